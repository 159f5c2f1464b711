//! The delta log: a file next to the store, to which checkpoints of live runs append their changes. SQLite writes whole pages,
//! for one changed number too; the log takes a few hundred bytes.
//!
//! ```text
//! file    entries, each: length (u32), FNV-1a hash of the rest (u64), run id, deflated body
//! body    written_ns, number of the entry, changed parts; varints, see `packed`
//! part    name, device, seq (see `parts`), form, length, bytes
//!   form  0: the whole part; an empty one is removed. 1: the difference from the previous entry that has the part (see `splice`)
//! beat    in place of a run with id 0: pid, start time, time of a heartbeat
//! ```
//!
//! An entry counts if `written_ns` is that of the run's row, the time at which the row was written in the database. So writing a
//! run there replaces its entries, in one transaction. Entries of a run are numbered; those after a gap do not count. Each part
//! is whole when it first appears, so an entry needs no data of the database.
//!
//! Its writer holds an exclusive lock. A second writer of the same store writes to the database only.

use super::packed::{put, take};
use super::parts::{Key, Parts, hash};
use super::splice;
use crate::export::fnv1a;
use miniz_oxide::deflate::compress_to_vec;
use miniz_oxide::inflate::decompress_to_vec_with_limit;
use std::collections::HashMap;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Result, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Suffix of the file.
pub(super) const SUFFIX: &str = "-deltas";
/// Size at which the entries are merged into the database.
pub(super) const MOST_BYTES: u64 = 16 << 20;
/// Maximum bytes read of the file or of one decompressed entry. A larger file was not written by a store.
const MOST_READ: u64 = 4 * MOST_BYTES;
const HEAD: usize = 12;
/// Marks a heartbeat, in place of a run's id; ids begin with 1.
const BEAT: i64 = 0;
/// Compression level. Entries are mostly digits; compression halves their size.
const LEVEL: u8 = 6;
/// A part that is unchanged for this many entries is dropped from memory, and written whole when it changes.
const IDLE: u64 = 8;

/// The log, open for appending.
#[derive(Debug)]
pub(super) struct DeltaLog {
    file: File,
    /// Length of the valid entries in bytes.
    pub len: u64,
    /// The log ends with a partial entry that could not be removed. Entries after it would not be read.
    pub is_torn: bool,
    runs: HashMap<i64, LoggedRun>,
}

/// The state of a run that the log and the database hold together.
#[derive(Debug, Default)]
struct LoggedRun {
    written_ns: i64,
    /// See [`identity`](super::parts::identity).
    identity: u64,
    entries: u64,
    /// Hash of each part.
    hashes: HashMap<Key, u64>,
    /// Parts that the log has, and the number of the entry that changed them.
    logged: HashMap<Key, (u64, Vec<u8>)>,
}

impl DeltaLog {
    /// Opens the log of a store, with the permissions of the store; `None` if another process writes it.
    pub(super) fn open(path: &Path, permissions: Permissions) -> Result<Option<Self>> {
        let file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
        if file.try_lock().is_err() {
            return Ok(None);
        }
        let found = file.metadata()?;
        if found.permissions() != permissions {
            file.set_permissions(permissions)?;
        }
        let len = found.len();
        Ok(Some(DeltaLog { file, len, is_torn: false, runs: HashMap::new() }))
    }

    /// Returns the `written_ns` to which the next entry of a run refers.
    pub(super) fn written_ns(&self, id: i64) -> Option<i64> {
        self.runs.get(&id).map(|run| run.written_ns)
    }

    /// Notes that the database has exactly these parts.
    pub(super) fn note_written(&mut self, id: i64, written_ns: i64, identity: u64, parts: &Parts) {
        let hashes = parts.iter().map(|(key, bytes)| (*key, hash(bytes))).collect();
        self.runs.insert(id, LoggedRun { written_ns, identity, hashes, ..LoggedRun::default() });
    }

    /// Returns whether the row of the run must be written: queries use columns of the database.
    pub(super) fn needs_row(&self, id: i64, identity: u64) -> bool {
        self.runs.get(&id).is_none_or(|run| run.identity != identity)
    }

    /// Drops the state of a run that gets no more entries.
    pub(super) fn forget(&mut self, id: i64) {
        self.runs.remove(&id);
    }

    pub(super) fn is_idle(&self) -> bool {
        self.runs.is_empty()
    }

    /// Appends the parts that differ from the last entry; writes nothing if none differs.
    pub(super) fn append(&mut self, id: i64, parts: Parts) -> Result<()> {
        let Some(run) = self.runs.get(&id) else { return Ok(()) };
        let gone = run.hashes.keys().filter(|key| !parts.contains_key(*key)).map(|key| (*key, Vec::new()));
        let is_new = |(key, bytes): &(Key, Vec<u8>)| run.hashes.get(key) != Some(&hash(bytes));
        let gone: Vec<_> = gone.collect();
        let changed: Vec<_> = parts.into_iter().filter(is_new).chain(gone).collect();
        if changed.is_empty() {
            return Ok(());
        }
        let mut body = Vec::new();
        put(&mut body, run.written_ns.cast_unsigned());
        put(&mut body, run.entries);
        for ((name, device, seq), bytes) in &changed {
            let before = run.logged.get(&(*name, *device, *seq));
            let difference = before.map(|(_, before)| splice::difference(before, bytes));
            let difference = difference.filter(|difference| difference.len() < bytes.len());
            put(&mut body, (*name).into());
            put(&mut body, (device + 1).cast_unsigned());
            put(&mut body, seq.cast_unsigned());
            put(&mut body, difference.is_some().into());
            let bytes = difference.as_ref().unwrap_or(bytes);
            put(&mut body, bytes.len() as u64);
            body.extend_from_slice(bytes);
        }
        self.write(id, &body)?;
        let Some(run) = self.runs.get_mut(&id) else { return Ok(()) };
        for (key, bytes) in changed {
            if bytes.is_empty() {
                run.hashes.remove(&key);
                run.logged.remove(&key);
            } else {
                run.hashes.insert(key, hash(&bytes));
                run.logged.insert(key, (run.entries, bytes));
            }
        }
        run.entries += 1;
        let entries = run.entries;
        run.logged.retain(|_, (changed, _)| entries - *changed <= IDLE);
        Ok(())
    }

