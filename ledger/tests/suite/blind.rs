//! Intervals in which the agent saw no driver calls.
use crate::common::*;
use gpumem_ledger::Coverage;
use gpumem_model::run::BlindWindow;
use gpumem_wire::AgentState::*;
use gpumem_wire::*;
use std::sync::Arc;

fn agent(s: &mut Script, time_ns: u64, state: AgentState, result: u16, detail: &str) {
    s.at(time_ns).control(Body::Agent { result, state, detail });
}

fn coverage(s: &Script) -> Coverage {
    Arc::unwrap_or_clone(s.process().coverage)
}

fn window(from_ns: u64, to_ns: Option<u64>, why: &str) -> BlindWindow {
    BlindWindow { from_ns, to_ns, why: why.into() }
}

/// A process covered from its start, with 100 bytes.
fn covered() -> Script {
    let mut s = Script::new();
    agent(&mut s, 1, Covered, 0, "");
    s.tag("a").alloc(0x1000, 100);
    s
}

#[test]
fn a_window_is_told_and_leaves_the_sums_in_doubt() {
    let mut s = covered();
    agent(&mut s, 500, Paused, 0, "paused by the program");
    assert_eq!(coverage(&s).blind_total_ns(800), 300, "it lasts");
    expect(&s, &["tracked 100 = direct:a 100", "flags paused partial"]);
    agent(&mut s, 700, Blocked, 39, "nsys");
    agent(&mut s, 900, Late, 0, "");
    let told = [window(500, Some(700), "paused by the program"), window(700, Some(900), "nsys held CUPTI")];
    assert_eq!(coverage(&s).blind, told);
    assert_eq!((coverage(&s).blind_count, coverage(&s).blind_total_ns(5000)), (2, 400));
    // Not late: memory from before the window was seen.
    expect(&s, &["tracked 100 = direct:a 100", "flags partial"]);
    // An address that is allocated again must have been freed.
    s.tag("b").alloc(0x1000, 30);
    expect(&s, &["tracked 30 = direct:b 30", "flags partial"]);
    // A resync does not help: the agent does not know the changes either.
    let row = s.seq;
    s.resync(1, |s| {
        s.tag("b")
            .restate(row, Body::AllocEnd { address: 0x1000, bytes: 30, pool: 0, took_us: 0, memory: DEV });
    });
    expect(&s, &["tracked 30 = direct:b 30", "flags partial"]);
}

#[test]
fn what_is_said_again_counts_once() {
    let mut s = covered();
    for _ in 0..3 {
        for (time_ns, state) in [(1, Covered), (500, Paused), (700, Late)] {
            let stamp = Stamp { time_ns, ..s.stamp };
            s.push(stamp, Body::Agent { result: 0, state, detail: "" });
        }
    }
    assert_eq!(
        (coverage(&s).blind_count, coverage(&s).blind_total_ns(9999), coverage(&s).blind.len()),
        (1, 200, 1)
    );
}

#[test]
fn who_saw_nothing_before_is_late_and_not_in_doubt() {
    let mut s = Script::new();
    agent(&mut s, 10, Blocked, 15, "libcupti and the driver are incompatible");
    agent(&mut s, 400, Late, 0, "");
    s.tag("a").alloc(0x1000, 100);
    expect(&s, &["tracked 100 = direct:a 100", "flags late"]);
    let told = window(10, Some(400), "libcupti and the driver are incompatible");
    assert_eq!(coverage(&s).blind, [told]);
}

#[test]
fn free_whose_return_was_not_seen_is_over_after_the_resync() {
    let mut s = covered();
    s.begin(0x1000);
    agent(&mut s, 500, Paused, 0, "");
    agent(&mut s, 700, Late, 0, "");
    expect(&s, &["tracked 100 = direct:a 100", "flags partial"]);
    s.resync(0, |_| {});
    expect(&s, &["tracked 0 = 0", "flags partial"]);
}

#[test]
fn many_windows_are_few_lines() {
    let mut s = covered();
    for turn in 0..100 {
        let from_ns = 1000 + turn * 100;
        agent(&mut s, from_ns, Paused, 0, "");
        agent(&mut s, from_ns + 1 + turn / 2, Late, 0, "");
    }
    let coverage = coverage(&s);
    assert_eq!((coverage.blind_count, coverage.blind.len()), (100, 32));
    assert_eq!(coverage.blind_total_ns(0), (0..100).map(|turn| 1 + turn / 2).sum::<u64>());
    assert!(coverage.blind.is_sorted_by_key(|window| window.from_ns));
    assert!(
        coverage.blind.iter().any(|window| window.to_ns == Some(window.from_ns + 50)),
        "the long ones stay"
    );
}

#[test]
fn the_end_of_the_process_ends_its_window() {
    let mut s = covered();
    agent(&mut s, 500, Blocked, 0, "CUPTI was finalized by another client");
    s.at(900).host_as(KEY.pid, Body::ProcessGone { start_ticks: KEY.start_ticks, status: Reading::of(0) });
    assert_eq!((coverage(&s).blind[0].to_ns, coverage(&s).blind_total_ns(5000)), (Some(900), 400));
}
