//! Stores device details and program data (facts that the program reported) in rows; a checkpoint writes only rows that changed.
//!
//! ```text
//! detail, name       seq                 body
//! rest        0                   JSON of Details without the lists below
//! growth      0                   JSON of Details::growth without its columns
//! columns     0                   Growth::cells, packed (see `packed`)
//! timeline    0, 1, ...           16 points each, packed
//! iterations  0, 1, ...           16 rows each, JSON
//! parameters  0                   JSON of Details::parameters
//! steps       0, 1, ...           16 each, JSON
//! ooms        0, 1, ...           one each, JSON
//!
//! own, name   seq                 body
//! rest        0                   JSON of ProgramData without the lists below
//! counters    0, 1, ...           one each, JSON
//! ranges      0, 1, ...           16 each, JSON
//! spans       0, 1, ...           256 each, JSON
//! ```
//!
//! An empty list has no rows. Stores of schemas 2 and 3 have all lists in the JSON of `rest`.

use super::packed;
use super::tables::{damaged, execute, json};
use gpumem_model::growth::Growth;
use gpumem_model::program_data::{Counter, Range, Span};
use gpumem_model::run::{Details, Iteration, Oom, Parameters, ProgramData, UntrackableChange};
use rusqlite::types::{Value, ValueRef};
use rusqlite::{Connection, Result, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

/// Number of list elements in a row. With few, a new element rewrites little; with many, packing saves more space.
const CHUNK: usize = 16;
/// Number of spans in a row. Once the list is full, each new span shifts all others, so all rows change anyway.
const SPANS: usize = 256;

/// Names of parts (see `parts`) and of rows. The delta log contains the index of a part's name, so the order must not change.
/// `columns` is never the name of a part.
pub(super) const NAMES: [&str; 17] = [
    "run",
    "cells",
    "device",
    "last",
    "peak",
    "series",
    "rest",
    "growth",
    "timeline",
    "iterations",
    "parameters",
    "steps",
    "ooms",
    "counters",
    "ranges",
    "spans",
    "columns",
];

/// Owner of rows: a device of a run; without a device, the run's program data.
#[derive(Debug, Clone, Copy)]
struct Owner {
    run: i64,
    device: Option<i64>,
}

impl Owner {
    /// Inserts the owner's table and condition into a statement. Parameter 1 is the run, parameter 2 the device.
    fn sql(self, sql: &str) -> String {
        let (table, place) = match self.device {
            Some(_) => ("detail", "run = ?1 AND device = ?2"),
            None => ("own", "run = ?1 AND ?2 IS NULL"),
        };
        sql.replace("TABLE", table).replace("PLACE", place)
    }
}

/// Rows of one owner, by name and seq. A row is JSON text, or a packed blob (see `packed`).
pub(super) type Rows = BTreeMap<(&'static str, i64), Value>;

pub(super) fn write(db: &Connection, id: i64, device: usize, details: &Details) -> Result<()> {
    write_rows(db, Owner { run: id, device: Some(device as i64) }, rows(details)?)
}

pub(super) fn write_own(db: &Connection, id: i64, own: &ProgramData) -> Result<()> {
    write_rows(db, Owner { run: id, device: None }, own_rows(own)?)
}

pub(super) fn own_rows(own: &ProgramData) -> Result<Rows> {
    let mut rows = BTreeMap::new();
    if !own.is_empty() {
        let mut rest = own.clone();
        list(&mut rows, "counters", &std::mem::take(&mut rest.counters), 1)?;
        list(&mut rows, "ranges", &std::mem::take(&mut rest.ranges), CHUNK)?;
        list(&mut rows, "spans", &std::mem::take(&mut rest.spans), SPANS)?;
        rows.insert(("rest", 0), Value::Text(json(&rest)?));
    }
    Ok(rows)
}

fn write_rows(db: &Connection, owner: Owner, mut rows: Rows) -> Result<()> {
    let Owner { run, device } = owner;
    let mut gone = Vec::new();
    {
        let mut stored = db.prepare_cached(&owner.sql("SELECT name, seq, body FROM TABLE WHERE PLACE"))?;
        let mut stored = stored.query(params![run, device])?;
        while let Some(row) = stored.next()? {
            let (name, seq) = (row.get_ref(0)?.as_str()?, row.get::<_, i64>(1)?);
            let key = NAMES.iter().find(|known| **known == name).map(|&known| (known, seq));
            match key.and_then(|key| Some((key, rows.get(&key)?))) {
                Some((key, body)) if ValueRef::from(body) == row.get_ref(2)? => drop(rows.remove(&key)),
                Some(_) => {}
                None => gone.push((name.to_owned(), seq)),
            }
        }
    }
    for (name, seq) in gone {
        let sql = owner.sql("DELETE FROM TABLE WHERE PLACE AND name = ?3 AND seq = ?4");
        execute(db, &sql, params![run, device, name, seq])?;
    }
    let mut write = db.prepare_cached(match device {
        Some(_) => {
            "INSERT INTO detail (run, device, name, seq, body) VALUES (?1, ?2, ?3, ?4, ?5)
            ON CONFLICT DO UPDATE SET body = excluded.body"
        }
        None => {
            "INSERT INTO own (run, name, seq, body) SELECT ?1, ?3, ?4, ?5 WHERE ?2 IS NULL
            ON CONFLICT DO UPDATE SET body = excluded.body"
        }
    })?;
    for ((name, seq), body) in rows {
        write.execute(params![run, device, name, seq, body])?;
    }
    Ok(())
}

pub(super) fn rows(details: &Details) -> Result<Rows> {
    let mut rows = BTreeMap::new();
    let mut rest = details.clone();
    let points = std::mem::take(&mut rest.timeline.points);
    for (seq, chunk) in (0..).zip(points.chunks(CHUNK)) {
        rows.insert(("timeline", seq), Value::Blob(packed::pack_points(chunk)));
    }
    let mut growth = std::mem::take(&mut rest.growth);
    let columns = std::mem::take(&mut growth.cells);
    if !columns.is_empty() {
        rows.insert(("columns", 0), Value::Blob(packed::pack_columns(&columns)));
    }
    if growth != Growth::default() {
        rows.insert(("growth", 0), Value::Text(json(&growth)?));
    }
    let parameters = std::mem::take(&mut rest.parameters);
    if parameters != Parameters::default() {
        rows.insert(("parameters", 0), Value::Text(json(&parameters)?));
    }
    list(&mut rows, "iterations", &std::mem::take(&mut rest.iterations.rows), CHUNK)?;
    list(&mut rows, "steps", &std::mem::take(&mut rest.steps), CHUNK)?;
    list(&mut rows, "ooms", &std::mem::take(&mut rest.ooms), 1)?;
    rows.insert(("rest", 0), Value::Text(json(&rest)?));
    Ok(rows)
}

fn list<T: Serialize>(rows: &mut Rows, name: &'static str, elements: &[T], row_length: usize) -> Result<()> {
    for (seq, chunk) in (0..).zip(elements.chunks(row_length)) {
        rows.insert((name, seq), Value::Text(json(&chunk)?));
    }
    Ok(())
}

pub(super) fn read(db: &Connection, id: i64, device: usize) -> Result<Details> {
    Stored::read(db, Owner { run: id, device: Some(device as i64) }, &format!("device {device} of run {id}"))?
        .details()
}

pub(super) fn read_own(db: &Connection, id: i64) -> Result<ProgramData> {
    Stored::read(db, Owner { run: id, device: None }, &format!("run {id} itself"))?.own()
}

/// Rows that were read of one owner (a device of a run, or the data of its program): by their column `name`, in the order of `seq`.
pub(super) struct Stored {
    rows: BTreeMap<String, Vec<Value>>,
    /// Text for messages that names the owner of the rows: `of ...`.
    of: String,
}

impl Stored {
    pub(super) fn new(owner: &str) -> Self {
        Stored { rows: BTreeMap::new(), of: format!("of {owner}") }
    }

    pub(super) fn push(&mut self, name: &str, body: Value) {
        self.rows.entry(name.to_owned()).or_default().push(body);
    }

    pub(super) fn details(mut self) -> Result<Details> {
        let mut details: Details = self.text("rest")?.unwrap_or_default();
        if let Some(growth) = self.text("growth")? {
            details.growth = growth;
        }
        if let Some(parameters) = self.text("parameters")? {
            details.parameters = parameters;
        }
        // In a store of an earlier schema, `rest` has elements of these lists; they are kept.
        details.growth.cells.extend(self.packed("columns", packed::unpack_columns)?);
        details.timeline.points.extend(self.packed("timeline", packed::unpack_points)?);
        details.iterations.rows.extend(self.list::<Iteration>("iterations")?);
        details.steps.extend(self.list::<UntrackableChange>("steps")?);
        details.ooms.extend(self.list::<Oom>("ooms")?);
        Ok(details)
    }

    pub(super) fn own(mut self) -> Result<ProgramData> {
        let mut own: ProgramData = self.text("rest")?.unwrap_or_default();
        own.counters.extend(self.list::<Counter>("counters")?);
        own.ranges.extend(self.list::<Range>("ranges")?);
        own.spans.extend(self.list::<Span>("spans")?);
        Ok(own)
    }

    fn read(db: &Connection, owner: Owner, name: &str) -> Result<Self> {
        let sql = owner.sql("SELECT name, seq, body FROM TABLE WHERE PLACE ORDER BY name, seq");
        let mut statement = db.prepare_cached(&sql)?;
        let mut stored = statement.query(params![owner.run, owner.device])?;
        let Stored { mut rows, of } = Stored::new(name);
        while let Some(row) = stored.next()? {
            let (name, seq) = (row.get::<_, String>(0)?, row.get::<_, i64>(1)?);
            let body = match row.get_ref(2)? {
                ValueRef::Text(text) => Value::Text(String::from_utf8_lossy(text).into_owned()),
                ValueRef::Blob(bytes) => Value::Blob(bytes.to_owned()),
                _ => return Err(damaged(format!("{name} {seq} {of} is neither text nor packed"))),
            };
            let bodies = rows.entry(name.clone()).or_default();
            if bodies.len() as i64 != seq {
                return Err(damaged(format!("{name} {seq} {of} where {} belongs", bodies.len())));
            }
            bodies.push(body);
        }
        Ok(Stored { rows, of })
    }

    fn take<T>(&mut self, name: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Vec<T>> {
        let bodies = self.rows.remove(name).unwrap_or_default();
        let bad = || damaged(format!("{name} {} cannot be read", self.of));
        bodies.iter().map(|body| read(body).ok_or_else(bad)).collect()
    }

    fn text<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>> {
        Ok(self.take(name, from_text)?.pop())
    }

    fn list<T: DeserializeOwned>(&mut self, name: &str) -> Result<Vec<T>> {
        Ok(self.take(name, from_text::<Vec<T>>)?.into_iter().flatten().collect())
    }

    fn packed<T>(&mut self, name: &str, unpack: impl Fn(&[u8]) -> Option<Vec<T>>) -> Result<Vec<T>> {
        let read = |body: &Value| match body {
            Value::Blob(bytes) => unpack(bytes),
            _ => None,
        };
        Ok(self.take(name, read)?.into_iter().flatten().collect())
    }
}

fn from_text<T: DeserializeOwned>(body: &Value) -> Option<T> {
    match body {
        Value::Text(text) => serde_json::from_slice(text.as_bytes()).ok(),
        _ => None,
    }
}
