//! Finds the requests that are replayed: of a stored run, a live process, a recording, or a snapshot.

use super::trials::Recorded;
use crate::args::StorePath;
use crate::command::report;
use crate::exit::Kind;
use anyhow::Result;
use gpumem_import::torch_snapshot::Requests;
use gpumem_import::{recorded, torch_snapshot};
use gpumem_replay::Release;
use gpumem_runs::input::Input;
use gpumem_runs::store::{RunId, Store};
use std::path::Path;

/// Reads the requests of `target` (see [`requests`]), and replays them under the recorded settings: those of each device of the
/// process, the one with the most requests first. `has_roles`: whether a recording's roles are read. `release` is the program's
/// release of PyTorch; without it, one is assumed and returned.
///
/// # Errors
/// The requests do not exist or cannot be read, or do not suffice for a replay.
pub(crate) fn load(
    target: &Path,
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
        return Err(Kind::BadInput.error(format!("{}: {what}", target.display())));
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

/// Reads the requests of `target`: a run's id, a pid, or a file. `pid` selects a process of a recording, `gpu` a device.
fn requests(
    target: &Path,
    (pid, gpu): (Option<u32>, Option<u8>),
    (store, has_roles): (&StorePath, bool),
) -> Result<Vec<Requests>> {
    let name = target.to_str().filter(|_| !target.exists()).unwrap_or_default();
    if let Ok(id) = name.parse::<RunId>() {
        return of_run(&Store::open_read_only(store.readable()?)?, id, target, (gpu, has_roles));
    }
    if let Ok(pid) = name.parse::<u32>() {
        for path in store.all_readable()? {
            let store = Store::open_read_only(path)?;
            let run = store.list()?.into_iter().find(|run| run.pid == pid);
            if let Some(run) = run {
                return of_run(&store, run.id, target, (gpu, has_roles));
            }
        }
        let text = format!("no run of process {pid} is in {}", store.readable()?.display());
        return Err(Kind::NotFound.error(text));
    }
    if !name.is_empty() && report::is_unknown(name) {
        return Err(report::unknown(name, "; snapshots of PyTorch and recordings are files"));
    }
    let input = Input::open(target)?;
    Ok(if recorded::looks_like(input.head()) {
        recorded::requests(input, (pid, gpu), has_roles)?
    } else {
        torch_snapshot::requests(input, gpu)?
    })
}

fn of_run(
    store: &Store,
    id: RunId,
    target: &Path,
    (gpu, has_roles): (Option<u8>, bool),
) -> Result<Vec<Requests>> {
    let pieces = store.requests(id)?;
    if pieces.is_empty() {
        store.load_head(id)?;
        let text = "the requests of this run were not kept: set keep_requests = true below [runs] in gpumemd.toml for later processes, \
                    or record them: gpumemctl run --record FILE -- COMMAND";
        return Err(Kind::Usage.error(format!("{}: {text}", target.display())));
    }
    Ok(recorded::kept_requests(&pieces, target, gpu, has_roles)?)
}
