//! Causes of an account's untrackable bytes: selects *boundary* samples (mod.rs), and explains the change between each two.

use crate::samples::pending::ClosedSample;
use crate::untrackable::change::{SampleContext, Steps, change_between};
use crate::untrackable::context::Contexts;
use crate::untrackable::event::{Event, Events, What};
use gpumem_model::gap::{Cause, UntrackableChange, UntrackableParts};
use std::sync::Arc;

#[derive(Debug, Clone, Copy)]
struct Boundary {
    t0_ns: u64,
    /// Untrackable bytes without the driver's rounding (the x of mod.rs).
    x: i64,
    /// Bytes allocated before the agent started, tracked or not, without their rounding.
    predates: i64,
}

#[derive(Debug, Default)]
pub(crate) struct Causes {
    pub since_boundary: SinceBoundary,
    contexts: Contexts,
    /// Bytes attributed to contexts at the last boundary sample, by part.
    booked: UntrackableParts,
    steps: Steps,
    last: Option<Boundary>,
    /// Rounding that the bytes from before the agent already contain.
    predates_rounding: i64,
    /// Number of CUDA graphs that were instantiated.
    graphs: u64,
}

/// Events of one device since the last boundary sample (see mod.rs).
#[derive(Debug, Default)]
pub(crate) struct SinceBoundary {
    events: Events,
    /// Whether records were lost since the last boundary.
    lost: bool,
    /// Whether the agent was blind (saw no calls) at some time since the last boundary.
    blind: bool,
    /// Maximum number of threads that the device can run at once; 0 if unknown.
    pub threads: u64,
}

impl Causes {
    /// Sets the rounding that the bytes from before the agent contain: that of the sample from which they were computed; none if
    /// the agent reported them.
    pub fn set_predates_rounding(&mut self, parts: Option<UntrackableParts>) {
        self.predates_rounding = parts.map_or(0, |parts| parts.rounding_bytes);
    }

    /// Returns the parts of a sample's untrackable bytes. If the sample is a boundary, first adds the step since the last one.
    pub fn close(&mut self, sample: &ClosedSample, context: &SampleContext<'_>) -> Option<UntrackableParts> {
        let untrackable = sample.untrackable_bytes()?;
        let rounding = sample.parts?.rounding_bytes.wrapping_sub(self.predates_rounding);
        let x = untrackable.wrapping_sub(rounding);
        let is_later = self.last.is_none_or(|last| sample.t0_ns > last.t0_ns);
        if sample.is_certain()
            && is_later
            && !self.since_boundary.events.is_in_progress(sample.t0_ns, sample.t1_ns)
        {
            self.add_boundary(sample, x, context);
        }
        let unexplained_bytes = x.wrapping_sub(self.booked.sum());
        Some(UntrackableParts { rounding_bytes: rounding, unexplained_bytes, ..self.booked })
    }

    /// Explains the change since the last boundary, and makes the sample the last boundary.
    fn add_boundary(&mut self, sample: &ClosedSample, x: i64, context: &SampleContext<'_>) {
        let (due, is_folded) = self.since_boundary.events.take_until(sample.t1_ns);
        // Bytes from before the agent that are tracked by now count too: tracking them does not change the memory held.
        let older = sample.predates_bytes.wrapping_add(context.adopted);
        let predates = older.wrapping_sub(self.predates_rounding);
        let boundary = Boundary { t0_ns: sample.t0_ns, x, predates };
        let lost = std::mem::take(&mut self.since_boundary.lost);
        let blind = std::mem::replace(&mut self.since_boundary.blind, context.blind) || context.blind;
        let last = self.last.replace(boundary);
        let before = match last {
            // More bytes from before the agent mean fewer untrackable ones; that difference is not a step.
            Some(last) => last.x.wrapping_add(last.predates).wrapping_sub(boundary.predates),
            None if context.late || lost => {
                // The causes of bytes that existed before the first boundary are unknown.
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
        self.steps.add(change_between(span, parts, doubt, &due, &shares, unseen, context));
    }

    pub fn steps(&self) -> Arc<[UntrackableChange]> {
        self.steps.all()
    }

    /// Returns the number of CUDA graphs that were instantiated. Steps name a graph only if a sample shows its memory.
    pub fn graphs(&self) -> u64 {
        self.graphs
    }

    /// Queues an event that may change the untrackable bytes, until the next boundary.
    pub fn note_event(&mut self, event: Event) {
        self.graphs += u64::from(event.what == What::Other(Cause::GraphInstantiated));
        let folded = self.since_boundary.events.push(event);
        if !folded.is_empty() {
            self.contexts.pass(&folded, self.since_boundary.threads);
        }
    }

    /// Records that events may be among lost records.
    pub fn lose(&mut self) {
        self.since_boundary.lost = true;
    }

    pub fn note_blind(&mut self) {
        self.since_boundary.blind = true;
    }
}
