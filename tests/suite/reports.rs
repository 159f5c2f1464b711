//! Exact output of reports for people and programs.
use gpumem_import::read_file;
use gpumem_model::run::{Caveat, Cell, Clock, Run, Source, State, UntrackableChange, UntrackableParts};
use gpumem_report::diff::{At, Diff};
use gpumem_report::rules::Groupings;
use gpumem_report::table::width;
use gpumem_report::text::{Layout, text};
use gpumem_report::{GroupBy, Report, csv, json, steps};
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_tests::{golden, node};
use std::path::Path;

fn report<'r>(run: &'r Run, by: Option<GroupBy>) -> Report<'r> {
    let rules = run.source.preset.as_deref().unwrap_or("default");
    let mut report = Report::new(run, Groupings::load(rules).expect("preset"), by);
    if run.source.kind == "tbd-log" {
        report.command = "gpumemctl report tests/data/small-train.log".into();
    }
    report
}

/// Suffixes of the gap's rows.
const KINDS: [&str; 4] = ["at least", "model", "measured", "upper bound"];

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
fn imported_log_in_every_grouping() {
    let run = small_train();
    for (name, by) in [("layer", GroupBy::Layer), ("structure", GroupBy::Structure), ("tag", GroupBy::Tag)] {
        let text = text(&report(&run, Some(by)), Layout::default());
        assert!(text.lines().count() <= 35, "{text}");
        golden::check(&format!("reports/small-train.{name}.txt"), &text);
    }
}

/// Asserts that the amounts and shares of the table on the first screen add up as printed.
fn assert_first_screen_adds_up(text: &str) {
    let lines: Vec<&str> = text.lines().collect();
    let total = lines.iter().position(|line| line.starts_with("total ")).expect("a total");
    let head = lines[..total].iter().rposition(|line| line.ends_with('%')).expect("a table");
    let share_end = lines[head].len();
    let amount_end = lines[head][..share_end - 1].trim_end().len();
    let number = |line: &str, end: usize| -> Option<f64> {
        line.get(..end.min(line.len()))?.rsplit(' ').next()?.replace([',', '~'], "").parse().ok()
    };
    let sum = |end: usize| lines[head + 1..total].iter().filter_map(|line| number(line, end)).sum::<f64>();
    let whole = number(lines[total], amount_end).expect("an amount");
    assert!((sum(amount_end) - whole).abs() < 0.01 || total == head + 1, "{text}");
    assert!((sum(share_end) - 100.0).abs() < 0.01 || total == head + 1, "{text}");
}

#[test]
fn first_screen_adds_up_and_has_at_most_25_lines() {
    let nodes = node_runs();
    for (name, run) in
        [("small-train", &small_train()), ("node.covered", &nodes[0]), ("node.uncovered", &nodes[1])]
    {
        let text = text(&report(run, None), Layout { is_short: true, ..Layout::default() });
        assert!(text.lines().count() <= 25, "{text}");
        assert_first_screen_adds_up(&text);
        golden::check(&format!("reports/{name}.short.txt"), &text);
    }
}

#[test]
fn first_screen_of_many_devices_has_at_most_25_lines_and_adds_up() {
    let mut run = small_train();
    let device = run.devices[0].clone();
    run.devices = (0..16_u16)
        .map(|ordinal| {
            let mut device = device.clone();
            (device.ordinal, device.name) = (ordinal, format!("GPU-{ordinal:08}"));
            device
        })
        .collect();
    let text = text(&report(&run, None), Layout { is_short: true, width: Some(100), ..Layout::default() });
    assert!(text.lines().count() <= 25, "{text}");
    let used =
        |line: &str| line.split("  ").find_map(|cell| cell.trim().replace(',', "").parse::<f64>().ok());
    let rows: Vec<&str> =
        text.lines().filter(|line| line.starts_with("GPU ") || line.starts_with("8 smaller")).collect();
    let sum = text.lines().find(|line| line.starts_with("sum")).and_then(used).expect("a sum");
    assert_eq!(rows.len(), 9, "{text}");
    assert!((rows.iter().filter_map(|row| used(row)).sum::<f64>() - sum).abs() < 0.01, "{text}");
}

