//! A store file: writes, loads and lists its runs.

use super::error::{Result, RunId, StoreError};
use super::writer::{self, Writer, set_writer, state_now};
use super::{columns, open, rows};
use gpumem_model::run::{Clock, Run, State};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};
use std::path::{Path, PathBuf};

/// An open store file.
#[derive(Debug)]
pub struct Store {
    pub(super) db: Connection,
    pub(super) path: PathBuf,
}

/// An entry of the list of runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunSummary {
    /// Id in this store.
    pub id: RunId,
    /// The writer's id of the run; the same when the writer stores it again.
    pub uid: String,
    /// Time of the first write, in seconds since 1970.
    pub stored_s: i64,
    /// Number of the part of its process's life, from 1.
    pub part: u32,
    /// Id of the preceding part, if it is still stored.
    pub continues: Option<RunId>,
    /// The command; the source's origin if the command is unknown.
    pub label: String,
    /// Pid in the daemon's namespace; 0 if unknown.
    pub pid: u32,
    /// [`Source::kind`](gpumem_model::run::Source::kind).
    pub source_kind: String,
    /// [`Source::origin`](gpumem_model::run::Source::origin).
    pub source_origin: String,
    /// State as [`Store::load`] returns it.
    pub state: State,
    /// Meaning of the times.
    pub clock: Clock,
    /// Earliest time in the run's series; absent without a series.
    pub started_ns: Option<u64>,
    /// Latest time in the run; absent without devices.
    pub last_ns: Option<u64>,
    /// Highest `tracked` on any of its devices.
    pub peak_tracked_bytes: Option<i64>,
    /// Ordered records applied.
    pub events: u64,
}

/// The newest stored part of a life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Newest {
    /// Id in this store.
    pub id: RunId,
    /// Number of the part, from 1.
    pub part: u32,
    /// The next part has begun or is about to begin.
    pub is_rolled: bool,
}

