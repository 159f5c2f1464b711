//! Finds growing memory. Judges the amounts at the begin of each step or forward pass, and the amounts over time for growth that
//! the former do not show.
//!
//! Memory that fluctuates can hide growth in the sum, so categories and tags are judged, too. The judgement over time omits
//! parameters, because a program that loads a model does not leak. It also omits activations in a program with steps, because
//! they grow within each forward pass, which may take minutes. Memory that rises again to an earlier level is not growth: a
//! cache that is dropped with each request.

mod beside;
mod course;
mod kept_by;
mod step_ends;
#[cfg(test)]
mod tests;

pub(super) use beside::{idle, pinned};

use self::course::Course;
use super::clues;
use super::finding::{Finding, KeptBy, Kind, Rate, Severity, mib};
use crate::amounts::{sum, sum_of, sums};
use crate::category::OTHERS;
use crate::judge::trend_test::{ALPHA, Judgement, Verdict, judge, warm_up};
use crate::judge::{Axis, Growth as Points};
use crate::names::OUTSIDE_TORCH;
use crate::rules::NO_TAG;
use crate::{GroupBy, Report, held, most_used, names};
use gpumem_model::escape::escape;
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Class, Device, Oom, State};
use gpumem_model::units::plural;
use gpumem_wire::Role;
use std::collections::BTreeMap;

/// Maximum number of tags that a finding names.
const NAMED: usize = 3;
/// Minimum share of the growth that a tag must have to be named in the finding.
const NAMED_SHARE: f64 = 0.1;
/// Minimum share of the growth that the named tags must have together. Otherwise their common path is named.
const COMMON_SHARE: f64 = 0.6;
/// Minimum growth, as a share of the process's memory.
const MATERIAL_SHARE: f64 = 0.02;
/// Minimum growth in bytes.
const MATERIAL_BYTES: f64 = 8.0 * 1_048_576.0;
/// Minimum number of forward passes for growth in a run that did not run out of memory, because a program may keep the results of
/// a short evaluation.
const LEAST_PASSES: u64 = 48;
/// Minimum duration in seconds for growth over time, because a shorter program is still starting.
const LEAST_SECONDS: f64 = 3.0;
/// Minimum rise of an amount's lowest level from the first to the second half of its growth, as a share of the growth. Without
/// fluctuations it is one half.
const LASTING_SHARE: f64 = 0.25;
/// Memory that has lost more than this share of its growth again is not growing.
const FALLEN_SHARE: f64 = 0.25;
/// Number of points at the end of which the highest is compared with the growth.
const LAST_POINTS: usize = 3;
/// Growth over time is reported in place of growth by steps only if it is this many times larger.
const CLEARLY_LARGER: f64 = 1.5;
/// Minimum confidence of growth for a forecast.
const CERTAIN: f64 = 0.99;
/// Longest time in seconds for which a forecast is made: 30 days.
const LONGEST_FORECAST_S: f64 = 30.0 * 86_400.0;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Growth {
    /// Number of bytes that were added and not released.
    pub bytes: i64,
    /// Bytes of all memory at the last point less those at the first one.
    since_first: i64,
    /// Unit of time of the rate: `step`, `forward pass`, `period` or `second`.
    axis: &'static str,
    /// Number of units of `axis` for which the memory grew.
    over: u64,
    pub confidence: f64,
    /// Time for which the memory grew, until now (ns); `None` if the growth may have ended.
    lasted_ns: Option<u64>,
    /// Time of the failed request (ns), after which the program may have continued without growth; `u64::MAX` without one.
    until_ns: u64,
    /// Tags that grow most, the largest first, or one path that contains many growing tags; each with the bytes by which it grew.
    names: Vec<(String, i64)>,
    /// Whether `names` is a path that contains many growing tags.
    is_in_many: bool,
    /// Whether the memory grew between the minority of the points that are judged.
    is_in_few_steps: bool,
    /// Number of the steps or forward passes that added memory, if others add nothing; `None` if that is unknown.
    jumps: Option<(u64, i64)>,
    /// Whether each step or forward pass adds different bytes.
    is_varied: bool,
    /// What keeps the memory, if the amounts show it.
    kept_by: Option<KeptBy>,
    /// The data structures (categories) that make up most of the growth, the one that grows most first.
    structures: Vec<String>,
}

