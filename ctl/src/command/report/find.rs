//! Finds the runs that the arguments of a command select, in files, in the store or in the daemon. Without arguments it is the
//! newest run of the calling user.

use crate::args::{Report as Args, StorePath};
use crate::client::{Daemon, RunReply, RunSelector};
use crate::exit::Kind;
use crate::when::now_ns;
use anyhow::Result;
use gpumem_import::{read_file, read_with_blocks};
use gpumem_model::escape::quoted;
use gpumem_model::run::{Clock, Run, State};
use gpumem_model::units::signed;
use gpumem_model::window::{self, Window};
use gpumem_report::oom::at::TimeWindow;
use gpumem_report::text::escape;
use gpumem_runs::input::Input;
use gpumem_runs::store::{Filter, RunId, RunSummary, SelectedRun, Store};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The requested runs, and the arguments of `gpumemctl report` that select them again.
pub(crate) struct Found {
    pub what: What,
    pub command: Vec<String>,
}

pub(crate) enum What {
    One(Box<One>),
    /// Several processes: a title for the group, and their runs.
    Group(String, Vec<Run>),
}

pub(crate) struct One {
    pub run: Run,
    /// The run's id in the store, if it is stored.
    pub id: Option<String>,
    /// Pids of the other processes that the same file has.
    pub others: Vec<u32>,
    /// The arguments that select the other processes of the run's job, and the number of those processes.
    pub job: Option<(String, u64)>,
    /// The file from which the run was read.
    pub file: Option<PathBuf>,
    /// The part of the run's life that is reported; `None` for all of it.
    pub window: Option<Window>,
}

impl Found {
    fn one(RunReply { id, run }: RunReply, command: Vec<String>) -> Found {
        let one = One { run, id, others: Vec::new(), job: None, file: None, window: None };
        Found { what: What::One(Box::new(one)), command }
    }

    /// Makes the result for a run that was loaded from the store.
    fn stored(reply: RunReply, args: &Args) -> Found {
        let command = reply.id.iter().cloned().chain(args.source.store.words()).collect();
        Found::one(reply, command)
    }
}

/// Opens a store; `None` if it does not exist.
pub(super) fn open(store: &StorePath) -> Result<Option<Store>> {
    let path = store.readable()?;
    Ok(if path.exists() { Some(Store::open_read_only(&path)?) } else { None })
}

fn load(store: &Store, id: RunId) -> Result<RunReply> {
    Ok(RunReply { id: Some(id.to_string()), run: store.load(id)? })
}

/// Returns the error for a file of the right format that contains no process.
pub(crate) fn no_process(file: &Path) -> anyhow::Error {
    let file = file.display();
    Kind::BadInput
        .error(format!("{file}: it has no process; a recording of an agent or a daemon has at least one"))
}

/// Returns whether a name is not that of a file, and not the path of one.
pub(crate) fn is_unknown(name: &str) -> bool {
    !name.contains('/') && !Path::new(name).exists()
}

/// Returns the error for a name that selects nothing; `more` is appended to the ways to find names.
pub(crate) fn unknown(name: &str, more: &str) -> anyhow::Error {
    Kind::NotFound.error(format!(
        "{name}: no such file, and neither a pid nor a run: gpumemctl ps lists pids; runs are named r1, r2, ... (gpumemctl runs{more})"
    ))
}

/// Finds the run that is named by its id or by a file; without a name the latest run of the store.
pub(crate) fn stored(args: &Args) -> Result<Found> {
    let name = args.run.as_deref();
    // A file may have the name of a run id, but no run id contains a slash.
    let id: Option<RunId> = name.and_then(|name| name.parse().ok());
    match (name, id) {
        (Some(name), None) if is_unknown(name) => {
            let job = format!("; for a job: --job {}", quoted(name));
            return Err(unknown(name, &job));
        }
        (Some(name), None) => return from_file(name, args),
        (Some(name), Some(_)) if args.format.is_some() => return from_file(name, args),
        _ => {}
    }
    let path = args.source.store.readable()?;
    let store = Store::open_read_only(&path)?;
    let none = || {
        let text = "holds no run yet; give a recording or log, or import one";
        Kind::NotFound.error(format!("{}: {text}", path.display()))
    };
    let id = id.map_or_else(|| store.latest()?.ok_or_else(none), Ok)?;
    let reply = load(&store, id)?;
    let run_pid = reply.run.process.pid;
    if let Some(pid) = args.pid.filter(|pid| *pid != run_pid) {
        return Err(Kind::NotFound.error(format!("run {id} is of pid {run_pid}, not {pid}")));
    }
    Ok(Found::stored(reply, args))
}

