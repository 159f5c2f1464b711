//! The comparison as JSON and CSV.
//!
//! The JSON is documented in docs/compare.md. All amounts are bytes as integers; an unknown amount is null, never 0. New fields
//! may be added at any time; any other change increments `version`.
//!
//! The CSV has one line for each name, for each pair of devices and each grouping. The lines of a grouping add up to the bytes
//! that NVML charges (or to `tracked` without a sample), in all three columns of bytes:
//! `device_a,device_b,grouping,part,name,a_bytes,b_bytes,difference_bytes,only_in`. `grouping` is `layer`, `structure` or `tag`.
//! `part` is `category`, `others`, `pool_idle`, `opaque`, `predates`, `uncovered`, or a part of the gap as in the report's CSV.
//! An unknown amount is empty.

use super::gate::Verdict;
use super::text::Shown;
use super::{At, Diff, Pair, Paired, Side, Uncertainty, difference, nameless, summary};
use crate::csv::field;
use crate::{By, Part};
use gpumem_model::run::{Caveat, Clock, Coverage, Device, Parts, Process, Source, State};
use serde::Serialize;
use std::fmt::Write;

/// Value of `schema` in the JSON.
pub const SCHEMA: &str = "gpumem.diff";
/// Value of `version` in the JSON.
pub const VERSION: u32 = 1;

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    version: u32,
    at: &'static str,
    rules: &'a str,
    /// The first sentence of the text form.
    sentence: String,
    a: SideJson<'a>,
    b: SideJson<'a>,
    pairs: Vec<PairJson<'a>>,
    /// The sum of all pairs; null if there is only one.
    total: Option<PairJson<'a>>,
    /// Null without `--fail-above`.
    gate: Option<&'a Verdict>,
}

#[derive(Serialize)]
struct SideJson<'a> {
    run: Option<&'a str>,
    source: &'a Source,
    clock: &'a Clock,
    process: &'a Process,
    state: &'a State,
    coverage: &'a Coverage,
    caveats: &'a [Caveat],
}

#[derive(Serialize)]
struct PairJson<'a> {
    a: Option<DeviceJson<'a>>,
    b: Option<DeviceJson<'a>>,
    /// `uuid`, `number`, `rank`, `order` or `alone`; null for the sum of all pairs.
    paired: Option<&'static str>,
    used: Amounts,
    predates: Amounts,
    tracked: Amounts,
    pool_idle: Amounts,
    opaque: Amounts,
    untrackable: Amounts,
    untrackable_parts: Vec<Entry>,
    /// Layers plus idle and opaque bytes add up to `tracked`.
    layers: Vec<Entry>,
    structures: Vec<Entry>,
    tags: Vec<Entry>,
    doubts: &'a [Uncertainty],
}

#[derive(Serialize)]
struct DeviceJson<'a> {
    name: &'a str,
    ordinal: u16,
    model: &'a str,
    time_ns: u64,
    gap_distance_ns: i64,
}

#[derive(Serialize)]
struct Amounts {
    a_bytes: Option<i64>,
    b_bytes: Option<i64>,
    difference_bytes: Option<i64>,
}

impl Amounts {
    fn of([a, b]: [Option<i64>; 2]) -> Self {
        Amounts { a_bytes: a, b_bytes: b, difference_bytes: difference(&[a, b]) }
    }
}

#[derive(Serialize)]
struct Entry {
    name: String,
    #[serde(flatten)]
    amounts: Amounts,
    /// `a` or `b` if the other side has no record of that name.
    only_in: Option<&'static str>,
}

/// Returns the comparison as one JSON document.
pub fn json(diff: &Diff<'_>, gate: Option<&Verdict>) -> String {
    let [a, b] = &diff.sides;
    let sentence = diff
        .whole()
        .map(|pair| summary::sentence(diff, pair, &Shown::of(pair.table(diff.by), usize::MAX)))
        .unwrap_or_default();
    let document = Document {
        schema: SCHEMA,
        version: VERSION,
        at: if diff.at == At::Peak { "peak" } else { "now" },
        rules: &diff.rules,
        sentence,
        a: side_json(a),
        b: side_json(b),
        pairs: diff.pairs.iter().map(|pair| pair_json(diff, pair)).collect(),
        total: diff.total.as_ref().map(|pair| PairJson { paired: None, ..pair_json(diff, pair) }),
        gate,
    };
    gpumem_model::harmless::json(&document)
}