/// Returns the growth of a device's memory until `oom`, or until its last moment.
pub(super) fn growth(report: &Report<'_>, device: &Device, oom: Option<&Oom>) -> Option<Growth> {
    let used = most_used_until(device, oom);
    let material = (used as f64 * MATERIAL_SHARE).max(MATERIAL_BYTES);
    let points = &device.details.growth;
    let least_passes = if oom.is_some() { 0 } else { LEAST_PASSES };
    let by_step = Course::of_steps(report, device, oom).and_then(|course| {
        course.judged(material, points.axis.name(), |judged| steps(points, judged, least_passes))
    });
    // Activations of one forward pass grow until its end, however long it takes.
    let is_one_pass = oom.is_some_and(|oom| oom.passes_without_backward.is_some_and(|passes| passes <= 1));
    let counts = if points.axis == Axis::Minute && !is_one_pass { is_live } else { is_kept };
    let by_time = Course::over_time(report, device, oom, counts)
        .and_then(|course| course.judged(material, "second", seconds));
    let growth = match (by_step, by_time) {
        (Some(by_step), Some(by_time)) if by_time.bytes as f64 > by_step.bytes as f64 * CLEARLY_LARGER => {
            Some(by_time)
        }
        (by_step, by_time) => by_step.or(by_time),
    };
    let growth = growth.or_else(|| step_ends::growth(report, device, oom?, used))?;
    let is_output = |name: &String| matches!(name.as_str(), "retained forward outputs" | "activations");
    let is_of_module = !growth.is_in_many && growth.structures.first().is_some_and(is_output);
    let varied = growth.names.as_slice();
    let varied = if growth.is_varied && is_of_module { varied } else { &[] };
    let kept_by = kept_by::first_of_many(report, varied).or(growth.kept_by);
    Some(Growth { kept_by, until_ns: oom.map_or(u64::MAX, |oom| oom.time_ns), ..growth })
}

/// Returns whether memory of a cell is in use and not a parameter.
fn is_live(cell: &Cell) -> bool {
    is_live_class(cell) && cell.role.as_deref() != Role::Parameter.name()
}

fn is_live_class(cell: &Cell) -> bool {
    matches!(cell.class, Class::Direct | Class::Block)
}

/// Returns whether such memory is not an activation.
fn is_kept(cell: &Cell) -> bool {
    is_live(cell) && cell.role.as_deref() != Role::Activation.name()
}

/// Returns the number of steps, forward passes or periods between the first and the last point of a judgement; `None` if these are
/// fewer than `least_passes` forward passes.
fn steps(points: &Points, judgement: &Judgement, least_passes: u64) -> Option<u64> {
    let least = if points.axis == Axis::ForwardPass { least_passes } else { 0 };
    Some(judgement.units().round() as u64).filter(|count| *count >= least)
}

/// Returns the number of seconds of a judgement; `None` if these are too few.
fn seconds(judgement: &Judgement) -> Option<u64> {
    Some(judgement.units()).filter(|length| *length >= LEAST_SECONDS).map(|length| length.round() as u64)
}

/// Returns the most bytes that the process used, including those at the time of `oom`.
fn most_used_until(device: &Device, oom: Option<&Oom>) -> i64 {
    let own = oom.and_then(|oom| oom.device.as_ref()?.holders.first()).map(|own| own.used_bytes);
    own.max(most_used(device)).unwrap_or(0)
}

