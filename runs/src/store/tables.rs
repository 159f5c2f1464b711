//! Maps values to rows of tables: one list of columns for each table serves both writing and reading. Also converts values for
//! which SQLite has no type: u64, JSON, and names of enum variants.

use gpumem_model::names::Named;
use gpumem_model::run::{
    Cell, Class, Clock, Device, DeviceReading, Moment, SideMemory, State, UntrackableParts,
};
use gpumem_model::series::{Bucket, Extremes};
use rusqlite::types::{ToSql, ToSqlOutput, Type, Value};
use rusqlite::{
    CachedStatement, Connection, Error, OptionalExtension, Params, Result, Row, params_from_iter,
};
use serde::{Serialize, de::DeserializeOwned};
use std::time::{SystemTime, UNIX_EPOCH};

/// A type whose values are stored in one or several adjacent columns.
pub(super) trait Column: Sized {
    /// Appends the values of the columns of `Self`.
    fn put<'a>(&'a self, out: &mut Vec<ToSqlOutput<'a>>) -> Result<()>;
    /// Reads the columns of `Self`, of which the first is column `at` of the row.
    fn take(row: &Row<'_>, at: usize) -> Result<Self>;
}

/// A type whose values are the rows of a table.
pub(super) trait Table: Default {
    const NAME: &'static str;
    /// Columns of the primary key. If the rows are a list, the last column is the index in the list.
    const KEY: &'static [&'static str];
    const COLUMNS: &'static [&'static str];
    /// Appends the values of the columns.
    fn put<'a>(&'a self, out: &mut Vec<ToSqlOutput<'a>>) -> Result<()>;
    /// Reads a row that starts with the columns.
    fn take(row: &Row<'_>) -> Result<Self>;
}

/// Declares the columns of a table and the fields stored in them. A field without a column is not stored, which the store's
/// round-trip test detects.
macro_rules! columns {
    ($value:ty: $table:literal ($($key:literal),+) { $( $($column:literal),+ => $($field:ident).+; )* }) => {
        impl Table for $value {
            const NAME: &'static str = $table;
            const KEY: &'static [&'static str] = &[$($key),+];
            const COLUMNS: &'static [&'static str] = &[$($($column),+),*];

            fn put<'a>(&'a self, out: &mut Vec<ToSqlOutput<'a>>) -> Result<()> {
                $( Column::put(&self.$($field).+, out)?; )*
                Ok(())
            }

            fn take(row: &Row<'_>) -> Result<Self> {
                let mut value = Self::default();
                let mut at = 0;
                $(
                    value.$($field).+ = Column::take(row, at)?;
                    at += [$($column),+].len();
                )*
                debug_assert_eq!(at, Self::COLUMNS.len());
                Ok(value)
            }
        }
    };
}

columns!(Cell: "cell" ("run", "idx") {
    "class"     => class;
    "tag"       => tag;
    "origin"    => origin;
    "role"      => role;
    "phase"     => phase;
    "library"   => library;
    "pool"      => pool;
    "pending"   => pending;
    "inherited" => inherited;
});

// Moments, buckets and details of a device are in other tables.
columns!(Device: "device" ("run", "idx") {
    "name"                            => name;
    "ordinal"                         => ordinal;
    "model"                           => model;
    "total_bytes"                     => total_bytes;
    "peak_used_bytes", "peak_used_ns" => peak_used;
    "unaccounted_bytes"               => unaccounted_bytes;
    "series_width_ns"                 => series.width_ns;
    "beside"                          => beside;
    "reading"                         => reading;
    "tenants"                         => tenants;
    "other_tenants"                   => other_tenants;
});

// The amounts of a moment are in another table.
columns!(Moment: "moment" ("run", "device", "kind") {
    "time_ns"                          => time_ns;
    "tracked_bytes"                    => tracked_bytes;
    "predates_bytes"                   => predates_bytes;
    "untrackable_bytes"                => untrackable_bytes;
    "uncovered_used_bytes"             => uncovered_used_bytes;
    "gap_distance_ns"                  => gap_distance_ns;
    "torn_min_bytes", "torn_max_bytes" => torn;
    "stale"                            => stale;
    "partial"                          => partial;
    "used_absence"                     => used_absence;
    "parts"                            => parts;
});

