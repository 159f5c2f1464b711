//! Finds the segments of PyTorch's pool: the driver allocations in which its blocks lie.
//!
//! The pool requests a segment when a block does not fit into the existing ones. It hands out that block at once on the same
//! thread, before any other block there (2.4.1 and 2.15.0; with `release_lock_on_cudamalloc` other threads may report
//! meanwhile, but not this one). So each thread stores its driver allocations since its last block, and an allocation that the
//! next block overlaps is a segment. This holds for each caller of the driver (a pluggable allocator in a MemPool, NCCL's), and
//! also for pieces of 2 or 20 MiB mapped side by side. All other allocations are memory outside of the pool, like that of
//! cuBLAS. PyTorch's total of reserved bytes shows whether all segments were found. If not, a block's segment is searched
//! among all rows, a limited number of times.

use crate::base::row::{Key, RowExtra, device_of, kind, kind_of, memory_of};
use crate::driver::allocations::Allocation;
use crate::driver::core::Core;
use crate::driver::torch_pools::TorchPool;
use crate::naming::callers;
use crate::record::recorder::RecordContext;
use crate::sources::torch::patch;
use crate::threads::{Call, Thread};
use gpumem_wire::{Body, MemoryKind};
use std::sync::atomic::Ordering::*;

/// The size of a segment of the native allocator is a multiple of this number of bytes.
const SEGMENT_UNIT: u64 = 2 << 20;
/// An allocation of fewer bytes is too small for a segment, and starts no search for PyTorch.
const SMALLEST: u64 = 1 << 20;

/// Whether PyTorch requested the allocation without its native caching allocator.
#[inline(always)]
fn is_no_segment(module: u16, bytes: u64, memory: MemoryKind) -> bool {
    callers::is_torch(module) && (memory == MemoryKind::StreamOrdered || !bytes.is_multiple_of(SEGMENT_UNIT))
}

impl Core {
    /// Stores an allocation by the driver in the thread's list: it may be a segment of PyTorch's pool.
    #[inline(always)]
    pub(crate) fn note_driver_memory(&self, thread: &Thread, module: u16, what: Allocation) {
        let Allocation { address, bytes, memory, .. } = what;
        if !matches!(memory, MemoryKind::Device | MemoryKind::Managed | MemoryKind::StreamOrdered) {
            return;
        }
        thread.torch.remember(address, bytes, module, false);
        if memory == MemoryKind::Device && bytes >= SMALLEST && self.settings.layers.torch {
            patch::search_if_changed();
        }
        if is_no_segment(module, bytes, memory) {
            self.torch.single_tensors.fetch_add(1, Relaxed);
        }
    }

    /// Whether an allocation is a single tensor of PyTorch: without caching, or with caching by the driver.
    #[inline(always)]
    pub(crate) fn is_single_tensor(&self, module: u16, bytes: u64, memory: MemoryKind) -> bool {
        is_no_segment(module, bytes, memory)
            || self.torch.single_tensors.load(Relaxed) != 0 && callers::is_torch(module)
    }

    /// Stores mapped memory in the thread's list: it may be a part of a segment of PyTorch's pool.
    #[inline(always)]
    pub(crate) fn note_driver_mapping(&self, thread: &Thread, module: u16, address: u64, bytes: u64) {
        thread.torch.remember(address, bytes, module, true);
        if self.settings.layers.torch {
            patch::search_if_changed();
        }
    }

    /// Adds memory that the driver gave this thread to the pool's segments, if the thread's next block lies in that memory.
    #[cold]
    #[inline(never)]
    pub(super) fn claim_segments(&self, thread: &Thread, pool: TorchPool<'_>, address: u64, bytes: u64) {
        let block_end = address.saturating_add(bytes);
        for fresh in thread.torch.fresh() {
            let (start, end) = (fresh.start.load(Relaxed), fresh.end.load(Relaxed));
            if start >= block_end || end <= address {
                continue;
            }
            if !fresh.is_mapped() {
                self.take_segment(thread, pool, Key::Allocation(start));
                continue;
            }
            let mut place = start;
            while place < end {
                place += self.take_segment(thread, pool, Key::Mapping(place)).unwrap_or(SEGMENT_UNIT);
            }
        }
        thread.torch.forget_fresh();
    }

