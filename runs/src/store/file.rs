//! A store file: writes, loads and lists its runs. A life is what one process did from its start to its end. The daemon may store
//! a long life as several runs, its parts.

use super::delta_log::{self, DeltaLog, Deltas, Heartbeat};
use super::error::{Result, RunId, StoreError};
use super::parts::{self, Figures};
use super::writer::{self, Writer, set_writer, state_now};
use super::{open, rows, tables};
use gpumem_model::run::{Clock, Run, State};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub struct Store {
    pub(super) db: Connection,
    pub(super) path: PathBuf,
    /// The delta log (see `delta_log`), if this process writes it.
    log: Option<DeltaLog>,
    /// Whether the size is limited; checkpoints then do not use the delta log.
    is_limited: bool,
    /// Size of the delta log in bytes above which it is merged into the database.
    max_log_bytes: u64,
}

/// An entry of the list of runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunSummary {
    pub id: RunId,
    /// Permanent id of the run, the same in every store.
    pub uid: String,
    /// Time of the first write, in seconds since 1970.
    pub stored_s: i64,
    /// Number of this part of the process's life, from 1.
    pub part: u32,
    /// Id of the preceding part of the life, if it is still stored.
    pub continues: Option<RunId>,
    /// The command; if it is unknown, the origin of the run's source.
    pub label: String,
    /// Pid in the daemon's namespace; 0 if unknown.
    pub pid: u32,
    pub source_kind: String,
    pub source_origin: String,
    /// State of the run, as [`Store::load`] returns it.
    pub state: State,
    pub clock: Clock,
    /// Earliest time in the run's series in ns; absent without a series.
    pub started_ns: Option<u64>,
    /// Latest time in the run in ns; absent without devices.
    pub last_ns: Option<u64>,
    /// Highest tracked bytes on any device of the run.
    pub peak_tracked_bytes: Option<i64>,
    /// Number of records with a sequence number in the run.
    pub events: u64,
}

/// The newest stored part of a process's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewestPart {
    pub id: RunId,
    pub part: u32,
    /// Whether this part was ended so that the next part begins. The process then still runs or ran on.
    pub is_rolled: bool,
}

