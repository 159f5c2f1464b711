//! Writes the stream of one process.

use super::entry::{Operation, POOL_NAME, Piece, TICK_NS, allocator_settings, flags};
use crate::varint::{put, put_distance, put_signed, put_size};
use foldhash::{HashMap, HashSet};
use gpumem_wire::{Body, Flags, FreeState, Phase, PoolOwner, Request, Role, Stamp};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Minimum number of bytes after which a piece begins with the state again. Beyond it, states take at most a fifth of the stream.
const LEAST_BETWEEN_STATES: usize = 1 << 20;
const TIMES_STATE: usize = 4;
/// Maximum number of bytes that wait to be taken. Beyond it, they are dropped, and the stream begins anew with the state. If the
/// state alone is larger, the stream ends.
const MAX_WAITING: usize = if cfg!(test) { 1 << 20 } else { 32 << 20 };
/// Maximum number of remembered blocks, segments, mappings and names. Beyond it, the stream ends.
const MAX_ENTRIES: usize = if cfg!(test) { 10_000 } else { 1_000_000 };
/// Memory in bytes of an entry of a map, on average.
const ENTRY_BYTES: usize = 96;

/// Which part of a stream is kept: the newest entries, at least those of `time_ns`, but not more than about `bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepLimits {
    /// Age in ns of the entries that are kept.
    pub time_ns: u64,
    /// Size of the stream in bytes.
    pub bytes: u64,
}

/// The requests of one process: takes its records and makes the pieces of its stream.
#[derive(Debug, Default)]
pub struct RequestLog {
    program: Program,
    out: Encoder,
    /// Number of the last ordered record; 0 before the first.
    last_seq: u64,
    /// Whether the state is being restated.
    is_restating: bool,
    /// Whether records are missing, so that nothing is written until the state has been restated.
    is_broken: bool,
    /// Whether the stream has ended for good, because the process has more than the log may remember.
    has_ended: bool,
    /// Number of the next piece.
    next: u64,
    /// The kept pieces that begin with the state: number, time of the first entry in ns, bytes of the pieces before it.
    states: VecDeque<(u64, u64, u64)>,
    /// Bytes of all pieces so far.
    written: u64,
    time_ns: u64,
}

/// What a process has at a time.
#[derive(Debug, Default)]
struct Program {
    instance: u16,
    settings: String,
    tags: HashMap<u32, Box<str>>,
    /// Length of the texts of `tags` in bytes.
    tag_bytes: usize,
    /// Pools of PyTorch's allocator, with their devices.
    pools: BTreeMap<u64, u8>,
    /// Addresses at which memory is mapped.
    mapped: BTreeSet<u64>,
    segments: BTreeMap<u64, Segment>,
    blocks: HashMap<u64, Block>,
    /// Bytes that are older than the agent, by device.
    older: BTreeMap<u8, u64>,
    phase: Phase,
}

#[derive(Debug, Clone, Copy)]
struct Segment {
    bytes: u64,
    pool: u64,
    is_mapped: bool,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    seq: u64,
    bytes: u64,
    pool: u64,
    tag: u32,
    request: Option<Request>,
    use_as: (Role, Phase),
    is_pending: bool,
}

impl RequestLog {
    /// Takes the next record of the process.
    pub fn observe(&mut self, stamp: &Stamp, body: &Body<'_>) {
        if self.has_ended {
            return;
        }
        self.time_ns = self.time_ns.max(stamp.time_ns);
        let is_restated = stamp.flags.has(Flags::RESTATED);
        if stamp.seq > self.last_seq && !is_restated {
            if self.last_seq > 0 && stamp.seq > self.last_seq + 1 {
                self.lose(stamp.seq - self.last_seq - 1);
            }
            self.last_seq = stamp.seq;
        }
        match *body {
            Body::Lost { count, .. } if count > 0 => self.lose(count),
            Body::ResyncBegin { after_seq, .. } => {
                // Records before the resync did not arrive.
                if self.last_seq > 0 && after_seq > self.last_seq {
                    self.lose(after_seq - self.last_seq);
                }
                if self.is_broken || self.last_seq == 0 {
                    self.last_seq = self.last_seq.max(after_seq);
                    self.program.forget_memory();
                }
                self.is_restating = true;
            }
            Body::ResyncEnd { .. } => {
                self.is_restating = false;
                if std::mem::take(&mut self.is_broken) {
                    self.restart();
                    self.write_state();
                }
            }
            _ => self.apply(stamp, body, is_restated),
        }
    }

