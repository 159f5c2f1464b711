//! The live table: one row for each live allocation, block, handle, mapping, pool and segment. Callbacks update it themselves, so
//! the state is correct even if the ring is full and records are lost.
//!
//! The table is a bounded hash table without locks. The rows lie in the memfd, as wire/src/layout.rs describes. Each row is the
//! record that made it; its seq is 0 while the row is empty or being written. In private memory there are, in addition:
//!
//! ```text
//! chunk   7 keys (hashes; 0 free, 1 being written), the number of rows that found this chunk full and lie in a later one, and
//!         which rows have extra data: one cache line
//! beside  for each row, data for which the record has no room: retags, counts of handles. Most rows have none
//! ```
//!
//! A row lies in the first chunk with a free place, starting at its home chunk (`chunk_at`). Each full chunk that it tried counts
//! it. So a lookup ends at a chunk that no row has passed, and removal leaves no tombstones.
//!
//! The key of an allocation is removed when its free *begins*, before the driver can reuse the address. It is added when the call
//! that allocates has *returned*. So operations on one key never race, unless the program itself races. Operations on different
//! keys meet only at free places, which are claimed by compare-and-swap.

mod chunk;
mod found;

use crate::base::memfd::{Words, anonymous, fetch_to_write};
use crate::base::ring::Row;
use crate::base::row::{Key, RowCopy, RowExtra, WRITING, kind, kind_of};
use crate::record::high_water;
use chunk::{Chunk, FREE, KEYS, extra_bit, favourite};
pub(crate) use found::FoundRow;
use std::sync::atomic::{AtomicU64, Ordering::*, fence};

/// Maximum number of chunks of the third level (see `chunk_at`) to try for a row. At 80 % load one in a million rows is further
/// than 8 chunks from its home chunk.
const REACH: usize = 64;

/// Numbers of chunks of the first and second level (see `chunk_at`): 3,584 rows in 229 kB, and 14,336 rows in 917 kB.
const NEAR: usize = 512;
const MIDDLE: usize = 2048;

/// A place in the table: key `number` of a chunk, and the row that belongs to this key.
#[derive(Debug, Clone, Copy)]
struct RowLocation {
    chunk: &'static Chunk,
    number: usize,
    row: &'static Words,
}

impl RowLocation {
    #[inline(always)]
    fn key(&self) -> &'static AtomicU64 {
        &self.chunk.keys[self.number]
    }
    #[inline(always)]
    fn has_extra(&self) -> bool {
        self.chunk.has_extra(self.number)
    }
}

/// A key's home chunk: the one to try first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Home {
    hash: u64,
    chunk: &'static Chunk,
    /// The row of the chunk's first key.
    rows: *const Words,
}

/// The place of a key's row. For a new key, the place that its row gets unless another thread claims it first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowSlot {
    hash: u64,
    /// The place, if it is in the home chunk; with `None` a search is needed.
    at_home: Option<RowLocation>,
}

/// The table; see the module's docs.
#[derive(Debug)]
#[repr(C)]
pub struct Live {
    rows: &'static [Words],
    chunks: &'static [Chunk],
    /// Number of chunks of the first level (see `chunk_at`): a power of two.
    near: usize,
    /// Number of chunks of the second level: a power of two, or 0.
    middle: usize,
    /// Maximum number of chunks that a lookup tries.
    reach: usize,
    /// Number of rows that were not added for lack of a place. If it is not 0, the table is incomplete.
    pub refused: AtomicU64,
    beside: &'static [[AtomicU64; 3]],
}

/// Returns the number of rows of a table with at least `wanted` rows: whole chunks, whose number is a power of two.
pub(crate) fn rows_for(wanted: u64) -> u64 {
    wanted.div_ceil(KEYS as u64).next_power_of_two() * KEYS as u64
}

impl Live {
    /// Creates a table with `rows`, whose number `rows_for` has returned; `None` without memory.
    pub(crate) fn new(rows: &'static [Words]) -> Option<Self> {
        let chunks = anonymous::<Chunk>(rows.len() / KEYS)?;
        let (near, middle) = match chunks.len() {
            8192.. => (NEAR, MIDDLE),
            1 => (1, 0),
            few => (few / 2, 0),
        };
        let rest = chunks.len() - near - middle;
        Some(Live {
            rows,
            chunks,
            beside: anonymous(rows.len())?,
            near,
            middle,
            reach: if rest == 0 { 1 } else { 2 + REACH.min(rest) },
            refused: AtomicU64::new(0),
        })
    }

