//! The keys: all of them with the signs, as the help; the most important ones of a view, as one line.

use super::overview::PARTS;
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
    ("w", "of a process: the next time range of the chart"),
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

/// The most important keys of the list, of a process, and of the help.
pub(crate) const OF_LIST: &str = "? keys  q leave  Enter details  s sort  r reverse  / filter  p pause";
pub(crate) const OF_PROCESS: &str =
    "Esc back  ? keys  Tab group by  Enter explain  w range  a all  o oom  g growth  x Untrackable";
pub(crate) const OF_HELP: &str = "Esc back  q leave";

pub(crate) fn lines(look: Look) -> Vec<Line<'static>> {
    let line = |sign: String, style: Style, effect: &'static str| {
        Line::from_iter([Span::styled(format!(" {sign:15}"), style), effect.into()])
    };
    let keys = KEYS.iter().map(|(key, effect)| line((*key).to_owned(), BOLD, effect));
    let parts = PARTS
        .iter()
        .map(|(name, glyphs, style)| line(look.glyph(*glyphs).to_string().repeat(2), *style, name));
    keys.chain(parts).collect()
}

/// Adds to a line those of the keys that fit into `width` columns.
pub(crate) fn add_keys(line: &mut Line<'_>, keys: &'static str, width: u16) {
    for words in keys.split("  ") {
        if line.width() + words.len() > width.into() {
            break;
        }
        let (key, effect) = words.split_once(' ').unwrap_or((words, ""));
        line.extend([Span::styled(key, BOLD), Span::styled(format!(" {effect}  "), DIM)]);
    }
}

/// Returns the line in which the user types the filter.
pub(crate) fn typed_line(filter: &str, look: Look) -> Line<'static> {
    let cursor = look.glyph(('█', '_'));
    Line::from_iter([Span::styled("only with these words: ", BOLD), format!("{filter}{cursor}").into()])
}
