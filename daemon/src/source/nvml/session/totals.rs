//! What a poller has called, and what it cost.

/// Running totals of a poller, told as `Counter` records whose tag is the place in this list plus one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) struct Totals {
    pub memory_calls: u64,
    pub memory_ns: u64,
    pub list_calls: u64,
    pub list_ns: u64,
    pub failed_calls: u64,
    pub deferred: u64,
    pub refused: u64,
}

impl Totals {
    /// In the order of their tags.
    pub(crate) fn values(&self) -> [u64; 7] {
        let Totals { memory_calls, memory_ns, list_calls, list_ns, failed_calls, deferred, refused } = *self;
        [memory_calls, memory_ns, list_calls, list_ns, failed_calls, deferred, refused]
    }

    /// The place of a tag.
    pub(crate) fn place(&mut self, tag: u32) -> Option<&mut u64> {
        Some(match tag {
            1 => &mut self.memory_calls,
            2 => &mut self.memory_ns,
            3 => &mut self.list_calls,
            4 => &mut self.list_ns,
            5 => &mut self.failed_calls,
            6 => &mut self.deferred,
            7 => &mut self.refused,
            _ => return None,
        })
    }
}
