//! Reads from an agent's memory what it had not sent when its connection ended: names, and the ring after the last received
//! record. If records are missing, it also reads the live table (all live allocations) and reports it as a resync.
//!
//! Each step returns one piece of bounded size, so that a dead process with a million allocations does not delay others.

use super::frames::word;
use super::memory::{Memory, MemoryError};
use crate::source::frame_of;
use gpumem_wire::layout::Header;
use gpumem_wire::{Body, Flags, SLOT_BYTES, Slot, Stamp, frame};

/// Maximum number of ring records, or of rows (live allocations), read at a time (256 KiB).
const PIECE: u64 = 4096;
/// Maximum number of bytes of names read at a time, about one packet.
const NAMES: usize = 60 << 10;
/// Highest accepted sequence number in a ring, so that adding a piece to it cannot overflow.
const MAX_SEQ: u64 = u64::MAX - PIECE;

/// The unsent records of an agent, read piece by piece.
#[derive(Debug)]
pub(crate) struct UnsentRecords {
    memory: Memory,
    header: Header,
    /// Sequence number of the next record to read from the ring.
    next: u64,
    /// Number of bytes read so far from the memory for names.
    names: u64,
    /// Whether records are missing, so that the live table must be read.
    has_gaps: bool,
    /// Number of the resync that reports the live table.
    epoch: u64,
    step: Step,
    /// Maximum number of live rows held in memory.
    max_rows: usize,
    /// Number of live rows beyond `max_rows`. They are not held in memory; only their number is reported.
    dropped: u64,
}

/// What is read or written next.
#[derive(Debug)]
enum Step {
    Names,
    Ring,
    /// Reads the live table: number of the next row to read, and the rows read so far.
    Rows(u64, Vec<Slot>),
    /// Sorts the live rows, after all have been read, in the order of a resync.
    Sort(Vec<Slot>),
    /// Writes the resync: index of the next row to write, and all rows.
    Restate(usize, Vec<Slot>),
    Done,
}

impl UnsentRecords {
    /// Starts reading the memory of an agent. `last_seq` is its last received record; `has_gaps` means that earlier ones are
    /// missing. At most `max_rows` live rows are reported; the others are only counted.
    /// Errors: [`MemoryError`]: the memory's header has changed.
    pub(crate) fn new(
        memory: Memory,
        (last_seq, has_gaps): (u64, bool),
        epoch: u64,
        max_rows: usize,
    ) -> Result<Self, MemoryError> {
        let mut header = memory.header()?;
        header.head_seq = header.head_seq.min(MAX_SEQ);
        let oldest = header.head_seq.saturating_sub(header.ring_slots - 1).max(1);
        let first = last_seq.saturating_add(1);
        let next = first.max(oldest);
        let has_gaps = has_gaps || next > first;
        Ok(UnsentRecords {
            memory,
            header,
            next,
            names: 0,
            has_gaps,
            epoch,
            step: Step::Names,
            max_rows,
            dropped: 0,
        })
    }

    /// Returns whether the next step reads the live rows, which are all held in memory at once.
    pub(crate) fn is_at_rows(&self) -> bool {
        matches!(self.step, Step::Rows(0, _))
    }

    /// Returns the next frames, which are untrusted like those of a packet; `None` at the end.
    pub(crate) async fn next_piece(&mut self, now_ns: u64) -> Result<Option<Vec<u8>>, MemoryError> {
        let one = |body| Ok(Some(frame_of(Stamp { time_ns: now_ns, ..Stamp::default() }, body)));
        loop {
            match std::mem::replace(&mut self.step, Step::Done) {
                Step::Names => {
                    let frames = names(&self.memory, &self.header, self.names)?;
                    self.names += frames.len() as u64;
                    if !frames.is_empty() {
                        self.step = Step::Names;
                        return Ok(Some(frames));
                    }
                    self.step = Step::Ring;
                }
                Step::Ring if self.next <= self.header.head_seq => {
                    self.step = Step::Ring;
                    let last = self.header.head_seq.min(self.next + PIECE - 1);
                    let mut slots = Vec::new();
                    self.memory.ring(self.next, last, &mut slots)?;
                    self.has_gaps |= (slots.len() as u64) < last - self.next + 1;
                    self.next = last + 1;
                    return Ok(Some(frames_of(&slots)));
                }
                Step::Ring => {
                    let head = self.header.head_seq;
                    self.step = if self.has_gaps { Step::Rows(0, Vec::new()) } else { Step::Done };
                    let body = Body::Watermark { last_seq: head, in_flight_since_ns: 0 };
                    return one(body);
                }
                Step::Rows(first, mut rows) => {
                    if let Some(first) = self.memory.next_live(first)? {
                        self.memory.live(first, PIECE, &mut rows)?;
                        self.dropped += rows.len().saturating_sub(self.max_rows) as u64;
                        rows.truncate(self.max_rows);
                        self.step = Step::Rows(first + PIECE, rows);
                    } else {
                        self.step = Step::Sort(rows);
                    }
                    return Ok(Some(Vec::new())); // other connections are served between these steps
                }
                Step::Sort(rows) => {
                    // A million rows would block other connections for too long. An error means that the daemon ends.
                    let rows = tokio::task::spawn_blocking(|| sorted(rows)).await;
                    let Ok(rows) = rows else { return Ok(None) };
                    self.step = Step::Restate(0, rows);
                    let (epoch, after_seq) = (self.epoch, self.header.head_seq);
                    return one(Body::ResyncBegin { epoch, after_seq });
                }
                Step::Restate(from, mut rows) => {
                    let to = rows.len().min(from + PIECE as usize);
                    if from == to {
                        let (epoch, head_seq) = (self.epoch, self.header.head_seq);
                        let rows = rows.len() as u64 + self.dropped;
                        return one(Body::ResyncEnd { epoch, head_seq, rows });
                    }
                    rows[from..to].iter_mut().for_each(|row| row[62] |= Flags::RESTATED.0);
                    let frames = frames_of(&rows[from..to]);
                    self.step = Step::Restate(to, rows);
                    return Ok(Some(frames));
                }
                Step::Done => return Ok(None),
            }
        }
    }
}

