//! Handles of multicast objects. They look like handles of memory, but have no memory, so calls of cuMemMap and cuMemRelease with
//! them are ignored.

use crate::base::memfd::Zeros;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

const PLACES: usize = 256;

/// A set of at most `PLACES` numbers, without locks. A lookup in an empty set costs one load.
#[derive(Debug, Default)]
pub(crate) struct NumberSet {
    count: AtomicUsize,
    numbers: Zeros<AtomicU64, PLACES>,
}

impl NumberSet {
    /// Adds a number, unless it is 0, in the set already, or the set is full.
    pub(crate) fn add(&self, number: u64) {
        let free = |place: &&AtomicU64| place.compare_exchange(0, number, AcqRel, Relaxed).is_ok();
        if number != 0 && !self.has(number) && self.numbers.iter().any(|place| free(&place)) {
            self.count.fetch_add(1, AcqRel);
        }
    }

    #[inline(always)]
    pub(crate) fn has(&self, number: u64) -> bool {
        self.count.load(Acquire) > 0 && self.numbers.iter().any(|place| place.load(Acquire) == number)
    }

    /// Removes a number; returns whether the set had it.
    pub(crate) fn remove(&self, number: u64) -> bool {
        let found = self.has(number)
            && self.numbers.iter().any(|place| place.compare_exchange(number, 0, AcqRel, Relaxed).is_ok());
        if found {
            self.count.fetch_sub(1, AcqRel);
        }
        found
    }
}

/// Handles of multicast objects, and the addresses at which these objects are mapped. An object is removed when cuMemCreate
/// returns the same number.
#[derive(Debug, Default)]
pub(crate) struct Multicast {
    pub(crate) objects: NumberSet,
    pub(crate) mappings: NumberSet,
}
