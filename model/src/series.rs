//! Used, tracked and untrackable bytes over time, in a bounded number of buckets. When all are in use, neighbours are merged and
//! the width of a bucket doubles. Minimum and maximum survive every merge.

use crate::fields::{Window, fields, plain};
use serde::{Deserialize, Serialize};

pub const MAX_BUCKETS: usize = 1024;

/// Minimum, maximum and last value of one amount (bytes) in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extremes {
    pub min: i64,
    pub max: i64,
    pub last: i64,
}

impl Extremes {
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

/// Used, tracked and untrackable bytes in the interval [time_ns, time_ns + width). Unobserved amounts are absent, not zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Start of the interval (ns), a multiple of the series' bucket width.
    pub time_ns: u64,
    pub used: Option<Extremes>,
    pub tracked: Option<Extremes>,
    pub untrackable: Option<Extremes>,
    /// Number of NVML samples in the interval.
    pub samples: u32,
    /// Number of samples during which memory changed (torn), or that lack the agent's records (stale).
    pub doubtful: u32,
}

impl Bucket {
    /// Whether the bucket, which covers `width_ns`, overlaps a window.
    pub(crate) fn is_in(&self, width_ns: u64, window: &Window) -> bool {
        self.time_ns.saturating_add(width_ns) > window.from_ns && self.time_ns <= window.to_ns
    }

    fn merge(&mut self, later: &Bucket) {
        Extremes::merge(&mut self.used, later.used);
        Extremes::merge(&mut self.tracked, later.tracked);
        Extremes::merge(&mut self.untrackable, later.untrackable);
        // The counts of a damaged store may have any value, so the sums saturate.
        self.samples = self.samples.saturating_add(later.samples);
        self.doubtful = self.doubtful.saturating_add(later.doubtful);
    }
}

fields! {
    /// A series of buckets, at most [`MAX_BUCKETS`].
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Series {
        /// Width of a bucket (ns, or lines of a log).
        width_ns: u64;
        /// Buckets in order of time; those without data are omitted.
        buckets: Vec<Bucket>;
    }
}

plain!(Bucket);

impl Series {
    /// Returns an empty series with this initial bucket width.
    pub fn new(width_ns: u64) -> Self {
        Series { width_ns: width_ns.max(1), buckets: Vec::new() }
    }

    /// Returns the bucket of a time, adding it if there is none. Times are not in order: samples and the ledger's windows do not
    /// end in the order in which they begin.
    fn bucket(&mut self, time_ns: u64) -> &mut Bucket {
        // Fast path without a division: the time is almost always in the last bucket.
        let last = self.buckets.last().map(|last| time_ns.wrapping_sub(last.time_ns));
        if last.is_some_and(|since_ns| since_ns < self.width_ns) {
            let at = self.buckets.len() - 1;
            return &mut self.buckets[at];
        }
        loop {
            let start_ns = time_ns - time_ns % self.width_ns;
            let at = match self.buckets.last() {
                Some(last) if last.time_ns >= start_ns => {
                    self.buckets.partition_point(|bucket| bucket.time_ns < start_ns)
                }
                _ => self.buckets.len(),
            };
            let is_there = self.buckets.get(at).is_some_and(|bucket| bucket.time_ns == start_ns);
            if !is_there && self.buckets.len() == MAX_BUCKETS {
                self.widen();
                continue;
            }
            if !is_there {
                self.buckets.insert(at, Bucket { time_ns: start_ns, ..Bucket::default() });
            }
            return &mut self.buckets[at];
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

    /// Adds an NVML sample taken at `time_ns`. `doubtful`: the sample is torn or stale; then `tracked` is not added.
    pub fn add_sample(
        &mut self,
        time_ns: u64,
        used: Option<i64>,
        tracked: Option<i64>,
        untrackable: Option<i64>,
        doubtful: bool,
    ) {
        let bucket = self.bucket(time_ns);
        Extremes::merge(&mut bucket.used, used.map(Extremes::at));
        Extremes::merge(&mut bucket.untrackable, untrackable.map(Extremes::at));
        bucket.samples = bucket.samples.saturating_add(1);
        bucket.doubtful = bucket.doubtful.saturating_add(doubtful.into());
        if let (false, Some(tracked)) = (doubtful, tracked) {
            // If the bucket has extremes already, this value adds nothing to them: `add_tracked` adds every change of `tracked`.
            bucket.tracked.get_or_insert(Extremes::at(tracked));
        }
    }

    /// Adds the extremes of `tracked` in the ledger's window (10 ms) that begins at `start_ns`.
    pub fn add_tracked(&mut self, start_ns: u64, extremes: Extremes) {
        Extremes::merge(&mut self.bucket(start_ns).tracked, Some(extremes));
    }

    pub(crate) fn clip(&mut self, window: &Window) {
        let width_ns = self.width_ns;
        self.buckets.retain(|bucket| bucket.is_in(width_ns, window));
    }

    /// Merges another series of the same process and device.
    pub fn absorb(&mut self, other: &Series) {
        // A width of 0, possible in a damaged store, is not a valid divisor.
        self.width_ns = self.width_ns.max(1);
        while self.width_ns < other.width_ns {
            self.widen();
        }
        for bucket in &other.buckets {
            self.bucket(bucket.time_ns).merge(bucket);
        }
    }
}
