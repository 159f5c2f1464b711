//! Parts of `top` that several views use: what the terminal can show, positions in long lists, bars.

use super::keys::Key;
use gpumem_report::text::wrapped_to;
use ratatui_core::buffer::{Buffer, Cell};
use ratatui_core::layout::{Constraint, Rect};
use ratatui_core::style::{Color, Modifier, Style};
use ratatui_core::text::Line;
use ratatui_core::widgets::{StatefulWidget, Widget};
use ratatui_widgets::scrollbar::{Scrollbar, ScrollbarOrientation, ScrollbarState};
use std::ops::Range;

// Numbers of the terminal's sixteen colours, which users choose to suit their background.
pub(crate) const RED: Color = Color::Indexed(1);
pub(crate) const YELLOW: Color = Color::Indexed(3);
pub(crate) const BLUE: Color = Color::Indexed(4);
pub(crate) const CYAN: Color = Color::Indexed(6);
pub(crate) const GREY: Color = Color::Indexed(8);

pub(crate) const PLAIN: Style = Style::new();
pub(crate) const BOLD: Style = PLAIN.add_modifier(Modifier::BOLD);
pub(crate) const DIM: Style = PLAIN.add_modifier(Modifier::DIM).remove_modifier(Modifier::BOLD);
pub(crate) const SELECTED: Style = PLAIN.add_modifier(Modifier::REVERSED).remove_modifier(Modifier::DIM);

/// Abilities of the terminal, and the kind of the frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    pub unicode: bool,
    pub colors: bool,
    /// Whether the frame has a selection and a line of keys; otherwise it is printed once.
    pub is_live: bool,
}

impl Look {
    /// Returns the character that the terminal can show, of one with and one without Unicode.
    pub(crate) fn glyph(self, (unicode, ascii): (char, char)) -> char {
        if self.unicode { unicode } else { ascii }
    }

    /// Removes from a frame what the terminal cannot show, and from coloured bars the style of the selection. A bar without a colour
    /// keeps it, since it would look like the rest of the selected row.
    pub(crate) fn apply(self, frame: &mut Buffer) {
        for cell in &mut frame.content {
            if is_block(cell) && cell.fg != Color::Reset {
                cell.modifier.remove(Modifier::REVERSED);
            }
            if !self.colors {
                (cell.fg, cell.bg) = (Color::Reset, Color::Reset);
            }
            if !self.colors && !self.is_live {
                cell.modifier = Modifier::empty();
            }
            if !self.unicode && !cell.symbol().is_ascii() {
                cell.set_char('?');
            }
        }
    }
}

/// Returns whether a cell has one of Unicode's block elements, which bars and sparklines consist of.
pub(crate) fn is_block(cell: &Cell) -> bool {
    cell.symbol().chars().all(|character| ('\u{2580}'..='\u{259f}').contains(&character))
}

/// Returns the constraint of a part with a known number of columns or rows.
pub(crate) fn length(cells: usize) -> Constraint {
    Constraint::Length(u16::try_from(cells).unwrap_or(u16::MAX))
}

/// Wraps a text for an area, and returns at most `limit` of its lines.
pub(crate) fn wrap(
    text: &str,
    area: Rect,
    limit: usize,
    style: Style,
) -> impl Iterator<Item = Line<'static>> + use<> {
    let lines = wrapped_to(text, Some(area.width.into()), limit);
    lines.into_iter().map(move |line| Line::styled(line, style))
}

/// Position in rows that may be more than the screen has.
#[derive(Debug, Default)]
pub(crate) struct Scroll {
    /// Index of the selected row; of a text, which has no selection, that of the first visible row.
    pub position: usize,
    first: usize,
    /// Number of all rows, and of those that fit on the screen.
    count: usize,
    page: usize,
}

impl Scroll {
    /// Moves the position if the key does so. Returns whether it does.
    pub(crate) fn key(&mut self, key: Key) -> bool {
        let Some(by) = key.step(self.page.max(1)) else { return false };
        self.position = self.position.saturating_add_signed(by).min(self.count.saturating_sub(1));
        true
    }

    /// Returns the visible rows of `count` for an area with `page` rows; the selected row is one of them.
    pub(crate) fn visible_rows(&mut self, count: usize, page: usize) -> Range<usize> {
        (self.count, self.page) = (count, page);
        self.position = self.position.min(count.saturating_sub(1));
        let least = (self.position + 1).saturating_sub(page);
        self.first = self.first.clamp(least, self.position.max(least)).min(count.saturating_sub(page));
        self.first..(self.first + page).min(count)
    }

    /// Like [`visible_rows`](Self::visible_rows), for a text.
    pub(crate) fn visible_lines(&mut self, count: usize, page: usize) -> Range<usize> {
        self.position = self.position.min(count.saturating_sub(page));
        self.first = self.position;
        (self.count, self.page) = (count, page);
        self.first..(self.first + page).min(count)
    }

