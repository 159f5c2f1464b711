//! Pictures of runs, and renderings by other tools: every sum, every letter, and no overlapping text.
use gpumem_import::read_file;
use gpumem_model::run::{Cell, Class, Clock, Fate, Iteration, Mark, Oom, OomKind, Run, Source};
use gpumem_model::timeline::Point;
use gpumem_report::plot::{Anchor, Bar, Drawing, Item, Kind, Options, Picture, Segment, Text, bars, draw};
use gpumem_report::rules::Groupings;
use gpumem_report::{GroupBy, Report, tree};
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_tests::live::packages::cargo_installed;
use gpumem_tests::{golden, node, samples::sample};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

const MIB: i64 = 1 << 20;
const PICTURES: [Picture; 4] = [Picture::Peak, Picture::Categories, Picture::Timeline, Picture::Compare];

fn report(run: &Run, by: Option<GroupBy>) -> Report<'_> {
    Report::new(run, Groupings::load(run.source.preset.as_deref().unwrap_or("default")).expect("rules"), by)
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

/// A run with `names` names, some long and some with special meaning in a format. Amounts range from most of the memory down
/// to bytes, over time, with every element of a timeline.
fn crowded(names: u32) -> Run {
    let mut run = small_train();
    run.clock = Clock::Monotonic { wall_offset_ns: Some(1_700_000_000_000_000_000) };
    run.source.origin = "a(b)\\ <script>alert(\"1\")</script> & 'c'".into();
    run.process.facts.remove("command");
    run.cells = (0..names)
        .map(|number| Cell {
            class: if number % 9 == 8 { Class::PoolIdle } else { Class::Block },
            tag: Some(match number % 4 {
                0 => format!(
                    "model/layers.{number}/self_attention/output_projection/weight_of_a_very_long_name"
                ),
                1 => format!("t{number}"),
                2 => format!("<b>{number}</b>;\"\u{1b}[31m\" & (x) \\ {{}}"),
                _ => format!("Übergröße {number} 中文"),
            }),
            ..Cell::default()
        })
        .collect();
    let device = &mut run.devices[0];
    let at = |share: i64| -> gpumem_model::run::Amounts {
        (0..names).map(|number| (number, ((9_000 * MIB) >> (number % 31)) * share / 100 + 1)).collect()
    };
    device.peak.amounts = at(100);
    device.peak.tracked_bytes = Some(at(100).iter().map(|(_, bytes)| bytes).sum());
    device.peak.predates_bytes = Some(130 * MIB);
    device.peak.untrackable_bytes = Some(700 * MIB);
    device.peak.parts = None;
    device.peak.time_ns = 50_000_000_000;
    device.details.timeline.points = (0..100_i64)
        .map(|second| {
            let share = if second == 50 { 100 } else { second % 10 * 9 + 5 };
            Point { time_ns: second as u64 * 1_000_000_000, amounts: at(share), rest_bytes: 0 }
        })
        .collect();
    device.details.ooms = (0..3)
        .map(|number| Oom {
            kind: OomKind::Device,
            fate: Fate::Survived,
            time_ns: 40_000_000_000 + number * 1_000_000_000,
            asked_bytes: 1 << 30,
            count: 1,
            ..Oom::default()
        })
        .collect();
    let named = |(number, name): (u64, Option<&str>)| Mark {
        time_ns: number * 1_000_000_000,
        name: name.map(str::to_owned),
        by: "program".into(),
    };
    let long = "a name\u{1b}[2J of <b>someone</b> who types a lot";
    let names = [(12, Some("warm-up")), (26, Some(long)), (60, None), (85, Some(""))];
    let mut marks: Vec<Mark> = names.into_iter().map(named).collect();
    marks.push(Mark { time_ns: 0, name: Some("begin".into()), by: "gpumemctl".into() });
    marks.push(Mark { time_ns: u64::MAX, name: Some("later".into()), by: "gpumemctl".into() });
    run.coverage.marks = marks;
    let step = |number: u64| Iteration {
        first: number,
        last: number,
        count: 1,
        start_ns: number * 1_000_000_000,
        end_ns: number * 1_000_000_000 + 900_000_001,
        ..Iteration::default()
    };
    device.details.iterations.rows = (1..90).map(step).collect();
    run
}

