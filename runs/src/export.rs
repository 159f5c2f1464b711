//! Exports a run as a file, to be read on another machine without loss.
//!
//! ```text
//! {"format":"gpumem-run","version":1,"bytes":N,"checks":["16 hex digits", ...]}      one line
//! {"uid":...,"from":{"host":...,"id":...,"time_s":...,"program":...},"run":{...}}     N bytes, the line end not counted
//! ```
//!
//! The second line is the run, as the JSON that a daemon returns. The checks are 64-bit FNV-1a hashes, one for each 64 KiB of
//! that line, so that an error message can name the damaged place. A reader accepts versions up to its own and ignores unknown
//! fields. Before parsing, it limits the number of bytes and of JSON objects; after parsing, it checks the sums of the run.

use crate::input::{Error, Input};
use gpumem_model::escape::{escape, escape_json};
use gpumem_model::run::{Caveat, Run, State};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io::{BufRead, Read};
use std::path::Path;

pub use gpumem_model::run::EXPORT_FORMAT as FORMAT;
/// Version of the format that is written; also the newest version that is read.
pub const VERSION: u64 = 1;
/// Code of the caveat that states on which machine a run was exported.
pub const MOVED: &str = "moved";
/// Maximum size of the second line in bytes, three times that of a run with 65,536 names on eight devices.
pub const MAX_BYTES: usize = 64 << 20;
/// Maximum number of JSON objects. An object of three bytes may take some 500 bytes in memory, so the size in bytes is not enough
/// of a limit.
const MAX_OBJECTS: usize = 400_000;
/// Maximum length of the first line in bytes.
const MAX_HEAD_BYTES: u64 = 64 << 10;
/// Number of bytes that each check covers.
const PIECE_BYTES: usize = 64 << 10;
/// Limit of the absolute value of a number of bytes, so that sums of a few of them cannot overflow.
const MAX_AMOUNT: i64 = 1 << 56;

/// Where and when a run was exported.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct From {
    pub host: String,
    /// Id of the run in that machine's store.
    pub id: Option<String>,
    /// Time of the export in seconds since 1970.
    pub time_s: i64,
    /// Name and version of the exporting program.
    pub program: String,
}

/// Content of a file with an exported run.
#[derive(Debug, Clone, PartialEq)]
pub struct Exported {
    pub run: Run,
    /// Permanent id of the run, the same in every store.
    pub uid: String,
    pub from: From,
}

/// Error: a reader would reject the exported run because of its size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the run is too large for an exported file ({what}; at most {MAX_BYTES} bytes and {MAX_OBJECTS} objects are read)"
)]
pub struct TooLarge {
    what: String,
}

#[derive(Serialize, Deserialize)]
struct Head {
    format: String,
    version: u64,
    bytes: usize,
    checks: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Body<'a> {
    uid: Cow<'a, str>,
    #[serde(default)]
    from: Cow<'a, From>,
    run: Cow<'a, Run>,
}

/// Returns the content of the file for a run. The uid of an open run gets the time of its last data as suffix. So a later export
/// of the complete run counts as another run.
///
/// # Errors
/// [`TooLarge`] if the file would exceed the limits of [`read`].
pub fn write(run: &Run, uid: &str, from: &From) -> Result<Vec<u8>, TooLarge> {
    let latest = run.devices.iter().map(|device| device.last.time_ns).max().unwrap_or(0);
    let uid = if run.state == State::Open { format!("{uid}@{latest}").into() } else { Cow::from(uid) };
    let body = Body { uid, from: Cow::Borrowed(from), run: Cow::Borrowed(run) };
    // Keys are strings and numbers are integers: serialisation cannot fail.
    let body = serde_json::to_string(&body).unwrap_or_default();
    // The file may be printed to a terminal, so control characters are escaped in JSON. A reader gets the original text.
    let body = escape_json(&body, |_| false).into_bytes();
    let objects = objects(&body);
    if body.len() > MAX_BYTES || objects > MAX_OBJECTS {
        return Err(TooLarge { what: format!("{} bytes, {objects} objects", body.len()) });
    }
    let head = Head { format: FORMAT.to_owned(), version: VERSION, bytes: body.len(), checks: checks(&body) };
    let mut file = serde_json::to_vec(&head).unwrap_or_default();
    file.push(b'\n');
    file.extend_from_slice(&body);
    file.push(b'\n');
    Ok(file)
}

