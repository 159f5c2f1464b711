//! The rows that grow: moments with their amounts, and the buckets of series.

use super::columns::{damaged, execute};
use super::tables;
use gpumem_model::run::Moment;
use gpumem_model::series::Bucket;
use rusqlite::{Connection, Result, Row, params};

pub(super) fn write_moment(
    db: &Connection,
    id: i64,
    device: usize,
    kind: &str,
    moment: &Moment,
) -> Result<()> {
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

pub(super) fn read_moment(db: &Connection, id: i64, device: usize, kind: &str) -> Result<Moment> {
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

/// Rewrites buckets from the first one that differs. That is the last stored one while a series grows, and the first after it was
/// widened. Comparing costs a read, but is correct for any change.
pub(super) fn write_buckets(db: &Connection, id: i64, device: usize, buckets: &[Bucket]) -> Result<()> {
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