/// A Chinese letter takes two columns of a terminal: with a tag of the same width in another script each table is the same.
#[test]
fn tables_align_with_tags_in_any_script() {
    let (latin, chinese) = ("in_arg/word-data", "in_arg/数据-word");
    assert_eq!(width(latin), width(chinese));
    let named = |tag: &str| {
        let mut run = small_train();
        let largest = run.devices[0].peak.amounts.iter().max_by_key(|(_, bytes)| *bytes).expect("cells").0;
        run.cells[largest as usize].tag = Some(tag.into());
        run
    };
    let runs = [named(latin), named(chinese)];
    for layout in [Layout::default(), Layout { width: Some(80), ..Layout::default() }] {
        let [expected, text] = [0, 1].map(|run| text(&report(&runs[run], Some(GroupBy::Tag)), layout));
        assert!(expected.contains(latin), "{expected}");
        assert_eq!(text, expected.replace(latin, chinese));
    }
    let compared = |run: &Run| {
        let side = |run| gpumem_report::diff::Side { run, id: None, typed: String::new() };
        let other = small_train();
        let diff = Diff::new([side(&other), side(run)], At::Peak, None, Some(GroupBy::Tag));
        gpumem_report::diff::text::text(&diff, Default::default())
    };
    let [expected, text] = [0, 1].map(|run| compared(&runs[run]));
    assert!(expected.contains(latin), "{expected}");
    assert_eq!(text, expected.replace(latin, chinese));
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
fn gap_steps_are_listed() {
    let mut run = node_runs().remove(0);
    let step = |tenths: u64, mib: i64, cause: &str| UntrackableChange {
        time_ns: tenths * 100_000_000,
        bytes: mib << 20,
        parts: UntrackableParts::unknown(mib << 20),
        cause: cause.into(),
        kind: "none".into(),
        tag: Some("model/layers.17".into()),
        ..UntrackableChange::default()
    };
    let steps = &mut run.devices[0].details.steps;
    steps.push(step(600, 178, "between events"));
    steps.push(step(700, -12, "graph destroyed"));
    steps.push(UntrackableChange {
        parts: UntrackableParts {
            local_memory_bytes: 264 << 20,
            unexplained_bytes: 36 << 20,
            ..UntrackableParts::default()
        },
        kind: "model".into(),
        library: Some("libnccl.so.2".into()),
        expected_bytes: Some(264 << 20),
        also: vec!["module loaded".into()],
        ..step(800, 300, "stack limit")
    });
    golden::check("reports/node.steps.txt", &steps::text(&report(&run, None)));
    let printed = text(&report(&run, None), Layout::default());
    let largest = line(&printed, "largest unexplained step");
    assert_eq!(
        largest,
        "largest unexplained step: +178.0 MiB at 00:01:10Z, between events, near tag model/layers.17 (--steps)"
    );
    let log = steps::text(&report(&small_train(), None));
    assert!(log.contains("\na log has no driver events"), "{log}");
}

#[test]
fn narrow_terminal_truncates_no_number() {
    let run = small_train();
    for width in [50, 60, 80, 120] {
        let text =
            text(&report(&run, Some(GroupBy::Tag)), Layout { width: Some(width), ..Layout::default() });
        let longest = text.lines().map(|line| line.chars().count()).max().expect("lines");
        assert!(longest <= width, "{longest} columns in a terminal of {width}\n{text}");
        let table =
            text.lines().skip_while(|line| !line.starts_with("used")).take_while(|line| !line.is_empty());
        for line in table {
            let note = KINDS.into_iter().find(|kind| line.ends_with(kind)).unwrap_or("");
            let words: Vec<&str> = line.trim_end_matches(note).split_whitespace().collect();
            let numbers = words.iter().rev().take(2).filter(|word| word.parse::<f64>().is_ok()).count();
            assert_eq!(numbers, 2, "{line}");
        }
    }
}

fn text_of(run: &Run, by: GroupBy, width: Option<usize>) -> String {
    text(&report(run, Some(by)), Layout { width, ..Layout::default() })
}

/// The rows of the first table.
fn rows(text: &str) -> Vec<&str> {
    text.lines().skip_while(|line| !line.starts_with("used")).take_while(|line| !line.is_empty()).collect()
}

fn line<'t>(text: &'t str, start: &str) -> &'t str {
    text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("no line {start}\n{text}"))
}

fn caveat(text: &str) -> Caveat {
    Caveat { code: "test".into(), text: text.into() }
}

/// Returns the words without the drawn line, whose width depends on the space.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.starts_with("over time ")).flat_map(str::split_whitespace)
}

#[test]
fn narrow_terminal_truncates_no_sentence() {
    let run = small_train();
    let piped = text_of(&run, GroupBy::Layer, None);
    for width in [60, 80, 100] {
        let text = text_of(&run, GroupBy::Layer, Some(width));
        assert!(text.lines().all(|line| line.chars().count() <= width), "{text}");
        assert!(words(&piped).eq(words(&text)), "{text}");
        assert!(text.lines().count() <= 35, "{text}");
    }
}

