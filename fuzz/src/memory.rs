//! Limit on a parser's allocations. libFuzzer checks memory once a second; this checks every allocation.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// The system's allocator, with a count of live bytes.
struct Counting;

fn add(bytes: usize) {
    let live = LIVE.with(|live| {
        live.set(live.get().wrapping_add(bytes));
        live.get()
    });
    let most = MOST.with(Cell::get);
    // Freeing an allocation from before `bounded` makes the count wrap below zero. That is not an excess.
    if live > most && live < usize::MAX / 2 {
        MOST.with(|most| most.set(usize::MAX));
        panic!("{live} bytes are live, {most} are allowed");
    }
}

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        LIVE.with(|live| live.set(live.get().wrapping_sub(layout.size())));
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LIVE.with(|live| live.set(live.get().wrapping_sub(layout.size())));
        add(size);
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(place, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `work`, which may have at most `most` more live bytes than now on this thread. Panics beyond that.
pub fn bounded<T>(most: usize, work: impl FnOnce() -> T) -> T {
    LIVE.with(|live| live.set(0));
    MOST.with(|limit| limit.set(most));
    let done = work();
    MOST.with(|limit| limit.set(usize::MAX));
    done
}
