//! Sums of smaller cells: how many cells become few, and every byte stays.
//!
//! **The chain.** Each cell is in a chain of sums of its own use (class, role, phase, library, pool), from near to far. Of
//! the tag `model/layers.17/rnn_l0_t9_out` these are: `model/layers.*/rnn_l*_t*_out`, what differs from it in numbers only;
//! `model/layers.*/rnn_l*`, what begins like it before its second number; what is below `model/layers.*` and `model`; and the
//! whole use. Numbers go first because it is repetition that fills a list: ninety layers, or thousands of
//! operators that a framework numbers by itself.
//!
//! **The rule.** The largest cells keep their names. What the others hold goes up their chains together, until a sum is
//! large enough, or at the top. Half of the room is for cells; how small a sum may be is what the other half has room
//! for; what is left over is for cells again. So repetition takes no room from what is there once, and
//! a sum is named as closely as its size earns. A cell's bytes are found again later: **they are in the nearest sum of its
//! chain that is there**, because what is too small passes a place together, and no sum is put between a cell
//! and a sum that has its bytes already.
//!
//! Sums are cells of their process, made when a second cell has them in its chain.

use crate::Map;
use crate::book::cells::{CellId, CellKey, CellTable};
use crate::book::timeline::{MAX_POINT_CELLS, NAMED};
use std::cmp::Reverse;
use std::sync::Arc;

/// How the tag of a sum ends. Before it stands a path with a `/` (what is below it), a tag with `*` for its numbers and a
/// blank (what differs in them), or nothing (the use).
pub const SUM: &str = "(smaller ones)";

/// Whether a tag is that of a sum.
pub fn is_sum(tag: &str) -> bool {
    tag.ends_with(SUM)
}

/// What rules and groups see of a tag: of a sum of tags that differ in numbers, these tags with `*`.
pub fn without_sum(tag: &str) -> &str {
    tag.strip_suffix(SUM).and_then(|tag| tag.strip_suffix(' ')).unwrap_or(tag)
}

/// The tag of sums; their `origin` says which.
pub(crate) const SUM_TAG: u32 = u32::MAX - 1;
/// Places that a process may have; beyond, cells begin with the farther ones of their chain. A large model has some hundreds.
const MAX_GROUPS: usize = 4096;
/// Components of a path that have a place of their own.
const DEEPEST: usize = 8;
/// No place.
const NONE: u32 = u32::MAX;

/// A step of chains.
#[derive(Debug, Clone, Copy)]
struct Group {
    /// The next one; it comes before this one.
    up: u32,
    /// Of the cell that has its sum.
    key: CellKey,
    /// That cell; `None` while a single cell or place is below, but for uses.
    cell: Option<CellId>,
    has_one: bool,
}

/// The sums of a process.
#[derive(Debug, Default)]
pub(crate) struct CellGroups {
    places: Vec<Group>,
    by_key: Map<CellKey, u32>,
    /// What they are called, by `origin`.
    names: Vec<Arc<str>>,
    by_name: Map<Arc<str>, u32>,
    /// Of each cell, where its chain begins; of a sum, its own place.
    begins: Vec<u32>,
}

impl CellGroups {
    /// What the sum with this key is called.
    pub fn name(&self, key: &CellKey) -> Option<Arc<str>> {
        self.names.get(key.origin as usize).cloned()
    }

    /// What they take, about: a place, twice its key, and its name.
    pub fn bytes(&self) -> usize {
        self.places.capacity() * 256 + self.begins.capacity() * size_of::<u32>()
    }

    fn place(&self, at: u32) -> Option<&Group> {
        self.places.get(at as usize)
    }

    /// The place of a sum with this name; `None`: there is no room.
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

/// What the sums of a tag are called, the farthest first.
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
    /// Cells get their chains, once there are more than a point has room for.
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

    /// A cell or a place comes below a place. With the second one the place's sum becomes a cell.
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

    /// The sums that may have the bytes of a cell, the nearest first.
    pub fn sums_of(&self, id: CellId) -> impl Iterator<Item = CellId> + '_ {
        let begin = self.sums.begins.get(id as usize).and_then(|at| self.sums.place(*at));
        std::iter::successors(begin, |place| self.sums.place(place.up)).filter_map(|place| place.cell)
    }

    /// The place of a cell that is a sum.
    fn own_group(&self, id: CellId) -> Option<u32> {
        let is_sum = self.keys.get(id as usize).is_some_and(|key| key.tag == SUM_TAG);
        self.sums.begins.get(id as usize).copied().filter(|place| is_sum && *place != NONE)
    }

    /// At most [`MAX_POINT_CELLS`] amounts, by cell, with the same sum as these: see above. `rest`, where there is one, has what even the
    /// sums of uses had no room for; then there are no new sums, and what finds none is in the rest.
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
        own.shrink_to_fit(); // it had room for all of them
        own
    }

    /// All but the first `named` cells go up their chains: the sums of `least` bytes or more, those of uses, and what had
    /// no place.
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

/// How small sums may be, in steps of about a tenth.
fn bytes(step: usize) -> u64 {
    (8 + step as u64 % 8) << (step / 8)
}

/// The last of them: nothing is as large.
const STEPS: usize = 60 * 8;

/// The first of `from..to` that is good, as all after it are; else `to`.
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

/// What is in a sum.
#[derive(Debug, Clone, Copy, Default)]
struct GroupSum {
    bytes: i64,
    /// The same without signs.
    weight: u64,
    /// It was before.
    is_there: bool,
    /// It may be one: no sum has bytes of its cells already.
    is_open: bool,
}
