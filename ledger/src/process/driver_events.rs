//! Records of a process that may change the gap on one of its devices.

use crate::process::Process;
use crate::untrackable::event::{Event, What};
use gpumem_wire::{DriverEventKind, Flags, NONE_DEVICE, Record, Stamp};

impl Process {
    pub fn note_driver_event(&mut self, stamp: &Stamp, event: DriverEventKind, bytes: u64, value: u64) {
        use DriverEventKind as Kind;
        let what = match event {
            Kind::ContextCreated | Kind::Unknown => return, // `ContextCreate` reports it
            Kind::ContextCreating => What::Creating,
            Kind::ModuleLoaded => What::Loaded { module: value, bytes },
            Kind::ModuleUnloaded => What::Unloaded { module: value, bytes },
            Kind::StackLimit => What::Stack(value),
            Kind::PrintfLimit => What::Printf(value),
            Kind::HeapLimit => What::Heap(value),
            Kind::GraphInstantiated
            | Kind::GraphDestroyed
            | Kind::StreamCreated
            | Kind::PeerAccess
            | Kind::LibraryLoaded
            | Kind::GreenContextCreated => What::Other(event),
        };
        self.note_event(stamp, what);
    }

    /// Notes an event that may change the gap. (NVML may charge imported memory to the importer as well.)
    pub fn note_event(&mut self, stamp: &Stamp, what: What) {
        if stamp.flags.has(Flags::RESTATED) && what != What::Existed {
            return; // it happened long ago
        }
        // A module of an unknown context: with a single device, it must be on that one.
        let book = match (stamp.device, self.accounts.len()) {
            (NONE_DEVICE, 1) => 0,
            (NONE_DEVICE, _) => return,
            (slot, _) => self.book(slot),
        };
        let time_ns = self.stream.time_of(stamp);
        self.accounts[usize::from(book)].causes.note_event(Event::of(stamp, time_ns, what));
    }

    /// Exchanges the events of two books whose accounts have been exchanged.
    pub fn swap_events(&mut self, one: usize, other: usize) {
        let since_boundary = std::mem::take(&mut self.accounts[one].causes.since_boundary);
        let since_boundary =
            std::mem::replace(&mut self.accounts[other].causes.since_boundary, since_boundary);
        self.accounts[one].causes.since_boundary = since_boundary;
    }

    /// Notes that the process became another program; `record` is its first one.
    pub fn note_exec(&mut self, record: &Record<'_>) {
        let event = Event::of(&record.stamp, record.stamp.time_ns, What::Exec);
        self.accounts.iter_mut().for_each(|account| account.causes.note_event(event));
    }
}
