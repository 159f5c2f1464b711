//! Encodes and decodes records. Both directions are generated from the table `records!`, so that they cannot disagree.
//!
//! A **slot** is 64 bytes, little-endian:
//!
//! ```text
//! offset size field
//!      0    8 seq       0: the record has no place in the order (in a ring: the slot is not committed)
//!      8    8 time_ns
//!     16    8 address   meaning depends on the kind, see the table
//!     24    8 bytes     depends on the kind
//!     32    8 aux       depends on the kind
//!     40    4 tag
//!     44    4 stack
//!     48    4 thread
//!     52    4 context
//!     56    2 module
//!     58    2 result    depends on the kind: CUresult, NVML code, errno; 0 is success
//!     60    1 kind      number in the table
//!     61    1 device
//!     62    1 flags
//!     63    1 detail    depends on the kind: a code of code.rs
//! ```
//!
//! A record's payload (names, facts) follows the slot in a frame; a ring contains only records without payload. In the table,
//! `field: Type => place` gives the place of a field; the place `payload` is the data after the slot. A place that a kind does
//! not use is 0 and is ignored when read.

use crate::code::*;
use crate::event::{Flags, Record, Stamp};

/// Size in bytes of a slot: the fixed part of a record.
pub const SLOT_BYTES: usize = 64;

/// A slot as bytes: a record without its payload.
pub type Slot = [u8; SLOT_BYTES];
/// A slot as eight 64-bit words; the first is `seq`.
pub type Words = [u64; SLOT_BYTES / 8];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// A kind unknown to this version; readers skip and count the record.
    UnknownKind(u8),
    /// The payload of this kind must be UTF-8 text and is not.
    Payload(u8),
}

impl core::fmt::Display for Error {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Error::UnknownKind(kind) => write!(f, "record kind {kind} is unknown to this version"),
            Error::Payload(kind) => write!(f, "record kind {kind} has a payload that is not UTF-8"),
        }
    }
}

impl core::error::Error for Error {}

/// The fields of a slot whose meaning depends on the record's kind.
#[derive(Default)]
struct Places<'a> {
    address: u64,
    bytes: u64,
    aux: u64,
    result: u16,
    detail: u8,
    payload: &'a [u8],
}

/// A field type that can be stored in a slot field of type `P`. `get` returns `None` for an invalid value.
trait Place<P>: Sized {
    fn put(self) -> P;
    fn get(place: P) -> Option<Self>;
}

macro_rules! places {
    ($( $type:ty as $place:ty: |$field:ident| $put:expr, |$stored:ident| $get:expr; )*) => { $(
        impl<'a> Place<$place> for $type {
            #[inline(always)]
            fn put(self) -> $place {
                let $field = self;
                $put
            }
            #[inline(always)]
            fn get($stored: $place) -> Option<Self> {
                $get
            }
        }
    )* };
}

places! {
    u64 as u64: |field| field, |stored| Some(stored);
    i64 as u64: |field| field.cast_unsigned(), |stored| Some(stored.cast_signed());
    u16 as u16: |field| field, |stored| Some(stored);
    u8 as u8: |field| field, |stored| Some(stored);
    bool as u8: |field| field.into(), |stored| Some(stored != 0);
    Reading as u64: |field| field.0.unwrap_or(u64::MAX), |stored| Some(Reading((stored != u64::MAX).then_some(stored)));
    // A role and a phase in one byte, four bits each.
    (Role, Phase) as u8: |field| field.0.to_code() | field.1.to_code() << 4,
        |stored| Some((Role::from_code(stored & 15), Phase::from_code(stored >> 4)));
    &'a [u8] as &'a [u8]: |field| field, |stored| Some(stored);
    &'a str as &'a [u8]: |field| field.as_bytes(), |stored| core::str::from_utf8(stored).ok();
}

