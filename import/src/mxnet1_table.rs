//! Reads the memory rows in the aggregate statistics of MXNet 1.x's profiler (`profiler.dumps()`).
//!
//! ```text
//! Profile Statistics.                                     1.2 to 1.4: kB under headings of time; `Time` is the last value
//! Device Storage
//! Name            Total Count   Time (ms)   Min Time (ms)   Max Time (ms)   Avg Time (ms)
//! Memory: gpu/0           147    200.7040        200.7040      25221.8926      12510.5938
//!
//! Profile Statistics:                                     1.5 and later
//! Name            Total Count   Min Use (kB)   Max Use (kB)   Avg Use (kB)
//!
//! {"Time": {...}, "Memory": {"Device Storage": {"Memory: gpu/0": {"Count", "Min", "Max", "Avg"}}}, "Unit": {...}}
//! ```
//!
//! A kB is 1000 bytes; values were converted to 32-bit floats. The file has no times, so the run shows each device's maximum.
//! MXNet computes `Avg` as (max-min)/2, which is not a mean, and initialises `Min` with 2^31-1. A file may contain the tables of
//! several programs.

use super::feed::{Feed, MAX_BYTES, Piece, ProcessFeed};
use super::lines::{contains, lines};
use gpumem_model::units::{plural, thousands};
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use gpumem_wire::Role;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::Read;

const FORMAT: &str = "mxnet1-table";
const EXAMPLE: &str = "Memory: gpu/0   147   200.7040   25221.8926   12510.5938";
/// Maximum size of the JSON form in bytes; the file is read as a whole.
const MAX_JSON_BYTES: u64 = 8 << 20;
const MAX_TABLES: usize = 256;
/// Maximum number of memory rows that are read from a table.
const MAX_ROWS: usize = 128;
/// A minimum at or above this is MXNet's initial value of about 2 GiB: all real values were greater.
const CAPPED_MIN: u64 = 2_147_483_000;

/// Returns whether a file contains a table or its JSON form.
pub(super) fn looks_like(head: &[u8]) -> bool {
    let has = |needle: &[u8]| contains(head, needle);
    let is_text = has(b"Profile Statistics") && has(b"Total Count");
    is_text || is_json(head) && has(b"\"Memory\"") && has(b"\"kB\"")
}

fn is_json(head: &[u8]) -> bool {
    head.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{')
}

/// A row of the table about one kind of memory; amounts are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    place: String,
    count: u64,
    min: u64,
    max: u64,
    average: u64,
}

impl Row {
    /// Parses a row of text. The name may contain blanks, so the numbers are taken from the right. Rows of MXNet 1.2 have five
    /// numbers, later ones four.
    fn parse(line: &str) -> Option<Row> {
        let mut words: Vec<&str> = line.split_ascii_whitespace().collect();
        let is_number = |word: &&&str| word.parse::<f64>().is_ok();
        let numbers = words.iter().rev().take_while(is_number).count();
        let numbers = words.split_off(words.len() - numbers);
        let (count, rest) = numbers.split_first()?;
        let [min, max, average] = rest.get(rest.len().checked_sub(3)?..)? else { return None };
        if !(3..=4).contains(&rest.len()) {
            return None;
        }
        let bytes = |text: &str| kb_to_bytes(text.parse().ok()?);
        Row::new(&words.join(" "), count.parse().ok()?, bytes(min)?, bytes(max)?, bytes(average)?)
    }

    fn new(name: &str, count: u64, min: u64, max: u64, average: u64) -> Option<Row> {
        let place = name.strip_prefix("Memory:").unwrap_or(name).trim().trim_end_matches('/');
        let row = Row { place: place.chars().take(64).collect(), count, min, max, average };
        (!place.is_empty() && max <= MAX_BYTES).then_some(row)
    }

    fn gpu(&self) -> Option<u8> {
        self.place.strip_prefix("gpu/")?.parse().ok()
    }

