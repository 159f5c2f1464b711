//! When all are gone: nothing of them is left but their runs.

use super::health::{Reading, children, fds};
use super::manager::{End, Manager};
use super::troupe::{Life, Troupe};
use crate::live::machine::Machine;
use crate::live::until;
use gpumem_runs::run::{Run, State};
use gpumem_runs::store::Store;
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;

/// A process that ended so shortly before the daemon did, may have been in its memory only.
const FRESH_NS: u64 = 3_000_000_000;
/// A daemon that is killed has written of those that came so long before that they were there.
const WRITTEN_NS: u64 = 1_000_000_000;
/// One that lived less long may have ended before its agent, or the daemon, got its turn on a busy machine.
const BRIEF_NS: u64 = 2_000_000_000;

/// Checks what is left, and ends the daemon.
///
/// # Panics
/// When something is left, or a run is missing or says what was not so.
pub fn check(machine: &Machine, manager: &mut Manager, troupe: &Troupe, base: &Reading) {
    let daemon = manager.daemon().job.pid();
    until(60, "a daemon that knows no process any more", || {
        let ps = manager.daemon().asked("/v1/ps")?;
        let runs = manager.daemon().asked("/v1/runs")?;
        (ps["processes"].as_array()?.is_empty() && runs.as_array()?.is_empty()).then_some(())
    });
    let count = || fds(daemon).values().sum::<usize>();
    let since = std::time::Instant::now();
    while count() > base.fds[0] {
        let waited = since.elapsed().as_secs();
        assert!(waited < 60, "{} descriptors, not {}: {:?}", count(), base.fds[0], fds(daemon));
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    println!("its descriptors were as before after {:.1?}", since.elapsed());
    assert!(children(daemon).len() <= 1, "one reads NVML: {:?}", children(daemon));
    until(20, "nothing that is kept", || (manager.kept() == 0).then_some(()));
    manager.end(End::Told);
    let mut left: Vec<String> = files(&manager.runtime(), "");
    left.sort();
    let known = ["agent.sock", "agent/agent.sock", "control.sock", "gpumemd.lock"];
    assert!(
        left.iter().all(|name| known.contains(&name.as_str())),
        "left in the runtime directory: {left:?}"
    );
    let shown = machine.tool("show", &[]);
    assert!(shown.contains("\nviolations=0\n") && shown.contains("\nstrays=0\n"), "{shown}");
    for device in ["gpu0", "gpu1"] {
        assert!(shown.contains(&format!("\n{device}.used=0\n")), "{shown}");
    }
    stored(manager, troupe);
}

fn files(dir: &std::path::Path, prefix: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            true => found.extend(files(&entry.path(), &format!("{name}/"))),
            false => found.push(name),
        }
    }
    found
}

/// Every process has its run, and every run can be read.
fn stored(manager: &Manager, troupe: &Troupe) {
    let store = Store::open_read_only(manager.store()).expect("a store");
    store.check().expect("whole");
    let mut runs: BTreeMap<u32, Vec<Run>> = BTreeMap::new();
    for summary in store.list().expect("a list") {
        let run = store.load(summary.id).unwrap_or_else(|error| panic!("{summary:?}: {error}"));
        runs.entry(run.process.pid).or_default().push(run);
    }
    let (mut missing, mut wrong, mut known) = (Vec::new(), Vec::new(), 0);
    for life in &troupe.lives {
        let is_it = |run: &&Run| life.start_ticks.is_none_or(|ticks| ticks == run.process.start_ticks);
        let mut of_it = runs.get(&life.pid).into_iter().flatten().filter(is_it);
        match of_it.next() {
            None if is_wanted(life, manager) => missing.push(life),
            None => {}
            Some(run) => {
                known += 1;
                if let Some(why) = wrongs(life, run, manager) {
                    wrong.push((why, life, run.state));
                }
            }
        }
        assert!(of_it.next().is_none(), "one run for each process: {life:?}");
    }
    let all: usize = runs.values().map(Vec::len).sum();
    println!("{} processes, {known} of them in the store, which has {all} runs", troupe.lives.len());
    runs.retain(|pid, _| !troupe.lives.iter().any(|life| life.pid == *pid));
    assert!(missing.is_empty(), "{} without a run: {missing:#?}\n{:?}", missing.len(), manager.gaps);
    assert!(wrong.is_empty(), "{} wrong: {wrong:#?}\n{:?}", wrong.len(), manager.gaps);
    assert!(runs.is_empty(), "runs that are nobody's: {:?}", runs.keys());
}

/// It must have one: it was seen by a daemon that had time to write that, or lived for a while in which there was one that went on.
fn is_wanted(life: &Life, manager: &Manager) -> bool {
    let Some((ended_ns, Some(_))) = life.end else { return life.was_seen };
    let unheard = manager
        .silences()
        .map(|(from_ns, to_ns)| to_ns.min(ended_ns).saturating_sub(from_ns.max(life.from_ns)));
    let heard_ns = (ended_ns - life.from_ns).saturating_sub(unheard.sum());
    let was_forgotten = manager
        .gaps
        .iter()
        .any(|gap| gap.end == End::Killed && life.from_ns + WRITTEN_NS > gap.from_ns && ended_ns < gap.to_ns);
    (life.was_seen && !was_forgotten)
        || life.is_covered && heard_ns > BRIEF_NS && !is_near_a_gap(life, manager)
}

/// Some time around its end there was no daemon, or one that lost what it had not written; of who has no agent nothing is kept.
fn is_near_a_gap(life: &Life, manager: &Manager) -> bool {
    let (from_ns, to_ns) = (life.from_ns, life.end.map_or(u64::MAX, |(at_ns, _)| at_ns));
    manager.gaps.iter().any(|gap| {
        let lasts =
            from_ns < gap.to_ns.saturating_add(FRESH_NS) && to_ns.saturating_add(FRESH_NS) > gap.from_ns;
        (gap.loses() || !life.is_covered) && lasts
    })
}

fn wrongs(life: &Life, run: &Run, manager: &Manager) -> Option<String> {
    let State::Closed { status, .. } = run.state else {
        return (!is_near_a_gap(life, manager)).then(|| "it ended, and its run did not".to_owned());
    };
    let (_, known) = life.end?;
    let known = u64::try_from(known?.into_raw()).ok();
    if life.is_covered != run.coverage.covered && !is_near_a_gap(life, manager) {
        return Some("covered, or not".to_owned());
    }
    (status.is_some() && status.map(|status| status & !0x80) != known.map(|status| status & !0x80))
        .then(|| format!("it ended with {known:?}, and its run says {status:?}"))
}