impl Store {
    /// Opens a store for reading and writing. Creates a missing file (mode 0600, because it holds command lines) and a missing
    /// directory (mode 0700). Never changes a file that is not a store.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        Ok(Store { db: open::writable(&path)?, path })
    }

    /// Opens a store for reading. Never creates a file. Works without write access to the directory. In that case, a store that
    /// was closed cleanly is read as of now: reopen it to see later changes.
    pub fn open_read_only(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        Ok(Store { db: open::read_only(&path)?, path })
    }

    /// Sets the size in bytes above which writes fail with [`StoreError::DiskFull`], until the store is reopened. A limit below
    /// the present size is raised to it.
    pub fn limit_size(&mut self, bytes: u64) -> Result<()> {
        let page: i64 = self.sql(|db| db.pragma_query_value(None, "page_size", |row| row.get(0)))?;
        let pages = i64::try_from(bytes).unwrap_or(i64::MAX) / page.max(1);
        // The pragma returns the limit that it set, so it must run as a query.
        let limit = format!("PRAGMA max_page_count = {}", pages.clamp(1, i64::from(u32::MAX - 1)));
        self.sql(|db| db.query_row(&limit, [], |_| Ok(())))
    }

    /// Stores a new run, which this process will checkpoint. `uid` identifies it permanently: it is the same for the same life of
    /// a process, also after a restart of the daemon.
    pub fn begin(&mut self, run: &Run, uid: &str) -> Result<RunId> {
        self.begin_part(run, uid, 1)
    }

    /// Stores a later part of a life; `life` is the uid of its first part, which may have been deleted.
    pub fn begin_part(&mut self, run: &Run, life: &str, part: u32) -> Result<RunId> {
        let writer = Some(self.this_writer()?);
        match self.store_new(run, life, part, writer)? {
            (id, true) => Ok(id),
            (id, false) => Err(StoreError::KnownUid { path: self.path.clone(), uid: uid_of(life, part), id }),
        }
    }

    /// Returns the newest part of a life; `life` is the uid of its first part, which may have been deleted.
    pub fn newest(&self, life: &str) -> Result<Option<Newest>> {
        let sql = "SELECT id, part, rolled_ns IS NOT NULL FROM run WHERE life = ? ORDER BY part DESC LIMIT 1";
        let newest =
            |row: &Row<'_>| Ok(Newest { id: RunId(row.get(0)?), part: row.get(1)?, is_rolled: row.get(2)? });
        self.sql(|db| db.prepare_cached(sql)?.query_row([life], newest).optional())
    }

    /// Replaces a stored run. This process becomes its writer, even if another one began it.
    pub fn checkpoint(&mut self, id: RunId, run: &Run) -> Result<()> {
        let writer = Some(self.this_writer()?);
        self.replace(id, run, writer)
    }

    /// Writes the last checkpoint; the run has no writer from then on. A run whose state is still [`State::Open`] becomes
    /// interrupted.
    pub fn close(&mut self, id: RunId, run: &Run) -> Result<()> {
        self.replace(id, run, None)
    }

    /// Stores a completed run, such as an import. If the uid is already stored, changes nothing and returns that run's id and
    /// false.
    pub fn insert(&mut self, run: &Run, uid: &str) -> Result<(RunId, bool)> {
        self.store_new(run, uid, 1, None)
    }

    /// Returns a run as it was last stored. An open run whose writer has ended becomes [`State::Interrupted`].
    pub fn load(&self, id: RunId) -> Result<Run> {
        // One transaction, so that a concurrent checkpoint is seen completely or not at all.
        let read = self.sql(|db| rows::read(&*db.unchecked_transaction()?, id.0))?;
        let (mut run, writer) = read.ok_or_else(|| self.unknown(id))?;
        run.state = state_now(run.state, writer.as_ref());
        Ok(run)
    }

    /// Returns a run without cells and devices, for searches.
    pub fn load_head(&self, id: RunId) -> Result<Run> {
        let (mut run, writer) = self.sql(|db| rows::read_run(db, id.0))?.ok_or_else(|| self.unknown(id))?;
        run.state = state_now(run.state, writer.as_ref());
        Ok(run)
    }

    /// Returns all runs, the newest first.
    pub fn list(&self) -> Result<Vec<RunSummary>> {
        self.newest_runs(usize::MAX)
    }

    /// Returns the newest `most` runs, newest first. Loading all runs of a large store would take too much memory.
    pub fn newest_runs(&self, most: usize) -> Result<Vec<RunSummary>> {
        let sql = "SELECT id, uid, stored_s, label, pid, source_kind, started_ns, last_ns, events,
                (SELECT max(tracked_bytes) FROM moment WHERE run = run.id AND kind = 'peak'),
                clock, wall_offset_ns, state, closed_ns, closed_status, rolled_ns,
                writer_pid, writer_start, writer_boot, source_origin, part,
                (SELECT id FROM run AS before WHERE before.life = run.life AND before.part = run.part - 1)
            FROM run ORDER BY id DESC LIMIT ?";
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        self.sql(|db| db.prepare_cached(sql)?.query_map([most], summary)?.collect())
    }

    /// Returns the id of the newest run; `None` if the store is empty.
    pub fn latest(&self) -> Result<Option<RunId>> {
        let id: Option<i64> = self.sql(|db| db.query_row("SELECT max(id) FROM run", [], |row| row.get(0)))?;
        Ok(id.map(RunId))
    }

    fn store_new(
        &mut self,
        run: &Run,
        life: &str,
        part: u32,
        writer: Option<Writer>,
    ) -> Result<(RunId, bool)> {
        self.check_run(run)?;
        let uid = uid_of(life, part);
        self.sql(|db| {
            let transaction = Transaction::new_unchecked(db, TransactionBehavior::Immediate)?;
            let known = "SELECT id FROM run WHERE uid = ?";
            if let Some(id) = transaction.query_row(known, [&uid], |row| row.get(0)).optional()? {
                return Ok((RunId(id), false));
            }
            columns::execute(
                &transaction,
                "INSERT INTO run (uid, stored_s, life, part) VALUES (?, ?, ?, ?)",
                params![uid, columns::now_s(), life, part],
            )?;
            let id = transaction.last_insert_rowid();
            rows::write(&transaction, id, run)?;
            set_writer(&transaction, id, writer.as_ref())?;
            transaction.commit()?;
            Ok((RunId(id), true))
        })
    }

    fn replace(&mut self, id: RunId, run: &Run, writer: Option<Writer>) -> Result<()> {
        self.check_run(run)?;
        let known = self.sql(|db| {
            let transaction = Transaction::new_unchecked(db, TransactionBehavior::Immediate)?;
            let known = rows::write(&transaction, id.0, run)?;
            set_writer(&transaction, id.0, writer.as_ref())?;
            transaction.commit()?;
            Ok(known)
        })?;
        if known { Ok(()) } else { Err(self.unknown(id)) }
    }

    /// Rejects a run that the tables cannot represent, before anything is written.
    fn check_run(&self, run: &Run) -> Result<()> {
        let known = run.cells.len();
        for device in &run.devices {
            let points = device.details.timeline.points.iter().map(|point| ("timeline", &point.amounts));
            let moments = [("last", &device.last.amounts), ("peak", &device.peak.amounts)];
            for (kind, amounts) in moments.into_iter().chain(points) {
                let rising = amounts.is_sorted_by(|(earlier, _), (later, _)| earlier < later);
                let highest = amounts.last().map_or(0, |&(cell, _)| cell as usize + 1);
                if !rising || highest > known {
                    let what = format!(
                        "the {kind} amounts of device {:?} must name each of its {known} cells at most once, \
                         in order",
                        device.name
                    );
                    return Err(StoreError::InvalidRun { path: self.path.clone(), what });
                }
            }
        }
        Ok(())
    }

    fn this_writer(&self) -> Result<Writer> {
        Writer::this().map_err(|error| StoreError::io(Path::new("/proc"), error))
    }

    pub(super) fn sql<T>(&self, work: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T> {
        work(&self.db).map_err(|error| StoreError::sqlite(&self.path, error))
    }

    fn unknown(&self, id: RunId) -> StoreError {
        StoreError::UnknownRun { path: self.path.clone(), id }
    }
}

/// Returns the uid of a part of a life.
fn uid_of(life: &str, part: u32) -> String {
    if part == 1 { life.to_owned() } else { format!("{life}/{part}") }
}

pub(super) fn summary(row: &Row<'_>) -> rusqlite::Result<RunSummary> {
    Ok(RunSummary {
        id: RunId(row.get(0)?),
        uid: row.get(1)?,
        stored_s: row.get(2)?,
        label: row.get(3)?,
        pid: row.get(4)?,
        source_kind: row.get(5)?,
        source_origin: row.get(19)?,
        part: row.get(20)?,
        continues: row.get::<_, Option<i64>>(21)?.map(RunId),
        started_ns: columns::maybe_unsigned(row, 6)?,
        last_ns: columns::maybe_unsigned(row, 7)?,
        events: columns::unsigned(row, 8)?,
        peak_tracked_bytes: row.get(9)?,
        clock: columns::clock(row, 10)?,
        state: state_now(columns::state(row, 12)?, writer::writer(row, 16)?.as_ref()),
    })
}