/// A process on two GPUs.
fn two_devices() -> Run {
    let mut run = crowded(30);
    let mut second = run.devices[0].clone();
    second.ordinal = 1;
    second.name = "GPU-5f1c4e8a-0000-0000-0000-000000000001".into();
    second.peak.amounts.truncate(12);
    second.peak.tracked_bytes = Some(second.peak.amounts.iter().map(|(_, bytes)| bytes).sum());
    second.peak.untrackable_bytes = Some(-5 * MIB);
    second.details.timeline.points.clear();
    run.devices.push(second);
    run
}

fn all() -> Vec<Run> {
    let log = sample("tbd-log/iwslt15-vi_en-tbd-partial_fw_prop-memory_profile.with-nvidia-smi.log");
    let logs = log.map(|path| read_file(&path, None).expect("a log").remove(0));
    node_runs()
        .into_iter()
        .chain([small_train(), crowded(3), crowded(30), crowded(200), two_devices()])
        .chain(logs)
        .collect()
}

/// Returns the expected sum of the parts at the peak.
fn known_at_peak(run: &Run) -> i64 {
    known(run).iter().sum()
}

/// Returns the expected sum for each device.
fn known(run: &Run) -> Vec<i64> {
    let of = |moment: &gpumem_model::run::Moment| match moment.tracked_bytes {
        Some(tracked) => tracked + moment.predates_bytes.unwrap_or(0) + moment.untrackable_bytes.unwrap_or(0),
        None => moment.used_bytes().unwrap_or(0),
    };
    run.devices.iter().map(|device| of(&device.peak)).collect()
}

/// Returns sums of `data-bytes` by kind, as a reader of the file would.
fn sums(svg: &str) -> BTreeMap<String, i64> {
    let mut sums = BTreeMap::new();
    for shape in svg.split("<path ").skip(1) {
        let attribute = |name: &str| Some(shape.split_once(&format!(" {name}=\""))?.1.split_once('"')?.0);
        let (Some(of), Some(bytes)) = (attribute("data-of"), attribute("data-bytes")) else { continue };
        *sums.entry(of.to_owned()).or_default() += bytes.parse::<i64>().expect("bytes");
    }
    sums
}

#[test]
fn every_picture_adds_up() {
    let options = Options { title: None, hide_below: Some(1.5) };
    for run in &all() {
        for by in [GroupBy::Layer, GroupBy::Structure, GroupBy::Tag] {
            let report = report(run, Some(by));
            for picture in PICTURES {
                if picture == Picture::Timeline && run.devices[0].details.timeline.points.is_empty() {
                    // A line of readings alone: no part to sum.
                    let svg = draw(&[report_again(&report)], picture, &options).expect("a picture").svg();
                    assert!(sums(&svg).is_empty());
                    continue;
                }
                for options in [&Options::default(), &options] {
                    let svg = draw(&[report_again(&report)], picture, options).expect("a picture").svg();
                    let sums = sums(&svg);
                    let known = known(run);
                    // A device has one bar for each grouping, and one in other pictures.
                    let (mut found, mut expected): (Vec<i64>, Vec<i64>) =
                        (sums.into_values().collect(), Vec::new());
                    let bars = found.len() / known.len().max(1);
                    known.iter().for_each(|bytes| expected.extend(vec![*bytes; bars.max(1)]));
                    if picture == Picture::Timeline {
                        expected.retain(|bytes| found.contains(bytes));
                    }
                    found.sort_unstable();
                    expected.sort_unstable();
                    assert_eq!(found, expected, "{picture:?} {by:?} {}", run.source.origin);
                    assert!(!found.is_empty());
                }
            }
        }
    }
}

