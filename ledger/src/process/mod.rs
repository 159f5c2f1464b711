//! One process: the order of its records, its holdings, the samples that wait for its records, and what the program reports beside memory.

pub(crate) mod account;
mod blind;
mod books;
pub(crate) mod coverage;
mod dispatch;
mod driver_events;
mod exec;
mod oom;
mod resync;
mod samples;
mod stream;
mod trends;

use crate::Map;
use crate::base::identity::ProcessKey;
use crate::base::quota::{MemoryUse, map};
use crate::history::program_data::ProgramData;
use crate::history::trend::Growth;
use crate::oom::records::Ooms;
use crate::process::account::Account;
use crate::process::coverage::{Coverage, Facts};
use crate::process::stream::{Order, Stream};
use crate::rules::holdings::Holdings;
use crate::samples::waiting::Samples;
use gpumem_model::program_data;
use gpumem_wire::{Body, Flags, Record};
use std::mem::size_of;
use std::sync::Arc;

/// In `slots`: no record has named the device.
pub(crate) const NO_BOOK: u8 = u8::MAX;
/// The book of all devices beyond those that a process may have: as many as bits in `Holdings::settle`.
pub(crate) const BEYOND: u8 = 63;

#[derive(Debug)]
pub(crate) struct Process {
    pub key: ProcessKey,
    pub facts: Facts,
    pub coverage: Coverage,
    /// Order of its records.
    pub stream: Stream,
    /// Samples that wait for its records, or for the ledger.
    pub samples: Samples,
    /// What the program reports beside memory.
    pub program: ProgramData,
    pub ooms: Ooms,
    /// Paths of libraries, by the agent's number.
    pub modules: Map<u16, Arc<str>>,
    pub holdings: Holdings,
    /// Same index as the books of `holdings`.
    pub accounts: Vec<Account>,
    /// Points of growth of its books.
    pub growth: Growth,
    /// Device slot of the agent -> book.
    pub slots: [u8; 256],
    /// End and wait status.
    pub ended: Option<(u64, Option<u64>)>,
    /// Estimate of its memory, and the quota that it has reached.
    pub memory_use: MemoryUse,
    /// Time of the last free of an address that is not known and may be older than the agent; 0 for none.
    pub baseline_freed_ns: u64,
}

impl Process {
    pub fn new(key: ProcessKey, window_ns: u64, most_spans: usize) -> Self {
        Process {
            key,
            facts: Facts::default(),
            coverage: Coverage::default(),
            stream: Stream::default(),
            samples: Samples::default(),
            program: ProgramData::new(most_spans),
            ooms: Ooms::default(),
            modules: Map::default(),
            holdings: Holdings::new(window_ns),
            accounts: Vec::new(),
            growth: Growth::default(),
            slots: [NO_BOOK; 256],
            ended: None,
            memory_use: MemoryUse::default(),
            baseline_freed_ns: 0,
        }
    }

    /// `count` records are missing: the sums are `partial` until a resync has ended.
    pub fn lose(&mut self, count: u64) {
        if count == 0 {
            return;
        }
        self.stream.healing = false;
        self.growth.steps.lose();
        self.program.ranges.lose();
        self.holdings.lose_records(self.stream.last_seq);
        self.coverage.lose(count, self.stream.applied_ns);
        // What was lost may have happened before a reading that waits, or in it.
        self.samples.doubt();
        self.accounts.iter_mut().for_each(|account| account.causes.lose());
        self.restart_history(self.stream.applied_ns);
    }

