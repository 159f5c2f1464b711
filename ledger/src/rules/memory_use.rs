//! What the rows of a process take of the daemon's memory: an estimate from the tables that a peer can fill.

use crate::Map;
use crate::base::quota::EVERY;
use crate::rows::pool::Segment;
use crate::rows::row::Mapping;
use crate::rules::holdings::Holdings;
use std::mem::size_of;

/// A node of a `BTreeMap` is half full at worst; a key and a value of that size.
const fn sorted(entry: usize) -> usize {
    2 * entry
}

/// A hash table with so many entries and places, of that size.
fn table(entries: usize, places: usize, entry: usize) -> usize {
    let is_nearly_full = places - entries.min(places) < EVERY.max(places / 16);
    let bytes = places * (entry + 1) * 8 / 7;
    if places > EVERY && is_nearly_full { 3 * bytes } else { bytes }
}

fn list<T>(list: &Vec<T>) -> usize {
    table(list.len(), list.capacity(), size_of::<T>())
}

pub(crate) fn map<K, V>(map: &Map<K, V>) -> usize {
    table(map.len(), map.capacity(), size_of::<(K, V)>())
}

impl Holdings {
    pub fn bytes(&self) -> usize {
        let rows = map(&self.allocations)
            + map(&self.handles)
            + map(&self.backings)
            + map(&self.carved)
            + self.carved.len() * 64
            + map(&self.waiting)
            + map(&self.pool_ids)
            + self.large.len() * sorted(16)
            + self.mappings.len() * sorted(8 + size_of::<Mapping>())
            + self.in_flight.bytes();
        let pools = self.pools.iter().map(|pool| {
            map(&pool.blocks)
                + pool.large_blocks.len() * sorted(16)
                // Each segment names what it lies in, and that names the segment.
                + pool.segments.len() * sorted(8 + size_of::<Segment>() + 96)
        });
        let cells = self.cells.bytes();
        let books = self.books.iter().map(|book| book.bytes());
        let follows =
            self.roles.iter().map(|roles| roles.young.bytes() + roles.iterations.bytes()).sum::<usize>()
                + self.ghosts.iter().map(|ghosts| ghosts.bytes()).sum::<usize>();
        let places = list(&self.pools) + list(&self.restated);
        rows + places + pools.sum::<usize>() + cells + books.sum::<usize>() + follows
    }
}
