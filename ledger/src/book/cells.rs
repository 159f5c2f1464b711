//! Cells: the finest division of a process's bytes (class, tag, role, phase, library, pool). A cell has the same id in all books
//! of its process.

use crate::Map;
use crate::book::cell_groups::{CellGroups, SUM_TAG};
use gpumem_model::cell::CellTraits;
use gpumem_model::names::Named;
use gpumem_model::run::{Cell, Class};
use gpumem_wire::{Flags, Phase, Role, Stamp};
use std::sync::Arc;

/// Properties that distinguish the cells of a process. Tags and modules are ids that the agent assigned; 0 means none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct CellKey {
    pub class: Class,
    pub role: Role,
    pub phase: Phase,
    pub module: u16,
    pub tag: u32,
    /// First tag of bytes whose tag was replaced, else 0. In the cell of a group: index of the group's name.
    pub origin: u32,
    /// Name of the framework pool that contains the bytes, as a tag id; 0 for no pool or an unnamed pool.
    pub pool: u32,
    /// Whether the bytes are blocks that the program has freed but a CUDA stream may still use.
    pub pending: bool,
    /// Whether the tag is the process's default, because the allocating thread had no tag.
    pub inherited: bool,
}

/// The fields of a [`CellKey`] in few words: each block is looked up by its key, and few words are hashed and compared faster.
pub(crate) type PackedKey = (u64, u64, u32);

impl CellKey {
    pub fn plain(class: Class) -> Self {
        CellKey { class, ..CellKey::default() }
    }

    #[inline]
    pub fn packed(&self) -> PackedKey {
        let CellKey { class, role, phase, module, tag, origin, pool, pending, inherited } = *self;
        let codes =
            [class as u8, role.to_code(), phase.to_code(), u8::from(pending) | u8::from(inherited) << 1];
        let codes = u64::from(u32::from_le_bytes(codes)) | u64::from(module) << 32;
        (codes, u64::from(tag) | u64::from(origin) << 32, pool)
    }
}

/// A cell with its names, which are shared with the ledger because many cells may have long names.
#[derive(Debug, Clone, PartialEq)]
pub struct CellView {
    pub class: Class,
    /// Tag path; absent if the bytes have no tag.
    pub tag: Option<Arc<str>>,
    pub origin: Option<Arc<str>>,
    pub role: Role,
    pub phase: Phase,
    pub library: Option<Arc<str>>,
    pub pool: Option<Arc<str>>,
    pub pending: bool,
    pub inherited: bool,
}

impl CellView {
    /// Whether the bytes are unused in a pool: in no block, or in a block that the program has freed.
    pub fn is_idle(&self) -> bool {
        self.class == Class::PoolIdle || self.pending
    }

    /// Returns the cell in the form that runs store.
    pub fn to_cell(&self) -> Cell {
        let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
        Cell {
            class: if self.pending { Class::PoolIdle } else { self.class },
            tag: text(&self.tag),
            origin: text(&self.origin),
            role: self.role.name().map(str::to_owned),
            phase: self.phase.name().map(str::to_owned),
            library: text(&self.library),
            pool: text(&self.pool),
            pending: self.pending,
            inherited: self.inherited,
        }
    }
}

impl<'c> From<&'c CellView> for CellTraits<'c> {
    fn from(cell: &'c CellView) -> Self {
        let (tag, library) = (cell.tag.as_deref(), cell.library.as_deref());
        CellTraits { class: cell.class, tag, library, role: cell.role, phase: cell.phase }
    }
}

/// Index of a cell in [`CellTable::keys`] and in every book of its process.
pub(crate) type CellId = u32;
/// Cell of the idle bytes (in no block) of all unnamed pools; each named pool has a separate cell.
pub(crate) const IDLE: CellId = 0;
/// Cell of the bytes of opaque pools: pools that report no blocks.
pub(crate) const OPAQUE: CellId = 1;
/// Cell that takes all new bytes once a process has [`MAX_CELLS`] cells.
pub(crate) const OVERFLOW: CellId = 2;
/// Maximum number of cells of a process. A training run has some thousands (modules times roles).
const MAX_CELLS: usize = 65_536;
pub use gpumem_model::timeline::MAX_CELLS as MAX_POINT_CELLS;
/// Maximum number of entries of a timeline point that are cells or groups below the last of a chain (cell_groups.rs). The other
/// entries of [`MAX_POINT_CELLS`] are for the last groups, which have all cells of a use.
pub(crate) const MAX_NAMED: usize = 40;
pub(crate) const OVERFLOW_TAG: u32 = u32::MAX;

