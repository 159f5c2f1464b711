//! used, tracked and gap over time, in a bounded number of buckets: when they are full, neighbours are
//! merged and buckets become twice as wide. Lowest and highest survive every merge.

use gpumem_ledger::ClosedSample;
use serde::{Deserialize, Serialize};

/// Buckets a series holds at most.
pub const MAX_BUCKETS: usize = 1024;

/// Lowest, highest and last of an amount in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extremes {
    /// Lowest.
    pub min: i64,
    /// Highest.
    pub max: i64,
    /// Last.
    pub last: i64,
}

impl Extremes {
    /// Of one value.
    pub fn at(value: i64) -> Self {
        Extremes { min: value, max: value, last: value }
    }

    fn merge(into: &mut Option<Extremes>, later: Option<Extremes>) {
        match (into, later) {
            (Some(into), Some(later)) => {
                into.min = into.min.min(later.min);
                into.max = into.max.max(later.max);
                into.last = later.last;
            }
            (into @ None, later) => *into = later,
            (Some(_), None) => {}
        }
    }
}

/// What happened in [time_ns, time_ns + width). What was not seen is absent, not zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Start, a multiple of the series' width.
    pub time_ns: u64,
    /// Charged by NVML.
    pub used: Option<Extremes>,
    /// Tracked.
    pub tracked: Option<Extremes>,
    /// Untrackable.
    pub untrackable: Option<Extremes>,
    /// Samples of NVML.
    pub samples: u32,
    /// Of those, torn or stale.
    pub doubtful: u32,
}

impl Bucket {
    fn merge(&mut self, later: &Bucket) {
        Extremes::merge(&mut self.used, later.used);
        Extremes::merge(&mut self.tracked, later.tracked);
        Extremes::merge(&mut self.untrackable, later.untrackable);
        self.samples += later.samples;
        self.doubtful += later.doubtful;
    }
}

/// A bounded series.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Series {
    /// Width of a bucket in record time.
    pub width_ns: u64,
    /// By time; only those in which something happened.
    pub buckets: Vec<Bucket>,
}

impl Series {
    /// An empty series whose buckets begin at this width.
    pub fn new(width_ns: u64) -> Self {
        Series { width_ns: width_ns.max(1), buckets: Vec::new() }
    }

    fn add(&mut self, time_ns: u64, mut bucket: Bucket) {
        bucket.time_ns = time_ns - time_ns % self.width_ns;
        match self.buckets.last_mut() {
            Some(last) if last.time_ns >= bucket.time_ns => last.merge(&bucket),
            _ => self.buckets.push(bucket),
        }
        while self.buckets.len() > MAX_BUCKETS {
            self.widen();
        }
    }

    fn widen(&mut self) {
        self.width_ns = self.width_ns.saturating_mul(2);
        let narrow = std::mem::take(&mut self.buckets);
        for mut bucket in narrow {
            bucket.time_ns -= bucket.time_ns % self.width_ns;
            match self.buckets.last_mut() {
                Some(last) if last.time_ns == bucket.time_ns => last.merge(&bucket),
                _ => self.buckets.push(bucket),
            }
        }
    }

    /// A sample of NVML.
    pub fn add_sample(&mut self, sample: &ClosedSample) {
        let used = sample.used_bytes.ok().and_then(|used| i64::try_from(used).ok());
        let bucket = Bucket {
            used: used.map(Extremes::at),
            untrackable: sample.untrackable_bytes().map(Extremes::at),
            samples: 1,
            doubtful: u32::from(sample.torn || sample.stale),
            ..Bucket::default()
        };
        self.add(sample.t0_ns, bucket);
    }

    /// Lowest, highest and last `tracked` since the last call.
    pub fn add_tracked(&mut self, time_ns: u64, [min, max, last]: [i64; 3]) {
        self.add(time_ns, Bucket { tracked: Some(Extremes { min, max, last }), ..Bucket::default() });
    }
}
