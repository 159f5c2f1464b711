//! Causes of one account's untrackable memory: selects boundary samples, and books the change between each two consecutive ones.

use crate::samples::pending::ClosedSample;
use crate::untrackable::change::{SampleContext, Steps, change_between};
use crate::untrackable::context::Contexts;
use crate::untrackable::event::{Event, Events, What};
use gpumem_model::gap::{Cause, UntrackableChange, UntrackableParts};
use std::sync::Arc;

#[derive(Debug, Clone, Copy)]
struct Boundary {
    t0_ns: u64,
    x: i64,
    /// Bytes allocated before the agent started, tracked or not, without their rounding.
    predates: i64,
}

/// Causes of one book's gap.
#[derive(Debug, Default)]
pub(crate) struct Causes {
    pub since_boundary: SinceBoundary,
    contexts: Contexts,
    /// Sum of the bytes booked for contexts at the last boundary.
    booked: UntrackableParts,
    steps: Steps,
    last: Option<Boundary>,
    /// Rounding already contained in the predating bytes: that of the sample from which they were taken.
    predates_rounding: i64,
}

/// Events of one device since the last boundary.
#[derive(Debug, Default)]
pub(crate) struct SinceBoundary {
    events: Events,
    /// Records were lost since the last boundary.
    lost: bool,
    /// The agent was blind since the last boundary.
    blind: bool,
    /// Threads that the device can run at once; 0 if unknown.
    pub threads: u64,
}

impl Causes {
    /// Sets the rounding contained in the predating bytes: that of the sample they were taken from, or none if the agent reported
    /// them.
    pub fn round_from(&mut self, parts: Option<UntrackableParts>) {
        self.predates_rounding = parts.map_or(0, |parts| parts.rounding_bytes);
    }

    /// Returns the parts of a sample's untrackable. If the sample is a boundary, books the step that led to it first.
    pub fn close(&mut self, sample: &ClosedSample, known: &SampleContext<'_>) -> Option<UntrackableParts> {
        let untrackable = sample.untrackable_bytes()?;
        let rounding = sample.parts?.rounding_bytes.wrapping_sub(self.predates_rounding);
        let x = untrackable.wrapping_sub(rounding);
        let is_later = self.last.is_none_or(|last| sample.t0_ns > last.t0_ns);
        if sample.is_certain()
            && is_later
            && !self.since_boundary.events.is_under_way(sample.t0_ns, sample.t1_ns)
        {
            self.reach(sample, x, known);
        }
        let unexplained_bytes = x.wrapping_sub(self.booked.sum());
        Some(UntrackableParts { rounding_bytes: rounding, unexplained_bytes, ..self.booked })
    }

    fn reach(&mut self, sample: &ClosedSample, x: i64, known: &SampleContext<'_>) {
        let (due, is_folded) = self.since_boundary.events.take_until(sample.t1_ns);
        // Adopted memory is tracked, so the gap does not change.
        let older = sample.predates_bytes.wrapping_add(known.adopted);
        let predates = older.wrapping_sub(self.predates_rounding);
        let boundary = Boundary { t0_ns: sample.t0_ns, x, predates };
        let lost = std::mem::take(&mut self.since_boundary.lost);
        let blind = std::mem::replace(&mut self.since_boundary.blind, known.blind) || known.blind;
        let last = self.last.replace(boundary);
        let before = match last {
            // More predating bytes reduce the gap; this is not a step.
            Some(last) => last.x.wrapping_add(last.predates).wrapping_sub(boundary.predates),
            None if known.late || lost => {
                // Bytes that existed before the first boundary have no known cause.
                self.contexts.pass(&due, self.since_boundary.threads);
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
        let shares = self.contexts.share(bytes, &due, self.since_boundary.threads, doubt.is_some());
        let booked = self.contexts.booked();
        let mut parts = booked.combine(std::mem::replace(&mut self.booked, booked), i64::wrapping_sub);
        parts.unexplained_bytes = bytes.wrapping_sub(parts.sum());
        if parts == UntrackableParts::default() {
            return;
        }
        let span = (last.map_or(0, |last| last.t0_ns), sample.t0_ns);
        let unseen = self.contexts.unseen_modules();
        self.steps.add(change_between(span, parts, doubt, &due, &shares, unseen, known));
    }

    /// Returns all steps by time; the smallest may be merged into one, see [`Cause::Smaller`].
    pub fn steps(&self) -> Arc<[UntrackableChange]> {
        self.steps.all()
    }
}

impl Causes {
    /// Adds an event that may change untrackable.
    pub fn note_event(&mut self, event: Event) {
        let folded = self.since_boundary.events.push(event);
        if !folded.is_empty() {
            self.contexts.pass(&folded, self.since_boundary.threads);
        }
    }

    /// Notes that records were lost, possibly with events among them.
    pub fn lose(&mut self) {
        self.since_boundary.lost = true;
    }

    pub fn go_blind(&mut self) {
        self.since_boundary.blind = true;
    }
}
