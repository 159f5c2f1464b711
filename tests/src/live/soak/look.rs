//! While nothing moves: compares the daemon's figures of every process with the machine's truth, to the byte.

use super::actor::Kind;
use super::{Actor, Manager, Troupe};
use crate::live::machine::Machine;
use crate::live::mixer::{now_ns, uuid};
use crate::live::prometheus::get;
use crate::live::truth::Truth;
use gpumem_model::run::{Class, Moment, Run};
use gpumem_wire::layout::Header;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Largest difference between the agent's clock and the kernel's (agent-lib/src/base/clock.rs).
const CLOCK_NS: u64 = 50_000;
/// Timeout for the daemon to reach the final state.
const PATIENCE: Duration = Duration::from_secs(120);

/// Totals of the comparisons so far.
#[derive(Debug, Default)]
pub struct Looked {
    /// Number of moments of rest.
    pub times: u64,
    /// Number of compared processes on devices.
    pub rows: u64,
    /// Number of processes whose records were counted individually.
    pub counted: u64,
    /// Records that agents lost, of processes that were alive at the last moment.
    pub lost: u64,
    /// Longest time until the daemon knew everything.
    pub longest: Duration,
    /// Memory of processes at their end, from the machine.
    pub ends: Vec<Truth>,
}

impl Looked {
    /// Takes the ends from the machine's journal and empties it, because it would have millions of lines after an hour.
    pub fn hear_of_ends(&mut self, machine: &Machine) {
        self.ends.extend(machine.ends());
        machine.forget_truth();
    }
}

/// Reason why there is nothing to compare yet.
type Why = String;

/// Stops all activity and compares.
///
/// # Panics
/// If a value differs, or the daemon does not reach the final state.
pub fn look(
    machine: &Machine,
    manager: &Manager,
    troupe: &mut Troupe,
    http: SocketAddr,
    looked: &mut Looked,
) {
    troupe.rest();
    looked.hear_of_ends(machine);
    let heads: BTreeMap<u32, u64> =
        troupe.living().filter_map(|actor| Some((actor.key.pid, header(actor)?.head_seq))).collect();
    let (after_ns, since) = (now_ns() + CLOCK_NS, Instant::now());
    let mut left: Vec<(&Actor, usize)> =
        troupe.living().flat_map(|actor| actor.devices.iter().map(move |&device| (actor, device))).collect();
    looked.rows += left.len() as u64;
    let mut known = BTreeMap::new();
    let (runs, truths) = loop {
        let runs = manager.daemon().asked("/v1/runs").expect("an answer");
        let runs: Vec<Run> = serde_json::from_value(runs).expect("runs");
        let truths = machine.latest_truth();
        // Nothing changes, so processes may become ready one after another.
        let mut why = String::new();
        left.retain(|&(actor, device)| match ready(actor, device, (&runs, &truths), after_ns) {
            Ok((run, truth)) => {
                compare(actor, device, run, truth);
                known.insert((actor.key.pid, device), truth.clone());
                false
            }
            Err(not_yet) => {
                why = not_yet;
                true
            }
        });
        if left.is_empty() {
            break (runs, known);
        }
        assert!(since.elapsed() < PATIENCE, "{} still unknown: {why}", left.len());
        std::thread::sleep(Duration::from_millis(50));
    };
    looked.longest = looked.longest.max(since.elapsed());
    looked.lost = 0;
    for actor in troupe.living() {
        let run = of(&runs, actor).expect("it is ready");
        if let Some(lost) = count(actor, run, &heads, (troupe, manager)) {
            looked.counted += 1;
            looked.lost += lost;
        }
    }
    scraped(troupe, &truths, http);
    looked.times += 1;
    troupe.were_seen();
}

fn of<'a>(runs: &'a [Run], actor: &Actor) -> Option<&'a Run> {
    runs.iter()
        .find(|run| (run.process.pid, run.process.start_ticks) == (actor.key.pid, actor.key.start_ticks))
}

fn moment(run: &Run, device: usize) -> Option<&Moment> {
    run.devices.iter().find(|of| of.name == uuid(device)).map(|of| &of.last)
}

