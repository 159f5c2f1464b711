//! One process: the order of its records, the memory that it holds, NVML samples that wait for its records, and data that the
//! program reports.

pub(crate) mod account;
mod blind;
mod books;
pub(crate) mod coverage;
mod dispatch;
mod exec;
mod oom;
mod resync;
mod samples;
mod stream;
mod trends;
pub(crate) mod view;

use crate::Map;
use crate::base::identity::ProcessKey;
use crate::base::quota::{MemoryUse, map};
use crate::history::program_data::ProgramData;
use crate::history::trend::Trends;
use crate::oom::records::Ooms;
use crate::process::account::Account;
use crate::process::coverage::{Coverage, Facts};
use crate::process::stream::Stream;
use crate::process::view::{LastView, ProcessView};
use crate::rows::row::AnomalyCounts;
use crate::rules::holdings::Holdings;
use crate::samples::pending::Samples;
use gpumem_wire::{Body, Flags, Record};
use std::cell::RefCell;
use std::mem::size_of;
use std::sync::Arc;

/// Value in [`Process::slots`] of a slot (number of a device in the agent's records) that no record has used yet.
pub(crate) const NO_BOOK: u8 = u8::MAX;
/// Index of the book for all devices beyond the maximum number. `Holdings::settle` has one bit for each of 64 books.
pub(crate) const BEYOND: u8 = 63;

#[derive(Debug)]
pub(crate) struct Process {
    pub key: ProcessKey,
    pub facts: Arc<Facts>,
    pub coverage: Coverage,
    pub stream: Stream,
    pub samples: Samples,
    pub program: ProgramData,
    pub ooms: Ooms,
    /// Paths of libraries, by the id that the agent assigned.
    pub modules: Map<u16, Arc<str>>,
    pub holdings: Holdings,
    /// One account for each of `holdings.books`.
    pub accounts: Vec<Account>,
    pub growth: Trends,
    /// Index in `holdings.books` for each device slot (number in records) of the agent.
    pub slots: [u8; 256],
    /// Time of the process's end (ns), and its wait status if known.
    pub ended: Option<(u64, Option<u64>)>,
    pub memory_use: MemoryUse,
    /// Time of the last free of an unknown address that may be older than the agent; 0 for none.
    pub baseline_freed_ns: u64,
    pub view: RefCell<LastView>,
    /// View before `view`, if that was only updated. The next update takes its memory: no snapshot has it any more by then.
    pub spare_view: RefCell<Option<Arc<ProcessView>>>,
}

impl Process {
    pub fn new(key: ProcessKey, window_ns: u64, max_spans: usize) -> Self {
        Process {
            key,
            facts: Arc::default(),
            coverage: Coverage::default(),
            stream: Stream::default(),
            samples: Samples::default(),
            program: ProgramData::new(max_spans),
            ooms: Ooms::default(),
            modules: Map::default(),
            holdings: Holdings::new(window_ns),
            accounts: Vec::new(),
            growth: Trends::default(),
            slots: [NO_BOOK; 256],
            ended: None,
            memory_use: MemoryUse::default(),
            baseline_freed_ns: 0,
            view: RefCell::default(),
            spare_view: RefCell::default(),
        }
    }

    /// Counts `count` missing records: the sums are `partial` until a resync (the agent restates its live rows) has completed.
    pub fn lose(&mut self, count: u64) {
        if count == 0 {
            return;
        }
        self.stream.healing = false;
        self.growth.steps.lose();
        self.program.ranges.lose();
        self.holdings.lose_records(self.stream.last_seq);
        self.coverage.lose(count);
        // Lost records may lie before or within an NVML reading that waits.
        self.samples.mark_doubtful();
        self.accounts.iter_mut().for_each(|account| account.causes.lose());
        self.restart_history(self.stream.applied_ns);
    }

