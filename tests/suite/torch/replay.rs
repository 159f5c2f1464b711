//! The model of PyTorch's caching allocator against unmodified PyTorch: one recording of a program under default settings,
//! replayed under other settings, has the same figures as a real run of the program under these settings.
use gpumem_replay::{Device, Event, EventReturn, Options, Release, Replay, SegmentAddresses, Settings};
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::{Daemon, Job, torch, until};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// A setting: its name, the process's share of the device, bytes that something else takes, the text.
struct Setting {
    name: &'static str,
    fraction: Option<f64>,
    taken_bytes: u64,
    text: &'static str,
    /// First release line that has it.
    since: u16,
}

const fn plain(name: &'static str, text: &'static str) -> Setting {
    Setting { name, fraction: None, taken_bytes: 0, text, since: 1 }
}

const fn share(name: &'static str, fraction: f64, text: &'static str) -> Setting {
    Setting { fraction: Some(fraction), ..plain(name, text) }
}

const SETTINGS: [Setting; 14] = [
    plain("default", ""),
    plain("expandable", "expandable_segments:True"),
    plain("split32", "max_split_size_mb:32"),
    plain("round4", "roundup_power2_divisions:4"),
    plain("roundlist", "roundup_power2_divisions:[1:2,4:8,16:4,>:2]"),
    share("collection", 0.04, "garbage_collection_threshold:0.6"),
    share("fraction", 0.05, ""),
    share("expandablefraction", 0.035, "expandable_segments:True"),
    share("splitfraction", 0.045, "max_split_size_mb:24"),
    share("collectionsplit", 0.045, "garbage_collection_threshold:0.5,max_split_size_mb:32"),
    Setting { taken_bytes: 15_300_000_000, ..plain("small", "") },
    Setting { taken_bytes: 15_500_000_000, ..plain("smallexpandable", "expandable_segments:True") },
    Setting { since: 11, ..plain("segment64", "large_segment_size_mb:64") },
    Setting { since: 6, ..plain("rounding64", "max_split_size_mb:24,max_non_split_rounding_mb:64") },
];

impl Setting {
    /// Returns the argument of tests/torch/replay.py.
    fn argument(&self) -> String {
        let fraction = self.fraction.map(|fraction| format!("@{fraction}")).unwrap_or_default();
        let taken = if self.taken_bytes > 0 { format!("-{}", self.taken_bytes) } else { String::new() };
        format!("{}{fraction}{taken}={}", self.name, self.text)
    }

    /// Replays the recording of a program's default run. Returns the figures by torch's names for them.
    fn replay(&self, release: Release, recorded: &Value) -> Vec<(&'static str, u64)> {
        let mut settings = Settings::parse(self.text, release).expect("a valid text");
        settings.fraction = self.fraction;
        let other_bytes = recorded["other"].as_u64().expect("bytes");
        let device = Device { total_bytes: recorded["total"].as_u64().expect("bytes"), other_bytes };
        // The simulated driver uses the lowest free addresses.
        let addresses = SegmentAddresses::LowestFree;
        let options = Options { release, settings, device, addresses, returns: EventReturn::AsRecorded };
        let mut replay = Replay::new(options).expect("the native backend");
        let (mut requests, mut before_failure) = (0, 0);
        for event in recorded["events"].as_array().expect("events") {
            let event = self.event(event, other_bytes);
            replay.apply(&event).expect("a valid event");
            if matches!(event, Event::Request { .. }) {
                before_failure += u64::from(replay.figures().failure.is_none());
                requests += 1;
            }
        }
        let figures = replay.figures();
        assert_eq!(replay.unknown_frees(), 0);
        vec![
            ("reserved_bytes", figures.reserved.peak),
            ("allocated_bytes", figures.allocated.peak),
            ("active_bytes", figures.active.peak),
            ("requested_bytes", figures.requested.peak),
            ("segment", figures.segments.peak),
            ("num_device_alloc", figures.device_allocs),
            ("num_device_free", figures.device_frees),
            ("num_alloc_retries", figures.retries),
            ("num_ooms", figures.ooms),
            ("bytes of the failing request", figures.failure.map_or(0, |failure| failure.rounded_bytes)),
            ("requests before it", if before_failure < requests { before_failure } else { 0 }),
        ]
    }

