//! Bars as data: the parts of a bar, which colour each category gets, and how small parts are summed.

use super::palette::{self, Pattern, RANKS};
use crate::amounts::{largest_first, sum};
use gpumem_model::units::thousands;
use std::collections::{BTreeMap, BTreeSet};

/// A bar with parts that add up to its total.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bar {
    /// Heading above the bar.
    pub title: String,
    /// Sum of the bytes of `segments`.
    pub total_bytes: i64,
    /// Parts of the bar, in any order.
    pub segments: Vec<Segment>,
}

/// A part of a bar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Name of the part; the same name has the same colour in all bars of a picture.
    pub name: String,
    /// Bytes; a negative part is drawn below zero.
    pub bytes: i64,
    /// Kind of memory.
    pub kind: Kind,
}

impl Segment {
    pub(super) fn is_like(&self, other: &Segment) -> bool {
        (&self.name, self.kind) == (&other.name, other.kind)
    }
}

/// Kind of a bar's part. Parts are stacked from below in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A category with its own colour; the largest category is lowest.
    Category,
    /// Sum of several small categories; plain grey.
    Smaller,
    /// Bytes that no rule matches; beige.
    Others,
    /// Idle memory of pools; light hatch.
    Idle,
    /// Bytes of pools that report no blocks; horizontal lines.
    Opaque,
    /// Memory older than the agent; vertical lines.
    Predates,
    /// Untrackable memory; strong hatch.
    Untrackable,
}

/// Returns how a part is drawn in a picture whose categories with colours are `ranks`.
pub(super) fn fill(part: &Segment, ranks: &[String]) -> Pattern {
    match part.kind {
        Kind::Category => match rank(part, ranks) {
            Some(rank) => Pattern::plain(palette::color(palette::numbers(ranks)[rank])),
            None => palette::SMALLER,
        },
        Kind::Smaller => palette::SMALLER,
        Kind::Others => palette::OTHERS,
        Kind::Idle => palette::IDLE,
        Kind::Opaque => palette::OPAQUE,
        Kind::Predates => palette::PREDATES,
        Kind::Untrackable => palette::UNTRACKABLE,
    }
}

/// Returns the rank of the part's category, if it has its own colour.
pub(super) fn rank(part: &Segment, ranks: &[String]) -> Option<usize> {
    (part.kind == Kind::Category).then(|| ranks.iter().position(|name| *name == part.name)).flatten()
}

/// Returns for each bar the categories with their own colours, the largest first. If bars have names in common, all bars get the
/// same list, so that a name has the same colour and place in all bars.
pub(super) fn ranks(bars: &[Bar]) -> Vec<Vec<String>> {
    let one_by_one = || bars.iter().map(std::slice::from_ref);
    let count =
        |bars: &[Bar]| bars.iter().flat_map(categories).map(|part| &part.name).collect::<BTreeSet<_>>().len();
    if count(bars) < one_by_one().map(count).sum() {
        return vec![largest(bars, RANKS); bars.len()];
    }
    one_by_one().map(|bar| largest(bar, RANKS)).collect()
}

pub(super) fn categories(bar: &Bar) -> impl Iterator<Item = &Segment> {
    bar.segments.iter().filter(|part| part.kind == Kind::Category)
}

/// Returns the largest categories in all of `bars`. There are at most `limit`, and one less if a part for the rest is needed.
pub(super) fn largest(bars: &[Bar], limit: usize) -> Vec<String> {
    let mut all: BTreeMap<&str, i64> = BTreeMap::new();
    for part in bars.iter().flat_map(categories) {
        let weight = all.entry(&part.name).or_default();
        *weight = (*weight).max(part.bytes.saturating_abs());
    }
    let all = largest_first(all);
    // The part for all other categories counts towards `limit`.
    let named = if all.len() > limit { limit.saturating_sub(1) } else { all.len() };
    all.into_iter().take(named).map(|(name, _)| name.to_owned()).collect()
}

/// Returns the bar with all categories that are not in `ranks` summed into one part.
pub(super) fn folded(bar: &Bar, ranks: &[String]) -> Bar {
    fold_into(bar, |name| ranks.iter().any(|rank| rank == name), SMALLER)
}

