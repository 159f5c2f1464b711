//! A table of several processes, or of one process on several devices, with their sums. Its printed amounts add up in each column,
//! and in each row whose amounts are all known as used = predates + tracked + gap.

use super::table::Table;
use crate::amounts::sum;
use crate::encode::{csv_field, csv_number};
use crate::held;
use crate::labels::{device_name, label, rank};
use crate::lines::{flags, in_brackets};
use gpumem_model::escape::escape;
use gpumem_model::run::{Class, Device, Run};
use gpumem_model::units::Unit;
use serde::Serialize;
use std::fmt::Write;

/// Amounts of one row: a process on a device, or a sum of such rows. In each row whose amounts are all known, used = predates +
/// tracked + gap.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ProcessAmounts {
    /// Bytes that NVML charges.
    #[serde(rename = "used")]
    pub used_bytes: Option<i64>,
    /// Bytes allocated before the agent was loaded.
    #[serde(rename = "predates")]
    pub predates_bytes: Option<i64>,
    /// Bytes of live allocations from the driver.
    #[serde(rename = "tracked")]
    pub tracked_bytes: Option<i64>,
    /// The part of `tracked` that pools keep but do not use.
    #[serde(rename = "idle")]
    pub idle_bytes: Option<i64>,
    /// used - predates - tracked.
    #[serde(rename = "gap")]
    pub gap_bytes: Option<i64>,
    /// Highest `used`, for tables that show it. It has no sum, because the rows have their peaks at different times.
    #[serde(skip)]
    pub peak_bytes: Option<i64>,
}

impl ProcessAmounts {
    /// Returns the amounts at the latest moment of a device.
    pub fn of(run: &Run, device: &Device) -> Self {
        let moment = &device.last;
        let idle = held(run, &moment.amounts, |cell| cell.class == Class::PoolIdle);
        ProcessAmounts {
            used_bytes: moment.used_bytes(),
            predates_bytes: moment.tracked_bytes.and(moment.predates_bytes),
            tracked_bytes: moment.tracked_bytes,
            idle_bytes: moment.tracked_bytes.map(|_| idle),
            gap_bytes: moment.tracked_bytes.and(moment.untrackable_bytes),
            peak_bytes: None,
        }
    }

    /// Returns the sum of each amount over those rows that know it. Peaks have no sum, because they are of different times.
    pub fn sum<'a>(rows: impl Iterator<Item = &'a ProcessAmounts>) -> Self {
        let add = |a: Option<i64>, b: Option<i64>| match (a, b) {
            (Some(a), Some(b)) => Some(a.saturating_add(b)),
            _ => a.or(b),
        };
        rows.fold(ProcessAmounts::default(), |sum, row| ProcessAmounts {
            used_bytes: add(sum.used_bytes, row.used_bytes),
            predates_bytes: add(sum.predates_bytes, row.predates_bytes),
            tracked_bytes: add(sum.tracked_bytes, row.tracked_bytes),
            idle_bytes: add(sum.idle_bytes, row.idle_bytes),
            gap_bytes: add(sum.gap_bytes, row.gap_bytes),
            peak_bytes: None,
        })
    }

    /// Returns the amounts in the order of [`COLUMNS`].
    fn columns(&self) -> [Option<i64>; 6] {
        let ProcessAmounts { used_bytes, predates_bytes, tracked_bytes, idle_bytes, gap_bytes, peak_bytes } =
            *self;
        [used_bytes, predates_bytes, tracked_bytes, idle_bytes, gap_bytes, peak_bytes]
    }
}

/// A row of the table: its names, its amounts, and a note.
#[derive(Debug, Clone)]
pub struct Line {
    pub names: Vec<String>,
    pub amounts: ProcessAmounts,
    pub note: String,
}

/// Headings of the amount columns. `predates` is shown only if some row is not zero, `peak` only if some row has it.
pub(crate) const COLUMNS: [&str; 6] = ["used", "predates", "tracked", "idle", "Untrackable", "peak used"];
const USED: usize = 0;
const PREDATES: usize = 1;
const TRACKED: usize = 2;
const GAP: usize = 4;
const PEAK: usize = 5;

