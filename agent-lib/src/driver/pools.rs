//! Pools of the driver. Their reserved bytes are polled, because pools shrink at synchronisations, for which the agent has no
//! callback.
//!
//! A pool is polled when a call that may change it returns: each time if the pool may have grown or was trimmed, else at most ten
//! times a second. The sender polls each pool once a second.
//!
//! The program could destroy a pool while the sender polls it, so the callback of cuMemPoolDestroy waits for the sender, for
//! microseconds.
//!
//! Each value is recorded with the earliest time from which it may be valid: NVML may be read between change and record.

use crate::base::memfd::Zeros;
use crate::threads;
use gpumem_wire::MemoryKind;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

/// Maximum number of pools at a time. Of further pools, only the allocations are recorded.
const POOLS: usize = 128;
const DEVICES: usize = 64;
/// Maximum number of calls of `wait_a_turn` while waiting for the sender: half a second. A debugger may have stopped the sender.
const MAX_TURNS: u32 = 5_064;
/// Ids of the pools of graph memory, one for each device: "gm" in the upper bits, and the device. No address has such a value.
pub(super) const GRAPH: u64 = 0x676d << 48;

/// An entry of the table of driver pools; it has a pool or is free.
#[derive(Debug, Default)]
pub(super) struct Pool {
    /// Handle of the pool; 0 while the entry is free, 1 while it is being written.
    pub(super) id: AtomicU64,
    pub(super) device: AtomicU32,
    /// Number of threads that request a poll now. The first one polls until no other has requested one meanwhile.
    pub(super) asked: AtomicU32,
    /// Begin (ns) of the oldest call that has returned since the last poll and may have changed the pool; `u64::MAX` for none.
    pub(super) entered_ns: AtomicU64,
    pub(super) polled_ns: AtomicU64,
    pub(super) reserved: AtomicU64,
    pub(super) used: AtomicU64,
    /// Sum of the bytes allocated from the pool since the last poll. Frees are not subtracted.
    pub(super) taken: AtomicU64,
}

pub(crate) fn graph_memory(device: u8) -> u64 {
    GRAPH | u64::from(device)
}

/// The driver's pools and their last polled sizes.
#[derive(Debug, Default)]
pub struct DriverPools {
    pub(super) pools: Zeros<Pool, POOLS>,
    /// For each device, the pool of stream-ordered allocations whose call does not name one; 0 while it is unknown.
    pub(super) current: Zeros<AtomicU64, DEVICES>,
    /// The pool that the sender is polling; 0 for none.
    pub(super) asking: AtomicU64,
    /// Ids of pools of managed and of host memory. These pools are neither recorded nor polled.
    pub(super) managed: NumberSet,
    pub(super) host: NumberSet,
}

impl DriverPools {
    pub(super) fn find(&self, id: u64) -> Option<&Pool> {
        if id <= 1 { None } else { self.pools.iter().find(|pool| pool.id.load(Acquire) == id) }
    }

    /// Adds a pool of managed or host memory.
    pub(crate) fn set_memory_kind(&self, id: u64, memory: MemoryKind) {
        self.forget_elsewhere(id);
        match memory {
            MemoryKind::Managed => self.managed.add(id),
            _ => self.host.add(id),
        }
    }

    /// Returns the kind of memory of a pool of managed or host memory; `None` for other pools.
    #[inline]
    pub(crate) fn memory_elsewhere(&self, id: u64) -> Option<MemoryKind> {
        if self.managed.has(id) {
            return Some(MemoryKind::Managed);
        }
        self.host.has(id).then_some(MemoryKind::Pinned)
    }

    /// Removes a pool of managed or host memory; returns whether there was one.
    pub(super) fn forget_elsewhere(&self, id: u64) -> bool {
        let (managed, host) = (self.managed.remove(id), self.host.remove(id));
        managed || host
    }

    /// Waits until the sender has finished its current poll, half a second at most: it may be polling the pool that was just
    /// removed.
    pub(super) fn wait_for_sender(&self) {
        let asking = self.asking.load(SeqCst);
        for turn in 0..MAX_TURNS {
            if asking == 0 || self.asking.load(SeqCst) != asking {
                return;
            }
            threads::wait_a_turn(turn);
        }
    }

    /// Returns the device of a pool, if the pool is known.
    pub fn device_of(&self, id: u64) -> Option<u8> {
        self.find(id).map(|pool| pool.device.load(Relaxed) as u8)
    }

    /// Removes the pools of a device that is reset. A pool is added and recorded again when it is used again.
    pub(crate) fn forget_device(&self, device: u32) {
        for pool in self.pools.iter().filter(|pool| pool.device.load(Relaxed) == device) {
            let id = pool.id.load(Acquire);
            if id > 1 {
                let _ = pool.id.compare_exchange(id, 0, SeqCst, Relaxed);
                self.wait_for_sender();
            }
        }
        self.set_current(device, 0);
    }

    /// Returns the reserved and used bytes of a pool at the last poll.
    pub(crate) fn state(&self, id: u64) -> Option<(u64, u64)> {
        let pool = self.find(id)?;
        Some((pool.reserved.load(Relaxed), pool.used.load(Relaxed)))
    }

    pub(crate) fn set_current(&self, device: u32, pool: u64) {
        if let Some(current) = self.current.get(device as usize) {
            current.store(pool, Relaxed);
        }
    }
}

const PLACES: usize = 256;

/// A set of at most `PLACES` numbers, without locks. A lookup in an empty set costs one load.
#[derive(Debug, Default)]
pub(crate) struct NumberSet {
    count: AtomicUsize,
    numbers: Zeros<AtomicU64, PLACES>,
}

impl NumberSet {
    /// Adds a number, unless it is 0, in the set already, or the set is full.
    pub(crate) fn add(&self, number: u64) {
        let free = |place: &&AtomicU64| place.compare_exchange(0, number, AcqRel, Relaxed).is_ok();
        if number != 0 && !self.has(number) && self.numbers.iter().any(|place| free(&place)) {
            self.count.fetch_add(1, AcqRel);
        }
    }

    #[inline(always)]
    pub(crate) fn has(&self, number: u64) -> bool {
        self.count.load(Acquire) > 0 && self.numbers.iter().any(|place| place.load(Acquire) == number)
    }

    /// Removes a number; returns whether the set had it.
    pub(crate) fn remove(&self, number: u64) -> bool {
        let found = self.has(number)
            && self.numbers.iter().any(|place| place.compare_exchange(number, 0, AcqRel, Relaxed).is_ok());
        if found {
            self.count.fetch_sub(1, AcqRel);
        }
        found
    }
}

/// Handles of multicast objects, and the addresses at which these objects are mapped. The handles look like those of memory, but
/// have none, so calls of cuMemMap and cuMemRelease with them are ignored. An object is removed when cuMemCreate returns the same
/// number.
#[derive(Debug, Default)]
pub(crate) struct Multicast {
    pub(crate) objects: NumberSet,
    pub(crate) mappings: NumberSet,
}