/// Name of a part that is a sum of small categories.
const SMALLER: &str = "smaller";

fn fold_into(bar: &Bar, is_kept: impl Fn(&str) -> bool, what: &str) -> Bar {
    let is_small = |part: &Segment| part.kind == Kind::Category && !is_kept(&part.name);
    let (small, mut segments): (Vec<Segment>, Vec<Segment>) =
        bar.segments.iter().cloned().partition(is_small);
    if !small.is_empty() {
        let bytes = sum(small.iter().map(|part| part.bytes));
        // A single small category keeps its name, without a colour.
        let name = match small.as_slice() {
            [one] if what == SMALLER => one.name.clone(),
            _ => format!("({} {what})", thousands(small.len() as u64)),
        };
        segments.push(Segment { name, bytes, kind: Kind::Smaller });
    }
    Bar { segments, ..bar.clone() }
}

impl Bar {
    /// Makes a bar whose total is the sum of `parts`.
    pub fn of(title: impl Into<String>, segments: Vec<Segment>) -> Self {
        let total_bytes = sum(segments.iter().map(|part| part.bytes));
        Bar { title: title.into(), total_bytes, segments }
    }

    /// Returns the lower and the upper end of the stacked parts; negative parts are below zero.
    pub(super) fn span(&self) -> (i64, i64) {
        let bytes = || self.segments.iter().map(|part| part.bytes);
        (sum(bytes().filter(|bytes| *bytes < 0)), sum(bytes().filter(|bytes| *bytes > 0)))
    }

    /// Returns the smallest part or 0, and the largest part or 0, for bars that are not stacked.
    pub(super) fn parts_span(&self) -> (i64, i64) {
        let bytes = || self.segments.iter().map(|part| part.bytes);
        (bytes().min().unwrap_or(0).min(0), bytes().max().unwrap_or(0).max(0))
    }
}

/// Sums the categories that are at most this percentage of every bar into one part. Returns the bars, and the summed categories
/// with their largest amounts, the largest first.
pub(super) fn hide(bars: &[Bar], percent: f64) -> (Vec<Bar>, Vec<(String, i64)>) {
    let is_small = |bar: &Bar, part: &Segment| {
        let share = part.bytes.saturating_abs() as f64 * 100.0 / bar.total_bytes.max(1) as f64;
        share <= percent
    };
    let mut all: BTreeMap<String, (bool, i64)> = BTreeMap::new();
    for bar in bars {
        for part in categories(bar) {
            let known = all.entry(part.name.clone()).or_insert((true, 0));
            known.0 &= is_small(bar, part);
            known.1 = known.1.max(part.bytes);
        }
    }
    let hidden = all.into_iter().filter(|(_, (is_small, _))| *is_small);
    let hidden = largest_first(hidden.map(|(name, (_, bytes))| (name, bytes)));
    let names: BTreeSet<&str> = hidden.iter().map(|(name, _)| name.as_str()).collect();
    let bars = bars.iter().map(|bar| fold_into(bar, |name| !names.contains(name), "hidden")).collect();
    (bars, hidden)
}

/// Sums all parts of kind `Smaller` into one part.
pub(super) fn merged(bar: Bar) -> Bar {
    let (small, mut segments): (Vec<Segment>, Vec<Segment>) =
        bar.segments.into_iter().partition(|part| part.kind == Kind::Smaller);
    let bytes = sum(small.iter().map(|part| part.bytes));
    if bytes != 0 {
        segments.push(Segment { name: "(smaller)".into(), bytes, kind: Kind::Smaller });
    }
    Bar { segments, ..bar }
}

/// Sums small categories so that the bars have at most `limit` names. Returns these names, the largest first, and the bars.
pub fn folded_to(bars: &[Bar], limit: usize) -> (Vec<String>, Vec<Bar>) {
    let mut names = largest(bars, limit);
    let bars: Vec<Bar> = bars.iter().map(|bar| merged(folded(bar, &names))).collect();
    for part in bars.iter().flat_map(|bar| &bar.segments).filter(|part| part.kind != Kind::Category) {
        if !names.contains(&part.name) {
            names.push(part.name.clone());
        }
    }
    (names, bars)
}
