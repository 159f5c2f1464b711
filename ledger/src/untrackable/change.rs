//! Steps of untrackable bytes: when they changed, by how much, and why.

use crate::untrackable::event::{Event, Names, What};
use gpumem_model::gap::{Cause, UntrackableChange, UntrackableParts};
use gpumem_model::names::Named;
use std::sync::{Arc, OnceLock};

/// Maximum number of steps of an account; of more, the smallest are merged into one.
const MAX_STEPS: usize = 256;

/// Returns the cause under which an event is shown; `None` for events that are not shown.
fn cause_of(what: What) -> Option<Cause> {
    Some(match what {
        What::Creating | What::Existed => return None,
        What::Created => Cause::ContextCreated,
        What::Destroyed | What::Reset => Cause::ContextDestroyed,
        What::Exec => Cause::HistoryLost,
        What::Loaded { .. } => Cause::ModuleLoaded,
        What::Unloaded { .. } => Cause::ModuleUnloaded,
        What::Stack(_) => Cause::StackLimit,
        What::Printf(_) => Cause::PrintfLimit,
        What::Heap(_) => Cause::HeapLimit,
        What::Imported(_) => Cause::MemoryImported,
        What::Other(cause) => cause,
    })
}

/// How the bytes of a step (a change of the untrackable bytes) were determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BookedAs {
    /// From the change that NVML shows.
    Measured,
    Model,
    /// At most the loadable bytes (size of loadable sections) of the modules.
    UpperBound,
    Unexplained,
}

impl BookedAs {
    fn name(self) -> &'static str {
        match self {
            BookedAs::Measured => "measured",
            BookedAs::Model => "model",
            BookedAs::UpperBound => "upper_bound",
            BookedAs::Unexplained => "none",
        }
    }
}

/// Returns the size of a step's largest part other than rounding; the steps with the lowest weight are merged first.
fn weight(step: &UntrackableChange) -> u64 {
    let without_rounding = UntrackableParts { rounding_bytes: 0, ..step.parts };
    without_rounding.each().iter().map(|(_, _, bytes)| bytes.unsigned_abs()).max().unwrap_or(0)
}

/// Returns the names of `causes` in the order of [`Cause::NAMES`], without `main`.
fn names_of(causes: &[&str], main: Cause) -> Vec<String> {
    let others = Cause::NAMES.iter().filter(|(name, cause)| *cause != main && causes.contains(name));
    others.map(|(name, _)| (*name).to_owned()).collect()
}

/// Returns the note that a report shows with a step. `unseen_bytes`: loadable bytes of modules that no step has shown yet.
fn note(
    cause: Cause,
    parts: &UntrackableParts,
    expected_bytes: Option<i64>,
    unseen_bytes: i64,
) -> Option<String> {
    let text = match cause {
        Cause::BetweenEvents if parts.unexplained_bytes > 0 && unseen_bytes > 0 => {
            return Some(format!(
                "modules with {unseen_bytes} bytes not yet seen are loaded: may be lazy loading"
            ));
        }
        Cause::StackLimit if expected_bytes.is_some_and(|model| model > parts.local_memory_bytes) => {
            "the driver may take the rest when a kernel needs it"
        }
        Cause::Blind => "the agent recorded nothing for a part of this interval",
        Cause::HistoryLost => "records were lost, or the process became another program",
        Cause::EventsLost => "more events happened than are kept",
        Cause::Smaller => "the smallest steps, as one",
        _ => return None,
    };
    Some(text.to_owned())
}

