//! Adopts the memory that PyTorch had before the agent started, i.e. records it as the process's. PyTorch's allocator can list
//! its segments and blocks (torch.cuda.memory_snapshot), and the agent's Python code requests the list.
//!
//! The list is right for the moment when the allocator wrote it. So it counts only if nothing else is recorded or reported from
//! before the request until the whole list is recorded. Otherwise everything is reversed, and the list is requested again. One
//! race of some hundred ns stays: another thread frees a block that is about to be recorded, and gets it again.

use crate::base::row::{Key, RowExtra, device_of};
use crate::driver::core::Core;
use crate::driver::torch_pools::Device;
use crate::record::recorder::RecordContext;
use crate::record::status;
use crate::sources::torch::patch;
use crate::threads::Thread;
use gpumem_wire::{Body, Flags, FreeState, MemoryKind, Phase, Role};
use std::sync::atomic::{AtomicU64, Ordering::*};

/// Name of memory that is older than the agent, until a retag gives it another name.
const NAME: &[u8] = b"before the agent";

/// Numbers of records and of PyTorch's reports when the list of its blocks was requested.
static BEFORE: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// An entry of the list: the program's number of the device, one of the kinds below, address, and bytes.
pub(crate) type Part = [u64; 4];

/// Kind of a segment that is one allocation.
const SEGMENT: u64 = 0;
const BLOCK: u64 = 1;
/// Kind of a piece of an expandable segment, which grows by mapping pieces.
const PAGE: u64 = 2;

struct Adoption<'a> {
    core: &'a Core,
    thread: &'a Thread,
    /// Key of each new row, and the number of the record that made it.
    rows: Vec<(Key, u64)>,
    /// Number of records that the adoption has made so far.
    count: u64,
}

impl Core {
    /// Returns the number of records and of PyTorch's reports so far.
    fn counts(&self) -> [u64; 2] {
        let reports = self.torch.devices.iter().map(|device| device.reports.load(Relaxed)).sum();
        [self.recorder.ring.head(), reports]
    }

    /// Prepares a request of the list. Returns false if no CUDA context is older than the agent. Also returns false while
    /// PyTorch's reports are not hooked or no callbacks arrive, because frees would be missed.
    pub(crate) fn adoption_begins(&self) -> bool {
        if !self.torch.is_late.load(Relaxed) || !patch::is_patched(patch::REPORT) || status::is_blind() {
            return false;
        }
        for (place, count) in BEFORE.iter().zip(self.counts()) {
            place.store(count, Relaxed);
        }
        true
    }

    /// Adopts the entries of the list. Returns false, and adopts nothing, if something else happened meanwhile.
    pub(crate) fn adopt(&self, thread: &Thread, parts: &[Part]) -> bool {
        let [records, reports] = BEFORE.each_ref().map(|place| place.load(Relaxed));
        let mut adoption = Adoption { core: self, thread, rows: Vec::new(), count: 0 };
        for (ordinal, device) in self.torch.devices.iter().enumerate() {
            let of_device = parts.iter().filter(|part| part[0] == ordinal as u64);
            let (blocks, segments): (Vec<&Part>, Vec<&Part>) = of_device.partition(|part| part[1] == BLOCK);
            if self.counts() == [records + adoption.count, reports] && !segments.is_empty() {
                adoption.record_device(device, ordinal as u8, &segments, &blocks);
            }
        }
        let is_right = self.counts() == [records + adoption.count, reports];
        if !is_right {
            adoption.undo();
        }
        for pool in self.torch.pools() {
            let device = pool.device;
            let unseen = device.reserved.load(Relaxed).wrapping_sub(device.segments.load(Relaxed));
            device.unseen.store(unseen as i64, Relaxed);
            self.record_unseen(thread, pool);
        }
        is_right
    }
}

