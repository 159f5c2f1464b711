//! `gpumemctl report --counters`: counters and ranges that the program reported itself, with the ranges' number and duration.

use super::Report;
use super::table::{Table, shorten};
use crate::encode::object;
use crate::labels::label_with_pid;
use crate::lines::{clean_name, listed};
use gpumem_model::escape::escape;
use gpumem_model::program_data::{Counter, LOST, ProgramData, Range};
use gpumem_model::run::{Clock, Run};
use gpumem_model::units::{plural, thousands};
use serde::Serialize;

/// Maximum width of a name in a table, in columns of the terminal; longer paths keep their end.
const WIDTH: usize = 60;
/// Maximum width of a name in the report's line, in columns. `NAMED` is the maximum number of names in that line.
const SHORT: usize = 24;
const NAMED: usize = 4;
const NOTHING: &str = "the program reported no counter, step or range: call gpumem_counter_set or gpumem_step; \
                       gpumem_configure(\"ranges\", \"on\") records the times of scopes";

/// Returns counters and ranges as two tables.
pub fn text(report: &Report<'_>) -> String {
    let (run, own) = (report.run, &report.run.own);
    let mut out = format!("{}\n", escape(&label_with_pid(run)));
    if own.is_empty() {
        return out + NOTHING + "\n";
    }
    if !own.counters.is_empty() {
        out += &counters(own);
    }
    if !own.ranges.is_empty() {
        out += if own.counters.is_empty() { "" } else { "\n" };
        out += &ranges(own, run.clock);
    }
    remarks(own).iter().for_each(|line| out += &format!("{line}\n"));
    out
}

fn counters(own: &ProgramData) -> String {
    let mut table = Table::of_numbers(1, 6);
    table.row(["counter", "now", "changes", "min", "max", "mean"]);
    for counter in &own.counters {
        table.row([shorten(&name_of(counter), WIDTH, true)].into_iter().chain(figures(counter)));
    }
    table.text()
}

fn ranges(own: &ProgramData, clock: Clock) -> String {
    let mut table = Table::of_numbers(1, 7);
    table.row(["range (with nested)", "count", "total", "min", "max", "mean", "open"]);
    for range in by_total(own) {
        let lengths = lengths(range, clock).map(|length| length.unwrap_or("-".to_owned()));
        let begin = [shorten(&title_of(range), WIDTH, true), thousands(range.count)];
        table.row(begin.into_iter().chain(lengths).chain([thousands(range.open)]));
    }
    table.text()
}

/// Returns remarks about counters and ranges that were dropped or lost.
pub(super) fn remarks(own: &ProgramData) -> Vec<String> {
    let of = |count: u64, what: &str, why: &str| (count > 0).then(|| plural(count, what) + why);
    let lines = [
        of(own.counters_dropped, "change", " of further counters were dropped: there are too many"),
        of(own.ranges_dropped, "range", " of further names were dropped: there are too many"),
        of(own.ranges_broken, "range", " without begin or end: records were lost"),
        of(own.spans_dropped, "earlier range", " only counted: a trace has only the latest ones"),
    ];
    lines.into_iter().flatten().collect()
}

pub(super) fn by_total(own: &ProgramData) -> Vec<&Range> {
    let mut ranges: Vec<&Range> = own.ranges.iter().collect();
    ranges.sort_by(|a, b| b.total_ns.cmp(&a.total_ns).then_with(|| a.title().cmp(b.title())));
    ranges
}

pub(super) fn name_of(counter: &Counter) -> String {
    counter.name.as_deref().map_or_else(|| LOST.to_owned(), clean_name)
}

pub(super) fn title_of(range: &Range) -> String {
    if range.is_step { range.title().to_owned() } else { clean_name(range.title()) }
}

/// Returns the mean value of a counter with one decimal digit.
fn mean(counter: &Counter) -> String {
    let tenths = (counter.mean() * 10.0).round() as i64;
    let sign = if tenths < 0 { "-" } else { "" };
    format!("{sign}{}.{}", thousands(tenths.unsigned_abs() / 10), tenths.unsigned_abs() % 10)
}

/// Returns the counter's current value, number of changes, lowest, highest and mean value as texts.
pub(super) fn figures(counter: &Counter) -> [String; 5] {
    let [value, min, max] = [counter.value, counter.min, counter.max].map(thousands);
    [value, thousands(counter.changes), min, max, mean(counter)]
}

