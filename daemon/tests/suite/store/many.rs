//! More processes than runs that may wait for the store.

use crate::common::node::{MIB, Node, batch, key};
use crate::common::{Scratch, metric, wait_for};
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::run::State;
use gpumem_runs::store::{RunSummary, Store};
use gpumem_wire::{Absence, Body, Reading, Stamp};
use gpumemd::aggregator::Command;
use gpumemd::stats::Count;
use gpumemd::view::prometheus::scrape;
use std::path::Path;
use std::time::Duration;
use tokio::sync::mpsc;

/// The supported number, see docs/store.md.
const MOST: usize = 10_000;
/// More than may wait for the store.
const SOME: usize = 2_000;
/// Later than the machine's real time, at which the aggregator starts.
const T: u64 = 1 << 60;
const SECOND: u64 = 1_000_000_000;

fn list(path: &Path) -> Vec<RunSummary> {
    Store::open_read_only(path).and_then(|store| store.list()).unwrap_or_default()
}

fn sample(node: &mut Node, processes: usize, time_ns: u64, used: u64) {
    let listed: Vec<(ProcessKey, Result<u64, Absence>)> =
        (0..processes).map(|process| (key(0, process), Ok(used))).collect();
    node.sample(0, time_ns, &listed);
}

/// Advances the time until no run waits for the store. Returns the time.
fn settle(node: &mut Node, mut now_ns: u64) -> u64 {
    wait_for("everything to be written", || {
        // Each turn costs time, so it waits until the store has written what the last one handed over.
        if node.context.run_writer.status().waiting > 0 {
            return None;
        }
        now_ns += SECOND / 10;
        node.core.tick(now_ns);
        let status = node.context.run_writer.status();
        (status.waiting == 0 && status.queued == 0).then_some(())
    });
    now_ns
}

fn gone(node: &mut Node, processes: usize, time_ns: u64) {
    for process in 0..processes {
        let stamp = Stamp { thread: key(0, process).pid, time_ns, ..Stamp::default() };
        let end = Body::ProcessGone { start_ticks: 7, status: Reading::of(0) };
        node.core.take(batch(Origin::Host, &[(stamp, end)]));
    }
}

#[test]
fn every_one_of_many_live_processes_is_checkpointed_and_has_a_run_at_its_end() {
    let scratch = Scratch::new();
    let path = scratch.join("runs.sqlite");
    let mut node = Node::new(path.clone(), 1, 10_000);
    sample(&mut node, MOST, T, MIB);
    let now = settle(&mut node, T);
    let is_open = |run: &RunSummary| matches!(run.state, State::Open);
    assert_eq!(list(&path).iter().filter(|run| is_open(run)).count(), MOST);

    // Every process changes. Every third checkpoint includes processes without an agent, so the next of that kind has all
    // new values.
    sample(&mut node, MOST, now, 2 * MIB);
    let sampled = now;
    let now = (0..3).fold(now, |now, _| settle(&mut node, now + 3_601 * SECOND));
    let is_newest = |run: &RunSummary| run.last_ns.is_some_and(|last| last >= sampled);
    assert_eq!(list(&path).iter().filter(|run| is_newest(run)).count(), MOST);

    gone(&mut node, MOST, now);
    let mut now = now + SECOND;
    wait_for("all to be closed", || {
        now = settle(&mut node, now);
        (node.context.stats.get(Count::RunsFinished) == MOST as u64).then_some(())
    });
    let over = list(&path).into_iter().filter(|run| matches!(run.state, State::Closed { .. }));
    assert_eq!(over.count(), MOST);
    assert_eq!(node.context.stats.get(Count::StoreDropped), 0);
    assert_eq!(node.context.stats.get(Count::RunsFinished), MOST as u64);
    node.thread.end(Duration::from_secs(10));
}

/// A short program is named by a list and ends; its hello waits in the socket until its run is closed.
#[test]
fn hello_that_is_read_after_the_run_was_closed_joins_it() {
    let scratch = Scratch::new();
    let path = scratch.join("runs.sqlite");
    let mut node = Node::new(path.clone(), 1, 10_000);
    let key = key(0, 0);
    let end = |node: &mut Node, time_ns: u64| {
        let stamp = Stamp { thread: key.pid, time_ns, ..Stamp::default() };
        let end = Body::ProcessGone { start_ticks: key.start_ticks, status: Reading::of(0) };
        node.core.take(batch(Origin::Host, &[(stamp, end)]));
        settle(node, time_ns + SECOND)
    };
    node.sample(0, T, &[(key, Ok(10 * MIB))]);
    let now = end(&mut node, T + 1);
    assert_eq!(node.context.stats.get(Count::RunsFinished), 1);
    let agent = |node: &mut Node, up: bool| {
        let stamp = Stamp { thread: key.pid, time_ns: now, ..Stamp::default() };
        node.core.take(batch(Origin::Process(key), &[(stamp, Body::Source { up, reason: "agent" })]));
    };
    agent(&mut node, true);
    node.covered(0, 0, 3);
    agent(&mut node, false);
    end(&mut node, now);
    let runs = list(&path);
    assert_eq!((runs.len(), node.context.stats.get(Count::SkippedOver)), (1, 0), "{runs:?}");
    let run = Store::open_read_only(&path).and_then(|store| store.load(runs[0].id)).expect("the run");
    assert_eq!(run.coverage.events, 6, "what the agent said");
    assert!(
        run.devices.iter().any(|device| device.peak_used.is_some()),
        "what the list said: {:?}",
        run.devices
    );
    // Without a hello the records are counted as skipped.
    node.covered(0, 0, 3);
    assert_eq!(node.context.stats.get(Count::SkippedOver), 6);
    node.thread.end(Duration::from_secs(10));
}