impl Adoption<'_> {
    fn record_device(&mut self, device: &Device, slot: u8, segments: &[&Part], blocks: &[&Part]) {
        let (core, thread) = (self.core, self.thread);
        let tag = core.recorder.names.intern(0, NAME);
        let at = RecordContext { tag, flags: Flags::OLDER, ..RecordContext::on(slot) };
        let bytes_of = |parts: &[&Part]| parts.iter().map(|part| part[3]).sum::<u64>();
        if device.pool.load(Acquire) == 0 {
            device.reserved.store(bytes_of(segments), Relaxed);
            self.count += 1;
        }
        let pool = core.make_pool(thread, device, slot, bytes_of(blocks));
        for &&[_, kind, address, bytes] in segments {
            if core.recorder.live.get(Key::Segment(pool, address)).is_some() {
                continue;
            }
            if kind == PAGE {
                self.record_page(at, address, bytes);
            } else {
                debug_assert_eq!(kind, SEGMENT);
                let body = Body::AllocEnd { address, bytes, pool: 0, took_us: 0, memory: MemoryKind::Device };
                self.record(at, Key::Allocation(address), body);
            }
            self.record(at, Key::Segment(pool, address), Body::SegmentAdd { address, bytes, pool });
            device.segments.fetch_add(bytes, Relaxed);
        }
        for &&[_, _, address, bytes] in blocks {
            let use_as = (Role::Unknown, Phase::Unknown);
            if self.record(at, Key::Block(pool, address), Body::BlockAlloc { address, bytes, pool, use_as }) {
                device.forget_older(bytes);
            }
        }
    }

    /// Records memory mapped at an address. Its handle is unknown, so the address, which no real handle equals, stands for it.
    /// PyTorch releases a handle right after mapping it. So the memory has no reference and ends with its mapping.
    fn record_page(&mut self, at: RecordContext, address: u64, bytes: u64) {
        let (core, thread, handle) = (self.core, self.thread, address);
        if core.recorder.live.get(Key::Mapping(address)).is_some() {
            return;
        }
        let body = Body::VmmCreate { handle, bytes, references: 0, memory: MemoryKind::Vmm };
        let backing = core.recorder.record(thread, at, body, |recorder, row| {
            core.references_change(row[0]);
            recorder.live.insert(Key::Backing(row[0]), row, RowExtra { mappings: 1, ..RowExtra::default() });
        });
        let mapping =
            core.recorder.record(thread, at, Body::VmmMap { address, bytes, handle }, |recorder, row| {
                core.references_change(row[0]);
                recorder.live.insert(Key::Mapping(address), row, RowExtra { backing, ..RowExtra::default() });
            });
        self.count += 2;
        self.rows.push((Key::Mapping(address), mapping));
    }

    /// Records an entry of the list as a row with this key; returns false if the row exists already.
    fn record(&mut self, at: RecordContext, key: Key, body: Body<'_>) -> bool {
        if self.core.recorder.live.get(key).is_some() {
            return false;
        }
        let seq = self.core.recorder.insert(self.thread, at, body, key, RowExtra::default());
        self.count += 1;
        self.rows.push((key, seq));
        true
    }

    /// Removes the new rows again, unless they have changed.
    fn undo(self) {
        let (core, thread) = (self.core, self.thread);
        for (key, seq) in self.rows.into_iter().rev() {
            let Some(taken) = core.recorder.live.get(key).filter(|taken| taken.seq() == seq) else {
                continue;
            };
            let (slot, bytes) = (device_of(&taken.row), taken.row[3]);
            let device = &core.torch.devices[usize::from(slot)];
            let at = RecordContext { flags: Flags::OLDER, ..RecordContext::on(slot) };
            let body = match key {
                Key::Block(pool, address) => {
                    device.older.fetch_add(bytes, Relaxed);
                    Body::BlockFree { address, pool, state: FreeState::Done }
                }
                Key::Segment(pool, address) => {
                    device.segments.fetch_sub(bytes, Relaxed);
                    Body::SegmentRemove { address, bytes, pool }
                }
                Key::Mapping(address) => Body::VmmUnmap { address, bytes },
                _ => Body::FreeBegin { address: taken.row[2] },
            };
            let begin_seq = core.recorder.record(thread, at, body, |recorder, row| {
                if let Some(mapping) = recorder.live.remove(key).filter(|_| matches!(key, Key::Mapping(_))) {
                    core.references_change(row[0]);
                    core.unmapped(&mapping);
                }
            });
            if matches!(body, Body::FreeBegin { .. } | Body::VmmUnmap { .. }) {
                core.recorder.note(thread, at, Body::FreeEnd { begin_seq, result: 0 });
            }
        }
    }
}
