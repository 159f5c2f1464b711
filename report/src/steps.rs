//! The changes (steps) of untrackable memory, the gap, as text: when it changed, by how much, and why.

use super::table::Table;
use super::{Report, sum};
use crate::labels::{device_title, label_with_pid};
use gpumem_model::escape::escape;
use gpumem_model::program_data::LOST;
use gpumem_model::run::{Clock, Device, UntrackableChange};
use gpumem_model::time::Times;
use gpumem_model::units::{Unit, thousands};

/// Maximum number of marks (times that the program named) below the lists: the newest ones.
const MOST_MARKS: usize = 16;
/// Maximum number of lines of a list, including its heading and its sum.
const MOST_LINES: usize = 30;
/// Number of lines of a list that are not steps: two headings, the sum of smaller steps, and the total.
const OTHER_LINES: usize = 4;
/// A step is mentioned in the run's report if it is at least this large (bytes), or if it satisfies `NOTABLE_PART`.
const NOTABLE_BYTES: i64 = 64 << 20;
/// A step is also mentioned if it is at least the used memory divided by this.
const NOTABLE_PART: i64 = 20;

/// Returns a list for each device: the largest steps in the order of time, and one line for the rest.
pub fn text(report: &Report<'_>) -> String {
    let run = report.run;
    let times = report.times();
    let mut lines = Vec::new();
    for device in &run.devices {
        if !lines.is_empty() {
            lines.push(String::new());
        }
        list(device, times, &format!("{}  {}", label_with_pid(run), device_title(device)), &mut lines);
    }
    if lines.is_empty() {
        lines.push("no GPU memory was observed".to_owned());
    }
    if run.clock == Clock::Lines {
        lines.push("a log has no driver events: causes of changes of Untrackable are unknown".to_owned());
    }
    let marks = &run.coverage.marks;
    for mark in marks.iter().skip(marks.len().saturating_sub(MOST_MARKS)) {
        let name = mark.name.as_deref().unwrap_or(LOST);
        lines.push(format!("mark {}  {name}  (by {})", times.time(mark.time_ns), mark.by));
    }
    let lines: Vec<String> = lines.iter().map(|line| escape(line)).collect();
    lines.join("\n") + "\n"
}

fn list(device: &Device, times: Times, title: &str, lines: &mut Vec<String>) {
    let steps = grouped(&device.details.steps);
    lines.push(title.to_owned());
    if steps.is_empty() {
        lines.push("no change of Untrackable was observed".to_owned());
        return;
    }
    let shown =
        if steps.len() + OTHER_LINES - 1 > MOST_LINES { MOST_LINES - OTHER_LINES } else { steps.len() };
    let (order, smaller) = split_largest(steps, shown);
    let rest = sum(smaller.iter().map(|step| step.bytes));
    let rest = (!smaller.is_empty()).then_some(rest);
    let bytes: Vec<i64> = order.iter().map(|step| step.bytes).chain(rest).collect();
    let whole = sum(bytes.iter().copied());
    let largest = bytes.iter().chain([&whole]).map(|bytes| bytes.saturating_abs()).max();
    let unit = Unit::for_largest(largest.unwrap_or(0));
    let total = unit.round(whole);
    let mut table = Table::of_numbers(1, 2);
    let mut amounts = unit.apportion(total, &bytes).into_iter().map(|steps| unit.print_signed(steps));
    for (step, amount) in order.iter().zip(amounts.by_ref()) {
        table.row_with_note([times.time(step.time_ns), amount], &description(step, unit));
    }
    if let Some(amount) = amounts.next() {
        let note = format!("({} more)", thousands(smaller.len() as u64));
        table.row_with_note([String::new(), amount], &note);
    }
    if order.len() > 1 {
        table.row(["sum".to_owned(), unit.print_signed(total)]);
    }
    lines.push(format!(
        "changes of Untrackable in {} (changes of the driver's rounding are left out)",
        unit.name
    ));
    lines.extend(table.lines());
}

