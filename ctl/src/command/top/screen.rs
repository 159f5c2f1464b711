//! A grid of characters with styles, and the bytes that make a terminal show it. Only changes since the last frame are written,
//! because a terminal may be on a slow connection. Functions for bars and sparklines are here too.

pub(crate) use gpumem_report::table::width as columns;
use gpumem_report::text::wrapped;
use unicode_width::UnicodeWidthChar;

/// Numbers of bytes written to the terminal: for the last frame that changed it, and for all frames.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Written {
    pub last: usize,
    pub all: usize,
}

impl Written {
    pub(crate) fn add(&mut self, bytes: usize) {
        if bytes > 0 {
            self.last = bytes;
        }
        self.all += bytes;
    }
}

/// Number of one of the terminal's sixteen colours, which users choose to suit their background.
pub(crate) type Color = u8;
pub(crate) const RED: Color = 1;
pub(crate) const YELLOW: Color = 3;
pub(crate) const BLUE: Color = 4;
pub(crate) const CYAN: Color = 6;
pub(crate) const GREY: Color = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Style {
    pub color: Option<Color>,
    pub ground: Option<Color>,
    pub bold: bool,
    pub dim: bool,
    pub reverse: bool,
}

impl Style {
    pub(crate) const PLAIN: Style =
        Style { color: None, ground: None, bold: false, dim: false, reverse: false };
    pub(crate) const BOLD: Style = Style { bold: true, ..Style::PLAIN };
    pub(crate) const DIM: Style = Style { dim: true, ..Style::PLAIN };
    pub(crate) const REVERSE: Style = Style { reverse: true, ..Style::PLAIN };

    pub(crate) const fn of(color: Color) -> Style {
        Style { color: Some(color), ..Style::PLAIN }
    }

    pub(crate) const fn bold(color: Color) -> Style {
        Style { bold: true, ..Style::of(color) }
    }

    /// Writes the escape sequence that selects the style (SGR).
    fn write(self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"\x1b[0");
        for (is, code) in [(self.bold, b";1"), (self.dim, b";2"), (self.reverse, b";7")] {
            if is {
                out.extend_from_slice(code);
            }
        }
        for (color, first, bright) in [(self.color, 30, 90), (self.ground, 40, 100)] {
            match color {
                Some(color @ 0..8) => out.extend_from_slice(format!(";{}", first + color).as_bytes()),
                Some(color) => out.extend_from_slice(format!(";{}", bright + (color & 7)).as_bytes()),
                None => {}
            }
        }
        out.push(b'm');
    }
}

/// A cell of the grid. The right half of a wide character has no character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    character: Option<char>,
    style: Style,
}

const BLANK: Cell = Cell { character: Some(' '), style: Style::PLAIN };
/// Number of unchanged characters from which moving the cursor behind them takes fewer bytes than writing them again.
const WORTH_A_JUMP: usize = 5;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Screen {
    pub width: usize,
    pub height: usize,
    pub unicode: bool,
    pub colors: bool,
    cells: Vec<Cell>,
}

impl Screen {
    pub(crate) fn new((width, height): (usize, usize), unicode: bool, colors: bool) -> Self {
        Screen { width, height, unicode, colors, cells: vec![BLANK; width * height] }
    }

    /// Writes text from a position on, at most to the end of the row. Returns the column behind the text. Control characters
    /// become `?`, although callers escape the text already.
    pub(crate) fn put(&mut self, row: usize, column: usize, text: &str, style: Style) -> usize {
        self.put_within(row, column, self.width, text, style)
    }

    /// Writes text so that it ends before column `end`, for numbers.
    pub(crate) fn put_before(&mut self, row: usize, end: usize, text: &str, style: Style) {
        self.put(row, end.saturating_sub(columns(text)), text, style);
    }

    /// Like [`put`](Self::put), but ends before column `end`.
    pub(crate) fn put_within(
        &mut self,
        row: usize,
        column: usize,
        end: usize,
        text: &str,
        style: Style,
    ) -> usize {
        let end = end.min(self.width);
        let style = if self.colors { style } else { Style { color: None, ground: None, ..style } };
        let mut at = column;
        for character in text.chars() {
            let (character, wide) = match character.width() {
                Some(0) => continue, // a combining or invisible character
                None => ('?', 1),
                Some(_) if !self.unicode && !character.is_ascii() => ('?', 1),
                Some(wide) => (character, wide),
            };
            if row >= self.height || at + wide > end {
                break;
            }
            self.set(row, at, Cell { character: Some(character), style });
            for half in 1..wide {
                self.set(row, at + half, Cell { character: None, style });
            }
            at += wide;
        }
        at
    }

    /// Wraps a text, writes at most `limit` of its lines from `row` on, and sets `row` to the row behind them.
    pub(crate) fn put_wrapped(&mut self, row: &mut usize, text: &str, limit: usize, style: Style) {
        for line in wrapped(text, Some(self.width)).iter().take(limit) {
            self.put(*row, 0, line, style);
            *row += 1;
        }
    }

    fn set(&mut self, row: usize, column: usize, cell: Cell) {
        if let Some(old) = self.cells.get_mut(row * self.width + column) {
            *old = cell;
        }
    }

