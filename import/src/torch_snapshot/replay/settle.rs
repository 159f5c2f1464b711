//! The end of a replay: adds and removes blocks and driver memory until the state equals that of the snapshot.

use super::super::arena::NONE;
use super::super::heap::{Heap, Live, Piece};
use super::super::model::Segment;
use super::Replay;
use gpumem_ledger::Origin;
use gpumem_wire::{Body, Stamp};

impl Replay<'_> {
    /// Changes the state of all devices to that of the snapshot.
    pub(super) fn correct(&mut self) {
        for index in 0..self.devices.len() {
            let device = &mut self.devices[index];
            let mut end = std::mem::take(&mut device.end);
            let is_same = |live: &Live, other: &Live| {
                (live.bytes, live.requested, live.is_pending)
                    == (other.bytes, other.requested, other.is_pending)
            };
            let surplus = device.heap.blocks.iter().filter(|(address, live)| {
                end.blocks.get(address).is_none_or(|wanted| !is_same(live, wanted))
            });
            let surplus: Vec<u64> = surplus.map(|(&address, _)| address).collect();
            self.totals.corrected += surplus.len() as u64;
            surplus.into_iter().for_each(|address| self.remove_block(index, address));
            self.correct_pieces(index, &mut end);
            for (&address, live) in &end.blocks {
                if !self.heap(index).blocks.contains_key(&address) {
                    self.totals.corrected += 1;
                    self.add_block(index, address, *live, NONE, false);
                }
                if live.frames == NONE || self.stacks.classify(self.arena, live.frames).is_none() {
                    self.totals.unnamed.0 += 1;
                    self.totals.unnamed.1 = self.totals.unnamed.1.saturating_add(live.bytes);
                }
            }
        }
    }

    /// Adds missing pieces (memory from the driver), and removes surplus pieces with their blocks. Keeps pieces that the snapshot
    /// has too, even if it splits them differently.
    fn correct_pieces(&mut self, index: usize, end: &mut Heap) {
        let pieces: Vec<(u64, Piece)> =
            self.heap(index).pieces.iter().map(|(&start, &piece)| (start, piece)).collect();
        for (start, Piece { bytes, is_expandable }) in pieces {
            let is_there = match end.pieces.get(&start) {
                Some(wanted) if wanted.bytes == bytes => true,
                _ => is_expandable && end.covers(start, bytes),
            };
            if is_there {
                continue;
            }
            let inside = self.heap(index).blocks.range(start..start.saturating_add(bytes));
            let inside: Vec<u64> = inside.map(|(&address, _)| address).collect();
            inside.into_iter().for_each(|address| self.remove_block(index, address));
            self.totals.corrected += 1;
            self.remove_piece(index, start);
        }
        for (&start, piece) in &end.pieces {
            if self.heap(index).has_room(start, piece.bytes) {
                self.totals.corrected += 1;
                self.add_piece(index, start, *piece);
            }
        }
    }

    /// Emits for each device the sums of what the snapshot states for its segments, so that the ledger compares them with the sums
    /// of blocks.
    pub(super) fn end(&mut self) {
        for index in 0..self.devices.len() {
            let is_here = |segment: &&Segment| !segment.is_host && usize::from(segment.device) == index;
            let segments = self.snapshot.segments.iter().filter(is_here);
            let (reserved, allocated) =
                segments.fold((0_u64, Some(0_u64)), |(reserved, allocated), segment| {
                    let sum = |own: u64| Some(allocated?.saturating_add(own));
                    (reserved.saturating_add(segment.bytes), segment.allocated.and_then(sum))
                });
            let Some(used_bytes) = allocated else { continue };
            let (pool, stamp) = (Self::pool(index), self.on(index));
            self.emit(stamp, Body::PoolState { pool, reserved_bytes: reserved, used_bytes, took_us: 0 });
            self.emit(stamp, Body::PoolCheck { pool, total_bytes: used_bytes });
        }
        let at = Stamp { time_ns: self.now_ns, ..Stamp::default() };
        self.send(Origin::Host, at, Body::Tick {});
    }
}
