//! Makes out-of-memory (OOM) entries from a process's records.

use crate::oom::records::{OomEntry, RequestPlace, SAME_NS};
use crate::process::Process;
use gpumem_model::names::Named;
use gpumem_model::oom::{Fate, Oom, OomKind};
use gpumem_wire::{Body, Flags, Layer, LayerState, OomOutcome, PHASE_FLAG, Phase, Stamp};

/// CUDA_ERROR_OUT_OF_MEMORY.
const OUT_OF_MEMORY: u16 = 2;

/// Common form of the three records that report a failed request for memory.
#[derive(Debug, Clone)]
struct OomReport {
    /// Whether a driver call failed; otherwise a framework reports its error.
    is_refusal: bool,
    /// Training phase of the thread, if the record contains it.
    phase: Option<Phase>,
    /// The OOM as runs store it, with the values of the record.
    record: Oom,
}

impl OomReport {
    fn from_record(body: &Body<'_>) -> Option<Self> {
        let (is_refusal, record) = match *body {
            Body::AllocFailed { bytes, device_free_bytes, result: OUT_OF_MEMORY, .. } => {
                let (device_free_bytes, result) = (device_free_bytes.0, OUT_OF_MEMORY);
                (true, Oom { asked_bytes: bytes, device_free_bytes, result, ..Oom::default() })
            }
            Body::Pressure { bytes, device_free_bytes } => {
                let device_free_bytes = device_free_bytes.0;
                (true, Oom { asked_bytes: bytes, device_free_bytes, ..Oom::default() })
            }
            Body::Oom { bytes, pool_used_bytes, pool_reserved_bytes, outcome, result } => {
                let (pool_used_bytes, pool_reserved_bytes) = (pool_used_bytes.0, pool_reserved_bytes.0);
                let said = match outcome {
                    OomOutcome::Fatal => Some("fatal".to_owned()),
                    OomOutcome::Survived => Some("survived".to_owned()),
                    OomOutcome::Unknown => None,
                };
                let asked_bytes = bytes;
                let known = Oom { asked_bytes, pool_used_bytes, pool_reserved_bytes, ..Oom::default() };
                (false, Oom { said, result, ..known })
            }
            _ => return None,
        };
        Some(OomReport { is_refusal, phase: None, record })
    }
}

impl Process {
    /// Records that a thread got memory, so that it has survived its last failed request.
    #[inline(always)]
    pub fn note_progress(&mut self, stamp: &Stamp) {
        if self.ooms.is_watched && !stamp.flags.has(Flags::RESTATED) {
            self.ooms.note_progress(stamp);
        }
    }

    #[cold]
    pub fn out_of_memory(&mut self, stamp: &Stamp, body: &Body<'_>) {
        let Some(mut report) = OomReport::from_record(body) else { return };
        let book = self.book(stamp.device);
        report.phase = self.phase_of_request(book, stamp, body);
        if matches!(body, Body::Oom { .. }) {
            self.holdings.note_failure(book, stamp.seq);
        }
        let time_ns = self.stream.time_of(stamp);
        let place = RequestPlace { book, thread: stamp.thread, time_ns };
        if report.is_refusal {
            self.note_refusal(&report, stamp, place);
        } else if report.record.said.is_none() && report.record.result == OUT_OF_MEMORY {
            // The record does not contain the outcome (cudaMallocAsync); later records show it.
            if self.ooms.pressure(place).is_none() {
                self.note_refusal(&OomReport { is_refusal: true, ..report }, stamp, place);
            }
            if let Some(at) = self.ooms.pressure(place) {
                let entry = &mut self.ooms.entries[at].record;
                entry.is_unheard = true;
                entry.phase =
                    report.phase.map_or(entry.phase.take(), |phase| phase.name().map(str::to_owned));
            }
        } else {
            self.framework_failed(&report, stamp, place);
        }
    }