impl Course<'_> {
    /// Judges the sum, the structures and the tags, and returns the growth of the one of the three that grows most. `over`
    /// returns the number of units of `axis` that a judgement covers; `None` if these are too few.
    fn judged(
        &self,
        material: f64,
        axis: &'static str,
        over: impl Fn(&Judgement) -> Option<u64>,
    ) -> Option<Growth> {
        let judged = |amounts: &[i64], among: usize| {
            let points = self.positions.iter().copied().zip(amounts.iter().map(|bytes| *bytes as f64));
            let judgement = judge(&points.collect::<Vec<_>>(), material, ALPHA / among.max(1) as f64);
            let grows =
                judgement.verdict == Verdict::Growing && self.is_lasting(&judgement, amounts, material);
            grows.then(|| (self.added(&judgement, amounts), judgement))
        };
        let parts = |series: &BTreeMap<&str, Vec<i64>>| {
            // Amounts that never changed by the minimum need no judgement.
            let moves = |amounts: &&Vec<i64>| {
                let (least, most) = (amounts.iter().min(), amounts.iter().max());
                least.zip(most).is_some_and(|(least, most)| most.saturating_sub(*least) as f64 >= material)
            };
            let moving = series.values().filter(moves);
            moving.filter_map(|amounts| judged(amounts, series.len())).collect::<Vec<_>>()
        };
        let whole = judged(&self.whole, 1).into_iter().collect();
        let groups = [whole, parts(&self.structures), parts(&self.tags)];
        let added = |group: &Vec<(i64, Judgement)>| sum(group.iter().map(|(bytes, _)| *bytes));
        let group = groups.iter().max_by_key(|group| added(group))?;
        let bytes = added(group);
        let (_, judgement) = *group.iter().max_by_key(|(bytes, _)| *bytes)?;
        if (bytes as f64) < material {
            return None;
        }
        let added = |series: &BTreeMap<&str, Vec<i64>>| -> Vec<(String, i64)> {
            let added = series.iter();
            added.map(|(name, amounts)| ((*name).to_owned(), self.added(&judgement, amounts))).collect()
        };
        let structures = main_parts(added(&self.structures), bytes);
        let tags = added(&self.tags);
        let names = largest(tags.clone(), bytes);
        Some(Growth {
            is_in_many: names.iter().any(|name| !tags.contains(name)),
            is_in_few_steps: axis != "second" && self.is_in_few_steps(&judgement, &names),
            jumps: self.jumps(&judgement, &names).filter(|_| axis != "second"),
            kept_by: self.frames(&judgement, bytes),
            is_varied: self.is_varied(
                &judgement,
                names.first().and_then(|(name, _)| self.tags.get(name.as_str())).unwrap_or(&self.whole),
            ),
            lasted_ns: self.lasted_ns(&judgement),
            until_ns: u64::MAX,
            since_first: self
                .whole
                .last()
                .zip(self.whole.first())
                .map_or(0, |(last, first)| last.saturating_sub(*first)),
            bytes,
            axis,
            over: over(&judgement)?,
            confidence: judgement.confidence.unwrap_or(0.0),
            names,
            structures,
        })
    }

    /// Returns the time between the first and the last point that `judgement` covers; `None` if later points exist.
    fn lasted_ns(&self, judgement: &Judgement) -> Option<u64> {
        let (first, last) = judgement.span?;
        let first = self.positions.iter().position(|position| *position >= first)?;
        (self.positions.last() <= Some(&last))
            .then(|| self.times_ns.last()?.checked_sub(*self.times_ns.get(first)?))?
    }

    /// Returns whether the last value of an amount clearly exceeds all values before the time that `judgement` covers, whether it
    /// has kept most of the growth, and whether its lowest level rises within this time, too. Values of the warm-up are ignored. The
    /// lowest level of memory that is dropped again and again does not rise.
    fn is_lasting(&self, judgement: &Judgement, amounts: &[i64], material: f64) -> bool {
        let Some((first, last)) = judgement.span else { return false };
        let amounts_in = |is_in: &dyn Fn(f64) -> bool| -> Vec<i64> {
            let points = self.positions.iter().zip(amounts).skip(warm_up(amounts.len()));
            points.filter(|(position, _)| is_in(**position)).map(|(_, bytes)| *bytes).collect()
        };
        let end = amounts.last().copied().unwrap_or(0);
        let earlier = amounts_in(&|at| at < first).into_iter().max();
        let middle = first + (last - first) / 2.0;
        let low = amounts_in(&|at| (first..middle).contains(&at)).into_iter().min();
        let later = amounts_in(&|at| (middle..=last).contains(&at)).into_iter().min();
        let growth = judgement.bytes_per_unit.unwrap_or(0.0) * judgement.units();
        let rise = growth * LASTING_SHARE;
        let most = amounts_in(&|at| (first..=last).contains(&at)).into_iter().max();
        // Of the last points the highest counts: each may be between two requests.
        let kept = amounts.iter().rev().take(LAST_POINTS).max().copied().unwrap_or(end);
        let has_fallen = most.is_some_and(|most| most.saturating_sub(kept) as f64 > growth * FALLEN_SHARE);
        !has_fallen
            && earlier.is_none_or(|earlier| end.saturating_sub(earlier) as f64 >= material)
            && low.zip(later).is_none_or(|(low, later)| later.saturating_sub(low) as f64 >= rise)
    }

    /// Returns the number of bytes by which an amount grew during the time that `judgement` covers.
    fn added(&self, judgement: &Judgement, amounts: &[i64]) -> i64 {
        let Some((first, last)) = judgement.span else { return 0 };
        let at = |position: f64| amounts.get(self.positions.iter().position(|found| *found >= position)?);
        match (at(first), at(last)) {
            (Some(first), Some(last)) => last.saturating_sub(*first),
            _ => 0,
        }
    }
}

