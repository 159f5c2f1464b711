//! `gpumemctl run -- CMD`: runs the command unchanged, and prints a summary with the verdict when it has ended.
//!
//! The command runs even if no daemon can be started or no agent is found. One line on standard error then gives the reason.
//! gpumemctl itself uses neither standard input nor standard output.

mod child;
pub(crate) mod environment;
mod exit_summary;
mod private;

use crate::args::Run as Args;
use crate::client::{self, Daemon};
use anyhow::Result;
use exit_summary::ExitSummary;
use gpumem_report::text::escape;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub(crate) use private::detach;

/// Runs the command and prints the summary. Returns the command's exit code; ends by the signal that ended the command.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let notes = Notes { quiet: args.quiet };
    // A mistyped command must not start a daemon.
    child::check_exists(&args.command)?;
    let library = environment::library();
    let listener = listener(args, &notes);
    if let Err(searched) = &library {
        notes.print(&format!("libgpumem.so was not found ({searched}): memory will have no names"));
    }
    let job = environment::job(args.name.as_deref());
    let variables = environment::variables(&job, library.as_deref().ok(), listener.agent.as_deref(), args);
    let started = Instant::now();
    let end = child::run(&args.command, &variables)?;
    if !args.quiet {
        let library_found = library.is_ok();
        let summary =
            ExitSummary { args, listener: &listener, library_found, job: &job, pid: end.pid, started };
        summary.print(&notes);
    }
    Ok(end.finish())
}

/// The daemon that receives the agents' reports. Empty if no daemon answers, or if the command writes a recording.
#[derive(Debug, Default)]
pub(crate) struct Listener {
    /// The socket for agents. It may be reachable without the daemon's control socket.
    agent: Option<PathBuf>,
    /// The daemon, which has the runs when the command has ended.
    daemon: Option<Daemon>,
}

/// Finds a daemon, or starts a private one if no socket is named.
fn listener(args: &Args, notes: &Notes) -> Listener {
    if args.record.is_some() {
        return Listener::default();
    }
    let with_daemon = |daemon: Daemon| {
        let agent = daemon.socket.path.with_file_name(client::AGENT);
        Listener { agent: Some(agent), daemon: Some(daemon) }
    };
    let given = args.socket.as_deref();
    let unreachable = match Daemon::find(given) {
        Ok(daemon) => return with_daemon(daemon),
        Err(unreachable) => unreachable,
    };
    if let Some(socket) = client::named_socket(given) {
        let why = unreachable.tried.first().map_or("", |(_, why)| why.as_str());
        notes.print(&format!("no daemon answers at {}: {why}; nothing will be recorded", socket.display()));
        return Listener::default();
    }
    if let Some(agent) = client::agent_socket() {
        return Listener { agent: Some(agent), daemon: None };
    }
    match private::start() {
        Ok(daemon) => with_daemon(daemon),
        Err(why) => {
            notes.print(&format!("no daemon answers or could be started: {why}; nothing will be recorded"));
            Listener::default()
        }
    }
}

/// Prints messages on standard error, unless `--quiet` was given.
#[derive(Debug)]
pub(crate) struct Notes {
    quiet: bool,
}

impl Notes {
    /// Prints a line, escaped. Errors are ignored, because standard error may be closed or full.
    pub(crate) fn print(&self, line: &str) {
        if !self.quiet {
            let _ = writeln!(std::io::stderr(), "gpumemctl: {}", escape(line));
        }
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
