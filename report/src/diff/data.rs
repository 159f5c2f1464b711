//! The comparison as JSON and CSV.
//!
//! The JSON is documented in docs/compare.md. All amounts are bytes as integers; an unknown amount is null, never 0. New fields
//! may be added at any time; any other change increments `version`.
//!
//! The CSV has one line for each name, for each pair of devices and each grouping. The lines of a grouping add up to the bytes
//! that NVML charges (or to `tracked` without a sample), in all three columns of bytes. `part` is `category`, `others`,
//! `pool_idle`, `opaque`, `predates`, `uncovered`, or a part of untrackable memory as in the report's CSV. An unknown amount is
//! empty.

use super::gate::Verdict;
use super::text::Shown;
use super::{At, Diff, Pair, Paired, Side, difference, summary};
use crate::encode::{csv_field, csv_number, object};
use crate::{By, Part};
use gpumem_model::run::UntrackableParts;
use serde::Serialize;
use std::fmt::Write;

/// Value of `schema` in the JSON.
pub const SCHEMA: &str = "gpumem.diff";
/// Value of `version` in the JSON.
pub const VERSION: u32 = 1;

/// Returns the comparison as one JSON document.
pub fn json(diff: &Diff<'_>, gate: Option<&Verdict>) -> String {
    let sentence =
        diff.whole().map(|pair| summary::sentence(diff, pair, &Shown::of(pair.table(diff.by), usize::MAX)));
    gpumem_model::escape::json(&object! {
        schema: SCHEMA,
        version: VERSION,
        at: if diff.at == At::Peak { "peak" } else { "now" },
        rules: &diff.rules,
        // The first sentence of the text form.
        sentence: sentence.unwrap_or_default(),
        a: side_json(&diff.sides[0]),
        b: side_json(&diff.sides[1]),
        pairs: diff.pairs.iter().map(|pair| pair_json(diff, pair, Some(pair.paired))).collect::<Vec<_>>(),
        // The sum of all pairs; null if there is only one.
        total: diff.total.as_ref().map(|pair| pair_json(diff, pair, None)),
        // Null without `--fail-above`.
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

/// `paired` is null for the sum of all pairs.
fn pair_json(diff: &Diff<'_>, pair: &Pair, paired: Option<Paired>) -> impl Serialize {
    let table = pair.table(By::Structure);
    let of = |part: Part| amounts(table.bytes(part));
    let tracked = table.bytes(Part::Tracked);
    // Tables leave out rows that are zero on both sides.
    let or_nothing = |part: Part| match table.row(part) {
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
    let named = |by: By| {
        let leaves = leaves(pair, by).into_iter().filter(|leaf| matches!(leaf.part, "category" | "others"));
        leaves.map(Leaf::entry).collect::<Vec<_>>()
    };
    let gap = leaves(pair, By::Structure).into_iter().filter(|leaf| leaf.is_gap);
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
        // Layers plus idle and opaque bytes add up to `tracked`.
        layers: named(By::Layer),
        structures: named(By::Structure),
        tags: named(By::Tag),
        doubts: &pair.doubts,
    }
}

fn amounts([a_bytes, b_bytes]: [Option<i64>; 2]) -> impl Serialize {
    object! { a_bytes, b_bytes, difference_bytes: difference(&[a_bytes, b_bytes]) }
}

/// A row without parts.
pub(super) struct Leaf {
    pub(super) part: &'static str,
    pub(super) name: String,
    pub(super) a: Option<i64>,
    pub(super) b: Option<i64>,
    /// `a` or `b` if the other side has no record of that name.
    pub(super) only_in: Option<&'static str>,
    is_gap: bool,
}

impl Leaf {
    fn entry(self) -> impl Serialize {
        object! { name: self.name, #[serde(flatten)] amounts: amounts([self.a, self.b]), only_in: self.only_in }
    }
}

/// Returns the rows of a grouping that `used` consists of: each byte is in exactly one.
pub(super) fn leaves(pair: &Pair, by: By) -> Vec<Leaf> {
    let table = pair.table(by);
    let mut leaves = Vec::new();
    for (row, only) in table.statement.rows.iter().zip(&table.only) {
        let [a, b] = [0, 1].map(|column| row.bytes.get(column).copied().flatten());
        let part = match row.part {
            Part::Category => "category",
            Part::Others => "others",
            Part::PoolIdle => "pool_idle",
            Part::Opaque => "opaque",
            Part::Predates => "predates",
            _ => continue,
        };
        let name = match row.part {
            Part::Category => row.name.clone(),
            Part::Others => by.name_of_rest().to_owned(),
            _ => String::new(),
        };
        let only_in = only.map(|side| if side == 0 { "a" } else { "b" });
        leaves.push(Leaf { part, name, a, b, only_in, is_gap: false });
    }
    let uncovered = pair.moments.each_ref().map(|moment| match moment.tracked_bytes {
        Some(_) => None,
        None => moment.used_bytes(),
    });
    if uncovered.iter().any(Option::is_some) {
        let [a, b] = uncovered;
        leaves.push(Leaf { part: "uncovered", name: String::new(), a, b, only_in: None, is_gap: false });
    }
    let parts = pair.moments.each_ref().map(|moment| moment.tracked_bytes.and(moment.gap_parts()));
    if parts.iter().any(Option::is_some) {
        let bytes = |parts: Option<UntrackableParts>| parts.map(|parts| parts.each());
        let [a, b] = parts.map(bytes);
        for (index, (part, _, _)) in UntrackableParts::default().each().into_iter().enumerate() {
            let of =
                |parts: &Option<[(&'static str, &'static str, i64); 6]>| Some(parts.as_ref()?.get(index)?.2);
            let [a, b] = [of(&a), of(&b)];
            if part == "unexplained" || [a, b].iter().any(|bytes| bytes.is_some_and(|bytes| bytes != 0)) {
                leaves.push(Leaf { part, name: String::new(), a, b, only_in: None, is_gap: true });
            }
        }
    }
    leaves
}

/// First line of the CSV.
pub const CSV_HEADER: &str = "device_a,device_b,grouping,part,name,a_bytes,b_bytes,difference_bytes,only_in";

/// Returns the comparison as CSV.
pub fn csv(diff: &Diff<'_>) -> String {
    let mut out = format!("{CSV_HEADER}\n");
    for pair in &diff.pairs {
        for by in [By::Layer, By::Structure, By::Tag] {
            csv_rows(diff, pair, by, &mut out);
        }
    }
    out
}

fn csv_rows(diff: &Diff<'_>, pair: &Pair, by: By, out: &mut String) {
    let [a, b] =
        [0, 1].map(|side| diff.device(pair, side).map(|device| csv_field(&device.name)).unwrap_or_default());
    for row in leaves(pair, by) {
        let _ = writeln!(
            out,
            "{a},{b},{},{},{},{},{},{},{}",
            by.name(),
            row.part,
            csv_field(&row.name),
            csv_number(row.a),
            csv_number(row.b),
            csv_number(difference(&[row.a, row.b])),
            row.only_in.unwrap_or("")
        );
    }
}
