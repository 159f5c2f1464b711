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
    ExitCode::from(match args::Cli::try_parse() {
        Ok(cli) => run(cli.command),
        Err(help_or_error) => {
            let _ = help_or_error.print();
            if help_or_error.use_stderr() { exit::USAGE } else { exit::OK }
        }
    })
}

fn run(command: args::Command) -> u8 {
    let done = match command {
        args::Command::Import(import) => command::import::run(&import),
        args::Command::Report(report) => command::report::run(&report),
        args::Command::Runs(runs) => command::runs::run(&runs),
    };
    match done {
        Ok(()) => exit::OK,
        Err(error) if output::is_broken_pipe(&error) => exit::OK, // the reader has seen enough
        Err(error) => output::complain(&error),
    }
}
