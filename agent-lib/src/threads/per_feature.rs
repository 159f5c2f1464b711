//! Data of a thread for certain features: the callers of the driver (naming/callers), the running node of the backward pass
//! (naming/autograd.rs), and PyTorch's allocator. For the latter, these are the thread's calls since the allocator last reported
//! a block.

use super::stack::Stack;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

/// Number of entries in a thread's cache of callers: a power of two.
pub(crate) const REMEMBERED: usize = 32;

/// Cached result of a search for the library that made a driver call. It is used again if the stack has the same words at the
/// same places.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CachedCaller {
    pub(crate) start: usize,
    pub(crate) near: (usize, usize),
    pub(crate) far: (usize, usize),
    pub(crate) generation: u32,
    pub(crate) call: u16,
    pub(crate) module: u16,
}

#[derive(Debug, Default)]
pub(crate) struct Callers {
    pub(crate) known: [CachedCaller; REMEMBERED],
    /// Return address of the last driver call in the library that made it; 0 if unknown.
    pub site: usize,
    pub(crate) stack: Stack,
}

/// A thread's state of the backward pass. Written only by the thread.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct AutogradThread {
    /// Tag of the scope that was open when the running node began.
    pub(crate) scope: AtomicU32,
    /// Identity (`sequence::Node`) of the running node; 0 if none runs, `UNNAMED` if it cannot be read.
    pub(crate) running: AtomicU64,
    /// PyTorch's id of the thread; 0 until it was read.
    pub(crate) id: AtomicU64,
    /// Value of `running` for the node that ended last on the thread; 0 for none.
    pub(crate) last: AtomicU64,
    /// Address of the running node if it accumulates a gradient, with the flag `gradient::NESTED`; else 0.
    pub(crate) accumulating: AtomicU64,
}

impl AutogradThread {
    pub(crate) fn reset(&self) {
        for word in [&self.id, &self.running, &self.last, &self.accumulating] {
            word.store(0, Relaxed);
        }
        self.scope.store(0, Relaxed);
    }

    #[inline(always)]
    pub(crate) fn scope(&self) -> u32 {
        self.scope.load(Relaxed)
    }
}

/// Number of address ranges stored for each thread: the newest ones.
const FRESH: usize = 4;

/// Maximum number of events stored for the free of a block: one for each stream that used the block.
pub(crate) const EVENTS: usize = 8;

/// Memory that a thread got from the driver since its last block of PyTorch. It may be a segment of PyTorch's allocator.
#[derive(Debug, Default)]
pub(crate) struct NewRange {
    /// Start address. The sender reads it, too.
    pub start: AtomicU64,
    pub end: AtomicU64,
    /// Id of the calling library << 1 | whether the range consists of mappings side by side, and not of one allocation.
    what: AtomicU64,
}

impl NewRange {
    pub(crate) fn module(&self) -> u16 {
        (self.what.load(Relaxed) >> 1) as u16
    }
    pub(crate) fn is_mapped(&self) -> bool {
        self.what.load(Relaxed) & 1 != 0
    }
}

/// A CUDA event that PyTorch has recorded.
#[derive(Debug, Default)]
pub(crate) struct Event {
    /// cudaEvent_t.
    pub handle: AtomicU64,
    /// Return address of the call that recorded it.
    pub site: AtomicUsize,
    /// Stack pointer at that call.
    pub stack: AtomicUsize,
}

/// A thread's calls since PyTorch's allocator last reported the use or free of a block on it. Written only by the thread.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct ThreadAllocatorState {
    /// Number of address ranges that the driver gave the thread since PyTorch last allocated a block on it.
    remembered: AtomicU32,
    /// Number of CUDA events that PyTorch has recorded on the thread since its last report.
    recorded: AtomicU32,
    /// Whether the driver has refused PyTorch memory since the last block.
    pub(crate) refused: AtomicBool,
    fresh: [NewRange; FRESH],
    events: [Event; EVENTS],
    /// Number of the record of the thread's last failed request.
    pub(crate) failed_seq: AtomicU64,
}

impl ThreadAllocatorState {
    pub(crate) fn reset(&self) {
        self.forget_fresh();
        self.forget_events();
        self.refused.store(false, Relaxed);
    }

