//! Explains a process's untrackable bytes (NVML charges them, but no allocation has them): parts, and steps in which they
//! changed.
//!
//! ```text
//! account   causes of one account: its boundaries, and the bytes attributed to causes at them
//! event     an event, and the queue of events since the last boundary
//! context   memory that a context costs apart from its allocations, and division of a step
//! change    one step with its causes, and the list of steps
//! ```
//!
//! x = untrackable - rounding: the memory that the driver holds for other reasons than allocations. A **boundary** is an NVML
//! sample during which no memory changed and no event was in progress. Between two boundaries x changes by one **step**, whose
//! bytes are divided among the events between them:
//!
//! | event | bytes | kind |
//! |---|---|---|
//! | end of a context | minus all bytes attributed to it | measured |
//! | limit of stacks, printf or malloc | the model's change; if it is the only event and the measured bytes are within 10 % and a granule of the model, the measured bytes | model, measured |
//! | modules | at most their loadable bytes, in granules | upper bound |
//! | new context | the rest of the step | measured |
//! | any other event, or none | no bytes: the rest is `unexplained`, and the step names the events, or states that there were none | none |
//!
//! If records were lost or the agent was blind (saw no calls) during a step, its events get no bytes. The parts of every sample
//! sum to its untrackable bytes, because `unexplained` is the remainder. All steps sum to the change of x since it was first
//! known (since 0 for a process with an agent from its start).

pub(crate) mod account;
pub(crate) mod change;
mod context;
pub(crate) mod event;
