//! Why untrackable is what it is: its parts, and the steps in which they came.
//!
//! ```text
//! account   the causes of one account: boundaries, and what is booked at them
//! event     an event, and the queue of those that no sample has passed yet
//! context   what a context costs beside its allocations, and how a step is divided
//! change    one step, with its causes; the list of them
//! ```
//!
//! x = untrackable - rounding is what the driver holds for other reasons than allocations. A **boundary** is a sample whose x is
//! certain, and during which no event was under way. Between two boundaries x changes by one **step**, whose bytes are divided among
//! the events between them:
//!
//! | who | what | kind |
//! |---|---|---|
//! | a context's end | all that was booked for it | measured |
//! | a limit of stacks, printf or malloc | the model's change; if it is the only event and the measured bytes are within 10 % and a granule of the model, the measured bytes | model, measured |
//! | modules | at most their loadable bytes, in granules | upper bound |
//! | a new context | all the rest | measured |
//! | anything else, or nothing | no bytes: the rest is `unexplained`, and the step names the events, or says that there was none | none |
//!
//! Nothing is booked across a loss or while the agent was blind. The parts of every sample sum to its untrackable, because
//! `unexplained` is the remainder. All steps sum to the change of x since it was first known (since 0 for a process that was covered
//! from its start).

pub(crate) mod account;
pub(crate) mod change;
mod context;
pub(crate) mod event;