    /// Appends a heartbeat, and has the log written to the disk.
    pub(super) fn beat(&mut self, beat: Beat) -> Result<()> {
        let mut body = Vec::new();
        [beat.pid.into(), beat.start_ticks, beat.time_ns].iter().for_each(|value| put(&mut body, *value));
        self.write(BEAT, &body)?;
        self.file.sync_data()
    }

    /// Removes all entries; the database has their runs.
    pub(super) fn clear(&mut self) -> Result<()> {
        self.file.set_len(0)?;
        self.len = 0;
        Ok(())
    }

    fn write(&mut self, id: i64, body: &[u8]) -> Result<()> {
        let mut text = Vec::new();
        put(&mut text, id.cast_unsigned());
        text.append(&mut compress_to_vec(body, LEVEL));
        let mut entry = Vec::with_capacity(HEAD + text.len());
        entry.extend_from_slice(&(text.len() as u32).to_le_bytes());
        entry.extend_from_slice(&fnv1a(&text).to_le_bytes());
        entry.extend_from_slice(&text);
        let result = self.file.write_all(&entry);
        match result {
            Ok(()) => self.len += entry.len() as u64,
            Err(_) => self.is_torn = self.file.set_len(self.len).is_err(),
        }
        result
    }
}

/// Heartbeat of a writer whose runs did not change: the process, and the time at which it still ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Beat {
    pub pid: u32,
    pub start_ticks: u64,
    /// CLOCK_MONOTONIC.
    pub time_ns: u64,
}

/// Content of a log.
#[derive(Debug, Default)]
pub(super) struct Deltas {
    pub runs: HashMap<i64, RunDeltas>,
    pub beat: Beat,
}

/// Latest parts of a run; empty ones are removed.
#[derive(Debug, Default)]
pub(super) struct RunDeltas {
    pub written_ns: i64,
    pub parts: Parts,
    entries: u64,
}

/// Reads the log; `only` one run. A store without a log, or with one that this user may not read, has no entries: the database
/// has a consistent, older state.
pub(super) fn read(path: &Path, only: Option<i64>) -> Result<Deltas> {
    let (mut deltas, mut bytes) = (Deltas::default(), Vec::new());
    match File::open(path) {
        Ok(file) => file.take(MOST_READ).read_to_end(&mut bytes)?,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => 0,
        Err(error) => return Err(error),
    };
    let mut rest = bytes.as_slice();
    while let Some((body, after)) = split(rest) {
        // A damaged entry ends its run, and no other one.
        let _ = deltas.apply(body, only);
        rest = after;
    }
    Ok(deltas)
}

fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    let (expected, rest) = rest.split_first_chunk::<8>()?;
    let (body, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    (fnv1a(body) == u64::from_le_bytes(*expected)).then_some((body, rest))
}

impl Deltas {
    fn apply(&mut self, mut entry: &[u8], only: Option<i64>) -> Option<()> {
        let id = take(&mut entry)?.cast_signed();
        if id != BEAT && only.is_some_and(|only| only != id) {
            return Some(());
        }
        let body = decompress_to_vec_with_limit(entry, MOST_READ as usize).ok()?;
        let mut body = body.as_slice();
        let mut number = || take(&mut body);
        if id == BEAT {
            let pid = u32::try_from(number()?).ok()?;
            self.beat = Beat { pid, start_ticks: number()?, time_ns: number()? };
            return Some(());
        }
        let (written_ns, entry) = (number()?.cast_signed(), number()?);
        if entry == 0 {
            self.runs.insert(id, RunDeltas { written_ns, ..RunDeltas::default() });
        }
        let run =
            self.runs.get_mut(&id).filter(|run| (run.written_ns, run.entries) == (written_ns, entry))?;
        let mut changed = Vec::new();
        while !body.is_empty() {
            let mut number = || take(&mut body);
            let name = u8::try_from(number()?).ok()?;
            let (device, seq) = (number()?.cast_signed() - 1, number()?.cast_signed());
            let (form, length) = (number()?, usize::try_from(number()?).ok()?);
            let (bytes, after) = body.split_at_checked(length)?;
            body = after;
            let key = (name, device, seq);
            let bytes = match form {
                0 => bytes.to_vec(),
                _ => splice::patched(run.parts.get(&key)?, bytes)?,
            };
            changed.push((key, bytes));
        }
        run.parts.extend(changed);
        run.entries += 1;
        Some(())
    }
}

impl RunDeltas {
    /// Replaces parts of the run in the database by those of the log.
    pub(super) fn over(&self, mut parts: Parts) -> Parts {
        parts.extend(self.parts.iter().map(|(key, bytes)| (*key, bytes.clone())));
        parts.retain(|_, bytes| !bytes.is_empty());
        parts
    }
}
