//! Deliberate panics for tests, only in debug builds. Each injection point has a name: `GPUMEM_FAULT=guard:7` panics in the
//! seventh call of [`guard`](crate::driver::guard::guard). `torch.report:7` panics in the seventh call of PyTorch's allocator to
//! the agent.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Name of the injection point, and the number of its call that panics (for tests).
static WANTED: OnceLock<Option<(String, u32)>> = OnceLock::new();
static CALLS: AtomicU32 = AtomicU32::new(0);

/// Reads GPUMEM_FAULT. Must not be called in a callback.
pub(crate) fn read() {
    let wanted = || {
        let value = std::env::var("GPUMEM_FAULT").ok()?;
        let (place, number) = value.split_once(':')?;
        Some((place.to_owned(), number.parse().ok()?))
    };
    if cfg!(debug_assertions) {
        let _ = WANTED.set(wanted());
    }
}

/// Panics, with the caller's line, if GPUMEM_FAULT names this point and this call.
#[inline(always)]
#[track_caller]
#[allow(clippy::panic)]
pub(crate) fn at(place: &str) {
    if cfg!(debug_assertions)
        && let Some(Some((wanted, number))) = WANTED.get()
        && wanted == place
        && CALLS.fetch_add(1, Relaxed) + 1 == *number
    {
        std::panic::panic_any(format!("on purpose, at {place}"));
    }
}
