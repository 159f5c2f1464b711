//! Returns the bytes that make a terminal show a frame. Only changes since the last frame are written, because a terminal may be on
//! a slow connection.

use ratatui_core::buffer::{Buffer, Cell, CellWidth};
use ratatui_core::style::{Color, Modifier};

/// Modifiers of the frames, with their codes in an escape sequence.
const MODIFIERS: [(Modifier, &str); 3] =
    [(Modifier::BOLD, ";1"), (Modifier::DIM, ";2"), (Modifier::REVERSED, ";7")];

/// Returns the bytes that change the terminal's contents from `shown` to `now`; of all cells if `shown` has another size.
pub(crate) fn changes(shown: Option<&Buffer>, now: &Buffer) -> Vec<u8> {
    let mut pen = Pen::default();
    let empty = Buffer::empty(now.area);
    let shown = shown.filter(|shown| shown.area == now.area).unwrap_or_else(|| {
        pen.out += "\x1b[0m\x1b[2J";
        &empty
    });
    let ends: Vec<u16> = (0..now.area.height).map(|row| row_end(now, row)).collect();
    let mut erased = None;
    for (column, row, cell) in shown.diff_iter(now) {
        let end = ends.get(usize::from(row)).copied().unwrap_or(now.area.width);
        if column < end {
            pen.write((column, row), cell);
        } else if erased.replace(row) != Some(row) {
            // Blanks at the end of a row are erased with one sequence.
            pen.move_to((end, row));
            pen.select(&Cell::EMPTY);
            pen.out += "\x1b[K";
        }
    }
    pen.select(&Cell::EMPTY);
    pen.out.into_bytes()
}

/// Returns the rows of a frame with their styles, for output like that of other commands. Empty rows at the end are left out.
pub(crate) fn printed(frame: &Buffer) -> String {
    let rows = (0..frame.area.height).rfind(|row| row_end(frame, *row) > 0).map_or(0, |last| last + 1);
    let mut pen = Pen::default();
    for row in 0..rows {
        let mut column = 0;
        while let Some(cell) = frame.cell((column, row)).filter(|_| column < row_end(frame, row)) {
            pen.select(cell);
            pen.out += cell.symbol();
            column += cell.cell_width().max(1);
        }
        pen.select(&Cell::EMPTY);
        pen.out.push('\n');
    }
    pen.out
}

/// Returns the column behind the last cell of a row that is not blank.
fn row_end(frame: &Buffer, row: u16) -> u16 {
    let cell = |column: &u16| frame.cell((*column, row)).filter(|cell| **cell != Cell::EMPTY);
    let last = (0..frame.area.width).rev().find_map(|column| Some((column, cell(&column)?)));
    last.map_or(0, |(column, cell)| column + cell.cell_width().max(1))
}

/// Collects output for the terminal, and tracks the terminal's state after this output.
#[derive(Default)]
struct Pen {
    out: String,
    /// Column and row of the cursor; `None` if unknown.
    cursor: Option<(u16, u16)>,
    /// Colours of text and background, and modifiers.
    style: (Color, Color, Modifier),
}

impl Pen {
    fn write(&mut self, (column, row): (u16, u16), cell: &Cell) {
        self.move_to((column, row));
        self.select(cell);
        self.out += cell.symbol();
        // After a character whose width differs between terminals, the cursor's position is unknown.
        let has_known_width = cell.symbol().is_ascii() || super::widgets::is_block(cell);
        self.cursor = has_known_width.then_some((column + 1, row));
    }

    fn move_to(&mut self, (column, row): (u16, u16)) {
        if self.cursor != Some((column, row)) {
            self.out += &format!("\x1b[{};{}H", row + 1, column + 1);
            self.cursor = Some((column, row));
        }
    }

