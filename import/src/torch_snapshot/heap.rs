//! State of PyTorch's allocator on one device: memory that it got from the driver (pieces), and the blocks in this memory.
//!
//! The history is a ring buffer that begins in the middle of the run. The state at its start is computed here, by undoing every
//! entry from the snapshot's state back, from the last entry to the first. The replay then applies the entries to that state.

use super::arena::{NONE, Ref};
use super::model::{Action, Event};
use gpumem_replay::{Release, Settings};
use std::collections::BTreeMap;

/// Memory from the driver. A segment is one piece. An expandable segment is many pieces, which are mapped and unmapped
/// separately.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub bytes: u64,
    pub is_expandable: bool,
}

/// A block that is allocated, or freed while a stream may still use it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Live {
    /// Size in bytes; 0 while unknown.
    pub bytes: u64,
    /// Bytes that the program requested.
    pub requested: u64,
    /// Whether the block was freed, but a stream may still use it.
    pub is_pending: bool,
    pub stream: u32,
    /// Stack (list of frames) that allocated the block.
    pub frames: Ref,
    /// Sequence number of the block's record; 0 before it is emitted.
    pub seq: u64,
}

/// Pieces and blocks by address. Pieces do not overlap, blocks do not overlap, and each block lies within pieces.
#[derive(Debug, Clone)]
pub(super) struct Heap {
    pub pieces: BTreeMap<u64, Piece>,
    pub blocks: BTreeMap<u64, Live>,
    /// Number of pieces that may still be visited, to limit the time for a hostile file.
    steps: u64,
    /// Number of pieces that splits may still add, to limit the memory for a hostile file.
    parts: u64,
}

impl Default for Heap {
    fn default() -> Self {
        Heap { pieces: BTreeMap::new(), blocks: BTreeMap::new(), steps: MAX_STEPS, parts: MAX_PARTS }
    }
}

/// Returns the size of the block for a request that is served from `room` free bytes. The size is less than `room` only if the rest
/// is large enough to be split off. The size exceeds `room` if the request does not fit.
pub(super) fn block_bytes(settings: &Settings, requested: u64, room: u64, is_expandable: bool) -> u64 {
    let rounded = rounded(settings, requested);
    match room.checked_sub(rounded) {
        Some(rest) if !settings.splits(rounded, rest, is_expandable) => room,
        _ => rounded,
    }
}

/// Returns the minimum size of a block for a request, in bytes. A snapshot does not name its release, so the newest rules apply.
pub(super) fn rounded(settings: &Settings, requested: u64) -> u64 {
    settings.round(requested, Release::LAST.rules())
}

/// Sizes in bytes by which expandable segments grow: for small blocks, then for large blocks.
const SMALL_PART: u64 = 2 << 20;
const LARGE_PART: u64 = 20 << 20;
/// Maximum number of pieces that all splits of expandable segments add: enough for 5 TiB in parts of 20 MiB.
const MAX_PARTS: u64 = 1 << 18;
/// Maximum number of pieces that splitting one range may add.
const MAX_PARTS_AT_ONCE: u64 = 1 << 14;
/// Maximum number of pieces visited for a file. A real history visits a few pieces for each entry.
const MAX_STEPS: u64 = 1 << 28;

impl Heap {
    /// Returns the piece that contains an address, as (start address, piece).
    fn piece_at(&self, address: u64) -> Option<(u64, Piece)> {
        let (&start, &piece) = self.pieces.range(..=address).next_back()?;
        (address - start < piece.bytes).then_some((start, piece))
    }

    /// Returns whether a range contains no piece.
    pub fn has_room(&self, address: u64, bytes: u64) -> bool {
        let end = address.saturating_add(bytes);
        self.piece_at(address).is_none() && self.pieces.range(address..end).next().is_none()
    }

    /// Returns the start addresses of the pieces in a range; `None` if they do not exactly fill it.
    pub fn pieces_in(&mut self, address: u64, bytes: u64) -> Option<Vec<u64>> {
        let end = address.checked_add(bytes).filter(|_| bytes > 0)?;
        let (mut at, mut found) = (address, Vec::new());
        while at < end {
            let piece = self.pieces.get(&at)?;
            self.steps = self.steps.checked_sub(1)?;
            found.push(at);
            at = at.checked_add(piece.bytes)?;
        }
        (at == end).then_some(found)
    }

    /// Returns whether pieces cover a range without a hole, whatever their sizes.
    pub fn covers(&mut self, address: u64, bytes: u64) -> bool {
        let end = address.saturating_add(bytes);
        let Some((start, piece)) = self.piece_at(address) else { return false };
        let mut at = start + piece.bytes;
        while at < end {
            let Some(piece) = self.pieces.get(&at).filter(|_| self.steps > 0) else { return false };
            self.steps -= 1;
            at += piece.bytes;
        }
        true
    }

    /// Returns whether a block overlaps a range.
    pub fn is_used(&self, address: u64, bytes: u64) -> bool {
        let before = self.blocks.range(..address).next_back();
        let reaches = before.is_some_and(|(start, live)| start + live.bytes.max(live.requested) > address);
        reaches || self.blocks.range(address..address.saturating_add(bytes)).next().is_some()
    }

