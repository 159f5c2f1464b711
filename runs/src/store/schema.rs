//! The schema of the run store, and how an SQLite file is recognised as a store.
//!
//! ```text
//! run      one for each run; fields that lists and filters need are columns, the rest is JSON
//! cell     (run, idx)                        Run::cells
//! device   (run, idx)                        Run::devices: identity and readings
//! moment   (run, device, kind)               Device::last and Device::peak: the scalars
//! amount   (run, device, moment, cell)       Moment::amounts: the bytes
//! bucket   (run, device, seq)                Series::buckets
//! detail   (run, device, name, seq)          Device::details: see `details`
//! own      (run, name, seq)                  Run::own: see `details`
//! request  (run, number)                     requests to PyTorch's allocator, if the daemon keeps them: see `requests`
//! ```
//!
//! - All sizes are bytes. Columns that end in `_ns` are times of records; plus `wall_offset_ns` they are ns since 1970.
//!   `stored_s` and `written_s`, the first and last write, are seconds since 1970.
//! - A u64 is stored as the same 64 bits, so values above i64::MAX (from a damaged recording or a malicious peer) look negative
//!   to other readers of the file. No query sorts or sums by such a column: buckets are sorted by `seq`.
//! - `run.label`, `started_ns`, `last_ns` and `events` duplicate other data, so that listing runs reads only this table and the
//!   scalars of moments.
//! - A run may be a part of a process's life: `life` is the uid of the first part, and `part` counts from 1. `rolled_ns` is the
//!   time at which the next part began; if it is set, `state` does not apply.
//! - `weight` is the approximate size of the run in bytes, used to share space among users; null in runs of earlier versions.
//! - `written_ns` is the time of the last write of the run, in ns since 1970. Each write gives it a greater value. Entries of the
//!   delta log refer to it.
//! - `writer_*` identify the process that checkpoints the run; null once the run has no writer.
//! - Deleting a run deletes all its rows. `amount.cell` is an index into `cell` without a foreign key. A foreign key would need a
//!   separate index, or deleting a run of n cells would scan its amounts n times.
//! - `detail` has rowids: without them, bodies of 1 to 5 KB would each take separate overflow pages.
//! - `run.id` is AUTOINCREMENT: users refer to `r7`, so the id must never be reused.
//!
//! A schema change appends a step to [`STEPS`] and never edits one, because existing files were made by the old steps.

use super::error::{APPLICATION_ID, StoreError};
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior};
use std::path::Path;

/// Schema version that this program reads and writes: the number of steps.
pub const VERSION: i64 = STEPS.len() as i64;

const TABLES: [&str; 9] = ["run", "cell", "device", "moment", "amount", "bucket", "detail", "own", "request"];

/// `STEPS[n]` upgrades version n to version n+1.
const STEPS: [&str; 8] = [
    "
CREATE TABLE run (
    id             INTEGER PRIMARY KEY AUTOINCREMENT,
    uid            TEXT NOT NULL UNIQUE,
    stored_s       INTEGER NOT NULL,
    writer_pid     INTEGER,
    writer_start   INTEGER,
    writer_boot    TEXT,
    label          TEXT NOT NULL DEFAULT '',
    source_kind    TEXT NOT NULL DEFAULT '',
    source_origin  TEXT NOT NULL DEFAULT '',
    source_preset  TEXT,
    clock          TEXT NOT NULL DEFAULT 'lines' CHECK (clock IN ('monotonic', 'lines')),
    wall_offset_ns INTEGER,
    pid            INTEGER NOT NULL DEFAULT 0,
    start_ticks    INTEGER NOT NULL DEFAULT 0,
    owner_uid      INTEGER,
    state          TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'closed', 'interrupted')),
    closed_ns      INTEGER,
    closed_status  INTEGER,
    started_ns     INTEGER,
    last_ns        INTEGER,
    events         INTEGER NOT NULL DEFAULT 0,
    facts          TEXT NOT NULL DEFAULT '{}',
    claims         TEXT NOT NULL DEFAULT '{}',
    coverage       TEXT NOT NULL DEFAULT '{}',
    caveats        TEXT NOT NULL DEFAULT '[]'
) STRICT;

