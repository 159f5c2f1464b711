//! Finds growing memory: by its amounts at the begin of each step, and over time for growth that steps do not show.
//!
//! Fluctuating memory can hide growth in the sum, so the parts are judged, too. The judgement over time leaves out parameters,
//! because a program that loads a model does not leak.

use super::{Finding, Kind, Severity, mib};
use crate::category::OTHERS;
use crate::judge::trend_test::{ALPHA, Judgement, Verdict, judge};
use crate::judge::{Axis, units};
use crate::rules::NO_TAG;
use crate::{By, Report, sum, sum_of, sums};
use gpumem_model::escape::escape;
use gpumem_model::names::Named;
use gpumem_model::run::{Class, Device, Oom};
use gpumem_model::timeline::Point;
use gpumem_model::units::plural;
use gpumem_wire::Role;
use std::collections::BTreeMap;

/// Names in a finding.
const NAMED: usize = 3;
/// A name with less than this share of the growth is not mentioned.
const NAMED_SHARE: f64 = 0.1;
/// Minimum share of the growth that the names, or their common path, must explain.
const COMMON_SHARE: f64 = 0.6;
/// Minimum growth, as a share of the process's memory.
const MATERIAL_SHARE: f64 = 0.02;
/// Minimum growth in bytes.
const MATERIAL_BYTES: f64 = 8.0 * 1_048_576.0;
/// Minimum duration in seconds for growth over time: a shorter program is still starting.
const LEAST_SECONDS: f64 = 3.0;
/// Maximum number of judged points: the judgement of n points takes n * n steps.
const MOST_POINTS: usize = 64;
/// Growth over time replaces growth by steps only if it is this many times larger.
const CLEARLY_LARGER: f64 = 1.5;

/// Growth of one device.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Growth {
    /// Bytes that were added and not released.
    pub bytes: i64,
    /// Unit of the rate.
    axis: &'static str,
    /// Number of units.
    over: u64,
    confidence: f64,
    /// Tags that grow, with their bytes, largest first.
    names: Vec<(String, i64)>,
    /// The structure that grows most.
    structure: Option<String>,
}

/// Amounts of a device at common places on an axis.
struct Course<'r> {
    /// Step, period or second of each point.
    places: Vec<f64>,
    whole: Vec<i64>,
    tags: BTreeMap<&'r str, Vec<i64>>,
    structures: BTreeMap<&'r str, Vec<i64>>,
}

/// Returns the growth of a device up to `oom`, or up to its last moment.
pub(super) fn growth(report: &Report<'_>, device: &Device, oom: Option<&Oom>) -> Option<Growth> {
    let used = used_at(device, oom);
    let material = (used as f64 * MATERIAL_SHARE).max(MATERIAL_BYTES);
    let points = &device.details.growth;
    let by_step = Course::of_steps(report, device).and_then(|course| {
        let (judgement, growth) = course.judged(material, points.axis.name())?;
        Some(Growth { over: units(points, &judgement), ..growth })
    });
    let by_time = Course::over_time(report, device, oom).and_then(|course| {
        let (judgement, growth) = course.judged(material, "second")?;
        let seconds = judgement.units();
        (seconds >= LEAST_SECONDS).then(|| Growth { over: seconds.round() as u64, ..growth })
    });
    match (by_step, by_time) {
        (Some(by_step), Some(by_time)) if by_time.bytes as f64 > by_step.bytes as f64 * CLEARLY_LARGER => {
            Some(by_time)
        }
        (by_step, by_time) => by_step.or(by_time),
    }
}

fn used_at(device: &Device, oom: Option<&Oom>) -> i64 {
    let own = oom.and_then(|oom| oom.device.as_ref()?.holders.first()).map(|own| own.used_bytes);
    let moments = [&device.last, &device.peak].map(|moment| moment.used_bytes().or(moment.tracked_bytes));
    own.into_iter().chain(moments.into_iter().flatten()).max().unwrap_or(0)
}

impl<'r> Course<'r> {
    fn new(places: Vec<f64>) -> Self {
        let whole = vec![0; places.len()];
        Course { places, whole, tags: BTreeMap::new(), structures: BTreeMap::new() }
    }

    /// Adds the bytes of a cell at a point.
    fn add(&mut self, report: &'r Report<'_>, cell: u32, at: usize, bytes: i64) {
        let Some(named) = report.run.cells.get(cell as usize) else { return };
        let count = self.places.len();
        let put = |series: &mut BTreeMap<&'r str, Vec<i64>>, name: &'r str| {
            let amounts = series.entry(name).or_insert_with(|| vec![0; count]);
            amounts[at] = amounts[at].saturating_add(bytes);
        };
        put(&mut self.tags, named.tag.as_deref().unwrap_or(NO_TAG));
        put(&mut self.structures, report.category(cell, By::Structure).unwrap_or(OTHERS));
    }

    /// Returns the amounts that were held when each step or period began.
    fn of_steps(report: &'r Report<'_>, device: &Device) -> Option<Self> {
        let points = &device.details.growth;
        if points.axis == Axis::Minute || points.points.is_empty() {
            return None;
        }
        let mut course = Course::new(points.points.iter().map(|(index, _)| *index as f64).collect());
        course.whole.clone_from(&points.named);
        for (cell, amounts) in &points.cells {
            for (at, bytes) in amounts.iter().enumerate().take(course.places.len()) {
                course.add(report, *cell, at, *bytes);
            }
        }
        Some(course)
    }

