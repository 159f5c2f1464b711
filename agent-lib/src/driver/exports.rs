//! Memory handles that the program has exported to file descriptors. The driver keeps the memory until the descriptor is closed,
//! even after the last release and unmap. There is no callback when a descriptor is closed.
//!
//! Each export is recorded as a mapping of the handle at an address that the driver never uses. The mapping is removed when the
//! descriptor is closed, which is checked at each release of a handle and once a second. Copies of the descriptor, also in other
//! processes, are unknown: after the first close, the recorded memory is a lower bound.

use crate::base::descriptor::Identity;
use crate::base::memfd::Zeros;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::*};

/// Maximum number of exports at a time. With further exports, memory is counted only until the handle's last release.
const PLACES: usize = 256;
/// Address of the first export's mapping: "ex" in the upper bits. The driver maps nothing there.
const ADDRESSES: u64 = 0x6578 << 48;
/// Distance between the addresses of two exports, and size of each mapping: mappings start at multiples of this.
const STEP: u64 = 2 << 20;

/// An entry of the table of exports: a descriptor that was open at the last check; the entry may be free.
#[derive(Debug, Default)]
struct Export {
    /// `FREE`; `CHANGING` while the entry is being written; `OPEN` if it has an export.
    state: AtomicUsize,
    descriptor: AtomicI32,
    /// Device and inode of the open file: another file may get the same descriptor later.
    device: AtomicU64,
    inode: AtomicU64,
}

const FREE: usize = 0;
const CHANGING: usize = 1;
const OPEN: usize = 2;

impl Export {
    fn file(&self) -> Identity {
        let (device, inode) = (self.device.load(Relaxed), self.inode.load(Relaxed));
        Identity { fd: self.descriptor.load(Relaxed), device, inode }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Exports {
    /// Number of entries that are not free. If it is 0, the table is not searched.
    count: AtomicUsize,
    places: Zeros<Export, PLACES>,
}

impl Exports {
    /// Adds an export to `file`, unless the table is full. `map` records the export's mapping, with address and size.
    pub(crate) fn follow(&self, file: Identity, map: impl FnOnce(u64, u64)) {
        let claim = |(_, export): &(usize, &Export)| {
            export.state.compare_exchange(FREE, CHANGING, AcqRel, Relaxed).is_ok()
        };
        let Some((place, export)) = self.places.iter().enumerate().find(claim) else { return };
        self.count.fetch_add(1, AcqRel);
        export.descriptor.store(file.fd, Relaxed);
        export.device.store(file.device, Relaxed);
        export.inode.store(file.inode, Relaxed);
        map(address_of(place), STEP);
        export.state.store(OPEN, Release);
    }

    /// Removes the exports whose descriptors were closed. `unmap` records the end of an export's mapping, with address and size.
    pub(crate) fn drop_closed(&self, unmap: impl Fn(u64, u64)) {
        if self.count.load(Acquire) == 0 {
            return;
        }
        for (place, export) in self.places.iter().enumerate() {
            let is_closed = export.state.load(Acquire) == OPEN && !export.file().holds();
            if is_closed && export.state.compare_exchange(OPEN, CHANGING, AcqRel, Relaxed).is_ok() {
                unmap(address_of(place), STEP);
                export.state.store(FREE, Release);
                self.count.fetch_sub(1, AcqRel);
            }
        }
    }
}

fn address_of(place: usize) -> u64 {
    ADDRESSES + place as u64 * STEP
}