    /// Takes a record of this process's agent.
    #[inline]
    pub fn apply(&mut self, record: &Record<'_>) {
        if let Body::Hello { instance, .. } = record.body {
            if self.begin_program(instance) {
                self.note_exec(record);
            }
            self.stream.has_watermarks = true; // the agent will send them
            self.start_history();
        }
        let shifted;
        let record = if self.stream.programs_before == 0 {
            record
        } else {
            shifted = self.shifted_ids(record);
            &shifted
        };
        let stamp = &record.stamp;
        let restated = stamp.flags.has(Flags::RESTATED);
        if stamp.seq != 0 && !restated {
            match self.stream.order(stamp.seq) {
                Order::Duplicate => {
                    self.holdings.anomalies_mut().duplicates += 1;
                    return;
                }
                Order::Next { missing: 0 } => {}
                Order::Next { missing } => self.lose(missing),
            }
            self.stream.last_seq = stamp.seq;
            self.stream.near_tag = stamp.tag;
            self.coverage.events += 1;
        }
        let entered = self.entered(record);
        if restated {
            if !self.stream.takes_restated(record) {
                return;
            }
        } else if self.stream.moves_time(stamp) {
            self.pass_time(record, entered);
        }
        // Rows that are unknown or lost may be freed.
        let is_forgiven = self.stream.is_restating()
            || self.coverage.is_state_unknown()
            || stamp.seq != 0 && stamp.seq <= self.holdings.forgiven_until();
        let anomalies = is_forgiven.then_some(*self.holdings.anomalies());
        self.book_record(record);
        if let Some(anomalies) = anomalies {
            self.holdings.anomalies_mut().forgive_since(anomalies);
        }
        // An agent that was never let in has seen nothing: its 0 is not what the process holds. Pools that the program reports itself
        // are no driver allocations.
        self.coverage.covered = self.coverage.blocked.is_none()
            || self.coverage.allocations > 0
            || self.holdings.has_driver_rows();
        if self.holdings.is_mixed() && self.stream.resync.is_none() {
            self.reach_head();
        }
        self.settle(record, entered);
    }

    /// The time of the process's records moves on with `record`, before that is booked.
    #[inline]
    fn pass_time(&mut self, record: &Record<'_>, entered: Option<(u64, i64)>) {
        let stamp = &record.stamp;
        self.stream.applied_ns = stamp.time_ns;
        if stamp.time_ns >= self.stream.look_ns {
            self.stream.look_ns = self.holdings.end_silences(stamp.time_ns);
        }
        if self.stream.applied_ns > self.samples.boundary_ns {
            self.samples.note_in_flight(record);
            self.mark_begun(self.stream.applied_ns - 1);
            if !self.stream.has_watermarks {
                self.samples.note_entered(self.slots[usize::from(stamp.device)], entered);
                self.advance(self.stream.applied_ns - 1);
            }
        }
    }

    /// Ends a record: the books that it touched settle, and samples that wait learn of the change.
    #[inline]
    fn settle(&mut self, record: &Record<'_>, entered: Option<(u64, i64)>) {
        let stamp = &record.stamp;
        let touched = self.holdings.settle(self.stream.applied_ns);
        if touched == 0 {
            return;
        }
        // A record that another thread overtook changed `tracked` at its own time.
        let is_restated = stamp.flags.has(Flags::RESTATED);
        let time_ns = if is_restated { self.stream.applied_ns } else { self.stream.time_of(stamp) };
        if self.samples.keeps_history {
            self.record_history(touched, time_ns, entered);
        }
        if !self.samples.pending.is_empty() {
            if self.stream.has_watermarks {
                self.samples.note_entered(self.slots[usize::from(stamp.device)], entered);
            }
            self.samples.note_change(touched, time_ns, &self.holdings);
        }
    }

    /// Returns the counters and ranges of the program.
    pub fn own(&self) -> program_data::ProgramData {
        self.program.view(self.stream.applied_ns, |tag| self.holdings.cells().tags.get(&tag).cloned())
    }

    /// The process is gone: nothing more will come.
    pub fn end(&mut self, time_ns: u64, status: Option<u64>) {
        self.ended.get_or_insert((time_ns, status));
        self.coverage.blind.end(time_ns);
        self.advance(u64::MAX);
        self.holdings.finish_resync(); // no more of the resync will come
        self.holdings.settle(self.stream.applied_ns);
    }

    /// Estimate of its memory.
    pub fn bytes(&self) -> usize {
        let names = map(&self.holdings.cells().tags) + map(&self.modules) + self.memory_use.names;
        let accounts: usize = self.accounts.iter().map(|account| account.bytes()).sum();
        size_of::<Process>() + names + accounts + self.program.bytes() + self.holdings.bytes()
    }
}
