//! Formats the verdicts on the growth of a run's memory: as a sentence, as a table, and as JSON.

use super::table::{Align, Table, shorten};
use super::{GroupBy, Report, most_used};
use crate::judge::trend_test::{Judgement, Verdict};
use crate::judge::{Axis, Growth, judge_amounts, judge_samples, units};
use crate::labels::{device_title, label_with_pid};
use crate::lines::listed;
use gpumem_model::escape::escape;
use gpumem_model::run::Device;
use gpumem_model::units::{plural, thousands};
use serde::Serialize;
use std::collections::BTreeMap;

const NAMED: usize = 3;
const ROWS: usize = 16;
/// A `flat` verdict with lower confidence than this is shown with the bounds of its rate.
const SURE: f64 = 0.95;
/// Name for the sum of the cells whose amounts over time were not recorded separately.
const REST: &str = "(all other names)";

/// A category or a tag, with the verdict on its growth.
#[derive(Debug, Clone, Serialize)]
pub struct Named {
    pub name: String,
    #[serde(flatten)]
    pub judgement: Judgement,
}

/// Verdicts on all amounts of a device. `None` means that the amount is unknown.
#[derive(Debug, Clone, Serialize)]
pub struct GrowthReport {
    /// Unit of time of the rates: step, forward pass, period or minute.
    pub per: Axis,
    /// Length in ns of a period (interval after which the memory repeats), if rates are per period.
    pub period_ns: Option<u64>,
    /// Bytes of live allocations without the idle memory of pools.
    pub tracked: Option<Judgement>,
    /// Idle memory of pools.
    pub pool_slack: Option<Judgement>,
    /// Pinned host memory; `None` if there never was any.
    pub pinned: Option<Judgement>,
    pub gap: Option<Judgement>,
    /// Bytes that NVML charges, for a process without an agent.
    pub used: Option<Judgement>,
    pub layers: Vec<Named>,
    pub structures: Vec<Named>,
    pub tags: Vec<Named>,
}

/// Returns the verdicts on a device's amounts; `None` if the device has no data to judge.
pub fn growth_report(report: &Report<'_>, device: &Device) -> Option<GrowthReport> {
    growth_report_by(report, device, &GroupBy::ALL)
}

/// Returns the verdicts on a device's amounts, with names of the groupings `kinds` only.
fn growth_report_by(report: &Report<'_>, device: &Device, kinds: &[GroupBy]) -> Option<GrowthReport> {
    let growth = &device.details.growth;
    let used = most_used(device).unwrap_or(0);
    // Points recorded while the agent could see no allocation are not evidence.
    let is_seen =
        device.peak.tracked_bytes.is_some_and(|bytes| bytes != 0) || report.run.coverage.blind_count == 0;
    let has_points = is_seen && !growth.points.is_empty();
    let has_samples =
        |samples: &[(u64, i64)]| (!samples.is_empty()).then(|| judge_samples(growth, samples, used));
    let names_of = |by: GroupBy| {
        if is_seen && kinds.contains(&by) { names(report, growth, by, used) } else { Vec::new() }
    };
    let verdicts = GrowthReport {
        per: growth.axis,
        period_ns: growth.period_ns,
        tracked: has_points.then(|| judge_amounts(growth, &growth.named, used, 1)),
        pool_slack: has_points.then(|| judge_amounts(growth, &growth.slack, used, 1)),
        pinned: (has_points && !growth.pinned.is_empty())
            .then(|| judge_amounts(growth, &growth.pinned, used, 1)),
        gap: has_samples(&growth.gap),
        used: has_samples(&growth.used),
        layers: names_of(GroupBy::Layer),
        structures: names_of(GroupBy::Structure),
        tags: names_of(GroupBy::Tag),
    };
    (verdicts.tracked.is_some() || verdicts.gap.is_some() || verdicts.used.is_some()).then_some(verdicts)
}