    /// Adds a failed driver call to the thread's pressure entry, or adds a new entry. A call that no record of a framework follows
    /// was made outside of all frameworks, so none reports its outcome.
    fn note_refusal(&mut self, report: &OomReport, stamp: &Stamp, place: RequestPlace) {
        let allocations = self.coverage.allocations;
        if let Some(at) = self.ooms.pressure(place) {
            let OomEntry { record: entry, new_refusals, at_allocations, .. } = &mut self.ooms.entries[at];
            entry.last_ns = place.time_ns;
            entry.device_free_bytes = report.record.device_free_bytes.or(entry.device_free_bytes);
            // A framework's `Pressure` record follows the failed call: one refusal is reported twice.
            if report.record.result == 0 {
                entry.is_unheard = !self.program.layers.is(Layer::OutOfMemory, LayerState::Active);
                let phase = report.phase;
                let phase = phase.unwrap_or_else(|| self.holdings.phase_of_request(place.book, place.thread));
                entry.phase = phase.name().map(str::to_owned);
                return;
            }
            (entry.is_unheard, entry.phase, entry.fate) = (true, None, Fate::Open);
            self.ooms.is_watched = true;
            // If the process got memory since, this refusal begins another OOM.
            if *at_allocations != allocations || *new_refusals == 0 {
                entry.count += 1;
                (*new_refusals, *at_allocations, entry.asked_bytes) = (0, allocations, 0);
            }
            *new_refusals += 1;
            entry.refusals += 1;
            entry.asked_bytes = entry.asked_bytes.max(report.record.asked_bytes);
            entry.driver_asked_bytes = Some(entry.asked_bytes);
            return;
        }
        if let (false, Some(newest)) = (self.may_copy_cells(place.time_ns), self.ooms.newest(place)) {
            newest.refusals += 1;
            newest.last_ns = place.time_ns;
            return;
        }
        self.add_entry(OomKind::Pressure, report, stamp, place);
    }

    /// Handles a framework's report of an out-of-memory error. The report replaces the pressure entry of the driver calls that
    /// failed before.
    fn framework_failed(&mut self, report: &OomReport, stamp: &Stamp, place: RequestPlace) {
        let pressure = if report.record.result == 0 { None } else { self.ooms.pressure(place) };
        let mut refusals = (0, None, None);
        let mut had_amounts = false;
        if let Some(at) = pressure {
            let entry = &mut self.ooms.entries[at];
            let record = &mut entry.record;
            refusals = (entry.new_refusals, record.driver_asked_bytes, record.device_free_bytes);
            record.count -= 1;
            record.refusals = record.refusals.saturating_sub(entry.new_refusals);
            entry.new_refusals = 0;
            if record.count == 0 {
                had_amounts = !self.ooms.entries.remove(at).record.amounts.is_empty();
            }
        }
        // The bytes by cell that were copied at a refused driver call may belong to another request, so they are copied again.
        if had_amounts || self.ooms.is_copy_of_refusal {
            self.ooms.next_copy_at = 0;
        }
        let kind = if report.record.result == 0 { OomKind::Pool } else { OomKind::Device };
        let may_copy_cells = self.may_copy_cells(place.time_ns);
        let keepers = self.ooms.early_keepers(stamp.seq);
        let again = self.ooms.entries.iter_mut().rev().find(|entry| {
            let is_same = entry.record.asked_bytes == report.record.asked_bytes
                && entry.stamp.tag == stamp.tag
                && report.phase.is_none_or(|phase| phase.name() == entry.record.phase.as_deref());
            entry.record.kind == kind && entry.is_near(place) && (is_same || !may_copy_cells)
        });
        // The same request again, or one so soon that the cells may not be copied again.
        if let Some(OomEntry { record: entry, at_allocations, failed_seq, .. }) = again {
            *failed_seq = stamp.seq;
            entry.keepers = keepers.unwrap_or_else(|| std::mem::take(&mut entry.keepers));
            *at_allocations = self.coverage.allocations;
            entry.count += 1;
            entry.last_ns = place.time_ns;
            entry.refusals += refusals.0;
            entry.fate = Fate::Open;
            self.ooms.is_watched = true;
            return;
        }
        self.add_entry(kind, report, stamp, place);
        if let Some(OomEntry { record: entry, failed_seq, .. }) = self.ooms.entries.last_mut() {
            *failed_seq = stamp.seq;
            entry.keepers = keepers.unwrap_or_default();
            (entry.refusals, entry.driver_asked_bytes, entry.device_free_bytes) = refusals;
        }
    }

