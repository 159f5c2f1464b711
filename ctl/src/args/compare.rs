//! Arguments of the commands that compare runs, replay requests, advise, explain words, and list, import or export runs.

use super::{DataSource, ROWS, Report, StorePath, formats, typed, words};
use crate::output::Output;
use crate::when::When;
use clap::Args;
use gpumem_import::Format;
use gpumem_report::GroupBy;
use gpumem_report::diff::gate::Limit;
use gpumem_runs::store::{STATES, Sort};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct Why {
    /// A pid, also of a launcher; a stored run (r7); a recording or PyTorch memory snapshot (./FILE) [default: your
    /// latest run]
    #[arg(value_name = "PID|RUN|FILE")]
    pub run: Option<String>,
    /// Print JSON of less than 4 kB, also for language models (docs/why.md)
    #[arg(long)]
    pub json: bool,
    /// Select a device by NVML index or UUID prefix
    #[arg(long, visible_alias = "gpu", value_name = "N|UUID")]
    pub device: Option<String>,
    /// Select a process of a recording with several
    #[arg(long, value_name = "PID", value_parser = typed::pid)]
    pub pid: Option<u32>,
    #[command(flatten)]
    pub source: DataSource,
}

impl Why {
    /// Returns the arguments of the report that finds the same run.
    pub(crate) fn report(&self) -> Report {
        Report {
            run: self.run.clone(),
            json: self.json,
            device: self.device.clone(),
            pid: self.pid,
            source: self.source.clone(),
            ..Report::default()
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Diff {
    /// Baseline: a pid, a stored run (r7), or a file (./FILE)
    #[arg(value_name = "A")]
    pub a: String,
    /// Compared with the baseline; more memory than A is positive
    #[arg(value_name = "B")]
    pub b: String,
    /// A and B are jobs (id or name), or files with several processes: compare the sums, and rank by rank
    #[arg(long)]
    pub job: bool,
    /// Compare the latest samples instead of the peaks
    #[arg(long)]
    pub now: bool,
    /// Rows of the table [default: the grouping that explains most of the difference]
    #[arg(long, value_name = "ROWS", value_parser = words(ROWS), conflicts_with_all = ["json", "csv"])]
    pub by: Option<GroupBy>,
    /// One row for each tag
    #[arg(long, conflicts_with_all = ["json", "csv", "by"])]
    pub tags: bool,
    /// Show every category, tag and device
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    pub all: bool,
    /// Select a device by NVML index or UUID prefix, of A or else of B
    #[arg(long, value_name = "N|UUID")]
    pub device: Option<String>,
    /// Print JSON (docs/compare.md)
    #[arg(long, group = "form")]
    pub json: bool,
    /// Print CSV: one line for each device, grouping and name, in bytes
    #[arg(long, group = "form")]
    pub csv: bool,
    /// Draw both runs side by side as SVG
    #[arg(long, group = "form")]
    pub svg: bool,
    /// Draw both runs side by side as PDF
    #[arg(long, group = "form")]
    pub pdf: bool,
    /// Draw both runs side by side as PNG
    #[arg(long, group = "form")]
    pub png: bool,
    /// Exit with code 8 if B exceeds A by more than a size (500MiB) or a share of A (2%)
    #[arg(long, value_name = "SIZE|PCT")]
    pub fail_above: Option<Limit>,
    /// Figure for --fail-above: used, tracked, gap (Untrackable), idle, a category or a tag [default: used, or tracked if unknown]
    #[arg(long, value_name = "WHAT", requires = "fail_above")]
    pub of: Option<String>,
    /// Rules for categories: default, mxnet, tbd, torch, or a file [default: chosen by the runs]
    #[arg(long, value_name = "PRESET|FILE")]
    pub rules: Option<String>,
    /// Format of files, instead of detection
    #[arg(long, value_parser = formats())]
    pub format: Option<&'static Format>,
    #[command(flatten)]
    pub output: Output,
    #[command(flatten)]
    pub source: DataSource,
}

impl Diff {
    /// Returns the arguments of the report that finds A or B, whichever is `name`.
    pub(crate) fn side(&self, name: &str) -> Report {
        // A name with a slash is a file, never a job.
        let is_job = self.job && !name.contains('/');
        Report {
            run: Some(name.to_owned()).filter(|_| !is_job),
            job: Some(name.to_owned()).filter(|_| is_job),
            format: self.format,
            source: self.source.clone(),
            ..Report::default()
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// A stored run (r7), a pid, or a recording or log (./FILE)
    #[arg(value_name = "RUN|PID|FILE")]
    pub run: String,
    /// Select a process of a recording with several
    #[arg(long, value_name = "PID", value_parser = typed::pid)]
    pub pid: Option<u32>,
    #[command(flatten)]
    pub output: Output,
    #[command(flatten)]
    pub source: DataSource,
}

#[derive(Debug, Args)]
pub(crate) struct Runs {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
    /// Runs of this user: name or uid
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// Runs of this job: its id, or the name given with `run --name`
    #[arg(long, value_name = "ID")]
    pub job: Option<String>,
    /// Runs with memory on this device: NVML index or UUID prefix
    #[arg(long, value_name = "N|UUID")]
    pub device: Option<String>,
    /// Runs that ended after this time: 2h (ago), 10:30, 2026-11-20T10:30, @seconds
    #[arg(long, value_name = "TIME")]
    pub since: Option<When>,
    /// Runs that began before this time
    #[arg(long, value_name = "TIME")]
    pub until: Option<When>,
    /// Runs in this state
    #[arg(long, value_parser = STATES)]
    pub state: Option<String>,
    /// Runs with an out-of-memory error, or a suspected one
    #[arg(long)]
    pub oom: bool,
    /// Runs whose command, file or job contains this text, or matches it with * and ?
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
    /// Order, newest or largest first
    #[arg(long, value_name = "BY", default_value = "stored", value_parser = words(ORDERS))]
    pub sort: Sort,
    /// Maximum number of runs
    #[arg(long, value_name = "N", value_parser = typed::count)]
    pub limit: Option<u64>,
    #[command(flatten)]
    pub store: StorePath,
}

/// Values of `--sort`: word, description and order.
const ORDERS: [(&str, &str, Sort); 5] = [
    ("stored", "", Sort::Stored),
    ("started", "", Sort::Started),
    ("peak", "", Sort::Peak),
    ("events", "", Sort::Events),
    ("label", "", Sort::Label),
];

#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// A word from a report, table or JSON: Untrackable, pool idle, used_bytes, a category, a tag [default: list all words]
    pub word: Option<String>,
    /// Source of the numbers [default: the live process with the most memory, else your latest run]
    #[arg(value_name = "PID|RUN|FILE")]
    pub run: Option<String>,
    /// Rules that name categories: default, mxnet, tbd, torch, or a file [default: what fits the run]
    #[arg(long, value_name = "PRESET|FILE")]
    pub rules: Option<String>,
    #[command(flatten)]
    pub source: DataSource,
}

#[derive(Debug, Args)]
pub(crate) struct WhatIf {
    /// A stored run (r7) or a pid, if the daemon keeps requests; a recording; a snapshot of torch.cuda.memory._dump_snapshot()
    #[arg(value_name = "PID|RUN|FILE")]
    pub target: PathBuf,
    /// Setting to try, as in PYTORCH_ALLOC_CONF; may be repeated [default: try several]
    #[arg(long, value_name = "KEY=VALUE", value_parser = typed::setting)]
    pub set: Vec<String>,
    /// Try several settings, also with --set
    #[arg(long)]
    pub sweep: bool,
    /// Memory that PyTorch can have [default: as in the recording, if a request failed there]
    #[arg(long, value_name = "SIZE", value_parser = typed::size)]
    pub device_memory: Option<u64>,
    /// Fraction of --device-memory that PyTorch may use, as with torch.cuda.set_per_process_memory_fraction() [default: all]
    #[arg(long, value_name = "FRACTION", value_parser = typed::fraction, requires = "device_memory")]
    pub memory_fraction: Option<f64>,
    /// Model of the program without memory of a role (activations), or whose name or line of the program contains NAME
    #[arg(long, value_name = "NAME")]
    pub drop: Vec<String>,
    /// Model of the program with FACTOR times as much of such memory
    #[arg(long, value_name = "NAME=FACTOR", value_parser = typed::scale)]
    pub scale: Vec<(String, f64)>,
    /// GPU, by its number in the program [default: each]
    #[arg(long, value_name = "N", value_parser = typed::gpu)]
    pub gpu: Option<u8>,
    /// Process of a recording [default: the one with most requests]
    #[arg(long, value_parser = typed::pid)]
    pub pid: Option<u32>,
    /// PyTorch release of the program, such as 2.15
    #[arg(long, value_name = "RELEASE")]
    pub torch: Option<gpumem_replay::Release>,
    #[command(flatten)]
    pub store: StorePath,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
