//! Polls the driver's memory pools: reads their reserved and used bytes and records changes. pools.rs describes when.

use super::pools::{GRAPH, Pool, graph_memory};
use crate::base::row::{Key, RowExtra};
use crate::driver::allocations::took_us_short;
use crate::driver::core::Core;
use crate::record::recorder::{RecordContext, no_row};
use crate::threads::{self, Thread};
use cupti_sys::pool_attribute::*;
use gpumem_wire::{Body, PoolOwner};
use std::sync::atomic::Ordering::*;

/// Minimum interval, in ns, between two polls of a pool after driver calls that use it.
pub(crate) const EVERY_NS: u64 = 100_000_000;
/// Value of `every_ns` for a pool that must be polled now: it was trimmed, or may have grown.
pub(crate) const AT_ONCE: u64 = 0;

impl Core {
    /// Returns the pool that a stream-ordered allocation on `device` uses if the call does not name one; 0 if it is unknown.
    pub(crate) fn current_pool(&self, thread: &Thread, device: u8) -> u64 {
        let Some(current) = self.driver_pools.current.get(usize::from(device)) else { return 0 };
        let known = current.load(Relaxed);
        if known != 0 {
            return known;
        }
        let mut pool = 0;
        let get = self.devices.driver().and_then(|driver| driver.device_get_mem_pool);
        // SAFETY: a function of the loaded driver, with room for its answer. The agent has no callback enabled for it.
        if get.is_none_or(|get| unsafe { get(&mut pool, i32::from(device)) } != 0) {
            return 0;
        }
        self.pool_seen(thread, pool, device, PoolOwner::Driver);
        current.store(pool, Relaxed);
        pool
    }

    /// Adds and records the driver pool `id`, if it is used for the first time.
    pub(crate) fn pool_seen(&self, thread: &Thread, id: u64, device: u8, owner: PoolOwner) {
        if id <= 1 || self.driver_pools.find(id).is_some() {
            return;
        }
        self.driver_pools.forget_elsewhere(id); // the id belonged to a pool that was destroyed
        let claim = |pool: &&Pool| {
            pool.id.load(Relaxed) == 0 && pool.id.compare_exchange(0, 1, AcqRel, Relaxed).is_ok()
        };
        if let Some(pool) = self.driver_pools.pools.iter().find(claim) {
            pool.device.store(u32::from(device), Relaxed);
            for word in [&pool.polled_ns, &pool.reserved, &pool.used, &pool.taken] {
                word.store(0, Relaxed);
            }
            pool.entered_ns.store(u64::MAX, Relaxed);
            pool.id.store(id, Release);
        }
        let body = Body::PoolCreate { pool: id, parent: 0, reports_blocks: 0, owner };
        let at = RecordContext::on(device);
        self.recorder.insert(thread, at, body, Key::Pool(id), RowExtra::default());
    }

    pub(crate) fn pool_gone(&self, thread: &Thread, id: u64) {
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
        let body = Body::PoolDestroy { pool: id };
        self.recorder.remove(thread, RecordContext::on(device), body, Key::Pool(id));
    }

    /// Returns the pool of a device's graph memory; adds it when the program first adds a memory node to a graph.
    pub(crate) fn graph_memory_used(&self, thread: &Thread, device: u8) -> u64 {
        let id = graph_memory(device);
        self.pool_seen(thread, id, device, PoolOwner::Graph);
        id
    }

    /// Polls a pool, unless it was polled less than `every_ns` ago.
    pub(crate) fn poll_pool(&self, thread: &Thread, id: u64, every_ns: u64) {
        if let Some(pool) = self.driver_pools.find(id) {
            self.poll(thread, pool, every_ns);
        }
    }

    /// Polls a pool after an allocation of `bytes`: at once if the pool may have grown, because there may be no later call.
    pub(crate) fn poll_pool_for(&self, thread: &Thread, id: u64, bytes: u64) {
        let Some(pool) = self.driver_pools.find(id) else { return };
        let taken = pool.taken.fetch_add(bytes, Relaxed).saturating_add(bytes);
        let fits = pool.used.load(Relaxed).saturating_add(taken) <= pool.reserved.load(Relaxed);
        self.poll(thread, pool, if fits { EVERY_NS } else { AT_ONCE });
    }

    pub(crate) fn poll_pools(&self, thread: &Thread) {
        for pool in self.driver_pools.pools.iter() {
            let id = pool.id.load(Acquire);
            if id <= 1 {
                continue;
            }
            // Either a thread that destroys the pool sees `asking`, or this thread sees that the pool was removed.
            self.driver_pools.asking.store(id, SeqCst);
            if pool.id.load(SeqCst) == id {
                self.poll(thread, pool, EVERY_NS);
            }
            self.driver_pools.asking.store(0, SeqCst);
        }
    }

    fn poll(&self, thread: &Thread, pool: &Pool, every_ns: u64) {
        let entered_ns = thread.moving_since_ns.load(Relaxed);
        if every_ns == AT_ONCE && entered_ns != 0 {
            pool.entered_ns.fetch_min(entered_ns, AcqRel); // another thread may be polling the pool now
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
        // The order matters: a call that changed the pool before this line is still in flight, or has set `entered_ns`.
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
            let body = |time_ns: u64, _: &mut RecordContext| {
                let took_us = took_us_short(Some(entered_ns), time_ns);
                Body::PoolState { pool: id, reserved_bytes, used_bytes, took_us }
            };
            self.recorder.record_timed(thread, RecordContext::on(device), body, no_row);
        }
    }

    fn read_pool(&self, id: u64, device: u8) -> Option<(u64, u64)> {
        let driver = self.devices.driver()?;
        let (mut reserved, mut used) = (0, 0);
        // SAFETY: functions of the loaded driver, with room for 64-bit answers. The pool exists: the calling thread uses it now,
        // or is the sender, for which the end of a pool waits.
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
