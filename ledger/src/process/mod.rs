//! One process: its names, the order of its records and what was lost of them, its holdings, and the
//! samples that wait for its records.

pub(crate) mod account;
mod blind;
mod books;
pub(crate) mod coverage;
mod driver_events;
mod exec;
mod oom;
mod quota;
mod resync;
mod samples;
mod stream;
mod trends;

use crate::Map;
use crate::base::identity::ProcessKey;
use crate::base::quota::Load;
use crate::history::counters::Counters;
use crate::history::layers::Layers;
use crate::history::marks::{MarkView, Marks};
use crate::history::ranges::{OwnView, Ranges};
use crate::history::trend::{StepCount, Trend};
use crate::oom::records::Ooms;
use crate::process::account::Account;
use crate::process::coverage::{Coverage, Facts, MOST_LOST, Partial, parse_lines};
use crate::process::stream::Resync;
use crate::rows::row::Oddities;
use crate::rules::holdings::Holdings;
use crate::samples::pending::{ClosedSample, Pending, known_until};
use gpumem_wire::{Body, ByeReason, Flags, ImportSource, MemoryKind, Record, Stamp, WITHHELD};
use std::sync::Arc;

/// In `slots`: no record has spoken of the device.
pub(crate) const NO_BOOK: u8 = u8::MAX;
/// The book of all devices beyond those that a process may have: as many as bits in `Holdings::settle`.
pub(crate) const BEYOND: u8 = 63;
/// Names a process may introduce; more stay numbers. Rows do not depend on them.
const MAX_NAMES: usize = 262_144;

#[derive(Debug)]
pub(crate) struct Process {
    pub key: ProcessKey,
    pub facts: Facts,
    pub coverage: Coverage,
    /// When something was freed that nobody knew and that may be older than the agent; 0 for never.
    pub older_freed_ns: u64,
    pub layers: Layers,
    pub marks: Marks,
    pub counters: Counters,
    pub ranges: Ranges,
    pub ooms: Ooms,
    pub modules: Map<u16, Arc<str>>,
    pub holdings: Holdings,
    /// Same index as `holdings.books`.
    pub accounts: Vec<Account>,
    /// Same index; grows when there is something to look at.
    pub trends: Vec<Trend>,
    pub steps: StepCount,
    /// Device slot of the agent -> book.
    pub slots: [u8; 256],
    pub ended: Option<(u64, Option<u64>)>,
    pub last_seq: u64,
    /// Latest time of a record.
    pub applied_ns: u64,
    /// When books are looked at next for silences that are over.
    look_ns: u64,
    /// All records up to this time have been applied.
    pub done_ns: u64,
    pub pending: Vec<Pending>,
    /// Earliest time at which a pending sample wants to be looked at.
    pub boundary_ns: u64,
    /// The agent says watermarks. Samples are then closed by them alone: times of records of several threads are
    /// not quite in the order of their seqs.
    pub has_watermarks: bool,
    /// Books keep their last moments: a living agent speaks, and readings may be heard of late.
    pub keeps_trails: bool,
    /// Between ResyncBegin and ResyncEnd.
    pub resync: Option<Resync>,
    /// When the last resync that healed a loss ended: the state is not known of any time before, whatever is heard of it later.
    pub known_from_ns: u64,
    /// A resync is under way or ended well, and nothing was lost since it began.
    pub healing: bool,
    /// How many programs have been before the one that speaks.
    pub image: u16,
    /// What it takes of the ledger's memory.
    pub load: Load,
    /// Of what the agent said about itself last.
    pub state_ns: u64,
    /// It has seen what the program does, at some time.
    pub is_watched_over: bool,
    /// The agent said good-bye: nothing more will come, until it says hello again.
    pub silent: bool,
    /// When its agent said good-bye, and why.
    pub bye: Option<(u64, ByeReason)>,
    pub closed: Vec<(u8, ClosedSample)>,
    /// The ledger looks after its samples that wait.
    pub is_watched: bool,
    /// Tag of the latest ordered record.
    pub near_tag: u32,
}

