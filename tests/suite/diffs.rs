//! Output of comparisons, compared exactly in text and JSON; those of real recordings match to the byte.
use gpumem_import::read_file;
use gpumem_model::run::{Cell, Run, Source, State};
use gpumem_report::diff::gate::{Of, judge};
use gpumem_report::diff::text::{Layout, text};
use gpumem_report::diff::{At, Diff, Side, data};
use gpumem_report::{GroupBy, Part};
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_tests::live::{Daemon, Machine, Mixer, until};
use gpumem_tests::samples::sample;
use gpumem_tests::{golden, node};
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MIB: i64 = 1 << 20;

fn small_train() -> Run {
    let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/small-train.log");
    read_file(&log, None).expect("a log").remove(0)
}

/// The same training with a larger vocabulary, one more layer and less untracked memory.
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
        for (cell, bytes) in moment.amounts.iter_mut() {
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

fn diff<'r>(a: &'r Run, b: &'r Run, at: At, by: Option<GroupBy>) -> Diff<'r> {
    Diff::new([side(a, "r7"), side(b, "r9")], at, None, by)
}

#[test]
fn two_trainings_in_every_form() {
    let (a, b) = (small_train(), larger());
    let peak = diff(&a, &b, At::Peak, None);
    let reported = text(&peak, Layout::default());
    assert!(reported.lines().count() <= 35, "{reported}");
    golden::check("diffs/small-train.txt", &reported);
    golden::check("diffs/small-train.tags.txt", &text(&peak, Layout { tags: true, ..Layout::default() }));
    let verdict = judge(&peak, &Of::Peak, "2%".parse().expect("a limit"));
    golden::check("diffs/small-train.json", &data::json(&peak, Some(&verdict)));
    golden::check("diffs/small-train.csv", &data::csv(&peak));
    let drawing = data::picture(&peak).expect("bytes");
    assert!(drawing.svg().contains("peak is 68.7 MiB higher") && drawing.pdf().starts_with(b"%PDF"));
}

#[test]
fn a_process_with_an_agent_and_one_without() {
    let mut builder = RunBuilder::new(Source { kind: "daemon".into(), origin: "node7".into(), preset: None });
    node::said().iter().for_each(|(origin, record)| builder.observe(*origin, record));
    let runs = builder.runs(true);
    let both = diff(&runs[0], &runs[1], At::Now, None);
    golden::check("diffs/node.txt", &text(&both, Layout::default()));
    golden::check("diffs/node.csv", &data::csv(&both));
}

#[test]
fn bert_pair_differs_by_recorded_parameters_and_gradients() {
    const LATE: &str = "mxnet2-csv/finetune_classifier-pid_17827.673cf9f.csv";
    const WHOLE: &str = "mxnet2-csv/finetune_classifier.csv";
    let (Some(late), Some(whole)) = (sample(LATE), sample(WHOLE)) else { return };
    let read = |path: &Path| read_file(path, None).expect("a profile").remove(0);
    let (a, b) = (read(&late), read(&whole));
    let diff = Diff::new([side(&a, LATE), side(&b, WHOLE)], At::Peak, None, None);
    let pair = diff.whole().expect("a device");

    // To the byte: the rows of the files, by the kind of storage in their names.
    let bytes_of = |kind: &str| {
        let tags = &pair.table(GroupBy::Tag).statement.rows;
        let of_kind = tags.iter().filter(|row| row.part == Part::Category && row.name.contains(kind));
        of_kind.filter_map(|row| Some(row.bytes[1]? - row.bytes[0]?)).sum::<i64>()
    };
    let (weights, gradients) = (bytes_of("in_arg"), bytes_of("arg_grad"));
    assert_eq!((weights + gradients) / MIB, 1056, "{weights} + {gradients}");
    let structures = pair.table(GroupBy::Structure);
    let named = |name: &str| {
        let row = structures.statement.rows.iter().find(|row| row.name == name).expect(name);
        row.bytes[1].expect("known") - row.bytes[0].expect("known")
    };
    // Input data also has such names, and does not count as weights.
    assert_eq!((named("Weights") + named("Weight Gradients")) / MIB, 1056);
    let tags = pair.table(GroupBy::Tag);
    let is_of = |name: &str| name.contains("in_arg") || name.contains("arg_grad");
    let rows = tags.statement.rows.iter().zip(&tags.only).filter(|(row, _)| is_of(&row.name));
    let only: i64 = rows.filter(|(_, only)| **only == Some(1)).filter_map(|(row, _)| row.bytes[1]).sum();
    assert_eq!(only / MIB, 1056, "recorded in one, not in the other");

    let reported = text(&diff, Layout::default());
    assert!(reported.lines().count() <= 35, "{reported}");
    let sentence = reported.lines().find(|line| line.starts_with("B's peak")).expect("a sentence");
    assert!(sentence.starts_with("B's peak is 92.0 MiB higher (used, +1.2 %): "), "{sentence}");
    for cause in ["Weights +528.1", "Weight Gradients +528.1", "Untrackable -1,055.7"] {
        assert!(sentence.contains(cause), "{sentence}");
    }
    assert!(reported.contains("1,055.7 MiB may differ in coverage, not in use"), "{reported}");
}

/// The store of an ended daemon, read by gpumemctl.
fn diff_text(daemon: &Daemon, machine: &Machine, arguments: &[&str]) -> (Option<i32>, String) {
    let store = format!("--store={}", machine.dir.join("runs.sqlite").display());
    let output = daemon.ctl(machine, arguments).arg(store).output().expect("gpumemctl runs");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!printed.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (output.status.code(), printed)
}

fn document(reported: (Option<i32>, String)) -> Value {
    serde_json::from_str(&reported.1).unwrap_or_else(|error| panic!("{error}: {}", reported.1))
}

#[test]
fn jobs_of_several_ranks_are_compared_by_rank_and_as_a_whole() {
    let machine = Machine::new(&["devices=2"]);
    let mut daemon = Daemon::start(&machine, "daemon", "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n");
    for (job, sizes) in [("before", [64, 32]), ("after", [64, 48])] {
        let mut ranks: Vec<Mixer> = Vec::new();
        for (rank, mib) in sizes.into_iter().enumerate() {
            let mut command = Mixer::command(&machine, &daemon);
            command.env("GPUMEM_JOB", job).env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
            let mut mixer = Mixer::run(&mut command);
            mixer.ok(&format!("device {rank}; alloc a {mib}M"));
            ranks.push(mixer);
        }
        until(30, "samples of both ranks", || {
            let runs = daemon.asked(&format!("/v1/runs?job={job}"))?;
            let runs = runs["runs"].as_array().or(runs.as_array())?.clone();
            (runs.len() == 2).then_some(())
        });
        let pids: Vec<u64> = ranks.iter().map(|rank| u64::from(rank.pid())).collect();
        ranks.iter_mut().for_each(Mixer::end);
        until(20, "closed runs", || {
            let known = daemon.pids(&machine);
            pids.iter().all(|pid| !known.contains(pid)).then_some(())
        });
    }
    daemon.stop();

    let (_, report) = diff_text(&daemon, &machine, &["report", "--job", "after"]);
    assert!(report.starts_with("2 processes of job after"), "{report}");
    assert!(report.contains("64.0") && report.contains("48.0") && report.contains("112.0"), "{report}");

    let compared = ["diff", "--job", "before", "after"];
    let (code, text) = diff_text(&daemon, &machine, &compared);
    println!("{text}");
    assert_eq!(code, Some(0));
    assert!(text.contains("2 processes of job before, all ended, each run at its own time"), "{text}");
    assert!(text.contains("2 ranks (2 by rank)") && text.contains("all ranks"), "{text}");
    assert!(text.contains("next: gpumemctl diff --job before after"), "{text}");
    let diff = document(diff_text(&daemon, &machine, &[&compared[..], &["--json"]].concat()));
    let amounts =
        |pair: &Value| ["a_bytes", "b_bytes", "difference_bytes"].map(|key| pair["tracked"][key].as_i64());
    let mib = |sizes: [i64; 3]| sizes.map(|size| Some(size * MIB));
    assert_eq!(amounts(&diff["total"]), mib([96, 112, 16]));
    for (rank, expected) in [(0, [64, 64, 0]), (1, [32, 48, 16])] {
        let pair = &diff["pairs"][rank];
        assert_eq!((&pair["paired"], &pair["a"]["name"]), (&"rank".into(), &format!("rank {rank}").into()));
        assert_eq!(amounts(pair), mib(expected), "rank {rank}");
    }
    let gate = |limit| {
        diff_text(&daemon, &machine, &[&compared[..], &["--of", "tracked", "--fail-above", limit]].concat()).0
    };
    assert_eq!((gate("10MiB"), gate("20MiB")), (Some(8), Some(0)));
}

#[test]
fn time_range_spans_the_parts_of_a_split_run() {
    let machine = Machine::new(&["devices=1"]);
    let config = "[runs]\ncheckpoint_every_s = 0.1\nroll_every_s = 1.0\n[metrics]\nlisten = \"off\"\n[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
    let mut daemon = Daemon::start(&machine, "daemon", config);
    let mut mixer = Mixer::start(&machine, &daemon);
    let (pid, number) = (mixer.pid().to_string(), u64::from(mixer.pid()));
    mixer.ok("device 0; alloc base 64M");
    let wall = |ns: u64| -> String {
        let age = gpumem_tests::live::mixer::now_ns() - ns;
        let at =
            SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970") - Duration::from_nanos(age);
        format!("@{}.{:06}", at.as_secs(), at.subsec_micros())
    };
    let parts = |count: usize| {
        until(60, "parts", || {
            // The first ones find no store yet.
            let store = format!("--store={}", machine.dir.join("runs.sqlite").display());
            let listed = daemon.ctl(&machine, &["runs", "--json", &store]).output().expect("gpumemctl runs");
            let listed: Value = serde_json::from_slice(&listed.stdout).ok()?;
            let of_pid = listed.as_array()?.iter().filter(|run| run["pid"].as_u64() == Some(number));
            (of_pid.count() >= count).then_some(())
        });
    };
    // Each part temporarily holds memory that no other part held.
    let mut held = Vec::new();
    for (part, mib) in [(1, 100), (2, 300), (3, 200)] {
        parts(part);
        let since = mixer.ok(&format!("alloc more {mib}M")).ended_ns;
        std::thread::sleep(Duration::from_millis(60));
        let until = mixer.ok("free more").began_ns;
        held.push((since, until, mib));
    }
    parts(4);
    mixer.end();
    daemon.wait_for_the_end_of(&machine, &[]);
    daemon.stop();

    let report = |flag: &str, window: String| {
        let document = document(diff_text(&daemon, &machine, &["report", &pid, "--json", flag, &window]));
        let device = &document["devices"][0];
        for moment in ["last", "peak"] {
            let held = &device[moment];
            let parts: i64 = held["layers"]
                .as_object()
                .into_iter()
                .flat_map(|it| it.values())
                .filter_map(Value::as_i64)
                .sum();
            assert!(
                parts == 0 || held["tracked_bytes"].as_i64().is_some_and(|tracked| parts <= tracked),
                "{held}"
            );
        }
        let caveats = document["caveats"].as_array().expect("caveats");
        let spans = caveats.iter().find(|caveat| caveat["code"] == "parts").map(|it| it["text"].to_string());
        (device["peak"]["tracked_bytes"].as_i64(), spans.unwrap_or_default())
    };
    let total = |mib: i64| Some((64 + mib) * MIB);
    let middle = |(since, until, _): (u64, u64, i64)| wall(since.midpoint(until));
    for of in held.clone() {
        let (peak, spans) = report("--at", middle(of));
        assert_eq!(peak, total(of.2), "{of:?}");
        assert!(spans.contains("the window is of r"), "{spans}");
    }
    let whole = format!("{},{}", middle(held[0]), middle(held[2]));
    let (peak, spans) = report("--between", whole);
    assert_eq!(peak, total(300));
    assert!(spans.contains("parts of the process's life, which are joined: r"), "{spans}");
    let (peak, _) = report("--since", middle(held[2]));
    assert_eq!(peak, total(200), "the parts before are not in it");
}

/// The second part belongs to another daemon, which numbers its names anew.
#[test]
fn names_and_losses_of_each_part_are_in_the_whole() {
    let machine = Machine::new(&["devices=1", "memory=16G"]);
    let config = "[runs]\ncheckpoint_every_s = 0.1\nroll_every_s = 1.0\n[metrics]\nlisten = \"off\"\n[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
    let mut daemon = Daemon::start(&machine, "daemon", config);
    let mut command = Mixer::command(&machine, &daemon);
    let mut mixer = Mixer::run(command.env("GPUMEM_RING_SLOTS", "2048"));
    let (pid, number) = (mixer.pid().to_string(), u64::from(mixer.pid()));
    mixer.ok("device 0; tag early; alloc base 64M");
    let runs = |daemon: &Daemon| -> Vec<Run> {
        let runs = daemon.asked(&format!("/v1/runs?pid={pid}"));
        runs.and_then(|runs| serde_json::from_value(runs).ok()).unwrap_or_default()
    };
    let part_of = |run: &Run| run.coverage.part.map_or(1, |part| part.number);
    let live = |daemon: &Daemon| runs(daemon).into_iter().find(|run| run.state == State::Open);
    // Waits for a new part, and returns its number.
    let next_part = |daemon: &Daemon, after: u32| {
        until(60, "a new part", || live(daemon).map(|run| part_of(&run)).filter(|part| *part > after))
    };
    until(60, "the process", || live(&daemon));
    daemon.job.signal("STOP");
    for _ in 0..5000 {
        mixer.ok("alloc more 1M; free more");
    }
    daemon.job.signal("CONT");
    let lossy = until(60, "the loss", || {
        runs(&daemon).into_iter().find(|run| run.coverage.lost > 0).map(|run| part_of(&run))
    });
    next_part(&daemon, lossy);
    daemon.stop();
    let mut daemon = Daemon::start(&machine, "second", config);
    // Until its agent has resent its state, the daemon answers with what the first one has stored.
    until(60, "the resent state", || {
        let ps = daemon.asked("/v1/ps")?;
        let mut rows = ps["processes"].as_array()?.iter();
        rows.any(|row| row["pid"] == number && row["tracked_bytes"] == 64 * MIB).then_some(())
    });
    let before = until(60, "the process", || live(&daemon).map(|run| part_of(&run)));
    mixer.ok("tag late; alloc held 300M");
    mixer.refused("alloc huge 100G");
    let failed = until(60, "the OOM", || {
        let has_oom = |run: &Run| run.devices.iter().any(|device| !device.details.ooms.is_empty());
        runs(&daemon).into_iter().find(has_oom).map(|run| part_of(&run))
    });
    assert!(lossy < failed && before <= failed, "{lossy}, {before}, {failed}");
    mixer.ok("free held");
    next_part(&daemon, failed);
    mixer.end();
    daemon.wait_for_the_end_of(&machine, &[]);
    daemon.stop();

    let listed = document(diff_text(&daemon, &machine, &["runs", "--json"]));
    let of_pid = listed.as_array().expect("rows").iter().filter(|run| run["pid"].as_u64() == Some(number));
    let parts: Vec<Value> = of_pid
        .map(|run| {
            document(diff_text(&daemon, &machine, &["report", run["run"].as_str().expect("id"), "--json"]))
        })
        .collect();
    let lost = |run: &Value| run["coverage"]["lost"].as_u64().expect("a count");
    assert!(parts.len() > 2 && lost(&parts[0]) == 0, "the newest part has no loss");
    let whole = document(diff_text(&daemon, &machine, &["report", &pid, "--since", "1d", "--json"]));
    let of = &whole["coverage"];
    assert!(lost(&whole) > 0, "{of}");
    assert_eq!(lost(&whole), parts.iter().map(lost).sum::<u64>(), "{of}");
    assert_eq!((&of["partial_history"], &of["partial_state"]), (&true.into(), &false.into()), "{of}");
    let (_, text) = diff_text(&daemon, &machine, &["report", &pid, "--since", "1d"]);
    assert!(text.contains("peak is a lower bound: records were lost"), "{text}");
    // The command that the report names shows the record.
    let typed =
        text.split("(gpumemctl oom ").nth(1).and_then(|rest| rest.split_once(')')).expect("a command").0;
    let store = machine.dir.join("runs.sqlite").display().to_string();
    assert_eq!(typed.split_once(" --store "), Some((&*pid, &*store)), "{text}");
    let ooms = document(diff_text(&daemon, &machine, &["oom", &pid, "--json"]));
    let entries = ooms["ooms"].as_array().expect("entries");
    assert_eq!(entries.len(), 1, "{ooms}");
    let held: Vec<_> = entries[0]["held"]
        .as_array()
        .into_iter()
        .flatten()
        // Untrackable is there if NVML was read in time.
        .filter(|part| part["name"] != "Untrackable")
        .map(|part| (part["name"].as_str().unwrap_or_default(), part["bytes"].as_i64().unwrap_or(0) / MIB))
        .collect();
    assert_eq!(
        (held, entries[0]["tag"].as_str()),
        (vec![("late", 300), ("early", 64)], Some("late")),
        "{ooms}"
    );
}
