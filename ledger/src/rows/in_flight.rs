//! Frees, unmaps and releases that were entered and have not returned.
//!
//! Nearly always, the next record of a thread is the end of its call. Therefore the latest call is kept outside the map: if no
//! other call comes in between, its end needs no hashing.
//!
//! During a resync, the ledger checks for each restated row whether a call has it in flight. A process may have thousands of
//! calls in flight, and one unmap may hold as many mappings as there are rows. So from the first such query until the end of the
//! resync, an index finds calls by the birth numbers of their rows.

use crate::rows::row::{BackingId, Mapping, Row};
use crate::{Map, in_order};

/// Rows that a call has removed; its end frees or restores them.
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
    /// NULL, an unknown address, or memory that was removed otherwise: the end has no effect.
    Nothing,
}

impl InFlight {
    fn mappings(&self) -> &[(u64, Mapping)] {
        if let InFlight::Unmap { mappings } = self { mappings } else { &[] }
    }

    fn births(&self) -> impl Iterator<Item = u64> {
        let row = if let InFlight::Allocation { row, .. } = self { Some(row.seq) } else { None };
        row.into_iter().chain(self.mappings().iter().map(|(_, mapping)| mapping.seq))
    }

    fn row_mut(&mut self, birth: u64) -> Option<&mut Row> {
        match self {
            InFlight::Allocation { row, .. } if row.seq == birth => Some(row),
            _ => None,
        }
    }

    fn mapping_mut(&mut self, address: u64, birth: u64) -> Option<&mut Mapping> {
        let InFlight::Unmap { mappings } = self else { return None };
        let place = mappings.binary_search_by_key(&address, |(start, _)| *start).ok()?;
        mappings.get_mut(place).map(|(_, mapping)| mapping).filter(|mapping| mapping.seq == birth)
    }
}

/// Calls in flight, by the number of the record that began them.
#[derive(Debug, Default)]
pub(crate) struct InFlights {
    latest: Option<(u64, InFlight)>,
    others: Map<u64, InFlight>,
    /// Index of `others` by birth number of their rows. Built at the first query, dropped by `forget_births`. Only wrong reports
    /// contain two rows with one birth number; then the later call counts.
    born: Option<Map<u64, u64>>,
    mappings: usize,
}

impl InFlights {
    #[inline]
    pub fn begin(&mut self, seq: u64, what: InFlight) {
        self.mappings += what.mappings().len();
        if let Some((seq, what)) = self.latest.replace((seq, what)) {
            if let Some(born) = &mut self.born {
                note(born, seq, &what);
            }
            self.others.insert(seq, what);
        }
    }

    #[inline]
    pub fn end(&mut self, seq: u64) -> Option<InFlight> {
        let what = match self.latest.take() {
            Some((latest, what)) if latest == seq => Some(what),
            other => {
                self.latest = other;
                let what = if self.others.is_empty() { None } else { self.others.remove(&seq) };
                if let (Some(born), Some(what)) = (&mut self.born, &what) {
                    for birth in what.births() {
                        if born.get(&birth) == Some(&seq) {
                            born.remove(&birth); // otherwise another call has it
                        }
                    }
                }
                what
            }
        };
        self.mappings = self.mappings.saturating_sub(what.as_ref().map_or(0, |what| what.mappings().len()));
        what
    }

    pub fn len(&self) -> usize {
        usize::from(self.latest.is_some()) + self.others.len()
    }

    pub fn bytes(&self) -> usize {
        let born = self.born.as_ref().map_or(0, Map::capacity);
        self.others.capacity() * size_of::<(u64, InFlight)>()
            + self.mappings * size_of::<(u64, Mapping)>()
            + born * size_of::<(u64, u64)>()
    }

    fn iter(&self) -> impl Iterator<Item = (u64, &InFlight)> {
        let latest = self.latest.iter().map(|(seq, what)| (*seq, what));
        latest.chain(self.others.iter().map(|(seq, what)| (*seq, what)))
    }

    pub fn values(&self) -> impl Iterator<Item = &InFlight> {
        self.iter().map(|(_, what)| what)
    }

    /// Returns the allocation born as `birth` if its free is in flight.
    pub fn row_mut(&mut self, birth: u64) -> Option<&mut Row> {
        self.find(birth, |what| what.row_mut(birth))
    }

    /// Returns the mapping at `address` born as `birth` if its unmap is in flight.
    pub fn mapping_mut(&mut self, address: u64, birth: u64) -> Option<&mut Mapping> {
        self.find(birth, |what| what.mapping_mut(address, birth))
    }

    fn find<T>(&mut self, birth: u64, get: impl Fn(&mut InFlight) -> Option<&mut T>) -> Option<&mut T> {
        let latest = self.latest.as_mut().and_then(|(_, what)| get(what));
        if latest.is_some() { latest } else { get(other_with(&mut self.others, &mut self.born, birth)?) }
    }

    /// Drops the index by birth number, because no queries are expected for a while.
    pub fn forget_births(&mut self) {
        self.born = None;
    }

    /// Returns the numbers of the selected calls, sorted.
    pub fn begun(&self, wanted: impl Fn(&InFlight) -> bool) -> Vec<u64> {
        in_order(self.iter().filter(|(_, what)| wanted(what)).map(|(seq, _)| seq))
    }
}

fn note(born: &mut Map<u64, u64>, seq: u64, what: &InFlight) {
    for birth in what.births() {
        let place = born.entry(birth).or_default();
        *place = seq.max(*place);
    }
}

/// Returns the call that holds the row with this birth number, among all but the latest call.
fn other_with<'a>(
    others: &'a mut Map<u64, InFlight>,
    born: &mut Option<Map<u64, u64>>,
    birth: u64,
) -> Option<&'a mut InFlight> {
    if others.is_empty() {
        return None;
    }
    let born = born.get_or_insert_with(|| {
        let mut born = Map::default();
        others.iter().for_each(|(&seq, what)| note(&mut born, seq, what));
        born
    });
    others.get_mut(born.get(&birth)?)
}
