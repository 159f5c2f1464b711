//! Kills the daemon while it writes: 50 times, or `GPUMEM_KILLS` times (`make kills`: 1000).

use super::program::{Program, list};
use crate::common::Scratch;
use crate::common::peer::now;
use gpumem_model::run::{Run, State};
use gpumem_runs::store::{RunId, Store, StoreError};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

const KILLS: u64 = 50;
/// Daemons at one time; each waits most of its life.
const LANES: u64 = 8;
/// Data older than this before a kill must be in the store: the checkpoint interval, and the time that a loaded machine needs for
/// the daemon's turn and the write.
const INTERVAL: Duration = Duration::from_millis(50);
const SLACK: Duration = Duration::from_millis(1500);

/// Returns a pseudorandom number.
fn scatter(n: u64) -> u64 {
    let mixed = (n ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 17
}

/// Checks all sums of a run.
#[track_caller]
fn assert_adds_up(run: &Run) {
    for device in &run.devices {
        for moment in [&device.last, &device.peak] {
            let sum: i64 = moment.amounts.iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(moment.tracked_bytes, Some(sum));
        }
        let allocated = run.coverage.allocated_bytes as i64;
        assert_eq!(device.last.tracked_bytes, Some(allocated), "nothing is freed");
        assert_eq!(device.peak.tracked_bytes, Some(allocated));
    }
}

/// Returns the stored runs after the daemon's end, as any reader finds them.
fn stored(folder: &Path) -> BTreeMap<RunId, Run> {
    let lines = list(folder);
    let store = match Store::open_read_only(folder.join("runs.sqlite")) {
        Ok(store) => store,
        // Killed while it created the store.
        Err(StoreError::NotFound { .. }) => return BTreeMap::new(),
        Err(StoreError::NotAStore { found, .. }) if found == "an empty file" => return BTreeMap::new(),
        Err(error) => panic!("{error}"),
    };
    store.check().expect("it is whole");
    let run = |line: &gpumem_runs::store::RunSummary| (line.id, store.load(line.id).expect("a run"));
    lines.iter().map(run).collect()
}

/// Runs and kills this many daemons in one directory, each with its own process.
fn lane(lane: u64, kills: u64) -> (u64, Duration) {
    let scratch = Scratch::new();
    let mut before: BTreeMap<RunId, Run> = BTreeMap::new();
    let (mut written, mut oldest_loss) = (0, Duration::ZERO);
    for kill in 0..kills {
        let mut daemon = Program::start(&scratch, "checkpoint_every_s = 0.05", &[]);
        let mut agent = daemon.agent();
        let chance = scatter(lane * 1000 + kill);
        // Most are killed while the store and the run are begun; some after a whole checkpoint interval.
        let life = if chance.is_multiple_of(5) { 1600 + chance % 400 } else { chance % 250 };
        let end = Instant::now() + Duration::from_millis(life);
        let mut said = Vec::new();
        while Instant::now() < end && agent.allocate() {
            said.push(now());
            std::thread::sleep(Duration::from_micros(500));
        }
        let killed = now();
        daemon.kill();

        let after = stored(&scratch.0);
        for (id, run) in &before {
            assert_eq!(after.get(id), Some(run), "a run of an earlier life changed or went");
        }
        let new: Vec<&Run> =
            after.iter().filter(|(id, _)| !before.contains_key(id)).map(|(_, run)| run).collect();
        assert!(new.len() <= 1, "{} new runs of one process", new.len());
        let kept = new.first().map_or(0, |run| run.coverage.events);
        assert!(kept <= said.len() as u64 + 1, "{kept} of {}", said.len());
        if let Some(run) = new.first() {
            assert_eq!((run.process.pid, run.state), (agent.pid(), State::Interrupted));
            assert_eq!((run.coverage.lost, run.coverage.odd), (0, 0));
            assert_adds_up(run);
            written += 1;
        }
        if let Some(first_lost) = said.get(kept as usize) {
            oldest_loss = oldest_loss.max(Duration::from_nanos(killed.saturating_sub(*first_lost)));
        }
        before = after;
    }
    (written, oldest_loss)
}

#[test]
fn kills_cost_no_run_more_than_the_last_interval() {
    let started = Instant::now();
    let kills = std::env::var("GPUMEM_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(KILLS);
    let results: Vec<(u64, Duration)> = std::thread::scope(|scope| {
        let lanes: Vec<_> =
            (0..LANES).map(|at| scope.spawn(move || lane(at, kills.div_ceil(LANES)))).collect();
        lanes.into_iter().map(|lane| lane.join().expect("a lane")).collect()
    });
    let written: u64 = results.iter().map(|(written, _)| written).sum();
    let oldest = results.iter().map(|(_, oldest)| *oldest).max().unwrap_or_default();
    println!(
        "{kills} kills in {:?}: {written} runs stored, oldest record lost {oldest:?} before its kill",
        started.elapsed()
    );
    assert!(written > kills / 2, "only {written} runs: kills came before anything was written");
    assert!(oldest <= INTERVAL + SLACK, "a record of {oldest:?} before the kill was lost");
}
