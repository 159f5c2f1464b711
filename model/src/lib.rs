//! Defines a run: the data about one process's life that are stored and reported, and pure functions on them. No I/O, no clock.
//!
//! ```text
//! run            the life of one process: source, clock, identity, state; coverage: how complete its numbers are
//! device         one GPU of a run; moment: memory held at one time; cell: properties by which bytes are summed
//! gap            parts of the untrackable bytes, and their changes
//! oom            times at which memory ran out or nearly did
//! iterations     memory held in each training step; parameters: individual parameters and gradients
//! timeline       memory held over time, by cell; series: extremes of the sums over time
//! growth         points from which growth (possible leaks) is judged
//! names          texts for the values of enums, in stored runs, JSON, metrics and rules
//! layers         state of each source of memory names (NVTX, Python frames, ...)
//! program_data   counters and ranges that the program reports
//! ending         other causes that ended a process: host memory, a driver fault
//! owner          user, job, pod and container of a process
//! window         cuts a run to a part of its life
//! fields         table macro that declares the records of a run, and the rules of its rows
//! time, units    times and amounts as text; escape: escapes unsafe characters in text from untrusted sources
//! control        requests and replies of the control API; checks: ids of doctor's checks
//! ```
//!
//! The crate depends on `gpumem-wire` for roles, phases and reasons of absence, which it serialises by name.
#![forbid(unsafe_code)]

pub mod blocks;
pub mod cell;
pub mod checks;
pub mod control;
pub mod coverage;
pub mod device;
pub mod ending;
pub mod escape;
pub mod fields;
pub mod gap;
pub mod growth;
pub mod iterations;
pub mod layers;
pub mod moment;
pub mod names;
pub mod oom;
pub mod owner;
pub mod parameters;
pub mod program_data;
pub mod run;
pub mod series;
pub mod time;
pub mod timeline;
pub mod units;
pub mod window;
