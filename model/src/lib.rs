//! What a run is: plain data with serde, and pure functions of it. No I/O, no clock of the machine.
//!
//! ```text
//! run            the life of one process: source, clock, identity, state; coverage: how complete its numbers are
//! device         one GPU of a run; moment: what was held at one time; cell: names of amounts
//! gap            parts of the untrackable memory, and the changes of it
//! oom            memory that ran out, or nearly did
//! iterations     what each training step held; parameters: parameters and gradients one by one
//! timeline       what was held over time, by cell; series: extremes of the sums over time
//! growth         points by which growth is judged
//! names          names of enums in stored runs, JSON, metrics and rules
//! layers         state of each way of naming memory
//! program_data   counters and ranges of the program
//! ending         what else ended a process: host memory, a fault of the driver
//! who            user, job, pod and container of a process
//! window         a run as it was in a part of its life
//! fields         the table that a record of a run is declared with, and the rules of its rows
//! time, units    times and amounts as text; harmless: text of strangers without characters that terminals obey
//! control        requests and replies of the control API; checks: ids of doctor's checks
//! ```
//!
//! The crate depends on `gpumem-wire` for roles, phases and reasons of absence, which it serialises by name.
#![forbid(unsafe_code)]

pub mod cell;
pub mod checks;
pub mod control;
pub mod coverage;
pub mod device;
pub mod ending;
pub mod fields;
pub mod gap;
pub mod growth;
pub mod harmless;
pub mod iterations;
pub mod layers;
pub mod moment;
pub mod names;
pub mod oom;
pub mod parameters;
pub mod program_data;
pub mod run;
pub mod series;
pub mod time;
pub mod timeline;
pub mod units;
pub mod who;
pub mod window;
