//! One device of a run: moments, series and what explains the numbers.

use crate::cell::hide_unknown_pool;
use crate::fields::{fields, plain};
use crate::gap::Step;
use crate::growth::Growth;
use crate::iterations::Iterations;
use crate::moment::Moment;
use crate::oom::Oom;
use crate::parameters::Parameters;
use crate::series::Series;
use crate::timeline::Timeline;
use serde::{Deserialize, Serialize};

/// Other processes that a device names.
pub const MAX_TENANTS: usize = 16;

fields! {
    /// One device of the run.
    #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
    pub struct Device {
        /// UUID as NVML writes it, `ordinal-N`, or `unnamed-N` where the agent has not named its slot.
        name: String                       => join last,           redact keep;
        /// NVML's index, or the import's number.
        ordinal: u16                       => join last,           redact keep;
        /// Product name; empty if unknown.
        model: String                      => join last,           redact keep;
        /// Size.
        total_bytes: Option<u64>           => join last,           redact keep;
        /// The latest moment at which everything that can be known was known.
        last: Moment                       => join last,           redact keep;
        /// The moment with the highest `tracked`.
        peak: Moment                       => join Moment::higher, redact keep;
        /// Highest `used` that was read, and when.
        peak_used: Option<(u64, u64)>      => join max,            redact keep;
        /// Host and foreign memory, and blocks outside the book: never in a sum.
        beside: Beside                     => join last,           redact keep;
        /// Device memory: together with the last sample where `unaccounted_bytes` is known, else as last read.
        reading: Option<DeviceReading>     => join last,           redact keep;
        /// Device used minus all its processes, where device memory agreed before and after their list.
        unaccounted_bytes: Option<i64>     => join last,           redact keep;
        /// Other processes in the same list: pid and used bytes, the largest first, at most [`MAX_TENANTS`].
        tenants: Vec<(u32, Option<u64>)>   => join last,           redact keep;
        /// Number of further ones, and their used bytes.
        #[serde(default)]
        other_tenants: (u32, u64)          => join last,           redact keep;
        /// used, tracked and gap over time.
        series: Series                     => join Series::append, redact keep;
        /// What explains the numbers.
        #[serde(default)]
        details: Details                   => join Details::join,  redact Details::redact;
    }
}

fields! {
    /// What explains a device's numbers. Kept as JSON in the store: a field that a stored run does not have gets its default.
    #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Details {
        /// Peak that the driver's own accounting charged to the process, where it is on.
        accounted_peak_bytes: Option<u64> => join last,               clip clear,            redact keep;
        /// Changes of the gap by time; the smallest of many are one and come first. Of the whole life: they explain what is held now.
        steps: Vec<Step>                  => join last,               clip within,           redact each(Step::redact);
        /// Points by which growth is judged, of the whole life.
        growth: Growth                    => join last,               clip Growth::clip,     redact keep;
        /// What was held over time, by cell; empty in runs of older versions.
        timeline: Timeline                => join Timeline::join,     clip Timeline::clip,   redact keep;
        /// What each training step held.
        iterations: Iterations            => join Iterations::join,   clip Iterations::clip, redact keep;
        /// Parameters and gradients one by one.
        parameters: Parameters            => join Parameters::append, clip keep,             redact clear;
        /// Pools that lived at the last record.
        pools: Vec<Pool>                  => join last,               clip keep,             redact each(Pool::redact);
        /// OOM records by time.
        ooms: Vec<Oom>                    => join append,             clip within,           redact each(Oom::redact);
        /// Device faults that the driver reported shortly before the end of the process: when, and which (Xid).
        faults: Vec<(u64, u64)>           => join last,               clip keep,             redact keep;
    }
}

plain!(Beside, DeviceReading);

/// What the driver's own accounting and we say of the highest `used`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Accounting {
    /// The driver's, which sees every allocation of video memory.
    pub driver_bytes: u64,
    /// Ours: the highest that was read, or the peak of `tracked` with its gap.
    pub our_bytes: Option<u64>,
}

