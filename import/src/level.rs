//! For files that list amounts instead of allocations: the bytes that a device holds at many times.
//!
//! Changes are recorded in a driver pool, whose reserved bytes change only when it is polled. Therefore `tracked` goes from one
//! amount directly to the next, without intermediate values.

use super::feed::{Feed, Piece, Speaker};
use gpumem_wire::Role;
use std::collections::BTreeMap;

const MAX_ROWS: usize = 1 << 16;

/// A total that a file lists over time. Each rise is recorded as an allocation, each fall as a free.
#[derive(Debug, Default)]
pub(super) struct Total {
    bytes: u64,
    live: usize,
    /// Addresses of live allocations, by their size.
    rows: BTreeMap<u64, Vec<u64>>,
}

impl Total {
    /// Sets the total on a device to `bytes`.
    pub fn set(&mut self, speaker: &mut Speaker, feed: &mut Feed<'_>, slot: u8, bytes: u64) {
        if bytes < self.bytes {
            self.fall(speaker, feed, slot, self.bytes - bytes);
        } else {
            self.rise(speaker, feed, slot, bytes - self.bytes);
        }
        self.bytes = bytes;
        speaker.keep(feed, slot, bytes);
    }

    fn rise(&mut self, speaker: &mut Speaker, feed: &mut Feed<'_>, slot: u8, mut bytes: u64) {
        // At the maximum number of rows (live allocations), the smallest row is merged into the new one.
        if self.live == MAX_ROWS
            && let Some((size, address)) = self.smallest()
        {
            speaker.give(feed, slot, address);
            bytes = bytes.saturating_add(size);
        }
        if bytes > 0 {
            self.live += 1;
            let address = speaker.take(feed, Piece::new(slot, bytes, 0, Role::Unknown));
            self.rows.entry(bytes).or_default().push(address);
        }
    }

    fn smallest(&mut self) -> Option<(u64, u64)> {
        let size = *self.rows.keys().next()?;
        Some((size, self.take(size)?))
    }

    /// Removes an allocation of this size from the list and returns its address.
    fn take(&mut self, size: u64) -> Option<u64> {
        let rows = self.rows.get_mut(&size)?;
        let address = rows.pop()?;
        if rows.is_empty() {
            self.rows.remove(&size);
        }
        self.live -= 1;
        Some(address)
    }

    /// Frees `bytes`: repeatedly the largest allocation that fits, else the smallest. Bytes freed in excess are allocated again.
    fn fall(&mut self, speaker: &mut Speaker, feed: &mut Feed<'_>, slot: u8, bytes: u64) {
        let mut left = bytes;
        while left > 0 {
            let found = self.rows.range(..=left).next_back().or_else(|| self.rows.iter().next());
            let Some((&size, _)) = found else { break };
            let Some(address) = self.take(size) else { break };
            speaker.give(feed, slot, address);
            if size > left {
                self.rise(speaker, feed, slot, size - left);
            }
            left = left.saturating_sub(size);
        }
    }
}

/// The memory of a device at one time, as allocations with names.
#[derive(Debug, Default)]
pub(super) struct Composition {
    /// Allocations with their addresses; `None` for a position without bytes.
    held: Vec<Option<(Piece, u64)>>,
}

impl Composition {
    /// Replaces the allocations by `pieces`. An allocation that is equal at the same position stays.
    pub fn set(&mut self, speaker: &mut Speaker, feed: &mut Feed<'_>, slot: u8, pieces: &[Piece]) {
        let name = |piece: &Piece| (piece.bytes, piece.tag, piece.role);
        self.held.resize(self.held.len().max(pieces.len()), None);
        for (place, held) in self.held.iter_mut().enumerate() {
            let wanted = pieces.get(place).map(name);
            if let Some((_, address)) = held.take_if(|(held, _)| Some(name(held)) != wanted) {
                speaker.give(feed, slot, address);
            }
        }
        for (held, &piece) in self.held.iter_mut().zip(pieces) {
            if held.is_none() && piece.bytes > 0 {
                *held = Some((piece, speaker.take(feed, piece)));
            }
        }
        speaker.keep(feed, slot, pieces.iter().map(|piece| piece.bytes).fold(0, u64::saturating_add));
    }
}
