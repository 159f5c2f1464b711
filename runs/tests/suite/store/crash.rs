//! Writers that die, and readers during the writes of live writers.

use super::files::read_without_rights;
use super::support::{TempDir, assert_consistent, run_at, scatter};
use gpumem_model::run::{Run, State};
use gpumem_runs::store::{RunId, Store};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Set for the copy of this program that acts as the writer; contains the path of its store.
const CHILD: &str = "GPUMEM_TEST_STORE_WRITER";
/// Default; overridden by `GPUMEM_KILLS`.
const KILLS: u64 = 30;

/// Checkpoints until it is killed, and prints a line after each.
fn write_for_ever(path: &Path) {
    let mut store = Store::open(path).unwrap();
    // A process id comes again after a while.
    let uid = format!("writer {} {:?}", std::process::id(), std::time::SystemTime::now());
    let id = store.begin(&run_at(0), &uid).unwrap();
    let mut out = std::io::stdout();
    // The test harness may have begun a line.
    writeln!(out, "\nack 0").unwrap();
    for n in 1.. {
        store.checkpoint(id, &run_at(n)).unwrap();
        writeln!(out, "ack {n}").unwrap();
    }
}

#[test]
fn acknowledged_checkpoints_survive_sigkill() {
    if let Some(path) = std::env::var_os(CHILD) {
        return write_for_ever(path.as_ref());
    }
    let dir = TempDir::new();
    let (mut before, mut under_way) = (Vec::<(RunId, Run)>::new(), 0);
    let kills = std::env::var("GPUMEM_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(KILLS);
    for kill in 0..kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "store::crash::acknowledged_checkpoints_survive_sigkill", "--nocapture"])
            .env(CHILD, dir.store())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut acks = lines.filter_map(|line| line.unwrap().strip_prefix("ack ")?.parse::<u64>().ok());
        let enough = scatter(kill) % 40;
        let mut last = acks.by_ref().find(|&ack| ack >= enough).expect("the writer died by itself");
        // Kills during some later checkpoint: without a clock, by work of varying length.
        for _ in 0..scatter(kill + KILLS) % 200_000 {
            std::hint::black_box(kill);
        }
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9), "the writer died by itself");
        // Checkpoints acknowledged before it died count, whether read or not.
        last = acks.last().unwrap_or(last);

        let store = Store::open_read_only(dir.store()).unwrap();
        let id = store.latest().unwrap().unwrap();
        let run = store.load(id).unwrap();
        let stored = run.coverage.events;
        assert!(stored == last || stored == last + 1, "acknowledged {last}, stored {stored}");
        under_way += stored - last;
        assert_consistent(&run);
        assert_eq!(run, Run { state: State::Interrupted, ..run_at(stored) });
        assert_eq!(store.list().unwrap().len() as u64, kill + 1);
        for (id, run) in &before {
            assert_eq!(&store.load(*id).unwrap(), run);
        }
        before.push((id, run));
        drop(store);
        let db = rusqlite::Connection::open(dir.store()).unwrap();
        let check: String = db.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
        assert_eq!(check, "ok");
        let torn = db.prepare("PRAGMA foreign_key_check").unwrap().exists([]).unwrap();
        assert!(!torn);
    }
    println!("{kills} kills, {under_way} checkpoints stored but not yet acknowledged");
}

/// A killed writer leaves data in the log: readers find it there, also those that cannot merge it.
#[test]
fn a_reader_without_rights_reads_what_a_killed_writer_left() {
    let dir = TempDir::new();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "store::crash::acknowledged_checkpoints_survive_sigkill", "--nocapture"])
        .env(CHILD, dir.store())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut acks = lines.filter_map(|line| line.unwrap().strip_prefix("ack ")?.parse::<u64>().ok());
    acks.by_ref().find(|&ack| ack == 3).expect("the writer died by itself");
    child.kill().unwrap();
    child.wait().unwrap();
    let last = acks.last().unwrap_or(3);
    assert!(std::fs::metadata(dir.path().join("runs.db-wal")).unwrap().len() > 0);
    match read_without_rights(&dir) {
        Ok(said) => {
            let stored = [last, last + 1].map(|events| format!("events {events}\n"));
            assert!(stored.iter().any(|stored| said.contains(stored)), "acknowledged {last}: {said}");
        }
        Err(error) => {
            gpumem_test_support::skip(&format!("cannot start a reader as another user: {error}"), "")
        }
    }
}

#[test]
fn readers_see_whole_checkpoints_of_a_living_writer() {
    const LAST: u64 = 200;
    let dir = TempDir::new();
    let mut writer = Store::open(dir.store()).unwrap();
    let id = writer.begin(&run_at(0), "a").unwrap();
    let reader = Store::open_read_only(dir.store()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1..=LAST {
                writer.checkpoint(id, &run_at(n)).unwrap();
            }
        });
        let (mut reads, mut seen) = (0, 0);
        while seen < LAST {
            let fresh;
            let store = if reads % 2 == 0 {
                &reader
            } else {
                fresh = Store::open_read_only(dir.store()).unwrap();
                &fresh
            };
            let run = store.load(id).unwrap();
            assert!(run.coverage.events >= seen, "time went back");
            seen = run.coverage.events;
            assert_eq!(run, run_at(seen));
            assert_eq!(store.list().unwrap()[0].state, State::Open);
            reads += 1;
        }
        println!("{reads} reads beside {LAST} checkpoints");
    });
}

#[test]
fn two_writers_take_turns() {
    let dir = TempDir::new();
    std::thread::scope(|scope| {
        for name in ["a", "b"] {
            let path = dir.store();
            scope.spawn(move || {
                let mut store = Store::open(path).unwrap();
                let id = store.begin(&run_at(0), name).unwrap();
                for n in 1..30 {
                    store.checkpoint(id, &run_at(n)).unwrap();
                }
            });
        }
    });
    let store = Store::open_read_only(dir.store()).unwrap();
    for line in store.list().unwrap() {
        assert_eq!(store.load(line.id).unwrap(), run_at(29));
    }
}
