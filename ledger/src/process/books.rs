//! Maps devices to a process's books. Agents and NVML number devices differently, and either may report a device first.

use crate::process::account::Account;
use crate::process::{BEYOND, NO_BOOK, Process};

impl Process {
    /// Adds a book and its account; returns [`BEYOND`] if there are too many.
    fn add_book(&mut self, device: Option<usize>) -> u8 {
        self.forget_view();
        if self.accounts.len() < usize::from(BEYOND) {
            self.accounts.push(Account::new(device));
            let book = self.holdings.add_book();
            if self.coverage.partial_state {
                self.accounts[usize::from(book)].causes.lose();
            }
            if self.samples.keeps_history {
                self.holdings.books[usize::from(book)].history.restart(0, 0);
            }
            return book;
        }
        self.holdings.anomalies.devices_beyond += 1;
        if self.accounts.len() == usize::from(BEYOND) {
            self.accounts.push(Account::new(None));
            self.holdings.add_book();
        }
        BEYOND
    }

    pub fn book_on(&self, device: usize) -> Option<u8> {
        self.accounts.iter().position(|account| account.device == Some(device)).map(|book| book as u8)
    }

    /// Returns the book on a device that NVML sampled, adding it if needed; `None` at the maximum number of devices.
    pub fn sampled_book(&mut self, device: usize) -> Option<u8> {
        let is_room = self.accounts.len() < usize::from(BEYOND);
        self.book_on(device).or_else(|| is_room.then(|| self.add_book(Some(device))))
    }

    /// Assigns a device to a slot: the number that the agent's records use for it. `threads`: number of threads that the device can
    /// run at once, 0 if unknown.
    pub fn name_slot(&mut self, slot: u8, device: usize, threads: u64) {
        let nameless = Some(self.slots[usize::from(slot)]).filter(|&book| {
            book != NO_BOOK && book != BEYOND && self.accounts[usize::from(book)].device.is_none() // used before it was named
        });
        let existing = self.book_on(device);
        match (nameless, existing.map(usize::from)) {
            (Some(book), None) => self.accounts[usize::from(book)].device = Some(device),
            (Some(book), Some(other)) if self.holdings.books[other].len() == 0 => {
                // NVML's samples came first: their account moves to the book that has bytes. The events since the last boundary
                // stay with the book, because the agent reported them for it.
                self.accounts.swap(usize::from(book), other);
                if let Ok([one, other]) = self.accounts.get_disjoint_mut([usize::from(book), other]) {
                    std::mem::swap(&mut one.causes.since_boundary, &mut other.causes.since_boundary);
                }
                let pending = self.samples.pending.iter_mut().map(|pending| &mut pending.book);
                let books = self.slots.iter_mut().chain(pending);
                books.filter(|at| usize::from(**at) == other).for_each(|at| *at = book);
            }
            _ => {
                self.slots[usize::from(slot)] = existing.unwrap_or_else(|| self.add_book(Some(device)));
            }
        }
        let book = self.slots[usize::from(slot)];
        if let Some(account) = self.accounts.get_mut(usize::from(book)).filter(|_| threads != 0) {
            account.causes.since_boundary.threads = threads;
        }
    }

    /// Returns the book of a device slot (number of a device in the agent's records), adding it if needed.
    #[inline]
    pub fn book(&mut self, slot: u8) -> u8 {
        if self.slots[usize::from(slot)] == NO_BOOK {
            self.slots[usize::from(slot)] = self.add_book(None);
        }
        self.slots[usize::from(slot)]
    }
}
