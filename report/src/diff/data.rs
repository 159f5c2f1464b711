//! The comparison as JSON, CSV and a picture.
//!
//! The JSON is documented in docs/compare.md. All amounts are bytes as integers; an unknown amount is null, never 0. New fields
//! may be added at any time; any other change increments `version`.
//!
//! The CSV has one line for each row, for each pair of devices and each grouping. In each column of bytes, the lines of a
//! grouping add up to the bytes that NVML charges. Without an NVML reading they add up to `tracked`. `part` is `category`,
//! `others`, `pool_idle`, `opaque`, `predates`, `uncovered`, or a part of untrackable memory as in the report's CSV. An unknown
//! amount is empty.

use super::gate::Verdict;
use super::text::Shown;
use super::{At, Diff, Pair, Pairing, SIDES, Side, difference, summary};
use crate::encode::{csv_field, csv_number, object};
use crate::labels::label;
use crate::plot::{Bar, Drawing, Frame, Kind, Segment, bars, by_name};
use crate::{Columns, GroupBy, Part};
use gpumem_model::escape::escape;
use gpumem_model::run::{Moment, UntrackableParts};
use serde::Serialize;
use std::fmt::Write;

/// Returns the comparison as one JSON document.
pub fn json(diff: &Diff<'_>, gate: Option<&Verdict>) -> String {
    let sentence =
        diff.whole().map(|pair| summary::sentence(diff, pair, &Shown::of(pair.table(diff.by), usize::MAX)));
    gpumem_model::escape::json(&object! {
        schema: "gpumem.diff",
        version: 1,
        at: if diff.at == At::Peak { "peak" } else { "now" },
        rules: &diff.rules,
        // The first sentence of the text form of the comparison.
        sentence: sentence.unwrap_or_default(),
        a: side_json(&diff.sides[0]),
        b: side_json(&diff.sides[1]),
        pairs: diff.pairs.iter().map(|pair| pair_json(diff, pair, Some(pair.paired))).collect::<Vec<_>>(),
        // The sum of all pairs; null if there is only one.
        total: diff.total.as_ref().map(|pair| pair_json(diff, pair, None)),
        // Result of the check; null without `--fail-above`.
        gate,
    })
}

fn side_json(side: &Side<'_>) -> impl Serialize {
    let run = side.run;
    object! {
        run: side.id.as_deref(),
        source: &run.source,
        clock: &run.clock,
        process: &run.process,
        state: &run.state,
        coverage: &run.coverage,
        caveats: &run.caveats,
    }
}

/// Returns the JSON of a pair of devices. `paired` is how they were matched; `None` for the sum of all pairs.
fn pair_json(diff: &Diff<'_>, pair: &Pair, paired: Option<Pairing>) -> impl Serialize {
    let table = pair.table(GroupBy::Structure);
    let of = |part: Part| amounts(table.bytes(part));
    let tracked = table.bytes(Part::Tracked);
    // Tables omit rows that are zero on both sides, so a missing row is zero if `tracked` is known.
    let or_nothing = |part: Part| match table.statement.row(part) {
        Some(_) => amounts(table.bytes(part)),
        None => amounts(tracked.map(|sum| sum.map(|_| 0))),
    };
    let device = |side: usize| {
        let (device, moment) = (diff.device(pair, side)?, pair.moments.get(side)?);
        Some(object! {
            name: &device.name,
            ordinal: device.ordinal,
            model: &device.model,
            time_ns: moment.time_ns,
            gap_distance_ns: moment.gap_distance_ns,
        })
    };
    let named = |by: GroupBy| {
        let leaves = leaves(pair, by).into_iter().filter(|leaf| matches!(leaf.part, "category" | "others"));
        leaves.map(Leaf::entry).collect::<Vec<_>>()
    };
    let gap = leaves(pair, GroupBy::Structure).into_iter().filter(|leaf| leaf.is_gap);
    let gap = gap.map(|leaf| Leaf { name: leaf.part.to_owned(), ..leaf }.entry());
    object! {
        a: device(0),
        b: device(1),
        paired,
        used: of(Part::Used),
        predates: or_nothing(Part::Predates),
        tracked: amounts(tracked),
        pool_idle: or_nothing(Part::PoolIdle),
        opaque: or_nothing(Part::Opaque),
        untrackable: of(Part::Untrackable),
        untrackable_parts: gap.collect::<Vec<_>>(),
        // The sum of layers, idle bytes and opaque bytes (pools that report no blocks) is `tracked`.
        layers: named(GroupBy::Layer),
        structures: named(GroupBy::Structure),
        tags: named(GroupBy::Tag),
        doubts: &pair.doubts,
    }
}

fn amounts([a_bytes, b_bytes]: Columns) -> impl Serialize {
    object! { a_bytes, b_bytes, difference_bytes: difference([a_bytes, b_bytes]) }
}

/// A row of the comparison without subordinate rows.
#[derive(Default)]
struct Leaf {
    part: &'static str,
    name: String,
    bytes: Columns,
    /// The only side (`a` or `b`) that ever had memory with the row's name; absent if both had.
    only_in: Option<&'static str>,
    is_gap: bool,
}