/// Returns the categories or tags of a grouping with their verdicts, the fastest changes first.
fn names(report: &Report<'_>, growth: &Growth, by: GroupBy, used: i64) -> Vec<Named> {
    let mut sums: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    let others = by.name_of_rest();
    let cells =
        growth.cells.iter().map(|(cell, points)| (report.category(*cell, by).unwrap_or(others), points));
    let rest = growth.rest.iter().any(|bytes| *bytes != 0).then_some((REST, &growth.rest));
    for (name, points) in cells.chain(rest) {
        let sum = sums.entry(name).or_insert_with(|| vec![0; growth.points.len()]);
        sum.iter_mut().zip(points).for_each(|(sum, bytes)| *sum = sum.wrapping_add(*bytes));
    }
    let among = sums.len();
    let named = |(name, points): (&str, Vec<i64>)| Named {
        name: name.to_owned(),
        judgement: judge_amounts(growth, &points, used, among),
    };
    let mut names: Vec<Named> = sums.into_iter().map(named).collect();
    let weight = |Named { judgement, .. }: &Named| {
        let rate = judgement.bytes_per_unit.map_or(0, |rate| rate.abs() as u64);
        (judgement.verdict.moves(), judgement.verdict != Verdict::NotEnoughData, rate)
    };
    names.sort_by(|a, b| weight(b).cmp(&weight(a)).then_with(|| a.name.cmp(&b.name)));
    names
}

/// Returns the unit in which a rate is shown: its name and its size in bytes.
fn unit(rate: f64) -> (&'static str, f64) {
    match rate.abs() {
        rate if rate >= 1_048_576.0 => ("MiB", 1_048_576.0),
        rate if rate >= 1024.0 => ("KiB", 1024.0),
        _ => ("bytes", 1.0),
    }
}

fn signed(rate: f64, (_, bytes): (&str, f64)) -> String {
    let tenths = (rate / bytes * 10.0).round();
    let number = format!("{}.{:.0}", thousands((tenths.abs() / 10.0).floor() as u64), tenths.abs() % 10.0);
    match tenths {
        tenths if tenths > 0.0 => format!("+{number}"),
        tenths if tenths < 0.0 => format!("-{number}"),
        _ => number,
    }
}

fn percent(confidence: f64) -> String {
    let floor = (confidence * 1000.0).floor() / 10.0;
    if floor > 99.0 { format!("{floor:.1} %") } else { format!("{floor:.0} %") }
}

/// Formats an amount with its sign and unit: `+3.0 MiB`.
fn amount(bytes: f64) -> String {
    let unit = unit(bytes);
    format!("{} {}", signed(bytes, unit), unit.0)
}

/// Returns ` (within 3.0 MiB per step)` if the verdict is uncertain, because noise could hide a relevant change; else nothing.
fn doubt(judgement: &Judgement, per: Axis) -> String {
    let unsure = judgement.low_high.filter(|_| judgement.confidence.is_some_and(|sure| sure < SURE));
    let within = unsure.map(|(low, high)| amount(low.abs().max(high.abs())));
    let words = |within: String| format!(" (within {} per {})", within.trim_start_matches('+'), per.name());
    within.map(words).unwrap_or_default()
}

fn short(name: &str) -> String {
    const WIDTH: usize = 48;
    shorten(&escape(name), WIDTH, true)
}

fn moving(judgement: &Judgement, per: Axis) -> Option<String> {
    let rate = judgement.bytes_per_unit.filter(|_| judgement.verdict.moves())?;
    Some(format!("{} per {}", amount(rate), per.name()))
}

/// Returns the verdict on one amount as text. `over` is text that states the judged duration; it may be empty.
fn verdict_text(judgement: &Judgement, per: Axis, over: &str) -> String {
    let sure = judgement.confidence.map(percent).unwrap_or_default();
    match judgement.verdict {
        Verdict::Growing | Verdict::Shrinking => {
            format!("{}{over} ({sure} sure)", moving(judgement, per).unwrap_or_default())
        }
        Verdict::Flat => format!("flat{over}{}", doubt(judgement, per)),
        Verdict::OneJump => {
            format!("flat{over} but for one jump of {}", amount(judgement.jump_bytes.unwrap_or(0) as f64))
        }
        Verdict::NotEnoughData => "not judged: too few samples".to_owned(),
    }
}

