//! Keys, signs, and what they cost.

use super::overview::{LEGEND, legend};
use super::screen::{Screen, Style};
use super::state::Cost;

const KEYS: [(&str, &str); 17] = [
    ("up down, j k", "choose a row; PgUp PgDn Home End"),
    ("Enter", "a process: in depth; a line of it: what its word means"),
    ("Esc", "back"),
    ("s  r", "sort by the next column; the other way round"),
    ("/", "only processes with these words: user, command, pid, state, job, pod, gpu3"),
    ("Tab", "of a process: rows are layers, structures, tags"),
    ("d", "of a process on several devices: the next one"),
    ("w", "of a process: a shorter time"),
    ("a", "of a process: every name, however small"),
    ("o g x i", "of a process: when memory ran out, what grows, steps of the gap, iterations"),
    ("e", "all words that are explained"),
    ("p", "pause: the screen stays as it is"),
    ("Ctrl-L", "draw everything again"),
    ("q, Ctrl-C", "leave"),
    ("", ""),
    ("-", "not known, which is never zero; ~ measured at another moment"),
    ("", ""),
];

pub(crate) fn draw(screen: &mut Screen, (mut row, end): (usize, usize), cost: &Cost) {
    for (key, what) in KEYS {
        if row < end {
            screen.put(row, 1, key, Style::BOLD);
            screen.put(row, 16, what, Style::PLAIN);
        }
        row += 1;
    }
    for (part, what) in LEGEND.iter().enumerate() {
        let (glyph, style) = legend(screen, part);
        if row < end {
            let at = screen.put(row, 1, &glyph, style);
            screen.put(row, at.max(16), what, Style::PLAIN);
        }
        row += 1;
    }
    if row < end {
        let text = format!("written: {} bytes for the last change, {} in all", cost.last, cost.all);
        screen.put(row, 1, &text, Style::DIM);
    }
}
