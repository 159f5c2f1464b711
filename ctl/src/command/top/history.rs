//! Memory of a process over time, by category: a stack of layers, with a column for each interval of time.

use super::screen::{BLOCKS, Color, GREY, Screen, Style};
use gpumem_report::Composition;
use std::collections::BTreeMap;

/// Number of points kept in addition to those of the run, which are few if the run is long.
const KEPT: usize = 512;

/// A layer of the stack, from the bottom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layer {
    pub name: LayerKind,
    pub color: Color,
    pub letter: char,
}

/// The memory that a layer represents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LayerKind {
    Category(String),
    /// Memory that no other layer represents.
    Rest,
    PoolIdle,
    Opaque,
}

/// Colours that are distinguishable on light and dark backgrounds.
const COLORS: [Color; 10] = [4, 2, 5, 6, 1, 12, 10, 13, 14, 9];
const REST: Color = 3;
const OPAQUE: Color = 11;

/// Returns layers for the categories in the table's order, then for the rest, opaque pools and idle memory.
pub(crate) fn layers(names: impl Iterator<Item = String>) -> Vec<Layer> {
    let named = names.take(COLORS.len()).zip(COLORS).zip('a'..);
    let mut layers: Vec<Layer> = named
        .map(|((name, color), letter)| Layer { name: LayerKind::Category(name), color, letter })
        .collect();
    layers.push(Layer { name: LayerKind::Rest, color: REST, letter: '+' });
    layers.push(Layer { name: LayerKind::Opaque, color: OPAQUE, letter: 'O' });
    layers.push(Layer { name: LayerKind::PoolIdle, color: GREY, letter: '.' });
    layers
}

impl Layer {
    /// Returns the sign of a layer next to its row in the table.
    pub(crate) fn sign(&self, screen: &Screen) -> (String, Style) {
        let letter = if screen.colors && screen.unicode { '█' } else { self.letter };
        (letter.to_string(), Style::of(self.color))
    }
}

#[derive(Debug, Default)]
pub(crate) struct History {
    points: BTreeMap<u64, Composition>,
    /// Times of the moments that were the latest at a poll; their points are kept.
    own: std::collections::VecDeque<u64>,
}

impl History {
    /// Replaces the points with those of a run, and keeps points that were the latest at a poll.
    pub(crate) fn update(&mut self, points: Vec<(u64, Composition)>) {
        if let Some((latest_ns, _)) = points.last() {
            self.own.push_back(*latest_ns);
        }
        if self.own.len() > KEPT {
            self.own.pop_front();
        }
        let own = std::mem::take(&mut self.points);
        self.points = own.into_iter().filter(|(time_ns, _)| self.own.contains(time_ns)).collect();
        self.points.extend(points);
    }

    /// Returns the times of the first and the last point, limited to the last `window_ns`.
    pub(crate) fn span(&self, window_ns: Option<u64>) -> Option<(u64, u64)> {
        let (first, last) = (*self.points.keys().next()?, *self.points.keys().next_back()?);
        let from = window_ns.map_or(first, |window_ns| last.saturating_sub(window_ns).max(first));
        (from < last).then_some((from, last))
    }

    /// Returns the fullest moment of each of `count` equal intervals. An interval without points has the preceding state.
    pub(crate) fn columns(&self, (from, to): (u64, u64), count: usize) -> Vec<Option<&Composition>> {
        let span = u128::from(to - from) + 1;
        let mut columns: Vec<Option<&Composition>> = vec![None; count];
        for (time_ns, composition) in self.points.range(from..=to) {
            let at = u128::from(time_ns - from) * count as u128 / span;
            let Some(column) = usize::try_from(at).ok().and_then(|at| columns.get_mut(at)) else { continue };
            if column.is_none_or(|held| held.total() <= composition.total()) {
                *column = Some(composition);
            }
        }
        let mut held = self.points.range(..from).next_back().map(|(_, composition)| composition);
        for (at, column) in columns.iter_mut().enumerate() {
            if column.is_some() {
                // The state after an interval is its last point, not its fullest.
                let end =
                    from + u64::try_from(span * (at as u128 + 1) / count.max(1) as u128).unwrap_or(u64::MAX);
                held = self.points.range(..end.max(from)).next_back().map(|(_, composition)| composition);
            } else {
                *column = held;
            }
        }
        columns
    }
}

