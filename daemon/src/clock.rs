//! Reads clocks. Records have times of the host's CLOCK_MONOTONIC. Other clocks relate these to the wall time and to the boot.

use gpumem_wire::{Body, ClockKind, Record, Stamp};
use rustix::time::{ClockId, clock_gettime};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};
use tokio::time::{Interval, MissedTickBehavior, interval_at};

/// Unit of the intervals of periodic tasks. tokio's timers have slots of 64 ms. A timer at the begin of a slot wakes the daemon
/// once, any other one twice.
pub(crate) const BEAT: Duration = Duration::from_millis(256);

static FIRST_BEAT: OnceLock<Instant> = OnceLock::new();

/// Starts the beats. Must be called directly before the tokio runtime is built, because the slots of the runtime's timers begin
/// then.
pub fn start_beats() {
    FIRST_BEAT.get_or_init(Instant::now);
}

/// Returns ticks at every `count`th beat. All tasks have the same beats, so that one wake-up serves them all.
pub(crate) fn beats(count: u32) -> Interval {
    let (first, period) = (*FIRST_BEAT.get_or_init(Instant::now), BEAT * count);
    let passed = first.elapsed().as_nanos() / period.as_nanos();
    let next = first + period * u32::try_from(passed + 1).unwrap_or(u32::MAX);
    let mut ticks = interval_at(next.into(), period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ticks
}

fn read(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}

pub(crate) fn cpu() -> Duration {
    Duration::from_nanos(read(ClockId::ThreadCPUTime))
}

pub fn now_ns() -> u64 {
    read(ClockId::Monotonic)
}

/// Returns the wall clock: time since 1970. Uses the C library's function instead of the vDSO directly, so that a test can
/// replace it.
pub(crate) fn wall() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Returns how far the wall clock is ahead of CLOCK_MONOTONIC, in ns.
pub(crate) fn wall_offset_ns() -> i128 {
    wall().as_nanos() as i128 - i128::from(now_ns())
}

/// Returns a record that relates CLOCK_MONOTONIC to the wall clock now, so that times of later records can be converted.
pub(crate) fn anchor() -> Record<'static> {
    let stamp = Stamp { time_ns: now_ns(), ..Stamp::default() };
    let (realtime_ns, boottime_ns) = (wall().as_nanos() as u64, read(ClockId::Boottime));
    Record { stamp, body: Body::ClockAnchor { realtime_ns, boottime_ns, clock: ClockKind::Monotonic } }
}

/// Returns the time since boot, including suspended time. The kernel counts start times of processes on this clock.
pub(crate) fn since_boot() -> Duration {
    Duration::from_nanos(read(ClockId::Boottime))
}

/// Returns the age of a process at the time `since_boot`, from its start time in /proc. A process whose start time is unknown (0)
/// counts as old as the machine.
pub(crate) fn process_age(start_ticks: u64, since_boot: Duration) -> Duration {
    const MS_PER_TICK: u64 = 10; // USER_HZ is 100 on every supported architecture
    since_boot.saturating_sub(Duration::from_millis(start_ticks.saturating_mul(MS_PER_TICK)))
}
