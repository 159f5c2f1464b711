//! Identity labels that are kept between scrapes: facts seldom change, and making the labels takes as long as the other series of a
//! process.

use super::families::Labels;
use crate::os::lock;
use gpumem_ledger::{Facts, ProcessKey, ProcessView};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Labels with the identity of each process in the last scrape, with the facts from which they were made.
#[derive(Debug, Default)]
pub struct Identities(Mutex<HashMap<ProcessKey, (Arc<Facts>, Labels)>>);

impl Identities {
    /// Drops those of other processes than `live`, which is sorted by start and pid.
    pub(super) fn keep(&self, live: &[&ProcessView]) {
        let order = |key: &ProcessKey| (key.start_ticks, key.pid);
        let mut known = lock(&self.0);
        if known.len() > live.len() {
            known.retain(|key, _| {
                live.binary_search_by_key(&order(key), |process| order(&process.key)).is_ok()
            });
        }
    }

    /// Passes the labels of a process to `write`. `make` makes them if the process is new or its facts have changed.
    pub(super) fn write(
        &self,
        process: &ProcessView,
        make: impl Fn(&Facts) -> Labels,
        write: impl FnOnce(&Labels),
    ) {
        let mut known = lock(&self.0);
        let made = || (Arc::clone(&process.facts), make(&process.facts));
        let (facts, labels) = known.entry(process.key).or_insert_with(made);
        if !Arc::ptr_eq(facts, &process.facts) {
            (*facts, *labels) = made();
        }
        write(labels);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_ledger::{Ledger, Origin};
    use gpumem_wire::{Body, Reading, Record, Stamp};
    use std::cell::Cell;

    fn facts(ledger: &mut Ledger, pid: u32, facts: &str) {
        let body = Body::ProcessFacts { start_ticks: 7, uid: Reading::of(1000), parent_pid: 1, facts };
        ledger.observe(Origin::Host, &Record { stamp: Stamp { thread: pid, ..Stamp::default() }, body });
    }

    #[test]
    fn identity_follows_changed_facts_and_goes_with_its_process() {
        let (mut ledger, identities) = (Ledger::new(), Identities::default());
        let written = |ledger: &Ledger, identities: &Identities| {
            let (snapshot, mut made, mut out) = (ledger.snapshot(), Cell::new(0), Vec::new());
            let live: Vec<&ProcessView> = snapshot.running().collect();
            identities.keep(&live);
            for process in &live {
                let make = |facts: &Facts| {
                    made.set(made.get() + 1);
                    let job = facts.seen.get("slurm_job").map_or("none", |job| &**job);
                    Labels::new().with("comm", &facts.seen["comm"]).with("slurm_job", job)
                };
                identities.write(process, make, |labels| out.push(format!("{labels:?}")));
            }
            (out.concat(), *made.get_mut())
        };
        facts(&mut ledger, 1, "comm=python");
        facts(&mut ledger, 2, "comm=other");
        let (first, made) = written(&ledger, &identities);
        assert_eq!((made, written(&ledger, &identities)), (2, (first.clone(), 0)));
        facts(&mut ledger, 1, "slurm_job=42");
        let (changed, made) = written(&ledger, &identities);
        assert!(made == 1 && changed.contains("42") && !first.contains("42"), "{changed}");
        ledger.remove_process(ProcessKey { pid: 2, start_ticks: 7 });
        assert!(!written(&ledger, &identities).0.contains("other"));
        assert_eq!(lock(&identities.0).len(), 1);
    }
}
