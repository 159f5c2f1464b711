//! Comparisons of arbitrary runs: rows add up across, and tables add up downwards, in every form.
use gpumem_import::read_file;
use gpumem_model::run::{Caveat, Cell, Class, Moment, Oom, Run, UntrackableParts};
use gpumem_report::diff::gate::{self, Limit, Of, Outcome};
use gpumem_report::diff::text::{Layout, text};
use gpumem_report::diff::{At, Diff, Side, data, sum_of_ranks};
use proptest::prelude::*;
use serde_json::Value;
use std::path::Path;

fn shipped() -> Run {
    let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    read_file(&log, None).expect("a log").remove(0)
}

/// Makes a run with these cells and devices; amounts are bytes of cells.
fn run(tags: &[&str], devices: &[(&str, Vec<i64>, Option<i64>)]) -> Run {
    let mut run = shipped();
    run.caveats = Vec::<Caveat>::new();
    run.source.preset = Some("tbd".into());
    run.cells = tags
        .iter()
        .map(|tag| Cell {
            class: match *tag {
                "idle" => Class::PoolIdle,
                "opaque" => Class::Opaque,
                _ => Class::Direct,
            },
            tag: Some((*tag).to_owned()).filter(|tag| !matches!(tag.as_str(), "" | "idle" | "opaque")),
            ..Cell::default()
        })
        .collect();
    let mut blank = run.devices.remove(0);
    blank.details = gpumem_model::run::Details::default();
    blank.series.buckets.clear();
    run.devices = devices
        .iter()
        .enumerate()
        .map(|(index, (name, amounts, gap))| {
            let mut device = blank.clone();
            device.name = (*name).to_owned();
            device.ordinal = index as u16;
            let amounts: Vec<(u32, i64)> =
                amounts.iter().zip(0..).map(|(bytes, cell)| (cell, *bytes)).collect();
            let moment = Moment {
                time_ns: 7,
                tracked_bytes: Some(amounts.iter().map(|(_, bytes)| bytes).sum()),
                amounts: amounts.into_iter().filter(|(_, bytes)| *bytes != 0).collect(),
                predates_bytes: Some(0),
                untrackable_bytes: *gap,
                parts: gap.map(|gap| UntrackableParts {
                    context_bytes: gap / 3,
                    unexplained_bytes: gap - gap / 3,
                    ..UntrackableParts::default()
                }),
                ..Moment::default()
            };
            (device.last, device.peak) = (moment.clone(), moment);
            device
        })
        .collect();
    run
}

fn diff<'r>(a: &'r Run, b: &'r Run, at: At) -> Diff<'r> {
    let side = |run: &'r Run, typed: &str| Side { run, id: None, typed: typed.into() };
    Diff::new([side(a, "a.log"), side(b, "b.log")], at, None, None)
}

/// Returns the rows of numbers in a text: depth, and A, B and the difference without decimal points.
fn rows(text: &str) -> Vec<(usize, String, [Option<i64>; 3])> {
    let number = |word: &str| word.replace([',', '.', '~', '+'], "").parse::<i64>().ok();
    let is_amount = |word: &&str| *word == "-" || number(word).is_some();
    text.lines()
        .skip_while(|line| !line.contains("B - A"))
        .take_while(|line| !line.starts_with("note: ") && !line.starts_with("next: "))
        .filter_map(|line| {
            let mut kept = line;
            for note in ["in A, not in B", "in B, not in A", "measured", "upper bound", "model", "at least"] {
                kept = kept.trim_end().trim_end_matches(note);
            }
            let words: Vec<&str> = kept.split_whitespace().rev().take(3).collect();
            let &[differs, b, a] = &words[..] else { return None };
            if ![a, b, differs].iter().all(is_amount) {
                return None;
            }
            let depth = line.len() - line.trim_start().len();
            Some((depth, line.trim().to_owned(), [number(a), number(b), number(differs)]))
        })
        .collect()
}

#[test]
fn sum_of_processes_has_every_count_and_names_of_its_ooms() {
    let process = |tag: &str, count: u64| {
        let mut run = run(&[tag], &[("GPU-1", vec![5], None)]);
        let oom = Oom { count, amounts: vec![(0, 5)].into(), ..Oom::default() };
        run.devices[0].details.ooms = vec![oom];
        let of = &mut run.coverage;
        (of.ooms_dropped, of.blind_count, of.blind_ns, of.lost) = (count, count, 10 * count, u64::MAX);
        run
    };
    let sum = sum_of_ranks("2 processes", vec![process("one", 1), process("two", 2)]);
    let of = &sum.coverage;
    assert_eq!((of.ooms_dropped, of.blind_count, of.blind_ns, of.lost), (3, 3, 30, u64::MAX));
    let tag = |cell: u32| sum.cells[cell as usize].tag.as_deref();
    let ooms = sum.devices.iter().flat_map(|device| &device.details.ooms);
    let named: Vec<_> = ooms.map(|oom| tag(oom.amounts[0].0)).collect();
    assert_eq!(named, [Some("one"), Some("two")]);
}

