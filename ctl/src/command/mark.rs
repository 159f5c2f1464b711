//! `gpumemctl mark NAME [PID|all]`

use crate::args::Mark;
use crate::client::{Daemon, Which};
use crate::exit::NotFound;
use crate::output::print;
use crate::when::When;
use anyhow::Result;
use gpumem_model::harmless::quoted;
use gpumem_report::text::clean;

/// Gives this moment a name in the runs of live processes.
pub(crate) fn run(args: &Mark) -> Result<()> {
    let daemon = Daemon::find(args.socket.as_deref())?;
    let marked = match (&args.job, args.pid) {
        (Some(job), _) => daemon.mark(&args.name, Which::Job(job)),
        (None, Some(Pid::All) | None) => daemon.mark(&args.name, Which::Live),
        (None, Some(Pid::One(pid))) => match daemon.mark(&args.name, Which::Pid(pid)) {
            // A launcher: what it started is meant.
            Err(error) if error.is::<NotFound>() => {
                daemon.mark(&args.name, Which::Tree(pid)).map_err(|_| error)
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

/// Whose run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pid {
    /// That of this process, or of what it started.
    One(u32),
    /// Those of all live processes that the caller may see.
    All,
}

impl std::str::FromStr for Pid {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => Ok(Pid::All),
            pid => pid.parse().map(Pid::One).map_err(|_| "a pid, or all"),
        }
    }
}
