//! Writes a picture as PDF 1.4: one page of the picture's size, with vectors and text that can be searched and copied. It uses
//! two of the fourteen fonts that every reader has, so no font is embedded. These fonts have the characters of Latin-1; others
//! are shown as [`REPLACEMENT`](super::helvetica::REPLACEMENT).
//!
//! The same picture always gives the same bytes: the file contains no date.

use super::drawing::{Drawing, Item, Text, hatch};
use super::helvetica::shown;
use super::palette::Color;
use super::svg::number;
use std::fmt::Write;

const TITLE: usize = 200;

impl Drawing {
    /// Returns the picture as PDF.
    pub fn pdf(&self) -> Vec<u8> {
        let content = self.content();
        let title: String = self.title.chars().take(TITLE).collect();
        let (width, height) = (number(self.width), number(self.height));
        let font =
            |name: &str| format!("<</Type/Font/Subtype/Type1/BaseFont/{name}/Encoding/WinAnsiEncoding>>");
        let objects = [
            "<</Type/Catalog/Pages 2 0 R>>".to_owned(),
            "<</Type/Pages/Kids[3 0 R]/Count 1>>".to_owned(),
            format!(
                "<</Type/Page/Parent 2 0 R/MediaBox[0 0 {width} {height}]/Contents 4 0 R\
                 /Resources<</Font<</R 5 0 R/B 6 0 R>>>>>>"
            ),
            format!("<</Length {}>>\nstream\n{content}\nendstream", content.len()),
            font("Helvetica"),
            font("Helvetica-Bold"),
            format!("<</Title{}/Producer(gpumemd)>>", utf16(&title)),
        ];
        let mut out = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n".to_vec();
        let mut places = Vec::new();
        for (index, object) in objects.iter().enumerate() {
            places.push(out.len());
            out.extend_from_slice(format!("{} 0 obj\n{object}\nendobj\n", index + 1).as_bytes());
        }
        let table = out.len();
        let count = objects.len() + 1;
        let mut tail = format!("xref\n0 {count}\n0000000000 65535 f \n");
        for place in places {
            let _ = writeln!(tail, "{place:010} 00000 n ");
        }
        let info = objects.len();
        let _ = writeln!(
            tail,
            "trailer\n<</Size {count}/Root 1 0 R/Info {info} 0 R>>\nstartxref\n{table}\n%%EOF"
        );
        out.extend_from_slice(tail.as_bytes());
        out
    }

    /// Returns the PDF operators that draw the page, in ASCII; other characters are octal escapes.
    fn content(&self) -> String {
        // In PDF the y axis points upwards.
        let up = |y: f64| self.height - y;
        let point = |&(x, y): &(f64, f64)| format!("{} {}", number(x), number(up(y)));
        let path = |points: &[(f64, f64)]| {
            let mut out = String::new();
            for (index, at) in points.iter().enumerate() {
                let _ = write!(out, "{} {} ", point(at), if index == 0 { 'm' } else { 'l' });
            }
            out
        };
        let mut out = String::from("1 1 1 rg 0 0 ");
        let _ = writeln!(out, "{} {} re f\n0 J 1 j", number(self.width), number(self.height));
        for item in &self.items {
            match item {
                Item::Shape { points, fill, stroke, .. } => {
                    let outline = path(points);
                    let _ = writeln!(out, "{} rg {outline}h f*", color(fill.ground[0]));
                    if let Some((ink, lines)) = hatch(points, fill) {
                        let lines: String = lines.iter().map(|(from, to)| path(&[*from, *to])).collect();
                        let _ = writeln!(out, "{} RG 0.7 w {lines}S", color(ink));
                    }
                    if let Some((ink, width)) = stroke {
                        let _ = writeln!(out, "{} RG {} w {outline}h S", color(*ink), number(*width));
                    }
                }
                Item::Line { points, color: ink, width, dashed } => {
                    let dash = if *dashed { ("[4 3] 0 d ", " [] 0 d") } else { ("", "") };
                    let (ink, width, line) = (color(*ink), number(*width), path(points));
                    let _ = writeln!(out, "{ink} RG {width} w {}{line}S{}", dash.0, dash.1);
                }
                Item::Text(text) => self.words(text, &mut out),
            }
        }
        out
    }

    fn words(&self, text: &Text, out: &mut String) {
        let shown: Text = Text { text: text.text.chars().map(shown).collect(), ..text.clone() };
        let mut letters = String::new();
        for letter in shown.text.chars() {
            match letter {
                '(' | ')' | '\\' => letters.extend(['\\', letter]),
                ' '..='~' => letters.push(letter),
                letter => {
                    let _ = write!(letters, "\\{:03o}", u32::from(letter) & 0xff);
                }
            }
        }
        let font = if text.bold { 'B' } else { 'R' };
        let (ink, size) = (color(text.color), number(text.size));
        let (x, y) = (number(text.x - shown.before()), number(self.height - text.y));
        // The first four numbers of `Tm` are a matrix that neither turns nor scales the text.
        let place = format!("1.0000 0.0000 -0.0000 1.0000 {x} {y} Tm");
        let _ = writeln!(out, "BT {ink} rg /{font} {size} Tf {place} ({letters}) Tj ET");
    }
}

fn color(Color(red, green, blue): Color) -> String {
    [red, green, blue].map(|part| format!("{:.3}", f64::from(part) / 255.0)).join(" ")
}

/// Returns a PDF string for any characters, as UTF-16 in hexadecimal.
fn utf16(text: &str) -> String {
    let mut out = String::from("<FEFF");
    for unit in text.encode_utf16() {
        let _ = write!(out, "{unit:04X}");
    }
    out + ">"
}
