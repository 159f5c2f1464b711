//! Every process that used a GPU has a run.

use crate::common::node::{MIB, Node, key};
use crate::common::{Scratch, wait_for};
use gpumem_model::run::{Run, State};
use gpumem_runs::store::Store;

#[test]
fn a_process_without_an_agent_has_a_run_of_what_nvml_says() {
    let scratch = Scratch::new();
    let path = scratch.join("runs.sqlite");
    let mut node = Node::new(path.clone(), 2, 1000);
    let (bare, covered, unread) = (key(0, 0), key(0, 1), key(0, 2));
    node.covered(0, 1, 3);
    for (second, used) in [(2, 700), (3, 900), (4, 800)] {
        let absent = gpumem_wire::Absence::NoPermission;
        let listed = [(bare, Ok(used * MIB)), (covered, Ok(500 * MIB)), (unread, Err(absent))];
        node.sample(0, second * 1_000_000_000, &listed);
        node.sample(1, second * 1_000_000_000, &[(bare, Ok(64 * MIB))]);
    }
    // An hour later everything is due.
    node.core.tick(gpumemd::clock::now_ns() + 4_000_000_000_000);
    let store = wait_for("three runs", || {
        let store = Store::open_read_only(&path).ok()?;
        (store.list().ok()?.len() == 3).then_some(store)
    });
    let stored = |pid: u32| -> Run {
        let line = store.list().unwrap().into_iter().find(|line| line.pid == pid).expect("it has one");
        store.load(line.id).unwrap()
    };
    let run = stored(bare.pid);
    assert_eq!((run.state, run.coverage.covered, run.coverage.samples), (State::Open, false, 6));
    assert_eq!(run.devices.len(), 2);
    let device = &run.devices[0];
    assert_eq!(device.last.uncovered_used_bytes, Some(800 * MIB));
    assert_eq!(
        (device.last.tracked_bytes, device.last.untrackable_bytes),
        (None, None),
        "unknown is not zero"
    );
    assert_eq!(device.peak_used.map(|(bytes, _)| bytes), Some(900 * MIB));
    let used: Vec<_> = device.series.buckets.iter().map(|bucket| bucket.used.map(|used| used.max)).collect();
    assert_eq!(used, [700, 900, 800].map(|used| Some(used << 20)));
    assert!(device.series.buckets.iter().all(|bucket| bucket.tracked.is_none()));
    assert_eq!(run.devices[1].last.uncovered_used_bytes, Some(64 * MIB));

    let unread = stored(unread.pid);
    assert_eq!(unread.devices[0].last.uncovered_used_bytes, None);
    assert_eq!(unread.devices[0].last.used_absence.as_deref(), Some("no permission"));

    let covered = stored(covered.pid);
    let device = &covered.devices[0];
    assert_eq!((covered.coverage.covered, device.peak.tracked_bytes), (true, Some(6 << 20)));
    assert_eq!(device.last.amounts.iter().map(|(_, bytes)| bytes).sum::<i64>(), 6 << 20);
    assert!(!device.details.timeline.points.is_empty());
}
