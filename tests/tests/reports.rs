//! Reports as people and programs get them, letter by letter.
#![allow(missing_docs)]

use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_runs::import::read_file;
use gpumem_runs::report::text::{Layout, text};
use gpumem_runs::report::{By, Report, csv, json};
use gpumem_runs::rules::Groupings;
use gpumem_runs::run::{Run, Source};
use gpumem_tests::{golden, node};
use std::path::Path;

fn report<'r>(run: &'r Run, by: Option<By>) -> Report<'r> {
    let rules = run.source.preset.as_deref().unwrap_or("default");
    let mut report = Report::new(run, Groupings::load(rules).expect("preset"), by);
    if run.source.kind == "tbd-log" {
        report.command = "gpumemctl report tests/data/small-train.log".into();
    }
    report
}

fn small_train() -> Run {
    let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/small-train.log");
    read_file(&log, None).expect("a log").remove(0)
}

fn node_runs() -> Vec<Run> {
    let source = Source { kind: "daemon".into(), origin: "node7".into(), preset: None };
    let mut builder = RunBuilder::new(source);
    node::said().iter().for_each(|(origin, record)| builder.observe(*origin, record));
    builder.runs(true)
}

#[test]
fn an_imported_log_in_every_grouping() {
    let run = small_train();
    for (name, by) in [("layer", By::Layer), ("structure", By::Structure), ("tag", By::Tag)] {
        let text = text(&report(&run, Some(by)), Layout::default());
        assert!(text.lines().count() <= 35, "{text}");
        golden::check(&format!("reports/small-train.{name}.txt"), &text);
    }
}

#[test]
fn a_node_with_a_covered_and_an_uncovered_process() {
    let runs = node_runs();
    golden::check("reports/node.covered.txt", &text(&report(&runs[0], None), Layout::default()));
    golden::check("reports/node.uncovered.txt", &text(&report(&runs[1], None), Layout::default()));
    golden::check("reports/node.covered.json", &json::json(&report(&runs[0], None)));
    golden::check("reports/node.covered.csv", &csv::csv(&report(&runs[0], None)));
    golden::check("reports/node.uncovered.csv", &csv::csv(&report(&runs[1], None)));
}

#[test]
fn a_terminal_cuts_no_number() {
    let run = small_train();
    for width in [50, 60, 80, 120] {
        let text = text(&report(&run, Some(By::Tag)), Layout { width: Some(width), ..Layout::default() });
        let longest = text.lines().map(|line| line.chars().count()).max().expect("lines");
        assert!(longest <= width, "{longest} columns in a terminal of {width}\n{text}");
        let table =
            text.lines().skip_while(|line| !line.starts_with("used")).take_while(|line| !line.is_empty());
        for line in table {
            let words: Vec<&str> = line.trim_end_matches("at least").split_whitespace().collect();
            let numbers = words.iter().rev().take(2).filter(|word| word.parse::<f64>().is_ok()).count();
            assert_eq!(numbers, 2, "{line}");
        }
    }
}

#[test]
fn every_documented_field_is_there_and_every_field_is_documented() {
    let documented = include_str!("../../docs/report-json.md");
    let report: serde_json::Value =
        serde_json::from_str(&json::json(&report(&node_runs()[0], None))).expect("JSON");
    let mut names = Vec::new();
    keys(&report, &mut names);
    for name in names {
        let word = |character: char| !(character.is_alphanumeric() || character == '_');
        assert!(
            documented.split(word).any(|word| word == name),
            "docs/report-json.md does not speak of {name}"
        );
    }
}

fn keys(value: &serde_json::Value, names: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                // Facts and claims have keys of the machine's own.
                if name != "facts" && name != "claims" {
                    keys(value, names);
                }
                names.push(name.clone());
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(|value| keys(value, names)),
        _ => {}
    }
}
