//! Tests of the table of modules.

use super::*;
use crate::base::memfd::{Shared, Sizes};
use crate::naming::python::layout::{Layout, tests::BASE};
use crate::naming::python::text::Types;
use std::cell::Cell;
use std::collections::BTreeMap;

const KIND: u64 = BASE + 0x100;

pub(crate) fn names() -> Names {
    let sizes = Sizes { ring_slots: 2, live_rows: 64, name_bytes: 8 << 20 };
    Names::new(&Shared::create(c"modules-test", sizes, 1, 2).expect("memory")).expect("memory")
}

/// Memory in which each type has the given bases, and every module has the type that was set.
struct Bases(BTreeMap<u64, Vec<u64>>, Cell<u64>);

impl Memory for Bases {
    fn word(&self, from: Pointer, offset: u16) -> Option<u64> {
        if offset == layout::TYPE && (at(0)..at(1 << 20)).contains(&from.address()) {
            return Some(self.1.get());
        }
        let bases = self.0.get(&(from.address() & !0xfff))?;
        match (from.address() & 0xfff, offset) {
            (0, layout::BASES) => Some(from.address() + 0x800),
            (0x800, layout::LENGTH) => Some(bases.len() as u64),
            (0x800, at) => bases.get(usize::from(at - 24) / 8).copied(),
            _ => None,
        }
    }

    fn bytes(&self, _: Pointer, _: u16, _: &mut [u8]) -> bool {
        false
    }
}

struct Bench {
    modules: Modules,
    names: Names,
    bases: Bases,
    layout: Layout,
}

impl Bench {
    fn new() -> Self {
        let layout = Layout::all()[2];
        Bench {
            modules: Modules::new(),
            names: names(),
            bases: Bases(BTreeMap::new(), Cell::new(KIND)),
            layout,
        }
    }

    fn say(&self, object: u64, parent: u64, name: &str) {
        assert!(self.modules.register(object, KIND, parent, name.as_bytes()), "{object:x} {name}");
    }

    fn path(&self, object: u64) -> Option<String> {
        self.path_as(object, KIND)
    }

    fn path_as(&self, object: u64, kind: u64) -> Option<String> {
        let types = &Types { code: 0, text: 0, bytes: 0, cell: 0 };
        let reader = Reader { memory: &self.bases, layout: &self.layout, types };
        self.bases.1.set(kind);
        let tag = self.modules.tag(&self.names, &reader, Pointer::new(object)?)?;
        Some(String::from_utf8_lossy(self.names.path(tag).unwrap_or_default()).into_owned())
    }
}

fn at(number: u64) -> u64 {
    0x7f00_0000_0000 + number * 48
}

fn some(path: &str) -> Option<String> {
    Some(path.to_owned())
}

#[test]
fn paths_join_names_and_count_with_dots() {
    let bench = Bench::new();
    let tree =
        [(1, 0, "GPT"), (2, 1, "h"), (3, 2, "3"), (4, 3, "attn"), (5, 3, "0"), (6, 0, "7"), (7, 6, "")];
    for (object, parent, name) in tree {
        bench.say(at(object), if parent == 0 { 0 } else { at(parent) }, name);
    }
    let paths: Vec<_> = (1..=7).map(|object| bench.path(at(object)).unwrap_or_default()).collect();
    assert_eq!(paths, ["GPT", "GPT/h", "GPT/h.3", "GPT/h.3/attn", "GPT/h.3.0", "7", "7/?"]);
    assert_eq!(bench.path(at(8)), None);
    assert_eq!(bench.modules.unknown.load(Relaxed), 1);
    assert!(!bench.modules.register(12, KIND, 0, b"no address"));
}

#[test]
fn long_paths_end_where_tags_do() {
    let bench = Bench::new();
    for object in 0..100 {
        bench.say(at(object), if object == 0 { 0 } else { at(object - 1) }, &"name".repeat(20));
    }
    let path = bench.path(at(99)).expect("a path");
    assert_eq!(path.len(), MAX_TAG_BYTES);
    for object in 200..300 {
        bench.say(at(object), if object == 200 { 0 } else { at(object - 1) }, "12345678");
    }
    assert_eq!(bench.path(at(299)).map(|path| path.len()), Some(MAX_TAG_BYTES));
    bench.say(at(0), at(99), "turned");
    assert!(bench.path(at(99)).is_some(), "a cycle ends");
}

