//! The delta log: its cost, and the runs that remain readable after a crash at any byte.

use super::support::{TempDir, assert_consistent, run_at};
use gpumem_model::run::{Run, State};
use gpumem_runs::store::{Filter, RunId, Store};
use std::fs;
use std::path::Path;

const FILES: [&str; 3] = ["runs.db", "runs.db-wal", "runs.db-deltas"];

/// Number of a checkpoint in which the run has the same devices as in the first.
fn even(n: u64) -> u64 {
    2 * n
}

fn contents(dir: &Path) -> [Vec<u8>; 3] {
    FILES.map(|name| fs::read(dir.join(name)).unwrap_or_default())
}

/// Copies the store's files as they are now, as a killed writer would leave them.
fn copy(of: &TempDir) -> TempDir {
    let copy = TempDir::new();
    for (name, bytes) in FILES.iter().zip(contents(of.path())) {
        fs::write(copy.path().join(name), bytes).unwrap();
    }
    copy
}

/// A store with a run of some checkpoints, of which the first is in the database.
fn logged(dir: &TempDir, checkpoints: u64) -> (Store, RunId) {
    let mut store = Store::open(dir.store()).unwrap();
    let id = store.begin(&run_at(even(1)), "a").unwrap();
    (2..=checkpoints).for_each(|n| store.checkpoint(id, &run_at(even(n))).unwrap());
    (store, id)
}

fn interrupted(n: u64) -> Run {
    Run { state: State::Interrupted, ..run_at(n) }
}

#[test]
fn unchanged_run_writes_nothing() {
    let dir = TempDir::new();
    let (mut store, id) = logged(&dir, 5);
    let before = contents(dir.path());
    (0..10).for_each(|_| store.checkpoint(id, &run_at(even(5))).unwrap());
    assert!(contents(dir.path()) == before);
    store.checkpoint(id, &run_at(even(6))).unwrap();
    let after = contents(dir.path());
    assert!(after[..2] == before[..2], "the database is not written for a change");
    assert!(after[2].starts_with(&before[2]), "the log only grows");
}

#[test]
fn small_change_takes_few_bytes() {
    let dir = TempDir::new();
    let (mut store, id) = logged(&dir, 300);
    let mut run = run_at(even(300));
    let len = || fs::metadata(dir.path().join("runs.db-deltas")).unwrap().len();
    let before = len();
    run.coverage.events += 1;
    run.devices[0].last.time_ns += 1_000_000_007;
    store.checkpoint(id, &run).unwrap();
    assert!(len() - before < 100, "{} bytes", len() - before);
}

/// A kill, or a full disk, may leave any part of the last entry.
#[test]
fn log_cut_at_any_byte_holds_an_earlier_checkpoint() {
    let dir = TempDir::new();
    let (store, id) = logged(&dir, 8);
    let image = copy(&dir);
    drop(store);
    let log = image.path().join("runs.db-deltas");
    let whole = fs::read(&log).unwrap();
    let mut seen = even(8);
    for len in (0..=whole.len()).rev().step_by(97) {
        fs::write(&log, &whole[..len]).unwrap();
        let run = Store::open_read_only(image.store()).unwrap().load(id).unwrap();
        let events = run.coverage.events;
        assert!(events <= seen);
        seen = events;
        assert_consistent(&run);
        assert!([State::Open, State::Interrupted].contains(&run.state));
        assert_eq!(run, Run { state: run.state, ..run_at(events) });
    }
    assert!(seen < even(8));
    // Flipped bits end the log, and are never read as something else.
    for at in (0..whole.len()).step_by(89) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(&log, &damaged).unwrap();
        let run = Store::open_read_only(image.store()).unwrap().load(id).unwrap();
        assert_eq!(run, Run { state: run.state, ..run_at(run.coverage.events) });
    }
}

#[test]
fn next_writer_merges_what_a_killed_one_left() {
    let dir = TempDir::new();
    let (store, id) = logged(&dir, 8);
    let image = copy(&dir);
    let mut next = Store::open(image.store()).unwrap();
    next.begin(&run_at(1), "b").unwrap();
    assert_eq!(contents(image.path())[2].len(), 0, "the log is empty");
    assert_eq!(next.load(id).unwrap(), run_at(even(8)));
    // The first writer lives: its log is its own, and a second writer works without one.
    let before = contents(dir.path());
    let mut second = Store::open(dir.store()).unwrap();
    let other = second.begin(&run_at(even(1)), "c").unwrap();
    second.checkpoint(other, &run_at(even(2))).unwrap();
    assert!(contents(dir.path())[2] == before[2]);
    assert_eq!(store.load(other).unwrap(), run_at(even(2)));
    assert_eq!(store.load(id).unwrap(), run_at(even(8)));
}

/// A run that was written to the database does not get entries from before; nor does another store's run with the same id.
#[test]
fn entries_belong_to_one_write_of_one_run() {
    let dir = TempDir::new();
    let (mut store, id) = logged(&dir, 8);
    let log = contents(dir.path())[2].clone();
    store.close(id, &run_at(even(9))).unwrap();
    assert_eq!(store.load(id).unwrap(), interrupted(even(9)));
    drop(store);
    assert_eq!(contents(dir.path())[2].len(), 0, "nothing is left to be merged");
    fs::write(dir.path().join("runs.db-deltas"), &log).unwrap();
    assert_eq!(Store::open_read_only(dir.store()).unwrap().load(id).unwrap(), interrupted(even(9)));
    assert_eq!(Store::open_read_only(dir.store()).unwrap().list().unwrap()[0].events, even(9));

    let other = TempDir::new();
    let (store, id) = logged(&other, 1);
    fs::write(other.path().join("runs.db-deltas"), log).unwrap();
    assert_eq!(store.load(id).unwrap(), run_at(even(1)));
}