/// Merges consecutive steps with the same cause and place. The result has the first one's time; its cause states how many steps
/// were merged.
pub(super) fn grouped(steps: &[UntrackableChange]) -> Vec<UntrackableChange> {
    let grouped = |steps: &[UntrackableChange]| {
        let mut group = steps[0].clone();
        for step in &steps[1..] {
            group.bytes = group.bytes.saturating_add(step.bytes);
            group.parts = group.parts.plus(step.parts);
            group.events = group.events.saturating_add(step.events);
            let expected = group.expected_bytes.zip(step.expected_bytes);
            group.expected_bytes = expected.map(|(a, b)| a.saturating_add(b));
        }
        if steps.len() > 1 {
            group.cause = format!("{} times {}", thousands(steps.len() as u64), group.cause);
        }
        group
    };
    steps.chunk_by(is_like).map(grouped).collect()
}

fn is_like(a: &UntrackableChange, b: &UntrackableChange) -> bool {
    a.cause != "smaller steps"
        && (&a.cause, &a.kind, &a.tag, &a.library, &a.also, &a.note)
            == (&b.cause, &b.kind, &b.tag, &b.library, &b.also, &b.note)
        && a.expected_bytes.is_some() == b.expected_bytes.is_some()
        // A growth is not merged with a shrinkage.
        && (a.bytes >= 0) == (b.bytes >= 0)
}

/// Returns the `limit` largest steps, in the order of time, and the other steps.
pub(super) fn split_largest(
    mut steps: Vec<UntrackableChange>,
    limit: usize,
) -> (Vec<UntrackableChange>, Vec<UntrackableChange>) {
    let weight =
        |step: &UntrackableChange| step.parts.each().iter().map(|(_, _, bytes)| bytes.unsigned_abs()).max();
    steps.sort_by_key(|step| std::cmp::Reverse(weight(step)));
    let smaller = steps.split_off(steps.len().min(limit));
    steps.sort_by_key(|step| step.time_ns);
    (steps, smaller)
}

/// Returns the text that follows a step's time and bytes.
pub(super) fn description(step: &UntrackableChange, unit: Unit) -> String {
    let mut words = vec![step.cause.clone()];
    if step.cause == "smaller steps" {
        words[0] = format!("{} {}", thousands(step.events), step.cause);
    } else if step.kind != "none" && !step.kind.is_empty() {
        words[0] += &format!(" ({})", step.kind.replace('_', " "));
    }
    words.extend(location(step));
    let amount = |bytes: i64| unit.print_signed(unit.round(bytes));
    let parts = step.parts.each().into_iter().filter(|(_, _, bytes)| *bytes != 0);
    let parts: Vec<String> =
        parts.map(|(name, _, bytes)| format!("{} {}", name.replace('_', " "), amount(bytes))).collect();
    if parts.len() > 1 {
        words.push(format!("parts: {}", parts.join(", ")));
    }
    let expected = step.expected_bytes.filter(|&bytes| bytes != step.bytes && step.kind != "measured");
    words.extend(expected.map(|bytes| format!("predicted {}", amount(bytes))));
    if !step.also.is_empty() {
        words.push(format!("at the same time: {}", step.also.join(", ")));
    }
    words.join(", ")
}

/// Returns where the step happened (tag and library), as far as known.
fn location(step: &UntrackableChange) -> Vec<String> {
    let near = if step.cause.ends_with("between events") { "near tag" } else { "tag" };
    let tag = step.tag.as_ref().map(|tag| format!("{near} {tag}"));
    let library = step.library.as_ref().map(|library| format!("by {library}"));
    tag.into_iter().chain(library).collect()
}

