//! `gpumemctl run -- CMD`: the command as if nobody watched, and five lines when it has ended.
//!
//! ```text
//! library       where libgpumem.so and gpumemd are
//! private       a daemon of the user's own, when none answers
//! environment   what the command and all it starts inherit
//! child         start, signals, the end
//! farewell      what is said at the end
//! ```
//!
//! The command comes first: whatever of ours fails, it runs, with one line on standard error that says what
//! is missing. Standard input and output are never touched.

mod child;
mod environment;
mod exit_summary;
pub(crate) mod library;
mod private;

use crate::args::Run as Args;
use crate::client::{self, Daemon};
use gpumem_report::text::clean;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub(crate) use private::detach;

/// Runs the command; the code is for the process to end with.
pub(crate) fn run(args: &Args) -> u8 {
    let mut words = Words { quiet: args.quiet };
    // A word that is mistyped starts no daemon.
    if let Some(failure) = child::not_found(&args.command) {
        return failure.told();
    }
    let library = library::find();
    let listener = listener(args, &mut words);
    if let Err(looked_at) = &library {
        words.say(&format!("libgpumem.so was not found ({looked_at}): memory will have no names"));
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
        Err(failure) => return failure.told(),
    };
    if !args.quiet {
        exit_summary::Farewell {
            listener: &listener,
            library_found: library.is_ok(),
            job: &variables.job,
            record: args.record.as_deref(),
            socket: args.socket.typed(),
            pid: end.pid,
            started,
        }
        .say(&mut words);
    }
    end.finish()
}

/// Whom the command's processes report to.
#[derive(Debug)]
pub(crate) enum Listener {
    /// A daemon that can be asked afterwards.
    Daemon(Daemon),
    /// An agent socket, and no more.
    AgentAlone(PathBuf),
    /// Nobody, unless one comes up meanwhile. Why has been said.
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

/// The daemon that answers, or one of our own.
fn listener(args: &Args, words: &mut Words) -> Listener {
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
        words.say(&format!("no daemon answers at {}: {why}; nothing will be recorded", socket.display()));
        return Listener::Nobody;
    }
    if let Some(agent) = client::agent_alone() {
        return Listener::AgentAlone(agent);
    }
    match private::start() {
        Ok(daemon) => Listener::Daemon(daemon),
        Err(why) => {
            words.say(&format!(
                "no daemon answers, and none could be started: {why}; nothing will be recorded"
            ));
            Listener::Nobody
        }
    }
}

/// What is said on standard error beside what the command says.
#[derive(Debug)]
pub(crate) struct Words {
    quiet: bool,
}

impl Words {
    /// One line, harmless. Standard error may be full or closed: that is nobody's concern.
    pub(crate) fn say(&mut self, line: &str) {
        if !self.quiet {
            let _ = writeln!(std::io::stderr(), "gpumemctl: {}", clean(line));
        }
    }
}

/// A path as others may use it from another working directory.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
