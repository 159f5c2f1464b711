//! Command line arguments.

mod compare;
mod help;
mod picture;
mod source;
mod typed;

pub(crate) use compare::{Diff, Explain, Export, Runs, WhatIf, Why};
pub(crate) use help::{command, examples};
pub(crate) use picture::{Picture, Traced, Window};
pub(crate) use source::{DataSource, SocketPath, StorePath, no_device, quoted_suffix, variable};
pub(crate) use typed::{Pid, names_device};

use crate::output::Output;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use gpumem_import::{FORMATS, Format};
use gpumem_report::GroupBy;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Show where the memory of NVIDIA GPUs goes; without a command: who holds it now, and what is wrong
#[derive(Debug, Parser)]
#[command(name = "gpumemctl", version, max_term_width = 100, after_help = crate::exit::HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command and print where its GPU memory went
    Run(Run),
    /// List the processes that use GPU memory
    Ps(Ps),
    /// Watch devices and processes in the terminal
    Top(Top),
    /// Show the memory of a process or run by name and cause
    Report(Box<Report>),
    /// Explain an out-of-memory error: the request, the holders, a remedy
    Oom(Oom),
    /// Advise what to change so that a program uses less memory, with the saving
    Why(Why),
    /// Sum the processes of a job on this node or, through Prometheus, on all nodes
    Job(Job),
    /// Explain a word of a report, with the numbers of a run
    Explain(Explain),
    /// Compare two runs; usable as a CI gate
    Diff(Diff),
    /// Replay a recording or a PyTorch memory snapshot under other allocator settings
    #[command(name = "whatif")]
    WhatIf(WhatIf),
    /// Serve reports and advice to language models, by the Model Context Protocol
    Mcp,
    /// Check the installation and a process, and suggest fixes
    Doctor(Doctor),
    /// List the stored runs
    Runs(Runs),
    /// Import recordings, exported runs and other tools' files into the run store
    Import(Import),
    /// Export a run to a file, for another machine
    Export(Export),
    /// Record a running process to a file, or pause its agent
    Record(Record),
    /// Mark this moment with a name in the runs of live processes
    Mark(Mark),
    /// Control the daemon's use of NVML
    Nvml(Nvml),
    /// Start a program in a new session
    #[command(hide = true)]
    Detach(Detach),
    /// Write manual pages and shell completions to a folder
    #[command(hide = true)]
    Generate(Generate),
    /// Print the words that can complete a command line
    #[command(hide = true)]
    Candidates(Candidates),
}

#[derive(Debug, Args)]
#[command(override_usage = "gpumemctl run [OPTIONS] -- CMD...")]
pub(crate) struct Run {
    /// Print no summary at the end
    #[arg(short, long)]
    pub quiet: bool,
    /// Name of the job, to find its runs
    #[arg(long, value_parser = typed::job_name)]
    pub name: Option<String>,
    /// Write a recording to FILE (%p: pid) instead of reporting to a daemon
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    #[command(flatten)]
    pub socket: SocketPath,
    /// Command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct Ps {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Select a device by NVML index or UUID prefix
    #[arg(long, value_name = "N|UUID")]
    pub device: Option<String>,
    #[command(flatten)]
    pub socket: SocketPath,
}

