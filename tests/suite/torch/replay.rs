//! The model of PyTorch's caching allocator against unmodified PyTorch: one recording of a program under default settings,
//! replayed under other settings, has the same figures as a real run of the program under these settings.
use crate::replay_proof::{self, Setting, VERSIONS, WITH_LIMITS, WITH_THREADS};
use gpumem_replay::{
    Device, Event, EventReturn, Options, PoolKind, Release, Replay, SegmentAddresses, Settings,
};
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::{Daemon, Job, Machine, torch, until};
use serde_json::Value;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Settings under which the agent's recordings and snapshots of programs are made: the default, and with little free memory.
const RECORDED: [&str; 2] = ["default", "small"];

/// Programs whose memory is compared with the bound for the driver's own pool. The simulated driver frees no memory of graphs.
const WITH_DRIVER_POOL: [&str; 5] = ["gpt", "resnet", "streams", "generate", "hostile"];

impl Setting {
    /// Replays the recording of a program's default run. Returns the figures by torch's names for them, and whether the replay has
    /// ended before the recording.
    fn replay(&self, release: Release, recorded: &Value) -> (Vec<(&'static str, u64)>, bool) {
        let settings = Settings::parse(self.text, release).expect("a valid text");
        let other_bytes = recorded["other"].as_u64().expect("bytes");
        let device = Device { total_bytes: recorded["total"].as_u64().expect("bytes"), other_bytes };
        // The simulated driver uses the lowest free addresses.
        let addresses = SegmentAddresses::LowestFree;
        let (fraction, returns) = (self.fraction, EventReturn::AsRecorded);
        let options = Options { release, settings, fraction, device, addresses, returns };
        let mut replay = Replay::new(options);
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
        let figures = vec![
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
        ];
        (figures, replay.has_ended())
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
            "fraction" => {
                let fraction = event[1].as_f64().expect("a number");
                Event::Fraction(fraction.min(self.fraction.unwrap_or(1.0)))
            }
            "others" => Event::OtherMemory { bytes: other_bytes + self.taken_bytes },
            "scope" => Event::ScopeBegins { pool: small(1) },
            "leave" => Event::ScopeEnds { pool: small(1) },
            "pool" => Event::PoolBegins {
                pool: small(1),
                kind: PoolKind::User { has_own_allocator: false, no_split: false, use_on_oom: false },
            },
            "gone" => Event::PoolEnds { pool: small(1) },
            kind => panic!("{kind}"),
        }
    }
}

/// Names of the figures of the first request that failed.
const FAILING: [&str; 2] = ["bytes of the failing request", "requests before it"];

