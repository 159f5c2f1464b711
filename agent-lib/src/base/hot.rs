//! Words of the process that each report of PyTorch's allocator reads, in one cache line. Separately, each would take a cache
//! line, and its address another: lines that the training needs itself. Each word belongs to the file that its comment names.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, AtomicUsize};

#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct HotWords {
    /// record/status.rs.
    pub phase: AtomicU8,
    /// record/high_water.rs.
    pub peaks_open: AtomicBool,
    /// driver/core.rs.
    pub core: AtomicPtr<()>,
    /// naming/python/mod.rs: the interpreter whose frames are read; null while none are.
    pub interpreter: AtomicPtr<()>,
    /// naming/autograd.rs, like the following.
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
