//! Explains untrackable memory: its parts, and the steps in which it changed.
//!
//! ```text
//! account   causes of one account: boundaries, and the bytes booked at them
//! event     an event, and the queue of events since the last boundary
//! context   cost of a context apart from its allocations, and division of a step
//! change    one step with its causes, and the list of steps
//! ```
//!
//! x = untrackable - rounding: the memory that the driver holds for other reasons than allocations. A **boundary** is a sample
//! whose x is certain and during which no event was in progress. Between two boundaries x changes by one **step**, whose bytes
//! are divided among the events between them:
//!
//! | event | bytes | kind |
//! |---|---|---|
//! | end of a context | all bytes booked for it | measured |
//! | limit of stacks, printf or malloc | the model's change; if it is the only event and the measured bytes are within 10 % and a granule of the model, the measured bytes | model, measured |
//! | modules | at most their loadable bytes, in granules | upper bound |
//! | new context | all the rest | measured |
//! | any other event, or none | no bytes: the rest is `unexplained`, and the step names the events, or states that there were none | none |
//!
//! No bytes are booked to events across a loss or while the agent was blind. The parts of every sample sum to its untrackable,
//! because `unexplained` is the remainder. All steps sum to the change of x since it was first known (since 0 for a process that
//! was covered from its start).

pub(crate) mod account;
pub(crate) mod change;
mod context;
pub(crate) mod event;
