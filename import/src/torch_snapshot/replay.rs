//! Converts a snapshot and its history (the allocator's log of allocations and frees) to the records that an agent would have
//! sent: the state at the start of the history, then every entry. If this does not lead to the snapshot's state, corrections
//! follow.

mod settle;

use super::arena::{Arena, NONE, Ref};
use super::heap::{Heap, Live, Piece, block_bytes, rounded};
use super::model::{Action, Block, Event, Snapshot};
use super::stack::{Stacks, part};
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_report::names::TORCH;
use gpumem_runs::builder::Sink;
use gpumem_wire::{
    Body, ClockKind, DeviceIdKind, FrameFormat, FreeState, Layer, LayerState, MAX_TAG_BYTES, MemoryKind,
    OomOutcome, Phase, PoolOwner, Reading, Record, Role, Stamp,
};
use std::collections::HashMap;

/// Key of the process that wrote the snapshot. The file does not contain its pid, so the pid is 0.
const SELF: ProcessKey = ProcessKey { pid: 0, start_ticks: 0 };
/// Time of the records for the state at the start of the history. The clock's anchor states the first entry's real time.
const START_NS: u64 = 1_000_000_000;
/// Maximum number of nested profiler ranges; further ones are ignored.
const MAX_SCOPES: usize = 16;
/// Name of the profiler range of a training step, up to the step's number.
const STEP: &str = "ProfilerStep#";
/// CUDA_ERROR_OUT_OF_MEMORY.
const OUT_OF_MEMORY: u16 = 2;

#[derive(Debug, Default)]
pub(super) struct ReplayTotals {
    /// Number of entries or rows that contradict the allocator's state. They are skipped.
    pub contradictions: u64,
    /// Number of blocks and pieces (of driver memory) that had to be added or removed at the end.
    pub corrected: u64,
    /// Maximum over time of the requested bytes of all devices together.
    pub peak_requested: u64,
    /// Maximum over time of the bytes in blocks of all devices together.
    pub peak_allocated: u64,
    /// Bytes in blocks at the start of the history.
    pub start_bytes: u64,
    /// Duration of the history.
    pub history_ns: u64,
    /// Number and bytes of the blocks without a stack that are live at the end.
    pub unnamed: (u64, u64),
}

#[derive(Debug, Default)]
struct Device<'a> {
    /// History, the oldest entry first.
    events: &'a [Event],
    /// PyTorch's allocator as it was at the present entry of the history.
    heap: Heap,
    /// PyTorch's allocator as it was when the snapshot was made.
    end: Heap,
    /// Size of the block of each history entry in bytes; 0 if unknown.
    sizes: Vec<u64>,
    /// Names of the profiler ranges that are open.
    scopes: Vec<Ref>,
    /// Bytes in live blocks.
    used_bytes: u64,
    /// Bytes that the allocator got from the driver.
    reserved_bytes: u64,
    next_event: usize,
    next_annotation: usize,
}

pub(super) struct Replay<'a> {
    sink: &'a mut dyn Sink,
    arena: &'a Arena,
    snapshot: &'a Snapshot,
    stacks: Stacks,
    tags: HashMap<String, u32>,
    devices: Vec<Device<'a>>,
    seq: u64,
    stacks_sent: u32,
    now_ns: u64,
    base_us: Option<u64>,
    step: Option<u64>,
    requested: u64,
    allocated: u64,
    totals: ReplayTotals,
}

pub(super) fn replay(sink: &mut dyn Sink, arena: &Arena, snapshot: &Snapshot) -> ReplayTotals {
    let mut replay = Replay {
        sink,
        arena,
        snapshot,
        stacks: Stacks::default(),
        tags: HashMap::new(),
        devices: Vec::new(),
        seq: 0,
        stacks_sent: 0,
        now_ns: START_NS,
        base_us: None,
        step: None,
        requested: 0,
        allocated: 0,
        totals: ReplayTotals::default(),
    };
    replay.rewind();
    replay.begin();
    replay.run();
    replay.correct();
    replay.end();
    replay.totals
}