    /// Returns the phase of a failed request; `None` if its record has no phase (see [`PHASE_FLAG`]). An unknown phase is derived.
    fn phase_of_request(&self, book: u8, stamp: &Stamp, body: &Body<'_>) -> Option<Phase> {
        let code = match body {
            Body::Pressure { .. } | Body::Oom { .. } if stamp.context & PHASE_FLAG != 0 => {
                stamp.context & !PHASE_FLAG
            }
            _ => return None,
        };
        match Phase::from_code(u8::try_from(code).unwrap_or(0)) {
            Phase::Unknown => Some(self.holdings.phase_of_request(book, stamp.thread)),
            phase => Some(phase),
        }
    }

    /// Whether the last copy of all cells is long ago, or enough records have come since.
    fn may_copy_cells(&self, time_ns: u64) -> bool {
        self.coverage.events >= self.ooms.next_copy_at
            || time_ns.saturating_sub(self.ooms.copied_ns) > SAME_NS
    }

    fn add_entry(&mut self, kind: OomKind, report: &OomReport, stamp: &Stamp, place: RequestPlace) {
        let is_refusal = kind == OomKind::Pressure;
        let is_framework = !report.is_refusal || report.record.result == 0;
        let guess = || is_framework.then(|| self.holdings.phase_of_request(place.book, place.thread));
        let phase = report.phase.or_else(guess);
        let record = Oom {
            kind,
            time_ns: place.time_ns,
            last_ns: place.time_ns,
            count: 1,
            refusals: u64::from(is_refusal),
            driver_asked_bytes: is_refusal.then_some(report.record.asked_bytes),
            stack: self.ooms.stack(stamp.stack),
            phase: phase.and_then(|phase| phase.name()).map(str::to_owned),
            step: self.ooms.step,
            passes_without_backward: Some(self.holdings.passes(place.book).since_backward),
            passes_after_first: Some(self.holdings.passes(place.book).after_first),
            is_unheard: !is_framework || !self.program.layers.is(Layer::OutOfMemory, LayerState::Active),
            ..report.record.clone()
        };
        let at_allocations = self.coverage.allocations;
        self.ooms.push(OomEntry {
            book: place.book,
            stamp: *stamp,
            record,
            new_refusals: 1,
            failed_seq: 0,
            at_allocations,
        });
        self.ooms.is_watched = true;
        if self.may_copy_cells(place.time_ns) {
            self.record_amounts();
        } else {
            self.ooms.reuse_amounts();
        }
    }

    /// Copies the present amounts by cell into the newest entry.
    fn record_amounts(&mut self) {
        let Some(newest) = self.ooms.entries.last_mut() else { return };
        let book = usize::from(newest.book);
        let report = &mut newest.record;
        self.ooms.copied_ns = report.time_ns;
        self.ooms.is_copy_of_refusal = report.kind == OomKind::Pressure;
        report.is_partial = self.coverage.partial_state || self.coverage.blind_doubt;
        report.tracked_bytes = self.holdings.books[book].tracked;
        let book_of = &self.holdings.books[book];
        report.amounts = book_of.sparse(|cell| book_of.now(cell)).into();
        let sample = self.accounts[book].complete.as_ref();
        report.untrackable_bytes = sample.and_then(|sample| sample.untrackable_bytes());
        report.predates_bytes = if self.coverage.late { self.accounts[book].predates } else { Some(0) };
        self.holdings.note_idle(newest.book, report);
        self.ooms.wants_holders = true;
        let cost = ((self.holdings.rows() + self.holdings.cells.keys.len()) / 16) as u64;
        self.ooms.next_copy_at = self.coverage.events.saturating_add(cost.min(100_000));
    }
}