#[test]
fn what_is_said_again_counts_for_everything_below() {
    let bench = Bench::new();
    bench.say(at(3), at(2), "c");
    assert_eq!(bench.path(at(3)), some("c"));
    bench.say(at(2), at(1), "b");
    assert_eq!(bench.path(at(3)), some("b/c"));
    bench.say(at(1), 0, "A");
    assert_eq!(bench.path(at(3)), some("A/b/c"));
    let epoch = bench.modules.epoch.load(Relaxed);
    bench.say(at(2), at(1), "b");
    assert_ne!(bench.path(at(2)), None);
    bench.say(at(9), at(1), "more");
    bench.say(at(2), at(1), "b");
    assert_eq!(bench.modules.epoch.load(Relaxed), epoch + 1, "once, for the parent's number");
    bench.say(at(1), at(5), "module");
    bench.say(at(5), 0, "DDP");
    assert_eq!(bench.path(at(3)), some("DDP/module/b/c"));
    // Shared by two parents: the last registration counts.
    bench.say(at(3), at(9), "tied");
    assert_eq!(bench.path(at(3)), some("DDP/module/more/tied"));
}

#[test]
fn who_loses_its_parent_keeps_the_path_that_was_settled() {
    for is_settled in [true, false] {
        let bench = Bench::new();
        for (object, parent, name) in [(1, 0, "Net"), (2, 1, "1"), (3, 2, "fc"), (4, 2, "never called")] {
            bench.say(at(object), if parent == 0 { 0 } else { at(parent) }, name);
        }
        assert_eq!(bench.path(at(3)), some("Net.1/fc"));
        bench.say(at(2), at(1), "0");
        if is_settled {
            bench.modules.settle(&bench.names);
        }
        bench.modules.gone(at(2));
        bench.say(at(1), 0, "Other");
        assert_eq!(bench.path(at(3)), some(if is_settled { "Net.0/fc" } else { "Net.1/fc" }));
        assert_eq!(bench.names.known(0, b"Net.0/never called"), None);
    }
}

#[test]
fn an_address_that_comes_again_is_another_module() {
    let bench = Bench::new();
    bench.say(at(1), 0, "Old");
    bench.say(at(2), at(1), "child");
    assert_eq!(bench.path(at(2)), some("Old/child"));
    bench.modules.gone(at(1));
    assert_eq!(bench.path(at(1)), None);
    bench.say(at(1), 0, "New");
    bench.say(at(4), at(1), "other");
    assert_eq!(bench.path(at(2)), some("Old/child"), "it keeps the name that it had");
    assert_eq!(bench.path(at(4)), some("New/other"));
    // The old module was not reported as gone; the type shows that this is another object.
    assert_eq!(bench.path_as(at(1), 0x7e00_1234_0000), None);
    assert_eq!(bench.path(at(1)), some("New"));
}

#[test]
fn what_a_compiler_made_names_nothing_but_for_itself() {
    let bench = Bench::new();
    let own = |object| {
        let tag = bench.modules.generated(&bench.names, object)?;
        Some(String::from_utf8_lossy(bench.names.path(tag).unwrap_or_default()).into_owned())
    };
    bench.say(at(1), at(1), "GraphModule");
    bench.say(at(2), at(1), "conv");
    let epoch = bench.modules.epoch.load(Relaxed);
    bench.say(at(1), at(1), "GraphModule");
    assert_eq!(bench.modules.epoch.load(Relaxed), epoch, "nothing new");
    assert_eq!((bench.path(at(1)), own(at(1))), (None, some("GraphModule")));
    assert_eq!(bench.path(at(2)), some("GraphModule/conv"), "its parts have names");
    assert_eq!(own(at(2)), None);
    assert_eq!(bench.modules.unknown.load(Relaxed), 0, "it is known");
    bench.say(at(3), 0, "Net");
    bench.say(at(1), at(3), "traced");
    assert_eq!((bench.path(at(1)), own(at(1))), (some("Net/traced"), None), "a part of somebody's");
    assert_eq!(bench.path(at(2)), some("Net/traced/conv"));
}

#[test]
fn a_class_derived_from_the_one_that_was_said_is_the_same_module() {
    let mut bench = Bench::new();
    let (sharded, stranger) = (0x7e00_2000_0000, 0x7e00_3000_0000);
    bench.bases.0.insert(sharded, vec![sharded, 0x10, KIND, 0x20]);
    bench.bases.0.insert(stranger, vec![stranger, 0x10, 0x20]);
    bench.say(at(1), 0, "M");
    assert_eq!(bench.path_as(at(1), sharded), some("M"));
    assert_eq!(bench.path_as(at(1), stranger), None);
    bench.bases.0.clear();
    assert_eq!(bench.path_as(at(1), sharded), some("M"), "remembered");
    assert_eq!(bench.path(at(1)), some("M"));
}