    /// Ends the stream for good, and frees its memory.
    pub fn end(&mut self) {
        if self.out.bytes.len() > MAX_WAITING {
            self.restart();
            self.is_broken = false;
        }
        self.lose(1);
        (self.has_ended, self.program) = (true, Program::default());
    }

    /// Returns an estimate of the log's memory in bytes.
    pub fn held_bytes(&self) -> usize {
        self.program.entries() * ENTRY_BYTES + self.program.tag_bytes + self.out.bytes.capacity()
    }

    /// Drops the encoded requests that the writer has not taken. The stream begins anew with the live blocks.
    fn restart(&mut self) {
        self.states.clear();
        self.out = Encoder::default();
    }

    /// Ends the stream, because `count` records are missing. A new one begins when the state has been restated.
    fn lose(&mut self, count: u64) {
        if !std::mem::replace(&mut self.is_broken, true) {
            self.out.begin(Operation::Lost, 0);
            put(&mut self.out.bytes, count);
        }
    }

    /// Applies a record to the state, and writes its entry.
    fn apply(&mut self, stamp: &Stamp, body: &Body<'_>, is_restated: bool) {
        let writes = !self.is_broken && !self.is_restating_at_begin();
        if writes && self.is_unwritten() && self.program.concerns(body) {
            self.write_state();
        }
        // Until the state is restated, memory is unknown.
        if self.is_broken && !self.is_restating && Program::is_memory(body) {
            return;
        }
        if let Body::Hello { instance, .. } = *body
            && instance != self.program.instance
        {
            self.last_seq = 0;
        }
        let out = writes.then_some(&mut self.out);
        let is_new = self.program.apply(stamp, body, out);
        // A restated row that the stream lacks.
        if is_restated && is_new && writes {
            self.lose(1);
        }
        if self.program.entries() > MAX_ENTRIES || self.out.state_bytes > MAX_WAITING {
            self.end();
        } else if self.out.bytes.len() > MAX_WAITING {
            self.restart();
        }
    }

    fn is_unwritten(&self) -> bool {
        self.states.is_empty() && self.out.bytes.is_empty()
    }

    fn is_restating_at_begin(&self) -> bool {
        self.is_restating && self.is_unwritten()
    }

    fn write_state(&mut self) {
        self.program.write(&mut self.out, self.time_ns);
    }

    /// Begins the stream anew with the state, for the next part of a long run.
    pub fn begin_part(&mut self) {
        self.restart();
        if !self.has_ended && !self.is_broken && !self.is_restating {
            self.write_state();
        }
    }

    /// Returns the entries since the last call as a piece.
    pub fn take(&mut self, limits: KeepLimits) -> Option<Piece> {
        if self.out.bytes.is_empty() {
            return None;
        }
        let bytes = std::mem::take(&mut self.out.bytes);
        let number = self.next;
        self.next += 1;
        if bytes[0] == Operation::State as u8 {
            self.states.push_back((number, self.time_ns, self.written));
        }
        self.written += bytes.len() as u64;
        let is_needed = |&(_, time_ns, before): &(u64, u64, u64)| {
            time_ns > self.time_ns.saturating_sub(limits.time_ns) && self.written - before <= limits.bytes
        };
        // Entries before the first state that is new enough are kept, unless the stream is too large.
        while let Some(second) = self.states.get(1)
            && (!is_needed(second) || self.written - self.states[0].2 > limits.bytes)
        {
            self.states.pop_front();
        }
        let first = self.states.front().map_or(number, |(first, ..)| *first);
        let since_state = self.states.back().map_or(0, |(_, _, before)| self.written - before);
        let distance = LEAST_BETWEEN_STATES.max(self.out.state_bytes * TIMES_STATE);
        if since_state > distance as u64 && !self.has_ended && !self.is_broken && !self.is_restating {
            self.write_state();
        }
        Some(Piece { number, first, bytes })
    }
}

impl Program {
    fn forget_memory(&mut self) {
        (self.segments, self.blocks, self.mapped) = Default::default();
    }

