//! The clocks. Records carry CLOCK_MONOTONIC of the host; everything else is for anchors.

use gpumem_wire::{Body, ClockKind, Record, Stamp};
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

fn read(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}

/// CLOCK_MONOTONIC in ns.
pub fn now_ns() -> u64 {
    read(ClockId::Monotonic)
}

/// How far the wall clock is ahead of CLOCK_MONOTONIC, in ns.
pub fn wall_offset_ns() -> i128 {
    i128::from(read(ClockId::Realtime)) - i128::from(now_ns())
}

/// What ties record times to the wall clock from now on.
pub fn anchor() -> Record<'static> {
    let stamp = Stamp { time_ns: now_ns(), ..Stamp::default() };
    let (realtime_ns, boottime_ns) = (read(ClockId::Realtime), read(ClockId::Boottime));
    Record { stamp, body: Body::ClockAnchor { realtime_ns, boottime_ns, clock: ClockKind::Monotonic } }
}

/// Time since the machine was started, suspended times included: what start times of processes count from.
pub fn since_boot() -> Duration {
    Duration::from_nanos(read(ClockId::Boottime))
}