/// Finds the latest stored run of a process; `None` if the store has none or does not exist.
fn stored_run_of_pid(pid: u32, args: &Args) -> Result<Option<Found>> {
    let Some(store) = open(&args.source.store)? else { return Ok(None) };
    let Some(summary) = store.list()?.into_iter().find(|run| run.pid == pid) else { return Ok(None) };
    Ok(Some(Found::stored(load(&store, summary.id)?, args)))
}

/// Returns the 1,024 newest stored runs of a job; empty if the store does not exist.
pub(crate) fn stored_runs_of_job(job: &str, store: &StorePath) -> Result<Vec<RunReply>> {
    selected(Filter { job: Some(job.to_owned()), ..Filter::default() }, store)
}

/// Returns the stored runs of the processes that a run's process has started; a later process may have the same pid. Empty if the
/// time of the run is unknown, or if the store does not exist.
pub(crate) fn stored_children(run: &Run, store: &StorePath) -> Result<Vec<RunReply>> {
    let Some((first_ns, last_ns)) = window::span(run) else { return Ok(Vec::new()) };
    let Clock::Monotonic { wall_offset_ns: Some(offset_ns) } = run.clock else { return Ok(Vec::new()) };
    let wall_ns = |time_ns: u64| Some(signed(time_ns).saturating_add(offset_ns));
    let ancestor = Some(run.process.pid).filter(|pid| *pid != 0);
    let filter =
        Filter { ancestor, since_ns: wall_ns(first_ns), until_ns: wall_ns(last_ns), ..Filter::default() };
    if ancestor.is_some() { selected(filter, store) } else { Ok(Vec::new()) }
}

/// Returns the 1,024 newest stored runs that a filter selects.
fn selected(filter: Filter, store: &StorePath) -> Result<Vec<RunReply>> {
    const MOST: usize = 1024;
    let Some(store) = open(store)? else { return Ok(Vec::new()) };
    let filter = Filter { limit: Some(MOST), ..filter };
    // If the life of a process is stored in several parts, only the newest part counts.
    let counts = |run: &RunSummary| run.source_kind == "daemon" && !matches!(run.state, State::Rolled { .. });
    let runs = store.select(&filter)?.into_iter().map(|selected| selected.run).filter(counts);
    runs.map(|run| load(&store, run.id)).collect()
}

/// Returns the names of the jobs of stored runs.
pub(crate) fn stored_jobs(store: &StorePath) -> Result<Vec<String>> {
    let runs = open(store)?.map(|store| store.select(&Filter::default())).transpose()?.unwrap_or_default();
    Ok(runs.into_iter().filter_map(|selected| selected.job).collect())
}

/// Returns stored runs whose process ended or ran out of memory around a time.
pub(crate) fn around(around: TimeWindow, args: &Args) -> Result<Vec<RunReply>> {
    let store = Store::open_read_only(&args.source.store.readable()?)?;
    let mut found = Vec::new();
    for summary in store.list()? {
        let wall_ns = |time_ns: Option<u64>| match summary.clock {
            Clock::Monotonic { wall_offset_ns } => i64::try_from(time_ns?).ok()?.checked_add(wall_offset_ns?),
            Clock::Lines => None,
        };
        // Runs outside of the searched time are skipped by their summary, because loading a run is slow.
        let (Some(first), Some(last)) = (wall_ns(summary.started_ns), wall_ns(summary.last_ns)) else {
            continue;
        };
        let is_before = last.saturating_add(around.for_ns) < around.at_ns;
        if is_before || first.saturating_sub(around.for_ns) > around.at_ns {
            continue;
        }
        let reply = load(&store, summary.id)?;
        if around.concerns(&reply.run) {
            found.push(reply);
        }
    }
    Ok(found)
}

