//! Replays the recordings of the GPU suite and compares them with the programs' own accounts.

use gpumem_import::read_file;
use gpumem_model::run::{Class, Device, Moment, Run, State};
use gpumem_tests::live::replay;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// `NAME.json` beside `NAME.gpumem`, as suite/check.py writes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expectations {
    /// The check and machine that made it; informational.
    check: String,
    #[allow(dead_code)]
    machine: serde_json::Value,
    runs: Vec<Expected>,
}

/// One process, by its own accounts.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expected {
    pid: u32,
    /// Live at the end.
    tracked_bytes: Option<i64>,
    peak_tracked_bytes: Option<i64>,
    /// Live at the end, by tag; "" for none.
    tags: Option<BTreeMap<String, i64>>,
    /// The run must have been closed.
    #[serde(default)]
    closed: bool,
}

/// Number of checked items.
#[derive(Debug, Default, Clone, Copy)]
pub struct Seen {
    pub recordings: usize,
    pub runs: usize,
    pub samples: usize,
    pub expectations: usize,
}

/// Replays every recording of a folder.
pub fn verify(folder: &Path) -> Seen {
    let mut seen = Seen::default();
    for path in recordings(folder) {
        let name = path.display().to_string();
        let beside = path.with_extension("json");
        let text = std::fs::read_to_string(&beside).unwrap_or_else(|error| panic!("{beside:?}: {error}"));
        let expected: Expectations =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{beside:?}: {error}"));
        let runs = read_file(&path, None).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(!runs.is_empty(), "{name}: no process in it");
        for run in &runs {
            assert_eq!(run.coverage.rejected, 0, "{name}: every record can be read");
            for device in &run.devices {
                moment_adds_up(&name, &device.last);
                moment_adds_up(&name, &device.peak);
            }
        }
        seen.samples += samples_add_up(&name, &path);
        for process in &expected.runs {
            let run = runs.iter().find(|run| run.process.pid == process.pid);
            let run = run.unwrap_or_else(|| panic!("{name} ({}): no pid {}", expected.check, process.pid));
            seen.expectations += holds(&name, run, process);
        }
        seen.recordings += 1;
        seen.runs += runs.len();
    }
    seen
}

fn recordings(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut found: Vec<_> = paths.filter(|path| path.extension().is_some_and(|e| e == "gpumem")).collect();
    found.sort();
    found
}

fn moment_adds_up(name: &str, moment: &Moment) {
    let sum: i64 = moment.amounts.iter().map(|(_, bytes)| bytes).sum();
    if let Some(tracked) = moment.tracked_bytes {
        assert_eq!(sum, tracked, "{name}: cells and tracked at {}", moment.time_ns);
    }
}

/// used = predates + tracked + untrackable, and tracked = its cells, at every sample of NVML.
fn samples_add_up(name: &str, path: &Path) -> usize {
    let replayed = replay(path);
    for (key, _, sample) in &replayed.samples {
        let (Some(tracked), Ok(used)) = (sample.tracked_bytes, sample.used_bytes) else { continue };
        assert_eq!(sample.amounts.iter().sum::<i64>(), tracked, "{name}: {key:?} at {}", sample.t0_ns);
        let Some(rest) = sample.untrackable_bytes() else { continue };
        let sum = sample.predates_bytes + tracked + rest;
        assert_eq!(i64::try_from(used).ok(), Some(sum), "{name}: {key:?} at {}", sample.t0_ns);
    }
    replayed.samples.len()
}

/// Sums over all devices of the run: the programs of the suite count that way.
fn total(run: &Run, of: impl Fn(&Device) -> Option<i64>) -> i64 {
    run.devices.iter().filter_map(of).sum()
}

fn holds(name: &str, run: &Run, expected: &Expected) -> usize {
    let mut held = 0;
    if let Some(bytes) = expected.tracked_bytes {
        assert_eq!(total(run, |device| device.last.tracked_bytes), bytes, "{name}: tracked at the end");
        held += 1;
    }
    if let Some(bytes) = expected.peak_tracked_bytes {
        assert_eq!(total(run, |device| device.peak.tracked_bytes), bytes, "{name}: tracked at the peak");
        held += 1;
    }
    if let Some(tags) = &expected.tags {
        let mut found = BTreeMap::<String, i64>::new();
        for (cell, bytes) in run.devices.iter().flat_map(|device| &device.last.amounts) {
            let cell = &run.cells[*cell as usize];
            if cell.class != Class::PoolIdle {
                *found.entry(cell.tag.clone().unwrap_or_default()).or_default() += bytes;
            }
        }
        assert_eq!(&found, tags, "{name}: tags at the end");
        held += 1;
    }
    if expected.closed {
        assert!(matches!(run.state, State::Closed { .. }), "{name}: {:?}", run.state);
        held += 1;
    }
    held
}
