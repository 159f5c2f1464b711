//! Why the gap is what it is: the parts of untrackable, and the steps in which they came.
//!
//! ```text
//! account   the causes of one account: boundaries, and what is booked at them
//! event     an event, and the queue of those that no sample has passed yet
//! context   what a context costs beside its allocations, and who may have what of a step
//! change    one change of the gap, with its causes; the list of them
//! ```
//!
//! x = untrackable - rounding is what the driver holds for other reasons than allocations. A **boundary** is a sample
//! whose x is certain, and in which no event was under way. Between two boundaries x changes by one **step**, and the
//! events between them may have its bytes:
//!
//! | who | what | kind |
//! |---|---|---|
//! | a context's end | all that was booked for it | measured |
//! | a limit of stacks, printf or malloc | the model's change; if nobody else is there, what was measured, if that is within 10 % and a granule of the model | model, measured |
//! | modules | at most their loadable bytes, in granules | upper bound |
//! | a new context | all the rest | measured |
//! | anything else, or nothing | no bytes: the rest is `unexplained`, and the step names what happened, or that nothing did | none |
//!
//! Nothing is booked across a loss or while the agent was blind. Whatever a sample is, its parts sum to its untrackable,
//! because `unexplained` is what the others leave; and all steps sum to what x has changed by since it was first known
//! (since 0, for a process that was covered from its start).

pub(crate) mod account;
pub(crate) mod change;
mod context;
pub(crate) mod event;
