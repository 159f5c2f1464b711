//! Decides whether an amount of B exceeds that of A by more than a limit: a gate for memory tests.
//!
//! Some amounts are only bounds of the true value. If the decision depends on an unknown value, the outcome is unknown.

use super::uncertainty::{Kind, bounds};
use super::{Diff, Pair, SIDES, difference};
use crate::labels::device_name;
use crate::lines::in_brackets;
use crate::{Columns, GroupBy, Part};
use gpumem_model::escape::escape;
use gpumem_model::units::Unit;
use serde::Serialize;
use std::str::FromStr;

/// Limit of a gate: the amount by which B may exceed A.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    /// An absolute number of bytes.
    Bytes(i64),
    /// A fraction of A's amount, in millionths.
    Millionths(i64),
}

/// Units of sizes with their bytes; the user may type them in upper or lower case. `B` must be the last one.
const UNITS: [(&str, i64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not a limit: give a size with its unit (500MiB, 1.5GiB, 200MB, 4096B) or a share of A (2%)"
            )
        };
        if let Some(share) = text.strip_suffix('%') {
            return decimal(share.trim_end(), 10_000).map(Limit::Millionths).ok_or_else(wrong);
        }
        let lower = text.to_lowercase();
        let unit = UNITS.iter().find(|(name, _)| lower.ends_with(&name.to_lowercase()));
        let (name, bytes) = match unit {
            Some((name, bytes)) => (name.len(), *bytes),
            None if text == "0" => return Ok(Limit::Bytes(0)),
            None => return Err(wrong()),
        };
        let number = text.get(..text.len().saturating_sub(name)).unwrap_or("");
        decimal(number.trim_end(), bytes).map(Limit::Bytes).ok_or_else(wrong)
    }
}

/// Parses a decimal number and returns it times `one`, for example `one` = 1,000,000 for millionths.
fn decimal(text: &str, one: i64) -> Option<i64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(part) || part.len() > 9 || text.ends_with('.') {
        return None;
    }
    let scale = 10_i128.pow(part.len() as u32);
    let number: i128 = format!("{whole}{part}").parse().ok()?;
    i64::try_from(number.checked_mul(i128::from(one))? / scale).ok()
}

/// The amount (`--of`) whose difference is compared with the limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Of {
    /// `used` if known for both sides, else `tracked`.
    Peak,
    /// A row of the statement other than a category, such as `tracked` or `idle`, and the row's name.
    Part(Part, &'static str),
    /// A category of a grouping, or a tag.
    Named(GroupBy, String),
}

/// Rows of the statement, each with the name that the user types to select it.
pub(crate) const PARTS: [(&str, Part); 13] = [
    ("used", Part::Used),
    ("tracked", Part::Tracked),
    ("gap", Part::Untrackable),
    ("untrackable", Part::Untrackable),
    ("predates", Part::Predates),
    ("idle", Part::PoolIdle),
    ("opaque", Part::Opaque),
    ("others", Part::Others),
    ("context", Part::Context),
    ("modules", Part::Modules),
    ("local memory", Part::LocalMemory),
    ("heaps + rounding", Part::Heaps),
    ("unexplained", Part::Unexplained),
];

/// Result of comparing B with the limit; a later variant is more severe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// B exceeds A by no more than the limit.
    Within,
    /// The outcome depends on values that are unknown.
    Unknown,
    /// B exceeds A by more than the limit.
    Above,
}

/// An outcome with its numbers.
#[derive(Debug, Clone, Serialize)]
pub struct Verdict {
    pub outcome: Outcome,
    /// Name of the compared amount: `used`, `tracked`, a category.
    pub of: String,
    /// Bytes by which B may exceed A; `None` if the limit is a percentage of A and A is unknown.
    pub limit_bytes: Option<i64>,
    pub a_bytes: Option<i64>,
    pub b_bytes: Option<i64>,
    pub text: String,
}

