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

/// Passes the records of a recording to the sink, and counts them.
struct Reader<'s> {
    origins: Origins,
    counts: Counts,
    sink: &'s mut dyn Sink,
}

impl Reader<'_> {
    /// Passes all records on. Returns the offset in the file of the first byte after the last whole frame, and what is wrong with
    /// the frame there.
    fn pass_all(&mut self, mut pieces: Pieces) -> Result<(u64, Option<frame::Error>), ReadError> {
        let mut offset = frame::HEADER_BYTES as u64;
        while let Some(piece) = pieces.next()? {
            let mut passed = 0;
            for (before, frame) in piece.others() {
                self.pass_plain(&piece.plain[passed..before]);
                passed = before;
                if let Ok(Some((slot, payload, _))) = frame::split_frame(frame) {
                    self.pass(Record::decode(slot, payload));
                }
            }
            self.pass_plain(&piece.plain[passed..]);
            offset += piece.whole as u64;
            if let Err(error) = frame::split_frame(&piece.bytes()[piece.whole..]) {
                return Ok((offset, Some(error)));
            }
        }
        Ok((offset, None))
    }

    /// Passes records on that have the origin of the record before them.
    fn pass_plain(&mut self, records: &[Record<'_>]) {
        self.counts.records += records.len() as u64;
        match self.origins.now {
            Some(origin) => {
                records.chunks(PRELOADED).for_each(|records| self.sink.observe_all(origin, records));
            }
            None => self.counts.orphans += records.len() as u64,
        }
    }

    fn pass(&mut self, decoded: Result<Record<'_>, CodecError>) {
        match decoded {
            Ok(record) => {
                self.counts.records += 1;
                match self.origins.origin_of(&record) {
                    Some(origin) => self.sink.observe(origin, &record),
                    None => self.counts.orphans += u64::from(self.origins.now.is_none()),
                }
            }
            Err(CodecError::UnknownKind(_)) => self.counts.unknown += 1,
            Err(_) => self.counts.bad += 1,
        }
    }
}

/// Reads a recording up to its end, or up to the first damaged frame, which is reported as a caveat. Records that cannot be decoded
/// are counted and skipped. A second thread reads the file and decodes it.
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
    let origins = Origins { now: None, has_origin_record: false };
    let mut reader = Reader { origins, counts: Counts::default(), sink };
    let (at, damage) = std::thread::scope(|scope| {
        let mut file = input.into_reader();
        let header = file.read_exact(&mut [0; frame::HEADER_BYTES]).map_err(|error| (0, error));
        let pieces = header.and_then(|()| Pieces::start(scope, file, frame::HEADER_BYTES as u64));
        pieces.and_then(|pieces| reader.pass_all(pieces))
    })
    .map_err(|(offset, source)| Error::Read { path: path.clone(), offset, source })?;
    let Counts { records, unknown, bad, orphans } = reader.counts;
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

#[cfg(test)]
mod tests;