fn truth<'a>(truths: &'a [Truth], actor: &Actor, device: usize, after_ns: u64) -> Option<&'a Truth> {
    let is_it = |truth: &&Truth| {
        truth.pid == actor.key.pid && truth.device == uuid(device) && truth.t > after_ns && !truth.is_end()
    };
    truths.iter().rfind(is_it)
}

/// Returns the daemon's and the machine's figures, once both are from a time after everything stopped.
fn ready<'a>(
    actor: &Actor,
    device: usize,
    (runs, truths): (&'a [Run], &'a [Truth]),
    after_ns: u64,
) -> Result<(&'a Run, &'a Truth), Why> {
    let run = of(runs, actor).ok_or_else(|| format!("no run of {actor:?}"))?;
    if run.coverage.covered != actor.kind.is_covered() || run.coverage.partial_state {
        return Err(format!("{:?}: {:?}", actor.key, run.coverage));
    }
    let moment = moment(run, device).ok_or_else(|| format!("{:?} is not on {device}", actor.key))?;
    let is_whole = moment.used_absence.is_none() && moment.used_bytes().is_some();
    // Records of a new agent may still be on their way if the process was sampled first.
    let is_heard = moment.tracked_bytes.is_some() || !actor.kind.is_covered();
    let is_fresh = moment.time_ns > after_ns && is_whole && is_heard;
    if !is_fresh || moment.stale || moment.torn.is_some() || moment.partial {
        return Err(format!("{:?} on {device} at {after_ns}: {moment:?}", actor.key));
    }
    let truth = truth(truths, actor, device, after_ns)
        .ok_or_else(|| format!("{:?} on {device}: the machine was not asked", actor.key))?;
    // Until the daemon receives the new hello, a process that executed another program looks unchanged.
    if actor.images > 0 && moment.tracked_bytes.is_some_and(|tracked| tracked != truth.tracked) {
        return Err(format!("{:?}, now another program: {moment:?}, not {truth:?}", actor.key));
    }
    Ok((run, truth))
}

fn compare(actor: &Actor, device: usize, run: &Run, truth: &Truth) {
    let moment = moment(run, device).expect("ready");
    let say =
        |what: &str| format!("{what}: {actor:?} on {device}\n{moment:?}\n{truth:?}\n{:?}", run.coverage);
    assert_eq!(moment.used_bytes(), Some(truth.used as i64), "{}", say("used"));
    if actor.kind == Kind::Bare {
        assert_eq!(moment.tracked_bytes, None, "{}", say("it is untracked"));
        return;
    }
    assert_eq!(moment.tracked_bytes, Some(truth.tracked), "{}", say("tracked"));
    assert_eq!(moment.predates_bytes, Some(0), "{}", say("predates"));
    assert_eq!(moment.untrackable_bytes, Some(truth.parts()), "{}", say("untrackable"));
    let parts = moment.gap_parts().unwrap_or_else(|| panic!("{}", say("parts")));
    assert_eq!(Some(parts.sum()), moment.untrackable_bytes, "{}", say("parts"));
    let (mut tags, mut idle) = (BTreeMap::new(), 0);
    for &(cell, bytes) in &moment.amounts {
        let cell = &run.cells[cell as usize];
        let tag = cell.tag.clone().unwrap_or_default();
        match cell.class {
            // A pool that has not handed out its first block is opaque; the machine calls it idle.
            Class::PoolIdle | Class::Opaque => idle += bytes,
            _ => *tags.entry(tag).or_insert(0) += bytes,
        }
    }
    tags.retain(|_, bytes| *bytes != 0);
    let mut known = truth.tags.clone();
    known.retain(|_, bytes| *bytes != 0);
    assert_eq!(idle, truth.idle, "{}", say("idle"));
    assert_eq!(tags, known, "{}", say("names"));
    let beside = run.devices.iter().find(|of| of.name == uuid(device)).map(|of| of.beside);
    let beside = beside.unwrap_or_default();
    // Registered memory counts as pinned.
    let ours = [beside.managed_bytes, beside.pinned_bytes + beside.registered_bytes];
    let theirs = ["managed", "pinned"].map(|kind| truth.beside.get(kind).copied().unwrap_or(0));
    assert_eq!(ours, theirs, "{}", say("managed and pinned, outside the sum"));
}

