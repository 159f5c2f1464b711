//! Shortens a list of bytes by cell (cells.rs): small cells are summed in groups, so that no byte is lost.
//!
//! **Chain.** Each cell has a chain of groups, from specific to general. All have the cell's class, role, phase, library and
//! pool, together called its *use*. The tag `model/layers.17/rnn_l0_t9_out` has these groups:
//!
//! ```text
//! model/layers.*/rnn_l*_t*_out   tags that differ only in their numbers
//! model/layers.*/rnn_l*          tags with the same text up to the first number of the last component
//! model/layers.*/  and  model/   all tags below a path
//! (nothing)                      all cells of the use
//! ```
//!
//! **Rule.** The largest cells stay separate. The bytes of all other cells move up their chains together until a group is large
//! enough, or to the top. Half of the room is reserved for cells; the other half determines the minimum size of a group. Places
//! that groups do not need go to cells. So repeated layers take no room from cells that exist once.
//!
//! **Invariant.** A cell's bytes are in the nearest group of its chain that has an amount, so later changes find them. This holds
//! because no group is added between a cell and a group that already contains the cell's bytes.
//!
//! A group has a cell of its own for its sum. That cell is created with the second member of the group (a cell, or a more specific
//! group). The last group of a chain gets it with the first member.

use crate::Map;
use crate::book::cells::{CellId, CellKey, CellTable, MAX_NAMED, MAX_POINT_CELLS};
use gpumem_model::cell::SUM;
use std::cmp::Reverse;
use std::sync::Arc;

/// Value of `CellKey::tag` in the cells of groups; there `CellKey::origin` is the index of the group's name.
pub(crate) const SUM_TAG: u32 = u32::MAX - 1;
/// Maximum number of groups of a process; a large model has some hundreds. At the maximum, new tags use only groups that exist
/// already.
const MAX_GROUPS: usize = 4096;
/// Maximum number of path components of a tag that have a group.
const DEEPEST: usize = 8;
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Group {
    /// Index of the next, more general group of the chain, which is lower; [`NONE`] for the last.
    up: u32,
    key: CellKey,
    /// Cell for the group's sum. `None` while the group has a single member, unless it is the last group of the chain.
    cell: Option<CellId>,
    has_member: bool,
}

#[derive(Debug, Default)]
pub(crate) struct CellGroups {
    groups: Vec<Group>,
    by_key: Map<CellKey, u32>,
    /// Names of the groups, by `CellKey::origin`.
    names: Vec<Arc<str>>,
    by_name: Map<Arc<str>, u32>,
    /// Index in `groups` of the first group in a cell's chain, by [`CellId`]. For the cell of a group, the index of that group.
    first_groups: Vec<u32>,
}

impl CellGroups {
    pub fn name(&self, key: &CellKey) -> Option<Arc<str>> {
        self.names.get(key.origin as usize).cloned()
    }

    /// Returns the estimated bytes of all groups; each group has its key twice, and a name.
    pub fn bytes(&self) -> usize {
        self.groups.capacity() * 256 + self.first_groups.capacity() * size_of::<u32>()
    }

    fn group(&self, at: u32) -> Option<&Group> {
        self.groups.get(at as usize)
    }

    /// Returns the index of the group with this name and the use (class, role, ...) of `cell`, creating it if needed; `None` if
    /// there are already [`MAX_GROUPS`].
    fn intern(&mut self, name: &str, cell: &CellKey, up: u32) -> Option<u32> {
        let next = u32::try_from(self.names.len()).ok()?;
        let origin = *self.by_name.get(name).unwrap_or(&next);
        let key = CellKey { tag: SUM_TAG, origin, ..*cell };
        if let Some(&group) = self.by_key.get(&key) {
            return Some(group);
        }
        if self.groups.len() >= MAX_GROUPS {
            return None;
        }
        if origin == next {
            let name: Arc<str> = name.into();
            self.names.push(name.clone());
            self.by_name.insert(name, origin);
        }
        let group = self.groups.len() as u32;
        self.groups.push(Group { up, key, cell: None, has_member: false });
        self.by_key.insert(key, group);
        Some(group)
    }
}