fn report_again<'r>(report: &Report<'r>) -> Report<'r> {
    Report::new(report.run, report.groupings.clone(), Some(report.by))
}

#[test]
fn pictures_of_other_tools_add_up() {
    for run in &all() {
        let report = report(run, None);
        let lines = tree::collapsed(&report);
        let mut paths = std::collections::BTreeSet::new();
        let mut sum = 0;
        for line in lines.lines() {
            let (path, bytes) = line.rsplit_once(' ').expect("a path and a count");
            assert!(path.split(';').all(|frame| !frame.trim().is_empty()), "{line}");
            assert!(!path.chars().any(char::is_control), "{line:?}");
            assert!(paths.insert(path.to_owned()), "twice: {path}");
            sum += bytes.parse::<u64>().expect("a count") as i64;
        }
        let negative: i64 = known(run).len() as i64 - 1;
        assert_eq!(sum, known_at_peak(run) + negative * 5 * MIB, "all but negative amounts");

        fn values(node: &serde_json::Value) -> i64 {
            let object = node.as_object().expect("a node");
            assert!(object["name"].is_string() && object.len() == 2, "{{name, children}} or {{name, value}}");
            match object.get("children") {
                Some(children) => children.as_array().expect("a list").iter().map(values).sum(),
                None => object["value"].as_i64().expect("bytes"),
            }
        }
        let tree: serde_json::Value = serde_json::from_str(&tree::treemap(&report)).expect("JSON");
        assert_eq!(values(&tree), known_at_peak(run));
        let devices = tree["children"].as_array().expect("one per device").len();
        assert_eq!(devices, run.devices.len());
    }
}

/// Returns a text's position: left, top, right, bottom, slightly smaller than the space of its letters.
fn room(text: &Text) -> [f64; 4] {
    let width = text.width();
    let left = match text.anchor {
        Anchor::Start => text.x,
        Anchor::Middle => text.x - width / 2.0,
        Anchor::End => text.x - width,
    };
    [left + 0.2, text.y - text.size * 0.7, left + width - 0.2, text.y + text.size * 0.15]
}

fn check_words(drawing: &Drawing, what: &str) {
    let texts: Vec<&Text> = drawing
        .items
        .iter()
        .filter_map(|item| match item {
            Item::Text(text) if !text.text.is_empty() => Some(text),
            _ => None,
        })
        .collect();
    assert!(texts.len() > 5, "{what}: {} words", texts.len());
    for (index, text) in texts.iter().enumerate() {
        let [left, top, right, bottom] = room(text);
        let inside = left >= 0.0 && top >= 0.0 && right <= drawing.width && bottom <= drawing.height;
        assert!(inside, "{what}: \"{}\" leaves the page: {:?}", text.text, room(text));
        for other in &texts[..index] {
            let [l, t, r, b] = room(other);
            let apart = right <= l || r <= left || bottom <= t || b <= top;
            assert!(apart, "{what}: \"{}\" is on \"{}\"", text.text, other.text);
        }
    }
}