/// Returns a sentence on the change of untrackable bytes with the most unexplained bytes, if these are many.
pub(super) fn largest_unexplained(device: &Device, times: Times) -> Option<String> {
    let steps = device.details.steps.iter().filter(|step| step.cause != "smaller steps");
    let step = steps.max_by_key(|step| step.parts.unexplained_bytes)?;
    let bytes = step.parts.unexplained_bytes;
    let used = device.last.used_bytes().unwrap_or(0).max(device.peak.used_bytes().unwrap_or(0));
    if bytes <= 0 || bytes < NOTABLE_BYTES && bytes < used / NOTABLE_PART {
        return None;
    }
    let unit = Unit::for_largest(bytes);
    let amount = unit.print_signed(unit.round(bytes));
    let words = [vec![step.cause.clone()], location(step)].concat().join(", ");
    let time = times.time(step.time_ns);
    Some(format!("largest unexplained step: {amount} {} at {time}, {words} (--steps)", unit.name))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use gpumem_model::run::UntrackableParts;

    const MIB: i64 = 1 << 20;

    fn step(seconds: u64, unexplained: i64, cause: &str) -> UntrackableChange {
        UntrackableChange {
            time_ns: seconds * 1_000_000_000,
            bytes: unexplained,
            parts: UntrackableParts::unknown(unexplained),
            cause: cause.into(),
            kind: "none".into(),
            tag: Some("model/x".into()),
            ..UntrackableChange::default()
        }
    }

    pub(crate) fn device(steps: Vec<UntrackableChange>) -> Device {
        let details = gpumem_model::run::Details { steps, ..Default::default() };
        Device {
            name: String::new(),
            ordinal: 0,
            model: String::new(),
            total_bytes: None,
            last: Default::default(),
            peak: Default::default(),
            peak_used: None,
            beside: Default::default(),
            reading: None,
            unaccounted_bytes: None,
            tenants: Vec::new(),
            other_tenants: (0, 0),
            series: gpumem_model::series::Series::new(1),
            details,
        }
    }

    fn times() -> Times {
        Times::of_clock(Clock::Monotonic { wall_offset_ns: Some(0) })
    }

    #[test]
    fn a_list_adds_up_and_is_short() {
        let steps = (0..100).map(|n| UntrackableChange {
            tag: Some(format!("model/{n}")),
            ..step(n, (n as i64 * 37 % 100) * MIB / 3 - 9 * MIB, "between events")
        });
        let device = device(steps.collect());
        let mut lines = Vec::new();
        list(&device, times(), "title", &mut lines);
        assert_eq!(lines.len(), MOST_LINES, "{lines:#?}");
        let amounts: Vec<i64> = lines[2..]
            .iter()
            .map(|line| {
                let amount =
                    line.split_whitespace().find(|word| word.starts_with(['+', '-']) || *word == "0.0");
                amount.expect("an amount").replace(['+', '.', ','], "").parse().expect("a number")
            })
            .collect();
        let (sum, rest) = amounts.split_last().expect("a sum");
        assert_eq!(rest.iter().sum::<i64>(), *sum, "{lines:#?}");
        assert!(lines[lines.len() - 2].ends_with("(74 more)"), "{lines:#?}");
        assert!(lines[lines.len() - 1].starts_with("sum "));
    }

    #[test]
    fn equal_neighbours_are_one() {
        let loaded = |seconds, mib: i64| step(seconds, 10 * mib * MIB, "module loaded");
        let mut elsewhere = loaded(4, 7);
        elsewhere.tag = None;
        let steps = vec![loaded(1, 1), loaded(2, 2), loaded(3, -3), elsewhere, loaded(5, 1), loaded(6, 1)];
        let mut lines = Vec::new();
        list(&device(steps), times(), "title", &mut lines);
        assert_eq!(
            lines[2..],
            [
                "00:00:01Z  +30.0  2 times module loaded, tag model/x",
                "00:00:03Z  -30.0  module loaded, tag model/x",
                "00:00:04Z  +70.0  module loaded",
                "00:00:05Z  +20.0  2 times module loaded, tag model/x",
                "sum        +90.0",
            ]
        );
    }

    #[test]
    fn the_largest_unexplained_step_is_told_if_it_is_large() {
        let said = largest_unexplained(
            &device(vec![step(5, 178 * MIB, "between events"), step(9, -999 * MIB, "x")]),
            times(),
        );
        let expected =
            "largest unexplained step: +178.0 MiB at 00:00:05Z, between events, near tag model/x (--steps)";
        assert_eq!(said.as_deref(), Some(expected));
        assert!(
            largest_unexplained(&device(vec![step(5, 63 * MIB, "a")]), times()).is_some(),
            "used is not known"
        );
        let mut known = device(vec![step(5, 63 * MIB, "a")]);
        known.last.uncovered_used_bytes = Some(10 << 30);
        assert_eq!(largest_unexplained(&known, times()), None);
    }
}
