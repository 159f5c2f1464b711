//! NVML samples of one process, from the begin of a reading until they are closed; see samples/pending.rs.

use crate::book::recent_past::BookChange;
use crate::book::rounding::Rounding;
use crate::process::Process;
use crate::rows::row::{MAX_BYTES, is_charged};
use crate::samples::pending::{MissedReading, PeakGap, Pending};
use crate::untrackable::change::SampleContext;
use crate::untrackable::event::Names;
use gpumem_wire::{Absence, Body, Flags, MemoryKind, Record};
use std::sync::Arc;

impl Process {
    /// Handles the begin of an NVML reading at `t0_ns`: adds a pending sample.
    pub fn begin_sample(&mut self, book: u8, number: u64, t0_ns: u64) {
        // An earlier reading without an end has failed, so its sample is dropped.
        self.samples.pending.retain(|pending| pending.book != book || pending.t1_ns.is_some());
        self.close_oldest(book);
        let mut pending = Pending::new(book, number, t0_ns);
        if self.coverage.covered && self.stream.applied_ns > t0_ns {
            let of = &self.holdings.books[usize::from(book)];
            let past =
                if of.history.is_on() { of.history.past(t0_ns, of.amounts(), of.rounding) } else { None };
            if let Some(past) = past {
                let partial = self.coverage.partial_state;
                pending.mark_past(past, self.stream.near_tag, partial);
            } else {
                // Even if `tracked` is unchanged, its division into cells may have changed.
                let late = of.touched_ns > t0_ns;
                self.mark(&mut pending, late);
            }
        } else if self.stream.silent || self.ended.is_some() || self.stream.done_ns >= t0_ns {
            self.mark(&mut pending, false);
        }
        push(&mut self.samples.pending, pending);
        self.samples.mark_doubtful_until(self.stream.known_from_ns);
        self.samples.set_boundary(self.stream.has_watermarks);
    }

    /// Closes the oldest sample of a book if there is no room for another one.
    fn close_oldest(&mut self, book: u8) {
        let Some(mut oldest) = self.samples.take_oldest(book) else { return };
        if !oldest.is_marked() {
            self.mark(&mut oldest, false);
        }
        self.close(oldest, self.coverage.covered);
    }

    fn mark(&mut self, pending: &mut Pending, late: bool) {
        let index = usize::from(pending.book);
        let partial = self.coverage.partial_state;
        let in_flight_bytes = self.holdings.in_flight_bytes[index];
        pending.mark(&mut self.holdings.books[index], in_flight_bytes, self.stream.near_tag, partial, late);
    }

    /// Sets the bytes that NVML listed for the process in a reading.
    pub fn sample_used(&mut self, book: u8, number: u64, t0_ns: u64, used: Result<u64, Absence>) {
        if !self.samples.pending.iter().any(|pending| pending.is(book, number)) {
            self.begin_sample(book, number, t0_ns);
        }
        self.samples.set_used(book, number, used);
        if let Ok(used) = used {
            let account = &mut self.accounts[usize::from(book)];
            account.last_minute.add(t0_ns, used);
            account.listed_since_ns.get_or_insert(t0_ns);
        }
    }

    /// Returns whether the process may miss readings that do not change its bytes: it has no agent, and was sampled on all devices.
    pub fn may_lag(&self) -> bool {
        !self.coverage.covered
            && self.ended.is_none()
            && self.samples.pending.is_empty()
            && self.accounts.iter().all(|account| account.device.is_none() || account.latest.is_some())
    }

    /// Adds readings that found the same bytes as the latest sample: first those that began at `earlier_ns`, then `last`.
    pub fn repeat_sample(
        &mut self,
        book: u8,
        used_bytes: Result<u64, Absence>,
        earlier_ns: &[u64],
        last: &MissedReading,
    ) {
        if let Ok(used) = used_bytes {
            let account = &mut self.accounts[usize::from(book)];
            for &t0_ns in earlier_ns {
                account.last_minute.add(t0_ns, used);
                if let Ok(used) = i64::try_from(used) {
                    account.gaps.add(t0_ns, used, true);
                }
            }
        }
        self.begin_sample(book, last.number, last.t0_ns);
        if used_bytes.is_ok() {
            self.sample_used(book, last.number, last.t0_ns, used_bytes);
        }
        self.end_sample(book, last.number, last.t1_ns, false);
    }

    /// Handles the end of a reading; `failed`: NVML could not list the processes.
    pub fn end_sample(&mut self, book: u8, number: u64, t1_ns: u64, failed: bool) {
        self.samples.end(book, number, t1_ns, failed);
        if !self.coverage.covered || self.ended.is_some() {
            self.advance(u64::MAX);
            return;
        }
        self.advance(self.stream.done_ns);
        if self.stream.silent {
            self.close_where(u64::MAX, true);
        }
    }

    /// Sets the time up to which all records have been booked, and closes the samples that ended by then.
    pub fn advance(&mut self, done_ns: u64) {
        if done_ns != u64::MAX {
            self.stream.done_ns = self.stream.done_ns.max(done_ns);
        }
        self.close_where(done_ns, false);
    }

    /// Copies the books into the samples that began up to `done_ns`; a later `Watermark` record closes these samples.
    pub fn mark_begun(&mut self, done_ns: u64) {
        let mut pending = std::mem::take(&mut self.samples.pending);
        for pending in &mut pending {
            if !pending.is_marked() && pending.t0_ns <= done_ns {
                self.mark(pending, false);
            }
        }
        self.samples.pending = pending;
        self.samples.set_boundary(self.stream.has_watermarks);
    }

