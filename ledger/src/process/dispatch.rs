//! Selects the booking rule for each record of a process.

use crate::process::account::Account;
use crate::process::coverage::parse_lines;
use crate::process::{NO_BOOK, Process};
use crate::roles::state::WorkspaceSizes;
use crate::rows::row::AnomalyCounts;
use crate::rules::holdings::Holdings;
use crate::samples::pending::known_until;
use crate::untrackable::event::{Event, What};
use gpumem_model::keeper::Keeper;
use gpumem_wire::{
    Body, DestroyScope, Flags, ImportSource, MemoryKind, NONE_DEVICE, Record, Stamp, WITHHELD,
};
use std::sync::Arc;

/// Maximum number of tag paths of a process; further tags have no path, but their bytes are booked all the same.
const MAX_NAMES: usize = 262_144;

/// Maximum length of the description of a process's models, in letters.
const MAX_MODELS: usize = 4_096;

/// Maximum number of calls in flight (frees, unmaps, releases) in one process; a thread has at most one.
const MAX_IN_FLIGHT: usize = 4096;

impl Process {
    /// Books a record, unless a limit refuses it. Allocations and frees come first, because they are the most frequent records.
    #[inline]
    pub fn book_record(&mut self, record: &Record<'_>) {
        let may_be_limited = self.coverage.full.is_some() || self.holdings.in_flight.len() >= MAX_IN_FLIGHT;
        if may_be_limited && self.is_beyond_limit(record) {
            self.lose(1);
            return;
        }
        let stamp: &Stamp = &record.stamp;
        match record.body {
            Body::AllocEnd { address, bytes, pool, memory, .. } => {
                let book = self.book(stamp.device);
                self.count_allocation(stamp, bytes);
                self.note_progress(stamp);
                self.adopt_baseline(stamp, book, bytes, |holdings| holdings.is_born(address, stamp.seq));
                self.holdings.allocate(address, bytes, pool, memory, stamp, book);
            }
            Body::BlockAlloc { address, bytes, pool, use_as } => {
                let book = self.book(stamp.device);
                self.note_progress(stamp);
                self.holdings.block_alloc(address, bytes, pool, use_as, stamp, book);
                if self.holdings.pass_begins {
                    self.begin_forward_pass(book, stamp.time_ns);
                }
            }
            Body::FreeBegin { address } => {
                let found = self.holdings.found_at(address);
                self.revoke_adoption(stamp, found);
                if self.frees_baseline(|holdings| holdings.free_begin(address, stamp.seq)) {
                    self.baseline_freed_ns = stamp.time_ns;
                }
            }
            Body::FreeEnd { begin_seq, result } => self.holdings.free_end(begin_seq, result),
            Body::BlockFree { address, pool, state } => self.holdings.block_free(address, pool, state),
            Body::Import { address, bytes, source } => {
                let book = self.book(stamp.device);
                let kind = MemoryKind::Imported;
                self.note_event(stamp, What::Imported(bytes));
                if source == ImportSource::ShareableHandle {
                    self.holdings.vmm_create(address, bytes, 1, kind, stamp, book);
                } else {
                    self.holdings.allocate(address, bytes, 0, kind, stamp, book);
                }
            }
            Body::VmmCreate { handle, bytes, references, memory } => {
                let book = self.book(stamp.device);
                self.count_allocation(stamp, bytes);
                self.adopt_baseline(stamp, book, bytes, |holdings| holdings.has_backing(stamp.seq));
                self.holdings.vmm_create(handle, bytes, references, memory, stamp, book);
            }
            Body::VmmMap { address, bytes, handle } => {
                self.with_handle(|holdings| holdings.vmm_map(address, bytes, handle, stamp));
            }
            Body::VmmUnmap { address, bytes } => {
                let found = self.holdings.mapped_at(address);
                self.revoke_adoption(stamp, found);
                if self.frees_baseline(|holdings| holdings.unmap_begin(address, bytes, stamp.seq)) {
                    self.baseline_freed_ns = stamp.time_ns;
                }
            }
            Body::VmmRetain { handle, address } => {
                self.with_handle(|holdings| holdings.vmm_retain(handle, address));
            }
            Body::VmmRelease { handle } => {
                self.with_handle(|holdings| holdings.release_begin(handle, stamp.seq));
            }
            _ => self.book_pools(record),
        }
    }

