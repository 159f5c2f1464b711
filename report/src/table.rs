//! Text tables whose columns are aligned by display width: a Chinese or Japanese character takes two columns of a terminal, a
//! combining accent none.

use unicode_width::UnicodeWidthChar;

/// Alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Left-aligned, for names.
    Left,
    /// Right-aligned, for numbers.
    Right,
}

/// Rows of cells, each with an optional note after the last column.
#[derive(Debug, Clone)]
pub struct Table {
    aligns: Vec<Align>,
    gap: usize,
    rows: Vec<(Vec<String>, String)>,
}

impl Table {
    /// Makes an empty table with columns aligned like this, two blanks apart.
    pub fn new(aligns: impl Into<Vec<Align>>) -> Self {
        Table { aligns: aligns.into(), gap: 2, rows: Vec::new() }
    }

    /// Makes an empty table with names in the first columns and numbers in the others.
    pub fn of_numbers(names: usize, columns: usize) -> Self {
        let align = |column| if column < names { Align::Left } else { Align::Right };
        Table::new((0..columns).map(align).collect::<Vec<_>>())
    }

    /// Sets the number of blanks between two columns.
    pub fn with_gap(mut self, gap: usize) -> Self {
        self.gap = gap;
        self
    }

    /// Adds a row; a row may have fewer cells than the table has columns.
    pub fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.row_with_note(cells, "");
    }

    /// Adds a row with a note.
    pub fn row_with_note<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>, note: &str) {
        self.rows.push((cells.into_iter().map(Into::into).collect(), note.to_owned()));
    }

    /// Returns the width of all columns on a terminal, including the gap after the last one, without notes.
    pub fn width(&self) -> usize {
        self.widths().iter().map(|width| width + self.gap).sum()
    }

    /// Returns the rows as text, without trailing blanks.
    pub fn lines(&self) -> Vec<String> {
        let widths = self.widths();
        let gap = " ".repeat(self.gap);
        let line = |(cells, note): &(Vec<String>, String)| {
            let mut line = String::new();
            for ((width, align), column) in widths.iter().zip(&self.aligns).zip(0..) {
                line += &pad(cells.get(column).map_or("", String::as_str), *width, *align);
                line += &gap;
            }
            (line + note).trim_end().to_owned()
        };
        self.rows.iter().map(line).collect()
    }

    /// Returns the rows as text, each ended by a newline.
    pub fn text(&self) -> String {
        self.lines().iter().map(|line| format!("{line}\n")).collect()
    }

    fn widths(&self) -> Vec<usize> {
        let widest = |column: usize| {
            let cells = self.rows.iter().filter_map(|(cells, _)| cells.get(column));
            cells.map(|cell| width(cell)).max().unwrap_or(0)
        };
        (0..self.aligns.len()).map(widest).collect()
    }
}

/// Returns the width of a text on a terminal, in columns.
pub fn width(text: &str) -> usize {
    text.chars().map(width_of).sum()
}

fn width_of(letter: char) -> usize {
    letter.width().unwrap_or(1)
}

/// Pads a text with blanks to the width `columns` on a terminal; a wider text is unchanged.
pub fn pad(text: &str, columns: usize, align: Align) -> String {
    let blanks = " ".repeat(columns.saturating_sub(width(text)));
    match align {
        Align::Left => text.to_owned() + &blanks,
        Align::Right => blanks + text,
    }
}

/// Returns the longest prefix of a text that fits into `columns` columns of a terminal, without trailing blanks.
pub fn cut(text: &str, columns: usize) -> &str {
    let mut taken = 0;
    let beyond = text.char_indices().find(|(_, letter)| {
        taken += width_of(*letter);
        taken > columns
    });
    text.get(..beyond.map_or(text.len(), |(at, _)| at)).unwrap_or(text).trim_end()
}

/// Shortens a name to `columns` columns of a terminal, with `~` for the omitted part. With `end`, the end of the name is kept,
/// which identifies a path; else the beginning is kept.
pub fn shorten(name: &str, columns: usize, end: bool) -> String {
    if width(name) <= columns {
        return name.to_owned();
    }
    let kept = columns.saturating_sub(1);
    let fits = |taken: &mut usize, letter: char| {
        *taken += width_of(letter);
        (*taken <= kept).then_some(letter)
    };
    if end {
        let tail: Vec<char> = name.chars().rev().scan(0, fits).collect();
        "~".to_owned() + &tail.into_iter().rev().collect::<String>()
    } else {
        name.chars().scan(0, fits).collect::<String>() + "~"
    }
}

/// Shortens a text to `columns` of a terminal, with `...` in place of its middle.
pub fn shorten_middle(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let kept = columns.saturating_sub(3);
    let head = cut(text, kept - kept / 2);
    let tail: String = shorten(text, kept / 2 + 1, true).chars().skip(1).collect();
    format!("{head}...{tail}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_in_any_script() {
        let mut table = Table::of_numbers(1, 3);
        table.row(["name", "used", "of"]);
        table.row_with_note(["模型/编码器", "1,024.0", "7"], "upper bound");
        table.row(["cafe\u{301}", "3.5", "12"]);
        assert_eq!(
            table.lines(),
            [
                "name            used  of",
                "模型/编码器  1,024.0   7  upper bound",
                "cafe\u{301}             3.5  12"
            ]
        );
        assert_eq!(table.width(), 26);
        assert_eq!(table.with_gap(1).lines()[0], "name           used of");
    }

    #[test]
    fn rows_may_be_short_and_end_without_blanks() {
        let mut table = Table::new([Align::Right, Align::Left, Align::Left]);
        table.row(["1", "a"]);
        table.row(["10", "bcd", "e"]);
        table.row::<&str>([]);
        assert_eq!(table.text(), " 1  a\n10  bcd  e\n\n");
        assert_eq!(Table::new([]).text(), "");
    }

    #[test]
    fn a_long_name_keeps_what_identifies_it() {
        assert_eq!(shorten("model/layers.17/mlp", 10, true), "~rs.17/mlp");
        assert_eq!(shorten("Optimizer State", 10, false), "Optimizer~");
        assert_eq!(shorten("short", 5, true), "short");
        assert_eq!(shorten("模型/编码器", 8, true), "~/编码器");
        assert_eq!(shorten("模型/编码器", 8, false), "模型/编~");
        for columns in 0..3 {
            assert_eq!(width(&shorten("a/b/c", columns, true)), columns.max(1));
            assert_eq!(width(&shorten("abcde", columns, false)), columns.max(1));
        }
    }

    #[test]
    fn texts_are_cut_between_letters() {
        assert_eq!(cut("模型 x", 3), "模");
        assert_eq!(cut("模型 x", 5), "模型");
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(pad("模", 3, Align::Right), " 模");
    }
}
