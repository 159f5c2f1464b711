//! Reads and writes gpumemd's own recordings: a header and frames (see `gpumem_wire::frame`). An agent or the daemon writes them.

mod read_ahead;

use crate::builder::Sink;
use crate::input::{Error, Input};
use gpumem_ledger::{Origin, PRELOADED, ProcessKey};
use gpumem_model::units::plural;
use gpumem_wire::{Body, CodecError, MAJOR, Record, Stamp, frame};
use read_ahead::{Pieces, ReadError};
use std::io::{self, Read, Write};

/// Number of bytes to write at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Returns whether a file begins like a recording.
pub fn looks_like(head: &[u8]) -> bool {
    head.starts_with(&frame::MAGIC)
}

/// Writes a recording. The records may come from several processes and the host: an `Origin` record is written at each change.
#[derive(Debug)]
pub struct Writer<W: Write> {
    out: W,
    buffer: Vec<u8>,
    origin: Option<Origin>,
}

impl<W: Write> Writer<W> {
    pub fn new(mut out: W) -> io::Result<Self> {
        out.write_all(&frame::header())?;
        Ok(Writer { out, buffer: Vec::new(), origin: None })
    }

    pub fn write(&mut self, origin: Origin, record: &Record<'_>) -> io::Result<()> {
        if self.origin != Some(origin) {
            self.origin = Some(origin);
            let (thread, start_ticks) = match origin {
                Origin::Host => (0, 0),
                Origin::Process(key) => (key.pid, key.start_ticks),
            };
            let stamp = Stamp { thread, time_ns: record.stamp.time_ns, ..Stamp::default() };
            Record { stamp, body: Body::Origin { start_ticks } }.append_frame(&mut self.buffer);
        }
        record.append_frame(&mut self.buffer);
        if self.buffer.len() >= CHUNK_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    pub fn flush(&mut self) -> io::Result<()> {
        self.out.write_all(&self.buffer)?;
        self.buffer.clear();
        self.out.flush()
    }
}

struct Origins {
    /// Origin (host or process) of the next records; `None` before the first record that states one.
    now: Option<Origin>,
    /// Whether an `Origin` record was read. After it, `Hello` records no longer change the origin.
    has_origin_record: bool,
}

impl Origins {
    /// Returns the origin of a record; `None` for an `Origin` record, and for a record whose origin is unknown.
    fn origin_of(&mut self, record: &Record<'_>) -> Option<Origin> {
        let thread = record.stamp.thread;
        match record.body {
            Body::Origin { start_ticks } => {
                self.has_origin_record = true;
                self.now = Some(match thread {
                    0 => Origin::Host,
                    pid => Origin::Process(ProcessKey { pid, start_ticks }),
                });
                return None;
            }
            Body::Hello { start_ticks, .. } if !self.has_origin_record => {
                self.now = Some(Origin::Process(ProcessKey { pid: thread, start_ticks }));
            }
            // These records mean the same for every origin, so the host is assumed if the origin is unknown.
            Body::ClockAnchor { .. } | Body::Device { .. } => return self.now.or(Some(Origin::Host)),
            _ => {}
        }
        self.now
    }
}

/// Decoded records of one origin that the sink has not taken yet.
struct Batch<'b> {
    origin: Origin,
    records: Vec<Record<'b>>,
}

impl<'b> Batch<'b> {
    fn new() -> Self {
        Batch { origin: Origin::Host, records: Vec::with_capacity(PRELOADED) }
    }

    fn push(&mut self, origin: Origin, record: Record<'b>, sink: &mut dyn Sink) {
        if origin != self.origin || self.records.len() == PRELOADED {
            self.pass_to(sink);
            self.origin = origin;
        }
        self.records.push(record);
    }

    fn pass_to(&mut self, sink: &mut dyn Sink) {
        sink.preload(self.origin, &self.records);
        self.records.iter().for_each(|record| sink.observe(self.origin, record));
        self.records.clear();
    }
}