    fn book_pools(&mut self, record: &Record<'_>) {
        let stamp: &Stamp = &record.stamp;
        match record.body {
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
                let is_reset = scope == DestroyScope::Device;
                self.note_event(stamp, if is_reset { What::Reset } else { What::Destroyed });
            }
            Body::ContextCreate { .. } => {
                let restated = stamp.flags.has(Flags::RESTATED);
                self.note_event(stamp, if restated { What::Existed } else { What::Created });
            }
            Body::DriverEvent { bytes, value, event } => {
                What::of(event, bytes, value).into_iter().for_each(|what| self.note_event(stamp, what));
            }
            Body::Baseline { bytes } => {
                let book = self.book(stamp.device);
                let account = &mut self.accounts[usize::from(book)];
                account.set_baseline(bytes, stamp.time_ns);
                account.causes.set_predates_rounding(None);
                self.coverage.late = true;
                self.holdings.unseen_segments = true;
            }
            _ => self.book_program_data(record),
        }
    }

    /// Queues an event that may change the untrackable bytes. (NVML may charge imported memory to the importer too.)
    fn note_event(&mut self, stamp: &Stamp, what: What) {
        if stamp.flags.has(Flags::RESTATED) && what != What::Existed {
            return; // a resync repeats the event, which happened earlier
        }
        // A module of an unknown context must be on the process's only device.
        let book = match (stamp.device, self.accounts.len()) {
            (NONE_DEVICE, 1) => 0,
            (NONE_DEVICE, _) => return,
            (slot, _) => self.book(slot),
        };
        let time_ns = self.stream.time_of(stamp);
        self.accounts[usize::from(book)].causes.note_event(Event::of(stamp, time_ns, what));
    }

    fn book_program_data(&mut self, record: &Record<'_>) {
        let stamp: &Stamp = &record.stamp;
        match record.body {
            Body::Tag { path } if self.holdings.cells.tags.len() < MAX_NAMES => {
                let old = self.holdings.cells.tags.insert(stamp.tag, path.into());
                self.memory_use.rename(path, old.as_deref());
            }
            Body::Module { path, .. } => {
                self.holdings.note_library(stamp.module, path);
                let old = self.modules.insert(stamp.module, path.into());
                self.memory_use.rename(path, old.as_deref());
            }
            Body::Stack { format, frames } => self.ooms.name_stack(stamp.stack, format, frames),
            Body::Keepers { oom_seq, keepers } => self.ooms.add_keepers(oom_seq, Keeper::parse(keepers)),
            Body::Layer { layer, state, reason } => self.program.layers.report(layer, state, reason),
            Body::Models { models } => {
                let models: String = models.chars().take(MAX_MODELS).collect();
                let claims = &mut Arc::make_mut(&mut self.facts).claims;
                match models.is_empty() {
                    true => claims.remove("models"),
                    false => claims.insert("models".to_owned(), models),
                };
            }
            Body::PhaseBegin { phase } => {
                self.holdings.begin_phase(phase, stamp.seq, stamp.time_ns);
            }
            Body::Step { number } => {
                self.ooms.step = Some(number);
                self.program.ranges.step(stamp.time_ns);
                self.begin_step(number, stamp);
            }
            Body::Epoch { number } => self.holdings.phases.epoch = number,
            Body::Marker {} => {
                let name = self.holdings.cells.tags.get(&stamp.tag);
                self.program.marks.add(stamp.time_ns, name.map(|name| &**name), false);
            }
            Body::Counter { value } => self.program.counters.set(record, value),
            Body::Scope { edge } => self.program.ranges.edge(stamp, edge),
            _ => self.book_stream_state(record),
        }
    }

    fn book_stream_state(&mut self, record: &Record<'_>) {
        let stamp: &Stamp = &record.stamp;
        match record.body {
            Body::Hello { claims, .. } => {
                let facts = Arc::make_mut(&mut self.facts);
                facts.claims = parse_lines(claims);
                let setting = facts.claims.get("cublas_workspace");
                self.holdings.workspaces = WorkspaceSizes::with_setting(setting.map(String::as_str));
                self.program.layers.clear();
                (self.stream.silent, self.stream.bye) = (false, None);
            }
            Body::Agent { result, state, detail } => {
                self.set_agent_state(state, result, detail, stamp.time_ns)
            }
            Body::AllocFailed { .. } => {
                self.coverage.failed_allocations += 1;
                self.out_of_memory(stamp, &record.body);
            }
            Body::Pressure { .. } | Body::Oom { .. } => self.out_of_memory(stamp, &record.body),
            Body::Lost { count, first_seq } => {
                let end = first_seq.saturating_add(count).saturating_sub(1);
                let missing = end.saturating_sub(self.stream.last_seq);
                if missing > 0 {
                    let withheld = if stamp.context == WITHHELD { count.min(missing) } else { 0 };
                    self.lose(missing - withheld);
                    self.withhold(withheld);
                    self.stream.last_seq = end;
                }
            }
            Body::Watermark { last_seq, .. } => {
                if last_seq > self.stream.last_seq {
                    self.lose(last_seq - self.stream.last_seq);
                    self.stream.last_seq = last_seq;
                }
                self.stream.has_watermarks = true;
                self.start_history();
                self.samples.note_in_flight(record);
                self.advance(known_until(record));
            }
            Body::ResyncBegin { after_seq, .. } => self.begin_resync(after_seq),
            Body::ResyncEnd { head_seq, rows, .. } => self.end_resync(head_seq, rows, stamp.time_ns),
            Body::Bye { reason } => {
                self.stream.bye = Some((stamp.time_ns, reason));
                self.advance(stamp.time_ns);
                self.stream.silent = true;
                self.close_where(u64::MAX, true);
            }
            // Records that only the daemon may send are ignored.
            _ => {}
        }
    }

    /// Counts memory as tracked that was allocated before the agent started. A restated row that was already known is not counted
    /// again.
    #[inline]
    fn adopt_baseline(
        &mut self,
        stamp: &Stamp,
        book: u8,
        bytes: u64,
        is_known: impl FnOnce(&mut Holdings) -> bool,
    ) {
        if stamp.flags.has(Flags::OLDER)
            && !(stamp.flags.has(Flags::RESTATED) && is_known(&mut self.holdings))
        {
            self.accounts[usize::from(book)].adopt_baseline(bytes as i64, stamp.time_ns);
        }
    }

    /// Reverses `adopt_baseline` when the agent withdraws its report of the memory, which is still allocated.
    #[inline]
    fn revoke_adoption(&mut self, stamp: &Stamp, found: Option<(u8, u64)>) {
        if let (true, Some((book, bytes))) = (stamp.flags.has(Flags::OLDER), found) {
            self.accounts[usize::from(book)].adopt_baseline(-(bytes as i64), stamp.time_ns);
        }
    }

    /// Runs `free`; returns whether it freed unknown memory that may be older than the agent. Such a free is not an anomaly:
    /// NVML's next sample shows the size of that memory.
    #[inline]
    fn frees_baseline(&mut self, free: impl FnOnce(&mut Holdings)) -> bool {
        let odd = self.holdings.anomalies.unknown_frees;
        free(&mut self.holdings);
        let is_unknown = self.holdings.anomalies.unknown_frees != odd;
        let is_older = is_unknown && self.coverage.late && self.accounts.iter().any(Account::has_older);
        if is_older {
            self.holdings.anomalies.unknown_frees = odd;
        }
        is_older
    }

    /// Runs `work`, which uses a VMM handle. With a late agent an unknown handle is not an anomaly: it may be older than the
    /// agent, even where all its bytes are tracked.
    #[inline]
    fn with_handle(&mut self, work: impl FnOnce(&mut Holdings)) {
        let AnomalyCounts { unknown_frees, unknown_handles, .. } = self.holdings.anomalies;
        work(&mut self.holdings);
        if self.coverage.late {
            let odd = self.holdings.anomalies;
            self.holdings.anomalies = AnomalyCounts { unknown_frees, unknown_handles, ..odd };
        }
    }

    #[inline]
    fn count_allocation(&mut self, stamp: &Stamp, bytes: u64) {
        if !stamp.flags.has(Flags::RESTATED) && !stamp.flags.has(Flags::OLDER) {
            self.coverage.allocations += 1;
            self.coverage.allocated_bytes = self.coverage.allocated_bytes.saturating_add(bytes);
        }
    }

    /// Whether a limit refuses the record because it would increase the process's memory use.
    fn is_beyond_limit(&mut self, record: &Record<'_>) -> bool {
        let is_beyond = match record.body {
            Body::FreeBegin { .. } | Body::VmmUnmap { .. } | Body::VmmRelease { .. } => {
                self.holdings.in_flight.len() >= MAX_IN_FLIGHT
            }
            Body::AllocEnd { .. }
            | Body::BlockAlloc { .. }
            | Body::Import { .. }
            | Body::VmmCreate { .. }
            | Body::VmmMap { .. }
            | Body::SegmentAdd { .. }
            | Body::PoolCreate { .. }
            | Body::PoolState { .. }
            | Body::Retag { .. }
            | Body::Tag { .. }
            | Body::Module { .. } => self.coverage.full.is_some(),
            Body::ContextCreate { .. }
            | Body::ContextDestroy { .. }
            | Body::DriverEvent { .. }
            | Body::Baseline { .. } => {
                self.coverage.full.is_some() && self.slots[usize::from(record.stamp.device)] == NO_BOOK
            }
            _ => false,
        };
        self.memory_use.refused += u64::from(is_beyond && self.coverage.full.is_some());
        is_beyond
    }
}