    fn entries(&self) -> usize {
        let memory = self.mapped.len() + self.segments.len() + self.blocks.len();
        memory + self.tags.len() + self.pools.len() + self.older.len()
    }

    /// Whether a record is about memory that is allocated or mapped.
    fn is_memory(body: &Body<'_>) -> bool {
        matches!(
            body,
            Body::BlockAlloc { .. }
                | Body::BlockFree { .. }
                | Body::Retag { .. }
                | Body::SegmentAdd { .. }
                | Body::SegmentRemove { .. }
                | Body::VmmMap { .. }
                | Body::VmmUnmap { .. }
        )
    }

    fn concerns(&self, body: &Body<'_>) -> bool {
        match *body {
            Body::BlockAlloc { pool, .. }
            | Body::BlockFree { pool, .. }
            | Body::Retag { pool, .. }
            | Body::SegmentAdd { pool, .. }
            | Body::SegmentRemove { pool, .. } => self.pools.contains_key(&pool),
            Body::Pressure { .. } | Body::Oom { .. } => !self.pools.is_empty(),
            _ => false,
        }
    }

    /// Applies a record, and writes its entry to `out`. Returns whether it is about a row that was not known.
    fn apply(&mut self, stamp: &Stamp, body: &Body<'_>, out: Option<&mut Encoder>) -> bool {
        let device = stamp.device;
        match *body {
            Body::Hello { instance, claims, .. } => {
                if instance != self.instance {
                    *self = Program { instance, ..Program::default() };
                }
                self.settings = allocator_settings(claims).to_owned();
                if let Some(out) = out.filter(|out| out.has_state) {
                    out.program(instance, &self.settings);
                }
            }
            Body::Tag { path } => {
                self.tag_bytes += path.len();
                let before = self.tags.insert(stamp.tag, path.into());
                self.tag_bytes -= before.map_or(0, |before| before.len());
            }
            Body::PoolCreate { pool, owner: PoolOwner::Framework, .. }
                if self.tags.get(&stamp.tag).is_some_and(|name| &**name == POOL_NAME) =>
            {
                let is_new = self.pools.insert(pool, device).is_none();
                if is_new && let Some(out) = out.filter(|out| out.has_state) {
                    out.pool(pool, device);
                }
            }
            Body::VmmMap { address, .. } => drop(self.mapped.insert(address)),
            Body::VmmUnmap { address, .. } => drop(self.mapped.remove(&address)),
            Body::Baseline { bytes } => {
                self.older.insert(device, bytes);
                if let Some(out) = out.filter(|out| out.has_state) {
                    out.older(device, bytes);
                }
            }
            Body::PhaseBegin { phase } => {
                self.phase = phase;
                if let Some(out) = out.filter(|out| out.has_state) {
                    out.phase(phase, stamp.time_ns);
                }
            }
            Body::Step { number } => {
                if let Some(out) = out.filter(|out| out.has_state) {
                    out.step(number, stamp.time_ns);
                }
            }
            _ if self.concerns(body) => return self.apply_memory(stamp, body, out),
            _ => {}
        }
        false
    }

    /// Sets the tag, role and phase of a block, each if it is known. Returns whether one has changed.
    fn retag(&mut self, stamp: &Stamp, address: u64, block_seq: u64, (role, phase): (Role, Phase)) -> bool {
        let Some(block) = self.blocks.get_mut(&address).filter(|block| block.seq == block_seq) else {
            return false;
        };
        let before = (block.tag, block.use_as);
        if stamp.tag != 0 {
            block.tag = stamp.tag;
        }
        if role != Role::Unknown {
            block.use_as.0 = role;
        }
        if phase != Phase::Unknown {
            block.use_as.1 = phase;
        }
        before != (block.tag, block.use_as)
    }

