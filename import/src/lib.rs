#![doc = include_str!("../README.md")]
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
pub mod recorded;
mod reread;
pub mod roles;
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
    pub name: &'static str,
    /// Description of the format in one line.
    pub about: &'static str,
    /// Whether a file with these first bytes seems to have the format.
    looks_like: fn(&[u8]) -> bool,
    read: fn(Input, &mut dyn Sink) -> Result<(), Error>,
    /// Name of the built-in rules that group memory in reports of such files.
    preset: Option<&'static str>,
}

impl std::fmt::Debug for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Makes [`FORMATS`]. A row gives the name, the module with the format's functions `looks_like` and `read`, the preset of rules
/// for reports, and the description.
macro_rules! formats {
    ($($name:expr, $module:ident, $preset:expr, $about:literal;)*) => {
        &[$(Format {
            name: $name,
            about: $about,
            looks_like: $module::looks_like,
            read: $module::read,
            preset: $preset,
        }),*]
    };
}

/// All formats; those that are recognised most reliably come first.
pub const FORMATS: &[Format] = formats! {
    "recording", recording, None, "gpumemd's own recording (gpumemctl run --record, GPUMEM_RECORD, the daemon's `record`)";
    export::FORMAT, exported, None, "a run that was exported (gpumemctl export)";
    "torch-snapshot", torch_snapshot, None,
        "PyTorch's memory snapshot (torch.cuda.memory._dump_snapshot), with or without its history";
    "tbd-log", tbd_log, Some("tbd"), "training log with the TBD suite's MXNet memory annotations";
    "mxnet2-csv", mxnet2_csv, Some(mxnet2_csv::PRESET), "GPU memory profile of MXNet 2.0 (gpu_memory_profile-pid_PID.csv)";
    "mxnet1-trace", mxnet1_trace, Some("mxnet"), "chrome trace of MXNet 1.x's profiler, with memory counters";
    "mxnet1-table", mxnet1_table, Some("mxnet"), "aggregate statistics of MXNet 1.x's profiler, text or JSON";
    "tbd-analysis", tbd_analysis, Some("tbd"), "sums of categories, as the TBD suite's memory_analysis.py writes them";
    "tbd-mem-csv", tbd_mem_csv, None, "CSV of the TBD suite's pytorch_mem_profiler";
    "nvidia-smi-csv", nvidia_smi, None,
        "used memory of processes as nvidia-smi printed it: --query-compute-apps, or a scalar's CSV";
    "mxnet1-csv", mxnet1_csv, Some("mxnet"), "tags and MiB of the GPU memory profiler proposed for MXNet 1.x";
};

/// Returns the format with this name on the command line.
pub fn format(name: &str) -> Option<&'static Format> {
    FORMATS.iter().find(|format| format.name == name)
}

/// Reads a file into runs. Its format is `forced` or, if that is `None`, the first format that it looks like. The runs have no
/// single blocks, see [`read_with_blocks`].
///
/// # Errors
/// See [`Error`]: each states the problem, its place, and what would be valid.
pub fn read_file(path: &Path, forced: Option<&'static Format>) -> Result<Vec<Run>, Error> {
    read(Input::open(path)?, forced, |builder| builder)
}

/// Like [`read_file`], for input that is already open; the runs also have their last blocks, which only pages show.
pub fn read_with_blocks(input: Input, forced: Option<&'static Format>) -> Result<Vec<Run>, Error> {
    read(input, forced, RunBuilder::with_blocks)
}

fn read(
    input: Input,
    forced: Option<&'static Format>,
    prepare: fn(RunBuilder) -> RunBuilder,
) -> Result<Vec<Run>, Error> {
    let format = recognise(&input, forced)?;
    if format.name == export::FORMAT {
        return Ok(vec![export::read(input)?.run]);
    }
    let mut builder = prepare(RunBuilder::new(Source {
        kind: format.name.into(),
        origin: input.path.file_name().unwrap_or(input.path.as_os_str()).to_string_lossy().into_owned(),
        preset: format.preset.map(str::to_owned),
    }));
    (format.read)(input, &mut builder)?;
    Ok(builder.runs(false))
}

/// Reads a file and passes its records to `sink`.
pub fn observe_file(path: &Path, forced: Option<&'static Format>, sink: &mut dyn Sink) -> Result<(), Error> {
    let input = Input::open(path)?;
    (recognise(&input, forced)?.read)(input, sink)
}

/// The format of exported runs. [`read`] imports them itself, because they have no records.
mod exported {
    use super::{Error, Input, Sink};
    pub(super) use gpumem_runs::export::looks_like;

    pub(super) fn read(input: Input, _: &mut dyn Sink) -> Result<(), Error> {
        let what = "is an exported run and has no records to replay: report or import it".to_owned();
        Err(Error::Damaged { path: input.path, offset: 0, what })
    }
}

fn recognise(input: &Input, forced: Option<&'static Format>) -> Result<&'static Format, Error> {
    let found = forced.or_else(|| FORMATS.iter().find(|format| (format.looks_like)(input.head())));
    found.ok_or_else(|| Error::Unrecognised {
        path: input.path.clone(),
        what: input.describe(),
        known: FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().join(", "),
    })
}
