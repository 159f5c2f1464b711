//! Processes that the daemon knows: live ones, and ones that ended recently.

use super::found::{Found, One, What};
use super::stored;
use crate::args::Report as Args;
use crate::client::{Daemon, RunReply, RunSelector};
use crate::exit::NotFound;
use anyhow::Result;
use gpumem_model::run::{Run, State};
use gpumem_report::text::clean;

/// Finds a process by its pid: its own run, else those of the processes that it started, else its latest stored run.
pub(crate) fn pid(pid: u32, args: &Args) -> Result<Found> {
    let daemon = Daemon::find(args.socket.as_deref());
    let mut looked_at = Vec::new();
    match &daemon {
        Ok(daemon) => {
            let own = daemon.runs(RunSelector::Pid(pid))?;
            if let Some(told) = own.into_iter().next() {
                return one(told, vec![pid.to_string()], daemon, args);
            }
            let mut tree = daemon.runs(RunSelector::Tree(pid))?;
            if tree.len() == 1 {
                // This is the case for `gpumemctl run` itself, or for a shell.
                return one(tree.remove(0), vec![pid.to_string()], daemon, args);
            }
            let (runs, over) = living(tree);
            if !runs.is_empty() {
                let title = format!("{} started by pid {pid}{}{over}", count(&runs), name(pid));
                return Ok(Found { what: What::Group(title, runs), command: asked(pid.to_string(), args) });
            }
            looked_at.push(format!(
                "the daemon at {} has no run of it, nor of a process that it started",
                daemon.control.display()
            ));
        }
        Err(_) => looked_at.push("no daemon answers (gpumemctl doctor)".to_owned()),
    }
    if let Some(found) = stored::of_pid(pid, args)? {
        return Ok(found);
    }
    looked_at.push(format!("no run of it is in {}", args.store.readable()?.display()));
    let is = match name(pid) {
        name if name.is_empty() => "no process of that number runs now".to_owned(),
        name => format!("it runs{name}: has it used a GPU? gpumemctl doctor {pid}"),
    };
    Err(NotFound(format!("pid {pid}: {}; {is}", looked_at.join("; "))).into())
}

/// Finds the processes of a job, in the daemon or else in the store.
pub(crate) fn job(job: &str, args: &Args) -> Result<Found> {
    let daemon = Daemon::find(args.socket.as_deref());
    let mut told = match &daemon {
        Ok(daemon) => daemon.runs(RunSelector::Job(job))?,
        Err(_) => Vec::new(),
    };
    if told.is_empty() {
        told = stored::of_job(job, &args.store)?;
    }
    if told.is_empty() {
        let asked = match &daemon {
            Ok(daemon) => format!("the daemon at {}", daemon.control.display()),
            Err(_) => "no daemon (none answers: gpumemctl doctor)".to_owned(),
        };
        let store = args.store.readable()?;
        return Err(NotFound(format!("no job {job}: asked {asked}, looked in {}", store.display())).into());
    }
    // Several jobs may have the same name; the newest is selected.
    let id = |told: &RunReply| told.run.process.claims.get("job").cloned();
    if !told.iter().any(|told| id(told).as_deref() == Some(job)) {
        let newest = told.iter().max_by_key(|told| told.run.process.start_ticks).and_then(id);
        told.retain(|told| id(told) == newest);
    }
    if told.len() == 1 {
        let told = told.remove(0);
        return Ok(One::found(told.run, told.id, asked_job(job, args)));
    }
    let (runs, over) = living(told);
    let title = format!("{} of job {}{over}", count(&runs), clean(job));
    Ok(Found { what: What::Group(title, runs), command: asked_job(job, args) })
}

/// Returns the run of a live process, with its job.
pub(crate) fn one(told: RunReply, command: Vec<String>, daemon: &Daemon, args: &Args) -> Result<Found> {
    let job = told.run.process.claims.get("job").cloned();
    let siblings = job.as_deref().and_then(|job| daemon.runs(RunSelector::Job(job)).ok());
    let others = siblings.map_or(0, |runs| runs.len().saturating_sub(1)) as u64;
    let job = job.filter(|_| others > 0).map(|job| (asked_job(&job, args).join(" "), others));
    let RunReply { run, id } = told;
    let one = One { run, id, others: Vec::new(), job, file: None, window: None };
    Ok(Found { what: What::One(Box::new(one)), command: with_socket(command, args) })
}

fn asked(what: String, args: &Args) -> Vec<String> {
    with_socket(vec![what], args)
}

fn asked_job(job: &str, args: &Args) -> Vec<String> {
    with_socket(vec!["--job".to_owned(), job.to_owned()], args)
}

fn with_socket(mut command: Vec<String>, args: &Args) -> Vec<String> {
    if let Some(socket) = args.socket.as_deref() {
        command.extend(["--socket".to_owned(), socket.to_string_lossy().into_owned()]);
    }
    command.extend(args.store.typed().split_once("--store ").map(|(_, path)| format!("--store={path}")));
    command
}

/// Returns the running processes, or all if none is running, and a text on those left out. Memory that was freed must not be
/// summed with memory that is in use.
fn living(told: Vec<RunReply>) -> (Vec<Run>, String) {
    let mut runs: Vec<Run> = told.into_iter().map(|told| told.run).collect();
    let open = runs.iter().filter(|run| run.state == State::Open).count();
    let over = runs.len() - open;
    if open == 0 || over == 0 {
        return (runs, if open == 0 { ", all ended".to_owned() } else { String::new() });
    }
    runs.retain(|run| run.state == State::Open);
    (runs, format!(", {over} more ended"))
}

fn count(runs: &[Run]) -> String {
    let mut pids: Vec<u32> = runs.iter().map(|run| run.process.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    match pids.len() {
        1 => "1 process".to_owned(),
        number => format!("{number} processes"),
    }
}

/// Returns a process's name such as ` (torchrun)`; empty if it does not exist.
fn name(pid: u32) -> String {
    let comm = std::fs::read(format!("/proc/{pid}/comm"));
    comm.map(|comm| format!(" ({})", clean(String::from_utf8_lossy(&comm).trim()))).unwrap_or_default()
}
