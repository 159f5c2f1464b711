//! Sentences of a comparison: how large the difference is, what causes it, and how the devices were matched.

use super::text::Shown;
use super::{At, Diff, Pair, Pairing, SIDES, difference};
use crate::amounts::sums;
use crate::labels::device_name;
use crate::lines::clean_name;
use crate::{Part, Row, Statement};
use gpumem_model::escape::escape;
use gpumem_model::time::Times;
use gpumem_model::units::plural;
use std::cmp::Reverse;

const NAMED: usize = 4;

/// Returns the first sentence: the difference and its largest causes. The causes add up to the difference as printed.
pub(super) fn sentence(diff: &Diff<'_>, pair: &Pair, shown: &Shown) -> String {
    let (subject, object) = match diff.at {
        At::Peak => ("B's peak", "A's"),
        At::Now => ("B", "A"),
    };
    let Statement { rows } = &shown.table.statement;
    let at = |part: Part| shown.table.statement.row(part);
    let known = |index: &usize| difference(rows[*index].bytes).is_some();
    let used = at(Part::Used).filter(known);
    let Some(head) = used.or(at(Part::Tracked).filter(known)) else {
        return format!("{subject} cannot be compared with {object}: {}", unknown(pair));
    };
    let what = if used.is_some() { "used" } else { "tracked" };
    let steps = shown.difference(head).unwrap_or(0);
    let total = match steps {
        0 => format!("{subject} equals {object} ({what})"),
        steps => {
            let than = if steps > 0 { "higher" } else { "lower" };
            let bytes = rows[head].bytes;
            let share = difference(bytes).zip(bytes[0]);
            let share = share.map_or(String::new(), |(bytes, base)| percent(bytes, base));
            let amount = shown.unit.print(steps.saturating_abs());
            let than_a = if diff.at == At::Now { " than A" } else { "" };
            format!("{subject} is {amount} {} {than}{than_a} ({what}{share})", shown.unit.name)
        }
    };
    // The rows whose differences add up to the total difference; untrackable memory (the gap) counts as one row.
    let is_leaf = |row: &Row| match row.part {
        Part::Category | Part::Others | Part::PoolIdle | Part::Opaque => true,
        Part::Predates | Part::Untrackable => used.is_some(),
        _ => false,
    };
    let leaves = (0..rows.len()).filter(|index| is_leaf(&rows[*index]));
    let causes = leaves.filter_map(|index| Some((index, shown.difference(index)?)));
    let mut causes: Vec<(usize, i64)> = causes.filter(|(_, steps)| *steps != 0).collect();
    causes.sort_by_key(|(index, steps)| (Reverse(steps.unsigned_abs()), *index));
    let rest = if causes.len() > NAMED + 1 { causes.split_off(NAMED) } else { Vec::new() };
    let part = |(index, steps): &(usize, i64)| {
        format!("{} {}", clean_name(&rows[*index].name), shown.unit.print_signed(*steps))
    };
    let mut parts: Vec<String> = causes.iter().map(part).collect();
    if !rest.is_empty() {
        let sum = rest.iter().map(|(_, steps)| steps).sum::<i64>();
        parts.push(format!("{} more {}", rest.len(), shown.unit.print_signed(sum)));
    }
    match (parts.is_empty(), steps) {
        (true, 0) => format!("{total}, and so do all parts"),
        (true, _) => format!("{total}; {}", known_of(pair)),
        (false, 0) => format!("{total}, but its parts differ: {}", parts.join(", ")),
        (false, _) => format!("{total}: {}", parts.join(", ")),
    }
}

/// Returns a sentence if memory that is tracked on one side may be untracked (in the gap) on the other side.
pub(super) fn shift(shown: &Shown) -> Option<String> {
    let of = |part: Part| shown.difference(shown.table.statement.row(part)?);
    let (tracked, gap) = (of(Part::Tracked)?, of(Part::Untrackable)?);
    let both = tracked.unsigned_abs().min(gap.unsigned_abs());
    // The differences of `tracked` and of the gap must be of similar size. A small one may be ordinary variation between runs.
    if tracked.signum() * gap.signum() != -1
        || both.saturating_mul(2) < tracked.unsigned_abs().max(gap.unsigned_abs())
    {
        return None;
    }
    let [more, less] = if tracked > 0 { ["B", "A"] } else { ["A", "B"] };
    let amount = shown.unit.print(i64::try_from(both).unwrap_or(i64::MAX));
    Some(format!(
        "{amount} {} may differ in coverage, not in use: {more} tracks about as much more as {less} has in Untrackable",
        shown.unit.name
    ))
}

