//! What framework pools hold and nobody uses: how much, in how many pieces, and how large the largest is.

use crate::rules::holdings::Holdings;
use crate::rules::pool::Pool;
use gpumem_wire::PoolOwner;

/// Segment bytes without a block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Idle {
    /// All of them.
    pub bytes: u64,
    /// Pieces that they are in: gaps between blocks, each in one segment.
    pub pieces: u64,
    /// The largest.
    pub largest_bytes: u64,
    /// A segment of theirs is mapped (VMM): it grows, as PyTorch's expandable segments do.
    pub is_expandable: bool,
}

impl Idle {
    fn add(&mut self, from: u64, to: u64) {
        let bytes = to.saturating_sub(from);
        self.bytes = self.bytes.saturating_add(bytes);
        self.pieces += u64::from(bytes > 0);
        self.largest_bytes = self.largest_bytes.max(bytes);
    }
}

/// Of the framework pools on a device; absent where none reports its blocks.
pub(super) fn idle(holdings: &Holdings, book: u8) -> Option<Idle> {
    let reports = |pool: &&Pool| {
        pool.book == book && pool.owner == PoolOwner::Framework && !pool.opaque && !pool.segments.is_empty()
    };
    let mut found = None;
    for pool in holdings.pools.iter().filter(reports) {
        let idle = found.get_or_insert_with(Idle::default);
        let mut blocks: Vec<(u64, u64)> =
            pool.blocks.iter().map(|(&address, row)| (address, row.bytes)).collect();
        blocks.sort_unstable();
        let mut blocks = blocks.into_iter().peekable();
        for (&start, segment) in &pool.segments {
            idle.is_expandable |= segment.is_mapped();
            let end = start.saturating_add(segment.bytes);
            let mut at = start;
            while let Some(&(address, bytes)) = blocks.peek()
                && address < end
            {
                idle.add(at, address);
                at = at.max(address.saturating_add(bytes));
                blocks.next();
            }
            idle.add(at, end);
        }
    }
    found
}