    /// Reads an event as tests/torch/replay.py prints it.
    fn event(&self, event: &Value, other_bytes: u64) -> Event {
        let number = |place: usize| event[place].as_i64().expect("a number") as u64;
        let small = |place: usize| u32::try_from(number(place)).expect("a small number");
        let flag = |place: usize| event[place].as_bool().expect("a flag");
        match event[0].as_str().expect("a kind") {
            "request" => Event::Request {
                id: number(1),
                bytes: number(2),
                stream: small(3),
                pool: small(4),
                has_failed: flag(5),
            },
            "free" => Event::Free { id: number(1), is_pending: flag(2) },
            "return" => Event::Return { id: number(1) },
            "empty" => Event::EmptyCache { pool: None },
            "others" => Event::OtherMemory { bytes: other_bytes + self.taken_bytes },
            "scope" => Event::ScopeBegins { pool: small(1) },
            "leave" => Event::ScopeEnds { pool: small(1) },
            "gone" => Event::PoolEnds { pool: small(1) },
            kind => panic!("{kind}"),
        }
    }
}

/// Returns the same figures of a real run.
fn real(run: &Value) -> Vec<(&'static str, u64)> {
    let names = [
        "reserved_bytes",
        "allocated_bytes",
        "active_bytes",
        "requested_bytes",
        "segment",
        "num_device_alloc",
        "num_device_free",
        "num_alloc_retries",
        "num_ooms",
    ];
    let figure = |name: &&'static str| (*name, run["stats"][name].as_u64().expect("a figure"));
    let mut figures: Vec<_> = names.iter().map(figure).collect();
    let failed = |name: &str| run["failed"][name].as_u64().unwrap_or(0);
    figures.push(("bytes of the failing request", failed("bytes")));
    figures.push(("requests before it", failed("after")));
    figures
}

/// Checks the row of a release in the table of docs/whatif.md, or writes it.
fn check_table(version: &str, cells: &str) {
    let path = gpumem_tests::structure::root().join("docs/whatif.md");
    let page = std::fs::read_to_string(&path).expect("the page");
    let (begin, row) = (format!("| {version} |"), format!("| {version} | {cells} |"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        let lines = page.lines().map(|line| if line.starts_with(&begin) { row.as_str() } else { line });
        std::fs::write(path, lines.collect::<Vec<_>>().join("\n") + "\n").expect("written");
    } else if page.contains(&begin) {
        assert!(page.contains(&row), "docs/whatif.md lacks: {row}");
    }
}

#[test]
fn replay_of_one_recording_has_the_figures_of_real_runs_under_other_settings() {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        let release: Release =
            wheel.version.split('@').next().expect("a version").parse().expect("a release");
        let settings: Vec<_> =
            SETTINGS.iter().filter(|setting| Release::new(setting.since) <= release).collect();
        let mut compared = Vec::new();
        // On a busy machine, memory that another stream may use returns only when the program waits for the device.
        for keys in [&[][..], &["cuda.busy=1"]] {
            let machine = torch::machine(keys);
            let programs: &[&str] = if keys.is_empty() { &[] } else { &["streams", "loader", "hostile"] };
            let mut lines = Vec::new();
            for settings in settings.chunks(2) {
                let arguments: Vec<_> = settings.iter().map(|setting| setting.argument()).collect();
                let arguments = programs.iter().copied().chain(arguments.iter().map(String::as_str));
                let arguments: Vec<&str> = arguments.collect();
                let mut job = Job::start(&mut wheel.bare(&machine, "replay.py", &arguments));
                lines.extend(torch::finished(&mut job));
            }
            let runs: Vec<_> = lines.iter().filter(|line| line["program"].is_string()).collect();
            let mut failures = 0;
            for run in &runs {
                let is_default =
                    |other: &&&Value| other["program"] == run["program"] && other["setting"] == "default";
                let recorded = runs.iter().find(is_default).expect("a default run");
                let setting =
                    settings.iter().find(|setting| run["setting"] == setting.name).expect("a setting");
                let what = format!("torch {version}, {} under {}", run["program"], setting.name);
                assert_eq!(setting.replay(release, recorded), real(run), "{what}");
                failures += usize::from(run["failed"].is_object());
            }
            println!(
                "torch {version} {keys:?}: {} runs, {failures} of them without memory at the end",
                runs.len()
            );
            let expected = settings.len() * if programs.is_empty() { 13 } else { programs.len() };
            assert_eq!(runs.len(), expected);
            assert!(failures > 0 || !programs.is_empty(), "the settings include too little memory");
            compared.push(format!("{expected} of {expected}"));
        }
        let [all, busy] = &compared[..] else { panic!("two machines") };
        check_table(version, &format!("{} | {all} | {busy}", settings.len()));
    }
}

