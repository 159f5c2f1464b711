//! For files that report amounts instead of allocations: the bytes that a device holds, at many times.
//!
//! Changes are booked in a driver pool, which keeps its reserved bytes until it is polled. Therefore `tracked` goes from one
//! amount directly to the next, without intermediate values.

use super::feed::{Feed, Piece, Speaker};
use gpumem_wire::Role;
use std::collections::BTreeMap;

const MAX_ROWS: usize = 1 << 16;

/// A total as a counter reports it. Each rise is booked as an allocation, each fall as a free.
#[derive(Debug, Default)]
pub(super) struct Total {
    bytes: u64,
    live: usize,
    /// Addresses of live rows, by their size.
    rows: BTreeMap<u64, Vec<u64>>,
}

impl Total {
    /// Sets the bytes that the device holds now.
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
        // At the maximum number of rows, the smallest row is merged into the new one.
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

    /// Removes a row of this size and returns its address.
    fn take(&mut self, size: u64) -> Option<u64> {
        let rows = self.rows.get_mut(&size)?;
        let address = rows.pop()?;
        if rows.is_empty() {
            self.rows.remove(&size);
        }
        self.live -= 1;
        Some(address)
    }

    /// Frees `bytes`: each time the largest row that fits, else the smallest. Any excess is allocated again.
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

/// A composition: pieces with names.
#[derive(Debug, Default)]
pub(super) struct Composition {
    held: Vec<(u64, u32, Role, u64)>,
}

impl Composition {
    /// Replaces the held pieces; each keeps its position from call to call.
    pub fn set(&mut self, speaker: &mut Speaker, feed: &mut Feed<'_>, slot: u8, pieces: &[Piece]) {
        self.held.resize(self.held.len().max(pieces.len()), (0, 0, Role::Unknown, 0));
        let wanted = pieces.iter().map(|piece| (piece.bytes, piece.tag, piece.role));
        let wanted: Vec<_> =
            wanted.chain(std::iter::repeat((0, 0, Role::Unknown))).take(self.held.len()).collect();
        let differs =
            |held: &(u64, u32, Role, u64), wanted: &(u64, u32, Role)| (held.0, held.1, held.2) != *wanted;
        for (held, wanted) in self.held.iter_mut().zip(&wanted) {
            if differs(held, wanted) && held.0 > 0 {
                speaker.give(feed, slot, held.3);
                held.0 = 0;
            }
        }
        for (held, &(bytes, tag, role)) in self.held.iter_mut().zip(&wanted) {
            if bytes > 0 && differs(held, &(bytes, tag, role)) {
                *held = (bytes, tag, role, speaker.take(feed, Piece::new(slot, bytes, tag, role)));
            }
        }
        speaker.keep(feed, slot, pieces.iter().map(|piece| piece.bytes).fold(0, u64::saturating_add));
    }
}
