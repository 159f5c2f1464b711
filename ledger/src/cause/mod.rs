//! Why the gap is what it is: the parts of untrackable, and the steps in which they came.
//!
//! ```text
//! heard     records of a process -> events of the driver, by device
//! event     an event, and the queue of those that no sample has passed yet
//! context   what a context costs beside its allocations, and who may have what of a step
//! step      one change of the gap, with its causes; the list of them
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

mod context;
mod event;
mod heard;
mod step;

pub use step::{BookedAs, Cause, Step};

pub(crate) use event::Names;

use crate::gap::ClosedSample;
use context::Contexts;
use event::{Event, Events, What};
use std::sync::Arc;
use step::Steps;

/// Parts of an untrackable, in bytes; signed, never clamped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parts {
    /// What creating contexts cost.
    pub context: i64,
    /// Code and globals of modules.
    pub modules: i64,
    /// Stacks of kernels.
    pub local_memory: i64,
    /// The FIFO of printf and the heap of malloc on the device.
    pub heaps: i64,
    /// What the driver adds to the sizes that were asked for.
    pub rounding: i64,
    /// The rest.
    pub unexplained: i64,
}

impl Parts {
    /// The untrackable, or the step, that they are the parts of.
    pub fn sum(&self) -> i64 {
        let Parts { context, modules, local_memory, heaps, rounding, unexplained } = *self;
        let all = [context, modules, local_memory, heaps, rounding, unexplained];
        all.iter().fold(0, |sum, bytes| sum.wrapping_add(*bytes))
    }

    fn combine(self, other: Parts, with: fn(i64, i64) -> i64) -> Parts {
        Parts {
            context: with(self.context, other.context),
            modules: with(self.modules, other.modules),
            local_memory: with(self.local_memory, other.local_memory),
            heaps: with(self.heaps, other.heaps),
            rounding: with(self.rounding, other.rounding),
            unexplained: with(self.unexplained, other.unexplained),
        }
    }

    pub(crate) fn plus(self, other: Parts) -> Parts {
        self.combine(other, i64::wrapping_add)
    }

    pub(crate) fn minus(self, other: Parts) -> Parts {
        self.combine(other, i64::wrapping_sub)
    }
}

/// What is known of the process beside its causes when a sample closes.
#[derive(Debug)]
pub(crate) struct Known<'a> {
    pub late: bool,
    /// The agent sees nothing now.
    pub blind: bool,
    /// Tag of the last record before the sample.
    pub near: u32,
    pub names: Names<'a>,
}

/// The last boundary.
#[derive(Debug, Clone, Copy)]
struct Boundary {
    t0_ns: u64,
    x: i64,
    predates: i64,
}

/// The causes of one book's gap.
#[derive(Debug, Default)]
pub(crate) struct Causes {
    /// What was said since the last boundary.
    pub heard: Heard,
    contexts: Contexts,
    /// Sum of what was booked for contexts at the last boundary.
    booked: Parts,
    steps: Steps,
    last: Option<Boundary>,
    /// Rounding that `predates` already has in it: that of the sample from which it was taken.
    predates_rounding: i64,
}

/// What a process has said of one device.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    events: Events,
    /// Records were lost since the last boundary.
    lost: bool,
    /// The agent was blind since the last boundary.
    blind: bool,
    /// Threads that the device can hold at once; 0 while not known.
    pub threads: u64,
}

impl Causes {
    /// `predates` was taken from a sample with these parts: its rounding is in it.
    pub fn round_from(&mut self, parts: Option<Parts>) {
        self.predates_rounding = parts.map_or(0, |parts| parts.rounding);
    }

    /// The parts of a sample's untrackable. If it is a boundary, the step that led to it is booked first.
    pub fn close(&mut self, sample: &ClosedSample, known: &Known<'_>) -> Option<Parts> {
        let untrackable = sample.untrackable_bytes()?;
        let rounding = sample.parts?.rounding.wrapping_sub(self.predates_rounding);
        let x = untrackable.wrapping_sub(rounding);
        let is_certain = !sample.torn && !sample.stale && !sample.partial;
        let is_later = self.last.is_none_or(|last| sample.t0_ns > last.t0_ns);
        if is_certain && is_later && !self.heard.events.is_under_way(sample.t0_ns, sample.t1_ns) {
            self.reach(sample, x, known);
        }
        Some(Parts { rounding, unexplained: x.wrapping_sub(self.booked.sum()), ..self.booked })
    }

    fn reach(&mut self, sample: &ClosedSample, x: i64, known: &Known<'_>) {
        let (due, is_folded) = self.heard.events.take_until(sample.t1_ns);
        let boundary = Boundary { t0_ns: sample.t0_ns, x, predates: sample.predates_bytes };
        let lost = std::mem::take(&mut self.heard.lost);
        let blind = std::mem::replace(&mut self.heard.blind, known.blind) || known.blind;
        let last = self.last.replace(boundary);
        let before = match last {
            // More predates is less gap, and no step.
            Some(last) => last.x.wrapping_add(last.predates).wrapping_sub(boundary.predates),
            None if known.late || lost => {
                // What was there first has no cause that could be known.
                due.iter().for_each(|event| self.contexts.pass(event, self.heard.threads));
                self.booked = self.contexts.booked();
                return;
            }
            None => 0,
        };
        let is_exec = due.iter().any(|event| event.what == What::Exec) && before != 0;
        let doubt = [
            (lost, Cause::HistoryLost),
            (blind, Cause::Blind),
            (is_exec, Cause::HistoryLost),
            (is_folded, Cause::EventsLost),
        ];
        let doubt = doubt.into_iter().find_map(|(is, cause)| is.then_some(cause));
        let bytes = x.wrapping_sub(before);
        let shares = self.contexts.share(bytes, &due, self.heard.threads, doubt.is_some());
        let booked = self.contexts.booked();
        let mut parts = booked.minus(std::mem::replace(&mut self.booked, booked));
        parts.unexplained = bytes.wrapping_sub(parts.sum());
        if parts == Parts::default() {
            return;
        }
        let span = (last.map_or(0, |last| last.t0_ns), sample.t0_ns);
        let unseen = self.contexts.unseen_modules();
        self.steps.add(step::told(span, parts, doubt, &due, &shares, unseen, known));
    }

    /// All steps so far in the order of their times; small ones may be one, see [`Cause::Smaller`].
    pub fn steps(&self) -> Arc<[Step]> {
        self.steps.all()
    }
}

impl Heard {
    fn hear(&mut self, event: Event, contexts: &mut Contexts) {
        if let Some(oldest) = self.events.push(event) {
            contexts.pass(&oldest, self.threads);
        }
    }
}

impl Causes {
    pub fn hear(&mut self, event: Event) {
        self.heard.hear(event, &mut self.contexts);
    }

    /// Records were lost: nobody knows what they said.
    pub fn lose(&mut self) {
        self.heard.lost = true;
    }

    /// The agent sees nothing for a while.
    pub fn go_blind(&mut self) {
        self.heard.blind = true;
    }
}
