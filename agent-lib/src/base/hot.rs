//! Global words that are read for each block of PyTorch's allocator, in one cache line. As separate statics, each would use a
//! cache line, and its address another, which the training needs itself. A field's comment names the file that uses the word.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, AtomicUsize};

#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct HotWords {
    /// Used by record/status.rs: whether the agent has not started, makes records, or does nothing.
    pub phase: AtomicU8,
    /// Used by record/high_water.rs: whether a range is open whose peak is measured.
    pub peaks_open: AtomicBool,
    /// Used by driver/core.rs: the agent's state; null before the agent starts.
    pub core: AtomicPtr<()>,
    /// Used by naming/python/mod.rs: the interpreter whose frames are read; null while no frames are read.
    pub interpreter: AtomicPtr<()>,
    /// This word and those after it are used by naming/autograd.rs.
    pub nodes: AtomicPtr<()>,
    pub next_number: AtomicUsize,
    pub offsets: AtomicU64,
    pub addition: AtomicU64,
    pub next_evaluate: AtomicUsize,
}
const _: () = assert!(size_of::<HotWords>() == 64);

pub(crate) static HOT_WORDS: HotWords = HotWords {
    phase: AtomicU8::new(0),
    peaks_open: AtomicBool::new(false),
    core: AtomicPtr::new(std::ptr::null_mut()),
    interpreter: AtomicPtr::new(std::ptr::null_mut()),
    nodes: AtomicPtr::new(std::ptr::null_mut()),
    next_number: AtomicUsize::new(0),
    offsets: AtomicU64::new(0),
    addition: AtomicU64::new(0),
    next_evaluate: AtomicUsize::new(0),
};
