//! Makes the text of `/metrics`.
//!
//! ```text
//! own        metrics about the daemon itself, from the registry in stats.rs
//! devices    values of GPUs, from the published snapshot
//! processes  values of processes, from the published snapshot
//! amounts    values of a process that can be added to those of other processes
//! names      categories and tags of a process's memory
//! rendered   keeps the series of each process until it changes
//! families   writes the values of GPUs and processes
//! ```
//!
//! GPU values have their own writer. The `prometheus` crate builds, sorts and clones a tree of strings for each series and needs
//! 0.9 ms for a thousand series. A whole scrape of 8 GPUs with 16 processes each must take less. Both write the same format.
//! Values have no time stamps, so that a series vanishes with its process. Unknown values have no series; another series has the
//! reason as a label.

mod amounts;
mod devices;
mod families;
mod names;
mod own;
mod processes;
mod rendered;

#[cfg(test)]
use crate::aggregator::Published;
use crate::config::Tenants;
use crate::stats::{self, Count, Family, Timing};
#[cfg(test)]
use crate::view::Health;
use crate::view::{ViewContext, ViewSettings};
pub use devices::MAX_SERIES_PER_DEVICE;
use families::{Families, Series};
use processes::ProcessSeries;
pub use rendered::RenderedProcesses;
use std::time::Instant;

/// Room for the metrics about the daemon itself, in bytes.
const OWN_BYTES: usize = 32 << 10;

/// Returns the text of one scrape for clients whose user is unknown: `tenants` of the configuration decides what they see of
/// processes.
pub fn scrape(context: &ViewContext) -> String {
    scrape_as(context, context.shown())
}

/// Returns the text of one scrape for clients that may see all processes.
pub(crate) fn scrape_named(context: &ViewContext) -> String {
    scrape_as(context, ViewSettings { tenants: Tenants::Named, ..context.shown() })
}

fn scrape_as(context: &ViewContext, shown: ViewSettings) -> String {
    let began = Instant::now();
    let published = context.reader.read();
    let health = context.sources.health();
    let (mut families, mut devices) = (Families::new(shown.max_series), Series::default());
    devices::collect(&published, &health, &mut devices);
    families.add(devices);
    let processes = ProcessSeries::new(&published, &health, &shown, context.run_writer.findings());
    let folded = context.rendered.with(shown.tenants, |rendered| processes.write(rendered, &mut families));
    context.stats.add(Count::SeriesFolded, families.omitted);
    let mut text = families.text(published.now_ns(), &published.snapshot.devices, OWN_BYTES);
    own::write(context, &health, &published, folded, &mut text);
    context.stats.observe(Timing::Scrape, began.elapsed());
    text
}

/// Returns all metric families, for the reference in docs/.
pub fn families() -> impl Iterator<Item = Family> {
    let of_gpus = [devices::FAMILIES, amounts::FAMILIES, processes::FAMILIES].into_iter().flatten();
    of_gpus.map(|family| **family).chain(stats::families())
}

/// Returns the maximum number of series of a process that uses this many devices.
pub fn max_series_per_process(shown: &ViewSettings, devices: usize) -> usize {
    let of_account = processes::max_per_account(shown.rules.structure.rules.len(), shown.tags);
    processes::MAX_PER_PROCESS + devices * of_account
}

#[cfg(test)]
pub(super) fn of_processes(published: &Published, health: &Health, shown: &ViewSettings) -> String {
    let mut families = Families::new(shown.max_series);
    let findings = Default::default();
    let processes = ProcessSeries::new(published, health, shown, &findings);
    RenderedProcesses::default().with(shown.tenants, |rendered| processes.write(rendered, &mut families));
    families.text(published.now_ns(), &published.snapshot.devices, 0)
}