#[test]
fn reasons_for_partial_sums_are_below_the_heading() {
    let mut run = small_train();
    run.coverage.partial_history = true;
    assert!(
        text_of(&run, GroupBy::Layer, Some(80))
            .lines()
            .nth(1)
            .expect("a line")
            .starts_with("peak is a lower")
    );
    run.coverage.partial_state = true;
    run.coverage.blocked_by = Some("nsys".into());
    for covered in [true, false] {
        run.coverage.covered = covered;
        let text = text_of(&run, GroupBy::Layer, Some(80));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("BLOCKED by nsys: "), "{text}");
        assert!(lines[2].starts_with("PARTIAL: sums are not exact, because records were lost"), "{text}");
    }
    run.state = State::Open;
    assert!(
        text_of(&run, GroupBy::Layer, None)
            .contains("\nPARTIAL: sums are not exact until the agent restates")
    );
    run.coverage.partial_state = false;
    run.coverage.partial_history = false;
    run.devices[0].last.partial = true;
    assert!(text_of(&run, GroupBy::Layer, None).contains("\nPARTIAL: sums are not exact, because"));
}

#[test]
fn counts_are_written_in_words() {
    let mut run = small_train();
    run.coverage.allocations = 1;
    run.coverage.allocated_bytes = u64::MAX;
    run.coverage.lost = 1;
    run.coverage.torn_samples = 1000;
    run.coverage.odd = 1234;
    let text = text_of(&run, GroupBy::Layer, None);
    assert!(text.contains(" 1 allocation of 18,446,744,073,709,551,615 bytes, 1 event lost, "), "{text}");
    assert!(text.contains("8 NVML samples (1,000 torn)"), "{text}");
    assert!(line(&text, "odd: ").starts_with("odd: 1,234 records contradicted earlier ones (frees"));
    run.coverage.odd = 1;
    assert!(text_of(&run, GroupBy::Layer, None).contains("\nodd: 1 record contradicted"));
    run.coverage.odd = 0;
    assert!(!text_of(&run, GroupBy::Layer, None).contains("odd: "));
}

#[test]
fn device_line_adds_up_as_printed() {
    let mut run = small_train();
    let number = |word: &str| -> i64 {
        let number = word.split(' ').next().expect("a number").trim_end_matches(',');
        number.replace(',', "").parse().expect(word)
    };
    let half = (1 << 20) / 2 - 1;
    let sizes = [(20_001 << 20, 10_001 << 20), ((20_001 << 20) + half, (10_001 << 20) + half), (5, 7)];
    for (used_bytes, free_bytes) in sizes {
        let reading = run.devices[0].reading.as_mut().expect("a reading");
        (reading.used_bytes, reading.free_bytes) = (used_bytes, free_bytes);
        for unaccounted in [None, Some(half as i64)] {
            run.devices[0].unaccounted_bytes = unaccounted;
            let text = text_of(&run, GroupBy::Layer, None);
            let sum = line(&text, "device (").split_once(": ").expect("a sum").1;
            let (parts, total) = sum.split_once(" = ").expect("a sum");
            assert_eq!(parts.split(" + ").map(number).sum::<i64>(), number(total), "{sum}");
        }
    }
    let reading = run.devices[0].reading.as_mut().expect("a reading");
    (reading.used_bytes, reading.free_bytes) = (u64::MAX, u64::MAX);
    run.devices[0].unaccounted_bytes = None;
    line(&text_of(&run, GroupBy::Layer, None), "device (MiB): ");
}

/// The parts add up to the device's size, or the line names what NVML's numbers lack.
#[test]
fn device_line_adds_up_to_the_size_of_the_device() {
    const GIB: u64 = 1 << 30;
    let mut run = small_train();
    let device = &mut run.devices[0];
    let used = device.last.used_bytes().expect("used bytes");
    let total = 80 * GIB;
    device.total_bytes = Some(total);
    device.tenants = vec![(4242, Some(498 << 20))];
    device.unaccounted_bytes = Some(12 << 20);
    let free = total - used as u64 - (498 << 20) - (12 << 20);
    for (missing, named) in [(0, false), (3 * GIB, true)] {
        let reading = run.devices[0].reading.as_mut().expect("a reading");
        (reading.free_bytes, reading.system_reserved_bytes) = (free - missing, None);
        let text = text_of(&run, GroupBy::Layer, None);
        let sum = line(&text, "device (");
        assert!(sum.contains(" = 81,920") && sum.contains("498 pid 4242"), "{sum}");
        assert_eq!(sum.contains("3,072 not in NVML's numbers"), named, "{sum}");
    }
}

