//! Disks that are full, fail, or have lost data.

use super::program::{Program, list};
use crate::common::{Scratch, wait_for};
use gpumem_model::run::State;
use gpumem_runs::store::Store;
use std::path::PathBuf;
use std::process::Command;

/// Starts a daemon with faults of its store, and returns it with the control file that sets the fault.
fn faulty(scratch: &Scratch, more: &str) -> (Program, PathBuf) {
    let (library, control) = (scratch.join("faults.so"), scratch.join("fault"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/suite/store/faults.c");
    let compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-o"])
        .arg(&library)
        .arg(source)
        .arg("-ldl")
        .output()
        .expect("a C compiler");
    assert!(compiler.status.success(), "{}", String::from_utf8_lossy(&compiler.stderr));
    let variables = [("LD_PRELOAD", library.as_path()), ("GPUMEM_TEST_FAULT", control.as_path())];
    (Program::start(scratch, &format!("checkpoint_every_s = 0.05\n{more}"), &variables), control)
}

fn up(daemon: &Program) -> Option<f64> {
    daemon.metric("gpumemd_source_up{source=\"store\"}")
}

/// Returns the stores that were set aside.
fn aside(scratch: &Scratch) -> Vec<PathBuf> {
    let files =
        std::fs::read_dir(&scratch.0).expect("a directory").filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<_> = files
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.contains(".damaged-")
                && !name.ends_with("-wal")
                && !name.ends_with("-shm")
                && !name.ends_with("-deltas")
        })
        .collect();
    found.sort();
    found
}

#[test]
fn a_full_disk_is_told_survived_and_loses_nothing() {
    let scratch = Scratch::new();
    let (daemon, control) = faulty(&scratch, "");
    let (mut ending, mut living) = (daemon.agent(), daemon.agent());
    assert!(ending.allocate() && living.allocate());
    let is_written = || daemon.list().iter().filter(|run| run.events == 1).count() == 2;
    wait_for("both runs", || is_written().then_some(()));
    std::fs::write(&control, "write ENOSPC").expect("a fault");
    assert!(ending.allocate() && living.allocate());
    wait_for("the store to fail", || up(&daemon).filter(|up| *up == 0.0));
    let pid = ending.pid();
    ending.end();
    wait_for("the run to end", || daemon.metric("gpumemd_runs_finished_total").filter(|ended| *ended == 1.0));
    // A run that begins and ends while the store fails.
    let mut unseen = daemon.agent();
    let unseen_pid = unseen.pid();
    assert!(unseen.allocate());
    unseen.end();
    wait_for("another end", || daemon.metric("gpumemd_runs_finished_total").filter(|ended| *ended == 2.0));
    assert!(living.allocate(), "agents and metrics go on");
    wait_for("what waits", || daemon.metric("gpumemd_store_waiting").filter(|waiting| *waiting == 3.0));
    let (level, text) = daemon.doctor().remove(0);
    assert!(level == "bad" && text.contains("the disk is full") && text.contains("3 runs wait"), "{text}");
    assert!(daemon.log().contains("the disk is full"), "{}", daemon.log());
    assert_eq!(daemon.metric("gpumemd_store_dropped_total"), Some(0.0));
    let events =
        |pid: u32| daemon.list().into_iter().find(|run| run.pid == pid).map(|run| (run.events, run.state));
    assert_eq!(events(pid), Some((1, State::Open)), "a reader sees the last state that had room");

    std::fs::remove_file(&control).expect("room again");
    wait_for("the store", || up(&daemon).filter(|up| *up == 1.0));
    wait_for("all that waited", || (events(living.pid())?.0 == 3).then_some(()));
    assert!(matches!(events(pid), Some((2, State::Closed { .. }))), "{:?}", events(pid));
    assert!(matches!(events(unseen_pid), Some((1, State::Closed { .. }))));
    wait_for("nothing to wait", || daemon.metric("gpumemd_store_waiting").filter(|waiting| *waiting == 0.0));
    assert!(daemon.doctor().iter().all(|(level, _)| level == "ok"));
    assert_eq!(aside(&scratch), [] as [PathBuf; 0]);
    Store::open_read_only(scratch.join("runs.sqlite")).and_then(|store| store.check()).expect("it is whole");
}