    /// Returns the fullest moments over time, without parameters and idle memory.
    fn over_time(report: &'r Report<'_>, device: &'r Device, oom: Option<&Oom>) -> Option<Self> {
        let until_ns = oom.map_or(u64::MAX, |oom| oom.time_ns);
        let points = &device.details.timeline.points;
        let points: Vec<_> = points.iter().filter(|point| point.time_ns <= until_ns).collect();
        let fullest = |points: &[&'r Point]| points.iter().copied().max_by_key(|point| point.tracked_bytes());
        let points: Vec<_> =
            points.chunks(points.len().div_ceil(MOST_POINTS).max(1)).filter_map(fullest).collect();
        let first_ns = points.first()?.time_ns;
        let seconds = |time_ns: u64| time_ns.saturating_sub(first_ns) as f64 / 1e9;
        let mut course = Course::new(points.iter().map(|point| seconds(point.time_ns)).collect());
        for (at, point) in points.iter().enumerate() {
            for &(cell, bytes) in &point.amounts {
                let counts = report.run.cells.get(cell as usize).is_some_and(|cell| {
                    matches!(cell.class, Class::Direct | Class::Block)
                        && cell.role.as_deref() != Role::Parameter.name()
                });
                if counts {
                    course.whole[at] = course.whole[at].saturating_add(bytes);
                    course.add(report, cell, at, bytes);
                }
            }
        }
        Some(course)
    }

    /// Judges the sum and, where it does not grow, its parts. Returns the judgement with the most growth, and the growth.
    fn judged(&self, material: f64, axis: &'static str) -> Option<(Judgement, Growth)> {
        let judged = |amounts: &[i64], among: usize| {
            let points = self.places.iter().copied().zip(amounts.iter().map(|bytes| *bytes as f64));
            let judgement = judge(&points.collect::<Vec<_>>(), material, ALPHA / among.max(1) as f64);
            (judgement.verdict == Verdict::Growing).then_some(judgement)
        };
        let parts = |series: &BTreeMap<&str, Vec<i64>>| {
            // A part that never changed by a material amount needs no judgement.
            let moves = |amounts: &&Vec<i64>| {
                let (least, most) = (amounts.iter().min(), amounts.iter().max());
                least.zip(most).is_some_and(|(least, most)| most.saturating_sub(*least) as f64 >= material)
            };
            let growing = series.values().filter(moves);
            let growing = growing.filter_map(|amounts| Some((judged(amounts, series.len())?, amounts)));
            growing
                .map(|(judgement, amounts)| (self.added(&judgement, amounts), judgement))
                .collect::<Vec<_>>()
        };
        let whole: Vec<_> = judged(&self.whole, 1)
            .map(|judgement| (self.added(&judgement, &self.whole), judgement))
            .into_iter()
            .collect();
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
        let structure = added(&self.structures).into_iter().max_by_key(|(_, bytes)| *bytes);
        Some((
            judgement,
            Growth {
                bytes,
                axis,
                over: 0,
                confidence: judgement.confidence.unwrap_or(0.0),
                names: largest(added(&self.tags), bytes),
                structure: structure.map(|(name, _)| name),
            },
        ))
    }

    /// Returns the bytes that an amount has gained over the span of a judgement.
    fn added(&self, judgement: &Judgement, amounts: &[i64]) -> i64 {
        let Some((first, last)) = judgement.span else { return 0 };
        let at =
            |place: f64| self.places.iter().position(|found| *found >= place).and_then(|at| amounts.get(at));
        match (at(first), at(last)) {
            (Some(first), Some(last)) => last.saturating_sub(*first),
            _ => 0,
        }
    }
}

/// Returns the names with the most of `bytes`. If many modules share the bytes, returns the path above these modules.
fn largest(mut names: Vec<(String, i64)>, bytes: i64) -> Vec<(String, i64)> {
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

impl Growth {
    /// Returns the finding.
    pub fn finding(self, device: &Device, used: i64, severity: Severity) -> Finding {
        let rate = self.bytes as f64 / self.over.max(1) as f64;
        let rate = match rate / 1_048_576.0 {
            mib if mib >= 1.0 => format!("{mib:.1} MiB"),
            mib => format!("{:.1} KiB", mib * 1024.0),
        };
        let names: Vec<String> = self.names.iter().map(|(name, _)| escape(name)).collect();
        let structure = match self.structure.as_deref() {
            Some(name) if name != OTHERS => escape(name),
            _ => String::new(),
        };
        let grows = match (names.is_empty(), structure.is_empty()) {
            (true, true) => "memory".to_owned(),
            (true, false) => structure,
            (false, true) => names.join(", "),
            (false, false) if names == [structure.as_str()] => structure,
            (false, false) => format!("{structure} of {}", names.join(", ")),
        };
        let share = 100.0 * self.bytes as f64 / used.max(1) as f64;
        let what = format!(
            "{grows}: +{rate} per {} over {}, {} MiB in all, {share:.0} % of what the process used",
            self.axis,
            plural(self.over, self.axis),
            mib(self.bytes),
        );
        Finding {
            confidence: Some(self.confidence),
            names: self.names,
            structure: self.structure,
            ..Finding::new(Kind::Growth, severity, device, (self.bytes, used), what)
        }
    }
}

/// Returns the finding for a run that growth did not end.
pub(super) fn finding(report: &Report<'_>, device: &Device) -> Option<Finding> {
    let growth = growth(report, device, None)?;
    Some(growth.finding(device, used_at(device, None), Severity::Warning))
}
