//! Chooses addresses of segments. The driver's choice is unknown; the choice matters only for releases that order equal blocks by
//! address.

use std::collections::BTreeMap;

/// How the driver chooses the address of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SegmentAddresses {
    /// Each segment lies above all earlier ones.
    #[default]
    Rising,
    /// Each segment lies below all earlier ones.
    Falling,
    /// Each segment lies in the lowest free range that is large enough.
    LowestFree,
}

/// Alignment of segments in bytes.
const ALIGN: u64 = 2 << 20;
/// Lowest address of segments, and of the address ranges of expandable segments.
const SEGMENTS: u64 = 1 << 40;
const RANGES: u64 = 1 << 50;

#[derive(Clone, Debug)]
pub(crate) struct AddressSpace {
    choice: SegmentAddresses,
    next: u64,
    /// Free address ranges below `next`: first address and length in bytes.
    free: BTreeMap<u64, u64>,
}

impl AddressSpace {
    pub(crate) fn of_segments(choice: SegmentAddresses) -> Self {
        AddressSpace { choice, next: SEGMENTS, free: BTreeMap::new() }
    }

    /// Returns the space from which expandable segments reserve their ranges.
    pub(crate) fn of_ranges(choice: SegmentAddresses) -> Self {
        AddressSpace { choice, next: RANGES, free: BTreeMap::new() }
    }

    /// Returns the address of a new segment or range.
    pub(crate) fn take(&mut self, bytes: u64) -> u64 {
        let bytes = bytes.next_multiple_of(ALIGN);
        match self.choice {
            SegmentAddresses::Falling => {
                self.next -= bytes;
                return self.next;
            }
            SegmentAddresses::Rising => {}
            SegmentAddresses::LowestFree => {
                if let Some((&address, &length)) = self.free.iter().find(|(_, length)| **length >= bytes) {
                    self.free.remove(&address);
                    if length > bytes {
                        self.free.insert(address + bytes, length - bytes);
                    }
                    return address;
                }
            }
        }
        self.next += bytes;
        self.next - bytes
    }

    pub(crate) fn give_back(&mut self, mut address: u64, bytes: u64) {
        if self.choice != SegmentAddresses::LowestFree {
            return;
        }
        let mut bytes = bytes.next_multiple_of(ALIGN);
        if let Some((&left, &length)) = self.free.range(..address).next_back()
            && left + length == address
        {
            (address, bytes) = (left, bytes + length);
        }
        if let Some(length) = self.free.remove(&(address + bytes)) {
            bytes += length;
        }
        self.free.insert(address, bytes);
    }
}