#[derive(Debug, Args)]
pub(crate) struct Job {
    /// Job: its name or id, a Slurm job id, or a pod's name or uid [default: list all jobs]
    pub id: Option<String>,
    /// Print JSON (docs/who.md)
    #[arg(long)]
    pub json: bool,
    /// Query this Prometheus, which scrapes the daemons of all nodes, instead of this node; https:// needs curl
    #[arg(long, value_name = "URL", conflicts_with_all = ["given", "socket"])]
    pub prometheus: Option<String>,
    #[command(flatten)]
    pub source: DataSource,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Also check this process
    #[arg(value_parser = typed::pid)]
    pub pid: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Write a support archive without command lines, environments, tags and user names [default file:
    /// gpumem-doctor-TIME.tar.gz]
    #[arg(long, value_name = "FILE", num_args = 0..=1, conflicts_with = "json")]
    pub bundle: Option<Option<PathBuf>>,
    /// Keep user names unredacted
    #[arg(long, requires = "bundle")]
    pub keep_names: bool,
    #[command(flatten)]
    pub socket: SocketPath,
}

#[derive(Debug, Args)]
pub(crate) struct Record {
    /// One of your processes
    #[arg(value_parser = typed::pid)]
    pub pid: u32,
    /// Action
    pub verb: Verb,
    /// New file, or existing folder; the path as the process sees it [default: gpumem-HOST-rRANK-pPID-N.gpumem in its working
    /// directory]
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// start: record only training steps A to B, both included
    #[arg(long, value_name = "A:B", value_parser = typed::steps)]
    pub steps: Option<(u64, u64)>,
    /// start: stop after this time
    #[arg(long = "for", value_name = "TIME", value_parser = typed::seconds)]
    pub for_s: Option<u64>,
    /// start: stop at this file size
    #[arg(long, value_name = "SIZE", value_parser = typed::size)]
    pub max_size: Option<u64>,
    #[command(flatten)]
    pub socket: SocketPath,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Verb {
    /// Start a recording, in addition to reporting to the daemon
    Start,
    /// Stop the recording
    Stop,
    /// Stop sending events; the state is sent again at resume
    Pause,
    /// Send the state, and events again
    Resume,
    /// Write the current state to a file
    Dump,
}

impl Verb {
    /// Returns the word for the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

#[derive(Debug, Args)]
pub(crate) struct Mark {
    /// Name of the mark; reports accept it as a time
    pub name: String,
    /// A pid, also of a launcher; default: all processes that you may see
    #[arg(value_name = "PID|all")]
    pub pid: Option<Pid>,
    /// Select the processes of this job
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
    /// Close NVML for a while, so that a GPU can be reset or its MIG mode changed
    Release(Release),
}

#[derive(Debug, Args)]
pub(crate) struct Release {
    /// Duration
    #[arg(long = "for", value_name = "TIME", default_value = "60s", value_parser = typed::seconds)]
    pub seconds: u64,
    #[command(flatten)]
    pub socket: SocketPath,
}

#[derive(Debug, Args)]
pub(crate) struct Detach {
    /// File to which the command's output is written
    #[arg(long)]
    pub log: PathBuf,
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct Candidates {
    /// The typed words after `gpumemctl`; the last one is to be completed
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// A `share` folder; man/, bash-completion/, zsh/ and fish/ are created in it
    pub dir: PathBuf,
}

/// The store and the daemon from which a command takes runs.
#[derive(Debug, Args)]
pub(crate) struct Import {
    /// Files; the format is detected from the content. A format name before the files forces it, like
    /// --format
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Format of the files, instead of detection
    #[arg(long, value_parser = formats())]
    pub format: Option<&'static Format>,
    #[command(flatten)]
    pub store: StorePath,
}

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Report {
    /// Whether a request without a name selects the newest run in which memory ran out.
    #[arg(skip)]
    pub with_oom: bool,
    /// A pid, also of a launcher; a stored run (r7); a recording or log (./FILE) [default: your latest run]
    #[arg(value_name = "PID|RUN|FILE")]
    pub run: Option<String>,
    /// More runs, processes or files, reported one after another or drawn side by side
    #[arg(value_name = "MORE", conflicts_with = "job")]
    pub more: Vec<String>,
    /// Select the processes of this job
    #[arg(long, value_name = "ID", conflicts_with = "run", help_heading = "Data source")]
    pub job: Option<String>,
    /// Select a process of a recording with several
    #[arg(long, value_name = "PID", value_parser = typed::pid, help_heading = "Data source")]
    pub pid: Option<u32>,
    /// Format of a file, instead of detection
    #[arg(long, value_parser = formats(), help_heading = "Data source")]
    pub format: Option<&'static Format>,
    #[command(flatten)]
    pub source: DataSource,
    #[command(flatten)]
    pub window: Window,
    /// Select a device by NVML index or UUID prefix
    #[arg(long, value_name = "N|UUID", help_heading = "Filter")]
    pub device: Option<String>,
    /// Rows of the table; source lines of modules need GPUMEM_LINES=1 in the program [default: the first that is
    /// not empty]
    #[arg(long, value_name = "ROWS", value_parser = report_rows(), conflicts_with_all = ["json", "csv"], help_heading = "Content")]
    pub by: Option<ReportRows>,
    /// One row for each tag: --by tag --all
    #[arg(long, conflicts_with_all = ["json", "csv", "by"], help_heading = "Content")]
    pub tags: bool,
    /// Show two moments, how each number was obtained, and all notes
    #[arg(short, long, conflicts_with_all = ["json", "csv"], help_heading = "Content")]
    pub verbose: bool,
    /// Like --verbose, with every category and device, also small ones
    #[arg(long, conflicts_with_all = ["json", "csv"], help_heading = "Content")]
    pub all: bool,
    /// Rules for categories: default, mxnet, tbd, torch, or a file [default: chosen by the run]
    #[arg(long, value_name = "PRESET|FILE", help_heading = "Content")]
    pub rules: Option<String>,
    /// Show each change of Untrackable with its cause
    #[arg(long, conflicts_with_all = ["json", "csv", "by", "all"], help_heading = "Content")]
    pub steps: bool,
    /// Show growth for each name, per step or minute, with a verdict
    #[arg(long, conflicts_with_all = ["json", "csv", "steps"], help_heading = "Content")]
    pub growth: bool,
    /// Show one row for each training step (also with --csv or --json)
    #[arg(long, conflicts_with_all = ["steps", "growth", "by", "tags"], help_heading = "Content")]
    pub iterations: bool,
    /// With --iterations: also each parameter and gradient of the last iteration (with --csv one column each)
    #[arg(long, requires = "iterations", help_heading = "Content")]
    pub columns: bool,
    /// With --iterations: show every Nth iteration
    #[arg(long, value_name = "N", requires = "iterations", value_parser = typed::count, help_heading = "Content")]
    pub every: Option<u64>,
    /// Show the program's counters, and count and duration of its ranges (also with --json)
    #[arg(long, conflicts_with_all = ["csv", "html", "steps", "growth", "iterations", "by", "tags", "all"], help_heading = "Content")]
    pub counters: bool,
    /// Print JSON (docs/report-json.md)
    #[arg(long, group = "form", help_heading = "Format")]
    pub json: bool,
    /// Print CSV: one line for each name and moment, in bytes
    #[arg(long, group = "form", help_heading = "Format")]
    pub csv: bool,
    /// Write a self-contained web page (docs/report-html.md)
    #[arg(long, group = "form", conflicts_with_all = ["all", "steps", "growth", "iterations"], help_heading = "Format")]
    pub html: bool,
    #[command(flatten)]
    pub picture: Picture,
    #[command(flatten)]
    pub traced: Traced,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Oom {
    /// A pid, also of a launcher; a stored run (r7); a recording (./FILE) [default: your newest
    /// out-of-memory error]
    #[arg(value_name = "PID|RUN|FILE")]
    pub run: Option<String>,
    /// Print JSON (docs/oom.md)
    #[arg(long)]
    pub json: bool,
    /// Show holders, composition and idle memory of the failure
    #[arg(long, conflicts_with_all = ["json", "at"])]
    pub verbose: bool,
    /// Like --verbose, for every out-of-memory error, also those that the program handled
    #[arg(long, conflicts_with_all = ["json", "at"])]
    pub all: bool,
    /// List the processes that ended or ran out of memory around this time
    #[arg(long, value_name = "TIME", conflicts_with_all = ["run", "job", "pid"], value_parser = crate::when::parse_unix_ns)]
    pub at: Option<i64>,
    /// With --at: time before and after it
    #[arg(long = "for", value_name = "TIME", default_value = "60s", requires = "at", value_parser = typed::seconds)]
    pub within_s: u64,
    /// Select a device by NVML index or UUID prefix
    #[arg(long, visible_alias = "gpu", value_name = "N|UUID")]
    pub device: Option<String>,
    /// Select the processes of this job
    #[arg(long, value_name = "ID", conflicts_with = "run")]
    pub job: Option<String>,
    /// Select a process of a recording with several
    #[arg(long, value_name = "PID", value_parser = typed::pid)]
    pub pid: Option<u32>,
    #[command(flatten)]
    pub source: DataSource,
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
            source: self.source.clone(),
            with_oom: true,
            ..Report::default()
        }
    }
}

/// Values of `--by`: word, description and kind of rows.
const ROWS: [(&str, &str, GroupBy); 3] =
    [("layer", "", GroupBy::Layer), ("structure", "", GroupBy::Structure), ("tag", "", GroupBy::Tag)];

/// The value of `report --by`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReportRows {
    pub by: GroupBy,
    /// Whether the rows are source lines in place of layers.
    pub lines: bool,
}

fn report_rows() -> impl TypedValueParser<Value = ReportRows> {
    let rows = ROWS.map(|(name, help, by)| (name, help, ReportRows { by, lines: false }));
    words(rows.into_iter().chain([("line", "", ReportRows { by: GroupBy::Layer, lines: true })]))
}

fn formats() -> impl TypedValueParser<Value = &'static Format> {
    words(FORMATS.iter().map(|format| (format.name, format.about, format)))
}

/// Returns a parser that maps words to values. `known` has each word, its description for --help, and its value.
fn words<T>(
    known: impl IntoIterator<Item = (&'static str, &'static str, T)>,
) -> impl TypedValueParser<Value = T>
where
    T: Clone + Send + Sync + 'static,
{
    let known: Vec<_> = known.into_iter().collect();
    let value = |(name, help, _): &(&'static str, &'static str, T)| {
        PossibleValue::new(*name).help(Some(*help).filter(|help| !help.is_empty()))
    };
    let names = PossibleValuesParser::new(known.iter().map(value).collect::<Vec<_>>());
    names.try_map(move |typed| {
        let value = known.iter().find(|(name, ..)| *name == typed).map(|(.., value)| value.clone());
        value.ok_or("no such value")
    })
}

#[derive(Debug, Args)]
pub(crate) struct Top {
    /// Start with the details of this process
    #[arg(value_parser = typed::pid)]
    pub pid: Option<u32>,
    /// Refresh interval: 0.1 to 3600 seconds
    #[arg(short, long, value_name = "SECONDS", default_value = "2", value_parser = interval)]
    pub interval: Duration,
    /// Select a device by NVML index or UUID prefix
    #[arg(long, value_name = "N|UUID")]
    pub device: Option<String>,
    /// Print one frame and exit, as into a pipe
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
