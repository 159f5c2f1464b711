//! Merges small cells into groups: many cells become few, and no byte is lost.
//!
//! **The chain.** Each cell has a chain of groups with the same use (class, role, phase, library, pool), from specific to
//! general. For the tag `model/layers.17/rnn_l0_t9_out` these are: `model/layers.*/rnn_l*_t*_out`, tags that differ only in
//! numbers; `model/layers.*/rnn_l*`, tags with the same begin up to their second number; all tags below `model/layers.*` and
//! `model`; and the whole use. Numbers come first because repetition fills a list: ninety layers, or thousands of numbered
//! operators.
//!
//! **The rule.** The largest cells keep their names. The bytes of all others move up their chains together until a group is large
//! enough, or to the top. Half of the room is for cells. The other half determines how small a group may be; its unused places go
//! to cells again. So repetition takes no room from cells that exist once, and a group is named as specifically as its size
//! allows. A cell's bytes can be found later: **they are in the nearest existing group of its chain**. That holds because small
//! cells pass a group together, and no group is inserted between a cell and a group that already contains its bytes.
//!
//! Groups are cells of their process, created when a second cell has them in its chain.

use crate::Map;
use crate::book::cells::{CellId, CellKey, CellTable, MAX_POINT_CELLS, NAMED};
use gpumem_model::cell::SUM;
use std::cmp::Reverse;
use std::sync::Arc;

/// Tag of all groups; their `origin` distinguishes them.
pub(crate) const SUM_TAG: u32 = u32::MAX - 1;
/// Maximum number of groups of a process; beyond it, chains start with more general groups. A large model has some hundreds.
const MAX_GROUPS: usize = 4096;
/// Maximum number of path components that get a group.
const DEEPEST: usize = 8;
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Group {
    /// The next group in the chain; its index is lower.
    up: u32,
    key: CellKey,
    /// Its cell; `None` while only a single cell or group is below it, unless it is a whole use.
    cell: Option<CellId>,
    has_one: bool,
}

#[derive(Debug, Default)]
pub(crate) struct CellGroups {
    places: Vec<Group>,
    by_key: Map<CellKey, u32>,
    /// Names of the groups, by `origin`.
    names: Vec<Arc<str>>,
    by_name: Map<Arc<str>, u32>,
    /// By cell: the first group of its chain; for the cell of a group, that group.
    begins: Vec<u32>,
}

impl CellGroups {
    pub fn name(&self, key: &CellKey) -> Option<Arc<str>> {
        self.names.get(key.origin as usize).cloned()
    }

    /// Returns the estimated memory: each group has its key twice, and a name.
    pub fn bytes(&self) -> usize {
        self.places.capacity() * 256 + self.begins.capacity() * size_of::<u32>()
    }

    fn place(&self, at: u32) -> Option<&Group> {
        self.places.get(at as usize)
    }

    /// Returns the group with this name, creating it if needed; `None` if there is no room.
    fn intern(&mut self, name: &str, of: &CellKey, up: u32) -> Option<u32> {
        let next = u32::try_from(self.names.len()).ok()?;
        let origin = *self.by_name.get(name).unwrap_or(&next);
        let key = CellKey { tag: SUM_TAG, origin, ..*of };
        if let Some(&place) = self.by_key.get(&key) {
            return Some(place);
        }
        if self.places.len() >= MAX_GROUPS {
            return None;
        }
        if origin == next {
            let name: Arc<str> = name.into();
            self.names.push(name.clone());
            self.by_name.insert(name, origin);
        }
        let place = self.places.len() as u32;
        self.places.push(Group { up, key, cell: None, has_one: false });
        self.by_key.insert(key, place);
        Some(place)
    }
}