/// Returns the JSON of `gpumemctl whatif`.
fn whatif(wheel: &torch::Wheel, file: &Path, options: &[&str]) -> Value {
    let mut command = Command::new(programs().ours.join("gpumemctl"));
    command.arg("whatif").arg(file).args(["--json", "--torch", &wheel.version]).args(options);
    let output = command.output().expect("gpumemctl");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Checks that the replay of a complete recording has the figures of a real run under `text`.
fn assert_equal(told: &Value, text: &str, run: &Value, what: &str) {
    let known = [&told["is_exact"], &told["older_blocks"], &told["block_sizes"]];
    assert_eq!(known, [&Value::from(true), &Value::from(0), &Value::from(0)], "{what}: {told}");
    let trial = if text.is_empty() { &told["own"] } else { &told["trials"][0] };
    for (name, of_torch) in [
        ("peak_reserved_bytes", "reserved_bytes"),
        ("peak_allocated_bytes", "allocated_bytes"),
        ("driver_allocations", "num_device_alloc"),
        ("driver_frees", "num_device_free"),
        ("retries", "num_alloc_retries"),
    ] {
        assert_eq!(trial[name], run["stats"][of_torch], "{what}: {name}");
    }
}

#[test]
fn whatif_of_a_recording_has_the_figures_of_real_runs() {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        let machine = torch::machine(&[]);
        let release: Release =
            wheel.version.split('@').next().expect("a version").parse().expect("a release");
        let settings = SETTINGS.iter().filter(|setting| {
            setting.fraction.is_none() && setting.taken_bytes == 0 && Release::new(setting.since) <= release
        });
        let others: Vec<_> = settings.filter(|setting| setting.name != "default").collect();
        let recorded = |arguments: &[&str]| {
            let mut command = wheel.bare(&machine, "replay.py", arguments);
            command.env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
            command.env("GPUMEM_RECORD", machine.dir.join("%p.gpumem"));
            torch::finished(&mut Job::start(&mut command))
        };
        let file = |run: &Value| machine.dir.join(format!("{}.gpumem", run["pid"]));
        let is_run = |line: &Value| line["program"].is_string();
        let recordings: Vec<Value> = recorded(&["default="]).into_iter().filter(is_run).collect();
        assert_eq!(recordings.len(), 13);
        for run in &recordings {
            assert_equal(
                &whatif(&wheel, &file(run), &[]),
                "",
                run,
                &format!("torch {version}, {}", run["program"]),
            );
        }
        for settings in others.chunks(4) {
            let arguments: Vec<_> = settings.iter().map(|setting| setting.argument()).collect();
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let lines = torch::finished(&mut Job::start(&mut wheel.bare(&machine, "replay.py", &arguments)));
            // A recording has no calls of empty_cache that freed nothing; `hostile` makes such calls.
            for run in lines.iter().filter(|line| is_run(line) && line["program"] != "hostile") {
                let same = |other: &&Value| other["program"] == run["program"];
                let recording = recordings.iter().find(same).expect("a recording");
                let text =
                    settings.iter().find(|setting| run["setting"] == setting.name).expect("a setting").text;
                let what = format!("torch {version}, {} under {text}", run["program"]);
                assert_equal(&whatif(&wheel, &file(recording), &["--set", text]), text, run, &what);
            }
        }
        // The recording of a run that ends without memory: the same request fails in the replay, and fits in a larger device.
        let mut failures = 0;
        for run in
            recorded(&["gpt", "resnet", "hostile", "full-15300000000="]).iter().filter(|line| is_run(line))
        {
            let failed = &run["failed"];
            let told = whatif(&wheel, &file(run), &[]);
            let rounded = &told["own"]["failure"]["rounded_bytes"];
            assert_eq!(rounded, &failed["bytes"], "torch {version}, {}: {told}", run["program"]);
            if failed.is_object() {
                failures += 1;
                let told = whatif(&wheel, &file(run), &["--device-memory", "15G"]);
                let trials = told["trials"].as_array().expect("trials");
                assert!(trials.iter().all(|trial| trial["failure"].is_null()), "{told}");
            }
        }
        assert!(failures > 0, "the device is too large");
    }
}

