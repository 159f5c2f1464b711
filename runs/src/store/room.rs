//! Makes space for new runs: finds deletable runs, deletes them, and returns free space to the file system. Each call does a
//! bounded amount of work; the caller decides when and how often.

use super::error::{Result, RunId, StoreError};
use super::file::Store;
use super::tables::{execute, maybe_unsigned, unsigned};
use super::writer::{Writer, writer};
use rusqlite::{OptionalExtension, Row};

/// Columns for [`over`] and [`lives`].
const SELECT: &str =
    "SELECT id, written_s, writer_pid, writer_start, writer_boot, pid, start_ticks, life, rolled_ns, owner_uid, weight
    FROM run";

/// Size of a store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// Size of the file in bytes, without its log.
    pub file_bytes: u64,
    /// Bytes of the file that [`Store::shrink`] can return.
    pub free_bytes: u64,
}

impl Room {
    /// Returns the bytes that runs occupy.
    pub fn used_bytes(&self) -> u64 {
        self.file_bytes.saturating_sub(self.free_bytes)
    }
}

/// A run that may be deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Over {
    /// Id of the run.
    pub id: RunId,
    /// Time of its last write, in seconds since 1970.
    pub written_s: i64,
    /// User id of its process; absent if unknown.
    pub uid: Option<u64>,
    /// Its approximate size in bytes; absent if an earlier version wrote it.
    pub bytes: Option<u64>,
}

impl Store {
    /// Reads the whole file and checks its integrity and foreign keys. Takes as long as reading the file.
    ///
    /// # Errors
    /// [`StoreError::Damaged`] names the first inconsistency.
    pub fn check(&self) -> Result<()> {
        let text = |sql: &str| self.sql(|db| db.query_row(sql, [], |row| row.get::<_, String>(0)).optional());
        let integrity = text("PRAGMA integrity_check(1)")?.filter(|said| said != "ok");
        let foreign =
            text("PRAGMA foreign_key_check")?.map(|table| format!("a row of {table} belongs to nothing"));
        match integrity.or(foreign) {
            Some(what) => Err(StoreError::Damaged { path: self.path.clone(), what }),
            None => Ok(()),
        }
    }

    /// Returns the size of the store.
    pub fn room(&self) -> Result<Room> {
        self.sql(|db| {
            let pragma = |name| db.pragma_query_value(None, name, |row| unsigned(row, 0));
            let (page, pages, free) =
                (pragma("page_size")?, pragma("page_count")?, pragma("freelist_count")?);
            Ok(Room { file_bytes: pages.saturating_mul(page), free_bytes: free.saturating_mul(page) })
        })
    }

    /// Returns the daemon's runs that may be deleted, oldest write first. Excludes imports, runs whose writer is alive, and runs
    /// of live processes.
    pub fn over(&self) -> Result<Vec<Over>> {
        let sql = format!("{SELECT} WHERE source_kind = 'daemon'");
        let mut over: Vec<Over> = self.sql(|db| {
            let mut statement = db.prepare_cached(&sql)?;
            let rows = statement.query_map([], |row| Ok((over(row)?, lives(row)?)))?;
            rows.filter_map(|row| row.map(|(over, lives)| (!lives).then_some(over)).transpose()).collect()
        })?;
        over.sort_by_key(|over| (over.written_s, over.id));
        Ok(over)
    }

    /// Deletes a run of [`Store::over`]. Returns false and deletes nothing if the run has changed or may no longer be deleted.
    pub fn delete(&mut self, over: Over) -> Result<bool> {
        let sql = format!("{SELECT} WHERE id = ?");
        self.sql(|db| {
            let transaction =
                rusqlite::Transaction::new_unchecked(db, rusqlite::TransactionBehavior::Immediate)?;
            let found = transaction.query_row(&sql, [over.id.0], |row| Ok((self::over(row)?, lives(row)?)));
            if !matches!(found.optional()?, Some((found, false)) if found == over) {
                return Ok(false);
            }
            execute(&transaction, "DELETE FROM run WHERE id = ?", [over.id.0])?;
            transaction.commit()?;
            Ok(true)
        })
    }

    /// Frees at most `pages` unused pages. The file system gets them back when the log is next merged, at the latest by
    /// [`Store::merge`].
    pub fn shrink(&mut self, pages: u32) -> Result<()> {
        // The pragma frees pages only while it is stepped; it returns no rows.
        let sql = format!("PRAGMA incremental_vacuum({pages})");
        self.sql(|db| {
            let mut statement = db.prepare(&sql)?;
            let mut rows = statement.query([])?;
            while rows.next()?.is_some() {}
            Ok(())
        })
    }

    /// Merges the log into the file as far as readers allow, without waiting.
    pub fn merge(&mut self) -> Result<()> {
        self.sql(|db| db.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())))
    }
}

fn over(row: &Row<'_>) -> rusqlite::Result<Over> {
    Ok(Over {
        id: RunId(row.get(0)?),
        written_s: row.get(1)?,
        uid: maybe_unsigned(row, 9)?,
        bytes: maybe_unsigned(row, 10)?,
    })
}

/// Whether the run's writer is alive, or the run is the newest part of a live process.
fn lives(row: &Row<'_>) -> rusqlite::Result<bool> {
    if writer(row, 2)?.is_some_and(|writer| writer.lives()) {
        return Ok(true);
    }
    let (pid, start_ticks) = (row.get(5)?, unsigned(row, 6)?);
    let life: String = row.get(7)?;
    let is_rolled = row.get::<_, Option<i64>>(8)?.is_some();
    // The daemon's uid of a life is boot, pid and start time.
    let boot_id = life.split(':').next().unwrap_or_default().to_owned();
    Ok(!is_rolled && start_ticks != 0 && Writer { pid, start_ticks, boot_id }.lives())
}
