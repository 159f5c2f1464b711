//! Rows of one book that are gone, were live at its peak, and may still learn their role.
//!
//! Every free of such a row writes here, and only a late `Retag` reads: rows are appended to a log, and
//! a log is indexed when something is asked of it. A map that is kept all the time costs each free two
//! more cache misses, 15 % of the time at 1 million live rows.

use crate::Map;
use crate::book::cells::CellId;

/// Rows that are kept; the role of more could not be told apart from rows that never get one.
const MAX_GHOSTS: usize = 262_144;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Ghost {
    pub bytes: u64,
    pub cell: CellId,
}

/// Ghosts by the seq of their birth.
#[derive(Debug, Default)]
pub(crate) struct Ghosts {
    log: Vec<(u64, Ghost)>,
    /// Seq to place in the log, of the first `indexed` entries.
    places: Map<u64, usize>,
    indexed: usize,
}

impl Ghosts {
    /// Keeps one, if there is room.
    #[inline]
    pub fn keep(&mut self, seq: u64, ghost: Ghost) {
        if self.log.len() < MAX_GHOSTS {
            self.log.push((seq, ghost));
        }
    }

    pub fn get_mut(&mut self, seq: u64) -> Option<&mut Ghost> {
        for place in self.indexed..self.log.len() {
            self.places.insert(self.log[place].0, place);
        }
        self.indexed = self.log.len();
        self.places.get(&seq).map(|&place| &mut self.log[place].1)
    }

    /// What they take, about.
    pub fn bytes(&self) -> usize {
        self.log.capacity() * std::mem::size_of::<(u64, Ghost)>() + self.places.capacity() * 18
    }

    /// There is a new peak, and they are not in it.
    #[inline]
    pub fn forget(&mut self) {
        if !self.log.is_empty() {
            *self = Ghosts::default();
        }
    }
}
