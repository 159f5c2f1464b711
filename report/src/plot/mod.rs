//! Pictures. What is to be seen -> a [`Drawing`]: shapes and words at their places -> SVG, PDF, PNG.
//!
//! ```text
//! of_report                which picture of which runs
//! bars, rows, timeline     stacked bars; a bar per category; what was held over time
//! bar, frame               sums as parts with ranks; what stands around pictures
//! axis, palette            scales of bytes; colours, which pages share
//! drawing, helvetica       what a picture is made of, and how wide words are
//! svg, pdf, png            formats; strokes: letters of the last
//! ```
//!
//! Every shape that stands for bytes carries them, and those of a bar or panel add up to its total.

mod axis;
mod bar;
mod bars;
mod drawing;
mod frame;
mod helvetica;
mod of_report;
pub mod palette;
mod pdf;
mod png;
mod rows;
mod strokes;
mod svg;
mod timeline;

pub use bar::{Bar, Kind, Segment, folded_to};
pub use bars::bars;
pub use drawing::{Anchor, Data, Drawing, Fill, Item, Rect, Text};
pub(crate) use frame::Frame;
pub use of_report::{Nothing, Options, Picture, bar, draw};
pub use png::TooLarge;
