//! Steps of untrackable memory: when it changed, by how much, and why.

use crate::untrackable::event::{Event, Names, What};
use gpumem_model::gap::Parts;
use gpumem_wire::DriverEventKind;
use std::sync::{Arc, OnceLock};

/// Maximum number of steps kept for each device; the smallest of more are merged into one.
const MAX_STEPS: usize = 256;

/// Returns the sum, part by part, without saturation: parts are exact.
pub(super) fn plus(one: Parts, other: Parts) -> Parts {
    combine(one, other, i64::wrapping_add)
}

/// Returns `one` minus `other`, part by part.
pub(super) fn minus(one: Parts, other: Parts) -> Parts {
    combine(one, other, i64::wrapping_sub)
}

fn combine(one: Parts, other: Parts, with: fn(i64, i64) -> i64) -> Parts {
    Parts {
        context_bytes: with(one.context_bytes, other.context_bytes),
        modules_bytes: with(one.modules_bytes, other.modules_bytes),
        local_memory_bytes: with(one.local_memory_bytes, other.local_memory_bytes),
        heaps_bytes: with(one.heaps_bytes, other.heaps_bytes),
        rounding_bytes: with(one.rounding_bytes, other.rounding_bytes),
        unexplained_bytes: with(one.unexplained_bytes, other.unexplained_bytes),
    }
}

/// Why untrackable changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Cause {
    /// A context was created.
    ContextCreated,
    /// A context was destroyed, or the device reset.
    ContextDestroyed,
    /// Modules were loaded.
    ModuleLoaded,
    /// Modules were unloaded.
    ModuleUnloaded,
    /// The limit of kernel stacks was set.
    StackLimit,
    /// The size of the printf FIFO was set.
    PrintfLimit,
    /// The size of the device-side malloc heap was set.
    HeapLimit,
    /// An executable graph was made.
    GraphInstantiated,
    /// An executable graph was destroyed.
    GraphDestroyed,
    /// A stream was created.
    StreamCreated,
    /// Access to a peer was enabled.
    PeerAccess,
    /// A kernel library was loaded.
    LibraryLoaded,
    /// A green context was created.
    GreenContextCreated,
    /// Memory of another process was imported.
    MemoryImported,
    /// No reported event happened.
    BetweenEvents,
    /// The agent was blind for a part of the time.
    Blind,
    /// Records were lost, or the process became another program.
    HistoryLost,
    /// More events happened than can be kept.
    EventsLost,
    /// Several small steps; [`Step::events`] is their number.
    Smaller,
}

impl Cause {
    const ALL: [Cause; 19] = [
        Cause::ContextCreated,
        Cause::ContextDestroyed,
        Cause::ModuleLoaded,
        Cause::ModuleUnloaded,
        Cause::StackLimit,
        Cause::PrintfLimit,
        Cause::HeapLimit,
        Cause::GraphInstantiated,
        Cause::GraphDestroyed,
        Cause::StreamCreated,
        Cause::PeerAccess,
        Cause::LibraryLoaded,
        Cause::GreenContextCreated,
        Cause::MemoryImported,
        Cause::BetweenEvents,
        Cause::Blind,
        Cause::HistoryLost,
        Cause::EventsLost,
        Cause::Smaller,
    ];

    /// Returns the name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Cause::ContextCreated => "context created",
            Cause::ContextDestroyed => "context destroyed",
            Cause::ModuleLoaded => "module loaded",
            Cause::ModuleUnloaded => "module unloaded",
            Cause::StackLimit => "stack limit",
            Cause::PrintfLimit => "printf limit",
            Cause::HeapLimit => "heap limit",
            Cause::GraphInstantiated => "graph instantiated",
            Cause::GraphDestroyed => "graph destroyed",
            Cause::StreamCreated => "stream created",
            Cause::PeerAccess => "peer access",
            Cause::LibraryLoaded => "library loaded",
            Cause::GreenContextCreated => "green context created",
            Cause::MemoryImported => "memory imported",
            Cause::BetweenEvents => "between events",
            Cause::Blind => "blind",
            Cause::HistoryLost => "history lost",
            Cause::EventsLost => "events lost",
            Cause::Smaller => "smaller steps",
        }
    }

    fn of(what: What) -> Option<Cause> {
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
            What::Other(kind) => match kind {
                DriverEventKind::GraphInstantiated => Cause::GraphInstantiated,
                DriverEventKind::GraphDestroyed => Cause::GraphDestroyed,
                DriverEventKind::StreamCreated => Cause::StreamCreated,
                DriverEventKind::PeerAccess => Cause::PeerAccess,
                DriverEventKind::LibraryLoaded => Cause::LibraryLoaded,
                DriverEventKind::GreenContextCreated => Cause::GreenContextCreated,
                _ => return None,
            },
        })
    }
}

/// How the bytes of a step were determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BookedAs {
    /// Measured: the step's own size.
    Measured,
    /// Computed by a model.
    Model,
    /// Limited by the loadable bytes of the loaded modules.
    UpperBound,
    /// Unknown.
    Unexplained,
}

