//! Pools of the driver: what they have reserved is polled, because it shrinks at synchronisations, which nobody reports.
//!
//! At the EXIT of calls that may change it, at most ten times a second each unless it may have grown or was trimmed; and once a
//! second by the sender, so that no figure is older than that while callbacks come. A pool that the program made could be destroyed while
//! the sender asks about it: cuMemPoolDestroy waits in its callback until the sender has its answer, which takes microseconds. With what
//! is found it is said since when it may be so: a reading of NVML may have fallen between the change and its report.

use crate::base::row::{Beside, Key};
use crate::driver::allocations::took_us_short;
use crate::driver::core::Core;
use crate::driver::multicast::Few;
use crate::record::recorder::{At, nothing};
use crate::threads::{self, Thread};
use cupti_sys::pool_attribute::*;
use gpumem_wire::{Body, MemoryKind, PoolOwner};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// Pools at a time that are polled; more are booked by their allocations alone.
const POOLS: usize = 128;
const DEVICES: usize = 64;
/// Turns that a thread which destroys a pool waits for the sender: half a second in all, should a debugger have stopped the sender.
const PATIENCE: u32 = 5_064;
/// Between two polls at EXITs.
const EVERY_NS: u64 = 100_000_000;
/// Ids of graph memory, a pool per device: "gm" and the device; no address looks like that.
const GRAPH: u64 = 0x676d << 48;

/// A pool that is alive, or a free place.
#[derive(Debug, Default)]
struct Pool {
    /// 0 while the place is free, 1 while it is being written.
    id: AtomicU64,
    device: AtomicU32,
    /// Who wants it to be polled: the first does so until nobody has come meanwhile.
    asked: AtomicU32,
    /// When the oldest call was entered that may have changed it and has returned; `u64::MAX` for none.
    entered_ns: AtomicU64,
    polled_ns: AtomicU64,
    reserved: AtomicU64,
    used: AtomicU64,
    /// Taken from it since it was polled; what went back is not taken off.
    taken: AtomicU64,
}

/// The pool that stands for the graph memory of a device.
pub fn graph_memory(device: u8) -> u64 {
    GRAPH | u64::from(device)
}

/// See the module's text.
#[derive(Debug)]
pub struct DriverPools {
    pools: [Pool; POOLS],
    /// The pool that stream-ordered allocations of a device come from; 0 until asked.
    current: [AtomicU64; DEVICES],
    /// The pool that the sender asks the driver about; 0 for none.
    asking: AtomicU64,
    /// Pools without device memory: of managed and of host memory. They are neither reported nor polled.
    managed: Few,
    host: Few,
}

impl DriverPools {
    /// None known.
    pub fn new() -> Self {
        DriverPools {
            pools: std::array::from_fn(|_| Pool::default()),
            current: std::array::from_fn(|_| AtomicU64::new(0)),
            asking: AtomicU64::new(0),
            managed: Few::new(),
            host: Few::new(),
        }
    }

    fn find(&self, id: u64) -> Option<&Pool> {
        if id <= 1 { None } else { self.pools.iter().find(|pool| pool.id.load(Acquire) == id) }
    }

    /// The program made a pool of such memory, which is none of a device.
    pub fn is_elsewhere(&self, id: u64, memory: MemoryKind) {
        self.forget_elsewhere(id);
        match memory {
            MemoryKind::Managed => self.managed.add(id),
            _ => self.host.add(id),
        }
    }

    /// What allocations from a pool are that has no device memory.
    #[inline]
    pub fn memory_elsewhere(&self, id: u64) -> Option<MemoryKind> {
        if self.managed.has(id) {
            return Some(MemoryKind::Managed);
        }
        self.host.has(id).then_some(MemoryKind::Pinned)
    }

    fn forget_elsewhere(&self, id: u64) -> bool {
        let (managed, host) = (self.managed.remove(id), self.host.remove(id));
        managed || host
    }

    /// Waits until the sender has the answer that it waits for now, which may be about a pool that was just taken out.
    fn wait_for_sender(&self) {
        let asking = self.asking.load(SeqCst);
        for turn in 0..PATIENCE {
            if asking == 0 || self.asking.load(SeqCst) != asking {
                return;
            }
            threads::wait_a_turn(turn);
        }
    }

    /// Where a pool that is known has its memory.
    pub fn device_of(&self, id: u64) -> Option<u8> {
        self.find(id).map(|pool| pool.device.load(Relaxed) as u8)
    }

