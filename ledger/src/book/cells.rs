//! Cells: names of a process's bytes. A cell has the same number in all books of the process.

use crate::Map;
use crate::book::cell_groups::CellGroups;
use gpumem_model::run::Class;
use gpumem_wire::{Flags, Phase, Role, Stamp};
use std::sync::Arc;

/// Key of a cell within a process. Ids are the agent's; 0 means none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CellKey {
    pub class: Class,
    pub role: Role,
    pub phase: Phase,
    pub module: u16,
    pub tag: u32,
    /// First tag of retagged bytes.
    pub origin: u32,
    /// Tag that names the framework pool of the bytes; 0 for none, or for a pool without a name.
    pub pool: u32,
    /// Blocks that their owner has freed but a stream may still use.
    pub pending: bool,
    /// The tag is that of the process, because the allocating thread had none.
    pub inherited: bool,
}

impl CellKey {
    pub const fn plain(class: Class) -> Self {
        CellKey {
            class,
            role: Role::Unknown,
            phase: Phase::Unknown,
            module: 0,
            tag: 0,
            origin: 0,
            pool: 0,
            pending: false,
            inherited: false,
        }
    }
}

/// Index of a cell in every book of its process.
pub(crate) type CellId = u32;
/// Idle bytes of pools without a name; each named pool has another cell.
pub(crate) const IDLE: CellId = 0;
/// Bytes of opaque pools.
pub(crate) const OPAQUE: CellId = 1;
/// Cell for all further bytes once a process has used up its cells.
pub(crate) const OVERFLOW: CellId = 2;
/// Maximum number of cells of a process; further ones are booked to [`OVERFLOW`]. A training run has some thousands (modules
/// times roles).
const MAX_CELLS: usize = 65_536;
/// Maximum number of cells of a point.
pub use gpumem_model::timeline::MAX_CELLS as MAX_POINT_CELLS;
/// Places of a point for cells and for groups of some cells; the rest of [`MAX_POINT_CELLS`] is for groups of whole uses
/// (cell_groups.rs).
pub(crate) const NAMED: usize = 40;
/// The tag shown for [`OVERFLOW`].
pub(crate) const OVERFLOW_TAG: u32 = u32::MAX;

/// The cells of a process, interned: a row holds a [`CellId`].
#[derive(Debug)]
pub(crate) struct CellTable {
    pub keys: Vec<CellKey>,
    pub ids: Map<CellKey, CellId>,
    /// Paths of tags that were reported.
    pub tags: Map<u32, Arc<str>>,
    /// Groups of small cells, for timelines; empty while there are few cells.
    pub sums: CellGroups,
    /// Number of bookings for which the table was full.
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
        CellTable {
            keys,
            ids: Map::default(),
            tags: Map::default(),
            sums: CellGroups::default(),
            overflowed: 0,
        }
    }
}

impl CellTable {
    /// Returns the estimated memory of the table and of its names and peaks in a run.
    pub fn bytes(&self) -> usize {
        self.keys.len() * 512
            + self.keys.capacity() * (3 * std::mem::size_of::<CellKey>() + 2 * std::mem::size_of::<CellId>())
            + self.sums.bytes()
    }

    /// Returns the cell for a stamp.
    #[inline]
    pub fn cell_of(&mut self, class: Class, stamp: &Stamp, use_as: (Role, Phase)) -> CellId {
        self.cell_in(class, stamp, use_as, 0)
    }

    /// Returns the cell for a stamp in the framework pool with this name.
    #[inline]
    pub fn cell_in(&mut self, class: Class, stamp: &Stamp, use_as: (Role, Phase), pool: u32) -> CellId {
        let (module, tag) = (stamp.module, stamp.tag);
        let (role, phase) = use_as;
        let inherited = stamp.flags.has(Flags::INHERITED) && tag != 0;
        self.intern(CellKey { class, role, phase, module, tag, origin: 0, pool, pending: false, inherited })
    }

    /// Returns the same cell with another role.
    #[inline]
    pub fn with_role(&mut self, id: CellId, role: Role) -> CellId {
        let key = self.keys[id as usize];
        if key.role == role { id } else { self.intern(CellKey { role, ..key }) }
    }

    #[inline]
    pub fn intern(&mut self, key: CellKey) -> CellId {
        if let Some(&id) = self.ids.get(&key) {
            return id;
        }
        if self.keys.len() >= MAX_CELLS {
            self.overflowed += 1;
            return OVERFLOW;
        }
        let id = self.keys.len() as CellId;
        self.keys.push(key);
        self.ids.insert(key, id);
        self.learn_chains();
        id
    }
}