/// Returns the names, the largest first, that together have the share [`COMMON_SHARE`] of `bytes`; at most [`NAMED`].
fn main_parts(mut names: Vec<(String, i64)>, bytes: i64) -> Vec<String> {
    names.sort_by_key(|(_, added)| std::cmp::Reverse(*added));
    let mut rest = (bytes as f64 * COMMON_SHARE) as i64;
    let is_needed = |(_, added): &(String, i64)| {
        let is_needed = rest > 0 && *added > 0;
        rest = rest.saturating_sub(*added);
        is_needed
    };
    names.into_iter().take_while(is_needed).take(NAMED).map(|(name, _)| name).collect()
}

/// Returns the names with the largest share of `bytes`. If many modules share the bytes, returns the path that contains them.
pub(super) fn largest(mut names: Vec<(String, i64)>, bytes: i64) -> Vec<(String, i64)> {
    let has = |share: f64, added: i64| added as f64 >= bytes as f64 * share;
    let paths = names
        .iter()
        .flat_map(|(name, added)| name.match_indices('/').map(|(end, _)| (name[..end].to_owned(), *added)));
    let below = sums(paths);
    names.retain(|(_, added)| has(NAMED_SHARE, *added));
    names.sort_by_key(|(_, added)| std::cmp::Reverse(*added));
    names.truncate(NAMED);
    let named = sum_of(&names);
    if !has(COMMON_SHARE, named) {
        let common = below.into_iter().filter(|(_, added)| has(COMMON_SHARE, *added));
        names.splice(0..0, common.max_by_key(|(path, _)| path.len()));
        names.truncate(1);
    }
    names
}

