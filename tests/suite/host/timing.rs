//! Lane `timing`: durations of programs with daemons that do not answer.

use super::cell::{Outcome, run};
use super::peers::{MANNERS, Peer};
use super::rows::{Row, much, timed};
use super::{Column, NVML};
use gpumem_tests::live::{Daemon, Machine};
use std::time::Duration;

/// Allowed delay compared with a run without an agent. Most take 10 ms; an exit adds 50 ms, and families have several exits
/// in sequence.
const LONGER: Duration = Duration::from_millis(250);
/// Program with thousands of names, some of a megabyte: 100 ms of work in a debug build, and more on a busy machine.
const NAMES: Duration = Duration::from_millis(1000);
/// Program whose first thread has ended: the agent's thread checks once a second whether it is the last one.
const LEFT: Duration = Duration::from_millis(1250);
/// Program that requests the daemon's report (`gpumem_dumps`), and so waits 3 s for the reply.
const ASKS: Duration = Duration::from_millis(4500);
/// Exit with a daemon that cannot receive the remaining records: 50 ms, plus the C library and the kernel.
const FAREWELL: Duration = Duration::from_millis(70);
/// Number of runs, of which the fastest counts, because other programs use the processors too.
const TIMES: usize = 5;

fn limit(row: &Row) -> Duration {
    match row.name {
        "tags" => NAMES,
        "leave" => LEFT,
        "cancel" | "late-filter" | "no-pidfd" | "no-memory" => ASKS,
        _ => LONGER,
    }
}

/// Returns daemons that listen but do not answer, or answer slowly.
fn columns(machine: &Machine, stopped: &Daemon) -> Vec<Column> {
    stopped.job.signal("STOP");
    let mut columns =
        vec![Column { name: "stopped", socket: stopped.runtime.join("agent.sock"), peer: None }];
    for (name, manner) in MANNERS.iter().filter(|manner| ["silent", "slow"].contains(&manner.0)) {
        let peer = Peer::listen(&machine.dir.join(format!("{name}.sock")), *manner);
        columns.push(Column { name, socket: peer.socket.clone(), peer: Some(peer) });
    }
    columns
}

fn outcome(machine: &Machine, row: &Row, column: Option<&Column>) -> Outcome {
    let folder = machine.dir.join(format!("timed-{}", column.map_or("bare", |column| column.name)));
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut command = match column {
        Some(column) => row.covered(machine, &column.socket),
        None => row.command(machine),
    };
    let outcome = run(&mut command, &folder);
    std::fs::remove_dir_all(folder).expect("a folder");
    outcome
}

/// Returns the shortest of several times; of one if that is at most `enough`.
fn least(enough: Duration, mut time: impl FnMut() -> Duration) -> Duration {
    let mut least = Duration::MAX;
    for _ in 0..TIMES {
        least = least.min(time());
        if least <= enough {
            break;
        }
    }
    least
}

#[test]
fn programs_never_wait_for_a_daemon() {
    let machine = Machine::new(&["devices=1", "memory=64G", "cuda.version=13990"]);
    machine.set(&["truth="]);
    let stopped = Daemon::start(&machine, "stopped", NVML);
    let columns = columns(&machine, &stopped);
    let mut reported = String::new();
    for row in timed() {
        let bare = (0..3).map(|_| outcome(&machine, &row, None).took).min().expect("some");
        let longer =
            |column| least(limit(&row), || outcome(&machine, &row, Some(column)).took.saturating_sub(bare));
        let longer: Vec<Duration> = std::thread::scope(|scope| {
            let times: Vec<_> = columns.iter().map(|column| scope.spawn(move || longer(column))).collect();
            times.into_iter().map(|time| time.join().expect("no panic")).collect()
        });
        println!("{:15} {bare:5.0?}, longer by {longer:.0?}", row.name);
        for (column, longer) in columns.iter().zip(longer).filter(|(_, longer)| *longer > limit(&row)) {
            reported += &format!("{} with a daemon that is {}: {longer:?} longer\n", row.name, column.name);
        }
    }
    assert!(reported.is_empty(), "{reported}");
}

#[test]
fn exit_waits_at_most_the_farewell_time() {
    let machine = Machine::new(&["devices=1", "memory=64G"]);
    machine.set(&["truth="]);
    let stopped = Daemon::start(&machine, "stopped", NVML);
    let columns = columns(&machine, &stopped);
    let row = much();
    let time = |column: Option<&Column>| {
        let outcome = outcome(&machine, &row, column);
        let printed = outcome.out.trim().strip_prefix("ends at ").and_then(|ns| ns.parse::<i64>().ok());
        Duration::from_nanos((outcome.ended_ns - printed.expect("a time")) as u64)
    };
    let bare = least(Duration::ZERO, || time(None));
    println!("without an agent {bare:.1?}");
    for column in &columns {
        let longer = least(FAREWELL, || time(Some(column)).saturating_sub(bare));
        println!("{}: {longer:.1?} longer", column.name);
        assert!(longer <= FAREWELL, "{}: {longer:?}", column.name);
    }
}