    /// The device is about to be reset: its pools are not looked at again before they are used again.
    pub fn forget_device(&self, device: u32) {
        for pool in self.pools.iter().filter(|pool| pool.device.load(Relaxed) == device) {
            let id = pool.id.load(Acquire);
            if id > 1 {
                let _ = pool.id.compare_exchange(id, 0, SeqCst, Relaxed);
                self.wait_for_sender();
            }
        }
        if let Some(current) = self.current.get(device as usize) {
            current.store(0, Relaxed);
        }
    }

    /// Reserved and used bytes as last polled.
    pub fn state(&self, id: u64) -> Option<(u64, u64)> {
        let pool = self.find(id)?;
        Some((pool.reserved.load(Relaxed), pool.used.load(Relaxed)))
    }

    /// A device was reset: what is used of its pools again is reported again.
    pub fn forget(&self, device: u8) {
        for pool in &self.pools {
            let id = pool.id.load(Acquire);
            if id > 1 && pool.device.load(Relaxed) == u32::from(device) {
                let _ = pool.id.compare_exchange(id, 0, AcqRel, Relaxed);
            }
        }
        if let Some(current) = self.current.get(usize::from(device)) {
            current.store(0, Relaxed);
        }
    }

    /// The program chose another pool for a device.
    pub fn set_current(&self, device: u32, pool: u64) {
        if let Some(current) = self.current.get(device as usize) {
            current.store(pool, Relaxed);
        }
    }
}

impl Default for DriverPools {
    fn default() -> Self {
        Self::new()
    }
}

impl Core {
    /// The pool that a stream-ordered allocation on `device` comes from, when the call does not name one.
    pub fn current_pool(&self, thread: &Thread, device: u8) -> u64 {
        let Some(current) = self.driver_pools.current.get(usize::from(device)) else { return 0 };
        let known = current.load(Relaxed);
        if known != 0 {
            return known;
        }
        let mut pool = 0;
        let get = self.devices.driver().and_then(|driver| driver.device_get_mem_pool);
        // SAFETY: a function of the loaded driver, with a place for its answer; no callback of ours is enabled for it.
        if get.is_none_or(|get| unsafe { get(&mut pool, i32::from(device)) } != 0) {
            return 0;
        }
        self.pool_seen(thread, pool, device, PoolOwner::Driver);
        current.store(pool, Relaxed);
        pool
    }

    /// A driver pool exists; reported the first time.
    pub fn pool_seen(&self, thread: &Thread, id: u64, device: u8, owner: PoolOwner) {
        if id <= 1 || self.driver_pools.find(id).is_some() {
            return;
        }
        self.driver_pools.forget_elsewhere(id); // the number is another pool's now
        let claim = |pool: &&Pool| {
            pool.id.load(Relaxed) == 0 && pool.id.compare_exchange(0, 1, AcqRel, Relaxed).is_ok()
        };
        if let Some(pool) = self.driver_pools.pools.iter().find(claim) {
            pool.device.store(u32::from(device), Relaxed);
            pool.polled_ns.store(0, Relaxed);
            pool.reserved.store(0, Relaxed);
            pool.used.store(0, Relaxed);
            pool.taken.store(0, Relaxed);
            pool.entered_ns.store(u64::MAX, Relaxed);
            pool.id.store(id, Release);
        }
        let body = Body::PoolCreate { pool: id, parent: 0, reports_blocks: 0, owner };
        self.recorder.record(thread, At { device, ..At::NOWHERE }, body, |recorder, row| {
            recorder.live.insert(Key::Pool(id), row, Beside::default());
        });
    }

    /// A pool is about to be destroyed.
    pub fn pool_gone(&self, thread: &Thread, id: u64) {
        if self.driver_pools.forget_elsewhere(id) {
            return;
        }
        let device = self.driver_pools.find(id).map_or(gpumem_wire::NONE_DEVICE, |pool| {
            let device = pool.device.load(Relaxed) as u8;
            pool.id.store(0, SeqCst);
            self.driver_pools.wait_for_sender();
            device
        });
        if let Some(current) = self.driver_pools.current.get(usize::from(device)) {
            let _ = current.compare_exchange(id, 0, Relaxed, Relaxed);
        }
        self.recorder.record(
            thread,
            At { device, ..At::NOWHERE },
            Body::PoolDestroy { pool: id },
            |recorder, _| {
                recorder.live.remove(Key::Pool(id));
            },
        );
    }

    /// The program put memory nodes into a graph.
    pub fn graph_memory_used(&self, thread: &Thread, device: u8) -> u64 {
        let id = graph_memory(device);
        self.pool_seen(thread, id, device, PoolOwner::Graph);
        id
    }