#[test]
fn processes_of_a_job_are_named_after_their_rank_or_numbered() {
    let process = |started: u64, rank: Option<&str>| {
        let mut run = run(&["x"], &[("GPU-1", vec![5], None)]);
        run.process.start_ticks = started;
        run.process.claims.extend(rank.map(|rank| ("rank".to_owned(), rank.to_owned())));
        run
    };
    let job = || sum_of_ranks("job", vec![process(9, None), process(8, None), process(7, Some("0"))]);
    let names: Vec<_> = job().devices.into_iter().map(|device| device.name).collect();
    assert_eq!(names, ["rank 0", "process 1", "process 2"]);
    let (a, b) = (job(), job());
    let value: Value = serde_json::from_str(&data::json(&diff(&a, &b, At::Now), None)).expect("JSON");
    let paired: Vec<&Value> =
        value["pairs"].as_array().expect("pairs").iter().map(|pair| &pair["paired"]).collect();
    assert_eq!(paired, ["rank", "order", "order"]);
}

fn assert_text_adds_up(text: &str) {
    let rows = rows(text);
    assert!(!rows.is_empty(), "{text}");
    for (index, (depth, line, amounts)) in rows.iter().enumerate() {
        if let [Some(a), Some(b), Some(differs)] = amounts {
            assert_eq!(a + differs, *b, "across: {line}\n{text}");
        }
        let inside = rows[index + 1..].iter().take_while(|(other, ..)| other > depth);
        let parts: Vec<_> = inside.filter(|(other, ..)| *other == depth + 1).collect();
        for (column, amount) in amounts.iter().enumerate() {
            let known: Option<Vec<i64>> = parts.iter().map(|(.., amounts)| amounts[column]).collect();
            if let (Some(amount), Some(known), false) = (amount, known, parts.is_empty()) {
                assert_eq!(known.iter().sum::<i64>(), *amount, "down: {line}\n{text}");
            }
        }
    }
}

fn assert_json_adds_up(text: &str) {
    let document: Value = serde_json::from_str(text).expect("JSON");
    assert_eq!((&document["schema"], &document["version"]), (&"gpumem.diff".into(), &1.into()));
    let total = (!document["total"].is_null()).then(|| document["total"].clone());
    for pair in document["pairs"].as_array().expect("pairs").iter().chain(total.iter()) {
        for column in ["a_bytes", "b_bytes", "difference_bytes"] {
            let of = |name: &str| pair[name][column].as_i64();
            let sum = |name: &str| -> Option<i64> {
                pair[name].as_array().expect(name).iter().map(|entry| entry[column].as_i64()).sum()
            };
            if let Some(tracked) = of("tracked") {
                let pools = of("pool_idle").expect("known") + of("opaque").expect("known");
                for grouping in ["layers", "structures", "tags"] {
                    assert_eq!(sum(grouping).expect("known") + pools, tracked, "{column} of {grouping}");
                }
                if let Some(used) = of("used") {
                    let gap = of("untrackable").expect("known");
                    assert_eq!(of("predates").expect("known") + tracked + gap, used);
                    assert_eq!(sum("untrackable_parts"), Some(gap));
                }
            }
        }
    }
}

fn assert_csv_adds_up(text: &str, diff: &Diff<'_>) {
    for pair in &diff.pairs {
        for (grouping, by) in [
            ("layer", gpumem_report::GroupBy::Layer),
            ("structure", gpumem_report::GroupBy::Structure),
            ("tag", gpumem_report::GroupBy::Tag),
        ] {
            let name = |side: usize| {
                pair.devices[side].map_or("", |device| diff.sides[side].run.devices[device].name.as_str())
            };
            let head = format!("{},{},{grouping},", name(0), name(1));
            let lines: Vec<&str> = text.lines().filter(|line| line.starts_with(&head)).collect();
            // Empty cells are unknown: NVML's total of one side is next to the categories of the other.
            let column = |from_end: usize| -> i64 {
                let cells = lines.iter().filter_map(|line| line.rsplit(',').nth(from_end));
                cells.filter_map(|cell| cell.parse::<i64>().ok()).sum()
            };
            let [a, b] = pair.table(by).bytes(gpumem_report::Part::Used);
            assert!(
                a.is_none_or(|a| a == column(3)) && b.is_none_or(|b| b == column(2)),
                "{grouping}\n{text}"
            );
            if let ([Some(a), Some(b)], true) = ([a, b], lines.iter().all(|line| !line.contains(",,"))) {
                assert_eq!(column(1), b - a, "{grouping}\n{text}");
            }
        }
    }
}

