//! Parts of long lives, and deletion of runs.

use crate::common::peer::{Memory, Peer, allocation, device, record, resync, watermark};
use crate::common::{Daemon, Scratch, start, start_in, wait_for};
use gpumem_model::run::{Cell, Class, Run, State};
use gpumem_runs::store::{RunSummary, Store};

fn agent(daemon: &Daemon) -> Peer {
    let (peer, epoch) = Peer::welcomed(&daemon.agent_socket(), &Memory::new());
    let (stamp, body) = allocation(1, 4096, 0);
    assert!(peer.send(&[device(), resync(epoch, 0, &[]), record(stamp, body), watermark(1)].concat()));
    peer
}

fn list(daemon: &Daemon) -> Vec<RunSummary> {
    Store::open_read_only(daemon.store()).and_then(|store| store.list()).unwrap_or_default()
}

fn reload_with(daemon: &mut Daemon, from: &str, to: &str) {
    let text = std::fs::read_to_string(daemon.config()).expect("a file");
    assert!(text.contains(from), "{text}");
    std::fs::write(daemon.config(), text.replace(from, to)).expect("a file");
    daemon.reload();
}

#[test]
fn a_long_life_has_parts_that_are_linked_and_the_newest_is_never_deleted() {
    let mut daemon = start(
        "[runs]\ncheckpoint_every_s = 0.05\nroll_every_s = 1.0\nkeep_days = 0.0\nkeep_steady_s = 0.0\n",
    );
    let peer = agent(&daemon);
    let parts = wait_for("three parts", || Some(list(&daemon)).filter(|list| list.len() >= 3));
    let store = Store::open_read_only(daemon.store()).expect("a store");
    for pair in parts.windows(2) {
        assert_eq!((pair[0].continues, pair[0].part), (Some(pair[1].id), pair[1].part + 1));
        assert!(matches!(pair[1].state, State::Rolled { .. }), "{:?}", pair[1]);
        let (newer, older) = (store.load(pair[0].id).expect("a run"), store.load(pair[1].id).expect("a run"));
        let State::Rolled { time_ns } = older.state else { unreachable!() };
        let part = newer.coverage.part.expect("a part");
        assert_eq!((part.number, part.began_ns), (pair[0].part, time_ns));
        assert_eq!(newer.devices[0].peak.tracked_bytes, Some(4096), "it begins with what is held");
        assert_eq!((newer.coverage.events, part.events_before), (0, 1));
    }
    assert!(daemon.metric("gpumemd_runs_rolled_total").is_some_and(|rolled| rolled >= 2.0));
    // A request for the process returns the open part.
    let runs = daemon.runs(&format!("?pid={}", std::process::id()));
    assert_eq!((runs.len(), runs[0].state), (1, State::Open));
    assert!(runs[0].coverage.part.is_some_and(|part| part.number >= 3), "{:?}", runs[0].coverage.part);

    // All runs are too old at once; those of live processes stay.
    reload_with(
        &mut daemon,
        "roll_every_s = 1.0\nkeep_days = 0.0",
        "roll_every_s = 0.0\nkeep_days = 0.000001",
    );
    wait_for("the old parts to go", || (list(&daemon).len() == 1).then_some(()));
    let left = list(&daemon).remove(0);
    assert_eq!(left.state, State::Open);
    assert_eq!(left.continues, None);
    assert!(left.part >= 3);
    assert!(
        daemon.metric("gpumemd_store_deleted_total{reason=\"age\"}").is_some_and(|deleted| deleted >= 2.0)
    );
    // The next daemon continues the same part.
    drop(peer);
    daemon.end().expect("a good end");
    let scratch = Scratch(std::mem::take(&mut daemon.scratch.0));
    let daemon =
        start_in(scratch, "[runs]\ncheckpoint_every_s = 0.05\nkeep_days = 0.000001\nkeep_steady_s = 0.0\n");
    let _peer = agent(&daemon);
    wait_for("the run to go on", || (list(&daemon).first()?.state == State::Open).then_some(()));
    let again = list(&daemon);
    assert_eq!((again.len(), again[0].id, again[0].part), (1, left.id, left.part));
    assert_eq!(
        Store::open_read_only(daemon.store()).expect("a store").load(left.id).expect("a run").coverage.lost,
        0
    );
}

#[test]
fn parts_that_end_while_the_store_is_out_of_order_are_all_kept() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.join("runs.sqlite")).expect("a directory in the way");
    let daemon = start_in(scratch, "[runs]\ncheckpoint_every_s = 0.05\nroll_every_s = 1.0\n");
    let _peer = agent(&daemon);
    wait_for("three parts in memory", || {
        daemon.metric("gpumemd_store_waiting").filter(|waiting| *waiting >= 3.0)
    });
    assert!(list(&daemon).is_empty());
    std::fs::remove_dir(daemon.store()).expect("the way is free");
    let parts = wait_for("the parts", || Some(list(&daemon)).filter(|list| list.len() >= 3));
    let numbers: Vec<u32> = parts.iter().rev().map(|line| line.part).collect();
    assert!(numbers.iter().copied().eq(1..=numbers.len() as u32), "{numbers:?}");
    let store = Store::open_read_only(daemon.store()).expect("a store");
    let events: Vec<u64> =
        parts.iter().rev().map(|line| store.load(line.id).expect("a run").coverage.events).collect();
    assert_eq!((events[0], &events[1..]), (1, &vec![0; events.len() - 1][..]), "each has its own counts");
}