/// A change of untrackable between two samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Time of the sample before the change; 0 for the start of the process.
    pub from_ns: u64,
    /// Time of the event that caused it; without an event, the time of the sample that shows it.
    pub time_ns: u64,
    /// Parts that the change was booked to; their sum is the change without rounding.
    pub parts: Parts,
    /// Event with the largest share of the bytes.
    pub cause: Cause,
    /// All events between the two samples, as bits by `Cause as u32`.
    causes: u32,
    /// Number of events between the two samples.
    pub events: u64,
    /// How its bytes were determined.
    pub kind: BookedAs,
    /// Bytes expected for the cause by the model or the upper bound.
    pub expected_bytes: Option<i64>,
    /// Loadable bytes of modules that no step has shown yet: the step may be lazy loading.
    pub unseen_module_bytes: i64,
    /// Tag in force at the event; without an event, the tag of the last record before the sample.
    pub tag: Option<Arc<str>>,
    /// Path of the library that made the call.
    pub library: Option<Arc<str>>,
}

impl Step {
    /// Returns the size of the change.
    pub fn bytes(&self) -> i64 {
        self.parts.sum()
    }

    /// Returns all events between the two samples, `cause` included.
    pub fn causes(&self) -> impl Iterator<Item = Cause> {
        let bits = self.causes;
        Cause::ALL.into_iter().filter(move |cause| bits & 1 << *cause as u32 != 0)
    }

    /// Returns the weight by which steps are selected for merging, lightest first.
    fn weight(&self) -> u64 {
        let without_rounding = Parts { rounding_bytes: 0, ..self.parts };
        without_rounding.each().iter().map(|(_, _, bytes)| bytes.unsigned_abs()).max().unwrap_or(0)
    }
}

/// Returns the step between two boundaries, at times `span`.
pub(super) fn change_between(
    span: (u64, u64),
    parts: Parts,
    doubt: Option<Cause>,
    due: &[Event],
    shares: &[Share],
    unseen_module_bytes: i64,
    known: &SampleContext<'_>,
) -> Step {
    let booked = shares.iter().filter(|share| doubt.is_none() || share.bytes != 0);
    // Among equal shares, the earliest one.
    let main = booked.rev().max_by_key(|share| share.bytes.unsigned_abs());
    let likely = due.iter().rev().find(|event| matches!(event.what, What::Imported(_) | What::Other(_)));
    let most = main.map_or(0, |share| share.bytes.unsigned_abs());
    let is_unexplained = parts.unexplained_bytes.unsigned_abs() > most;
    let seen = |event: &Event| Cause::of(event.what);
    let mut causes = due.iter().filter_map(seen).fold(0, |bits, cause| bits | 1 << cause as u32);
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
    causes |= 1 << cause as u32;
    Step {
        from_ns: span.0,
        time_ns: event.map(|event| event.time_ns).filter(|time_ns| *time_ns > span.0).unwrap_or(span.1),
        parts,
        cause,
        causes,
        events: due.iter().filter(|event| seen(event).is_some()).count() as u64,
        kind,
        expected_bytes,
        unseen_module_bytes: if cause == Cause::BetweenEvents && parts.unexplained_bytes > 0 {
            unseen_module_bytes
        } else {
            0
        },
        tag: known.names.tag(event.map_or(known.near, |event| event.tag)),
        library: event.and_then(|event| known.names.library(event.library)),
    }
}

/// The steps of one book.
#[derive(Debug, Default)]
pub(super) struct Steps {
    large: Vec<Step>,
    smaller: Option<Step>,
    /// The list returned last; cleared by a new step.
    change_between: OnceLock<Arc<[Step]>>,
}

impl Steps {
    pub fn add(&mut self, step: Step) {
        self.change_between = OnceLock::new();
        self.large.push(step);
        if self.large.len() <= MAX_STEPS {
            return;
        }
        let smallest = self.large.iter().enumerate().min_by_key(|(_, step)| step.weight());
        let Some((at, _)) = smallest else { return };
        let step = self.large.remove(at);
        match &mut self.smaller {
            Some(sum) => {
                sum.parts = plus(sum.parts, step.parts);
                sum.from_ns = sum.from_ns.min(step.from_ns);
                sum.time_ns = sum.time_ns.max(step.time_ns);
                sum.causes |= step.causes;
                sum.events += 1;
            }
            None => {
                let (causes, kind) = (step.causes | 1 << Cause::Smaller as u32, BookedAs::Unexplained);
                let Step { from_ns, time_ns, parts, .. } = step;
                self.smaller = Some(Step {
                    from_ns,
                    time_ns,
                    parts,
                    cause: Cause::Smaller,
                    causes,
                    events: 1,
                    kind,
                    expected_bytes: None,
                    unseen_module_bytes: 0,
                    tag: None,
                    library: None,
                });
            }
        }
    }

    pub fn all(&self) -> Arc<[Step]> {
        let change_between = || self.smaller.iter().chain(&self.large).cloned().collect();
        self.change_between.get_or_init(change_between).clone()
    }
}

/// State of a process, other than its events, when a sample closes.
#[derive(Debug)]
pub(crate) struct SampleContext<'a> {
    pub late: bool,
    /// Tracked bytes that were allocated before the agent started.
    pub adopted: i64,
    /// The agent is blind now.
    pub blind: bool,
    /// Tag of the last record before the sample.
    pub near: u32,
    pub names: Names<'a>,
}

/// Bytes of a step booked to one event, and the bytes expected for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share {
    pub event: Event,
    pub bytes: i64,
    pub kind: BookedAs,
    /// According to the model or the upper bound.
    pub expected: Option<i64>,
}
