//! Once every program has ended, only the runs must remain.

use super::health::{Reading, children, fds};
use super::manager::{End, Manager};
use super::troupe::{Life, Troupe};
use crate::live::machine::Machine;
use crate::live::truth::Truth;
use crate::live::until;
use gpumem_model::run::{Run, State};
use gpumem_runs::store::Store;
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;

/// Time before the daemon's end in ns: a process that ended within it may not be in the store.
const FRESH_NS: u64 = 3_000_000_000;
/// Maximum time from a process's end until its parent notices.
const AT_END_NS: u64 = 500_000_000;
/// A killed daemon has written the runs that it has known for this long.
const WRITTEN_NS: u64 = 1_000_000_000;
/// A process that lived for less than this may have ended before its agent or the daemon ran, on a busy machine.
const BRIEF_NS: u64 = 2_000_000_000;

/// # Panics
/// If the daemon still knows a process after a minute.
pub fn wait_until_nobody_is_known(manager: &Manager) {
    until(60, "a daemon without processes", || {
        let ps = manager.daemon().asked("/v1/ps")?;
        let runs = manager.daemon().asked("/v1/runs")?;
        (ps["processes"].as_array()?.is_empty() && runs.as_array()?.is_empty()).then_some(())
    });
}

/// Checks the remains, and ends the daemon.
///
/// # Panics
/// If anything else remains, or a run is missing or wrong.
pub fn check(machine: &Machine, manager: &mut Manager, (troupe, ends): (&Troupe, &[Truth]), base: &Reading) {
    let daemon = manager.daemon().job.pid();
    wait_until_nobody_is_known(manager);
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
    stored(manager, troupe, ends);
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

/// Checks that every process has its run, and that every run can be read.
fn stored(manager: &Manager, troupe: &Troupe, ends: &[Truth]) {
    let store = Store::open_read_only(manager.store()).expect("a store");
    store.check().expect("whole");
    let mut runs: BTreeMap<(u32, u64), Run> = BTreeMap::new();
    for summary in store.list().expect("a list") {
        let run = store.load(summary.id).unwrap_or_else(|error| panic!("{summary:?}: {error}"));
        let key = (run.process.pid, run.process.start_ticks);
        let other = runs.insert(key, run);
        assert!(other.is_none(), "one run for each process: {:?}", other.map(|run| run.process));
    }
    let all = runs.len();
    let (mut missing, mut wrong, mut compared) = (Vec::new(), Vec::new(), 0);
    // A pid may be reused: lives with a known start time are matched first, the others get the remaining runs.
    let (named, others): (Vec<&Life>, Vec<&Life>) =
        troupe.lives.iter().partition(|life| life.start_ticks.is_some());
    for life in named.into_iter().chain(others) {
        // Start 0 means that the process ended before its start time could be read.
        let known = life.start_ticks.map_or([(1, u64::MAX), (0, 0)], |ticks| [(ticks, ticks); 2]);
        let mut of_it =
            known.into_iter().flat_map(|(from, to)| runs.range((life.pid, from)..=(life.pid, to)));
        let key = of_it.next().map(|(key, _)| *key);
        match key.and_then(|key| runs.remove(&key)) {
            None if is_wanted(life, manager) => missing.push(life),
            None => {}
            Some(run) => {
                let of_it = held(life, &run, manager, ends);
                compared += of_it.len();
                let is_other = |(_, last, truth): &&(String, Option<i64>, i64)| *last != Some(*truth);
                let why = wrongs(life, &run, manager)
                    .or_else(|| of_it.iter().find(is_other).map(|other| format!("it held {other:?}")));
                if let Some(why) = why {
                    wrong.push((why, life, run.state));
                }
            }
        }
    }
    println!(
        "{} processes, {} in the store; memory compared at {compared} ends",
        troupe.lives.len(),
        all - runs.len()
    );
    assert!(missing.is_empty(), "{} without a run: {missing:#?}\n{:?}", missing.len(), manager.gaps);
    assert!(wrong.is_empty(), "{} wrong: {wrong:#?}\n{:?}", wrong.len(), manager.gaps);
    // The start of a process that NVML listed after its end is unknown.
    runs.retain(|&(pid, start), _| start > 0 || !troupe.lives.iter().any(|life| life.pid == pid));
    assert!(runs.is_empty(), "runs without a process: {:?}", runs.keys());
}

/// Returns the memory at the process's end by its run and by the machine, for each device; empty if they are not comparable.
fn held(life: &Life, run: &Run, manager: &Manager, ends: &[Truth]) -> Vec<(String, Option<i64>, i64)> {
    let is_whole = life.is_covered && run.coverage.covered && !run.coverage.partial_state;
    let Some((ended_ns, _)) = life.end.filter(|_| life.is_still && is_whole && !is_near_a_gap(life, manager))
    else {
        return Vec::new();
    };
    // For the machine, a process that executes another program ends too.
    let at_end = ended_ns - AT_END_NS..ended_ns + FRESH_NS;
    let of_it = ends.iter().filter(|end| end.pid == life.pid && at_end.contains(&end.t));
    let last = |end: &Truth| {
        let device = run.devices.iter().find(|device| *device.name == *end.device)?;
        device.last.tracked_bytes
    };
    of_it.map(|end| (end.device.clone(), last(end), end.tracked)).collect()
}

/// Returns whether the process must have a run. It must if a daemon saw it and had time to write the run, or if it lived long
/// enough while a daemon was running that continued.
fn is_wanted(life: &Life, manager: &Manager) -> bool {
    let Some((ended_ns, Some(_))) = life.end else { return life.was_seen };
    let was_forgotten = manager.gaps.iter().any(|gap| {
        gap.end == End::Killed && ended_ns < gap.to_ns && heard_ns(life, gap.from_ns, manager) < WRITTEN_NS
    });
    (life.was_seen && !was_forgotten)
        || life.is_covered && heard_ns(life, ended_ns, manager) > BRIEF_NS && !is_near_a_gap(life, manager)
}

/// Returns the time for which a daemon was listening, from the process's start to `until_ns`.
fn heard_ns(life: &Life, until_ns: u64, manager: &Manager) -> u64 {
    let unheard = manager
        .silences()
        .map(|(from_ns, to_ns)| to_ns.min(until_ns).saturating_sub(from_ns.max(life.from_ns)));
    until_ns.saturating_sub(life.from_ns).saturating_sub(unheard.sum())
}

/// Returns whether no daemon was running around the process's end, or one that lost unwritten data. For a process without an
/// agent nothing is kept.
fn is_near_a_gap(life: &Life, manager: &Manager) -> bool {
    let (from_ns, to_ns) = (life.from_ns, life.end.map_or(u64::MAX, |(at_ns, _)| at_ns));
    // Not the daemon's last end, when no process was left.
    manager.gaps.iter().filter(|gap| gap.to_ns < u64::MAX).any(|gap| {
        let lasts =
            from_ns < gap.to_ns.saturating_add(FRESH_NS) && to_ns.saturating_add(FRESH_NS) > gap.from_ns;
        (gap.loses() || !life.is_covered) && lasts
    })
}

fn wrongs(life: &Life, run: &Run, manager: &Manager) -> Option<String> {
    let State::Closed { status, .. } = run.state else {
        return (!is_near_a_gap(life, manager)).then(|| "it ended, and its run did not".to_owned());
    };
    let (ended_ns, known) = life.end?;
    let known = u64::try_from(known?.into_raw()).ok();
    let is_brief = ended_ns - life.from_ns < BRIEF_NS;
    let is_heard = run.coverage.covered || is_brief;
    if (life.is_covered && !is_heard || !life.is_covered && run.coverage.covered)
        && !is_near_a_gap(life, manager)
    {
        return Some("covered, or not".to_owned());
    }
    (status.is_some() && status.map(|status| status & !0x80) != known.map(|status| status & !0x80))
        .then(|| format!("it ended with {known:?}, and its run has {status:?}"))
}
