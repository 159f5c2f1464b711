//! What the ledger has finished since the last call: closed samples and ended windows.

use crate::base::identity::{AccountRef, ProcessKey};
use crate::book::Window;
use crate::ledger::{Ledger, RepeatedSample};
use crate::process::account::Account;
use crate::samples::pending::ClosedSample;
use std::sync::Arc;

impl Ledger {
    /// Moves closed samples and ended windows of a process to the lists that `take_samples` and `take_windows` return.
    pub(super) fn take_closed(&mut self, index: usize) {
        let process = &mut self.processes[index];
        if !process.samples.closed.is_empty() {
            self.has_changed.set(true);
        }
        for (book, sample) in process.samples.closed.drain(..) {
            let Some(device) = process.accounts[usize::from(book)].device else { continue };
            self.samples.push((process.key, device, sample));
        }
        for (book, window) in process.holdings.windows.drain(..) {
            self.windows.push((process.key, place(&process.accounts, book), window));
        }
    }

    /// Whether there are closed samples or ended windows to take. Both accumulate, so callers check this after each record.
    /// Repeated samples come with samples.
    #[inline]
    pub fn has_output(&self) -> bool {
        !self.samples.is_empty() || !self.windows.is_empty()
    }

    /// Returns the samples that were closed before those of [`Ledger::take_samples`], with the same values.
    pub fn take_repeated(&mut self) -> std::vec::Drain<'_, RepeatedSample> {
        self.repeated.drain(..)
    }

    /// Returns the samples closed since the last call: process, index of the device in [`Ledger::devices`], sample.
    pub fn take_samples(&mut self) -> std::vec::Drain<'_, (ProcessKey, usize, Arc<ClosedSample>)> {
        self.samples.drain(..)
    }

    /// Returns the windows that ended since the last call, in the order of each process's records.
    pub fn take_windows(&mut self) -> std::vec::Drain<'_, (ProcessKey, AccountRef, Window)> {
        self.windows.drain(..)
    }

    /// Adds the open windows that have changed since the last call to the ended ones. The windows stay open.
    pub fn end_windows(&mut self) {
        for process in &mut self.processes {
            for book in 0..process.holdings.books.len() {
                if let Some(window) = process.holdings.books[book].partial_window() {
                    self.windows.push((process.key, place(&process.accounts, book as u8), window));
                }
            }
        }
    }
}

fn place(accounts: &[Account], book: u8) -> AccountRef {
    let book = usize::from(book);
    accounts[book].device.map_or(AccountRef::Unnamed(book), AccountRef::Device)
}
