//! A picture before it is written as SVG, PDF or PNG: shapes and texts at their positions, in points, with y downwards. The
//! writers make no layout decisions, so all three formats show the same.

use super::helvetica;
use super::palette::{Color, Pattern};

/// A finished picture.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawing {
    /// Description for screen readers, and the document's title.
    pub title: String,
    pub width: f64,
    pub height: f64,
    /// Items in the order in which they are painted.
    pub items: Vec<Item>,
}

/// An item of a picture.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    /// A closed polygon.
    Shape {
        points: Vec<(f64, f64)>,
        fill: Pattern,
        /// Colour of the outline, and its width in points; `None` for no outline.
        stroke: Option<(Color, f64)>,
        data: Option<Data>,
    },
    /// A line through points.
    Line {
        /// Points of the line, at least two.
        points: Vec<(f64, f64)>,
        color: Color,
        width: f64,
        dashed: bool,
    },
    /// A single line of text.
    Text(Text),
}

/// A text at a position.
#[derive(Debug, Clone, PartialEq)]
pub struct Text {
    /// The text, without control characters.
    pub text: String,
    /// x coordinate of the text's start, middle or end, see `anchor`.
    pub x: f64,
    /// y coordinate of the baseline.
    pub y: f64,
    /// Font size, in points.
    pub size: f64,
    /// Which end of the text is at `x`.
    pub anchor: Anchor,
    pub bold: bool,
    pub color: Color,
}

/// Which end of a text is at its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

impl Text {
    /// Returns the text's width in points.
    pub fn width(&self) -> f64 {
        helvetica::width(&self.text, self.size, self.bold)
    }

    /// Returns the distance from the text's start to `x`, in points.
    pub(super) fn before(&self) -> f64 {
        match self.anchor {
            Anchor::Start => 0.0,
            Anchor::Middle => self.width() / 2.0,
            Anchor::End => self.width(),
        }
    }
}

/// The bytes that a shape represents. SVG files contain them for programs that read the picture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Data {
    /// Name of the bar, panel or series that contains the shape.
    pub container: String,
    pub name: String,
    pub bytes: i64,
}

impl Drawing {
    /// Makes an empty picture.
    pub fn new(title: impl Into<String>, width: f64, height: f64) -> Self {
        Drawing { title: title.into(), width, height, items: Vec::new() }
    }

    /// Adds a rectangle; `x`, `y` is its upper left corner.
    pub fn rect(&mut self, at: Rect, fill: Pattern, stroke: Option<(Color, f64)>, data: Option<Data>) {
        let Rect { x, y, width, height } = at;
        let points = vec![(x, y), (x + width, y), (x + width, y + height), (x, y + height)];
        self.items.push(Item::Shape { points, fill, stroke, data });
    }

    /// Adds a solid line.
    pub fn line(&mut self, points: Vec<(f64, f64)>, color: Color, width: f64) {
        self.items.push(Item::Line { points, color, width, dashed: false });
    }

    /// Adds a text.
    pub fn text(&mut self, text: Text) {
        self.items.push(Item::Text(text));
    }

    /// Adds all items of another picture, moved right by `x` and down by `y`.
    pub fn place(&mut self, other: Drawing, x: f64, y: f64) {
        for mut item in other.items {
            match &mut item {
                Item::Shape { points, .. } | Item::Line { points, .. } => {
                    points.iter_mut().for_each(|point| *point = (point.0 + x, point.1 + y));
                }
                Item::Text(text) => (text.x, text.y) = (text.x + x, text.y + y),
            }
            self.items.push(item);
        }
    }
}

/// A rectangle, in points.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rect {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

pub(super) type Stroke = ((f64, f64), (f64, f64));

/// Returns the colour of the hatch lines of a polygon, and the lines (even-odd rule); `None` for a plain pattern. All polygons of
/// a picture use one grid of lines. So lines of adjacent shapes meet, and the output formats need no clipping.
pub(super) fn hatch(points: &[(f64, f64)], pattern: &Pattern) -> Option<(Color, Vec<Stroke>)> {
    /// Maximum number of hatch lines, more than any picture needs: a full page with the smallest spacing.
    const MAX_LINES: f64 = 4096.0;
    let ink = pattern.ink?[0];
    let (sin, cos) = pattern.degrees.to_radians().sin_cos();
    // Rotates the polygon so that the hatch lines are horizontal.
    let level = |(x, y): (f64, f64)| (x * cos - y * sin, x * sin + y * cos);
    let back = |(x, y): (f64, f64)| (x * cos + y * sin, y * cos - x * sin);
    let turned: Vec<(f64, f64)> = points.iter().map(|&point| level(point)).collect();
    let low = turned.iter().map(|point| point.1).fold(f64::INFINITY, f64::min);
    let high = turned.iter().map(|point| point.1).fold(f64::NEG_INFINITY, f64::max);
    let spacing = pattern.spacing;
    if spacing <= 0.0 || !low.is_finite() || !high.is_finite() || (high - low) / spacing > MAX_LINES {
        return None;
    }
    let mut strokes = Vec::new();
    let mut line = (low / spacing).ceil();
    while line * spacing <= high {
        let y = line * spacing;
        let inside = inside(&turned, y).into_iter().filter(|(from, to)| to - from > 0.05);
        strokes.extend(inside.map(|(from, to)| (back((from, y)), back((to, y)))));
        line += 1.0;
    }
    Some((ink, strokes))
}

/// Returns the parts of a horizontal line that are inside a polygon (even-odd rule), as the x coordinates of their ends.
pub(super) fn inside(points: &[(f64, f64)], y: f64) -> Vec<(f64, f64)> {
    let edges = points.iter().zip(points.iter().cycle().skip(1));
    let crossed = edges.filter(|(a, b)| (a.1 <= y) != (b.1 <= y));
    let mut at: Vec<f64> = crossed.map(|(a, b)| a.0 + (y - a.1) / (b.1 - a.1) * (b.0 - a.0)).collect();
    at.sort_by(f64::total_cmp);
    at.chunks_exact(2).map(|ends| (ends[0], ends[1])).collect()
}

#[cfg(test)]
mod tests {
    use super::super::palette::{BLACK, WHITE};
    use super::*;

    #[test]
    fn a_hatch_stays_inside_and_fills() {
        let square = [(10.0, 10.0), (50.0, 10.0), (50.0, 30.0), (10.0, 30.0)];
        for degrees in [0.0, 45.0, -45.0, 90.0] {
            let pattern = Pattern { ground: [WHITE; 2], ink: Some([BLACK; 2]), degrees, spacing: 4.0 };
            let (_, strokes) = hatch(&square, &pattern).expect("lines");
            assert!(strokes.len() >= 5, "{degrees}: {strokes:?}");
            for ((ax, ay), (bx, by)) in strokes {
                for (x, y) in [(ax, ay), (bx, by)] {
                    assert!((9.99..=50.01).contains(&x) && (9.99..=30.01).contains(&y), "{degrees}: {x} {y}");
                }
            }
        }
        let endless = [(0.0, 0.0), (1e12, 0.0), (1e12, 1e12)];
        let pattern = Pattern { ground: [WHITE; 2], ink: Some([BLACK; 2]), degrees: 45.0, spacing: 1.0 };
        assert_eq!(hatch(&endless, &pattern), None, "bounded");
        assert_eq!(hatch(&[], &pattern), None);
    }
}