    /// Closes samples that ended by `done_ns`: all records up to then have arrived or, if `stale`, the agent was silent for too
    /// long.
    pub fn close_where(&mut self, done_ns: u64, stale: bool) {
        let mut waiting = std::mem::take(&mut self.samples.pending);
        let mut at = 0;
        while let Some(pending) = waiting.get_mut(at) {
            let ends = pending.t1_ns.is_some_and(|t1_ns| t1_ns <= done_ns);
            // Without an agent there is no book to copy, so a sample closes without a mark.
            let is_due = if ends { self.coverage.covered } else { !stale && pending.t0_ns <= done_ns };
            if !pending.is_marked() && is_due {
                self.mark(pending, false);
            }
            if ends {
                self.close(waiting.remove(at), stale && self.coverage.covered);
            } else {
                at += 1;
            }
        }
        self.samples.pending = waiting;
        self.samples.set_boundary(self.stream.has_watermarks);
    }

    fn close(&mut self, pending: Pending, stale: bool) {
        let (book, near) = (pending.book, pending.near());
        let account = &mut self.accounts[usize::from(book)];
        let mut sample = pending.close(0, stale, self.coverage.covered);
        if account.settles_baseline(&sample, self.coverage.late) {
            account.causes.set_predates_rounding(sample.parts);
        }
        sample.predates_bytes = account.predates_at(&sample, self.coverage.late);
        account.release_baseline(&mut sample, self.baseline_freed_ns);
        let context = SampleContext {
            late: self.coverage.late,
            adopted: account.adopted_at(sample.t0_ns),
            blind: self.coverage.paused || self.coverage.blocked.is_some(),
            near,
            names: Names { cells: &self.holdings.cells, modules: &self.modules },
        };
        sample.parts = account.causes.close(&sample, &context);
        self.coverage.stale_samples += u64::from(stale);
        if let Ok(used) = sample.used_bytes
            && account.peak_used.is_none_or(|(highest, _)| used > highest)
        {
            account.peak_used = Some((used, sample.t0_ns));
        }
        account.note_gap(&sample, &self.holdings.books[usize::from(book)].peak);
        account.add_gap_point(&sample, self.coverage.covered);
        let sample = Arc::new(sample);
        if sample.used_bytes.is_ok() && sample.tracked_bytes.is_some() == self.coverage.covered {
            account.complete = Some(Arc::clone(&sample));
        }
        account.latest = Some(Arc::clone(&sample));
        if sample.tracked_bytes.is_some() && !sample.partial {
            self.add_sample_to_trends(book, sample.t0_ns, &sample.amounts);
        }
        push(&mut self.samples.closed, (book, sample));
        self.outdate_view(book);
    }

    pub fn peak_gap(&self, book: u8) -> Option<PeakGap> {
        self.accounts[usize::from(book)].peak_gap(&self.holdings.books[usize::from(book)].peak)
    }

    /// Returns the time at which the call of a record was entered, and the bytes that the record will add when it is booked: the
    /// size of an allocation, or the growth of a driver pool (negative if it shrinks).
    #[inline]
    pub fn entered(&self, record: &Record<'_>) -> Option<(u64, i64)> {
        let stamp = &record.stamp;
        let (took_us, bytes) = match record.body {
            Body::AllocEnd { pool, took_us, bytes, memory: MemoryKind::StreamOrdered, .. } => {
                (u64::from(took_us), self.holdings.pool_growth_for(pool, bytes))
            }
            Body::AllocEnd { took_us, bytes, memory, .. } if is_charged(memory) => {
                (u64::from(took_us), bytes.min(MAX_BYTES) as i64)
            }
            Body::VmmCreate { bytes, memory, .. } if is_charged(memory) => {
                (u64::from(stamp.context), bytes.min(MAX_BYTES) as i64)
            }
            Body::PoolState { pool, reserved_bytes, took_us, .. } if took_us != 0 => {
                (u64::from(took_us), self.holdings.pool_growth(pool, reserved_bytes))
            }
            _ => return None,
        };
        let is_none = stamp.flags.has(Flags::RESTATED) || stamp.flags.has(Flags::CAPTURED);
        if took_us == 0 || bytes == 0 || is_none {
            return None;
        }
        let took_ns = if took_us == u64::from(u16::MAX) { u64::MAX } else { took_us * 1000 };
        Some((stamp.time_ns.saturating_sub(took_ns), bytes))
    }

    /// Adds the record's changes to the history of the books that it touched.
    #[inline]
    pub fn record_history(&mut self, touched: u64, time_ns: u64, entered: Option<(u64, i64)>) {
        let mut rest = touched;
        while rest != 0 {
            let book = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let (tracked, in_flight) =
                (self.holdings.books[book].tracked, self.holdings.in_flight_bytes[book]);
            let change = BookChange { time_ns, tracked, in_flight, entered, rounding: Rounding::default() };
            self.holdings.books[book].history.end_record(change);
        }
    }

    /// Starts the history of all books, from the start of the process if nothing has been booked yet.
    pub fn start_history(&mut self) {
        if !std::mem::replace(&mut self.samples.keeps_history, true) {
            let is_new = self.coverage.events == 0 && self.stream.resync.is_none();
            self.restart_history(if is_new { 0 } else { self.stream.applied_ns });
        }
    }

    /// Clears the history of all books; their state before `now_ns` can no longer be restored.
    pub fn restart_history(&mut self, now_ns: u64) {
        if self.samples.keeps_history {
            self.holdings.restart_history(now_ns);
        }
    }
}

/// Adds an element to a list. Most processes use one device, and a list's usual first growth would be to four elements.
fn push<T>(list: &mut Vec<T>, element: T) {
    if list.capacity() == 0 {
        list.reserve_exact(1);
    }
    list.push(element);
}
