//! What can be typed.

use crate::exit::NoStore;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use gpumem_runs::import::{FORMATS, Format};
use gpumem_runs::report::By;
use std::path::PathBuf;

/// Where did my GPU memory go?
#[derive(Debug, Parser)]
#[command(name = "gpumemctl", version, max_term_width = 100, after_help = crate::exit::HELP)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Read a file of another tool, or a recording, into the run store
    Import(Import),
    /// Tell where the memory of a run went
    Report(Report),
    /// List the runs in the store
    Runs(Runs),
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub struct Import {
    /// Format of the files
    #[arg(value_parser = formats())]
    pub format: &'static Format,
    /// Files to read
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    #[command(flatten)]
    pub store: StorePath,
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub struct Report {
    /// A run of the store (r7), or a recording or log; the latest run if left out
    pub run: Option<String>,
    /// One JSON document (docs/report-json.md)
    #[arg(long, conflicts_with = "csv")]
    pub json: bool,
    /// One line per name and moment, in bytes
    #[arg(long)]
    pub csv: bool,
    /// Rows of the table [default: the first that names something]
    #[arg(long, value_name = "ROWS", conflicts_with_all = ["json", "csv"])]
    pub by: Option<Rows>,
    /// Rules that name categories: default, mxnet, tbd, or a file [default: what fits the run]
    #[arg(long, value_name = "PRESET|FILE")]
    pub rules: Option<String>,
    /// Name every category, however small
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    pub all: bool,
    /// Only this process of a recording with several
    #[arg(long, value_name = "PID")]
    pub pid: Option<u32>,
    /// Read a file as this format instead of guessing
    #[arg(long, value_parser = formats())]
    pub format: Option<&'static Format>,
    #[command(flatten)]
    pub store: StorePath,
}

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub struct Runs {
    /// One JSON array
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub store: StorePath,
}

#[derive(Debug, Args)]
pub struct StorePath {
    /// Run store [default: $GPUMEM_STORE, $XDG_STATE_HOME/gpumem/runs.sqlite, ~/.local/state/gpumem/runs.sqlite]
    #[arg(long = "store", value_name = "FILE")]
    given: Option<PathBuf>,
}

impl StorePath {
    /// As it must be typed again, with a blank before it; empty if it was not typed.
    pub fn typed(&self) -> String {
        self.given.as_ref().map(|path| format!(" --store {}", path.display())).unwrap_or_default()
    }

    /// The store's path, given or usual.
    ///
    /// # Errors
    /// No home directory is known.
    pub fn path(&self) -> anyhow::Result<PathBuf> {
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
pub enum Rows {
    Layer,
    Structure,
    Tag,
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

/// The formats, as --help and errors list them.
fn formats() -> impl TypedValueParser<Value = &'static Format> {
    let known = FORMATS.iter().map(|format| PossibleValue::new(format.name).help(format.about));
    PossibleValuesParser::new(known)
        .try_map(|name| gpumem_runs::import::format(&name).ok_or("no such format"))
}