/// Returns whether a file begins like an exported run.
pub fn looks_like(head: &[u8]) -> bool {
    const BEGIN: &[u8] = b"{\"format\":\"gpumem-run\"";
    head.starts_with(BEGIN)
}

/// Reads an exported run. A run that was open becomes interrupted, because the file gets no more of its data.
///
/// # Errors
/// See [`Error`]: damage and contradictory sums with their place, and files of a newer program.
pub fn read(input: Input) -> Result<Exported, Error> {
    let path = input.path.clone();
    let mut reader = input.into_reader();
    let failed = |offset: usize| {
        let path = path.clone();
        move |source| Error::Read { path, offset: offset as u64, source }
    };
    let mut head = Vec::new();
    reader.by_ref().take(MAX_HEAD_BYTES).read_until(b'\n', &mut head).map_err(failed(0))?;
    let at = head.len();
    let head = first_line(&head, &path)?;
    let mut body = Vec::new();
    // Reads two bytes more than the run has, to find out whether only a line end follows it.
    reader.by_ref().take(head.bytes as u64 + 2).read_to_end(&mut body).map_err(failed(at))?;
    let damaged = |offset: usize, what: String| Error::Damaged {
        path: path.clone(),
        offset: (at + offset) as u64,
        what: escape(&what),
    };
    if body.len() < head.bytes {
        return Err(damaged(
            body.len(),
            format!("it ends here, and {} bytes are missing", head.bytes - body.len()),
        ));
    }
    if body.get(head.bytes..).is_some_and(|rest| !matches!(rest, b"" | b"\n")) {
        return Err(damaged(head.bytes, "the run ends here, and should be followed by one line end".into()));
    }
    body.truncate(head.bytes);
    let found = checks(&body);
    let differs = found.iter().zip(&head.checks).position(|(found, written)| found != written);
    if let Some(piece) = differs.or((found.len() != head.checks.len()).then_some(0)) {
        let length = PIECE_BYTES.min(body.len().saturating_sub(piece * PIECE_BYTES));
        return Err(damaged(
            piece * PIECE_BYTES,
            format!("some of the next {length} bytes are damaged (checksum)"),
        ));
    }
    let objects = objects(&body);
    if objects > MAX_OBJECTS {
        return Err(damaged(0, format!("{objects} objects, where a run has at most {MAX_OBJECTS}")));
    }
    let parsed: serde_json::Result<Body<'_>> = serde_json::from_slice(&body);
    // The body is one line, so the column is the offset.
    let Body { uid, from, run } =
        parsed.map_err(|error| damaged(error.column(), format!("no run: {error}")))?;
    let (uid, from, mut run) = (uid.into_owned(), from.into_owned(), run.into_owned());
    check_sums(&run).map_err(|what| damaged(0, what))?;
    if run.state == State::Open {
        run.state = State::Interrupted;
    }
    if run.source.kind == "daemon" {
        // The run must not count as one that the daemon here recorded: the store may delete those, and their pids are those of this
        // machine.
        run.source.kind = FORMAT.to_owned();
    }
    if !run.caveats.iter().any(|caveat| caveat.code == MOVED) {
        run.caveats.push(Caveat { code: MOVED.into(), text: origin(&from) });
    }
    Ok(Exported { run, uid, from })
}

