//! Reads a stream as the records that it was made from. The stream may be damaged or hostile. The memory does not depend on its
//! length.

use super::entry::{Operation, POOL_NAME, TICK_NS, flags};
use crate::builder::Sink;
use crate::varint::{take, take_distance, take_signed, take_size};
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_wire::{
    Body, Flags, FreeState, OomOutcome, Phase, PoolOwner, Reading, Record, Request, Role, Stamp,
};

/// Error: the stream contains bytes that no program of this version writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the kept requests cannot be read from byte {offset} of piece {piece} on")]
pub struct Damaged {
    /// Number of the piece, from 0.
    pub piece: usize,
    /// Offset in the decompressed piece, in bytes.
    pub offset: usize,
}

/// Passes the records of a stream to `sink` as those of the process `key`. The block of a `Retag` is the live one at its address: its
/// `block_seq` is 0.
///
/// # Errors
/// [`Damaged`]; the records before it have been passed on.
pub fn read<'a>(
    pieces: impl IntoIterator<Item = &'a [u8]>,
    key: ProcessKey,
    sink: &mut dyn Sink,
) -> Result<(), Damaged> {
    let mut reader = Reader {
        key,
        sink,
        seq: 0,
        ticks: 0,
        address: 0,
        pool: 0,
        tag: 0,
        place: (0, 0),
        use_as: (Role::Unknown, Phase::Unknown),
        is_state: false,
        has_state: false,
    };
    for (number, piece) in pieces.into_iter().enumerate() {
        let mut rest = piece;
        while !rest.is_empty() {
            let offset = piece.len() - rest.len();
            reader.entry(&mut rest).ok_or(Damaged { piece: number, offset })?;
        }
    }
    Ok(())
}

/// Number of the pool's name. Programs have no tag of this number, and `u32::MAX` means too many names.
const POOL_TAG: u32 = u32::MAX - 1;

struct Reader<'a> {
    key: ProcessKey,
    sink: &'a mut dyn Sink,
    /// Number of the last record.
    seq: u64,
    ticks: u64,
    address: u64,
    pool: u64,
    tag: u32,
    place: (u16, u16),
    use_as: (Role, Phase),
    /// Whether the entries are part of a state.
    is_state: bool,
    /// Whether a complete state has been read. Later ones repeat what is known.
    has_state: bool,
}