    /// Returns the index of the chunk to try at `distance`. Distance 0 is in the first level, 1 in the larger second level, and
    /// the others are neighbours in the third. So a program with few rows uses few pages: a row of a table of 20 MB costs two
    /// cache misses and two TLB misses.
    #[inline(always)]
    fn chunk_at(&self, hash: u64, distance: usize) -> usize {
        match distance {
            0 => hash as usize & (self.near - 1),
            1 if self.middle > 0 => self.near + ((hash >> 12) as usize & (self.middle - 1)),
            _ => {
                let first = self.near + self.middle;
                let rest = self.chunks.len() - first;
                let home = (((hash >> 32) * rest as u64) >> 32) as usize;
                first + (home + distance) % rest
            }
        }
    }

    #[inline(always)]
    fn walk(&self, hash: u64) -> impl Iterator<Item = (usize, usize)> {
        (0..self.reach).map(move |distance| (distance, self.chunk_at(hash, distance)))
    }

    fn place(&self, at: usize, number: usize) -> RowLocation {
        RowLocation { chunk: &self.chunks[at], number, row: &self.rows[at * KEYS + number] }
    }

    #[inline(always)]
    fn home(&self, hash: u64) -> Home {
        let at = hash as usize & (self.near - 1);
        // SAFETY: there are at least `near` chunks, which is a power of two, and `KEYS` rows for each.
        let (chunk, rows) = unsafe { (self.chunks.get_unchecked(at), self.rows.as_ptr().add(at * KEYS)) };
        Home { hash, chunk, rows }
    }

    /// Finds the row whose key has this hash; returns its distance from the home chunk, in chunks, and its place.
    #[inline(always)]
    fn find(&self, hash: u64) -> Option<(usize, RowLocation)> {
        for (distance, at) in self.walk(hash) {
            let chunk = &self.chunks[at];
            let number = chunk.place_of(hash);
            if number < KEYS {
                return Some((distance, self.place(at, number)));
            }
            if !chunk.is_passed() {
                return None;
            }
        }
        None
    }

    /// Adds `row`, whose first word is its seq. Replaces a row with the same key: its end was not observed. Returns false if
    /// there is no place.
    #[inline(always)]
    pub(crate) fn insert(&self, key: Key, row: &Row, beside: RowExtra) -> bool {
        let RowSlot { hash, at_home } = Self::spot_for(self.home(key.hash()));
        let is_there = at_home.is_some_and(|place| self.claim(place, hash, row, Some(beside)));
        is_there || self.insert_further(hash, *row, beside)
    }

    /// Returns the place for the row of a new key, and prefetches its cache line. That line is rarely in a near cache, and the
    /// program's next locked instruction would wait for the write to it.
    #[inline(always)]
    pub(crate) fn spot_for(home: Home) -> RowSlot {
        // Nearly always the key is new, and its home chunk has a free place.
        let is_new = !home.chunk.is_passed() && home.chunk.equal(home.hash) == 0;
        let number = if is_new { home.chunk.free_place(favourite(home.hash)) } else { KEYS };
        Self::fetch_row(home, number)
    }

    /// Returns the place of the key's row, if it is in its home chunk. Prefetches the row, as `spot_for` does.
    #[inline(always)]
    pub(crate) fn spot_of(home: Home) -> RowSlot {
        Self::fetch_row(home, home.chunk.place_of(home.hash))
    }

    #[inline(always)]
    fn fetch_row(Home { hash, chunk, rows }: Home, number: usize) -> RowSlot {
        if number >= KEYS {
            return RowSlot { hash, at_home: None };
        }
        // SAFETY: the chunk has `KEYS` rows (see `home`), in memory that stays mapped.
        let row = unsafe { &*rows.add(number) };
        fetch_to_write(row);
        RowSlot { hash, at_home: Some(RowLocation { chunk, number, row }) }
    }

    /// Adds a row without additional data at a place that `spot_for` has returned.
    #[inline(always)]
    pub(crate) fn insert_at(&self, spot: RowSlot, row: &Row) -> bool {
        let is_there = spot.at_home.is_some_and(|place| self.claim(place, spot.hash, row, None));
        let [seq, time, address, bytes, aux, tag, thread, codes] = *row;
        is_there || self.insert_words(spot.hash, seq, time, address, bytes, aux, tag, thread, codes)
    }