    /// Reads what a pool has reserved, unless that was done just now, and reports it if it changed.
    pub fn poll_pool(&self, thread: &Thread, id: u64) {
        if let Some(pool) = self.driver_pools.find(id) {
            self.poll(thread, pool, EVERY_NS);
        }
    }

    /// The same, at once: it was trimmed.
    pub fn poll_pool_now(&self, thread: &Thread, id: u64) {
        if let Some(pool) = self.driver_pools.find(id) {
            self.poll(thread, pool, 0);
        }
    }

    /// The same after an allocation. One that may not have fit has made the pool larger, and no later call need say so:
    /// then it is read at once.
    pub fn poll_pool_for(&self, thread: &Thread, id: u64, bytes: u64) {
        let Some(pool) = self.driver_pools.find(id) else { return };
        let taken = pool.taken.fetch_add(bytes, Relaxed).saturating_add(bytes);
        let fits = pool.used.load(Relaxed).saturating_add(taken) <= pool.reserved.load(Relaxed);
        self.poll(thread, pool, if fits { EVERY_NS } else { 0 });
    }

    /// Reads what every pool has reserved. For the sender.
    pub fn poll_pools(&self, thread: &Thread) {
        for pool in &self.driver_pools.pools {
            let id = pool.id.load(Acquire);
            if id <= 1 {
                continue;
            }
            // Either the thread that destroys it sees that we ask, or we see that it is gone.
            self.driver_pools.asking.store(id, SeqCst);
            if pool.id.load(SeqCst) == id {
                self.poll(thread, pool, EVERY_NS);
            }
            self.driver_pools.asking.store(0, SeqCst);
        }
    }

    fn poll(&self, thread: &Thread, pool: &Pool, every_ns: u64) {
        let entered_ns = thread.moving_since_ns.load(Relaxed);
        if every_ns == 0 && entered_ns != 0 {
            pool.entered_ns.fetch_min(entered_ns, AcqRel); // whoever polls it now, if not we
        }
        let now = self.recorder.clock.now();
        if now.saturating_sub(pool.polled_ns.load(Relaxed)) < every_ns || pool.asked.fetch_add(1, AcqRel) != 0
        {
            return;
        }
        loop {
            let asked = pool.asked.load(Acquire);
            self.poll_once(thread, pool);
            if pool.asked.compare_exchange(asked, 0, AcqRel, Relaxed).is_ok() {
                break;
            }
        }
    }

    fn poll_once(&self, thread: &Thread, pool: &Pool) {
        let now = self.recorder.clock.now();
        // In this order: a call that has changed the pool by now is under way still, or has left its time.
        let under_way = Some(threads::moving_since_ns()).filter(|&since| since != 0);
        let left = pool.entered_ns.swap(u64::MAX, AcqRel);
        let entered_ns = under_way.unwrap_or(now).min(left).min(now);
        pool.polled_ns.store(now, Relaxed);
        let id = pool.id.load(Relaxed);
        let device = pool.device.load(Relaxed) as u8;
        let Some((reserved_bytes, used_bytes)) = self.read_pool(id, device) else { return };
        let changed = pool.reserved.swap(reserved_bytes, Relaxed) != reserved_bytes
            || pool.used.load(Relaxed) != used_bytes;
        pool.used.store(used_bytes, Relaxed);
        pool.taken.store(0, Relaxed);
        if changed {
            let body = |time_ns: u64, _: &mut At| {
                let took_us = took_us_short(Some(entered_ns), time_ns);
                Body::PoolState { pool: id, reserved_bytes, used_bytes, took_us }
            };
            self.recorder.record_timed(thread, At { device, ..At::NOWHERE }, body, nothing);
        }
    }

    fn read_pool(&self, id: u64, device: u8) -> Option<(u64, u64)> {
        let driver = self.devices.driver()?;
        let (mut reserved, mut used) = (0, 0);
        // SAFETY: functions of the loaded driver, with places for 64-bit answers; the pool is alive: it was named by the
        // call that has just returned, or cannot be destroyed.
        let done = unsafe {
            if id >> 48 == GRAPH >> 48 {
                let get = driver.graph_mem_get_attribute?;
                get(device.into(), GRAPH_RESERVED_CURRENT, &mut reserved) == 0
                    && get(device.into(), GRAPH_USED_CURRENT, &mut used) == 0
            } else {
                let get = driver.pool_get_attribute?;
                get(id, RESERVED_CURRENT, &mut reserved) == 0 && get(id, USED_CURRENT, &mut used) == 0
            }
        };
        done.then_some((reserved, used))
    }
}