/// Returns the names of the groups in a tag's chain, the most general first.
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
    /// Builds the chains of new cells, once there are more cells than a timeline point has room for.
    pub fn build_chains(&mut self) {
        while self.keys.len() > MAX_POINT_CELLS
            && let Some(&key) = self.keys.get(self.groups.first_groups.len())
        {
            if key.tag == SUM_TAG {
                let own = self.groups.by_key.get(&key).copied();
                self.groups.first_groups.push(own.unwrap_or(NONE));
                continue;
            }
            let tag = self.tags.get(&key.tag).cloned().unwrap_or_default();
            let mut up = NONE;
            for name in chain(&tag) {
                let count = self.groups.groups.len();
                let Some(group) = self.groups.intern(&name, &key, up) else { break };
                if self.groups.groups.len() > count {
                    self.add_member(up);
                }
                up = group;
            }
            self.add_member(up);
            self.groups.first_groups.push(up);
        }
    }

    /// Adds a cell or group as a member to `group`. With its second member the group gets a cell of its own.
    fn add_member(&mut self, group: u32) {
        let next = self.keys.len() as CellId;
        let Some(group) = self.groups.groups.get_mut(group as usize) else { return };
        if (group.has_member || group.up == NONE) && group.cell.is_none() {
            group.cell = Some(next);
            self.keys.push(group.key);
            self.ids.insert(group.key.packed(), next);
        }
        group.has_member = true;
    }

    /// Returns the cells of the groups that may contain the bytes of a cell, the most specific first.
    pub fn groups_of(&self, id: CellId) -> impl Iterator<Item = CellId> + '_ {
        let begin = self.groups.first_groups.get(id as usize).and_then(|at| self.groups.group(*at));
        std::iter::successors(begin, |group| self.groups.group(group.up)).filter_map(|group| group.cell)
    }

    /// Returns the group whose cell this is; `None` for an ordinary cell.
    fn own_group(&self, id: CellId) -> Option<u32> {
        let is_sum = self.keys.get(id as usize).is_some_and(|key| key.tag == SUM_TAG);
        self.groups.first_groups.get(id as usize).copied().filter(|group| is_sum && *group != NONE)
    }

    /// Returns at most [`MAX_POINT_CELLS`] amounts by cell and group; the sum of all amounts and `rest` does not change. `rest`
    /// takes the bytes for which even the last groups of chains have no room. Once it is set, no further group gets an amount,
    /// because bytes of its cells may already be in `rest`.
    pub fn fold_small(&self, amounts: Vec<(CellId, i64)>, rest: &mut Option<i64>) -> Vec<(CellId, i64)> {
        let mut sums = vec![GroupSum::default(); self.groups.groups.len()];
        let mut own = Vec::with_capacity(amounts.len());
        for (id, bytes) in amounts {
            match self.own_group(id).and_then(|group| sums.get_mut(group as usize)) {
                Some(sum) => {
                    *sum = GroupSum { bytes, weight: bytes.unsigned_abs(), is_present: true, is_open: true }
                }
                None => own.push((id, bytes)),
            }
        }
        for at in 0..sums.len() {
            let up = self.groups.groups.get(at).and_then(|group| sums.get(group.up as usize)).copied();
            if let Some(sum) = sums.get_mut(at) {
                sum.is_open |= rest.is_none() && up.is_none_or(|up| up.is_open && !up.is_present);
            }
        }
        own.sort_unstable_by_key(|&(id, bytes)| (Reverse(bytes.unsigned_abs()), id));
        let count = |named: usize, step: usize| {
            named + self.climb(&own, named, group_size(step), sums.clone()).0.len()
        };
        let cells = own.len().min(MAX_NAMED / 2);
        let step = first_true(0, STEPS, |step| count(cells, step) <= MAX_NAMED);
        let named = first_true(cells, own.len().min(MAX_NAMED), |named| count(named + 1, step) > MAX_NAMED);
        let (stay, mut uses, mut left) = self.climb(&own, named, group_size(step), sums);
        own.truncate(named);
        own.extend(stay);
        uses.sort_unstable_by_key(|&(id, bytes)| (Reverse(bytes.unsigned_abs()), id));
        for (_, bytes) in uses.split_off(uses.len().min(MAX_POINT_CELLS - MAX_NAMED)) {
            left = Some(left.unwrap_or(0).wrapping_add(bytes));
        }
        if let Some(bytes) = left {
            *rest = Some(rest.unwrap_or(0).wrapping_add(bytes));
        }
        own.extend(uses);
        own.retain(|(_, bytes)| *bytes != 0);
        own.sort_unstable_by_key(|&(id, _)| id);
        own.shrink_to_fit(); // its capacity was that for all cells
        own
    }

    /// Moves the bytes of all cells in `own` but the first `named` up their chains. Returns the groups with at least `least`
    /// bytes, the last groups of chains, and the bytes without a group.
    fn climb(
        &self,
        own: &[(CellId, i64)],
        named: usize,
        least: u64,
        mut sums: Vec<GroupSum>,
    ) -> (Amounts, Amounts, Option<i64>) {
        let weight = |(_, bytes): &(CellId, i64)| bytes.unsigned_abs();
        let mut left = None;
        let mut add = |sums: &mut Vec<GroupSum>, group: u32, bytes: i64, weight: u64| match sums
            .get_mut(group as usize)
        {
            Some(sum) => {
                sum.bytes = sum.bytes.wrapping_add(bytes);
                sum.weight = sum.weight.saturating_add(weight);
            }
            None => left = Some(left.unwrap_or(0_i64).wrapping_add(bytes)),
        };
        for small in own.get(named..).unwrap_or_default() {
            let group = self.groups.first_groups.get(small.0 as usize).copied().unwrap_or(NONE);
            add(&mut sums, group, small.1, weight(small));
        }
        let (mut stay, mut uses) = (Vec::new(), Vec::new());
        for (at, group) in self.groups.groups.iter().enumerate().rev() {
            let Some(&sum) = sums.get(at) else { continue };
            match group.cell.filter(|_| sum.is_open && sum.weight > 0) {
                Some(cell) if group.up == NONE => uses.push((cell, sum.bytes)),
                Some(cell) if sum.weight >= least => stay.push((cell, sum.bytes)),
                _ if sum.weight > 0 => add(&mut sums, group.up, sum.bytes, sum.weight),
                _ => {}
            }
        }
        (stay, uses, left)
    }
}

/// Returns the minimum bytes of a group at step `step` of the search for that minimum; each step is about a tenth larger.
fn group_size(step: usize) -> u64 {
    (8 + step as u64 % 8) << (step / 8)
}

/// Last step that [`group_size`] tries: no amount is larger than its result.
const STEPS: usize = 60 * 8;

/// Returns the first number in `from..to` for which `test` is true, or `to`. `test` must be true for all greater numbers too.
fn first_true(mut from: usize, mut to: usize, test: impl Fn(usize) -> bool) -> usize {
    while from < to {
        let middle = from.midpoint(to);
        match test(middle) {
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
    /// Sum of the absolute amounts of the group's cells.
    weight: u64,
    /// Whether the list already had an amount for the group.
    is_present: bool,
    /// Whether the group may get an amount: no more general group already contains bytes of its cells.
    is_open: bool,
}
