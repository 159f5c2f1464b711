//! Records each allocation and free of a block, from PyTorch's report to its profiler. The agent replaces the slot of that
//! function and passes the call on.
//!
//! PyTorch makes the call at exactly two places, unconditionally, for each block of the native caching allocator, in every pool
//! and mode. It holds the allocator's mutex for the device. So nothing here takes the GIL, calls CUDA, waits or allocates. The
//! call carries PyTorch's totals after the event, which must equal the agent's own sum each time.

use crate::base::fault_injection;
use crate::base::row::{AllocationName, Key, RowExtra};
use crate::driver::core::Core;
use crate::driver::guard::guard;
use crate::driver::torch_pools::{Device, TorchPool};
use crate::record::live::{Home, Live, RowSlot};
use crate::record::recorder::RecordContext;
use crate::sources::torch::patch::{self, REPORT};
use crate::sources::torch::request;
use crate::threads::Thread;
use gpumem_wire::{Body, FreeState, PoolOwner};
use std::arch::naked_asm;
use std::ffi::c_void;
use std::sync::atomic::Ordering::*;

#[derive(Clone, Copy, Default)]
pub(crate) struct Report {
    /// Address of the block.
    pub address: u64,
    /// Size of the block in bytes after rounding; negative for a free.
    pub bytes: i64,
    /// PyTorch's total of live blocks on the device after the event, in bytes.
    pub allocated: u64,
    /// PyTorch's total of segments on the device, in bytes.
    pub reserved: u64,
    /// c10::Device: the type, and the program's number of the device << 8.
    pub device: u16,
    /// Word that is the address of PyTorch's Block in a report of an allocation, see request.rs; 0 for none.
    pub block: u64,
    /// The stack pointer at the call.
    pub stack: usize,
}

type Next = unsafe extern "C-unwind" fn(*mut c_void, i64, u64, u64, u16);

/// Replacement for reportMemoryUsageToProfiler: adds the stack pointer, and for an allocation a register of the caller
/// (request.rs) above the device. Jumps to `reported_at`, of which each direction has its own copy: between two reports PyTorch
/// displaces the agent's code from the cache, so an event costs the lines of its own path only.
///
/// # Safety
/// Must be called with PyTorch's arguments.
#[unsafe(link_section = ".text.hot.gpumem")]
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn reported(
    address: *mut c_void,
    bytes: i64,
    allocated: u64,
    reserved: u64,
    device: u16,
) {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        "movzx r8d, r8w",
        "mov r9, rsp",
        "test rsi, rsi",
        "jle {free}",
        "shl rax, 16",
        "or r8, rax",
        "jmp {alloc}",
        alloc = sym reported_at::<true>,
        free = sym reported_at::<false>,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "and w4, w4, 0xffff",
        "mov x5, sp",
        "cmp x1, #0",
        "b.gt 1f",
        "b {free}",
        "1:",
        "b {alloc}",
        alloc = sym reported_at::<true>,
        free = sym reported_at::<false>,
    );
}

#[unsafe(link_section = ".text.hot.gpumem")]
unsafe extern "C-unwind" fn reported_at<const IS_ALLOC: bool>(
    address: *mut c_void,
    bytes: i64,
    allocated: u64,
    reserved: u64,
    device_and_block: u64,
    stack: usize,
) {
    let (device, block) = (device_and_block as u16, device_and_block >> 16);
    guard((), |core, thread| {
        fault_injection::at("torch.report");
        let address = address as u64;
        core.reported::<IS_ALLOC>(
            thread,
            Report { address, bytes, allocated, reserved, device, block, stack },
        );
    });
    let next = patch::next(REPORT);
    if !next.is_null() {
        // SAFETY: the slot held a function of this type. Its exceptions pass through.
        unsafe {
            std::mem::transmute::<*mut c_void, Next>(next)(address, bytes, allocated, reserved, device)
        };
    }
}

/// Returns the program's number of a device from c10::Device; `None` unless it is CUDA or HIP.
#[inline(always)]
pub(crate) fn ordinal(device: u16) -> Option<usize> {
    let (kind, index) = (device & 255, usize::from(device >> 8));
    (matches!(kind, 1 | 6) && index < crate::driver::torch_pools::DEVICES).then_some(index)
}

impl Core {
    #[inline(always)]
    fn reported<const IS_ALLOC: bool>(&self, thread: &Thread, report: Report) {
        let Some(index) = ordinal(report.device) else { return };
        let device = &self.torch.devices[index];
        let mut id = device.pool.load(Relaxed);
        if id == 0 {
            let before = (report.allocated as i64).wrapping_sub(report.bytes).max(0);
            id = self.make_pool(thread, device, index as u8, before as u64);
        }
        // A closure: the value is made only for rare calls, so that the usual case does not store it.
        let pool = || TorchPool { device, id, slot: index as u8 };
        let home = self.recorder.live.expect(Key::Block(id, report.address));
        let sum = device.sum.load(Relaxed).wrapping_add(report.bytes);
        if sum != report.allocated as i64 {
            device.add_drift(sum.abs_diff(report.allocated as i64));
        }
        device.sum.store(report.allocated as i64, Relaxed);
        device.reserved.store(report.reserved, Relaxed);
        device.reports.store(device.reports.load(Relaxed) + 1, Relaxed);
        if IS_ALLOC {
            self.block_reported(thread, pool(), report, home);
        } else {
            self.free_reported(thread, pool(), report, home);
        }
        thread.torch.forget_events();
        let unseen = report.reserved.wrapping_sub(device.segments.load(Relaxed)) as i64;
        device.unseen.store(unseen, Relaxed);
        if device.check_due.load(Relaxed) {
            self.record_totals(thread, pool());
        }
    }