    /// Describes the row in words. The average is left out if it is only half the difference of maximum and minimum.
    fn sentence(&self) -> String {
        let Row { place, count, min, max, average } = self;
        let min = match *min >= CAPPED_MIN && *max > CAPPED_MIN {
            true => "no minimum below 2 GiB".to_owned(),
            false => format!("min {}", thousands(*min)),
        };
        let half = max.saturating_sub(self.min) / 2;
        let average = match average.abs_diff(half) <= 2 + max / (1 << 22) {
            true => String::new(),
            false => format!(", average {}", thousands(*average)),
        };
        format!("{place}: max {} bytes, {min}{average}, {}", thousands(*max), plural(*count, "change"))
    }
}

fn kb_to_bytes(kb: f64) -> Option<u64> {
    let bytes = (kb * 1000.0).round();
    (0.0..1e18).contains(&bytes).then_some(bytes as u64)
}

#[derive(Debug, Default)]
struct Table {
    line: u64,
    rows: Vec<Row>,
    /// Rows about pools. The rows of devices include the bytes of the pools.
    pools: Vec<Row>,
}

fn emit_tables(tables: &[Table], feed: &mut Feed<'_>) {
    let (mut gpu_rows, mut host_rows, mut pool_rows) = (Vec::new(), Vec::new(), Vec::new());
    let mut processes = Vec::new();
    for (number, table) in tables.iter().enumerate() {
        let which = if tables.len() > 1 { format!("table {}, ", number + 1) } else { String::new() };
        let mut process = ProcessFeed::new(number as u64);
        let mut is_there = false;
        for row in &table.rows {
            let list = if row.gpu().is_some() { &mut gpu_rows } else { &mut host_rows };
            list.push(format!("{which}{}", row.sentence()));
            if let Some(slot) = row.gpu() {
                feed.time_ns = table.line;
                is_there = true;
                let piece = Piece { estimated: true, ..Piece::new(slot, row.max, 0, Role::Unknown) };
                process.allocate(feed, piece);
            }
        }
        pool_rows.extend(table.pools.iter().map(|row| format!("{which}{}", row.sentence())));
        if is_there {
            processes.push(process);
        }
    }
    if processes.is_empty() {
        processes.push(ProcessFeed::default());
    }
    let only_maximum = "a table of MXNet's profiler has no times and no names: each device's amount is its maximum, without memory that its pool \
                        caches and without the driver's share";
    let rounded = "amounts passed through 32-bit floats: they are exact to one part in 16 million";
    let has_gpus = !gpu_rows.is_empty();
    let [gpus, others, pools] = [gpu_rows, host_rows, pool_rows].map(|rows| rows.join("; "));
    let count = processes.len();
    let several = format!(
        "the file has {count} tables of GPU memory, each read as one process: gpumemctl import stores them all"
    );
    feed.caveats([
        ("only_maximum", has_gpus, only_maximum.to_owned()),
        ("rounded", has_gpus, rounded.to_owned()),
        ("table", has_gpus, gpus),
        ("host_memory", !others.is_empty(), format!("host memory, in no sum: {others}")),
        ("pool_memory", !pools.is_empty(), format!("pools, included in the amounts of devices: {pools}")),
        ("several_processes", count > 1, several),
    ]);
    for mut process in processes {
        process.end(feed);
    }
}

pub(super) fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let path = input.path.clone();
    let mut feed = Feed::without_clock(sink);
    let (tables, read) = match is_json(input.head()) {
        true => (vec![json(input)?], 1),
        false => text(input, &mut feed)?,
    };
    if tables.iter().all(|table| table.rows.is_empty()) {
        return Err(Error::NothingFound { path, format: FORMAT, lines: read, example: EXAMPLE });
    }
    emit_tables(&tables, &mut feed);
    feed.caveat_rejects("row", "line", EXAMPLE);
    Ok(())
}