impl Replay<'_> {
    /// Computes the state at the start of the history from the state at its end.
    fn rewind(&mut self) {
        let snapshot = self.snapshot;
        let segments = || snapshot.segments.iter().filter(|segment| !segment.is_host);
        let used =
            segments().map(|segment| segment.device).chain(snapshot.annotations.iter().map(|a| a.device));
        let count = used.map(|device| usize::from(device) + 1).max().unwrap_or(0);
        let traced = snapshot.traces.iter().rposition(|trace| !trace.is_empty()).map_or(0, |last| last + 1);
        self.devices.resize_with(count.max(traced).max(1), Device::default);
        for segment in segments() {
            let end = &mut self.devices[usize::from(segment.device)].end;
            if end.has_room(segment.address, segment.bytes) {
                end.add(segment.address, segment.bytes, segment.is_expandable, segment.is_small);
            } else {
                self.totals.contradictions += 1; // two segments at the same address
            }
        }
        for block in snapshot.blocks.iter().filter(|block| !block.is_host) {
            let end = &mut self.devices[usize::from(block.device)].end;
            let &Block { bytes, requested, is_pending, stream, frames, .. } = block;
            let live = Live { bytes, requested, is_pending, stream, frames, seq: 0 };
            if end.room(block.address, bytes).is_some_and(|(room, _)| bytes <= room) {
                end.blocks.insert(block.address, live);
            } else {
                self.totals.contradictions += 1;
            }
        }
        for (index, device) in self.devices.iter_mut().enumerate() {
            device.events = snapshot.traces.get(index).map(Vec::as_slice).unwrap_or_default();
            device.heap = device.end.clone();
            device.sizes = device.heap.rewind(device.events, &snapshot.settings);
        }
    }

    fn send(&mut self, origin: Origin, stamp: Stamp, body: Body<'_>) {
        self.sink.observe(origin, &Record { stamp, body });
    }

    fn on(&self, device: usize) -> Stamp {
        Stamp { time_ns: self.now_ns, device: device as u8, ..Stamp::default() }
    }

    fn send_own(&mut self, stamp: Stamp, body: Body<'_>) {
        self.send(Origin::Process(SELF), stamp, body);
    }

    /// Emits a record of the process with the next sequence number, and returns that number.
    fn emit(&mut self, stamp: Stamp, body: Body<'_>) -> u64 {
        self.seq += 1;
        self.send_own(Stamp { seq: self.seq, ..stamp }, body);
        self.seq
    }

    fn tag(&mut self, path: &str) -> u32 {
        if path.is_empty() {
            return 0;
        }
        if let Some(&id) = self.tags.get(path) {
            return id;
        }
        let id = self.tags.len() as u32 + 1;
        self.send_own(Stamp { tag: id, ..Stamp::default() }, Body::Tag { path });
        self.tags.insert(path.to_owned(), id);
        id
    }

    fn pool(device: usize) -> u64 {
        device as u64 + 1
    }

    /// Emits names, clock, devices, and the state at the start of the history.
    fn begin(&mut self) {
        let annotated = self.snapshot.annotations.iter().map(|annotation| annotation.time_us);
        let times = self.snapshot.traces.iter().flatten().map(|event| event.time_us).chain(annotated);
        self.base_us = times.filter(|&time_us| time_us > 0).min();
        let clock = if self.base_us.is_some() { ClockKind::Wall } else { ClockKind::Ordinal };
        let realtime_ns = self.base_us.unwrap_or(0).saturating_mul(1000);
        if clock == ClockKind::Ordinal {
            self.now_ns = 1;
        }
        let at = Stamp { time_ns: self.now_ns, ..Stamp::default() };
        self.send(Origin::Host, at, Body::ClockAnchor { realtime_ns, boottime_ns: 0, clock });
        for layer in [Layer::Blocks, Layer::OutOfMemory, Layer::Stacks] {
            self.send_own(at, Body::Layer { layer, state: LayerState::Active, reason: "" });
        }
        let tag = self.tag(TORCH);
        for device in 0..self.devices.len() {
            let (uuid_low, ordinal, id) = (device as u64, device as u16, DeviceIdKind::Ordinal);
            let total_bytes = Reading::ABSENT;
            let body = Body::Device { uuid_high: 0, uuid_low, total_bytes, ordinal, id, name: "" };
            let stamp = self.on(device);
            self.send(Origin::Host, stamp, body);
            self.send_own(stamp, body);
            let (pool, owner) = (Self::pool(device), PoolOwner::Framework);
            let body = Body::PoolCreate { pool, parent: 0, reports_blocks: 1, owner };
            self.emit(Stamp { tag, ..stamp }, body);
            let heap = &mut self.devices[device].heap;
            let (pieces, blocks) = (std::mem::take(&mut heap.pieces), std::mem::take(&mut heap.blocks));
            for (address, piece) in pieces {
                self.add_piece(device, address, piece);
            }
            for (address, live) in blocks {
                self.totals.start_bytes = self.totals.start_bytes.saturating_add(live.bytes);
                self.add_block(device, address, live, NONE, false);
            }
        }
        let host = self.snapshot.segments.iter().filter(|segment| segment.is_host);
        let host: Vec<(u64, u64)> = host.map(|segment| (segment.address, segment.bytes)).collect();
        for (address, bytes) in host {
            let (stamp, memory) = (Stamp { tag, ..self.on(0) }, MemoryKind::Pinned);
            self.emit(stamp, Body::AllocEnd { address, bytes, pool: 0, took_us: 0, memory });
        }
    }

    fn add_piece(&mut self, device: usize, address: u64, piece: Piece) {
        let (bytes, pool, memory) = (piece.bytes, Self::pool(device), MemoryKind::Device);
        self.emit(self.on(device), Body::AllocEnd { address, bytes, pool, took_us: 0, memory });
        let device = &mut self.devices[device];
        device.reserved_bytes = device.reserved_bytes.saturating_add(bytes);
        device.heap.pieces.insert(address, piece);
    }

    fn remove_piece(&mut self, device: usize, address: u64) {
        let begin_seq = self.emit(self.on(device), Body::FreeBegin { address });
        self.emit(self.on(device), Body::FreeEnd { begin_seq, result: 0 });
        let device = &mut self.devices[device];
        if let Some(piece) = device.heap.pieces.remove(&address) {
            device.reserved_bytes = device.reserved_bytes.saturating_sub(piece.bytes);
        }
    }

    /// Returns tag path, phase and role of a block. The path has the program's metadata, the open profiler ranges (only with
    /// `in_scopes`), and the stack.
    fn path(&mut self, device: usize, frames: Ref, metadata: Ref, in_scopes: bool) -> (String, Phase, Role) {
        let arena = self.arena;
        let scopes = if in_scopes { self.devices[device].scopes.as_slice() } else { &[] };
        let scopes = scopes.iter().filter_map(|&name| arena.text(name));
        let scopes = scopes.filter(|name| !name.starts_with(STEP));
        let mut path = String::new();
        for text in arena.text(metadata).into_iter().chain(scopes).map(|text| part(&text)) {
            if !text.is_empty() && path.len() + 1 + text.len() <= MAX_TAG_BYTES {
                path += if path.is_empty() { "" } else { "/" };
                path += &text;
            }
        }
        let stack = self.stacks.classify(arena, frames).cloned().unwrap_or_default();
        let room = MAX_TAG_BYTES.saturating_sub(path.len() + 1);
        if stack.path.len() <= room {
            match path.is_empty() {
                true => path = stack.path,
                false if stack.path.is_empty() => {}
                false => path = format!("{path}/{}", stack.path),
            }
        } else if let Some((at, _)) =
            stack.path.match_indices('/').find(|(at, _)| stack.path.len() - at <= room)
        {
            // The whole stack would make the tag too long. Its innermost frames stay, because they are the most informative.
            path.push_str(stack.path.get(at..).unwrap_or_default());
        }
        (path, stack.phase, stack.role)
    }

    /// Emits a block and adds it to the state. `is_new` is false for a block whose allocation the history does not contain.
    fn add_block(&mut self, device: usize, address: u64, live: Live, metadata: Ref, is_new: bool) {
        let (path, phase, role) = self.path(device, live.frames, metadata, is_new);
        let tag = self.tag(&path);
        // The order of allocations before the history is unknown. The phases of these blocks would make the run's phase jump.
        let phase = if is_new { phase } else { Phase::Unknown };
        let stamp = Stamp { tag, context: live.stream, ..self.on(device) };
        let pool = Self::pool(device);
        let body = Body::BlockAlloc { address, bytes: live.bytes, pool, use_as: (role, phase) };
        let seq = self.emit(stamp, body);
        if live.is_pending {
            self.free_block(device, address, FreeState::Pending);
        }
        self.requested = self.requested.saturating_add(live.requested);
        self.allocated = self.allocated.saturating_add(live.bytes);
        self.totals.peak_requested = self.totals.peak_requested.max(self.requested);
        self.totals.peak_allocated = self.totals.peak_allocated.max(self.allocated);
        let device = &mut self.devices[device];
        device.used_bytes = device.used_bytes.saturating_add(live.bytes);
        device.heap.blocks.insert(address, Live { seq, ..live });
    }

    fn free_block(&mut self, device: usize, address: u64, state: FreeState) {
        self.emit(self.on(device), Body::BlockFree { address, pool: Self::pool(device), state });
    }

    fn remove_block(&mut self, device: usize, address: u64) {
        self.free_block(device, address, FreeState::Done);
        let device = &mut self.devices[device];
        if let Some(live) = device.heap.blocks.remove(&address) {
            device.used_bytes = device.used_bytes.saturating_sub(live.bytes);
            self.requested = self.requested.saturating_sub(live.requested);
            self.allocated = self.allocated.saturating_sub(live.bytes);
        }
    }

    /// Applies the history entries of all devices in the order of time. Entries of one device keep their order.
    fn run(&mut self) {
        while let Some(index) = self.next_device() {
            let device = &mut self.devices[index];
            let (event, known_bytes) = (device.events[device.next_event], device.sizes[device.next_event]);
            device.next_event += 1;
            self.advance_to(event.time_us);
            self.apply_scopes_until(index, event.time_us);
            if !self.apply(index, &event, known_bytes) {
                self.totals.contradictions += 1;
            }
        }
        for index in 0..self.devices.len() {
            self.apply_scopes_until(index, u64::MAX);
        }
        self.totals.history_ns = self.now_ns.saturating_sub(START_NS);
    }

    /// Returns the device whose next entry is the oldest; `None` at the end.
    fn next_device(&self) -> Option<usize> {
        let devices = self.devices.iter().enumerate();
        let times = devices
            .filter_map(|(index, device)| Some((device.events.get(device.next_event)?.time_us, index)));
        times.min().map(|(_, index)| index)
    }

    /// Sets the time of the next records to an entry's time; the time never goes back. Without a clock, each entry takes 1 ns.
    fn advance_to(&mut self, time_us: u64) {
        let now_ns = match self.base_us {
            Some(base_us) => time_us.saturating_sub(base_us).saturating_mul(1000).saturating_add(START_NS),
            None => self.now_ns + 1,
        };
        self.now_ns = self.now_ns.max(now_ns);
    }

    /// Opens and closes a device's profiler ranges that begin or end at or before `time_us`.
    fn apply_scopes_until(&mut self, index: usize, time_us: u64) {
        let (arena, snapshot) = (self.arena, self.snapshot);
        let device = &mut self.devices[index];
        let rest = snapshot.annotations.get(device.next_annotation..).unwrap_or_default();
        let mut step = None;
        for annotation in rest {
            if annotation.time_us > time_us {
                break;
            }
            device.next_annotation += 1;
            if usize::from(annotation.device) != index {
                continue;
            }
            if !annotation.begins {
                let same = |&name: &Ref| arena.text(name) == arena.text(annotation.name);
                if let Some(at) = device.scopes.iter().rposition(same) {
                    device.scopes.remove(at);
                }
                continue;
            }
            let name = arena.text(annotation.name).unwrap_or_default();
            if let Some(number) = name.strip_prefix(STEP).and_then(|number| number.parse::<u64>().ok()) {
                step = Some(number);
            } else if device.scopes.len() < MAX_SCOPES {
                device.scopes.push(annotation.name);
            }
        }
        // Every device's history contains the same steps, so a step that was emitted is skipped.
        if let Some(number) = step.filter(|number| self.step.is_none_or(|last| *number > last)) {
            self.step = Some(number);
            self.emit(self.on(index), Body::Step { number });
        }
    }

    fn heap(&mut self, device: usize) -> &mut Heap {
        &mut self.devices[device].heap
    }

    /// Splits a piece of an expandable segment so that one piece begins at `address`.
    fn cut(&mut self, device: usize, address: u64) {
        let Some([left, right]) = self.heap(device).cut_at(address) else { return };
        self.remove_piece(device, left.0);
        self.add_piece(device, left.0, left.1);
        self.add_piece(device, right.0, right.1);
    }

    /// Applies one entry of the history; `known_bytes` is the size of its block, 0 if unknown. Returns false if the entry
    /// contradicts the allocator's state.
    fn apply(&mut self, device: usize, event: &Event, known_bytes: u64) -> bool {
        let &Event { action, address, bytes, .. } = event;
        let heap = self.heap(device);
        match action {
            Action::Alloc => {
                let Some((room, is_expandable)) = heap.room(address, bytes) else { return false };
                let size = match known_bytes {
                    0 => block_bytes(&self.snapshot.settings, bytes, room, is_expandable),
                    known_bytes => known_bytes,
                };
                if size > room {
                    return false;
                }
                let &Event { stream, frames, metadata, .. } = event;
                let live = Live { bytes: size, requested: bytes, is_pending: false, stream, frames, seq: 0 };
                self.add_block(device, address, live, metadata, true);
            }
            Action::FreeRequested => {
                if heap.blocks.get(&address).is_none_or(|live| live.is_pending) {
                    return false;
                }
                if self.is_completed_next(device, address) {
                    return true; // the next entry completes the free, so no stream delays it
                }
                self.free_block(device, address, FreeState::Pending);
                if let Some(live) = self.heap(device).blocks.get_mut(&address) {
                    live.is_pending = true;
                }
            }
            Action::FreeCompleted => {
                if !heap.blocks.contains_key(&address) {
                    return false;
                }
                self.remove_block(device, address);
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                if bytes == 0 || !heap.has_room(address, bytes) {
                    return false;
                }
                let is_expandable = action == Action::SegmentMap;
                for (start, bytes) in heap.cuts(address, bytes, is_expandable, false) {
                    self.add_piece(device, start, Piece { bytes, is_expandable });
                }
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                if heap.is_used(address, bytes) {
                    return false;
                }
                if action == Action::SegmentUnmap {
                    self.cut(device, address);
                    self.cut(device, address.saturating_add(bytes));
                }
                let Some(found) = self.heap(device).pieces_in(address, bytes) else { return false };
                found.into_iter().for_each(|start| self.remove_piece(device, start));
            }
            Action::Oom => self.emit_oom(device, event),
            Action::Annotate => {
                let Some(live) = heap.blocks.get(&address).copied() else { return false };
                let (path, ..) = self.path(device, live.frames, event.metadata, true);
                let stamp = Stamp { tag: self.tag(&path), ..self.on(device) };
                let (pool, use_as) = (Self::pool(device), (Role::Unknown, Phase::Unknown));
                self.emit(stamp, Body::Retag { address, block_seq: live.seq, pool, use_as });
            }
            Action::Snapshot => {
                let stamp = Stamp { tag: self.tag("snapshot"), ..self.on(device) };
                self.emit(stamp, Body::Marker {});
            }
            Action::Refused => {}
        }
        true
    }

    /// Returns whether a device's next entry completes the free of the block at `address`.
    fn is_completed_next(&self, device: usize, address: u64) -> bool {
        let Device { events, next_event, .. } = &self.devices[device];
        let is_completion = |next: &Event| next.action == Action::FreeCompleted && next.address == address;
        events.get(*next_event).is_some_and(is_completion)
    }

    /// Emits a failed allocation with its stack and the device's totals.
    fn emit_oom(&mut self, device: usize, event: &Event) {
        let (path, ..) = self.path(device, event.frames, event.metadata, true);
        let tag = self.tag(&path);
        self.stacks_sent += 1;
        let stack = self.stacks_sent;
        let text = Stacks::text(self.arena, event.frames);
        let format = FrameFormat::Text;
        self.send_own(Stamp { stack, ..Stamp::default() }, Body::Stack { format, frames: text.as_bytes() });
        let settings = &self.snapshot.settings;
        let segment_bytes = settings.segment_bytes(rounded(settings, event.bytes));
        let free = (event.address != u64::MAX).then_some(event.address);
        // If the free memory of the device was enough or is unknown, the entry counts as a failure at the allocator's own limit,
        // without a CUDA error.
        let result = if free.is_some_and(|free| free < segment_bytes) { OUT_OF_MEMORY } else { 0 };
        let stamp = Stamp { tag, stack, ..self.on(device) };
        if result != 0 {
            let (pool, memory, device_free_bytes) = (0, MemoryKind::Device, Reading(free));
            self.emit(
                stamp,
                Body::AllocFailed { bytes: segment_bytes, pool, device_free_bytes, result, memory },
            );
        }
        let &Device { used_bytes, reserved_bytes, .. } = &self.devices[device];
        let (pool_used_bytes, pool_reserved_bytes) = (Reading::of(used_bytes), Reading::of(reserved_bytes));
        let (bytes, outcome) = (event.bytes, OomOutcome::Fatal);
        self.emit(stamp, Body::Oom { bytes, pool_used_bytes, pool_reserved_bytes, outcome, result });
    }
}
