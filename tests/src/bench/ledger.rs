//! How fast the ledger takes events in steady state: 1 million live rows, 1,000 tags, and pairs of a
//! free of a random row and an allocation. Working sets are far beyond the caches (a map of 1 million
//! rows is 84 MB), so both the ledger and its floor mostly wait for memory.
//!
//! The floor is the least that keeps sums per tag: one map from address to bytes and tag, with the
//! ledger's hasher, and one sum per tag, fed with the same decoded events.

use super::rounds::{Contestant, Per, print_table};
use gpumem_ledger::{Class, Ledger, Origin, ProcessKey};
use gpumem_wire::{Body, FreeState, MemoryKind, Phase, PoolOwner, Record, Role, Stamp, frame};
use std::collections::{HashMap, VecDeque};
use std::hint::black_box;

const ROWS: u64 = 1_000_000;
const TAGS: u32 = 1_000;
const PAIRS_PER_ROUND: usize = 100_000;
const ROUNDS: usize = 24;
const POOL: u64 = 0xb10c;
const AGENT: Origin = Origin::Process(ProcessKey { pid: 4711, start_ticks: 1 });
const BASE: u64 = 0x7f00_0000_0000;
/// Between addresses: no allocation below is larger.
const STRIDE: u64 = 2 << 20;
/// Addresses beside the live ones: one comes back after so many frees.
const SPARE: u64 = 1_000_000;
const SEGMENT_BYTES: u64 = (ROWS + SPARE) * STRIDE;

#[derive(Clone, Copy, PartialEq)]
enum Stream {
    Driver,
    Blocks,
}

/// Makes events; never while the clock runs.
struct Traffic {
    stream: Stream,
    live: Vec<u64>,
    free: VecDeque<u64>,
    seq: u64,
    random: u64,
}

impl Traffic {
    fn new(stream: Stream) -> Self {
        let free = (0..ROWS + SPARE).map(|index| BASE + index * STRIDE).collect();
        Traffic { stream, live: Vec::new(), free, seq: 0, random: 1 }
    }

    /// splitmix64.
    fn random(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % below
    }

    fn record(&mut self, tag: u32, body: Body<'static>) -> Record<'static> {
        self.seq += 1;
        let stamp = Stamp {
            seq: self.seq,
            time_ns: self.seq * 100,
            tag,
            thread: 1,
            context: 1,
            device: 0,
            ..Stamp::default()
        };
        Record { stamp, body }
    }

    fn alloc(&mut self) -> (u64, Record<'static>) {
        let address = self.free.pop_front().expect("there are spare addresses");
        // 512 B to 512 KiB, and every 64th one large enough to be a segment.
        let bytes = if self.random(64) == 0 { STRIDE } else { 512 << self.random(11) };
        let tag = 1 + self.random(u64::from(TAGS)) as u32;
        let body = match self.stream {
            Stream::Driver => {
                Body::AllocEnd { address, bytes, pool: 0, took_us: 0, memory: MemoryKind::Device }
            }
            Stream::Blocks => {
                Body::BlockAlloc { address, bytes, pool: POOL, use_as: (Role::Unknown, Phase::Unknown) }
            }
        };
        (address, self.record(tag, body))
    }

    fn free(&mut self, address: u64, events: &mut Vec<Record<'static>>) {
        self.free.push_back(address);
        match self.stream {
            Stream::Driver => {
                let begin = self.record(0, Body::FreeBegin { address });
                let end = self.record(0, Body::FreeEnd { begin_seq: begin.stamp.seq, result: 0 });
                events.extend([begin, end]);
            }
            Stream::Blocks => {
                let body = Body::BlockFree { address, pool: POOL, state: FreeState::Done };
                events.push(self.record(0, body));
            }
        }
    }

    /// A segment if one is needed, and all the rows.
    fn fill(&mut self) -> Vec<Record<'static>> {
        let mut events = Vec::new();
        if self.stream == Stream::Blocks {
            let pool =
                Body::PoolCreate { pool: POOL, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework };
            events.push(self.record(0, pool));
            let segment = Body::AllocEnd {
                address: BASE,
                bytes: SEGMENT_BYTES,
                pool: POOL,
                took_us: 0,
                memory: MemoryKind::Device,
            };
            events.push(self.record(0, segment));
        }
        for _ in 0..ROWS {
            let (address, event) = self.alloc();
            self.live.push(address);
            events.push(event);
        }
        events
    }

