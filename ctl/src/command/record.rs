//! `gpumemctl record PID start|stop|pause|resume|dump`

use crate::args::{Record, Verb};
use crate::client::Daemon;
use crate::output::print;
use anyhow::Result;
use gpumem_model::harmless::{clean, quoted};

/// Has the daemon tell the agent of a process.
pub(crate) fn run(args: &Record) -> Result<()> {
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
    let file = recorded.file.as_deref().map(|file| clean(&quoted(file)));
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
