//! The run writer with a store on disk.

use super::*;
use gpumem_model::run::{Clock, Coverage, Part, Process, ProgramData, Source};

pub(super) fn run(events: u64) -> Run {
    Run {
        source: Source { kind: "daemon".into(), origin: "host".into(), preset: None },
        clock: Clock::Monotonic { wall_offset_ns: None },
        process: Process { pid: 7, start_ticks: 9, ..Process::default() },
        state: State::Open,
        coverage: Coverage { events, ..Coverage::default() },
        caveats: Vec::new(),
        cells: Vec::new(),
        devices: Vec::new(),
        own: ProgramData::default(),
    }
}

/// A process that lives for a few milliseconds has ended before the store is searched for it. The result must not stay in memory.
#[test]
fn of_a_process_that_is_over_nothing_is_recalled() {
    let dir = std::env::temp_dir().join(format!("gpumemd-recalled-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let (path, stats) = (dir.join("runs.sqlite"), Arc::new(Stats::default()));
    let (writer, thread) =
        RunWriter::start(path, Retention::default(), Arc::clone(&stats)).expect("a thread");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let ask = |pid: u32, state: State| {
        let (uid, process) = (format!("boot:{pid}:9"), Process { pid, start_ticks: 9, ..Process::default() });
        let of = |events, state| Run { state, process: process.clone(), ..run(events) };
        writer.queue(uid.clone(), of(5, state), Vec::new(), true);
        while writer.status().waiting > 0 {
            std::thread::yield_now();
        }
        let now = of(3, State::Open);
        let (reply, mut recalled) = tokio::sync::mpsc::unbounded_channel();
        writer.request_earlier_counts(uid, key_of(&now), reply);
        let whole = runtime.block_on(writer.join_earlier(vec![now]));
        (recalled.try_recv().ok().map(|recalled| recalled.events), whole[0].coverage.events)
    };
    assert_eq!(ask(7, State::Closed { time_ns: 1, status: None }), (None, 3));
    assert_eq!(ask(8, State::Open), (Some(5), 8), "the daemon that kept it has ended: the process may go on");
    thread.end(Duration::from_secs(60));
    std::fs::remove_dir_all(&dir).expect("removed");
}

/// This daemon counts the parts of a run from 1; users see the numbers of the store, also after a part is complete.
#[test]
fn parts_are_numbered_after_those_of_an_earlier_daemon() {
    let dir = std::env::temp_dir().join(format!("gpumemd-numbered-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let of = |part: Option<u32>, state| {
        let process = Process { pid: 7, start_ticks: 9, ..Process::default() };
        let mut run = Run { state, process, ..run(5) };
        run.coverage.part = part.map(|number| Part { number, began_ns: 1, events_before: 0 });
        run
    };
    let rolled = || State::Rolled { time_ns: 1 };
    let start =
        || RunWriter::start(dir.join("runs.sqlite"), Retention::default(), Arc::default()).expect("a thread");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let write = |writer: &RunWriter, run: Run| {
        let is_final = run.state != State::Open;
        writer.queue("boot:7:9".into(), run, Vec::new(), is_final);
        while writer.status().waiting > 0 {
            std::thread::yield_now();
        }
    };
    let seen = |writer: &RunWriter, own: Option<u32>| {
        let runs = runtime.block_on(writer.join_earlier(vec![of(own, State::Open)]));
        (runs[0].coverage.part.map(|part| part.number), runs[0].coverage.events)
    };
    let (writer, thread) = start();
    write(&writer, of(None, rolled()));
    write(&writer, of(Some(2), State::Open));
    thread.end(Duration::from_secs(60));

    let (writer, thread) = start();
    write(&writer, of(None, State::Open));
    assert_eq!(seen(&writer, None), (Some(2), 10), "continues the open part of the earlier daemon");
    assert_eq!(seen(&writer, Some(2)), (Some(3), 5), "the next part, before the complete one is written");
    write(&writer, of(None, rolled()));
    assert_eq!(seen(&writer, Some(2)), (Some(3), 5), "before its first checkpoint");
    write(&writer, of(Some(2), State::Open));
    assert_eq!(seen(&writer, Some(2)), (Some(3), 5));
    thread.end(Duration::from_secs(60));
    std::fs::remove_dir_all(&dir).expect("removed");
}

/// The start time of a process that had ended before it connected is its own claim.
#[test]
fn run_of_another_user_is_never_continued() {
    let dir = std::env::temp_dir().join(format!("gpumemd-another-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let path = dir.join("runs.sqlite");
    let store = || Store::open_read_only(&path).expect("a store");
    for (user, events) in [(1, 5), (2, 7), (1, 9)] {
        let (writer, thread) =
            RunWriter::start(path.clone(), Retention::default(), Arc::default()).expect("a thread");
        let process = Process { pid: 7, start_ticks: 9, uid: Some(user), ..Process::default() };
        writer.queue("boot:7:9".into(), Run { process, ..run(events) }, Vec::new(), true);
        thread.end(Duration::from_secs(60));
    }
    let of = |user| {
        let runs = store().list().expect("runs");
        let runs = runs.into_iter().map(|run| store().load(run.id).expect("a run"));
        let mut events: Vec<u64> =
            runs.filter(|run| run.process.uid == Some(user)).map(|run| run.coverage.events).collect();
        events.sort_unstable();
        events
    };
    assert_eq!(of(2), [7], "nothing of the other's, and nothing in it");
    assert_eq!(of(1), [14], "the first one's goes on");
    std::fs::remove_dir_all(&dir).expect("removed");
}

/// A slow disk gets the newest state, not a series of outdated ones; otherwise the daemon would end before writing the last one.
#[test]
fn what_is_old_is_not_written_when_there_is_something_newer() {
    const STATES: u64 = 200;
    let dir = std::env::temp_dir().join(format!("gpumemd-keeper-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let (path, stats) = (dir.join("runs.sqlite"), Arc::new(Stats::default()));
    let (writer, thread) =
        RunWriter::start(path.clone(), Retention::default(), Arc::clone(&stats)).expect("a thread");
    (1..=STATES).for_each(|events| writer.queue("boot:7:9".into(), run(events), Vec::new(), false));
    thread.end(Duration::from_secs(60));
    let list = Store::open_read_only(&path).and_then(|store| store.list()).expect("a store");
    assert_eq!((list.len(), list[0].events), (1, STATES));
    let writes = stats.get(Count::StoreWrites);
    assert!(writes < STATES / 2, "{writes} writes");
    std::fs::remove_dir_all(&dir).expect("removed");
}