    fn round(&mut self) -> Vec<Record<'static>> {
        let mut events = Vec::new();
        for _ in 0..PAIRS_PER_ROUND {
            let place = self.random(ROWS) as usize;
            self.free(self.live[place], &mut events);
            let (address, event) = self.alloc();
            self.live[place] = address;
            events.push(event);
        }
        events
    }
}

/// The least that any ledger has to do.
struct Floor {
    rows: HashMap<u64, (u64, u32), foldhash::fast::RandomState>,
    sums: Vec<i64>,
}

impl Floor {
    fn apply(&mut self, record: &Record<'_>) {
        match record.body {
            Body::AllocEnd { pool: POOL, .. } => {} // the segment
            Body::AllocEnd { address, bytes, .. } | Body::BlockAlloc { address, bytes, .. } => {
                self.rows.insert(address, (bytes, record.stamp.tag));
                self.sums[record.stamp.tag as usize] += bytes as i64;
            }
            Body::FreeBegin { address } | Body::BlockFree { address, .. } => {
                if let Some((bytes, tag)) = self.rows.remove(&address) {
                    self.sums[tag as usize] -= bytes as i64;
                }
            }
            _ => {}
        }
    }
}

fn packets(events: &[Record<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    events.iter().for_each(|event| event.append_frame(&mut bytes));
    bytes
}

// The three contestants are kept out of line, so that a profile tells them apart.

#[inline(never)]
fn replay(floor: &mut Floor, events: &[Record<'_>]) {
    events.iter().for_each(|event| floor.apply(event));
}

#[inline(never)]
fn observe(ledger: &mut Ledger, events: &[Record<'_>]) {
    events.iter().for_each(|event| ledger.observe(AGENT, event));
}

#[inline(never)]
fn observe_packets(ledger: &mut Ledger, packets: &[u8]) {
    for record in frame::records(packets) {
        let record = record.expect("whole frames").expect("known kinds");
        ledger.observe(AGENT, &record);
    }
}

fn tag_name(tag: u32) -> String {
    format!("model/layer.{tag}")
}

/// The ledger's sums are the floor's, per tag and in total, and nothing was odd.
fn check(ledger: &Ledger, floor: &Floor, stream: Stream) {
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
            // Names that no tag has, and bytes without one, have to be 0.
            (tag, _) => sums[tag.as_deref().and_then(|tag| ids.get(tag).copied()).unwrap_or(0)] += amount,
        }
    }
    assert_eq!(sums, floor.sums);
    let live: i64 = floor.sums.iter().sum();
    assert_eq!(account.tracked_bytes, live + idle);
    assert_eq!(account.tracked_bytes, if stream == Stream::Blocks { SEGMENT_BYTES as i64 } else { live });
}

fn measure(stream: Stream, title: &str) {
    let mut traffic = Traffic::new(stream);
    let mut floor = Floor { rows: HashMap::default(), sums: vec![0; TAGS as usize + 1] };
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
        let events = traffic.round();
        let bytes = packets(&events);
        for turn in 0..times.len() {
            let turn = (turn + round) % times.len(); // who goes first finds the events cold
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
        check(ledger, &floor, stream);
    }
    // The rows are the same ones: freeing what the floor holds leaves nothing, and finds everything.
    assert_eq!(floor.rows.len() as u64, ROWS);
    let mut events = Vec::new();
    let live: Vec<u64> = floor.rows.keys().copied().collect();
    live.into_iter().for_each(|address| traffic.free(address, &mut events));
    replay(&mut floor, &events);
    observe(&mut decoded, &events);
    observe(&mut packed, &events);
    for ledger in [&decoded, &packed] {
        check(ledger, &floor, stream);
    }
    assert!(floor.sums.iter().all(|&sum| sum == 0));
}

/// Both streams.
pub fn run() {
    measure(Stream::Driver, "driver allocations: FreeBegin, FreeEnd, AllocEnd");
    measure(Stream::Blocks, "framework blocks: BlockFree, BlockAlloc in one pool with one segment");
    println!(
        "end states checked: every sum per tag equals the floor's, the same rows are live, nothing was odd"
    );
}
