//! What the driver did that may move the gap.

use crate::Map;
use crate::book::cells::OVERFLOW_TAG;
use gpumem_wire::{DriverEventKind, Stamp};
use std::collections::VecDeque;
use std::sync::Arc;

/// Events that wait for a sample to pass them, per device. A process that loads its modules one by one has some
/// thousands, but not within one second.
const MAX_EVENTS: usize = 1024;
/// How long a call may have been under way before or after the record that tells of it: it changes what NVML charges
/// somewhere in that time. (Loading a module takes up to some milliseconds; the record does not say how long.)
const CALL_NS: u64 = 20_000_000;
/// The same of creating and destroying a context.
const CONTEXT_NS: u64 = 500_000_000;
/// Clocks of agents and readings are apart by no more than this.
const CLOCK_NS: u64 = 50_000;
/// A context that is being created for longer than this exists already, or never will.
const CREATING_NS: u64 = 10_000_000_000;

/// Names of a process, by its ids.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names<'a> {
    pub tags: &'a Map<u32, Arc<str>>,
    pub modules: &'a Map<u16, Arc<str>>,
}

impl Names<'_> {
    /// `None` for no tag.
    pub fn tag(&self, id: u32) -> Option<Arc<str>> {
        match id {
            0 => None,
            OVERFLOW_TAG => Some("(more names than a process may have)".into()),
            id => {
                let known = self.tags.get(&id).cloned();
                Some(known.unwrap_or_else(|| format!("(tag {id}, its name was lost)").into()))
            }
        }
    }

    pub fn library(&self, id: u16) -> Option<Arc<str>> {
        self.modules.get(&id).cloned()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// A call that creates a context was entered.
    Creating,
    Created,
    /// It existed before; said again.
    Existed,
    Destroyed,
    /// All contexts of the device are gone.
    Reset,
    /// The process became another program: all contexts are gone.
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
    /// Memory of another process was imported, of so many bytes; its charge has no model.
    Imported(u64),
    /// Something that has no model.
    Other(DriverEventKind),
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

    /// When NVML's number may have changed because of it.
    fn span(&self) -> (u64, u64) {
        let (before, after) = match self.what {
            What::Loaded { .. } | What::Stack(_) | What::Printf(_) | What::Heap(_) => (CALL_NS, 0),
            What::Created | What::Reset => (CONTEXT_NS, 0),
            // Told before the driver does it.
            What::Unloaded { .. } => (0, CALL_NS),
            What::Destroyed => (0, CONTEXT_NS),
            What::Creating | What::Existed | What::Exec | What::Imported(_) | What::Other(_) => (0, 0),
        };
        (self.time_ns.saturating_sub(before.max(CLOCK_NS)), self.time_ns.saturating_add(after.max(CLOCK_NS)))
    }

    /// Whether it can have bytes of its own.
    fn is_priced(&self) -> bool {
        !matches!(self.what, What::Existed | What::Exec | What::Imported(_) | What::Other(_))
    }
}

/// Those that no boundary has passed, in the order in which they were said.
#[derive(Debug, Default)]
pub(super) struct Events {
    queue: VecDeque<Event>,
    /// Older ones had to go.
    folded: bool,
}

impl Events {
    /// Says which had to go for it if there were too many: the older half, so that each costs little.
    pub fn push(&mut self, event: Event) -> Vec<Event> {
        let oldest = if self.queue.len() < MAX_EVENTS { 0 } else { MAX_EVENTS / 2 };
        let oldest: Vec<Event> = self.queue.drain(..oldest).collect();
        self.folded |= !oldest.is_empty();
        self.queue.push_back(event);
        oldest
    }

    /// Whether something that costs memory was being done in a reading.
    pub fn is_under_way(&self, t0_ns: u64, t1_ns: u64) -> bool {
        let mut creating = None;
        for event in &self.queue {
            match event.what {
                What::Creating if event.time_ns <= t1_ns => creating = Some(event.time_ns),
                What::Created if event.time_ns <= t1_ns => creating = None,
                _ => {}
            }
            let (from, to) = event.span();
            if event.is_priced() && event.what != What::Creating && from <= t1_ns && to >= t0_ns {
                return true;
            }
        }
        creating.is_some_and(|since| t1_ns - since < CREATING_NS)
    }

    /// Those that happened until then, and whether older ones had to go.
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
