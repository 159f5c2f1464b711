//! Draws categories as horizontal bars, one in each row with its name. Suits any number and length of names.

use super::axis::{Axis, GREY, GRID, LARGE, SMALL, amounts, words};
use super::bar::{Bar, Segment, fill};
use super::bars::MARGIN;
use super::drawing::{Anchor, Data, Drawing, Rect, Text};
use super::helvetica::{WIDER, distinct, fitted, width};
use super::palette::{BLACK, Pattern, WHITE};
use gpumem_model::units::thousands;

const ROW: f64 = 17.0;
/// Width for an amount and its percentage, in points.
const AMOUNT: f64 = 104.0;

/// Properties that all panels of a picture share.
pub(super) struct Rows<'p> {
    /// Rows from the top; a panel shows a dash for a row that it lacks.
    pub(super) names: &'p [Segment],
    /// Names of the categories with their own colours, the largest first.
    pub(super) ranks: &'p [String],
    pub(super) axis: Axis,
    pub(super) width: f64,
    pub(super) longest: f64,
}

impl Rows<'_> {
    pub(super) fn panel(&self, bar: &Bar) -> Drawing {
        let widths = self.names.iter().map(|part| width(&part.name, SMALL, false));
        let names = (widths.fold(60.0, f64::max) * WIDER).min(self.longest) + 8.0;
        let unit = self.axis.unit;
        let plot = Rect {
            x: MARGIN + names,
            y: MARGIN + 36.0,
            width: self.width,
            height: ROW * self.names.len() as f64 + 4.0,
        };
        let (right, bottom) = (plot.x + plot.width, plot.y + plot.height);
        let mut out = Drawing::new(bar.title.clone(), right + AMOUNT + MARGIN, bottom + 34.0);
        let title = fitted(&bar.title, LARGE, true, right + AMOUNT - MARGIN);
        out.text(Text { bold: true, ..words(&title, MARGIN, MARGIN + LARGE, LARGE) });
        let total = unit.amount_with_name(bar.total_bytes);
        let total = format!("total {total} ({} bytes)", thousands(bar.total_bytes));
        out.text(Text { color: GREY, ..words(&total, MARGIN, MARGIN + LARGE + 14.0, SMALL) });
        for (bytes, label) in self.axis.steps() {
            let x = plot.x + self.axis.along(plot.width, bytes);
            out.line(vec![(x, plot.y), (x, bottom)], GRID, 0.6);
            out.text(Text { anchor: Anchor::Middle, ..words(&label, x, bottom + 12.0, SMALL) });
        }
        out.text(Text { color: GREY, ..words(unit.name, right + 12.0, bottom + 12.0, SMALL) });
        self.fill(bar, plot, &mut out);
        let zero = plot.x + self.axis.along(plot.width, 0.0);
        out.line(vec![(zero, plot.y), (zero, bottom)], BLACK, 0.9);
        out
    }

    fn fill(&self, bar: &Bar, plot: Rect, out: &mut Drawing) {
        let of = |row: &Segment| bar.segments.iter().find(|part| part.is_like(row)).map(|part| part.bytes);
        let bytes: Vec<Option<i64>> = self.names.iter().map(of).collect();
        let names: Vec<&str> = self.names.iter().map(|row| row.name.as_str()).collect();
        let names = distinct(&names, SMALL, self.longest / WIDER);
        let known: Vec<i64> = bytes.iter().map(|bytes| bytes.unwrap_or(0)).collect();
        let amounts = amounts(self.axis.unit, bar.total_bytes, &known);
        let zero = plot.x + self.axis.along(plot.width, 0.0);
        let rows = self.names.iter().zip(bytes).zip(names.iter().zip(&amounts));
        for (index, ((row, bytes), (name, (amount, share)))) in rows.enumerate() {
            let top = plot.y + 2.0 + ROW * index as f64;
            let y = top + ROW * 0.68;
            out.text(Text { anchor: Anchor::End, ..words(name, plot.x - 6.0, y, SMALL) });
            let Some(bytes) = bytes else {
                out.text(Text { color: GREY, ..words("-", zero + 5.0, y, SMALL) });
                continue;
            };
            let end = plot.x + self.axis.along(plot.width, bytes as f64);
            let width = (end - zero).abs().max(0.3);
            let at = Rect { x: zero.min(end), y: top + 2.5, width, height: ROW - 5.0 };
            let data = Data { container: bar.title.clone(), name: row.name.clone(), bytes };
            out.rect(at, fill(row, self.ranks), Some((BLACK, 0.5)), Some(data));
            let label = format!("{amount}  {share}");
            let label = words(label.trim_end(), at.x + at.width + 5.0, y, SMALL);
            // A background hides the grid line behind the label.
            let width = label.width() + 4.0;
            let behind = Rect { x: label.x - 2.0, y: y - SMALL, width, height: SMALL * 1.3 };
            out.rect(behind, Pattern::plain([WHITE; 2]), None, None);
            out.text(label);
        }
    }
}

/// Returns the rows for `bars`: categories by their largest amount, then other parts.
pub(super) fn rows_of(bars: &[Bar]) -> Vec<Segment> {
    let mut rows: Vec<Segment> = Vec::new();
    for part in bars.iter().flat_map(|bar| &bar.segments) {
        match rows.iter_mut().find(|row| row.is_like(part)) {
            Some(row) => row.bytes = row.bytes.max(part.bytes),
            None => rows.push(part.clone()),
        }
    }
    let parts = bars.iter().flat_map(|bar| &bar.segments).filter(|part| part.bytes != 0);
    rows.retain(|row| parts.clone().any(|part| part.name == row.name));
    rows.sort_by(|a, b| (a.kind, b.bytes, &a.name).cmp(&(b.kind, a.bytes, &b.name)));
    rows
}
