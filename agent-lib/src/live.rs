//! State: what is live now, kept by the callbacks themselves, so that a full ring loses history but never a sum.
//!
//! A bounded hash table without locks. The rows lie in the memfd, as layout.rs says (each the slot of the record that
//! made it, seq 0 while empty or being written); beside them, in memory of our own:
//!
//! ```text
//! chunk   7 keys (hashes; 0 free, 1 being written); how many rows probed past this chunk, and which of its rows have
//!         something beside them: one cache line
//! beside  per row what the record has no place for: retags, VMM counts. Most have nothing, and it is not touched then
//! ```
//!
//! A row lies in the first chunk with a free place, from its home on (`chunk_at`). Each chunk that it passed counts it, so a look-up
//! ends at a chunk that nobody passed, and removal leaves no tombstones.
//!
//! What makes this simple is the order of events: an address is unbound when its free is *entered*, before the driver
//! can give it out again, and bound when the allocation has *returned*. So operations on one key never race, unless the
//! program itself races; operations on different keys meet only at free places, which are claimed by compare-and-swap.

use crate::memfd::{Words, anonymous, fetch_to_write};
use crate::peak;
use crate::ring::Row;
use gpumem_wire::Slot;
use std::sync::atomic::{AtomicU64, Ordering::*, fence};

const KEYS: usize = 7;
const FREE: u64 = 0;
const WRITING: u64 = 1;
/// Chunks that a row may lie from its home. At 80 % load one in a million rows is further than 8.
const REACH: usize = 64;

/// 3,584 rows in 229 kB, 14,336 more in 917 kB.
const NEAR: usize = 512;
const MIDDLE: usize = 2048;

#[derive(Debug)]
#[repr(align(64))]
struct Chunk {
    keys: [AtomicU64; KEYS],
    /// Low half: rows that probed past. Above: a bit per key, set while something lies beside its row.
    passed: AtomicU64,
}

impl Chunk {
    #[inline(always)]
    fn is_passed(&self) -> bool {
        self.passed.load(Acquire) as u32 != 0
    }
    #[inline(always)]
    fn has_beside(&self, place: usize) -> bool {
        self.passed.load(Acquire) & beside_bit(place) != 0
    }
}

#[inline(always)]
fn beside_bit(place: usize) -> u64 {
    1 << (32 + place)
}

/// What the record has no place for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Beside {
    /// First tag; the row's own is the latest. Meaningful if `RETAGGED`.
    pub first_tag: u32,
    /// Role and phase as in `Retag`, of rows that have no place for it.
    pub use_as: u8,
    /// See the constants.
    pub flags: u8,
    /// VMM: references of the handle. Imports: how often it was opened.
    pub references: u32,
    /// VMM: live mappings of the handle.
    pub mappings: u32,
    /// VMM mappings: seq of the handle's row.
    pub backing: u64,
}

impl Beside {
    /// It was retagged at least once.
    pub const RETAGGED: u8 = 1;
    /// A block that its owner has freed and a stream may still use.
    pub const PENDING: u8 = 2;

    fn words(self) -> [u64; 3] {
        let first = u64::from(self.first_tag) | u64::from(self.use_as) << 32 | u64::from(self.flags) << 40;
        [first, u64::from(self.references) | u64::from(self.mappings) << 32, self.backing]
    }

    fn from_words([first, counts, backing]: [u64; 3]) -> Self {
        Beside {
            first_tag: first as u32,
            use_as: (first >> 32) as u8,
            flags: (first >> 40) as u8,
            references: counts as u32,
            mappings: (counts >> 32) as u32,
            backing,
        }
    }
}

/// By what a row is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// A driver allocation or import, by address.
    Allocation(u64),
    /// A VMM handle that has references, by its number.
    Handle(u64),
    /// A VMM handle without references that still has mappings, by the seq that made it: its number may be given out
    /// again.
    Backing(u64),
    /// A VMM mapping, by address.
    Mapping(u64),
    /// A pool.
    Pool(u64),
    /// Pool and address.
    Segment(u64, u64),
    /// Pool and address.
    Block(u64, u64),
}

impl Key {
    #[inline(always)]
    fn hash(self) -> u64 {
        let (space, a, b) = match self {
            Key::Allocation(address) => (1, address, 0),
            Key::Handle(handle) => (2, handle, 0),
            Key::Backing(seq) => (3, seq, 0),
            Key::Mapping(address) => (4, address, 0),
            Key::Pool(pool) => (5, pool, 0),
            Key::Segment(pool, address) => (6, address, pool),
            Key::Block(pool, address) => (7, address, pool),
        };
        let mixed = mix(a ^ (space << 57), b ^ 0x9e37_79b9_7f4a_7c15);
        if mixed <= WRITING { mixed + 2 } else { mixed }
    }
}

