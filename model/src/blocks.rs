//! Single blocks of the last part of a process's life.

use crate::fields::{Field, Window};

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

/// Blocks of a device in the last part of a process's life. A run has them if it was read from a file with events, or if they were
/// made from the requests that were kept with it.
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

impl Blocks {
    /// Cuts the blocks to a window of time. Blocks that are freed after it were live at its end.
    pub fn clip(&mut self, window: &Window) {
        let (from_ns, to_ns) = (self.from_ns.max(window.from_ns), self.to_ns.min(window.to_ns));
        if from_ns > to_ns {
            *self = Blocks::default();
            return;
        }
        self.is_cut |= from_ns > self.from_ns;
        (self.from_ns, self.to_ns) = (from_ns, to_ns);
        self.steps.retain(|(time_ns, _)| (from_ns..=to_ns).contains(time_ns));
        let before = self.tracked.partition_point(|(time_ns, _)| *time_ns <= from_ns);
        self.tracked.drain(..before.saturating_sub(1));
        self.tracked.first_mut().into_iter().for_each(|(time_ns, _)| *time_ns = from_ns.max(*time_ns));
        self.tracked.retain(|(time_ns, _)| *time_ns <= to_ns);
        self.blocks.retain_mut(|block| {
            block.freed_ns.take_if(|freed_ns| *freed_ns > to_ns);
            let since =
                block.since(from_ns).filter(|block| block.made_ns.is_none_or(|made_ns| made_ns <= to_ns));
            since.map(|since| *block = since).is_some()
        });
    }
}

impl Field for Blocks {
    fn remap(&mut self, to: &dyn Fn(u32) -> Option<u32>) {
        self.blocks.retain_mut(|block| to(block.cell).map(|cell| block.cell = cell).is_some());
    }

    fn heap_bytes(&self) -> usize {
        size_of_val(self.blocks.as_slice()) + 16 * (self.steps.len() + self.tracked.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::WindowKind;

    #[test]
    fn window_has_its_blocks_and_their_state_at_its_end() {
        let block = |address, made_ns, freed_ns| Block { address, bytes: 8, cell: 0, made_ns, freed_ns };
        let all = Blocks {
            from_ns: 10,
            to_ns: 100,
            is_cut: false,
            steps: vec![(20, 1), (50, 2), (90, 3)],
            tracked: vec![(10, 1), (30, 2), (60, 3), (95, 4)],
            blocks: vec![
                block(1, None, Some(40)),
                block(2, Some(20), Some(55)),
                block(3, Some(20), None),
                block(4, Some(60), Some(85)),
                block(5, Some(85), Some(99)),
            ],
        };
        let window = |from_ns, to_ns| Window { part: WindowKind::Between, from_ns, to_ns, exact: true };
        let clipped = |from_ns, to_ns| {
            let mut blocks = all.clone();
            blocks.clip(&window(from_ns, to_ns));
            blocks
        };
        let expected = Blocks {
            from_ns: 50,
            to_ns: 80,
            is_cut: true,
            steps: vec![(50, 2)],
            tracked: vec![(50, 2), (60, 3)],
            blocks: vec![block(2, None, Some(55)), block(3, None, None), block(4, Some(60), None)],
        };
        assert_eq!(clipped(50, 80), expected);
        assert_eq!(clipped(0, u64::MAX), all);
        assert_eq!(clipped(200, 300), Blocks::default());
        assert_eq!(clipped(0, 5), Blocks::default());
    }
}