fn bytes(composition: &Composition, layers: &[Layer]) -> Vec<i64> {
    let named = |layer: &Layer| match &layer.name {
        LayerKind::Category(name) => composition.categories.get(name).copied().unwrap_or(0),
        LayerKind::PoolIdle => composition.pool_idle,
        LayerKind::Opaque => composition.opaque,
        LayerKind::Rest => 0,
    };
    let mut bytes: Vec<i64> = layers.iter().map(named).collect();
    let rest = composition.total() - bytes.iter().sum::<i64>();
    for (bytes, layer) in bytes.iter_mut().zip(layers) {
        if layer.name == LayerKind::Rest {
            *bytes = rest;
        }
    }
    bytes
}

/// Draws columns from a position on; `most` bytes fill the whole height.
pub(crate) fn draw(
    screen: &mut Screen,
    (top, left): (usize, usize),
    height: usize,
    columns: &[Option<&Composition>],
    layers: &[Layer],
    most: i64,
) {
    let whole = height * BLOCKS.len();
    for (column, composition) in columns.iter().enumerate() {
        let Some(composition) = composition else { continue };
        let mut sum = 0_i64;
        // Ends of the layers, in eighths of a row.
        let ends: Vec<usize> = bytes(composition, layers)
            .into_iter()
            .map(|bytes| {
                sum = sum.saturating_add(bytes.max(0));
                (sum as f64 / most.max(1) as f64 * whole as f64).round() as usize
            })
            .collect();
        let layer_at = |eighth: usize| ends.iter().position(|end| *end > eighth);
        for row in 0..height {
            let (from, to) = (row * BLOCKS.len(), (row + 1) * BLOCKS.len());
            let place = (top + height - 1 - row, left + column);
            if !screen.colors || !screen.unicode {
                if let Some(layer) = layer_at(from + BLOCKS.len() / 2).and_then(|at| layers.get(at)) {
                    screen.put(place.0, place.1, &layer.letter.to_string(), Style::of(layer.color));
                }
                continue;
            }
            let Some(lower) = layer_at(from) else { continue };
            let end = ends.get(lower).copied().unwrap_or(to).min(to);
            let glyph = BLOCKS.get((end - from).saturating_sub(1)).copied().unwrap_or('█');
            let color = |at: usize| layers.get(at).map(|layer| layer.color);
            // If several layers end in this cell, the upper part shows the one in its middle.
            let upper = if end < to { layer_at((end + to) / 2).or(layer_at(end)) } else { None };
            let style = Style { color: color(lower), ground: upper.and_then(color), ..Style::PLAIN };
            screen.put(place.0, place.1, &glyph.to_string(), style);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(a: i64, b: i64, idle: i64) -> Composition {
        let categories = [("a".to_owned(), a), ("b".to_owned(), b)].into_iter().collect();
        Composition { categories, pool_idle: idle, ..Composition::default() }
    }

    #[test]
    fn layers_stand_on_each_other() {
        let layers = layers(["a", "b"].map(str::to_owned).into_iter());
        let (one, two) = (held(2, 1, 1), held(4, 0, 0));
        let mut screen = Screen::new((4, 4), true, false);
        draw(&mut screen, (0, 0), 4, &[Some(&one), None, Some(&two)], &layers, 4);
        assert_eq!(screen.text(), [". a", "b a", "a a", "a a"]);
        let mut screen = Screen::new((2, 2), true, true);
        draw(&mut screen, (0, 0), 2, &[Some(&held(3, 1, 0))], &layers, 4);
        assert_eq!(screen.text(), ["▄", "█"], "the half of a place");
        let odd = held(-5, 3, 0);
        draw(&mut screen, (0, 0), 2, &[Some(&odd)], &layers, 0);
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
