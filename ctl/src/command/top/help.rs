//! The help: keys, signs, and the number of bytes written to the terminal.

use super::overview::PARTS;
use super::paint::Written;
use super::widgets::{BOLD, DIM, Look};
use ratatui_core::style::Style;
use ratatui_core::text::{Line, Span};

/// Keys with their effects, and signs.
const KEYS: [(&str, &str); 17] = [
    ("up down, j k", "choose a row; PgUp PgDn Home End"),
    ("Enter", "a process: details; a line: the explanation of its word"),
    ("Esc", "back"),
    ("s  r", "sort by the next column; the other way round"),
    ("/", "only processes with these words: user, command, pid, state, job, pod, gpu3"),
    ("Tab", "of a process: rows are layers, structures, tags"),
    ("d", "of a process on several devices: the next one"),
    ("w", "of a process: a shorter time"),
    ("a", "of a process: every name, however small"),
    ("o g x i", "of a process: when memory ran out, growth, changes of Untrackable, iterations"),
    ("e", "all words that are explained"),
    ("p", "pause: the screen stays as it is"),
    ("Ctrl-L", "draw everything again"),
    ("q, Ctrl-C", "leave"),
    ("", ""),
    ("-", "unknown, which is never zero; ~ measured at another moment"),
    ("", ""),
];

pub(crate) fn lines(look: Look, written: &Written) -> Vec<Line<'static>> {
    let line = |sign: String, style: Style, effect: &'static str| {
        Line::from_iter([Span::styled(format!(" {sign:15}"), style), effect.into()])
    };
    let keys = KEYS.iter().map(|(key, effect)| line((*key).to_owned(), BOLD, effect));
    let parts = PARTS
        .iter()
        .map(|(name, glyphs, style)| line(look.glyph(*glyphs).to_string().repeat(2), *style, name));
    let count = format!(" written: {} bytes for the last change, {} in all", written.last, written.all);
    keys.chain(parts).chain([Line::styled(count, DIM)]).collect()
}
