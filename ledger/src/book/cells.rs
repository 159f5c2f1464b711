//! Cells: names of a process's bytes. A cell has the same number in all books of the process.

use crate::Map;
use crate::book::cell_groups::{CellGroups, SUM_TAG};
use gpumem_model::cell::CellTraits;
use gpumem_model::names::Named;
use gpumem_model::run::{Cell, Class};
use gpumem_wire::{Flags, Phase, Role, Stamp};
use std::sync::Arc;

/// Key of a cell within a process. Ids are the agent's; 0 means none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
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
    pub fn plain(class: Class) -> Self {
        CellKey { class, ..CellKey::default() }
    }
}

/// A cell with its names. They are shared with the ledger, because a process may have many cells with long names.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct CellView {
    pub class: Class,
    /// Tag path; absent if the bytes have no name.
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
    /// Whether the bytes are unused in a pool: not covered by a block, or in a block that its owner has freed.
    pub fn is_idle(&self) -> bool {
        self.class == Class::PoolIdle || self.pending
    }

    /// Returns the cell as a run has it.
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
pub use gpumem_model::timeline::MAX_CELLS as MAX_POINT_CELLS;
/// Places of a point for cells and for groups of some cells; the rest of [`MAX_POINT_CELLS`] is for groups of whole uses
/// (cell_groups.rs).
pub(crate) const NAMED: usize = 40;
pub(crate) const OVERFLOW_TAG: u32 = u32::MAX;

/// The cells of a process, interned: a row holds a [`CellId`].
#[derive(Debug)]
pub(crate) struct CellTable {
    pub keys: Vec<CellKey>,
    pub ids: Map<CellKey, CellId>,
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
        let (ids, tags, sums) = Default::default();
        CellTable { keys, ids, tags, sums, overflowed: 0 }
    }
}

impl CellTable {
    /// Returns the estimated memory of the table and of its names and peaks in a run.
    pub fn bytes(&self) -> usize {
        self.keys.len() * 512
            + self.keys.capacity() * (3 * std::mem::size_of::<CellKey>() + 2 * std::mem::size_of::<CellId>())
            + self.sums.bytes()
    }

    /// Returns the path of a tag; `None` for no tag.
    pub fn tag(&self, id: u32) -> Option<Arc<str>> {
        match id {
            0 => None,
            OVERFLOW_TAG => Some("(more names than a process may have)".into()),
            id => {
                let known = self.tags.get(&id).cloned();
                Some(known.unwrap_or_else(|| format!("(tag {id}, its name was lost)").into()))
            }
        }
    }

    /// Returns the tag of a cell, or the name of the group that the cell stands for.
    pub fn name(&self, key: &CellKey) -> Option<Arc<str>> {
        let group = self.sums.name(key).filter(|_| key.tag == SUM_TAG);
        group.or_else(|| self.tag(key.tag))
    }

    /// Returns a cell with its names. `library`: path of the library that requested the bytes.
    pub fn view(&self, key: &CellKey, library: Option<Arc<str>>) -> CellView {
        CellView {
            class: key.class,
            tag: self.name(key),
            // The origin of a group is not a tag.
            origin: self.tag(key.origin).filter(|_| key.tag != SUM_TAG),
            role: key.role,
            phase: key.phase,
            library,
            pool: self.tag(key.pool),
            pending: key.pending,
            inherited: key.inherited,
        }
    }

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
        self.intern(CellKey { class, role, phase, module, tag, pool, inherited, ..CellKey::default() })
    }

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
