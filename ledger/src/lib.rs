//! The ledger: observations in, sums that add up out. It has one owner, does no I/O, reads no clock and cannot fail: records that do
//! not fit are counted, never returned as errors.
//!
//! A file imports from its own layer and from layers below it:
//!
//! ```text
//! ledger, snapshot, to_model   one entry for all observations; devices and readings; what views read, as types of gpumem-model
//! process       one process: order of its records, which rule a record belongs to, baseline, resync, exec(), blind intervals
//! oom           running out of memory: the requests, and who held the device
//! history       counters, ranges and marks of the program; points of growth
//! untrackable   why untrackable is what it is: events of the driver, parts, changes
//! samples       samples of NVML, joined to `tracked` at their own time
//! rules         what a record does to rows and books; roles of blocks
//! roles         blocks without a settled role; what each iteration held
//! rows          data of allocations, blocks, pools, segments, handles, calls in flight
//! book          double entry: cells whose sum is `tracked`, its peak and timeline; groups of small cells; rounding
//! base          identities, devices, quotas, extremes of the last minute
//! ```
//!
//! # Booking rules
//!
//! Per process and device there is one **book** of cells. `tracked` is their sum by construction:
//! every rule below either *posts* bytes to a cell (tracked moves) or *shifts* them between two cells
//! (tracked does not). Cells are signed and nothing is clamped; a wrong report shows as a negative cell,
//! not as a wrong total.
//!
//! | what happens | what is booked |
//! |---|---|
//! | allocation of device memory | posted to the cell of its tag (class direct) |
//! | allocation for a framework pool | posted to `idle`: it is a segment of that pool |
//! | stream-ordered allocation | shifted from `idle` to the cell of its tag (class block); for the pool `max(reserved as last polled, highest live since)` is posted |
//! | managed, pinned, registered, imported memory | beside the book, per kind |
//! | pools of managed or host memory, and what comes from them | beside the book |
//! | allocation under stream capture | nothing: a graph owns the bytes |
//! | free entered | nothing yet: the address is unbound, the row is in flight |
//! | free returned 0 (or 4: the driver is gone) | taken from where it was booked |
//! | free failed | the address is bound again, unless its device was reset meanwhile |
//! | VMM create / map / unmap / retain / release | posted on create, taken when references and mappings are both zero, in whichever order |
//! | segment over memory that is booked | shifted from that memory's cell to `idle` (`opaque` if its pool reports no blocks) |
//! | segment over memory that is not booked | nothing: it predates the agent or was lost; its blocks are counted beside, until memory for all of it is booked |
//! | memory unmapped under a segment that stays | shifted back; its blocks are counted beside until memory is mapped there again (a pool that sleeps) |
//! | segment removed, wholly or in part | shifted back to the memory's cell |
//! | segment of a nested pool | shifted from the outer block's cell to `idle` |
//! | block | shifted from `idle` to the cell of its tag (class block) |
//! | retag | shifted between cells, in the peak too if the block was live there |
//! | phase or step begins | blocks whose role is known by now are shifted, as by a retag; see rules/derive.rs |
//! | context or device gone | everything in it is taken, segments and blocks too |
//! | context, module, limit | nothing: they change untrackable, see untrackable/ |
//! | lost records | nothing; the sums say `partial` until a resync has ended |
//! | the agent was blind | nothing; the sums say `partial` from then on, because what was freed meanwhile is still booked. An address that is given out again ends the row that had it |
//! | resync | restated rows stay, all others are taken when it ends; no peak is taken until the ring has caught up with it |
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
mod to_model;
mod untrackable;

pub use base::device::{AgreedReading, DeviceView, Fault, Faults};
pub use base::identity::{DeviceName, Origin, Place, ProcessKey};
pub use base::quota::{Limits, QuotaExceeded, RefusedRecords};
pub use base::recent::{RECENT_NS, Recent};
pub use book::cell_groups::{SUM, is_sum, without_sum};
pub use book::cells::MAX_POINT_CELLS;
pub use book::rounding::{ROUNDING_RULE, RoundingRule};
pub use book::timeline::MAX_POINTS;
pub use book::{WINDOW_NS, Window};
pub use gpumem_model::gap::Parts;
pub use gpumem_model::iterations::Level;
pub use gpumem_model::oom::OomKind;
pub use gpumem_model::run::{Beside, Class, DeviceReading, Program};
pub use history::counters::{MAX_COUNTER_POINTS, MAX_COUNTERS};
pub use history::program_data::{LayerView, MAX_MARKS, MarkView};
pub use history::ranges::{MAX_RANGES, MAX_SPANS, MAX_SPANS_OF_FILE};
pub use history::ring::TrendPoint;
pub use history::trend::{TrackView, TrendView, rise};
pub use ledger::{Ledger, STALE_AFTER_NS};
pub use oom::device::{Holder, OomDevice};
pub use oom::records::OomView;
pub use process::coverage::{Blind, BlindCause, BlindWindow, Blocked, Coverage, Earlier, Facts, Partial};
pub use roles::iterations::{Iteration, IterationsView, MAX_ITERATIONS, ROLES};
pub use roles::parameters::{MAX_COLUMNS, ParametersView};
pub use rows::pool::Idle;
pub use rows::row::AnomalyCounts;
pub use samples::pending::{ClosedSample, PeakGap};
pub use snapshot::{AccountView, CellView, PeakView, PoolView, ProcessView, Snapshot};
pub use to_model::sparse;
pub use untrackable::change::{BookedAs, Cause, Step};

/// A hash map whose speed a hostile peer's keys cannot reduce.
pub(crate) type Map<K, V> = std::collections::HashMap<K, V, foldhash::fast::RandomState>;