    /// Applies a record about memory of PyTorch's allocator; see [`apply`](Self::apply).
    fn apply_memory(&mut self, stamp: &Stamp, body: &Body<'_>, mut out: Option<&mut Encoder>) -> bool {
        let device = stamp.device;
        match *body {
            Body::SegmentAdd { address, bytes, pool } => {
                let segment = Segment { bytes, pool, is_mapped: self.mapped.contains(&address) };
                if self.segments.contains_key(&address) {
                    return false;
                }
                self.segments.insert(address, segment);
                if let Some(out) = &mut out {
                    out.segment(address, segment, stamp.time_ns);
                }
                return true;
            }
            Body::SegmentRemove { address, bytes, pool } => {
                let end = address.saturating_add(bytes.max(1));
                while let Some((&gone, _)) = self.segments.range(address..end).next() {
                    self.segments.remove(&gone);
                }
                if let Some(out) = &mut out {
                    let segment = Segment { bytes, pool, is_mapped: false };
                    out.memory(Operation::SegmentEnd, 0, address, segment.pool);
                    put_size(&mut out.bytes, bytes);
                    out.time(stamp.time_ns);
                }
            }
            Body::BlockAlloc { address, bytes, pool, use_as } => {
                if self.blocks.get(&address).is_some_and(|block| block.seq == stamp.seq) {
                    return false; // restated, or repeated after a resync
                }
                let request = Request::of(stamp);
                let (seq, tag) = (stamp.seq, stamp.tag);
                let block = Block { seq, bytes, pool, tag, request, use_as, is_pending: false };
                self.blocks.insert(address, block);
                if let Some(out) = &mut out {
                    out.name(stamp.tag, &self.tags);
                    out.allocate(address, &block, stamp.time_ns);
                }
                return true;
            }
            Body::BlockFree { address, pool, state } => {
                let is_pending = state == FreeState::Pending;
                if is_pending {
                    self.blocks.entry(address).and_modify(|block| block.is_pending = true);
                } else {
                    self.blocks.remove(&address);
                }
                if let Some(out) = &mut out {
                    let operation = if is_pending { Operation::FreeLater } else { Operation::Free };
                    out.memory(operation, 0, address, pool);
                    out.time(stamp.time_ns);
                }
            }
            Body::Retag { address, block_seq, pool, use_as } => {
                if self.retag(stamp, address, block_seq, use_as)
                    && let Some(out) = &mut out
                {
                    out.name(stamp.tag, &self.tags);
                    out.memory(Operation::Use, flags::OTHER, address, pool);
                    out.numbers(&[code(use_as).into(), stamp.tag.into()]);
                }
            }
            Body::Pressure { bytes, device_free_bytes } => {
                if let Some(out) = &mut out {
                    out.begin(Operation::Refused, 0);
                    let free = device_free_bytes.0.map_or(0, |free| free.saturating_add(1));
                    out.numbers(&[device.into(), bytes, free]);
                    out.time(stamp.time_ns);
                }
            }
            Body::Oom { bytes, result, .. } => {
                if let Some(out) = &mut out {
                    out.name(stamp.tag, &self.tags);
                    out.begin(Operation::Failed, 0);
                    out.numbers(&[device.into(), stamp.tag.into(), bytes, result.into()]);
                    out.time(stamp.time_ns);
                }
            }
            _ => {}
        }
        false
    }

    fn write(&self, out: &mut Encoder, time_ns: u64) {
        let before = out.bytes.len();
        *out = Encoder { bytes: std::mem::take(&mut out.bytes), has_state: true, ..Encoder::default() };
        out.begin(Operation::State, 0);
        out.time(time_ns);
        out.program(self.instance, &self.settings);
        for (pool, device) in &self.pools {
            out.pool(*pool, *device);
        }
        for (device, bytes) in &self.older {
            out.older(*device, *bytes);
        }
        for (address, segment) in &self.segments {
            out.segment(*address, *segment, time_ns);
        }
        let mut blocks: Vec<_> = self.blocks.iter().collect();
        blocks.sort_unstable_by_key(|(address, _)| **address);
        for (address, block) in blocks {
            out.name(block.tag, &self.tags);
            out.allocate(*address, block, time_ns);
            if block.is_pending {
                out.memory(Operation::FreeLater, 0, *address, block.pool);
                out.time(time_ns);
            }
        }
        out.phase(self.phase, time_ns);
        out.begin(Operation::StateEnd, 0);
        out.state_bytes = out.bytes.len() - before;
    }
}

/// Returns role and phase in one byte.
fn code((role, phase): (Role, Phase)) -> u8 {
    role.to_code() | phase.to_code() << 4
}

