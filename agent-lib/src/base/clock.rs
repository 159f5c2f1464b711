//! CLOCK_MONOTONIC in nanoseconds, computed from the processor's time stamp counter where that is reliable.
//!
//! A call of clock_gettime costs 20 to 40 ns, as much as the rest of a record. The counter and one multiplication cost 10 ns.
//! The counter is used if the kernel uses it as clock source, too. Times are a linear function of the counter, the line. The
//! sender compares the line with the kernel's clock, first often, then about once a second. It then changes the slope, so that
//! the line stays continuous and meets the kernel's clock one period later. After a jump (a virtual machine was moved, the
//! machine slept) the line is set to the kernel's clock at once. After too many jumps only the kernel's clock is used.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*, fence};

/// Largest error of a time in ns, from out-of-order reads of the counter and the error of the slope. It is subtracted from the
/// time in a Watermark record, up to which all records were sent.
pub(crate) const MARGIN_NS: u64 = 20_000;
/// A larger difference from the kernel's clock, in ns, is a jump and not a drift.
const JUMP_NS: i64 = 1_000_000;
/// Maximum number of jumps; after more, only the kernel's clock is used.
const JUMPS_ALLOWED: u32 = 8;
/// Time in ns from the first measurement to the computation of the first slope.
const FIRST_NS: u64 = 20_000_000;
/// Longest time between measurements, in ns. The time grows with the age of the slope: then the slope's error stays about as
/// small as that of a measurement.
const PERIOD_NS: u64 = 1_000_000_000;

pub(crate) fn kernel_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

pub(crate) fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: every kernel has these clocks, and `time` has room for the result.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cold]
#[inline(never)]
fn kernel_ns_cold() -> u64 {
    kernel_ns()
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn ticks() -> u64 {
    // SAFETY: every x86-64 has this instruction. A kernel that forbids it does not use the counter as its clock source.
    unsafe { std::arch::x86_64::_rdtsc() }
}
#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    0
}

/// Value of `Clock::version` while there is no line: the kernel's clock is read.
const NONE: u32 = u32::MAX;

/// The line: `time = base_ns + (ticks - base_ticks) * slope / 2^32`, where `ticks` is the counter.
#[derive(Debug)]
#[repr(C)]
pub struct Clock {
    /// Version of the line; odd while the line is being changed, and before there is one.
    version: AtomicU32,
    base_ticks: AtomicU64,
    base_ns: AtomicU64,
    slope: AtomicU64,
}

#[derive(Debug, Default)]
pub(crate) struct Calibration {
    /// Values of the counter and of the kernel's clock (ns) at the start of the measurements, or after the last jump.
    start: Option<(u64, u64)>,
    last_ns: u64,
    jumps: u32,
    given_up: bool,
}

impl Clock {
    pub(crate) const fn new() -> Self {
        Clock {
            version: AtomicU32::new(NONE),
            base_ticks: AtomicU64::new(0),
            base_ns: AtomicU64::new(0),
            slope: AtomicU64::new(0),
        }
    }

    /// Returns the current time in ns.
    #[inline(always)]
    pub fn now(&self) -> u64 {
        let version = self.version.load(Acquire);
        if version & 1 != 0 {
            return kernel_ns_cold();
        }
        let base_ticks = self.base_ticks.load(Relaxed);
        let base_ns = self.base_ns.load(Relaxed);
        let slope = self.slope.load(Relaxed);
        fence(Acquire);
        if self.version.load(Relaxed) != version {
            return kernel_ns_cold();
        }
        line(base_ticks, base_ns, slope, ticks())
    }

    fn set(&self, base_ticks: u64, base_ns: u64, slope: u64) {
        let version = self.version.load(Relaxed);
        self.version.store(version | 1, Relaxed);
        fence(Release);
        self.base_ticks.store(base_ticks, Relaxed);
        self.base_ns.store(base_ns, Relaxed);
        self.slope.store(slope, Relaxed);
        self.version.store((version | 1).wrapping_add(1), Release);
    }