impl Process {
    pub fn new(key: ProcessKey, window_ns: u64, most_spans: usize) -> Self {
        Process {
            key,
            facts: Facts::default(),
            coverage: Coverage::default(),
            older_freed_ns: 0,
            layers: Layers::default(),
            marks: Marks::default(),
            counters: Counters::default(),
            ranges: Ranges::new(most_spans),
            ooms: Ooms::default(),
            modules: Map::default(),
            holdings: Holdings::new(window_ns),
            accounts: Vec::new(),
            trends: Vec::new(),
            steps: StepCount::default(),
            slots: [NO_BOOK; 256],
            ended: None,
            last_seq: 0,
            applied_ns: 0,
            look_ns: 0,
            done_ns: 0,
            pending: Vec::new(),
            boundary_ns: u64::MAX,
            has_watermarks: false,
            keeps_trails: false,
            resync: None,
            known_from_ns: 0,
            healing: false,
            image: 0,
            load: Load::default(),
            state_ns: 0,
            is_watched_over: false,
            silent: false,
            bye: None,
            closed: Vec::new(),
            is_watched: false,
            near_tag: 0,
        }
    }

    pub fn lose(&mut self, count: u64) {
        if count == 0 {
            return;
        }
        self.healing = false;
        self.steps.lose();
        self.ranges.lose();
        self.holdings.lose_phases();
        self.holdings.unseen_segments = true;
        self.coverage.lost = self.coverage.lost.saturating_add(count).min(MOST_LOST);
        if self.coverage.events == 0 {
            self.coverage.before = self.coverage.before.saturating_add(count);
        }
        self.holdings.doubtful_before = Some(self.last_seq);
        let since_ns = self.coverage.partial.map_or(self.applied_ns, |partial| partial.since_ns);
        self.coverage.partial = Some(Partial { since_ns, state: true });
        // What was lost may have happened before a reading that waits, or in it.
        self.pending.iter_mut().for_each(Pending::doubt);
        self.accounts.iter_mut().for_each(|account| account.causes.lose());
        self.restart_trails(self.applied_ns);
    }

    /// Takes a record of this process's agent.
    #[inline]
    pub fn apply(&mut self, record: &Record<'_>) {
        if let Body::Hello { instance, .. } = record.body {
            if self.enter_image(instance) {
                self.hear_exec(record);
            }
            self.has_watermarks = true; // it will say them
            self.keep_trails();
        }
        let shifted;
        let record = if self.image == 0 {
            record
        } else {
            shifted = self.in_image(record);
            &shifted
        };
        let stamp = &record.stamp;
        let restated = stamp.flags.has(Flags::RESTATED);
        if stamp.seq != 0 && !restated {
            if stamp.seq <= self.last_seq {
                self.holdings.odd.duplicates += 1;
                return;
            }
            if stamp.seq != self.last_seq + 1 {
                self.lose(stamp.seq - self.last_seq - 1);
            }
            self.last_seq = stamp.seq;
            self.near_tag = stamp.tag;
            self.coverage.events += 1;
        }
        let entered = self.entered(record);
        if restated {
            let is_name = matches!(record.body, Body::Tag { .. } | Body::Module { .. } | Body::Stack { .. });
            if let Some(resync) = &mut self.resync {
                resync.rows += u64::from(!is_name);
                if resync.confirms && !is_name && !matches!(record.body, Body::Device { .. }) {
                    return;
                }
                let is_pool = matches!(record.body, Body::PoolCreate { .. } | Body::PoolState { .. });
                if stamp.seq > resync.after_seq && !is_pool {
                    return; // born while the table was read: the ring brings it, in its place
                }
            }
        } else if stamp.time_ns > self.applied_ns && (stamp.seq != 0 || !self.has_watermarks) {
            // (What the agent says of itself has its sender's time; the ring may be behind that, and watermarks say so.)
            self.applied_ns = stamp.time_ns;
            if stamp.time_ns >= self.look_ns {
                self.look_ns = self.holdings.end_silences(stamp.time_ns);
            }
            if self.applied_ns > self.boundary_ns {
                self.note_in_flight(record);
                self.mark_begun(self.applied_ns - 1);
                if !self.has_watermarks {
                    self.note_entered(stamp.device, entered);
                    self.advance(self.applied_ns - 1);
                }
            }
        }
        // What is not known yet, or was lost, may be freed.
        let in_doubt = self.resync.is_some_and(|resync| !resync.confirms)
            || self.coverage.partial.is_some_and(|partial| partial.state);
        let forgiven = in_doubt || stamp.seq != 0 && stamp.seq <= self.holdings.forgiven_until;
        let odd = forgiven.then_some(self.holdings.odd);
        self.book_record(record);
        if let Some(odd) = odd {
            let Oddities { impossible, devices_beyond, .. } = self.holdings.odd;
            self.holdings.odd = Oddities { impossible, devices_beyond, ..odd };
        }
        // An agent that was never let in has seen nothing: its 0 is not what the process holds. What the program says
        // of its own pools is no driver allocation.
        let held = &self.holdings;
        let has_driver_rows =
            !held.allocations.is_empty() || !held.backings.is_empty() || !held.mappings.is_empty();
        self.coverage.covered =
            self.coverage.blocked.is_none() || self.coverage.allocations > 0 || has_driver_rows;
        if self.holdings.mixed && self.resync.is_none() {
            self.reach_head();
        }
        let touched = self.holdings.settle(self.applied_ns);
        // A record that another thread overtook changed `tracked` at its own time.
        let time_ns = if restated || stamp.time_ns == 0 { self.applied_ns } else { stamp.time_ns };
        if touched != 0 && self.keeps_trails {
            self.leave_trail(touched, time_ns, entered);
        }
        if touched != 0 && !self.pending.is_empty() {
            if self.has_watermarks {
                self.note_entered(stamp.device, entered);
            }
            for pending in &mut self.pending {
                if touched & 1 << pending.book != 0 {
                    let index = usize::from(pending.book);
                    let (tracked, flying) =
                        (self.holdings.books[index].tracked, self.holdings.in_flight_bytes[index]);
                    pending.change(time_ns, tracked, flying);
                }
            }
        }
    }

