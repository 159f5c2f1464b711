//! Pictures. A report becomes a [`Drawing`] (shapes and texts at their positions), which is written as SVG, PDF or PNG.
//!
//! Every shape that represents bytes contains their number. The numbers of a bar or panel add up to its total.

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
pub use drawing::{Anchor, Data, Drawing, Item, Rect, Text};
pub(crate) use frame::Frame;
pub(crate) use of_report::by_name;
pub use of_report::{NothingToDraw, Options, Picture, bar, draw};
pub use png::{TooLarge, crc32};
