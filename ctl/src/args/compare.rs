//! Arguments of the commands that compare runs, explain words, and list, import or export runs.

use super::{Rows, SocketPath, StorePath, formats};
use crate::output::Output;
use crate::when::When;
use clap::{Args, ValueEnum};
use gpumem_import::Format;
use gpumem_report::diff::gate::Limit;
use gpumem_runs::store::{STATES, Sort};

#[derive(Debug, Args)]
#[command(after_help = crate::exit::DIFF_HELP)]
pub(crate) struct Diff {
    /// What is compared with: a process by its pid, a run of the store (r7), or a file (./FILE)
    #[arg(value_name = "A")]
    pub a: String,
    /// What is compared: what it has more is positive
    #[arg(value_name = "B")]
    pub b: String,
    /// A and B are jobs, by id or name, or files with several processes: all of them together, and rank by rank
    #[arg(long)]
    pub job: bool,
    /// Compare the last moments instead of the peaks
    #[arg(long)]
    pub now: bool,
    /// Rows of the table [default: those that name the difference best]
    #[arg(long, value_name = "ROWS", conflicts_with_all = ["json", "csv"])]
    pub by: Option<Rows>,
    /// Rows are tags, and every tag has one
    #[arg(long, conflicts_with_all = ["json", "csv", "by"])]
    pub tags: bool,
    /// Every category, tag and device
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    pub all: bool,
    /// Only this device: NVML's index, or the beginning of its UUID; A's, else B's
    #[arg(long, value_name = "N|UUID")]
    pub device: Option<String>,
    /// One JSON document (docs/compare.md)
    #[arg(long, group = "form")]
    pub json: bool,
    /// One line per device, grouping and name, in bytes
    #[arg(long, group = "form")]
    pub csv: bool,
    /// A picture: A's bar beside B's, the same colours for the same categories
    #[arg(long, group = "form")]
    pub svg: bool,
    /// The picture as PDF
    #[arg(long, group = "form")]
    pub pdf: bool,
    /// The picture as PNG
    #[arg(long, group = "form")]
    pub png: bool,
    /// Fail (exit code 8) where B exceeds A by more than a size (500MiB) or a share of A (2%)
    #[arg(long, value_name = "SIZE|PCT")]
    pub fail_above: Option<Limit>,
    /// What --fail-above judges: used, tracked, gap, idle, a category or a tag [default: used, where it is not known tracked]
    #[arg(long, value_name = "WHAT", requires = "fail_above")]
    pub of: Option<String>,
    /// Rules that name categories: default, mxnet, tbd, torch, or a file [default: what fits the runs]
    #[arg(long, value_name = "PRESET|FILE")]
    pub rules: Option<String>,
    /// Read files as this format instead of guessing
    #[arg(long, value_parser = formats())]
    pub format: Option<&'static Format>,
    #[command(flatten)]
    pub output: Output,
    #[command(flatten)]
    pub store: StorePath,
    #[command(flatten)]
    pub socket: SocketPath,
}

impl Diff {
    /// Returns the arguments of the report that finds one side.
    pub(crate) fn side(&self, name: &str) -> super::Report {
        // A name with a slash is a file, never a job.
        let is_job = self.job && !name.contains('/');
        super::Report {
            run: Some(name.to_owned()).filter(|_| !is_job),
            job: Some(name.to_owned()).filter(|_| is_job),
            format: self.format,
            store: self.store.clone(),
            socket: self.socket.clone(),
            ..super::Report::default()
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Export {
    /// A run of the store (r7), a process by its pid, or a recording or log (./FILE)
    #[arg(value_name = "RUN|PID|FILE")]
    pub run: String,
    /// Only this process of a recording with several
    #[arg(long, value_name = "PID")]
    pub pid: Option<u32>,
    #[command(flatten)]
    pub output: Output,
    #[command(flatten)]
    pub store: StorePath,
    #[command(flatten)]
    pub socket: SocketPath,
}

impl Export {
    /// Returns the arguments of the report that finds the run.
    pub(crate) fn report(&self) -> super::Report {
        super::Report {
            run: Some(self.run.clone()),
            pid: self.pid,
            store: self.store.clone(),
            socket: self.socket.clone(),
            ..super::Report::default()
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Runs {
    /// One JSON array
    #[arg(long)]
    pub json: bool,
    /// Only those of this user: name or uid
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// Only those of this job: its id, or the name that `run --name` gave it
    #[arg(long, value_name = "ID")]
    pub job: Option<String>,
    /// Only those with memory on this device: NVML's index, or the beginning of its UUID
    #[arg(long, value_name = "N|UUID")]
    pub device: Option<String>,
    /// Only those that had not ended before: 2h (ago), 10:30, 2026-11-20T10:30, @seconds
    #[arg(long, value_name = "TIME")]
    pub since: Option<When>,
    /// Only those that had begun by then
    #[arg(long, value_name = "TIME")]
    pub until: Option<When>,
    /// Only those that are so
    #[arg(long, value_parser = STATES)]
    pub state: Option<String>,
    /// Only those in which memory ran out, or is suspected to have
    #[arg(long)]
    pub oom: bool,
    /// Only those with this in their command, file or job; with * and ? all of one of them
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
    /// Order: the newest or largest first
    #[arg(long, value_name = "BY", default_value = "stored")]
    pub sort: Order,
    /// Not more than so many
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    #[command(flatten)]
    pub store: StorePath,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Order {
    Stored,
    Started,
    Peak,
    Events,
    Label,
}

impl From<Order> for Sort {
    fn from(order: Order) -> Sort {
        match order {
            Order::Stored => Sort::Stored,
            Order::Started => Sort::Started,
            Order::Peak => Sort::Peak,
            Order::Events => Sort::Events,
            Order::Label => Sort::Label,
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Explain {
    /// As a report, a table or JSON prints it: Untrackable, pool idle, used_bytes, a category, a tag; all words if left out
    pub word: Option<String>,
    /// Whose numbers are shown [default: the live process with most memory, else the latest run]
    #[arg(value_name = "PID|RUN|FILE")]
    pub run: Option<String>,
    /// Rules that name categories: default, mxnet, tbd, torch, or a file [default: what fits the run]
    #[arg(long, value_name = "PRESET|FILE")]
    pub rules: Option<String>,
    #[command(flatten)]
    pub store: StorePath,
    #[command(flatten)]
    pub socket: SocketPath,
}

impl Explain {
    /// Returns the arguments of the report that finds the run.
    pub(crate) fn report(&self) -> super::Report {
        super::Report {
            run: self.run.clone(),
            store: self.store.clone(),
            socket: self.socket.clone(),
            ..super::Report::default()
        }
    }
}