    #[inline]
    pub fn apply(&mut self, record: &Record<'_>) {
        if let Body::Hello { instance, .. } = record.body {
            self.begin_program(instance, record);
            self.stream.has_watermarks = true; // every agent sends them
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
            let Some(missing) = self.stream.missing_before(stamp.seq) else {
                self.holdings.anomalies.duplicates += 1;
                return;
            };
            if missing > 0 {
                self.lose(missing);
            }
            self.stream.last_seq = stamp.seq;
            self.stream.near_tag = stamp.tag;
            self.coverage.events += 1;
        }
        let entered = self.entered(record);
        if restated {
            if !self.stream.count_restated(record) {
                return;
            }
        } else if self.stream.moves_time(stamp) {
            self.pass_time(record, entered);
        }
        // Anomalies that missing rows explain (such as a free of an unknown row) are not counted while rows may be missing.
        let is_forgiven = self.stream.is_restating()
            || self.coverage.partial_state
            || stamp.seq != 0 && stamp.seq <= self.holdings.forgiven_until;
        let anomalies = is_forgiven.then_some(self.holdings.anomalies);
        // If another thread's record overtook this one, `tracked` still changes at this record's own time.
        self.holdings.now_ns = if restated { self.stream.applied_ns } else { self.stream.time_of(stamp) };
        self.book_record(record);
        if let Some(anomalies) = anomalies {
            self.holdings.anomalies.reset_explained(anomalies);
        }
        // An agent that could not use CUPTI has 0 bytes, which is not the process's true amount. Pools that the program itself
        // reports are not driver allocations.
        self.coverage.covered = self.coverage.blocked.is_none()
            || self.coverage.allocations > 0
            || self.holdings.has_driver_rows();
        if self.holdings.mixed && self.stream.resync.is_none() {
            self.reach_head();
        }
        self.settle(record, entered);
    }

    /// Advances the time of the process's records to that of `record`, before it is booked.
    #[inline]
    fn pass_time(&mut self, record: &Record<'_>, entered: Option<(u64, i64)>) {
        let stamp = &record.stamp;
        self.stream.applied_ns = stamp.time_ns;
        if let Some(ring) = &mut self.holdings.block_ring {
            ring.now_ns = stamp.time_ns;
        }
        if stamp.time_ns >= self.stream.next_silence_check_ns {
            self.stream.next_silence_check_ns = self.holdings.end_silences(stamp.time_ns);
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

    /// Finishes a record: records peaks in the books that it touched, and adds the change to pending samples.
    #[inline]
    fn settle(&mut self, record: &Record<'_>, entered: Option<(u64, i64)>) {
        let stamp = &record.stamp;
        let touched = self.holdings.settle(self.stream.booked_ns());
        if touched == 0 {
            return;
        }
        let time_ns = self.holdings.now_ns;
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

    pub fn coverage(&self) -> Coverage {
        let mut coverage = self.coverage.clone();
        if let Some(program) = coverage.programs.last_mut() {
            program.heard = self.stream.last_seq;
        }
        let blocked = coverage.blocked.clone();
        coverage.blocked_code = blocked.as_ref().map(|blocked| blocked.result);
        coverage.blocked_by = blocked.map(|blocked| blocked.by);
        coverage.odd = self.odd().total();
        coverage.layers = self.program.layers.view();
        (coverage.marks, coverage.marks_dropped) = (self.program.marks.view(), self.program.marks.dropped);
        coverage.ooms_dropped = self.ooms.dropped;
        coverage
    }

    pub fn odd(&self) -> AnomalyCounts {
        let overflowed = self.holdings.cells.overflowed;
        AnomalyCounts { overflowed, ..self.holdings.anomalies }
    }

    /// Handles the end of the process; no further records follow.
    pub fn end(&mut self, time_ns: u64, status: Option<u64>) {
        self.ended.get_or_insert((time_ns, status));
        self.coverage.end_blind(time_ns);
        self.advance(u64::MAX);
        self.holdings.finish_resync(); // the rest of the resync will not come
        self.holdings.settle(self.stream.booked_ns());
    }

    pub fn bytes(&self) -> usize {
        let names = map(&self.holdings.cells.tags) + map(&self.modules) + self.memory_use.names;
        let accounts: usize = self.accounts.iter().map(|account| account.bytes()).sum();
        size_of::<Process>() + names + accounts + self.program.bytes() + self.holdings.bytes()
    }
}
