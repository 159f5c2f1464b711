//! Rows by address, in a hash table with linear probing.
//!
//! With a million live rows each look-up waits for memory. In std's map it waits twice, for a control byte and then for the row; here
//! a row lies beside its address. [`Home::read`] starts this wait early, at a cost of a few instructions.

use crate::base::quota::table;
use crate::rows::row::Row;
use foldhash::fast::RandomState;
use std::hash::BuildHasher;

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    address: u64,
    row: Option<Row>,
}

/// The first two slots in which a row may lie. To remove a row, both are read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Home<'t>(&'t Slot, &'t Slot);

impl Home<'_> {
    /// Reads the begin of the first slot and the end of the second one, so that both are in the processor's caches when the row
    /// is needed. Returns a value that depends on what it has read, without a branch that would wait for it.
    #[inline]
    pub fn read(self) -> u64 {
        self.0.address ^ u64::from(self.1.row.is_some())
    }
}

#[derive(Debug, Default)]
pub(crate) struct RowTable {
    /// A power of two of slots, or none. Each row lies in its home, which the hash of its address gives, or in the first slot after
    /// it that was vacant. At least a quarter of the slots is vacant.
    slots: Vec<Slot>,
    len: usize,
    /// Seeded, so that a peer cannot choose addresses that have the same home.
    hasher: RandomState,
}

impl RowTable {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn bytes(&self) -> usize {
        table(self.len, self.slots.len() / 4 * 3, self.slots.len() * size_of::<Slot>())
    }

    #[inline]
    fn home(&self, address: u64) -> usize {
        self.hasher.hash_one(address) as usize & self.mask()
    }

    #[inline]
    fn mask(&self) -> usize {
        self.slots.len().wrapping_sub(1)
    }

    /// Returns the home of an address without reading it; `None` in a table without slots.
    #[inline]
    pub fn home_of(&self, address: u64) -> Option<Home<'_>> {
        let home = self.home(address);
        Some(Home(self.slots.get(home)?, self.slots.get((home + 1) & self.mask())?))
    }

    /// Returns the index of the slot with this address, or of the vacant slot for it; `None` in a table without slots.
    #[inline]
    fn place(&self, address: u64) -> Option<usize> {
        let mut at = self.home(address);
        loop {
            let slot = self.slots.get(at)?;
            if slot.address == address || slot.row.is_none() {
                return Some(at);
            }
            at = (at + 1) & self.mask();
        }
    }

    #[inline]
    pub fn get(&self, address: u64) -> Option<&Row> {
        self.slots[self.place(address)?].row.as_ref()
    }

    #[inline]
    pub fn get_mut(&mut self, address: u64) -> Option<&mut Row> {
        let at = self.place(address)?;
        self.slots[at].row.as_mut()
    }

    /// Inserts a row, or replaces the row at this address.
    #[inline]
    pub fn insert(&mut self, address: u64, row: Row) {
        if self.len >= self.slots.len() / 4 * 3 {
            self.grow();
        }
        if let Some(at) = self.place(address) {
            self.len += usize::from(self.slots[at].row.is_none());
            self.slots[at] = Slot { address, row: Some(row) };
        }
    }

    #[cold]
    fn grow(&mut self) {
        let slots = vec![Slot::default(); (2 * self.slots.len()).max(4)];
        let old = std::mem::replace(&mut self.slots, slots);
        self.len = 0;
        old.into_iter().for_each(|slot| slot.row.into_iter().for_each(|row| self.insert(slot.address, row)));
    }

    #[inline]
    pub fn remove(&mut self, address: u64) -> Option<Row> {
        let mut vacant = self.place(address)?;
        let row = self.slots[vacant].row?;
        self.len -= 1;
        // Rows after the removed one move up, unless they would lie before their home.
        let mut at = vacant;
        loop {
            at = (at + 1) & self.mask();
            let next = self.slots[at];
            if next.row.is_none() {
                break;
            }
            let distance = |from: usize| at.wrapping_sub(from) & self.mask();
            if distance(self.home(next.address)) >= distance(vacant) {
                self.slots[vacant] = next;
                vacant = at;
            }
        }
        self.slots[vacant].row = None;
        Some(row)
    }

    /// Returns addresses and rows in an arbitrary order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Row)> {
        self.slots.iter().filter_map(|slot| Some((slot.address, slot.row.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn slot_is_as_small_as_address_and_row() {
        assert_eq!(size_of::<Slot>(), size_of::<(u64, Row)>());
    }

    #[test]
    fn table_has_the_rows_of_a_map_after_any_calls() {
        let mut random = 1_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (random >> 33) % below
        };
        let (mut table, mut map) = (RowTable::default(), BTreeMap::new());
        assert_eq!((table.remove(0), table.home_of(0).is_none()), (None, true));
        assert_eq!(table.get(0), None);
        for addresses in [4, 40, 400, 4000] {
            for seq in 0..20_000 {
                // Few addresses, so that most calls concern one that is known; 0 and the highest are not special.
                let address = next(addresses).wrapping_sub(addresses / 2);
                let row = Row { seq, ..Row::default() };
                match next(3) {
                    0 => assert_eq!(table.remove(address), map.remove(&address)),
                    1 => assert_eq!(table.get_mut(address), map.get_mut(&address)),
                    _ => {
                        table.insert(address, row);
                        map.insert(address, row);
                    }
                }
                assert_eq!((table.len(), table.get(address)), (map.len(), map.get(&address)));
                assert_eq!(table.is_empty(), map.is_empty());
            }
            let rows: BTreeMap<u64, Row> = table.iter().map(|(address, row)| (address, *row)).collect();
            assert_eq!(rows, map);
        }
        for address in map.keys() {
            assert!(table.remove(*address).is_some());
        }
        assert!(table.iter().next().is_none());
    }
}
