//! Derived names for memory that no rule names: the library that allocated it, or a shortened tag path.

pub use gpumem_model::cell::TORCH;

use crate::amounts::{largest_first, sum, sums};
use crate::category::is_named_by_rules;
use gpumem_model::cell::without_sum;
use gpumem_model::run::{Cell, Class, Run};
use std::collections::{BTreeMap, BTreeSet};

/// Tag that the agent gives to memory of all source lines for which it has no separate tag.
const OTHER_LINES: &str = "(other lines)";
/// End of the names of memory that a process with PyTorch allocated without PyTorch's allocator.
pub(crate) const OUTSIDE_TORCH: &str = " (outside torch)";
/// Maximum number of groups of tag paths in a table.
const MOST_GROUPS: usize = 16;
/// With fewer groups than this, deeper paths are used, with numbers replaced by `*`.
const FEW_GROUPS: usize = 4;

/// Returns whether PyTorch's allocator was seen in a run.
pub fn has_torch(run: &Run) -> bool {
    run.cells.iter().any(|cell| cell.pool.as_deref() == Some(TORCH))
}

/// Returns the short name of a library's file: `/usr/lib/libnccl.so.2` is `libnccl`.
pub fn library(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split_once(".so").map_or(file, |(name, _)| name)
}

/// Returns whether a library is the Python interpreter. It calls the driver for Python code, as through `ctypes`.
fn is_interpreter(library: &str) -> bool {
    let version = library.strip_prefix("lib").unwrap_or(library).strip_prefix("python");
    version.is_some_and(|version| {
        version.is_empty() || version.starts_with(|first: char| first.is_ascii_digit())
    })
}

/// Returns the name for direct bytes (allocated from the driver) that have no other name: the library that allocated them, or the line
/// of the program for which the interpreter did.
pub(super) fn by_library(cell: &Cell, has_torch: bool) -> Option<String> {
    let path = cell.library.as_deref().filter(|_| cell.class == Class::Direct)?;
    let line = cell.tag.as_deref().filter(|tag| is_interpreter(library(path)) && is_line(tag));
    let name = line.unwrap_or_else(|| library(path));
    Some(if has_torch { format!("{name}{OUTSIDE_TORCH}") } else { format!("{name} (no tag)") })
}

/// Returns whether a tag is the source line that allocated memory, such as `train.py:212 make_buffer`, or the tag for all further
/// lines. The agent uses such tags for memory without another name.
pub fn is_line(tag: &str) -> bool {
    let is_place = |(at, _): (usize, &str)| {
        let (file, rest) = (&tag[..at], &tag[at + 1..]);
        let number = rest.split(' ').next().unwrap_or_default();
        let is_number =
            number == "?" || !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        let is_file = file.ends_with(".py") || file.ends_with('>') || file == "?";
        is_file && is_number && rest.len() > number.len() + 1
    };
    tag == OTHER_LINES || !tag.contains('/') && tag.match_indices(':').any(is_place)
}

/// Returns the source line in a tag, alone or after a module's path (`GPUMEM_LINES=1`). Also searches the tag that the cell's tag
/// replaced (`origin`).
pub(super) fn line_of(cell: &Cell) -> Option<&str> {
    [&cell.tag, &cell.origin].into_iter().find_map(|tag| {
        let last = tag.as_deref()?.rsplit('/').next()?;
        is_line(last).then_some(last)
    })
}

/// Divisor: a source line gets a row if it holds at least tracked memory divided by this.
const LARGE_LINE: i64 = 100;
const MOST_LINES: usize = 16;

/// Returns the source lines of all devices that get a row, because they are large now, at the peak, or at an out-of-memory event.
pub(super) fn large_lines(run: &Run) -> BTreeSet<String> {
    let mut found: BTreeMap<&str, i64> = BTreeMap::new();
    let moments = run.devices.iter().flat_map(|device| [&device.last.amounts, &device.peak.amounts]);
    let ooms = run.devices.iter().flat_map(|device| device.details.ooms.iter().map(|oom| &oom.amounts));
    for amounts in moments.chain(ooms) {
        let all = sum(amounts.iter().map(|(_, bytes)| *bytes));
        let tag = |index: u32| run.cells.get(index as usize)?.tag.as_deref().filter(|tag| is_line(tag));
        let lines = sums(amounts.iter().filter_map(|(index, bytes)| Some((tag(*index)?, *bytes))));
        for (line, bytes) in lines.into_iter().filter(|(_, bytes)| *bytes > 0 && *bytes >= all / LARGE_LINE) {
            let largest = found.entry(line).or_default();
            *largest = bytes.max(*largest);
        }
    }
    largest_first(found).into_iter().take(MOST_LINES).map(|(line, _)| line.to_owned()).collect()
}

