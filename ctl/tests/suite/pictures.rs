//! Pictures, traces, stacks and treemaps, from the command line.

use crate::common::Folder;
use std::fs;
use std::path::Path;
use std::process::Output;

fn log() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    path.to_string_lossy().into_owned()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn failure(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && output.stdout.is_empty() && !said.contains("panicked"), "{said}");
    said
}

#[test]
fn every_picture_in_every_format() {
    let folder = Folder::new("every-picture");
    let log = log();
    for plot in ["peak", "categories", "timeline", "compare"] {
        for (form, begins) in [("--svg", &b"<svg "[..]), ("--pdf", b"%PDF-1.4"), ("--png", b"\x89PNG\r\n")] {
            let output = folder.run(&["report", &log, form, "--plot", plot]);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert!(output.stdout.starts_with(begins), "{plot} {form}");
            let file = folder.text(&format!("{plot}{form}"));
            assert!(folder.run(&["report", &log, form, "--plot", plot, "-o", &file]).stdout.is_empty());
            assert_eq!(fs::read(&file).expect("a file"), output.stdout, "the same in a file");
        }
    }
    let twice = folder.run(&["report", &log, "--svg", "-o", &folder.text("peak--svg")]);
    assert!(failure(&twice).contains("--force"), "nothing is replaced unasked");
}

#[test]
fn titles_and_hidden_categories_are_in_the_picture() {
    let folder = Folder::new("picture-words");
    let svg =
        stdout(&folder.run(&["report", &log(), "--svg", "--title", "Batch <64>", "--hide-below", "5%"]));
    assert!(svg.contains(">Batch &lt;64&gt;</text>"));
    assert!(svg.contains("hidden)"), "a part of the sum");
    assert!(svg.contains("hidden (at most 5 % of the total): "), "and named below it");
    assert!(!stdout(&folder.run(&["report", &log(), "--svg"])).contains("hidden"));
}

#[test]
fn several_runs_are_told_in_turn_or_drawn_side_by_side() {
    let folder = Folder::new("several");
    let copy = folder.text("another.log");
    fs::copy(log(), &copy).expect("copied");
    let text = stdout(&folder.run(&["report", "--verbose", &log(), &copy]));
    assert_eq!(
        text.matches("Untrackable").count(),
        2 * stdout(&folder.run(&["report", "--verbose", &copy])).matches("Untrackable").count()
    );
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&folder.run(&["report", &log(), &copy, "--json"])))
            .expect("one document");
    assert_eq!(json.as_array().map(Vec::len), Some(2));
    let svg = stdout(&folder.run(&["report", &log(), &copy, &copy, "--svg"]));
    assert!(svg.contains(">small-train.log</text>") && svg.matches(">another.log</text>").count() == 2);
    assert!(
        failure(&folder.run(&["report", &log(), &copy, "--svg", "--plot", "timeline"]))
            .contains("--plot compare")
    );
    for form in ["--csv", "--html", "--treemap"] {
        assert!(failure(&folder.run(&["report", &log(), &copy, form])).contains("one run"));
    }
    assert!(failure(&folder.run(&["report", &log(), "no.log", "--svg"])).contains("no.log"));
}

#[test]
fn forms_for_other_tools() {
    let folder = Folder::new("other-tools");
    let trace: serde_json::Value =
        serde_json::from_str(&stdout(&folder.run(&["report", &log(), "--chrome-trace"]))).expect("JSON");
    assert!(trace["traceEvents"].as_array().is_some_and(|events| events.len() > 20));
    let by_structure = stdout(&folder.run(&["report", &log(), "--chrome-trace", "--by", "structure"]));
    assert!(by_structure.contains("GPU 0 by structure"));
    let stacks = stdout(&folder.run(&["report", &log(), "--collapsed"]));
    assert!(
        stacks
            .lines()
            .all(|line| line.rsplit_once(' ').is_some_and(|(_, bytes)| bytes.parse::<u64>().is_ok()))
    );
    let tree: serde_json::Value =
        serde_json::from_str(&stdout(&folder.run(&["report", &log(), "--treemap"]))).expect("JSON");
    assert_eq!(tree["children"][0]["name"], "GPU 0");
}

#[test]
fn what_does_not_go_together_is_refused() {
    let folder = Folder::new("picture-usage");
    let log = log();
    for args in [
        &["--svg", "--png"][..],
        &["--svg", "--json"],
        &["--svg", "--growth"],
        &["--plot", "timeline"],
        &["--title", "x"],
        &["--treemap", "--collapsed"],
        &["--svg", "--hide-below", "120"],
        &["--svg", "--plot", "pie"],
    ] {
        let output = folder.run(&[&["report", &log], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty());
    }
}
