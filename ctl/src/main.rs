//! gpumemctl: arguments, one file or one stored run, one text, table or JSON.
//!
//! ```text
//! args       what can be typed
//! exit       exit codes, and which error is which
//! command    one file per command
//! output     standard output: a terminal or a pipe
//! ```
#![forbid(unsafe_code)]

mod args;
mod command;
mod exit;
mod output;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let done = match args::Cli::parse().command {
        args::Command::Import(import) => command::import::run(&import),
        args::Command::Report(report) => command::report::run(&report),
        args::Command::Runs(runs) => command::runs::run(&runs),
    };
    match done {
        Ok(()) => ExitCode::from(exit::OK),
        Err(error) => {
            if output::is_broken_pipe(&error) {
                return ExitCode::from(exit::OK); // the reader has seen enough
            }
            eprintln!("gpumemctl: {error:#}");
            ExitCode::from(exit::code(&error))
        }
    }
}