    #[inline(always)]
    fn claim(&self, place: RowLocation, hash: u64, row: &Row, beside: Option<RowExtra>) -> bool {
        if place.key().compare_exchange(FREE, WRITING, Acquire, Relaxed).is_err() {
            return false;
        }
        self.write(place, row, beside);
        if high_water::open() {
            self.count_new(place.row);
        }
        place.key().store(hash, Release);
        true
    }

    /// Like `insert_further`, without additional data. The words are separate arguments, so that the usual case keeps them in
    /// registers: an address of the row would make it store them.
    #[cold]
    #[inline(never)]
    #[allow(clippy::too_many_arguments)]
    fn insert_words(
        &self,
        hash: u64,
        seq: u64,
        time: u64,
        address: u64,
        bytes: u64,
        aux: u64,
        tag: u64,
        thread: u64,
        codes: u64,
    ) -> bool {
        self.insert_further(hash, [seq, time, address, bytes, aux, tag, thread, codes], RowExtra::default())
    }

    #[cold]
    #[inline(never)]
    fn insert_further(&self, hash: u64, row: Row, beside: RowExtra) -> bool {
        if self.find(hash).is_some() {
            self.take(hash);
        }
        for (distance, at) in self.walk(hash) {
            let chunk = &self.chunks[at];
            for (number, key) in chunk.keys.iter().enumerate() {
                if key.load(Relaxed) == FREE && self.claim(self.place(at, number), hash, &row, Some(beside)) {
                    return true;
                }
            }
            chunk.passed.fetch_add(1, AcqRel);
            if distance + 1 == self.reach {
                self.unpass(hash, distance + 1);
            }
        }
        self.refused.fetch_add(1, Relaxed);
        false
    }

    fn unpass(&self, hash: u64, chunks: usize) {
        for (_, at) in self.walk(hash).take(chunks) {
            self.chunks[at].passed.fetch_sub(1, AcqRel);
        }
    }

    #[inline(always)]
    fn write(&self, place: RowLocation, row: &Row, beside: Option<RowExtra>) {
        fence(Release); // a reader that sees the following stores also sees that the seq was 0
        if let Some(beside) = beside.filter(|beside| *beside != RowExtra::default()) {
            self.write_extra(place, beside);
        }
        let to = place.row;
        for word in 1..row.len() {
            to[word].store(row[word].to_le(), Relaxed);
        }
        place.row[0].store(row[0].to_le(), Release);
    }

