//! `/metrics`.
//!
//! ```text
//! own        what the daemon counts about itself: a collector of the `prometheus` crate
//! devices, processes   facts about GPUs, from the published snapshot
//! amounts    what adds up of a process, or of several that are folded
//! names      what its bytes are called: categories and tags
//! families   the writer of those
//! ```
//!
//! Facts about GPUs are written by a writer of our own: the crate builds, sorts and clones a tree of strings per
//! series and needs 0.9 ms for a thousand of them, more than a whole scrape of 8 GPUs with 16 processes each
//! may take; its output and ours are the same text. Values carry no time stamps, so that a series vanishes
//! with its process. What is not known has no series; a series with a reason says why.

mod amounts;
mod devices;
mod families;
mod names;
mod own;
mod processes;

#[cfg(test)]
use crate::aggregator::Published;
use crate::config::Tenants;
#[cfg(test)]
use crate::view::health::Health;
use crate::view::{ViewContext, ViewSettings};
pub use devices::MOST_PER_DEVICE;
use families::Families;
pub(crate) use families::Family;

/// The text of one scrape, as everybody may have it.
pub fn scrape(context: &ViewContext) -> String {
    scrape_as(context, context.shown())
}

/// The same for who sees all processes.
pub(crate) fn scrape_named(context: &ViewContext) -> String {
    scrape_as(context, ViewSettings { tenants: Tenants::Named, ..context.shown() })
}

fn scrape_as(context: &ViewContext, shown: ViewSettings) -> String {
    let published = context.board.read();
    let health = context.sources.health();
    let mut families = Families::new(shown.max_series);
    devices::collect(&published, &health, &mut families);
    let folded = processes::collect(&published, &health, &shown, &mut families);
    context.stats.add(crate::stats::Count::SeriesFolded, families.folded());
    let mut text = families.text();
    own::write(context, &health, &published, folded, &mut text);
    text
}

/// Every family that is written by hand or about ourselves, for the reference: those of counts and of sources have tables
/// of their own.
pub fn families() -> impl Iterator<Item = &'static Family> {
    [devices::FAMILIES, amounts::FAMILIES, processes::FAMILIES, own::FAMILIES].into_iter().flatten().copied()
}

/// The most series of a process that uses so many devices.
pub fn most_per_process(shown: &ViewSettings, devices: usize) -> usize {
    let of_account = processes::most_per_account(shown.rules.structure.rules.len(), shown.tags);
    processes::MOST_PER_PROCESS + devices * of_account
}

/// The series of processes alone.
#[cfg(test)]
pub(super) fn of_processes(published: &Published, health: &Health, shown: &ViewSettings) -> String {
    let mut families = Families::new(shown.max_series);
    processes::collect(published, health, shown, &mut families);
    families.text()
}
