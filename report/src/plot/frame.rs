//! A page with several pictures. A title and lines of text are above the pictures, notes below them.

use super::axis::{GREY, SMALL, words};
use super::bars::MARGIN;
use super::drawing::{Drawing, Text};
use super::helvetica::{fitted, width};

const TITLE: f64 = 15.0;
const LINE: f64 = 13.0;

#[derive(Debug, Clone, Default)]
pub(crate) struct Frame {
    pub(crate) title: String,
    pub(crate) lines: Vec<String>,
    pub(crate) notes: Vec<String>,
}

impl Frame {
    /// Arranges pictures in a grid with `columns` columns, and adds the texts.
    pub(crate) fn around(self, pictures: Vec<Drawing>, columns: usize) -> Drawing {
        /// Minimum width of a page in points, so that the text has room.
        const NARROWEST: f64 = 420.0;
        let columns = columns.max(1);
        let cell = pictures.iter().map(|picture| picture.width).fold(0.0, f64::max);
        let used = columns.min(pictures.len().max(1)) as f64;
        let width = (cell * used).max(NARROWEST);
        let room = width - 2.0 * MARGIN;
        let mut out = Drawing::new(self.title.clone(), width, 0.0);
        let mut y = MARGIN + TITLE;
        let title = fitted(&self.title, TITLE, true, room);
        out.text(Text { bold: true, ..words(&title, MARGIN, y, TITLE) });
        for line in self.lines.iter().flat_map(|line| wrapped(line, room)) {
            y += LINE;
            out.text(Text { color: GREY, ..words(&line, MARGIN, y, SMALL) });
        }
        y += MARGIN / 2.0;
        let mut pictures = pictures.into_iter().peekable();
        while pictures.peek().is_some() {
            let row: Vec<Drawing> = pictures.by_ref().take(columns).collect();
            let height = row.iter().map(|picture| picture.height).fold(0.0, f64::max);
            for (column, picture) in row.into_iter().enumerate() {
                out.place(picture, cell * column as f64, y);
            }
            y += height;
        }
        for line in self.notes.iter().flat_map(|line| wrapped(line, room)) {
            out.text(Text { color: GREY, ..words(&line, MARGIN, y, SMALL) });
            y += LINE;
        }
        out.height = y + MARGIN / 2.0;
        out
    }
}

fn wrapped(text: &str, room: f64) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split(' ') {
        let longer = if line.is_empty() { word.to_owned() } else { format!("{line} {word}") };
        if width(&longer, SMALL, false) <= room {
            line = longer;
            continue;
        }
        if !line.is_empty() {
            lines.push(std::mem::take(&mut line));
        }
        line = fitted(word, SMALL, false, room);
    }
    lines.push(line);
    lines
}