/// Both halves of a 128-bit product.
#[inline(always)]
pub fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ 0x2d35_8dcc_aa6c_78a5) * u128::from(b ^ 0x8bb8_4b93_962e_acc9);
    let folded = product as u64 ^ (product >> 64) as u64;
    (folded ^ folded >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// A row that was taken out.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    /// Its record.
    pub row: Row,
    /// What lay beside it.
    pub beside: Beside,
}

impl Taken {
    /// Seq of the record that made it.
    pub fn seq(&self) -> u64 {
        self.row[0]
    }
    /// The slot as bytes.
    pub fn slot(&self) -> Slot {
        slot_of(&self.row)
    }
}

/// Words to bytes.
pub fn slot_of(row: &Row) -> Slot {
    let mut slot = [0; 64];
    for (place, word) in slot.chunks_exact_mut(8).zip(row) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    slot
}

/// Where a key's row is, or where that of a new key will be, if nobody else takes the place.
#[derive(Debug, Clone, Copy)]
pub struct Spot {
    hash: u64,
    at: usize,
    /// `KEYS`: it has to be looked for.
    place: usize,
}

/// See the module's text.
#[derive(Debug)]
pub struct Live {
    rows: &'static [Words],
    chunks: &'static [Chunk],
    beside: &'static [[AtomicU64; 3]],
    /// Chunks that are tried first: a power of two.
    near: usize,
    /// Chunks that are tried next: a power of two, or none.
    middle: usize,
    /// Chunks that are tried in all.
    reach: usize,
    /// Rows that found no place: from the first one on, the state is not whole.
    pub refused: AtomicU64,
}

/// Rows in a table for at least `wanted`: whole chunks, a power of two of them.
pub fn rows_for(wanted: u64) -> u64 {
    wanted.div_ceil(KEYS as u64).next_power_of_two() * KEYS as u64
}

