//! Cells and lists of bytes by cell. A cell sums the bytes of a process that have the same class, tag, role, phase, library and
//! pool.

use crate::fields::{Field, fields, plain};
use crate::names::{Named, named};
use gpumem_wire::{Phase, Role};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

fields! {
    /// Properties of a cell; the bytes of a process with the same properties are summed.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
    pub struct Cell {
        /// Kind of memory: `direct`, `block`, `pool_idle` or `opaque`.
        class: Class            => redact keep;
        /// Tag: name of the memory as a path `a/b/c`; absent if it has none.
        tag: Option<String>     => redact hide_tag;
        /// First tag of the bytes, if another tag replaced it later.
        origin: Option<String>  => redact clear;
        /// Role: what the bytes are used for (`parameter`, `gradient`, ...); absent if unknown.
        role: Option<String>    => redact hide_unknown_role;
        /// Phase of the training step in which the bytes were allocated; absent if unknown.
        phase: Option<String>   => redact hide_unknown_phase;
        /// Path of the library that requested the bytes.
        library: Option<String> => redact clear;
        /// Name of the framework pool that contains the bytes.
        #[serde(default)]
        pool: Option<String>    => redact hide_unknown_pool;
        /// Whether the bytes are blocks that the program has freed but a CUDA stream may still use; then the class is
        /// `pool_idle`.
        #[serde(default)]
        pending: bool           => redact keep;
        /// Whether the tag is the process's default, because the allocating thread had no tag.
        #[serde(default)]
        inherited: bool         => redact keep;
    }
}

named! {
    /// Class of a cell: kind of the memory that the cell sums.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Class {
        #[default]
        /// Driver allocations that are not segments of a pool.
        Direct = "direct",
        /// Blocks: pieces of a pool's memory that the program uses.
        Block = "block",
        /// Pool bytes in no block, or in a block that the program has freed (`pending`): cached by the allocator.
        PoolIdle = "pool_idle",
        /// Segments of pools that report no blocks, so that their use is unknown.
        Opaque = "opaque",
    }
}

plain!(Class);

/// Properties of a cell with which category rules are compared.
#[derive(Debug, Clone, Copy)]
pub struct CellTraits<'c> {
    pub class: Class,
    pub tag: Option<&'c str>,
    /// Path of the library that made the request.
    pub library: Option<&'c str>,
    pub role: Role,
    pub phase: Phase,
}

impl<'c> From<&'c Cell> for CellTraits<'c> {
    fn from(cell: &'c Cell) -> Self {
        CellTraits {
            class: cell.class,
            tag: cell.tag.as_deref(),
            library: cell.library.as_deref(),
            role: cell.role.as_deref().and_then(Role::from_name).unwrap_or_default(),
            phase: cell.phase.as_deref().and_then(Phase::from_name).unwrap_or_default(),
        }
    }
}

/// End of the tag of a group of small cells. After a path and `/`, the group contains all tags below the path. After a tag in
/// which `*` replaces numbers, and a blank, it contains the tags that differ in these numbers. Alone, it contains all tags.
pub const SUM: &str = "(smaller ones)";

/// Whether a tag is the tag of a group of small cells.
pub fn is_sum(tag: &str) -> bool {
    tag.ends_with(SUM)
}

/// Returns the tag without the suffix of a sum of smaller tags. Category rules are compared with the result.
pub fn without_sum(tag: &str) -> &str {
    tag.strip_suffix(SUM).and_then(|tag| tag.strip_suffix(' ')).unwrap_or(tag)
}

/// Name of PyTorch's memory pools in [`Cell::pool`].
pub const TORCH: &str = "torch";
/// Text that replaces tags in a redacted run.
pub const HIDDEN_TAG: &str = "(not shown)";

fn hide_tag(tag: &mut Option<String>) {
    if let Some(tag) = tag.as_mut().filter(|tag| *tag != SUM) {
        HIDDEN_TAG.clone_into(tag);
    }
}

/// Removes a role that gpumemd does not define, because it may be a secret name.
fn hide_unknown_role(role: &mut Option<String>) {
    role.take_if(|role| Role::from_name(role).is_none());
}

pub(crate) fn hide_unknown_phase(phase: &mut Option<String>) {
    phase.take_if(|phase| Phase::from_name(phase).is_none());
}

pub(crate) fn hide_unknown_pool(pool: &mut Option<String>) {
    pool.take_if(|pool| pool != TORCH);
}

/// Bytes by cell: pairs of a cell's index in [`Run::cells`](crate::run::Run::cells) and the cell's bytes, sorted by index, without
/// zeros.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Amounts(Vec<(u32, i64)>);

impl Amounts {
    /// Whether the list is empty. serde's `skip_serializing_if` cannot name the method of the inner list.
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_empty()
    }
}

impl Field for Amounts {
    fn remap(&mut self, to: &dyn Fn(u32) -> Option<u32>) {
        let mut sums = BTreeMap::<u32, i64>::new();
        for (cell, bytes) in self.0.drain(..) {
            if let Some(cell) = to(cell) {
                let sum = sums.entry(cell).or_default();
                *sum = sum.wrapping_add(bytes);
            }
        }
        self.0 = sums.into_iter().filter(|(_, bytes)| *bytes != 0).collect();
    }

    fn heap_bytes(&self) -> usize {
        self.0.heap_bytes()
    }
}

impl Deref for Amounts {
    type Target = Vec<(u32, i64)>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Amounts {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl From<Vec<(u32, i64)>> for Amounts {
    fn from(amounts: Vec<(u32, i64)>) -> Self {
        Amounts(amounts)
    }
}

impl FromIterator<(u32, i64)> for Amounts {
    fn from_iter<I: IntoIterator<Item = (u32, i64)>>(amounts: I) -> Self {
        Amounts(amounts.into_iter().collect())
    }
}

impl<'a> IntoIterator for &'a Amounts {
    type Item = &'a (u32, i64);
    type IntoIter = std::slice::Iter<'a, (u32, i64)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<const N: usize> PartialEq<[(u32, i64); N]> for Amounts {
    fn eq(&self, other: &[(u32, i64); N]) -> bool {
        self.0 == other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_that_become_one_are_summed_and_others_are_left_out() {
        let mut amounts = Amounts::from(vec![(0, 5), (1, 7), (2, -5), (3, 1)]);
        amounts.remap(&|cell| [Some(4), Some(2), Some(4), None].get(cell as usize).copied().flatten());
        assert_eq!(amounts, [(2, 7)]);
    }

    #[test]
    fn only_words_of_ours_stay_in_a_redacted_cell() {
        let text = |text: &str| Some(text.to_owned());
        let mut cell = Cell {
            tag: text("customer/loss"),
            origin: text("customer"),
            role: text("kv cache"),
            phase: text("customer"),
            library: text("libcustomer.so"),
            pool: text(TORCH),
            inherited: true,
            ..Cell::default()
        };
        cell.redact();
        let (tag, role, pool) = (text(HIDDEN_TAG), text("kv cache"), text(TORCH));
        assert_eq!(cell, Cell { tag, role, pool, inherited: true, ..Cell::default() });
        let mut sum = Cell { tag: text(SUM), ..Cell::default() };
        sum.redact();
        assert_eq!(sum.tag, text(SUM));
    }
}
