//! Draws memory over time as one line of a terminal.

use gpumem_model::series::{Bucket, Extremes, Series};
use gpumem_model::time::Times;
use gpumem_model::units::Unit;

/// Selects the drawn value of a bucket (an interval of the series).
type Value = fn(&Bucket) -> Option<Extremes>;

/// Maximum number of columns of the drawing; also used if the terminal's width is unknown.
const COLUMNS: usize = 60;
const HEAD: &str = "over time ";
/// Minimum number of columns of a drawing.
const LEAST: usize = 8;
/// Characters that fill one to eight eighths of a cell from below.
pub const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Characters for terminals without Unicode, from low to high values.
const PLAIN: [char; 8] = ['_', '.', '-', ':', '=', '+', '*', '#'];

/// Returns a line such as `over time ▁▂▅█ used, 0 to 71,204 MiB, 10:30:00Z-10:45:12Z`. It shows NVML's figure, or tracked memory if
/// NVML was read in fewer than 8 buckets, or over less than 80 % of the time for which tracked memory is known. `None` if there is
/// nothing to draw.
pub(super) fn line(series: &Series, times: Times, width: Option<usize>, unicode: bool) -> Option<String> {
    let span = |value: Value| {
        let first = series.buckets.iter().find(|bucket| value(bucket).is_some())?.time_ns;
        let last = series.buckets.iter().rfind(|bucket| value(bucket).is_some())?.time_ns;
        Some((first, last.max(first))) // the run's writer may have used another order
    };
    let is_read = series.buckets.iter().filter(|bucket| bucket.used.is_some()).count() >= LEAST;
    let length = |span: Option<(u64, u64)>| span.map_or(0, |(first, last)| last - first);
    let (used, tracked): (Value, Value) = (|bucket| bucket.used, |bucket| bucket.tracked);
    let is_used = is_read && length(span(used)) >= length(span(tracked)) / 5 * 4;
    let (name, of) = if is_used { ("used", used) } else { ("tracked", tracked) };
    let (first, last) = span(of)?;
    let most =
        series.buckets.iter().filter_map(|bucket| Some(of(bucket)?.max)).max().filter(|most| *most > 0)?;
    let unit = Unit::for_largest(most);
    let (from, to) = (times.time(first), times.time(last));
    let span = if from == to { times.clock().distance(last - first) } else { format!("{from} to {to}") };
    let scale = format!(" {name}, 0 to {} {}, {span}", unit.amount(most), unit.name);
    let room = width.map_or(COLUMNS, |width| width.saturating_sub(HEAD.len() + scale.chars().count()));
    let slots =
        usize::try_from((last - first) / series.width_ns.max(1)).unwrap_or(usize::MAX).saturating_add(1);
    let columns = columns(series, of, (first, last), room.min(COLUMNS).min(slots));
    if columns.len() < LEAST || columns.iter().all(|bytes| *bytes == columns[0]) {
        return None;
    }
    Some(format!("{HEAD}{}{scale}", sparkline(columns.into_iter().map(Some), most, unicode)))
}

/// Returns a character for each value, on a scale from 0 to `most`; unknown values are blanks.
pub fn sparkline(values: impl IntoIterator<Item = Option<i64>>, most: i64, unicode: bool) -> String {
    let glyphs = if unicode { BLOCKS } else { PLAIN };
    let glyph = |value: Option<i64>| {
        let Some(bytes) = value else { return ' ' };
        let step = (bytes.max(0) as f64 / most.max(1) as f64 * glyphs.len() as f64).ceil() as usize;
        glyphs.get(step.saturating_sub(1)).copied().unwrap_or('?')
    };
    values.into_iter().map(glyph).collect()
}

/// Returns the highest value in each of `count` equal intervals. An interval without buckets has the last known value.
fn columns(series: &Series, value: Value, (first, last): (u64, u64), count: usize) -> Vec<i64> {
    let span = u128::from(last - first) + u128::from(series.width_ns.max(1));
    let mut highest: Vec<Option<(i64, i64)>> = vec![None; count];
    for bucket in &series.buckets {
        let Some(extremes) = value(bucket) else { continue };
        let at = u128::from(bucket.time_ns.saturating_sub(first)) * count as u128 / span.max(1);
        let Some(column) = usize::try_from(at).ok().and_then(|at| highest.get_mut(at)) else { continue };
        let most = column.map_or(extremes.max, |(most, _)| most.max(extremes.max));
        *column = Some((most, extremes.last));
    }
    let mut held = 0;
    let columns = highest.into_iter().map(|column| {
        let (most, last) = column.unwrap_or((held, held));
        held = last;
        most
    });
    columns.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(values: &[(u64, i64)]) -> Series {
        let bucket = |&(time_ns, bytes): &(u64, i64)| Bucket {
            time_ns,
            used: Some(Extremes::at(bytes)),
            ..Bucket::default()
        };
        Series { width_ns: 10, buckets: values.iter().map(bucket).collect() }
    }

    #[test]
    fn a_series_in_any_order_is_drawn_somehow() {
        for (first, last) in [(90, 0), (u64::MAX, 0), (0, u64::MAX)] {
            let mut values: Vec<(u64, i64)> = (0..9).map(|at| (first, at)).collect();
            values.push((last, 5));
            assert!(
                line(&series(&values), Times::of_clock(gpumem_model::run::Clock::Lines), None, true)
                    .is_none_or(|line| line.starts_with(HEAD))
            );
        }
    }

    #[test]
    fn a_sparkline_has_a_character_per_value() {
        assert_eq!(sparkline([Some(0), Some(1), None, Some(4), Some(8)], 8, true), "▁▁ ▄█");
        assert_eq!(sparkline([Some(8), Some(i64::MAX)], i64::MAX, false), "_#");
        assert_eq!(sparkline([], 0, true), "");
    }

    #[test]
    fn columns_are_the_highest_of_equal_times_and_what_was_held_between() {
        let series = series(&[(0, 5), (10, 9), (20, 1), (70, 4)]);
        let of = |bucket: &Bucket| bucket.used;
        assert_eq!(columns(&series, of, (0, 70), 4), [9, 1, 1, 4]);
        assert_eq!(columns(&series, of, (0, 70), 8), [5, 9, 1, 1, 1, 1, 1, 4]);
        assert_eq!(columns(&series, of, (0, 70), 1), [9]);
        assert_eq!(columns(&series, of, (0, 70), 0), [0; 0]);
    }
}
