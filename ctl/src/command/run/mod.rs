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
mod farewell;
pub mod library;
mod private;

use crate::args::Run as Args;
use crate::client::{self, Daemon};
use gpumem_runs::report::text::clean;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

pub use private::detach;

/// Runs the command; the code is for the process to end with.
pub fn run(args: &Args) -> u8 {
    let mut words = Words { quiet: args.quiet };
    // A word that is mistyped starts no daemon.
    if let Some(failure) = child::not_found(&args.command) {
        return failure.told();
    }
    let library = library::find();
    let daemon = if args.record.is_some() { None } else { daemon(args, &mut words) };
    if let Err(looked_at) = &library {
        words.say(&format!("libgpumem.so was not found ({looked_at}): memory will have no names"));
    }
    let variables = environment::variables(&environment::Ways {
        library: library.as_deref().ok(),
        control: daemon.as_ref().map(|daemon| daemon.control.as_path()),
        record: args.record.as_deref(),
        name: args.name.as_deref(),
    });
    let started = Instant::now();
    let end = match child::run(&args.command, &variables.set) {
        Ok(end) => end,
        Err(failure) => return failure.told(),
    };
    if !args.quiet {
        farewell::Farewell {
            daemon: daemon.as_ref(),
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

/// The daemon that answers, or one of our own.
fn daemon(args: &Args, words: &mut Words) -> Option<Daemon> {
    let given = args.socket.as_deref();
    let unreachable = match Daemon::find(given) {
        Ok(daemon) => return Some(daemon),
        Err(unreachable) => unreachable,
    };
    if let Some(socket) = client::named(given) {
        let why = unreachable.tried.first().map_or("", |(_, why)| why.as_str());
        words.say(&format!("no daemon answers at {}: {why}; nothing will be recorded", socket.display()));
        return None;
    }
    match private::start() {
        Ok(daemon) => Some(daemon),
        Err(why) => {
            words.say(&format!(
                "no daemon answers, and none could be started: {why}; nothing will be recorded"
            ));
            None
        }
    }
}

/// What is said on standard error beside what the command says.
#[derive(Debug)]
pub struct Words {
    quiet: bool,
}

impl Words {
    /// One line, harmless. Standard error may be full or closed: that is nobody's concern.
    pub fn say(&mut self, line: &str) {
        if !self.quiet {
            let _ = writeln!(std::io::stderr(), "gpumemctl: {}", clean(line));
        }
    }
}

/// A path as others may use it from another working directory.
fn absolute(path: &Path) -> std::path::PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
