//! Makes space for new runs: finds runs that may be deleted, deletes them, and returns free space to the file system. Each call
//! does a limited amount of work; the caller decides when and how often.

use super::error::{Result, RunId, StoreError};
use super::file::Store;
use super::tables::{execute, maybe_unsigned, unsigned};
use super::writer::{Writer, writer};
use rusqlite::{OptionalExtension, Row};

/// SQL that selects the columns which [`deletable_runs`] and [`is_in_use`] need.
const SELECT: &str =
    "SELECT id, written_s, writer_pid, writer_start, writer_boot, pid, start_ticks, life, rolled_ns, owner_uid,
    weight + (SELECT coalesce(sum(length(body)), 0) FROM request WHERE request.run = run.id) FROM run";

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreSize {
    /// Size of the store's file in bytes, without the write-ahead log.
    pub file_bytes: u64,
    /// Bytes of the file that [`Store::shrink`] can return.
    pub free_bytes: u64,
}

impl StoreSize {
    /// Returns the bytes that runs occupy.
    pub fn used_bytes(&self) -> u64 {
        self.file_bytes.saturating_sub(self.free_bytes)
    }
}

/// A run that may be deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeletableRun {
    pub id: RunId,
    /// Time of the last write to the run, in seconds since 1970.
    pub written_s: i64,
    /// User id of the process of the run; absent if unknown.
    pub uid: Option<u64>,
    /// Approximate size of the run in bytes; absent if an earlier version wrote the run.
    pub bytes: Option<u64>,
}

impl Store {
    /// Reads the whole file and checks its integrity and its foreign keys.
    ///
    /// # Errors
    /// [`StoreError::Damaged`] names the first inconsistency.
    pub fn check(&self) -> Result<()> {
        let text = |sql: &str| self.sql(|db| db.query_row(sql, [], |row| row.get::<_, String>(0)).optional());
        let integrity = text("PRAGMA integrity_check(1)")?.filter(|result| result != "ok");
        let foreign =
            text("PRAGMA foreign_key_check")?.map(|table| format!("a row of {table} belongs to nothing"));
        match integrity.or(foreign) {
            Some(what) => Err(StoreError::Damaged { path: self.path.clone(), what }),
            None => Ok(()),
        }
    }

    pub fn room(&self) -> Result<StoreSize> {
        self.sql(|db| {
            let pragma = |name| db.pragma_query_value(None, name, |row| unsigned(row, 0));
            let (page, pages, free) =
                (pragma("page_size")?, pragma("page_count")?, pragma("freelist_count")?);
            Ok(StoreSize { file_bytes: pages.saturating_mul(page), free_bytes: free.saturating_mul(page) })
        })
    }

    /// Returns the runs that may be deleted, the one with the oldest last write first. These are runs of the daemon that no live
    /// process writes, except the newest part of a live process. Imports are never among them.
    pub fn deletable_runs(&self) -> Result<Vec<DeletableRun>> {
        let sql = format!("{SELECT} WHERE source_kind = 'daemon'");
        let mut deletable_runs: Vec<DeletableRun> = self.sql(|db| {
            let mut statement = db.prepare_cached(&sql)?;
            let rows = statement.query_map([], |row| Ok((deletable_runs(row)?, is_in_use(row)?)))?;
            rows.filter_map(|row| {
                row.map(|(deletable_runs, is_in_use)| (!is_in_use).then_some(deletable_runs)).transpose()
            })
            .collect()
        })?;
        deletable_runs.sort_by_key(|deletable_runs| (deletable_runs.written_s, deletable_runs.id));
        Ok(deletable_runs)
    }

    /// Deletes a run that [`Store::deletable_runs`] returned. If the run has changed or is in use again, deletes nothing and
    /// returns false.
    pub fn delete(&mut self, deletable_runs: DeletableRun) -> Result<bool> {
        let sql = format!("{SELECT} WHERE id = ?");
        self.transaction(|db| {
            let found = db.query_row(&sql, [deletable_runs.id.0], |row| {
                Ok((self::deletable_runs(row)?, is_in_use(row)?))
            });
            if !matches!(found.optional()?, Some((found, false)) if found == deletable_runs) {
                return Ok(false);
            }
            execute(db, "DELETE FROM run WHERE id = ?", [deletable_runs.id.0])?;
            Ok(true)
        })
    }

    /// Removes at most `pages` unused pages from the file. The file shrinks when SQLite next merges its write-ahead log, at the
    /// latest in [`Store::merge`].
    pub fn shrink(&mut self, pages: u32) -> Result<()> {
        // This pragma returns no rows, but it frees pages only while rows are requested.
        let sql = format!("PRAGMA incremental_vacuum({pages})");
        self.sql(|db| {
            let mut statement = db.prepare(&sql)?;
            let mut rows = statement.query([])?;
            while rows.next()?.is_some() {}
            Ok(())
        })
    }

    /// Frees the pages of the file that SQLite keeps in memory, up to 2 MiB. The next writes and queries read their pages again.
    pub fn release_memory(&self) -> Result<()> {
        self.sql(|db| db.release_memory())
    }

    /// Merges SQLite's write-ahead log into the store's file, without waiting for readers that prevent a part of it.
    pub fn merge(&mut self) -> Result<()> {
        self.sql(|db| db.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())))
    }
}

fn deletable_runs(row: &Row<'_>) -> rusqlite::Result<DeletableRun> {
    Ok(DeletableRun {
        id: RunId(row.get(0)?),
        written_s: row.get(1)?,
        uid: maybe_unsigned(row, 9)?,
        bytes: maybe_unsigned(row, 10)?,
    })
}

/// Returns whether the run's writer is alive, or the run is the newest part of a live process.
fn is_in_use(row: &Row<'_>) -> rusqlite::Result<bool> {
    if writer(row, 2)?.is_some_and(|writer| writer.is_alive()) {
        return Ok(true);
    }
    let (pid, start_ticks) = (row.get(5)?, unsigned(row, 6)?);
    let life: String = row.get(7)?;
    let is_rolled = row.get::<_, Option<i64>>(8)?.is_some();
    // The daemon's uid of a process's life has the form BOOT:PID:START, see `Writer`.
    let boot_id = life.split(':').next().unwrap_or_default().to_owned();
    Ok(!is_rolled && start_ticks != 0 && Writer { pid, start_ticks, boot_id }.is_alive())
}
