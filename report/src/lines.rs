//! Lines of text for a terminal: without control characters, and wrapped at the terminal's width.

use crate::table::{cut, width as width_of};
use gpumem_model::escape::escape;
use gpumem_model::units::thousands;

const NARROWEST: usize = 20;
const DOTS: &str = "...";

/// Removes control characters from a sentence and wraps it.
pub fn wrapped(text: &str, width: Option<usize>) -> Vec<String> {
    let mut lines = Lines::new(width);
    lines.prose(text);
    lines.lines
}

/// Like [`wrapped`], in at most `limit` lines: a sentence that is cut ends with `...` after a whole word.
pub fn wrapped_to(text: &str, columns: Option<usize>, limit: usize) -> Vec<String> {
    let mut lines = wrapped(text, columns);
    if lines.len() > limit
        && let Some(last) = limit.checked_sub(1).and_then(|last| lines.get_mut(last))
    {
        let room = columns.map_or(usize::MAX, |columns| columns.max(NARROWEST).saturating_sub(DOTS.len()));
        let kept = cut(last, room);
        let is_in_word =
            last.get(kept.len()..).is_some_and(|rest| !rest.is_empty() && !rest.starts_with(' '));
        let whole = kept.rsplit_once(' ').filter(|_| is_in_word).map_or(kept, |(whole, _)| whole);
        *last = whole.trim_end_matches([' ', ',']).to_owned() + DOTS;
    }
    lines.truncate(limit);
    lines
}

/// Cleans a name from an untrusted source. Blanks at its ends are shown as escapes, because they could imitate indentation or
/// hide the difference between two names.
pub(crate) fn clean_name(name: &str) -> String {
    let trimmed = name.trim();
    if name.is_empty() || trimmed.len() == name.len() {
        return if name.is_empty() { "(blank)".to_owned() } else { escape(name) };
    }
    let (start, end) = name.split_at(name.len() - name.trim_start().len());
    let end = end.get(trimmed.len()..).unwrap_or_default();
    let numbers =
        |blanks: &str| blanks.chars().map(|blank| format!("\\u{{{:x}}}", blank as u32)).collect::<String>();
    numbers(start) + &escape(trimmed) + &numbers(end)
}

/// Returns the first `limit` names and the number of further names: `a, b, 3 more`.
pub(crate) fn listed(names: impl IntoIterator<Item = String>, limit: usize) -> String {
    let mut names = names.into_iter();
    let mut listed: Vec<String> = names.by_ref().take(limit).collect();
    let more = names.count() as u64;
    listed.extend((more > 0).then(|| format!("{} more", thousands(more))));
    listed.join(", ")
}

/// Returns a number of processes as text: `1 process`, `12 processes`.
pub(crate) fn count_processes(count: usize) -> String {
    thousands(count as u64) + if count == 1 { " process" } else { " processes" }
}

/// Returns those words whose condition is true, separated by commas: `late, partial`.
pub(crate) fn flags<const N: usize>(words: [(bool, &str); N]) -> String {
    let words = words.into_iter().filter_map(|(is_true, word)| is_true.then_some(word));
    words.collect::<Vec<_>>().join(", ")
}

/// Returns ` (text)`, or nothing for an empty text.
pub(crate) fn in_brackets(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" ({text})") }
}

/// Returns `FIRST to LAST`, or one of them if they are equal.
pub(crate) fn span(first: String, last: String) -> String {
    if first == last { last } else { format!("{first} to {last}") }
}

/// Lines of a report. Control characters are removed from all text.
pub(crate) struct Lines {
    pub(crate) lines: Vec<String>,
    /// Number of columns of the terminal; `None` if the output is not a terminal.
    pub(crate) width: Option<usize>,
}

impl Lines {
    pub(crate) fn new(width: Option<usize>) -> Self {
        Lines { lines: Vec::new(), width }
    }

    /// Adds a line without wrapping.
    pub(crate) fn line(&mut self, line: &str) {
        self.lines.push(escape(line).trim_end().to_owned());
    }

    /// Adds a sentence, wrapped at the terminal's width, with indented continuation lines.
    pub(crate) fn prose(&mut self, text: &str) {
        self.indented("", text);
    }

