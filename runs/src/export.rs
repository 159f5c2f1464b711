//! A run as a file of its own, to be carried to another machine and read there without loss.
//!
//! ```text
//! {"format":"gpumem-run","version":1,"bytes":N,"checks":["16 hex digits", ...]}      one line
//! {"uid":...,"from":{"host":...,"id":...,"time_s":...,"program":...},"run":{...}}     N bytes, the line end not counted
//! ```
//!
//! The second line is the run as JSON, as a daemon tells it; a check is the FNV-1a sum (64 bits) of each 64 KiB of it, so
//! that damage is named by its place. A reader takes versions up to its own; fields that it does not know it leaves out.
//! What is read is bounded in bytes and in objects before anything is made of it, and must add up.

use crate::input::{Error, Input};
use gpumem_model::harmless::{clean, in_json};
use gpumem_model::run::{Caveat, Run, State};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Read};
use std::path::Path;

/// What the format is called.
pub use gpumem_model::run::EXPORT_FORMAT as FORMAT;
/// Version that is written, and the newest that is read.
pub const VERSION: u64 = 1;
/// Code of the caveat that says where a run came from.
pub const MOVED: &str = "moved";
/// Largest file: a run of 65,536 names on eight devices has a third of it.
pub const MAX_BYTES: usize = 64 << 20;
/// Objects in a file: an empty one of three bytes may become some 500 in memory; lists and texts become at most eight
/// times as large.
const MAX_OBJECTS: usize = 400_000;
/// Longest first line.
const MAX_HEAD_BYTES: u64 = 64 << 10;
/// Bytes that have a check of their own.
const PIECE_BYTES: usize = 64 << 10;
/// No sum of a run is larger: so sums of a few of them stay sums.
const MAX_AMOUNT: i64 = 1 << 56;

/// Where an exported run came from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct From {
    /// The machine that exported it.
    pub host: String,
    /// How its store called the run.
    pub id: Option<String>,
    /// When: seconds since 1970.
    pub time_s: i64,
    /// Program and version.
    pub program: String,
}

/// An exported run.
#[derive(Debug, Clone, PartialEq)]
pub struct Exported {
    /// The run.
    pub run: Run,
    /// What its writer calls it: the same in every store.
    pub uid: String,
    /// Where it came from.
    pub from: From,
}

/// What cannot be exported, because nothing would read it.
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

#[derive(Serialize)]
struct Told<'a> {
    uid: &'a str,
    from: &'a From,
    run: &'a Run,
}

#[derive(Deserialize)]
struct Body {
    uid: String,
    #[serde(default)]
    from: From,
    run: Run,
}

/// The file of a run. One that goes on is exported as it is now, under a uid of its own, so that the whole of it can follow.
///
/// # Errors
/// It is larger than what is read.
pub fn write(run: &Run, uid: &str, from: &From) -> Result<Vec<u8>, TooLarge> {
    let latest = run.devices.iter().map(|device| device.last.time_ns).max().unwrap_or(0);
    let uid = if run.state == State::Open { format!("{uid}@{latest}") } else { uid.to_owned() };
    // Keys are strings and numbers are integers: serialisation cannot fail.
    let body = serde_json::to_string(&Told { uid: &uid, from, run }).unwrap_or_default();
    // It may be shown by a terminal (`-o - | head`): what that would obey is escaped, and read as it was.
    let body = in_json(&body, |_| false).into_bytes();
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

/// Whether the beginning of a file is that of an exported run.
pub fn looks_like(head: &[u8]) -> bool {
    const BEGIN: &[u8] = b"{\"format\":\"gpumem-run\"";
    head.starts_with(BEGIN)
}

/// Reads an exported run; one that went on is interrupted: nobody watches the copy.
///
/// # Errors
/// See [`Error`]: damage and what does not add up with its place, and files of a newer program.
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
    // What follows is the line end at most.
    reader.by_ref().take(head.bytes as u64 + 2).read_to_end(&mut body).map_err(failed(at))?;
    let damaged = |offset: usize, what: String| Error::Damaged {
        path: path.clone(),
        offset: (at + offset) as u64,
        what: clean(&what),
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
            format!("of the next {length} bytes some are not what was written (checksum)"),
        ));
    }
    let objects = objects(&body);
    if objects > MAX_OBJECTS {
        return Err(damaged(0, format!("{objects} objects, where a run has at most {MAX_OBJECTS}")));
    }
    let parsed: serde_json::Result<Body> = serde_json::from_slice(&body);
    // It is one line: the column is the place.
    let Body { uid, from, mut run } =
        parsed.map_err(|error| damaged(error.column(), format!("no run: {error}")))?;
    sound(&run).map_err(|what| damaged(0, what))?;
    if run.state == State::Open {
        run.state = State::Interrupted;
    }
    if run.source.kind == "daemon" {
        // It is no run of the daemon here: what that may delete, or whose pids are of this machine.
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
        .map_err(|error| damaged(format!("its first line is not whole: {error}")))?;
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
    let head: Head = serde_json::from_value(first)
        .map_err(|error| damaged(format!("its first line is not whole: {error}")))?;
    if head.bytes > MAX_BYTES {
        return Err(damaged(format!(
            "says that {} bytes follow, where a run has at most {MAX_BYTES}",
            head.bytes
        )));
    }
    Ok(head)
}

/// Where a run came from, in words.
fn origin(from: &From) -> String {
    let time = gpumem_model::time::date_minute(from.time_s);
    let host = if from.host.is_empty() { "another machine" } else { &from.host };
    let id = from.id.as_ref().map(|id| format!(", where it is run {id}")).unwrap_or_default();
    format!("the run was exported on {host}{id}, at {time}")
}

/// FNV-1a of each piece: any changed byte changes it.
fn checks(bytes: &[u8]) -> Vec<String> {
    let sum = |piece: &[u8]| {
        piece.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
            (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        })
    };
    bytes.chunks(PIECE_BYTES).map(|piece| format!("{:016x}", sum(piece))).collect()
}

/// Objects in a JSON text, without reading it.
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

/// What every report relies on: amounts are of cells that there are, and add up.
fn sound(run: &Run) -> Result<(), String> {
    let cells = run.cells.len();
    for device in &run.devices {
        let at = |what: &str| format!("device {:?}: {what}", device.name);
        let amounts = |what: &str, amounts: &[(u32, i64)]| -> Result<i64, String> {
            if amounts.iter().any(|(cell, _)| *cell as usize >= cells) {
                return Err(at(&format!("{what} names a cell beyond the {cells} there are")));
            }
            let mut sum = 0_i64;
            for (_, bytes) in amounts {
                sum = sum
                    .checked_add(*bytes)
                    .filter(|sum| sum.abs() < MAX_AMOUNT)
                    .ok_or_else(|| at(&format!("{what} is larger than any memory")))?;
            }
            Ok(sum)
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
                return Err(at("the timeline is larger than any memory"));
            }
        }
        for oom in &device.details.ooms {
            amounts("a time at which memory ran out", &oom.amounts)?;
        }
        let growth = &device.details.growth;
        let points = growth.points.len();
        let fits = |list: &[i64]| list.is_empty() || list.len() == points;
        if !growth
            .cells
            .iter()
            .map(|(_, list)| list)
            .chain([&growth.named, &growth.slack, &growth.rest])
            .all(|list| fits(list))
        {
            return Err(at("its growth has lists of different lengths"));
        }
    }
    Ok(())
}