/// Returns the table's lines: headings, rows, and the sums of the known amounts.
pub fn table(heads: &[&str], lines: &[Line]) -> Vec<String> {
    let unit = unit(lines);
    let steps = steps(lines, unit);
    let has_predates = lines.iter().any(|line| line.amounts.predates_bytes.is_some_and(|bytes| bytes != 0));
    let has_peak = lines.iter().any(|line| line.amounts.peak_bytes.is_some());
    let is_shown = |&column: &usize| (column != PREDATES || has_predates) && (column != PEAK || has_peak);
    let columns: Vec<usize> = (0..COLUMNS.len()).filter(is_shown).collect();
    let sum_of = |column: usize| {
        let known: Vec<i64> = steps.iter().filter_map(|row| row[column]).collect();
        (!known.is_empty()).then(|| sum(known))
    };
    let cell = |steps: Option<i64>| steps.map_or("-".to_owned(), |steps| unit.print(steps));
    let mut printed = Table::of_numbers(heads.len(), heads.len() + columns.len());
    let amounts = columns.iter().map(|&column| COLUMNS[column]);
    printed.row_with_note(heads.iter().copied().chain(amounts), &format!("({})", unit.name));
    for (line, steps) in lines.iter().zip(&steps) {
        let names = line.names.iter().map(|name| escape(name));
        let amounts = columns.iter().map(|&column| cell(steps[column]));
        printed.row_with_note(names.chain(amounts), &escape(&line.note));
    }
    if lines.len() > 1 {
        let names = (0..heads.len()).map(|name| if name == 0 { "sum".to_owned() } else { String::new() });
        let complete = |&column: &usize| {
            [PREDATES, PEAK].contains(&column) || steps.iter().all(|row| row[column].is_some())
        };
        let note = if columns.iter().all(complete) { "" } else { "of the known values" };
        let amounts =
            columns.iter().map(|&column| if column == PEAK { String::new() } else { cell(sum_of(column)) });
        printed.row_with_note(names.chain(amounts), note);
    }
    printed.lines()
}

fn unit(lines: &[Line]) -> Unit {
    let amounts = |line: &Line| line.amounts.used_bytes.into_iter().chain(line.amounts.tracked_bytes);
    Unit::for_largest(lines.iter().flat_map(amounts).map(i64::saturating_abs).max().unwrap_or(0))
}

/// Returns the printed sum of the `tracked` column with its unit, for a breakdown below the table. `None` if a row has no amount.
pub fn tracked(lines: &[Line]) -> Option<(Unit, i64)> {
    let unit = unit(lines);
    let tracked: Option<Vec<i64>> = steps(lines, unit).iter().map(|row| row[TRACKED]).collect();
    Some((unit, sum(tracked?)))
}

/// Returns the amounts in units of the last printed digit. `used` adds up to its sum, and the parts of a row to its `used`.
fn steps(lines: &[Line], unit: Unit) -> Vec<[Option<i64>; 6]> {
    let known: Vec<i64> = lines.iter().filter_map(|line| line.amounts.used_bytes).collect();
    let total = unit.round(sum(known.iter().copied()));
    let mut used = unit.apportion(total, &known).into_iter();
    let row = |line: &Line| {
        let amounts = line.amounts.columns();
        let mut row = amounts.map(|bytes| bytes.map(|bytes| unit.round(bytes)));
        row[USED] = amounts[USED].and_then(|_| used.next());
        let parts: Option<Vec<i64>> =
            [PREDATES, TRACKED, GAP].map(|column| amounts[column]).into_iter().collect();
        if let (Some(total), Some(parts)) = (row[USED], parts) {
            let parts = unit.apportion(total, &parts).into_iter().map(Some);
            [PREDATES, TRACKED, GAP].into_iter().zip(parts).for_each(|(column, part)| row[column] = part);
        }
        row
    };
    lines.iter().map(row).collect()
}

/// Returns a table of the processes of a launcher or job, sorted by rank, or by pid for processes without a rank.
pub fn text(title: &str, runs: &[&Run], command: &str) -> String {
    let mut runs = runs.to_vec();
    runs.sort_by_key(|run| (rank(run).is_none(), rank(run), run.process.pid, run.process.start_ticks));
    let mut lines = Vec::new();
    for run in &runs {
        let rank = run.process.claims.get("rank").cloned().unwrap_or_else(|| "-".to_owned());
        let mut names = vec![rank, run.process.pid.to_string()];
        let note = note(run);
        if run.devices.is_empty() {
            names.push("-".to_owned());
            lines.push(Line {
                names,
                amounts: ProcessAmounts::default(),
                note: format!("{note} (no GPU memory)"),
            });
            continue;
        }
        for device in &run.devices {
            let mut names = names.clone();
            names.push(device_name(device));
            lines.push(Line { names, amounts: ProcessAmounts::of(run, device), note: note.clone() });
        }
    }
    let mut out = vec![escape(title), String::new()];
    out.extend(table(&["rank", "pid", "device"], &lines));
    let pid = runs.first().map_or("PID".to_owned(), |run| run.process.pid.to_string());
    out.push(String::new());
    out.push(format!("next: gpumemctl report {pid} | {} --json | --csv", escape(command)));
    out.join("\n") + "\n"
}

