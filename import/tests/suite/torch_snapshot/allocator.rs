//! A small model of PyTorch's caching allocator: segments, blocks that split and merge, and frees that wait for a stream.
//! It keeps a history with the bytes in use after every entry. Tests compare an imported snapshot with that history.

use super::pickle::{Value, dict};
use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;
const FIRST_ADDRESS: u64 = 0x7f00_0000_0000;

#[derive(Debug, Clone)]
struct Segment {
    bytes: u64,
    is_small: bool,
    /// Address -> block.
    blocks: BTreeMap<u64, Block>,
}

#[derive(Debug, Clone)]
struct Block {
    bytes: u64,
    requested: u64,
    is_pending: bool,
    line: i64,
}

/// Bytes in use after an entry of the history.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sums {
    pub reserved: u64,
    pub allocated: u64,
    pub requested: u64,
}

#[derive(Debug, Default)]
pub struct Allocator {
    segments: BTreeMap<u64, Segment>,
    next: u64,
    pub events: Vec<Value>,
    /// Bytes in use after each event.
    pub sums: Vec<Sums>,
    now: Sums,
    time_us: i64,
}

pub fn frame(file: &str, name: &str, line: i64) -> Value {
    dict([("name", name.into()), ("filename", file.into()), ("line", line.into())])
}

fn frames(line: i64) -> Value {
    let python = "/usr/lib/python3/dist-packages/torch/nn/functional.py";
    Value::List(vec![
        frame("??", "torch::unwind::unwind()", 0),
        frame(python, "linear", 10),
        frame("/home/me/train.py", "forward", line),
        frame("/home/me/train.py", "<module>", 99),
    ])
}

impl Allocator {
    fn say(&mut self, action: &str, address: u64, bytes: u64, line: i64) {
        self.time_us += 10;
        self.events.push(dict([
            ("action", action.into()),
            ("addr", address.into()),
            ("size", bytes.into()),
            ("stream", 0_i64.into()),
            ("time_us", (1_700_000_000_000_000 + self.time_us).into()),
            ("frames", frames(line)),
        ]));
        self.sums.push(self.now);
    }

    /// Returns the first hole that is large enough.
    fn hole(&self, bytes: u64, is_small: bool) -> Option<(u64, u64, u64)> {
        self.segments.iter().filter(|(_, segment)| segment.is_small == is_small).find_map(
            |(&start, segment)| {
                let mut at = start;
                let ends = segment.blocks.iter().map(|(&start, block)| (start, start + block.bytes));
                for (begin, end) in ends.chain([(start + segment.bytes, 0)]) {
                    if begin - at >= bytes {
                        return Some((start, at, begin - at));
                    }
                    at = end;
                }
                None
            },
        )
    }

    pub fn alloc(&mut self, requested: u64, line: i64) -> u64 {
        let rounded = requested.next_multiple_of(512).max(512);
        let is_small = rounded <= MIB;
        if self.hole(rounded, is_small).is_none() {
            let bytes = match rounded {
                ..=MIB => 2 * MIB,
                _ if rounded < 10 * MIB => 20 * MIB,
                _ => rounded.next_multiple_of(2 * MIB),
            };
            let address = FIRST_ADDRESS + self.next;
            self.next += bytes + 64 * MIB;
            self.segments.insert(address, Segment { bytes, is_small, blocks: BTreeMap::new() });
            self.now.reserved += bytes;
            self.say("segment_alloc", address, bytes, line);
        }
        let (segment, address, room) = self.hole(rounded, is_small).expect("there is one now");
        let is_split = if is_small { room - rounded >= 512 } else { room - rounded > MIB };
        let bytes = if is_split { rounded } else { room };
        let block = Block { bytes, requested, is_pending: false, line };
        self.segments.get_mut(&segment).expect("it").blocks.insert(address, block);
        self.now.allocated += bytes;
        self.now.requested += requested;
        self.say("alloc", address, requested, line);
        address
    }

    fn segment_of(&mut self, address: u64) -> &mut Segment {
        self.segments.range_mut(..=address).next_back().expect("a segment").1
    }

    pub fn let_go(&mut self, address: u64) {
        let block = self.segment_of(address).blocks.get_mut(&address).expect("a block");
        block.is_pending = true;
        let requested = block.requested;
        self.say("free_requested", address, requested, 1);
    }

    pub fn complete(&mut self, address: u64) {
        let block = self.segment_of(address).blocks.remove(&address).expect("a block");
        self.now.allocated -= block.bytes;
        self.now.requested -= block.requested;
        self.say("free_completed", address, block.requested, 1);
    }

    pub fn empty_cache(&mut self) {
        let empty: Vec<(u64, u64)> = self
            .segments
            .iter()
            .filter(|(_, segment)| segment.blocks.is_empty())
            .map(|(&address, segment)| (address, segment.bytes))
            .collect();
        for (address, bytes) in empty {
            self.segments.remove(&address);
            self.now.reserved -= bytes;
            self.say("segment_free", address, bytes, 2);
        }
    }

    pub fn now(&self) -> Sums {
        self.now
    }

    /// Returns the bytes of blocks that wait for a stream.
    pub fn pending(&self) -> u64 {
        let blocks = self.segments.values().flat_map(|segment| segment.blocks.values());
        blocks.filter(|block| block.is_pending).map(|block| block.bytes).sum()
    }

    /// Returns the snapshot with the last `entries` of its history.
    pub fn snapshot(&self, entries: usize) -> Value {
        let segments = self.segments.iter().map(|(&address, segment)| {
            let block = |(&address, block): (&u64, &Block)| {
                let state = if block.is_pending { "active_pending_free" } else { "active_allocated" };
                dict([
                    ("address", address.into()),
                    ("size", block.bytes.into()),
                    ("requested_size", block.requested.into()),
                    ("state", state.into()),
                    ("frames", frames(block.line)),
                ])
            };
            let live = segment.blocks.values().filter(|block| !block.is_pending);
            dict([
                ("device", 0_i64.into()),
                ("address", address.into()),
                ("total_size", segment.bytes.into()),
                ("allocated_size", live.map(|block| block.bytes).sum::<u64>().into()),
                ("stream", 0_i64.into()),
                ("segment_type", if segment.is_small { "small" } else { "large" }.into()),
                ("segment_pool_id", Value::Tuple(vec![0_i64.into(), 0_i64.into()])),
                ("is_expandable", false.into()),
                ("blocks", segment.blocks.iter().map(block).collect::<Vec<_>>().into()),
            ])
        });
        let from = self.events.len() - entries.min(self.events.len());
        dict([
            ("segments", segments.collect::<Vec<_>>().into()),
            ("device_traces", vec![Value::List(self.events[from..].to_vec())].into()),
            ("external_annotations", vec![].into()),
        ])
    }
}