CREATE TABLE cell (
    run     INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    idx     INTEGER NOT NULL,
    class   TEXT NOT NULL CHECK (class IN ('direct', 'block', 'pool_idle', 'opaque')),
    tag     TEXT,
    origin  TEXT,
    role    TEXT,
    phase   TEXT,
    library TEXT,
    PRIMARY KEY (run, idx)
) STRICT, WITHOUT ROWID;

CREATE TABLE device (
    run               INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    idx               INTEGER NOT NULL,
    name              TEXT NOT NULL,
    ordinal           INTEGER NOT NULL,
    model             TEXT NOT NULL,
    total_bytes       INTEGER,
    peak_used_bytes   INTEGER,
    peak_used_ns      INTEGER,
    unaccounted_bytes INTEGER,
    series_width_ns   INTEGER NOT NULL,
    beside            TEXT NOT NULL,
    reading           TEXT,
    tenants           TEXT NOT NULL,
    other_tenants     TEXT NOT NULL,
    PRIMARY KEY (run, idx)
) STRICT, WITHOUT ROWID;

CREATE TABLE moment (
    run                  INTEGER NOT NULL,
    device               INTEGER NOT NULL,
    kind                 TEXT NOT NULL CHECK (kind IN ('last', 'peak')),
    time_ns              INTEGER NOT NULL,
    tracked_bytes        INTEGER,
    predates_bytes       INTEGER,
    untrackable_bytes    INTEGER,
    used_absence         TEXT,
    uncovered_used_bytes INTEGER,
    gap_distance_ns      INTEGER NOT NULL,
    torn_min_bytes       INTEGER,
    torn_max_bytes       INTEGER,
    stale                INTEGER NOT NULL,
    partial              INTEGER NOT NULL,
    PRIMARY KEY (run, device, kind),
    FOREIGN KEY (run, device) REFERENCES device (run, idx) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;

CREATE TABLE amount (
    run    INTEGER NOT NULL,
    device INTEGER NOT NULL,
    moment TEXT NOT NULL,
    cell   INTEGER NOT NULL,
    bytes  INTEGER NOT NULL,
    PRIMARY KEY (run, device, moment, cell),
    FOREIGN KEY (run, device, moment) REFERENCES moment (run, device, kind) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;

CREATE TABLE bucket (
    run              INTEGER NOT NULL,
    device           INTEGER NOT NULL,
    seq              INTEGER NOT NULL,
    time_ns          INTEGER NOT NULL,
    used_min         INTEGER,
    used_max         INTEGER,
    used_last        INTEGER,
    tracked_min      INTEGER,
    tracked_max      INTEGER,
    tracked_last     INTEGER,
    untrackable_min  INTEGER,
    untrackable_max  INTEGER,
    untrackable_last INTEGER,
    samples          INTEGER NOT NULL,
    doubtful         INTEGER NOT NULL,
    PRIMARY KEY (run, device, seq),
    FOREIGN KEY (run, device) REFERENCES device (run, idx) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
",
    "
ALTER TABLE moment ADD COLUMN parts TEXT;
ALTER TABLE device ADD COLUMN details TEXT NOT NULL DEFAULT '{}';
",
    "
ALTER TABLE cell ADD COLUMN pool TEXT;
ALTER TABLE cell ADD COLUMN pending INTEGER NOT NULL DEFAULT 0;
",
    "
CREATE TABLE detail (
    run    INTEGER NOT NULL,
    device INTEGER NOT NULL,
    name   TEXT NOT NULL,
    seq    INTEGER NOT NULL,
    body   ANY NOT NULL,
    PRIMARY KEY (run, device, name, seq),
    FOREIGN KEY (run, device) REFERENCES device (run, idx) ON DELETE CASCADE
) STRICT;
INSERT INTO detail SELECT run, idx, 'rest', 0, details FROM device;
ALTER TABLE device DROP COLUMN details;

ALTER TABLE run ADD COLUMN life TEXT NOT NULL DEFAULT '';
ALTER TABLE run ADD COLUMN part INTEGER NOT NULL DEFAULT 1;
ALTER TABLE run ADD COLUMN rolled_ns INTEGER;
ALTER TABLE run ADD COLUMN written_s INTEGER NOT NULL DEFAULT 0;
UPDATE run SET life = uid, written_s = stored_s;
CREATE UNIQUE INDEX run_life ON run (life, part);
",
    "
ALTER TABLE run ADD COLUMN weight INTEGER;
",
    "
CREATE TABLE own (
    run  INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    seq  INTEGER NOT NULL,
    body ANY NOT NULL,
    PRIMARY KEY (run, name, seq)
) STRICT;
",
    "
ALTER TABLE cell ADD COLUMN inherited INTEGER NOT NULL DEFAULT 0;
",
    "
ALTER TABLE run ADD COLUMN written_ns INTEGER NOT NULL DEFAULT 0;
",
];

/// The table for streams of requests. It is made apart from the steps, so that earlier versions can still read the store.
const REQUESTS: &str = "CREATE TABLE IF NOT EXISTS request (
    run    INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    body   BLOB NOT NULL,
    PRIMARY KEY (run, number)
) STRICT";

/// State of the file at a store's path, if it belongs to a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileState {
    /// The file has no tables and no application id: it was just created, or its creator crashed before the first write.
    Fresh,
    /// A store of this schema version, 1..=[`VERSION`].
    Version(i64),
}