#[test]
fn negative_gap_is_no_lower_bound() {
    let mut run = small_train();
    run.devices[0].last.untrackable_bytes = Some(-(400 << 20));
    for width in [None, Some(80), Some(40)] {
        let text = text_of(&run, GroupBy::Layer, width);
        assert!(text.contains("  unexplained ") && text.contains("-400.0"), "{text}");
        assert!(text.contains("NVML charges less than was tracked"), "{text}");
        assert!(!text.contains("at least"), "{text}");
    }
}

#[test]
fn next_command_and_other_processes_are_shown() {
    let run = small_train();
    let mut report = report(&run, Some(GroupBy::Layer));
    assert!(!text(&report, Layout::default()).contains("other processes"));
    report.command = "gpumemctl report r1 --store 'my runs'".into();
    report.others = vec![42, 43];
    let reported = text(&report, Layout::default());
    assert!(reported.ends_with(
        "\nother processes in this file: --pid 42 | 43 (2)\n\
         next: gpumemctl report r1 --store 'my runs' --by structure | --by tag | --all | --json | --csv\n"
    ));
    report.others = (1..=1000).collect();
    assert!(text(&report, Layout::default()).contains("--pid 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | ... (1,000)\n"));
}

#[test]
fn names_cannot_forge_indentation_or_hide_numbers() {
    let mut run = small_train();
    let blanks = " ".repeat(300);
    let live: Vec<u32> = run.devices[0].last.amounts.iter().map(|(cell, _)| *cell).collect();
    let cells = run.cells.iter_mut().enumerate().filter(|(cell, _)| live.contains(&(*cell as u32)));
    let mut tags = cells.filter_map(|(_, cell)| cell.tag.as_mut());
    *tags.next().expect("a tag") = format!("{blanks}first/of/all");
    *tags.next().expect("a tag") = format!("\u{3000} {}/end", "x".repeat(300));
    *tags.next().expect("a tag") = blanks;
    for width in [1, 20, 40, 80] {
        let all = Layout { width: Some(width), categories: usize::MAX, ..Layout::default() };
        let text = text(&report(&run, Some(GroupBy::Tag)), all);
        let unit = |row: &&str| row.split_whitespace().filter(|word| word.parse::<f64>().is_ok()).count();
        let table = rows(&text);
        let numbers = table.iter().filter(|row| !KINDS.contains(&row.trim()));
        assert!(numbers.clone().all(|row| unit(row) >= 2), "{text}");
        let depths = table.iter().map(|row| row.len() - row.trim_start_matches(' ').len());
        assert!(depths.max().expect("rows") <= 4, "{text}");
        assert!(table.iter().any(|row| row.contains("  ~") && row.contains("x/end ")), "{text}");
        assert!(table.iter().any(|row| row.starts_with("  \\u{20}")), "blanks by number: {text}");
    }
    let narrow = text_of(&run, GroupBy::Layer, Some(20));
    assert!(rows(&narrow).iter().any(|row| row.starts_with("  Optimiz~ ")), "{narrow}");
}

#[test]
fn untrusted_text_reaches_the_terminal_escaped() {
    let bad = "a\u{1b}[2J\u{200b}\u{7f}\u{9b}\n\u{feff}b";
    let mut run = small_train();
    run.source.origin = bad.into();
    run.caveats.push(caveat(bad));
    run.process.facts.insert("user".into(), bad.into());
    run.cells.iter_mut().for_each(|cell| cell.tag = Some(bad.into()));
    run.devices[0].model = bad.into();
    let rules = Groupings::parse(&format!("[[layer]]\nname = {}\ntag = [\"*\"]\n", quoted(bad)), "bad");
    let mut report = Report::new(&run, rules.expect("rules"), Some(GroupBy::Layer));
    report.command = bad.into();
    report.id = Some(bad.into());
    let raw = |character: char| character.is_control() && character != '\n';
    for text in [text(&report, Layout::default()), json::json(&report), csv::csv(&report)] {
        assert!(!text.contains(raw), "{text:?}");
    }
    let reported = text(&report, Layout::default());
    assert!(!reported.contains(['\u{200b}', '\u{feff}']) && !reported.contains("\nb"), "{reported}");
    let parsed: serde_json::Value = serde_json::from_str(&json::json(&report)).expect("JSON");
    assert_eq!(parsed["source"]["origin"], bad, "programs get it whole");
}

fn quoted(text: &str) -> String {
    let escaped: String = text.chars().map(|character| format!("\\u{:04x}", character as u32)).collect();
    format!("\"{escaped}\"")
}