impl Store {
    /// Opens a store for reading and writing. Creates a missing file (mode 0600, because it contains command lines) and a missing
    /// directory (mode 0700). Does not change a file that is not a store.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Store::new(path.as_ref(), open::writable(path.as_ref())?))
    }

    /// Opens a store for reading; does not create a file. Works without write access to the directory too, if the store was
    /// closed cleanly. Later changes are then not seen until it is opened again.
    pub fn open_read_only(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Store::new(path.as_ref(), open::read_only(path.as_ref())?))
    }

    fn new(path: &Path, db: Connection) -> Self {
        let path = path.to_owned();
        Store { db, path, log: None, is_limited: false, max_log_bytes: delta_log::MAX_BYTES }
    }

    /// Sets the size in bytes above which writes fail with [`StoreError::DiskFull`], until the store is opened again. A limit
    /// below the present size is raised to that size. Checkpoints no longer use the delta log.
    pub fn limit_size(&mut self, bytes: u64) -> Result<()> {
        self.merge_deltas()?;
        (self.log, self.is_limited) = (None, true);
        let page: i64 = self.sql(|db| db.pragma_query_value(None, "page_size", |row| row.get(0)))?;
        let pages = i64::try_from(bytes).unwrap_or(i64::MAX) / page.max(1);
        // This pragma returns a row, so it must run as a query.
        let limit = format!("PRAGMA max_page_count = {}", pages.clamp(1, i64::from(u32::MAX - 1)));
        self.sql(|db| db.query_row(&limit, [], |_| Ok(())))
    }

    /// Sets the size in bytes above which the delta log is merged into the database.
    pub fn limit_log(&mut self, bytes: u64) {
        self.max_log_bytes = bytes;
    }

    /// Stores a new run, which the calling process will checkpoint. `uid` identifies it permanently: for one process, the daemon
    /// chooses the same uid again after its own restart.
    pub fn begin(&mut self, run: &Run, uid: &str) -> Result<RunId> {
        self.begin_part(run, uid, 1)
    }

    /// Stores a new part of an observed process's life; the calling process will checkpoint it. `life` is the uid of the first part, which may
    /// have been deleted.
    pub fn begin_part(&mut self, run: &Run, life: &str, part: u32) -> Result<RunId> {
        self.open_log()?;
        let writer = self.this_writer()?;
        let (id, written_ns) = self.store_part(run, life, part, Some(writer))?;
        self.note_written(id, written_ns, run)?;
        Ok(id)
    }

    /// Stores a finished part of a process's life; `life` is the uid of the first part.
    pub fn insert_part(&mut self, run: &Run, life: &str, part: u32) -> Result<RunId> {
        Ok(self.store_part(run, life, part, None)?.0)
    }

    fn store_part(
        &mut self,
        run: &Run,
        life: &str,
        part: u32,
        writer: Option<Writer>,
    ) -> Result<(RunId, i64)> {
        match self.store_new(run, life, part, writer)? {
            (id, Some(written_ns)) => Ok((id, written_ns)),
            (id, None) => Err(StoreError::KnownUid { path: self.path.clone(), uid: uid_of(life, part), id }),
        }
    }

    /// Returns the newest stored part of a process's life; `life` is the uid of the first part, which may have been deleted.
    pub fn newest(&self, life: &str) -> Result<Option<NewestPart>> {
        let sql = "SELECT id, part, rolled_ns IS NOT NULL FROM run WHERE life = ? ORDER BY part DESC LIMIT 1";
        let newest = |row: &Row<'_>| {
            Ok(NewestPart { id: RunId(row.get(0)?), part: row.get(1)?, is_rolled: row.get(2)? })
        };
        self.sql(|db| db.prepare_cached(sql)?.query_row([life], newest).optional())
    }

    /// Replaces a stored run. This process becomes its writer, even if another process began it. Appends the changes since the
    /// last checkpoint to the delta log if possible; without a change, nothing is written.
    pub fn checkpoint(&mut self, id: RunId, run: &Run) -> Result<()> {
        self.check_run(run)?;
        self.open_log()?;
        let sql = "SELECT written_ns FROM run WHERE id = ?";
        let written =
            self.sql(|db| db.prepare_cached(sql)?.query_row([id.0], |row| row.get(0)).optional())?;
        let written_ns: i64 = written.ok_or_else(|| self.unknown(id))?;
        let (identity, parts) = self.sql(|_| Ok((parts::identity(run)?, parts::parts(run)?)))?;
        if let Some(log) = &mut self.log
            && log.written_ns(id.0) == Some(written_ns)
            && !log.needs_row(id.0, identity)
        {
            if log.len > self.max_log_bytes {
                self.merge_deltas()?;
            }
            // If the log cannot be written, the database is written instead. That succeeds, or its error shows the cause.
            if let Some(log) = &mut self.log
                && log.append(id.0, parts).is_ok()
            {
                return Ok(());
            }
            self.log.take_if(|log| log.is_torn);
        }
        let writer = Some(self.this_writer()?);
        let written_ns = self.replace(id, run, writer.as_ref())?;
        self.note_written(id, written_ns, run)
    }

    /// Writes the last checkpoint of a run, after which it has no writer. A run whose state is still [`State::Open`] then counts
    /// as interrupted.
    pub fn close(&mut self, id: RunId, run: &Run) -> Result<()> {
        self.check_run(run)?;
        self.replace(id, run, None)?;
        self.log.iter_mut().for_each(|log| log.forget(id.0));
        Ok(())
    }

    /// Records that this process still writes its runs, and that they did not change until `time_ns` (CLOCK_MONOTONIC) apart from
    /// changes that the next checkpoint will write. Writes the delta log through to the disk.
    pub fn heartbeat(&mut self, time_ns: u64) -> Result<()> {
        let writer = self.this_writer()?;
        let Some(log) = self.log.as_mut().filter(|log| !log.is_idle()) else { return Ok(()) };
        let heartbeat = Heartbeat { pid: writer.pid, start_ticks: writer.start_ticks, time_ns };
        log.append_heartbeat(heartbeat).map_err(|error| StoreError::io(&self.path, error))
    }

    /// Stores a completed run, such as an import, and returns its id and true. If the store has a run with this uid, changes
    /// nothing and returns that run's id and false.
    pub fn insert(&mut self, run: &Run, uid: &str) -> Result<(RunId, bool)> {
        self.store_new(run, uid, 1, None).map(|(id, new)| (id, new.is_some()))
    }

    /// Returns a run as it was last stored. An open run whose writer has ended becomes [`State::Interrupted`].
    pub fn load(&self, id: RunId) -> Result<Run> {
        let has_writer = "SELECT writer_pid IS NOT NULL FROM run WHERE id = ?";
        let has_writer =
            self.sql(|db| db.prepare_cached(has_writer)?.query_row([id.0], |row| row.get(0)).optional())?;
        // The delta log has no changes of a run without a writer.
        let deltas = if has_writer == Some(true) { self.deltas(Some(id))? } else { Deltas::default() };
        let (mut run, writer) = self.load_stored(id, &deltas)?;
        run.state = state_now(run.state, writer.as_ref());
        Ok(run)
    }

    /// Returns a run with the changes in `deltas` and its state as stored, and its writer. `deltas` must have been read before
    /// this call: if the run was written to the database after that, the changes are invalid and ignored.
    fn load_stored(&self, id: RunId, deltas: &Deltas) -> Result<(Run, Option<Writer>)> {
        let read = self.sql(|db| {
            // One transaction, so that a concurrent checkpoint is seen completely or not at all.
            let db = db.unchecked_transaction()?;
            let Some((mut run, writer, written_ns)) = rows::read(&db, id.0)? else { return Ok(None) };
            if let Some(deltas) = deltas.run(id.0, written_ns) {
                // If the changed parts cannot be read, the older state in the database is returned.
                run = parts::run(&deltas.applied_to(parts::parts(&run)?)).unwrap_or(run);
            }
            Ok(Some((run, writer)))
        })?;
        let (mut run, writer) = read.ok_or_else(|| self.unknown(id))?;
        // The heartbeat of the run's writer states that the run did not change up to that time.
        let Heartbeat { pid, start_ticks, time_ns } = deltas.heartbeat;
        if writer.as_ref().is_some_and(|writer| (writer.pid, writer.start_ticks) == (pid, start_ticks)) {
            let lasts = run.devices.iter_mut().map(|device| &mut device.last.time_ns);
            lasts.filter(|last_ns| **last_ns > 0).for_each(|last_ns| *last_ns = time_ns.max(*last_ns));
        }
        Ok((run, writer))
    }

    /// Returns a run without its cells and devices, which is enough for searches.
    pub fn load_head(&self, id: RunId) -> Result<Run> {
        let read = self.sql(|db| rows::read_run(db, id.0))?;
        let (mut run, writer, _) = read.ok_or_else(|| self.unknown(id))?;
        run.state = state_now(run.state, writer.as_ref());
        Ok(run)
    }

    /// Returns all runs, the newest first.
    pub fn list(&self) -> Result<Vec<RunSummary>> {
        self.newest_runs(usize::MAX)
    }

    /// Returns at most `limit` runs, the newest first.
    pub fn newest_runs(&self, limit: usize) -> Result<Vec<RunSummary>> {
        let sql = format!("SELECT {SUMMARY} FROM run ORDER BY id DESC LIMIT ?");
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let deltas = self.deltas(None)?;
        self.sql(|db| {
            db.prepare_cached(&sql)?.query_map([limit], |row| Ok(summary(row, &deltas)?.0))?.collect()
        })
    }

    /// Returns the id of the newest run; `None` if the store is empty.
    pub fn latest(&self) -> Result<Option<RunId>> {
        let id: Option<i64> = self.sql(|db| db.query_row("SELECT max(id) FROM run", [], |row| row.get(0)))?;
        Ok(id.map(RunId))
    }

    /// Stores a new run as part number `part` of a process's life. Returns its id and `written_ns`, or its id and `None` if the
    /// store has it already.
    fn store_new(
        &mut self,
        run: &Run,
        life: &str,
        part: u32,
        writer: Option<Writer>,
    ) -> Result<(RunId, Option<i64>)> {
        self.check_run(run)?;
        let uid = uid_of(life, part);
        self.transaction(|db| {
            let known = "SELECT id FROM run WHERE uid = ?";
            if let Some(id) = db.query_row(known, [&uid], |row| row.get(0)).optional()? {
                return Ok((RunId(id), None));
            }
            let insert = "INSERT INTO run (uid, stored_s, life, part) VALUES (?, ?, ?, ?)";
            tables::execute(db, insert, params![uid, tables::now_s(), life, part])?;
            let id = db.last_insert_rowid();
            rows::write(db, id, run)?;
            Ok((RunId(id), set_writer(db, id, writer.as_ref())?))
        })
    }

    /// Writes a stored run to the database; returns its new `written_ns`.
    fn replace(&mut self, id: RunId, run: &Run, writer: Option<&Writer>) -> Result<i64> {
        let written = self.transaction(|db| {
            rows::write(db, id.0, run)?;
            set_writer(db, id.0, writer)
        });
        written?.ok_or_else(|| self.unknown(id))
    }

    /// Tells the delta log the state of a run that was just written to the database.
    fn note_written(&mut self, id: RunId, written_ns: i64, run: &Run) -> Result<()> {
        if self.log.is_some() {
            let (identity, parts) = self.sql(|_| Ok((parts::identity(run)?, parts::parts(run)?)))?;
            self.log.iter_mut().for_each(|log| log.note_written(id.0, written_ns, identity, &parts));
        }
        Ok(())
    }

    /// Opens the delta log for writing, and merges the entries that a crashed writer left in it. If it cannot be opened, for
    /// example because another process writes it, checkpoints go to the database. The first checkpoint also calls this.
    pub fn open_log(&mut self) -> Result<()> {
        if self.log.is_some() || self.is_limited {
            return Ok(());
        }
        let permissions = self.path.metadata().map(|found| found.permissions());
        let path = open::side_file(&self.path, delta_log::SUFFIX);
        self.log = permissions.and_then(|permissions| DeltaLog::open(&path, permissions)).unwrap_or(None);
        if self.log.as_ref().is_some_and(|log| log.len > 0) { self.merge_deltas() } else { Ok(()) }
    }

    /// Writes the runs of the delta log to the database, and empties the log.
    fn merge_deltas(&mut self) -> Result<()> {
        if self.log.is_none() {
            return Ok(());
        }
        let deltas = self.deltas(None)?;
        let mut ids: Vec<RunId> = deltas.runs.keys().map(|id| RunId(*id)).collect();
        ids.sort_unstable_by_key(|id| id.0);
        for id in ids {
            let written_ns = self.sql(|db| rows::read_run(db, id.0))?.map(|(_, _, written_ns)| written_ns);
            if written_ns.and_then(|written_ns| deltas.run(id.0, written_ns)).is_none() {
                continue;
            }
            let (run, writer) = self.load_stored(id, &deltas)?;
            let written_ns = self.replace(id, &run, writer.as_ref())?;
            if self.log.as_ref().is_some_and(|log| log.written_ns(id.0).is_some()) {
                self.note_written(id, written_ns, &run)?;
            }
        }
        // The database must be on the disk before the log is emptied.
        let wal = open::side_file(&self.path, "-wal");
        let synced = File::open(wal).and_then(|wal| wal.sync_data());
        if let Some(log) = &mut self.log {
            let cleared = match synced {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
                _ => log.clear(),
            };
            cleared.map_err(|error| StoreError::io(&self.path, error))?;
        }
        Ok(())
    }

    /// Reads the delta log, only entries of the run `only` if it is given.
    pub(super) fn deltas(&self, only: Option<RunId>) -> Result<Deltas> {
        let path = open::side_file(&self.path, delta_log::SUFFIX);
        delta_log::read(&path, only.map(|id| id.0)).map_err(|error| StoreError::io(&path, error))
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

    /// Runs `work` with the database; adds the path to its error.
    pub(super) fn sql<T>(&self, work: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T> {
        work(&self.db).map_err(|error| StoreError::sqlite(&self.path, error))
    }

    /// Runs `work` in a write transaction, which is committed unless `work` fails.
    pub(super) fn transaction<T>(&self, work: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T> {
        self.sql(|db| {
            let transaction = Transaction::new_unchecked(db, TransactionBehavior::Immediate)?;
            let result = work(&transaction)?;
            transaction.commit()?;
            Ok(result)
        })
    }

    fn unknown(&self, id: RunId) -> StoreError {
        StoreError::UnknownRun { path: self.path.clone(), id }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Without live runs, the database has everything.
        if self.log.as_ref().is_some_and(|log| log.is_idle() && log.len > 0) {
            let _ = self.merge_deltas();
        }
    }
}

/// Returns the uid of a part of a process's life; `life` is the uid of the first part.
fn uid_of(life: &str, part: u32) -> String {
    if part == 1 { life.to_owned() } else { format!("{life}/{part}") }
}

pub(super) const SUMMARY: &str = "id, uid, stored_s, label, pid, source_kind, started_ns, last_ns, events,
    (SELECT max(tracked_bytes) FROM moment WHERE run = run.id AND kind = 'peak'),
    clock, wall_offset_ns, state, closed_ns, closed_status, rolled_ns,
    writer_pid, writer_start, writer_boot, source_origin, part,
    (SELECT id FROM run AS before WHERE before.life = run.life AND before.part = run.part - 1), written_ns";

/// Returns the summary in a row that begins with the columns [`SUMMARY`], and the newer figures from the delta log.
pub(super) fn summary(row: &Row<'_>, deltas: &Deltas) -> rusqlite::Result<(RunSummary, Figures)> {
    let (id, written_ns): (i64, i64) = (row.get(0)?, row.get(22)?);
    let deltas = deltas.run(id, written_ns);
    let figures = deltas.map(|deltas| parts::figures(&deltas.parts)).transpose()?.unwrap_or_default();
    let summary = RunSummary {
        id: RunId(id),
        uid: row.get(1)?,
        stored_s: row.get(2)?,
        label: row.get(3)?,
        pid: row.get(4)?,
        source_kind: row.get(5)?,
        source_origin: row.get(19)?,
        part: row.get(20)?,
        continues: row.get::<_, Option<i64>>(21)?.map(RunId),
        started_ns: tables::maybe_unsigned(row, 6)?,
        last_ns: tables::maybe_unsigned(row, 7)?.max(figures.last_ns),
        events: figures.events.map_or_else(|| tables::unsigned(row, 8), Ok)?,
        peak_tracked_bytes: row.get::<_, Option<i64>>(9)?.max(figures.peak_tracked_bytes),
        clock: tables::clock(row, 10)?,
        state: state_now(tables::state(row, 12)?, writer::writer(row, 16)?.as_ref()),
    };
    Ok((summary, figures))
}
