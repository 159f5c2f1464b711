//! Shares the poller's current NVML call with its parent, because a poller stuck in the kernel cannot report anything. The state
//! is one 64-bit word in an unnamed file that both processes have open. The child maps the file, so that an update costs one
//! store and no system call. (`pwrite` took a tenth of a sample's time.) The parent reads it regularly.

use super::raw::SharedWord;
use crate::clock::now_ns;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd, pread};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

/// What the poller does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    /// Not in a call: the poller waits, or writes frames.
    Nothing,
    /// Opening or closing the NVML library.
    Library,
    /// Opening the GPU that has this NVML index.
    Index(u16),
    /// Reading the memory of the device in this slot.
    Device(u8),
    /// Reading the process lists of the device in this slot.
    Lists(u8),
    /// Reading the events of all GPUs.
    Events,
}

impl Call {
    fn code(self) -> u64 {
        match self {
            Call::Nothing => 0,
            Call::Library => 1 << 16,
            Call::Index(index) => 2 << 16 | u64::from(index),
            Call::Device(slot) => 3 << 16 | u64::from(slot),
            Call::Lists(slot) => 4 << 16 | u64::from(slot),
            Call::Events => 5 << 16,
        }
    }

    fn from_code(code: u64) -> Call {
        match (code >> 16, code & 0xffff) {
            (1, _) => Call::Library,
            (2, index) => Call::Index(index as u16),
            (3, slot) => Call::Device(slot as u8),
            (4, slot) => Call::Lists(slot as u8),
            (5, _) => Call::Events,
            _ => Call::Nothing,
        }
    }
}

/// Number of low bits of the shared word that encode the current call; the higher bits count the calls. For [`Call::Nothing`] the
/// low 16 bits are the time until which the poller sleeps, in ms of CLOCK_MONOTONIC.
const CODE_BITS: u32 = 19;
/// Maximum sleep that is accepted, in ms: twice the longest one. A poller that is stopped for a minute, until its announced time
/// seems to come again, has been replaced before.
const MAX_SLEEP_MS: u16 = 2000;

/// The daemon's view of the call that the poller process is in.
#[derive(Debug)]
pub(crate) struct CallState {
    file: OwnedFd,
    /// As last read: the number of calls begun, and the current call.
    seen: (u64, Call),
    /// Number of reads since the state last changed.
    unchanged: u32,
}

/// Writes, in the poller process, the NVML call that it is in.
#[derive(Debug)]
pub(crate) struct CallStateWriter {
    word: SharedWord,
    /// Number of calls begun so far.
    count: u64,
}

impl CallState {
    /// Creates the file, with the state [`Call::Nothing`].
    pub(crate) fn new() -> std::io::Result<CallState> {
        let file = memfd_create("gpumemd-beacon", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, size_of::<u64>() as u64)?;
        Ok(CallState { file, seen: (0, Call::Nothing), unchanged: 0 })
    }

    /// Returns a descriptor for a child to inherit, and the descriptor's number. Drop it once the child has started.
    pub(crate) fn to_inherit(&self) -> std::io::Result<(OwnedFd, i32)> {
        let copy = self.file.try_clone()?;
        fcntl_setfd(&copy, FdFlags::empty())?;
        let number = copy.as_raw_fd();
        Ok((copy, number))
    }

    /// Reads the state. Returns for how long it has not changed, if it is read once in each `tick`. An announced sleep does not
    /// count. Counts ticks instead of time: while the daemon was stopped, the child may have been stopped too.
    pub(crate) fn stalled_for(&mut self, tick: Duration) -> Duration {
        let (now, sleeps) = (self.read(), !self.sleeps_for(now_ns()).is_zero());
        self.unchanged = if now == self.seen && !sleeps { self.unchanged + 1 } else { 0 };
        self.seen = now;
        tick * self.unchanged
    }

    /// Returns the call that [`CallState::stalled_for`] last read.
    pub(crate) fn call(&self) -> Call {
        self.seen.1
    }

