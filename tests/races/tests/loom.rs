//! Explores every interleaving up to a number of thread switches (LOOM_MAX_PREEMPTIONS).
#![cfg(loom)]

use gpumem_races::memfd::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Shared};
use gpumem_races::names::Names;
use gpumem_races::ring::{Made, Ring, Row};
use gpumem_races::table::{RecordInProgress, SlotTable, TableSlot};
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicBool;
use loom::thread;
use std::sync::atomic::Ordering::*;

fn leaked<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

fn row(seq: u64) -> Row {
    std::array::from_fn(|word| if word == 0 { seq } else { seq * 100 + word as u64 })
}

/// A thread's state, as in threads.rs.
#[derive(Default)]
struct Seat {
    id: AtomicU32,
    making: RecordInProgress,
    busy: AtomicU32,
    /// Open scopes. Only the thread itself accesses them.
    depth: UnsafeCell<usize>,
}

// SAFETY: loom checks the accesses.
unsafe impl Sync for Seat {}

impl TableSlot for Seat {
    fn id(&self) -> &AtomicU32 {
        &self.id
    }
    fn making(&self) -> &RecordInProgress {
        &self.making
    }
    fn begin(&self) {
        self.busy.store(0, Relaxed);
        // SAFETY: as above.
        self.depth.with_mut(|depth| unsafe { *depth = 0 });
    }
    fn end(&self) {
        let _ = self.busy.load(Acquire);
    }
}

type Seats<const MOST: usize> = SlotTable<Seat, MOST>;

fn seats<const MOST: usize>() -> &'static Seats<MOST> {
    let table = (0..MOST).map(|_| Seat::default()).collect::<Vec<_>>().leak();
    leaked(SlotTable {
        table: AtomicPtr::new(table.as_mut_ptr()),
        used: AtomicUsize::new(0),
        next: AtomicUsize::new(0),
        refused: AtomicU64::new(0),
    })
}

/// Makes a record inside a guard, as record/recorder.rs does.
fn record(ring: &Ring, seat: &Seat) {
    seat.busy.store(1, Relaxed);
    let seq = seat.making.begin(ring);
    ring.put(&row(seq));
    seat.making.end();
    seat.busy.store(0, Release);
}

/// Drains the records, as drain.rs does.
fn drain<const MOST: usize>(ring: &Ring, seats: &Seats<MOST>, taken: &mut u64, seen: &mut Vec<u64>) {
    let (head, mut quiet) = (ring.head(), 0);
    let wait = |_| {
        thread::yield_now();
        true
    };
    while *taken < head {
        let seq = *taken + 1;
        match ring.made(seq, head, &mut quiet, |until| seats.quiesce(until, wait)) {
            Made::Unfinished => unreachable!("it waits as long as it takes"),
            Made::Record(found) => {
                assert_eq!(found, row(seq), "a record of one writer, whole");
                seen.push(seq);
            }
            Made::Lost => {}
        }
        *taken = seq;
    }
    ring.set_sent(*taken);
}

/// Two writers and the sender, on a ring with the given number of slots: each number is read once, or counted as lost.
fn ring_of(slots: usize, each: u64) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(2));
    model.check(move || {
        let ring = leaked(Ring::new(&Shared::new(slots, 64)));
        let seats = seats::<2>();
        let writers = [1, 2].map(|id| {
            thread::spawn(move || {
                let seat = seats.claim(id).expect("a place");
                for _ in 0..each {
                    record(ring, seat);
                }
            })
        });
        let (mut taken, mut seen) = (0, Vec::new());
        drain(ring, seats, &mut taken, &mut seen);
        writers.into_iter().for_each(|writer| writer.join().expect("no panic"));
        drain(ring, seats, &mut taken, &mut seen);
        assert_eq!((taken, ring.head()), (2 * each, 2 * each));
        assert_eq!(seen.len() as u64 + ring.lost(), 2 * each, "nothing is lost without being counted");
        assert!(seen.is_sorted(), "in their order");
    });
}

#[test]
fn records_are_complete_ordered_and_counted() {
    ring_of(2, 1);
}

#[test]
fn full_ring_drops_and_counts_records() {
    ring_of(1, 1);
}

#[test]
fn wrapped_ring_returns_no_old_record() {
    ring_of(2, 2);
}

