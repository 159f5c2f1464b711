//! Imports files of other tools. Converts them to the records that an agent or daemon would emit. Each format has its own module.
#![forbid(unsafe_code)]

mod feed;
mod level;
mod lines;
mod mxnet1_csv;
mod mxnet1_table;
mod mxnet1_trace;
mod mxnet2_csv;
mod nvidia_smi;
mod objects;
mod reread;
mod tbd_analysis;
pub mod tbd_log;
mod tbd_mem_csv;
pub mod torch_snapshot;

pub use reread::reread;

use gpumem_model::run::{Run, Source};
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_runs::input::{Error, Input};
use gpumem_runs::{export, recording};
use std::path::Path;

/// A file format that can be imported.
pub struct Format {
    /// Name of the format on the command line.
    pub name: &'static str,
    /// Description of the format in one line.
    pub about: &'static str,
    looks_like: fn(&[u8]) -> bool,
    read: fn(Input, &mut dyn Sink) -> Result<(), Error>,
    preset: Option<&'static str>,
}

impl std::fmt::Debug for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// All formats; those that are recognised most reliably come first.
pub const FORMATS: &[Format] = &[
    Format {
        name: "recording",
        about: "gpumemd's own recording (gpumemctl run --record, GPUMEM_RECORD, the daemon's `record`)",
        looks_like: recording::looks_like,
        read: recording::read,
        preset: None,
    },
    Format {
        name: export::FORMAT,
        about: "a run that was exported (gpumemctl export)",
        looks_like: export::looks_like,
        read: no_records,
        preset: None,
    },
    Format {
        name: "torch-snapshot",
        about: "PyTorch's memory snapshot (torch.cuda.memory._dump_snapshot), with or without its history",
        looks_like: torch_snapshot::looks_like,
        read: torch_snapshot::read,
        preset: None,
    },
    Format {
        name: "tbd-log",
        about: "training log with the TBD suite's MXNet memory annotations",
        looks_like: tbd_log::looks_like,
        read: tbd_log::read,
        preset: Some("tbd"),
    },
    Format {
        name: "mxnet2-csv",
        about: "GPU memory profile of MXNet 2.0 (gpu_memory_profile-pid_PID.csv)",
        looks_like: mxnet2_csv::looks_like,
        read: mxnet2_csv::read,
        preset: Some(mxnet2_csv::PRESET),
    },
    Format {
        name: "mxnet1-trace",
        about: "chrome trace of MXNet 1.x's profiler, with memory counters",
        looks_like: mxnet1_trace::looks_like,
        read: mxnet1_trace::read,
        preset: Some("mxnet"),
    },
    Format {
        name: "mxnet1-table",
        about: "aggregate statistics of MXNet 1.x's profiler, text or JSON",
        looks_like: mxnet1_table::looks_like,
        read: mxnet1_table::read,
        preset: Some("mxnet"),
    },
    Format {
        name: "tbd-analysis",
        about: "sums of categories, as the TBD suite's memory_analysis.py writes them",
        looks_like: tbd_analysis::looks_like,
        read: tbd_analysis::read,
        preset: Some("tbd"),
    },
    Format {
        name: "tbd-mem-csv",
        about: "CSV of the TBD suite's pytorch_mem_profiler",
        looks_like: tbd_mem_csv::looks_like,
        read: tbd_mem_csv::read,
        preset: None,
    },
    Format {
        name: "nvidia-smi-csv",
        about: "used memory of processes as nvidia-smi said it: --query-compute-apps, or a scalar's CSV",
        looks_like: nvidia_smi::looks_like,
        read: nvidia_smi::read,
        preset: None,
    },
    Format {
        name: "mxnet1-csv",
        about: "tags and MiB of the GPU memory profiler proposed for MXNet 1.x",
        looks_like: mxnet1_csv::looks_like,
        read: mxnet1_csv::read,
        preset: Some("mxnet"),
    },
];

/// Returns the format with this name on the command line.
pub fn format(name: &str) -> Option<&'static Format> {
    FORMATS.iter().find(|format| format.name == name)
}

/// Reads a file into runs. Its format is `forced`, or else the format that it looks like.
///
/// # Errors
/// See [`Error`]: each states the problem, its place, and what would be valid.
pub fn read_file(path: &Path, forced: Option<&'static Format>) -> Result<Vec<Run>, Error> {
    read(Input::open(path)?, forced)
}

/// Like [`read_file`], for input that is already open.
///
/// # Errors
/// Same as [`read_file`].
pub fn read(input: Input, forced: Option<&'static Format>) -> Result<Vec<Run>, Error> {
    let format = format_of(&input, forced)?;
    if format.name == export::FORMAT {
        return Ok(vec![export::read(input)?.run]);
    }
    let mut builder = RunBuilder::new(Source {
        kind: format.name.into(),
        origin: input.path.file_name().unwrap_or(input.path.as_os_str()).to_string_lossy().into_owned(),
        preset: format.preset.map(str::to_owned),
    });
    (format.read)(input, &mut builder)?;
    Ok(builder.runs(false))
}

/// Reads a file and passes its records to `sink`.
///
/// # Errors
/// Same as [`read_file`].
pub fn observe_file(path: &Path, forced: Option<&'static Format>, sink: &mut dyn Sink) -> Result<(), Error> {
    let input = Input::open(path)?;
    (format_of(&input, forced)?.read)(input, sink)
}

/// Rejects an exported run: it is a finished run, so it contains no records.
fn no_records(input: Input, _: &mut dyn Sink) -> Result<(), Error> {
    let what = "is a run already, and has no records to play: report or import it".to_owned();
    Err(Error::Damaged { path: input.path, offset: 0, what })
}

fn format_of(input: &Input, forced: Option<&'static Format>) -> Result<&'static Format, Error> {
    let found = forced.or_else(|| FORMATS.iter().find(|format| (format.looks_like)(input.head())));
    found.ok_or_else(|| Error::Unrecognised {
        path: input.path.clone(),
        what: input.describe(),
        known: FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().join(", "),
    })
}