    /// Highlights a row as selected; its bars keep their style.
    pub(crate) fn highlight(&mut self, row: usize) {
        let is_bar = |cell: &Cell| cell.character.is_some_and(is_block);
        let cells = self.cells.iter_mut().skip(row * self.width).take(self.width);
        for cell in cells.filter(|cell| !is_bar(cell)) {
            cell.style = Style { reverse: true, dim: false, ..cell.style };
        }
    }

    /// Returns the rows as text without styles.
    pub(crate) fn text(&self) -> Vec<String> {
        let row = |cells: &[Cell]| {
            cells.iter().filter_map(|cell| cell.character).collect::<String>().trim_end().to_owned()
        };
        self.cells.chunks(self.width.max(1)).map(row).collect()
    }

    /// Returns a row with its styles, for one frame that is printed like the output of other commands.
    pub(crate) fn printed(&self, row: usize) -> Vec<u8> {
        let mut pen = Pen { out: Vec::new(), cursor: Some((row, 0)), style: Style::PLAIN };
        let cells = self.row(row);
        let end = cells.iter().rposition(|cell| *cell != BLANK).map_or(0, |last| last + 1);
        cells.iter().take(end).enumerate().for_each(|(column, cell)| pen.write(row, column, cell));
        pen.set_style(Style::PLAIN);
        pen.out
    }

    fn row(&self, row: usize) -> &[Cell] {
        self.cells.get(row * self.width..(row + 1) * self.width).unwrap_or_default()
    }

    /// Returns the bytes that change the terminal's contents from `shown` to this; of all cells if `shown` has another size.
    pub(crate) fn changes(&self, shown: Option<&Screen>) -> Vec<u8> {
        let mut pen = Pen { out: Vec::new(), cursor: None, style: Style::PLAIN };
        let same_size = |shown: &&Screen| (shown.width, shown.height) == (self.width, self.height);
        let empty = Screen::new((self.width, self.height), self.unicode, self.colors);
        let before = shown.filter(same_size).unwrap_or_else(|| {
            pen.out.extend_from_slice(b"\x1b[0m\x1b[2J");
            &empty
        });
        for row in 0..self.height {
            pen.update_row(row, before.row(row), self.row(row));
        }
        pen.set_style(Style::PLAIN);
        pen.out
    }
}

/// Collects bytes for the terminal, and tracks the terminal's state after these bytes.
struct Pen {
    out: Vec<u8>,
    /// Row and column of the cursor; `None` if unknown.
    cursor: Option<(usize, usize)>,
    style: Style,
}

impl Pen {
    /// Writes the changes from the cells `before` to the cells `now`.
    fn update_row(&mut self, row: usize, before: &[Cell], now: &[Cell]) {
        let differs = |column: &usize| before.get(*column) != now.get(*column);
        let Some(last) = (0..now.len()).rev().find(differs) else { return };
        // Blanks at the end of a row are erased with one sequence.
        let blank = now.iter().rposition(|cell| *cell != BLANK).map_or(0, |last| last + 1);
        let (mut column, end) = (0, blank.min(last + 1));
        while let Some(next) = (column..end).find(differs) {
            let near = self.cursor.filter(|(line, at)| *line == row && next - (*at).min(next) < WORTH_A_JUMP);
            let from = near.map_or(next, |(_, at)| at.min(next));
            for (column, cell) in now.iter().enumerate().take(next + 1).skip(from) {
                self.write(row, column, cell);
            }
            column = next + 1;
        }
        if last >= blank {
            self.move_to(row, blank);
            self.set_style(Style::PLAIN);
            self.out.extend_from_slice(b"\x1b[K");
        }
    }

    fn write(&mut self, row: usize, column: usize, cell: &Cell) {
        let Some(character) = cell.character else { return };
        self.move_to(row, column);
        self.set_style(cell.style);
        let mut bytes = [0; 4];
        self.out.extend_from_slice(character.encode_utf8(&mut bytes).as_bytes());
        // After a character whose width differs between terminals, the cursor's position is unknown.
        let has_known_width = character.is_ascii() || is_block(character);
        self.cursor = has_known_width.then_some((row, column + 1));
    }

    fn move_to(&mut self, row: usize, column: usize) {
        if self.cursor != Some((row, column)) {
            self.out.extend_from_slice(format!("\x1b[{};{}H", row + 1, column + 1).as_bytes());
            self.cursor = Some((row, column));
        }
    }

    fn set_style(&mut self, style: Style) {
        if style != self.style {
            style.write(&mut self.out);
            self.style = style;
        }
    }
}

/// Returns whether a character is one of Unicode's block elements, which bars and sparklines consist of.
fn is_block(character: char) -> bool {
    ('\u{2580}'..='\u{259f}').contains(&character)
}

/// Characters of a sparkline, from low to high.
pub(super) const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Characters of a sparkline without Unicode, from low to high.
const ASCII: [char; 8] = ['_', '.', '-', ':', '=', '+', '*', '#'];

#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub bytes: i64,
    /// Characters with and without Unicode. They differ between parts, so that a bar is readable without colours.
    pub glyphs: (char, char),
    pub style: Style,
}