/// Two threads, one slot: the second thread gets it once the first has ended and the sender has noticed. Records
/// drained meanwhile are complete, none of the first thread's remain, and a thread without a slot records nothing.
#[test]
fn slot_is_reused_only_after_its_thread_has_ended() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(2));
    model.check(|| {
        let (ring, seats) = (leaked(Ring::new(&Shared::new(2, 64))), seats::<1>());
        // Simulates the kernel's answer, which is ordered after the thread's end.
        let ended: &'static [AtomicBool; 2] = leaked(Default::default());
        let is_gone = |id: u32| ended[id as usize - 1].load(Acquire);
        let threads = [1_u32, 2].map(|id| {
            thread::spawn(move || {
                let seat = seats.claim(id);
                if let Some(seat) = seat {
                    // SAFETY: loom checks the accesses.
                    seat.depth.with_mut(|depth| unsafe {
                        assert_eq!(*depth, 0, "no scope of the last one's is open");
                        *depth += 1;
                    });
                    record(ring, seat);
                    assert_eq!(seat.id.load(Relaxed), id, "still its own");
                }
                ended[id as usize - 1].store(true, Release);
                u64::from(seat.is_some())
            })
        });
        let (mut taken, mut seen) = (0, Vec::new());
        for _ in 0..2 {
            seats.sweep(is_gone);
            drain(ring, seats, &mut taken, &mut seen);
        }
        let placed: u64 = threads.into_iter().map(|thread| thread.join().expect("no panic")).sum();
        drain(ring, seats, &mut taken, &mut seen);
        assert_eq!((taken, seen.len() as u64, ring.lost()), (placed, placed, 0));
        assert_eq!(placed + seats.refused.load(Relaxed), 2, "who found no place is counted");
        seats.sweep(is_gone);
        assert!(seats.all().iter().all(|seat| seat.id.load(Relaxed) == 0), "all are free again");
    });
}

/// A thread that starts during a sweep reuses a place that is already free, and takes no new one.
#[test]
fn thread_that_starts_during_a_sweep_takes_a_free_slot() {
    loom::model(|| {
        let seats = seats::<8>();
        assert!((1..=4).all(|id| seats.claim(id).is_some()));
        let coming = std::cell::Cell::new(5);
        seats.sweep(|_| {
            if coming.get() < 7 && seats.all()[0].id.load(Relaxed) != 1 {
                seats.claim(coming.replace(coming.get() + 1)).expect("a place");
            }
            true
        });
        let ids = || seats.all().iter().map(|seat| seat.id.load(Relaxed)).collect::<Vec<_>>();
        assert_eq!(ids(), [5, 6, 0, 0], "none beyond the four");
        seats.claim(9).expect("a place");
        seats.claim(10).expect("a place");
        assert_eq!(ids(), [5, 6, 9, 10]);
    });
}

/// The slot is free again, and the reserved sequence number counts as lost.
#[test]
fn thread_that_ends_during_a_record_loses_only_that_record() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(2));
    model.check(|| {
        let (ring, seats) = (leaked(Ring::new(&Shared::new(4, 64))), seats::<2>());
        let ended: &'static [AtomicBool; 2] = leaked(Default::default());
        let is_gone = |id: u32| ended[id as usize - 1].load(Acquire);
        let threads = [1_u32, 2].map(|id| {
            thread::spawn(move || {
                let seat = seats.claim(id).expect("a place");
                if id == 1 {
                    record(ring, seat);
                } else {
                    seat.making.begin(ring);
                }
                ended[id as usize - 1].store(true, Release);
            })
        });
        let (mut taken, mut seen) = (0, Vec::new());
        let mut turn = || {
            seats.sweep(is_gone);
            let (head, mut quiet) = (ring.head(), 0);
            while taken < head {
                match ring.made(taken + 1, head, &mut quiet, |until| seats.quiesce(until, |_| false)) {
                    Made::Unfinished => break, // a later turn knows more
                    Made::Record(found) => seen.push(found[0]),
                    Made::Lost => {}
                }
                taken += 1;
            }
        };
        turn();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        turn();
        assert_eq!((taken, seen.len()), (2, 1), "{seen:?}");
    });
}

/// Two threads open the same scope and one inside it at the same time, while the sender reads.
#[test]
fn concurrent_scopes_intern_a_name_once_with_a_complete_frame() {
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
        assert_eq!(names.copy(0, end, &mut out), end, "every frame below the end is complete");
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
