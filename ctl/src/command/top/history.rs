//! The chart of a process's memory over time: a stack of layers, one for each category, with a column for each interval of time.

use super::widgets::{GREY, Look};
use gpumem_report::Composition;
use gpumem_report::plot::palette::{self, RANKS};
use gpumem_report::text::BLOCKS;
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Stylize};
use ratatui_core::text::Span;
use ratatui_core::widgets::Widget;
use std::collections::{BTreeMap, VecDeque};

/// Number of points that are kept in addition to those of the run. A run has a limited number of points, however long it is.
const KEPT: usize = 512;

/// A layer of the picture of memory over time: one category or another amount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layer {
    pub kind: LayerKind,
    pub color: Color,
    /// Character of the layer on a terminal without colours or Unicode.
    pub letter: char,
}

/// The memory that a layer shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LayerKind {
    Category(String),
    /// Tracked memory that has no layer of its own.
    Rest,
    PoolIdle,
    /// Memory of pools that report no blocks.
    Opaque,
}

/// Maximum number of categories with a layer of their own.
const MOST: usize = 10;
/// The terminal's colour for each colour of the palette, so that a category looks as on a page. Only brown has no colour of its
/// own: it is that of tan.
const COLORS: [u8; RANKS] = [4, 3, 2, 11, 1, 14, 5, 10, 12, 9, 9, 13];
const REST: Color = Color::Indexed(7);
/// Blocks of Unicode that fill idle and Untrackable memory.
const IDLE_SHADE: char = '▒';
pub(crate) const UNTRACKABLE_SHADE: char = '░';
const OPAQUE: Color = Color::Indexed(6);

/// Returns the layers from the bottom: categories in the order of `names`, then the rest, opaque pools and idle memory.
pub(crate) fn layers(names: impl Iterator<Item = String>) -> Vec<Layer> {
    let layer = |kind, color, letter| Layer { kind, color, letter };
    let names: Vec<String> = names.take(MOST).collect();
    let colors = palette::numbers(&names).into_iter().map(|number| Color::Indexed(COLORS[number % RANKS]));
    let named = names.into_iter().map(LayerKind::Category).zip(colors).zip('a'..);
    let mut layers: Vec<Layer> = named.map(|((kind, color), letter)| layer(kind, color, letter)).collect();
    layers.push(layer(LayerKind::Rest, REST, '+'));
    layers.push(layer(LayerKind::Opaque, OPAQUE, 'O'));
    layers.push(layer(LayerKind::PoolIdle, GREY, '.'));
    layers
}

impl Layer {
    /// Returns the character that stands next to the layer's row in the table.
    pub(crate) fn sign(&self, look: Look) -> Span<'static> {
        let letter = if look.colors && look.unicode { self.shade() } else { self.letter };
        Span::styled(letter.to_string(), self.color)
    }

    /// Returns the block of Unicode that fills the layer; memory without a category is hatched.
    pub(crate) fn shade(&self) -> char {
        match self.kind {
            LayerKind::Category(_) | LayerKind::Rest => '█',
            LayerKind::Opaque | LayerKind::PoolIdle => IDLE_SHADE,
        }
    }
}

/// The memory of a process at points in time, in ns of the run's clock.
#[derive(Debug, Default)]
pub(crate) struct History {
    points: BTreeMap<u64, Composition>,
    /// Times of the last points of the newest [`KEPT`] replies. These points stay when a new reply replaces the others.
    kept: VecDeque<u64>,
}

impl History {
    /// Replaces the points with those of a reply, and keeps the points that were the latest of earlier replies.
    pub(crate) fn update(&mut self, points: Vec<(u64, Composition)>) {
        if let Some((latest_ns, _)) = points.last() {
            self.kept.push_back(*latest_ns);
        }
        if self.kept.len() > KEPT {
            self.kept.pop_front();
        }
        self.points.retain(|time_ns, _| self.kept.contains(time_ns));
        self.points.extend(points);
    }

