//! Every order of steps, up to a number of switches between threads that loom is told (LOOM_MAX_PREEMPTIONS).
#![cfg(loom)]
#![allow(missing_docs)]

use gpumem_races::memfd::{AtomicU64, Shared};
use gpumem_races::names::Names;
use gpumem_races::ring::{Ring, Row};
use loom::thread;
use std::sync::atomic::Ordering::*;

fn leaked<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

fn row(seq: u64) -> Row {
    std::array::from_fn(|word| if word == 0 { seq } else { seq * 100 + word as u64 })
}

/// As core.rs makes a record: a lower bound of the number is there before the number is taken, and goes when the record is there.
fn record(ring: &Ring, making: &AtomicU64, bound: &mut u64) -> u64 {
    making.store(*bound, Release);
    let seq = ring.take();
    *bound = seq + 1;
    ring.put(&row(seq));
    making.store(0, Release);
    seq
}

/// As drain.rs takes them: a number without a record is lost once no thread is at a number up to the head.
fn drain(ring: &Ring, makers: &[&AtomicU64], taken: &mut u64, seen: &mut Vec<u64>) {
    let head = ring.head();
    while *taken < head {
        let seq = *taken + 1;
        let found = ring.get(seq).or_else(|| {
            let is_at_work = |making: &&AtomicU64| (1..=head).contains(&making.load(Acquire));
            while makers.iter().any(is_at_work) {
                thread::yield_now();
            }
            ring.get(seq)
        });
        if let Some(found) = found {
            assert_eq!(found, row(seq), "a record of one writer, whole");
            seen.push(seq);
        }
        *taken = seq;
    }
    ring.set_sent(*taken);
}

/// Two writers and the sender, on a ring of so many slots: each number is read once, or counted as lost.
fn ring_of(slots: usize, each: u64) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(2));
    model.check(move || {
        let ring = leaked(Ring::new(&Shared::new(slots, 64)));
        let making: [&'static AtomicU64; 2] = [leaked(AtomicU64::new(0)), leaked(AtomicU64::new(0))];
        let writers = making.map(|making| {
            thread::spawn(move || {
                let mut bound = 1;
                for _ in 0..each {
                    record(ring, making, &mut bound);
                }
            })
        });
        let (mut taken, mut seen) = (0, Vec::new());
        drain(ring, &making, &mut taken, &mut seen);
        writers.into_iter().for_each(|writer| writer.join().expect("no panic"));
        drain(ring, &making, &mut taken, &mut seen);
        assert_eq!((taken, ring.head()), (2 * each, 2 * each));
        assert_eq!(seen.len() as u64 + ring.lost(), 2 * each, "nothing is lost without being counted");
        assert!(seen.is_sorted(), "in their order");
    });
}

#[test]
fn records_are_whole_in_order_and_counted() {
    ring_of(2, 1);
}

#[test]
fn a_full_ring_loses_and_counts() {
    ring_of(1, 1);
}

#[test]
fn a_ring_that_wraps_gives_no_old_record() {
    ring_of(2, 2);
}

/// Two threads open the same scope, and one inside of it, at the same time; the sender reads meanwhile.
#[test]
fn a_name_has_one_number_and_a_whole_frame() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(2));
    model.check(|| {
        let names = leaked(Names::new(&Shared::new(1, 512)).expect("memory"));
        let openers = ["b", "c"].map(|inner| {
            thread::spawn(move || {
                let outer = names.intern(0, b"a");
                let tag = names.intern(outer, inner.as_bytes());
                assert_eq!(names.path(tag), Some(format!("a/{inner}").as_bytes()), "its own path at once");
                outer
            })
        });
        let mut out = Vec::with_capacity(512);
        let end = names.end();
        assert_eq!(names.copy(0, end, &mut out), end, "what is below the end is finished");
        let [first, second] = openers.map(|opener| opener.join().expect("no panic"));
        assert_eq!(first, second, "one number");
        let text = |tag| String::from_utf8_lossy(names.path(tag).unwrap_or_default()).into_owned();
        assert_eq!(text(first), "a");
        assert_eq!(names.refused.load(Relaxed), 0);
        out.clear();
        let end = names.end();
        assert_eq!(names.copy(0, end, &mut out), end);
        let whole = gpumem_wire::frame::records(&out).filter(|record| matches!(record, Ok(Ok(_)))).count();
        assert!((3..=4).contains(&whole), "a, a/b, a/c, and perhaps a again: {whole}");
    });
}