/// Returns a sentence that states for which sides the categories are known.
fn known_of(pair: &Pair) -> String {
    match pair.moments.each_ref().map(|moment| moment.tracked_bytes.is_some()) {
        [true, false] => "the composition is known for A only".to_owned(),
        [false, true] => "the composition is known for B only".to_owned(),
        _ => "the composition is unknown".to_owned(),
    }
}

fn unknown(pair: &Pair) -> String {
    let why = pair.doubts.iter().filter(|doubt| matches!(doubt.code, "uncovered" | "blocked" | "no_sample"));
    let why: Vec<String> = why.map(|doubt| format!("{}: {}", doubt.side, escape(&doubt.text))).collect();
    if why.is_empty() { "neither used nor tracked is known for both".to_owned() } else { why.join("; ") }
}

/// Returns a sentence that states which amounts, moments and devices are compared.
pub(super) fn basis(diff: &Diff<'_>) -> String {
    let what = match (diff.at, diff.sides.iter().all(|side| side.run.coverage.covered)) {
        (At::Peak, true) => "each run at its peak of tracked",
        (At::Peak, false) => "each run at its peak (of tracked; without an agent, of used)",
        (At::Now, _) => "each run at its last complete moment",
    };
    let mut words = vec![what.to_owned()];
    match diff.pairs.as_slice() {
        [pair] => words.extend(paired(diff, pair)),
        pairs => {
            let name = |pairing: Pairing| match pairing {
                Pairing::Uuid => "by UUID",
                Pairing::Number => "by number",
                Pairing::Rank => "by rank",
                Pairing::Order => "in their order",
                Pairing::Alone => "on one side only",
            };
            let counts = sums(pairs.iter().map(|pair| (pair.paired, 1)));
            let hows: Vec<String> =
                counts.iter().map(|(how, count)| format!("{count} {}", name(*how))).collect();
            let what = if counts.contains_key(&Pairing::Rank) { "rank" } else { "device" };
            words.push(format!("{} ({})", plural(pairs.len() as u64, what), hows.join(", ")));
        }
    }
    words.push(format!("rules {}", escape(&diff.rules)));
    words.join("; ")
}

/// Returns a sentence that names the two devices of a pair and how they were matched.
pub(super) fn paired(diff: &Diff<'_>, pair: &Pair) -> Option<String> {
    Some(match (diff.device(pair, 0), diff.device(pair, 1)) {
        (Some(a), Some(b)) => match pair.paired {
            Pairing::Uuid => format!("the same device, {} (by UUID)", device_name(a)),
            Pairing::Number => format!("{} of both (by number)", device_name(a)),
            Pairing::Rank => format!("{} of both", device_name(a)),
            _ => format!("{} of A with {} of B (in their order)", device_name(a), device_name(b)),
        },
        (Some(a), None) => format!("{} in A only", device_name(a)),
        (None, Some(b)) => format!("{} in B only", device_name(b)),
        (None, None) => return None,
    })
}

pub(super) fn times(diff: &Diff<'_>, pair: &Pair) -> [String; 2] {
    let time = |side: usize| Times::of(diff.sides[side].run).time(pair.moments[side].time_ns);
    [0, 1].map(|side| pair.devices[side].map(|_| time(side)).unwrap_or_default())
}

/// Returns the reasons for inexact amounts as lines; a reason that holds for both sides is one line.
pub(super) fn doubts(pair: &Pair) -> Vec<String> {
    let mut reasons: Vec<(String, Vec<&str>)> = Vec::new();
    for doubt in &pair.doubts {
        match reasons.iter_mut().find(|(text, _)| *text == doubt.text) {
            Some((_, sides)) if sides.contains(&doubt.side) => {}
            Some((_, sides)) => sides.push(doubt.side),
            None => reasons.push((doubt.text.clone(), vec![doubt.side])),
        }
    }
    let whose = |sides: &[&str]| match sides {
        [side] => (*side).to_owned(),
        _ => SIDES.join(" and "),
    };
    reasons.iter().map(|(text, sides)| format!("{}: {}", whose(sides), escape(text))).collect()
}

/// Returns the difference as a percentage of `base`, such as `, +1.2 %`. Empty if it rounds to 0 or `base` is not positive.
fn percent(bytes: i64, base: i64) -> String {
    if base <= 0 {
        return String::new();
    }
    let tenths =
        (i128::from(bytes) * 1000 + i128::from(bytes.signum()) * i128::from(base) / 2) / i128::from(base);
    let sign = if tenths < 0 { "-" } else { "+" };
    let text = || format!(", {sign}{}.{} %", tenths.unsigned_abs() / 10, tenths.unsigned_abs() % 10);
    if tenths == 0 { String::new() } else { text() }
}
