//! gpumemd: monitors the GPUs of this machine and reports what uses their memory.

use anyhow::Context;
use clap::{Parser, Subcommand};
use gpumemd::app::{self, Setup, error_chain};
use gpumemd::clock;
use gpumemd::config::Home;
use gpumemd::os::{raise_descriptor_limit, use_one_heap};
use gpumemd::signals::Signals;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Watches the GPUs of this machine and reports what uses their memory
#[derive(Debug, Parser)]
#[command(name = "gpumemd", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: Run,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon (the default)
    Run(Run),
}

#[derive(Debug, clap::Args)]
struct Run {
    /// Configuration file [default: /etc/gpumemd/gpumemd.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Serve only this user: own directory, no metrics port, exit when idle
    #[arg(long)]
    private: bool,
    /// Check the configuration and exit
    #[arg(long)]
    check: bool,
    /// Log level: error, warn, info, debug, trace, or directives such as gpumemd=debug
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log: String,
}

fn main() -> ExitCode {
    // Handles the arguments of the child process that reads NVML. Only the daemon starts it.
    let mut args = std::env::args_os().skip(1);
    if args.next().is_some_and(|word| word == "nvml-poller") {
        return gpumemd::source::nvml::poller_main(args);
    }
    // This must come first: a signal before its handler is installed would kill the daemon during its start.
    let signals = Signals::install();
    let cli = Cli::parse();
    let run = match cli.command {
        Some(Command::Run(run)) => run,
        None => cli.run,
    };
    match signals.context("installing signal handlers").and_then(|signals| start(run, signals)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpumemd: {}", error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn start(run: Run, signals: Signals) -> anyhow::Result<()> {
    let setup = Setup { file: run.config, private: run.private, home: Home::of_process(), service: true };
    let settings = setup.settings()?;
    if run.check {
        println!("the configuration is valid");
        return Ok(());
    }
    log(&run.log)?;
    raise_descriptor_limit();
    use_one_heap();
    clock::start_beats();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let (end, reload) = signals.listen()?;
        app::run(setup, settings, app::Signals { end, reload }).await
    });
    // Do not wait for a thread that waits for a disk.
    runtime.shutdown_background();
    result
}

/// Writes the log to standard error, one line for each event. The journal adds the time to each line.
fn log(directives: &str) -> anyhow::Result<()> {
    let filter: Targets = directives.parse().with_context(|| {
        format!(
            "--log {directives:?}: must be error, warn, info, debug or trace, or directives such as gpumemd=debug"
        )
    })?;
    let terminal = std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = lines.with_ansi(terminal).with_target(false);
    let log = tracing_subscriber::registry().with(filter);
    if std::env::var_os("JOURNAL_STREAM").is_some() {
        log.with(lines.without_time()).init()
    } else {
        log.with(lines).init()
    }
    Ok(())
}
