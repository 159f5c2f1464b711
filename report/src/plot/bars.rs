//! Stacked bars side by side on one scale, each with a list of its parts. Used to show layers next to data structures, and two
//! runs.

use super::axis::{Axis, GREY, LARGE, SMALL, amounts, percents, words};
use super::bar::{Bar, Segment, fill, folded, rank, ranks};
use super::drawing::{Anchor, Data, Drawing, Rect, Text};
use super::helvetica::{WIDER, distinct, fitted};
use super::palette::{BLACK, Pattern};
use crate::amounts::sum;
use gpumem_model::units::{Unit, thousands};

pub(super) const MARGIN: f64 = 16.0;
/// Width of the scale's labels, in points.
const SCALE: f64 = 44.0;
const BAR: f64 = 84.0;
/// Width on each side of a bar for the percentages of thin parts, in points.
const SIDE: f64 = 44.0;
pub(super) const LIST: f64 = 236.0;
const HEIGHT: f64 = 330.0;
/// Height of a line in a list, in points.
pub(super) const ROW: f64 = 15.0;
/// Width of an amount in a list, in points.
const AMOUNT: f64 = 44.0;
/// Parts below this fraction of the bar have no label.
const LABELLED: f64 = 0.05;
/// Labels of parts below this fraction of the bar are next to the bar, alternately right and left.
const THIN: f64 = 0.10;

/// Returns a picture of bars on one scale.
pub fn bars(bars: &[Bar]) -> Drawing {
    let ranks = ranks(bars);
    let bars: Vec<Bar> = bars.iter().zip(&ranks).map(|(bar, ranks)| folded(bar, ranks)).collect();
    let column = SIDE + BAR + SIDE + LIST;
    let width = column * bars.len().max(1) as f64;
    let plot = Rect { x: MARGIN + SCALE, y: MARGIN + 40.0, width, height: HEIGHT };
    let titles: Vec<&str> = bars.iter().map(|bar| bar.title.as_str()).collect();
    let mut out =
        Drawing::new(titles.join(", "), plot.x + plot.width + MARGIN, plot.y + HEIGHT + 2.0 * MARGIN);
    let low = bars.iter().map(|bar| bar.span().0).min().unwrap_or(0);
    let high = bars.iter().map(|bar| bar.span().1).max().unwrap_or(0);
    let axis = Axis::new(low, high);
    axis.scale(plot, &mut out);
    for (index, (bar, ranks)) in bars.iter().zip(&ranks).enumerate() {
        let x = plot.x + column * index as f64;
        bar_with_list(bar, ranks, &axis, Rect { x, width: column, ..plot }, &mut out);
    }
    out
}

