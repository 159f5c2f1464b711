//! Exported runs: nothing is lost, and damaged or forged files are rejected.
use gpumem_import::read_file;
use gpumem_model::escape::is_unsafe;
use gpumem_model::run::{Cell, Class, Run, State};
use gpumem_report::rules::Groupings;
use gpumem_report::{Report, csv, json, text};
use gpumem_runs::export::{self, Exported, From, MOVED};
use gpumem_runs::input::{Error, Input};
use gpumem_runs::store::Store;
use std::fs;
use std::path::{Path, PathBuf};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("gpumem-export-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }
    fn read(&self, bytes: &[u8]) -> Result<Exported, Error> {
        let path = self.0.join("run.gpumem-run");
        fs::write(&path, bytes).expect("a file");
        export::read(Input::open(&path)?)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn shipped() -> Run {
    let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    let mut run = read_file(&log, None).expect("a log").remove(0);
    // The file of a run has no single blocks.
    run.devices.iter_mut().for_each(|device| device.details.blocks = Default::default());
    run
}

/// The smallest run that contains something of every kind.
fn small() -> Run {
    let mut run = shipped();
    run.caveats.truncate(1);
    run.cells = vec![
        Cell { tag: Some("a/\"b\"\u{1b}é".into()), ..Cell::default() },
        Cell { class: Class::PoolIdle, pool: Some("torch".into()), ..Cell::default() },
    ];
    let device = &mut run.devices[0];
    for moment in [&mut device.last, &mut device.peak] {
        moment.amounts = vec![(0, 3), (1, 4)].into();
        moment.tracked_bytes = Some(7);
    }
    device.details = gpumem_model::run::Details::default();
    device.series.buckets.truncate(1);
    run
}

#[test]
fn exported_run_shows_no_character_that_a_terminal_obeys() {
    let mut run = small();
    run.cells[0].tag = Some("\u{202e}a\u{9b}2J\u{1b}[m\u{2028}\u{e0041}".into());
    run.process.facts.insert("command".into(), "x\u{200b}\u{7f}".into());
    let file = export::write(&run, "uid\u{202e}", &from()).expect("a file");
    let text = String::from_utf8(file.clone()).expect("text");
    assert!(!text.chars().any(|character| is_unsafe(character) && character != '\n'), "{text}");
    let again = Folder::new("acts").read(&file).expect("a run");
    assert_eq!((again.uid.as_str(), &again.run.cells), ("uid\u{202e}", &run.cells));
    assert_eq!(again.run.process.facts, run.process.facts);
}

fn from() -> From {
    From {
        host: "node7".into(),
        id: Some("r7".into()),
        time_s: 1_795_200_000,
        program: "gpumemctl 0.1.0".into(),
    }
}

#[test]
fn a_run_is_the_same_elsewhere_but_for_where_it_came_from() {
    let folder = Folder::new("same");
    for run in [shipped(), small()] {
        let file = export::write(&run, "boot:1:2", &from()).expect("small enough");
        assert!(export::looks_like(&file));
        let read = folder.read(&file).expect("whole");
        assert_eq!((read.uid.as_str(), &read.from), ("boot:1:2", &from()));
        let mut there = read.run.clone();
        let mark = there.caveats.pop().expect("a mark");
        assert_eq!((mark.code.as_str(), there == run), (MOVED, true));
        assert!(mark.text.contains("exported on node7, where it is run r7, at 2026-11-"), "{}", mark.text);
        // When exported again, it keeps its first origin.
        let further = export::write(&read.run, &read.uid, &From { host: "third".into(), ..from() })
            .expect("small enough");
        assert_eq!(folder.read(&further).expect("whole").run, read.run);

        let mut store = Store::open(folder.0.join("runs.sqlite")).expect("a store");
        let (id, new) = store.insert(&read.run, &format!("{}{}", read.uid, run.cells.len())).expect("stored");
        assert!(new);
        assert_eq!(store.load(id).expect("a run"), read.run);
    }
}

#[test]
fn a_run_that_goes_on_is_a_snapshot_with_a_name_of_its_own() {
    let folder = Folder::new("open");
    let mut run = small();
    run.state = State::Open;
    let first = folder.read(&export::write(&run, "boot:1:2", &from()).expect("small")).expect("whole");
    assert_eq!(first.run.state, State::Interrupted);
    run.devices[0].last.time_ns += 1;
    let second = folder.read(&export::write(&run, "boot:1:2", &from()).expect("small")).expect("whole");
    run.state = State::Closed { time_ns: 9, status: Some(0) };
    let third = folder.read(&export::write(&run, "boot:1:2", &from()).expect("small")).expect("whole");
    assert_eq!(third.uid, "boot:1:2");
    assert!(first.uid != second.uid && first.uid != third.uid && second.uid != third.uid);
}

#[test]
fn a_file_that_is_cut_anywhere_is_named_with_the_place() {
    let folder = Folder::new("cut");
    let file = export::write(&small(), "boot:1:2", &from()).expect("small");
    let head = file.iter().position(|byte| *byte == b'\n').expect("a first line") + 1;
    for length in 1..file.len() - 1 {
        match folder.read(&file[..length]) {
            Err(Error::Damaged { offset, what, .. }) if length >= head => {
                assert_eq!(offset, length as u64, "{what}");
                assert!(what.contains("bytes are missing"), "{what}");
            }
            Err(Error::Damaged { offset: 0, .. } | Error::Encoding { .. }) if length < head => {}
            other => panic!("{length} of {}: {other:?}", file.len()),
        }
    }
    assert!(folder.read(&file[..file.len() - 1]).is_ok(), "a line end is not part of the run");
    let long = [file.as_slice(), b"more"].concat();
    assert!(matches!(folder.read(&long), Err(Error::Damaged { .. })));
}

#[test]
fn a_file_with_any_bit_flipped_is_not_believed() {
    let folder = Folder::new("flipped");
    let file = export::write(&small(), "boot:1:2", &from()).expect("small");
    // The last byte is the line end after the run.
    for at in 0..file.len() {
        let bits: &[u8] = if at % 29 == 0 { &[0, 1, 2, 3, 4, 5, 6, 7] } else { &[(at % 8) as u8] };
        for bit in bits {
            let mut flipped = file.clone();
            flipped[at] ^= 1 << bit;
            let error = match folder.read(&flipped) {
                Err(error) => error.to_string(),
                Ok(read) => panic!("byte {at}, bit {bit}: {:?}", read.uid),
            };
            assert!(error.contains("run.gpumem-run: "), "{error}");
        }
    }
}

/// Returns a file with a valid checksum and arbitrary content.
fn forged(body: &str) -> Vec<u8> {
    let sum = |piece: &[u8]| {
        piece.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
            (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        })
    };
    let checks: Vec<String> =
        body.as_bytes().chunks(64 << 10).map(|piece| format!("\"{:016x}\"", sum(piece))).collect();
    let head = format!(
        "{{\"format\":\"gpumem-run\",\"version\":1,\"bytes\":{},\"checks\":[{}]}}\n",
        body.len(),
        checks.join(",")
    );
    [head.as_bytes(), body.as_bytes(), b"\n"].concat()
}

fn body(run: &Run) -> String {
    format!("{{\"uid\":\"x\",\"run\":{}}}", serde_json::to_string(run).expect("JSON"))
}

#[test]
fn what_does_not_add_up_is_refused_and_what_is_odd_is_survived() {
    let folder = Folder::new("forged");
    assert!(folder.read(&forged(&body(&small()))).is_ok(), "who it is from is not needed");
    type Damage = fn(&mut Run);
    let wrong: [(&str, Damage); 8] = [
        ("does not exist; there are 2", |run| run.devices[0].peak.amounts[1].0 = 99),
        ("do not add up", |run| run.devices[0].peak.tracked_bytes = Some(8)),
        ("do not add up", |run| run.devices[0].last.amounts = vec![(0, 3), (0, 4)].into()),
        ("larger than any memory", |run| run.devices[0].last.amounts[0].1 = i64::MAX),
        ("larger than any memory", |run| run.devices[0].last.untrackable_bytes = Some(i64::MIN)),
        ("does not exist; there are 2", |run| {
            run.devices[0].details.timeline.points =
                vec![gpumem_model::timeline::Point { amounts: vec![(2, 1)].into(), ..Default::default() }];
        }),
        ("does not exist; there are 2", |run| {
            run.devices[0].details.ooms =
                vec![gpumem_model::run::Oom { amounts: vec![(7, 1)].into(), ..Default::default() }];
        }),
        ("different lengths", |run| run.devices[0].details.growth.named = vec![1, 2, 3]),
    ];
    for (words, change) in wrong {
        let mut run = small();
        change(&mut run);
        let error = folder.read(&forged(&body(&run))).expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    }
    // Texts, numbers and lists of the wrong types.
    let right = body(&small());
    let value: serde_json::Value = serde_json::from_str(&right).expect("JSON");
    let mut paths = Vec::new();
    places(&value, String::new(), &mut paths);
    for path in paths {
        for odd in ["null", "-1", "18446744073709551615", "\"\\u0000\"", "[]", "{}", "[[[[]]]]", "1e308"] {
            let mut forged_value = value.clone();
            *forged_value.pointer_mut(&path).expect("a place") = serde_json::from_str(odd).expect("JSON");
            if let Ok(read) = folder.read(&forged(&forged_value.to_string())) {
                let report = Report::new(&read.run, Groupings::of_run(&read.run), None);
                let told =
                    text::text(&report, text::Layout::default()) + &json::json(&report) + &csv::csv(&report);
                assert!(!told.is_empty());
            }
        }
    }
}

fn places(value: &serde_json::Value, path: String, paths: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                places(value, format!("{path}/{}", name.replace('~', "~0").replace('/', "~1")), paths);
            }
        }
        serde_json::Value::Array(list) => {
            for (index, value) in list.iter().enumerate() {
                places(value, format!("{path}/{index}"), paths);
            }
        }
        _ => {}
    }
    paths.push(path);
}

