//! Makes allocations and frees for files that list only the bytes that a device holds at many times.
//!
//! The allocations are made in a driver pool, and `tracked` counts the pool's reserved bytes, which one record sets. Therefore
//! `tracked` goes from one listed value directly to the next, whatever the number of allocations and frees between them.

use super::feed::{Feed, Piece, ProcessFeed};
use gpumem_wire::Role;
use std::collections::BTreeMap;

/// Maximum number of live allocations.
const MAX_ROWS: usize = 1 << 16;

/// A number of bytes that a file lists over time. A rise becomes an allocation, a fall becomes frees.
#[derive(Debug, Default)]
pub(super) struct Total {
    bytes: u64,
    live: usize,
    /// Addresses of live allocations, by size in bytes.
    rows: BTreeMap<u64, Vec<u64>>,
}

impl Total {
    pub fn set(&mut self, process: &mut ProcessFeed, feed: &mut Feed<'_>, slot: u8, bytes: u64) {
        if bytes < self.bytes {
            self.fall(process, feed, slot, self.bytes - bytes);
        } else {
            self.rise(process, feed, slot, bytes - self.bytes);
        }
        self.bytes = bytes;
        process.set_reserved(feed, slot, bytes);
    }

    fn rise(&mut self, process: &mut ProcessFeed, feed: &mut Feed<'_>, slot: u8, mut bytes: u64) {
        // At the maximum number of live allocations, the smallest one is merged into the new one.
        if self.live == MAX_ROWS
            && let Some((size, address)) = self.smallest()
        {
            process.pool_free(feed, slot, address);
            bytes = bytes.saturating_add(size);
        }
        if bytes > 0 {
            self.live += 1;
            let address = process.pool_allocate(feed, Piece::new(slot, bytes, 0, Role::Unknown));
            self.rows.entry(bytes).or_default().push(address);
        }
    }

    fn smallest(&mut self) -> Option<(u64, u64)> {
        let size = *self.rows.keys().next()?;
        Some((size, self.remove(size)?))
    }

    /// Removes a live allocation of this size from `rows` and returns its address.
    fn remove(&mut self, size: u64) -> Option<u64> {
        let rows = self.rows.get_mut(&size)?;
        let address = rows.pop()?;
        if rows.is_empty() {
            self.rows.remove(&size);
        }
        self.live -= 1;
        Some(address)
    }

    /// Frees `bytes`: repeatedly the largest allocation that is not too large. If all are too large, frees the smallest one and
    /// allocates the excess again.
    fn fall(&mut self, process: &mut ProcessFeed, feed: &mut Feed<'_>, slot: u8, bytes: u64) {
        let mut left = bytes;
        while left > 0 {
            let found = self.rows.range(..=left).next_back().or_else(|| self.rows.iter().next());
            let Some((&size, _)) = found else { break };
            let Some(address) = self.remove(size) else { break };
            process.pool_free(feed, slot, address);
            if size > left {
                self.rise(process, feed, slot, size - left);
            }
            left = left.saturating_sub(size);
        }
    }
}

/// The memory of a device at one time, as a list of allocations with names.
#[derive(Debug, Default)]
pub(super) struct Composition {
    /// Each allocation of the list with its address; `None` for an allocation of 0 bytes.
    held: Vec<Option<(Piece, u64)>>,
}

impl Composition {
    /// Replaces the list by `pieces`. An allocation stays if bytes, tag and role at its position do not change.
    pub fn set(&mut self, process: &mut ProcessFeed, feed: &mut Feed<'_>, slot: u8, pieces: &[Piece]) {
        let identity = |piece: &Piece| (piece.bytes, piece.tag, piece.role);
        self.held.resize(self.held.len().max(pieces.len()), None);
        for (place, held) in self.held.iter_mut().enumerate() {
            let wanted = pieces.get(place).map(identity);
            if let Some((_, address)) = held.take_if(|(held, _)| Some(identity(held)) != wanted) {
                process.pool_free(feed, slot, address);
            }
        }
        for (held, &piece) in self.held.iter_mut().zip(pieces) {
            if held.is_none() && piece.bytes > 0 {
                *held = Some((piece, process.pool_allocate(feed, piece)));
            }
        }
        process.set_reserved(feed, slot, pieces.iter().map(|piece| piece.bytes).fold(0, u64::saturating_add));
    }
}
