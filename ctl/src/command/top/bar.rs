//! Bars and sparklines made of characters.

use super::screen::{Screen, Style};

/// Glyphs of a sparkline, from low to high.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Glyphs for terminals without Unicode.
const PLAIN: [char; 8] = ['_', '.', '-', ':', '=', '+', '*', '#'];

/// A part of a bar.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub bytes: i64,
    /// Glyphs with and without Unicode. They differ between parts, so that a bar is readable without colours.
    pub glyphs: (char, char),
    pub style: Style,
}

/// Draws a bar of `whole` bytes from its parts, from the left; the rest stays empty. A part with any bytes gets at least one
/// column if there is room.
pub(crate) fn bar(screen: &mut Screen, row: usize, (from, to): (usize, usize), whole: i64, parts: &[Part]) {
    let width = to.saturating_sub(from);
    let share = |bytes: i64| (bytes.max(0) as f64 / whole.max(1) as f64).min(1.0);
    let columns = |bytes: i64| (share(bytes) * width as f64).round() as usize;
    let (mut sum, mut at) = (0_i64, from);
    for part in parts {
        sum = sum.saturating_add(part.bytes.max(0));
        let least = at + usize::from(part.bytes > 0);
        let end = (from + columns(sum)).max(least).min(to);
        let glyph = if screen.unicode { part.glyphs.0 } else { part.glyphs.1 };
        let text: String = std::iter::repeat_n(glyph, end.saturating_sub(at)).collect();
        at = screen.put_within(row, at, to, &text, part.style).max(at);
    }
}

const EIGHTHS: [char; 7] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉'];

/// Returns a bar for a single amount of `whole`, with a resolution of an eighth of a column.
pub(crate) fn amount(bytes: i64, whole: i64, width: usize, unicode: bool) -> String {
    let length = (bytes.max(0) as f64 / whole.max(1) as f64).min(1.0) * width as f64;
    if !unicode {
        return "#".repeat(length.round() as usize);
    }
    let eighths = (length * 8.0).round() as usize;
    let end = (eighths % 8).checked_sub(1).and_then(|at| EIGHTHS.get(at));
    "█".repeat(eighths / 8) + &end.map(char::to_string).unwrap_or_default()
}

/// Returns a sparkline; unknown values are blanks.
pub(crate) fn spark(values: &[Option<u64>], unicode: bool) -> String {
    let glyphs = if unicode { BLOCKS } else { PLAIN };
    let most = values.iter().flatten().max().copied().unwrap_or(0).max(1);
    let glyph = |value: &Option<u64>| {
        let Some(value) = value else { return ' ' };
        let step = (u128::from(*value) * glyphs.len() as u128).div_ceil(u128::from(most));
        let at = usize::try_from(step).unwrap_or(0).saturating_sub(1);
        glyphs.get(at).copied().unwrap_or(' ')
    };
    values.iter().map(glyph).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_shows_every_part_and_no_more_than_its_room() {
        let part = |bytes, glyph| Part { bytes, glyphs: (glyph, glyph), style: Style::PLAIN };
        let drawn = |whole, bytes: [i64; 3]| {
            let mut screen = Screen::new((12, 1), true, false);
            let parts = [part(bytes[0], 'a'), part(bytes[1], 'b'), part(bytes[2], 'c')];
            bar(&mut screen, 0, (1, 11), whole, &parts);
            screen.text().remove(0)
        };
        assert_eq!(drawn(100, [50, 30, 20]), " aaaaabbbcc");
        assert_eq!(drawn(100, [50, 1, 0]), " aaaaab");
        assert_eq!(drawn(100, [-5, 0, 10]), " c");
        assert_eq!(drawn(0, [i64::MAX, i64::MAX, 1]), " aaaaaaaaaa", "more than there is");
    }

    #[test]
    fn an_amount_is_as_long_as_it_is_large() {
        let drawn = |bytes, unicode| amount(bytes, 80, 10, unicode);
        assert_eq!(
            [0, -3, 1, 12, 80, 500].map(|bytes| drawn(bytes, true)),
            ["", "", "▏", "█▌", "██████████", "██████████"]
        );
        assert_eq!([0, 3, 5, 80].map(|bytes| drawn(bytes, false)), ["", "", "#", "##########"]);
        assert_eq!(amount(1, 0, 3, true), "███");
    }

    #[test]
    fn a_course_has_a_character_per_value() {
        assert_eq!(spark(&[Some(0), Some(1), None, Some(4), Some(8)], true), "▁▁ ▄█");
        assert_eq!(spark(&[Some(8), Some(u64::MAX)], false), "_#");
        assert_eq!(spark(&[], true), "");
    }
}
