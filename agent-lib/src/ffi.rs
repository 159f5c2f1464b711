//! The one way in: whatever the host calls goes through [`guard`].

use crate::core::Core;
use crate::state;
use crate::threads::{self, Thread};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;

/// Runs `work` unless the agent is disarmed, the thread is inside already (a signal handler, a driver call of our own),
/// or it has no place; then `absent`. A panic ends here, and the agent with it.
#[inline(always)]
pub fn guard<T>(absent: T, work: impl FnOnce(&'static Core, &'static Thread) -> T) -> T {
    if !state::armed() {
        return absent;
    }
    let (Some(core), Some(thread)) = (Core::get(), threads::current()) else { return absent };
    if thread.busy.load(Relaxed) != 0 {
        return absent;
    }
    thread.busy.store(1, Relaxed);
    match catch_unwind(AssertUnwindSafe(|| work(core, thread))) {
        Ok(value) => {
            thread.busy.store(0, Relaxed);
            value
        }
        Err(panic) => {
            std::mem::forget(panic); // dropping it may panic again
            thread.making.store(0, Relaxed);
            state::disarm_after_panic();
            absent
        }
    }
}

/// Runs `work` whether or not the agent is armed; a panic disarms it. For starting and stopping.
pub fn shielded<T>(absent: T, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        std::mem::forget(panic);
        state::disarm_after_panic();
        absent
    })
}
