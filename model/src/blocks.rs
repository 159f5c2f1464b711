//! Single blocks of the last part of a process's life.

use crate::fields::Field;

/// One allocation or block in a time in which its bytes did not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Address; 0 if unknown.
    pub address: u64,
    /// Bytes that are not in a segment of a pool.
    pub bytes: u64,
    /// Index of the cell in the run.
    pub cell: u32,
    /// Time of the allocation in ns; absent if it is before [`Blocks::from_ns`].
    pub made_ns: Option<u64>,
    /// Time of the free in ns; absent if the block was live at the end.
    pub freed_ns: Option<u64>,
}

impl Block {
    /// Returns the block without a time of allocation before `from_ns`; `None` if it was freed before.
    pub fn since(&self, from_ns: u64) -> Option<Block> {
        let made_ns = self.made_ns.filter(|made_ns| *made_ns > from_ns);
        self.freed_ns.is_none_or(|freed_ns| freed_ns > from_ns).then_some(Block { made_ns, ..*self })
    }

    /// Returns whether the block is live all the time.
    pub fn is_constant(&self) -> bool {
        self.made_ns.is_none() && self.freed_ns.is_none()
    }
}

/// Blocks of a device in the last part of a process's life. Only runs that were read from a file have them; they are not stored.
///
/// At each time the tracked bytes are those of the live blocks plus the bytes in no block (idle and opaque pool bytes).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Blocks {
    /// Time in ns at which the part begins: a training step, if steps are known and `is_cut`.
    pub from_ns: u64,
    /// Time of the last event in ns.
    pub to_ns: u64,
    /// Whether there were earlier events.
    pub is_cut: bool,
    /// Training steps: time in ns of the begin, and number.
    pub steps: Vec<(u64, u64)>,
    /// Tracked bytes from a time in ns on.
    pub tracked: Vec<(u64, i64)>,
    /// Blocks that were live in this part, in the order in which they were made.
    pub blocks: Vec<Block>,
}

impl Field for Blocks {
    fn remap(&mut self, to: &dyn Fn(u32) -> Option<u32>) {
        self.blocks.retain_mut(|block| to(block.cell).map(|cell| block.cell = cell).is_some());
    }

    fn heap_bytes(&self) -> usize {
        size_of_val(self.blocks.as_slice()) + 16 * (self.steps.len() + self.tracked.len())
    }
}