#[test]
fn labels_do_not_overlap() {
    let title = Some("A title that a user typed without knowing how wide a page is, ".repeat(4));
    for run in &all() {
        for picture in PICTURES {
            for options in [Options::default(), Options { title: title.clone(), hide_below: Some(3.0) }] {
                for by in [GroupBy::Layer, GroupBy::Tag] {
                    let report = report(run, Some(by));
                    let Ok(drawing) = draw(&[report], picture, &options) else { continue };
                    check_words(&drawing, &format!("{picture:?} {by:?} of {}", run.source.origin));
                }
            }
        }
    }
    let many = all();
    for count in 1..=many.len() {
        let reports: Vec<Report<'_>> = many.iter().take(count).map(|run| report(run, None)).collect();
        let drawing = draw(&reports, Picture::Compare, &Options::default()).expect("a picture");
        check_words(&drawing, &format!("{count} side by side"));
    }
    let part = |name: &str, bytes: i64| Segment { name: name.into(), bytes, kind: Kind::Category };
    let odd = [
        Bar::of("nothing", Vec::new()),
        Bar::of("one byte", vec![part("a", 1)]),
        Bar::of("below zero", vec![part("a", 100 * MIB), part("b", -30 * MIB)]),
        Bar::of("twenty alike", (0..20).map(|number| part(&format!("p{number}"), 500)).collect()),
        Bar { total_bytes: 9, ..Bar::of("parts that do not add up", vec![part("a", 7)]) },
    ];
    let drawing = bars(&odd);
    check_words(&drawing, "odd bars");
    let reported = drawing
        .items
        .iter()
        .any(|item| matches!(item, Item::Text(text) if text.text.contains("parts add up to 7 bytes")));
    assert!(reported, "a bar that does not add up is reported");
}

#[test]
fn marks_and_ooms_are_lines_of_a_timeline() {
    let run = crowded(3);
    let drawing = draw(&[report(&run, None)], Picture::Timeline, &Options::default()).expect("a picture");
    let dashed = drawing.items.iter().filter(|item| matches!(item, Item::Line { dashed: true, .. })).count();
    assert_eq!(dashed, 3 + 5, "three times out of memory and five marks; one is outside");
    let words = |wanted: &str| {
        drawing.items.iter().any(|item| matches!(item, Item::Text(text) if text.text.starts_with(wanted)))
    };
    for name in ["OOM", "warm-up", "begin", "(unnamed)", "(blank)", "a name"] {
        assert!(words(name), "{name}");
    }
    assert!(!words("later"));
    assert!(!drawing.svg().contains('\u{1b}'));
}

#[test]
fn untrusted_names_stay_plain_text() {
    let run = crowded(30);
    let report = [report(&run, Some(GroupBy::Tag))];
    let drawing = draw(&report, Picture::Categories, &Options::default()).expect("a picture");
    let svg = drawing.svg();
    assert!(!svg.contains("<script") && !svg.contains("<b>") && !svg.contains('\u{1b}'), "escaped");
    assert!(svg.contains("&lt;b&gt;"));
    assert!(!svg.contains("href") && !svg.contains("url("), "nothing comes from elsewhere");
    let pdf = drawing.pdf();
    let text = String::from_utf8_lossy(&pdf);
    assert!(text.contains("\\(x\\)"), "parentheses do not end a string");
    assert!(text.contains("a\\(b\\)"), "nor in the title");
}

/// Letters as they are, on either side of a change.
#[test]
fn pictures_of_a_small_run() {
    let run = small_train();
    for (name, picture) in
        [("peak", Picture::Peak), ("categories", Picture::Categories), ("timeline", Picture::Timeline)]
    {
        let drawing = draw(&[report(&run, None)], picture, &Options::default()).expect("a picture");
        golden::check(&format!("pictures/small-train.{name}.svg"), &drawing.svg());
    }
    let reported = report(&run, None);
    golden::check("pictures/small-train.collapsed", &tree::collapsed(&reported));
    golden::check("pictures/small-train.treemap.json", &tree::treemap(&reported));
    golden::check("pictures/small-train.trace.json", &gpumem_report::trace::json(&reported));
    let runs = node_runs();
    golden::check("pictures/node.trace.json", &gpumem_report::trace::json(&report(&runs[0], None)));
}