/// Returns whether a program continued after a failed request.
fn has_caught_error(run: &Value) -> bool {
    run["failed"].is_object() && (run["message"].is_null() || run["stats"]["num_ooms"].as_u64() > Some(1))
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

/// Checks that a replay has the figures of a real run. With threads, each of a program's two runs may need one segment more.
fn assert_same(
    setting: &Setting,
    program: &Value,
    replayed: &[(&str, u64)],
    real: &[(&str, u64)],
    what: &str,
) {
    if program != WITH_THREADS {
        assert_eq!(replayed, real, "{what}");
        return;
    }
    let segment = Settings::parse(setting.text, Release::LAST).expect("a valid text").segment_bytes(2 << 20);
    for ((name, replayed), (_, real)) in replayed.iter().zip(real) {
        let bound = match *name {
            "segment" => 1,
            "num_device_alloc" | "num_device_free" => 2,
            name if name.ends_with("_bytes") => segment,
            _ => 0,
        };
        assert!(replayed.abs_diff(*real) <= bound, "{what}: {name} is {real}, replayed {replayed}");
    }
}

/// Comparisons of the model with one release.
struct Proof {
    version: String,
    wheel: torch::Wheel,
    release: Release,
    settings: Vec<&'static Setting>,
}

impl Proof {
    fn new(version: &str) -> Option<Self> {
        let wheel = torch::wheel(version)?;
        let release: Release =
            wheel.version.split('@').next().expect("a version").parse().expect("a release");
        let settings = replay_proof::settings(release).collect();
        Some(Proof { version: version.to_owned(), wheel, release, settings })
    }

    fn setting(&self, run: &Value) -> &'static Setting {
        self.settings.iter().find(|setting| run["setting"] == setting.name).expect("a setting")
    }

    /// Returns the names of programs that this release can run.
    fn programs(&self, is_chosen: impl Fn(&replay_proof::Program) -> bool) -> Vec<&'static str> {
        replay_proof::programs(self.release).filter(|one| is_chosen(one)).map(|one| one.name).collect()
    }

    /// Runs programs under settings, all in one process's children. Returns one line for each run.
    fn runs(
        &self,
        machine: &Machine,
        programs: &[&str],
        settings: &[&Setting],
        environment: &[(&str, &OsStr)],
    ) -> Vec<Value> {
        let arguments: Vec<_> = settings.iter().map(|setting| setting.argument()).collect();
        let expected = programs.len() * arguments.len();
        let arguments: Vec<&str> =
            programs.iter().copied().chain(arguments.iter().map(String::as_str)).collect();
        let mut command = self.wheel.bare(machine, "replay.py", &arguments);
        let mut lines = torch::finished(&mut Job::start(command.envs(environment.iter().copied())));
        lines.retain(|line| line["program"].is_string());
        assert_eq!(lines.len(), expected, "torch {}", self.version);
        lines
    }

    fn what(&self, run: &Value) -> String {
        format!("torch {}, {} under {}", self.version, run["program"], run["setting"])
    }

    /// Replays each program's requests under each setting.
    fn check_requests(&self, runs: &[Value]) {
        for run in runs {
            let setting = self.setting(run);
            let (replayed, has_ended) = setting.replay(self.release, default_run(runs, run));
            let compared = if has_ended && has_caught_error(run) { FAILING.as_slice() } else { &[] };
            let [replayed, real] = [replayed, real(run)].map(|mut figures| {
                figures.retain(|(name, _)| compared.is_empty() || compared.contains(name));
                figures
            });
            assert_same(setting, &run["program"], &replayed, &real, &self.what(run));
        }
        let failures = runs.iter().filter(|run| run["failed"].is_object()).count();
        println!("torch {}: {} runs, {failures} of them without memory at the end", self.version, runs.len());
    }

    /// Checks the figures of the agent's recordings, and their replay under other settings by `runs`.
    fn check_recordings(&self, machine: &Machine, runs: &[Value]) {
        let agent = programs().ours.join("libgpumem.so");
        let files = machine.dir.join("%p.gpumem");
        let environment =
            [("CUDA_INJECTION64_PATH", agent.as_os_str()), ("GPUMEM_RECORD", files.as_os_str())];
        let mut recorded = self.settings.clone();
        recorded.retain(|setting| RECORDED.contains(&setting.name));
        let recordings = self.runs(machine, &self.programs(|_| true), &recorded, &environment);
        let file = |run: &Value| machine.dir.join(format!("{}.gpumem", run["pid"]));
        for run in &recordings {
            let told = whatif(&self.wheel, &file(run), &[]);
            assert_own(&told, run, &self.what(run));
            if run["failed"].is_object() {
                self.fits_elsewhere(&file(run));
            }
        }
        assert!(recordings.iter().any(|run| run["failed"].is_object()), "the device is too large");
        for run in runs {
            let setting = self.setting(run);
            // A recording has no calls of empty_cache that freed nothing; `hostile` makes such calls.
            if !setting.is_unlimited() || setting.text.is_empty() || run["program"] == "hostile" {
                continue;
            }
            let told = whatif(&self.wheel, &file(default_run(&recordings, run)), &["--set", setting.text]);
            assert_trial(&told, setting, run, &self.what(run));
        }
    }

    /// Checks that programs have at least the computed memory if the driver's own pool serves their requests.
    fn check_bound(&self, machine: &Machine, runs: &[Value]) {
        let setting = replay_proof::plain("driver", "backend:cudaMallocAsync");
        // The backend is chosen when PyTorch is loaded.
        let environment = [("PYTORCH_CUDA_ALLOC_CONF", OsStr::new(setting.text))];
        let programs = self.programs(|program| WITH_DRIVER_POOL.contains(&program.name));
        for run in &self.runs(machine, &programs, &[&setting], &environment) {
            let (bound, _) = setting.replay(self.release, default_run(runs, run));
            let bound = bound.iter().find(|(name, _)| *name == "reserved_bytes").expect("a figure").1;
            let real = |name: &str| run["stats"][name].as_u64().expect("a figure");
            let (reserved, allocated) = (real("reserved_bytes"), real("allocated_bytes"));
            assert!(
                bound > 0 && bound <= allocated && allocated <= reserved,
                "{}: {bound} {run}",
                self.what(run)
            );
        }
    }

    /// Checks snapshots like the agent's recordings.
    fn check_snapshots(&self, machine: &Machine, runs: &[Value]) {
        let file = |run: &Value, setting: &str| {
            machine.dir.join(format!("{}-{setting}.pickle", run["program"].as_str().expect("a name")))
        };
        for run in runs {
            let setting = self.setting(run);
            if !["gpt", "resnet", "streams"].map(Value::from).contains(&run["program"]) {
                continue;
            }
            if RECORDED.contains(&setting.name) {
                let told = whatif(&self.wheel, &file(run, setting.name), &[]);
                assert_own(&told, run, &self.what(run));
            }
            if run["failed"].is_object() && setting.name == "small" {
                self.fits_elsewhere(&file(run, setting.name));
            } else if setting.is_unlimited() && !setting.text.is_empty() {
                let told = whatif(&self.wheel, &file(run, "default"), &["--set", setting.text]);
                assert_trial(&told, setting, run, &self.what(run));
            }
        }
    }

    /// Checks that a recording that ends without memory fits in a larger device.
    fn fits_elsewhere(&self, recording: &Path) {
        let told = whatif(&self.wheel, recording, &["--device-memory", "15G"]);
        let trials = told["trials"].as_array().expect("trials");
        assert!(!trials.is_empty() && trials.iter().all(|trial| trial["failure"].is_null()), "{told}");
    }
}