/// Returns a sentence such as `growth: tracked flat over 400 steps; gap flat`; `None` without data to judge.
pub fn line(report: &Report<'_>, device: &Device) -> Option<String> {
    // A reader who may not see tags gets categories instead.
    let by = if report.hides_tags { GroupBy::Structure } else { GroupBy::Tag };
    let mut verdicts = growth_report_by(report, device, &[by])?;
    verdicts.tags.append(&mut verdicts.structures);
    let (growth, per) = (&device.details.growth, verdicts.per);
    let over = |judgement: &Judgement| format!(" over {}", plural(units(growth, judgement), per.name()));
    let is_judged = |judgement: &Judgement| judgement.verdict != Verdict::NotEnoughData;
    let mut parts = Vec::new();
    if let Some(used) = verdicts.used.filter(is_judged) {
        parts.push(format!("used {}", verdict_text(&used, per, &over(&used))));
    }
    if let Some(tracked) = verdicts.tracked.filter(is_judged) {
        let names = movers(&verdicts, tracked.bytes_per_unit.filter(|_| tracked.verdict.moves()));
        parts.push(format!("tracked {}{names}", verdict_text(&tracked, per, &over(&tracked))));
    }
    let beside = [("pool slack", verdicts.pool_slack), ("pinned host memory", verdicts.pinned)];
    parts.extend(
        beside.iter().filter_map(|(name, amount)| Some(format!("{name} {}", moving(amount.as_ref()?, per)?))),
    );
    if let Some(gap) = verdicts.gap.filter(|gap| is_judged(gap) || !parts.is_empty()) {
        parts.push(format!("Untrackable {}", verdict_text(&gap, per, "")));
    }
    if parts.is_empty() {
        return None;
    }
    let period =
        verdicts.period_ns.map(|length_ns| format!(" (a period is {:.2} s)", length_ns as f64 / 1e9));
    Some(format!("growth: {}{}", parts.join("; "), period.unwrap_or_default()))
}

/// Returns a text about the tags that grow or shrink. `whole` is the rate of the total if it changes; its unit is then used.
fn movers(verdicts: &GrowthReport, whole: Option<f64>) -> String {
    let movers: Vec<&Named> = verdicts.tags.iter().filter(|named| named.judgement.verdict.moves()).collect();
    if movers.is_empty() {
        return String::new();
    }
    let named = movers.iter().map(|named| {
        let name = short(&named.name);
        match (whole, named.judgement.bytes_per_unit) {
            (Some(whole), Some(rate)) => format!("{name} {}", signed(rate, unit(whole))),
            _ => format!("{name} {}", verdict_text(&named.judgement, verdicts.per, "")),
        }
    });
    let before = if whole.is_some() { ": " } else { ", but " };
    before.to_owned() + &listed(named, NAMED)
}

impl GrowthReport {
    /// Returns whether an amount of the whole device, or that of a tag, still grows or shrinks.
    pub(crate) fn moves(&self) -> bool {
        let amounts =
            [&self.tracked, &self.pool_slack, &self.pinned, &self.gap, &self.used].into_iter().flatten();
        amounts.chain(self.tags.iter().map(|tag| &tag.judgement)).any(|judgement| judgement.verdict.moves())
    }
}

/// Returns the verdicts on all devices as a table. With `all`, lists every category and tag.
pub fn table(report: &Report<'_>, all: bool) -> String {
    let mut out = format!("{}\n", label_with_pid(report.run));
    for device in &report.run.devices {
        out += &format!("\n{}\n", device_title(device));
        match growth_report(report, device) {
            Some(verdicts) => of_device(report, &verdicts, &device.details.growth, all, &mut out),
            None => out += "nothing to judge: no step, sample or allocation was observed\n",
        }
    }
    if report.run.devices.is_empty() {
        out += "no GPU memory was observed\n";
    }
    out + &format!("next: {} | {0} --json\n", report.command)
}