    #[inline]
    fn book_record(&mut self, record: &Record<'_>) {
        let stamp: &Stamp = &record.stamp;
        if self.is_beyond_limit(record) {
            self.lose(1);
            return;
        }
        match record.body {
            Body::AllocEnd { address, bytes, pool, memory, .. } => {
                let book = self.book(stamp.device);
                self.count_allocation(stamp, bytes);
                self.note_going_on(stamp);
                self.take_over(stamp, book, bytes, |holdings| holdings.is_born(address, stamp.seq));
                self.holdings.allocate(address, bytes, pool, memory, stamp, book);
            }
            Body::BlockAlloc { address, bytes, pool, use_as } => {
                let book = self.book(stamp.device);
                self.note_going_on(stamp);
                self.holdings.block_alloc(address, bytes, pool, use_as, stamp, book);
            }
            Body::FreeBegin { address } => {
                let found = self.holdings.found_at(address);
                self.give_back(stamp, found);
                if self.frees_older(|holdings| holdings.free_begin(address, stamp.seq)) {
                    self.older_freed_ns = stamp.time_ns;
                }
            }
            Body::FreeEnd { begin_seq, result } => self.holdings.free_end(begin_seq, result),
            Body::BlockFree { address, pool, state } => self.holdings.block_free(address, pool, state),
            Body::Import { address, bytes, source } => {
                let book = self.book(stamp.device);
                let kind = MemoryKind::Imported;
                self.hear_import(stamp, bytes);
                if source == ImportSource::ShareableHandle {
                    self.holdings.vmm_create(address, bytes, 1, kind, stamp, book);
                } else {
                    self.holdings.allocate(address, bytes, 0, kind, stamp, book);
                }
            }
            Body::VmmCreate { handle, bytes, references, memory } => {
                let book = self.book(stamp.device);
                self.count_allocation(stamp, bytes);
                self.take_over(stamp, book, bytes, |holdings| holdings.backings.contains_key(&stamp.seq));
                self.holdings.vmm_create(handle, bytes, references, memory, stamp, book);
            }
            Body::VmmMap { address, bytes, handle } => {
                self.with_handle(|holdings| holdings.vmm_map(address, bytes, handle, stamp));
            }
            Body::VmmUnmap { address, bytes } => {
                let found = self.holdings.mapped_at(address);
                self.give_back(stamp, found);
                if self.frees_older(|holdings| holdings.unmap_begin(address, bytes, stamp.seq)) {
                    self.older_freed_ns = stamp.time_ns;
                }
            }
            Body::VmmRetain { handle, address } => {
                self.with_handle(|holdings| holdings.vmm_retain(handle, address));
            }
            Body::VmmRelease { handle } => {
                self.with_handle(|holdings| holdings.release_begin(handle, stamp.seq));
            }
            Body::PoolCreate { pool, parent, reports_blocks, owner } => {
                let book = self.book(stamp.device);
                self.holdings.pool_create(pool, parent, reports_blocks != 0, owner, stamp, book);
            }
            Body::PoolState { pool, reserved_bytes, used_bytes, .. } => {
                let book = self.book(stamp.device);
                self.holdings.pool_state(pool, reserved_bytes, used_bytes, book);
            }
            Body::PoolDestroy { pool } => self.holdings.pool_destroy(pool),
            Body::PoolCheck { pool, total_bytes } => self.holdings.pool_check(pool, total_bytes),
            Body::SegmentAdd { address, bytes, pool } => {
                let book = self.book(stamp.device);
                self.holdings.add_segment(address, bytes, pool, stamp, book);
            }
            Body::SegmentRemove { address, bytes, pool } => {
                self.holdings.remove_segment(address, bytes, pool);
            }
            Body::Retag { address, block_seq, pool, use_as } => {
                self.holdings.retag(address, pool, block_seq, stamp, use_as);
            }
            Body::ContextDestroy { scope } => {
                let book = self.book(stamp.device);
                self.holdings.destroy_context(stamp.context, scope, book);
                self.hear_destroyed(stamp, scope);
            }
            Body::ContextCreate { .. } => self.hear_context(stamp),
            Body::DriverEvent { bytes, value, event } => self.hear_driver(stamp, event, bytes, value),
            Body::Baseline { bytes } => {
                let book = self.book(stamp.device);
                let account = &mut self.accounts[usize::from(book)];
                account.baseline(bytes, stamp.time_ns);
                account.causes.round_from(None);
                self.coverage.late = true;
                self.holdings.unseen_segments = true;
            }
            Body::Tag { path } if self.holdings.cells.tags.len() < MAX_NAMES => {
                let old = self.holdings.cells.tags.insert(stamp.tag, path.into());
                self.load.rename(path, old.as_deref());
            }
            Body::Module { path, .. } => {
                self.holdings.note_library(stamp.module, path);
                let old = self.modules.insert(stamp.module, path.into());
                self.load.rename(path, old.as_deref());
            }
            Body::Hello { claims, .. } => {
                self.facts.claims = parse_lines(claims);
                self.layers.forget();
                (self.silent, self.bye) = (false, None);
            }
            Body::Agent { result, state, detail } => self.set_state(state, result, detail, stamp.time_ns),
            Body::Layer { layer, state, reason } => self.layers.say(layer, state, reason),
            Body::AllocFailed { .. } => {
                self.coverage.failed_allocations += 1;
                self.run_out(stamp, &record.body);
            }
            Body::Pressure { .. } | Body::Oom { .. } => self.run_out(stamp, &record.body),
            Body::Stack { format, frames } => self.ooms.name_stack(stamp.stack, format, frames),
            Body::PhaseBegin { phase } => {
                self.holdings.begin_phase(phase, stamp.seq, stamp.time_ns);
            }
            Body::Step { number } => {
                self.ooms.step = Some(number);
                self.ranges.step(stamp.time_ns);
                self.begin_step(number, stamp);
            }
            Body::Lost { count, first_seq } => {
                let end = first_seq.saturating_add(count).saturating_sub(1);
                if end > self.last_seq {
                    let missing = end - self.last_seq;
                    let withheld = if stamp.context == WITHHELD { count.min(missing) } else { 0 };
                    self.lose(missing - withheld);
                    self.withhold(withheld);
                    self.last_seq = end;
                }
            }
            Body::Watermark { last_seq, .. } => {
                if last_seq > self.last_seq {
                    self.lose(last_seq - self.last_seq);
                    self.last_seq = last_seq;
                }
                self.has_watermarks = true;
                self.keep_trails();
                self.note_in_flight(record);
                self.advance(known_until(record));
            }
            Body::ResyncBegin { after_seq, .. } => self.begin_resync(after_seq),
            Body::ResyncEnd { head_seq, rows, .. } => self.end_resync(head_seq, rows, stamp.time_ns),
            Body::Bye { reason } => {
                self.bye = Some((stamp.time_ns, reason));
                self.advance(stamp.time_ns);
                self.silent = true;
                self.close_where(u64::MAX, true);
            }
            Body::Marker {} => {
                let name = self.holdings.cells.tags.get(&stamp.tag).cloned();
                self.marks.add(MarkView { time_ns: stamp.time_ns, name, from_outside: false });
            }
            Body::Epoch { number } => self.holdings.phases.epoch = number,
            // Counters and scopes do not move a sum.
            Body::Counter { value } => self.counters.set(record, value),
            Body::Scope { edge } => self.ranges.edge(stamp, edge),
            // The host's own records and commands are not for a process to say.
            _ => {}
        }
    }