impl Of {
    /// Finds the part, category or tag that a word names in a comparison. `None` if nothing has that name.
    pub fn find(word: &str, diff: &Diff<'_>) -> Option<Of> {
        let is_word = |name: &str| name.eq_ignore_ascii_case(word);
        if let Some((name, part)) = PARTS.iter().find(|(name, _)| is_word(name)) {
            return Some(Of::Part(*part, name));
        }
        let groupings = [diff.by, GroupBy::Structure, GroupBy::Layer, GroupBy::Tag];
        let named = |by: GroupBy, fits: &dyn Fn(&str) -> bool| {
            let row = diff.whole()?.table(by).statement.categories().find(|row| fits(&row.name))?;
            Some(Of::Named(by, row.name.clone()))
        };
        let exactly = groupings.iter().find_map(|by| named(*by, &|name| name == word));
        exactly.or_else(|| groupings.iter().find_map(|by| named(*by, &is_word)))
    }

    /// Returns the words that select an amount in a comparison.
    pub fn words(diff: &Diff<'_>) -> Vec<String> {
        let tables =
            [GroupBy::Structure, GroupBy::Layer].into_iter().filter_map(|by| Some(diff.whole()?.table(by)));
        let categories = tables.flat_map(|table| table.statement.categories().map(|row| escape(&row.name)));
        PARTS.iter().map(|(name, _)| (*name).to_owned()).chain(categories).collect()
    }

    /// Returns the name and kind of the amount that the user selected, and its values in A and B.
    fn amounts(&self, pair: &Pair) -> (String, Kind, Columns) {
        let table = pair.table(GroupBy::Structure);
        let used = table.bytes(Part::Used);
        match self {
            Of::Peak if used.iter().all(Option::is_some) => ("used".to_owned(), Kind::Used, used),
            Of::Peak => ("tracked".to_owned(), Kind::Tracked, table.bytes(Part::Tracked)),
            Of::Part(part, name) => {
                let kind = match part {
                    Part::Used => Kind::Used,
                    Part::Tracked => Kind::Tracked,
                    Part::Category | Part::Others | Part::PoolIdle | Part::Opaque => Kind::PartOfTracked,
                    _ => Kind::Gap,
                };
                ((*name).to_owned(), kind, zero_if_omitted(table.bytes(*part), kind, table))
            }
            Of::Named(by, name) => {
                let table = pair.table(*by);
                let row = table.statement.categories().find(|row| row.name == *name);
                let bytes = row.map_or([None, None], |row| row.bytes);
                (escape(name), Kind::PartOfTracked, zero_if_omitted(bytes, Kind::PartOfTracked, table))
            }
        }
    }
}

/// Returns the amounts of a row. If the table omits the row because it is zero, returns 0 where the total is known.
fn zero_if_omitted(bytes: Columns, kind: Kind, table: &super::Table) -> Columns {
    if bytes != [None, None] {
        return bytes;
    }
    let sum = if kind == Kind::PartOfTracked { Part::Tracked } else { Part::Used };
    table.bytes(sum).map(|sum| sum.map(|_| 0))
}

/// Compares B with A for each pair of devices, and returns the worst verdict.
pub fn judge(diff: &Diff<'_>, amount: &Of, limit: Limit) -> Verdict {
    let verdicts = diff.pairs.iter().map(|pair| judge_pair(diff, pair, amount, limit));
    // `max_by_key` returns the last of equal elements, so the verdicts are reversed to get the first one.
    verdicts.rev().max_by_key(|verdict| verdict.outcome).unwrap_or_else(|| Verdict {
        outcome: Outcome::Unknown,
        of: "used".to_owned(),
        limit_bytes: None,
        a_bytes: None,
        b_bytes: None,
        text: "cannot be judged: neither A nor B has memory on a GPU".to_owned(),
    })
}