/// Returns the step (change of the untrackable bytes) between two boundary samples. `span`: their times. `doubt`: why the events
/// are uncertain. `due`: events between the boundaries. `shares`: their bytes. `unseen_bytes`: as for [`note`].
pub(super) fn change_between(
    span: (u64, u64),
    parts: UntrackableParts,
    doubt: Option<Cause>,
    due: &[Event],
    shares: &[Share],
    unseen_bytes: i64,
    context: &SampleContext<'_>,
) -> UntrackableChange {
    let booked = shares.iter().filter(|share| doubt.is_none() || share.bytes != 0);
    // The largest share; among equal ones, the earliest.
    let main = booked.rev().max_by_key(|share| share.bytes.unsigned_abs());
    let likely = due.iter().rev().find(|event| matches!(event.what, What::Imported(_) | What::Other(_)));
    let max_share = main.map_or(0, |share| share.bytes.unsigned_abs());
    let is_unexplained = parts.unexplained_bytes.unsigned_abs() > max_share;
    let seen = |event: &Event| cause_of(event.what);
    let causes: Vec<&str> = due.iter().filter_map(seen).filter_map(Cause::name).collect();
    let (cause, event, kind, expected_bytes) = match (doubt, main, likely) {
        (Some(doubt), ..) => (Some(doubt), None, BookedAs::Unexplained, None),
        (None, main, Some(likely)) if main.is_none() || is_unexplained => {
            let imported = |event: &Event| match event.what {
                What::Imported(bytes) => bytes as i64,
                _ => 0,
            };
            let imported: i64 = due.iter().map(imported).sum();
            let expected = (imported != 0).then_some(imported);
            (seen(likely), Some(likely), BookedAs::Unexplained, expected)
        }
        (None, Some(share), _) => {
            let kind = if share.bytes == 0 { BookedAs::Unexplained } else { share.kind };
            (seen(&share.event), Some(&share.event), kind, share.expected)
        }
        (None, None, _) => (None, None, BookedAs::Unexplained, None),
    };
    let cause = cause.unwrap_or(Cause::BetweenEvents);
    let library = event.and_then(|event| context.names.library(event.library));
    UntrackableChange {
        from_ns: span.0,
        time_ns: event.map(|event| event.time_ns).filter(|time_ns| *time_ns > span.0).unwrap_or(span.1),
        bytes: parts.sum(),
        parts,
        cause: cause.name_or_unknown().to_owned(),
        also: names_of(&causes, cause),
        events: causes.len() as u64,
        kind: kind.name().to_owned(),
        tag: context.names.tag(event.map_or(context.near, |event| event.tag)),
        library: library.map(|path| path.rsplit('/').next().unwrap_or(&path).to_owned()),
        expected_bytes,
        note: note(cause, &parts, expected_bytes, unseen_bytes),
    }
}

#[derive(Debug, Default)]
pub(super) struct Steps {
    large: Vec<UntrackableChange>,
    smaller: Option<UntrackableChange>,
    /// Cached result of [`Steps::all`]; cleared by a new step.
    all: OnceLock<Arc<[UntrackableChange]>>,
}

impl Steps {
    pub fn add(&mut self, step: UntrackableChange) {
        self.all = OnceLock::new();
        self.large.push(step);
        if self.large.len() <= MAX_STEPS {
            return;
        }
        let smallest = self.large.iter().enumerate().min_by_key(|(_, step)| weight(step));
        let Some((at, _)) = smallest else { return };
        let step = self.large.remove(at);
        let sum = self.smaller.get_or_insert_with(|| UntrackableChange {
            from_ns: step.from_ns,
            cause: Cause::Smaller.name_or_unknown().to_owned(),
            kind: BookedAs::Unexplained.name().to_owned(),
            note: note(Cause::Smaller, &step.parts, None, 0),
            ..UntrackableChange::default()
        });
        sum.parts = sum.parts.combine(step.parts, i64::wrapping_add);
        sum.bytes = sum.parts.sum();
        sum.from_ns = sum.from_ns.min(step.from_ns);
        sum.time_ns = sum.time_ns.max(step.time_ns);
        sum.events += 1;
        let causes = sum.also.iter().chain(&step.also).chain([&step.cause]).map(String::as_str);
        sum.also = names_of(&causes.collect::<Vec<_>>(), Cause::Smaller);
    }

    pub fn all(&self) -> Arc<[UntrackableChange]> {
        self.all.get_or_init(|| self.smaller.iter().chain(&self.large).cloned().collect()).clone()
    }
}

/// The process's state when an NVML sample is joined with its records.
#[derive(Debug)]
pub(crate) struct SampleContext<'a> {
    /// Whether the agent started after the first allocation.
    pub late: bool,
    /// Tracked bytes that were allocated before the agent started.
    pub adopted: i64,
    /// Whether the agent sees no calls.
    pub blind: bool,
    /// Tag of the last record before the sample.
    pub near: u32,
    pub names: Names<'a>,
}

/// Bytes of a step that are attributed to one event.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share {
    pub event: Event,
    pub bytes: i64,
    pub kind: BookedAs,
    /// Bytes according to the model or the upper bound.
    pub expected: Option<i64>,
}