/// Writes entries. Remembers the fields of the entry before, from which the next one differs.
#[derive(Debug, Default)]
struct Encoder {
    bytes: Vec<u8>,
    /// Whether the state has been written.
    has_state: bool,
    /// Size in bytes of the last state.
    state_bytes: usize,
    ticks: u64,
    address: u64,
    pool: u64,
    tag: u32,
    place: (u16, u16),
    use_as: (Role, Phase),
    /// Tags whose names have been written since the last state.
    named: HashSet<u32>,
}

impl Encoder {
    fn begin(&mut self, operation: Operation, flags: u8) {
        self.bytes.push(operation as u8 | flags << 4);
    }

    fn numbers(&mut self, numbers: &[u64]) {
        numbers.iter().for_each(|number| put(&mut self.bytes, *number));
    }

    fn text(&mut self, text: &str) {
        put(&mut self.bytes, text.len() as u64);
        self.bytes.extend_from_slice(text.as_bytes());
    }

    fn time(&mut self, time_ns: u64) {
        let ticks = time_ns / TICK_NS;
        put_signed(&mut self.bytes, ticks.wrapping_sub(self.ticks).cast_signed());
        self.ticks = ticks;
    }

    fn memory(&mut self, operation: Operation, flags: u8, address: u64, pool: u64) {
        let is_other_pool = std::mem::replace(&mut self.pool, pool) != pool;
        self.begin(operation, flags | if is_other_pool { flags::POOL } else { 0 });
        if is_other_pool {
            put(&mut self.bytes, pool);
        }
        put_distance(&mut self.bytes, address.wrapping_sub(self.address).cast_signed());
        self.address = address;
    }

    fn program(&mut self, instance: u16, settings: &str) {
        self.begin(Operation::Program, 0);
        put(&mut self.bytes, instance.into());
        self.text(settings);
    }

    fn pool(&mut self, pool: u64, device: u8) {
        self.begin(Operation::Pool, 0);
        self.numbers(&[pool, device.into()]);
    }

    fn older(&mut self, device: u8, bytes: u64) {
        self.begin(Operation::Older, 0);
        self.numbers(&[device.into(), bytes]);
    }

    /// Writes the name of a tag, unless it has been written.
    fn name(&mut self, tag: u32, names: &HashMap<u32, Box<str>>) {
        if let Some(name) = names.get(&tag)
            && self.named.insert(tag)
        {
            self.begin(Operation::Name, 0);
            put(&mut self.bytes, tag.into());
            self.text(name);
        }
    }

    fn segment(&mut self, address: u64, segment: Segment, time_ns: u64) {
        let flags = if segment.is_mapped { flags::OTHER } else { 0 };
        self.memory(Operation::Segment, flags, address, segment.pool);
        put_size(&mut self.bytes, segment.bytes);
        self.time(time_ns);
    }

    fn phase(&mut self, phase: Phase, time_ns: u64) {
        self.begin(Operation::Phase, 0);
        put(&mut self.bytes, phase.to_code().into());
        self.time(time_ns);
    }

    fn step(&mut self, number: u64, time_ns: u64) {
        self.begin(Operation::Phase, flags::OTHER);
        put(&mut self.bytes, number);
        self.time(time_ns);
    }

    fn allocate(&mut self, address: u64, block: &Block, time_ns: u64) {
        if std::mem::replace(&mut self.use_as, block.use_as) != block.use_as {
            self.begin(Operation::Use, 0);
            put(&mut self.bytes, code(block.use_as).into());
        }
        let mut flags = 0;
        if block.tag != self.tag {
            flags |= flags::TAG;
        }
        match block.request {
            Some(request) if (request.stream, request.pool) != self.place => flags |= flags::REQUEST,
            Some(_) => {}
            None => flags |= flags::OTHER,
        }
        self.memory(Operation::Allocate, flags, address, block.pool);
        put_size(&mut self.bytes, block.bytes);
        if flags & flags::TAG != 0 {
            put(&mut self.bytes, block.tag.into());
            self.tag = block.tag;
        }
        if let Some(Request { unused_bytes, stream, pool }) = block.request {
            put(&mut self.bytes, unused_bytes.into());
            if flags & flags::REQUEST != 0 {
                self.numbers(&[stream.into(), pool.into()]);
                self.place = (stream, pool);
            }
        }
        self.time(time_ns);
    }
}
