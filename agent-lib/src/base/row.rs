//! Rows of the live table. A row is the record that made it (an allocation, block, handle, mapping, pool or segment), additional
//! data, and a key.

use crate::base::ring::Row;
pub use gpumem_wire::slot_of;
use gpumem_wire::{Body, Flags, ImportSource, MemoryKind, Phase, PoolOwner, Role};

/// Key of a row of the live table while the row is being written. Other keys are hashes, and larger.
pub(crate) const WRITING: u64 = 1;

/// Identifies a row of the live table: its kind, and an address or handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// A driver allocation or import, by address.
    Allocation(u64),
    /// A handle of physical memory (cuMemCreate) that has references, by its number.
    Handle(u64),
    /// A handle without references that still has mappings, by the seq of its record: the driver may reuse its number.
    Backing(u64),
    /// A mapping of a handle, by address.
    Mapping(u64),
    /// A pool of the driver or of a framework, by id.
    Pool(u64),
    /// A segment of a framework's pool: pool and address.
    Segment(u64, u64),
    /// A block of a framework's pool: pool and address.
    Block(u64, u64),
}

impl Key {
    /// Returns the hash of the key; larger than [`WRITING`].
    #[inline(always)]
    pub(crate) fn hash(self) -> u64 {
        let (space, a, b) = match self {
            Key::Allocation(address) => (1, address, 0),
            Key::Handle(handle) => (2, handle, 0),
            Key::Backing(seq) => (3, seq, 0),
            Key::Mapping(address) => (4, address, 0),
            Key::Pool(pool) => (5, pool, 0),
            Key::Segment(pool, address) => (6, address, pool),
            Key::Block(pool, address) => (7, address, pool),
        };
        // A set bit that no position in the table is computed from, so that a hash is larger than `WRITING`.
        mix(a ^ (space << 57), b ^ 0x9e37_79b9_7f4a_7c15) | 1 << 30
    }
}

/// Returns a hash of two words.
#[inline(always)]
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ 0x2d35_8dcc_aa6c_78a5) * u128::from(b ^ 0x8bb8_4b93_962e_acc9);
    let folded = product as u64 ^ (product >> 64) as u64;
    (folded ^ folded >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// Additional data of a row, for which its record has no field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RowExtra {
    /// Tag of the row before its first retag; the row itself has the current tag. Only if `RETAGGED` is set.
    pub(crate) first_tag: u32,
    /// Role (low four bits) and phase (high four bits) that retags have set.
    pub(crate) use_as: u8,
    /// The flags `RETAGGED` and `PENDING`.
    pub(crate) flags: u8,
    /// For handles, the reference count. For imports, the number of times that the memory is open.
    pub(crate) references: u32,
    /// For handles, the number of mappings.
    pub(crate) mappings: u32,
    /// For a mapping: number (`seq`) of the record that made the mapped handle's row.
    pub(crate) backing: u64,
}

impl RowExtra {
    pub(crate) const RETAGGED: u8 = 1;
    /// Flag: the owner has freed the block, but a stream may still use it.
    pub(crate) const PENDING: u8 = 2;

    /// Additional data of a new handle or import: one reference.
    pub(crate) const REFERENCED: RowExtra = RowExtra::from_words([0, 1, 0]);

    /// Returns the role and the phase that retags have set.
    pub(crate) fn later_use(&self) -> (Role, Phase) {
        use_of(if self.is_retagged() { self.use_as } else { 0 })
    }

    pub(crate) fn is_retagged(&self) -> bool {
        self.flags & RowExtra::RETAGGED != 0
    }

    pub(crate) fn words(self) -> [u64; 3] {
        let first = u64::from(self.first_tag) | u64::from(self.use_as) << 32 | u64::from(self.flags) << 40;
        [first, u64::from(self.references) | u64::from(self.mappings) << 32, self.backing]
    }

    pub(crate) const fn from_words([first, counts, backing]: [u64; 3]) -> Self {
        RowExtra {
            first_tag: first as u32,
            use_as: (first >> 32) as u8,
            flags: (first >> 40) as u8,
            references: counts as u32,
            mappings: (counts >> 32) as u32,
            backing,
        }
    }
}

/// A copy of a row of the live table.
#[derive(Debug, Clone, Copy)]
pub struct RowCopy {
    /// The record that made the row, with later changes of its words, for example of the tag.
    pub row: Row,
    pub(crate) beside: RowExtra,
}

impl RowCopy {
    pub(crate) fn seq(&self) -> u64 {
        self.row[0]
    }

    /// Returns the role and the phase that retags have set.
    pub(crate) fn later_use(&self) -> (Role, Phase) {
        self.beside.later_use()
    }