/// Returns an installed program's output for a file; `None` with a skip if it is not installed.
fn says(program: &str, arguments: &[&str]) -> Option<String> {
    match Command::new(program).args(arguments).stderr(Stdio::inherit()).output() {
        Ok(output) => {
            assert!(output.status.success(), "{program} {arguments:?}: {}", output.status);
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Err(error) => {
            let package = match program {
                "pdftotext" | "pdfinfo" => "poppler-utils",
                "mutool" => "mupdf-tools",
                "rsvg-convert" => "librsvg2-bin",
                other => other,
            };
            gpumem_test_support::skip(
                &format!("{program} is not here ({error})"),
                &format!("apt-get install {package}"),
            );
            None
        }
    }
}

/// Lane `browser`.
mod browser {
    use super::*;

    #[test]
    fn flame_graph_tool_reads_every_byte() {
        let run = small_train();
        let file = std::env::temp_dir().join(format!("gpumem-stacks-{}", std::process::id()));
        std::fs::write(&file, tree::collapsed(&report(&run, None))).expect("written");
        let program = cargo_installed("inferno", "0.12.8", "inferno-flamegraph");
        let graph = program.and_then(|program| {
            says(&program.to_string_lossy(), &["--countname", "bytes", &file.to_string_lossy()])
        });
        std::fs::remove_file(&file).expect("removed");
        if let Some(graph) = graph {
            assert!(graph.contains(&format!("total_samples=\"{}\"", known_at_peak(&run))), "all of them");
        }
    }

    #[test]
    fn pictures_are_valid_pdf_png_and_svg() {
        let run = crowded(30);
        let drawing = draw(&[report(&run, Some(GroupBy::Tag))], Picture::Categories, &Options::default())
            .expect("a picture");
        let folder = std::env::temp_dir().join(format!("gpumem-pictures-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let file = |name: &str, bytes: &[u8]| {
            let path = folder.join(name);
            std::fs::write(&path, bytes).expect("written");
            path.to_string_lossy().into_owned()
        };
        let (pdf, png) = (drawing.pdf(), drawing.png().expect("small enough"));

        // Every offset in the cross-reference table is that of its object; this needs no PDF reader.
        let text = String::from_utf8_lossy(&pdf);
        let bytes_at = |at: usize, what: &str| pdf[at..].starts_with(what.as_bytes());
        let table: usize = text
            .rsplit("startxref\n")
            .next()
            .and_then(|rest| rest.lines().next()?.parse().ok())
            .expect("a table");
        assert!(bytes_at(table, "xref\n"));
        let rows: Vec<&str> =
            text.rsplit_once("\nxref\n").expect("a table").1.lines().skip(2).take(7).collect();
        for (number, row) in rows.iter().enumerate() {
            let at: usize = row[..10].parse().expect("a place");
            assert!(bytes_at(at, &format!("{} 0 obj\n", number + 1)), "{row}");
        }

        let (pdf, png, svg) =
            (file("a.pdf", &pdf), file("a.png", &png), file("a.svg", drawing.svg().as_bytes()));
        if let Some(words) = says("pdftotext", &["-layout", &pdf, "-"]) {
            for word in ["by tag", "Untrackable", "predates the agent", "Übergröße", "total 1"] {
                assert!(words.contains(word), "{word}: {words}");
            }
            assert!(!words.contains('中'), "what the font has not is replaced");
        }
        if let Some(about) = says("pdfinfo", &[&pdf]) {
            assert!(about.contains("Pages:           1") && about.contains("script"), "{about}");
        }
        if let Some(about) = says("mutool", &["info", &pdf]) {
            assert!(about.contains("Helvetica") && about.contains("Pages: 1"), "{about}");
        }
        let pixels = format!("{} x {}", (drawing.width * 2.0).ceil(), (drawing.height * 2.0).ceil());
        if let Some(about) = says("file", &[&png]) {
            assert!(about.contains(&pixels) && about.contains("8-bit/color RGB"), "{about}");
        }
        says("mutool", &["draw", "-q", "-o", &folder.join("a.ppm").to_string_lossy(), &png]);
        says("rsvg-convert", &["-o", &folder.join("b.png").to_string_lossy(), &svg]);
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
