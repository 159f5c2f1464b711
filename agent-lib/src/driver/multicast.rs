//! Multicast objects look like memory handles and are none: cuMemMap and cuMemRelease of them are left out.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

/// Size of a set.
const PLACES: usize = 256;

/// A small set of numbers; a lookup in an empty one is one load.
#[derive(Debug)]
pub(crate) struct Few {
    count: AtomicUsize,
    numbers: [AtomicU64; PLACES],
}

impl Few {
    /// None.
    pub(crate) fn new() -> Self {
        Few { count: AtomicUsize::new(0), numbers: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Adds one; none if the set is full.
    pub(crate) fn add(&self, number: u64) {
        let free = |place: &&AtomicU64| place.compare_exchange(0, number, AcqRel, Relaxed).is_ok();
        if number != 0 && self.numbers.iter().any(|place| free(&place)) {
            self.count.fetch_add(1, AcqRel);
        }
    }

    /// Whether the set has it.
    #[inline(always)]
    pub(crate) fn has(&self, number: u64) -> bool {
        self.count.load(Acquire) > 0 && self.numbers.iter().any(|place| place.load(Acquire) == number)
    }

    /// Takes one out; whether it was there.
    pub(crate) fn remove(&self, number: u64) -> bool {
        let found = self.has(number)
            && self.numbers.iter().any(|place| place.compare_exchange(number, 0, AcqRel, Relaxed).is_ok());
        if found {
            self.count.fetch_sub(1, AcqRel);
        }
        found
    }
}

impl Default for Few {
    fn default() -> Self {
        Self::new()
    }
}

/// Handles of multicast objects, and addresses at which they are mapped.
#[derive(Debug, Default)]
pub(crate) struct Multicast {
    objects: Few,
    mappings: Few,
}

impl Multicast {
    /// cuMulticastCreate gave this handle. It stays known after its release: only a new cuMemCreate with the same
    /// number makes it memory.
    pub(crate) fn remember(&self, handle: u64) {
        if !self.objects.has(handle) {
            self.objects.add(handle);
        }
    }

    /// Whether a handle is a multicast object.
    #[inline(always)]
    pub(crate) fn is_object(&self, handle: u64) -> bool {
        self.objects.has(handle)
    }

    /// The number is memory's now.
    pub(crate) fn forget(&self, handle: u64) {
        self.objects.remove(handle);
    }

    /// A multicast object was mapped here.
    pub(crate) fn remember_mapping(&self, address: u64) {
        self.mappings.add(address);
    }

    /// It is unmapped; false if it was no such mapping.
    pub(crate) fn forget_mapping(&self, address: u64) -> bool {
        self.mappings.remove(address)
    }
}
