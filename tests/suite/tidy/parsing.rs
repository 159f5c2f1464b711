//! gpumem_tests::structure on small crates whose figures are known.

use gpumem_tests::structure::graph::Graph;
use gpumem_tests::structure::layers::{Layer, Layers};
use gpumem_tests::structure::source::Sources;

/// Makes a crate from these files.
fn sources(files: &[(&str, &str)]) -> Sources {
    let texts = files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned()));
    Sources::parse("sample", texts.collect())
}

fn imports(files: &[(&str, &str)]) -> Vec<String> {
    let graph = Graph::new(&sources(files), None);
    graph.imports().map(|(from, to)| format!("{from} -> {to}")).collect()
}

#[test]
fn test_items_do_not_count_as_production_lines() {
    let text = r##"//! A crate.
mod kept;
/// Of tests.
#[cfg(test)]
mod of_tests;

#[cfg(target_os = "linux")]
fn stays() {
    let quoted = "#[cfg(test)] {";
    #[cfg(test)]
    let counted = 1;
    let _ = quoted;
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    fn helper() {}
}

#[cfg(not(test))]
fn stays_too() {}
"##;
    let files = [
        ("lib.rs", text),
        ("kept.rs", "struct A;\nimpl A {\n    #[cfg(test)]\n    fn b() {}\n}\n"),
        ("of_tests.rs", "mod deeper;\n"),
        ("of_tests/deeper.rs", "fn a() {}\n"),
    ];
    let sources = sources(&files);
    let lines: Vec<(&str, usize)> =
        sources.files.iter().map(|file| (file.path.as_str(), file.lines)).collect();
    // Of 21 lines three declare the module of tests, two are the statement and four the inner module.
    assert_eq!(lines, [("kept.rs", 3), ("lib.rs", 12)]);
    assert_eq!(sources.lines(), 15);
}

#[test]
#[should_panic(expected = "src/lost.rs: no module declares it")]
fn undeclared_file_is_an_error() {
    sources(&[("lib.rs", "fn a() {}\n"), ("lost.rs", "fn b() {}\n")]);
}

#[test]
fn imports_come_from_uses_paths_and_macros() {
    let used = |text| imports(&[("lib.rs", "mod a;\nmod b;\n"), ("a.rs", text), ("b.rs", "pub fn f() {}\n")]);
    let edge = ["a.rs -> b.rs"];
    assert_eq!(used("use crate::b::f;\n"), edge);
    assert_eq!(used("use super::b::{f as g};\n"), edge);
    assert_eq!(used("use crate::b::*;\n"), edge);
    assert_eq!(used("fn g() { crate::b::f() }\n"), edge);
    assert_eq!(used("use crate::b;\nfn g() { b::f() }\n"), edge);
    assert_eq!(used("fn g() { use crate::b as c; c::f() }\n"), edge);
    assert_eq!(used("fn g() { println!(\"{:?}\", (1, crate::b::f())) }\n"), edge);
    assert_eq!(used("macro_rules! g { () => { $crate::b::f() } }\n"), edge);
    assert_eq!(used("mod inner { fn g() { super::super::b::f() } }\n"), edge);
    // A bare module, other crates, text and tests.
    assert!(used("use crate::b;\n").is_empty());
    assert!(used("use std::fmt;\nfn g() -> fmt::Result { b::f() }\n").is_empty());
    assert!(used("//! crate::b::f\nconst A: &str = \"crate::b::f\";\n").is_empty());
    assert!(used("#[cfg(test)]\nmod tests { use crate::b::f; }\n").is_empty());
}

#[test]
fn re_exports_lead_to_the_definition() {
    let root = "mod a;\nmod b;\npub use b::Thing;\nfn of_root() {}\n";
    let files = |a| {
        imports(&[
            ("lib.rs", root),
            ("a.rs", a),
            ("b/mod.rs", "mod c;\npub use c::Thing;\npub use self::c::*;\npub struct Here;\n"),
            ("b/c.rs", "pub enum Thing { One }\npub struct Other;\n"),
        ])
    };
    let of_b = ["b/mod.rs -> b/c.rs"];
    assert_eq!(files("use crate::Thing;\n"), [&["a.rs -> b/c.rs"][..], &of_b].concat());
    assert_eq!(files("use crate::b::Thing::One;\n"), [&["a.rs -> b/c.rs"][..], &of_b].concat());
    assert_eq!(files("use crate::b::Other;\n"), [&["a.rs -> b/c.rs"][..], &of_b].concat());
    assert_eq!(files("use crate::b::Here;\n"), [&["a.rs -> b/mod.rs"][..], &of_b].concat());
    assert_eq!(files("use crate::of_root;\n"), of_b);
}