fn text(input: Input, feed: &mut Feed<'_>) -> Result<(Vec<Table>, u64), Error> {
    let mut tables: Vec<Table> = Vec::new();
    let mut section = String::new();
    let mut previous = String::new();
    let mut dropped = 0_u64;
    let read = lines(input, feed, |feed, number, line| {
        let line = line.trim();
        if line.starts_with("Profile Statistics") {
            tables.push(Table { line: number, ..Table::default() });
            section.clear();
        }
        if line.starts_with("====") {
            section.clone_from(&previous);
        }
        let is_pool = section == "Pool Memory" && Row::parse(line).is_some();
        if is_pool || line.starts_with("Memory:") {
            if tables.is_empty() {
                tables.push(Table { line: number, ..Table::default() });
            }
            let count = tables.len();
            let Some(table) = tables.last_mut() else { return };
            let list = if is_pool { &mut table.pools } else { &mut table.rows };
            match Row::parse(line) {
                Some(_) if list.len() >= MAX_ROWS || count > MAX_TABLES => dropped += 1,
                Some(row) => list.push(row),
                None => feed.reject(number),
            }
        }
        tables.truncate(MAX_TABLES);
        if line.len() < 64 {
            line.clone_into(&mut previous);
        }
    })?;
    let rows = plural(dropped, "row");
    let text = format!("{rows} of more than {MAX_TABLES} tables or {MAX_ROWS} rows were not read");
    feed.caveats([("many_tables", dropped > 0, text)]);
    Ok((tables, read))
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    memory: BTreeMap<String, BTreeMap<String, Stats>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Stats {
    count: u64,
    min: f64,
    max: f64,
    avg: f64,
}

fn json(input: Input) -> Result<Table, Error> {
    let path = input.path.clone();
    let mut bytes = Vec::new();
    let read = input.into_reader().take(MAX_JSON_BYTES).read_to_end(&mut bytes);
    read.map_err(|source| Error::Read { path: path.clone(), offset: 0, source })?;
    let wrong = |what: String| Error::Unsuitable {
        path: path.clone(),
        what: format!("is no JSON table of MXNet's profiler: {what}"),
    };
    let document: Document = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    let mut table = Table { line: 1, ..Table::default() };
    for (section, rows) in document.memory {
        let list = if section == "Pool Memory" { &mut table.pools } else { &mut table.rows };
        for (name, Stats { count, min, max, avg }) in rows.into_iter().take(MAX_ROWS) {
            let amounts = kb_to_bytes(min).zip(kb_to_bytes(max)).zip(kb_to_bytes(avg));
            let row = amounts.and_then(|((min, max), average)| Row::new(&name, count, min, max, average));
            list.push(row.ok_or_else(|| wrong(format!("{name:?} has no possible amounts")))?);
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_both_dialects() {
        let row = |place: &str, count, min, max, average| {
            Some(Row { place: place.into(), count, min, max, average })
        };
        assert_eq!(
            Row::parse("Memory: gpu/0      147    200.7040   200.7040   25221.8926   12510.5938"),
            row("gpu/0", 147, 200_704, 25_221_893, 12_510_594)
        );
        assert_eq!(
            Row::parse("Memory: cpu pinned/  2  0.0000  8.0000  4.0000"),
            row("cpu pinned", 2, 0, 8000, 4000)
        );
        for bad in [
            "Memory: gpu/0",
            "Memory: gpu/0 1 2 3",
            "Memory: gpu/0 1 -2 3 4",
            "Memory: gpu/0 1 2 inf 4",
            "1 2 3 4",
        ] {
            assert_eq!(Row::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_the_statistics_hide_is_told() {
        let sentence =
            |min, max, average| Row { place: "gpu/0".into(), count: 3, min, max, average }.sentence();
        assert_eq!(sentence(0, 4000, 2000), "gpu/0: max 4,000 bytes, min 0, 3 changes");
        assert!(sentence(0, 4000, 3000).contains("average 3,000"));
        assert!(sentence(2_147_483_647, 5_000_000_000, 0).contains("no minimum below 2 GiB"));
    }
}
