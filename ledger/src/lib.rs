//! The ledger: books the records of all sources (agents, NVML, /proc) as sums of bytes. It has one owner, does no I/O, reads no
//! clock and returns no errors: records that contradict its state are counted.
//!
//! A file imports only from its own layer and from layers below it:
//!
//! ```text
//! ledger, snapshot   entry for all records; devices and NVML readings; data for views
//! process       one process: order of its records, rule for each record, memory older than the agent, resync, exec(), times
//!               in which the agent saw nothing
//! oom           out-of-memory errors: the requests, and the processes that held the device
//! history       counters, ranges and marks of the program; points for detecting leaks
//! untrackable   causes of untrackable memory (NVML charges it, but no allocation has it): driver events, parts, changes
//! samples       NVML samples, joined with `tracked` at their own time
//! rules         effect of a record on rows and books; roles of blocks
//! roles         blocks whose role (gradient, activation, ...) is not final; memory held in each iteration
//! rows          data of allocations, blocks, pools, segments, handles, calls in flight
//! book          double-entry book: bytes by cell, their sum `tracked`, its peak and timeline; groups of small cells; rounding
//! base          identities, devices, quotas, extremes of the last minute
//! ```
//!
//! # Booking rules
//!
//! Each process has one **book** for each device. A book has bytes by **cell**: class, tag, role, phase, library and pool together.
//! `tracked` is the sum of the cells by construction: each rule below *posts* bytes to a cell (`tracked` changes) or *shifts*
//! them between two cells (`tracked` does not change). Cells are signed and nothing is clamped, so a wrong report shows as a
//! negative cell, not as a wrong total. `idle` is the cell of pool bytes in no block, `opaque` that of pools that report no
//! blocks.
//!
//! | event | booking |
//! |---|---|
//! | allocation of device memory | posted to the cell of its tag (class direct) |
//! | allocation for a framework pool | posted to `idle`: it is a segment of that pool |
//! | stream-ordered allocation | shifted from `idle` to the cell of its tag (class block); for the pool `max(reserved as last polled, highest live since)` is posted |
//! | managed, pinned, registered, imported memory | counted outside the book, by kind |
//! | pools of managed or host memory, and allocations from them | counted outside the book |
//! | allocation under stream capture | nothing: a graph owns the bytes |
//! | free entered | nothing yet: the allocation's row leaves the table of live addresses and counts as in flight |
//! | free returned 0 (or 4: the driver has shut down) | removed from where it was booked |
//! | free failed | the row becomes live again, unless its device was reset meanwhile |
//! | VMM create / map / unmap / retain / release | posted on create, removed when references and mappings are both zero, in any order |
//! | segment over booked memory | shifted from that memory's cell to `idle` (`opaque` if its pool reports no blocks) |
//! | segment over memory that is not booked | nothing: it predates the agent or its record was lost; its blocks are counted outside the book until memory for the whole segment is booked |
//! | memory unmapped under a segment that stays | shifted back; its blocks are counted outside the book until memory is mapped there again (a sleeping pool) |
//! | segment removed, wholly or in part | shifted back to the memory's cell |
//! | segment of a nested pool | shifted from the outer block's cell to `idle` |
//! | block | shifted from `idle` to the cell of its tag (class block) |
//! | retag | shifted between cells, in the peak too if the block was live there |
//! | begin of a phase or step | blocks whose role is now decided are shifted, as by a retag; see rules/derive.rs |
//! | context or device destroyed | everything in it is removed, segments and blocks too |
//! | context, module, limit | nothing: they change the untrackable bytes, see untrackable/ |
//! | lost records | nothing; the sums are `partial` until a resync (the agent restates its live rows) has completed |
//! | the agent was blind | nothing; the sums are `partial` from then on, because memory freed in that time is still booked. If an address is allocated again, its old row ends |
//! | resync | restated rows stay, all others are removed when it ends; no peak is recorded until the records that were made meanwhile have arrived |
#![forbid(unsafe_code)]

mod base;
mod book;
mod history;
mod ledger;
mod oom;
mod process;
mod roles;
mod rows;
mod rules;
mod samples;
mod snapshot;
mod untrackable;

pub use base::device::{AgreedReading, DeviceView, Fault, Faults, LastMinute, RECENT_NS};
pub use base::identity::{AccountRef, DeviceName, Origin, ProcessKey};
pub use base::quota::{Limits, QuotaExceeded, RefusedRecords};
pub use book::cells::{CellView, MAX_POINT_CELLS};
pub use book::rounding::{ROUNDING_RULE, RoundingRule};
pub use book::timeline::MAX_POINTS;
pub use book::{WINDOW_NS, Window};
pub use gpumem_model::gap::UntrackableParts;
pub use gpumem_model::oom::OomKind;
pub use gpumem_model::run::{Class, DeviceReading, Pool, Program, SideMemory};
pub use history::counters::{MAX_COUNTER_POINTS, MAX_COUNTERS};
pub use history::program_data::MAX_MARKS;
pub use history::ranges::{MAX_RANGES, MAX_SPANS, MAX_SPANS_OF_FILE};
pub use history::trend::TrendView;
pub use ledger::{Ledger, PRELOADED, STALE_AFTER_NS};
pub use process::coverage::{Blocked, Coverage, EarlierRecords, Facts};
pub use process::view::{AccountView, PeakView, ProcessView};
pub use rows::row::AnomalyCounts;
pub use samples::pending::{ClosedSample, PeakGap};
pub use snapshot::{Snapshot, sparse};

/// A hash map whose speed a hostile peer cannot reduce by its choice of keys.
pub(crate) type Map<K, V> = std::collections::HashMap<K, V, foldhash::fast::RandomState>;

/// Returns items sorted. The order of a hash map is random, but a replayed recording must be booked in the same order again.
pub(crate) fn in_order<T: Ord>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut items: Vec<T> = items.collect();
    items.sort_unstable();
    items
}