#[test]
fn it_grows_to_its_capacity_and_says_what_it_refused() {
    let bench = Bench::new();
    let mut said = Vec::new();
    for object in 0..MAX_MODULES as u64 + 500 {
        if bench.modules.register(at(object), KIND, 0, b"m") {
            said.push(object);
        }
    }
    assert_eq!(said.len(), bench.modules.live.load(Relaxed));
    assert!(said.len() > MAX_MODULES * 99 / 100, "{}", said.len());
    assert!(said.iter().all(|&object| bench.path(at(object)) == some("m")));
    said.iter().for_each(|&object| bench.modules.gone(at(object)));
    assert_eq!(bench.modules.live.load(Relaxed), 0);
}

/// After many additions and removals, live modules are found, removed ones are not, and lookups stay short.
#[test]
fn it_lasts() {
    let bench = Bench::new();
    let mut random = 1;
    let mut here: BTreeMap<u64, String> = BTreeMap::new();
    for turn in 0..60_000_u64 {
        random = crate::base::row::mix(random, turn);
        let object = at(random % 5000);
        if here.remove(&object).is_some() {
            bench.modules.gone(object);
        } else {
            let name = format!("n{}", random % 97);
            bench.say(object, 0, &name);
            here.insert(object, name);
        }
        let other = at(random / 5000 % 5000);
        assert_eq!(bench.path(other), here.get(&other).cloned(), "turn {turn}");
    }
    assert_eq!(bench.modules.live.load(Relaxed), here.len());
    assert!(bench.modules.text_used.load(Relaxed) < 1 << 20, "names are kept once, more or less");
}

#[test]
fn readers_go_on_while_it_changes() {
    let bench = Bench::new();
    bench.say(at(0), 0, "Root");
    for child in 1..100 {
        bench.say(at(child), at(0), &format!("c{child}"));
    }
    let stop = std::sync::atomic::AtomicBool::new(false);
    struct Shared<'a>(&'a Bench);
    // SAFETY: only these threads share it; the table allows concurrent readers, and the rest is not written.
    unsafe impl Sync for Shared<'_> {}
    let shared = Shared(&bench);
    std::thread::scope(|scope| {
        let (shared, stop) = (&shared, &stop);
        let reader = move || {
            let mut read = 0_u64;
            while !stop.load(Relaxed) || read < 1000 {
                let child = 1 + read % 99;
                let path = shared.0.path(at(child));
                assert_eq!(path, Some(format!("Root/c{child}")));
                read += 1;
            }
        };
        let readers = [scope.spawn(reader), scope.spawn(reader)];
        for turn in 0..4000 {
            shared.0.say(at(1000 + turn), at(turn % 100), "temporary");
            if turn % 3 != 0 {
                shared.0.modules.gone(at(1000 + turn));
            }
        }
        stop.store(true, Relaxed);
        readers.into_iter().for_each(|reader| reader.join().expect("no panic"));
    });
}

/// Roots have numbers, and numbers recur: a repeated name must not take room again.
#[test]
fn names_that_are_said_again_take_no_more_room() {
    let bench = Bench::new();
    for round in 0..20 {
        for number in 0..10_000 {
            bench.say(at(1), 0, &format!("Block#{number}"));
        }
        bench.say(at(1), 0, &format!("last{}", round % 2));
    }
    let used = bench.modules.text_used.load(Relaxed);
    assert!(used < 200_000, "{used} bytes for 10,000 names");
    assert_eq!(bench.path(at(1)).as_deref(), Some("last1"));
}

#[test]
fn without_room_for_names_a_module_has_that_of_the_nearest_one_outside() {
    let bench = Bench::new();
    bench.say(at(1), 0, "Net");
    bench.say(at(2), at(1), "layer");
    assert_eq!(bench.path(at(1)).as_deref(), Some("Net"));
    let fills = |number: &u32| bench.names.intern(0, format!("{number}{}", "x".repeat(200)).as_bytes()) == 0;
    (0..100_000).find(fills).expect("a full table");
    while bench.names.intern(0, format!("{}", bench.names.end()).as_bytes()) != 0 {}
    assert_eq!(bench.path(at(2)).as_deref(), Some("Net"));
}
