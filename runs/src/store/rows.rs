//! Converts a run to rows and back. A write compares the run with the stored rows and writes only differences, so that SQLite
//! writes few pages. A run that is read back equals the one that was written.

use super::tables::{bits, clock, damaged, execute, from_json, json, maybe_unsigned, now_s, state, unsigned};
use super::writer::{Writer, writer};
use super::{details, tables};
use gpumem_model::run::{Cell, Clock, Device, Moment, Process, ProgramData, Run, Source, State};
use gpumem_model::series::Bucket;
use rusqlite::{Connection, OptionalExtension, Result, Row, params};

/// Writes everything except id, uid and writer of a run. Returns false if the store has no such run.
pub(super) fn write(db: &Connection, id: i64, run: &Run) -> Result<bool> {
    if !write_run(db, id, run)? {
        return Ok(false);
    }
    write_cells(db, id, &run.cells)?;
    details::write_own(db, id, &run.own)?;
    for (idx, device) in run.devices.iter().enumerate() {
        tables::write(&mut tables::upsert::<Device>(db)?, &[&id, &(idx as i64)], device)?;
        write_moment(db, id, idx, "last", &device.last)?;
        write_moment(db, id, idx, "peak", &device.peak)?;
        write_buckets(db, id, idx, &device.series.buckets)?;
        details::write(db, id, idx, &device.details)?;
    }
    execute(db, "DELETE FROM device WHERE run = ? AND idx >= ?", params![id, run.devices.len() as i64])?;
    Ok(true)
}

/// A run, its writer, and the column `written_ns`.
pub(super) type StoredRun = (Run, Option<Writer>, i64);

/// Returns the run as it was written to the database.
pub(super) fn read(db: &Connection, id: i64) -> Result<Option<StoredRun>> {
    let Some((mut run, writer, written_ns)) = read_run(db, id)? else { return Ok(None) };
    run.cells = tables::read_list(db, &[&id])?;
    run.own = details::read_own(db, id)?;
    run.devices = tables::read_list(db, &[&id])?;
    for (idx, device) in run.devices.iter_mut().enumerate() {
        device.last = read_moment(db, id, idx, "last")?;
        device.peak = read_moment(db, id, idx, "peak")?;
        device.series.buckets = tables::read_list(db, &[&id, &(idx as i64)])?;
        device.details = details::read(db, id, idx)?;
        let known = run.cells.len() as u32;
        let timeline = device.details.timeline.points.iter().flat_map(|point| &point.amounts);
        let mut amounts = device.last.amounts.iter().chain(&device.peak.amounts).chain(timeline);
        if let Some((cell, _)) = amounts.find(|(cell, _)| *cell >= known) {
            return Err(damaged(format!("run {id}: an amount of cell {cell} of {known}")));
        }
    }
    Ok(Some((run, writer, written_ns)))
}

fn write_run(db: &Connection, id: i64, run: &Run) -> Result<bool> {
    let (clock, wall_offset_ns) = match run.clock {
        Clock::Monotonic { wall_offset_ns } => ("monotonic", wall_offset_ns),
        Clock::Lines => ("lines", None),
    };
    let (state, closed) = match run.state {
        State::Open => ("open", None),
        State::Closed { time_ns, status } => ("closed", Some((time_ns, status))),
        State::Interrupted => ("interrupted", None),
        // The column `state` has no value for a rolled run (continued in the next part); `rolled_ns` marks it.
        State::Rolled { .. } => ("interrupted", None),
    };
    let rolled_ns = if let State::Rolled { time_ns } = run.state { Some(time_ns) } else { None };
    let facts = &run.process.facts;
    let origin = if run.source.is_watched() { "(unknown command)" } else { &run.source.origin };
    let label = facts.get("command").or_else(|| facts.get("comm")).map_or(origin, String::as_str);
    let firsts = run.devices.iter().filter_map(|device| device.series.buckets.first());
    let lasts = run.devices.iter().flat_map(|device| {
        let bucket = device.series.buckets.last().map_or(0, |bucket| bucket.time_ns);
        [bucket, device.last.time_ns, device.peak.time_ns]
    });
    let changed = execute(
        db,
        "UPDATE run SET label = ?, source_kind = ?, source_origin = ?, source_preset = ?, clock = ?,
            wall_offset_ns = ?, pid = ?, start_ticks = ?, owner_uid = ?, state = ?, closed_ns = ?,
            closed_status = ?, started_ns = ?, last_ns = ?, events = ?, facts = ?, claims = ?,
            coverage = ?, caveats = ?, rolled_ns = ?, written_s = ?, weight = ? WHERE id = ?",
        params![
            label,
            run.source.kind,
            run.source.origin,
            run.source.preset,
            clock,
            wall_offset_ns,
            run.process.pid,
            bits(run.process.start_ticks),
            run.process.uid.map(bits),
            state,
            closed.map(|(time_ns, _)| bits(time_ns)),
            closed.and_then(|(_, status)| status).map(bits),
            firsts.map(|bucket| bucket.time_ns).min().map(bits),
            lasts.chain(closed.map(|(time_ns, _)| time_ns)).chain(rolled_ns).max().map(bits),
            bits(run.coverage.events),
            json(facts)?,
            json(&run.process.claims)?,
            json(&run.coverage)?,
            json(&run.caveats)?,
            rolled_ns.map(bits),
            now_s(),
            run.weight() as i64,
            id,
        ],
    )?;
    Ok(changed == 1)
}

