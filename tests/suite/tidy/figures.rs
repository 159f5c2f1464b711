//! Limits of the figures that `make figures` prints. Each limit is the code's present figure. A figure above its limit fails
//! the test; one below it requires a lower limit, so that limits only fall.

use gpumem_tests::structure::figures::{Figures, LONG_FUNCTION, SMALL_FILE};
use gpumem_tests::structure::graph::Graph;
use gpumem_tests::structure::source::Sources;
use gpumem_tests::structure::{product_crates, root};

/// The limits of a crate. A crate that is not in the table has no cycle, no import against its layers and no small file.
struct Limits {
    krate: &'static str,
    /// Files in the largest import cycle; 1 is none. The goal is 6 or fewer in each crate.
    largest_cycle: usize,
    /// Imports against the layers of gpumem_tests::structure::layers. The goal is 0.
    against_layers: usize,
    /// Files with fewer than 60 lines that are not `mod.rs`. The goal is 15 in all crates together.
    small_files: usize,
}

const LIMITS: [Limits; 11] = [
    Limits { krate: "wire", largest_cycle: 2, against_layers: 0, small_files: 0 },
    Limits { krate: "model", largest_cycle: 1, against_layers: 0, small_files: 0 },
    Limits { krate: "cupti-sys", largest_cycle: 1, against_layers: 0, small_files: 1 },
    Limits { krate: "agent-lib", largest_cycle: 6, against_layers: 0, small_files: 3 },
    Limits { krate: "ledger", largest_cycle: 2, against_layers: 0, small_files: 0 },
    Limits { krate: "runs", largest_cycle: 1, against_layers: 0, small_files: 0 },
    Limits { krate: "report", largest_cycle: 3, against_layers: 0, small_files: 0 },
    Limits { krate: "import", largest_cycle: 1, against_layers: 0, small_files: 0 },
    Limits { krate: "replay", largest_cycle: 1, against_layers: 0, small_files: 0 },
    Limits { krate: "daemon", largest_cycle: 4, against_layers: 0, small_files: 3 },
    Limits { krate: "ctl", largest_cycle: 5, against_layers: 0, small_files: 1 },
];

/// Functions above 100 lines that stay, with the reason. Each is a dispatch over the kinds of something.
const LONG_FUNCTIONS: [(&str, &str, &str); 0] = [];

fn all() -> Vec<Figures> {
    product_crates().iter().map(|krate| Figures::of(krate)).collect()
}

/// Compares a figure with its limit.
fn check(what: &str, krate: &str, figure: usize, limit: usize, found: &[String]) {
    let list = || found.iter().map(|line| format!("\n  {line}")).collect::<String>();
    assert!(figure <= limit, "{krate}: {what}: {figure}, and {limit} are allowed:{}", list());
    assert!(figure == limit, "{krate}: {what}: {figure} now: lower the limit, which is {limit}");
}

#[test]
fn import_cycles_do_not_grow() {
    for figures in all() {
        let limit = LIMITS.iter().find(|limits| limits.krate == figures.krate);
        let limit = limit.map_or(1, |limits| limits.largest_cycle);
        let found = figures.cycles.first().map_or(&[][..], Vec::as_slice);
        check("files in the largest import cycle", &figures.krate, figures.largest_cycle(), limit, found);
    }
}

#[test]
fn imports_against_the_layers_do_not_grow() {
    for figures in all() {
        assert!(
            figures.without_layer.is_empty(),
            "{}: files of no layer: {:?}",
            figures.krate,
            figures.without_layer
        );
        let limit = LIMITS.iter().find(|limits| limits.krate == figures.krate);
        let limit = limit.map_or(0, |limits| limits.against_layers);
        let found = figures.against_layers.as_deref().unwrap_or_default();
        check("imports against the layers", &figures.krate, found.len(), limit, found);
    }
}

#[test]
fn small_files_do_not_grow() {
    for figures in all() {
        let limit = LIMITS.iter().find(|limits| limits.krate == figures.krate);
        let limit = limit.map_or(0, |limits| limits.small_files);
        let what = format!("files below {SMALL_FILE} lines");
        check(&what, &figures.krate, figures.small_files.len(), limit, &figures.small_files);
    }
}

#[test]
fn long_functions_have_a_reason() {
    let mut found: Vec<(String, String)> = Vec::new();
    for figures in all() {
        for (function, lines) in figures.long_functions {
            let is_listed =
                LONG_FUNCTIONS.iter().any(|(krate, name, _)| (*krate, *name) == (&figures.krate, &function));
            assert!(is_listed, "{}: {function} has {lines} lines, more than {LONG_FUNCTION}", figures.krate);
            found.push((figures.krate.clone(), function));
        }
    }
    for (krate, name, _) in LONG_FUNCTIONS {
        let is_there =
            found.iter().any(|(found, function)| (found.as_str(), function.as_str()) == (krate, name));
        assert!(is_there, "{krate}: {name} is short now: remove it from the list");
    }
}

/// Clippy finds each panic of the agent by its type; this test keeps the lints enabled. A text search would confuse methods
/// of the same name.
#[test]
fn the_agent_denies_panics() {
    let text = std::fs::read_to_string(root().join("agent-lib/src/lib.rs")).expect("lib.rs");
    let lints = "#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]";
    assert!(text.contains(lints), "the agent is a guest and must not panic: {lints}");
    for (path, text) in super::sources("agent-lib") {
        let production = text.split("#[cfg(test)]").next().expect("a first part");
        // base/fault_injection.rs panics on purpose, in builds that are not releases.
        for lint in ["clippy::unwrap_used", "clippy::expect_used"] {
            let is_allowed = production.contains(&format!("allow({lint}"));
            assert!(!is_allowed, "{} allows {lint}", path.display());
        }
    }
}

/// Only `app.rs` connects sources and views: neither uses the other, and layers in between use neither.
#[test]
fn only_app_uses_sources_and_views() {
    let sources = Sources::read("daemon");
    let graph = Graph::new(&sources, None);
    let side = |file: &str| ["source/", "view/"].into_iter().find(|side| file.starts_with(side));
    let between: Vec<(&str, &str)> = graph
        .imports()
        .filter(|(from, to)| *from != "app.rs" && side(to).is_some_and(|to| side(from) != Some(to)))
        .collect();
    assert!(between.is_empty(), "imports of sources and views: {between:?}");
}
