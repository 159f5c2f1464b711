//! Growth of memory beside the memory in use: unused memory of pools, and pinned memory of the host.

use super::course::Course;
use super::{Growth, LEAST_PASSES, MATERIAL_BYTES, MATERIAL_SHARE, largest, most_used_until, seconds, steps};
use crate::amounts::sums;
use crate::findings::finding::{Finding, Kind, PINNED, Severity, mib};
use crate::judge::{Axis, Growth as Points};
use crate::{Report, most_used};
use gpumem_model::escape::escape;
use gpumem_model::run::{Class, Device, Oom};

/// Minimum growth of pinned host memory in bytes.
const MATERIAL_PINNED_BYTES: f64 = 256.0 * 1_048_576.0;

/// Returns the growth of the unused memory of pools until `oom`, or until the last moment.
pub(in crate::findings) fn idle(report: &Report<'_>, device: &Device, oom: Option<&Oom>) -> Option<Growth> {
    let material = (most_used_until(device, oom) as f64 * MATERIAL_SHARE).max(MATERIAL_BYTES);
    let points = &device.details.growth;
    let until_ns = oom.map_or(u64::MAX, |oom| oom.time_ns);
    beside(points, &points.slack, until_ns, (material, 0)).or_else(|| {
        let course = Course::over_time(report, device, oom, |cell| cell.class == Class::PoolIdle)?;
        course.judged(material, "second", seconds)
    })
}

/// Returns the growth of an amount at those points of `points` until `until_ns` that is not part of the memory in use. Growth over
/// fewer than `least_passes` forward passes does not count.
fn beside(
    points: &Points,
    amounts: &[i64],
    until_ns: u64,
    (material, least_passes): (f64, u64),
) -> Option<Growth> {
    if amounts.is_empty() {
        return None;
    }
    let begun = points.points.partition_point(|(_, time_ns)| *time_ns <= until_ns);
    let first_ns = points.points.first()?.1;
    let is_timed = points.axis == Axis::Minute;
    let position = |&(index, time_ns): &(u64, u64)| match is_timed {
        true => time_ns.saturating_sub(first_ns) as f64 / 1e9,
        false => index as f64,
    };
    let (times_ns, positions) =
        points.points.iter().take(begun).map(|point| (point.1, position(point))).unzip();
    let mut course = Course::new(times_ns, positions);
    course.whole = amounts.iter().take(begun).copied().collect();
    match is_timed {
        true => course.judged(material, "second", seconds),
        false => course.judged(material, points.axis.name(), |judged| steps(points, judged, least_passes)),
    }
}

/// Returns the finding on pinned host memory that grows, with the lines or modules that made most of the growth. If only their
/// present bytes are known (older runs), those beyond all pinned bytes before the growth are certainly new.
pub(in crate::findings) fn pinned(report: &Report<'_>, device: &Device) -> Option<Finding> {
    let used = most_used(device).unwrap_or(0);
    let points = &device.details.growth;
    let growth = beside(points, &points.pinned, u64::MAX, (MATERIAL_PINNED_BYTES, LEAST_PASSES))?;
    let held = points.pinned.last().copied().unwrap_or(0);
    let rate = growth.whole(device, held);
    let by_tag = |cells: &[(u32, i64)]| {
        sums(cells.iter().filter_map(|(cell, bytes)| Some((report.cell(*cell)?.tag.clone()?, *bytes))))
    };
    let early = by_tag(&points.early_pinned_cells);
    let unknown = held.saturating_sub(growth.bytes);
    let added = by_tag(&points.pinned_cells).into_iter().map(|(tag, bytes)| {
        let before = early.get(&tag).copied().unwrap_or(unknown);
        (tag, bytes.saturating_sub(before).clamp(0, growth.bytes))
    });
    let names = largest(added.collect(), growth.bytes);
    let of: Vec<String> = names.iter().map(|(name, _)| escape(name)).collect();
    let of = if of.is_empty() { String::new() } else { format!(" of {}", of.join(", ")) };
    let what = format!(
        "{PINNED}{of}: {}, +{} MiB in total; {} MiB in all, which are not memory of the GPU",
        rate.text,
        mib(growth.bytes),
        mib(held)
    );
    let finding = Finding::new(Kind::Growth, Severity::Warning, Some(device), (growth.bytes, used), what);
    let structures = vec![PINNED.to_owned()];
    let (confidence, share) = (Some(growth.confidence), finding.share.min(1.0));
    Some(Finding { confidence, share, names, structures, rate: Some(rate), ..finding })
}
