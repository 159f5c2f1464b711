//! Ring of the last changes of live memory, for pictures of single blocks. Only readers of files keep one.

use crate::Map;
use crate::book::cells::CellId;
use gpumem_model::blocks::{Block, Blocks};
use std::collections::VecDeque;

/// Maximum number of events in a ring; 56 bytes each.
const MAX_EVENTS: usize = 65_536;

/// Bytes of an allocation or block that are not in a segment of a pool.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnBytes {
    /// Birth number of the row.
    pub seq: u64,
    pub address: u64,
    pub bytes: u64,
    pub cell: CellId,
}

#[derive(Debug, Clone, Copy)]
enum Change {
    /// The own bytes of a row changed; `before` is 0 if the row is new.
    Row {
        before: u64,
        now: OwnBytes,
    },
    Tracked {
        before: i64,
        now: i64,
    },
    Step {
        number: u64,
    },
}

#[derive(Debug, Clone, Copy)]
struct Event {
    time_ns: u64,
    book: u8,
    change: Change,
}

/// The last events of a process.
#[derive(Debug, Default)]
pub(crate) struct BlockRing {
    events: VecDeque<Event>,
    /// Whether earlier events were dropped.
    is_cut: bool,
    /// Time of the record that is being booked.
    pub now_ns: u64,
    /// Tracked bytes of each book at its last event.
    tracked: Vec<i64>,
}

