//! Frees, unmaps and releases that were entered and have not returned.
//!
//! Nearly always the next thing a thread says is the end of what it began, so the latest one lies beside
//! the map: no hashing for a free that nothing overtakes.

use crate::Map;
use crate::holdings::Row;
use crate::vmm::{BackingId, Mapping};

/// Something that a call has taken apart and that its end gives back or puts together again.
#[derive(Debug)]
pub(crate) enum InFlight {
    Allocation {
        address: u64,
        row: Row,
    },
    Release {
        handle: u64,
        backing: BackingId,
    },
    Unmap {
        mappings: Vec<(u64, Mapping)>,
    },
    /// NULL, an unknown address, or memory that went another way: the end has nothing to do.
    Nothing,
}

impl InFlight {
    fn mappings(&self) -> usize {
        if let InFlight::Unmap { mappings } = self { mappings.len() } else { 0 }
    }
}

/// By the seq of the record that began them.
#[derive(Debug, Default)]
pub(crate) struct InFlights {
    latest: Option<(u64, InFlight)>,
    others: Map<u64, InFlight>,
    /// In all of them.
    mappings: usize,
}

impl InFlights {
    #[inline]
    pub fn begin(&mut self, seq: u64, what: InFlight) {
        self.mappings += what.mappings();
        if let Some((seq, what)) = self.latest.replace((seq, what)) {
            self.others.insert(seq, what);
        }
    }

    #[inline]
    pub fn end(&mut self, seq: u64) -> Option<InFlight> {
        let what = match self.latest.take() {
            Some((latest, what)) if latest == seq => Some(what),
            other => {
                self.latest = other;
                if self.others.is_empty() { None } else { self.others.remove(&seq) }
            }
        };
        self.mappings = self.mappings.saturating_sub(what.as_ref().map_or(0, InFlight::mappings));
        what
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        usize::from(self.latest.is_some()) + self.others.len()
    }

    /// What they take, about.
    pub fn bytes(&self) -> usize {
        self.others.capacity() * size_of::<(u64, InFlight)>() + self.mappings * size_of::<(u64, Mapping)>()
    }

    fn iter(&self) -> impl Iterator<Item = (u64, &InFlight)> {
        let latest = self.latest.iter().map(|(seq, what)| (*seq, what));
        latest.chain(self.others.iter().map(|(seq, what)| (*seq, what)))
    }

    pub fn values(&self) -> impl Iterator<Item = &InFlight> {
        self.iter().map(|(_, what)| what)
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut InFlight> {
        self.latest.iter_mut().map(|(_, what)| what).chain(self.others.values_mut())
    }

    /// The allocation born as `seq`, if a free of it is in flight.
    pub fn row_mut(&mut self, seq: u64) -> Option<&mut Row> {
        self.values_mut().find_map(|flight| match flight {
            InFlight::Allocation { row, .. } if row.seq == seq => Some(row),
            _ => None,
        })
    }

    /// Seqs of those that are wanted, in order.
    pub fn begun(&self, wanted: impl Fn(&InFlight) -> bool) -> Vec<u64> {
        let mut begun: Vec<u64> = self.iter().filter(|(_, what)| wanted(what)).map(|(seq, _)| seq).collect();
        begun.sort_unstable();
        begun
    }
}
