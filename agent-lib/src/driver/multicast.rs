//! Multicast objects have handles like memory but no memory of their own, so their cuMemMap and cuMemRelease are ignored.

use crate::base::memfd::Zeros;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

const PLACES: usize = 256;

/// A small set of numbers; a lookup in an empty one costs one load.
#[derive(Debug, Default)]
pub(crate) struct Few {
    count: AtomicUsize,
    numbers: Zeros<AtomicU64, PLACES>,
}

impl Few {
    /// Adds a number; ignores it if the set is full.
    pub(crate) fn add(&self, number: u64) {
        let free = |place: &&AtomicU64| place.compare_exchange(0, number, AcqRel, Relaxed).is_ok();
        if number != 0 && self.numbers.iter().any(|place| free(&place)) {
            self.count.fetch_add(1, AcqRel);
        }
    }

    #[inline(always)]
    pub(crate) fn has(&self, number: u64) -> bool {
        self.count.load(Acquire) > 0 && self.numbers.iter().any(|place| place.load(Acquire) == number)
    }

    pub(crate) fn remove(&self, number: u64) -> bool {
        let found = self.has(number)
            && self.numbers.iter().any(|place| place.compare_exchange(number, 0, AcqRel, Relaxed).is_ok());
        if found {
            self.count.fetch_sub(1, AcqRel);
        }
        found
    }
}

/// Handles of multicast objects, and addresses at which they are mapped.
#[derive(Debug, Default)]
pub(crate) struct Multicast {
    objects: Few,
    mappings: Few,
}

impl Multicast {
    /// Adds a handle that cuMulticastCreate returned. It stays until a new cuMemCreate returns the same number.
    pub(crate) fn remember(&self, handle: u64) {
        if !self.objects.has(handle) {
            self.objects.add(handle);
        }
    }

    #[inline(always)]
    pub(crate) fn is_object(&self, handle: u64) -> bool {
        self.objects.has(handle)
    }

    /// Removes a handle: the number now belongs to memory.
    pub(crate) fn forget(&self, handle: u64) {
        self.objects.remove(handle);
    }

    pub(crate) fn remember_mapping(&self, address: u64) {
        self.mappings.add(address);
    }

    /// Removes an address; returns false if it was not such a mapping.
    pub(crate) fn forget_mapping(&self, address: u64) -> bool {
        self.mappings.remove(address)
    }
}