columns!(Bucket: "bucket" ("run", "device", "seq") {
    "time_ns"                                                   => time_ns;
    "used_min", "used_max", "used_last"                         => used;
    "tracked_min", "tracked_max", "tracked_last"                => tracked;
    "untrackable_min", "untrackable_max", "untrackable_last"    => untrackable;
    "samples"                                                   => samples;
    "doubtful"                                                  => doubtful;
});

/// Returns a statement that inserts a row.
pub(super) fn insert<T: Table>(db: &Connection) -> Result<CachedStatement<'_>> {
    db.prepare_cached(&insert_sql::<T>())
}

/// Returns a statement that inserts a row or updates the columns of the existing row. REPLACE would also delete all rows that
/// refer to the row.
pub(super) fn upsert<T: Table>(db: &Connection) -> Result<CachedStatement<'_>> {
    let changed: Vec<String> = T::COLUMNS.iter().map(|name| format!("{name} = excluded.{name}")).collect();
    db.prepare_cached(&format!("{} ON CONFLICT DO UPDATE SET {}", insert_sql::<T>(), changed.join(", ")))
}

fn insert_sql<T: Table>() -> String {
    let names = [T::KEY, T::COLUMNS].concat();
    let marks = vec!["?"; names.len()].join(", ");
    format!("INSERT INTO {} ({}) VALUES ({marks})", T::NAME, names.join(", "))
}

pub(super) fn write<T: Table>(
    statement: &mut CachedStatement<'_>,
    key: &[&dyn ToSql],
    value: &T,
) -> Result<()> {
    let mut values = key.iter().map(|value| value.to_sql()).collect::<Result<Vec<_>>>()?;
    value.put(&mut values)?;
    statement.execute(params_from_iter(values))?;
    Ok(())
}

/// Reads the rows whose key begins with `key`, sorted by the rest of the key.
pub(super) fn read_list<T: Table>(db: &Connection, key: &[&dyn ToSql]) -> Result<Vec<T>> {
    let (columns, keys) = (T::COLUMNS.join(", "), T::KEY.join(", "));
    let [.., index] = T::KEY else { return Err(damaged(format!("{} has no key", T::NAME))) };
    let sql = format!(
        "SELECT {columns}, {index} FROM {} WHERE {} ORDER BY {keys}",
        T::NAME,
        key_condition::<T>(key.len())
    );
    let row = |row: &Row<'_>| Ok((row.get(T::COLUMNS.len())?, T::take(row)?));
    dense(T::NAME, db.prepare_cached(&sql)?.query_map(key, row)?)
}

pub(super) fn read_one<T: Table>(db: &Connection, key: &[&dyn ToSql]) -> Result<Option<T>> {
    let sql =
        format!("SELECT {} FROM {} WHERE {}", T::COLUMNS.join(", "), T::NAME, key_condition::<T>(key.len()));
    db.prepare_cached(&sql)?.query_row(key, T::take).optional()
}

/// Returns the condition that the first `count` columns of the key are equal to parameters.
fn key_condition<T: Table>(count: usize) -> String {
    T::KEY.iter().take(count).map(|name| format!("{name} = ?")).collect::<Vec<_>>().join(" AND ")
}

fn owned<'a>(value: impl Into<Value>) -> ToSqlOutput<'a> {
    ToSqlOutput::Owned(value.into())
}

/// Implements [`Column`] for types, with the values that it writes, and the expression that reads them from column `at` on.
macro_rules! column {
    ($($type:ty),+; |$value:ident| $put:expr; |$row:ident, $at:ident| $take:expr) => { $( impl Column for $type {
        fn put<'a>(&'a self, out: &mut Vec<ToSqlOutput<'a>>) -> Result<()> {
            let $value = self;
            out.extend($put);
            Ok(())
        }

        fn take($row: &Row<'_>, $at: usize) -> Result<Self> {
            $take
        }
    } )+ };
}
// Types that SQLite supports.
column!(bool, u16, u32, i64, String, Option<String>, Option<i64>; |value| [value.to_sql()?]; |row, at| row.get(at));
column!(u64; |value| [owned(bits(*value))]; |row, at| unsigned(row, at));
column!(Option<u64>; |value| [owned(value.map(bits))]; |row, at| maybe_unsigned(row, at));
// Types stored as JSON; those in the second group as JSON or NULL.
column!(SideMemory, Vec<(u32, Option<u64>)>, (u32, u64); |value| [owned(json(value)?)]; |row, at| from_json(row, at));
column!(Option<DeviceReading>, Option<UntrackableParts>;
    |value| [owned(value.as_ref().map(json).transpose()?)];
    |row, at| row.get_ref(at)?.as_str_or_null()?.is_some().then(|| from_json(row, at)).transpose());