/// Returns the names of the groups of a tag, the most general first.
fn chain(tag: &str) -> Vec<String> {
    let mut starred = String::with_capacity(tag.len());
    for letter in tag.chars() {
        match letter.is_ascii_digit() {
            true if starred.ends_with('*') => {}
            true => starred.push('*'),
            false => starred.push(letter),
        }
    }
    let above = starred.match_indices('/').take(DEEPEST).map(|(at, _)| at + 1);
    let mut names: Vec<String> =
        [0].into_iter().chain(above).map(|end| format!("{}{SUM}", &starred[..end])).collect();
    let last = starred.rfind('/').map_or(0, |at| at + 1);
    let number = starred.get(last..).and_then(|name| name.find('*')).map(|at| last + at + 1);
    let begins = number.and_then(|end| starred.get(..end)).filter(|begin| *begin != starred);
    names.extend(begins.map(|begin| format!("{begin} {SUM}")));
    if starred != tag {
        names.push(format!("{starred} {SUM}"));
    }
    names
}

impl CellTable {
    /// Builds the chains of cells, once there are more cells than a point has room for.
    pub fn learn_chains(&mut self) {
        while self.keys.len() > MAX_POINT_CELLS
            && let Some(&key) = self.keys.get(self.sums.begins.len())
        {
            if key.tag == SUM_TAG {
                let own = self.sums.by_key.get(&key).copied();
                self.sums.begins.push(own.unwrap_or(NONE));
                continue;
            }
            let tag = self.tags.get(&key.tag).cloned().unwrap_or_default();
            let mut up = NONE;
            for name in chain(&tag) {
                let known = self.sums.places.len();
                let Some(place) = self.sums.intern(&name, &key, up) else { break };
                if self.sums.places.len() > known {
                    self.enter(up);
                }
                up = place;
            }
            self.enter(up);
            self.sums.begins.push(up);
        }
    }

    /// Adds a cell or group to a group, which becomes a cell with its second member.
    fn enter(&mut self, place: u32) {
        let next = self.keys.len() as CellId;
        let Some(place) = self.sums.places.get_mut(place as usize) else { return };
        if (place.has_one || place.up == NONE) && place.cell.is_none() {
            place.cell = Some(next);
            self.keys.push(place.key);
            self.ids.insert(place.key, next);
        }
        place.has_one = true;
    }

