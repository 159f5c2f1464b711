//! Residues of a book's peak: rows that were removed since the peak, were live at it, and may still get a role or another name.
//!
//! Every free of such a row is recorded here, but only a late `Retag` reads the records. So rows are appended to a log, which is
//! indexed at the first query. A permanent map would cost each free two more cache misses: 15 % of the time at 1 million live
//! rows.

use crate::Map;
use crate::book::cells::CellId;

/// Maximum number of kept rows; further rows keep the role that they had when they were removed.
const MAX_RESIDUES: usize = 262_144;

#[derive(Debug, Clone, Copy)]
pub(crate) struct PeakResidue {
    pub bytes: u64,
    pub cell: CellId,
}

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