    #[inline(always)]
    fn block_reported(&self, thread: &Thread, pool: TorchPool<'_>, report: Report, home: Home) {
        let TorchPool { device, id, slot } = pool;
        let pool = || TorchPool { device, id, slot };
        let (address, bytes) = (report.address, report.bytes as u64);
        if thread.torch.has_fresh() {
            self.claim_segments(thread, pool(), address, bytes);
        }
        if device.segments.load(Relaxed) != report.reserved {
            self.search_segment(thread, pool(), address);
        }
        if device.pending.load(Relaxed) != 0 {
            self.free_overlapped(thread, pool(), address, bytes);
        }
        thread.torch.refused.store(false, Relaxed);
        self.record_gradient_of_running_node(thread);
        let AllocationName { mut tag, flags, phase, role } = self.named(thread);
        if tag == 0 {
            tag = crate::naming::python::line(self);
        }
        let spot = Live::spot_for(home);
        let (request, stack, context) = request::read(&report).of_stamp();
        let flags = flags.with(request);
        let at = RecordContext { tag, flags, stack, context, ..RecordContext::on(slot) };
        let body = Body::BlockAlloc { address, bytes, pool: id, use_as: (role, phase) };
        self.recorder.record(thread, at, body, |recorder, row| {
            recorder.live.insert_at(spot, row);
        });
    }

    #[inline(always)]
    fn free_reported(&self, thread: &Thread, pool: TorchPool<'_>, report: Report, home: Home) {
        let Report { address, bytes, stack, .. } = report;
        let TorchPool { device, id, .. } = pool;
        if device.older.load(Relaxed) != 0 && self.is_older(device, id, address, bytes) {
            return;
        }
        if thread.torch.recorded() != 0 && self.record_pending(thread, device, id, address, bytes, stack) {
            return;
        }
        self.record_free(thread, id, address, Live::spot_of(home));
    }

    /// Whether the freed block is older than the agent, that is, has no row. Then subtracts its bytes from `device.older`.
    #[cold]
    #[inline(never)]
    fn is_older(&self, device: &Device, pool: u64, address: u64, bytes: i64) -> bool {
        let is_older = self.recorder.live.get(Key::Block(pool, address)).is_none();
        if is_older {
            device.forget_older(bytes.unsigned_abs());
        }
        is_older
    }

    /// Records that a block is free for the next request. `spot` is the place of its row.
    #[inline(always)]
    pub(crate) fn record_free(&self, thread: &Thread, pool: u64, address: u64, spot: RowSlot) {
        let body = Body::BlockFree { address, pool, state: FreeState::Done };
        self.recorder
            .record(thread, RecordContext::NOWHERE, body, |recorder, _| recorder.live.discard_at(spot));
    }

    /// Returns the id of the device's pool, creating the pool if there is none. `before` is the size of the blocks that are older
    /// than the agent, in bytes.
    #[cold]
    #[inline(never)]
    pub(super) fn make_pool(&self, thread: &Thread, device: &Device, slot: u8, before: u64) -> u64 {
        let _turn = device.turn.take();
        let made = device.pool.load(Acquire);
        if made != 0 {
            return made;
        }
        device.sum.store(before as i64, Relaxed);
        device.older.store(before, Relaxed);
        // The driver must not be asked for the device's UUID here. Nearly always it is known from the segment's allocation.
        device.is_unknown.store(true, Relaxed);
        let pool = self.new_pool_id();
        let tag = self.recorder.names.intern(0, b"torch");
        let at = RecordContext { tag, ..RecordContext::on(slot) };
        let body = Body::PoolCreate { pool, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework };
        self.recorder.insert(thread, at, body, Key::Pool(pool), RowExtra::default());
        device.pool.store(pool, Release);
        self.torch.made.fetch_add(1, Release);
        device.check_due.store(before > 0, Relaxed);
        pool
    }

    /// Records PyTorch's current totals, in order with the blocks: the ledger compares them with its own.
    #[cold]
    #[inline(never)]
    fn record_totals(&self, thread: &Thread, pool: TorchPool<'_>) {
        let TorchPool { device, id, slot } = pool;
        device.check_due.store(false, Relaxed);
        let (used_bytes, reserved_bytes) = (device.sum.load(Relaxed) as u64, device.reserved.load(Relaxed));
        let body = Body::PoolState { pool: id, reserved_bytes, used_bytes, took_us: 0 };
        self.recorder.note(thread, RecordContext::on(slot), body);
        let body = Body::PoolCheck { pool: id, total_bytes: used_bytes };
        self.recorder.note(thread, RecordContext::on(slot), body);
        self.record_unseen(thread, pool);
    }

    /// Records the bytes of segments that are older than the agent, if a context is older than the agent and the bytes have
    /// changed.
    pub(super) fn record_unseen(&self, thread: &Thread, pool: TorchPool<'_>) {
        let unseen = pool.device.unseen.load(Relaxed).max(0);
        if self.torch.is_late.load(Relaxed) && pool.device.baseline.swap(unseen, Relaxed) != unseen {
            let body = Body::Baseline { bytes: unseen as u64 };
            self.recorder.note(thread, RecordContext::on(pool.slot), body);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gpus_count() {
        assert_eq!(ordinal(0x0001), Some(0));
        assert_eq!(ordinal(0x0701), Some(7));
        assert_eq!(ordinal(0x0206), Some(2));
        assert_eq!(ordinal(0xff00), None, "the CPU");
        assert_eq!(ordinal(0xff01), None, "no device");
        assert_eq!(ordinal(0x0009), None);
    }
}
