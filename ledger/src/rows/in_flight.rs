//! Frees, unmaps and releases that were entered and have not returned.
//!
//! Nearly always the next thing a thread says is the end of what it began, so the latest one lies beside
//! the map: no hashing for a free that nothing overtakes.
//!
//! A resync asks of each row that it says whether a call has it in hand. A process may have thousands of calls under way, and one
//! unmap may hold as many mappings as there are rows: from the first such question until the resync is over, they are found
//! by their birth.

use crate::Map;
use crate::rows::row::{BackingId, Mapping, Row};

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
    /// By their addresses.
    fn mappings(&self) -> &[(u64, Mapping)] {
        if let InFlight::Unmap { mappings } = self { mappings } else { &[] }
    }

    /// Of all that it holds.
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

/// By the seq of the record that began them.
#[derive(Debug, Default)]
pub(crate) struct InFlights {
    latest: Option<(u64, InFlight)>,
    others: Map<u64, InFlight>,
    /// Where in `others` is what was born so. Made when somebody asks, gone with the next `forget_births`. Only a liar has two of one
    /// birth: then it is in the later call.
    born: Option<Map<u64, u64>>,
    /// In all of them.
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
                            born.remove(&birth); // else another has it
                        }
                    }
                }
                what
            }
        };
        self.mappings = self.mappings.saturating_sub(what.as_ref().map_or(0, |what| what.mappings().len()));
        what
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        usize::from(self.latest.is_some()) + self.others.len()
    }

    /// What they take, about.
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

    /// The allocation born as `birth`, if a free of it is in flight.
    pub fn row_mut(&mut self, birth: u64) -> Option<&mut Row> {
        let latest = self.latest.as_mut().and_then(|(_, what)| what.row_mut(birth));
        if latest.is_some() {
            latest
        } else {
            other_with(&mut self.others, &mut self.born, birth)?.row_mut(birth)
        }
    }

    /// The mapping at `address` born as `birth`, if an unmap of it is in flight.
    pub fn mapping_mut(&mut self, address: u64, birth: u64) -> Option<&mut Mapping> {
        let latest = self.latest.as_mut().and_then(|(_, what)| what.mapping_mut(address, birth));
        if latest.is_some() {
            latest
        } else {
            other_with(&mut self.others, &mut self.born, birth)?.mapping_mut(address, birth)
        }
    }

    /// Nobody will ask for a while.
    pub fn forget_births(&mut self) {
        self.born = None;
    }

    /// Seqs of those that are wanted, in order.
    pub fn begun(&self, wanted: impl Fn(&InFlight) -> bool) -> Vec<u64> {
        let mut begun: Vec<u64> = self.iter().filter(|(_, what)| wanted(what)).map(|(seq, _)| seq).collect();
        begun.sort_unstable();
        begun
    }
}

fn note(born: &mut Map<u64, u64>, seq: u64, what: &InFlight) {
    for birth in what.births() {
        let place = born.entry(birth).or_default();
        *place = seq.max(*place);
    }
}

/// Of the calls that are not the latest, the one that holds what was born so.
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
