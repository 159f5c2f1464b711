//! The processes that ended last, with their stored runs, so that views can name the run of an ended process.

use super::key_of;
use crate::os::lock;
use gpumem_ledger::ProcessKey;
use gpumem_model::control::EndedRow;
use gpumem_model::owner::Owner;
use gpumem_model::run::{Process, Run, State};
use gpumem_report::findings::Outcome;
use gpumem_report::text::exit;
use gpumem_runs::store::RunId;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Instant;

const MAX_RUNS: usize = 32;

/// A process whose final run is in the store.
#[derive(Debug)]
struct EndedRun {
    id: RunId,
    process: Process,
    outcome: Option<String>,
    /// Time at which the final run was written.
    at: Instant,
}

impl EndedRun {
    fn row(&self) -> EndedRow {
        let Process { pid, start_ticks, uid, facts, claims } = &self.process;
        EndedRow {
            pid: *pid,
            start_ticks: *start_ticks,
            uid: *uid,
            run: self.id.to_string(),
            age_ms: u64::try_from(self.at.elapsed().as_millis()).unwrap_or(u64::MAX),
            command: facts.get("command").or(facts.get("comm")).cloned(),
            who: Owner::of(facts, claims, *uid).map(),
            outcome: self.outcome.clone(),
        }
    }
}

/// The processes that ended last, the latest first.
#[derive(Debug, Default)]
pub(crate) struct EndedRuns(Mutex<VecDeque<EndedRun>>);

impl EndedRuns {
    /// Returns a row for each of them whose user may be shown, given its uid.
    pub(crate) fn rows(&self, is_shown: impl Fn(Option<u64>) -> bool) -> Vec<EndedRow> {
        let all = lock(&self.0);
        all.iter().filter(|ended| is_shown(ended.process.uid)).map(EndedRun::row).collect()
    }

    /// Returns the run of an ended process; `None` if it is not one of the last.
    pub(crate) fn id_of(&self, key: ProcessKey) -> Option<RunId> {
        let of =
            |ended: &&EndedRun| (ended.process.pid, ended.process.start_ticks) == (key.pid, key.start_ticks);
        lock(&self.0).iter().find(of).map(|ended| ended.id)
    }

    /// Removes all runs, because a new store gives their ids to other runs.
    pub(super) fn clear(&self) {
        lock(&self.0).clear();
    }

    /// Adds a run that has been written, if it is that of an ended process.
    pub(super) fn add(&self, id: RunId, run: &Run) {
        let State::Closed { status, .. } = run.state else { return };
        if self.id_of(key_of(run)).is_some() {
            return;
        }
        let status = status.filter(|status| *status != 0).map(exit);
        let outcome = Outcome::of(run).words().map(str::to_owned).or(status);
        let mut all = lock(&self.0);
        all.truncate(MAX_RUNS - 1);
        all.push_front(EndedRun { id, process: run.process.clone(), outcome, at: Instant::now() });
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::run;
    use super::*;
    use gpumem_model::run::{Details, Device, Fate, Oom, OomKind};

    #[test]
    fn rows_state_how_a_process_ended() {
        let outcome = |status: u64, ooms: Vec<Oom>| {
            let mut run = run(1);
            run.state = State::Closed { time_ns: 1, status: Some(status) };
            run.devices =
                vec![Device { details: Details { ooms, ..Details::default() }, ..Device::default() }];
            let all = EndedRuns::default();
            all.add(RunId(1), &run);
            all.rows(|_| true).remove(0).outcome
        };
        assert_eq!(outcome(0, Vec::new()), None);
        assert_eq!(outcome(1 << 8, Vec::new()).as_deref(), Some("exit 1"));
        let fate = Fate::Fatal { after_ns: 0, status: None };
        let oom = Oom { kind: OomKind::Device, asked_bytes: 1 << 30, fate, ..Oom::default() };
        assert_eq!(outcome(1 << 8, vec![oom]).as_deref(), Some("out of memory"));
    }

    #[test]
    fn only_the_last_ended_processes_are_known() {
        let all = EndedRuns::default();
        let key = |pid| ProcessKey { pid, start_ticks: 7 };
        for pid in 1..=40 {
            let mut run = run(1);
            (run.process.pid, run.process.start_ticks, run.state) = (pid, 7, State::Open);
            all.add(RunId(100), &run);
            assert_eq!(all.id_of(key(pid)), None, "it has not ended");
            run.state = State::Closed { time_ns: 1, status: None };
            all.add(RunId(i64::from(pid)), &run);
        }
        let pids: Vec<u32> = all.rows(|_| true).iter().map(|row| row.pid).collect();
        assert_eq!(all.rows(|_| false), []);
        assert_eq!(pids, (9..=40).rev().collect::<Vec<_>>());
        assert_eq!((all.id_of(key(40)), all.id_of(key(8))), (Some(RunId(40)), None));
    }
}
