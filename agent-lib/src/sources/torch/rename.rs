//! Renames live memory after modules have moved. Rows are found by the text of their tag: a module's path, perhaps with a
//! parameter's name behind it and a scope before it. Nodes of the backward pass are renamed in the same way.
//!
//! Not for callbacks: it allocates. A renaming takes about 10 ns for each live row, and some microseconds for each different
//! name.

use crate::base::row::{key_of, kind, kind_of};
use crate::driver::core::Core;
use crate::naming::autograd;
use crate::threads::Thread;
use std::collections::HashMap;

/// A new path, the number of the first record that it applies to, and the number after the last one.
type New<'a> = (&'a [u8], u64, u64);

/// New paths by old path. A path that stays the same is listed, too, so that paths below it stay the same.
struct Paths<'a>(HashMap<&'a [u8], Vec<New<'a>>>);

impl<'a> Paths<'a> {
    /// Parses lines of four fields: old path, new path, and the two record numbers. Each field ends with a zero byte. If several
    /// lines apply to a record, the first one counts.
    fn new(text: &'a [u8]) -> Self {
        let words: Vec<&[u8]> = text.split(|&byte| byte == 0).collect();
        let number = |word: &[u8]| str::from_utf8(word).ok().and_then(|word| word.parse().ok()).unwrap_or(0);
        let mut paths: HashMap<_, Vec<_>> = HashMap::new();
        for line in words.chunks_exact(4) {
            paths.entry(line[0]).or_default().push((line[1], number(line[2]), number(line[3])));
        }
        Paths(paths)
    }

    /// Returns the new name of `path` in record `seq`; `None` if it stays the same.
    fn renamed(&self, path: &[u8], seq: u64) -> Option<Vec<u8>> {
        let mut starts = std::iter::once(0).chain(slashes(path).map(|at| at + 1));
        let (start, end, new) = starts.find_map(|start| {
            let rest = &path[start..];
            let mut ends = std::iter::once(rest.len()).chain(slashes(rest).rev());
            ends.find_map(|end| {
                let mut lines = self.0.get(&rest[..end])?.iter();
                let (new, ..) = lines.find(|(_, from, until)| (*from..*until).contains(&seq))?;
                Some((start, start + end, *new))
            })
        })?;
        (&path[start..end] != new).then(|| [&path[..start], new, &path[end..]].concat())
    }

    /// Returns the record numbers at which a new path begins or ceases to apply.
    fn turns(&self) -> Vec<u64> {
        let mut turns: Vec<u64> =
            self.0.values().flatten().flat_map(|(_, from, until)| [*from, *until]).collect();
        turns.sort_unstable();
        turns.dedup();
        turns
    }
}

fn slashes(path: &[u8]) -> impl DoubleEndedIterator<Item = usize> {
    path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at)
}

impl Core {
    /// Renames rows and nodes; see the module's docs, and `Paths::new` for the format. Returns the number of the next record.
    pub(crate) fn rename(&self, thread: &Thread, text: &[u8]) -> u64 {
        if text.is_empty() {
            return self.recorder.ring.head() + 1;
        }
        let _uncancelled = crate::base::own_thread::Uncancelled::now();
        let paths = Paths::new(text);
        let turns = paths.turns();
        let mut known: HashMap<(u32, usize), u32> = HashMap::new();
        // Returns 0 for a tag that does not change.
        let mut renamed = |tag: u32, seq: u64| {
            *known.entry((tag, turns.partition_point(|turn| *turn <= seq))).or_insert_with(|| {
                let new = self.recorder.names.path(tag).and_then(|path| paths.renamed(path, seq));
                new.map_or(0, |new| self.recorder.names.intern(0, &new))
            })
        };
        for taken in self.recorder.live.scan() {
            let (row, tag) = (&taken.row, taken.row[5] as u32);
            if tag == 0 || !matches!(kind_of(row), kind::BLOCK_ALLOC | kind::ALLOC_END) {
                continue;
            }
            let (Some(key), new) = (key_of(&taken), renamed(tag, taken.seq())) else { continue };
            // Not a row that was added at this place since.
            let found = self.recorder.live.find_row(key).filter(|found| found.seq == taken.seq());
            if new != 0 && found.is_some() {
                self.record_retag(thread, key, found, Default::default(), new);
            }
        }
        // Nodes have no record number. Most belong to the last pass, so the current number is used.
        let head = self.recorder.ring.head();
        autograd::rename(|tag| renamed(tag, head));
        self.recorder.ring.head() + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(lines: &[(&str, &str, u64, u64)]) -> String {
        let line = |(old, new, from, until): &(&str, &str, u64, u64)| {
            [*old, *new, &from.to_string(), &until.to_string(), ""].join("\0")
        };
        lines.iter().map(line).collect()
    }

    fn renamed(text: &str, path: &str, seq: u64) -> Option<String> {
        Some(String::from_utf8(Paths::new(text.as_bytes()).renamed(path.as_bytes(), seq)?).expect("text"))
    }

    #[test]
    fn the_longest_old_path_decides_and_what_stays_stays() {
        let moved = [
            ("Net", "Net"),
            ("Net/head", "Net/head.1"),
            ("Net/head/in", "Net/head.1/in"),
            ("Net/h.0", "Net/h.1"),
            ("Net/h.1", "Net/h.0"),
            ("Net/h.0/stays", "Net/h.0/stays"),
        ];
        let text = text(&moved.map(|(old, new)| (old, new, 0, 9)));
        for (path, new) in [
            ("Net/head", Some("Net/head.1")),
            ("Net/head/weight", Some("Net/head.1/weight")),
            ("Net/head/in/weight", Some("Net/head.1/in/weight")),
            ("Net/headless", None),
            ("Net/h.0", Some("Net/h.1")),
            ("Net/h.1/bias", Some("Net/h.0/bias")),
            ("Net/h.0/stays/bias", None),
            ("Net", None),
            ("Other/head", None),
            ("", None),
            // With scopes in front.
            ("step/Net/head", Some("step/Net/head.1")),
            ("a/b/Net/h.1/bias", Some("a/b/Net/h.0/bias")),
            ("Net/x/Net/head", None),
        ] {
            assert_eq!(renamed(&text, path, 5).as_deref(), new, "{path}");
        }
        assert_eq!(renamed("", "Net", 5), None);
        assert_eq!(renamed("Net\0other\0", "Net", 0), None, "cut off");
    }

    #[test]
    fn a_path_that_two_modules_had_is_told_by_the_record() {
        let lines = [
            ("Net", "Net", 0, 99),
            ("Net/head", "Net/head/base", 0, 10),
            ("Net/head", "Net/head", 10, 99),
            ("Net/new", "Net/old", 20, 99),
        ];
        let text = &text(&lines);
        for (path, seq, new) in [
            ("Net/head/weight", 9, Some("Net/head/base/weight")),
            ("Net/head/weight", 10, None),
            ("Net/new", 19, None),
            ("Net/new", 20, Some("Net/old")),
            ("Net/new", 99, None),
        ] {
            assert_eq!(renamed(text, path, seq).as_deref(), new, "{path} in {seq}");
        }
        assert_eq!(Paths::new(text.as_bytes()).turns(), [0, 10, 20, 99]);
    }
}
