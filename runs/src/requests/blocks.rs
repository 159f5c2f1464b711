//! The single blocks of a stored run: a ledger books the requests that were kept with it.

use super::read::{Damaged, read};
use crate::builder::{RunBuilder, Sink};
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::fields::Field;
use gpumem_model::run::{Cell, Device, Run};
use gpumem_model::window::{Window, WindowKind};
use gpumem_wire::{Body, Flags, MemoryKind, Phase, Record, Stamp};
use std::collections::{BTreeMap, HashMap};

/// Adds the blocks of PyTorch's allocator to the devices of a run, those of `window` if there is one. They come from the stream that
/// was kept with the run.
///
/// # Errors
/// [`Damaged`]; the blocks of the part before it have been added.
pub fn add_blocks<'a>(
    run: &mut Run,
    pieces: impl IntoIterator<Item = &'a [u8]>,
    window: Option<&Window>,
) -> Result<(), Damaged> {
    let key = ProcessKey { pid: run.process.pid, start_ticks: run.process.start_ticks };
    let until_ns = window.map_or(u64::MAX, |window| window.to_ns);
    let builder = RunBuilder::new(run.source.clone()).with_blocks();
    let mut booking = Booking { until_ns, ..Booking::new(builder) };
    let result = read(pieces, key, &mut booking);
    let from_ns = window.filter(|window| window.part != WindowKind::At).map_or(0, |window| window.from_ns);
    // The blocks of the first state were allocated at an unknown time before it.
    let from_ns = from_ns.max(booking.state_ns);
    let shown = Window { part: WindowKind::Between, from_ns, to_ns: until_ns, exact: true };
    for booked in booking.sink.runs(false) {
        // The run may have been cut to one of several devices.
        let is_only = (run.devices.len(), booked.devices.len()) == (1, 1);
        for mut device in booked.devices {
            let is_same = |own: &Device| is_only || has_pool_of(own, &device);
            let Some(at) = run.devices.iter().position(is_same) else { continue };
            let blocks = &mut device.details.blocks;
            blocks.clip(&shown);
            // Only cells of these blocks are added to the run.
            let mut cells: BTreeMap<u32, u32> = blocks.blocks.iter().map(|block| (block.cell, 0)).collect();
            let used: Vec<Cell> =
                cells.keys().filter_map(|&cell| booked.cells.get(cell as usize).cloned()).collect();
            cells.values_mut().zip(run.merge_cells(&used)).for_each(|(to, place)| *to = place);
            blocks.remap(&|cell| cells.get(&cell).copied());
            run.devices[at].details.blocks = std::mem::take(blocks);
        }
    }
    result
}

fn has_pool_of(one: &Device, other: &Device) -> bool {
    let pools = &other.details.pools;
    one.details.pools.iter().any(|pool| pools.iter().any(|other| other.id == pool.id))
}

/// Reads a stream as [`read`] does, and passes numbered records, which a ledger can book.
///
/// # Errors
/// [`Damaged`]; the records of the part before it have been passed.
pub fn read_booked<'a>(
    pieces: impl IntoIterator<Item = &'a [u8]>,
    key: ProcessKey,
    sink: &mut impl Sink,
) -> Result<(), Damaged> {
    read(pieces, key, &mut Booking::new(sink))
}

/// Passes the records of a stream to a ledger as if they were those of a process. The stream has no driver allocations, so the
/// segments of the pools stand for them.
struct Booking<S> {
    sink: S,
    /// Time in ns of the last record that is booked.
    until_ns: u64,
    is_over: bool,
    /// Time in ns of the first state.
    state_ns: u64,
    /// Number of the last record.
    seq: u64,
    /// Numbers of the records that made the blocks, by address.
    blocks: HashMap<u64, u64>,
    segments: BTreeMap<u64, u64>,
    /// Devices of the pools.
    devices: HashMap<u64, u8>,
}

impl<S: Sink> Booking<S> {
    fn new(sink: S) -> Self {
        Booking {
            sink,
            until_ns: u64::MAX,
            is_over: false,
            state_ns: 0,
            seq: 0,
            blocks: HashMap::new(),
            segments: BTreeMap::new(),
            devices: HashMap::new(),
        }
    }

    /// Books a record as the next one. Returns its number.
    fn book(&mut self, origin: Origin, stamp: Stamp, body: Body<'_>) -> u64 {
        self.seq += 1;
        let stamp = Stamp { seq: self.seq, ..stamp };
        self.sink.observe(origin, &Record { stamp, body });
        self.seq
    }

    fn add_segment(&mut self, origin: Origin, stamp: Stamp, (address, bytes): (u64, u64), pool: u64) {
        self.remove_segments(origin, stamp, address, 1);
        self.segments.insert(address, bytes);
        let memory = MemoryKind::Device;
        self.book(origin, stamp, Body::AllocEnd { address, bytes, pool, took_us: 0, memory });
    }

    fn remove_segments(&mut self, origin: Origin, stamp: Stamp, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes.max(1));
        while let Some((&gone, _)) = self.segments.range(address..end).next() {
            self.segments.remove(&gone);
            let begin_seq = self.book(origin, stamp, Body::FreeBegin { address: gone });
            self.book(origin, stamp, Body::FreeEnd { begin_seq, result: 0 });
        }
    }
}

impl<S: Sink> Sink for Booking<S> {
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        let Record { stamp, body } = *record;
        let flags = Flags(stamp.flags.0 & !Flags::RESTATED.0);
        if let Body::Tag { .. } | Body::Hello { .. } = body {
            self.sink.observe(origin, &Record { stamp: Stamp { flags, seq: 0, ..stamp }, body });
            return;
        }
        self.is_over |= stamp.time_ns > self.until_ns;
        if self.is_over {
            return;
        }
        let is_state = stamp.flags.has(Flags::RESTATED);
        if is_state {
            self.state_ns = self.state_ns.max(stamp.time_ns);
        }
        let device = |pool: u64| self.devices.get(&pool).copied().unwrap_or(stamp.device);
        let on = |pool: u64| Stamp { device: device(pool), flags, ..stamp };
        match body {
            Body::PoolCreate { pool, .. } => {
                self.devices.insert(pool, stamp.device);
                self.book(origin, Stamp { flags, ..stamp }, body);
            }
            Body::SegmentAdd { address, bytes, pool } => {
                self.add_segment(origin, on(pool), (address, bytes), pool)
            }
            Body::SegmentRemove { address, bytes, pool } => {
                self.remove_segments(origin, on(pool), address, bytes)
            }
            Body::BlockAlloc { address, bytes, pool, use_as: (role, phase) } if is_state => {
                // The process did not enter this phase at the time of the state.
                let (stamp, use_as) = (on(pool), (role, Phase::Unknown));
                let block_seq = self.book(origin, stamp, Body::BlockAlloc { address, bytes, pool, use_as });
                self.blocks.insert(address, block_seq);
                let use_as = (role, phase);
                self.book(origin, stamp, Body::Retag { address, block_seq, pool, use_as });
            }
            Body::BlockAlloc { address, pool, .. } => {
                let seq = self.book(origin, on(pool), body);
                self.blocks.insert(address, seq);
            }
            Body::Retag { address, pool, use_as, .. } => {
                if let Some(&block_seq) = self.blocks.get(&address) {
                    self.book(origin, on(pool), Body::Retag { address, block_seq, pool, use_as });
                }
            }
            Body::BlockFree { pool, .. } => drop(self.book(origin, on(pool), body)),
            Body::PhaseBegin { .. } | Body::Step { .. } => {
                self.book(origin, Stamp { flags, ..stamp }, body);
            }
            _ => {}
        }
    }
}
