//! The delta log: a file next to the store, to which checkpoints of live runs append their changes. An entry takes a few hundred
//! bytes. SQLite would write several whole pages, even if only one number has changed.
//!
//! ```text
//! file    entries, each: length (u32), FNV-1a hash of the rest (u64), run id, deflated body
//! body    written_ns, number of the entry, changed parts; all numbers are varints, see `packed`
//! part    name, device, seq (see `parts`), form, length, bytes
//!   form  0: the whole part; an empty one is removed. 1: the difference from the previous entry that has the part (see `splice`)
//! ```
//!
//! The body of an entry with run id 0 is a heartbeat instead: pid and start time of the writer, and the time.
//!
//! An entry is valid if its `written_ns` is that of the run's row: the time at which the run was last written to the database. So
//! writing the run there makes its entries invalid in the same transaction. The entries of a run are numbered; entries after a
//! missing number are invalid. Each part is whole when it first appears, so an entry needs no data of the database.
//!
//! The writer of the log holds an exclusive lock. A second writer of the same store writes to the database only.

use super::parts::{Key, Parts, hash};
use super::splice;
use crate::export::fnv1a;
use crate::varint::{put, take};
use miniz_oxide::deflate::compress_to_vec;
use miniz_oxide::inflate::decompress_to_vec_with_limit;
use std::collections::HashMap;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Result, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Suffix of the log's file name, after the name of the store.
pub(super) const SUFFIX: &str = "-deltas";
/// Size in bytes above which the entries are merged into the database, unless [`Store::limit_log`](super::Store::limit_log) sets
/// another.
pub(super) const MAX_BYTES: u64 = 16 << 20;
/// Maximum number of bytes read from the file, or from one decompressed entry. No store writes more.
const MAX_READ_BYTES: u64 = 4 * MAX_BYTES;
/// Size in bytes of an entry's head: its length and hash.
const HEAD_BYTES: usize = 12;
/// Marks a heartbeat, in place of a run's id. Ids of runs begin with 1.
const HEARTBEAT_ID: i64 = 0;
/// Compression level of deflate. Entries are mostly digits; compression halves their size.
const LEVEL: u8 = 6;
/// Maximum length of a body that is not compressed (bytes). Allocating and clearing the compressor's tables, 0.3 MB, took half of
/// the time of a checkpoint.
const MAX_STORED: u16 = 2048;
/// Number of entries after which an unchanged part is dropped from memory. Its next change is written as a whole part.
const MAX_IDLE_ENTRIES: u64 = 8;

#[derive(Debug)]
pub(super) struct DeltaLog {
    file: File,
    /// Length of the valid entries in bytes.
    pub len: u64,
    /// Whether the log ends with a partial entry that could not be removed. Entries after it would not be read.
    pub is_torn: bool,
    runs: HashMap<i64, LoggedRun>,
}

/// The state of a run according to the database and the log together.
#[derive(Debug, Default)]
struct LoggedRun {
    written_ns: i64,
    /// Hash of the fields that queries use, see [`identity`](super::parts::identity).
    identity: u64,
    /// Number of the run's entries in the log.
    entries: u64,
    /// Hash of each part of the run, to find the parts that changed.
    hashes: HashMap<Key, u64>,
    /// Parts that changed recently: the number of the entry that changed them last, and their bytes.
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

    /// Returns the `written_ns` of a run's next entry; `None` if the run was not written to the database by this process.
    pub(super) fn written_ns(&self, id: i64) -> Option<i64> {
        self.runs.get(&id).map(|run| run.written_ns)
    }

    /// Stores that the run was written to the database with these parts, so that later entries have only parts that changed.
    pub(super) fn note_written(&mut self, id: i64, written_ns: i64, identity: u64, parts: &Parts) {
        let hashes = parts.iter().map(|(key, bytes)| (*key, hash(bytes))).collect();
        self.runs.insert(id, LoggedRun { written_ns, identity, hashes, ..LoggedRun::default() });
    }

    /// Returns whether a checkpoint must write the run to the database, because columns that queries use have changed.
    pub(super) fn needs_row(&self, id: i64, identity: u64) -> bool {
        self.runs.get(&id).is_none_or(|run| run.identity != identity)
    }

    /// Forgets a run that gets no more entries.
    pub(super) fn forget(&mut self, id: i64) {
        self.runs.remove(&id);
    }

    /// Returns whether no run of this process gets entries.
    pub(super) fn is_idle(&self) -> bool {
        self.runs.is_empty()
    }

    /// Appends an entry with the parts that have changed; writes nothing if none has.
    pub(super) fn append(&mut self, id: i64, parts: Parts) -> Result<()> {
        let Some(run) = self.runs.get(&id) else { return Ok(()) };
        let removed = run.hashes.keys().filter(|key| !parts.contains_key(*key)).map(|key| (*key, Vec::new()));
        let removed: Vec<_> = removed.collect();
        let is_new = |(key, bytes): &(Key, Vec<u8>)| run.hashes.get(key) != Some(&hash(bytes));
        let changed: Vec<_> = parts.into_iter().filter(is_new).chain(removed).collect();
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
        run.logged.retain(|_, (changed, _)| entries - *changed <= MAX_IDLE_ENTRIES);
        Ok(())
    }

