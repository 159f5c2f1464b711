//! Types of a record. codec.rs defines their layout in bytes.
//!
//! `seq` numbers the *ordered* records of one sender: allocations, frees, blocks and everything else whose order affects a sum.
//! A gap in these numbers is a loss. Names, facts and control have `seq` 0. The ids `tag`, `stack`, `module` and `device` are
//! local to the sender and are defined by its records `Tag`, `Stack`, `Module` and `Device`.
//!
//! In a **resync** the agent sends its state: for each row of live memory it repeats the record that made it, with
//! [`Flags::RESTATED`] and the original `seq`, between `ResyncBegin` and `ResyncEnd`. A row that is not repeated no longer
//! exists.

/// Value of [`Stamp::device`] in a record that concerns no device.
pub const NONE_DEVICE: u8 = 255;

/// Value of [`Stamp::context`] in a `Lost` record whose records were withheld on request (mute or pause) and are not lost.
pub const WITHHELD: u32 = u32::MAX;

/// Bits of [`Stamp::flags`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Flags(pub u8);

impl Flags {
    /// The record repeats an earlier one in a resync: it states what exists, not a new event.
    pub const RESTATED: Flags = Flags(1);
    /// The tag is the process's default tag, because the thread had no open scope.
    pub const INHERITED: Flags = Flags(2);
    /// The bytes are an estimate: those of arrays, and those read from logs that state MiB.
    pub const ESTIMATED: Flags = Flags(4);
    /// The record was made under stream capture: a graph owns the bytes.
    pub const CAPTURED: Flags = Flags(8);
    /// In a record that makes a row: the memory is older than the agent, which got it from its owner's list. In a record that
    /// removes a row: the agent withdraws its report; the memory is still allocated.
    pub const OLDER: Flags = Flags(16);
    /// In `BlockAlloc`: `stack` and `context` describe the request that the block serves, see [`Request`].
    pub const REQUEST: Flags = Flags(32);

    /// Whether all bits of `other` are set.
    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }
    /// Returns the union of both sets of bits.
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// Bit of [`Stamp::context`] in `Pressure` and `Oom`: if it is set, the other bits are the code of the thread's phase. Older
/// agents do not set it; their `context` is CUPTI's number of the context.
pub const PHASE_FLAG: u32 = 1 << 31;

/// Fields common to all records: position, time, tag, thread, device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// Number in the total order of the sender's records, from 1; 0 for unordered records. In `EarlierLife` the last number
    /// received from the process.
    pub seq: u64,
    /// Time of the record: CLOCK_MONOTONIC of the host in ns, unless the recording has another [`crate::ClockKind`].
    pub time_ns: u64,
    /// Id of the tag (name) of the memory or event; 0 for none.
    pub tag: u32,
    /// Id of the call's stack frames; 0 for none. In `BlockAlloc` see [`Request`].
    pub stack: u32,
    /// Kernel id of the thread. In records about a process (`Origin`, `Hello`, `ProcessFacts`, `ProcessSample`, `ProcessGone`)
    /// the process's pid in the daemon's PID namespace.
    pub thread: u32,
    /// CUPTI's number of the context. In `DeviceSample` the duration of the read in ns, in `VmmCreate` the duration of the call
    /// in us. In `Device` the number of multiprocessors << 16 | threads for each of them, 0 if unknown. In `Lost` [`WITHHELD`],
    /// if that applies. For `Pressure` and `Oom` see [`PHASE_FLAG`], for `BlockAlloc` see [`Request`].
    pub context: u32,
    /// Id of the library that made the call; 0 for unknown.
    pub module: u16,
    /// Number (slot) that the sender uses for the device, or [`NONE_DEVICE`].
    pub device: u8,
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

/// A program's request to a framework's allocator. A `BlockAlloc` with [`Flags::REQUEST`] has it in its stamp: `stack` is
/// `unused_bytes`, `context` is `stream | pool << 16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Bytes of the block that the program did not request: the rest of rounding, or of a block that was not split.
    pub unused_bytes: u32,
    /// The sender's number of the stream; 0 is the default stream.
    pub stream: u16,
    /// The sender's number of the private pool (of CUDA graphs, or made by the program); 0 is the default pool.
    pub pool: u16,
}

impl Request {
    #[inline(always)]
    pub const fn context(self) -> u32 {
        self.stream as u32 | (self.pool as u32) << 16
    }

    /// Returns the request in the stamp of a `BlockAlloc`; `None` if the sender did not know it.
    pub const fn of(stamp: &Stamp) -> Option<Request> {
        if !stamp.flags.has(Flags::REQUEST) {
            return None;
        }
        let (stream, pool) = (stamp.context as u16, (stamp.context >> 16) as u16);
        Some(Request { unused_bytes: stamp.stack, stream, pool })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Fields that all kinds of records have.
    pub stamp: Stamp,
    /// Kind of the record, and the fields of that kind.
    pub body: Body<'a>,
}

pub use crate::codec::Body;