    /// Memory that is older than the agent is tracked from now on, unless it is known: then a row is said again, and else it was lost.
    #[inline]
    fn take_over(
        &mut self,
        stamp: &Stamp,
        book: u8,
        bytes: u64,
        is_known: impl FnOnce(&mut Holdings) -> bool,
    ) {
        if stamp.flags.has(Flags::OLDER)
            && !(stamp.flags.has(Flags::RESTATED) && is_known(&mut self.holdings))
        {
            self.accounts[usize::from(book)].take_over(bytes as i64, stamp.time_ns);
        }
    }

    /// It is not, after all.
    #[inline]
    fn give_back(&mut self, stamp: &Stamp, found: Option<(u8, u64)>) {
        if let (true, Some((book, bytes))) = (stamp.flags.has(Flags::OLDER), found) {
            self.accounts[usize::from(book)].take_over(-(bytes as i64), stamp.time_ns);
        }
    }

    /// Whether what is freed here is nothing that is known, but may be older than the agent: then it is not odd, and how large it was NVML
    /// will say.
    #[inline]
    fn frees_older(&mut self, free: impl FnOnce(&mut Holdings)) -> bool {
        let odd = self.holdings.odd.unknown_frees;
        free(&mut self.holdings);
        let is_unknown = self.holdings.odd.unknown_frees != odd;
        let is_older = is_unknown && self.coverage.late && self.accounts.iter().any(Account::has_older);
        if is_older {
            self.holdings.odd.unknown_frees = odd;
        }
        is_older
    }