/// Draws a bar between two columns, which stand for 0 and `whole` bytes. The parts follow each other from the left. A part that
/// is not empty gets at least one column if there is room.
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

/// Characters that fill one to seven eighths of a column.
const EIGHTHS: [char; 7] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉'];

/// Returns a bar for an amount; `whole` bytes are as long as `width` columns. The resolution is an eighth of a column.
pub(crate) fn amount_bar(bytes: i64, whole: i64, width: usize, unicode: bool) -> String {
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
    let glyphs = if unicode { BLOCKS } else { ASCII };
    let highest = values.iter().flatten().max().copied().unwrap_or(0).max(1);
    let glyph = |value: &Option<u64>| {
        let Some(value) = value else { return ' ' };
        let step = (u128::from(*value) * glyphs.len() as u128).div_ceil(u128::from(highest));
        let at = usize::try_from(step).unwrap_or(0).saturating_sub(1);
        glyphs.get(at).copied().unwrap_or(' ')
    };
    values.iter().map(glyph).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(number: u16) -> std::num::NonZero<u16> {
        std::num::NonZero::new(number).expect("a size")
    }

    fn seen(parser: &vt100::Parser) -> Vec<String> {
        parser.screen().rows(0, 20).map(|row| row.trim_end().to_owned()).collect()
    }

    #[test]
    fn what_is_written_makes_the_terminal_show_it() {
        let texts =
            ["", "a", "ab  cd", "wide 漢字 and 𝕏", "end of a longer row.", "████▌  ▁▂", "x\u{301}y\u{1b}[2J"];
        let mut parser = vt100::Parser::new(size(4), size(20), 0);
        let mut shown: Option<Screen> = None;
        for round in 0..200_usize {
            let mut screen = Screen::new((20, 4), true, true);
            for row in 0..4 {
                let text = texts[(round * 7 + row * (round / 5 + 3)) % texts.len()];
                let style = if (round + row) % 3 == 0 { Style::of(RED) } else { Style::PLAIN };
                screen.put(row, (round * 3 + row) % 9, text, style);
            }
            if round % 4 == 0 {
                screen.highlight(round % 5);
            }
            parser.process(&screen.changes(shown.as_ref()));
            assert_eq!(seen(&parser), screen.text(), "round {round}");
            for (row, column) in (0..4).flat_map(|row| (0..20).map(move |column| (row, column))) {
                let cell = parser.screen().cell(row as u16, column as u16).expect("a cell");
                let Cell { character: Some(_), style } = screen.row(row)[column] else { continue };
                let red = cell.fgcolor() == vt100::Color::Idx(1);
                assert_eq!((cell.inverse(), red), (style.reverse, style.color == Some(RED)), "round {round}");
            }
            shown = Some(screen);
        }
        let screen = shown.expect("drawn");
        assert!(screen.changes(Some(&screen)).is_empty(), "what is shown already costs nothing");
        assert_eq!(columns("漢字a"), 5);
    }

    #[test]
    fn a_change_costs_what_it_is() {
        let mut before = Screen::new((80, 24), true, true);
        (0..24).for_each(|row| _ = before.put(row, 0, &"text ".repeat(16), Style::PLAIN));
        let mut now = before.clone();
        now.put(5, 10, "12.5", Style::PLAIN);
        let bytes = now.changes(Some(&before));
        assert!(bytes.len() <= 12, "{:?}", String::from_utf8_lossy(&bytes));
        let erased = Screen::new((80, 24), true, true).changes(Some(&before));
        assert!(erased.len() <= 24 * 10, "{} bytes", erased.len());
    }

    #[test]
    fn nothing_is_drawn_outside_and_nothing_that_is_not_there() {
        let mut screen = Screen::new((5, 2), false, false);
        assert_eq!(screen.put(0, 3, "abc", Style::of(RED)), 5);
        assert_eq!(screen.put(7, 0, "abc", Style::PLAIN), 0);
        screen.put(1, 0, "ü漢x", Style::PLAIN);
        assert_eq!(screen.text(), ["   ab", "??x"]);
        assert!(!String::from_utf8_lossy(&screen.changes(None)).contains("31m"), "no colour was asked for");
        Screen::new((0, 0), true, true).changes(None);
    }

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
        let drawn = |bytes, unicode| amount_bar(bytes, 80, 10, unicode);
        assert_eq!(
            [0, -3, 1, 12, 80, 500].map(|bytes| drawn(bytes, true)),
            ["", "", "▏", "█▌", "██████████", "██████████"]
        );
        assert_eq!([0, 3, 5, 80].map(|bytes| drawn(bytes, false)), ["", "", "#", "##########"]);
        assert_eq!(amount_bar(1, 0, 3, true), "███");
    }

    #[test]
    fn a_course_has_a_character_per_value() {
        assert_eq!(spark(&[Some(0), Some(1), None, Some(4), Some(8)], true), "▁▁ ▄█");
        assert_eq!(spark(&[Some(8), Some(u64::MAX)], false), "_#");
        assert_eq!(spark(&[], true), "");
    }
}