/// Returns the default run of the same program.
fn default_run<'a>(runs: &'a [Value], run: &Value) -> &'a Value {
    let is_default = |other: &&Value| other["program"] == run["program"] && other["setting"] == "default";
    runs.iter().find(is_default).expect("a default run")
}

/// Returns the JSON of `gpumemctl whatif`.
fn whatif(wheel: &torch::Wheel, file: &Path, options: &[&str]) -> Value {
    let mut command = Command::new(programs().ours.join("gpumemctl"));
    command.arg("whatif").arg(file).args(["--json", "--torch", &wheel.version]).args(options);
    let output = command.output().expect("gpumemctl");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Figures in the JSON of whatif, and torch's names for them.
const FIGURES: [(&str, &str); 5] = [
    ("peak_reserved_bytes", "reserved_bytes"),
    ("peak_allocated_bytes", "allocated_bytes"),
    ("driver_allocations", "num_device_alloc"),
    ("driver_frees", "num_device_free"),
    ("retries", "num_alloc_retries"),
];

fn figures_of(trial: &Value) -> Vec<(&'static str, u64)> {
    FIGURES.map(|(name, of_torch)| (of_torch, trial[name].as_u64().expect("a figure"))).to_vec()
}

fn figures_of_run(run: &Value) -> Vec<(&'static str, u64)> {
    FIGURES.map(|(_, of_torch)| (of_torch, run["stats"][of_torch].as_u64().expect("a figure"))).to_vec()
}

/// Checks that a recording is complete, and that its replay as recorded has the figures of the run, or fails at the same request.
/// Not checked for a run with little memory that ends: what else uses the device is known only from a request that fails.
fn assert_own(told: &Value, run: &Value, what: &str) {
    let known = [&told["is_exact"], &told["older_blocks"], &told["block_sizes"]];
    if run["failed"].is_object() {
        assert_eq!(told["own"]["failure"]["rounded_bytes"], run["failed"]["bytes"], "{what}: {told}");
    } else if run["setting"] != "small" {
        assert_eq!(known, [&Value::from(true), &Value::from(0), &Value::from(0)], "{what}: {told}");
        assert_eq!(told["own"]["failure"], Value::Null, "{what}");
        assert_eq!(figures_of(&told["own"]), figures_of_run(run), "{what}");
    }
}

/// Checks that the replay of a recording under a setting has the figures of a real run.
fn assert_trial(told: &Value, setting: &Setting, run: &Value, what: &str) {
    assert_same(setting, &run["program"], &figures_of(&told["trials"][0]), &figures_of_run(run), what);
}

#[test]
fn replay_of_one_recording_has_the_figures_of_real_runs_under_other_settings() {
    let versions = torch::named_versions().unwrap_or_else(|| VERSIONS.map(str::to_owned).to_vec());
    for proof in versions.iter().filter_map(|version| Proof::new(version)) {
        let machine = torch::machine(&[]);
        let (programs, snapshots) = (proof.programs(|_| true), [("SNAPSHOTS", machine.dir.as_os_str())]);
        let runs = proof.runs(&machine, &programs, &proof.settings, &snapshots);
        proof.check_requests(&runs);
        // On a busy machine, memory that another stream may use returns only when the program waits for the device.
        let late = torch::machine(&["cuda.busy=1"]);
        let with_streams = proof.programs(|program| program.has_streams);
        let late_runs = proof.runs(&late, &with_streams, &proof.settings, &[]);
        proof.check_requests(&late_runs);
        proof.check_bound(&machine, &runs);
        proof.check_recordings(&machine, &runs);
        proof.check_snapshots(&machine, &runs);
        replay_proof::check_row(&proof.version, proof.release);
    }
}

/// The programs catch errors of requests that are too large, and change the fraction of the device that they may use.
#[test]
fn replay_of_programs_with_limits_has_the_figures_of_real_runs() {
    let versions = torch::named_versions().unwrap_or_else(|| VERSIONS.map(str::to_owned).to_vec());
    for proof in versions.iter().filter_map(|version| Proof::new(version)) {
        proof.check_requests(&proof.runs(&torch::machine(&[]), &WITH_LIMITS, &proof.settings, &[]));
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
            assert_own(&told, run, &what);
        }
        assert_eq!(runs.len(), 8);
        let gpt = runs.iter().find(|run| run["program"] == "gpt").expect("a training program");
        let pid = gpt["pid"].to_string();
        let output =
            daemon.ctl(&machine, &["report", &pid, "--html", "--store", store]).output().expect("a page");
        has_blocks(&String::from_utf8_lossy(&output.stdout));
    }
}

