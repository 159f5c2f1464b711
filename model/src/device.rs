//! One device of a run: moments, series, and details that explain the numbers.

use crate::blocks::Blocks;
use crate::cell::hide_unknown_pool;
use crate::fields::{fields, plain};
use crate::gap::UntrackableChange;
use crate::growth::Growth;
use crate::iterations::{Iterations, is_zero};
use crate::moment::Moment;
use crate::oom::{self, Holder, Oom};
use crate::parameters::Parameters;
use crate::series::Series;
use crate::timeline::Timeline;
use serde::{Deserialize, Serialize};

/// Maximum number of other processes listed for a device.
pub const MAX_TENANTS: usize = 16;

fields! {
    #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
    pub struct Device {
        /// UUID as NVML writes it; `ordinal-N` in imports without UUIDs; `unnamed-N` if the process has not reported which device
        /// it is.
        name: String                       => join last,           redact keep;
        /// NVML's index of the device; for an import, the number in the import.
        ordinal: u16                       => join last,           redact keep;
        model: String                      => join last,           redact keep;
        total_bytes: Option<u64>           => join last,           redact keep;
        /// The memory held at the last NVML sample with used bytes and, if there is an agent, tracked bytes. Without such a sample,
        /// the memory tracked at the latest time.
        last: Moment                       => join last,           redact keep;
        /// The memory held when `tracked` was highest.
        peak: Moment                       => join Moment::higher, redact keep;
        /// Highest used bytes that NVML reported, and their time (ns).
        peak_used: Option<(u64, u64)>      => join max,            redact keep;
        /// Memory outside the tracked bytes: host memory, imported memory, and blocks in memory that is not tracked.
        beside: SideMemory                     => join last,           redact keep;
        /// Device memory at the last NVML reading that gave `unaccounted_bytes`; if none did, at the last reading.
        reading: Option<DeviceReading>     => join last,           redact keep;
        /// Used bytes of the device minus those of all processes on it. Absent if memory changed while NVML listed the processes.
        unaccounted_bytes: Option<i64>     => join last,           redact keep;
        /// Other processes on the device: pid and used bytes, largest first, at most [`MAX_TENANTS`].
        tenants: Vec<(u32, Option<u64>)>   => join last,           redact keep;
        /// Number of processes on the device that `tenants` does not list, and the sum of their used bytes.
        #[serde(default)]
        other_tenants: (u32, u64)          => join last,           redact keep;
        /// Used, tracked and untrackable bytes over time.
        series: Series                     => join |series: &mut Series, later: Series| series.absorb(&later), redact keep;
        /// Data that explains the numbers.
        #[serde(default)]
        details: Details                   => join Details::join,  redact Details::redact;
    }
}

fields! {
    /// Data that explains a device's numbers. Stored as JSON; a field missing in a stored run gets its default.
    #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Details {
        /// Highest used bytes of the process according to the driver's accounting mode; absent if that mode is off.
        accounted_peak_bytes: Option<u64> => join last,               clip clear,            redact keep;
        /// Changes of the untrackable bytes over the whole life, by time. If there are many, the smallest are merged into one,
        /// which comes first.
        steps: Vec<UntrackableChange>                  => join last,               clip within,           redact each(UntrackableChange::redact);
        /// Points for detecting growth, over the whole life.
        growth: Growth                    => join last,               clip Growth::clip,     redact keep;
        /// Memory held over time, by cell; empty in runs of older versions.
        timeline: Timeline                => join Timeline::join,     clip Timeline::clip,   redact keep;
        /// Memory held in each training step.
        iterations: Iterations            => join Iterations::join,   clip Iterations::clip, redact keep;
        /// Bytes of individual parameters and gradients in each step.
        parameters: Parameters            => join Parameters::append, clip keep,             redact clear;
        /// Pools that existed at the last record.
        pools: Vec<Pool>                  => join last,               clip keep,             redact each(Pool::redact);
        /// Number of CUDA graphs that the agent saw instantiated.
        #[serde(skip_serializing_if = "is_zero")]
        graphs: u64                       => join sum,                clip keep,             redact keep;
        /// The other process that held most of the device at the last reading; absent if there was none, and in earlier versions' runs.
        #[serde(skip_serializing_if = "Option::is_none")]
        largest_tenant: Option<Holder>    => join last,               clip clear,            redact keep;
        /// OOM records by time.
        ooms: Vec<Oom>                    => join oom::join_ooms,         clip within,           redact each(Oom::redact);
        /// Driver faults of the device shortly before the end of the process: time (ns) and Xid (NVIDIA's fault code).
        faults: Vec<(u64, u64)>           => join last,               clip keep,             redact keep;
        /// Single blocks of the last part of the life. They are not stored with a run; see [`Blocks`].
        #[serde(skip)]
        blocks: Blocks                    => join last,               clip Blocks::clip,     redact clear;
    }
}

plain!(SideMemory, DeviceReading);

