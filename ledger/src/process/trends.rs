//! Decides when the books of a process are sampled for detecting leaks.

use crate::book::Book;
use crate::history::trend::{Trend, TrendView};
use crate::process::Process;
use gpumem_wire::Stamp;

impl Process {
    /// Handles a `Step` record: samples all books with the bytes that are still held after the last step.
    pub fn begin_step(&mut self, number: u64, stamp: &Stamp) {
        let time_ns = stamp.time_ns;
        self.coverage.steps += 1;
        self.holdings.begin_iteration(number, stamp.seq, time_ns);
        let index = self.growth.steps.next(number);
        for book in 0..self.holdings.books.len() {
            if let Some(trend) = self.trend(book) {
                trend.0.step(index, time_ns, trend.1);
            }
        }
    }

    pub fn begin_forward_pass(&mut self, book: u8, time_ns: u64) {
        self.holdings.pass_begins = false;
        if let Some((trend, book)) = self.trend(usize::from(book)) {
            trend.forward_pass(time_ns, book);
        }
    }

    /// Samples the books whose windows have ended.
    pub fn note_ended_windows(&mut self) {
        if self.holdings.is_ordinal() {
            return; // the times of a log are line numbers
        }
        let time_ns = self.stream.applied_ns;
        for at in 0..self.holdings.windows.len() {
            let book = usize::from(self.holdings.windows[at].0);
            if let Some((trend, book)) = self.trend(book) {
                trend.time(time_ns, book);
            }
        }
    }

    pub fn add_sample_to_trends(&mut self, book: u8, time_ns: u64, amounts: &[i64]) {
        if let Some((trend, book)) = self.trend(usize::from(book)) {
            trend.sample(time_ns, amounts, book);
        }
    }

    /// Returns the trend of a book; `None` while the state is unknown or a resync mixes rows of several moments.
    fn trend(&mut self, book: usize) -> Option<(&mut Trend, &Book)> {
        let is_unknown = self.holdings.mixed || self.coverage.partial_state;
        if is_unknown {
            return None;
        }
        if self.growth.books.len() <= book {
            // Most processes use one device, and the list's usual first growth would be to four elements of 700 bytes.
            self.growth.books.reserve_exact(book + 1 - self.growth.books.len());
            self.growth.books.resize_with(book + 1, Trend::default);
        }
        Some((&mut self.growth.books[book], &self.holdings.books[book]))
    }

    pub fn trend_view(&self, book: usize) -> TrendView {
        let trend = self.growth.books.get(book).map(Trend::view).unwrap_or_default();
        let trend = TrendView { pinned_cells: self.holdings.pinned_cells(book), ..trend };
        match self.accounts.get(book).map(|account| account.gaps.view()).unwrap_or_default() {
            (used, true) => TrendView { used, ..trend },
            (gap, false) => TrendView { gap, ..trend },
        }
    }
}
