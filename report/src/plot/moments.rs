//! Moments that are told apart on a timeline: when memory ran out, and those that somebody gave a name.

use super::axis::{GREY, SMALL, words};
use super::drawing::{Anchor, Drawing, Item, Rect, Text};
use super::helvetica::{fitted, width};
use super::palette::Color;
use crate::Report;
use crate::text::clean_name;
use gpumem_model::run::Device;

/// Times at which memory ran out.
const ALARM: Color = Color(0xb8, 0x1f, 0x1f);
/// A name has no more room than that.
const LONGEST: f64 = 90.0;
/// Between two names.
const GAP: f64 = 4.0;

struct Moment {
    x: f64,
    name: String,
    is_alarm: bool,
}

/// A line through the plot for each, with its name above where that has room.
pub(super) fn draw(
    report: &Report<'_>,
    device: &Device,
    (first, last): (u64, u64),
    plot: Rect,
    x: &dyn Fn(u64) -> f64,
    out: &mut Drawing,
) {
    let is_seen = |time_ns: u64| (first..=last).contains(&time_ns);
    let ooms = device.details.ooms.iter().filter(|oom| oom.is_true() && is_seen(oom.time_ns));
    let ooms = ooms.map(|oom| Moment { x: x(oom.time_ns), name: "OOM".into(), is_alarm: true });
    let marks = report.run.coverage.marks.iter().filter(|mark| is_seen(mark.time_ns));
    let marks = marks.map(|mark| {
        let name = clean_name(mark.name.as_deref().unwrap_or("(unnamed)"));
        Moment { x: x(mark.time_ns), name: fitted(&name, SMALL, false, LONGEST), is_alarm: false }
    });
    let moments: Vec<Moment> = ooms.chain(marks).collect();
    // Names of alarms come first: where two want one place, those are read.
    let mut taken: Vec<(f64, f64)> = Vec::new();
    for moment in &moments {
        let (color, stroke) = if moment.is_alarm { (ALARM, 1.2) } else { (GREY, 0.8) };
        let points = vec![(moment.x, plot.y), (moment.x, plot.y + plot.height)];
        out.items.push(Item::Line { points, color, width: stroke, dashed: true, data: None });
        let half = width(&moment.name, SMALL, moment.is_alarm) / 2.0 + GAP;
        let middle = moment.x.clamp(plot.x + half, (plot.x + plot.width - half).max(plot.x + half));
        let place = (middle - half, middle + half);
        if taken.iter().all(|other| place.1 <= other.0 || place.0 >= other.1) {
            taken.push(place);
            let label = words(&moment.name, middle, plot.y - 4.0, SMALL);
            out.text(Text { anchor: Anchor::Middle, color, bold: moment.is_alarm, ..label });
        }
    }
}