#[test]
fn cycles_are_found_with_their_files() {
    let name = |other: &str| format!("use crate::{other}::X;\npub struct X;\n");
    let graph = Graph::new(
        &sources(&[
            ("lib.rs", "mod a;\nmod b;\nmod c;\nmod d;\n"),
            ("a.rs", &name("b")),
            ("b.rs", &name("c")),
            ("c.rs", &name("a")),
            ("d.rs", &name("a")),
        ]),
        None,
    );
    assert_eq!(graph.cycles(), [["a.rs", "b.rs", "c.rs"]]);
    assert_eq!(graph.largest_cycle(), 3);
}

#[test]
fn calls_of_a_spread_type_are_imports() {
    let sources = sources(&[
        ("lib.rs", "mod core;\nmod one;\nmod two;\n"),
        ("core.rs", "pub struct Core;\nimpl Core { pub fn start(&self) { self.finish() } }\n"),
        ("one.rs", "use crate::core::Core;\nimpl Core { pub fn finish(&self) {} }\n"),
        (
            "two.rs",
            "fn f(core: &u8, other: &u8) { core.start(); other.len() }\nstruct X;\nimpl X { fn len() {} }\n",
        ),
    ]);
    let edges = |spread| Graph::new(&sources, spread).imports().map(|(a, b)| format!("{a} -> {b}")).collect();
    let without: Vec<String> = edges(None);
    let with: Vec<String> = edges(Some("Core"));
    assert_eq!(without, ["one.rs -> core.rs"]);
    assert_eq!(with, ["core.rs -> one.rs", "one.rs -> core.rs", "two.rs -> core.rs"]);
}

#[test]
fn imports_against_layers_are_upward_or_sideways() {
    const LOW: Layer = Layer { name: "low", files: &["low.rs", "left/moved.rs"] };
    const LEFT: Layer = Layer { name: "left", files: &["left/"] };
    const RIGHT: Layer = Layer { name: "right", files: &["right.rs"] };
    let layers = Layers { krate: "sample", ranks: &[&[LOW], &[LEFT, RIGHT]], spread: None };
    let sources = sources(&[
        ("lib.rs", "mod left;\nmod low;\nmod right;\n"),
        ("low.rs", "use crate::right::R;\npub struct L;\n"),
        ("left/mod.rs", "mod moved;\nuse crate::low::L;\nuse crate::right::R;\npub struct M;\n"),
        ("left/moved.rs", "use super::M;\n"),
        ("right.rs", "use crate::low::L;\npub struct R;\n"),
    ]);
    let found = layers.violations(&Graph::new(&sources, None));
    let expected = [
        "left left/mod.rs -> right right.rs",
        "low left/moved.rs -> left left/mod.rs",
        "low low.rs -> right right.rs",
    ];
    assert_eq!(found, expected);
    assert_eq!(layers.layer_of("other.rs"), None);
}

#[test]
fn long_functions_small_files_and_public_items() {
    let body = "    let _ = 1;\n".repeat(100);
    let sources = sources(&[
        ("lib.rs", &format!("pub mod a;\npub mod b;\nfn long() {{\n{body}}}\nfn short() {{}}\n")),
        ("a.rs", "pub struct A;\nimpl A {\n    pub fn b() {}\n    pub(crate) fn c() {}\n}\n"),
        ("b/mod.rs", "pub(super) fn d() -> u8 { 1 }\n"),
    ]);
    let long: Vec<(String, usize)> =
        sources.functions_above(100).into_iter().map(|function| (function.name, function.lines)).collect();
    assert_eq!(long, [("long".to_owned(), 102)]);
    assert_eq!(sources.files_below(60), ["a.rs"]);
    let names: Vec<String> = sources.public_items().into_iter().map(|(_, name)| name).collect();
    assert_eq!(names, ["A", "b", "a", "b"]);
}