    /// Measures and adjusts the line if a measurement is due. One thread calls this regularly; most calls do nothing.
    pub(crate) fn calibrate(&self, state: &mut Calibration) {
        if state.given_up {
            return;
        }
        let now = kernel_ns();
        let Some((start_ticks, start_ns)) = state.start else {
            state.given_up = !kernel_uses_the_counter();
            state.start = Some(measure());
            return;
        };
        let is_first = self.version.load(Relaxed) == NONE;
        let due_ns = match is_first {
            true => start_ns + FIRST_NS,
            false => state.last_ns + period(state.last_ns, start_ns),
        };
        if now < due_ns {
            return;
        }
        let (ticks, ns) = measure();
        let (Some(ticked), Some(passed)) = (ticks.checked_sub(start_ticks), ns.checked_sub(start_ns)) else {
            return self.give_up(state);
        };
        if ticked == 0 {
            return self.give_up(state);
        }
        // The slope since the start: its error decreases as time passes.
        let slope = ((u128::from(passed) << 32) / u128::from(ticked)) as u64;
        state.last_ns = ns;
        if is_first {
            return self.set(ticks, ns, slope);
        }
        let computed_ns =
            line(self.base_ticks.load(Relaxed), self.base_ns.load(Relaxed), self.slope.load(Relaxed), ticks);
        let ahead = computed_ns.wrapping_sub(ns) as i64;
        if ahead.abs() > JUMP_NS {
            state.jumps += 1;
            state.start = Some((ticks, ns));
            if state.jumps > JUMPS_ALLOWED {
                return self.give_up(state);
            }
            return self.set(ticks, ns, slope);
        }
        // The new line continues the old one here, and meets the kernel's clock one period later.
        let correction = -i128::from(ahead) * i128::from(slope) / i128::from(period(ns, start_ns));
        let slope = (i128::from(slope) + correction).max(1) as u64;
        self.set(ticks, computed_ns, slope);
    }

    fn give_up(&self, state: &mut Calibration) {
        state.given_up = true;
        self.version.store(NONE, Release);
    }
}

/// Returns the time until the next measurement after one at `last_ns`.
fn period(last_ns: u64, start_ns: u64) -> u64 {
    last_ns.saturating_sub(start_ns).clamp(FIRST_NS, PERIOD_NS)
}

#[inline(always)]
fn line(base_ticks: u64, base_ns: u64, slope: u64, ticks: u64) -> u64 {
    // The counter may have been read a little before the line's base was set.
    let since = ticks.wrapping_sub(base_ticks);
    let since = if since as i64 > 0 { since } else { 0 };
    base_ns.wrapping_add(((u128::from(since) * u128::from(slope)) >> 32) as u64)
}

/// Reads the counter and the kernel's clock (ns) five times, and returns the pair that took the shortest time to read.
fn measure() -> (u64, u64) {
    let tries = (0..5).map(|_| {
        let before = ticks();
        let ns = kernel_ns();
        let after = ticks();
        (after.wrapping_sub(before), before.wrapping_add(after.wrapping_sub(before) / 2), ns)
    });
    tries.min_by_key(|(width, ..)| *width).map_or((0, 0), |(_, ticks, ns)| (ticks, ns))
}

/// Whether the kernel uses the counter. It does not on other processors, or if it has found the counter unreliable.
fn kernel_uses_the_counter() -> bool {
    let source = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    cfg!(target_arch = "x86_64") && std::fs::read_to_string(source).is_ok_and(|source| source.trim() == "tsc")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn it_follows_the_kernel() {
        let clock = Clock::new();
        let mut state = Calibration::default();
        for _ in 0..60 {
            clock.calibrate(&mut state);
            let before = kernel_ns();
            let told = clock.now();
            let after = kernel_ns();
            assert!(told + MARGIN_NS >= before && told <= after + MARGIN_NS, "{before} {told} {after}");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(state.given_up || clock.version.load(Relaxed) & 1 == 0);
    }

    #[test]
    fn a_jump_is_followed() {
        let clock = Clock::new();
        let (ticks, ns) = measure();
        if ticks == 0 || !kernel_uses_the_counter() {
            eprintln!("skipped: the counter is not the clock source here");
            return;
        }
        clock.set(ticks, ns + 60_000_000_000, 1 << 31);
        let start = Some((ticks.wrapping_sub(3_000_000_000), ns.wrapping_sub(1_000_000_000)));
        let mut state = Calibration { start, ..Calibration::default() };
        clock.calibrate(&mut state);
        assert_eq!(state.jumps, 1);
        assert!(clock.now().abs_diff(kernel_ns()) < JUMP_NS as u64);
    }
}