    /// Reads the child's current call, and a counter that distinguishes calls of the same kind.
    pub(crate) fn read(&self) -> (u64, Call) {
        let word = self.word();
        (word >> CODE_BITS, Call::from_code(word & ((1 << CODE_BITS) - 1)))
    }

    /// Reads how long the child will sleep from `now_ns` on. Zero if it is in a call, or should be awake.
    pub(crate) fn sleeps_for(&self, now_ns: u64) -> Duration {
        let word = self.word();
        if Call::from_code(word & ((1 << CODE_BITS) - 1)) != Call::Nothing {
            return Duration::ZERO;
        }
        let until_ms = word as u16;
        let left_ms = until_ms.wrapping_sub((now_ns / 1_000_000) as u16);
        Duration::from_millis(if until_ms != 0 && left_ms <= MAX_SLEEP_MS { left_ms.into() } else { 0 })
    }

    fn word(&self) -> u64 {
        let mut bytes = [0; 8];
        if matches!(pread(&self.file, &mut bytes, 0), Ok(8)) { u64::from_ne_bytes(bytes) } else { 0 }
    }
}

impl CallStateWriter {
    /// Opens the state in the child. `number` is that of the inherited descriptor.
    pub(crate) fn inherited(number: i32) -> std::io::Result<CallStateWriter> {
        // Open the file again instead of taking over the descriptor, which this process may not own.
        let file = File::options().read(true).write(true).open(format!("/proc/self/fd/{number}"))?;
        Ok(CallStateWriter { word: SharedWord::map(&file)?, count: 0 })
    }

    pub(crate) fn set(&mut self, call: Call) {
        self.count += 1;
        self.word.set(self.count << CODE_BITS | call.code());
    }

    /// Announces a sleep until this time (ns, CLOCK_MONOTONIC), in which no call is made.
    pub(crate) fn sleep_until(&mut self, until_ns: u64) {
        self.count += 1;
        // 0 announces nothing, as the words of calls have it.
        let until = ((until_ns / 1_000_000) & 0xffff).max(1);
        self.word.set(self.count << CODE_BITS | Call::Nothing.code() | until);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_sees_what_the_child_does() {
        let parent = CallState::new().expect("a beacon");
        assert_eq!(parent.read(), (0, Call::Nothing));
        let (kept, number) = parent.to_inherit().expect("a descriptor");
        let mut child = CallStateWriter::inherited(number).expect("the other end");
        drop(kept);
        for (count, doing) in [
            Call::Library,
            Call::Index(65_535),
            Call::Device(254),
            Call::Lists(254),
            Call::Events,
            Call::Nothing,
        ]
        .into_iter()
        .enumerate()
        {
            child.set(doing);
            assert_eq!(parent.read(), (count as u64 + 1, doing));
        }
    }

    #[test]
    fn the_parent_knows_how_long_the_child_sleeps() {
        const SECOND: u64 = 1_000_000_000;
        let parent = CallState::new().expect("a call state");
        let (kept, number) = parent.to_inherit().expect("a descriptor");
        let mut child = CallStateWriter::inherited(number).expect("the other end");
        drop(kept);
        for now_ns in [0, 65 * SECOND, 65 * SECOND + 535_000_000, 1_000_000 * SECOND] {
            child.sleep_until(now_ns + SECOND);
            assert_eq!(parent.sleeps_for(now_ns), Duration::from_secs(1), "{now_ns}");
            assert_eq!(parent.read().1, Call::Nothing);
            for late_ns in [SECOND, 2 * SECOND, 20 * SECOND, 40 * SECOND, 60 * SECOND] {
                assert_eq!(parent.sleeps_for(now_ns + late_ns), Duration::ZERO, "{now_ns} {late_ns}");
            }
            child.set(Call::Device(3));
            assert_eq!(parent.sleeps_for(now_ns), Duration::ZERO);
        }
    }
}
