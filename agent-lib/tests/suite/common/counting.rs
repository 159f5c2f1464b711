//! Counts the calling thread's allocations and deallocations. It is this test program's global allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

pub struct Counting;

thread_local! {
    /// Allocations and deallocations; `None` while they are not counted.
    static ASKED: Cell<Option<u64>> = const { Cell::new(None) };
}

fn count() {
    let _ = ASKED.try_with(|asked| asked.set(asked.get().map(|asked| asked + 1)));
}

// SAFETY: passes everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller guarantees the arguments.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller guarantees the arguments.
        unsafe { System.dealloc(at, layout) };
    }
}

/// Returns the allocations and deallocations of this thread during `work`, and its result.
pub fn counted<T>(work: impl FnOnce() -> T) -> (u64, T) {
    ASKED.set(Some(0));
    let given = work();
    (ASKED.replace(None).expect("counting"), given)
}
