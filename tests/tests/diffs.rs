//! Comparisons as people and programs get them, letter by letter, and those of real recordings to the byte.
#![allow(missing_docs)]

use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_runs::diff::gate::{Of, judge};
use gpumem_runs::diff::text::{Layout, text};
use gpumem_runs::diff::{At, Diff, Side, csv, json, plot};
use gpumem_runs::import::read_file;
use gpumem_runs::report::{By, Part};
use gpumem_runs::run::{Cell, Run, Source};
use gpumem_tests::samples::sample;
use gpumem_tests::{golden, node};
use std::path::Path;

const MIB: i64 = 1 << 20;

fn small_train() -> Run {
    let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/small-train.log");
    read_file(&log, None).expect("a log").remove(0)
}

/// The same training with a larger vocabulary, another layer and less of what nothing tracks.
fn larger() -> Run {
    let mut run = small_train();
    let added = run.cells.len() as u32;
    run.cells.push(Cell { tag: Some("forward_features/residual_add".into()), ..Cell::default() });
    let logits: Vec<u32> = run
        .cells
        .iter()
        .zip(0..)
        .filter(|(cell, _)| cell.tag.as_deref().is_some_and(|tag| tag.contains("logits")))
        .map(|(_, index)| index)
        .collect();
    let device = &mut run.devices[0];
    for moment in [&mut device.last, &mut device.peak] {
        for (cell, bytes) in &mut moment.amounts {
            *bytes += if logits.contains(cell) { *bytes / 2 } else { 0 };
        }
        moment.amounts.push((added, 24 * MIB));
        moment.tracked_bytes = Some(moment.amounts.iter().map(|(_, bytes)| bytes).sum());
        moment.untrackable_bytes = moment.untrackable_bytes.map(|gap| gap - 10 * MIB);
        moment.parts = moment.parts.map(|mut parts| {
            parts.unexplained_bytes -= 10 * MIB;
            parts
        });
    }
    run
}

fn side<'r>(run: &'r Run, typed: &str) -> Side<'r> {
    Side { run, id: Some(typed.to_owned()).filter(|typed| typed.starts_with('r')), typed: typed.to_owned() }
}

fn diff<'r>(a: &'r Run, b: &'r Run, at: At, by: Option<By>) -> Diff<'r> {
    Diff::new([side(a, "r7"), side(b, "r9")], at, None, by)
}

#[test]
fn two_trainings_in_every_form() {
    let (a, b) = (small_train(), larger());
    let peak = diff(&a, &b, At::Peak, None);
    let told = text(&peak, Layout::default());
    assert!(told.lines().count() <= 35, "{told}");
    golden::check("diffs/small-train.txt", &told);
    golden::check("diffs/small-train.tags.txt", &text(&peak, Layout { tags: true, ..Layout::default() }));
    let verdict = judge(&peak, &Of::Peak, "2%".parse().expect("a limit"));
    golden::check("diffs/small-train.json", &json::json(&peak, Some(&verdict)));
    golden::check("diffs/small-train.csv", &csv::csv(&peak));
    let drawing = plot::picture(&peak).expect("bytes");
    assert!(drawing.svg().contains("peak is 68.7 MiB higher") && drawing.pdf().starts_with(b"%PDF"));
}

#[test]
fn a_process_with_an_agent_and_one_without() {
    let mut builder = RunBuilder::new(Source { kind: "daemon".into(), origin: "node7".into(), preset: None });
    node::said().iter().for_each(|(origin, record)| builder.observe(*origin, record));
    let runs = builder.runs(true);
    let both = diff(&runs[0], &runs[1], At::Now, None);
    golden::check("diffs/node.txt", &text(&both, Layout::default()));
    golden::check("diffs/node.csv", &csv::csv(&both));
}

#[test]
fn the_bert_pair_differs_by_what_was_recorded_of_parameters_and_gradients() {
    const LATE: &str = "mxnet2-csv/finetune_classifier-pid_17827.673cf9f.csv";
    const WHOLE: &str = "mxnet2-csv/finetune_classifier.csv";
    let (Some(late), Some(whole)) = (sample(LATE), sample(WHOLE)) else { return };
    let read = |path: &Path| read_file(path, None).expect("a profile").remove(0);
    let (a, b) = (read(&late), read(&whole));
    let diff = Diff::new([side(&a, LATE), side(&b, WHOLE)], At::Peak, None, None);
    let pair = diff.whole().expect("a device");

    // To the byte: the rows of the files, by the kind of storage in their names.
    let bytes_of = |kind: &str| {
        let tags = &pair.table(By::Tag).statement.rows;
        let of_kind = tags.iter().filter(|row| row.part == Part::Category && row.name.contains(kind));
        of_kind.filter_map(|row| Some(row.bytes[1]? - row.bytes[0]?)).sum::<i64>()
    };
    let (weights, gradients) = (bytes_of("in_arg"), bytes_of("arg_grad"));
    assert_eq!((weights + gradients) / MIB, 1056, "{weights} + {gradients}");
    let structures = pair.table(By::Structure);
    let named = |name: &str| {
        let row = structures.statement.rows.iter().find(|row| row.name == name).expect(name);
        row.bytes[1].expect("known") - row.bytes[0].expect("known")
    };
    // Data that goes in has such names too, and is no weight.
    assert_eq!((named("Weights") + named("Weight Gradients")) / MIB, 1056);
    let tags = pair.table(By::Tag);
    let is_of = |name: &str| name.contains("in_arg") || name.contains("arg_grad");
    let rows = tags.statement.rows.iter().zip(&tags.only).filter(|(row, _)| is_of(&row.name));
    let only: i64 = rows.filter(|(_, only)| **only == Some(1)).filter_map(|(row, _)| row.bytes[1]).sum();
    assert_eq!(only / MIB, 1056, "recorded in one, not in the other");

    let told = text(&diff, Layout::default());
    assert!(told.lines().count() <= 35, "{told}");
    let sentence = told.lines().find(|line| line.starts_with("B's peak")).expect("a sentence");
    assert!(sentence.starts_with("B's peak is 92.0 MiB higher (used, +1.2 %): "), "{sentence}");
    for cause in ["Weights +528.1", "Weight Gradients +528.1", "Untrackable -1,055.7"] {
        assert!(sentence.contains(cause), "{sentence}");
    }
    assert!(told.contains("1,055.7 MiB may be a matter of recording, not of use"), "{told}");
}