/// Draws one bar with its title, labels and list.
fn bar_with_list(bar: &Bar, ranks: &[String], axis: &Axis, plot: Rect, out: &mut Drawing) {
    let parts = stacked(bar, ranks);
    let x = plot.x + SIDE;
    // Grid lines end before the list of parts.
    let lined = Rect { width: SIDE + BAR + SIDE - 8.0, ..plot };
    axis.grid(lined, out);
    let amounts: Vec<i64> = parts.iter().map(|(part, _)| part.bytes).collect();
    let shares = percents(bar.total_bytes, &amounts);
    let (mut top, mut bottom) = (0_i64, 0_i64);
    let mut is_left = false;
    for ((part, fill), label) in parts.iter().zip(&shares) {
        let edge = if part.bytes > 0 { &mut top } else { &mut bottom };
        let from = *edge;
        *edge = edge.saturating_add(part.bytes);
        let (a, b) = (axis.y(plot, from as f64), axis.y(plot, *edge as f64));
        let at = Rect { x, y: a.min(b), width: BAR, height: (a - b).abs() };
        let data = Data { container: bar.title.clone(), name: part.name.clone(), bytes: part.bytes };
        out.rect(at, *fill, Some((BLACK, 0.5)), Some(data));
        let share = part.bytes as f64 / bar.total_bytes.max(1) as f64;
        // A small bar next to a far larger one may have no room for the label.
        if label.is_empty() || share.abs() < LABELLED || at.height < SMALL * 0.6 {
            continue;
        }
        let y = at.y + at.height / 2.0 + SMALL * 0.36;
        let label = words(label, x + BAR / 2.0, y, SMALL);
        if share.abs() >= THIN && at.height > SMALL * 1.4 {
            let mut label = Text { anchor: Anchor::Middle, ..label };
            if fill.ink.is_none() {
                label.color = fill.ground[0].text();
            } else {
                // Text on hatching is hard to read, so it gets a plain background.
                let width = label.width() + 6.0;
                let behind = Rect { x: label.x - width / 2.0, y: y - SMALL, width, height: SMALL * 1.35 };
                out.rect(behind, Pattern::plain(fill.ground), None, None);
            }
            out.text(label);
        } else {
            let (anchor, x) = if is_left { (Anchor::End, x - 4.0) } else { (Anchor::Start, x + BAR + 4.0) };
            out.text(Text { anchor, x, ..label });
            is_left = !is_left;
        }
    }
    axis.zero(lined, out);
    let beside = Rect { x: x + BAR + SIDE, width: LIST, ..plot };
    list(bar, &parts, axis.unit, beside, out);
    let title = fitted(&bar.title, LARGE, true, plot.width - SIDE - 8.0);
    out.text(Text { bold: true, ..words(&title, x, plot.y - 32.0, LARGE) });
    let total = format!("{} {}", axis.unit.amount(bar.total_bytes), axis.unit.name);
    let total = match sum(amounts.iter().copied()) {
        sum if sum == bar.total_bytes => format!("{total} ({} bytes)", thousands(bar.total_bytes)),
        // The parts of a bar should always add up to its total. If they do not, the picture states the difference.
        sum => {
            format!(
                "{total} ({} bytes); its parts add up to {} bytes",
                thousands(bar.total_bytes),
                thousands(sum)
            )
        }
    };
    out.text(Text { color: GREY, ..words(&total, x, plot.y - 17.0, SMALL) });
}

/// Returns the parts of a bar in the order of stacking from below, each with its fill.
pub(super) fn stacked<'b>(bar: &'b Bar, ranks: &[String]) -> Vec<(&'b Segment, Pattern)> {
    let parts = bar.segments.iter().filter(|part| part.bytes != 0);
    let mut parts: Vec<(&Segment, Pattern)> = parts.map(|part| (part, fill(part, ranks))).collect();
    parts.sort_by_key(|(part, _)| (part.kind, rank(part, ranks)));
    parts
}

/// Draws the list of parts in the order in which they are stacked, and their sum.
pub(super) fn list(bar: &Bar, parts: &[(&Segment, Pattern)], unit: Unit, at: Rect, out: &mut Drawing) {
    let bytes: Vec<i64> = parts.iter().map(|(part, _)| part.bytes).collect();
    let amounts = amounts(unit, bar.total_bytes, &bytes);
    let (amounts_at, shares_at) = (at.x + at.width - 58.0, at.x + at.width - 12.0);
    let room = (amounts_at - at.x - 16.0 - AMOUNT) / WIDER;
    let names: Vec<&str> = parts.iter().map(|(part, _)| part.name.as_str()).collect();
    let names = distinct(&names, SMALL, room);
    // The list is centred vertically next to the bar.
    let height = ROW * (parts.len() as f64 + 1.0);
    let mut y = at.y + ((at.height - height) / 2.0).max(0.0) + SMALL;
    let right = |text: &str, x: f64, y: f64| Text { anchor: Anchor::End, ..words(text, x, y, SMALL) };
    for (((_, fill), (amount, share)), name) in parts.iter().zip(&amounts).zip(&names).rev() {
        let swatch = Rect { x: at.x, y: y - SMALL * 0.8, width: 11.0, height: 9.0 };
        out.rect(swatch, *fill, Some((BLACK, 0.5)), None);
        out.text(words(name, at.x + 16.0, y, SMALL));
        out.text(right(amount, amounts_at, y));
        if !share.is_empty() {
            out.text(right(share, shares_at, y));
        }
        y += ROW;
    }
    out.line(vec![(at.x, y - ROW * 0.72), (shares_at, y - ROW * 0.72)], GREY, 0.5);
    let sum = format!("total {}", unit.name);
    out.text(words(&sum, at.x + 16.0, y, SMALL));
    out.text(right(&unit.amount(bar.total_bytes), amounts_at, y));
    if bar.total_bytes > 0 {
        out.text(right("100.0 %", shares_at, y));
    }
}
