//! Selects the run if none is named: the caller's newest, from all daemons that answer and all readable stores.

use super::found::Found;
use super::{live, stored};
use crate::args::Report as Args;
use crate::client::{Daemon, RunReply, RunSelector};
use anyhow::Result;
use gpumem_model::run::{Clock, Run};
use gpumem_report::text::clean;
use gpumem_runs::store::{Filter, Listed, RunId, Store};
use std::path::{Path, PathBuf};

/// Most stored runs that are searched for one of the caller's.
const NEWEST: usize = 256;
/// Most OOM runs of the caller that are compared by the time of their last OOM.
const COMPARED: usize = 16;

/// A run that may be selected.
enum Candidate {
    Live(Box<RunReply>, Daemon),
    /// A stored run: the store's path, its id, the time of storing in s since 1970, and the run.
    Stored(PathBuf, RunId, i64, Box<Run>),
}

/// Returns the caller's newest run; for `gpumemctl oom`, the newest in which memory ran out, if there is one. Prints on standard
/// error which run it is. `None` if the caller has no run.
///
/// # Errors
/// If a named daemon does not answer, or a named store cannot be read.
pub(crate) fn newest(args: &Args) -> Result<Option<Found>> {
    let candidates = candidates(args)?;
    let when = |candidate: &Candidate| -> Option<i128> {
        let run = candidate.run();
        if args.with_oom { last_oom_ns(run) } else { Some(candidate.began_ns()) }
    };
    let chosen = candidates.into_iter().filter_map(|candidate| Some((when(&candidate)?, candidate)));
    let Some((_, candidate)) =
        chosen.max_by_key(|(when, candidate)| (*when, candidate.run().process.start_ticks))
    else {
        if !args.with_oom {
            return Ok(None);
        }
        // The report on the newest run says that memory has not run out.
        return newest(&Args { with_oom: false, ..args.clone() });
    };
    let run = candidate.run();
    let command = run.process.facts.get("command").or(run.process.facts.get("comm"));
    let command = command.map(|command| format!(", {}", clean(command))).unwrap_or_default();
    let why = if args.with_oom { "your newest run that was out of memory" } else { "your newest run" };
    let (pid, others) = (run.process.pid, "gpumemctl runs and ps list others");
    match candidate {
        Candidate::Live(told, daemon) => {
            eprintln!("{why}: pid {pid}{command}, which is live ({others})");
            live::one(*told, vec![pid.to_string()], &daemon, args).map(Some)
        }
        Candidate::Stored(path, id, _, run) => {
            eprintln!("{why}: {id}, pid {pid}{command} ({others})");
            Ok(Some(stored::of_store(*run, id, args, &path)))
        }
    }
}

impl Candidate {
    fn run(&self) -> &Run {
        match self {
            Candidate::Live(told, _) => &told.run,
            Candidate::Stored(.., run) => run,
        }
    }

    /// Returns when the process began, in ns since 1970. For imports this is unknown, so the time of storing is used.
    fn began_ns(&self) -> i128 {
        let run = self.run();
        let tick_ns = 1_000_000_000 / i128::from(rustix::param::clock_ticks_per_second().max(1));
        match run.clock {
            Clock::Monotonic { wall_offset_ns: Some(offset) } if run.source.is_watched() => {
                i128::from(run.process.start_ticks) * tick_ns + i128::from(offset)
            }
            _ => match self {
                Candidate::Stored(_, _, stored_s, _) => i128::from(*stored_s) * 1_000_000_000,
                Candidate::Live(..) => i128::MAX,
            },
        }
    }
}

/// Returns when memory last ran out in a run, in ns since 1970.
fn last_oom_ns(run: &Run) -> Option<i128> {
    let ooms = run.devices.iter().flat_map(|device| &device.details.ooms);
    let last = ooms.filter(|oom| oom.is_true()).map(|oom| i128::from(oom.time_ns)).max()?;
    match run.clock {
        Clock::Monotonic { wall_offset_ns: Some(offset) } => Some(last + i128::from(offset)),
        _ => Some(last),
    }
}

fn candidates(args: &Args) -> Result<Vec<Candidate>> {
    let user = u64::from(rustix::process::getuid().as_raw());
    let mut found = Vec::new();
    let daemons = match Daemon::all(args.socket.as_deref()) {
        // A named daemon must answer.
        Err(unreachable) if args.socket.as_deref().is_some() => return Err(unreachable.into()),
        daemons => daemons.unwrap_or_default(),
    };
    for daemon in daemons {
        let live = daemon.runs(RunSelector::Live)?.into_iter();
        let mine = live.filter(|told| told.run.process.uid.is_none_or(|uid| uid == user));
        found.extend(mine.map(|told| Candidate::Live(Box::new(told), daemon.clone())));
    }
    for path in args.store.all_readable()? {
        found.extend(of_store(&path, args.with_oom, user)?);
    }
    Ok(found)
}

fn of_store(path: &Path, with_oom: bool, user: u64) -> Result<Vec<Candidate>> {
    let store = Store::open_read_only(path)?;
    let filter = Filter { oom: with_oom, limit: Some(NEWEST), ..Filter::default() };
    // A run without a user was imported, so it belongs to the owner of the store.
    let mine = |listed: &Listed| listed.uid.is_none_or(|uid| uid == user);
    let newest = store.select(&filter)?.into_iter().filter(mine).take(if with_oom { COMPARED } else { 1 });
    newest
        .map(|listed| {
            let id = listed.run.id;
            Ok(Candidate::Stored(path.to_owned(), id, listed.run.stored_s, Box::new(store.load(id)?)))
        })
        .collect()
}
