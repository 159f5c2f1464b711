//! Rows: one for each live allocation, block or handle. Also counts of memory outside the book and of anomalies, and the peak
//! amounts of removed rows (residues).

use crate::Map;
use crate::book::cells::CellId;
use gpumem_model::run::SideMemory;
use gpumem_wire::MemoryKind;

/// Maximum accepted size of an allocation (256 TiB). A larger one is a wrong report and is refused, so that no sum overflows.
pub(crate) const MAX_BYTES: u64 = 1 << 48;

/// The last address, at which no memory can begin. A record with it is a wrong report and is refused, so that tables can mark vacant
/// slots with it.
pub(crate) const NO_ADDRESS: u64 = u64::MAX;

/// Minimum size of allocations that can be found by an address inside them, for segments in a part of an allocation. Smaller ones
/// are found by their first address only.
pub(crate) const LARGE_BYTES: u64 = 1 << 20;

/// Live memory of one allocation or block. 32 bytes: a process may have millions.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Row {
    /// Number of the record that created the row: its birth number, by which `Retag` refers to it.
    pub seq: u64,
    pub bytes: u64,
    pub cell: CellId,
    /// [`crate::book::Book::next_epoch`] when the row was created.
    pub first_epoch: u32,
    /// Of a direct allocation: its context. Of a stream-ordered one: its pool's index. Of a block: its entry in
    /// [`crate::roles::undecided::UndecidedBlocks`].
    pub owner: u32,
    pub kind: MemoryKind,
    pub book: u8,
    /// Number, modulo 256, of the last resync (in which the agent sends all live rows again) that contained the row.
    pub generation: u8,
    pub flags: u8,
}

impl Row {
    /// The memory is not booked: it is in no cell of the book.
    pub const UNBOOKED: u8 = 1;
    /// The program has freed the block, but a CUDA stream may still use it.
    pub const PENDING: u8 = 2;
    /// The allocation was made as a segment of a framework pool, and ends together with that segment.
    pub const SEGMENT: u8 = 4;
    /// The program reported the role, so the ledger does not derive it.
    pub const EXACT: u8 = 8;
    /// The role was reported by the row's first record, so no resync can revoke it.
    pub const BORN_EXACT: u8 = 16;

    pub fn is(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Identifies a backing (physical memory behind a VMM handle): number of the record that created it.
pub(crate) type BackingId = u64;

/// Identifies a piece of booked memory in which a segment can lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Extent {
    /// Driver allocation: address and birth number. Another allocation may get the address while a free is in flight.
    Allocation(u64, u64),
    Backing(BackingId),
    /// Block: pool index and address.
    Block(u32, u64),
}

/// Backing: physical memory behind a VMM handle.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Backing {
    pub row: Row,
    /// The handle's value, for releases that fail.
    pub handle: u64,
    /// Number of references: one or more at creation or import, plus retains, minus entered releases.
    pub references: u32,
    /// Number of mappings whose unmap was not entered.
    pub mappings: u32,
    /// Number of releases and unmaps in flight. Until they return they hold the backing, because they may fail.
    pub in_flight: u32,
    /// Whether only calls in flight hold the backing, so that its bytes count in `Holdings::in_flight_bytes`.
    pub leaving: bool,
}

/// A range of addresses to which a backing is mapped.
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

/// Returns the field that counts memory of a kind that NVML does not charge to the process; `None` for charged kinds.
pub(crate) fn side_bytes(beside: &mut SideMemory, kind: MemoryKind) -> Option<&mut i64> {
    match kind {
        MemoryKind::Managed => Some(&mut beside.managed_bytes),
        MemoryKind::Pinned => Some(&mut beside.pinned_bytes),
        MemoryKind::Registered => Some(&mut beside.registered_bytes),
        MemoryKind::Imported => Some(&mut beside.imported_bytes),
        MemoryKind::HostVmm => Some(&mut beside.host_vmm_bytes),
        _ => None,
    }
}

/// Counts of records that contradicted the known state or exceeded a limit. If all records arrive and are correct, all counts are 0
/// except `overflowed` and `devices_beyond`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AnomalyCounts {
    /// Number of frees of addresses that were not live.
    pub unknown_frees: u64,
    /// Number of ends of frees that had not begun.
    pub unknown_ends: u64,
    /// Number of allocations at addresses that were live.
    pub replaced: u64,
    /// Number of uses of unknown VMM handles, pools or segments.
    pub unknown_handles: u64,
    /// Number of records with an impossible size or address.
    pub impossible: u64,
    /// Number of records with a sequence number that arrived twice.
    pub duplicates: u64,
    /// Number of bookings that found the table of cells full.
    pub overflowed: u64,
    /// Number of devices beyond the limits of a process or user.
    pub devices_beyond: u64,
}

impl AnomalyCounts {
    pub fn total(&self) -> u64 {
        let records = self.unknown_frees + self.unknown_ends + self.replaced + self.unknown_handles;
        records + self.impossible + self.duplicates + self.overflowed + self.devices_beyond
    }

    /// Resets to `before` the counts of anomalies that a loss of records can explain.
    pub(crate) fn reset_explained(&mut self, before: AnomalyCounts) {
        let AnomalyCounts { impossible, devices_beyond, .. } = *self;
        *self = AnomalyCounts { impossible, devices_beyond, ..before };
    }
}

/// Maximum number of residues of a book (rows removed since its peak). Later roles and tags of further removed rows do not change
/// the amounts at the peak.
const MAX_RESIDUES: usize = 262_144;

/// Bytes, and cell at the peak, of a row that was live at the peak and was removed since.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeakResidue {
    pub bytes: u64,
    pub cell: CellId,
}

/// Residues of a book's peak: rows that were live at the peak, were removed since, and may still get a role or another tag.
///
/// Every free of such a row adds an entry, but only a late `Retag` reads them. So they are appended to a log, which is indexed at
/// the first query. A permanent map would cost each free two more cache misses: 15 % of the time with 1 million live rows.
#[derive(Debug, Default)]
pub(crate) struct PeakResidues {
    log: Vec<(u64, PeakResidue)>,
    /// Index in the log by birth number, for the first `indexed` entries.
    index: Map<u64, usize>,
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
        for at in self.indexed..self.log.len() {
            self.index.insert(self.log[at].0, at);
        }
        self.indexed = self.log.len();
        self.index.get(&seq).map(|&at| &mut self.log[at].1)
    }

    pub fn bytes(&self) -> usize {
        self.log.capacity() * std::mem::size_of::<(u64, PeakResidue)>() + self.index.capacity() * 18
    }

    /// Clears all residues after a new peak, at which their rows were not live.
    #[inline]
    pub fn clear(&mut self) {
        if !self.log.is_empty() {
            *self = PeakResidues::default();
        }
    }
}