impl Live {
    /// A table over `rows`, whose number comes from `rows_for`.
    pub fn new(rows: &'static [Words]) -> Option<Self> {
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

    /// The chunk that is tried at `distance`: first one of few, then one of more, then neighbours in the rest. A program with
    /// few rows stays within few pages; one row in a table of 20 MB costs two cache misses and two of the TLB.
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

    /// Where the row of `hash` is: distance from home, chunk, place.
    #[inline(always)]
    fn find(&self, hash: u64) -> Option<(usize, usize, usize)> {
        for (distance, at) in self.walk(hash) {
            let chunk = &self.chunks[at];
            for (place, key) in chunk.keys.iter().enumerate() {
                if key.load(Acquire) == hash {
                    return Some((distance, at, place));
                }
            }
            if !chunk.is_passed() {
                return None;
            }
        }
        None
    }

    /// Binds `key` to `row`, whose seq is in its first word. A row that is there already is replaced: its end was
    /// not seen. False if there is no place.
    #[inline(always)]
    pub fn insert(&self, key: Key, row: &Row, beside: Beside) -> bool {
        self.insert_at(self.spot_for(key.hash()), row, beside)
    }

    /// Where a new key with this hash will have its row, whose line is on its way from now on: it mostly lies in no cache
    /// that is near, and the program's next locked instruction would wait until it is here.
    #[inline(always)]
    pub fn spot_for(&self, hash: u64) -> Spot {
        let at = self.chunk_at(hash, 0);
        let chunk = &self.chunks[at];
        let (mut place, mut is_new) = (KEYS, !chunk.is_passed());
        for (index, key) in chunk.keys.iter().enumerate().rev() {
            match key.load(Acquire) {
                FREE => place = index,
                found if found == hash => is_new = false,
                _ => {}
            }
        }
        // Nearly always: a new key, and a free place at home.
        let place = if is_new { place } else { KEYS };
        self.fetch_row(Spot { hash, at, place })
    }

    /// Where the row of the key with this hash is, if it is at home: as `spot_for`.
    #[inline(always)]
    pub fn spot_of(&self, hash: u64) -> Spot {
        let at = self.chunk_at(hash, 0);
        let mut place = KEYS;
        for (index, key) in self.chunks[at].keys.iter().enumerate() {
            place = if key.load(Acquire) == hash { index } else { place }; // a branch would be guessed wrong
        }
        self.fetch_row(Spot { hash, at, place })
    }

    #[inline(always)]
    fn fetch_row(&self, spot: Spot) -> Spot {
        if spot.place < KEYS {
            fetch_to_write(&self.rows[spot.at * KEYS + spot.place]);
        }
        spot
    }

    /// As `insert`, where `spot_for` has looked.
    #[inline(always)]
    pub fn insert_at(&self, spot: Spot, row: &Row, beside: Beside) -> bool {
        let Spot { hash, at, place } = spot;
        if place < KEYS && self.claim(at, place, hash, row, beside) {
            return true;
        }
        self.insert_further(hash, row, beside)
    }

    #[inline(always)]
    fn claim(&self, at: usize, place: usize, hash: u64, row: &Row, beside: Beside) -> bool {
        let key = &self.chunks[at].keys[place];
        if key.compare_exchange(FREE, WRITING, Acquire, Relaxed).is_err() {
            return false;
        }
        self.write(at, place, row, beside);
        key.store(hash, Release);
        if peak::open() {
            peak::born(row);
        }
        true
    }

    #[cold]
    #[inline(never)]
    fn insert_further(&self, hash: u64, row: &Row, beside: Beside) -> bool {
        if self.find(hash).is_some() {
            self.take(hash);
        }
        for (distance, at) in self.walk(hash) {
            let chunk = &self.chunks[at];
            for (place, key) in chunk.keys.iter().enumerate() {
                if key.load(Relaxed) == FREE && self.claim(at, place, hash, row, beside) {
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
    fn write(&self, at: usize, place: usize, row: &Row, beside: Beside) {
        let index = at * KEYS + place;
        fence(Release); // a reader that sees what follows sees the 0 that removal left
        if beside != Beside::default() {
            self.write_beside(at, place, beside);
        }
        let words = &self.rows[index];
        for word in 1..row.len() {
            words[word].store(row[word].to_le(), Relaxed);
        }
        words[0].store(row[0].to_le(), Release);
    }

    #[cold]
    fn write_beside(&self, at: usize, place: usize, beside: Beside) {
        for (word, value) in self.beside[at * KEYS + place].iter().zip(beside.words()) {
            word.store(value, Relaxed);
        }
        self.chunks[at].passed.fetch_or(beside_bit(place), AcqRel);
    }

    #[inline(always)]
    fn read_beside(&self, at: usize, place: usize) -> Beside {
        match self.chunks[at].has_beside(place) {
            true => self.beside_there(at * KEYS + place),
            false => Beside::default(),
        }
    }

    fn beside_there(&self, index: usize) -> Beside {
        Beside::from_words(std::array::from_fn(|word| self.beside[index][word].load(Relaxed)))
    }

    /// Makes the words beside a row meaningful, to be changed one by one.
    fn open_beside(&self, at: usize, place: usize) {
        if !self.chunks[at].has_beside(place) {
            self.write_beside(at, place, Beside::default());
        }
    }

    /// Unbinds `key` and gives its row.
    #[inline]
    pub fn remove(&self, key: Key) -> Option<Taken> {
        self.take(key.hash())
    }

    #[inline]
    fn take(&self, hash: u64) -> Option<Taken> {
        let found = self.seize(hash)?;
        let (_, at, place) = found;
        let row = std::array::from_fn(|word| u64::from_le(self.rows[at * KEYS + place][word].load(Relaxed)));
        let beside = self.read_beside(at, place);
        self.vacate(hash, found);
        if peak::open() {
            peak::gone(&row);
        }
        Some(Taken { row, beside })
    }

    /// Where the row of `hash` is, for the caller alone: of two frees of one address one gets it.
    #[inline(always)]
    fn seize(&self, hash: u64) -> Option<(usize, usize, usize)> {
        let found = self.find(hash)?;
        self.seize_at(hash, found)
    }

    #[inline(always)]
    fn seize_at(&self, hash: u64, found: (usize, usize, usize)) -> Option<(usize, usize, usize)> {
        let (_, at, place) = found;
        self.chunks[at].keys[place].compare_exchange(hash, WRITING, AcqRel, Relaxed).ok()?;
        Some(found)
    }

    /// The place of a row that was seized is free.
    #[inline(always)]
    fn vacate(&self, hash: u64, (distance, at, place): (usize, usize, usize)) {
        let chunk = &self.chunks[at];
        if chunk.has_beside(place) {
            chunk.passed.fetch_and(!beside_bit(place), AcqRel);
        }
        self.rows[at * KEYS + place][0].store(0, Release);
        chunk.keys[place].store(FREE, Release);
        if distance > 0 {
            self.unpass(hash, distance);
        }
    }

    /// Unbinds `key`. Its row is not looked at: it mostly lies in another core's cache, and waiting for it would be half of
    /// what a freed block costs.
    #[inline(always)]
    pub fn discard(&self, key: Key) {
        self.discard_at(self.spot_of(key.hash()));
    }

    /// As `discard`, where `spot_of` has looked.
    #[inline(always)]
    pub fn discard_at(&self, spot: Spot) {
        let Spot { hash, at, place } = spot;
        let is_at_home = place < KEYS && !peak::open();
        match is_at_home.then_some((0, at, place)).and_then(|found| self.seize_at(hash, found)) {
            Some(found) => self.vacate(hash, found),
            None => self.discard_further(hash),
        }
    }

    #[cold]
    #[inline(never)]
    fn discard_further(&self, hash: u64) {
        self.take(hash);
    }

    /// `key` will be bound or unbound soon; its hash.
    #[inline(always)]
    pub fn expect(&self, key: Key) -> u64 {
        let hash = key.hash();
        fetch_to_write(&self.chunks[self.chunk_at(hash, 0)]);
        hash
    }

    /// The row of `key`, if it is bound.
    pub fn get(&self, key: Key) -> Option<Taken> {
        let (_, at, place) = self.find(key.hash())?;
        self.read(at, place)
    }

    /// The row there, if there is one: a consistent copy, whatever other threads do.
    fn read(&self, at: usize, place: usize) -> Option<Taken> {
        let words = &self.rows[at * KEYS + place];
        let seq = u64::from_le(words[0].load(Acquire));
        let row = std::array::from_fn(|word| u64::from_le(words[word].load(Relaxed)));
        let beside = self.read_beside(at, place);
        fence(Acquire);
        (seq != 0 && u64::from_le(words[0].load(Relaxed)) == seq).then_some(Taken { row, beside })
    }

    /// Every row, in no order.
    pub fn scan(&self) -> impl Iterator<Item = Taken> + '_ {
        let used = self.chunks.iter().enumerate().flat_map(|(at, chunk)| {
            let taken =
                move |(place, key): (usize, &AtomicU64)| (key.load(Acquire) > WRITING).then_some((at, place));
            chunk.keys.iter().enumerate().filter_map(taken)
        });
        used.filter_map(|(at, place)| self.read(at, place))
    }

    /// Unbinds every row that `goes` says; for ends of contexts and pools.
    pub fn remove_where(&self, key_of: impl Fn(&Taken) -> Option<Key>) {
        for taken in self.scan() {
            if let Some(key) = key_of(&taken) {
                self.remove(key);
            }
        }
    }

    /// Changes one word of the row of `key`, and what lies beside it. In a program that retags a block while
    /// another thread frees it, the next owner of the row may get the name.
    pub fn update(&self, key: Key, word: usize, change: impl Fn(u64, &mut Beside) -> u64) -> Option<Taken> {
        let (_, at, place) = self.find(key.hash())?;
        let index = at * KEYS + place;
        let before = self.read(at, place)?;
        self.open_beside(at, place);
        let mut beside = before.beside;
        let value = change(before.row[word], &mut beside);
        if word == 5 && peak::open() {
            peak::renamed(&before.row, value as u32);
        }
        self.rows[index][word].store(value.to_le(), Release);
        for (to, value) in [0, 2].into_iter().map(|word| (&self.beside[index][word], beside.words()[word])) {
            to.store(value, Relaxed);
        }
        Some(before)
    }

    /// Adds to the counts of the row of `key`; the counts after it. `None` if it is not bound.
    pub fn count(&self, key: Key, references: i32, mappings: i32) -> Option<Taken> {
        let (_, at, place) = self.find(key.hash())?;
        let index = at * KEYS + place;
        self.open_beside(at, place);
        let counts = &self.beside[index][1];
        let add = |counts: u64| {
            let now = (counts as u32).saturating_add_signed(references);
            let mapped = ((counts >> 32) as u32).saturating_add_signed(mappings);
            u64::from(now) | u64::from(mapped) << 32
        };
        let mut old = counts.load(Relaxed);
        while let Err(other) = counts.compare_exchange_weak(old, add(old), AcqRel, Relaxed) {
            old = other;
        }
        let mut taken = self.read(at, place)?;
        taken.beside.references = add(old) as u32;
        taken.beside.mappings = (add(old) >> 32) as u32;
        Some(taken)
    }
}

#[cfg(test)]
mod tests;