/// Returns whether a tag is a path, or is inside of it.
fn is_below(tag: &str, path: &str) -> bool {
    tag.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl Growth {
    /// Returns whether the growth lasted for few forward passes.
    pub fn is_short(&self) -> bool {
        self.axis == Axis::ForwardPass.name() && self.over < LEAST_PASSES
    }

    /// Returns the growth as far as `amounts` still have it; `None` if most of the named memory has been released.
    pub fn still_held(self, report: &Report<'_>, amounts: &Amounts) -> Option<Growth> {
        let is_named = |cell: &Cell| {
            let tag = cell.tag.as_deref().unwrap_or(NO_TAG);
            is_live_class(cell) && self.names.iter().any(|(name, _)| is_below(tag, name))
        };
        let named = sum_of(&self.names);
        let lost = named.saturating_sub(held(report.run, amounts, is_named)).max(0);
        if amounts.is_empty() || named <= 0 {
            return Some(self);
        }
        let is_lost = lost as f64 > named as f64 * FALLEN_SHARE;
        (!is_lost).then(|| Growth { bytes: self.bytes.saturating_sub(lost), ..self })
    }

    /// Returns the bytes that the growing tags and categories have in `amounts`.
    fn held_in(&self, report: &Report<'_>, amounts: &Amounts) -> i64 {
        let bytes_of = |(cell, bytes): &(u32, i64)| {
            let tag = report.cell(*cell).filter(|cell| is_live_class(cell))?.tag.as_deref();
            let structure = report.category(*cell, GroupBy::Structure).unwrap_or(OTHERS);
            let is_named = self.names.iter().any(|(name, _)| tag.is_some_and(|tag| is_below(tag, name)));
            (is_named || self.structures.iter().any(|name| name == structure)).then_some(*bytes)
        };
        sum(amounts.iter().filter_map(bytes_of))
    }

    /// Returns the number of seconds until the free bytes of the device are used up at this rate. `None` if the growth is uncertain
    /// or may have ended, if the free bytes are unknown, or if the device would not be full within [`LONGEST_FORECAST_S`].
    fn full_in_s(&self, device: &Device) -> Option<u64> {
        let free = device.reading?.free_bytes as f64;
        let seconds = self.lasted_ns.filter(|_| self.confidence >= CERTAIN)? as f64 / 1e9;
        let full_in_s = free * seconds / self.bytes.max(1) as f64;
        (full_in_s <= LONGEST_FORECAST_S).then_some(full_in_s as u64)
    }

    /// Returns the rate and the number of steps, forward passes, periods or seconds.
    pub fn rate(&self) -> String {
        let rate = self.bytes as f64 / self.over.max(1) as f64;
        let rate = match rate / 1_048_576.0 {
            mib if mib >= 1.0 => format!("{mib:.1} MiB"),
            mib => format!("{:.1} KiB", mib * 1024.0),
        };
        let whole = format!("+{rate} per {} over {}", self.axis, plural(self.over, self.axis));
        match self.jumps {
            Some((jumps, bytes)) => {
                let each = bytes / (jumps as i64).max(1);
                format!("{whole} ({jumps} of them add about {} MiB each, the others nothing)", mib(each))
            }
            None => whole,
        }
    }

    /// Returns the rate, with the bytes that it adds in the whole life of the process, or until the failed request. These are not
    /// less than those that were seen to be added, and at most `held`, the bytes of this memory that exist, or all that was added
    /// from the first point until now: other tags may have grown with these, or before them.
    fn whole(&self, device: &Device, held: i64) -> Rate {
        let points = &device.details.growth;
        let begun = points.points.iter().rev().find(|(_, time_ns)| *time_ns <= self.until_ns);
        let last = begun.filter(|_| points.latest.1 > self.until_ns).unwrap_or(&points.latest);
        let units = if points.axis.name() == self.axis { last.0.saturating_add(1) } else { self.over };
        let whole_bytes = self.bytes as f64 * units.max(self.over) as f64 / self.over.max(1) as f64;
        let bytes_per_unit = self.bytes / i64::try_from(self.over.max(1)).unwrap_or(i64::MAX);
        let most = held.max(self.bytes).max(self.since_first.saturating_add(bytes_per_unit));
        Rate {
            text: self.rate(),
            bytes_per_unit,
            is_over_time: self.axis == "second",
            whole_bytes: (whole_bytes as i64).min(most),
        }
    }

    /// Returns the growing memory in words: its structures, and the modules or lines that made it. A line without a structure made
    /// memory outside of every module.
    fn subject(&self) -> String {
        let names = self.names.iter().map(|(name, _)| name);
        let is_outside = |name: &String| name.ends_with(OUTSIDE_TORCH);
        let has_lines = self.structures.iter().any(|name| names::is_line(name) && !is_outside(name));
        let is_line = |name: &&String| has_lines && names::is_line(name) && !is_outside(name);
        let is_in_structure = |name: &String| {
            let is_same =
                |structure: &String| structure.strip_suffix(OUTSIDE_TORCH).unwrap_or(structure) == name;
            self.structures.iter().any(is_same)
        };
        let of_names = names.clone().filter(|name| is_line(name) && !is_in_structure(name));
        let lines = self.structures.iter().filter(is_line).chain(of_names);
        let lines = lines.map(|name| escape(name)).collect::<Vec<_>>().join(", ");
        let tensors =
            (!lines.is_empty()).then(|| format!("tensors made at {lines}, outside of every module"));
        let structures = self.structures.iter().filter(|name| *name != OTHERS && !is_line(name));
        let structures: Vec<String> = structures.map(|name| escape(name)).collect();
        let others = names.filter(|name| !is_in_structure(name) && !is_line(name));
        let others: Vec<String> = others.map(|name| escape(name)).collect();
        let modules = match (structures.join(" + "), others.join(", ")) {
            (structures, others) if others.is_empty() => structures,
            (structures, others) if structures.is_empty() => others,
            (structures, others) => format!("{structures} of {others}"),
        };
        let parts: Vec<String> =
            [Some(modules).filter(|text| !text.is_empty()), tensors].into_iter().flatten().collect();
        if parts.is_empty() { "memory".to_owned() } else { parts.join(" and ") }
    }

    /// Returns the growth as a finding. `used` is the number of bytes that the process used, and `amounts` are those of its cells
    /// then.
    pub fn finding(
        self,
        report: &Report<'_>,
        (device, amounts): (&Device, &Amounts),
        used: i64,
        severity: Severity,
    ) -> Finding {
        let subject = self.subject();
        let held = Some(self.held_in(report, amounts)).filter(|bytes| *bytes > 0).unwrap_or(used).min(used);
        let share = 100.0 * (self.bytes as f64 / used.max(1) as f64).min(1.0);
        let what = format!(
            "{subject}: {}, +{} MiB in total, {share:.0} % of the process's memory",
            self.rate(),
            mib(self.bytes),
        );
        Finding {
            confidence: Some(self.confidence),
            rate: Some(self.whole(device, held)),
            kept_by: self.kept_by,
            names: self.names,
            is_in_many: self.is_in_many,
            is_in_few_steps: self.is_in_few_steps,
            structures: self.structures,
            ..Finding::new(Kind::Growth, severity, Some(device), (self.bytes, used), what)
        }
    }
}

/// Returns the finding on growth in a run that did not run out of memory. For a live process, it has the time until the device is
/// full, if that can be forecast.
pub(super) fn finding(report: &Report<'_>, device: &Device) -> Option<Finding> {
    let growth = growth(report, device, None)?;
    let full_in_s = (report.run.state == State::Open).then(|| growth.full_in_s(device)).flatten();
    let amounts = &device.peak.amounts;
    let finding = growth.finding(report, (device, amounts), most_used_until(device, None), Severity::Warning);
    let mut finding = clues::with_clues(report, (None, amounts), finding);
    finding.full_in_s = full_in_s;
    if let Some(forecast) = finding.forecast() {
        finding.what = format!("{forecast}: {}", finding.what);
    }
    Some(finding)
}
