//! The rows that grow: moments with their amounts, and the buckets of series.

use super::columns::{bits, damaged, dense, execute, from_json, json, maybe_unsigned, unsigned};
use gpumem_model::run::Moment;
use gpumem_model::series::{Bucket, Extremes};
use rusqlite::{Connection, OptionalExtension, Result, Row, params};

pub(super) fn write_moment(
    db: &Connection,
    id: i64,
    device: usize,
    kind: &str,
    moment: &Moment,
) -> Result<()> {
    let sql = "INSERT INTO moment (run, device, kind, time_ns, tracked_bytes, predates_bytes,
            untrackable_bytes, uncovered_used_bytes, gap_distance_ns, torn_min_bytes, torn_max_bytes,
            stale, partial, used_absence, parts)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT DO UPDATE SET time_ns = excluded.time_ns, tracked_bytes = excluded.tracked_bytes,
            predates_bytes = excluded.predates_bytes, untrackable_bytes = excluded.untrackable_bytes,
            uncovered_used_bytes = excluded.uncovered_used_bytes,
            gap_distance_ns = excluded.gap_distance_ns, torn_min_bytes = excluded.torn_min_bytes,
            torn_max_bytes = excluded.torn_max_bytes, stale = excluded.stale, partial = excluded.partial,
            used_absence = excluded.used_absence, parts = excluded.parts";
    let values = params![
        id,
        device as i64,
        kind,
        bits(moment.time_ns),
        moment.tracked_bytes,
        moment.predates_bytes,
        moment.untrackable_bytes,
        moment.uncovered_used_bytes.map(bits),
        moment.gap_distance_ns,
        moment.torn.map(|(min, _)| min),
        moment.torn.map(|(_, max)| max),
        moment.stale,
        moment.partial,
        moment.used_absence,
        moment.parts.as_ref().map(json).transpose()?,
    ];
    execute(db, sql, values)?;
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

pub(super) fn read_moment(db: &Connection, id: i64, device: usize, kind: &str) -> Result<Moment> {
    let sql = "SELECT time_ns, tracked_bytes, predates_bytes, untrackable_bytes, uncovered_used_bytes,
            gap_distance_ns, torn_min_bytes, torn_max_bytes, stale, partial, used_absence, parts
        FROM moment WHERE run = ? AND device = ? AND kind = ?";
    let moment = |row: &Row<'_>| {
        Ok(Moment {
            time_ns: unsigned(row, 0)?,
            tracked_bytes: row.get(1)?,
            amounts: read_amounts(db, id, device, kind)?.into(),
            predates_bytes: row.get(2)?,
            untrackable_bytes: row.get(3)?,
            uncovered_used_bytes: maybe_unsigned(row, 4)?,
            gap_distance_ns: row.get(5)?,
            torn: row.get::<_, Option<i64>>(6)?.zip(row.get(7)?),
            stale: row.get(8)?,
            partial: row.get(9)?,
            used_absence: row.get(10)?,
            parts: if row.get_ref(11)?.as_str_or_null()?.is_some() {
                Some(from_json(row, 11)?)
            } else {
                None
            },
        })
    };
    let moment = db.prepare_cached(sql)?.query_row(params![id, device as i64, kind], moment).optional()?;
    moment.ok_or_else(|| damaged(format!("run {id}: device {device} has no {kind} moment")))
}

fn read_amounts(db: &Connection, id: i64, device: usize, kind: &str) -> Result<Vec<(u32, i64)>> {
    let sql = "SELECT cell, bytes FROM amount WHERE run = ? AND device = ? AND moment = ?
        ORDER BY run, device, moment, cell";
    let amount = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?));
    db.prepare_cached(sql)?.query_map(params![id, device as i64, kind], amount)?.collect()
}

/// Rewrites from the first bucket that differs: as a series grows that is the last one stored, after it
/// widened it is the first. Comparing costs a read, and holds also for series that grew otherwise.
pub(super) fn write_buckets(db: &Connection, id: i64, device: usize, buckets: &[Bucket]) -> Result<()> {
    let stored = read_buckets(db, id, device)?;
    let same = stored.iter().zip(buckets).take_while(|(stored, bucket)| stored == bucket).count();
    if same < stored.len() {
        let sql = "DELETE FROM bucket WHERE run = ? AND device = ? AND seq >= ?";
        execute(db, sql, params![id, device as i64, same as i64])?;
    }
    let mut write =
        db.prepare_cached("INSERT INTO bucket VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)")?;
    for (seq, bucket) in buckets.iter().enumerate().skip(same) {
        let [used, tracked, untrackable] = [bucket.used, bucket.tracked, bucket.untrackable]
            .map(|extremes| [extremes.map(|e| e.min), extremes.map(|e| e.max), extremes.map(|e| e.last)]);
        let values = params![
            id,
            device as i64,
            seq as i64,
            bits(bucket.time_ns),
            used[0],
            used[1],
            used[2],
            tracked[0],
            tracked[1],
            tracked[2],
            untrackable[0],
            untrackable[1],
            untrackable[2],
            bucket.samples,
            bucket.doubtful,
        ];
        write.execute(values)?;
    }
    Ok(())
}

pub(super) fn read_buckets(db: &Connection, id: i64, device: usize) -> Result<Vec<Bucket>> {
    let sql = "SELECT time_ns, used_min, used_max, used_last, tracked_min, tracked_max, tracked_last,
            untrackable_min, untrackable_max, untrackable_last, samples, doubtful, seq
        FROM bucket WHERE run = ? AND device = ? ORDER BY run, device, seq";
    let extremes = |row: &Row<'_>, at| -> Result<Option<Extremes>> {
        let Some(min) = row.get(at)? else { return Ok(None) };
        Ok(Some(Extremes { min, max: row.get(at + 1)?, last: row.get(at + 2)? }))
    };
    let bucket = |row: &Row<'_>| {
        let bucket = Bucket {
            time_ns: unsigned(row, 0)?,
            used: extremes(row, 1)?,
            tracked: extremes(row, 4)?,
            untrackable: extremes(row, 7)?,
            samples: row.get(10)?,
            doubtful: row.get(11)?,
        };
        Ok((row.get(12)?, bucket))
    };
    dense("bucket", db.prepare_cached(sql)?.query_map(params![id, device as i64], bucket)?)
}