/// All cells of a process. Rows (live allocations and blocks) refer to a cell by [`CellId`].
#[derive(Debug)]
pub(crate) struct CellTable {
    pub keys: Vec<CellKey>,
    pub ids: Map<PackedKey, CellId>,
    pub tags: Map<u32, Arc<str>>,
    /// Groups that sum small cells in timelines; empty while there are few cells.
    pub groups: CellGroups,
    /// Number of requests for a new cell when the table was full.
    pub overflowed: u64,
}

impl Default for CellTable {
    /// Returns a table with the three cells that every process has.
    fn default() -> Self {
        let keys = vec![
            CellKey::plain(Class::PoolIdle),
            CellKey::plain(Class::Opaque),
            CellKey { tag: OVERFLOW_TAG, ..CellKey::plain(Class::Direct) },
        ];
        let (ids, tags, groups) = Default::default();
        CellTable { keys, ids, tags, groups, overflowed: 0 }
    }
}

impl CellTable {
    /// Returns the estimated bytes of the table, and of the cells' names and peak amounts in a run.
    pub fn bytes(&self) -> usize {
        self.keys.len() * 512
            + self.keys.capacity() * (3 * std::mem::size_of::<CellKey>() + 2 * std::mem::size_of::<CellId>())
            + self.groups.bytes()
    }

    pub fn tag(&self, id: u32) -> Option<Arc<str>> {
        match id {
            0 => None,
            OVERFLOW_TAG => Some("(more names than a process may have)".into()),
            id => {
                let path = self.tags.get(&id).cloned();
                Some(path.unwrap_or_else(|| format!("(tag {id}, its name was lost)").into()))
            }
        }
    }

    /// Returns the tag path of a cell; for the cell of a group, the group's name.
    pub fn name(&self, key: &CellKey) -> Option<Arc<str>> {
        let group = self.groups.name(key).filter(|_| key.tag == SUM_TAG);
        group.or_else(|| self.tag(key.tag))
    }

    /// Returns the properties of a cell as names; `library` is the path of the library that requested the bytes.
    pub fn view(&self, key: &CellKey, library: Option<Arc<str>>) -> CellView {
        CellView {
            class: key.class,
            tag: self.name(key),
            // For a group, `origin` is the index of its name and no tag.
            origin: self.tag(key.origin).filter(|_| key.tag != SUM_TAG),
            role: key.role,
            phase: key.phase,
            library,
            pool: self.tag(key.pool),
            pending: key.pending,
            inherited: key.inherited,
        }
    }

    /// Returns the cell for bytes that a record with this stamp reports. `use_as`: role and phase. `pool`: name of the framework
    /// pool.
    #[inline]
    pub fn cell_in(&mut self, class: Class, stamp: &Stamp, use_as: (Role, Phase), pool: u32) -> CellId {
        let (module, tag) = (stamp.module, stamp.tag);
        let (role, phase) = use_as;
        let inherited = stamp.flags.has(Flags::INHERITED) && tag != 0;
        self.intern(CellKey { class, role, phase, module, tag, pool, inherited, ..CellKey::default() })
    }

    #[inline]
    pub fn with_role(&mut self, id: CellId, role: Role) -> CellId {
        let key = self.keys[id as usize];
        if key.role == role { id } else { self.intern(CellKey { role, ..key }) }
    }

    /// Returns the cell with this key, creating it if needed; [`OVERFLOW`] if the table is full.
    #[inline]
    pub fn intern(&mut self, key: CellKey) -> CellId {
        let packed = key.packed();
        if let Some(&id) = self.ids.get(&packed) {
            return id;
        }
        if self.keys.len() >= MAX_CELLS {
            self.overflowed += 1;
            return OVERFLOW;
        }
        let id = self.keys.len() as CellId;
        self.keys.push(key);
        self.ids.insert(packed, id);
        self.build_chains();
        id
    }
}
