//! Room for new runs: what may be deleted, deleting it, and giving the space back to the file system. Each call is a
//! bounded piece of work; who keeps the store decides when and how often.

use super::columns::{execute, maybe_unsigned, unsigned};
use super::error::{Result, RunId, StoreError};
use super::file::Store;
use super::writer::{Writer, writer};
use rusqlite::{OptionalExtension, Row};

/// How large a store is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// Of the file, without its log.
    pub file_bytes: u64,
    /// Of those, what [`Store::shrink`] can give back.
    pub free_bytes: u64,
}

impl Room {
    /// What runs take.
    pub fn used_bytes(&self) -> u64 {
        self.file_bytes.saturating_sub(self.free_bytes)
    }
}

/// A run that may be deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Over {
    /// Which.
    pub id: RunId,
    /// When it was last written: seconds since 1970.
    pub written_s: i64,
    /// Whose process it was; none where nobody could tell.
    pub uid: Option<u64>,
    /// About what it takes; none where an earlier version wrote it.
    pub bytes: Option<u64>,
}

impl Store {
    /// Reads all of it and compares what must agree: [`StoreError::Damaged`] names the first thing that does not. Takes as
    /// long as reading the file.
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

    /// How large it is.
    pub fn room(&self) -> Result<Room> {
        self.sql(|db| {
            let pragma = |name| db.pragma_query_value(None, name, |row| unsigned(row, 0));
            let (page, pages, free) =
                (pragma("page_size")?, pragma("page_count")?, pragma("freelist_count")?);
            Ok(Room { file_bytes: pages.saturating_mul(page), free_bytes: free.saturating_mul(page) })
        })
    }

    /// What the daemon kept and may be deleted, the one that was written last at the end. A run whose process lives, or that
    /// somebody writes, is not among them, nor what people imported.
    pub fn over(&self) -> Result<Vec<Over>> {
        let sql =
            "SELECT id, written_s, writer_pid, writer_start, writer_boot, pid, start_ticks, life, rolled_ns, owner_uid, weight
            FROM run WHERE source_kind = 'daemon'";
        let mut over: Vec<Over> = self.sql(|db| {
            let mut statement = db.prepare_cached(sql)?;
            let rows = statement.query_map([], |row| Ok((over(row)?, lives(row)?)))?;
            rows.filter_map(|row| row.map(|(over, lives)| (!lives).then_some(over)).transpose()).collect()
        })?;
        over.sort_by_key(|over| (over.written_s, over.id));
        Ok(over)
    }

    /// Deletes a run of [`Store::over`]; false, and nothing, if it is none of them any more.
    pub fn delete(&mut self, over: Over) -> Result<bool> {
        let sql =
            "SELECT id, written_s, writer_pid, writer_start, writer_boot, pid, start_ticks, life, rolled_ns, owner_uid, weight
            FROM run WHERE id = ?";
        self.sql(|db| {
            let transaction =
                rusqlite::Transaction::new_unchecked(db, rusqlite::TransactionBehavior::Immediate)?;
            let found = transaction.query_row(sql, [over.id.0], |row| Ok((self::over(row)?, lives(row)?)));
            if !matches!(found.optional()?, Some((found, false)) if found == over) {
                return Ok(false);
            }
            execute(&transaction, "DELETE FROM run WHERE id = ?", [over.id.0])?;
            transaction.commit()?;
            Ok(true)
        })
    }

    /// Gives at most so many pages of what is free back to the file system, which has them when the log is next merged: at
    /// the latest [`Store::merge`].
    pub fn shrink(&mut self, pages: u32) -> Result<()> {
        // It works while it is asked for rows, and has none.
        let sql = format!("PRAGMA incremental_vacuum({pages})");
        self.sql(|db| {
            let mut statement = db.prepare(&sql)?;
            let mut rows = statement.query([])?;
            while rows.next()?.is_some() {}
            Ok(())
        })
    }

    /// Merges the log into the file, as far as readers allow; waits for nobody.
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

/// Whether somebody writes the run, or it is the newest part of a process that lives.
fn lives(row: &Row<'_>) -> rusqlite::Result<bool> {
    if writer(row, 2)?.is_some_and(|writer| writer.lives()) {
        return Ok(true);
    }
    let (pid, start_ticks) = (row.get(5)?, unsigned(row, 6)?);
    let life: String = row.get(7)?;
    let is_rolled = row.get::<_, Option<i64>>(8)?.is_some();
    // The daemon names a life by boot, pid and start.
    let boot_id = life.split(':').next().unwrap_or_default().to_owned();
    Ok(!is_rolled && start_ticks != 0 && Writer { pid, start_ticks, boot_id }.lives())
}