    /// Draws a scroll bar at the right edge of the area if some rows are not visible. Returns the rest of the area.
    pub(crate) fn draw_bar(&self, area: Rect, frame: &mut Buffer, look: Look) -> Rect {
        if !look.is_live || self.count <= self.page {
            return area;
        }
        let mut state = ScrollbarState::new(self.count - self.page + 1)
            .position(self.first)
            .viewport_content_length(self.page);
        let bar = Scrollbar::new(ScrollbarOrientation::VerticalRight);
        let bar = bar.begin_symbol(None).end_symbol(None).track_symbol(None);
        let bar = bar.thumb_symbol(if look.unicode { "█" } else { "#" }).style(DIM);
        bar.render(area, frame, &mut state);
        Rect { width: area.width.saturating_sub(1), ..area }
    }
}

/// Draws the lines of a text that are visible at a position.
pub(crate) fn draw_text(lines: &[Line], scroll: &mut Scroll, area: Rect, frame: &mut Buffer, look: Look) {
    let visible = scroll.visible_lines(lines.len(), area.height.into());
    let area = scroll.draw_bar(area, frame, look);
    lines
        .get(visible)
        .unwrap_or_default()
        .iter()
        .zip(area.rows())
        .for_each(|(line, row)| line.render(row, frame));
}

/// Characters that fill one to seven eighths of a column.
const EIGHTHS: [char; 7] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉'];

/// Returns a bar of a block of Unicode for an amount; `whole` bytes are as long as `width` columns. The resolution of a solid bar is
/// an eighth of a column.
pub(crate) fn amount_bar(bytes: i64, whole: i64, width: u16, shade: char, look: Look) -> String {
    let length = (bytes.max(0) as f64 / whole.max(1) as f64).min(1.0) * f64::from(width);
    if !look.unicode || shade != '█' {
        return look.glyph((shade, '#')).to_string().repeat(length.round() as usize);
    }
    let eighths = (length * 8.0).round() as usize;
    let end = (eighths % 8).checked_sub(1).and_then(|at| EIGHTHS.get(at));
    "█".repeat(eighths / 8) + &end.map(char::to_string).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::top::paint::printed;

    const PIPE: Look = Look { unicode: true, colors: false, is_live: false };
    const ASCII_PIPE: Look = Look { unicode: false, ..PIPE };

    #[test]
    fn a_frame_has_only_what_the_terminal_can_show() {
        let mut frame = Buffer::empty(Rect::new(0, 0, 6, 1));
        frame.set_string(0, 0, "ü漢x", Style::from(RED).add_modifier(Modifier::BOLD));
        ASCII_PIPE.apply(&mut frame);
        assert_eq!(printed(&frame), "?? x\n");
    }

    #[test]
    fn a_bar_in_the_selected_row_differs_from_the_row() {
        let mut frame = Buffer::empty(Rect::new(0, 0, 2, 1));
        frame.set_string(0, 0, "█", SELECTED);
        frame.set_string(1, 0, "█", SELECTED.fg(BLUE));
        Look { unicode: true, colors: true, is_live: true }.apply(&mut frame);
        let is_reversed = [0, 1].map(|at| frame[(at, 0)].modifier.contains(Modifier::REVERSED));
        assert_eq!(is_reversed, [true, false], "without a colour only the reversed block differs");
    }

    #[test]
    fn an_amount_is_as_long_as_it_is_large() {
        let drawn = |bytes, look| amount_bar(bytes, 80, 10, '█', look);
        assert_eq!(
            [0, -3, 1, 12, 80, 500].map(|bytes| drawn(bytes, PIPE)),
            ["", "", "▏", "█▌", "██████████", "██████████"]
        );
        assert_eq!([0, 3, 5, 80].map(|bytes| drawn(bytes, ASCII_PIPE)), ["", "", "#", "##########"]);
        assert_eq!(amount_bar(1, 0, 3, '█', PIPE), "███");
        assert_eq!(
            ["▒▒", "##"],
            [amount_bar(12, 80, 10, '▒', PIPE), amount_bar(12, 80, 10, '▒', ASCII_PIPE)]
        );
    }

    #[test]
    fn the_selected_row_is_always_visible() {
        let mut scroll = Scroll::default();
        let mut rows = |keys: &[Key], count, page| {
            keys.iter().for_each(|key| _ = scroll.key(*key));
            let rows = scroll.visible_rows(count, page);
            assert!(count == 0 || page == 0 || rows.contains(&scroll.position), "{rows:?}");
            (rows, scroll.position)
        };
        assert_eq!(rows(&[], 9, 3), (0..3, 0));
        assert_eq!(rows(&[Key::Down, Key::PageDown], 9, 3), (2..5, 4));
        assert_eq!(rows(&[Key::Up], 9, 3), (2..5, 3));
        assert_eq!(rows(&[Key::End], 9, 3), (6..9, 8));
        assert_eq!(rows(&[], 4, 3), (1..4, 3));
        assert_eq!(rows(&[], 4, 10), (0..4, 3));
        assert_eq!(rows(&[], 0, 3), (0..0, 0));
        rows(&[Key::End, Key::Home], 5, 0);
    }

    #[test]
    fn a_text_scrolls_to_its_last_line() {
        let mut scroll = Scroll::default();
        assert_eq!(scroll.visible_lines(9, 4), 0..4);
        scroll.key(Key::End);
        assert_eq!(scroll.visible_lines(9, 4), 5..9);
        scroll.key(Key::Up);
        assert_eq!(scroll.visible_lines(9, 4), 4..8);
    }
}