/// Finds the run with most memory in a file, or of the requested pid. A run of a process with an agent comes before one without.
fn from_file(name: &str, args: &Args) -> Result<Found> {
    let path = Path::new(name);
    let runs = if args.html {
        read_with_blocks(Input::open(path)?, args.format)?
    } else {
        read_file(path, args.format)?
    };
    let mut pids: Vec<u32> = runs.iter().map(|run| run.process.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    let peak = |run: &Run| {
        let peaks =
            run.devices.iter().filter_map(|device| device.peak.tracked_bytes.or(device.peak.used_bytes()));
        peaks.fold(0, i64::saturating_add)
    };
    let requested = runs.into_iter().filter(|run| args.pid.is_none_or(|pid| run.process.pid == pid));
    let largest = requested.max_by_key(|run| (run.coverage.covered, peak(run)));
    let run = largest.ok_or_else(|| match args.pid {
        Some(pid) => {
            let known = pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
            Kind::NotFound.error(format!("{name}: has no pid {pid}; there are: {known}"))
        }
        None => no_process(path),
    })?;
    pids.retain(|pid| *pid != run.process.pid);
    let mut command = vec![name.to_owned()];
    command
        .extend(args.format.into_iter().flat_map(|format| ["--format".to_owned(), format.name.to_owned()]));
    command.extend(args.pid.into_iter().flat_map(|pid| ["--pid".to_owned(), pid.to_string()]));
    let one = One { run, id: None, others: pids, job: None, file: Some(path.to_owned()), window: None };
    Ok(Found { what: What::One(Box::new(one)), command })
}

/// Finds a process by its pid: its own run, else those of the processes that it started, else its latest stored run.
pub(crate) fn by_pid(pid: u32, args: &Args) -> Result<Found> {
    let command = [vec![pid.to_string()], args.source.words()].concat();
    let mut searched = Vec::new();
    match Daemon::find(args.source.socket.as_deref()) {
        Ok(daemon) => {
            if let Some(own) = daemon.runs(RunSelector::Pid(pid))?.into_iter().next() {
                return Ok(found_in_daemon(own, command, &daemon, &[], args));
            }
            let mut tree = daemon.runs(RunSelector::Tree(pid))?;
            if tree.len() == 1 {
                // `pid` is a shell or `gpumemctl run`, and has started one process with GPU memory.
                return Ok(found_in_daemon(tree.remove(0), command, &daemon, &[], args));
            }
            let (runs, ended) = running_or_all(tree);
            if !runs.is_empty() {
                let title = format!("{} started by pid {pid}{}{ended}", count(&runs), process_name(pid));
                return Ok(Found { what: What::Group(title, runs), command });
            }
            let at = daemon.socket.path.display();
            searched.push(format!("the daemon at {at} has no run of this process or of its children"));
        }
        Err(_) => searched.push("no daemon answers (gpumemctl doctor)".to_owned()),
    }
    if let Some(found) = stored_run_of_pid(pid, args)? {
        return Ok(found);
    }
    searched.push(format!("no run of it is in {}", args.source.store.readable()?.display()));
    let process = match process_name(pid) {
        name if name.is_empty() => "no process with this pid runs now".to_owned(),
        name => format!("the process runs{name}, and may not have used a GPU: gpumemctl doctor {pid}"),
    };
    Err(Kind::NotFound.error(format!("pid {pid}: {}; {process}", searched.join("; "))))
}

/// Finds the processes of a job, in the daemon or else in the store.
pub(crate) fn by_job(job: &str, args: &Args) -> Result<Found> {
    let daemon = Daemon::find(args.source.socket.as_deref()).ok();
    let mut found =
        daemon.as_ref().map(|daemon| daemon.runs(RunSelector::Job(job))).transpose()?.unwrap_or_default();
    if found.is_empty() {
        found = stored_runs_of_job(job, &args.source.store)?;
    }
    if found.is_empty() {
        let asked = match &daemon {
            Some(daemon) => format!("the daemon at {}", daemon.socket.path.display()),
            None => "no daemon (gpumemctl doctor says why none answers)".to_owned(),
        };
        let store = args.source.store.readable()?;
        let text = format!("no job {job}: asked {asked}, searched {}", store.display());
        return Err(Kind::NotFound.error(text));
    }
    // Several jobs may have the same name; the newest is selected.
    let id = |reply: &RunReply| reply.run.process.claims.get("job").cloned();
    if !found.iter().any(|reply| id(reply).as_deref() == Some(job)) {
        let newest = found.iter().max_by_key(|reply| reply.run.process.start_ticks).and_then(id);
        found.retain(|reply| id(reply) == newest);
    }
    let command = job_words(job, args);
    if found.len() == 1 {
        return Ok(Found::one(found.remove(0), command));
    }
    let (runs, ended) = running_or_all(found);
    let title = format!("{} of job {}{ended}", count(&runs), escape(job));
    Ok(Found { what: What::Group(title, runs), command })
}

/// Makes the result for a run that a daemon sent, with the daemon's other processes of the run's job. `socket` is the option that
/// selects the daemon, as words.
fn found_in_daemon(
    reply: RunReply,
    command: Vec<String>,
    daemon: &Daemon,
    socket: &[String],
    args: &Args,
) -> Found {
    let job = reply.run.process.claims.get("job").cloned();
    let siblings = job.as_deref().and_then(|job| daemon.runs(RunSelector::Job(job)).ok());
    let others = siblings.map_or(0, |runs| runs.len().saturating_sub(1)) as u64;
    let words = |job: String| [job_words(&job, args), socket.to_vec()].concat().join(" ");
    let job = job.filter(|_| others > 0).map(|job| (words(job), others));
    let RunReply { run, id } = reply;
    let one = One { run, id, others: Vec::new(), job, file: None, window: None };
    Found { what: What::One(Box::new(one)), command }
}

fn job_words(job: &str, args: &Args) -> Vec<String> {
    [vec!["--job".to_owned(), job.to_owned()], args.source.words()].concat()
}

/// Returns the runs of running processes, or all runs if no process is running, and a text on the ended ones. Freed memory of
/// ended processes must not be added to memory that is in use.
fn running_or_all(replies: Vec<RunReply>) -> (Vec<Run>, String) {
    let runs = replies.into_iter().map(|reply| reply.run);
    let (open, ended): (Vec<Run>, Vec<Run>) = runs.partition(|run| run.state == State::Open);
    match (open.len(), ended.len()) {
        (0, _) => (ended, ", all ended".to_owned()),
        (_, 0) => (open, String::new()),
        (_, more) => (open, format!(", {more} more ended")),
    }
}

fn count(runs: &[Run]) -> String {
    super::processes(runs.iter().map(|run| run.process.pid).collect::<BTreeSet<_>>().len())
}

/// Returns the name of a process as ` (torchrun)`; empty if the process does not exist.
fn process_name(pid: u32) -> String {
    let comm = std::fs::read(format!("/proc/{pid}/comm"));
    comm.map(|comm| format!(" ({})", escape(String::from_utf8_lossy(&comm).trim()))).unwrap_or_default()
}

/// Number of the newest runs in a store that are searched for runs of the calling user.
const NEWEST: usize = 256;
/// Maximum number of the user's runs that are compared: with OOMs by the time of the last one, of one job by their memory.
const COMPARED: usize = 16;

/// A run of the calling user, which may be the newest one.
struct Candidate {
    reply: RunReply,
    origin: Origin,
    /// Time at which the process began, in ns since 1970. For an imported run, whose start is unknown: the time at which the run
    /// was stored.
    began_ns: i128,
}

enum Origin {
    /// A daemon, and the option that selects it, as words; empty for the daemon that answers without `--socket`.
    Daemon(Daemon, Vec<String>),
    Store(PathBuf),
}

impl Candidate {
    /// `default_ns` is the beginning of a process whose start time is unknown, in ns since 1970.
    fn new(reply: RunReply, origin: Origin, default_ns: i128) -> Candidate {
        let tick_ns = 1_000_000_000 / i128::from(rustix::param::clock_ticks_per_second().max(1));
        let began_ns = match reply.run.clock {
            Clock::Monotonic { wall_offset_ns: Some(offset) } if reply.run.source.is_watched() => {
                i128::from(reply.run.process.start_ticks) * tick_ns + i128::from(offset)
            }
            _ => default_ns,
        };
        Candidate { reply, origin, began_ns }
    }
}

/// Finds the calling user's newest run; for `gpumemctl oom` the newest in which memory ran out, if there is one. Prints on
/// standard error which run it is. Returns `None` if the user has no run.
pub(crate) fn newest(args: &Args) -> Result<Option<Found>> {
    let mut candidates = candidates(args)?;
    let timed = candidates.iter().enumerate().filter_map(|(index, candidate)| {
        let run = &candidate.reply.run;
        let time_ns = if args.with_oom { last_oom_ns(run)? } else { candidate.began_ns };
        // A store lists the newest run first; its times are whole seconds.
        Some(((time_ns, run.process.start_ticks, Reverse(index)), index))
    });
    let newest_index = timed.max_by_key(|(time, _)| *time).map(|(_, index)| index);
    let found = newest_index.map(|index| if args.with_oom { index } else { main_of_job(&candidates, index) });
    let Some(Candidate { reply, origin, .. }) = found.map(|index| candidates.swap_remove(index)) else {
        if !args.with_oom {
            return Ok(None);
        }
        // No run has run out of memory; the report on the newest run states this.
        return newest(&Args { with_oom: false, ..args.clone() });
    };
    let process = &reply.run.process;
    let why = if args.with_oom { "your newest run that ran out of memory" } else { "your newest run" };
    let (pid, others) = (process.pid, "gpumemctl runs and ps list others");
    Ok(Some(match origin {
        Origin::Daemon(daemon, socket) => {
            let is = if reply.run.state == State::Open { "which is live" } else { "which has ended" };
            let at = match socket.is_empty() {
                true => String::new(),
                false => format!(", known to the daemon at {}", daemon.socket.path.display()),
            };
            eprintln!("{why}: pid {pid}, {is}{at} ({others})");
            let words = [vec![pid.to_string()], args.source.words(), socket.clone()].concat();
            found_in_daemon(reply, words, &daemon, &socket, args)
        }
        Origin::Store(path) => {
            let is_usual = args.source.store.readable().is_ok_and(|usual| usual == path);
            let of = if is_usual { String::new() } else { format!(" of {}", path.display()) };
            let id = reply.id.as_deref().unwrap_or_default();
            eprintln!("{why}: {id}{of}, pid {pid} ({others})");
            let mut found = Found::stored(reply, args);
            if !is_usual && args.source.store.words().is_empty() {
                found.command.extend(["--store".to_owned(), path.to_string_lossy().into_owned()]);
            }
            found
        }
    }))
}

/// Returns the index of the run with most memory that the newest run's job had at the same time, if it has much more than the newest
/// run: a program starts helper processes after itself.
fn main_of_job(candidates: &[Candidate], newest: usize) -> usize {
    const MUCH_MORE: i64 = 2;
    let peak = |candidate: &Candidate| {
        let devices = candidate.reply.run.devices.iter();
        devices.filter_map(|device| device.peak.tracked_bytes).fold(0, i64::saturating_add)
    };
    let job = |candidate: &Candidate| candidate.reply.run.process.claims.get("job").cloned();
    let Some(own) = candidates.get(newest).filter(|own| job(own).is_some()) else { return newest };
    let is_beside = |candidate: &Candidate| {
        let run = &candidate.reply.run;
        let length_ns = window::span(run).map_or(0, |(first, last)| last.saturating_sub(first));
        let is_part = matches!(run.state, State::Rolled { .. });
        !is_part
            && job(candidate) == job(own)
            && candidate.began_ns.saturating_add(length_ns.into()) >= own.began_ns
    };
    let beside = candidates.iter().enumerate().filter(|(_, candidate)| is_beside(candidate));
    let largest = beside.max_by_key(|(_, candidate)| peak(candidate));
    let is_much = |other: &Candidate| peak(other) / MUCH_MORE > peak(own);
    largest.filter(|(_, other)| is_much(other)).map_or(newest, |(index, _)| index)
}

/// Returns the time of a run's last OOM, in ns since 1970, or on the run's clock if it has no wall-clock offset.
fn last_oom_ns(run: &Run) -> Option<i128> {
    let ooms = run.devices.iter().flat_map(|device| &device.details.ooms);
    let last = ooms.filter(|oom| oom.is_out_of_memory()).map(|oom| i128::from(oom.time_ns)).max()?;
    match run.clock {
        Clock::Monotonic { wall_offset_ns: Some(offset) } => Some(last + i128::from(offset)),
        _ => Some(last),
    }
}

fn candidates(args: &Args) -> Result<Vec<Candidate>> {
    let user = u64::from(rustix::process::getuid().as_raw());
    let daemons = match Daemon::all(args.source.socket.as_deref()) {
        // A daemon that the user has named must answer.
        Err(unreachable) if args.source.socket.as_deref().is_some() => return Err(unreachable.into()),
        daemons => daemons.unwrap_or_default(),
    };
    let mut stores = args.source.store.all_readable()?;
    let mut found = Vec::new();
    for (number, daemon) in daemons.into_iter().enumerate() {
        let mut runs = daemon.runs(RunSelector::Live)?;
        if !args.source.store.is_named()
            && let Some(path) = daemon.store().filter(|path| !stores.contains(path))
        {
            match Store::open_read_only(&path) {
                Ok(_) => stores.push(path),
                Err(_) => runs.extend(ended(&daemon)),
            }
        }
        let mut socket = vec!["--socket".to_owned(), daemon.socket.path.to_string_lossy().into_owned()];
        if number == 0 {
            socket.clear(); // this daemon answers without the option
        }
        let mine = runs.into_iter().filter(|reply| reply.run.process.uid.is_none_or(|uid| uid == user));
        let origin = || Origin::Daemon(daemon.clone(), socket.clone());
        found.extend(mine.map(|reply| Candidate::new(reply, origin(), i128::MAX)));
    }
    for path in stores {
        found.extend(newest_of_store(&path, args.with_oom, user)?);
    }
    Ok(found)
}

/// Returns the ended runs that a daemon shows to the caller, of the last 30 days; empty if it does not answer.
fn ended(daemon: &Daemon) -> Vec<RunReply> {
    const AGE_NS: i64 = 30 * 24 * 3600 * 1_000_000_000;
    let around = TimeWindow { at_ns: now_ns(), for_ns: AGE_NS };
    let mut runs = daemon.runs(RunSelector::TimeWindow(around)).unwrap_or_default();
    runs.retain(|reply| reply.run.state != State::Open);
    runs
}

fn newest_of_store(path: &Path, with_oom: bool, user: u64) -> Result<Vec<Candidate>> {
    let store = Store::open_read_only(path)?;
    let filter = Filter { oom: with_oom, limit: Some(NEWEST), ..Filter::default() };
    // A run without a user id was imported, so it belongs to the owner of the store.
    let mine = |listed: &SelectedRun| listed.uid.is_none_or(|uid| uid == user);
    let mut listed: Vec<SelectedRun> = store.select(&filter)?.into_iter().filter(mine).collect();
    if let Some(newest) =
        listed.first().filter(|_| !with_oom).map(|newest| (newest.run.id, newest.job.clone()))
    {
        listed.retain(|listed| listed.run.id == newest.0 || listed.job.is_some() && listed.job == newest.1);
    }
    listed.truncate(COMPARED);
    let candidate = |listed: SelectedRun| {
        let stored_ns = i128::from(listed.run.stored_s) * 1_000_000_000;
        Ok(Candidate::new(load(&store, listed.run.id)?, Origin::Store(path.to_owned()), stored_ns))
    };
    listed.into_iter().map(candidate).collect()
}
