//! Names that no rule gives: the library that asked for bytes, and paths of tags rolled up.

use crate::run::{Class, Run};
use gpumem_ledger::{CellView, without_sum};
use std::collections::BTreeSet;

/// What PyTorch's pool is called.
pub const TORCH: &str = "torch";
/// Groups of paths that are worth a table.
const MOST_GROUPS: usize = 16;
/// Fewer than these tell less than the kinds of modules do.
const FEW_GROUPS: usize = 4;

/// Whether PyTorch's allocator was seen in a run.
pub fn has_torch(run: &Run) -> bool {
    run.cells.iter().any(|cell| cell.pool.as_deref() == Some(TORCH))
}

/// A library's file as people call it: `/usr/lib/libnccl.so.2` is `libnccl`.
pub fn library(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split_once(".so").map_or(file, |(name, _)| name)
}

/// Direct bytes that nothing else names are called after the library that asked for them.
pub(super) fn by_library(cell: &CellView, has_torch: bool) -> Option<String> {
    let path = cell.library.as_deref().filter(|_| cell.class == gpumem_ledger::Class::Direct)?;
    let name = library(path);
    Some(if has_torch { format!("{name} (outside torch)") } else { format!("{name} (no tag)") })
}

/// NCCL's own buffers, whatever they are for.
pub(super) fn is_apart(cell: &CellView) -> bool {
    cell.class == gpumem_ledger::Class::Direct
        && cell.library.as_deref().is_some_and(|path| library(path) == "libnccl")
}

/// The first components of a path; with `starred` numbers are alike, as in `GPT/h.*/attn`.
fn group(path: &str, depth: usize, starred: bool) -> String {
    let all_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let component = |component: &str| match component.rsplit_once('.') {
        Some((container, number)) if starred && all_digits(number) => format!("{container}.*"),
        None if starred && all_digits(component) => "*".to_owned(),
        _ => component.to_owned(),
    };
    path.split('/').take(depth).map(component).collect::<Vec<_>>().join("/")
}

/// A group for each tag: paths as deep as fit into a table; where that says too little, deeper ones in which numbers are
/// alike.
pub(super) fn rolled_up(run: &Run, cells: &[CellView]) -> Vec<Option<String>> {
    let moments = run.devices.iter().flat_map(|device| [&device.last, &device.peak]);
    let held = moments.flat_map(|moment| moment.amounts.iter());
    let is_named = |index: u32| {
        run.cells.get(index as usize).is_some_and(|cell| matches!(cell.class, Class::Direct | Class::Block))
    };
    let paths: BTreeSet<&str> = held
        .filter(|(index, bytes)| *bytes != 0 && is_named(*index))
        .filter_map(|(index, _)| cells.get(*index as usize)?.tag.as_deref())
        .collect();
    let (depth, starred) = level(&paths);
    let path = |cell: &CellView| cell.tag.as_deref().map(|tag| group(without_sum(tag), depth, starred));
    cells.iter().map(path).collect()
}

/// How many components of paths make a table, and whether numbers are alike in it.
fn level(paths: &BTreeSet<&str>) -> (usize, bool) {
    let deepest = paths.iter().map(|path| path.split('/').count()).max().unwrap_or(1);
    let groups = |depth: usize, starred: bool| {
        paths.iter().map(|path| group(path, depth, starred)).collect::<BTreeSet<_>>().len()
    };
    let fits = |starred: bool| (1..=deepest).rev().find(|&depth| groups(depth, starred) <= MOST_GROUPS);
    match (fits(false), fits(true)) {
        (Some(plain), Some(starred)) if groups(plain, false) < FEW_GROUPS && starred > plain => {
            (starred, true)
        }
        (Some(plain), _) => (plain, false),
        (None, Some(starred)) => (starred, true),
        (None, None) => (1, true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_paths() {
        for (path, name) in
            [("/usr/lib/libnccl.so.2", "libnccl"), ("libc10_cuda.so", "libc10_cuda"), ("/opt/a.out", "a.out")]
        {
            assert_eq!(library(path), name);
        }
        assert_eq!(group("GPT/h.3/attn/c_proj", 2, false), "GPT/h.3");
        assert_eq!(group("GPT/h.3/attn/c_proj", 9, true), "GPT/h.*/attn/c_proj");
        assert_eq!(group("steps/17/a.b", 3, true), "steps/*/a.b");
    }

    #[test]
    fn paths_are_as_deep_as_a_table_is_long() {
        let paths = |layers: usize| -> Vec<String> {
            let of_layer = |layer: usize| {
                ["attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj", "ln_1"]
                    .map(|name| format!("GPT/h.{layer}/{name}"))
            };
            (0..layers).flat_map(of_layer).chain(["GPT/wte".to_owned(), "GPT/ln_f".to_owned()]).collect()
        };
        for (layers, expected) in [(2, (4, false)), (12, (2, false)), (96, (4, true))] {
            let paths = paths(layers);
            assert_eq!(level(&paths.iter().map(String::as_str).collect()), expected, "{layers}");
        }
        assert_eq!(level(&BTreeSet::new()), (1, false));
    }
}
