//! The run store: runs in one SQLite file, written by the daemon while they go on and read by anyone who
//! may read the file.
//!
//! ```text
//! file                one store file: writing, loading and listing its runs
//! schema              tables, versions, what makes a file a store
//! rows, moments       Run <-> rows
//! details, packed     what explains a device, in rows of which those that differ are written
//! room                deleting what is old, and giving the space back
//! select              runs that are asked for
//! tables              the columns of each table and the fields that they hold
//! columns             values that SQLite has no type for
//! writer              who writes a run, and whether that process lives
//! error               StoreError, and ids of runs
//! ```
//!
//! One process writes; any number read, also while it writes. A write is one transaction: after SIGKILL
//! at any moment the file holds the last acknowledged checkpoint or the one under way. After a power cut
//! the last few may be gone (`synchronous=NORMAL`), but no run is torn.

mod columns;
mod details;
mod error;
mod file;
mod moments;
mod open;
mod packed;
mod room;
mod rows;
mod schema;
mod select;
mod tables;
mod writer;

pub use error::{ParseRunIdError, RunId, StoreError};
pub use file::{Newest, RunSummary, Store};
pub use room::{Over, Room};
pub use schema::VERSION;
pub use select::{Filter, Listed, STATES, Sort, state_name};
