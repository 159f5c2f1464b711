//! The limits of a process: which records they refuse, and what the process takes of the daemon's memory.

use crate::process::{NO_BOOK, Process};
use crate::rules::memory_use::map;
use gpumem_wire::{Body, Record};
use std::mem::size_of;

/// Calls that one process may have entered without having left them: as many threads no program has, and each is looked at
/// when a row is said again.
const MAX_IN_FLIGHT: usize = 4096;

impl Process {
    /// Whether the record would make the process larger.
    #[inline]
    pub fn is_beyond_limit(&mut self, record: &Record<'_>) -> bool {
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
        self.load.refused += u64::from(is_beyond && self.coverage.full.is_some());
        is_beyond
    }

    /// What it takes, about.
    pub fn bytes(&self) -> usize {
        let names = map(&self.holdings.cells.tags) + map(&self.modules) + self.load.names;
        let accounts: usize = self.accounts.iter().map(|account| account.bytes()).sum();
        size_of::<Process>()
            + names
            + accounts
            + self.counters.bytes()
            + self.ranges.bytes()
            + self.holdings.bytes()
    }
}
