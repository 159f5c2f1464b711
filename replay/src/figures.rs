//! Results of a replay.

use crate::event::RequestId;

/// Totals and peaks of a replay, in bytes and numbers of calls. The names are those of `torch.cuda.memory_stats`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Bytes that the allocator got from the driver: segments and mapped pages.
    pub reserved: Gauge,
    /// Bytes of blocks that the program uses, after rounding of the requests.
    pub allocated: Gauge,
    /// Bytes of blocks that the program uses, or has freed while another stream may still use them.
    pub active: Gauge,
    /// Bytes that the program requested for the active blocks, before rounding.
    pub requested: Gauge,
    /// Number of segments that are not expandable.
    pub segments: Gauge,
    /// Value of `allocated` when `reserved` had its peak.
    pub allocated_at_peak: u64,
    /// Number of driver calls that allocated memory: cudaMalloc, or one mapping of an expandable segment.
    pub device_allocs: u64,
    /// Number of driver calls that freed or unmapped memory.
    pub device_frees: u64,
    /// Number of requests for which all free memory was released before another attempt.
    pub retries: u64,
    /// Number of requests that failed for lack of memory.
    pub ooms: u64,
    /// The first request that failed; `None` if none did.
    pub failure: Option<Failure>,
}

/// An amount with its present and its highest value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauge {
    /// Present value.
    pub now: u64,
    /// Highest value so far.
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

/// A request that failed for lack of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Number of the request's event, from 0.
    pub event: u64,
    /// Bytes of the request after rounding.
    pub rounded_bytes: u64,
    /// Bytes of the segment that the driver refused; PyTorch's message states this size after "Tried to allocate".
    pub segment_bytes: u64,
    /// Value of [`Figures::reserved`] when the request failed, after free memory was released.
    pub reserved_bytes: u64,
    /// Value of [`Figures::allocated`] when the request failed.
    pub allocated_bytes: u64,
}

/// Result of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Continues,
    /// Memory was freed whose request is older than the recording.
    FreesUnknown,
    /// The request fails only in the replay.
    Fails,
    /// The request failed in the recording, and succeeds.
    ServesRecordedFailure,
}

/// Error: the events contradict each other, or cannot be replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A request has the id of a request whose memory is still in use.
    #[error("event {event}: request {id} begins a second time")]
    RequestedTwice {
        /// Number of the event.
        event: u64,
        /// Id of the request.
        id: RequestId,
    },
}
