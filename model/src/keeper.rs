//! Names in a program that keep tensors, found by the agent when memory ran out.

use crate::escape::escape;
use crate::fields::fields;
use crate::units::{plural, thousands};
use serde::{Deserialize, Serialize};

/// Maximum number of keepers of one failed request, and maximum length of each of their names in characters.
const MOST: usize = 8;
const LONGEST: usize = 120;

fields! {
    /// A variable, attribute or cache that keeps tensors on GPUs. Its names are text of the program.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Keeper {
        /// `global`, `attribute`, `local`, `closure`, `default` (of an argument) or `cache` (of a function); `cycle` for objects
        /// that refer to each other, and to which no other object refers.
        kind: String;
        /// The variable, or the attribute with its class; of a cycle, a class or function in it.
        name: String;
        /// The function to which it belongs; empty for globals and attributes.
        function: String;
        /// The file, with the line that a local variable's function executed, or at which another function begins.
        place: String;
        /// Class of the object that has this name: `list`, `dict`, ...; empty for a cycle.
        class: String;
        /// Number of tensors that the object holds, directly or in further containers.
        tensors: u64;
        /// Bytes of their storages, each counted once.
        bytes: u64;
        /// Number of those tensors that have a graph of the backward pass, which keeps further tensors.
        with_graph: u64;
        /// Whether an exception keeps the tensors: they are local variables of the functions in its traceback.
        in_traceback: bool;
        /// Whether not all objects of the program were searched.
        is_partial: bool;
        /// Whether it is one tensor, to which `with_graph` tensors were added with their graphs.
        is_sum: bool;
    }
}

impl Keeper {
    /// Reads the lines of the record `Keepers` of the wire format. Skips lines that have another form.
    pub fn parse(lines: &str) -> Vec<Keeper> {
        lines.lines().take(MOST).filter_map(Keeper::parse_line).collect()
    }

    fn parse_line(line: &str) -> Option<Keeper> {
        let mut parts = line.split('\t');
        let mut part = || parts.next();
        let kind = part().filter(|kind| KINDS.contains(kind))?;
        let mut text = || part().map(|text| text.chars().take(LONGEST).collect::<String>());
        let (name, function, place, class) = (text()?, text()?, text()?, text()?);
        let mut number = || part()?.parse::<u64>().ok();
        let (tensors, bytes, with_graph) = (number()?, number()?, number()?);
        let flags = part().unwrap_or_default();
        let has = |flag| flags.split(',').any(|other| other == flag);
        Some(Keeper {
            kind: kind.to_owned(),
            name,
            function,
            place,
            class,
            tensors,
            bytes,
            with_graph,
            in_traceback: has("traceback"),
            is_partial: has("partial"),
            is_sum: has("sum"),
        })
    }

    /// Returns the name of the keeper with its class and place: `list losses of main (train.py:41)`. Its names are escaped.
    pub fn title(&self) -> String {
        let Keeper { name, function, place, class, .. } = self;
        let text = match self.kind.as_str() {
            "local" => format!("{class} {name} of {function}"),
            "closure" => format!("{class} {name} in the closure of {function}"),
            "default" => format!("{class} that is a default argument of {function}"),
            "cache" => format!("lru_cache of {function}"),
            CYCLE => format!("reference cycles of {name}"),
            _ => format!("{class} {name}"),
        };
        let place = if place.is_empty() { String::new() } else { format!(" ({place})") };
        escape(&(text + &place))
    }

    /// Returns whether reference cycles keep the tensors, which the garbage collector would free.
    pub fn is_cycle(&self) -> bool {
        self.kind == CYCLE
    }

    /// Returns the number of tensors, with the statement on their graphs: `1,120 tensors with graphs`.
    pub fn count(&self) -> String {
        let graphs = match self.with_graph {
            all if self.is_sum => return format!("the sum of {} with graphs", plural(all, "tensor")),
            0 => String::new(),
            all if all == self.tensors => " with graphs".to_owned(),
            some => format!(", {} with graphs", thousands(some)),
        };
        plural(self.tensors, "tensor") + &graphs
    }
}

/// Values of [`Keeper::kind`].
const KINDS: [&str; 7] = ["global", "attribute", "local", "closure", "default", "cache", CYCLE];
const CYCLE: &str = "cycle";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_keepers_with_titles() {
        let lines = "local\tlosses\tmain\ttrain.py:41\tlist\t1120\t4480\t1120\t\n\
            attribute\tReplayBuffer.items\t\t\tdeque\t80\t20971520\t40\tpartial\n\
            global\terrors\t\trun.py\tlist\t9\t1\t0\ttraceback,partial\n\
            cache\t\tmask\trun.py:3\t_lru_cache_wrapper\t9\t1\t0\t\n\
            local\ttotal\tmain\ta.py:7\tTensor\t1\t4\t18\tsum\ncycle\tJob\t\t\t\t52\t1\t0\t\nother\tx\t\t\tlist\t1\t1\t0\t\nglobal\tx\t\t\tlist\tmany\t1\t0\t\nglobal\tx";
        let keepers = Keeper::parse(lines);
        let titles: Vec<_> = keepers.iter().map(|keeper| (keeper.title(), keeper.count())).collect();
        let expected = [
            ("list losses of main (train.py:41)", "1,120 tensors with graphs"),
            ("deque ReplayBuffer.items", "80 tensors, 40 with graphs"),
            ("list errors (run.py)", "9 tensors"),
            ("lru_cache of mask (run.py:3)", "9 tensors"),
            ("Tensor total of main (a.py:7)", "the sum of 18 tensors with graphs"),
            ("reference cycles of Job", "52 tensors"),
        ];
        assert_eq!(titles, expected.map(|(title, count)| (title.to_owned(), count.to_owned())));
        let flags: Vec<_> = keepers.iter().map(|keeper| (keeper.in_traceback, keeper.is_partial)).collect();
        let none = (false, false);
        assert_eq!(flags, [none, (false, true), (true, true), none, none, none]);
    }

    #[test]
    fn names_are_bounded_and_escaped() {
        let long = format!("global\t{}\t\t\tlist\t4\t1\t0\t", "ä\u{1b}".repeat(1000));
        let keepers = Keeper::parse(&[long.as_str(); 100].join("\n"));
        assert_eq!(keepers.len(), MOST);
        let title = keepers[0].title();
        assert!(title.chars().count() < 9 * LONGEST && !title.contains('\u{1b}'), "{title}");
    }
}