    /// Returns the times of the first and the last point. With a window the first time is at most `window_ns` before the last.
    pub(crate) fn span(&self, window_ns: Option<u64>) -> Option<(u64, u64)> {
        let (first, last) = (*self.points.keys().next()?, *self.points.keys().next_back()?);
        let from = window_ns.map_or(first, |window_ns| last.saturating_sub(window_ns).max(first));
        (from < last).then_some((from, last))
    }

    /// Returns the point with most memory in each of `count` equal intervals. An interval without points has the point before it.
    pub(crate) fn columns(&self, (from, to): (u64, u64), count: usize) -> Vec<Option<&Composition>> {
        let span = u128::from(to - from) + 1;
        let edge = |index: usize| {
            let ns = (span * index as u128).div_ceil(count.max(1) as u128);
            from.saturating_add(u64::try_from(ns).unwrap_or(u64::MAX))
        };
        let fullest = |index: usize| {
            let (start, end) = (edge(index), edge(index + 1));
            let within = self.points.range(start..end).map(|(_, composition)| composition);
            let before = || Some(self.points.range(..start).next_back()?.1);
            within.max_by_key(|composition| composition.total()).or_else(before)
        };
        (0..count).map(fullest).collect()
    }
}

fn bytes(composition: &Composition, layers: &[Layer]) -> Vec<i64> {
    let of_layer = |layer: &Layer| match &layer.kind {
        LayerKind::Category(name) => composition.categories.get(name).copied().unwrap_or(0),
        LayerKind::PoolIdle => composition.pool_idle,
        LayerKind::Opaque => composition.opaque,
        LayerKind::Rest => 0,
    };
    let mut bytes: Vec<i64> = layers.iter().map(of_layer).collect();
    let rest = composition.total() - bytes.iter().sum::<i64>();
    if let Some(index) = layers.iter().position(|layer| layer.kind == LayerKind::Rest) {
        bytes[index] = rest;
    }
    bytes
}

/// The chart; `max_bytes` fill the whole height.
pub(crate) struct Chart<'a> {
    pub columns: &'a [Option<&'a Composition>],
    pub layers: &'a [Layer],
    pub max_bytes: i64,
    pub look: Look,
}

impl Widget for Chart<'_> {
    fn render(self, area: Rect, frame: &mut Buffer) {
        let whole = usize::from(area.height) * BLOCKS.len();
        for (composition, column) in self.columns.iter().zip(area.columns()) {
            let Some(composition) = composition else { continue };
            let mut sum = 0_i64;
            let end = |bytes: i64| {
                sum = sum.saturating_add(bytes.max(0));
                (sum as f64 / self.max_bytes.max(1) as f64 * whole as f64).round() as usize
            };
            // Upper end of each layer above the bottom of the chart, in eighths of a row.
            let ends: Vec<usize> = bytes(composition, self.layers).into_iter().map(end).collect();
            for (row, place) in column.rows().rev().enumerate() {
                if let Some(cell) = self.cell(&ends, row * BLOCKS.len()) {
                    cell.render(place, frame);
                }
            }
        }
    }
}

