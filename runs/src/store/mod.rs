//! The run store: runs in one SQLite file (a run is the recorded memory use of one process). The daemon writes it while runs are
//! open; anyone with read permission may read it.
//!
//! ```text
//! file                a store file: writes, loads and lists its runs
//! schema              tables and versions, and how a store file is recognised
//! rows                Run <-> rows
//! details, packed     device details and program data in rows, of which only changed ones are written
//! delta_log           the file to which checkpoints of live runs append their changes
//! parts, splice       a run as small parts for the delta log, and differences between two versions of a part
//! requests            streams of requests to PyTorch's allocator
//! room                deletes old runs and returns free space to the file system
//! select              runs that match a filter
//! tables              the columns of each table and the fields that they hold; values that SQLite has no type for
//! writer              the process that writes a run, and whether it is alive
//! error               StoreError, and ids of runs
//! ```
//!
//! One process writes; any number of processes read at the same time. Each write is one transaction: if the writer is killed, the
//! file has the last completed checkpoint or the one in progress. After a power failure the last few checkpoints may be missing
//! (`synchronous=NORMAL`), but every run is consistent.

mod delta_log;
mod details;
mod error;
mod file;
mod open;
pub(crate) mod packed;
mod parts;
mod requests;
mod room;
mod rows;
mod schema;
mod select;
mod splice;
mod tables;
mod writer;

pub use error::{ParseRunIdError, RunId, StoreError};
pub use file::{NewestPart, RunSummary, Store};
pub use room::{DeletableRun, StoreSize};
pub use schema::VERSION;
pub use select::{Filter, STATES, SelectedRun, Sort, state_name};