    /// Handles may be older than a late agent even where all bytes are tracked: of what was taken over nobody knows the handle. One that is
    /// not known is not odd then.
    #[inline]
    fn with_handle(&mut self, work: impl FnOnce(&mut Holdings)) {
        let Oddities { unknown_frees, unknown_handles, .. } = self.holdings.odd;
        work(&mut self.holdings);
        if self.coverage.late {
            self.holdings.odd = Oddities { unknown_frees, unknown_handles, ..self.holdings.odd };
        }
    }

    #[inline]
    fn count_allocation(&mut self, stamp: &Stamp, bytes: u64) {
        if !stamp.flags.has(Flags::RESTATED) && !stamp.flags.has(Flags::OLDER) {
            self.coverage.allocations += 1;
            self.coverage.allocated_bytes = self.coverage.allocated_bytes.saturating_add(bytes);
        }
    }

    /// What the program says of itself beside memory.
    pub fn own(&self) -> OwnView {
        let name = |tag: u32| self.holdings.cells.tags.get(&tag).cloned();
        let counters = self.counters.view(self.applied_ns, name);
        let mut view = OwnView { counters, counters_dropped: self.counters.dropped, ..OwnView::default() };
        self.ranges.view(name, &mut view);
        view
    }

    /// The process is gone: nothing more will come.
    pub fn end(&mut self, time_ns: u64, status: Option<u64>) {
        self.ended.get_or_insert((time_ns, status));
        self.coverage.blind.end(time_ns);
        self.advance(u64::MAX);
        self.reach_end(); // no more of the resync will come
        self.holdings.settle(self.applied_ns);
    }
}
