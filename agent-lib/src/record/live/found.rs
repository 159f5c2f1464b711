//! Rows that are found once, to read some of their words and to change them.

use super::{Live, RowLocation};
use crate::base::memfd::Words;
use crate::base::row::{Key, RowCopy, RowExtra};
use crate::record::high_water;
use crate::record::live::chunk::KEYS;
use std::sync::atomic::{AtomicU64, Ordering::*};

/// A row that was found, as it was then, and its place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FoundRow {
    hash: u64,
    place: RowLocation,
    /// Number of the record that made the row.
    pub seq: u64,
}

impl FoundRow {
    /// Returns a word of the row. If another thread frees the row meanwhile, the word may be that of the next row at this place.
    #[inline(always)]
    pub(crate) fn word(&self, index: usize) -> u64 {
        u64::from_le(self.place.row[index].load(Relaxed))
    }
}

impl Live {
    /// Finds the row of `key`, to read some of its words or to update it.
    #[inline(always)]
    pub(crate) fn find_row(&self, key: Key) -> Option<FoundRow> {
        let hash = key.hash();
        let home = self.home(hash);
        let place = match home.chunk.place_of(hash) {
            number @ 0..KEYS => {
                // SAFETY: as in `fetch_row`.
                RowLocation { chunk: home.chunk, number, row: unsafe { &*home.rows.add(number) } }
            }
            _ => self.find_further(hash)?,
        };
        let seq = u64::from_le(place.row[0].load(Acquire));
        (seq != 0).then_some(FoundRow { hash, place, seq })
    }

    #[cold]
    #[inline(never)]
    fn find_further(&self, hash: u64) -> Option<RowLocation> {
        self.find(hash).map(|(_, place)| place)
    }

    /// Marks the additional data of a row as valid, so that its words can be changed one by one.
    fn open_extra(&self, place: RowLocation) -> &'static [AtomicU64; 3] {
        if !place.has_extra() {
            self.write_extra(place, RowExtra::default());
        }
        self.beside(place)
    }

    /// Returns the additional data of a row.
    #[inline(always)]
    pub(crate) fn extra(&self, found: &FoundRow) -> RowExtra {
        self.read_extra(found.place)
    }

    /// Changes one word of the row of `key`, and its additional data, if there is such a row.
    pub(crate) fn update(&self, key: Key, word: usize, change: impl Fn(u64, &mut RowExtra) -> u64) {
        if let Some(found) = self.find_row(key) {
            self.update_found(&found, word, change);
        }
    }

    /// Changes one word of a row, and its additional data, unless the row was removed since it was found. If another thread frees
    /// it just now, the change may apply to the next row at this place.
    #[inline(always)]
    pub(crate) fn update_found(
        &self,
        found: &FoundRow,
        word: usize,
        change: impl Fn(u64, &mut RowExtra) -> u64,
    ) {
        let place = found.place;
        if place.key().load(Acquire) != found.hash || found.word(0) != found.seq {
            return;
        }
        let words = self.open_extra(place);
        let mut beside = RowExtra::from_words(std::array::from_fn(|index| words[index].load(Relaxed)));
        let value = change(found.word(word), &mut beside);
        if word == 5 && high_water::open() {
            self.count_retagged(place.row, value as u32);
        }
        place.row[word].store(value.to_le(), Release);
        for word in [0, 2] {
            words[word].store(beside.words()[word], Relaxed);
        }
    }

    #[cold]
    #[inline(never)]
    fn count_retagged(&self, row: &Words, tag: u32) {
        let row = std::array::from_fn(|word| u64::from_le(row[word].load(Relaxed)));
        high_water::row_retagged(&row, self.parent_of(&row), tag);
    }

    /// Marks a block as pending: freed while a stream may still use it.
    pub(crate) fn set_pending(&self, key: Key) {
        self.update(key, 5, |word, beside| {
            beside.flags |= RowExtra::PENDING;
            word
        });
    }

    /// Adds to a row's counts of references and mappings. Returns the row with the new counts; `None` without a row.
    pub(crate) fn count(&self, key: Key, references: i32, mappings: i32) -> Option<RowCopy> {
        let (_, place) = self.find(key.hash())?;
        let counts = &self.open_extra(place)[1];
        let add = |counts: u64| {
            let now = (counts as u32).saturating_add_signed(references);
            let mapped = ((counts >> 32) as u32).saturating_add_signed(mappings);
            u64::from(now) | u64::from(mapped) << 32
        };
        let mut old = counts.load(Relaxed);
        while let Err(other) = counts.compare_exchange_weak(old, add(old), AcqRel, Relaxed) {
            old = other;
        }
        let mut taken = self.read(place)?;
        taken.beside.references = add(old) as u32;
        taken.beside.mappings = (add(old) >> 32) as u32;
        Some(taken)
    }
}