/// Numbers of records of a recording.
#[derive(Debug, Default)]
struct Counts {
    /// Decoded records.
    records: u64,
    /// Records of a kind that this version does not know.
    unknown: u64,
    /// Records that could not be decoded.
    bad: u64,
    /// Records before the one that names their process.
    orphans: u64,
}

/// Passes all records to the sink. Returns the offset in the file of the first byte after the last whole frame, and what is wrong
/// with the frame there.
fn pass_records(
    mut pieces: Pieces,
    counts: &mut Counts,
    sink: &mut dyn Sink,
) -> Result<(u64, Option<frame::Error>), ReadError> {
    let mut origins = Origins { now: None, has_origin_record: false };
    let mut offset = frame::HEADER_BYTES as u64;
    while let Some(piece) = pieces.next()? {
        let mut rest = piece;
        let mut batch = Batch::new();
        let end = loop {
            match frame::split_frame(rest) {
                Ok(Some((slot, payload, after))) => {
                    match Record::decode(slot, payload) {
                        Ok(record) => {
                            counts.records += 1;
                            match origins.origin_of(&record) {
                                Some(origin) => batch.push(origin, record, sink),
                                None => counts.orphans += u64::from(origins.now.is_none()),
                            }
                        }
                        Err(CodecError::UnknownKind(_)) => counts.unknown += 1,
                        Err(_) => counts.bad += 1,
                    }
                    rest = after;
                }
                Ok(None) => break None,
                Err(error) => break Some(error),
            }
        };
        batch.pass_to(sink);
        offset += (piece.len() - rest.len()) as u64;
        if end.is_some() {
            return Ok((offset, end));
        }
    }
    Ok((offset, None))
}

/// Reads a recording up to its end, or up to the first damaged frame, which is reported as a caveat. Records that cannot be decoded
/// are counted and skipped. A second thread reads the file.
///
/// # Errors
/// [`Error::Version`] for another major version, [`Error::Unrecognised`] without a whole header or without a record,
/// [`Error::Read`] when reading fails.
pub fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let path = input.path.clone();
    let Some((found, _minor)) = frame::read_header(input.head()) else {
        let what = if looks_like(input.head()) { "the header is cut" } else { "does not begin with GPUMEMR" };
        return Err(Error::Unrecognised { path, what: what.into(), known: "recording".into() });
    };
    if found != MAJOR {
        return Err(Error::Version { path, found, supported: MAJOR });
    }
    let mut counts = Counts::default();
    let (at, damage) = std::thread::scope(|scope| {
        let mut reader = input.into_reader();
        let header = reader.read_exact(&mut [0; frame::HEADER_BYTES]).map_err(|error| (0, error));
        let pieces = header.and_then(|()| Pieces::start(scope, reader, frame::HEADER_BYTES as u64));
        pieces.and_then(|pieces| pass_records(pieces, &mut counts, sink))
    })
    .map_err(|(offset, source)| Error::Read { path: path.clone(), offset, source })?;
    let Counts { records, unknown, bad, orphans } = counts;
    if records == 0 {
        let what = match damage {
            Some(error) => format!("has no record: {error}"),
            None => "has a header and no record: its writer stopped after the header".into(),
        };
        return Err(Error::Unrecognised { path, what, known: "recording".into() });
    }
    if let Some(error) = damage {
        sink.caveat("cut", format!("the recording ends at byte {at}, after {records} records: {error}"));
    }
    sink.reject(unknown + bad + orphans);
    if orphans > 0 {
        let text = format!("{} before the record that names the process", plural(orphans, "record"));
        sink.caveat("no_origin", text);
    }
    if unknown > 0 {
        let text = format!("{} of a kind that this version does not know", plural(unknown, "record"));
        sink.caveat("unknown_kinds", text);
    }
    if bad > 0 {
        sink.caveat("bad_records", format!("{} could not be read", plural(bad, "record")));
    }
    Ok(())
}