#[test]
fn hostile_files_cost_little() {
    let folder = Folder::new("hostile");
    let refused = |file: &[u8], words: &str| {
        let error = folder.read(file).expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    };
    let with = |field: &str, list: String| {
        let mut value = serde_json::to_value(small()).expect("JSON");
        value["devices"][0]["details"][field] = serde_json::Value::String("@".into());
        format!("{{\"uid\":\"x\",\"run\":{}}}", value.to_string().replace("\"@\"", &list))
    };
    refused(
        &forged(&with("ooms", format!("[{}{{}}]", "{},".repeat(500_000)))),
        "objects, where a run has at most 400000",
    );
    let deep = format!("{{\"new\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    refused(&forged(&deep), "no run: missing field");
    let named = format!("{{\"uid\":\"x\",\"run\":{}}}", serde_json::to_value(small()).expect("JSON"));
    let named = named.replacen("\"closed\"", "\"c\u{7f}sed\"", 1);
    refused(&forged(&named), "unknown variant `c\\u{7f}sed`");
    let deep = with("steps", format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)));
    refused(&forged(&deep), "no run: ");
    refused(b"{\"format\":\"gpumem-run\",\"version\":0,\"bytes\":0,\"checks\":[]}\n", "version 1 and up");
    let endless = [
        b"{\"format\":\"gpumem-run\",\"version\":1,\"bytes\":0,\"checks\":[\"".as_slice(),
        &vec![b'x'; 1 << 20],
    ]
    .concat();
    refused(&endless, "first line is incomplete");
    // Claims ten gigabytes that do not follow.
    let path = folder.0.join("sparse");
    fs::write(&path, b"{\"format\":\"gpumem-run\",\"version\":1,\"bytes\":60000000,\"checks\":[]}\n")
        .expect("a file");
    fs::File::options()
        .write(true)
        .open(&path)
        .and_then(|file| file.set_len(10 << 30))
        .expect("a sparse file");
    let error = read_file(&path, None).expect_err("a hole").to_string();
    assert!(error.contains("should be followed by one line end"), "{error}");
}