    /// Returns the groups that may contain the bytes of a cell, the most specific first.
    pub fn sums_of(&self, id: CellId) -> impl Iterator<Item = CellId> + '_ {
        let begin = self.sums.begins.get(id as usize).and_then(|at| self.sums.place(*at));
        std::iter::successors(begin, |place| self.sums.place(place.up)).filter_map(|place| place.cell)
    }

    /// Returns the group that a cell stands for; `None` for an ordinary cell.
    fn own_group(&self, id: CellId) -> Option<u32> {
        let is_sum = self.keys.get(id as usize).is_some_and(|key| key.tag == SUM_TAG);
        self.sums.begins.get(id as usize).copied().filter(|place| is_sum && *place != NONE)
    }

    /// Returns at most [`MAX_POINT_CELLS`] amounts by cell, with the same sum as `amounts`; see the module's documentation. If
    /// `rest` exists, it takes the bytes for which even the groups of uses had no room. Then no new groups are created, and bytes
    /// without a group go there.
    pub fn fewer(&self, amounts: Vec<(CellId, i64)>, rest: &mut Option<i64>) -> Vec<(CellId, i64)> {
        let mut sums = vec![GroupSum::default(); self.sums.places.len()];
        let mut own = Vec::with_capacity(amounts.len());
        for (id, bytes) in amounts {
            match self.own_group(id).and_then(|place| sums.get_mut(place as usize)) {
                Some(sum) => {
                    *sum = GroupSum { bytes, weight: bytes.unsigned_abs(), is_there: true, is_open: true }
                }
                None => own.push((id, bytes)),
            }
        }
        for at in 0..sums.len() {
            let up = self.sums.places.get(at).and_then(|place| sums.get(place.up as usize)).copied();
            if let Some(sum) = sums.get_mut(at) {
                sum.is_open |= rest.is_none() && up.is_none_or(|up| up.is_open && !up.is_there);
            }
        }
        own.sort_unstable_by_key(|&(id, bytes)| (Reverse(bytes.unsigned_abs()), id));
        let count =
            |named: usize, step: usize| named + self.climb(&own, named, bytes(step), sums.clone()).0.len();
        let cells = own.len().min(NAMED / 2);
        let step = least(0, STEPS, |step| count(cells, step) <= NAMED);
        let beyond = least(cells, own.len().min(NAMED), |named| count(named + 1, step) > NAMED);
        let (stay, mut uses, mut left) = self.climb(&own, beyond, bytes(step), sums);
        own.truncate(beyond);
        own.extend(stay);
        uses.sort_unstable_by_key(|&(id, bytes)| (Reverse(bytes.unsigned_abs()), id));
        for (_, bytes) in uses.split_off(uses.len().min(MAX_POINT_CELLS - NAMED)) {
            left = Some(left.unwrap_or(0).wrapping_add(bytes));
        }
        if let Some(bytes) = left {
            *rest = Some(rest.unwrap_or(0).wrapping_add(bytes));
        }
        own.extend(uses);
        own.retain(|(_, bytes)| *bytes != 0);
        own.sort_unstable_by_key(|&(id, _)| id);
        own.shrink_to_fit(); // it had room for all cells
        own
    }

    /// Moves all but the first `named` cells up their chains. Returns the groups with at least `least` bytes, those of uses, and
    /// the bytes without a group.
    fn climb(
        &self,
        own: &[(CellId, i64)],
        named: usize,
        least: u64,
        mut sums: Vec<GroupSum>,
    ) -> (Amounts, Amounts, Option<i64>) {
        let weight = |(_, bytes): &(CellId, i64)| bytes.unsigned_abs();
        let mut left = None;
        let mut add = |sums: &mut Vec<GroupSum>, place: u32, bytes: i64, weight: u64| match sums
            .get_mut(place as usize)
        {
            Some(sum) => {
                sum.bytes = sum.bytes.wrapping_add(bytes);
                sum.weight = sum.weight.saturating_add(weight);
            }
            None => left = Some(left.unwrap_or(0_i64).wrapping_add(bytes)),
        };
        for small in own.get(named..).unwrap_or_default() {
            let place = self.sums.begins.get(small.0 as usize).copied().unwrap_or(NONE);
            add(&mut sums, place, small.1, weight(small));
        }
        let (mut stay, mut uses) = (Vec::new(), Vec::new());
        for (at, place) in self.sums.places.iter().enumerate().rev() {
            let Some(&sum) = sums.get(at) else { continue };
            match place.cell.filter(|_| sum.is_open && sum.weight > 0) {
                Some(cell) if place.up == NONE => uses.push((cell, sum.bytes)),
                Some(cell) if sum.weight >= least => stay.push((cell, sum.bytes)),
                _ if sum.weight > 0 => add(&mut sums, place.up, sum.bytes, sum.weight),
                _ => {}
            }
        }
        (stay, uses, left)
    }
}

/// Returns the minimum size of a group; sizes grow by about a tenth for each step.
fn bytes(step: usize) -> u64 {
    (8 + step as u64 % 8) << (step / 8)
}

/// The last step, larger than any amount.
const STEPS: usize = 60 * 8;

/// Returns the first number in `from..to` that is good, or `to`. All numbers after a good one must be good.
fn least(mut from: usize, mut to: usize, is_good: impl Fn(usize) -> bool) -> usize {
    while from < to {
        let middle = from.midpoint(to);
        match is_good(middle) {
            true => to = middle,
            false => from = middle + 1,
        }
    }
    from
}

type Amounts = Vec<(CellId, i64)>;

#[derive(Debug, Clone, Copy, Default)]
struct GroupSum {
    bytes: i64,
    /// Sum of absolute values.
    weight: u64,
    is_there: bool,
    /// The group may become a cell: no other group already contains bytes of its cells.
    is_open: bool,
}
