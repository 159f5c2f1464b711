//! Driver events that may change untrackable bytes: contexts, modules, limits.

use crate::Map;
use crate::book::cells::CellTable;
use gpumem_model::gap::Cause;
use gpumem_wire::{DriverEventKind, Stamp};
use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum number of events of an account that wait for a sample. A process may load thousands of modules, but not within a
/// second.
const MAX_EVENTS: usize = 1024;
/// Maximum time (ns) between the record of a driver event and the change of NVML's figure that the call causes. Loading a module
/// takes some milliseconds, and its record has no duration.
const CALL_NS: u64 = 20_000_000;
/// Like [`CALL_NS`], for creating and destroying a context.
const CONTEXT_NS: u64 = 500_000_000;
/// Maximum difference between the clocks of agents and of NVML readings (ns).
const CLOCK_NS: u64 = 50_000;
/// Time (ns) after which a context that a call should create counts as not created: it existed already, or the call failed.
const CREATING_NS: u64 = 10_000_000_000;

/// Names of a process by id, for resolving tags and libraries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names<'a> {
    pub cells: &'a CellTable,
    pub modules: &'a Map<u16, Arc<str>>,
}

impl Names<'_> {
    pub fn tag(&self, id: u32) -> Option<String> {
        self.cells.tag(id).as_deref().map(str::to_owned)
    }

    pub fn library(&self, id: u16) -> Option<String> {
        self.modules.get(&id).map(|path| (**path).to_owned())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// A call that creates a context was entered.
    Creating,
    Created,
    /// A resync restated the context.
    Existed,
    Destroyed,
    /// All contexts of the device were destroyed.
    Reset,
    /// The process became another program: all its contexts were destroyed.
    Exec,
    Loaded {
        module: u64,
        bytes: u64,
    },
    Unloaded {
        module: u64,
        bytes: u64,
    },
    Stack(u64),
    Printf(u64),
    Heap(u64),
    /// Memory of another process was imported (bytes). How NVML charges it is not known.
    Imported(u64),
    /// An event whose bytes no model predicts.
    Other(Cause),
}

impl What {
    /// Converts a `DriverEvent` record; returns `None` if another record reports the event.
    pub fn of(event: DriverEventKind, bytes: u64, value: u64) -> Option<What> {
        use DriverEventKind as Kind;
        Some(match event {
            Kind::ContextCreated | Kind::Unknown => return None, // `ContextCreate` reports it
            Kind::ContextCreating => What::Creating,
            Kind::ModuleLoaded => What::Loaded { module: value, bytes },
            Kind::ModuleUnloaded => What::Unloaded { module: value, bytes },
            Kind::StackLimit => What::Stack(value),
            Kind::PrintfLimit => What::Printf(value),
            Kind::HeapLimit => What::Heap(value),
            Kind::GraphInstantiated => What::Other(Cause::GraphInstantiated),
            Kind::GraphDestroyed => What::Other(Cause::GraphDestroyed),
            Kind::StreamCreated => What::Other(Cause::StreamCreated),
            Kind::PeerAccess => What::Other(Cause::PeerAccess),
            Kind::LibraryLoaded => What::Other(Cause::LibraryLoaded),
            Kind::GreenContextCreated => What::Other(Cause::GreenContextCreated),
        })
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub time_ns: u64,
    pub what: What,
    pub context: u32,
    pub tag: u32,
    pub library: u16,
}

impl Event {
    pub fn of(stamp: &Stamp, time_ns: u64, what: What) -> Self {
        Event { time_ns, what, context: stamp.context, tag: stamp.tag, library: stamp.module }
    }

    /// Returns the interval in which the event may have changed NVML's figure.
    fn span(&self) -> (u64, u64) {
        let (before, after) = match self.what {
            What::Loaded { .. } | What::Stack(_) | What::Printf(_) | What::Heap(_) => (CALL_NS, 0),
            What::Created | What::Reset => (CONTEXT_NS, 0),
            // The record is made before the driver acts.
            What::Unloaded { .. } => (0, CALL_NS),
            What::Destroyed => (0, CONTEXT_NS),
            What::Creating | What::Existed | What::Exec | What::Imported(_) | What::Other(_) => (0, 0),
        };
        (self.time_ns.saturating_sub(before.max(CLOCK_NS)), self.time_ns.saturating_add(after.max(CLOCK_NS)))
    }

    fn has_bytes(&self) -> bool {
        !matches!(self.what, What::Existed | What::Exec | What::Imported(_) | What::Other(_))
    }
}

/// Events since the last boundary, in record order.
#[derive(Debug, Default)]
pub(super) struct Events {
    queue: VecDeque<Event>,
    /// Whether older events were dropped.
    folded: bool,
}

impl Events {
    /// Adds an event. If the queue is full, removes and returns its older half.
    pub fn push(&mut self, event: Event) -> Vec<Event> {
        let oldest = if self.queue.len() < MAX_EVENTS { 0 } else { MAX_EVENTS / 2 };
        let oldest: Vec<Event> = self.queue.drain(..oldest).collect();
        self.folded |= !oldest.is_empty();
        self.queue.push_back(event);
        oldest
    }

    /// Whether an event with bytes was in progress during a reading.
    pub fn is_in_progress(&self, t0_ns: u64, t1_ns: u64) -> bool {
        let mut creating = None;
        for event in &self.queue {
            match event.what {
                What::Creating if event.time_ns <= t1_ns => creating = Some(event.time_ns),
                What::Created if event.time_ns <= t1_ns => creating = None,
                _ => {}
            }
            let (from, to) = event.span();
            if event.has_bytes() && event.what != What::Creating && from <= t1_ns && to >= t0_ns {
                return true;
            }
        }
        creating.is_some_and(|since| t1_ns - since < CREATING_NS)
    }

    /// Removes and returns the events up to a time; also returns whether older ones were dropped.
    pub fn take_until(&mut self, t1_ns: u64) -> (Vec<Event>, bool) {
        let folded = std::mem::take(&mut self.folded);
        if self.queue.is_empty() {
            return (Vec::new(), folded);
        }
        let (due, later): (Vec<Event>, Vec<Event>) =
            self.queue.drain(..).partition(|event| event.time_ns <= t1_ns);
        self.queue = later.into();
        (due, folded)
    }
}