/// Returns CSV in bytes, with one line for each process and device.
pub fn csv(runs: &[&Run]) -> String {
    let mut out = String::from(
        "rank,pid,device,used_bytes,predates_bytes,tracked_bytes,idle_bytes,untrackable_bytes,peak_tracked_bytes\n",
    );
    for run in runs {
        let rank = run.process.claims.get("rank").map(|rank| csv_field(rank)).unwrap_or_default();
        for device in &run.devices {
            let amounts =
                ProcessAmounts { peak_bytes: device.peak.tracked_bytes, ..ProcessAmounts::of(run, device) };
            let bytes = amounts.columns().map(csv_number).join(",");
            let _ = writeln!(out, "{rank},{},{},{bytes}", run.process.pid, csv_field(&device.name));
        }
    }
    out
}

fn note(run: &Run) -> String {
    let coverage = &run.coverage;
    let flags = flags([
        (!coverage.covered, "uncovered"),
        (coverage.late, "late"),
        (coverage.blocked_by.is_some(), "blocked"),
        (coverage.partial_state, "partial"),
    ]);
    label(run) + &in_brackets(&flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, amounts: [Option<i64>; 5]) -> Line {
        let [used_bytes, predates_bytes, tracked_bytes, idle_bytes, gap_bytes] = amounts;
        let amounts = ProcessAmounts {
            used_bytes,
            predates_bytes,
            tracked_bytes,
            idle_bytes,
            gap_bytes,
            peak_bytes: None,
        };
        Line { names: vec![name.into()], amounts, note: String::new() }
    }

    #[test]
    fn tables_add_up_downwards_and_across() {
        const MIB: i64 = 1 << 20;
        let odd = |part: i64| part * MIB + MIB / 3;
        let lines: Vec<Line> = (1..8)
            .map(|row| {
                let (predates, tracked, gap) =
                    (odd(row), odd(1000 * row), odd(10 * row) - (row % 2) * 100 * MIB);
                let used = predates + tracked + gap;
                line("GPU", [Some(used), Some(predates), Some(tracked), Some(odd(row)), Some(gap)])
            })
            .collect();
        let printed = table(&["device"], &lines);
        assert_eq!(printed.len(), 9);
        let rows: Vec<Vec<i64>> = printed[1..]
            .iter()
            .map(|row| {
                let words = row.split_whitespace().skip(1);
                words.map(|word| word.replace([',', '.'], "").parse().expect("a number")).collect()
            })
            .collect();
        let (sum, parts) = rows.split_last().expect("a sum");
        for row in &rows {
            assert_eq!(row[0], row[1] + row[2] + row[4], "{printed:#?}");
        }
        assert_eq!(
            tracked(&lines).expect("all are known").1,
            sum[TRACKED],
            "what stands below adds up to it"
        );
        for (column, sum) in sum.iter().enumerate() {
            assert_eq!(parts.iter().map(|row| row[column]).sum::<i64>(), *sum, "{printed:#?}");
        }
    }

    #[test]
    fn what_is_not_known_is_a_dash_and_said_of_the_sum() {
        let known = line("a", [Some(600), Some(0), Some(100), Some(0), Some(500)]);
        let unknown = line("b\u{1b}", [Some(50), None, None, None, None]);
        let printed = table(&["device"], &[known.clone(), unknown]);
        assert_eq!(
            printed,
            [
                "device   used  tracked  idle  Untrackable  (bytes)",
                "a         600      100     0          500",
                "b\\u{1b}    50        -     -            -",
                "sum       650      100     0          500  of the known values",
            ]
        );
        assert_eq!(table(&[""], &[known]).len(), 2, "one row needs no sum");
        assert_eq!(table(&["device"], &[]).len(), 1);
    }
}
