//! A series that grows, in little memory. Its newest buckets are as in a [`Series`]; older ones, which seldom change, are packed.

use crate::store::packed::{pack_buckets, unpack_buckets};
use gpumem_model::series::{Bucket, Extremes, MAX_BUCKETS, Series};

/// Number of buckets that are packed together. At least as many stay unpacked, because samples and windows arrive out of order.
const CHUNK: usize = 8;

/// A series of a process that lives. A full one takes 4 to 30 KB, while [`Series`] takes 112 KB.
#[derive(Debug)]
pub(crate) struct LiveSeries {
    /// Older buckets in order of time, [`CHUNK`] in each element. Their times are packed as multiples of the bucket width.
    packed: Vec<Box<[u8]>>,
    /// Bucket width, and the newest buckets.
    recent: Series,
}

impl LiveSeries {
    pub fn new(width_ns: u64) -> Self {
        LiveSeries { packed: Vec::new(), recent: Series::new(width_ns) }
    }

    pub fn add_sample(
        &mut self,
        time_ns: u64,
        used: Option<i64>,
        tracked: Option<i64>,
        untrackable: Option<i64>,
        doubtful: bool,
    ) {
        self.unpack_for(time_ns);
        self.recent.add_sample(time_ns, used, tracked, untrackable, doubtful);
        self.pack();
    }

    pub fn add_tracked(&mut self, start_ns: u64, extremes: Extremes) {
        self.unpack_for(start_ns);
        self.recent.add_tracked(start_ns, extremes);
        self.pack();
    }

    pub fn to_series(&self) -> Series {
        let mut buckets = self.unpacked();
        buckets.extend_from_slice(&self.recent.buckets);
        Series { width_ns: self.recent.width_ns, buckets }
    }

    /// Unpacks all buckets if a value of this time may change a packed one, or if buckets must be merged to make room for a new one.
    fn unpack_for(&mut self, time_ns: u64) {
        let recent = &self.recent.buckets;
        let is_older = recent.first().is_some_and(|first| time_ns < first.time_ns);
        let is_full = self.packed.len() * CHUNK + recent.len() >= MAX_BUCKETS;
        let is_outside = |bucket: &Bucket| time_ns.wrapping_sub(bucket.time_ns) >= self.recent.width_ns;
        let needs_room = is_full && recent.iter().all(is_outside);
        if !self.packed.is_empty() && (is_older || needs_room) {
            self.recent = self.to_series();
            self.packed.clear();
        }
    }

    /// Packs the oldest unpacked buckets, if there are twice as many as stay unpacked.
    fn pack(&mut self) {
        let buckets = &mut self.recent.buckets;
        if buckets.len() < 2 * CHUNK {
            return;
        }
        let count = (buckets.len() / CHUNK - 1) * CHUNK;
        let older = &mut buckets[..count];
        older.iter_mut().for_each(|bucket| bucket.time_ns /= self.recent.width_ns);
        self.packed.extend(older.chunks(CHUNK).map(|chunk| pack_buckets(chunk).into_boxed_slice()));
        buckets.drain(..count);
        buckets.shrink_to(2 * CHUNK);
    }

    fn unpacked(&self) -> Vec<Bucket> {
        let mut buckets = Vec::with_capacity(self.packed.len() * CHUNK + self.recent.buckets.len());
        buckets.extend(self.packed.iter().filter_map(|chunk| unpack_buckets(chunk)).flatten());
        buckets.iter_mut().for_each(|bucket| bucket.time_ns *= self.recent.width_ns);
        buckets
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WIDTH_NS: u64 = 10_000_000;

    #[derive(Debug, Clone)]
    enum Value {
        Sample(Option<i64>, Option<i64>, bool),
        Window(i64, i64),
    }

    /// Generates a value with the time since the previous one, which may be negative.
    fn value() -> impl Strategy<Value = (i64, Value)> {
        let step = prop_oneof![0..3 * WIDTH_NS as i64, 0..1_100_000_000_i64, -400_000_000..0_i64];
        let sample = (any::<Option<i64>>(), any::<Option<i64>>(), any::<bool>());
        let sample = sample.prop_map(|(used, tracked, doubtful)| Value::Sample(used, tracked, doubtful));
        let window = (any::<i64>(), any::<i64>()).prop_map(|(a, b)| Value::Window(a.min(b), a.max(b)));
        (step, prop_oneof![sample, window])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn buckets_are_those_of_a_plain_series(values in prop::collection::vec(value(), 0..2000)) {
            let (mut live, mut plain) = (LiveSeries::new(WIDTH_NS), Series::new(WIDTH_NS));
            let mut time_ns = 1_000_000_000_u64;
            for (step_ns, value) in values {
                time_ns = time_ns.saturating_add_signed(step_ns);
                match value {
                    Value::Sample(used, tracked, doubtful) => {
                        live.add_sample(time_ns, used, tracked, used, doubtful);
                        plain.add_sample(time_ns, used, tracked, used, doubtful);
                    }
                    Value::Window(min, max) => {
                        live.add_tracked(time_ns, Extremes { min, max, last: max });
                        plain.add_tracked(time_ns, Extremes { min, max, last: max });
                    }
                }
                prop_assert!(live.recent.buckets.len() < 2 * CHUNK);
            }
            prop_assert_eq!(live.to_series(), plain);
        }
    }

    #[test]
    fn memory_of_a_day_stays_small() {
        let mut live = LiveSeries::new(WIDTH_NS);
        let mut most = 0;
        for second in 0..86_400_u64 {
            let used = Some(i64::try_from(second * 7 % 13 + 64).expect("small") << 21);
            live.add_sample(second * 1_000_000_000, used, None, None, false);
            if second % 97 == 0 {
                let packed: usize = live.packed.iter().map(|chunk| chunk.len() + 32).sum();
                most = most.max(packed + live.recent.buckets.capacity() * size_of::<Bucket>());
            }
        }
        assert!(most < 30_000, "{most} bytes");
    }
}
