//! Finds the requests that are replayed: of a stored run, a live process, a recording, or a snapshot.

use super::trials::Recorded;
use crate::args::StorePath;
use crate::command::report;
use crate::exit::Kind;
use anyhow::Result;
use gpumem_import::torch_snapshot::Requests;
use gpumem_import::{recorded, torch_snapshot};
use gpumem_model::run::Process;
use gpumem_replay::Release;
use gpumem_runs::input::Input;
use gpumem_runs::store::{RunId, Store};
use std::borrow::Cow;
use std::path::Path;

/// What is replayed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target<'a> {
    /// A run's id, a pid, or a file, as the user names it.
    Named(&'a Path),
    Run(RunId),
    /// This process, and no other one that had its pid.
    Process(&'a Process),
}

impl Target<'_> {
    /// Returns the name for messages.
    fn name(&self) -> Cow<'_, Path> {
        match self {
            Target::Named(path) => Cow::Borrowed(path),
            Target::Run(id) => Cow::Owned(id.to_string().into()),
            Target::Process(process) => Cow::Owned(process.pid.to_string().into()),
        }
    }
}

/// Reads the requests of `target` (see [`requests`]), and replays them under the recorded settings: those of each device of the
/// process, the one with the most requests first. `has_roles`: whether a recording's roles are read. `release` is the program's
/// release of PyTorch; without it, one is assumed and returned.
///
/// # Errors
/// The requests do not exist or cannot be read, or do not suffice for a replay.
pub(crate) fn load(
    target: Target<'_>,
    place: (Option<u32>, Option<u8>),
    release: Option<Release>,
    (store, has_roles): (&StorePath, bool),
) -> Result<(Vec<Recorded>, Release)> {
    let devices = requests(target, place, (store, has_roles))?;
    let (devices, release) = match release {
        Some(release) => (replayed(devices, release)?, release),
        None => of_likely_release(devices)?,
    };
    if devices.first().is_some_and(Recorded::lacks_streams) {
        let what = "has only the sizes of blocks, and not the streams or private pools of this program: record it again \
                    with gpumemctl run --record FILE -- COMMAND";
        return Err(Kind::BadInput.error(format!("{}: {what}", target.name().display())));
    }
    let (devices, others) = devices.into_iter().partition::<Vec<_>, _>(|device| !device.lacks_streams());
    for device in others {
        eprintln!("GPU {} is omitted: only the sizes of its blocks were recorded", device.requests.device);
    }
    Ok((devices, release))
}

fn replayed(devices: Vec<Requests>, release: Release) -> Result<Vec<Recorded>> {
    devices.into_iter().map(|requests| Recorded::new(requests, release)).collect()
}

/// Replays with the rules of a release that explains the recording, for a program of unknown release.
fn of_likely_release(mut devices: Vec<Requests>) -> Result<(Vec<Recorded>, Release)> {
    // Histories state the pool of a request from PyTorch 2.12 on.
    if !devices.iter().all(Requests::is_recording) {
        let names_pools = devices.iter().all(|requests| requests.names_pools);
        let release = if names_pools { Release::LAST } else { Release::new(11) };
        return Ok((replayed(devices, release)?, release));
    }
    // There are three rules for the choice among free blocks of equal size: that of releases up to 2.11, that of 2.12, and that
    // from 2.13 on.
    for release in [Release::LAST, Release::new(12), Release::new(11)] {
        let recorded = replayed(devices, release)?;
        // The device with the most requests decides.
        if recorded.first().is_some_and(|device| device.is_exact) {
            return Ok((recorded, release));
        }
        devices = recorded.into_iter().map(|device| device.requests).collect();
    }
    Ok((replayed(devices, Release::LAST)?, Release::LAST))
}

/// Reads the requests of `target`. `pid` selects a process of a recording, `gpu` a device.
fn requests(
    target: Target<'_>,
    (pid, gpu): (Option<u32>, Option<u8>),
    (store, has_roles): (&StorePath, bool),
) -> Result<Vec<Requests>> {
    let path = match target {
        Target::Run(id) => return of_run(&Store::open_read_only(store.readable()?)?, id, (gpu, has_roles)),
        Target::Process(process) => {
            return of_process(process.pid, Some(process.start_ticks), store, (gpu, has_roles));
        }
        Target::Named(path) => path,
    };
    let name = path.to_str().filter(|_| !path.exists()).unwrap_or_default();
    if let Ok(id) = name.parse::<RunId>() {
        return of_run(&Store::open_read_only(store.readable()?)?, id, (gpu, has_roles));
    }
    if let Ok(pid) = name.parse::<u32>() {
        return of_process(pid, None, store, (gpu, has_roles));
    }
    if !name.is_empty() && report::is_unknown(name) {
        return Err(report::unknown(name, "; snapshots of PyTorch and recordings are files"));
    }
    let input = Input::open(path)?;
    Ok(if recorded::looks_like(input.head()) {
        recorded::requests(input, (pid, gpu), has_roles)?
    } else {
        torch_snapshot::requests(input, gpu)?
    })
}

fn of_process(
    pid: u32,
    start_ticks: Option<u64>,
    store: &StorePath,
    filter: (Option<u8>, bool),
) -> Result<Vec<Requests>> {
    for path in store.all_readable()? {
        let store = Store::open_read_only(path)?;
        if let Some(id) = newest_run(&store, pid, start_ticks)? {
            return of_run(&store, id, filter);
        }
    }
    let text = format!("no run of process {pid} is in {}", store.readable()?.display());
    Err(Kind::NotFound.error(text))
}

/// Returns the newest run of a process with this pid, and this start time if one is given.
fn newest_run(store: &Store, pid: u32, start_ticks: Option<u64>) -> Result<Option<RunId>> {
    for run in store.list()?.into_iter().filter(|run| run.pid == pid) {
        let is_it = match start_ticks {
            Some(ticks) => store.load_head(run.id)?.process.start_ticks == ticks,
            None => true,
        };
        if is_it {
            return Ok(Some(run.id));
        }
    }
    Ok(None)
}

fn of_run(store: &Store, id: RunId, (gpu, has_roles): (Option<u8>, bool)) -> Result<Vec<Requests>> {
    let pieces = store.requests(id)?;
    if pieces.is_empty() {
        store.load_head(id)?;
        let text = "the requests of this run were not kept: set keep_requests = true below [runs] in gpumemd.toml for later processes, \
                    or record them: gpumemctl run --record FILE -- COMMAND";
        return Err(Kind::Usage.error(format!("{id}: {text}")));
    }
    Ok(recorded::kept_requests(&pieces, Path::new(&id.to_string()), gpu, has_roles)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_import::read_file;

    #[test]
    fn run_of_a_process_has_its_start_time() {
        let folder = std::env::temp_dir().join(format!("gpumemctl-source-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("made");
        let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = read_file(&log, None).expect("a log").remove(0);
        let mut store = Store::open(folder.join("runs.sqlite")).expect("a store");
        let mut insert = |pid, start_ticks| {
            (run.process.pid, run.process.start_ticks) = (pid, start_ticks);
            store.insert(&run, &format!("boot:{pid}:{start_ticks}")).expect("saved").0
        };
        let [first, second] = [5, 9].map(|start_ticks| insert(7, start_ticks));
        let found = |pid, start_ticks| newest_run(&store, pid, start_ticks).expect("read");
        assert_eq!([found(7, Some(5)), found(7, Some(9)), found(7, None)], [first, second, second].map(Some));
        assert_eq!([found(7, Some(6)), found(8, None)], [None; 2], "another process with that pid");
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
