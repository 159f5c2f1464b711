//! Runs of the store, and files that are read directly.

use super::found::{Found, One, What};
use crate::args::{Report as Args, StorePath};
use crate::client::RunReply;
use crate::exit::{NoProcess, NotFound};
use anyhow::Result;
use gpumem_import::read_file;
use gpumem_model::run::{Clock, Run, State};
use gpumem_report::oom::at::Around;
use gpumem_runs::store::{RunId, RunSummary, Store};
use std::path::Path;

/// Finds a run by its id, a file, or the latest run.
pub(crate) fn find(args: &Args) -> Result<Found> {
    let name = args.run.as_deref();
    // A file may have the name of a run id, but no run id contains a slash.
    let id: Option<RunId> = name.and_then(|name| name.parse().ok());
    match (name, id) {
        (Some(name), None) if !name.contains('/') && !Path::new(name).exists() => {
            let text =
                format!("{name}: no such file, and neither a pid nor a run: runs are named r1, r2, ...");
            return Err(NotFound(text).into());
        }
        (Some(name), None) => return from_file(name, args),
        (Some(name), Some(_)) if args.format.is_some() => return from_file(name, args),
        _ => {}
    }
    let path = args.store.readable()?;
    let store = Store::open_read_only(&path)?;
    let id = match id {
        Some(id) => id,
        None => store.latest()?.ok_or_else(|| {
            NotFound(format!("{}: holds no run yet; give a recording or log, or import one", path.display()))
        })?,
    };
    let run = store.load(id)?;
    if let Some(pid) = args.pid.filter(|pid| *pid != run.process.pid) {
        return Err(NotFound(format!("run {id} is of pid {}, not {pid}", run.process.pid)).into());
    }
    Ok(One::found(run, Some(id.to_string()), command(id, args, &path)))
}

/// Returns the result for a run of this store.
pub(crate) fn of_store(run: Run, id: RunId, args: &Args, path: &Path) -> Found {
    let mut command = command(id, args, path);
    if args.store.typed().is_empty() && args.store.readable().is_ok_and(|usual| usual != path) {
        command.extend(["--store".to_owned(), path.to_string_lossy().into_owned()]);
    }
    One::found(run, Some(id.to_string()), command)
}

/// Returns the latest run of a process; `None` if the store has none or does not exist.
pub(crate) fn of_pid(pid: u32, args: &Args) -> Result<Option<Found>> {
    let path = args.store.readable()?;
    if !path.exists() {
        return Ok(None);
    }
    let store = Store::open_read_only(&path)?;
    let Some(summary) = store.list()?.into_iter().find(|run| run.pid == pid) else { return Ok(None) };
    let run = store.load(summary.id)?;
    Ok(Some(One::found(run, Some(summary.id.to_string()), command(summary.id, args, &path))))
}

/// Returns the runs of a job, from the newest runs of the store.
pub(crate) fn of_job(job: &str, store: &StorePath) -> Result<Vec<RunReply>> {
    const NEWEST: usize = 1024;
    let path = store.readable()?;
    if !path.exists() {
        return Ok(Vec::new());
    }
    let store = Store::open_read_only(&path)?;
    let mut found = Vec::new();
    // If the life of a process is stored in parts, only the newest part counts.
    let speaks = |run: &RunSummary| run.source_kind == "daemon" && !matches!(run.state, State::Rolled { .. });
    for summary in store.list()?.into_iter().take(NEWEST).filter(speaks) {
        let run = store.load(summary.id)?;
        if gpumem_model::who::is_of_job(&run.process.facts, &run.process.claims, job) {
            found.push(RunReply { id: Some(summary.id.to_string()), run });
        }
    }
    Ok(found)
}

/// Returns runs whose process ended or ran out of memory around a time.
pub(crate) fn around(around: Around, args: &Args) -> Result<Vec<RunReply>> {
    let store = Store::open_read_only(&args.store.readable()?)?;
    let mut found = Vec::new();
    for summary in store.list()? {
        let wall_ns = |time_ns: Option<u64>| match summary.clock {
            Clock::Monotonic { wall_offset_ns } => i64::try_from(time_ns?).ok()?.checked_add(wall_offset_ns?),
            Clock::Lines => None,
        };
        // Runs that do not overlap the time are not loaded.
        let (Some(first), Some(last)) = (wall_ns(summary.started_ns), wall_ns(summary.last_ns)) else {
            continue;
        };
        let is_before = last.saturating_add(around.for_ns) < around.at_ns;
        if is_before || first.saturating_sub(around.for_ns) > around.at_ns {
            continue;
        }
        let run = store.load(summary.id)?;
        if around.concerns(&run) {
            found.push(RunReply { id: Some(summary.id.to_string()), run });
        }
    }
    Ok(found)
}

fn command(id: RunId, args: &Args, path: &Path) -> Vec<String> {
    let mut command = vec![id.to_string()];
    if !args.store.typed().is_empty() {
        command.extend(["--store".to_owned(), path.to_string_lossy().into_owned()]);
    }
    command
}

/// Returns the process with most memory, or the requested one.
fn from_file(name: &str, args: &Args) -> Result<Found> {
    let path = Path::new(name);
    let runs = read_file(path, args.format)?;
    let mut pids: Vec<u32> = runs.iter().map(|run| run.process.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    let peak = |run: &Run| {
        let peaks =
            run.devices.iter().filter_map(|device| device.peak.tracked_bytes.or(device.peak.used_bytes()));
        peaks.fold(0, i64::saturating_add)
    };
    let asked_for = runs.into_iter().filter(|run| args.pid.is_none_or(|pid| run.process.pid == pid));
    let most = asked_for.max_by_key(|run| (run.coverage.covered, peak(run)));
    let run = most.ok_or_else(|| match args.pid {
        Some(pid) => {
            let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
            let there = pids.join(", ");
            NotFound(format!("{}: has no pid {pid}; there are: {there}", path.display())).into()
        }
        None => anyhow::Error::from(NoProcess(path.to_owned())),
    })?;
    pids.retain(|pid| *pid != run.process.pid);
    let mut command = vec![name.to_owned()];
    if let Some(format) = args.format {
        command.extend(["--format".to_owned(), format.name.to_owned()]);
    }
    if let Some(pid) = args.pid {
        command.extend(["--pid".to_owned(), pid.to_string()]);
    }
    let file = Some(path.to_owned());
    let one = One { run, id: None, others: pids, job: None, file, window: None };
    Ok(Found { what: What::One(Box::new(one)), command })
}