fn of_device(report: &Report<'_>, verdicts: &GrowthReport, growth: &Growth, all: bool, out: &mut String) {
    let mut rows: Vec<(String, Option<&Judgement>)> = Vec::new();
    let row = |name: &str, amount| (name.to_owned(), Some(amount));
    rows.extend(verdicts.used.as_ref().map(|used| row("used", used)));
    rows.extend(verdicts.tracked.as_ref().map(|tracked| row("tracked without slack", tracked)));
    let kinds: &[(&str, &[Named])] = match report.by {
        GroupBy::Layer => &[("by layer", &verdicts.layers), ("by tag", &verdicts.tags)],
        GroupBy::Structure => &[("by structure", &verdicts.structures), ("by tag", &verdicts.tags)],
        GroupBy::Tag => &[("by tag", &verdicts.tags)],
    };
    // Without `all`, flat names and names with too few points for a verdict are not in the table; a line below it counts each.
    let (mut flat, mut unjudged) = (Vec::new(), Vec::new());
    for (kind, names) in kinds {
        let is_shown = |named: &&Named| {
            all || !matches!(named.judgement.verdict, Verdict::Flat | Verdict::NotEnoughData)
        };
        let shown: Vec<&Named> = names.iter().filter(is_shown).collect();
        let most = if all { usize::MAX } else { ROWS };
        if !shown.is_empty() {
            rows.push((format!(" {kind}"), None));
        }
        let named = shown.iter().take(most).map(|named| (short(&named.name), &named.judgement));
        rows.extend(named.map(|(name, judgement)| (format!("  {name}"), Some(judgement))));
        if shown.len() > most {
            rows.push((format!("  ({} more: --all)", thousands((shown.len() - most) as u64)), None));
        }
        let count = |verdict: Verdict| {
            let names = names.iter().filter(|named| named.judgement.verdict == verdict);
            Some(names.count() as u64).filter(|count| *count > 0 && !all)
        };
        let what = kind.trim_start_matches("by ");
        flat.extend(count(Verdict::Flat).map(|count| plural(count, what)));
        unjudged.extend(count(Verdict::NotEnoughData).map(|count| plural(count, what)));
    }
    let others = [
        ("pool slack", &verdicts.pool_slack),
        ("pinned host memory", &verdicts.pinned),
        ("Untrackable", &verdicts.gap),
    ];
    for (name, judgement) in others.into_iter().filter_map(|(name, of)| Some((name, of.as_ref()?))) {
        match judgement.verdict {
            Verdict::Flat if !all => flat.push(name.to_owned()),
            _ => rows.push(row(name, judgement)),
        }
    }
    let rates = rows.iter().filter_map(|(_, judgement)| (*judgement)?.bytes_per_unit);
    let unit = unit(rates.map(f64::abs).fold(0.0, f64::max));
    let mut table =
        Table::new([Align::Left, Align::Right, Align::Left, Align::Right, Align::Right, Align::Right]);
    let per = format!("{} per {}", unit.0, verdicts.per.name());
    table.row(["", per.as_str(), "verdict", "sure", "points", "over"]);
    for (name, judgement) in rows {
        let Some(judgement) = judgement else {
            table.row([name]);
            continue;
        };
        let verdict = match judgement.jump_bytes {
            Some(bytes) => format!("one jump of {}", amount(bytes as f64)),
            None => judgement.verdict.name().to_owned(),
        };
        let over = || plural(units(growth, judgement), verdicts.per.name());
        table.row([
            name,
            judgement.bytes_per_unit.map_or("-".to_owned(), |rate| signed(rate, unit)),
            verdict,
            judgement.confidence.map_or("-".to_owned(), percent),
            judgement.points.to_string(),
            judgement.span.map_or("-".to_owned(), |_| over()),
        ]);
    }
    *out += &table.text();
    for (what, names) in [("flat", flat), ("too few points to judge", unjudged)] {
        if !names.is_empty() {
            *out += &format!("{what}: {} (--all lists them)\n", names.join(", "));
        }
    }
}