#[test]
fn deleted_run_is_unknown_to_its_writer() {
    let dir = TempDir::new();
    let (mut store, id) = logged(&dir, 3);
    let db = rusqlite::Connection::open(dir.store()).unwrap();
    db.execute_batch("PRAGMA foreign_keys = ON; DELETE FROM run").unwrap();
    assert!(store.checkpoint(id, &run_at(even(4))).is_err());
    assert!(store.load(id).is_err());
    assert_eq!(store.list().unwrap(), []);
}

#[test]
fn lists_have_the_figures_of_the_log() {
    let dir = TempDir::new();
    let (store, id) = logged(&dir, 40);
    let last = run_at(even(40));
    let listed = store.select(&Filter::default()).unwrap().remove(0);
    assert_eq!((listed.run.id, listed.run.events), (id, even(40)));
    assert_eq!(listed.run.peak_tracked_bytes, last.devices[0].peak.tracked_bytes);
    assert_eq!(listed.peak_used_bytes, Some(even(40) as i64));
    assert_eq!(listed.run.last_ns, Some(even(40)));
    assert_eq!(listed.run, store.list().unwrap()[0]);
    // What filters compare is in the database at once.
    let mut store = store;
    let mut run = run_at(even(41));
    run.process.claims.insert("job".into(), "night.7".into());
    store.checkpoint(id, &run).unwrap();
    let of_job = Filter { job: Some("night".into()), ..Filter::default() };
    assert_eq!(store.select(&of_job).unwrap().len(), 1);
}

#[test]
fn heartbeat_extends_runs_that_do_not_change() {
    let dir = TempDir::new();
    let (mut store, id) = logged(&dir, 3);
    store.heartbeat(5_000).unwrap();
    let last = |run: Run| run.devices[0].last.time_ns;
    assert_eq!(last(store.load(id).unwrap()), 5_000);
    store.close(id, &run_at(even(4))).unwrap();
    assert_eq!(last(store.load(id).unwrap()), even(4), "a run without a writer has its own end");
    let before = contents(dir.path());
    store.heartbeat(6_000).unwrap();
    assert!(contents(dir.path()) == before, "without open runs there is nothing to note");
}

/// After a power cut, each file may be as it was at another time.
#[test]
fn files_of_different_times_hold_some_checkpoint() {
    let dir = TempDir::new();
    let (mut store, id) = logged(&dir, 3);
    let mut images = vec![contents(dir.path())];
    for n in 4..8 {
        let mut run = run_at(even(n));
        // Every second one is written to the database, since its job is new.
        run.process.claims.insert("job".into(), (n / 2).to_string());
        store.checkpoint(id, &run).unwrap();
        images.push(contents(dir.path()));
    }
    let image = TempDir::new();
    for (database, log) in (0..images.len()).flat_map(|at| (0..images.len()).map(move |log| (at, log))) {
        let [db, wal, _] = &images[database];
        for (name, bytes) in FILES.iter().zip([db, wal, &images[log][2]]) {
            fs::write(image.path().join(name), bytes).unwrap();
        }
        let _ = fs::remove_file(image.path().join("runs.db-shm"));
        let run = Store::open_read_only(image.store()).unwrap().load(id).unwrap();
        let at = |image: usize| even(3 + image as u64);
        assert!(run.coverage.events >= even(1) && run.coverage.events <= at(database.max(log)));
        assert_consistent(&run);
        let expected = run_at(run.coverage.events);
        assert_eq!((run.cells, run.devices), (expected.cells, expected.devices));
        // The next writer continues from there.
        let mut next = Store::open(image.store()).unwrap();
        next.begin(&run_at(1), "b").unwrap();
        assert_eq!(next.load(id).unwrap().coverage.events, run.coverage.events);
        next.checkpoint(id, &run_at(even(9))).unwrap();
        assert_eq!(next.load(id).unwrap(), run_at(even(9)));
    }
}

#[test]
fn log_that_is_too_large_is_merged_into_the_database() {
    let dir = TempDir::new();
    let (mut store, id) = logged(&dir, 1);
    store.limit_log(10_000);
    let other = store.begin(&run_at(1), "b").unwrap();
    store.checkpoint(other, &run_at(3)).unwrap();
    let len = || fs::metadata(dir.path().join("runs.db-deltas")).unwrap().len();
    let (mut before, mut merged) = (len(), 0);
    for n in 2..100 {
        store.checkpoint(id, &run_at(even(n))).unwrap();
        assert_eq!(store.load(id).unwrap(), run_at(even(n)));
        assert_eq!(store.load(other).unwrap(), run_at(3));
        merged += u32::from(len() < before);
        before = len();
        assert!(before < 30_000, "{before} bytes");
    }
    assert!(merged > 1, "{merged} times");
}
