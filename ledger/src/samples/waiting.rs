//! Samples of one process that wait: for records of the process, or for the ledger to take them.

use crate::rules::holdings::Holdings;
use crate::samples::pending::{ClosedSample, Pending};
use gpumem_wire::{Absence, Body, Record};

/// Maximum number of readings of one device that wait for a process's records. An agent that is not stale cannot delay that many
/// at a hundred readings a second.
const MAX_PENDING: usize = 64;

#[derive(Debug)]
pub(crate) struct Samples {
    pub pending: Vec<Pending>,
    /// Earliest time at which a pending sample must be checked.
    pub boundary_ns: u64,
    /// Closed samples that the ledger has not taken, with their books.
    pub closed: Vec<(u8, ClosedSample)>,
    /// The ledger will close pending samples once they are stale.
    pub is_watched: bool,
    /// Books keep their recent past, because the begin of a reading may arrive after records of a live agent.
    pub keeps_history: bool,
}

impl Default for Samples {
    fn default() -> Self {
        Samples {
            pending: Vec::new(),
            boundary_ns: u64::MAX,
            closed: Vec::new(),
            is_watched: false,
            keeps_history: false,
        }
    }
}

impl Samples {
    /// Notes that lost records may belong to waiting samples.
    pub fn doubt(&mut self) {
        self.pending.iter_mut().for_each(Pending::doubt);
    }

    /// Doubts samples that began by `known_from_ns`: the book at earlier times is unknown.
    pub fn doubt_until(&mut self, known_from_ns: u64) {
        let unknown = |pending: &&mut Pending| pending.t0_ns <= known_from_ns;
        self.pending.iter_mut().filter(unknown).for_each(Pending::doubt);
    }

    /// Removes the oldest sample of a book if there is no room for another one.
    pub fn take_oldest(&mut self, book: u8) -> Option<Pending> {
        let of_book = |pending: &Pending| pending.book == book;
        if self.pending.iter().filter(|pending| of_book(pending)).count() < MAX_PENDING {
            return None;
        }
        self.pending.iter().position(of_book).map(|at| self.pending.remove(at))
    }

    /// Returns the end of the earliest waiting reading.
    pub fn waits_since_ns(&self) -> Option<u64> {
        self.pending.iter().filter_map(|pending| pending.t1_ns).min()
    }

    pub fn has(&self, book: u8, number: u64) -> bool {
        self.pending.iter().any(|pending| pending.is(book, number))
    }

    /// Sets the bytes that NVML charges in a reading.
    pub fn set_used(&mut self, book: u8, number: u64, used: Result<u64, Absence>) {
        // Numbers may repeat after a restart of the daemon: the youngest reading is meant.
        if let Some(pending) = self.pending.iter_mut().rfind(|pending| pending.is(book, number)) {
            pending.used = used;
        }
    }

    /// Ends a reading; `failed`: its process lists failed.
    pub fn end(&mut self, book: u8, number: u64, t1_ns: u64, failed: bool) {
        let is_open = |pending: &Pending| pending.is(book, number) && pending.t1_ns.is_none();
        if let Some(pending) = self.pending.iter_mut().rfind(|pending| is_open(pending)) {
            pending.t1_ns = Some(t1_ns);
            if failed {
                pending.fail();
            }
        }
    }

    /// Updates the earliest time at which a sample must be checked.
    pub fn set_boundary(&mut self, has_watermarks: bool) {
        let waits = self.pending.iter().filter(|pending| !has_watermarks || !pending.is_marked());
        self.boundary_ns = waits.map(Pending::boundary_ns).min().unwrap_or(u64::MAX);
    }

    /// Notes an allocation in all samples of its book. It is recorded when its call returns, but NVML may have charged it since
    /// the call was entered. A reading that ended in between may include it.
    pub fn note_entered(&mut self, book: u8, entered: Option<(u64, i64)>) {
        if let Some((entered_ns, bytes)) = entered {
            for pending in self.pending.iter_mut().filter(|pending| pending.book == book) {
                pending.entered(entered_ns, bytes);
            }
        }
    }

    /// Notes a call in flight, which may tear samples. Must precede the closing of samples by the same record.
    pub fn note_in_flight(&mut self, record: &Record<'_>) {
        if let Body::Watermark { in_flight_since_ns, .. } = record.body
            && in_flight_since_ns != 0
        {
            let now_ns = record.stamp.time_ns;
            self.pending.iter_mut().for_each(|pending| pending.in_flight(in_flight_since_ns, now_ns));
        }
    }

    /// Notes that a record of `time_ns` changed the books in `touched`.
    pub fn note_change(&mut self, touched: u64, time_ns: u64, holdings: &Holdings) {
        for pending in &mut self.pending {
            if touched & 1 << pending.book != 0 {
                let index = usize::from(pending.book);
                let tracked = holdings.books[index].tracked;
                pending.change(time_ns, tracked, holdings.in_flight_bytes[index]);
            }
        }
    }
}
