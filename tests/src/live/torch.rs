//! Unmodified PyTorch wheels on the simulated machine (tests/torch), and the recorded state of a program at the moments
//! that it marked.

use super::machine::{Job, Machine};
use super::programs::{self, programs};
use gpumem_ledger::{Class, Ledger, Origin};
use gpumem_model::run::Iteration;
use gpumem_runs::builder::Sink;
use gpumem_runs::input::Input;
use gpumem_runs::recording;
use gpumem_wire::Role;
use gpumem_wire::{Body, Flags, Record};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Two distant pinned versions. "newest" is the registry's latest.
pub const VERSIONS: [&str; 2] = ["2.4.1", "2.15.0"];

/// Returns [`VERSIONS`], or else [`named_versions`].
pub fn versions() -> Vec<String> {
    named_versions().unwrap_or_else(|| VERSIONS.map(str::to_owned).to_vec())
}

/// Returns the versions in $GPUMEM_TORCH_VERSIONS: `2.15.0`, or `2.15.0@3.14` for another CPython.
pub fn named_versions() -> Option<Vec<String>> {
    let named = std::env::var("GPUMEM_TORCH_VERSIONS").ok()?;
    Some(named.split_whitespace().map(str::to_owned).collect())
}

/// Returns whether names come from frames, which is not the case for a CPython without a GIL.
pub fn reads_frames(version: &str) -> bool {
    version.split_once('@').is_none_or(|(_, python)| !python.ends_with('t'))
}

/// An installed version.
#[derive(Debug, Clone)]
pub struct Wheel {
    /// Version as in the registry.
    pub version: String,
    /// target/torch-VERSION: `venv/`, `lib/`, and `libraries/` if [`libraries`] has installed them.
    pub dir: PathBuf,
}

/// Returns the version, and installs it if it is missing; `None` with a message if it is not available.
///
/// # Panics
/// If it is not available and GPUMEM_TOOLS_REQUIRED is set, because CI must not skip.
pub fn wheel(version: &str) -> Option<Wheel> {
    static KNOWN: Mutex<Option<HashMap<String, Option<Wheel>>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let known = known.get_or_insert_with(HashMap::new);
    if let Some(found) = known.get(version) {
        return found.clone();
    }
    let found = install("wheel", version);
    if let Err(why) = &found {
        gpumem_test_support::skip(&format!("torch {version} cannot be had: {why}"), "pip install torch");
    }
    known.insert(version.to_owned(), found.clone().ok());
    found.ok()
}

/// Returns the folder for PYTHONPATH with the third-party libraries of tests/torch/libraries.txt; `None` if they are not
/// available.
///
/// # Panics
/// If they are not available and GPUMEM_TOOLS_REQUIRED is set.
pub fn libraries(version: &str) -> Option<PathBuf> {
    let found = install("libraries", version).map(|wheel| wheel.dir.join("libraries"));
    let why = |why: String| {
        let what = format!("libraries for torch {version} cannot be had: {why}");
        gpumem_test_support::skip(&what, "pip install -r tests/torch/libraries.txt");
    };
    found.map_err(why).ok()
}

/// Makes the target `what-version` of tests/torch/Makefile.
fn install(what: &str, version: &str) -> Result<Wheel, String> {
    let (fake, target) = (programs::fake(), programs::target());
    let makefile = Path::new(env!("CARGO_MANIFEST_DIR")).join("torch");
    // Several test programs may do this at once.
    let mut make = Command::new("flock");
    make.arg(target.join("torch.lock")).args(["make", "-s", "-C"]).arg(makefile);
    make.arg(format!("TARGET={}", target.display())).arg(format!("FAKE={}", fake.display()));
    let output = make.arg(format!("{what}-{version}")).output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(said.lines().rev().take(5).collect::<Vec<_>>().join(" / "));
    }
    let dir = target.join(format!("torch-{version}"));
    let dir = dir.canonicalize().map_err(|error| format!("{}: {error}", dir.display()))?;
    let name = dir.file_name().and_then(|name| name.to_str()).unwrap_or(version);
    Ok(Wheel { version: name.trim_start_matches("torch-").to_owned(), dir })
}