#[test]
fn a_store_that_stands_still_costs_bounded_memory_and_holds_nobody_up() {
    const NAMES: usize = 1000;
    let scratch = Scratch::new();
    let (daemon, control) = faulty(&scratch, "waiting_mib = 1");
    let mut living = daemon.agent();
    assert!(living.allocate());
    wait_for("the run", || (daemon.list().first()?.events == 1).then_some(()));
    std::fs::write(&control, "stand still").expect("a fault");
    // The thread waits for the disk while it writes this run.
    assert!(living.allocate());
    let metric = |name: &str| daemon.metric(name).unwrap_or(-1.0);
    wait_for("a run to wait", || (metric("gpumemd_store_waiting") >= 1.0).then_some(()));
    // Half a MiB each.
    for ended in 1..=6 {
        let mut agent = daemon.agent();
        agent.allocate_named(NAMES);
        agent.end();
        wait_for("its end", || (metric("gpumemd_runs_finished_total") == f64::from(ended)).then_some(()));
        let bytes = metric("gpumemd_store_waiting_bytes");
        assert!(bytes <= f64::from(1 << 20), "{bytes}");
    }
    let dropped = metric("gpumemd_store_dropped_total");
    assert!((3.0..=5.0).contains(&dropped), "{dropped}");
    // Requests return the runs in memory, and after a while without waiting.
    let told = |words: &str| daemon.doctor().iter().any(|(_, text)| text.contains(words));
    wait_for("the doctor to say so", || told("its disk has not answered for").then_some(()));
    assert!(
        told(&format!(
            "runs were never stored: too many or too large ones waited while the store was slow or not writable: {dropped} since the start"
        )),
        "{:?}",
        daemon.doctor()
    );
    assert!(living.allocate(), "agents go on");
    let began = std::time::Instant::now();
    for _ in 0..5 {
        let stream =
            std::os::unix::net::UnixStream::connect(scratch.join("run/control.sock")).expect("a daemon");
        let (status, body) = crate::common::http(stream, "GET", &format!("/v1/runs?pid={}", living.pid()));
        assert!(status == 200 && body.contains("\"events\":"), "{body}");
    }
    gpumem_test_support::bar(
        "five answers beside a store that stands still",
        began.elapsed(),
        std::time::Duration::from_secs(8),
    );

    std::fs::remove_file(&control).expect("it works again");
    wait_for("all that waited", || (metric("gpumemd_store_waiting") == 0.0).then_some(()));
    let list = wait_for("the living one", || {
        Some(daemon.list()).filter(|list| list.iter().any(|run| run.pid == living.pid() && run.events == 3))
    });
    assert_eq!(list.len() as f64, 1.0 + 6.0 - dropped, "what was not dropped is there: {list:?}");
    assert!(!told("has not answered"));
}

#[test]
fn a_file_that_cannot_be_read_or_written_is_set_aside_once() {
    let scratch = Scratch::new();
    let (daemon, control) = faulty(&scratch, "");
    let mut ending = daemon.agent();
    assert!(ending.allocate());
    ending.end();
    wait_for("the ended run", || (daemon.ended() == ["r1"]).then_some(()));
    let mut agent = daemon.agent();
    assert!(agent.allocate());
    wait_for("the run", || (daemon.list().len() == 2 && daemon.list()[0].events == 1).then_some(()));
    std::fs::write(&control, "all EIO").expect("a fault");
    assert!(agent.allocate());
    let set_aside = || daemon.metric("gpumemd_store_set_aside_total").filter(|count| *count >= 1.0);
    wait_for("the third failure", set_aside);
    // The new file fails too, so the file is not the cause, and no further files must be set aside.
    let errors = daemon.metric("gpumemd_store_errors_total").unwrap_or(0.0);
    wait_for("one more failure", || daemon.metric("gpumemd_store_errors_total").filter(|now| *now > errors));
    assert_eq!((set_aside(), aside(&scratch).len()), (Some(1.0), 1));
    assert!(agent.allocate());
    std::fs::remove_file(&control).expect("it works again");
    wait_for("the new store", || (daemon.list().first()?.events == 3).then_some(()));
    wait_for("the store", || up(&daemon).filter(|up| *up == 1.0));
    // The new store gives the id of the ended run to another one.
    assert_eq!(daemon.ended(), [""; 0]);
    // Nothing was deleted: the old store is there, with its log.
    let old = Store::open_read_only(&aside(&scratch)[0]).and_then(|store| store.list()).expect("a store");
    assert_eq!((old.len(), old[0].events), (2, 1));
    let told = daemon.doctor();
    assert!(told.iter().any(|(level, text)| level == "warn" && text.contains(".damaged-")), "{told:?}");
}

#[test]
fn damage_that_shows_while_the_daemon_lives() {
    let scratch = Scratch::new();
    let mut daemon = Program::start(&scratch, "checkpoint_every_s = 0.05", &[]);
    let mut agent = daemon.agent();
    assert!(agent.allocate());
    wait_for("the run", || (daemon.list().first()?.events == 1).then_some(()));
    daemon.kill();
    drop(agent);
    // The whole log is in the file now, and the pages after the first are damaged, which opening does not notice.
    let path = scratch.join("runs.sqlite");
    drop(Store::open(&path).expect("a store"));
    let mut bytes = std::fs::read(&path).expect("a file");
    bytes.iter_mut().skip(4096).for_each(|byte| *byte ^= 0x5a);
    std::fs::write(&path, &bytes).expect("damage");
    let daemon = Program::start(&scratch, "checkpoint_every_s = 0.05", &[]);
    let mut agent = daemon.agent();
    assert!(agent.allocate());
    wait_for("a new store", || (list(&scratch.0).first()?.events == 1).then_some(()));
    assert_eq!(daemon.metric("gpumemd_store_set_aside_total"), Some(1.0));
    let kept = std::fs::read(&aside(&scratch)[0]).expect("the damaged one");
    assert!(kept == bytes, "it is as it was");
    assert!(daemon.log().contains("set aside"), "{}", daemon.log());
}
