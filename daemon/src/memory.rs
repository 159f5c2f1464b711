//! Memory that is free goes back to the system. The C library keeps what lies below something that is used, for as long as that is: a
//! daemon that has once had to do with sixty processes at a time would seem to grow with each of their successors.

use std::time::{Duration, Instant};

/// It takes some milliseconds.
const EVERY: Duration = Duration::from_secs(60);

/// When it was given back last.
#[derive(Debug)]
pub struct Spare(Instant);

impl Spare {
    /// From now on.
    pub fn new() -> Self {
        Spare(Instant::now())
    }

    /// Gives it back, once a minute.
    pub fn give_back(&mut self) {
        if self.0.elapsed() >= EVERY {
            trim();
            self.0 = Instant::now();
        }
    }
}

#[cfg(target_env = "gnu")]
fn trim() {
    // SAFETY: no pointers; it takes the locks that malloc takes.
    #[allow(unsafe_code)]
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(not(target_env = "gnu"))]
fn trim() {}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::trim;

    fn resident_bytes() -> u64 {
        let pages = std::fs::read_to_string("/proc/self/statm").expect("statm");
        pages.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).expect("pages") * 4096
    }

    /// Every second one of many allocations is freed: none of it lies at the end of the heap.
    #[test]
    fn what_is_free_in_the_middle_goes_back() {
        const BYTES: usize = 64 << 10;
        let mut all: Vec<Option<Vec<u8>>> = (0..1000).map(|_| Some(vec![1; BYTES])).collect();
        let full = resident_bytes();
        all.iter_mut().step_by(2).for_each(|half| *half = None);
        trim();
        let half = resident_bytes();
        assert!(half + 400 * (BYTES as u64) < full, "{full} to {half}");
        assert!(all.iter().flatten().all(|rest| rest.iter().all(|byte| *byte == 1)));
    }
}
