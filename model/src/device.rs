//! One device of a run: moments, series and what explains the numbers.

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

/// One device of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// UUID as NVML writes it, `ordinal-N`, or `unnamed-N` where the agent has not named its slot.
    pub name: String,
    /// NVML's index, or the import's number.
    pub ordinal: u16,
    /// Product name; empty where not known.
    pub model: String,
    /// Size.
    pub total_bytes: Option<u64>,
    /// The latest moment at which everything that can be known was known.
    pub last: Moment,
    /// The highest `tracked`.
    pub peak: Moment,
    /// Highest `used` that was read, and when.
    pub peak_used: Option<(u64, u64)>,
    /// Host and foreign memory, and blocks outside the book: never in a sum.
    pub beside: Beside,
    /// Device memory: together with the last sample where `unaccounted_bytes` is known, else as last read.
    pub reading: Option<DeviceReading>,
    /// Device used minus all its processes, where device memory agreed before and after their list.
    pub unaccounted_bytes: Option<i64>,
    /// Other processes in the same list: pid and used bytes, the largest first, at most [`MAX_TENANTS`].
    pub tenants: Vec<(u32, Option<u64>)>,
    /// How many more there are, and their used bytes.
    #[serde(default)]
    pub other_tenants: (u32, u64),
    /// used, tracked and gap over time.
    pub series: Series,
    /// What explains the rest.
    #[serde(default)]
    pub details: Details,
}

/// What explains a device's numbers. Kept as JSON in the store: fields that are added read as their default from
/// older runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Details {
    /// The highest that the driver's own accounting charged to the process, where it is on.
    pub accounted_peak_bytes: Option<u64>,
    /// How the gap came to be what it is: in the order of time, but the smallest of many are one and come first.
    pub steps: Vec<Step>,
    /// Points by which growth is judged.
    pub growth: Growth,
    /// What was held over time, by cell; empty in runs of older versions.
    pub timeline: Timeline,
    /// What each training step held.
    pub iterations: Iterations,
    /// Parameters and gradients one by one.
    pub parameters: Parameters,
    /// Pools that lived when the run was told.
    pub pools: Vec<Pool>,
    /// Times at which memory ran out or nearly did, in their order.
    pub ooms: Vec<Oom>,
    /// Faults that the driver told of the device shortly before the end of the process: when, and which (Xid).
    pub faults: Vec<(u64, u64)>,
}

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

/// One pool, at the time of the run's last record (a moment's idle bytes are those of its sample).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pool {
    /// The owner's number for it.
    pub id: u64,
    /// The owner's name for it.
    pub name: Option<String>,
    /// `driver`, `graph` or `framework`.
    pub owner: Option<String>,
    /// Pool whose blocks its segments lie in.
    pub parent: Option<u64>,
    /// It reports no blocks: `block_bytes` is then what its owner last said to be in use, 0 if it never did.
    pub opaque: bool,
    /// Bytes of its segments (a framework's), or reserved (the driver's).
    pub segment_bytes: u64,
    /// Of those, bytes that are booked; less where segments predate the agent, or records were lost.
    pub booked_bytes: u64,
    /// Bytes of live blocks, pending ones included.
    pub block_bytes: u64,
    /// Of those, bytes whose owner let go and that wait for a stream: PyTorch counts them as active, not as allocated.
    pub pending_bytes: u64,
    /// What its owner last said to have reserved and handed out (a framework's; nobody asks the driver's).
    pub own: Option<(u64, u64)>,
    /// The owner's total of live blocks and ours, when it last compared.
    pub check: Option<(u64, u64)>,
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