#[test]
fn notes_take_space_from_categories() {
    let mut run = small_train();
    for notes in 0..30 {
        let text = text_of(&run, GroupBy::Tag, Some(80));
        let table = rows(&text).len();
        // used, tracked, six rows of tags with the rest, Untrackable, rounding, unexplained
        assert!(text.lines().count() <= 35 || table == 2 + 6 + 3, "{text}");
        assert!(notes > 2 || text.lines().count() == 35 || table == 2 + 16 + 3, "{text}");
        run.caveats.push(caveat("something else"));
    }
}

#[test]
fn several_devices_share_the_facts_of_the_run() {
    let mut run = small_train();
    for ordinal in 1..6 {
        let mut device = run.devices[0].clone();
        device.ordinal = ordinal;
        if ordinal % 2 == 1 {
            device.last.untrackable_bytes = Some(i64::from(ordinal) << 30);
        }
        run.devices.push(device);
    }
    let count = |text: &str, start: &str| text.lines().filter(|line| line.starts_with(start)).count();
    let six = text_of(&run, GroupBy::Tag, None);
    assert!(
        six.starts_with("train.py --batch-size 64 --hidden 256 --layers 2:2  pid 20417 (python3)  6 GPUs\n"),
        "{six}"
    );
    assert_eq!(
        ["train.py", "covered", "used", "GPU ", "sum ", "next"].map(|start| count(&six, start)),
        [1, 1, 0, 6, 1, 1]
    );
    assert_rows_add_up(&six);
    assert!(six.lines().count() <= 35 && six.contains("\nnext: ") && six.contains(" --device 0 | "), "{six}");
    let all = Layout { width: None, categories: usize::MAX, ..Layout::default() };
    let all = text(&report(&run, Some(GroupBy::Layer)), all);
    assert_eq!([count(&all, "used"), count(&all, "sum ")], [6, 1]);
    run.devices.truncate(1);
    assert!(!text_of(&run, GroupBy::Tag, None).contains("--device"), "one has nothing to choose from");
}

/// used = tracked + gap in each row, and each column is its sum.
fn assert_rows_add_up(text: &str) {
    let rows = text.lines().filter(|line| line.starts_with("GPU ") || line.starts_with("sum "));
    let rows: Vec<Vec<i64>> = rows
        .map(|line| {
            let words = line.split_whitespace().map(|word| word.replace([',', '.'], ""));
            let numbers: Vec<i64> = words.filter_map(|word| word.parse().ok()).collect();
            numbers[numbers.len() - 4..].to_vec()
        })
        .collect();
    let (sum, parts) = rows.split_last().expect("a sum");
    for row in &rows {
        assert_eq!(row[0], row[1] + row[3], "{text}");
    }
    for (column, sum) in sum.iter().enumerate() {
        assert_eq!(parts.iter().map(|row| row[column]).sum::<i64>(), *sum, "{text}");
    }
}

#[test]
fn columns_that_span_days_show_dates() {
    let mut run = small_train();
    run.clock = Clock::Monotonic { wall_offset_ns: Some(1_795_139_200_000_000_000) };
    run.state = State::Open;
    let device = &mut run.devices[0];
    device.reading = None;
    (device.peak.time_ns, device.last.time_ns) = (0, 60_000_000_000);
    let text = text_of(&run, GroupBy::Layer, Some(80));
    assert!(text.contains(" 01:47:40Z  01:46:40Z\n") && !text.contains("2026"), "{text}");
    run.devices[0].last.time_ns = 86_400_000_000_000;
    run.devices[0].peak.gap_distance_ns = -40_300_000;
    let text = text_of(&run, GroupBy::Layer, Some(80));
    assert!(text.contains(" 2026-11-21 01:46:40Z  2026-11-20 01:46:40Z\n"), "{text}");
    assert!(text.contains("\n~ Untrackable was measured 40.3 ms before the peak\n"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn folded_categories_show_their_count_with_commas() {
    let mut run = small_train();
    let cell = run.cells.iter().find(|cell| cell.tag.is_some()).expect("a tag").clone();
    for number in 0..2000 {
        run.devices[0].last.amounts.push((run.cells.len() as u32, 1));
        run.cells.push(Cell { tag: Some(format!("small/{number}")), ..cell.clone() });
    }
    let text = text_of(&run, GroupBy::Tag, None);
    assert!(text.contains("  (2,228 smaller) "), "{text}");
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
        assert!(documented.split(word).any(|word| word == name), "docs/report-json.md lacks {name}");
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