/// Returns the run without cells and devices.
pub(super) fn read_run(db: &Connection, id: i64) -> Result<Option<StoredRun>> {
    let sql = "SELECT source_kind, source_origin, source_preset, pid, start_ticks, owner_uid, facts, claims,
            coverage, caveats, clock, wall_offset_ns, state, closed_ns, closed_status, rolled_ns,
            writer_pid, writer_start, writer_boot, written_ns FROM run WHERE id = ?";
    let run = |row: &Row<'_>| {
        let run = Run {
            source: Source { kind: row.get(0)?, origin: row.get(1)?, preset: row.get(2)? },
            process: Process {
                pid: row.get(3)?,
                start_ticks: unsigned(row, 4)?,
                uid: maybe_unsigned(row, 5)?,
                facts: from_json(row, 6)?,
                claims: from_json(row, 7)?,
            },
            coverage: from_json(row, 8)?,
            caveats: from_json(row, 9)?,
            clock: clock(row, 10)?,
            state: state(row, 12)?,
            cells: Vec::new(),
            devices: Vec::new(),
            own: ProgramData::default(),
        };
        Ok((run, writer(row, 16)?, row.get(19)?))
    };
    db.prepare_cached(sql)?.query_row([id], run).optional()
}

fn write_cells(db: &Connection, id: i64, cells: &[Cell]) -> Result<()> {
    let stored = tables::read_list::<Cell>(db, &[&id])?;
    let mut delete = db.prepare_cached("DELETE FROM cell WHERE run = ? AND idx = ?")?;
    let mut insert = tables::insert::<Cell>(db)?;
    for (idx, cell) in cells.iter().enumerate().filter(|&(idx, cell)| stored.get(idx) != Some(cell)) {
        // Measured: deleting and inserting a row takes 6 us, an upsert took 65 us.
        if idx < stored.len() {
            delete.execute(params![id, idx as i64])?;
        }
        tables::write(&mut insert, &[&id, &(idx as i64)], cell)?;
    }
    execute(db, "DELETE FROM cell WHERE run = ? AND idx >= ?", params![id, cells.len() as i64])?;
    Ok(())
}

fn write_moment(db: &Connection, id: i64, device: usize, kind: &str, moment: &Moment) -> Result<()> {
    tables::write(&mut tables::upsert::<Moment>(db)?, &[&id, &(device as i64), &kind], moment)?;
    write_amounts(db, id, device, kind, &moment.amounts)
}

fn write_amounts(db: &Connection, id: i64, device: usize, kind: &str, amounts: &[(u32, i64)]) -> Result<()> {
    let stored = read_amounts(db, id, device, kind)?;
    let sql = "DELETE FROM amount WHERE run = ? AND device = ? AND moment = ? AND cell = ?";
    for (cell, _) in &stored {
        if amounts.binary_search_by_key(cell, |&(cell, _)| cell).is_err() {
            execute(db, sql, params![id, device as i64, kind, cell])?;
        }
    }
    let mut write = db.prepare_cached(
        "INSERT INTO amount (run, device, moment, cell, bytes) VALUES (?, ?, ?, ?, ?)
        ON CONFLICT DO UPDATE SET bytes = excluded.bytes",
    )?;
    for amount @ (cell, bytes) in amounts {
        if stored.binary_search(amount).is_err() {
            write.execute(params![id, device as i64, kind, cell, bytes])?;
        }
    }
    Ok(())
}

fn read_moment(db: &Connection, id: i64, device: usize, kind: &str) -> Result<Moment> {
    let moment: Option<Moment> = tables::read_one(db, &[&id, &(device as i64), &kind])?;
    let mut moment =
        moment.ok_or_else(|| damaged(format!("run {id}: device {device} has no {kind} moment")))?;
    moment.amounts = read_amounts(db, id, device, kind)?.into();
    Ok(moment)
}

fn read_amounts(db: &Connection, id: i64, device: usize, kind: &str) -> Result<Vec<(u32, i64)>> {
    let sql = "SELECT cell, bytes FROM amount WHERE run = ? AND device = ? AND moment = ?
        ORDER BY run, device, moment, cell";
    let amount = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?));
    db.prepare_cached(sql)?.query_map(params![id, device as i64, kind], amount)?.collect()
}

/// Rewrites the buckets from the first one that differs: the last stored bucket while a series grows, or the first
/// bucket after the series got wider buckets.
fn write_buckets(db: &Connection, id: i64, device: usize, buckets: &[Bucket]) -> Result<()> {
    let stored = tables::read_list::<Bucket>(db, &[&id, &(device as i64)])?;
    let same = stored.iter().zip(buckets).take_while(|(stored, bucket)| stored == bucket).count();
    if same < stored.len() {
        let sql = "DELETE FROM bucket WHERE run = ? AND device = ? AND seq >= ?";
        execute(db, sql, params![id, device as i64, same as i64])?;
    }
    let mut insert = tables::insert::<Bucket>(db)?;
    for (seq, bucket) in buckets.iter().enumerate().skip(same) {
        tables::write(&mut insert, &[&id, &(device as i64), &(seq as i64)], bucket)?;
    }
    Ok(())
}