/// Returns the complete frames of names from byte `from` on; none at the end.
pub(crate) fn names(memory: &Memory, header: &Header, from: u64) -> Result<Vec<u8>, MemoryError> {
    let left = header.names_end.saturating_sub(from);
    let mut bytes = vec![0; usize::try_from(left).unwrap_or(usize::MAX).min(NAMES)];
    memory.names(from, &mut bytes)?;
    let mut whole = 0;
    while let Ok(Some((_, payload, _))) = frame::split_frame(&bytes[whole..]) {
        whole += frame::PREFIX_BYTES + SLOT_BYTES + payload.len();
    }
    bytes.truncate(whole);
    Ok(bytes)
}

/// Encodes records without text as frames.
fn frames_of(slots: &[Slot]) -> Vec<u8> {
    let mut frames = Vec::with_capacity(slots.len() * (frame::PREFIX_BYTES + SLOT_BYTES));
    for slot in slots {
        frames.extend_from_slice(&(SLOT_BYTES as u32).to_le_bytes());
        frames.extend_from_slice(slot);
    }
    frames
}

/// Sorts rows: pools first, outer ones before inner ones; then the others by sequence number. Mappings directly follow their VMM
/// handle. A mapping belongs to the newest handle with its number that is older than the mapping.
fn sorted(mut rows: Vec<Slot>) -> Vec<Slot> {
    const POOL: u8 = 24;
    const CREATE: u8 = 32;
    const MAP: u8 = 33;
    let mut handles: Vec<(u64, u64)> =
        rows.iter().filter(|row| row[60] == CREATE).map(|row| (word(row, 16), word(row, 0))).collect();
    handles.sort_unstable();
    let owner = |row: &Slot| {
        let (handle, seq) = (word(row, 32), word(row, 0));
        let at = handles.partition_point(|&known| known <= (handle, seq));
        handles[..at].last().filter(|(known, _)| *known == handle).map_or(seq, |&(_, seq)| seq)
    };
    rows.sort_by_cached_key(|row| {
        let seq = word(row, 0);
        match row[60] {
            POOL => (0, seq, 0),
            MAP => (1, owner(row), seq),
            _ => (1, seq, 0),
        }
    });
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::agent::memory::by_hand;
    use gpumem_wire::{MemoryKind, Record};

    /// A header may have any content. With a head near the maximum, a sum that wraps to 0 would let reading begin again for ever.
    #[tokio::test]
    async fn reading_ends_whatever_the_head_is_said_to_be() {
        for head in [0, 1, 1 << 40, u64::MAX - PIECE, u64::MAX - 1, u64::MAX] {
            for last_seq in [0, 5, u64::MAX - 2, u64::MAX] {
                let (fd, _) = by_hand::unsealed(4, 2, head);
                let mut unsent =
                    UnsentRecords::new(by_hand::accepted(fd), (last_seq, true), 1, 2).expect("readable");
                let mut pieces = 0;
                while unsent.next_piece(1).await.expect("readable").is_some() {
                    pieces += 1;
                    assert!(pieces < 20, "head {head}, heard {last_seq}");
                }
            }
        }
    }

    fn row(seq: u64, body: Body<'_>) -> Slot {
        Record { stamp: Stamp { seq, ..Stamp::default() }, body }.encode().0
    }

    #[test]
    fn rows_in_the_order_of_a_resync() {
        let create = |seq, handle| {
            let body = Body::VmmCreate { handle, bytes: 1, references: 1, memory: MemoryKind::Vmm };
            row(seq, body)
        };
        let map = |seq, handle| row(seq, Body::VmmMap { address: seq, bytes: 1, handle });
        let pool = |seq| {
            let owner = gpumem_wire::PoolOwner::Framework;
            row(seq, Body::PoolCreate { pool: seq, parent: 0, reports_blocks: 1, owner })
        };
        let rows = vec![map(9, 5), create(1, 5), map(4, 6), create(3, 6), create(6, 5), map(2, 5), pool(8)];
        let seqs: Vec<_> = sorted(rows).iter().map(|row| word(row, 0)).collect();
        assert_eq!(seqs, [8, 1, 2, 3, 4, 6, 9]);
    }
}
