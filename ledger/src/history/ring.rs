//! A bounded number of points for any length of time: when all are in use, pairs are merged.

pub(super) const POINTS: usize = 64;

/// Points on one axis, and columns of amounts.
#[derive(Debug)]
pub(super) struct Ring {
    pub stride: u64,
    /// Number of samples in a point.
    looks: u64,
    /// Begin of each point: index (steps since the first, or seconds; for the gap: tenths of seconds), a multiple of the stride;
    /// and time of its first sample.
    pub points: Vec<(u64, u64)>,
    /// Index and time of the latest sample, whether it was needed or not.
    pub latest: (u64, u64),
    pub columns: Vec<Vec<i64>>,
}

impl Ring {
    pub fn new(looks: u64, columns: usize) -> Self {
        let columns = vec![Vec::new(); columns];
        Ring { stride: 1, looks, points: Vec::new(), latest: (0, 0), columns }
    }

    /// Whether a sample at `index` is needed: `Some(true)` if it begins a point.
    pub fn place(&mut self, index: u64, time_ns: u64) -> Option<bool> {
        if index < self.latest.0 {
            return None;
        }
        self.latest = (index, time_ns);
        loop {
            if index % self.stride >= self.looks {
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

    /// Merges pairs of points.
    fn widen(&mut self) {
        let all_count = self.stride < self.looks;
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

    pub fn put(&mut self, column: usize, bytes: i64, is_new: bool) {
        let column = &mut self.columns[column];
        match column.last_mut() {
            Some(last) if !is_new => *last = bytes.min(*last),
            _ => column.push(bytes),
        }
    }
}
