//! The vocabulary: what a source can say. The bytes are in codec.rs.
//!
//! `seq` numbers the *ordered* records of one origin: allocations, frees, blocks and everything
//! else whose order decides a sum. It is the slot index in the agent's ring plus one, so a gap in
//! `seq` is a loss. Names, facts and control have `seq` 0. Ids (`tag`, `stack`, `module`, `device`)
//! are local to the origin that speaks and are introduced by `Tag`, `Stack`, `Module` and `Device`.
//!
//! A **resync entry** is not a record of its own: it is the record that made the row, said again with
//! [`Flags::RESTATED`] and its original `seq`, between `ResyncBegin` and `ResyncEnd`. What is not
//! said again in between is gone.

/// `Stamp::device` when a record concerns no device.
pub const NONE_DEVICE: u8 = 255;

/// `context` of a `Lost` record: the records were kept back because somebody asked for it, and none was lost.
pub const WITHHELD: u32 = u32::MAX;

/// Bits of [`Stamp::flags`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Flags(pub u8);

impl Flags {
    /// An entry of a resync: the state as it is, not something that happened now.
    pub const RESTATED: Flags = Flags(1);
    /// The tag was inherited from the process, the thread had none of its own.
    pub const INHERITED: Flags = Flags(2);
    /// The bytes are an estimate (arrays, logs in MiB).
    pub const ESTIMATED: Flags = Flags(4);
    /// Recorded under stream capture: a graph owns the bytes.
    pub const CAPTURED: Flags = Flags(8);
    /// `AllocEnd`: it is older than the agent, which has taken it over from its owner's list. `FreeBegin`: that was wrong.
    pub const OLDER: Flags = Flags(16);

    /// Whether all bits of `other` are set.
    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }
    /// Both sets of bits.
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// Set in [`Stamp::context`] of `Pressure` and `Oom` where its other bits are the code of the phase that the thread is in. Older agents do
/// not say it: they leave there what CUPTI numbers a context.
pub const PHASE_SAID: u32 = 1 << 31;

/// Who, when and where: the same for every record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// Position in the origin's total order, from 1; 0 for records without one. In `EarlierLife` the last one heard of the process.
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
    /// CUPTI's contextUid; in block records a small number for the stream; in `DeviceSample` how
    /// long the read took in ns; in `VmmCreate` how long the call took in us; in `Device` its
    /// multiprocessors << 16 | threads that one of them can hold, 0 where that is not known; in `Lost`
    /// [`WITHHELD`] where the records were kept back on request; in `Pressure` and `Oom` see [`PHASE_SAID`].
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

/// One thing that a source says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Who, when and where.
    pub stamp: Stamp,
    /// What.
    pub body: Body<'a>,
}

pub use crate::codec::Body;