    fn beside(&self, place: RowLocation) -> &'static [AtomicU64; 3] {
        let bytes = std::ptr::from_ref(place.row).addr() - self.rows.as_ptr().addr();
        &self.beside[bytes / size_of::<Words>()]
    }

    #[unsafe(link_section = ".text.hot.gpumem")]
    #[inline(never)]
    fn write_extra(&self, place: RowLocation, beside: RowExtra) {
        for (word, value) in self.beside(place).iter().zip(beside.words()) {
            word.store(value, Relaxed);
        }
        place.chunk.passed.fetch_or(extra_bit(place.number), AcqRel);
    }

    #[inline(always)]
    fn read_extra(&self, place: RowLocation) -> RowExtra {
        match place.has_extra() {
            true => self.stored_extra(place),
            false => RowExtra::default(),
        }
    }

    fn stored_extra(&self, place: RowLocation) -> RowExtra {
        let words = self.beside(place);
        RowExtra::from_words(std::array::from_fn(|word| words[word].load(Relaxed)))
    }

    #[inline]
    pub(crate) fn remove(&self, key: Key) -> Option<RowCopy> {
        self.take(key.hash())
    }

    #[inline]
    fn take(&self, hash: u64) -> Option<RowCopy> {
        let (distance, place) = self.find(hash).filter(|(_, place)| Self::seize(*place, hash))?;
        let row = std::array::from_fn(|word| u64::from_le(place.row[word].load(Relaxed)));
        let beside = self.read_extra(place);
        Self::vacate(place);
        if distance > 0 {
            self.unpass(hash, distance);
        }
        if high_water::open() {
            high_water::count(&row, self.parent_of(&row), -1);
        }
        Some(RowCopy { row, beside })
    }

    /// Claims the row of `hash` for removal: of two frees of one address, only one succeeds.
    #[inline(always)]
    fn seize(place: RowLocation, hash: u64) -> bool {
        place.key().compare_exchange(hash, WRITING, AcqRel, Relaxed).is_ok()
    }

    #[cold]
    #[inline(never)]
    fn forget_extra(chunk: &Chunk, number: usize) {
        chunk.passed.fetch_and(!extra_bit(number), AcqRel);
    }

    #[inline(always)]
    fn vacate(place: RowLocation) {
        if place.has_extra() {
            Self::forget_extra(place.chunk, place.number);
        }
        place.row[0].store(0, Release);
        place.key().store(FREE, Release);
    }

    /// Removes the row that `spot_of` has found, without reading it: reading from another core's cache takes half of a free's
    /// time.
    #[inline(always)]
    pub(crate) fn discard_at(&self, spot: RowSlot) {
        match spot.at_home.filter(|place| !high_water::open() && Self::seize(*place, spot.hash)) {
            Some(place) => Self::vacate(place),
            None => self.discard_further(spot.hash),
        }
    }

    #[cold]
    #[inline(never)]
    fn discard_further(&self, hash: u64) {
        self.take(hash);
    }

    /// Prefetches the home chunk of `key` and, most probably, its row, which will soon be added or removed.
    #[inline(always)]
    pub(crate) fn expect(&self, key: Key) -> Home {
        let home = self.home(key.hash());
        fetch_to_write(home.chunk);
        // SAFETY: as in `fetch_row`.
        fetch_to_write(unsafe { &*home.rows.add(favourite(home.hash)) });
        home
    }

    #[inline]
    pub fn get(&self, key: Key) -> Option<RowCopy> {
        self.get_hashed(key.hash())
    }

    #[inline(never)]
    fn get_hashed(&self, hash: u64) -> Option<RowCopy> {
        let (_, place) = self.find(hash)?;
        self.read(place)
    }

    /// Reads the row at a place; `None` if the place is free or another thread changes it meanwhile.
    fn read(&self, place: RowLocation) -> Option<RowCopy> {
        let words = place.row;
        let seq = u64::from_le(words[0].load(Acquire));
        let row = std::array::from_fn(|word| u64::from_le(words[word].load(Relaxed)));
        let beside = self.read_extra(place);
        fence(Acquire);
        (seq != 0 && u64::from_le(words[0].load(Relaxed)) == seq).then_some(RowCopy { row, beside })
    }

    /// Returns the parent of a block's pool; 0 if the pool has no parent or the row is not a block.
    pub(crate) fn parent_of(&self, row: &Row) -> u64 {
        match kind_of(row) {
            kind::BLOCK_ALLOC => self.get(Key::Pool(row[4])).map_or(0, |pool| pool.row[4]),
            _ => 0,
        }
    }

    #[cold]
    #[inline(never)]
    fn count_new(&self, row: &Words) {
        let row = std::array::from_fn(|word| u64::from_le(row[word].load(Relaxed)));
        high_water::count(&row, self.parent_of(&row), 1);
    }

    /// Begins a range whose peak is recorded (high_water.rs); returns false without memory. Must not be called in a callback.
    pub(crate) fn begin_high_water(&self) -> bool {
        high_water::begin(|| self.scan().map(|taken| (taken.row, self.parent_of(&taken.row))).collect())
    }

    /// Iterates over all rows of the table, in no particular order.
    pub fn scan(&self) -> impl Iterator<Item = RowCopy> + '_ {
        let used = self.chunks.iter().enumerate().flat_map(|(at, chunk)| {
            let taken = move |(number, key): (usize, &AtomicU64)| {
                (key.load(Acquire) > WRITING).then_some((at, number))
            };
            chunk.keys.iter().enumerate().filter_map(taken)
        });
        used.filter_map(|(at, number)| self.read(self.place(at, number)))
    }

    /// Removes each row for which `key_of` returns a key, for example all rows of a context that ended.
    pub(crate) fn remove_where(&self, key_of: impl Fn(&RowCopy) -> Option<Key>) {
        for taken in self.scan() {
            if let Some(key) = key_of(&taken) {
                self.remove(key);
            }
        }
    }
}

#[cfg(test)]
mod tests;
