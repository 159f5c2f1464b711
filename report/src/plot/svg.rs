//! Writes a picture as SVG: one file without scripts, style sheets or external references.

use super::drawing::{Anchor, Data, Drawing, Item, Text, hatch};
use crate::encode::markup;
use gpumem_model::escape::escape;
use std::fmt::Write;

/// Fonts with the character widths that the layout uses. Text in another font is compressed to these widths.
const FONTS: &str = "Helvetica, Arial, 'Liberation Sans', Arimo, sans-serif";

impl Drawing {
    /// Returns the picture as SVG. Shapes that represent bytes have the attributes `data-of`, `data-name` and `data-bytes`.
    pub fn svg(&self) -> String {
        let (width, height) = (number(self.width), number(self.height));
        let title = escaped(&self.title);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}pt\" height=\"{height}pt\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"{FONTS}\" role=\"img\">\n<title>{title}</title>\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
        );
        for item in &self.items {
            match item {
                Item::Shape { points, fill, stroke, data } => {
                    let ground = fill.ground[0].hex();
                    let _ = write!(out, "<path d=\"{}Z\" fill=\"{ground}\"", path(points));
                    let edge = stroke.map(|(color, width)| {
                        format!(" stroke=\"{}\" stroke-width=\"{}\"", color.hex(), number(width))
                    });
                    let edge = edge.unwrap_or_default();
                    let Some((ink, lines)) = hatch(points, fill) else {
                        out.push_str(&edge);
                        closed(&mut out, data.as_ref());
                        continue;
                    };
                    // The hatch lines are painted over the background, the outline over the lines.
                    closed(&mut out, data.as_ref());
                    let lines: String = lines.iter().map(|(from, to)| path(&[*from, *to])).collect();
                    let ink = ink.hex();
                    let _ = writeln!(out, "<path d=\"{lines}\" stroke=\"{ink}\" stroke-width=\"0.7\"/>");
                    if stroke.is_some() {
                        let _ = writeln!(out, "<path d=\"{}Z\" fill=\"none\"{edge}/>", path(points));
                    }
                }
                Item::Line { points, color, width, dashed } => {
                    let _ =
                        write!(out, "<path d=\"{}\" fill=\"none\" stroke=\"{}\"", path(points), color.hex());
                    let _ = write!(out, " stroke-width=\"{}\"", number(*width));
                    out.push_str(if *dashed { " stroke-dasharray=\"4 3\"/>\n" } else { "/>\n" });
                }
                Item::Text(item) => text(&mut out, item),
            }
        }
        out.push_str("</svg>\n");
        out
    }
}

/// Ends an element. Adds the bytes that it represents as attributes and tooltip.
fn closed(out: &mut String, data: Option<&Data>) {
    let Some(Data { container, name, bytes }) = data else {
        out.push_str("/>\n");
        return;
    };
    let (container, name) = (escaped(container), escaped(name));
    let thousands = gpumem_model::units::thousands(*bytes);
    let _ = writeln!(
        out,
        " data-of=\"{container}\" data-name=\"{name}\" data-bytes=\"{bytes}\"><title>{name}: {thousands} bytes</title></path>"
    );
}

fn text(out: &mut String, item: &Text) {
    let Text { text, x, y, size, anchor, bold, color } = item;
    let _ = write!(out, "<text x=\"{}\" y=\"{}\" font-size=\"{}\"", number(*x), number(*y), number(*size));
    out.push_str(match anchor {
        Anchor::Start => "",
        Anchor::Middle => " text-anchor=\"middle\"",
        Anchor::End => " text-anchor=\"end\"",
    });
    out.push_str(if *bold { " font-weight=\"bold\"" } else { "" });
    if text.chars().count() > 1 {
        let width = number(item.width());
        let _ = write!(out, " textLength=\"{width}\" lengthAdjust=\"spacingAndGlyphs\"");
    }
    let _ = writeln!(out, " fill=\"{}\">{}</text>", color.hex(), escaped(text));
}

fn path(points: &[(f64, f64)]) -> String {
    let mut out = String::new();
    for (index, (x, y)) in points.iter().enumerate() {
        let verb = if index == 0 { 'M' } else { 'L' };
        let _ = write!(out, "{verb}{} {}", number(*x), number(*y));
    }
    out
}

/// Formats a number with at most two decimal digits, without trailing zeros.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// Escapes text for content and attributes. Control characters and noncharacters are shown by their number, because XML does not
/// permit them even escaped.
fn escaped(text: &str) -> String {
    markup(&escape(text))
}