/// The daemon keeps the requests, so a run that has ended and a process that still runs are answered like a recording.
#[test]
fn whatif_of_a_stored_run_has_the_figures_of_the_process() {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        let machine = torch::machine(&[]);
        let daemon = Daemon::start(&machine, "daemon", "[runs]\nkeep_requests = true\n");
        let store = machine.dir.join("runs.sqlite");
        let store = store.to_str().expect("a path");
        let mut job = Job::start(&mut wheel.covered(&machine, &daemon.runtime, "holding.py", &[]));
        job.wait_for("holding");
        let pid = job.pid().to_string();
        let held = until(20, "the requests of a live process", || {
            let mut command = daemon.ctl(&machine, &["whatif", &pid, "--store", store, "--json"]);
            let output = command.args(["--torch", &wheel.version]).output().expect("gpumemctl");
            serde_json::from_slice::<Value>(&output.stdout).ok()
        });
        assert!(held["requests"].as_u64() > Some(0) && held["is_exact"] == true, "{held}");
        job.signal("KILL");
        let arguments =
            ["gpt", "graphs", "streams", "resnet", "default=", "expandable=expandable_segments:True"];
        let lines = torch::finished(&mut Job::start(&mut wheel.covered(
            &machine,
            &daemon.runtime,
            "replay.py",
            &arguments,
        )));
        let runs: Vec<_> = lines.iter().filter(|line| line["program"].is_string()).collect();
        until(20, "closed runs", || daemon.pids(&machine).is_empty().then_some(()));
        for run in &runs {
            let pid = run["pid"].to_string();
            let what = format!("torch {version}, {} under {}", run["program"], run["setting"]);
            let told = whatif(&wheel, Path::new(&pid), &["--store", store]);
            assert_equal(&told, "", run, &what);
        }
        assert_eq!(runs.len(), 8);
    }
}

#[test]
fn whatif_of_a_snapshot_has_the_figures_of_real_runs() {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        let machine = torch::machine(&[]);
        let settings = [
            ("default", ""),
            ("expandable", "expandable_segments:True"),
            ("split32", "max_split_size_mb:32"),
            ("round4", "roundup_power2_divisions:4"),
        ];
        let mut arguments = vec!["gpt".to_owned(), "resnet".to_owned(), "streams".to_owned()];
        arguments.extend(settings.iter().map(|(name, text)| format!("{name}={text}")));
        arguments.push("full-15300000000=".to_owned());
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut job =
            Job::start(wheel.bare(&machine, "replay.py", &arguments).env("SNAPSHOTS", &machine.dir));
        let lines = torch::finished(&mut job);
        let whatif = |program: &Value, setting: &str, options: &[&str]| -> Value {
            let name = program.as_str().expect("a name");
            whatif(&wheel, &machine.dir.join(format!("{name}-{setting}.pickle")), options)
        };
        let mut failures = 0;
        for run in lines.iter().filter(|line| line["program"].is_string()) {
            let setting = run["setting"].as_str().expect("a name");
            let what = format!("torch {version}, {} under {setting}", run["program"]);
            if setting == "full" {
                // The recording of a run that ends without memory: the same request fails in the replay, and fits elsewhere.
                let told = whatif(&run["program"], setting, &["--device-memory", "15G"]);
                let failure = &told["own"]["failure"];
                assert_eq!(failure["rounded_bytes"], run["failed"]["bytes"], "{what}: {told}");
                assert!(
                    told["trials"].as_array().expect("trials").iter().all(|trial| trial["failure"].is_null())
                );
                failures += usize::from(failure.is_object());
                continue;
            }
            let (_, text) = settings.iter().find(|(name, _)| *name == setting).expect("a setting");
            let options = if text.is_empty() { vec![] } else { vec!["--set", text] };
            let told = whatif(&run["program"], "default", &options);
            assert_equal(&told, text, run, &what);
        }
        assert!(failures > 0, "the device is too large");
    }
}