impl Wheel {
    /// Returns whether it is that release or a later one.
    pub fn is_from(&self, major: u32, minor: u32) -> bool {
        let number = |part: Option<&str>| part.and_then(|part| part.parse().ok()).unwrap_or(0_u32);
        let mut parts = self.version.split('.');
        (number(parts.next()), number(parts.next())) >= (major, minor)
    }

    /// Returns a Python command with this wheel on that machine, for a program of tests/torch. Its environment contains nothing
    /// of gpumem.
    pub fn bare(&self, machine: &Machine, program: &str, arguments: &[&str]) -> Command {
        let fake = &programs().fake;
        let mut command = machine.command(self.dir.join("venv/bin/python"));
        let path = std::env::join_paths([self.dir.join("lib"), fake.join("lib")]).expect("paths");
        command
            .env("LD_LIBRARY_PATH", path)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("PYTHONWARNINGS", "ignore");
        command
            .env("FAKE_GPU", fake.join("bin/fake-gpu"))
            .env("PLUGGABLE", self.dir.join("lib/pluggable.so"));
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("torch").join(program)).args(arguments);
        command
    }

    /// Returns such a command that reports to the daemon in `runtime`.
    pub fn covered(&self, machine: &Machine, runtime: &Path, program: &str, arguments: &[&str]) -> Command {
        let mut command = self.bare(machine, program, arguments);
        command.env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
        command.env("GPUMEM_SOCKET", runtime.join("agent.sock"));
        command
    }
}

/// Creates a machine for such wheels: two devices of 16 GiB, and a driver that the newest CUDA accepts.
pub fn machine(keys: &[&str]) -> Machine {
    let name = "name=Simulated GPU 16GB";
    Machine::new(&[&["devices=2", "memory=16G", name, "cuda.version=13990"], keys].concat())
}

/// Longest time between two lines of a program of tests/torch, on a busy machine. The time until the end has no limit.
const SILENCE: Duration = Duration::from_secs(300);

/// Waits for a successful end, and returns the JSON lines.
///
/// # Panics
/// If it fails, prints nothing for [`SILENCE`], or ends before it printed `done`.
pub fn finished(job: &mut Job) -> Vec<Value> {
    let mut heard = Instant::now();
    while job.is_running() {
        if !job.hear().is_empty() {
            heard = Instant::now();
        }
        let waited = heard.elapsed();
        assert!(
            waited < SILENCE || waited < gpumem_test_support::on_this_machine(SILENCE),
            "silent for {} s: {:#?}",
            SILENCE.as_secs(),
            job.said
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    job.finish();
    let said: Vec<Value> = job.said.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert!(said.iter().any(|line| line["done"] == true), "{:#?}", job.said);
    said
}

/// Memory of a process on a device at a moment, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// Total tracked bytes.
    pub tracked: i64,
    /// Driver allocations that are not pool segments.
    pub direct: i64,
    /// Blocks of pools.
    pub blocks: i64,
    /// Pool segments without blocks.
    pub idle: i64,
    /// Pools that report no blocks.
    pub opaque: i64,
    /// Blocks outside any segment.
    pub unbooked: i64,
    /// Freed by the program, still in use by a stream.
    pub pending: i64,
    /// Blocks by the number of their role, without pending ones.
    pub roles: [i64; Role::ALL.len()],
}

/// A moment that a program marked.
#[derive(Debug, Clone)]
pub struct Moment {
    /// Text after `check `.
    pub name: String,
    /// By ordinal of the machine.
    pub devices: Vec<Held>,
}

struct Reader {
    ledger: Ledger,
    pid: u32,
    names: HashMap<u32, String>,
    found: Vec<Moment>,
}

impl Sink for Reader {
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        self.ledger.observe(origin, record);
        self.ledger.take_samples();
        self.ledger.take_windows();
        let Origin::Process(key) = origin else { return };
        if key.pid != self.pid || record.stamp.flags.has(Flags::RESTATED) {
            return;
        }
        match record.body {
            Body::Tag { path } => {
                self.names.insert(record.stamp.tag, path.to_owned());
            }
            Body::Marker {} => {
                let name = self.names.get(&record.stamp.tag).map_or("", String::as_str);
                if let Some(name) = name.strip_prefix("check ") {
                    self.found.push(Moment { name: name.to_owned(), devices: held(&self.ledger, self.pid) });
                }
            }
            _ => {}
        }
    }
    fn reject(&mut self, count: u64) {
        assert_eq!(count, 0, "rejected records");
    }
}