impl Leaf {
    fn entry(self) -> impl Serialize {
        object! { name: self.name, #[serde(flatten)] amounts: amounts(self.bytes), only_in: self.only_in }
    }
}

/// Returns the rows of a grouping that `used` consists of. Each byte is in exactly one row.
fn leaves(pair: &Pair, by: GroupBy) -> Vec<Leaf> {
    let table = pair.table(by);
    let mut leaves = Vec::new();
    for (row, only) in table.statement.rows.iter().zip(&table.only) {
        let (part, name) = match row.part {
            Part::Category => ("category", row.name.as_str()),
            Part::Others => ("others", by.name_of_rest()),
            Part::PoolIdle => ("pool_idle", ""),
            Part::Opaque => ("opaque", ""),
            Part::Predates => ("predates", ""),
            _ => continue,
        };
        let only_in = only.map(|side| if side == 0 { "a" } else { "b" });
        leaves.push(Leaf { part, name: name.to_owned(), bytes: row.bytes, only_in, is_gap: false });
    }
    let uncovered = |moment: &Moment| moment.used_bytes().filter(|_| moment.tracked_bytes.is_none());
    let bytes = pair.moments.each_ref().map(uncovered);
    if bytes != [None, None] {
        leaves.push(Leaf { part: "uncovered", bytes, ..Leaf::default() });
    }
    let parts = pair.moments.each_ref().map(|moment| moment.tracked_bytes.and(moment.gap_parts()));
    let parts = parts.map(|parts| parts.map(|parts| parts.each()));
    if parts.iter().any(Option::is_some) {
        for (index, (part, ..)) in UntrackableParts::default().each().into_iter().enumerate() {
            let bytes = parts.map(|parts| parts.map(|parts| parts[index].2));
            if part == "unexplained" || bytes.iter().flatten().any(|bytes| *bytes != 0) {
                leaves.push(Leaf { part, bytes, is_gap: true, ..Leaf::default() });
            }
        }
    }
    leaves
}

/// Returns the comparison as CSV.
pub fn csv(diff: &Diff<'_>) -> String {
    let head = "device_a,device_b,grouping,part,name,a_bytes,b_bytes,difference_bytes,only_in\n";
    let mut out = head.to_owned();
    for pair in &diff.pairs {
        GroupBy::ALL.into_iter().for_each(|by| csv_rows(diff, pair, by, &mut out));
    }
    out
}

fn csv_rows(diff: &Diff<'_>, pair: &Pair, by: GroupBy, out: &mut String) {
    let [a, b] =
        [0, 1].map(|side| diff.device(pair, side).map(|device| csv_field(&device.name)).unwrap_or_default());
    for row in leaves(pair, by) {
        let (by, part, name) = (by.name(), row.part, csv_field(&row.name));
        let bytes = [row.bytes[0], row.bytes[1], difference(row.bytes)].map(csv_number).join(",");
        let _ = writeln!(out, "{a},{b},{by},{part},{name},{bytes},{}", row.only_in.unwrap_or(""));
    }
}

/// Returns a picture of A and B as two bars on one scale; the same category has the same colour in both. Each bar adds up to
/// `used`, or to the known part of `used`. `None` if neither run has memory on a GPU.
pub fn picture(diff: &Diff<'_>) -> Option<Drawing> {
    let pair = diff.whole()?;
    let shown = Shown::of(pair.table(diff.by), usize::MAX);
    let heading = diff.sides.each_ref().map(|side| match &side.id {
        Some(id) => format!("{} {id}", label(side.run)),
        None => label(side.run),
    });
    let both = [0, 1].map(|side| bar(pair, diff.by, side, format!("{}  {}", SIDES[side], heading[side])));
    let frame = Frame {
        title: heading.join(" and "),
        lines: vec![
            escape(&summary::sentence(diff, pair, &shown)),
            format!("{}; {}", summary::basis(diff), by_name(diff.by)),
        ],
        notes: summary::shift(&shown).into_iter().chain(summary::doubts(pair)).collect(),
    };
    Some(frame.around(vec![bars(&both)], 1))
}

fn bar(pair: &Pair, by: GroupBy, side: usize, title: String) -> Bar {
    let mut segments = Vec::new();
    let moment = &pair.moments[side];
    if moment.tracked_bytes.is_none() {
        let (name, bytes) = ("used (no agent)".to_owned(), moment.used_bytes().unwrap_or(0));
        segments.push(Segment { name, bytes, kind: Kind::Opaque });
    }
    for row in &pair.table(by).statement.rows {
        let kind = match row.part {
            Part::Category => Kind::Category,
            Part::Others => Kind::Others,
            Part::PoolIdle => Kind::Idle,
            Part::Opaque => Kind::Opaque,
            Part::Predates => Kind::Predates,
            Part::Untrackable => Kind::Untrackable,
            _ => continue,
        };
        segments.extend(row.bytes[side].map(|bytes| Segment { name: escape(&row.name), bytes, kind }));
    }
    segments.retain(|segment| segment.bytes != 0);
    Bar::of(title, segments)
}