    /// Selects the style of a cell (SGR).
    fn select(&mut self, cell: &Cell) {
        let style = (cell.fg, cell.bg, cell.modifier);
        if style == self.style {
            return;
        }
        self.style = style;
        self.out += "\x1b[0";
        let modifiers = MODIFIERS.iter().filter(|(modifier, _)| cell.modifier.contains(*modifier));
        self.out.extend(modifiers.map(|(_, code)| *code));
        for (color, first) in [(cell.fg, 30), (cell.bg, 40)] {
            match color {
                Color::Indexed(color @ 0..8) => self.out += &format!(";{}", first + color),
                Color::Indexed(color) => self.out += &format!(";{}", first + 60 + (color & 7)),
                _ => {}
            }
        }
        self.out.push('m');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::top::widgets::RED;
    use ratatui_core::layout::Rect;
    use ratatui_core::style::Style;

    fn size(number: u16) -> std::num::NonZero<u16> {
        std::num::NonZero::new(number).expect("a size")
    }

    fn frame(width: u16, height: u16) -> Buffer {
        Buffer::empty(Rect::new(0, 0, width, height))
    }

    #[test]
    fn written_bytes_make_the_terminal_show_the_frame() {
        let texts =
            ["", "a", "ab  cd", "wide 漢字 and 𝕏", "end of a longer row.", "████▌  ▁▂", "x\u{301}y\u{1b}[2J"];
        let mut parser = vt100::Parser::new(size(4), size(20), 0);
        let mut shown: Option<Buffer> = None;
        for round in 0..200_u16 {
            let mut now = frame(20, 4);
            for row in 0..4 {
                let text = texts[usize::from(round * 7 + row * (round / 5 + 3)) % texts.len()];
                let style = if (round + row) % 3 == 0 { Style::from(RED) } else { Style::new() };
                now.set_string((round * 3 + row) % 9, row, text, style);
            }
            if round % 4 == 0 {
                now.set_style(Rect::new(0, round % 5, 20, 1), Modifier::REVERSED);
            }
            parser.process(&changes(shown.as_ref(), &now));
            let seen: Vec<String> =
                parser.screen().rows(0, 20).map(|row| row.trim_end().to_owned()).collect();
            let plain: Vec<String> = (0..4).map(|row| text(&now, row)).collect();
            assert_eq!(seen, plain, "round {round}");
            for (row, column) in (0..4).flat_map(|row| (0..20).map(move |column| (row, column))) {
                let (cell, expected) =
                    (parser.screen().cell(row, column).expect("a cell"), &now[(column, row)]);
                if cell.is_wide_continuation() {
                    continue;
                }
                let style = (cell.inverse(), cell.fgcolor() == vt100::Color::Idx(1));
                let expected = (expected.modifier.contains(Modifier::REVERSED), expected.fg == RED);
                assert_eq!(style, expected, "round {round}, row {row}, column {column}");
            }
            shown = Some(now);
        }
        let shown = shown.expect("drawn");
        assert!(changes(Some(&shown), &shown).is_empty(), "an unchanged frame costs nothing");
    }

    fn text(frame: &Buffer, row: u16) -> String {
        let mut one = Buffer::empty(Rect::new(0, 0, frame.area.width, 1));
        (0..frame.area.width)
            .for_each(|column| _ = one[(column, 0)].set_symbol(frame[(column, row)].symbol()));
        printed(&one).trim_end().to_owned()
    }

    #[test]
    fn small_changes_take_few_bytes() {
        let mut before = frame(80, 24);
        (0..24).for_each(|row| before.set_string(0, row, "text ".repeat(16), Style::new()));
        let mut now = before.clone();
        now.set_string(10, 5, "12.5", Style::new());
        let bytes = changes(Some(&before), &now);
        assert!(bytes.len() <= 12, "{:?}", String::from_utf8_lossy(&bytes));
        let erased = changes(Some(&before), &frame(80, 24));
        assert!(erased.len() <= 24 * 10, "{} bytes", erased.len());
        changes(None, &frame(0, 0));
    }

    #[test]
    fn printed_rows_have_styles_but_never_move_the_cursor() {
        let mut now = frame(12, 3);
        now.set_string(1, 0, "漢字 x", Style::from(RED));
        assert_eq!(printed(&now), " \x1b[0;31m漢字 x\x1b[0m\n");
    }
}
