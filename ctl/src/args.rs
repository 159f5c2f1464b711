//! Command line arguments.

mod compare;
mod picture;
mod typed;

pub(crate) use compare::{Diff, Explain, Export, Runs};
pub(crate) use picture::{Picture, Plot, Traced, Window};
pub(crate) use typed::{Pid, names_device};

use crate::exit::NoStore;
use crate::output::Output;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use gpumem_import::{FORMATS, Format};
use gpumem_model::harmless::quoted;
use gpumem_report::By;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where did my GPU memory go?
#[derive(Debug, Parser)]
#[command(name = "gpumemctl", version, max_term_width = 100, after_help = crate::exit::HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command and tell afterwards where its GPU memory went
    Run(Run),
    /// List what holds the GPUs now
    Ps(Ps),
    /// Watch what holds the GPUs, and one process in depth
    Top(Top),
    /// Tell where the memory of a process or run went
    Report(Box<Report>),
    /// Tell why memory ran out: the request, who had the device, what would have helped
    Oom(Oom),
    /// Sum the processes of a job, on this node or with a Prometheus on all; without ID: list the jobs
    Job(Job),
    /// Say what a word of a report means, with the numbers of a run
    Explain(Explain),
    /// Tell what one run holds more than another, and why; a gate for tests
    Diff(Diff),
    /// Look for what does not work, and say what to do
    Doctor(Doctor),
    /// List the runs in the store
    Runs(Runs),
    /// Read a file of another tool, a recording or an exported run into the run store
    Import(Import),
    /// Write a run into a file, to be imported or reported on another machine
    Export(Export),
    /// Make a running process write recordings, or keep its history back
    Record(Record),
    /// Give this moment a name, in the runs of live processes
    Mark(Mark),
    /// Let go of the driver for a while
    Nvml(Nvml),
    /// Starts the program in a session of its own
    #[command(hide = true)]
    Detach(Detach),
    /// Write manual pages and completions into a folder
    #[command(hide = true)]
    Generate(Generate),
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::RUN_HELP, override_usage = "gpumemctl run [OPTIONS] -- CMD...")]
pub(crate) struct Run {
    /// Say nothing at the end
    #[arg(short, long)]
    pub quiet: bool,
    /// A name for the job, to find its runs by
    #[arg(long, value_parser = typed::job_name)]
    pub name: Option<String>,
    /// Write a recording (%p: the pid) instead of reporting to a daemon
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    #[command(flatten)]
    pub socket: SocketPath,
    /// Command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Ps {
    /// One JSON document
    #[arg(long)]
    pub json: bool,
    /// Only this device: NVML's index, or the beginning of its UUID
    #[arg(long, value_name = "N|UUID")]
    pub device: Option<String>,
    #[command(flatten)]
    pub socket: SocketPath,
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Job {
    /// Name or id of the job, Slurm's, or the pod's name or uid; all jobs if left out
    pub id: Option<String>,
    /// One JSON document (docs/who.md)
    #[arg(long)]
    pub json: bool,
    /// Ask this Prometheus, which scrapes the daemons of all nodes, instead of this node
    #[arg(long, value_name = "URL", conflicts_with_all = ["given", "socket"])]
    pub prometheus: Option<String>,
    #[command(flatten)]
    pub store: StorePath,
    #[command(flatten)]
    pub socket: SocketPath,
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::DOCTOR_HELP)]
pub(crate) struct Doctor {
    /// Look at this process as well
    pub pid: Option<u32>,
    /// One JSON document
    #[arg(long)]
    pub json: bool,
    /// Write an archive for somebody who is to help, without command lines, environments, tags and users' names [default file:
    /// gpumem-doctor-TIME.tar.gz]
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "", conflicts_with = "json")]
    pub bundle: Option<PathBuf>,
    /// Users are named as they are
    #[arg(long, requires = "bundle")]
    pub keep_names: bool,
    #[command(flatten)]
    pub socket: SocketPath,
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Record {
    /// The process, one of your own
    pub pid: u32,
    /// What it is to do
    pub verb: Verb,
    /// The new file, or the folder for it, as the process sees it [default: gpumem-HOST-rRANK-pPID-N.gpumem where the process
    /// runs]
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// start: only these steps of the program, first and last
    #[arg(long, value_name = "A:B", value_parser = typed::steps)]
    pub steps: Option<(u64, u64)>,
    /// start: for so long
    #[arg(long = "for", value_name = "TIME", value_parser = typed::seconds)]
    pub for_s: Option<u64>,
    /// start: until the file is so large
    #[arg(long, value_name = "SIZE", value_parser = typed::size)]
    pub max_size: Option<u64>,
    #[command(flatten)]
    pub socket: SocketPath,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Verb {
    /// Begin a recording, beside what it tells the daemon
    Start,
    /// End it
    Stop,
    /// Keep its history back; its sums are told again at resume
    Pause,
    /// Tell it again, and the state
    Resume,
    /// Write what it holds now
    Dump,
}

impl Verb {
    /// As it is typed.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Verb::Start => "start",
            Verb::Stop => "stop",
            Verb::Pause => "pause",
            Verb::Resume => "resume",
            Verb::Dump => "dump",
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Mark {
    /// The name: reports take it as a time
    pub name: String,
    /// A process by its pid, or what a launcher started; all that you may see if left out
    #[arg(value_name = "PID|all")]
    pub pid: Option<Pid>,
    /// The processes of this job
    #[arg(long, value_name = "ID", conflicts_with = "pid")]
    pub job: Option<String>,
    #[command(flatten)]
    pub socket: SocketPath,
}

#[derive(Debug, Args)]
pub(crate) struct Nvml {
    #[command(subcommand)]
    pub command: NvmlCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NvmlCommand {
    /// Close NVML, so that a GPU can be reset or its MIG mode changed
    Release(Release),
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Release {
    /// For how long
    #[arg(long = "for", value_name = "TIME", default_value = "60s", value_parser = typed::seconds)]
    pub seconds: u64,
    #[command(flatten)]
    pub socket: SocketPath,
}

#[derive(Debug, Args)]
pub(crate) struct Detach {
    /// Where its words go
    #[arg(long)]
    pub log: PathBuf,
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// A `share` folder: man/, bash-completion/, zsh/ and fish/ are made in it
    pub dir: PathBuf,
}

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct SocketPath {
    /// The daemon's control socket, or its directory [default: $GPUMEM_CONTROL, then the user's and the
    /// system's runtime directory]
    #[arg(long = "socket", value_name = "DIR|FILE")]
    socket: Option<PathBuf>,
}

impl SocketPath {
    /// Returns the path that was typed.
    pub(crate) fn as_deref(&self) -> Option<&Path> {
        self.socket.as_deref()
    }

    /// Returns the option as text for a suggested command, with a leading blank; empty if it was not given.
    pub(crate) fn typed(&self) -> String {
        self.socket
            .as_ref()
            .map(|path| format!(" --socket {}", quoted(&path.to_string_lossy())))
            .unwrap_or_default()
    }
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Import {
    /// Files to read; their format is guessed from what is in them. A format's name before them forces it,
    /// like --format
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Read the files as this format instead of guessing
    #[arg(long, value_parser = formats())]
    pub format: Option<&'static Format>,
    #[command(flatten)]
    pub store: StorePath,
}

#[derive(Debug, Clone, Default, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Report {
    /// Without a name, selects a run in which memory ran out.
    #[arg(skip)]
    pub with_oom: bool,
    /// A process by its pid, or what a launcher started; a run of the store (r7); a recording or log
    /// (./FILE); the latest run if left out
    #[arg(value_name = "PID|RUN|FILE")]
    pub run: Option<String>,
    /// More of them: each in turn, or as a picture side by side
    #[arg(value_name = "MORE", conflicts_with = "job")]
    pub more: Vec<String>,
    /// One JSON document (docs/report-json.md)
    #[arg(long, group = "form")]
    pub json: bool,
    /// One line per name and moment, in bytes
    #[arg(long, group = "form")]
    pub csv: bool,
    /// A page for a browser, in one file that asks for nothing else (docs/report-html.md)
    #[arg(long, group = "form", conflicts_with_all = ["all", "steps", "growth", "iterations"])]
    pub html: bool,
    /// Rows of the table; lines of modules are known where the program ran with GPUMEM_LINES=1 [default: the first that names
    /// something]
    #[arg(long, value_name = "ROWS", conflicts_with_all = ["json", "csv"])]
    pub by: Option<ReportRows>,
    /// Rows are tags, and every tag has one: --by tag --all
    #[arg(long, conflicts_with_all = ["json", "csv", "by"])]
    pub tags: bool,
    /// Rules that name categories: default, mxnet, tbd, torch, or a file [default: what fits the run]
    #[arg(long, value_name = "PRESET|FILE")]
    pub rules: Option<String>,
    /// Name every category, however small
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    pub all: bool,
    /// How the gap came to be what it is: its steps, with their causes
    #[arg(long, conflicts_with_all = ["json", "csv", "by", "all"])]
    pub steps: bool,
    /// What grows instead: each name, per step or per minute, with a verdict
    #[arg(long, conflicts_with_all = ["json", "csv", "steps"])]
    pub growth: bool,
    /// What each training step held instead: a row each (with --csv or --json too)
    #[arg(long, conflicts_with_all = ["steps", "growth", "by", "tags"])]
    pub iterations: bool,
    /// With --iterations: each parameter and its gradient, too, as its last iteration had them (with --csv a column each)
    #[arg(long, requires = "iterations")]
    pub columns: bool,
    /// With --iterations: only those whose number is a multiple of N
    #[arg(long, value_name = "N", requires = "iterations", value_parser = clap::value_parser!(u64).range(1..))]
    pub every: Option<u64>,
    /// The program's own counters, and how often and how long it was in each of its ranges (with --json too)
    #[arg(long, conflicts_with_all = ["csv", "html", "steps", "growth", "iterations", "by", "tags", "all"])]
    pub counters: bool,
    #[command(flatten)]
    pub window: Window,
    /// Only this device: NVML's index, or the beginning of its UUID
    #[arg(long, value_name = "N|UUID")]
    pub device: Option<String>,
    /// The processes of this job
    #[arg(long, value_name = "ID", conflicts_with = "run")]
    pub job: Option<String>,
    /// Only this process of a recording with several
    #[arg(long, value_name = "PID")]
    pub pid: Option<u32>,
    /// Read a file as this format instead of guessing
    #[arg(long, value_parser = formats())]
    pub format: Option<&'static Format>,
    #[command(flatten)]
    pub picture: Picture,
    #[command(flatten)]
    pub traced: Traced,
    #[command(flatten)]
    pub output: Output,
    #[command(flatten)]
    pub store: StorePath,
    #[command(flatten)]
    pub socket: SocketPath,
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Oom {
    /// A process by its pid, or what a launcher started; a run of the store (r7); a recording
    /// (./FILE); the latest run if left out
    #[arg(value_name = "PID|RUN|FILE")]
    pub run: Option<String>,
    /// One JSON document (docs/oom.md)
    #[arg(long)]
    pub json: bool,
    /// All of them in full, and refusals that were survived
    #[arg(long, conflicts_with_all = ["json", "at"])]
    pub all: bool,
    /// Instead of a process: who ended, or ran out of memory, around this time
    #[arg(long, value_name = "TIME", conflicts_with_all = ["run", "job", "pid"], value_parser = crate::when::typed_moment)]
    pub at: Option<i64>,
    /// With --at: so long before and after it
    #[arg(long = "for", value_name = "TIME", default_value = "60s", requires = "at", value_parser = typed::seconds)]
    pub within_s: u64,
    /// Only this device: NVML's index, or the beginning of its UUID
    #[arg(long, visible_alias = "gpu", value_name = "N|UUID")]
    pub device: Option<String>,
    /// The processes of this job
    #[arg(long, value_name = "ID", conflicts_with = "run")]
    pub job: Option<String>,
    /// Only this process of a recording with several
    #[arg(long, value_name = "PID")]
    pub pid: Option<u32>,
    #[command(flatten)]
    pub store: StorePath,
    #[command(flatten)]
    pub socket: SocketPath,
}

impl Oom {
    /// Returns the arguments of the report that finds the same run.
    pub(crate) fn report(&self) -> Report {
        Report {
            run: self.run.clone(),
            json: self.json,
            all: self.all,
            device: self.device.clone(),
            job: self.job.clone(),
            pid: self.pid,
            store: self.store.clone(),
            socket: self.socket.clone(),
            with_oom: true,
            ..Report::default()
        }
    }
}

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct StorePath {
    /// Run store [default: $GPUMEM_STORE, $XDG_STATE_HOME/gpumem/runs.sqlite, ~/.local/state/gpumem/runs.sqlite]
    #[arg(long = "store", value_name = "FILE")]
    given: Option<PathBuf>,
}

/// Path of the system daemon's run store.
const SYSTEM_STORE: &str = "/var/lib/gpumemd/runs.sqlite";

impl StorePath {
    /// Returns the option as text for a suggested command, with a leading blank; empty if it was not given.
    pub(crate) fn typed(&self) -> String {
        self.given
            .as_ref()
            .map(|path| format!(" --store {}", quoted(&path.to_string_lossy())))
            .unwrap_or_default()
    }

    /// Returns the store to read: like [`path`](Self::path), but the system daemon's store if the user has none.
    ///
    /// # Errors
    /// If no home directory is known.
    pub(crate) fn readable(&self) -> anyhow::Result<PathBuf> {
        let usual = self.path();
        let named =
            self.given.is_some() || std::env::var_os("GPUMEM_STORE").is_some_and(|value| !value.is_empty());
        let there = usual.as_ref().is_ok_and(|path| path.exists());
        if !named && !there && std::fs::File::open(SYSTEM_STORE).is_ok() {
            Ok(SYSTEM_STORE.into())
        } else {
            usual
        }
    }

    /// Returns all existing stores: the user's and the system daemon's, or only the one that is named.
    ///
    /// # Errors
    /// If no home directory is known.
    pub(crate) fn all_readable(&self) -> anyhow::Result<Vec<PathBuf>> {
        let first = self.readable()?;
        let named =
            self.given.is_some() || std::env::var_os("GPUMEM_STORE").is_some_and(|value| !value.is_empty());
        let system = PathBuf::from(SYSTEM_STORE);
        let mut all: Vec<PathBuf> = if first.exists() { vec![first] } else { Vec::new() };
        if !named && !all.contains(&system) && std::fs::File::open(&system).is_ok() {
            all.push(system);
        }
        Ok(all)
    }

    /// Returns the store's path, given or default.
    ///
    /// # Errors
    /// If no home directory is known.
    pub(crate) fn path(&self) -> anyhow::Result<PathBuf> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(path) = self.given.clone().or_else(|| set("GPUMEM_STORE")) {
            return Ok(path);
        }
        let absolute = |name: &str| set(name).filter(|path| path.is_absolute());
        let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
        state.map(|state| state.join("gpumem/runs.sqlite")).ok_or_else(|| NoStore.into())
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Rows {
    Layer,
    Structure,
    Tag,
}

/// Rows of a report.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ReportRows {
    Layer,
    Structure,
    Tag,
    Line,
}

impl From<ReportRows> for By {
    fn from(rows: ReportRows) -> By {
        match rows {
            // `Report::by_line` puts lines in place of layers.
            ReportRows::Layer | ReportRows::Line => By::Layer,
            ReportRows::Structure => By::Structure,
            ReportRows::Tag => By::Tag,
        }
    }
}

impl From<Rows> for By {
    fn from(rows: Rows) -> By {
        match rows {
            Rows::Layer => By::Layer,
            Rows::Structure => By::Structure,
            Rows::Tag => By::Tag,
        }
    }
}

/// Returns the parser for names of formats, with their descriptions for --help and errors.
fn formats() -> impl TypedValueParser<Value = &'static Format> {
    let known = FORMATS.iter().map(|format| PossibleValue::new(format.name).help(format.about));
    PossibleValuesParser::new(known).try_map(|name| gpumem_import::format(&name).ok_or("no such format"))
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Top {
    /// Begin with this process in depth
    pub pid: Option<u32>,
    /// Look so often: 0.1 to 3600 seconds
    #[arg(short, long, value_name = "SECONDS", default_value = "2", value_parser = interval)]
    pub interval: Duration,
    /// Only this device: NVML's index, or the beginning of its UUID
    #[arg(long, value_name = "N|UUID")]
    pub device: Option<String>,
    /// Print one frame; so does a pipe
    #[arg(long)]
    pub once: bool,
    #[command(flatten)]
    pub socket: SocketPath,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.trim_end_matches('s').parse().ok();
    let fits = seconds.filter(|seconds| (0.1..=3600.0).contains(seconds));
    fits.map(Duration::from_secs_f64).ok_or_else(|| "an interval is 0.1 to 3600 seconds".to_owned())
}