/// Returns total, shortest, longest and mean duration as printed; `None` before the first range has ended.
pub(super) fn lengths(range: &Range, clock: Clock) -> [Option<String>; 4] {
    let lengths = [range.total_ns, range.min_ns, range.max_ns, range.mean_ns().unwrap_or(0)];
    lengths.map(|ns| (range.count > 0).then(|| clock.distance(ns)))
}

/// Returns a line for the report such as `counters: batch 32, scale 65,536, 3 more; ranges: 12 names`. `None` if there are no
/// counters and ranges.
pub(super) fn line(run: &Run) -> Option<String> {
    let own = &run.own;
    let counters = own.counters.iter();
    let counters = counters
        .map(|counter| format!("{} = {}", shorten(&name_of(counter), SHORT, true), thousands(counter.value)));
    let scopes = own.ranges.iter().filter(|range| !range.is_step).count() as u64;
    let parts = [
        (!own.counters.is_empty()).then(|| format!("counters: {}", listed(counters, NAMED))),
        (scopes > 0).then(|| format!("ranges: {}", plural(scopes, "name"))),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| format!("{} (--counters)", parts.join("; ")))
}

/// Returns the JSON fields for counters and ranges.
pub(super) fn fields(own: &ProgramData) -> impl Serialize {
    let counters = own.counters.iter().map(|counter| {
        object! {
            name: &counter.name,
            value: counter.value,
            changes: counter.changes,
            min: counter.min,
            max: counter.max,
            mean: counter.mean(),
            since_ns: counter.since_ns,
            until_ns: counter.until_ns,
            points: &counter.points,
        }
    });
    let ranges = own.ranges.iter().map(|range| {
        object! {
            name: &range.name,
            is_step: range.is_step,
            count: range.count,
            total_ns: range.total_ns,
            min_ns: (range.count > 0).then_some(range.min_ns),
            max_ns: (range.count > 0).then_some(range.max_ns),
            mean_ns: range.mean_ns(),
            open: range.open,
        }
    });
    object! {
        counters: counters.collect::<Vec<_>>(),
        counters_dropped: own.counters_dropped,
        ranges: ranges.collect::<Vec<_>>(),
        ranges_dropped: own.ranges_dropped,
        ranges_broken: own.ranges_broken,
        snapshot: own.snapshot,
    }
}

/// Returns counters and ranges as a JSON document, with the same fields as in the report.
pub fn json(report: &Report<'_>) -> String {
    gpumem_model::escape::json(&object! {
        schema: "gpumem.counters",
        version: 1,
        run: report.id.as_deref(),
        pid: report.run.process.pid,
        #[serde(flatten)]
        own: fields(&report.run.own),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> ProgramData {
        let counter = |name: &str, value: i64| Counter {
            name: Some(name.into()),
            value,
            changes: 3,
            min: -8,
            max: 70_000,
            area: 123_450,
            since_ns: 0,
            until_ns: 10_000,
            points: Vec::new(),
        };
        let range = |name: &str, count: u64, total_ns: u64| Range {
            name: Some(name.into()),
            count,
            total_ns,
            min_ns: total_ns / 4,
            max_ns: total_ns / 2,
            open: 1,
            ..Range::default()
        };
        ProgramData {
            counters: vec![counter("batch", 32), counter("evil\u{1b}[2J", -1), Counter::default()],
            counters_dropped: 1,
            ranges: vec![
                range("load", 2, 3_000_000),
                range("load/\u{202e}", 3, 9_000_000),
                range("never", 0, 0),
            ],
            ranges_broken: 1234,
            ..ProgramData::default()
        }
    }

    #[test]
    fn tables_have_a_row_each_and_say_what_they_lack() {
        let own = own();
        assert_eq!(
            counters(&own),
            "\
counter              now  changes  min     max  mean
batch                 32        3   -8  70,000  12.3
evil\\u{1b}[2J         -1        3   -8  70,000  12.3
(its name was lost)    0        0    0       0   0.0
"
        );
        let clock = Clock::Monotonic { wall_offset_ns: None };
        assert_eq!(
            ranges(&own, clock),
            "\
range (with nested)  count   total       min     max    mean  open
load/\\u{202e}            3  9.0 ms    2.2 ms  4.5 ms  3.0 ms     1
load                     2  3.0 ms  750.0 µs  1.5 ms  1.5 ms     1
never                    0       -         -       -       -     1
"
        );
        let said = [
            "1 change of further counters were dropped: there are too many",
            "1,234 ranges without begin or end: records were lost",
        ];
        assert_eq!(remarks(&own), said);
    }
}