impl Reader<'_> {
    fn pass(&mut self, stamp: Stamp, body: Body<'_>) {
        if self.is_state && self.has_state {
            return;
        }
        let mut stamp = Stamp { time_ns: self.ticks.wrapping_mul(TICK_NS), thread: self.key.pid, ..stamp };
        if self.is_state {
            stamp.flags = Flags(stamp.flags.0 | Flags::RESTATED.0);
        } else {
            self.seq += 1;
            stamp.seq = self.seq;
        }
        self.sink.observe(Origin::Process(self.key), &Record { stamp, body });
    }

    /// Reads an entry; `None` if it is invalid.
    fn entry(&mut self, rest: &mut &[u8]) -> Option<()> {
        let (&first, after) = rest.split_first()?;
        *rest = after;
        let operation = *Operation::ALL.get(usize::from(first & 15))?;
        let flags = first >> 4;
        match operation {
            Operation::State => {
                (self.ticks, self.address, self.pool, self.tag, self.place) = Default::default();
                self.use_as = Default::default();
                self.is_state = true;
                self.time(rest)?;
            }
            Operation::StateEnd => (self.is_state, self.has_state) = (false, true),
            Operation::Program => {
                let instance = small(rest)?;
                let claims = format!("alloc_conf={}\n", text(rest)?);
                let start_ticks = self.key.start_ticks;
                let hello =
                    Body::Hello { start_ticks, versions: 0, capabilities: 0, instance, claims: &claims };
                self.pass(Stamp::default(), hello);
                // The pool's name.
                let name = Body::Tag { path: POOL_NAME };
                self.pass(Stamp { tag: POOL_TAG, ..Stamp::default() }, name);
            }
            Operation::Name => {
                let tag = small(rest)?;
                let path = text(rest)?;
                self.pass(Stamp { tag, ..Stamp::default() }, Body::Tag { path });
            }
            Operation::Pool => {
                let (pool, device) = (take(rest)?, small(rest)?);
                let owner = PoolOwner::Framework;
                let body = Body::PoolCreate { pool, parent: 0, reports_blocks: 1, owner };
                self.pass(Stamp { tag: POOL_TAG, device, ..Stamp::default() }, body);
            }
            Operation::Older => {
                let (device, bytes) = (small(rest)?, take(rest)?);
                self.pass(Stamp { device, ..Stamp::default() }, Body::Baseline { bytes });
            }
            Operation::Refused => {
                let (device, bytes, free) = (small(rest)?, take(rest)?, take(rest)?);
                self.time(rest)?;
                let device_free_bytes = Reading(free.checked_sub(1));
                let body = Body::Pressure { bytes, device_free_bytes };
                self.pass(Stamp { device, ..Stamp::default() }, body);
            }
            Operation::Failed => {
                let (device, tag, bytes, result) = (small(rest)?, small(rest)?, take(rest)?, small(rest)?);
                self.time(rest)?;
                let (pool_used_bytes, pool_reserved_bytes) = (Reading(None), Reading(None));
                let outcome = OomOutcome::default();
                let body = Body::Oom { bytes, pool_used_bytes, pool_reserved_bytes, outcome, result };
                self.pass(Stamp { device, tag, ..Stamp::default() }, body);
            }
            Operation::Lost => {
                let count = take(rest)?;
                self.pass(Stamp::default(), Body::Lost { count, first_seq: 0 });
            }
            Operation::Use if flags & flags::OTHER == 0 => self.use_as = use_of(take(rest)?),
            Operation::Phase => {
                let number = take(rest)?;
                self.time(rest)?;
                let is_step = flags & flags::OTHER != 0;
                let body = if is_step {
                    Body::Step { number }
                } else {
                    Body::PhaseBegin { phase: phase_of(number) }
                };
                self.pass(Stamp::default(), body);
            }
            Operation::Use
            | Operation::Segment
            | Operation::SegmentEnd
            | Operation::Allocate
            | Operation::Free
            | Operation::FreeLater => self.memory(operation, flags, rest)?,
        }
        Some(())
    }

    fn memory(&mut self, operation: Operation, flags: u8, rest: &mut &[u8]) -> Option<()> {
        if flags & flags::POOL != 0 {
            self.pool = take(rest)?;
        }
        self.address = self.address.wrapping_add_signed(take_distance(rest)?);
        let (address, pool) = (self.address, self.pool);
        if let Operation::Free | Operation::FreeLater = operation {
            self.time(rest)?;
            let state = if operation == Operation::Free { FreeState::Done } else { FreeState::Pending };
            self.pass(Stamp::default(), Body::BlockFree { address, pool, state });
            return Some(());
        }
        if operation == Operation::Use {
            let use_as = use_of(take(rest)?);
            let stamp = Stamp { tag: small(rest)?, ..Stamp::default() };
            self.pass(stamp, Body::Retag { address, block_seq: 0, pool, use_as });
            return Some(());
        }
        let bytes = take_size(rest)?;
        match operation {
            Operation::Segment => {
                self.time(rest)?;
                let is_mapped = flags & flags::OTHER != 0;
                if is_mapped {
                    self.pass(Stamp::default(), Body::VmmMap { address, bytes, handle: 0 });
                }
                self.pass(Stamp::default(), Body::SegmentAdd { address, bytes, pool });
                if is_mapped {
                    self.pass(Stamp::default(), Body::VmmUnmap { address, bytes });
                }
            }
            Operation::SegmentEnd => {
                self.time(rest)?;
                self.pass(Stamp::default(), Body::SegmentRemove { address, bytes, pool });
            }
            _ => {
                if flags & flags::TAG != 0 {
                    self.tag = small(rest)?;
                }
                let mut stamp = Stamp { tag: self.tag, ..Stamp::default() };
                if flags & flags::OTHER == 0 {
                    let unused_bytes = small(rest)?;
                    if flags & flags::REQUEST != 0 {
                        self.place = (small(rest)?, small(rest)?);
                    }
                    let (stream, pool) = self.place;
                    let context = Request { unused_bytes, stream, pool }.context();
                    stamp = Stamp { flags: Flags::REQUEST, stack: unused_bytes, context, ..stamp };
                }
                self.time(rest)?;
                self.pass(stamp, Body::BlockAlloc { address, bytes, pool, use_as: self.use_as });
            }
        }
        Some(())
    }

    fn time(&mut self, rest: &mut &[u8]) -> Option<()> {
        self.ticks = self.ticks.wrapping_add_signed(take_signed(rest)?);
        Some(())
    }
}

/// Returns the role and phase of a byte; `Unknown` for numbers that this version does not know.
fn use_of(code: u64) -> (Role, Phase) {
    (Role::from_code(code as u8 & 15), phase_of(code >> 4))
}

fn phase_of(code: u64) -> Phase {
    u8::try_from(code).map_or(Phase::Unknown, Phase::from_code)
}

fn small<T: TryFrom<u64>>(rest: &mut &[u8]) -> Option<T> {
    T::try_from(take(rest)?).ok()
}

fn text<'a>(rest: &mut &'a [u8]) -> Option<&'a str> {
    let length = small(rest)?;
    let (text, after) = rest.split_at_checked(length)?;
    *rest = after;
    std::str::from_utf8(text).ok()
}