fn side_json<'a>(side: &'a Side<'_>) -> SideJson<'a> {
    let run = side.run;
    SideJson {
        run: side.id.as_deref(),
        source: &run.source,
        clock: &run.clock,
        process: &run.process,
        state: &run.state,
        coverage: &run.coverage,
        caveats: &run.caveats,
    }
}

fn pair_json<'a>(diff: &'a Diff<'_>, pair: &'a Pair) -> PairJson<'a> {
    let table = pair.table(By::Structure);
    let of = |part: Part| Amounts::of(table.bytes(part));
    let tracked = table.bytes(Part::Tracked);
    // Tables leave out rows that are zero on both sides.
    let or_nothing = |part: Part, sum: [Option<i64>; 2]| match table.row(part) {
        Some(_) => Amounts::of(table.bytes(part)),
        None => Amounts::of(sum.map(|sum| sum.map(|_| 0))),
    };
    let device = |side: usize| {
        let device: &'a Device = diff.sides.get(side)?.run.devices.get((*pair.devices.get(side)?)?)?;
        let moment = pair.moments.get(side)?;
        Some(DeviceJson {
            name: &device.name,
            ordinal: device.ordinal,
            model: &device.model,
            time_ns: moment.time_ns,
            gap_distance_ns: moment.gap_distance_ns,
        })
    };
    let named = |by: By| {
        let entries = leaves(pair, by).into_iter().filter(|leaf| matches!(leaf.part, "category" | "others"));
        entries.map(|leaf| leaf.entry()).collect()
    };
    let gap = leaves(pair, By::Structure)
        .into_iter()
        .filter(|leaf| leaf.is_gap)
        .map(|leaf| Leaf { name: leaf.part.to_owned(), ..leaf });
    PairJson {
        a: device(0),
        b: device(1),
        paired: Some(match pair.paired {
            Paired::Uuid => "uuid",
            Paired::Number => "number",
            Paired::Rank => "rank",
            Paired::Order => "order",
            Paired::Alone => "alone",
        }),
        used: of(Part::Used),
        predates: or_nothing(Part::Predates, tracked),
        tracked: Amounts::of(tracked),
        pool_idle: or_nothing(Part::PoolIdle, tracked),
        opaque: or_nothing(Part::Opaque, tracked),
        untrackable: of(Part::Untrackable),
        untrackable_parts: gap.map(Leaf::entry).collect(),
        layers: named(By::Layer),
        structures: named(By::Structure),
        tags: named(By::Tag),
        doubts: &pair.doubts,
    }
}

/// A row without parts.
pub(super) struct Leaf {
    pub(super) part: &'static str,
    pub(super) name: String,
    pub(super) a: Option<i64>,
    pub(super) b: Option<i64>,
    pub(super) only_in: Option<&'static str>,
    is_gap: bool,
}

impl Leaf {
    fn entry(self) -> Entry {
        Entry { name: self.name, amounts: Amounts::of([self.a, self.b]), only_in: self.only_in }
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
            Part::Others => nameless(by).to_owned(),
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
        let bytes = |parts: Option<Parts>| parts.map(|parts| parts.each());
        let [a, b] = parts.map(bytes);
        for (index, (part, _, _)) in Parts::default().each().into_iter().enumerate() {
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
        for (by, name) in [(By::Layer, "layer"), (By::Structure, "structure"), (By::Tag, "tag")] {
            csv_rows(diff, pair, by, name, &mut out);
        }
    }
    out
}

fn csv_rows(diff: &Diff<'_>, pair: &Pair, by: By, grouping: &str, out: &mut String) {
    let device = |side: usize| {
        let device = diff.sides.get(side)?.run.devices.get((*pair.devices.get(side)?)?);
        device.map(|device| field(&device.name))
    };
    let [a, b] = [0, 1].map(|side| device(side).unwrap_or_default());
    for row in leaves(pair, by) {
        let number = |bytes: Option<i64>| bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
        let _ = writeln!(
            out,
            "{a},{b},{grouping},{},{},{},{},{},{}",
            row.part,
            field(&row.name),
            number(row.a),
            number(row.b),
            number(difference(&[row.a, row.b])),
            row.only_in.unwrap_or("")
        );
    }
}
