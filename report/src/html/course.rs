//! Memory over time for the page: the timeline by category, and the series of NVML readings. Thins both to the page's limits.

use super::data::{Context, TimeOrigin};
use crate::encode::object;
use crate::{GroupBy, held};
use gpumem_model::cell::is_sum;
use gpumem_model::run::{Class, Device};
use gpumem_model::series::{Bucket, Extremes};
use gpumem_model::timeline::Point;
use gpumem_model::units::signed;
use serde::Serialize;
use std::collections::BTreeMap;

/// Returns the memory of a device over time. `named` has, for each grouping, the unescaped names of the categories that have a
/// row. At each point, the rows of a grouping plus `idle` and `opaque` (pools without reported blocks) add up to `tracked`.
pub(super) fn course(
    context: Context<'_>,
    device: &Device,
    named: &[&[String]; 3],
) -> impl Serialize + use<> {
    let Context { report, ranks, limits, origin, .. } = context;
    let timeline = &device.details.timeline;
    let points: Vec<&Point> = thinned(&timeline.points, limits.points);
    let is_several =
        |cell: u32| report.cell(cell).is_some_and(|cell| cell.tag.as_deref().is_some_and(is_sum));
    let of_class = |wanted: Class| {
        let bytes = |point: &&Point| held(report.run, &point.amounts, |cell| cell.class == wanted);
        points.iter().map(bytes).collect::<Vec<_>>()
    };
    let stacks = GroupBy::ALL.map(|by| {
        let named = named[by as usize];
        let place: BTreeMap<&str, usize> =
            named.iter().enumerate().map(|(at, name)| (name.as_str(), at)).collect();
        let mut rows = vec![vec![0_i64; points.len()]; named.len()];
        let (mut others, mut smaller) = (vec![0_i64; points.len()], vec![0_i64; points.len()]);
        for (at, point) in points.iter().enumerate() {
            smaller[at] = point.rest_bytes;
            for &(cell, bytes) in &point.amounts {
                if matches!(report.cell(cell).map(|cell| cell.class), Some(Class::PoolIdle | Class::Opaque)) {
                    continue;
                }
                let row = match report.category(cell, by) {
                    None if is_several(cell) => &mut smaller,
                    None => &mut others,
                    Some(name) => match place.get(name).and_then(|row| rows.get_mut(*row)) {
                        Some(row) => row,
                        None => &mut smaller,
                    },
                };
                row[at] = row[at].saturating_add(bytes);
            }
        }
        let codes = named.iter().map(|name| ranks[by as usize].code(Some(name)));
        // `rows`: codes of the categories, and their bytes at each point. `smaller`: bytes of categories without a row, and bytes
        // that the timeline does not divide into categories.
        object! { rows: codes.zip(rows).collect::<Vec<_>>(), others, smaller }
    });
    let merge = device.series.buckets.len().div_ceil(limits.buckets.max(1)).max(1);
    let buckets = device.series.buckets.chunks(merge);
    object! {
        t: points.iter().map(|point| origin.offset_ns(point.time_ns)).collect::<Vec<_>>(),
        tracked: points.iter().map(|point| point.tracked_bytes()).collect::<Vec<_>>(),
        idle: of_class(Class::PoolIdle),
        opaque: of_class(Class::Opaque),
        // Rows of categories, for each grouping.
        stacks,
        // Width of one bucket of the series, in ns.
        width: signed(device.series.width_ns).saturating_mul(merge as i64),
        buckets: buckets.map(|buckets| bucket(buckets, origin)).collect::<Vec<_>>(),
    }
}

/// Keeps every n-th point, and always the highest and the last point.
fn thinned(points: &[Point], limit: usize) -> Vec<&Point> {
    let every = points.len().div_ceil(limit.max(1)).max(1);
    let highest = (0..points.len()).max_by_key(|&at| points[at].tracked_bytes());
    let is_kept = |at: usize| at.is_multiple_of(every) || Some(at) == highest || at + 1 == points.len();
    points.iter().enumerate().filter(|(at, _)| is_kept(*at)).map(|(_, point)| point).collect()
}

/// Merges adjacent buckets of the series into one. Returns its time, then its used, tracked and untrackable bytes, each as
/// (lowest, highest, last) value.
fn bucket(buckets: &[Bucket], origin: TimeOrigin) -> impl Serialize + use<> {
    let merged = |of: fn(&Bucket) -> Option<Extremes>| {
        let all = buckets.iter().filter_map(of);
        all.map(|one| [one.min, one.max, one.last])
            .reduce(|sum, one| [sum[0].min(one[0]), sum[1].max(one[1]), one[2]])
    };
    let first = buckets.first().map_or(0, |bucket| origin.offset_ns(bucket.time_ns));
    let untrackable = merged(|bucket| bucket.untrackable);
    (first, merged(|bucket| bucket.used), merged(|bucket| bucket.tracked), untrackable)
}