/// Returns a run of some hundred KiB.
fn large(run: &Run) -> Run {
    let mut run = run.clone();
    run.cells = (0..2000)
        .map(|cell| Cell {
            class: Class::Direct,
            tag: Some(format!("model/layer/{cell}/with a long name")),
            ..Cell::default()
        })
        .collect();
    run.devices[0].peak.amounts = (0..2000).map(|cell| (cell, 1 << 20)).collect();
    run.state = State::Closed { time_ns: 1, status: None };
    run.process.start_ticks = 1;
    run
}

/// Returns a daemon that has ended, and its run of this process.
fn ended_with_a_run() -> (Daemon, Run) {
    let mut daemon = start("[runs]\ncheckpoint_every_s = 0.05\n");
    let peer = agent(&daemon);
    let run = wait_for("the run", || daemon.runs(&format!("?pid={}", std::process::id())).pop());
    drop(peer);
    daemon.end().expect("a good end");
    (daemon, run)
}

#[test]
fn a_store_that_is_too_large_shrinks_to_its_size() {
    let (mut first, run) = ended_with_a_run();
    let path = first.store();
    let mut store = Store::open(&path).expect("a store");
    for number in 0..60 {
        store.insert(&large(&run), &format!("another boot:7:{number}")).expect("stored");
    }
    let mut import = large(&run);
    import.source.kind = "tbd-log".into();
    let (import, _) = store.insert(&import, "import").expect("stored");
    drop(store);
    let size = || std::fs::metadata(&path).expect("a file").len();
    let full = size();
    assert!(full > 8 << 20, "{full}");
    let scratch = Scratch(std::mem::take(&mut first.scratch.0));
    let daemon = start_in(scratch, "[runs]\ncheckpoint_every_s = 0.05\nmax_size_mib = 4\n");
    let _peer = agent(&daemon);
    wait_for("the file to shrink", || (size() <= 5 << 20).then_some(()));
    let deleted = daemon.metric("gpumemd_store_deleted_total{reason=\"size\"}").unwrap_or(0.0);
    let left = list(&daemon);
    assert_eq!(left.len(), 62 - deleted as usize);
    assert!(left.iter().any(|line| line.id == import), "an import is its owner's");
    assert!(left.iter().any(|line| line.state == State::Open), "what lives stays");
    // The oldest were deleted first: the remaining ones are the newest in a row.
    let ids: Vec<i64> =
        left.iter().filter(|line| line.uid.starts_with("another")).map(|line| line.id.0).collect();
    assert!(
        !ids.is_empty() && ids.windows(2).all(|pair| pair[0] == pair[1] + 1) && ids[0] == import.0 - 1,
        "{ids:?}"
    );
    Store::open_read_only(&path).and_then(|store| store.check()).expect("it is whole");
}

#[test]
fn who_fills_the_store_pushes_out_their_own_runs_and_no_others() {
    let (mut first, run) = ended_with_a_run();
    let path = first.store();
    let mut store = Store::open(&path).expect("a store");
    let mut insert = |uid: u64, number: u64| {
        let mut run = large(&run);
        run.process.uid = Some(uid);
        store.insert(&run, &format!("another boot:{uid}:{number}")).expect("stored").0
    };
    // One user's few runs are the oldest; then many of another user follow.
    let few: Vec<_> = (0..5).map(|number| insert(1001, number)).collect();
    for number in 0..55 {
        insert(1002, number);
    }
    drop(store);
    let scratch = Scratch(std::mem::take(&mut first.scratch.0));
    let daemon = start_in(scratch, "[runs]\nmax_size_mib = 4\n");
    let size = || std::fs::metadata(&path).expect("a file").len();
    wait_for("the file to shrink", || (size() <= 5 << 20).then_some(()));
    let left = list(&daemon);
    assert!(few.iter().all(|id| left.iter().any(|line| line.id == *id)), "{left:?}");
    let theirs = left.iter().filter(|line| line.uid.starts_with("another boot:1002:")).count();
    assert!((5..30).contains(&theirs), "{theirs}: they have what the other does not use");
}

#[test]
fn a_store_of_living_runs_is_not_cut_and_says_so() {
    let mut first = start("[runs]\ncheckpoint_every_s = 0.05\n");
    let peer = agent(&first);
    let run = wait_for("the run", || first.runs(&format!("?pid={}", std::process::id())).pop());
    drop(peer);
    first.end().expect("a good end");
    let mut store = Store::open(first.store()).expect("a store");
    for number in 0..12 {
        let mut import = large(&run);
        import.source.kind = "tbd-log".into();
        store.insert(&import, &number.to_string()).expect("stored");
    }
    drop(store);
    let scratch = Scratch(std::mem::take(&mut first.scratch.0));
    let daemon = start_in(scratch, "[runs]\nmax_size_mib = 1\n");
    let told = |text: &str| text.contains("larger than runs.max_size_mib");
    wait_for("the doctor to say so", || {
        let (_, doctor) = daemon.get("/v1/doctor");
        let mut findings = doctor["findings"].as_array()?.iter();
        findings.any(|finding| finding["text"].as_str().is_some_and(told)).then_some(())
    });
    assert!(list(&daemon).len() >= 12);
}
