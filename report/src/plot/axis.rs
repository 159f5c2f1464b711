//! The scale of bytes of a picture, with round steps and its unit.

use super::drawing::{Anchor, Drawing, Rect, Text};
use super::palette::{BLACK, Color};
use gpumem_model::escape::escape;
use gpumem_model::units::{Unit, thousands};

/// Font size of scales and lists, in points (1/72 inch).
pub(super) const SMALL: f64 = 9.0;
pub(super) const LARGE: f64 = 12.0;
pub(super) const GRID: Color = Color(0xd9, 0xd9, 0xd9);
/// Colour of outlines and secondary text.
pub(super) const GREY: Color = Color(0x55, 0x55, 0x55);

/// Returns a text item without control characters.
pub(super) fn words(text: &str, x: f64, y: f64, size: f64) -> Text {
    let text = escape(text);
    Text { text, x, y, size, anchor: Anchor::Start, bold: false, color: BLACK }
}

/// A scale of amounts from `low` to `high`; both are multiples of `step`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Axis {
    pub(super) unit: Unit,
    low: f64,
    high: f64,
    step: f64,
    /// Number of digits after the decimal point that the labels need.
    decimals: usize,
}

impl Axis {
    /// Makes a scale that contains 0 and all amounts from `low` to `high`.
    pub(super) fn new(low: i64, high: i64) -> Self {
        const STEPS: f64 = 6.0;
        let unit = Unit::for_axis(low.saturating_abs().max(high));
        let one = unit.bytes() as f64;
        let (low, high) = (low.min(0) as f64 / one, high.max(0) as f64 / one);
        let span = if high > low { high - low } else { 1.0 };
        let step = round_step(span, STEPS, &[1.0, 2.0, 5.0]).unwrap_or(span);
        // Labels would repeat if steps were less than one byte.
        let step = if unit.bytes() == 1 { step.max(1.0) } else { step };
        let decimals = decimals(step);
        let low = (low / step).floor() * step;
        let high = ((high / step).ceil() * step).max(low + step);
        Axis { unit, low: low * one, high: high * one, step: step * one, decimals }
    }

    /// Returns the y coordinate of an amount on a scale that is as high as `plot`.
    pub(super) fn y(&self, plot: Rect, bytes: f64) -> f64 {
        plot.y + plot.height * (self.high - bytes) / (self.high - self.low)
    }

    /// Returns the amounts at the steps of the scale, with their labels.
    pub(super) fn steps(&self) -> Vec<(f64, String)> {
        let one = self.unit.bytes() as f64;
        let steps = ((self.high - self.low) / self.step).round() as i64;
        let label = |bytes: f64| {
            let label = match self.decimals {
                0 => thousands((bytes / one).round() as i64),
                decimals => format!("{:.decimals$}", bytes / one),
            };
            let is_zero = label.trim_start_matches('-').chars().all(|letter| "0.".contains(letter));
            if is_zero { "0".to_owned() } else { label }
        };
        let amounts = (0..=steps).map(|step| self.low + step as f64 * self.step);
        amounts.map(|bytes| (bytes, label(bytes))).collect()
    }

    pub(super) fn grid(&self, plot: Rect, out: &mut Drawing) {
        self.steps().into_iter().for_each(|(bytes, _)| self.line(plot, bytes, (GRID, 0.6), out));
    }

    /// Draws the labels left of the plot, with their unit above.
    pub(super) fn scale(&self, plot: Rect, out: &mut Drawing) {
        for (bytes, label) in self.steps() {
            let y = self.y(plot, bytes) + SMALL * 0.36;
            out.text(Text { anchor: Anchor::End, ..words(&label, plot.x - 5.0, y, SMALL) });
        }
        let unit = words(self.unit.name, plot.x - 5.0, plot.y - 12.0, SMALL);
        out.text(Text { anchor: Anchor::End, color: GREY, ..unit });
    }

