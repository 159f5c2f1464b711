//! Generates allocations and frees in steady state, and keeps the minimal sums for comparison.

use gpumem_wire::{Body, FreeState, MemoryKind, Phase, PoolOwner, Record, Role, Stamp};
use std::collections::{HashMap, VecDeque};

/// Live rows in steady state.
pub const ROWS: u64 = 1_000_000;
/// Number of tags, from 1.
pub const TAGS: u32 = 1_000;
const POOL: u64 = 0xb10c;
const BASE: u64 = 0x7f00_0000_0000;
/// Distance between addresses; no allocation is larger.
const STRIDE: u64 = 2 << 20;

/// Kind of allocations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// FreeBegin, FreeEnd, AllocEnd.
    Driver,
    /// BlockFree, BlockAlloc in one pool with one segment.
    Blocks,
}

/// Generates events; not called while times are measured.
#[derive(Debug)]
pub struct Traffic {
    stream: Stream,
    rows: u64,
    tags: u32,
    live: Vec<u64>,
    free: VecDeque<u64>,
    /// Number of the last record.
    pub seq: u64,
    /// Time of the last record; each is 100 ns after the one before.
    pub time_ns: u64,
    random: u64,
}

impl Traffic {
    /// Makes a generator that keeps this many rows live, with this many tags. There are twice as many addresses, so an address
    /// returns after `rows` frees.
    pub fn new(stream: Stream, rows: u64, tags: u32) -> Self {
        let free = (0..2 * rows).map(|index| BASE + index * STRIDE).collect();
        Traffic { stream, rows, tags, live: Vec::new(), free, seq: 0, time_ns: 0, random: 1 }
    }

    /// Returns a number below `below`, from splitmix64.
    fn random(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % below
    }

    fn record(&mut self, tag: u32, body: Body<'static>) -> Record<'static> {
        self.seq += 1;
        self.time_ns += 100;
        let stamp = Stamp {
            seq: self.seq,
            time_ns: self.time_ns,
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
        // 512 B to 512 KiB; every 64th is large enough to be a segment.
        let bytes = if self.random(64) == 0 { STRIDE } else { 512 << self.random(11) };
        let tag = 1 + self.random(u64::from(self.tags)) as u32;
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

    /// Adds the events that free a row.
    pub fn free(&mut self, address: u64, events: &mut Vec<Record<'static>>) {
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

    /// Returns the size of the only segment of [`Stream::Blocks`].
    pub fn segment_bytes(&self) -> u64 {
        2 * self.rows * STRIDE
    }

    /// Returns the events for all rows, and for the segment if one is needed.
    pub fn fill(&mut self) -> Vec<Record<'static>> {
        let mut events = Vec::new();
        if self.stream == Stream::Blocks {
            let pool =
                Body::PoolCreate { pool: POOL, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework };
            events.push(self.record(0, pool));
            let segment = Body::AllocEnd {
                address: BASE,
                bytes: self.segment_bytes(),
                pool: POOL,
                took_us: 0,
                memory: MemoryKind::Device,
            };
            events.push(self.record(0, segment));
        }
        for _ in 0..self.rows {
            let (address, event) = self.alloc();
            self.live.push(address);
            events.push(event);
        }
        events
    }

    /// Returns frees of random rows, each followed by an allocation.
    pub fn round(&mut self, pairs: usize) -> Vec<Record<'static>> {
        let mut events = Vec::new();
        for _ in 0..pairs {
            let place = self.random(self.rows) as usize;
            self.free(self.live[place], &mut events);
            let (address, event) = self.alloc();
            self.live[place] = address;
            events.push(event);
        }
        events
    }
}

/// The minimum that any ledger has to do.
#[derive(Debug)]
pub struct Floor {
    /// Bytes and tag, by address.
    pub rows: HashMap<u64, (u64, u32), foldhash::fast::RandomState>,
    /// Bytes, by tag.
    pub sums: Vec<i64>,
}

impl Floor {
    /// Makes an empty one.
    pub fn new() -> Self {
        Floor { rows: HashMap::default(), sums: vec![0; TAGS as usize + 1] }
    }

    /// Applies an event.
    #[inline]
    pub fn apply(&mut self, record: &Record<'_>) {
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

/// Returns the events as consecutive frames.
pub fn packets(events: &[Record<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    events.iter().for_each(|event| event.append_frame(&mut bytes));
    bytes
}

/// Returns the path of a tag.
pub fn tag_name(tag: u32) -> String {
    format!("model/layer.{tag}")
}