    /// Returns the free bytes from an address to the next block or the segment's end, and whether the segment is expandable.
    /// `None` if the address is not free. In an expandable segment, the search for the end stops soon after `wanted` bytes.
    pub fn room(&mut self, address: u64, wanted: u64) -> Option<(u64, bool)> {
        let (start, piece) = self.piece_at(address)?;
        if let Some((before, live)) = self.blocks.range(..=address).next_back()
            && before + live.bytes.max(1) > address
        {
            return None;
        }
        let next = self.blocks.range(address..).next().map_or(u64::MAX, |(&start, _)| start);
        let mut end = start + piece.bytes;
        // Adjacent pieces of an expandable segment count as one piece.
        while piece.is_expandable
            && end < next
            && end - address <= wanted.saturating_add(SMALL_PART)
            && let Some(more) = self.pieces.get(&end).filter(|more| more.is_expandable && self.steps > 0)
        {
            self.steps -= 1;
            end += more.bytes;
        }
        Some((end.min(next) - address, piece.is_expandable))
    }

    /// Returns both parts of the piece of an expandable segment that is split at an address. `None` if no piece contains the
    /// address inside.
    pub fn cut_at(&self, address: u64) -> Option<[(u64, Piece); 2]> {
        let (start, piece) = self.piece_at(address)?;
        let left = address - start;
        let part = |bytes| Piece { bytes, ..piece };
        (piece.is_expandable && left > 0).then(|| [(start, part(left)), (address, part(piece.bytes - left))])
    }

    fn cut(&mut self, address: u64) {
        if let Some(two) = self.cut_at(address) {
            self.pieces.extend(two);
        }
    }

    /// Returns the pieces of a new range, as (start address, bytes): several of them for an expandable segment.
    pub fn cuts(&mut self, address: u64, bytes: u64, is_expandable: bool, is_small: bool) -> Vec<(u64, u64)> {
        let part = if is_small || !bytes.is_multiple_of(LARGE_PART) { SMALL_PART } else { LARGE_PART };
        let more = bytes.div_ceil(part).saturating_sub(1);
        if !is_expandable || more > MAX_PARTS_AT_ONCE || more > self.parts {
            return vec![(address, bytes)];
        }
        self.parts -= more;
        (0..=more).map(|nth| (address + nth * part, part.min(bytes - nth * part))).collect()
    }

    pub fn add(&mut self, address: u64, bytes: u64, is_expandable: bool, is_small: bool) {
        for (start, bytes) in self.cuts(address, bytes, is_expandable, is_small) {
            self.pieces.insert(start, Piece { bytes, is_expandable });
        }
    }

    /// Undoes the entries of a history, from the last to the first. Returns for each entry the size of its block, or 0 if
    /// unknown. Entries that contradict the state are skipped; the later replay counts them.
    pub fn rewind(&mut self, events: &[Event], settings: &Settings) -> Vec<u64> {
        let mut sizes: Vec<u64> = events.iter().rev().map(|event| self.undo(event)).collect();
        sizes.reverse();
        self.estimate(settings);
        sizes
    }

    /// Undoes one entry, unless it contradicts the state. Returns the size of the block that the entry allocated, else 0.
    fn undo(&mut self, event: &Event) -> u64 {
        let &Event { action, address, bytes, .. } = event;
        match action {
            Action::Alloc => {
                let is_same = |live: &Live| !live.is_pending && live.requested == bytes;
                if self.blocks.get(&address).is_some_and(is_same) {
                    return self.blocks.remove(&address).map_or(0, |live| live.bytes);
                }
            }
            Action::FreeCompleted => {
                if !self.is_used(address, bytes.max(1)) && self.piece_at(address).is_some() {
                    let (stream, frames) = (event.stream, NONE);
                    let live = Live { bytes: 0, requested: bytes, is_pending: true, stream, frames, seq: 0 };
                    self.blocks.insert(address, live);
                }
            }
            Action::FreeRequested => {
                if let Some(live) = self.blocks.get_mut(&address) {
                    live.is_pending = false;
                }
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                self.cut(address);
                self.cut(address.saturating_add(bytes));
                if !self.is_used(address, bytes) {
                    for start in self.pieces_in(address, bytes).into_iter().flatten() {
                        self.pieces.remove(&start);
                    }
                }
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                if bytes > 0 && self.has_room(address, bytes) {
                    self.add(address, bytes, action == Action::SegmentUnmap, false);
                }
            }
            Action::Oom | Action::Annotate | Action::Snapshot | Action::Refused => {}
        }
        0
    }

    /// Estimates the sizes of blocks that existed at the history's start but not at its end.
    fn estimate(&mut self, settings: &Settings) {
        let unknown: Vec<u64> =
            self.blocks.iter().filter(|(_, live)| live.bytes == 0).map(|(&address, _)| address).collect();
        for address in unknown {
            let Some(live) = self.blocks.remove(&address) else { continue };
            let Some((room, is_expandable)) = self.room(address, live.requested) else { continue };
            let bytes = block_bytes(settings, live.requested, room, is_expandable).min(room);
            self.blocks.insert(address, Live { bytes, ..live });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_rest_stays_with_the_block() {
        const MIB: u64 = 1 << 20;
        let settings = Settings::default();
        let block = |requested, room, is_expandable| block_bytes(&settings, requested, room, is_expandable);
        assert_eq!(block(20_480_000, 20 * MIB, false), 20 * MIB, "a rest below 1 MiB");
        assert_eq!(block(20_480_000, 20 * MIB, true), 20_480_000);
        assert_eq!(block(4 * MIB, 20 * MIB, false), 4 * MIB);
        assert_eq!(block(1024, 1536, false), 1024);
        assert_eq!(block(2 * MIB, MIB, false), 2 * MIB, "not where there is too little room");
        let unsplit = Settings { max_split_bytes: Some(8 * MIB), ..Settings::default() };
        assert_eq!(block_bytes(&unsplit, 10 * MIB, 20 * MIB, false), 20 * MIB);
    }
}