/// Compares B with A for one pair of devices.
fn judge_pair(diff: &Diff<'_>, pair: &Pair, amount: &Of, limit: Limit) -> Verdict {
    let (name, kind, bytes) = amount.amounts(pair);
    let side =
        |side: usize| bounds(bytes[side], kind, &diff.sides[side].run.coverage, &pair.moments[side], diff.at);
    let [a, b] = [side(0), side(1)];
    let allowed = |of_a: i64| match limit {
        Limit::Bytes(bytes) => bytes,
        Limit::Millionths(share) => {
            let bytes = i128::from(of_a.max(0)) * i128::from(share) / 1_000_000;
            i64::try_from(bytes).unwrap_or(i64::MAX)
        }
    };
    // The highest and lowest possible limit for B, given the bounds of A.
    let most_allowed = a.high.map(|a| a.saturating_add(allowed(a)));
    let least_allowed = a.low.map(|a| a.saturating_add(allowed(a)));
    let is_above = b.low.zip(most_allowed).is_some_and(|(b, most)| b > most);
    let is_within = b.high.zip(least_allowed).is_some_and(|(b, least)| b <= least);
    let outcome = match (is_above, is_within) {
        (true, _) => Outcome::Above,
        (_, true) => Outcome::Within,
        _ => Outcome::Unknown,
    };
    let limit_bytes = match limit {
        Limit::Bytes(bytes) => Some(bytes),
        Limit::Millionths(_) => bytes[0].map(allowed),
    };
    let on = diff.device(pair, 0).or(diff.device(pair, 1)).filter(|_| diff.pairs.len() > 1);
    let on = on.map(|device| format!(" on {}", device_name(device))).unwrap_or_default();
    let largest = bytes.iter().flatten().copied().chain(limit_bytes).map(i64::saturating_abs).max();
    let unit = Unit::for_largest(largest.unwrap_or(0));
    let may = match (limit, limit_bytes) {
        (Limit::Bytes(bytes), _) => unit.amount_with_name(bytes),
        (Limit::Millionths(share), bytes) => {
            let bytes = bytes.map(|bytes| unit.amount_with_name(bytes)).unwrap_or_default();
            percent(share) + &in_brackets(&bytes)
        }
    };
    let more = difference(bytes).map(|more| (more, unit.amount_with_name(more)));
    let text = match (more, outcome) {
        (Some((_, more)), Outcome::Above) => format!("B's {name}{on} exceeds A's by {more}, more than {may}"),
        (Some((..=0, _)), Outcome::Within) => format!("B's {name}{on} does not exceed A's, and may by {may}"),
        (Some((_, more)), Outcome::Within) => {
            format!("B's {name}{on} exceeds A's by {more}, and may by {may}")
        }
        _ => {
            let missing = SIDES.into_iter().zip(bytes).filter(|(_, bytes)| bytes.is_none());
            let missing: Vec<&str> = missing.map(|(side, _)| side).collect();
            let what = match missing[..] {
                [] => "the numbers are only bounds, and the answer depends on unknown values".to_owned(),
                [side] => format!("{side}'s {name} is unknown"),
                _ => format!("{name} is unknown for both"),
            };
            let why = pair.doubts.iter().map(|doubt| format!("{}: {}", doubt.side, escape(&doubt.text)));
            let why = in_brackets(&why.collect::<Vec<_>>().join("; "));
            format!("cannot judge {name}{on}: {what}{why}")
        }
    };
    Verdict { outcome, of: name, limit_bytes, a_bytes: bytes[0], b_bytes: bytes[1], text }
}

fn percent(millionths: i64) -> String {
    let text = format!("{}.{:04}", millionths / 10_000, millionths % 10_000);
    format!("{} %", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_sizes_or_shares() {
        let right = [
            ("500MiB", Limit::Bytes(500 << 20)),
            ("1.5 GiB", Limit::Bytes(3 << 29)),
            ("200MB", Limit::Bytes(200_000_000)),
            ("4096b", Limit::Bytes(4096)),
            ("0", Limit::Bytes(0)),
            ("2%", Limit::Millionths(20_000)),
            ("0.25 %", Limit::Millionths(2_500)),
        ];
        for (text, limit) in right {
            assert_eq!(text.parse::<Limit>(), Ok(limit), "{text}");
        }
        for text in [
            "",
            "500",
            "-1MiB",
            "1e3MiB",
            "MiB",
            ".5MiB",
            "5.MiB",
            "%",
            "9999999999999TiB",
            "1.2.3%",
            "é%",
            "5é",
        ] {
            let error = text.parse::<Limit>().unwrap_err().to_string();
            assert!(error.contains("500MiB"), "{error}");
        }
        assert_eq!((percent(20_000), percent(2_500)), ("2 %".into(), "0.25 %".into()));
    }
}
