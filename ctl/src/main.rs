//! gpumemctl: one command, which uses a file, a stored run or a daemon's reply, and prints text, a table or JSON.
//!
//! ```text
//! args      command line arguments
//! exit      exit codes, and the mapping of errors to them
//! client    requests to the daemon
//! command   one file or folder for each command
//! output    standard output: a terminal or a pipe
//! proc      parsers of files in /proc/PID
//! when      times as users type them
//! ```
#![forbid(unsafe_code)]

mod args;
mod client;
mod command;
mod exit;
mod output;
mod proc;
#[cfg(test)]
mod reference;
mod when;

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(match args::Cli::from_process() {
        Ok(cli) => run(cli).unwrap_or_else(|error| match output::is_broken_pipe(&error) {
            true => exit::OK, // the reader closed the pipe early
            false => output::print_error(&error),
        }),
        Err(help_or_error) => {
            output::print_parse_error(&help_or_error);
            // Exit codes of `gpumemctl run` below 125 always come from the command itself.
            let is_run = std::env::args_os().nth(1).is_some_and(|word| word == "run");
            match help_or_error.use_stderr() {
                true if is_run => exit::RUN_FAILED,
                true => exit::USAGE,
                false => exit::OK,
            }
        }
    })
}

/// Runs a command, or prints the overview of the node without one. Returns the exit code.
fn run(cli: args::Cli) -> anyhow::Result<u8> {
    let Some(command) = cli.command else { return command::node::run().map(|()| exit::OK) };
    match command {
        args::Command::Run(run) => return command::run::run(&run),
        args::Command::Doctor(doctor) => return command::doctor::run(&doctor),
        args::Command::Detach(detach) => command::run::detach(&detach),
        args::Command::Candidates(candidates) => command::candidates::run(&candidates),
        args::Command::Generate(generate) => command::generate::run(&generate),
        args::Command::Ps(ps) => command::ps::run(&ps),
        args::Command::Job(job) => command::job::run(&job),
        args::Command::Top(top) => command::top::run(&top),
        args::Command::Mark(mark) => command::requests::mark(&mark),
        args::Command::Nvml(nvml) => command::requests::nvml(&nvml),
        args::Command::WhatIf(whatif) => command::whatif::run(&whatif),
        args::Command::Import(import) => command::import::run(&import),
        args::Command::Record(record) => command::requests::record(&record),
        args::Command::Mcp => command::requests::mcp(),
        args::Command::Report(report) => command::report::run(&report),
        args::Command::Oom(oom) => command::report::oom(&oom),
        args::Command::Why(why) => command::why::run(&why),
        args::Command::Diff(diff) => command::diff::run(&diff),
        args::Command::Explain(explain) => command::explain::run(&explain),
        args::Command::Export(export) => command::import::export(&export),
        args::Command::Runs(runs) => command::runs::run(&runs),
    }
    .map(|()| exit::OK)
}