fn first_line(line: &[u8], path: &Path) -> Result<Head, Error> {
    let damaged = |what: String| Error::Damaged { path: path.to_owned(), offset: 0, what };
    let first: serde_json::Value = serde_json::from_slice(line)
        .map_err(|error| damaged(format!("its first line is incomplete: {error}")))?;
    let version = first.get("version").and_then(serde_json::Value::as_u64).unwrap_or(0);
    if first.get("format").and_then(serde_json::Value::as_str) != Some(FORMAT) || version == 0 {
        return Err(damaged(format!(
            "its first line is not that of an exported run ({FORMAT}, version 1 and up)"
        )));
    }
    if version > VERSION {
        return Err(Error::Newer { path: path.to_owned(), found: version, supported: VERSION });
    }
    if line.last() != Some(&b'\n') {
        return Err(damaged("it ends within its first line".into()));
    }
    let head: Head = serde_json::from_slice(line)
        .map_err(|error| damaged(format!("its first line is incomplete: {error}")))?;
    if head.bytes > MAX_BYTES {
        return Err(damaged(format!("announces {} bytes, and a run has at most {MAX_BYTES}", head.bytes)));
    }
    Ok(head)
}

fn origin(from: &From) -> String {
    let time = gpumem_model::time::date_minute(from.time_s);
    let host = if from.host.is_empty() { "another machine" } else { &from.host };
    let id = from.id.as_ref().map(|id| format!(", where it is run {id}")).unwrap_or_default();
    format!("the run was exported on {host}{id}, at {time}")
}

fn checks(bytes: &[u8]) -> Vec<String> {
    bytes.chunks(PIECE_BYTES).map(|piece| format!("{:016x}", fnv1a(piece))).collect()
}

/// Returns the FNV-1a hash, which is the same on every machine.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Counts the objects in a JSON text without parsing it.
fn objects(bytes: &[u8]) -> usize {
    let (mut count, mut in_string, mut is_escaped) = (0, false, false);
    for byte in bytes {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_string => is_escaped = true,
            b'"' => in_string = !in_string,
            b'{' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

/// Checks what every report relies on: numbers of bytes refer to existing cells, and their sums are those that the run states.
fn check_sums(run: &Run) -> Result<(), String> {
    let cells = run.cells.len();
    for device in &run.devices {
        let at = |what: &str| format!("device {:?}: {what}", device.name);
        let amounts = |what: &str, amounts: &[(u32, i64)]| -> Result<i64, String> {
            if amounts.iter().any(|(cell, _)| *cell as usize >= cells) {
                return Err(at(&format!("{what} names a cell that does not exist; there are {cells}")));
            }
            let add = |sum: i64, (_, bytes): &(u32, i64)| {
                sum.checked_add(*bytes).filter(|sum| sum.abs() < MAX_AMOUNT)
            };
            let sum = amounts.iter().try_fold(0, add);
            sum.ok_or_else(|| at(&format!("{what} is larger than any memory")))
        };
        for (what, moment) in [("the last moment", &device.last), ("the peak", &device.peak)] {
            let rising = moment.amounts.is_sorted_by(|(earlier, _), (later, _)| earlier < later);
            let sum = amounts(what, &moment.amounts)?;
            if !rising || moment.tracked_bytes.is_some_and(|tracked| tracked != sum) {
                return Err(at(&format!("the amounts of {what} do not add up")));
            }
            let parts = [
                moment.predates_bytes,
                moment.untrackable_bytes,
                moment.gap_parts().map(|parts| parts.sum()),
            ];
            if parts.into_iter().flatten().any(|bytes| bytes.unsigned_abs() >= MAX_AMOUNT.unsigned_abs()) {
                return Err(at(&format!("{what} is larger than any memory")));
            }
        }
        for point in &device.details.timeline.points {
            amounts("the timeline", &point.amounts)?;
            if point.rest_bytes.unsigned_abs() >= MAX_AMOUNT.unsigned_abs() {
                return Err(at("a point of the timeline is larger than any memory"));
            }
        }
        for oom in &device.details.ooms {
            amounts("the memory at an out-of-memory error", &oom.amounts)?;
        }
        let growth = &device.details.growth;
        let lists = growth.cells.iter().map(|(_, list)| list);
        let mut lists = lists.chain([&growth.named, &growth.slack, &growth.rest]);
        if lists.any(|list| !list.is_empty() && list.len() != growth.points.len()) {
            return Err(at("its growth has lists of different lengths"));
        }
    }
    Ok(())
}
