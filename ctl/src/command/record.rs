//! `gpumemctl record PID start|stop|pause|resume|dump`

use crate::args::{Record, Verb};
use crate::client::Daemon;
use crate::output::print;
use anyhow::Result;

/// Has the daemon tell the agent of a process.
pub fn run(args: &Record) -> Result<()> {
    let daemon = Daemon::find(args.socket.as_deref())?;
    let output = args.output.as_deref().map(std::path::absolute).transpose()?;
    let recorded = daemon.record(args.pid, args.verb.name(), output.as_deref())?;
    let pid = recorded.pid;
    let file = recorded.file.as_deref().map(gpumem_runs::report::text::clean);
    let told = match (args.verb, file) {
        (Verb::Start, Some(file)) => format!("pid {pid} records to {file}"),
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