/// While the daemon was stopped, a short program lived and ended. Several lists that named it wait to be read, before and after its
/// hello.
#[test]
fn lists_that_name_a_process_after_its_end_make_no_second_run() {
    let scratch = Scratch::new();
    let path = scratch.join("runs.sqlite");
    let mut node = Node::new(path.clone(), 1, 10_000);
    let key = key(0, 0);
    // /proc no longer has the start time of the process.
    let unseen = ProcessKey { start_ticks: 0, ..key };
    let listed = |node: &mut Node, tenths: u64| {
        let time_ns = T + tenths * SECOND / 10;
        node.sample(0, time_ns, &[(unseen, Ok(10 * MIB))]);
        node.core.tick(time_ns);
    };
    (0..3).for_each(|tenths| listed(&mut node, tenths));
    let stamp = Stamp { thread: key.pid, time_ns: T + SECOND, ..Stamp::default() };
    let agent = |node: &mut Node, up: bool| {
        node.core.take(batch(Origin::Process(key), &[(stamp, Body::Source { up, reason: "agent" })]));
    };
    agent(&mut node, true);
    node.covered(0, 0, 3);
    listed(&mut node, 3);
    agent(&mut node, false);
    let end = Body::ProcessGone { start_ticks: key.start_ticks, status: Reading::of(0) };
    node.core.take(batch(Origin::Host, &[(stamp, end)]));
    let now = settle(&mut node, T + SECOND);
    assert_eq!(node.context.stats.get(Count::RunsFinished), 1);
    listed(&mut node, 4);
    node.sample(0, now + SECOND, &[]);
    settle(&mut node, now + 60 * SECOND);
    let runs = list(&path);
    assert_eq!(runs.iter().map(|run| (run.pid, run.events)).collect::<Vec<_>>(), [(key.pid, 6)], "{runs:?}");
    node.thread.end(Duration::from_secs(10));
}

#[test]
fn daemon_that_ends_writes_the_news_of_every_process() {
    let scratch = Scratch::new();
    let path = scratch.join("runs.sqlite");
    let mut node = Node::new(path.clone(), 1, 10_000);
    sample(&mut node, SOME, T, MIB);
    let Node { core, context, thread } = node;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (_batches, inbox) = mpsc::channel(1);
        let (_asks, asked) = mpsc::channel(1);
        let (orders, ordered) = mpsc::channel(1);
        orders.send(Command::End).await.expect("it listens");
        core.run(inbox, asked, ordered).await;
    });
    thread.end(Duration::from_secs(30));
    assert_eq!(list(&path).len(), SOME);
    assert_eq!(context.stats.get(Count::StoreDropped), 0);
}

/// Runs that are not written yet are shown, and counted when they are written late.
#[test]
fn runs_that_are_written_late_are_counted() {
    let scratch = Scratch::new();
    // No store can be opened below a file, so runs of live processes wait.
    let file = scratch.join("file");
    std::fs::write(&file, "").expect("a file");
    let path = file.join("runs.sqlite");
    let mut node = Node::new(path.clone(), 1, 10_000);
    sample(&mut node, SOME, T, MIB);
    node.core.tick(T);
    node.core.tick(T + SECOND);
    let status = node.context.run_writer.status();
    assert!(status.waiting > 0 && status.queued > 0, "{status:?}");
    assert_eq!(status.waiting + status.queued, SOME);
    let shown = |node: &Node, series: &str| metric(&scrape(&node.context), series).expect("a series");
    assert_eq!(shown(&node, "gpumemd_store_queued"), status.queued as f64);
    assert_eq!(shown(&node, "gpumemd_store_waiting"), status.waiting as f64);
    let later = T + 2 * 3_600 * SECOND;
    node.core.tick(later);
    assert!(node.context.run_writer.status().is_late);
    assert!(shown(&node, "gpumemd_store_unwritten_seconds") >= 2.0 * 3_600.0);
    std::fs::remove_file(&file).expect("removed");
    std::fs::create_dir_all(&file).expect("a folder");
    settle(&mut node, later);
    assert_eq!(list(&path).len(), SOME);
    let queued = status.queued as u64;
    assert_eq!(node.context.stats.get(Count::StoreLate), queued);
    assert_eq!(shown(&node, "gpumemd_store_late_total"), queued as f64);
    assert_eq!(shown(&node, "gpumemd_store_queued"), 0.0);
    assert_eq!(shown(&node, "gpumemd_store_unwritten_seconds"), 0.0);
    node.thread.end(Duration::from_secs(10));
}
