//! Memory over time by category, for JSON: names once, and columns of amounts.

use super::{By, Composition, Report};
use crate::category::OTHERS;
use gpumem_model::run::{Device, Moment};
use gpumem_model::timeline::Point;
use serde::Serialize;
use std::collections::BTreeSet;

/// The timeline of a device.
#[derive(Debug, Serialize)]
pub(super) struct TimelineJson {
    width_ns: u64,
    /// Names of the columns of `layers`, `Others` last.
    layers: Vec<String>,
    /// Names of the columns of `structures`, `Others` last.
    structures: Vec<String>,
    points: Vec<PointJson>,
}

/// A point of the timeline. `tracked_bytes` is the sum of `layers`, idle and opaque bytes, and also of `structures`, idle and
/// opaque bytes.
#[derive(Debug, Serialize)]
struct PointJson {
    time_ns: u64,
    tracked_bytes: i64,
    pool_idle_bytes: i64,
    opaque_bytes: i64,
    layers: Vec<i64>,
    structures: Vec<i64>,
}

impl TimelineJson {
    pub(super) fn of(report: &Report<'_>, device: &Device) -> Self {
        let timeline = &device.details.timeline;
        let by = |by: By| -> Vec<Composition> {
            timeline.points.iter().map(|point| composition(report, point, by)).collect()
        };
        let (by_layer, by_structure) = (by(By::Layer), by(By::Structure));
        let (layers, structures) = (names(&by_layer), names(&by_structure));
        let told = timeline.points.iter().zip(by_layer.iter().zip(&by_structure));
        let points = told.map(|(point, (by_layer, by_structure))| PointJson {
            time_ns: point.time_ns,
            tracked_bytes: point.tracked_bytes(),
            pool_idle_bytes: by_layer.pool_idle,
            opaque_bytes: by_layer.opaque,
            layers: column(&layers, by_layer),
            structures: column(&structures, by_structure),
        });
        TimelineJson { width_ns: timeline.width_ns, points: points.collect(), layers, structures }
    }
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
