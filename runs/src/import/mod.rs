//! Files of other tools -> observations. One table of formats; each format is one file.

pub mod tbd_log;
pub mod torch_snapshot;

use crate::builder::{RunBuilder, Sink};
use crate::input::{Error, Input};
use crate::recording;
use crate::run::{Run, Source};
use std::path::Path;

/// A format that can be read.
pub struct Format {
    /// What it is called on the command line.
    pub name: &'static str,
    /// One line for people.
    pub about: &'static str,
    /// Whether the beginning of a file looks like it.
    looks_like: fn(&[u8]) -> bool,
    read: fn(Input, &mut dyn Sink) -> Result<(), Error>,
    /// Preset of rules that goes with it.
    preset: Option<&'static str>,
}

impl std::fmt::Debug for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// All formats, the surest first.
pub const FORMATS: &[Format] = &[
    Format {
        name: "recording",
        about: "gpumemd's own recording (gpumemctl run --record, GPUMEM_RECORD, the daemon's `record`)",
        looks_like: recording::looks_like,
        read: recording::read,
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
        name: "torch-snapshot",
        about: "PyTorch's memory snapshot (torch.cuda.memory._dump_snapshot), with or without its history",
        looks_like: torch_snapshot::looks_like,
        read: torch_snapshot::read,
        preset: None,
    },
];

/// The format of that name.
pub fn format(name: &str) -> Option<&'static Format> {
    FORMATS.iter().find(|format| format.name == name)
}

/// Reads a file as `forced`, or as what it looks like, into runs.
///
/// # Errors
/// See [`Error`]: each says what, where, and what would be right.
pub fn read_file(path: &Path, forced: Option<&'static Format>) -> Result<Vec<Run>, Error> {
    let (input, format) = open(path, forced)?;
    let mut builder = RunBuilder::new(Source {
        kind: format.name.into(),
        origin: path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
        preset: format.preset.map(str::to_owned),
    });
    (format.read)(input, &mut builder)?;
    Ok(builder.runs(false))
}

/// Reads a file, one observation after another.
///
/// # Errors
/// As [`read_file`].
pub fn observe_file(path: &Path, forced: Option<&'static Format>, sink: &mut dyn Sink) -> Result<(), Error> {
    let (input, format) = open(path, forced)?;
    (format.read)(input, sink)
}

fn open(path: &Path, forced: Option<&'static Format>) -> Result<(Input, &'static Format), Error> {
    let input = Input::open(path)?;
    match forced.or_else(|| FORMATS.iter().find(|format| (format.looks_like)(input.head()))) {
        Some(format) => Ok((input, format)),
        None => Err(Error::Unrecognised {
            path: path.into(),
            what: input.describe(),
            known: FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().join(", "),
        }),
    }
}