/// Returns whether the file is a store, without changing it. This is the first read of the file, so it also reports most damage.
///
/// `connection` is a transaction, so that a store that another process is creating is seen completely or not at all.
pub(super) fn recognise(connection: &Transaction<'_>, path: &Path) -> Result<FileState, StoreError> {
    let pragma = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let read = || -> rusqlite::Result<_> {
        let tables = "SELECT count(*) FROM sqlite_master";
        let tables: i64 = connection.query_row(tables, [], |row| row.get(0))?;
        Ok((pragma("application_id")?, pragma("user_version")?, tables))
    };
    match read().map_err(|error| StoreError::sqlite(path, error))? {
        (0, 0, 0) => Ok(FileState::Fresh),
        (APPLICATION_ID, found, _) if found > VERSION => {
            Err(StoreError::NewerVersion { path: path.to_owned(), found, supported: VERSION })
        }
        (APPLICATION_ID, found @ 1.., tables) if tables > 0 => match find_executable_schema(connection) {
            Ok(None) => Ok(FileState::Version(found)),
            Ok(Some(what)) => Err(StoreError::not_a_store(path, what)),
            Err(error) => Err(StoreError::sqlite(path, error)),
        },
        (APPLICATION_ID, found, tables) => Err(StoreError::not_a_store(
            path,
            format!("the right application id, but schema version {found} with {tables} tables"),
        )),
        (id, _, tables) => Err(StoreError::not_a_store(
            path,
            format!("an SQLite file with application id {id:#x} and {tables} tables"),
        )),
    }
}

/// Describes a view, trigger, virtual table or generated column in place of one of the store's tables, if there is one. Such an
/// object would run SQL that a hostile creator of the file chose. Objects with other names are not used, so they are ignored.
fn find_executable_schema(db: &Connection) -> rusqlite::Result<Option<String>> {
    let sql = "
        SELECT 'a ' || iif(type = 'table', 'virtual table', type) || ' ' || quote(name) FROM sqlite_schema
            WHERE lower(iif(type = 'trigger', tbl_name, name)) IN (SELECT value FROM json_each(?1))
                AND (type <> 'table' OR rootpage = 0)
        UNION ALL
        SELECT 'a generated column ' || quote(c.name) FROM json_each(?1), pragma_table_xinfo(value) AS c WHERE hidden <> 0
        LIMIT 1";
    let tables = format!("{TABLES:?}");
    db.query_row(sql, [tables], |row| row.get(0)).optional()
}

/// Upgrades a fresh file or any older version to [`VERSION`], in one transaction.
pub(super) fn migrate(connection: &Connection, path: &Path) -> Result<(), StoreError> {
    let error = |error| StoreError::sqlite(path, error);
    let transaction =
        Transaction::new_unchecked(connection, TransactionBehavior::Immediate).map_err(error)?;
    // The version is read again under the lock, because another process may have upgraded the file in the meantime.
    let from = match recognise(&transaction, path)? {
        FileState::Fresh => 0,
        FileState::Version(found) => found,
    };
    let steps = STEPS.iter().skip(usize::try_from(from).unwrap_or(STEPS.len()));
    let apply = || {
        steps.into_iter().try_for_each(|step| transaction.execute_batch(step))?;
        transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
        transaction.pragma_update(None, "user_version", VERSION)
    };
    if from < VERSION {
        apply().map_err(error)?;
    }
    transaction.execute(REQUESTS, []).map_err(error)?;
    transaction.commit().map_err(error)
}