/// Checks that every record of the agent was booked or counted as lost. Returns the number of lost ones.
fn count(
    actor: &Actor,
    run: &Run,
    heads: &BTreeMap<u32, u64>,
    (troupe, manager): (&Troupe, &Manager),
) -> Option<u64> {
    let header = header(actor).filter(|_| actor.kind.is_covered())?;
    let coverage = &run.coverage;
    let say = || format!("{actor:?}: {header:?} {coverage:?}");
    assert!(coverage.lost >= header.lost, "what the agent lost is counted: {}", say());
    if actor.images > 0 {
        return None; // the numbers of the programs before are gone with them
    }
    // The agent may have polled a pool meanwhile.
    let numbers = *heads.get(&actor.key.pid)?..=header.head_seq;
    assert!(numbers.contains(&(coverage.events + coverage.lost)), "not in {numbers:?}: {}", say());
    // A daemon's end loses data that it had read but not written, and unread data if its sockets were not kept.
    let from_ns = troupe
        .lives
        .iter()
        .rfind(|life| life.start_ticks == Some(actor.key.start_ticks) && life.pid == actor.key.pid)?
        .from_ns;
    let may_lose = |gap: &super::manager::Gap| gap.to_ns > from_ns && gap.loses();
    if !manager.gaps.iter().any(may_lose) {
        assert_eq!(coverage.lost, header.lost, "nothing else was lost: {}", say());
    }
    Some(coverage.lost)
}

/// Reads the header of the agent's shared memory.
fn header(actor: &Actor) -> Option<Header> {
    for entry in std::fs::read_dir(format!("/proc/{}/fd", actor.key.pid)).ok()?.flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if !target.to_string_lossy().contains("memfd:gpumem") {
            continue;
        }
        let file = std::fs::File::open(entry.path()).ok()?;
        let mut bytes = [0; 72];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).ok()?;
        if let Ok(header) = Header::decode(&bytes, file.metadata().ok()?.len()) {
            return Some(header);
        }
    }
    None
}

/// Waits until a scrape has the same sums; its data is published a few times a second.
fn scraped(troupe: &Troupe, truths: &BTreeMap<(u32, usize), Truth>, http: SocketAddr) {
    let devices: BTreeSet<usize> = troupe.living().flat_map(|actor| actor.devices.clone()).collect();
    let sums = devices.into_iter().map(|device| {
        let of_it: Vec<&Actor> = troupe.living().filter(|of| of.devices.contains(&device)).collect();
        let truth = |actor: &Actor| &truths[&(actor.key.pid, device)];
        let used: i64 = of_it.iter().map(|actor| truth(actor).used as i64).sum();
        let covered = of_it.iter().filter(|actor| actor.kind.is_covered());
        let tracked: i64 = covered.map(|actor| truth(actor).tracked).sum();
        (device, [used, tracked])
    });
    let sums: BTreeMap<usize, [i64; 2]> = sums.collect();
    let since = Instant::now();
    loop {
        let text = get(http, "/metrics").expect("an exposition");
        let sum = |name: &str, device: usize| -> i64 {
            let gpu = format!("gpu=\"{device}\"");
            let of_it = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('{'));
            let of_it = of_it.filter(|line| line.contains(&gpu)).filter_map(|line| line.rsplit_once("} "));
            of_it.filter_map(|(_, value)| value.parse::<f64>().ok()).sum::<f64>() as i64
        };
        let families = ["gpumem_process_used_bytes", "gpumem_process_tracked_bytes"];
        let scraped: BTreeMap<usize, [i64; 2]> =
            sums.keys().map(|&device| (device, families.map(|name| sum(name, device)))).collect();
        if scraped == sums {
            return;
        }
        assert!(
            since.elapsed() < PATIENCE,
            "used and tracked by device in a scrape: {scraped:?}, not {sums:?}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}
