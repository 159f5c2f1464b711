#![doc = include_str!("../README.md")]
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

pub use base::device::{AgreedReading, DeviceView, Fault, Faults, LastMinute, RECENT_NS, RepeatedReading};
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
pub use ledger::{Ledger, PRELOADED, RepeatedSample, STALE_AFTER_NS};
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