const TAGS: [&str; 9] = [
    "in_arg/rnn_weight",
    "arg_grad/rnn_weight",
    "forward_features/att_x",
    "workspace/fully",
    "nobody knows",
    "",
    "idle",
    "opaque",
    "=evil,\"\u{1b}[2J",
];

fn amounts() -> impl Strategy<Value = Vec<i64>> {
    let bytes = prop_oneof![Just(0), 0..5_000_i64, 0..(30_i64 << 30), Just(1 << 20)];
    proptest::collection::vec(bytes, TAGS.len())
}

fn any_run() -> impl Strategy<Value = Run> {
    let gap = proptest::option::of(-(2_i64 << 30)..(4_i64 << 30));
    let device = (0..4_usize, amounts(), gap);
    (proptest::collection::vec(device, 0..4), any::<bool>()).prop_map(|(devices, covered)| {
        let names = ["GPU-aaaaaaaa-1", "GPU-bbbbbbbb-2", "GPU-cccccccc-3", "ordinal-7"];
        let mut seen = Vec::new();
        let mut kept = Vec::new();
        for (name, amounts, gap) in devices {
            if !seen.contains(&name) {
                seen.push(name);
                kept.push((names[name], amounts, gap));
            }
        }
        let mut run = run(&TAGS, &kept);
        if !covered && !kept.is_empty() {
            run.coverage.covered = false;
            for device in &mut run.devices {
                let used = device.peak.tracked_bytes.map(i64::unsigned_abs);
                device.peak = Moment { uncovered_used_bytes: used, ..Moment::default() };
                device.last = device.peak.clone();
            }
        }
        run
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_two_runs_add_up_in_every_form(a in any_run(), b in any_run(), now in any::<bool>()) {
        let diff = diff(&a, &b, if now { At::Now } else { At::Peak });
        for layout in [
            Layout::default(),
            Layout { all: true, ..Layout::default() },
            Layout { tags: true, ..Layout::default() },
            Layout { width: Some(60), ..Layout::default() },
        ] {
            let text = text(&diff, layout);
            if !diff.pairs.is_empty() {
                assert_text_adds_up(&text);
            }
            let acts = text.contains('\u{1b}');
            prop_assert!(!acts);
            if layout.width.is_none() && !layout.all && !layout.tags {
                prop_assert!(text.lines().count() <= 40, "{}", text);
            }
        }
        assert_json_adds_up(&data::json(&diff, None));
        assert_csv_adds_up(&data::csv(&diff), &diff);
        for limit in [Limit::Bytes(1 << 20), Limit::Millionths(20_000)] {
            let verdict = gate::judge(&diff, &Of::Peak, limit);
            if let ([Some(a), Some(b), Some(limit)], 1) = ([verdict.a_bytes, verdict.b_bytes, verdict.limit_bytes], diff.pairs.len()) {
                let outcome = if b > a.saturating_add(limit) { Outcome::Above } else { Outcome::Within };
                prop_assert_eq!(verdict.outcome, outcome);
            }
        }
    }
}

const MIB: i64 = 1 << 20;

fn two() -> [Run; 2] {
    let a = run(
        &["forward_features/x", "workspace/y"],
        &[("GPU-a", vec![1000 * MIB, 50 * MIB], Some(600 * MIB))],
    );
    let b = run(
        &["forward_features/x", "workspace/y", "in_arg/w", "arg_grad/w"],
        &[("GPU-a", vec![1000 * MIB, 50 * MIB, 528 * MIB, 528 * MIB], Some(600 * MIB))],
    );
    [a, b]
}

#[test]
fn the_first_sentence_names_the_causes() {
    let [a, b] = two();
    let told = text(&diff(&a, &b, At::Peak), Layout::default());
    let sentence = told.lines().find(|line| line.starts_with("B's")).expect("a sentence");
    assert_eq!(
        sentence,
        "B's peak is 1,056.0 MiB higher (used, +64.0 %): Weight Gradients +528.0, Weights +528.0"
    );
    assert!(told.contains("Weights") && told.contains("in B, not in A"), "{told}");
    let told = text(&diff(&b, &a, At::Now), Layout::default());
    assert!(told.contains("\nB is 1,056.0 MiB lower than A (used, -39.0 %): "), "{told}");
    assert!(told.contains("in A, not in B"), "{told}");
    let told = text(&diff(&a, &a, At::Peak), Layout::default());
    assert!(told.contains("\nB's peak equals A's (used), and so do all parts\n"), "{told}");
}

#[test]
fn bytes_that_one_side_has_no_name_for_are_told() {
    let [mut a, b] = two();
    let moment = &mut a.devices[0].peak;
    moment.untrackable_bytes = Some(1600 * MIB);
    moment.parts = None;
    let told = text(&diff(&a, &b, At::Peak), Layout::default());
    assert!(told.contains("Untrackable -1,000.0"), "{told}");
    assert!(
        told.contains("1,000.0 MiB may differ in coverage, not in use: B tracks about as much more as A has"),
        "{told}"
    );
}

#[test]
fn the_gate_knows_what_is_not_known() {
    let judged = |a: &Run, b: &Run, of: &str, limit: &str| {
        let diff = diff(a, b, At::Peak);
        let of = Of::find(of, &diff).expect("a word");
        let verdict = gate::judge(&diff, &of, limit.parse().expect("a limit"));
        (verdict.outcome, verdict.text)
    };
    let [a, b] = two();
    assert_eq!(judged(&a, &b, "used", "1056MiB").0, Outcome::Within, "what it may be it may be");
    let (outcome, text) = judged(&a, &b, "used", "1055MiB");
    assert_eq!(
        (outcome, text.as_str()),
        (Outcome::Above, "B's used exceeds A's by 1,056.0 MiB, more than 1,055.0 MiB")
    );
    assert_eq!(judged(&a, &b, "Weights", "10%").0, Outcome::Above, "any is more than none");
    assert_eq!(judged(&b, &a, "tracked", "0").0, Outcome::Within);
    assert_eq!(judged(&a, &b, "gap", "0").0, Outcome::Within);
    assert_eq!(judged(&a, &b, "idle", "0").0, Outcome::Within, "none is known to be none");
    assert_eq!(judged(&a, &b, "in_arg/w", "600MiB").0, Outcome::Within, "a tag");
    assert!(Of::find("wieghts", &diff(&a, &b, At::Peak)).is_none());

    // A lower bound suffices for `Above`, but not for `Within`.
    let mut lossy = b.clone();
    lossy.coverage.partial_history = true;
    assert_eq!(judged(&a, &lossy, "used", "1GiB").0, Outcome::Above);
    let (outcome, text) = judged(&a, &lossy, "used", "2GiB");
    assert_eq!(outcome, Outcome::Unknown, "{text}");
    assert!(text.contains("its peak is a lower bound"), "{text}");
    assert_eq!(
        judged(&lossy, &a, "used", "1MiB").0,
        Outcome::Within,
        "A may be more, B is less than what is known"
    );
    // A part of an incomplete peak cannot be judged.
    assert_eq!(judged(&a, &lossy, "Weights", "1MiB").0, Outcome::Unknown);

    // An absent value.
    let mut unread = b;
    unread.devices[0].peak.untrackable_bytes = None;
    let (outcome, text) = judged(&a, &unread, "used", "1GiB");
    assert_eq!(outcome, Outcome::Unknown);
    assert!(text.contains("B's used is unknown") && text.contains("NVML was not read"), "{text}");
    let of_peak = gate::judge(&diff(&a, &unread, At::Peak), &Of::Peak, Limit::Bytes(0));
    assert_eq!((of_peak.of.as_str(), of_peak.outcome), ("tracked", Outcome::Above));
    let bare = run(&[], &[]);
    assert_eq!(
        gate::judge(&diff(&bare, &bare, At::Peak), &Of::Peak, Limit::Bytes(0)).outcome,
        Outcome::Unknown
    );
}

#[test]
fn several_devices_are_paired_and_summed() {
    let a =
        run(&["in_arg/x"], &[("GPU-a", vec![100 * MIB], Some(MIB)), ("GPU-b", vec![200 * MIB], Some(MIB))]);
    let b =
        run(&["in_arg/x"], &[("GPU-b", vec![260 * MIB], Some(MIB)), ("GPU-c", vec![90 * MIB], Some(MIB))]);
    let mut both = diff(&a, &b, At::Peak);
    let told = text(&both, Layout::default());
    assert!(told.contains("2 devices (1 by UUID, 1 in their order)"), "{told}");
    assert!(told.contains("B's peak is 50.0 MiB higher"), "{told}");
    assert_text_adds_up(&told);
    let worst = gate::judge(&both, &Of::Peak, Limit::Bytes(55 * MIB));
    assert_eq!(worst.outcome, Outcome::Above, "together they are within, one is not");
    assert_eq!(worst.text, "B's used on GPU 1 exceeds A's by 60.0 MiB, more than 55.0 MiB");
    assert_eq!(gate::judge(&both, &Of::Peak, Limit::Bytes(60 * MIB)).outcome, Outcome::Within);
    let is_b = |device: &gpumem_model::run::Device| device.name == "GPU-b";
    assert!(!both.only(|device| device.name == "GPU-z"));
    assert!(both.only(is_b));
    let told = text(&both, Layout::default());
    assert!(told.contains("the same device, GPU 1") && told.contains("is 60.0 MiB higher"), "{told}");
}
