//! Bytes that the daemon writes to the disk for processes without an agent.

use gpumem_model::run::State;
use gpumem_runs::store::Store;
use gpumem_tests::live::{Daemon, Job, Machine, until};
use std::process::Command;

const CONFIG: &str = "[runs]\ncheckpoint_every_s = 0.05\n[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\nextra_lists_every_s = 3600.0\n";
const MIB: u64 = 1 << 20;

fn hold(machine: &Machine, job: &Job, bytes: u64) {
    machine.tool("hold", &[&job.pid().to_string(), "0", &bytes.to_string()]);
}

/// Database, write-ahead log and delta log.
fn files(machine: &Machine) -> [Vec<u8>; 3] {
    let read = |suffix| std::fs::read(machine.dir.join(format!("runs.sqlite{suffix}"))).unwrap_or_default();
    ["", "-wal", "-deltas"].map(read)
}

/// State, and the bytes used at the last sample, as a reader of the store finds them.
fn stored(machine: &Machine, job: &Job) -> Option<(State, Option<u64>)> {
    let store = Store::open_read_only(machine.dir.join("runs.sqlite")).ok()?;
    let run = store.list().ok()?.into_iter().find(|run| run.pid == job.pid())?;
    let run = store.load(run.id).expect("a run");
    Some((run.state, run.devices.first()?.last.uncovered_used_bytes))
}

#[test]
fn process_whose_memory_stays_the_same_writes_nothing() {
    let machine = Machine::new(&["devices=1"]);
    let daemon = Daemon::start(&machine, "daemon", CONFIG);
    let [moving, still] = [1, 2].map(|number| {
        let job = Job::start(Command::new("sleep").arg("1000"));
        hold(&machine, &job, number * 64 * MIB);
        job
    });
    let has = |job: &Job, bytes: u64| {
        until(60, "the bytes in the store", || {
            (stored(&machine, job) == Some((State::Open, Some(bytes)))).then_some(())
        });
    };
    has(&moving, 64 * MIB);
    has(&still, 128 * MIB);
    let calm = || {
        until(60, "a time without a write", || {
            let (before, count) = (files(&machine), machine.lists());
            until(60, "more lists", || (machine.lists() >= count + 40).then_some(()));
            (files(&machine) == before).then_some(before)
        })
    };
    let before = calm();
    hold(&machine, &moving, 65 * MIB);
    has(&moving, 65 * MIB);
    let after = calm();
    assert!(after[..2] == before[..2], "the database is not written for a change");
    assert!(after[2].starts_with(&before[2]) && after[2].len() > before[2].len());
    assert!(after[2].len() - before[2].len() < 4096, "{} bytes", after[2].len() - before[2].len());
    daemon.job.signal("KILL");
    drop(daemon);
    assert_eq!(stored(&machine, &moving), Some((State::Interrupted, Some(65 * MIB))));
    assert_eq!(stored(&machine, &still), Some((State::Interrupted, Some(128 * MIB))));
}
