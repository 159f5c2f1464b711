//! Memory over time for the page: points of the timeline, and the series of NVML readings. Thins both to the page's limits.

use super::data::{Context, TimeOrigin};
use crate::encode::object;
use gpumem_model::run::Device;
use gpumem_model::series::{Bucket, Extremes};
use gpumem_model::timeline::Point;
use gpumem_model::units::signed;
use serde::Serialize;

/// Returns the times and sums of the timeline's points, and the series of a device. The holdings have the bytes at each point.
pub(super) fn course(context: Context<'_>, device: &Device, points: &[&Point]) -> impl Serialize + use<> {
    let Context { limits, origin, .. } = context;
    let merge = device.series.buckets.len().div_ceil(limits.buckets.max(1)).max(1);
    let buckets = device.series.buckets.chunks(merge);
    object! {
        t: points.iter().map(|point| origin.offset_ns(point.time_ns)).collect::<Vec<_>>(),
        tracked: points.iter().map(|point| point.tracked_bytes()).collect::<Vec<_>>(),
        // Width of one bucket of the series, in ns.
        width: signed(device.series.width_ns).saturating_mul(merge as i64),
        buckets: buckets.map(|buckets| bucket(buckets, origin)).collect::<Vec<_>>(),
    }
}

/// Keeps every n-th point, and always the highest and the last point.
pub(super) fn thinned(points: &[Point], limit: usize) -> Vec<&Point> {
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
