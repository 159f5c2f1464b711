//! Stores device details and program data in rows; a checkpoint writes only the rows that differ.
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
//! The rows of a list give its length; an empty list has no rows. Runs of schemas 2 and 3 have everything in `rest`.

use super::packed;
use super::tables::{damaged, execute, json};
use gpumem_model::growth::Growth;
use gpumem_model::program_data::{Counter, Range, Span};
use gpumem_model::run::{Details, Iteration, Oom, Parameters, ProgramData, UntrackableChange};
use rusqlite::types::{ToSql, ToSqlOutput, ValueRef};
use rusqlite::{Connection, Result, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

/// Number of elements in a row. A list that grows at its end changes one row; the first element of a packed row takes most space.
const CHUNK: usize = 16;
/// Number of single ranges in a row. Once the list is full, each new range shifts all others.
const SPANS: usize = 256;

/// Names of parts and of rows of details; files contain the index. `columns` is a row only.
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

/// Owner of the rows: a device or a run's program data.
#[derive(Debug, Clone, Copy)]
enum Of {
    Device(i64, i64),
    Run(i64),
}

impl Of {
    /// Inserts table and condition into a statement; the condition uses parameters 1 and 2.
    fn sql(self, sql: &str) -> String {
        match self {
            Of::Device(..) => sql.replace("TABLE", "detail").replace("PLACE", "run = ?1 AND device = ?2"),
            Of::Run(_) => sql.replace("TABLE", "own").replace("PLACE", "run = ?1 AND ?2 IS NULL"),
        }
    }

    fn place(self) -> (i64, Option<i64>) {
        match self {
            Of::Device(run, device) => (run, Some(device)),
            Of::Run(run) => (run, None),
        }
    }
}

/// Rows of one owner, by name and seq.
pub(super) type Rows = BTreeMap<(&'static str, i64), Body>;

pub(super) enum Body {
    Text(String),
    Packed(Vec<u8>),
}

impl Body {
    fn is(&self, stored: ValueRef<'_>) -> bool {
        match (self, stored) {
            (Body::Text(text), ValueRef::Text(stored)) => text.as_bytes() == stored,
            (Body::Packed(bytes), ValueRef::Blob(stored)) => bytes == stored,
            _ => false,
        }
    }
}

impl ToSql for Body {
    fn to_sql(&self) -> Result<ToSqlOutput<'_>> {
        match self {
            Body::Text(text) => text.to_sql(),
            Body::Packed(bytes) => bytes.to_sql(),
        }
    }
}

pub(super) fn write(db: &Connection, id: i64, device: usize, details: &Details) -> Result<()> {
    write_rows(db, Of::Device(id, device as i64), rows(details)?)
}

pub(super) fn write_own(db: &Connection, id: i64, own: &ProgramData) -> Result<()> {
    write_rows(db, Of::Run(id), own_rows(own)?)
}

/// Returns all rows of program data.
pub(super) fn own_rows(own: &ProgramData) -> Result<Rows> {
    let mut rows = BTreeMap::new();
    if !own.is_empty() {
        let mut rest = own.clone();
        list(&mut rows, "counters", &std::mem::take(&mut rest.counters), 1)?;
        list(&mut rows, "ranges", &std::mem::take(&mut rest.ranges), CHUNK)?;
        list(&mut rows, "spans", &std::mem::take(&mut rest.spans), SPANS)?;
        rows.insert(("rest", 0), Body::Text(json(&rest)?));
    }
    Ok(rows)
}

fn write_rows(db: &Connection, of: Of, mut rows: Rows) -> Result<()> {
    let (run, device) = of.place();
    let mut gone = Vec::new();
    {
        let mut stored = db.prepare_cached(&of.sql("SELECT name, seq, body FROM TABLE WHERE PLACE"))?;
        let mut stored = stored.query(params![run, device])?;
        while let Some(row) = stored.next()? {
            let (name, seq) = (row.get_ref(0)?.as_str()?, row.get::<_, i64>(1)?);
            let key = NAMES.iter().find(|known| **known == name).map(|&known| (known, seq));
            match key.and_then(|key| Some((key, rows.get(&key)?))) {
                Some((key, body)) if body.is(row.get_ref(2)?) => drop(rows.remove(&key)),
                Some(_) => {}
                None => gone.push((name.to_owned(), seq)),
            }
        }
    }
    for (name, seq) in gone {
        let sql = of.sql("DELETE FROM TABLE WHERE PLACE AND name = ?3 AND seq = ?4");
        execute(db, &sql, params![run, device, name, seq])?;
    }
    let mut write = db.prepare_cached(match of {
        Of::Device(..) => {
            "INSERT INTO detail (run, device, name, seq, body) VALUES (?1, ?2, ?3, ?4, ?5)
            ON CONFLICT DO UPDATE SET body = excluded.body"
        }
        Of::Run(_) => {
            "INSERT INTO own (run, name, seq, body) SELECT ?1, ?3, ?4, ?5 WHERE ?2 IS NULL
            ON CONFLICT DO UPDATE SET body = excluded.body"
        }
    })?;
    for ((name, seq), body) in rows {
        write.execute(params![run, device, name, seq, body])?;
    }
    Ok(())
}

/// Returns all rows of a device's details.
pub(super) fn rows(details: &Details) -> Result<Rows> {
    let mut rows = BTreeMap::new();
    let mut rest = details.clone();
    let points = std::mem::take(&mut rest.timeline.points);
    for (seq, chunk) in (0..).zip(points.chunks(CHUNK)) {
        rows.insert(("timeline", seq), Body::Packed(packed::pack_points(chunk)));
    }
    let mut growth = std::mem::take(&mut rest.growth);
    let columns = std::mem::take(&mut growth.cells);
    if !columns.is_empty() {
        rows.insert(("columns", 0), Body::Packed(packed::pack_columns(&columns)));
    }
    if growth != Growth::default() {
        rows.insert(("growth", 0), Body::Text(json(&growth)?));
    }
    let parameters = std::mem::take(&mut rest.parameters);
    if parameters != Parameters::default() {
        rows.insert(("parameters", 0), Body::Text(json(&parameters)?));
    }
    list(&mut rows, "iterations", &std::mem::take(&mut rest.iterations.rows), CHUNK)?;
    list(&mut rows, "steps", &std::mem::take(&mut rest.steps), CHUNK)?;
    list(&mut rows, "ooms", &std::mem::take(&mut rest.ooms), 1)?;
    rows.insert(("rest", 0), Body::Text(json(&rest)?));
    Ok(rows)
}

fn list<T: Serialize>(rows: &mut Rows, name: &'static str, elements: &[T], in_a_row: usize) -> Result<()> {
    for (seq, chunk) in (0..).zip(elements.chunks(in_a_row)) {
        rows.insert((name, seq), Body::Text(json(&chunk)?));
    }
    Ok(())
}

pub(super) fn read(db: &Connection, id: i64, device: usize) -> Result<Details> {
    Stored::read(db, Of::Device(id, device as i64), &format!("device {device} of run {id}"))?.details()
}

pub(super) fn read_own(db: &Connection, id: i64) -> Result<ProgramData> {
    Stored::read(db, Of::Run(id), &format!("run {id} itself"))?.own()
}

/// Rows of one owner by name, and a description of the owner for messages.
pub(super) struct Stored {
    rows: BTreeMap<String, Vec<Body>>,
    of: String,
}

impl Stored {
    pub(super) fn new(of: &str) -> Self {
        Stored { rows: BTreeMap::new(), of: format!("of {of}") }
    }

    /// Appends the next row of a name.
    pub(super) fn push(&mut self, name: &str, body: Body) {
        self.rows.entry(name.to_owned()).or_default().push(body);
    }

    /// Returns the device details in the rows.
    pub(super) fn details(mut self) -> Result<Details> {
        let mut details: Details = self.text("rest")?.unwrap_or_default();
        if let Some(growth) = self.text("growth")? {
            details.growth = growth;
        }
        if let Some(parameters) = self.text("parameters")? {
            details.parameters = parameters;
        }
        // Lists that an earlier schema stored in `rest` are kept.
        details.growth.cells.extend(self.packed("columns", packed::unpack_columns)?);
        details.timeline.points.extend(self.packed("timeline", packed::unpack_points)?);
        details.iterations.rows.extend(self.list::<Iteration>("iterations")?);
        details.steps.extend(self.list::<UntrackableChange>("steps")?);
        details.ooms.extend(self.list::<Oom>("ooms")?);
        Ok(details)
    }

    /// Returns the program data in the rows.
    pub(super) fn own(mut self) -> Result<ProgramData> {
        let mut own: ProgramData = self.text("rest")?.unwrap_or_default();
        own.counters.extend(self.list::<Counter>("counters")?);
        own.ranges.extend(self.list::<Range>("ranges")?);
        own.spans.extend(self.list::<Span>("spans")?);
        Ok(own)
    }

    fn read(db: &Connection, place: Of, of: &str) -> Result<Self> {
        let sql = place.sql("SELECT name, seq, body FROM TABLE WHERE PLACE ORDER BY name, seq");
        let mut statement = db.prepare_cached(&sql)?;
        let (run, device) = place.place();
        let mut stored = statement.query(params![run, device])?;
        let Stored { mut rows, of } = Stored::new(of);
        while let Some(row) = stored.next()? {
            let (name, seq) = (row.get::<_, String>(0)?, row.get::<_, i64>(1)?);
            let body = match row.get_ref(2)? {
                ValueRef::Text(text) => Body::Text(String::from_utf8_lossy(text).into_owned()),
                ValueRef::Blob(bytes) => Body::Packed(bytes.to_owned()),
                _ => return Err(damaged(format!("{name} {seq} {of} is neither text nor packed"))),
            };
            let of_name = rows.entry(name.clone()).or_default();
            if of_name.len() as i64 != seq {
                return Err(damaged(format!("{name} {seq} {of} where {} belongs", of_name.len())));
            }
            of_name.push(body);
        }
        Ok(Stored { rows, of })
    }

    fn take<T>(&mut self, name: &str, read: impl Fn(&Body) -> Option<T>) -> Result<Vec<T>> {
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
        let read = |body: &Body| match body {
            Body::Packed(bytes) => unpack(bytes),
            Body::Text(_) => None,
        };
        Ok(self.take(name, read)?.into_iter().flatten().collect())
    }
}

fn from_text<T: DeserializeOwned>(body: &Body) -> Option<T> {
    match body {
        Body::Text(text) => serde_json::from_str(text).ok(),
        Body::Packed(_) => None,
    }
}