    /// Adds an indented sentence that belongs to the line above.
    pub(crate) fn inset(&mut self, text: &str) {
        self.indented("  ", text);
    }

    /// Adds a sentence after an indentation, wrapped at the terminal's width.
    pub(crate) fn indented(&mut self, indent: &str, text: &str) {
        let width = self.width.map_or(usize::MAX, |width| width.max(NARROWEST).saturating_sub(indent.len()));
        wrap(text, width).iter().for_each(|line| self.line(&format!("{indent}{line}")));
    }

    /// Adds a row of a table with its note, on a separate line if the terminal is too narrow for both.
    pub(crate) fn with_note(&mut self, line: &str, note: &str) {
        const GAP: &str = "  ";
        let both = format!("{line}{GAP}{note}");
        if note.is_empty() || self.width.is_none_or(|width| width_of(&both) <= width) {
            self.line(&both);
        } else {
            self.line(line);
            let depth = line.len() - line.trim_start_matches(' ').len();
            self.indented(&format!("{}{GAP}", " ".repeat(depth)), note);
        }
    }
}

/// Wraps a text between words; a word longer than a line is not split.
fn wrap(text: &str, width: usize) -> Vec<String> {
    const INDENT: &str = "  ";
    let mut lines = Vec::new();
    let mut line = String::new();
    let mut columns = 0;
    let mut empty = true;
    for word in text.split(' ') {
        let length = width_of(word);
        if !empty && columns + 1 + length > width {
            lines.push(std::mem::replace(&mut line, INDENT.to_owned()));
            (columns, empty) = (INDENT.len(), true);
        }
        if empty && word.is_empty() {
            continue; // omit the blanks between columns where the line was wrapped
        }
        if !empty {
            line.push(' ');
            columns += 1;
        }
        line.push_str(word);
        (columns, empty) = (columns + length, false);
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_broken_between_words_and_never_cut() {
        assert_eq!(wrap("one two  three four", 10), ["one two ", "  three", "  four"]);
        assert_eq!(wrap("one two  three", usize::MAX), ["one two  three"]);
        assert_eq!(wrap("incomprehensible to me", 8), ["incomprehensible", "  to me"]);
        assert_eq!(wrap("a b", 0), ["a", "  b"]);
        assert_eq!(wrap("", 5), [""]);
    }

    #[test]
    fn note_of_a_row_is_wrapped_below_the_row() {
        let mut out = Lines::new(Some(24));
        out.with_note("Untrackable  523.3", "context 498.0, modules 12.0, rounding 13.3");
        assert_eq!(out.lines, ["Untrackable  523.3", "  context 498.0, modules", "    12.0, rounding 13.3"]);
    }

    #[test]
    fn a_cut_sentence_ends_with_dots() {
        let text = "one two three four five six seven";
        assert_eq!(wrapped_to(text, Some(20), 2), ["one two three four", "  five six seven"]);
        assert_eq!(wrapped_to(text, Some(20), 1), ["one two three..."]);
        assert_eq!(wrapped_to(text, None, 1), [text]);
        assert_eq!(wrapped_to(text, Some(20), 0), [""; 0]);
    }

    #[test]
    fn nothing_that_a_terminal_acts_on_comes_out() {
        let mut lines = Lines::new(Some(80));
        let bad = "\u{1b}\u{7f}\u{9b}\n\u{61c}\u{200b}\u{200f}\u{2028}\u{202e}\u{2060}\u{2069}\u{feff}";
        lines.line(bad);
        lines.prose(bad);
        let marks = "\\u{1b}\\u{7f}\\u{9b}\\u{a}\\u{61c}\\u{200b}\\u{200f}\\u{2028}\\u{202e}\\u{2060}\\u{2069}\\u{feff}";
        assert_eq!(lines.lines, [marks, marks]);
        assert_eq!(clean_name(" \u{3000}a b "), "\\u{20}\\u{3000}a b\\u{20}");
        assert_eq!(clean_name("  "), "\\u{20}\\u{20}");
        assert_eq!(clean_name(""), "(blank)");
    }
}