/// Asserts that the page of a training program has its single blocks, with roles and training steps.
fn has_blocks(page: &str) {
    let data =
        page.split_once("id=\"data\">").and_then(|(_, rest)| rest.split_once("</script>")).expect("data").0;
    let data: Value = serde_json::from_str(data).expect("JSON");
    let blocks = &data["processes"][0]["devices"][0]["detail"]["blocks"];
    let list = |key: &str| blocks[key].as_array().cloned().unwrap_or_default();
    let steps: Vec<u64> = list("steps").iter().filter_map(|step| step[1].as_u64()).collect();
    assert!(steps.len() >= 3 && steps.is_sorted(), "{steps:?}");
    let names = list("names");
    for role in ["parameter", "activation", "gradient", "optimizer state"] {
        assert!(names.iter().any(|name| name[2] == role), "{role}: {names:?}");
    }
    let bytes = |block: &Value| block[1].as_i64().unwrap_or(0);
    // The program frees its blocks at its end.
    let mut most = 0;
    for level in list("levels") {
        let at = level[0].as_u64().expect("a time");
        let is_live = |block: &&Value| {
            block[2].as_u64().is_none_or(|made| made <= at)
                && block[3].as_u64().is_none_or(|freed| freed > at)
        };
        let live: i64 = list("rows").iter().filter(is_live).map(bytes).sum();
        let (smaller, tracked) = (level[1].as_i64(), level[2].as_i64().expect("bytes"));
        assert!(smaller.is_some_and(|smaller| live + smaller <= tracked), "{live} {level}");
        most = most.max(live);
    }
    assert!(most > 0, "{blocks}");
}
