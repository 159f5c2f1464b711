//! Deliberate panics for tests, only in debug builds. Each injection point has a name: `GPUMEM_FAULT=guard:7` panics in the
//! seventh callback, `torch.report:7` in the seventh call of PyTorch's allocator to the agent.

#[cfg(not(debug_assertions))]
mod on_purpose {
    #[inline(always)]
    pub(crate) fn at(_: &str) {}
    pub(crate) fn read() {}
}

#[cfg(debug_assertions)]
mod on_purpose {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    static WANTED: OnceLock<Option<(String, u32)>> = OnceLock::new();
    static MET: AtomicU32 = AtomicU32::new(0);

    /// Reads GPUMEM_FAULT. Must not be called in a callback.
    pub(crate) fn read() {
        let wanted = || {
            let value = std::env::var("GPUMEM_FAULT").ok()?;
            let (place, number) = value.split_once(':')?;
            Some((place.to_owned(), number.parse().ok()?))
        };
        let _ = WANTED.set(wanted());
    }

    /// Panics if this point and its count are the requested ones, at the caller's line.
    #[track_caller]
    pub(crate) fn at(place: &str) {
        if let Some(Some((wanted, number))) = WANTED.get()
            && wanted == place
            && MET.fetch_add(1, Relaxed) + 1 == *number
        {
            std::panic::panic_any(format!("on purpose, at {place}"));
        }
    }
}

pub(crate) use on_purpose::{at, read};
