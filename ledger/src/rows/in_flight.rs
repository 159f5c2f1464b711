//! Calls in flight: frees, unmaps and releases that were entered and have not returned.
//!
//! The record after the begin of a call is nearly always its end. So the latest call is kept outside the map, and its end needs
//! no hashing.
//!
//! A resync checks for each restated row whether a call in flight is freeing it. There may be thousands of calls, and one unmap
//! may have as many mappings as there are rows. So until the end of the resync, an index finds a call by the birth numbers of its
//! rows. A birth number is the number of the record that created a row.

use crate::rows::row::{BackingId, Mapping, Row};
use crate::{Map, in_order};

/// Memory that a call in flight will free. If the call fails, the rows of that memory become live again.
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
    /// The call frees NULL, an unknown address, or memory removed since: its end has no effect.
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
        let index = mappings.binary_search_by_key(&address, |(start, _)| *start).ok()?;
        mappings.get_mut(index).map(|(_, mapping)| mapping).filter(|mapping| mapping.seq == birth)
    }
}

/// Calls in flight, by the number of the record that began them.
#[derive(Debug, Default)]
pub(crate) struct InFlights {
    latest: Option<(u64, InFlight)>,
    others: Map<u64, InFlight>,
    /// Key in `others` by birth number of a row. Built at the first query, dropped by `forget_births`. If two rows have one birth
    /// number, which only wrong reports contain, the later call counts.
    by_birth: Option<Map<u64, u64>>,
    mappings: usize,
}

impl InFlights {
    #[inline]
    pub fn begin(&mut self, seq: u64, what: InFlight) {
        self.mappings += what.mappings().len();
        if let Some((seq, what)) = self.latest.replace((seq, what)) {
            if let Some(by_birth) = &mut self.by_birth {
                note(by_birth, seq, &what);
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
                if let (Some(by_birth), Some(what)) = (&mut self.by_birth, &what) {
                    for birth in what.births() {
                        if by_birth.get(&birth) == Some(&seq) {
                            by_birth.remove(&birth); // otherwise the entry is another call's
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
        let by_birth = self.by_birth.as_ref().map_or(0, Map::capacity);
        self.others.capacity() * size_of::<(u64, InFlight)>()
            + self.mappings * size_of::<(u64, Mapping)>()
            + by_birth * size_of::<(u64, u64)>()
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &InFlight)> {
        let latest = self.latest.iter().map(|(seq, what)| (*seq, what));
        latest.chain(self.others.iter().map(|(seq, what)| (*seq, what)))
    }

    /// Returns the allocation with this birth number if its free is in flight.
    pub fn row_mut(&mut self, birth: u64) -> Option<&mut Row> {
        self.find(birth, |what| what.row_mut(birth))
    }

    /// Returns the mapping at `address` with this birth number if its unmap is in flight.
    pub fn mapping_mut(&mut self, address: u64, birth: u64) -> Option<&mut Mapping> {
        self.find(birth, |what| what.mapping_mut(address, birth))
    }

    fn find<T>(&mut self, birth: u64, get: impl Fn(&mut InFlight) -> Option<&mut T>) -> Option<&mut T> {
        let latest = self.latest.as_mut().and_then(|(_, what)| get(what));
        if latest.is_some() { latest } else { get(other_with(&mut self.others, &mut self.by_birth, birth)?) }
    }

    /// Drops the index by birth number, because no more queries are expected.
    pub fn forget_births(&mut self) {
        self.by_birth = None;
    }

    /// Returns the record numbers of the calls that `wanted` selects, sorted.
    pub fn begun(&self, wanted: impl Fn(&InFlight) -> bool) -> Vec<u64> {
        in_order(self.iter().filter(|(_, what)| wanted(what)).map(|(seq, _)| seq))
    }
}

fn note(by_birth: &mut Map<u64, u64>, seq: u64, what: &InFlight) {
    for birth in what.births() {
        let call = by_birth.entry(birth).or_default();
        *call = seq.max(*call);
    }
}

/// Returns the call, among all but the latest, that has a row with this birth number.
fn other_with<'a>(
    others: &'a mut Map<u64, InFlight>,
    by_birth: &mut Option<Map<u64, u64>>,
    birth: u64,
) -> Option<&'a mut InFlight> {
    if others.is_empty() {
        return None;
    }
    let by_birth = by_birth.get_or_insert_with(|| {
        let mut by_birth = Map::default();
        others.iter().for_each(|(&seq, what)| note(&mut by_birth, seq, what));
        by_birth
    });
    others.get_mut(by_birth.get(&birth)?)
}