fn read(path: &Path, pid: u32) -> Reader {
    let mut reader = Reader { ledger: Ledger::new(), pid, names: HashMap::new(), found: Vec::new() };
    let input = Input::open(path).unwrap_or_else(|error| panic!("{error}"));
    recording::read(input, &mut reader).unwrap_or_else(|error| panic!("{error}"));
    reader
}

/// Returns every marked moment of a process in a daemon's recording.
///
/// # Panics
/// If it cannot be read.
pub fn moments(path: &Path, pid: u32) -> Vec<Moment> {
    read(path, pid).found
}

/// Returns the iterations of a process on its first device.
///
/// # Panics
/// If the recording cannot be read, or there is no such process.
pub fn iterations(path: &Path, pid: u32) -> Vec<Iteration> {
    let ledger = read(path, pid).ledger;
    let key = ledger.snapshot().processes.iter().map(|process| process.key).find(|key| key.pid == pid);
    ledger.iterations(key.expect("the process"), 0).rows
}

fn held(ledger: &Ledger, pid: u32) -> Vec<Held> {
    let snapshot = ledger.snapshot();
    let mut found = vec![Held::default(); 2];
    let Some(process) = snapshot.processes.iter().find(|process| process.key.pid == pid) else {
        return found;
    };
    for account in &process.accounts {
        let name = account.device.map(|device| snapshot.devices[device].name.to_string());
        let last = name.and_then(|name| name.chars().last()?.to_digit(16));
        let Some(held) = last.and_then(|ordinal| found.get_mut(ordinal as usize)) else { continue };
        held.tracked += account.tracked_bytes;
        held.unbooked += account.beside.unbooked_block_bytes;
        held.pending += account.beside.pending_block_bytes;
        for (cell, bytes) in process.cells.iter().zip(&account.amounts) {
            match cell.class {
                Class::Direct => held.direct += bytes,
                Class::Block => {
                    held.blocks += bytes;
                    held.roles[usize::from(cell.role.to_code())] += if cell.pending { 0 } else { *bytes };
                }
                Class::PoolIdle => held.idle += bytes,
                Class::Opaque => held.opaque += bytes,
            }
        }
    }
    found
}

/// Pairs each moment with the program's own line, which must exist, in order.
///
/// # Panics
/// If the moments differ.
pub fn beside<'a>(moments: &'a [Moment], said: &'a [Value]) -> Vec<(&'a Moment, &'a Value)> {
    let checks: Vec<&Value> = said.iter().filter(|line| line["check"].is_string()).collect();
    let names: Vec<&str> = checks.iter().filter_map(|line| line["check"].as_str()).collect();
    assert_eq!(moments.iter().map(|moment| moment.name.as_str()).collect::<Vec<_>>(), names);
    moments.iter().zip(checks).collect()
}

/// Compares the recorded state at a moment with torch's own figures, for each device and to the byte, in a process in
/// which only torch's caching allocator allocates.
///
/// # Panics
/// If they differ.
pub fn agree(what: &str, moment: &Moment, said: &Value) {
    let devices = said["devices"].as_array().expect("devices");
    for (ordinal, numbers) in devices.iter().enumerate() {
        let of = |name: &str| numbers[name].as_i64().unwrap_or_else(|| panic!("{name} of {said}"));
        let held = moment.devices[ordinal];
        let what = format!("{what} on device {ordinal}: {held:?} beside {numbers}");
        assert_eq!(held.unbooked, 0, "{what}");
        assert_eq!(held.tracked, of("reserved"), "{what}");
        assert_eq!(held.blocks + held.idle, of("reserved"), "segments and blocks: {what}");
        assert_eq!(held.blocks - held.pending, of("allocated"), "{what}");
        assert_eq!(held.blocks, of("active"), "with what waits for a stream: {what}");
    }
}
