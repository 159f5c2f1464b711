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
    include_str!("schema/1.sql"),
    include_str!("schema/2.sql"),
    include_str!("schema/3.sql"),
    include_str!("schema/4.sql"),
    include_str!("schema/5.sql"),
    include_str!("schema/6.sql"),
    include_str!("schema/7.sql"),
    include_str!("schema/8.sql"),
];

/// The table for streams of requests. It is made apart from the steps, so that earlier versions can still read the store.
const REQUESTS: &str = include_str!("schema/request.sql");

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
