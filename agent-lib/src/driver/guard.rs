//! [`guard`] runs the work of every function that the host program or the driver calls, and catches panics.

use crate::base::fault_injection;
use crate::driver::core::Core;
use crate::record::status;
use crate::threads::{self, Thread};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{Relaxed, Release};

/// Runs `work`. Returns `absent` instead if the agent is disarmed, or if the table of threads has no place for the thread. Also
/// returns `absent` if the thread is inside of the agent already (in a signal handler, or in a driver call of the agent). A panic
/// is caught and disarms the agent.
#[inline(always)]
pub fn guard<T>(absent: T, work: impl FnOnce(&'static Core, &'static Thread) -> T) -> T {
    if !status::armed() {
        return absent;
    }
    let Some(thread) = threads::current() else { return absent };
    run(thread, absent, |core| work(core, thread))
}

/// Like [`guard`], for the calling thread's own place.
#[inline(always)]
pub(crate) fn guard_known<T>(thread: &'static Thread, absent: T, work: impl FnOnce(&'static Core) -> T) -> T {
    if status::armed() { run(thread, absent, work) } else { absent }
}

#[inline(always)]
fn run<T>(thread: &'static Thread, absent: T, work: impl FnOnce(&'static Core) -> T) -> T {
    let Some(core) = Core::get() else { return absent };
    if thread.busy.load(Relaxed) != 0 {
        return absent;
    }
    thread.busy.store(1, Relaxed);
    let work = || {
        fault_injection::at("guard");
        work(core)
    };
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(value) => {
            thread.busy.store(0, Release); // makes the stores of `work` visible to whoever sees this one
            value
        }
        Err(panic) => {
            std::mem::forget(panic); // dropping it may panic again
            thread.making.end();
            status::disarm_after_panic();
            absent
        }
    }
}