    /// Draws the line at zero; to be called after the shapes are drawn.
    pub(super) fn zero(&self, plot: Rect, out: &mut Drawing) {
        self.line(plot, 0.0, (BLACK, 0.9), out);
    }

    fn line(&self, plot: Rect, bytes: f64, (color, width): (Color, f64), out: &mut Drawing) {
        let y = self.y(plot, bytes);
        out.line(vec![(plot.x, y), (plot.x + plot.width, y)], color, width);
    }

    /// Returns the distance of an amount from the left end, if the scale is horizontal and `width` points wide.
    pub(super) fn along(&self, width: f64, bytes: f64) -> f64 {
        width * (bytes - self.low) / (self.high - self.low)
    }
}

/// Returns the smallest step that divides `span` into at most `max_parts` parts and is one of `rounds` times a power of ten.
pub(super) fn round_step(span: f64, max_parts: f64, rounds: &[f64]) -> Option<f64> {
    let power = 10_f64.powf((span / max_parts).log10().floor());
    let steps =
        [power, power * 10.0].into_iter().flat_map(|power| rounds.iter().map(move |round| round * power));
    steps.into_iter().find(|step| span / step <= max_parts)
}

/// Returns the number of digits after the decimal point that multiples of `step` need.
pub(super) fn decimals(step: f64) -> usize {
    (-step.log10()).ceil().max(0.0) as usize
}

/// Formats the parts of a total, each as amount and percentage (see [`percents`]), so that both add up as printed. An amount
/// above zero that rounds to zero is printed as less than one unit of the last digit.
pub(super) fn amounts(unit: Unit, total: i64, parts: &[i64]) -> Vec<(String, String)> {
    let steps = unit.apportion(unit.round(total), parts);
    let print = |(steps, bytes): (i64, &i64)| match steps {
        0 if *bytes > 0 => format!("<{}", unit.print(1)),
        steps => unit.print(steps),
    };
    steps.into_iter().zip(parts).map(print).zip(percents(total, parts)).collect()
}

/// Formats percentages with one decimal digit that add up to 100 as printed; empty texts if the total is not positive.
pub(super) fn percents(total: i64, parts: &[i64]) -> Vec<String> {
    if total <= 0 {
        return vec![String::new(); parts.len()];
    }
    let steps = Unit::for_shares(total).apportion(1000, parts);
    let print = |(steps, bytes): (i64, &i64)| match steps {
        0 if *bytes > 0 => "<0.1 %".to_owned(),
        steps => {
            let sign = if steps < 0 { "-" } else { "" };
            format!("{sign}{}.{} %", steps.abs() / 10, steps.abs() % 10)
        }
    };
    steps.into_iter().zip(parts).map(print).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_have_round_steps_and_all_amounts() {
        const MIB: i64 = 1 << 20;
        for (low, high) in
            [(0, 1), (0, 0), (0, 7), (0, 9077 * MIB), (-300 * MIB, 70_000 * MIB), (0, i64::MAX), (-5, 0)]
        {
            let axis = Axis::new(low, high);
            assert!(axis.low <= low as f64 && axis.high >= high as f64, "{axis:?}");
            let steps = (axis.high - axis.low) / axis.step;
            assert!((1.0..=8.0).contains(&steps), "{axis:?}");
        }
        assert_eq!(Axis::new(0, 9077 * MIB).unit.name, "GiB");
        assert_eq!(Axis::new(0, 900 * MIB).unit.name, "MiB");
    }

    #[test]
    fn percents_add_up_as_printed() {
        assert_eq!(percents(3, &[1, 1, 1]), ["33.4 %", "33.3 %", "33.3 %"]);
        assert_eq!(percents(100, &[130, -30]), ["130.0 %", "-30.0 %"]);
        assert_eq!(percents(100_000, &[99_999, 1]), ["100.0 %", "<0.1 %"]);
        assert_eq!(percents(0, &[0]), [""]);
    }
}
