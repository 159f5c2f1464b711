//! What the agent keeps about PyTorch's caching allocator, for each device.

use crate::base::locks::SpinLock;
use crate::base::memfd::anonymous;
use crate::threads::per_feature::EVENTS;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering::*};

/// Maximum number of devices of a process, as in devices.rs.
pub(crate) const DEVICES: usize = 64;

/// Maximum number of pending blocks (freed, waiting for events) of a device at a time. Further ones count as free.
pub(crate) const MOST: usize = 1024;

/// An entry for a pending block, which was freed while a stream may still use it. The entry may be free.
#[derive(Debug, Default)]
pub(crate) struct PendingBlock {
    /// Address of the block; 0 while this entry is free.
    pub(crate) address: AtomicU64,
    pub(crate) bytes: AtomicU64,
    /// CUDA events that must complete before the block is free; 0 for an event that is complete.
    pub(crate) events: [AtomicU64; EVENTS],
}

/// PyTorch's allocator on a device. A *report* is the allocator's call of reportMemoryUsageToProfiler when a block is allocated
/// or freed. Reports write the fields while PyTorch holds its mutex for the device. Without that mutex, the sender writes
/// `check_due` and `is_unknown`, and sources/torch/adopt.rs and frees of segments write others. The fields that each report uses
/// come first, in one cache line.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct Device {
    /// The agent's id for the pool of PyTorch's allocator; 0 until the allocator's first report.
    pub(crate) pool: AtomicU64,
    /// The agent's sum of the bytes of blocks in use. It must equal PyTorch's total in each report.
    pub(crate) sum: AtomicI64,
    /// Bytes that PyTorch has reserved from the driver, as last reported.
    pub(crate) reserved: AtomicU64,
    /// Bytes of recorded segments. They equal `reserved`, unless some segments are older than the agent.
    pub segments: AtomicU64,
    /// `reserved` minus `segments` at the last report, in bytes. Between reports the two also differ while a segment is added or
    /// removed.
    pub(crate) unseen: AtomicI64,
    /// Bytes of live blocks that are older than the agent and are not recorded.
    pub older: AtomicU64,
    pub(crate) reports: AtomicU64,
    /// Number of pending blocks: freed, but waiting for events.
    pub(crate) pending: AtomicU32,
    /// Whether the pool's totals are to be recorded at the next report. Set by the sender, and when the pool is made if there are
    /// older blocks.
    pub(crate) check_due: AtomicBool,
    /// Bytes of `unseen` that were recorded as older than the agent.
    pub(crate) baseline: AtomicI64,
    /// Sum of the differences (bytes) between the agent's sum and the total in each report; 0 if they always agreed.
    pub drift: AtomicU64,
    /// Remaining number of times that all rows may be searched for a block's segment.
    pub(crate) searches: AtomicU32,
    /// Whether the device's UUID must still be read from the driver, by the sender.
    pub(crate) is_unknown: AtomicBool,
    pub(crate) turn: SpinLock,
    pub(crate) waiting: &'static [PendingBlock],
}

impl Device {
    #[cold]
    #[inline(never)]
    pub(crate) fn add_drift(&self, bytes: u64) {
        self.drift.fetch_add(bytes, Relaxed);
    }

    /// Subtracts bytes of blocks older than the agent that were freed, or are recorded now.
    pub(crate) fn forget_older(&self, bytes: u64) {
        let _ = self.older.fetch_update(Relaxed, Relaxed, |older| Some(older.saturating_sub(bytes)));
    }
}

/// The pool of PyTorch's allocator on a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TorchPool<'a> {
    pub device: &'a Device,
    pub id: u64,
    pub slot: u8,
}

/// State of PyTorch's allocator in the process, as a part of [`Core`](crate::driver::core::Core).
#[derive(Debug)]
pub struct State {
    /// State of each device, by the program's CUDA ordinal.
    pub devices: [Device; DEVICES],
    /// Whether the driver had a context before the agent started. Then segments that were not recorded are older than the agent.
    pub is_late: AtomicBool,
    /// Number of pools of PyTorch's allocator that were created.
    pub(crate) made: AtomicU32,
    /// Number of allocations of PyTorch without its native caching allocator, where each tensor is a driver allocation of its
    /// own.
    pub(crate) single_tensors: AtomicU64,
    pub(crate) stacks: AtomicU32,
    /// Number of pending blocks (freed, waiting for events) that were not recorded because `waiting` was full.
    pub unrecorded_pending: AtomicU64,
}

const SEARCHES: u32 = 32;

impl State {
    pub(crate) fn new() -> Option<Self> {
        let waiting = anonymous::<PendingBlock>(DEVICES * MOST)?; // uses no memory until a block waits
        let device = |index: usize| Device {
            searches: AtomicU32::new(SEARCHES),
            waiting: waiting.get(index * MOST..(index + 1) * MOST).unwrap_or_default(),
            ..Device::default()
        };
        Some(State {
            devices: std::array::from_fn(device),
            is_late: AtomicBool::new(false),
            made: AtomicU32::new(0),
            single_tensors: AtomicU64::new(0),
            stacks: AtomicU32::new(0),
            unrecorded_pending: AtomicU64::new(0),
        })
    }

    /// Returns the pool of PyTorch's allocator on a device, if the allocator has made a report.
    pub(crate) fn pool(&self, slot: u8) -> Option<TorchPool<'_>> {
        let device = self.devices.get(usize::from(slot))?;
        let id = device.pool.load(Relaxed);
        (id != 0).then_some(TorchPool { device, id, slot })
    }

    pub(crate) fn pools(&self) -> impl Iterator<Item = TorchPool<'_>> {
        let count = if self.made.load(Relaxed) == 0 { 0 } else { DEVICES as u8 };
        (0..count).filter_map(|slot| self.pool(slot))
    }
}
