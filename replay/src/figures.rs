//! The result of a replay.

/// Totals and peaks of a replay, in bytes and calls. Names are those of `torch.cuda.memory_stats`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Bytes of segments and mapped pages.
    pub reserved: Gauge,
    /// Bytes of blocks that the program has, at the blocks' sizes.
    pub allocated: Gauge,
    /// Bytes of blocks that the program has or that wait for a stream.
    pub active: Gauge,
    /// Bytes that were asked for, of active blocks.
    pub requested: Gauge,
    /// Number of segments that are not expandable.
    pub segments: Gauge,
    /// Allocated bytes at the moment of the highest reserved bytes.
    pub allocated_at_peak: u64,
    /// Number of driver calls that brought memory: cudaMalloc, or one mapping of an expandable segment.
    pub device_allocs: u64,
    /// Number of driver calls that gave memory back.
    pub device_frees: u64,
    /// Number of requests for which everything free was released.
    pub retries: u64,
    /// Number of requests for which there was no memory.
    pub ooms: u64,
    /// Highest reserved bytes for which `allocated_at_peak` was noted.
    pub(crate) noted_peak: u64,
    /// The first of these.
    pub failure: Option<Failure>,
}

/// An amount and its highest value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauge {
    /// The amount now.
    pub now: u64,
    /// Its highest value.
    pub peak: u64,
}

impl Gauge {
    pub(crate) fn add(&mut self, amount: u64) {
        self.now += amount;
        self.peak = self.peak.max(self.now);
    }

    pub(crate) fn remove(&mut self, amount: u64) {
        self.now -= amount;
    }
}

/// A request for which there was no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Number of the event, from 0.
    pub event: u64,
    /// Bytes of the request after rounding.
    pub rounded_bytes: u64,
    /// Bytes of the segment that the driver refused: PyTorch's message has "Tried to allocate" with this size.
    pub segment_bytes: u64,
    /// Reserved bytes at that moment, after everything free was released.
    pub reserved_bytes: u64,
    /// Allocated bytes at that moment.
    pub allocated_bytes: u64,
}