impl BlockRing {
    fn push(&mut self, book: u8, change: Change) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
            self.is_cut = true;
        }
        // The records of several threads are not exactly sorted.
        let time_ns = self.events.back().map_or(self.now_ns, |last| last.time_ns.max(self.now_ns));
        self.events.push_back(Event { time_ns, book, change });
    }

    /// Notes that the own bytes of a row changed from `before`.
    pub fn note_row(&mut self, book: u8, before: u64, now: OwnBytes) {
        if before != now.bytes {
            self.push(book, Change::Row { before, now });
        }
    }

    pub fn note_tracked(&mut self, book: u8, now: i64) {
        let index = usize::from(book);
        if index >= self.tracked.len() {
            self.tracked.resize(index + 1, 0);
        }
        let before = std::mem::replace(&mut self.tracked[index], now);
        if before != now {
            self.push(book, Change::Tracked { before, now });
        }
    }

    /// Notes the begin of a training step on the device of a book.
    pub fn note_step(&mut self, book: u8, number: u64) {
        self.push(book, Change::Step { number });
    }

    /// Returns the time from which the events of a book are shown: the begin of its first whole step, or of the first event.
    fn begin_ns(&self, book: u8) -> u64 {
        let is_step = |event: &&Event| event.book == book && matches!(event.change, Change::Step { .. });
        let mut steps = self.events.iter().filter(is_step);
        // The only step may have begun just before the last event.
        let first_whole = steps.next().filter(|_| self.is_cut && steps.next().is_some());
        first_whole.or(self.events.front()).map_or(0, |event| event.time_ns)
    }

    /// Returns the blocks of a book since the first whole step in the ring. `live`: all its rows now. `tracked`: its tracked
    /// bytes now.
    pub fn blocks(&self, book: u8, live: impl Iterator<Item = OwnBytes>, tracked: i64) -> Blocks {
        let from_ns = self.begin_ns(book);
        let to_ns = self.events.back().map_or(0, |event| event.time_ns);
        let mut found = Blocks { from_ns, to_ns, is_cut: self.is_cut, ..Blocks::default() };
        // Times at which the rows got their present bytes.
        let mut since: Map<u64, u64> = Map::default();
        let in_window = |time_ns: u64| (time_ns > from_ns || !self.is_cut).then_some(time_ns);
        for Event { time_ns, change, .. } in self.events.iter().filter(|event| event.book == book) {
            match *change {
                Change::Row { before, now } => {
                    let began_ns = since.remove(&now.seq);
                    if before > 0 && *time_ns >= from_ns && began_ns != Some(*time_ns) {
                        let made_ns = began_ns.and_then(in_window);
                        let OwnBytes { address, cell, .. } = now;
                        found.blocks.push(Block {
                            address,
                            bytes: before,
                            cell,
                            made_ns,
                            freed_ns: Some(*time_ns),
                        });
                    }
                    if now.bytes > 0 {
                        since.insert(now.seq, *time_ns);
                    }
                }
                Change::Tracked { before, now } => {
                    if found.tracked.is_empty() {
                        found.tracked.push((from_ns, before));
                    }
                    if *time_ns <= from_ns {
                        found.tracked.clear();
                    }
                    found.tracked.push((from_ns.max(*time_ns), now));
                }
                Change::Step { number } if *time_ns >= from_ns => found.steps.push((*time_ns, number)),
                Change::Step { .. } => {}
            }
        }
        if found.tracked.is_empty() {
            found.tracked.push((from_ns, tracked));
        }
        found.blocks.extend(live.map(|OwnBytes { seq, address, bytes, cell }| {
            let made_ns = since.get(&seq).copied().and_then(in_window);
            Block { address, bytes, cell, made_ns, freed_ns: None }
        }));
        let order = |block: &Block| (block.made_ns, block.freed_ns.unwrap_or(u64::MAX), block.address);
        found.blocks.sort_by_key(order);
        found
    }

    pub fn bytes(&self) -> usize {
        self.events.capacity() * size_of::<Event>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(seq: u64, bytes: u64) -> OwnBytes {
        OwnBytes { seq, address: seq << 8, bytes, cell: seq as u32 }
    }

    fn at(ring: &mut BlockRing, time_ns: u64) -> &mut BlockRing {
        ring.now_ns = time_ns;
        ring
    }

    #[test]
    fn blocks_have_their_lives_and_their_last_cell() {
        let mut ring = BlockRing::default();
        at(&mut ring, 5).note_tracked(0, 100);
        at(&mut ring, 10).note_row(0, 0, row(1, 30));
        at(&mut ring, 20).note_row(0, 0, row(2, 40));
        at(&mut ring, 20).note_row(1, 0, row(9, 1));
        // A segment takes a part of the second one.
        at(&mut ring, 30).note_row(0, 40, row(2, 15));
        at(&mut ring, 40).note_row(0, 30, OwnBytes { cell: 7, ..row(1, 0) });
        at(&mut ring, 45).note_step(0, 3);
        ring.note_step(1, 9);
        at(&mut ring, 39).note_tracked(0, 60); // a record that another thread's record overtook
        let blocks = ring.blocks(0, [row(2, 15)].into_iter(), 60);
        let block = |seq: u64, bytes, cell, made, freed_ns| Block {
            address: seq << 8,
            bytes,
            cell,
            made_ns: Some(made),
            freed_ns,
        };
        assert_eq!(
            blocks.blocks,
            [block(1, 30, 7, 10, Some(40)), block(2, 40, 2, 20, Some(30)), block(2, 15, 2, 30, None)]
        );
        assert_eq!((blocks.from_ns, blocks.to_ns, blocks.is_cut), (5, 45, false));
        assert_eq!(blocks.tracked, [(5, 100), (45, 60)]);
        assert_eq!(blocks.steps, [(45, 3)]);
    }

    #[test]
    fn memory_is_bounded_and_the_window_begins_with_a_whole_step() {
        let mut ring = BlockRing::default();
        at(&mut ring, 1).note_row(0, 0, row(1, 8));
        ring.note_tracked(0, 1000);
        let events = 3 * MAX_EVENTS as u64;
        for time_ns in 2..events {
            ring.now_ns = time_ns;
            if time_ns % 1000 == 0 {
                ring.note_step(0, time_ns / 1000);
            } else if time_ns % 2 == 0 {
                ring.note_row(0, 0, row(time_ns, 4));
            } else {
                // Each block lives for 501 ns.
                ring.note_row(0, 4, row(time_ns.saturating_sub(501), 0));
            }
        }
        assert_eq!(ring.events.len(), MAX_EVENTS);
        assert!(ring.bytes() <= 2 * MAX_EVENTS * size_of::<Event>());
        assert!(size_of::<Event>() <= 64);
        let blocks = ring.blocks(0, [row(1, 8)].into_iter(), 1000);
        let first = (events - MAX_EVENTS as u64).next_multiple_of(1000);
        assert_eq!((blocks.from_ns, blocks.is_cut), (first, true));
        assert_eq!(blocks.steps[0], (first, first / 1000));
        assert_eq!(blocks.tracked, [(first, 1000)]);
        assert!(blocks.blocks.iter().all(|block| block.freed_ns.is_none_or(|freed_ns| freed_ns >= first)));
        assert_eq!(blocks.blocks[0].made_ns, None, "made before the window");
        let old = Block { address: 1 << 8, bytes: 8, cell: 1, made_ns: None, freed_ns: None };
        assert!(blocks.blocks.contains(&old));
    }
}
