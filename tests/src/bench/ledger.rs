//! Speed of the ledger in steady state: 1 million live rows, 1,000 tags, and pairs of a free of a random row and an allocation.
//! The working sets are far larger than the caches (a map of 1 million rows is 84 MB), so both the ledger and its floor mostly
//! wait for memory.
//!
//! The floor is the minimum that keeps sums by tag: a map from address to bytes and tag, with the ledger's hasher, and one sum
//! for each tag, with the same decoded events.

use super::rounds::{Contestant, Per, print_table};
use super::traffic::{Floor, ROWS, Stream, TAGS, Traffic, packets, tag_name};
use gpumem_ledger::{Class, Ledger, Origin, PRELOADED, ProcessKey};
use gpumem_wire::{Body, Record, Stamp, frame};
use std::collections::HashMap;
use std::hint::black_box;

const PAIRS_PER_ROUND: usize = 100_000;
const ROUNDS: usize = 24;
const AGENT: Origin = Origin::Process(ProcessKey { pid: 4711, start_ticks: 1 });

// The three contestants are not inlined, so that a profile separates them.

#[inline(never)]
fn replay(floor: &mut Floor, events: &[Record<'_>]) {
    events.iter().for_each(|event| floor.apply(event));
}

#[inline(never)]
fn observe(ledger: &mut Ledger, events: &[Record<'_>]) {
    for events in events.chunks(PRELOADED) {
        ledger.preload(AGENT, events.iter());
        events.iter().for_each(|event| ledger.observe(AGENT, event));
    }
}

#[inline(never)]
fn observe_packets(ledger: &mut Ledger, packets: &[u8]) {
    let mut frames = frame::records(packets);
    let mut records = Vec::with_capacity(PRELOADED);
    loop {
        let next = frames.by_ref().take(PRELOADED);
        records.extend(next.map(|record| record.expect("whole frames").expect("known kinds")));
        if records.is_empty() {
            break;
        }
        observe(ledger, &records);
        records.clear();
    }
}

/// Checks that the ledger's sums are the floor's, by tag and in total, and that no event was odd.
fn check(ledger: &Ledger, floor: &Floor, segment: Option<u64>) {
    let snapshot = ledger.snapshot();
    let process = &snapshot.processes[0];
    let account = &process.accounts[0];
    assert_eq!(process.odd, Default::default());
    assert_eq!(process.coverage.lost, 0);
    let mut sums = vec![0; floor.sums.len()];
    let ids: HashMap<String, usize> = (1..=TAGS).map(|tag| (tag_name(tag), tag as usize)).collect();
    let mut idle = 0;
    for (cell, amount) in process.cells.iter().zip(&account.amounts) {
        match (&cell.tag, cell.class) {
            (_, Class::PoolIdle) => idle += amount,
            // Unknown names, and bytes without a name, must be 0.
            (tag, _) => sums[tag.as_deref().and_then(|tag| ids.get(tag).copied()).unwrap_or(0)] += amount,
        }
    }
    assert_eq!(sums, floor.sums);
    let live: i64 = floor.sums.iter().sum();
    assert_eq!(account.tracked_bytes, live + idle);
    assert_eq!(account.tracked_bytes, segment.map_or(live, |bytes| bytes as i64));
}

fn measure(stream: Stream, title: &str) {
    let mut traffic = Traffic::new(stream, ROWS, TAGS);
    let segment = (stream == Stream::Blocks).then(|| traffic.segment_bytes());
    let mut floor = Floor::new();
    let (mut decoded, mut packed) = (Ledger::new(), Ledger::new());
    for ledger in [&mut decoded, &mut packed] {
        for tag in 1..=TAGS {
            let stamp = Stamp { tag, ..Stamp::default() };
            ledger.observe(AGENT, &Record { stamp, body: Body::Tag { path: &tag_name(tag) } });
        }
    }
    let events = traffic.fill();
    replay(&mut floor, &events);
    observe(&mut decoded, &events);
    observe(&mut packed, &events);
    drop(events);

    let mut times =
        ["ledger, decoded events", "ledger, from packet bytes", "floor, decoded events"].map(Contestant::new);
    for round in 0..ROUNDS {
        let events = traffic.round(PAIRS_PER_ROUND);
        let bytes = packets(&events);
        for turn in 0..times.len() {
            let turn = (turn + round) % times.len(); // the first one finds the events in no cache
            times[turn].round(events.len(), || match turn {
                0 => observe(&mut decoded, black_box(&events)),
                1 => observe_packets(&mut packed, black_box(&bytes)),
                _ => replay(&mut floor, black_box(&events)),
            });
        }
    }
    times.iter_mut().for_each(Contestant::forget_warm_up);
    let [decoded_times, packed_times, floor_times] = &times;
    print_table(title, Per::Event, &[decoded_times, packed_times, floor_times]);

    for ledger in [&decoded, &packed] {
        check(ledger, &floor, segment);
    }
    // The rows must be the same: freeing the floor's rows must find each row and leave none.
    assert_eq!(floor.rows.len() as u64, ROWS);
    let mut events = Vec::new();
    let live: Vec<u64> = floor.rows.keys().copied().collect();
    live.into_iter().for_each(|address| traffic.free(address, &mut events));
    replay(&mut floor, &events);
    observe(&mut decoded, &events);
    observe(&mut packed, &events);
    for ledger in [&decoded, &packed] {
        check(ledger, &floor, segment);
    }
    assert!(floor.sums.iter().all(|&sum| sum == 0));
}

/// Runs both streams.
pub fn run() {
    measure(Stream::Driver, "driver allocations: FreeBegin, FreeEnd, AllocEnd");
    measure(Stream::Blocks, "framework blocks: BlockFree, BlockAlloc in one pool with one segment");
    println!(
        "end states checked: every sum per tag equals the floor's, the same rows are live, nothing was odd"
    );
}