    /// Adds the row of `key` as a segment of the pool; returns its bytes, if there is such a row.
    fn take_segment(&self, thread: &Thread, pool: TorchPool<'_>, key: Key) -> Option<u64> {
        let row = self.recorder.live.get(key)?.row;
        let (address, bytes) = (row[2], row[3].max(1));
        if self.recorder.live.get(Key::Segment(pool.id, address)).is_none() {
            self.add_segment(thread, pool, address, bytes);
        }
        Some(bytes)
    }

    fn add_segment(&self, thread: &Thread, pool: TorchPool<'_>, address: u64, bytes: u64) {
        let at = RecordContext { device: pool.slot, ..self.here(thread) };
        let (body, key) =
            (Body::SegmentAdd { address, bytes, pool: pool.id }, Key::Segment(pool.id, address));
        self.recorder.insert(thread, at, body, key, RowExtra::default());
        pool.device.segments.fetch_add(bytes, Relaxed);
    }

    /// Searches all rows for the segment of a block, which another thread may have requested, or which is older than the hooks.
    #[cold]
    #[inline(never)]
    pub(super) fn search_segment(&self, thread: &Thread, pool: TorchPool<'_>, address: u64) {
        let left = pool.device.searches.load(Relaxed);
        if left == 0 {
            return;
        }
        pool.device.searches.store(left - 1, Relaxed);
        let mut found = None;
        for taken in self.recorder.live.scan() {
            let (start, bytes) = (taken.row[2], taken.row[3]);
            if start > address || address - start >= bytes {
                continue;
            }
            match kind_of(&taken.row) {
                kind::SEGMENT_ADD if taken.row[4] == pool.id => return,
                kind::ALLOC_END if memory_of(&taken.row) == MemoryKind::Device => {
                    found = Some(Key::Allocation(start));
                }
                kind::VMM_MAP => found = Some(Key::Mapping(start)),
                _ => {}
            }
        }
        if let Some(key) = found {
            self.take_segment(thread, pool, key);
        }
    }

    /// Removes, at the begin of a free or unmap, the segments that start in [address, address + bytes). With `bytes` 0, removes
    /// the segment at `address`.
    #[inline(always)]
    pub(crate) fn remove_segments(&self, thread: &Thread, call: &mut Call, address: u64, bytes: u64) {
        if self.torch.made.load(Relaxed) != 0 {
            self.drop_segments(thread, call, address, bytes);
        }
    }

    #[inline(never)]
    fn drop_segments(&self, thread: &Thread, call: &mut Call, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes.clamp(1, 1 << 40));
        for TorchPool { device, id: pool, .. } in self.torch.pools() {
            let mut place = address;
            while place < end {
                let key = Key::Segment(pool, place);
                let Some(segment) = self.recorder.live.get(key) else {
                    place = (place + SEGMENT_UNIT) & !(SEGMENT_UNIT - 1);
                    continue;
                };
                let bytes = segment.row[3];
                let at = RecordContext::on(device_of(&segment.row));
                let body = Body::SegmentRemove { address: place, bytes, pool };
                self.recorder.remove(thread, at, body, key);
                device.segments.fetch_sub(bytes, Relaxed);
                call.segment_of = pool;
                place += bytes.max(1);
            }
        }
    }

    /// Restores the segment after a free or unmap failed. The row of its allocation or mapping is restored already.
    #[cold]
    pub(crate) fn restore_segment(&self, thread: &Thread, pool: u64, address: u64, bytes: u64) {
        if let Some(pool) = self.torch.pools().find(|other| other.id == pool) {
            self.add_segment(thread, pool, address, bytes);
        }
    }
}