impl Accounting {
    /// What the driver allocates at once: less is no disagreement.
    pub const GRANULE_BYTES: u64 = 2 << 20;

    /// How much the driver's exceeds ours, if that is more than a granule, in either direction.
    pub fn disagreement(&self) -> Option<i64> {
        let ours = self.our_bytes?;
        (self.driver_bytes.abs_diff(ours) > Self::GRANULE_BYTES).then(|| {
            (i128::from(self.driver_bytes) - i128::from(ours)).clamp(i64::MIN.into(), i64::MAX.into()) as i64
        })
    }
}

impl Device {
    /// The driver's word and ours, where accounting mode is on.
    pub fn accounting(&self) -> Option<Accounting> {
        let driver_bytes = self.details.accounted_peak_bytes?;
        let read = self.peak_used.map(|(bytes, _)| bytes);
        let summed = self.peak.used_bytes().and_then(|bytes| u64::try_from(bytes).ok());
        Some(Accounting { driver_bytes, our_bytes: read.max(summed) })
    }
}

/// Memory outside the sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Beside {
    pub managed_bytes: i64,
    pub pinned_bytes: i64,
    pub registered_bytes: i64,
    pub imported_bytes: i64,
    pub host_vmm_bytes: i64,
    /// Live blocks in memory that is not booked.
    pub unbooked_block_bytes: i64,
    /// Blocks that wait for a stream; inside the sum as blocks.
    pub pending_block_bytes: i64,
}

/// Device memory at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct DeviceReading {
    pub time_ns: u64,
    pub used_bytes: u64,
    pub free_bytes: u64,
    pub system_reserved_bytes: Option<u64>,
    #[serde(default)]
    pub unified: bool,
}

fields! {
    /// One pool, at the time of the run's last record (a moment's idle bytes are those of its sample).
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Pool {
        /// The owner's number for it.
        id: u64                   => redact keep;
        /// The owner's name for it.
        name: Option<String>      => redact hide_unknown_pool;
        /// `driver`, `graph` or `framework`.
        owner: Option<String>     => redact keep;
        /// Pool whose blocks its segments lie in.
        parent: Option<u64>       => redact keep;
        /// It reports no blocks: `block_bytes` is then what its owner last reported as in use, 0 if it never did.
        opaque: bool              => redact keep;
        /// Bytes of its segments (a framework's), or reserved (the driver's).
        segment_bytes: u64        => redact keep;
        /// Of those, bytes that are booked; less where segments predate the agent, or records were lost.
        booked_bytes: u64         => redact keep;
        /// Bytes of live blocks, pending ones included.
        block_bytes: u64          => redact keep;
        /// Of those, freed bytes that wait for a stream: PyTorch counts them as active, not as allocated.
        pending_bytes: u64        => redact keep;
        /// Reserved and handed-out bytes as its owner last reported them (a framework's; the driver's are not read).
        own: Option<(u64, u64)>   => redact keep;
        /// The owner's total of live blocks and ours, when it last compared.
        check: Option<(u64, u64)> => redact keep;
    }
}

impl Pool {
    /// Segment bytes that no live block covers. Negative where blocks lie in segments that nobody told of.
    pub fn idle_bytes(&self) -> i64 {
        self.segment_bytes.wrapping_sub(self.block_bytes) as i64
    }

    /// What the owner calls allocated: live blocks without those that wait for a stream.
    pub fn allocated_bytes(&self) -> u64 {
        self.block_bytes.saturating_sub(self.pending_bytes)
    }

    /// The owner's total minus ours when it last compared; `None` if it never did, or if both are the same.
    pub fn disagreement(&self) -> Option<i64> {
        let (own, ours) = self.check?;
        (own != ours).then_some(own.wrapping_sub(ours) as i64)
    }
}
