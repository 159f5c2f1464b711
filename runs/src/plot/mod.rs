//! Pictures. What is to be seen -> a [`Drawing`]: shapes and words at their places -> SVG, PDF, PNG.
//!
//! ```text
//! bars                     stacked bars side by side, a list beside each
//! axis, palette            scales of bytes; colours, which pages share
//! drawing, helvetica       what a picture is made of, and how wide words are
//! svg, pdf, png            formats; strokes: letters of the last
//! ```
//!
//! Every shape that stands for bytes carries them, and those of a bar or panel add up to its total.

mod axis;
mod bars;
mod drawing;
mod helvetica;
pub mod palette;
mod pdf;
mod png;
mod strokes;
mod svg;

pub use bars::{Bar, Kind, Segment, bars};
pub use drawing::{Anchor, Data, Drawing, Fill, Item, Rect, Text};
pub use png::TooLarge;
