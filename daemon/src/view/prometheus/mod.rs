//! `/metrics`.
//!
//! ```text
//! own        what the daemon counts about itself: a collector of the `prometheus` crate
//! devices, processes   facts about GPUs, from the published snapshot
//! families   the writer of those
//! ```
//!
//! Facts about GPUs are written by a writer of our own: the crate builds, sorts and clones a tree of strings per
//! series and needs 0.9 ms for a thousand of them, more than a whole scrape of 8 GPUs with 16 processes each
//! may take; its output and ours are the same text. Values carry no time stamps, so that a series vanishes
//! with its process. What is not known has no series; a series with a reason says why.

mod devices;
mod families;
mod own;
mod processes;

use crate::view::Sight;
use families::Families;
pub use processes::flags;

/// The text of one scrape.
pub fn scrape(sight: &Sight) -> String {
    let published = sight.board.read();
    let shown = sight.shown();
    let health = sight.sources.health();
    let mut families = Families::new(shown.max_series);
    devices::collect(&published, &health, &mut families);
    processes::collect(&published, &shown, &mut families);
    sight.stats.add(crate::stats::Count::SeriesFolded, families.folded());
    let mut text = families.text();
    own::write(sight, &health, published.at_ns, &mut text);
    text
}