impl Chart<'_> {
    /// Returns the character of a cell whose lower edge is `from` eighths above the bottom, with the colours of its layers.
    fn cell(&self, ends: &[usize], from: usize) -> Option<Span<'static>> {
        let to = from + BLOCKS.len();
        let layer_at = |eighth: usize| ends.iter().position(|end| *end > eighth);
        let layer = |index: usize| self.layers.get(index);
        if !self.look.colors || !self.look.unicode {
            let layer = layer_at(from + BLOCKS.len() / 2).and_then(layer)?;
            return Some(Span::styled(layer.letter.to_string(), layer.color));
        }
        let lower = layer_at(from)?;
        let end = ends.get(lower).copied().unwrap_or(to).min(to);
        let glyph = match end {
            end if end < to => BLOCKS.get((end - from).saturating_sub(1)).copied().unwrap_or('█'),
            _ => layer(lower)?.shade(),
        };
        // A character cell shows two layers: the lowest one, and above its end the one in the middle of the rest.
        let upper = if end < to { layer_at((end + to) / 2).or(layer_at(end)) } else { None };
        let span = Span::styled(glyph.to_string(), layer(lower)?.color);
        Some(match upper.and_then(layer) {
            Some(upper) => span.bg(upper.color),
            None => span,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui_core::buffer::Cell;

    fn held(a: i64, b: i64, idle: i64) -> Composition {
        let categories = [("a".to_owned(), a), ("b".to_owned(), b)].into_iter().collect();
        Composition { categories, pool_idle: idle, ..Composition::default() }
    }

    #[test]
    fn layers_stand_on_each_other() {
        let layers = layers(["a", "b"].map(str::to_owned).into_iter());
        let (one, two) = (held(2, 1, 1), held(4, 0, 0));
        let drawn = |columns: &[Option<&Composition>], size: u16, max_bytes, colors| {
            let look = Look { unicode: true, colors, is_live: true };
            let mut frame = Buffer::empty(Rect::new(0, 0, size, size));
            Chart { columns, layers: &layers, max_bytes, look }.render(frame.area, &mut frame);
            frame
        };
        let chart = drawn(&[Some(&one), None, Some(&two)], 4, 4, false);
        let rows: Vec<String> =
            chart.content.chunks(4).map(|row| row.iter().map(Cell::symbol).collect()).collect();
        assert_eq!(rows, [". a ", "b a ", "a a ", "a a "]);
        let chart = drawn(&[Some(&held(3, 1, 0))], 2, 4, true);
        assert_eq!([chart[(0, 0)].symbol(), chart[(0, 1)].symbol()], ["▄", "█"], "half of a cell");
        let chart = drawn(&[Some(&held(2, 0, 2))], 2, 4, true);
        assert_eq!([chart[(0, 0)].symbol(), chart[(0, 1)].symbol()], ["▒", "█"], "idle memory is hatched");
        drawn(&[Some(&held(-5, 3, 0))], 2, 0, true);
    }

    #[test]
    fn a_category_has_the_same_colour_beside_any_others() {
        let colors = |names: &[&str]| -> Vec<Color> {
            let layers = layers(names.iter().map(|name| (*name).to_owned()));
            layers.into_iter().take(names.len()).map(|layer| layer.color).collect()
        };
        let all = colors(&["model/h.0", "gradients", "parameters"]);
        assert_eq!([all[2], all[1]], [colors(&["parameters"])[0], colors(&["gradients"])[0]]);
        assert!(all[0] != all[1] && all[0] != all[2]);
    }

    #[test]
    fn columns_are_the_fullest_moments_and_what_was_held_between() {
        let mut history = History::default();
        history.update(vec![
            (0, held(5, 0, 0)),
            (10, held(9, 0, 0)),
            (19, held(1, 0, 0)),
            (79, held(4, 0, 0)),
        ]);
        let columns = |span, count| -> Vec<i64> {
            history.columns(span, count).into_iter().map(|held| held.map_or(-1, Composition::total)).collect()
        };
        assert_eq!(columns((0, 79), 4), [9, 1, 1, 4]);
        assert_eq!(columns((30, 79), 2), [1, 4]);
        assert_eq!(history.span(None), Some((0, 79)));
        assert_eq!(history.span(Some(9)), Some((70, 79)));
        assert_eq!(History::default().span(None), None);
    }

    #[test]
    fn what_was_seen_here_stays_when_the_run_tells_less() {
        let mut history = History::default();
        for round in 0..2000 {
            history.update(vec![
                (0, held(1, 0, 0)),
                (round * 3 + 1, held(2, 0, 0)),
                (round * 3 + 2, held(3, 0, 0)),
            ]);
        }
        assert!(history.points.len() <= KEPT + 3 && history.points.contains_key(&(1999 * 3 - 1)));
    }
}