    /// Appends a heartbeat, and writes the log through to the disk.
    pub(super) fn append_heartbeat(&mut self, heartbeat: Heartbeat) -> Result<()> {
        let mut body = Vec::new();
        [heartbeat.pid.into(), heartbeat.start_ticks, heartbeat.time_ns]
            .iter()
            .for_each(|value| put(&mut body, *value));
        self.write(HEARTBEAT_ID, &body)?;
        self.file.sync_data()
    }

    /// Removes all entries. The database must have their runs.
    pub(super) fn clear(&mut self) -> Result<()> {
        self.file.set_len(0)?;
        self.len = 0;
        Ok(())
    }

    fn write(&mut self, id: i64, body: &[u8]) -> Result<()> {
        let mut text = Vec::new();
        put(&mut text, id.cast_unsigned());
        text.append(&mut deflated(body));
        let mut entry = Vec::with_capacity(HEAD_BYTES + text.len());
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

/// Returns a body in the format of deflate: a short one as a stored block, a longer one compressed.
fn deflated(body: &[u8]) -> Vec<u8> {
    match u16::try_from(body.len()) {
        Ok(len @ ..=MAX_STORED) => {
            let [low, high] = len.to_le_bytes();
            // 1: the last block, not compressed. Its length and the complement of that follow.
            [&[1, low, high, !low, !high], body].concat()
        }
        _ => compress_to_vec(body, LEVEL),
    }
}

/// Heartbeat of a process that writes runs: the process, and a time at which it ran and its runs had not changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Heartbeat {
    pub pid: u32,
    pub start_ticks: u64,
    /// Time in ns, CLOCK_MONOTONIC.
    pub time_ns: u64,
}

/// Content of a log.
#[derive(Debug, Default)]
pub(super) struct Deltas {
    pub runs: HashMap<i64, RunDeltas>,
    pub heartbeat: Heartbeat,
}

/// Changes of a run after it was written to the database at `written_ns`.
#[derive(Debug, Default)]
pub(super) struct RunDeltas {
    pub written_ns: i64,
    /// Latest bytes of each changed part. An empty part was removed.
    pub parts: Parts,
    /// Number of the run's log entries that were applied.
    entries: u64,
}

/// Reads the log, only entries of the run `only` if it is given. Returns no entries if there is no log or this user may not read
/// it; the database alone has a consistent, older state.
pub(super) fn read(path: &Path, only: Option<i64>) -> Result<Deltas> {
    let (mut deltas, mut bytes) = (Deltas::default(), Vec::new());
    match File::open(path) {
        Ok(file) => file.take(MAX_READ_BYTES).read_to_end(&mut bytes)?,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => 0,
        Err(error) => return Err(error),
    };
    let mut rest = bytes.as_slice();
    while let Some((body, after)) = split(rest) {
        // After a damaged entry, later entries of its run are invalid, but not those of other runs.
        let _ = deltas.apply(body, only);
        rest = after;
    }
    Ok(deltas)
}

/// Splits off the first entry, without its length and hash; `None` if it is incomplete or damaged.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    let (expected, rest) = rest.split_first_chunk::<8>()?;
    let (body, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    (fnv1a(body) == u64::from_le_bytes(*expected)).then_some((body, rest))
}

impl Deltas {
    /// Returns the changes of a run whose row has this `written_ns`.
    pub(super) fn run(&self, id: i64, written_ns: i64) -> Option<&RunDeltas> {
        self.runs.get(&id).filter(|run| run.written_ns == written_ns)
    }

    /// Applies an entry to the parts of its run; `None` if the entry is invalid.
    fn apply(&mut self, mut entry: &[u8], only: Option<i64>) -> Option<()> {
        let id = take(&mut entry)?.cast_signed();
        if id != HEARTBEAT_ID && only.is_some_and(|only| only != id) {
            return Some(());
        }
        let body = decompress_to_vec_with_limit(entry, MAX_READ_BYTES as usize).ok()?;
        let mut body = body.as_slice();
        let mut number = || take(&mut body);
        if id == HEARTBEAT_ID {
            let pid = u32::try_from(number()?).ok()?;
            self.heartbeat = Heartbeat { pid, start_ticks: number()?, time_ns: number()? };
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
    /// Returns the parts of the run in the database, updated by those of the log.
    pub(super) fn applied_to(&self, mut parts: Parts) -> Parts {
        parts.extend(self.parts.iter().map(|(key, bytes)| (*key, bytes.clone())));
        parts.retain(|_, bytes| !bytes.is_empty());
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_of_all_lengths_are_read_back() {
        let most = usize::from(MAX_STORED);
        for length in [0, 1, most, most + 1, 1 << 17] {
            let body: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let packed = deflated(&body);
            assert_eq!(packed.len() == length + 5, length <= most, "{length}");
            let read = decompress_to_vec_with_limit(&packed, 1 << 20).expect("a whole block");
            assert!(read == body, "{length}");
        }
    }
}
