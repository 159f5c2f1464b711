//! Rows of live memory, the amounts that count them, and residues of removed rows.

use crate::Map;
use crate::book::cells::CellId;
use gpumem_model::run::Beside;
use gpumem_wire::MemoryKind;

/// Maximum accepted allocation (256 TiB): a peer that reports more is wrong, and no sum of accepted rows can overflow.
pub(crate) const MAX_BYTES: u64 = 1 << 48;

/// Minimum size of allocations that can be found by an address inside them (for segments in a part of an allocation). Smaller
/// ones are found only by their first byte.
pub(crate) const LARGE_BYTES: u64 = 1 << 20;

/// Live memory of one allocation or block. 32 bytes: a process may have millions.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Row {
    /// Number of the record that created it (its birth number); `Retag` refers to it.
    pub seq: u64,
    pub bytes: u64,
    pub cell: CellId,
    pub first_epoch: u32,
    /// Direct allocation: its context. Stream-ordered one: its pool index. Block: its entry in
    /// [`crate::roles::undecided::UndecidedBlocks`].
    pub owner: u32,
    pub kind: MemoryKind,
    pub book: u8,
    /// Number of the last resync that restated it.
    pub generation: u8,
    pub flags: u8,
}

impl Row {
    /// The row describes memory that is not booked here.
    pub const UNBOOKED: u8 = 1;
    /// Freed by its owner, but a stream may still use it.
    pub const PENDING: u8 = 2;
    /// The allocation was made as a segment of a framework pool, and ends together with that segment.
    pub const SEGMENT: u8 = 4;
    /// Its role was reported.
    pub const EXACT: u8 = 8;
    /// Its role was reported by its first record: no later record revokes it.
    pub const BORN_EXACT: u8 = 16;

    pub fn is(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Number of the record that created the backing: unique within the process.
pub(crate) type BackingId = u64;

/// A piece of booked memory that a segment can lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Extent {
    /// Driver allocation at address `.0`, born as `.1`. The number is needed because another allocation may get the address while
    /// a free is in flight.
    Allocation(u64, u64),
    Backing(BackingId),
    /// Block of pool `.0` at address `.1`.
    Block(u32, u64),
}

/// Physical memory behind a handle.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Backing {
    pub row: Row,
    /// The handle's number, for failed releases.
    pub handle: u64,
    /// References: created or imported, plus retains, minus entered releases.
    pub references: u32,
    /// Mappings, minus those whose unmap was entered.
    pub mappings: u32,
    /// Releases and unmaps in flight: they still hold the backing, and may fail.
    pub in_flight: u32,
    /// Only calls in flight hold the backing: its bytes are counted in `in_flight_bytes`.
    pub leaving: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Mapping {
    pub seq: u64,
    pub bytes: u64,
    pub backing: BackingId,
    pub generation: u8,
}

/// Whether NVML charges memory of this kind to the process.
pub(crate) fn is_charged(kind: MemoryKind) -> bool {
    use MemoryKind::{HostVmm, Imported, Managed, Pinned, Registered};
    !matches!(kind, Managed | Pinned | Registered | Imported | HostVmm)
}

/// Returns the amount that counts memory of a kind that NVML does not charge to the process; `None` for charged kinds.
pub(crate) fn side_bytes(beside: &mut Beside, kind: MemoryKind) -> Option<&mut i64> {
    match kind {
        MemoryKind::Managed => Some(&mut beside.managed_bytes),
        MemoryKind::Pinned => Some(&mut beside.pinned_bytes),
        MemoryKind::Registered => Some(&mut beside.registered_bytes),
        MemoryKind::Imported => Some(&mut beside.imported_bytes),
        MemoryKind::HostVmm => Some(&mut beside.host_vmm_bytes),
        _ => None,
    }
}

/// Counts of records that contradicted the known state. A covered process without losses has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct AnomalyCounts {
    /// Frees of addresses that were not live.
    pub unknown_frees: u64,
    /// Ends of frees that had not begun.
    pub unknown_ends: u64,
    /// Allocations at addresses that were live.
    pub replaced: u64,
    pub unknown_handles: u64,
    pub impossible: u64,
    /// Ordered records that arrived twice.
    pub duplicates: u64,
    /// Bookings for which the table of cells was full.
    pub overflowed: u64,
    /// Device slots beyond the maximum for a process: their bytes are in one sum.
    pub devices_beyond: u64,
}

impl AnomalyCounts {
    /// Returns the number of all such records.
    pub fn total(&self) -> u64 {
        let records = self.unknown_frees + self.unknown_ends + self.replaced + self.unknown_handles;
        records + self.impossible + self.duplicates + self.overflowed + self.devices_beyond
    }

    /// Resets the counts to `before`, except those that no loss can explain.
    pub(crate) fn forgive_since(&mut self, before: AnomalyCounts) {
        let AnomalyCounts { impossible, devices_beyond, .. } = *self;
        *self = AnomalyCounts { impossible, devices_beyond, ..before };
    }
}

/// Maximum number of residues; further rows keep the role that they had when they were removed.
const MAX_RESIDUES: usize = 262_144;

#[derive(Debug, Clone, Copy)]
pub(crate) struct PeakResidue {
    pub bytes: u64,
    pub cell: CellId,
}

/// Residues of a book's peak: rows that were removed since the peak, were live at it, and may still get a role or another name.
///
/// Every free of such a row is recorded here, but only a late `Retag` reads the records. So rows are appended to a log, which is
/// indexed at the first query. A permanent map would cost each free two more cache misses: 15 % of the time at 1 million live
/// rows.
#[derive(Debug, Default)]
pub(crate) struct PeakResidues {
    log: Vec<(u64, PeakResidue)>,
    /// Index in the log by birth number, for the first `indexed` entries.
    places: Map<u64, usize>,
    indexed: usize,
}

impl PeakResidues {
    #[inline]
    pub fn keep(&mut self, seq: u64, residue: PeakResidue) {
        if self.log.len() < MAX_RESIDUES {
            self.log.push((seq, residue));
        }
    }

    pub fn get_mut(&mut self, seq: u64) -> Option<&mut PeakResidue> {
        for place in self.indexed..self.log.len() {
            self.places.insert(self.log[place].0, place);
        }
        self.indexed = self.log.len();
        self.places.get(&seq).map(|&place| &mut self.log[place].1)
    }

    pub fn bytes(&self) -> usize {
        self.log.capacity() * std::mem::size_of::<(u64, PeakResidue)>() + self.places.capacity() * 18
    }

    /// Clears all residues after a new peak, which does not include them.
    #[inline]
    pub fn forget(&mut self) {
        if !self.log.is_empty() {
            *self = PeakResidues::default();
        }
    }
}