column!(Class; |value| [value.name_or_unknown().into()]; |row, at| {
    let name = row.get_ref(at)?.as_str()?;
    Class::from_name(name).ok_or_else(|| damaged(format!("a class {name:?}")))
});
// Types stored in several columns.
column!(Option<(u64, u64)>;
    |value| [value.map(|(first, _)| bits(first)), value.map(|(_, second)| bits(second))].map(owned);
    |row, at| Ok(maybe_unsigned(row, at)?.zip(maybe_unsigned(row, at + 1)?)));
column!(Option<(i64, i64)>;
    |value| [value.map(|(first, _)| first), value.map(|(_, second)| second)].map(owned);
    |row, at| Ok(row.get::<_, Option<i64>>(at)?.zip(row.get(at + 1)?)));
column!(Option<Extremes>;
|value| [value.map(|of| of.min), value.map(|of| of.max), value.map(|of| of.last)].map(owned);
|row, at| match row.get(at)? {
    Some(min) => Ok(Some(Extremes { min, max: row.get(at + 1)?, last: row.get(at + 2)? })),
    None => Ok(None),
});

/// Runs a statement and returns the number of changed rows. The connection keeps the prepared statement.
pub(super) fn execute(db: &Connection, sql: &str, params: impl Params) -> Result<usize> {
    db.prepare_cached(sql)?.execute(params)
}

/// Returns an error that [`StoreError`](super::StoreError) maps to damage.
pub(super) fn damaged(what: String) -> Error {
    Error::FromSqlConversionFailure(0, Type::Null, what.into())
}

/// Converts a u64 to SQLite's integer with the same 64 bits.
pub(super) fn bits(value: u64) -> i64 {
    value.cast_signed()
}

pub(super) fn unsigned(row: &Row<'_>, at: usize) -> Result<u64> {
    Ok(row.get::<_, i64>(at)?.cast_unsigned())
}

pub(super) fn maybe_unsigned(row: &Row<'_>, at: usize) -> Result<Option<u64>> {
    Ok(row.get::<_, Option<i64>>(at)?.map(i64::cast_unsigned))
}

pub(super) fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::ToSqlConversionFailure(error.into()))
}

pub(super) fn from_json<T: DeserializeOwned>(row: &Row<'_>, at: usize) -> Result<T> {
    let text = row.get_ref(at)?.as_str()?.as_bytes(); // like all other JSON of runs, so that the parser is compiled once
    serde_json::from_slice(text)
        .map_err(|error| Error::FromSqlConversionFailure(at, Type::Text, error.into()))
}

/// Collects rows (index, value) that are sorted by index into a list. Fails unless the indexes are 0, 1, 2, ...
pub(super) fn dense<T>(what: &str, rows: impl Iterator<Item = Result<(i64, T)>>) -> Result<Vec<T>> {
    let checked = rows.zip(0..).map(|(row, expected)| match row? {
        (idx, value) if idx == expected => Ok(value),
        (idx, _) => Err(damaged(format!("{what} {idx} where {expected} belongs"))),
    });
    checked.collect()
}

/// Reads the clock from the columns clock, wall_offset_ns.
pub(super) fn clock(row: &Row<'_>, at: usize) -> Result<Clock> {
    match row.get_ref(at)?.as_str()? {
        "monotonic" => Ok(Clock::Monotonic { wall_offset_ns: row.get(at + 1)? }),
        "lines" => Ok(Clock::Lines),
        other => Err(damaged(format!("a clock {other:?}"))),
    }
}

pub(super) fn now_s() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().cast_signed())
}

/// Reads the state from the columns state, closed_ns, closed_status, rolled_ns.
pub(super) fn state(row: &Row<'_>, at: usize) -> Result<State> {
    if let Some(time_ns) = maybe_unsigned(row, at + 3)? {
        return Ok(State::Rolled { time_ns });
    }
    match row.get_ref(at)?.as_str()? {
        "open" => Ok(State::Open),
        "closed" => {
            Ok(State::Closed { time_ns: unsigned(row, at + 1)?, status: maybe_unsigned(row, at + 2)? })
        }
        "interrupted" => Ok(State::Interrupted),
        other => Err(damaged(format!("a state {other:?}"))),
    }
}
