//! `gpumemctl mark NAME [PID|all]`, `gpumemctl record PID VERB` and `gpumemctl nvml release`: requests to the daemon.

use crate::args::{Mark, Nvml, NvmlCommand, Pid, Record, Verb};
use crate::client::{Daemon, RunSelector};
use crate::exit::NotFound;
use crate::output::print;
use crate::when::When;
use anyhow::Result;
use gpumem_model::harmless::{clean as harmless, quoted};
use gpumem_report::text::clean;

/// Sets a mark at the present moment in the runs of live processes.
pub(crate) fn mark(args: &Mark) -> Result<()> {
    let daemon = Daemon::find(args.socket.as_deref())?;
    let marked = match (&args.job, args.pid) {
        (Some(job), _) => daemon.mark(&args.name, RunSelector::Job(job)),
        (None, Some(Pid::All) | None) => daemon.mark(&args.name, RunSelector::Live),
        (None, Some(Pid::One(pid))) => match daemon.mark(&args.name, RunSelector::Pid(pid)) {
            // If the process is a launcher, the processes that it started are marked.
            Err(error) if error.is::<NotFound>() => {
                daemon.mark(&args.name, RunSelector::Tree(pid)).map_err(|_| error)
            }
            marked => marked,
        },
    }?;
    let name = clean(&args.name);
    let whose = match marked.pids.as_slice() {
        [pid] => format!("pid {pid}"),
        pids if pids.len() <= 8 => {
            let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
            format!("pids {}", pids.join(", "))
        }
        pids => format!("{} processes", pids.len()),
    };
    let of = marked.pids.first().map(u32::to_string).unwrap_or_default();
    let since = quoted(&clean(&When::Mark(args.name.clone()).to_string()));
    print(&format!("marked {name} in the run of {whose}: gpumemctl report {of} --since {since}\n"))
}

/// Sends a recording command to the agent of a process, through the daemon.
pub(crate) fn record(args: &Record) -> Result<()> {
    let daemon = Daemon::find(args.socket.as_deref())?;
    let output = args.output.as_deref().map(std::path::absolute).transpose()?;
    let mut limits = String::new();
    if let Some((first, last)) = args.steps {
        limits += &format!("&steps={first}:{last}");
    }
    if let Some(seconds) = args.for_s {
        limits += &format!("&for={seconds}");
    }
    if let Some(bytes) = args.max_size {
        limits += &format!("&max_size={bytes}");
    }
    let recorded = daemon.record(args.pid, args.verb.name(), output.as_deref(), &limits)?;
    let pid = recorded.pid;
    let file = recorded.file.as_deref().map(|file| harmless(&quoted(file)));
    let told = match (args.verb, file) {
        (Verb::Start, Some(file)) => match args.steps {
            Some((first, last)) => {
                format!("pid {pid} records its steps {first} to {last} to {file}, when they come")
            }
            None => format!("pid {pid} records to {file}"),
        },
        (Verb::Stop, Some(file)) => format!("pid {pid} has recorded to {file}: gpumemctl report {file}"),
        (Verb::Stop, None) => format!("pid {pid} was not recording"),
        (Verb::Dump, Some(file)) => {
            format!("pid {pid} has written what it holds to {file}: gpumemctl report {file}")
        }
        (Verb::Pause, _) => {
            format!("pid {pid} keeps its history back; its sums stay as they are until resume")
        }
        (Verb::Resume, _) => format!("pid {pid} tells its history again"),
        (verb, None) => format!("pid {pid}: {} is done", verb.name()),
    };
    print(&format!("{told}\n"))
}

/// Asks the daemon to close NVML, so that a GPU can be reset or its MIG mode changed.
pub(crate) fn nvml(args: &Nvml) -> Result<()> {
    let NvmlCommand::Release(release) = &args.command;
    let daemon = Daemon::find(release.socket.as_deref())?;
    let released = daemon.release(release.seconds)?;
    print(&format!(
        "NVML is closed for {} s: GPUs can be reset and MIG changed; used is not known until then\n",
        released.for_s
    ))
}
