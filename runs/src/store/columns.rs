//! Column values that SQLite has no type for: u64, JSON, enum names, and lists without gaps.

use gpumem_model::run::{Clock, State};
use rusqlite::types::Type;
use rusqlite::{Connection, Error, Params, Result, Row};
use serde::{Serialize, de::DeserializeOwned};
use std::time::{SystemTime, UNIX_EPOCH};

/// Runs a statement, prepared once for each connection; returns the number of changed rows.
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
    let text = row.get_ref(at)?.as_str()?;
    serde_json::from_str(text).map_err(|error| Error::FromSqlConversionFailure(at, Type::Text, error.into()))
}

/// Collects rows of (index, value), sorted by index, into a list; the indexes must be 0, 1, 2, ...
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

/// Returns the time in seconds since 1970.
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
