//! Reads clocks. Records have times of the host's CLOCK_MONOTONIC. Other clocks relate these to the wall time and to the boot.

use gpumem_wire::{Body, ClockKind, Record, Stamp};
use rustix::time::{ClockId, clock_gettime};
use std::pin::Pin;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::Notify;
use tokio::time::{Sleep, sleep_until};

/// Unit of the intervals of periodic tasks. tokio's timers have slots of 64 ms. A timer at the begin of a slot wakes the daemon
/// once, any other one twice.
pub(crate) const BEAT: Duration = Duration::from_millis(256);

static FIRST_BEAT: OnceLock<Instant> = OnceLock::new();

/// Starts the beats. Must be called directly before the tokio runtime is built, because the slots of the runtime's timers begin
/// then.
pub fn start_beats() {
    FIRST_BEAT.get_or_init(Instant::now);
}

/// Returns the first beat that is later than `wait` from now. All tasks have the same beats, so that one wake-up serves them all.
fn beat_after(wait: Duration) -> tokio::time::Instant {
    let first = *FIRST_BEAT.get_or_init(Instant::now);
    let passed = (first.elapsed() + wait).as_nanos() / BEAT.as_nanos();
    (first + BEAT * u32::try_from(passed + 1).unwrap_or(u32::MAX)).into()
}

/// Timer of a task that other events wake as well. The task postpones the timer at such an event, so that the timer wakes the
/// daemon only while nothing else does.
#[derive(Debug)]
pub(crate) struct BeatTimer(Pin<Box<Sleep>>);

impl BeatTimer {
    /// Returns a timer that expires at the next beat.
    pub(crate) fn new() -> Self {
        BeatTimer(Box::pin(sleep_until(beat_after(Duration::ZERO))))
    }

    /// Sets the timer to the first beat that is later than `wait` from now.
    pub(crate) fn set(&mut self, wait: Duration) {
        self.replace(beat_after(wait));
    }

    /// Replaces the timer instead of resetting it: tokio wakes up at the old time of a timer that is reset to a later one.
    fn replace(&mut self, end: tokio::time::Instant) {
        self.0.set(sleep_until(end));
    }

    /// Sets the timer to `tick` from now if that is shorter than a beat, otherwise to the first beat later than `wait` from now.
    pub(crate) fn set_tick(&mut self, tick: Duration, wait: Duration) {
        match tick < BEAT {
            true => self.replace(tokio::time::Instant::now() + tick),
            false => self.set(wait),
        }
    }

    /// Waits until the timer expires. Returns at once from then on, until the timer is set again.
    pub(crate) async fn expired(&mut self) {
        self.0.as_mut().await;
    }
}

/// Notified at each regular wake-up of the daemon.
static WAKE_UP: Notify = Notify::const_new();

/// Runs the tasks that wait in [`next_wake_up`].
pub(crate) fn share_wake_up() {
    WAKE_UP.notify_waiters();
}

/// Waits at least `wait`, then for the next regular wake-up. Without one, returns one to two beats after `wait`.
pub(crate) async fn next_wake_up(wait: Duration) {
    let (began, mut timer) = (tokio::time::Instant::now(), BeatTimer::new());
    timer.set(wait + BEAT);
    loop {
        tokio::select! {
            () = timer.expired() => return,
            () = WAKE_UP.notified() => if began.elapsed() >= wait {
                return;
            }
        }
    }
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
