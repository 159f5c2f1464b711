use super::*;
use crate::GroupBy;
use gpumem_import::read_file;
use gpumem_model::gap::Cause;
use gpumem_model::names::{Named, phases_of_blocks};
use gpumem_model::run::{self, Run};
use gpumem_wire::Role;
use std::collections::BTreeMap;
use std::path::Path;

fn run() -> Run {
    let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    read_file(&log, None).expect("a log").remove(0)
}

fn report(run: &Run) -> Report<'_> {
    Report::new(run, Groupings::of_run(run), None)
}

#[test]
fn no_word_means_two_things() {
    let mut seen: BTreeMap<String, &str> = BTreeMap::new();
    let mut twice = Vec::new();
    for entry in words() {
        let first = entry.names[0].as_str();
        for name in &entry.names {
            if seen.insert(plain(name), first).is_some_and(|other| other != first) {
                twice.push(name);
            }
        }
    }
    assert!(twice.is_empty(), "explained twice: {twice:?}");
}

#[test]
fn conclusions_and_moments_of_the_first_screen_differ() {
    let words =
        ["finding", "free to save", "at the peak", "at the end", "when memory ran out", "at that time"];
    let texts: BTreeSet<&str> = words.map(|word| find(word).expect("known").means.as_str()).into();
    assert_eq!(texts.len(), words.len(), "{texts:#?}");
}

#[test]
fn words_name_numbers_that_are_there() {
    let file: File = toml::from_str(include_str!("words.toml")).expect("the file of words");
    assert!(file.subject.iter().map(|subject| subject.word.len()).sum::<usize>() > 100);
    let mut used = Vec::new();
    for entry in words().filter(|entry| !entry.here.is_empty()) {
        let (name, argument) = entry.here.split_once(' ').unwrap_or((&entry.here, ""));
        used.push(name);
        let is_fine = match name {
            "row" => numbers::row(argument).is_some(),
            "role" => Role::from_name(argument).is_some(),
            "phase" => phases_of_blocks().any(|phase| phase == argument),
            "part" => run::UntrackableParts::default().each().iter().any(|(part, ..)| *part == argument),
            "cells" => ["block", "direct", "inherited", "pending", "torch"].contains(&argument),
            "ooms" => ["confirmed", "pressure", "suspected"].contains(&argument),
            "category" | "layer" | "steps" => !argument.is_empty(),
            _ => argument.is_empty() && numbers::NUMBERS.iter().any(|(number, _)| *number == name),
        };
        assert!(is_fine, "{}: no number `{}`", entry.names[0], entry.here);
    }
    let unused: Vec<&str> =
        numbers::NUMBERS.iter().map(|(name, _)| *name).filter(|name| !used.contains(name)).collect();
    assert!(unused.is_empty(), "no word shows {unused:?}");
}

#[test]
fn each_answer_is_two_to_six_lines() {
    let run = run();
    let report = report(&run);
    for entry in words() {
        for (report, width) in [(Some(&report), None), (None, None), (Some(&report), Some(100))] {
            let text = explain(&entry.names[0], report, width).expect("known");
            let most = if width.is_some() { 9 } else { 4 };
            assert!((2..=most).contains(&text.lines().count()), "{text}");
            assert!(
                text.lines().all(|line| width.is_none_or(|width| line.chars().count() <= width)),
                "{text}"
            );
        }
    }
}

#[test]
fn a_word_comes_with_the_numbers_of_the_run() {
    let run = run();
    let report = report(&run);
    let text = explain("used_bytes", Some(&report), None).expect("known");
    assert!(text.starts_with("used  (also: used (= nvidia-smi); "), "{text}");
    assert!(
        text.contains("\n  here: 721.0 MiB last, 721.0 MiB at peak  (train.py pid 20417, GPU 0)\n"),
        "{text}"
    );
    let text = explain("unexplained", Some(&report), None).expect("known");
    assert!(text.contains("here: 367.0 MiB last"), "{text}");
    let text = explain("SoftMax", Some(&report), None).expect("a category");
    assert!(
        text.contains("tbd (by layer)") && text.contains("here: 39.1 MiB last, 39.1 MiB at peak, by layer"),
        "{text}"
    );
    let text = explain("in_arg/logits_weight", Some(&report), None).expect("a tag");
    assert!(text.contains("A tag: ") && text.contains(" MiB last"), "{text}");
    assert!(explain("in_arg/logits_weight", None, None).is_err());
    assert_eq!(explain("untrackabel", None, None), Err(vec!["Untrackable".to_owned()]));
    assert!(list(Some(80)).lines().all(|line| line.chars().count() <= 90), "{}", list(Some(80)));
}

fn assert_known<'a>(what: &str, words: impl IntoIterator<Item = &'a str>) {
    let unknown: Vec<&str> = words.into_iter().filter(|word| !is_known(word)).collect();
    assert!(unknown.is_empty(), "{what}: not explained: {unknown:?}");
}