    pub(crate) fn use_as(&self) -> (Role, Phase) {
        let (first, later) = (first_use(self.row[7]), self.later_use());
        let role = if later.0 == Role::Unknown { first.0 } else { later.0 };
        (role, if later.1 == Phase::Unknown { first.1 } else { later.1 })
    }

    pub(crate) fn is_retagged(&self) -> bool {
        self.beside.is_retagged()
    }

    pub(crate) fn is_pending(&self) -> bool {
        self.beside.flags & RowExtra::PENDING != 0
    }

    /// Returns the pool of a block; 0 for other rows.
    pub(crate) fn pool(&self) -> u64 {
        if kind_of(&self.row) == kind::BLOCK_ALLOC { self.row[4] } else { 0 }
    }

    /// Returns the body of a record that changes the tag, role or phase of the row.
    pub(crate) fn retag(&self, use_as: (Role, Phase)) -> Body<'static> {
        Body::Retag { address: self.row[2], block_seq: self.seq(), pool: self.pool(), use_as }
    }
}

/// Returns the role and the phase with which a block was recorded. `codes` is word 7 of the row.
pub(crate) fn first_use(codes: u64) -> (Role, Phase) {
    use_of(if (codes >> 32) as u8 == kind::BLOCK_ALLOC { (codes >> 56) as u8 } else { 0 })
}

fn use_of(byte: u8) -> (Role, Phase) {
    (Role::from_code(byte & 15), Phase::from_code(byte >> 4))
}

/// Kinds (wire/src/codec.rs) of the records that make rows.
pub(crate) mod kind {
    pub(crate) const ALLOC_END: u8 = 16;
    pub(crate) const IMPORT: u8 = 20;
    pub(crate) const POOL_CREATE: u8 = 24;
    pub(crate) const VMM_CREATE: u8 = 32;
    pub(crate) const VMM_MAP: u8 = 33;
    pub(crate) const SEGMENT_ADD: u8 = 48;
    pub(crate) const BLOCK_ALLOC: u8 = 50;
}

/// Returns the kind of a row: byte 60 of its slot.
pub(crate) fn kind_of(row: &Row) -> u8 {
    (row[7] >> 32) as u8
}

/// Returns the device of a row: byte 61.
pub(crate) fn device_of(row: &Row) -> u8 {
    (row[7] >> 40) as u8
}

pub(crate) fn context_of(row: &Row) -> u32 {
    (row[6] >> 32) as u32
}

/// Returns the owner of a pool's row: byte 63.
pub(crate) fn pool_owner(row: &Row) -> PoolOwner {
    PoolOwner::from_code((row[7] >> 56) as u8)
}

/// Returns the memory kind of an allocation's row: byte 63.
pub(crate) fn memory_of(row: &Row) -> MemoryKind {
    MemoryKind::from_code((row[7] >> 56) as u8)
}

/// Returns the key of a row; `None` if this kind of record makes no row (wire/src/layout.rs).
pub(crate) fn key_of(taken: &RowCopy) -> Option<Key> {
    let row = &taken.row;
    let (address, aux) = (row[2], row[4]);
    match kind_of(row) {
        kind::ALLOC_END => Some(Key::Allocation(address)),
        kind::IMPORT if (row[7] >> 56) as u8 == ImportSource::ShareableHandle.to_code() => {
            Some(handle_key(taken))
        }
        kind::IMPORT => Some(Key::Allocation(address)),
        kind::POOL_CREATE => Some(Key::Pool(address)),
        kind::VMM_CREATE => Some(handle_key(taken)),
        kind::VMM_MAP => Some(Key::Mapping(address)),
        kind::SEGMENT_ADD => Some(Key::Segment(aux, address)),
        kind::BLOCK_ALLOC => Some(Key::Block(aux, address)),
        _ => None,
    }
}

fn handle_key(taken: &RowCopy) -> Key {
    match taken.beside.references {
        0 => Key::Backing(taken.seq()),
        _ => Key::Handle(taken.row[2]),
    }
}

/// The name for memory that a thread allocates, from one source of names or from all of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AllocationName {
    /// Id of the name (tag) of the allocation; 0 for none.
    pub tag: u32,
    /// [`Flags::INHERITED`] or no flag.
    pub flags: Flags,
    /// Phase of training; `Unknown` if no source of names has one.
    pub phase: Phase,
    pub(crate) role: Role,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_those_of_the_wire() {
        let rows = [
            ("AllocEnd", kind::ALLOC_END),
            ("Import", kind::IMPORT),
            ("PoolCreate", kind::POOL_CREATE),
            ("VmmCreate", kind::VMM_CREATE),
            ("VmmMap", kind::VMM_MAP),
            ("SegmentAdd", kind::SEGMENT_ADD),
            ("BlockAlloc", kind::BLOCK_ALLOC),
        ];
        for row in rows {
            assert!(Body::KINDS.contains(&row), "{row:?}");
        }
    }
}
