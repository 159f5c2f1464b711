//! The daemon's heap use and memory returned to the system. This is a separate process, because other tests would be counted too.
#![cfg(target_env = "gnu")]
use gpumemd::os::{heap_bytes_in_use, trim_heap};

fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("statm");
    pages.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).expect("pages") * 4096
}

/// Every second of many allocations is freed, so no free memory is at the end of the heap.
#[test]
fn what_is_used_is_counted_and_what_is_free_in_the_middle_goes_back() {
    const BYTES: usize = 64 << 10;
    let before = heap_bytes_in_use().expect("glibc");
    let mut all: Vec<Option<Vec<u8>>> = (0..1000).map(|_| Some(vec![1; BYTES])).collect();
    let (full, used) = (resident_bytes(), heap_bytes_in_use().expect("glibc"));
    all.iter_mut().step_by(2).for_each(|half| *half = None);
    trim_heap();
    let (half, less) = (resident_bytes(), heap_bytes_in_use().expect("glibc"));
    assert!(half + 400 * (BYTES as u64) < full, "{full} to {half}");
    let bytes = 1000 * BYTES as u64;
    assert!((before + bytes / 10 * 9..before + bytes / 10 * 13).contains(&used), "{before} to {used}");
    assert!((used - bytes / 10 * 6..used - bytes / 10 * 4).contains(&less), "{used} to {less}");
    assert!(all.iter().flatten().all(|rest| rest.iter().all(|byte| *byte == 1)));
}
