//! Types of a record. codec.rs has their bytes.
//!
//! `seq` numbers the *ordered* records of one origin: allocations, frees, blocks and everything else whose order affects a sum.
//! It is the slot index in the agent's ring plus one, so a gap in `seq` is a loss. Names, facts and control have `seq` 0. Ids
//! (`tag`, `stack`, `module`, `device`) are local to the origin and are introduced by `Tag`, `Stack`, `Module` and `Device`.
//!
//! A **resync entry** has no separate kind: it repeats the record that created the row, with [`Flags::RESTATED`] and its
//! original `seq`, between `ResyncBegin` and `ResyncEnd`. A row that is not repeated no longer exists.

/// `Stamp::device` when a record concerns no device.
pub const NONE_DEVICE: u8 = 255;

/// `context` of a `Lost` record whose records were withheld on request (mute or pause), not lost.
pub const WITHHELD: u32 = u32::MAX;

/// Bits of [`Stamp::flags`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Flags(pub u8);

impl Flags {
    /// A resync entry: existing state, not a new event.
    pub const RESTATED: Flags = Flags(1);
    /// The tag is the process's, because the thread had no open scope.
    pub const INHERITED: Flags = Flags(2);
    /// The bytes are an estimate (arrays, logs in MiB).
    pub const ESTIMATED: Flags = Flags(4);
    /// Recorded under stream capture: a graph owns the bytes.
    pub const CAPTURED: Flags = Flags(8);
    /// `AllocEnd`: the allocation predates the agent, which adopted it from its owner's list. `FreeBegin`: revokes that.
    pub const OLDER: Flags = Flags(16);

    /// Whether all bits of `other` are set.
    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }
    /// Returns the union of both sets of bits.
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// Set in [`Stamp::context`] of `Pressure` and `Oom` if its other bits are the code of the thread's phase. Older agents do not set it;
/// their `context` is CUPTI's context number.
pub const PHASE_SAID: u32 = 1 << 31;

/// Fields common to all records: position, time, tag, thread, device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// Position in the origin's total order, from 1; 0 for unordered records. In `EarlierLife` the last one received from the process.
    pub seq: u64,
    /// CLOCK_MONOTONIC of the host in ns (but see [`crate::ClockKind`]).
    pub time_ns: u64,
    /// Tag in force; 0 for none.
    pub tag: u32,
    /// Stack of the call; 0 for none.
    pub stack: u32,
    /// Thread id; in records about a process (`Origin`, `Hello`, `ProcessFacts`, `ProcessSample`,
    /// `ProcessGone`) its pid in the daemon's namespace.
    pub thread: u32,
    /// CUPTI's contextUid. In block records a small number for the stream; in `DeviceSample` the
    /// duration of the read in ns; in `VmmCreate` the duration of the call in us; in `Device` its
    /// multiprocessors << 16 | threads for each multiprocessor, 0 if unknown; in `Lost` [`WITHHELD`] if
    /// the records were withheld on request; in `Pressure` and `Oom` see [`PHASE_SAID`].
    pub context: u32,
    /// Library that made the call; 0 for unknown.
    pub module: u16,
    /// The origin's device slot, or [`NONE_DEVICE`].
    pub device: u8,
    /// See [`Flags`].
    pub flags: Flags,
}

impl Default for Stamp {
    fn default() -> Self {
        Stamp {
            seq: 0,
            time_ns: 0,
            tag: 0,
            stack: 0,
            thread: 0,
            context: 0,
            module: 0,
            device: NONE_DEVICE,
            flags: Flags(0),
        }
    }
}

/// One record of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Common fields.
    pub stamp: Stamp,
    /// Content by kind.
    pub body: Body<'a>,
}

pub use crate::codec::Body;