/// Highest used bytes of a process according to the driver's accounting mode, and according to gpumemd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Accounting {
    /// The driver's value, which includes every allocation of video memory.
    pub driver_bytes: u64,
    /// gpumemd's value: the highest reading, or the peak of the tracked bytes plus the gap (used minus tracked) there, if higher.
    pub our_bytes: Option<u64>,
}

impl Accounting {
    /// Size in which the driver allocates; a difference up to it is not a disagreement.
    pub const GRANULE_BYTES: u64 = 2 << 20;

    /// Returns the driver's value minus gpumemd's, if they differ by more than a granule.
    pub fn disagreement(&self) -> Option<i64> {
        let ours = self.our_bytes?;
        (self.driver_bytes.abs_diff(ours) > Self::GRANULE_BYTES).then(|| {
            (i128::from(self.driver_bytes) - i128::from(ours)).clamp(i64::MIN.into(), i64::MAX.into()) as i64
        })
    }
}

impl Device {
    /// Compares the driver's accounting with gpumemd's readings; `None` if accounting mode is off.
    pub fn accounting(&self) -> Option<Accounting> {
        let driver_bytes = self.details.accounted_peak_bytes?;
        let read = self.peak_used.map(|(bytes, _)| bytes);
        let summed = self.peak.used_bytes().and_then(|bytes| u64::try_from(bytes).ok());
        Some(Accounting { driver_bytes, our_bytes: read.max(summed) })
    }
}

/// Memory outside the sum of tracked bytes; also the pending blocks, which are in that sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SideMemory {
    pub managed_bytes: i64,
    pub pinned_bytes: i64,
    pub registered_bytes: i64,
    pub imported_bytes: i64,
    pub host_vmm_bytes: i64,
    /// Bytes of live pool blocks in memory that is not tracked.
    pub unbooked_block_bytes: i64,
    /// Bytes of blocks that the program has freed but a CUDA stream may still use; the tracked bytes include them.
    pub pending_block_bytes: i64,
}

/// Device memory at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReading {
    pub time_ns: u64,
    pub used_bytes: u64,
    pub free_bytes: u64,
    pub system_reserved_bytes: Option<u64>,
    #[serde(default)]
    pub unified: bool,
}

fields! {
    /// One pool as of the run's last record. (The amounts in [`Device::last`] are those at an NVML sample, so idle bytes may
    /// differ.)
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Pool {
        /// Id that the pool's owner (driver or framework) gave it.
        id: u64                   => redact keep;
        /// Name that the owner gave the pool.
        name: Option<String>      => redact hide_unknown_pool;
        /// Kind of owner: `driver`, `graph` or `framework`.
        owner: Option<String>     => redact keep;
        /// Id of the pool whose blocks contain this pool's segments.
        parent: Option<u64>       => redact keep;
        /// Whether the pool reports no blocks. Then `block_bytes` are the used bytes that its owner last reported, or 0.
        opaque: bool              => redact keep;
        /// Bytes of the pool's segments (framework pools) or reserved bytes (driver pools).
        segment_bytes: u64        => redact keep;
        /// Segment bytes that are tracked: not all if segments are older than the agent or records were lost.
        booked_bytes: u64         => redact keep;
        /// Bytes of live blocks, pending ones included.
        block_bytes: u64          => redact keep;
        /// Block bytes that were freed but a CUDA stream may still use. PyTorch counts them as active, not as allocated.
        pending_bytes: u64        => redact keep;
        /// Number of CUDA streams that requested blocks; absent if the agent did not see the requests. Numbers above 63 count as one
        /// stream.
        #[serde(skip_serializing_if = "Option::is_none")]
        streams: Option<u32>      => redact keep;
        /// Number of private pools that requested blocks: those of CUDA graphs, and of `torch.cuda.MemPool`; absent if the agent did
        /// not see the requests. Numbers above 63 count as one pool.
        #[serde(skip_serializing_if = "Option::is_none")]
        private_pools: Option<u32> => redact keep;
        /// Reserved and allocated bytes as last reported by the owner (framework pools only).
        own: Option<(u64, u64)>   => redact keep;
        /// Live block bytes according to the owner and to the ledger, when the owner last reported its total.
        check: Option<(u64, u64)> => redact keep;
    }
}

impl Pool {
    /// Returns the segment bytes that are in no live block; negative if blocks lie in segments that were not reported.
    pub fn idle_bytes(&self) -> i64 {
        self.segment_bytes.wrapping_sub(self.block_bytes) as i64
    }

    /// Returns the bytes that the owner counts as allocated: live blocks without pending ones.
    pub fn allocated_bytes(&self) -> u64 {
        self.block_bytes.saturating_sub(self.pending_bytes)
    }

    /// Returns the owner's total minus the ledger's in `check`; `None` if both are equal or there was no check.
    pub fn disagreement(&self) -> Option<i64> {
        let (own, ours) = self.check?;
        (own != ours).then_some(own.wrapping_sub(ours) as i64)
    }
}