#[test]
fn what_the_code_can_print_is_explained() {
    assert_known("roles", Role::NAMES.iter().map(|(name, _)| *name));
    assert_known("phases", phases_of_blocks());
    let parts = run::UntrackableParts::default().each();
    assert_known("parts of the gap", parts.iter().flat_map(|(name, kind, _)| [*name, *kind]));
    assert_known("causes", Cause::NAMES.iter().map(|(name, _)| *name));
    use gpumem_wire::{Absence, Layer, LayerState};
    let absences = [
        Absence::NotAvailable,
        Absence::NoPermission,
        Absence::NotListed,
        Absence::GpuLost,
        Absence::Timeout,
        Absence::NotSupported,
        Absence::WrongNamespace,
    ];
    assert_known(
        "absences",
        absences.iter().flat_map(|absence| [true, false].map(|list| run::absence_name(*absence, list))),
    );
    let layers = [
        Layer::Blocks,
        Layer::OutOfMemory,
        Layer::Scopes,
        Layer::Nvtx,
        Layer::ModulePath,
        Layer::Autograd,
        Layer::Roles,
    ];
    assert_known("layers", layers.map(Named::name_or_unknown));
    let states =
        [LayerState::Active, LayerState::Degraded, LayerState::Absent, LayerState::Off, LayerState::Failed];
    assert_known("states of layers", states.map(Named::name_or_unknown));
    let said = |layer: &str| gpumem_model::layers::LayerReport {
        layer: layer.into(),
        state: "active".into(),
        reason: String::new(),
    };
    for layer in layers {
        let level = gpumem_model::layers::level(&[said(layer.name_or_unknown())]).expect("a level");
        assert_known("levels", [level]);
    }
    assert_known("states of runs", gpumem_runs::store::STATES);
    assert_known("columns of groups", crate::group::COLUMNS);
    use crate::iterations::{COLUMNS, HIGHEST, parts};
    assert_known("columns of the page's iterations", COLUMNS.map(|(name, _)| name));
    assert_known("columns of iterations", HIGHEST.map(|(name, _)| name));
    assert_known("parts of iterations", parts::HELD.map(|(name, _)| name));
    assert_known("other columns of iterations", [parts::OTHERS, parts::IN_STEP]);
    assert_known("rows that reports make", crate::rules::RESERVED);
    for (name, _) in PRESETS {
        let groupings = Groupings::preset(Some(name));
        let rules = groupings.layer.rules.iter().chain(&groupings.structure.rules);
        assert_known(name, rules.map(|rule| rule.name.as_str()));
    }
    // Rows of a statement that contains every kind of row.
    let mut run = run();
    let device = &mut run.devices[0];
    for class in [run::Class::PoolIdle, run::Class::Opaque] {
        run.cells.push(run::Cell { class, ..run::Cell::default() });
        device.last.amounts.push((run.cells.len() as u32 - 1, 7));
    }
    device.last.predates_bytes = Some(1);
    device.last.parts = Some(run::UntrackableParts {
        context_bytes: 1,
        modules_bytes: 2,
        local_memory_bytes: 3,
        heaps_bytes: 4,
        rounding_bytes: 5,
        unexplained_bytes: 6,
    });
    device.last.untrackable_bytes = Some(21);
    for by in [GroupBy::Layer, GroupBy::Structure, GroupBy::Tag] {
        let report = Report::new(&run, Groupings::of_run(&run), Some(by));
        let rows = report.statement(&run.devices[0], usize::MAX, 0).rows;
        let made = rows.iter().filter(|row| row.part != crate::Part::Category);
        assert_known("rows", made.map(|row| row.name.as_str()));
    }
}

/// Collects the keys of a JSON document, except in maps whose keys are data.
fn keys(value: &serde_json::Value, found: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                found.push(name.clone());
                if !matches!(name.as_str(), "facts" | "claims" | "who") {
                    keys(value, found);
                }
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(|value| keys(value, found)),
        _ => {}
    }
}

#[test]
fn every_key_of_json_is_explained() {
    let mut run = run();
    let device = &mut run.devices[0];
    device.details.ooms = vec![run::Oom {
        device: Some(run::OomDevice { holders: vec![run::Holder::default()], ..Default::default() }),
        ..Default::default()
    }];
    device.details.accounted_peak_bytes = Some(1);
    device.details.pools = vec![run::Pool::default()];
    device.tenants = vec![(1, Some(2))];
    device.reading = Some(run::DeviceReading {
        time_ns: 1,
        used_bytes: 2,
        free_bytes: 3,
        system_reserved_bytes: Some(4),
        unified: false,
    });
    run.coverage.layers = vec![gpumem_model::layers::LayerReport::default()];
    run.coverage.blind = vec![run::BlindWindow { from_ns: 1, to_ns: None, why: String::new() }];
    run.own.counters = vec![gpumem_model::program_data::Counter::default()];
    run.own.ranges = vec![gpumem_model::program_data::Range::default()];
    let report = report(&run);
    let side = || crate::diff::Side { run: &run, id: None, typed: String::new() };
    let diff = crate::diff::Diff::new([side(), side()], crate::diff::At::Peak, None, None);
    let verdict =
        crate::diff::gate::judge(&diff, &crate::diff::gate::Of::Peak, crate::diff::gate::Limit::Bytes(0));
    let documents = [
        crate::json::json(&report),
        crate::oom::json(&report),
        crate::iterations::json(&report, crate::iterations::IterationFilter { every: 1, columns: true }),
        crate::own::json(&report),
        crate::diff::data::json(&diff, Some(&verdict)),
    ];
    let mut found = Vec::new();
    for document in documents {
        keys(&serde_json::from_str(&document).expect("JSON"), &mut found);
    }
    found.sort();
    found.dedup();
    assert!(found.len() > 150, "{found:?}");
    assert_known("keys", found.iter().map(String::as_str));
}

#[test]
fn near_words_are_found() {
    let known = ["tracked", "Untrackable", "used", "unaccounted"].map(str::to_owned);
    assert_eq!(nearest("traked", &known), ["tracked"]);
    assert_eq!(nearest("untrack", &known), ["Untrackable"]);
    assert!(nearest("xyzzy", &known).is_empty());
    let phrases = ["retained forward outputs", "retries", "kv cache"].map(str::to_owned);
    assert_eq!(nearest("retaind", &phrases)[0], "retained forward outputs");
    assert_eq!(nearest("forwrd outputs", &phrases), ["retained forward outputs"]);
    assert_eq!(nearest("cahce", &phrases), ["kv cache"]);
}