    #[inline(always)]
    pub(crate) fn remember(&self, start: u64, bytes: u64, module: u16, is_mapped: bool) {
        let count = self.remembered.load(Relaxed);
        let what = u64::from(module) << 1 | u64::from(is_mapped);
        let end = start.saturating_add(bytes);
        if is_mapped && count > 0 {
            let last = &self.fresh[(count as usize - 1) % FRESH];
            if last.end.load(Relaxed) == start && last.what.load(Relaxed) == what {
                last.end.store(end, Relaxed);
                return;
            }
        }
        let place = &self.fresh[count as usize % FRESH];
        place.start.store(start, Relaxed);
        place.end.store(end, Relaxed);
        place.what.store(what, Relaxed);
        // A count above FRESH determines only the index of the next range.
        let next = if count as usize >= 2 * FRESH { count + 1 - FRESH as u32 } else { count + 1 };
        self.remembered.store(next, Release);
    }

    #[inline(always)]
    pub(crate) fn has_fresh(&self) -> bool {
        self.remembered.load(Relaxed) != 0
    }

    /// Returns the stored ranges. If another thread (the sender) calls this, a range may be half written.
    pub(crate) fn fresh(&self) -> impl Iterator<Item = &NewRange> {
        self.fresh.iter().take(self.remembered.load(Acquire) as usize)
    }

    #[inline(always)]
    pub(crate) fn forget_fresh(&self) {
        self.remembered.store(0, Relaxed);
    }

    pub(crate) fn note_event(&self, event: u64, site: usize, stack: usize) {
        let count = self.recorded.load(Relaxed);
        if let Some(place) = self.events.get(count as usize) {
            place.handle.store(event, Relaxed);
            place.site.store(site, Relaxed);
            place.stack.store(stack, Relaxed);
        }
        self.recorded.store(count.saturating_add(1), Relaxed);
    }

    /// Removes an event for which no block has to wait any more.
    pub(crate) fn forget_event(&self, event: u64) {
        let count = self.recorded.load(Relaxed) as usize;
        let events = &self.events[..count.min(EVENTS)];
        for known in events.iter().filter(|known| known.handle.load(Relaxed) == event) {
            known.handle.store(0, Relaxed);
        }
    }

    #[inline(always)]
    pub(crate) fn recorded(&self) -> u32 {
        self.recorded.load(Relaxed)
    }

    /// Returns the stored events that were not removed.
    pub(crate) fn events(&self) -> impl Iterator<Item = &Event> {
        let noted = self.events.iter().take(self.recorded.load(Relaxed) as usize);
        noted.filter(|event| event.handle.load(Relaxed) != 0)
    }

    #[inline(always)]
    pub(crate) fn forget_events(&self) {
        self.recorded.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(mine: &ThreadAllocatorState) -> Vec<(u64, u64)> {
        mine.fresh().map(|fresh| (fresh.start.load(Relaxed), fresh.end.load(Relaxed))).collect()
    }

    #[test]
    fn pieces_side_by_side_are_one_range_and_the_last_ranges_stay() {
        let mine = ThreadAllocatorState::default();
        for piece in 0..100 {
            mine.remember(1000 + piece * 10, 10, 7, true);
        }
        assert_eq!(ranges(&mine), [(1000, 2000)]);
        mine.remember(2000, 10, 8, true); // from another library
        mine.remember(2010, 10, 8, false); // allocations are not merged
        assert_eq!(ranges(&mine).len(), 3);
        for n in 0..1000 {
            mine.remember(n, 1, 7, false);
            assert!(ranges(&mine).contains(&(n, n + 1)));
        }
        mine.forget_fresh();
        assert!(!mine.has_fresh() && ranges(&mine).is_empty());
    }

    #[test]
    fn events_come_and_go() {
        let mine = ThreadAllocatorState::default();
        let handles = || mine.events().map(|event| event.handle.load(Relaxed)).collect::<Vec<_>>();
        (1..=3).for_each(|event| mine.note_event(event, 0, 0));
        mine.forget_event(1);
        mine.forget_event(9);
        assert_eq!(handles(), [2, 3]);
        (11..=30).for_each(|event| mine.note_event(event, 0, 0));
        assert_eq!((mine.recorded(), handles().len()), (23, EVENTS - 1));
        mine.forget_events();
        assert_eq!(mine.events().count(), 0);
    }
}
