//! Rows by address, in a hash table with linear probing.
//!
//! With many live rows each look-up waits for memory. In std's map it waits twice in sequence, for a control byte and then for the
//! row. Here addresses and rows are two arrays, so both waits overlap, and [`Home::read`] starts them early. A search reads
//! addresses only, of which a cache line has eight. Searches begin at even slots, and two rows lie in a cache line, so most rows are
//! in the line that was read early, and most moves of rows by a removal stay in it.

use crate::base::quota::table;
use crate::rows::row::{NO_ADDRESS, Row};
use foldhash::fast::RandomState;
use std::hash::BuildHasher;

/// The rows of an even slot and of the slot after it, in one cache line.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Pair([Row; 2]);

/// The first slot in which a row may lie: its address, and its row with the next one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Home<'t>(&'t u64, &'t Pair);

impl Home<'_> {
    /// Reads the slot, so that it is in the processor's caches when the row is needed. Returns a value that depends on what it has
    /// read, without a branch that would wait for it.
    #[inline]
    pub fn read(self) -> u64 {
        *self.0 ^ self.1.0[0].bytes
    }
}

#[derive(Debug, Default)]
pub(crate) struct RowTable {
    /// Addresses of the rows; [`NO_ADDRESS`] in vacant slots. A power of two of slots, or none. Each row lies in its home, an even
    /// slot that the hash of its address gives, or in the first slot after it that was vacant. At least a quarter of the slots is vacant.
    addresses: Vec<u64>,
    /// Rows of the slots; that of a vacant slot means nothing.
    pairs: Vec<Pair>,
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
        let slots = self.addresses.len();
        table(self.len, slots / 4 * 3, slots * (size_of::<u64>() + size_of::<Row>()))
    }

    #[inline]
    fn home(&self, address: u64) -> usize {
        self.hasher.hash_one(address) as usize & self.mask() & !1
    }

    #[inline]
    fn mask(&self) -> usize {
        self.addresses.len().wrapping_sub(1)
    }

    /// Returns the home of an address without reading it; `None` in a table without slots.
    #[inline]
    pub fn home_of(&self, address: u64) -> Option<Home<'_>> {
        let home = self.home(address);
        Some(Home(self.addresses.get(home)?, self.pairs.get(home / 2)?))
    }

    /// Returns the index of the slot with this address, or of the vacant slot for it; `None` in a table without slots.
    #[inline]
    fn place(&self, address: u64) -> Option<usize> {
        let mut at = self.home(address);
        loop {
            let present = *self.addresses.get(at)?;
            if present == address || present == NO_ADDRESS {
                return Some(at);
            }
            at = (at + 1) & self.mask();
        }
    }

    /// Returns the index of the slot with this address.
    #[inline]
    pub fn find(&self, address: u64) -> Option<usize> {
        self.place(address).filter(|&at| self.addresses[at] != NO_ADDRESS)
    }

    #[inline]
    pub fn get(&self, address: u64) -> Option<&Row> {
        let at = self.find(address)?;
        self.pairs.get(at / 2).map(|pair| &pair.0[at % 2])
    }

    #[inline]
    pub fn get_mut(&mut self, address: u64) -> Option<&mut Row> {
        let at = self.find(address)?;
        self.pairs.get_mut(at / 2).map(|pair| &mut pair.0[at % 2])
    }

    /// Returns the vacant slot for an address, for [`fill`](Self::fill), or the row at this address.
    #[inline]
    pub fn vacancy(&mut self, address: u64) -> Result<usize, &mut Row> {
        if self.len >= self.addresses.len() / 4 * 3 {
            self.grow();
        }
        let at = self.place(address).unwrap_or_default();
        if self.addresses[at] == NO_ADDRESS { Ok(at) } else { Err(&mut self.pairs[at / 2].0[at % 2]) }
    }

    /// Puts a row into the slot that [`vacancy`](Self::vacancy) has just returned for its address, which is not [`NO_ADDRESS`].
    #[inline]
    pub fn fill(&mut self, slot: usize, address: u64, row: Row) {
        self.len += 1;
        self.addresses[slot] = address;
        self.pairs[slot / 2].0[slot % 2] = row;
    }

    /// Inserts a row, or replaces the row at this address. Does nothing for [`NO_ADDRESS`].
    #[inline]
    pub fn insert(&mut self, address: u64, row: Row) {
        match self.vacancy(address) {
            _ if address == NO_ADDRESS => {}
            Ok(slot) => self.fill(slot, address, row),
            Err(old) => *old = row,
        }
    }

    #[cold]
    fn grow(&mut self) {
        let slots = (2 * self.addresses.len()).max(4);
        let addresses = std::mem::replace(&mut self.addresses, vec![NO_ADDRESS; slots]);
        let pairs = std::mem::replace(&mut self.pairs, vec![Pair::default(); slots / 2]);
        self.len = 0;
        let rows = pairs.iter().flat_map(|pair| pair.0);
        let live = addresses.into_iter().zip(rows).filter(|(address, _)| *address != NO_ADDRESS);
        live.for_each(|(address, row)| self.insert(address, row));
    }

    #[inline]
    pub fn remove(&mut self, address: u64) -> Option<Row> {
        self.find(address).map(|at| self.take(at))
    }

    /// Removes the row in a slot that [`find`](Self::find) has returned. The result is not an `Option`: the compiler writes an
    /// optional row to the stack and reads it back in other pieces, for which a processor waits.
    #[inline]
    pub fn take(&mut self, slot: usize) -> Row {
        let row = self.pairs[slot / 2].0[slot % 2];
        self.len -= 1;
        // Rows after the removed one move up, unless they would lie before their home.
        let (mut vacant, mut at) = (slot, slot);
        loop {
            at = (at + 1) & self.mask();
            let next = self.addresses[at];
            if next == NO_ADDRESS {
                break;
            }
            let distance = |from: usize| at.wrapping_sub(from) & self.mask();
            if distance(self.home(next)) >= distance(vacant) {
                self.addresses[vacant] = next;
                self.pairs[vacant / 2].0[vacant % 2] = self.pairs[at / 2].0[at % 2];
                vacant = at;
            }
        }
        self.addresses[vacant] = NO_ADDRESS;
        row
    }

    /// Returns addresses and rows in an arbitrary order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Row)> {
        let slots = self.addresses.iter().zip(self.pairs.iter().flat_map(|pair| &pair.0));
        slots.filter(|(address, _)| **address != NO_ADDRESS).map(|(address, row)| (*address, row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn alignment_costs_no_memory() {
        assert_eq!(size_of::<Pair>(), 2 * size_of::<Row>());
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
                // Few addresses, so that most calls concern one that is known; 0 is valid, and the highest address is not.
                let address = next(addresses).wrapping_sub(addresses / 2);
                let row = Row { seq, ..Row::default() };
                match next(3) {
                    0 => assert_eq!(table.remove(address), map.remove(&address)),
                    1 => assert_eq!(table.get_mut(address), map.get_mut(&address)),
                    _ => {
                        table.insert(address, row);
                        if address != NO_ADDRESS {
                            map.insert(address, row);
                        }
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