impl<C: Code> Place<u8> for C {
    #[inline(always)]
    fn put(self) -> u8 {
        self.number()
    }
    #[inline(always)]
    fn get(place: u8) -> Option<Self> {
        Some(C::of_number(place))
    }
}

impl<C: Code> Place<u16> for C {
    #[inline(always)]
    fn put(self) -> u16 {
        self.number().into()
    }
    #[inline(always)]
    fn get(place: u16) -> Option<Self> {
        Some(C::of_number(u8::try_from(place).unwrap_or(0)))
    }
}

macro_rules! records {
    ($( $(#[$doc:meta])* $number:literal $kind:ident { $( $field:ident : $type:ty => $place:ident ),* $(,)? } )*) => {
        /// Content of a record, by kind. The suffix of a field's name gives its unit, the table in codec.rs its place.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Body<'a> {
            $( $(#[$doc])* $kind { $( $field: $type ),* }, )*
        }

        impl<'a> Body<'a> {
            /// Name and number of every record kind, in order of the numbers.
            pub const KINDS: &'static [(&'static str, u8)] = &[$( (stringify!($kind), $number) ),*];

            /// Returns the kind's number on the wire.
            pub fn kind(&self) -> u8 {
                match self {
                    $( Body::$kind { .. } => $number, )*
                }
            }

            #[inline(always)]
            fn places(self) -> (u8, Places<'a>) {
                let mut places = Places::default();
                let kind = match self {
                    $( Body::$kind { $( $field ),* } => {
                        $( places.$place = Place::put($field); )*
                        $number
                    } )*
                };
                (kind, places)
            }

            #[inline(always)]
            fn from_places(kind: u8, places: Places<'a>) -> Result<Self, Error> {
                match kind {
                    $( $number => Ok(Body::$kind {
                        $( $field: Place::get(places.$place).ok_or(Error::Payload(kind))? ),*
                    }), )*
                    other => Err(Error::UnknownKind(other)),
                }
            }
        }
    };
}

records! {
    // The sender of the records, and the names that later records use.

    /// First record of an agent. `thread` is the pid that the agent reads; the socket's peer credentials decide whether it is
    /// right. `start_ticks` is field 22 of /proc/self/stat, which must match. `versions` is MAJOR << 16 | MINOR. `instance`
    /// differs between the programs that one process runs by exec(). Payload: `key=value` lines about rank and job.
    1 Hello { start_ticks: u64 => address, versions: u64 => bytes, capabilities: u64 => aux, instance: u16 => result, claims: &'a str => payload }
    /// Wall-clock and CLOCK_BOOTTIME time at the moment `time_ns`. Sent once in a recording, and after a clock jump.
    2 ClockAnchor { realtime_ns: u64 => address, boottime_ns: u64 => bytes, clock: ClockKind => detail }
    /// Defines the stamp's device number `device`. `ordinal` is the sender's number of the device (CUDA's or NVML's).
    3 Device { uuid_high: u64 => address, uuid_low: u64 => aux, total_bytes: Reading => bytes, ordinal: u16 => result, id: DeviceIdKind => detail, name: &'a str => payload }
    /// Defines the id `tag`: a name as a path `a/b/c`, at most 255 bytes.
    4 Tag { path: &'a str => payload }
    /// Defines the id `module`: a library or executable mapped at `base`.
    5 Module { base: u64 => address, bytes: u64 => bytes, path: &'a str => payload }
    /// Defines the id `stack`: the frames of a call stack.
    6 Stack { format: FrameFormat => detail, frames: &'a [u8] => payload }
    /// Used in recordings of several processes. The following records come from process `thread`, started at `start_ticks`; pid
    /// 0 is the daemon.
    7 Origin { start_ticks: u64 => address }

    // Driver allocations.

    /// An allocation succeeded; recorded when the call returns. `pool` is the driver pool of a stream-ordered allocation, the
    /// framework pool if the whole allocation is one of its segments, or 0. The call began `took_us` earlier (rounded up;
    /// 65,535 means that or longer), and NVML may include the allocation since then.
    16 AllocEnd { address: u64 => address, bytes: u64 => bytes, pool: u64 => aux, took_us: u16 => result, memory: MemoryKind => detail }
    /// A free began: the driver may reuse the address from now on. The bytes are subtracted at `FreeEnd`.
    17 FreeBegin { address: u64 => address }
    /// The free, unmap or release whose begin is record `begin_seq` returned `result`.
    18 FreeEnd { begin_seq: u64 => aux, result: u16 => result }
    /// An allocation failed.
    19 AllocFailed { bytes: u64 => bytes, pool: u64 => aux, device_free_bytes: Reading => address, result: u16 => result, memory: MemoryKind => detail }
    /// Memory of another process or API was mapped; for shareable handles `address` is the handle.
    20 Import { address: u64 => address, bytes: u64 => bytes, source: ImportSource => detail }
    /// Bytes on `device` that were allocated before the agent started, computed from a pool's own total.
    21 Baseline { bytes: u64 => bytes }

    // Pools of the driver, of graphs and of frameworks.

    /// A pool exists on `device`; `tag` is its name. `parent` is the pool from whose blocks its segments come, or 0. With
    /// `reports_blocks` 0 the use of its memory is unknown until its first block; after that the field is 1 in a resync.
    24 PoolCreate { pool: u64 => address, parent: u64 => aux, reports_blocks: u16 => result, owner: PoolOwner => detail }
    /// The pool's own totals of reserved and used bytes. A driver pool may have changed to these totals up to `took_us`
    /// earlier, and NVML may include the change since then. `took_us` is rounded up; 65,535: that or longer; 0: unknown.
    25 PoolState { pool: u64 => address, reserved_bytes: u64 => bytes, used_bytes: u64 => aux, took_us: u16 => result }
    /// The program destroyed the pool, which exists until its last allocation is freed.
    26 PoolDestroy { pool: u64 => address }
    /// The owner's own total of live block bytes; the daemon compares it with the sum of the reported blocks.
    27 PoolCheck { pool: u64 => address, total_bytes: u64 => bytes }

    // Virtual memory management: physical handles, and their mappings.

    /// cuMemCreate succeeded. In a resync, `references` is the reference count at `after_seq`; later retains and releases
    /// follow as records. The count may be 0 while mappings exist. A handle's mappings are sent again before the next handle.
    32 VmmCreate { handle: u64 => address, bytes: u64 => bytes, references: u16 => result, memory: MemoryKind => detail }
    /// cuMemMap succeeded: `handle` is mapped at `address`.
    33 VmmMap { address: u64 => address, bytes: u64 => bytes, handle: u64 => aux }
    /// cuMemUnmap began; `FreeEnd` has its result.
    34 VmmUnmap { address: u64 => address, bytes: u64 => bytes }
    /// cuMemRetainAllocationHandle returned `handle` for the mapping at `address`.
    35 VmmRetain { handle: u64 => aux, address: u64 => address }
    /// cuMemRelease began; `FreeEnd` has its result.
    36 VmmRelease { handle: u64 => address }

    // Contexts.

    /// Context `context` exists on `device`.
    40 ContextCreate { handle: u64 => address }
    /// Context `context` was destroyed, together with the memory given by `scope`.
    41 ContextDestroy { scope: DestroyScope => detail }

    // Framework pools: segments, and the blocks into which they are divided.

    /// The pool's owner obtained [address, address+bytes), which it will divide into blocks.
    48 SegmentAdd { address: u64 => address, bytes: u64 => bytes, pool: u64 => aux }
    /// The pool's owner released that range: several segments, one, or part of one.
    49 SegmentRemove { address: u64 => address, bytes: u64 => bytes, pool: u64 => aux }
    /// A pool returned a block to the program; `bytes` is its size. For the request see [`crate::Request`].
    50 BlockAlloc { address: u64 => address, bytes: u64 => bytes, pool: u64 => aux, use_as: (Role, Phase) => detail }
    /// The program returned a block to its pool. `Pending`: a stream may still use it.
    51 BlockFree { address: u64 => address, pool: u64 => aux, state: FreeState => detail }
    /// Sets tag, role and phase, each unless 0, of the block (or with pool 0 the allocation) made by record `block_seq`. Also
    /// sent for freed blocks, because a peak may still contain them. In a resync it follows each row that was ever retagged,
    /// with that row's `seq` and all current values (0: unknown). `stack` is then the first tag, if it was replaced.
    52 Retag { address: u64 => address, block_seq: u64 => bytes, pool: u64 => aux, use_as: (Role, Phase) => detail }
    /// The process entered a phase.
    53 PhaseBegin { phase: Phase => detail }

    // Out of memory.

    /// A driver allocation failed, and the framework will release cached memory and retry. So it is not an OOM yet. Here and
    /// in `Oom`, `context` may hold the thread's phase: see [`crate::PHASE_FLAG`].
    57 Pressure { bytes: u64 => bytes, device_free_bytes: Reading => address }
    /// A framework's allocation failed after all retries; the totals are its pool's own.
    58 Oom { bytes: u64 => bytes, pool_used_bytes: Reading => address, pool_reserved_bytes: Reading => aux, outcome: OomOutcome => detail, result: u16 => result }

    // Causes of memory outside of allocations (Untrackable), and marks in time.

    /// A driver event that uses memory outside of allocations.
    64 DriverEvent { bytes: u64 => bytes, value: u64 => aux, event: DriverEventKind => detail }
    /// Training step `number` begins.
    72 Step { number: u64 => aux }
    /// The program set the counter with the name `tag` to `value`.
    73 Counter { value: i64 => bytes }
    /// The program marks the present time; `tag` is the mark's name.
    74 Marker { }
    /// The scope named by the stamp's `tag` begins or ends on the stamp's `thread`.
    75 Scope { edge: Edge => detail }
    /// Epoch `number` begins. Step numbers restart with each epoch.
    76 Epoch { number: u64 => aux }

    // Records about the stream of records: losses, positions, resyncs.

    /// `count` ordered records, from `first_seq` on, were dropped.
    80 Lost { count: u64 => bytes, first_seq: u64 => aux }
    /// All records up to number `last_seq` and time `time_ns` have been sent. `in_flight_since_ns` is the time at which the
    /// oldest driver call that has not returned began; 0 for none.
    81 Watermark { last_seq: u64 => aux, in_flight_since_ns: u64 => bytes }
    /// The state follows: the record of every live row is sent again. Rows made after `after_seq` may be missing, because their
    /// records follow. All ordered records up to `after_seq` were sent before. Pools come first, each after its parent, the
    /// other rows in any order (but see `VmmCreate`). A freed block that a stream may still use is followed by its `BlockFree`.
    82 ResyncBegin { epoch: u64 => address, after_seq: u64 => aux }
    /// End of the state: `rows` records were sent again (names do not count). Meanwhile records up to `head_seq` were made; the
    /// state is exact once they have arrived.
    83 ResyncEnd { epoch: u64 => address, head_seq: u64 => aux, rows: u64 => bytes }
    /// The agent stops sending.
    84 Bye { reason: ByeReason => detail }
    /// Whether the agent observes driver calls. `result` is CUPTI's; the payload is the client that prevents it, or the reason.
    85 Agent { result: u16 => result, state: AgentState => detail, detail: &'a str => payload }

    /// State of a naming layer (a source of names); the payload is the reason. Sent for each layer at every connection, and on
    /// each change.
    86 Layer { layer: Layer => result, state: LayerState => detail, reason: &'a str => payload }

    /// Result of a command (`RecordControl`, `Pause`, `Resume`, `Dump`, by its number). `result` is an errno, 0 for success;
    /// `told` is the file written, or the error text.
    87 Done { result: u16 => result, command: u8 => detail, told: &'a str => payload }

    /// Sizes of PyTorch models by element type, for advice. One line `model TAB type TAB bytes TAB bytes that require gradients
    /// TAB bytes that an optimizer updates TAB bytes of embedding tables with dense gradients TAB bytes of those with sparse ones`
    /// for each model and type of parameter; the model is empty for optimizer state. A line without TAB names a library whose object
    /// keeps the program's models: `accelerate`.
    88 Models { models: &'a str => payload }

    /// Names in the program that keep tensors of PyTorch, found after the failed request that is record `oom_seq`. One line `kind TAB
    /// name TAB function TAB place TAB class TAB tensors TAB bytes TAB tensors with a graph TAB flags` for each name, the largest
    /// first. The kind is `global`, `attribute`, `local`, `closure`, `default` or `cache`; flags are `traceback` (an exception
    /// keeps the tensors), `partial` (not all objects were searched) and `sum` (one tensor, the sum of that many tensors with
    /// graphs), with commas between.
    89 Keepers { oom_seq: u64 => aux, keepers: &'a str => payload }

    // Observations of the daemon, for recordings.

    /// A reading of `device` by NVML begins: device memory, then the process lists, then device memory again.
    96 SampleBegin { number: u64 => aux }
    /// Device memory. `reserved_bytes` is the driver's part, if NVML reports it separately. `unified`: the device uses host
    /// memory. Then used and free bytes are the host's, and `free_bytes` is the host's available memory.
    97 DeviceSample { used_bytes: u64 => bytes, free_bytes: u64 => address, reserved_bytes: Reading => aux, unified: bool => detail }
    /// Memory that NVML charges to pid `thread`. Bits of `lists`: 0 compute, 1 graphics, 2 MPS.
    98 ProcessSample { start_ticks: u64 => address, used_bytes: Reading => bytes, absence: Absence => result, lists: u8 => detail }
    /// The reading ended at `time_ns`. If `result` is not 0, the process lists could not be read.
    99 SampleEnd { number: u64 => aux, result: u16 => result }
    /// Process `thread`: payload `key=value` lines from /proc (comm, command, user, cgroup, exe).
    100 ProcessFacts { start_ticks: u64 => address, uid: Reading => bytes, parent_pid: u64 => aux, facts: &'a str => payload }
    /// Process `thread` ended; `status` has the form of waitpid's, if available.
    101 ProcessGone { start_ticks: u64 => address, status: Reading => bytes }
    /// Whether NVML can be read (on `device`, unless that is none), and the reason if not.
    102 Source { up: bool => detail, reason: &'a str => payload }
    /// Nothing else happened up to `time_ns`.
    103 Tick { }

    /// Highest memory use of pid `thread` on `device` since the start of the process, from the driver's accounting mode.
    104 AccountedPeak { start_ticks: u64 => address, peak_bytes: u64 => bytes }
    /// NVML reported a fault with Xid (fault code) `xid` on `device`.
    105 DeviceFault { xid: u64 => aux }
    /// Bytes protected by confidential computing, a part of those that NVML charges to pid `thread` on `device`.
    106 ProtectedSample { start_ticks: u64 => address, protected_bytes: u64 => bytes }
    /// In a reading that has begun: all processes of the device's previous reading that this one has not named hold the same bytes.
    /// Recordings have a `ProcessSample` for each of them instead.
    107 SameProcesses { }
    /// A mark that was set from outside of process `thread`.
    108 ProcessMark { start_ticks: u64 => address, name: &'a str => payload }

    /// Counts of process `thread` from before a restart of the daemon: `events` ordered records were applied, `lost` were
    /// lost. `seq` is the last record received from the program `instance` (see `Hello`); 0 if only the counts are known.
    109 EarlierLife { start_ticks: u64 => address, events: u64 => bytes, lost: u64 => aux, instance: u16 => result }

    // From the daemon to an agent.

    /// The daemon has accepted the Hello. `epoch` is the number for the agent's next resync.
    112 Welcome { epoch: u64 => address, versions: u64 => bytes, capabilities: u64 => aux }
    /// Requests the whole state, to be sent between `ResyncBegin` and `ResyncEnd` with this `epoch`.
    113 ResyncRequest { epoch: u64 => address }
    /// Requests that the agent starts or stops a recording to a file, in addition to this connection. Payload: the file, which
    /// must not exist (empty for a name with host, rank and pid), then limits, each after a NUL: `steps=FIRST:LAST`,
    /// `for=SECONDS`, `max_size=BYTES`. An agent refuses a limit that it does not know.
    114 RecordControl { on: bool => detail, path: &'a str => payload }
    /// Requests that the agent stops sending records; the agent still tracks allocations.
    115 Pause { }
    /// Requests that the agent sends its state, and then records again.
    116 Resume { }
    /// Requests that the agent writes its current state to a file; the payload is as in `RecordControl`.
    117 Dump { path: &'a str => payload }

    // On a separate connection without a Hello: a program requests its own report.

    /// First and only record of a connection. Payload: options as `key=value` lines.
    118 Ask { what: AskKind => detail, options: &'a str => payload }
    /// Part of the answer; `last` marks the final one. `result` is an errno, 0 for success; on an error the text is the message.
    119 Answer { result: u16 => result, last: bool => detail, text: &'a [u8] => payload }
}

#[inline]
pub fn slot_of(words: &Words) -> Slot {
    let mut slot = [0; SLOT_BYTES];
    for (place, word) in slot.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    slot
}

macro_rules! at {
    ($slot:ident, $type:ty, $offset:literal) => {
        <$type>::from_le_bytes(*$slot[$offset..].first_chunk().expect("offset lies within a slot"))
    };
}

impl<'a> Record<'a> {
    /// Returns the slot as words, which are stored little-endian, and the payload. Always inlined: with a constant kind the
    /// compiler folds most of the code, and the words stay in registers.
    #[inline(always)]
    pub fn words(&self) -> (Words, &'a [u8]) {
        let (kind, places) = self.body.places();
        let stamp = &self.stamp;
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let codes = u32::from_le_bytes([kind, stamp.device, stamp.flags.0, places.detail]);
        let words = [
            stamp.seq,
            stamp.time_ns,
            places.address,
            places.bytes,
            places.aux,
            pair(stamp.tag, stamp.stack),
            pair(stamp.thread, stamp.context),
            pair(u32::from(stamp.module) | u32::from(places.result) << 16, codes),
        ];
        (words, places.payload)
    }

    /// Returns the slot, and the payload that follows it in a frame.
    #[inline]
    pub fn encode(&self) -> (Slot, &'a [u8]) {
        let (words, payload) = self.words();
        (slot_of(&words), payload)
    }

    /// Decodes a slot and its payload.
    ///
    /// # Errors
    /// [`Error::UnknownKind`] and [`Error::Payload`]; both concern this record only.
    #[inline]
    pub fn decode(slot: &Slot, payload: &'a [u8]) -> Result<Self, Error> {
        let places = Places {
            address: at!(slot, u64, 16),
            bytes: at!(slot, u64, 24),
            aux: at!(slot, u64, 32),
            result: at!(slot, u16, 58),
            detail: slot[63],
            payload,
        };
        let body = Body::from_places(slot[60], places)?;
        let stamp = Stamp {
            seq: at!(slot, u64, 0),
            time_ns: at!(slot, u64, 8),
            tag: at!(slot, u32, 40),
            stack: at!(slot, u32, 44),
            thread: at!(slot, u32, 48),
            context: at!(slot, u32, 52),
            module: at!(slot, u16, 56),
            device: slot[61],
            flags: Flags(slot[62]),
        };
        Ok(Record { stamp, body })
    }
}
