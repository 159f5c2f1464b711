//! State of PyTorch's allocator for each device.

use crate::base::locks::SpinLock;
use crate::base::memfd::anonymous;
use crate::threads::allocator_calls::EVENTS;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering::*};

/// Devices that a process can have, as in devices.rs.
pub(crate) const DEVICES: usize = 64;

/// Blocks of a device that can wait at a time; others count as free.
pub(crate) const MOST: usize = 1024;

/// A freed block that a stream may still use, or a free place.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// Of the block; 0 while the place is free.
    pub(crate) address: AtomicU64,
    /// Of the block.
    pub(crate) bytes: AtomicU64,
    /// Events that it waits for; 0 for one that is over.
    pub(crate) events: [AtomicU64; EVENTS],
}

/// Of a device. All but `check_due` is written under the mutex of PyTorch's allocator for that device: one thread at a time. What each
/// report looks at comes first: one line of the processor's cache.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Device {
    /// Number of its pool; 0 until the first report.
    pub(crate) pool: AtomicU64,
    /// Bytes of blocks by our own sum, which each report's total must equal.
    pub(crate) sum: AtomicI64,
    /// Reserved bytes by the last report.
    pub(crate) reserved: AtomicU64,
    /// Bytes of segments that were recorded: equal to `reserved`, unless some are older than the agent.
    pub segments: AtomicU64,
    /// What `reserved` had more than `segments` with the last report: in between they differ while a segment comes or goes.
    pub(crate) unseen: AtomicI64,
    /// Bytes of blocks that are older than we are and still live.
    pub older: AtomicU64,
    /// Reports.
    pub(crate) reports: AtomicU64,
    /// Blocks in `waiting`.
    pub(crate) pending: AtomicU32,
    /// The sender wants the pool's totals with the next report.
    pub(crate) check_due: AtomicBool,
    /// Bytes of `unseen` that were recorded as older than the agent.
    pub(crate) baseline: AtomicI64,
    /// By how much our sum was wrong, added up.
    pub drift: AtomicU64,
    /// Looks for a block's segment among all rows that are left.
    pub(crate) searches: AtomicU32,
    /// The driver was not asked for this device's UUID so far; the sender asks.
    pub(crate) is_unknown: AtomicBool,
    /// Held by the thread that makes the pool.
    pub(crate) turn: SpinLock,
    /// Free while pending.
    pub(crate) waiting: &'static [Waiting],
}

impl Device {
    /// Our sum was wrong by so much.
    #[cold]
    #[inline(never)]
    pub(crate) fn differs(&self, bytes: u64) {
        self.drift.fetch_add(bytes, Relaxed);
    }

    /// Of the blocks that are older than we are, some are gone, or known now.
    pub(crate) fn forget_older(&self, bytes: u64) {
        let _ = self.older.fetch_update(Relaxed, Relaxed, |older| Some(older.saturating_sub(bytes)));
    }
}

/// Of the process. A forked child that starts anew has a fresh one, as it has of all of `Core`.
#[derive(Debug)]
pub struct State {
    /// By the program's numbers of devices.
    pub devices: [Device; DEVICES],
    /// The driver had a context before we came: segments that were not seen are older.
    pub is_late: AtomicBool,
    /// Pools that were made.
    pub(crate) pools: AtomicU32,
    /// Allocations that are none of a caching allocator: each tensor has its own.
    pub(crate) single_tensors: AtomicU64,
    /// Stacks that were recorded.
    pub(crate) stacks: AtomicU32,
    /// Frees that found no place among those that wait.
    pub untold_pending: AtomicU64,
}

/// Looks through all rows in a device's life.
const SEARCHES: u32 = 32;

impl State {
    /// Nothing so far. `None` without memory.
    pub(crate) fn new() -> Option<Self> {
        let each = MOST;
        let waiting = anonymous::<Waiting>(DEVICES * each)?; // untouched until a block waits
        let device = |index: usize| Device {
            pool: AtomicU64::new(0),
            sum: AtomicI64::new(0),
            reserved: AtomicU64::new(0),
            segments: AtomicU64::new(0),
            unseen: AtomicI64::new(0),
            baseline: AtomicI64::new(0),
            older: AtomicU64::new(0),
            drift: AtomicU64::new(0),
            reports: AtomicU64::new(0),
            pending: AtomicU32::new(0),
            searches: AtomicU32::new(SEARCHES),
            check_due: AtomicBool::new(false),
            is_unknown: AtomicBool::new(false),
            turn: SpinLock::new(),
            waiting: waiting.get(index * each..(index + 1) * each).unwrap_or_default(),
        };
        Some(State {
            devices: std::array::from_fn(device),
            is_late: AtomicBool::new(false),
            pools: AtomicU32::new(0),
            single_tensors: AtomicU64::new(0),
            stacks: AtomicU32::new(0),
            untold_pending: AtomicU64::new(0),
        })
    }

    /// Devices that have a pool, and its number.
    pub(crate) fn with_pools(&self) -> impl Iterator<Item = (&Device, u64)> {
        let none = self.pools.load(Relaxed) == 0;
        let devices = if none { &[][..] } else { &self.devices[..] };
        devices.iter().map(|device| (device, device.pool.load(Relaxed))).filter(|(_, pool)| *pool != 0)
    }
}
