//! `gpumemctl run -- CMD`: runs the command unchanged, and prints five lines when it has ended.
//!
//! ```text
//! private         starts a private daemon if none answers
//! environment     paths of libgpumem.so and gpumemd; variables that the command inherits
//! child           start, signals and end of the command
//! exit_summary    the summary at the end
//! ```
//!
//! The command has priority: it runs even if a part of ours fails. One line on standard error then gives the reason. Standard
//! input and output are never used.

mod child;
pub(crate) mod environment;
mod exit_summary;
mod private;

use crate::args::Run as Args;
use crate::client::{self, Daemon};
use gpumem_report::text::escape;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub(crate) use private::detach;

pub(crate) fn run(args: &Args) -> u8 {
    let mut notes = Notes { quiet: args.quiet };
    // A mistyped command must not start a daemon.
    if let Some(failure) = child::not_found(&args.command) {
        return failure.print();
    }
    let library = environment::library();
    let listener = listener(args, &mut notes);
    if let Err(looked_at) = &library {
        notes.print(&format!("libgpumem.so was not found ({looked_at}): memory will have no names"));
    }
    let variables = environment::variables(&environment::Ways {
        library: library.as_deref().ok(),
        agent: listener.agent().as_deref(),
        record: args.record.as_deref(),
        name: args.name.as_deref(),
    });
    let started = Instant::now();
    let end = match child::run(&args.command, &variables.set) {
        Ok(end) => end,
        Err(failure) => return failure.print(),
    };
    if !args.quiet {
        exit_summary::ExitSummary {
            listener: &listener,
            library_found: library.is_ok(),
            job: &variables.job,
            record: args.record.as_deref(),
            socket: args.socket.typed(),
            pid: end.pid,
            started,
        }
        .print(&mut notes);
    }
    end.finish()
}

#[derive(Debug)]
pub(crate) enum Listener {
    /// A daemon that can be queried afterwards.
    Daemon(Daemon),
    /// Only an agent socket is reachable.
    AgentAlone(PathBuf),
    /// None, unless a daemon starts meanwhile. The reason has been printed.
    Nobody,
}

impl Listener {
    fn agent(&self) -> Option<PathBuf> {
        match self {
            Listener::Daemon(daemon) => Some(client::sibling(&daemon.control, client::AGENT)),
            Listener::AgentAlone(agent) => Some(agent.clone()),
            Listener::Nobody => None,
        }
    }
}

fn listener(args: &Args, notes: &mut Notes) -> Listener {
    if args.record.is_some() {
        return Listener::Nobody;
    }
    let given = args.socket.as_deref();
    let unreachable = match Daemon::find(given) {
        Ok(daemon) => return Listener::Daemon(daemon),
        Err(unreachable) => unreachable,
    };
    if let Some(socket) = client::named(given) {
        let why = unreachable.tried.first().map_or("", |(_, why)| why.as_str());
        notes.print(&format!("no daemon answers at {}: {why}; nothing will be recorded", socket.display()));
        return Listener::Nobody;
    }
    if let Some(agent) = client::agent_alone() {
        return Listener::AgentAlone(agent);
    }
    match private::start() {
        Ok(daemon) => Listener::Daemon(daemon),
        Err(why) => {
            notes.print(&format!("no daemon answers or could be started: {why}; nothing will be recorded"));
            Listener::Nobody
        }
    }
}

/// Messages on standard error in addition to the command's output.
#[derive(Debug)]
pub(crate) struct Notes {
    quiet: bool,
}

impl Notes {
    /// Prints a cleaned line. Errors are ignored, because standard error may be closed or full.
    pub(crate) fn print(&mut self, line: &str) {
        if !self.quiet {
            let _ = writeln!(std::io::stderr(), "gpumemctl: {}", escape(line));
        }
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
