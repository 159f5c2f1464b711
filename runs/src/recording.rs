//! Reads and writes gpumemd's own recordings: a header and frames (see `gpumem_wire::frame`). An agent or the daemon writes them.

use crate::builder::Sink;
use crate::input::{Error, Input};
use gpumem_ledger::{Origin, PRELOADED, ProcessKey};
use gpumem_model::units::plural;
use gpumem_wire::{Body, CodecError, MAJOR, Record, Stamp, frame};
use std::io::{self, Read, Write};

/// Number of bytes to read or write at once, more than the longest frame. Fuzzing uses less, because it reads many small files.
const CHUNK_BYTES: usize = if cfg!(fuzzing) { 66 << 10 } else { 1 << 20 };
const _: () = assert!(CHUNK_BYTES > frame::PREFIX_BYTES + frame::MAX_FRAME_BYTES);

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
    /// Starts a recording.
    pub fn new(mut out: W) -> io::Result<Self> {
        out.write_all(&frame::header())?;
        Ok(Writer { out, buffer: Vec::new(), origin: None })
    }

    /// Appends one record.
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

    /// Writes all buffered records and flushes `out`.
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

/// Reads a recording up to its end, or up to the first damaged frame, which is reported as a caveat. Records that cannot be decoded
/// are counted and skipped.
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
    let mut reader = input.into_reader();
    let mut buffer = vec![0; CHUNK_BYTES];
    // `buffer[start..end]` has been read but not decoded; `offset` is the file offset of `buffer[0]`.
    let (mut start, mut end, mut offset) = (0, 0, 0_u64);
    let mut skip = frame::HEADER_BYTES;
    let mut origins = Origins { now: None, has_origin_record: false };
    let (mut records, mut unknown, mut bad, mut orphans) = (0_u64, 0_u64, 0_u64, 0_u64);
    let damage = loop {
        buffer.copy_within(start..end, 0);
        offset += start as u64;
        end -= start;
        start = 0;
        let read = loop {
            match reader.read(&mut buffer[end..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other,
            }
        };
        let read =
            read.map_err(|source| Error::Read { path: path.clone(), offset: offset + end as u64, source })?;
        end += read;
        let skipped = skip.min(end);
        start += skipped;
        skip -= skipped;
        let mut rest = &buffer[start..end];
        let mut batch = Batch::new();
        let stop = loop {
            match frame::split_frame(rest) {
                Ok(Some((slot, payload, after))) => {
                    match Record::decode(slot, payload) {
                        Ok(record) => {
                            records += 1;
                            match origins.origin_of(&record) {
                                Some(origin) => batch.push(origin, record, sink),
                                None => orphans += u64::from(origins.now.is_none()),
                            }
                        }
                        Err(CodecError::UnknownKind(_)) => unknown += 1,
                        Err(_) => bad += 1,
                    }
                    rest = after;
                }
                Ok(None) => break None,
                Err(error) => break Some(error),
            }
        };
        batch.pass_to(sink);
        start = end - rest.len();
        match stop {
            Some(frame::Error::Length(_)) => break stop,
            _ if read == 0 => break stop,
            _ => {}
        }
    };
    if records == 0 {
        let what = match damage {
            Some(error) => format!("has no record: {error}"),
            None => "has a header and no record: its writer stopped after the header".into(),
        };
        return Err(Error::Unrecognised { path, what, known: "recording".into() });
    }
    if let Some(error) = damage {
        let at = offset + start as u64;
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
