//! Memory over time by category, for JSON: names once, and columns of amounts.

use super::{By, Composition, Report};
use crate::category::OTHERS;
use crate::encode::object;
use gpumem_model::run::{Device, Moment};
use gpumem_model::timeline::Point;
use serde::Serialize;
use std::collections::BTreeSet;

/// Returns the timeline of a device. `tracked_bytes` of a point is the sum of its `layers`, idle and opaque bytes, and also of its
/// `structures`, idle and opaque bytes.
pub(super) fn timeline(report: &Report<'_>, device: &Device) -> impl Serialize {
    let timeline = &device.details.timeline;
    let by = |by: By| -> Vec<Composition> {
        timeline.points.iter().map(|point| composition(report, point, by)).collect()
    };
    let (by_layer, by_structure) = (by(By::Layer), by(By::Structure));
    let (layers, structures) = (names(&by_layer), names(&by_structure));
    let points = timeline.points.iter().zip(by_layer.iter().zip(&by_structure));
    let points = points.map(|(point, (by_layer, by_structure))| {
        object! {
            time_ns: point.time_ns,
            tracked_bytes: point.tracked_bytes(),
            pool_idle_bytes: by_layer.pool_idle,
            opaque_bytes: by_layer.opaque,
            layers: column(&layers, by_layer),
            structures: column(&structures, by_structure),
        }
    });
    let points: Vec<_> = points.collect();
    // `layers` and `structures` are the names of the columns of the points, `Others` last.
    object! { width_ns: timeline.width_ns, layers, structures, points }
}

/// Returns a point's bytes by category; bytes that the point does not name go to `Others`.
pub(super) fn composition(report: &Report<'_>, point: &Point, by: By) -> Composition {
    let moment = Moment { amounts: point.amounts.clone(), ..Moment::default() };
    let mut composition = report.composition(&moment, by);
    composition.others = composition.others.saturating_add(point.rest_bytes);
    composition
}

fn names(of: &[Composition]) -> Vec<String> {
    let names: BTreeSet<&String> = of.iter().flat_map(|composition| composition.categories.keys()).collect();
    names.into_iter().cloned().chain([OTHERS.to_owned()]).collect()
}

fn column(names: &[String], of: &Composition) -> Vec<i64> {
    let named = names.iter().take(names.len().saturating_sub(1));
    named.map(|name| of.categories.get(name).copied().unwrap_or(0)).chain([of.others]).collect()
}
