//! Commands that send one request to the daemon: `gpumemctl mark NAME [PID|all]`, `record PID VERB` and `nvml release`;
//! and `gpumemctl mcp`, which becomes the program gpumem-mcp.

use crate::args::{Mark, Nvml, NvmlCommand, Pid, Record, Verb};
use crate::client::{Daemon, RunSelector};
use crate::exit::Kind;
use crate::output::print;
use crate::when::When;
use anyhow::Result;
use gpumem_model::escape::{escape, quoted};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Sets a mark at the present moment in the runs of live processes.
pub(crate) fn mark(args: &Mark) -> Result<()> {
    let daemon = Daemon::find(args.socket.as_deref())?;
    let marked = match (&args.job, args.pid) {
        (Some(job), _) => daemon.mark(&args.name, RunSelector::Job(job)),
        (None, Some(Pid::All) | None) => daemon.mark(&args.name, RunSelector::Live),
        (None, Some(Pid::One(pid))) => match daemon.mark(&args.name, RunSelector::Pid(pid)) {
            // A launcher has no run, so the processes that it started get the mark.
            Err(error) if Kind::NotFound.matches(&error) => {
                daemon.mark(&args.name, RunSelector::Tree(pid)).map_err(|_| error)
            }
            marked => marked,
        },
    }?;
    let name = escape(&args.name);
    let whose = match marked.pids.as_slice() {
        [pid] => format!("pid {pid}"),
        pids if pids.len() <= 8 => {
            format!("pids {}", pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", "))
        }
        pids => format!("{} processes", pids.len()),
    };
    let pid = marked.pids.first().map(u32::to_string).unwrap_or_default();
    let since = quoted(&escape(&When::Mark(args.name.clone()).to_string()));
    print(&format!("marked {name} in the run of {whose}: gpumemctl report {pid} --since {since}\n"))
}

/// Sends a recording command to the agent of a process, through the daemon.
pub(crate) fn record(args: &Record) -> Result<()> {
    let daemon = Daemon::find(args.socket.as_deref())?;
    let output = args.output.as_deref().map(std::path::absolute).transpose()?;
    let mut limits = args.steps.map(|(first, last)| format!("&steps={first}:{last}")).unwrap_or_default();
    limits += &args.for_s.map(|seconds| format!("&for={seconds}")).unwrap_or_default();
    limits += &args.max_size.map(|bytes| format!("&max_size={bytes}")).unwrap_or_default();
    let verb = args.verb.name();
    let recorded = daemon.record(args.pid, &verb, output.as_deref(), &limits)?;
    let file = recorded.file.as_deref().map(|file| escape(&quoted(file)));
    let text = match (args.verb, file) {
        (Verb::Start, Some(file)) => match args.steps {
            Some((first, last)) => format!("will record its steps {first} to {last} to {file}"),
            None => format!("records to {file}"),
        },
        (Verb::Stop, Some(file)) => format!("has recorded to {file}: gpumemctl report {file}"),
        (Verb::Stop, None) => "was not recording".to_owned(),
        (Verb::Dump, Some(file)) => format!("has written its state to {file}: gpumemctl report {file}"),
        (Verb::Pause, _) => "sends no events until resume; its sums stay exact".to_owned(),
        (Verb::Resume, _) => "sends events again".to_owned(),
        (_, None) => return print(&format!("pid {}: {verb} is done\n", recorded.pid)),
    };
    print(&format!("pid {} {text}\n", recorded.pid))
}

/// Asks the daemon to close NVML, so that a GPU can be reset or its MIG mode changed.
pub(crate) fn nvml(args: &Nvml) -> Result<()> {
    let NvmlCommand::Release(release) = &args.command;
    let daemon = Daemon::find(release.socket.as_deref())?;
    let seconds = daemon.release_nvml(release.seconds)?.for_s;
    print(&format!(
        "NVML is closed for {seconds} s: GPUs can be reset and MIG changed; used is unknown until then\n"
    ))
}

/// Executes gpumem-mcp, which is beside this program or in PATH. Returns only if that fails.
pub(crate) fn mcp() -> Result<()> {
    const NAME: &str = "gpumem-mcp";
    let beside =
        std::env::current_exe().ok().map(|own| own.with_file_name(NAME)).filter(|path| path.is_file());
    let error = beside.map_or_else(|| Command::new(NAME), Command::new).exec();
    Err(Kind::Other.error(format!(
        "{NAME} cannot be executed: {error}; install it beside gpumemctl or in PATH, as gpumemd's packages do"
    )))
}