/// Returns whether the cell has buffers that NCCL allocated for itself.
pub(super) fn is_apart(cell: &Cell) -> bool {
    cell.class == Class::Direct && cell.library.as_deref().is_some_and(|path| library(path) == "libnccl")
}

/// Returns the first `depth` components of a path. With `starred`, numbers are replaced by `*`, as in `GPT/h.*/attn`.
pub(crate) fn group(path: &str, depth: usize, starred: bool) -> String {
    let all_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let component = |component: &str| match component.rsplit_once('.') {
        Some((container, number)) if starred && all_digits(number) => format!("{container}.*"),
        None if starred && all_digits(component) => "*".to_owned(),
        _ => component.to_owned(),
    };
    path.split('/').take(depth).map(component).collect::<Vec<_>>().join("/")
}

/// Returns a group for each cell with a tag: its path, cut to the greatest depth at which at most [`MOST_GROUPS`] paths differ. If
/// these are fewer than [`FEW_GROUPS`], deeper paths whose parts of digits are replaced by `*`.
pub(super) fn rolled_up(run: &Run) -> Vec<Option<String>> {
    let moments = run.devices.iter().flat_map(|device| [&device.last, &device.peak]);
    let held = moments.flat_map(|moment| moment.amounts.iter());
    let cells = held.filter(|(_, bytes)| *bytes != 0).filter_map(|(index, _)| run.cells.get(*index as usize));
    let tags = cells.filter(|cell| is_named_by_rules(cell.class)).filter_map(|cell| cell.tag.as_deref());
    let paths: BTreeSet<&str> = tags.filter(|tag| !is_line(tag)).collect();
    let (depth, starred) = level(&paths);
    let path = |cell: &Cell| cell.tag.as_deref().map(|tag| group(without_sum(tag), depth, starred));
    run.cells.iter().map(path).collect()
}

/// Returns the depth to which the groups' paths are shortened, and whether numbers in paths are replaced by `*`.
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
    fn memory_that_the_interpreter_asks_for_has_the_programs_line() {
        let cell = |path: &str, tag: Option<&str>| Cell {
            class: Class::Direct,
            library: Some(path.to_owned()),
            tag: tag.map(str::to_owned),
            ..Cell::default()
        };
        let name = |path, tag| by_library(&cell(path, tag), true).expect("a name");
        let line = Some("train.py:5 grab");
        for path in ["/usr/lib/libpython3.11.so.1.0", "/usr/bin/python3.13t", "python"] {
            assert_eq!(name(path, line), "train.py:5 grab (outside torch)", "{path}");
        }
        assert_eq!(
            name("/usr/lib/libpython3.11.so.1.0", Some("libpython3.11/drop_gil")),
            "libpython3.11 (outside torch)"
        );
        assert_eq!(name("/usr/lib/libnccl.so.2", line), "libnccl (outside torch)");
        assert_eq!(name("/usr/lib/libpythonic.so", line), "libpythonic (outside torch)");
    }

    #[test]
    fn lines_are_told_from_paths() {
        for line in [
            "train.py:212 make_buffer",
            "a b.py:3 f",
            "<stdin>:1 <module>",
            "?:? ?",
            "x.py:7 A.f.<locals>.<lambda>",
        ] {
            assert!(is_line(line), "{line}");
        }
        assert!(is_line(OTHER_LINES));
        for path in [
            "GPT/h.3/attn",
            "loss",
            "step 17",
            "a:b c",
            "step:17 forward",
            ":3 f",
            "train/x.py:3 f",
            "x.py:3",
            "",
        ] {
            assert!(!is_line(path), "{path}");
        }
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
