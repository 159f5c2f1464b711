//! A bounded number of points for a time of any length. When all points are in use, neighbours are merged in pairs.

pub(super) const POINTS: usize = 64;

/// Points on one axis (steps or time) with several columns of bytes. The value of a point is the minimum of its first samples.
#[derive(Debug)]
pub(super) struct Ring {
    /// Distance between two points on the axis; doubles when points are merged.
    pub stride: u64,
    /// Number of axis indices, from that of a point on, whose samples count for the point.
    samples: u64,
    /// Index on the axis (a multiple of the stride) and time of the first sample of each point. The unit of an index is a step, a
    /// second, or a tenth of a second.
    pub points: Vec<(u64, u64)>,
    /// Index and time of the latest sample, also of one that did not count.
    pub latest: (u64, u64),
    pub columns: Vec<Vec<i64>>,
}

impl Ring {
    pub fn new(samples: u64, columns: usize) -> Self {
        let columns = vec![Vec::new(); columns];
        Ring { stride: 1, samples, points: Vec::new(), latest: (0, 0), columns }
    }

    /// Adds a sample at `index` on the axis. Returns `None` if it does not count for a point, else whether it begins a new point.
    pub fn place(&mut self, index: u64, time_ns: u64) -> Option<bool> {
        if index < self.latest.0 {
            return None;
        }
        self.latest = (index, time_ns);
        loop {
            if index % self.stride >= self.samples {
                return None;
            }
            let start = index - index % self.stride;
            if self.points.last().is_some_and(|point| point.0 >= start) {
                return Some(false);
            }
            if self.points.len() < POINTS {
                self.points.push((start, time_ns));
                return Some(true);
            }
            self.widen();
        }
    }

    fn widen(&mut self) {
        let all_count = self.stride < self.samples;
        self.stride = self.stride.saturating_mul(2);
        let old = std::mem::take(&mut self.points);
        let mut into = Vec::with_capacity(old.len());
        for (index, time_ns) in old {
            let index = index - index % self.stride;
            if self.points.last().is_none_or(|last| last.0 != index) {
                self.points.push((index, time_ns));
            }
            into.push(self.points.len() - 1);
        }
        for column in &mut self.columns {
            let old = std::mem::take(column);
            for (bytes, &at) in old.into_iter().zip(&into) {
                match column.get_mut(at) {
                    Some(point) if all_count => *point = bytes.min(*point),
                    Some(_) => {}
                    None => column.push(bytes),
                }
            }
        }
    }

    /// Adds the sample's bytes to a column; `is_new` is the result of [`Ring::place`].
    pub fn put(&mut self, column: usize, bytes: i64, is_new: bool) {
        let column = &mut self.columns[column];
        match column.last_mut() {
            Some(last) if !is_new => *last = bytes.min(*last),
            _ => column.push(bytes),
        }
    }
}
