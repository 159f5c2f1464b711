//! The only entry from the host: every function that the host calls goes through [`guard`].

use crate::base::fault_injection;
use crate::driver::core::Core;
use crate::record::status;
use crate::threads::{self, Thread};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{Relaxed, Release};

/// Runs `work`. Returns `absent` instead if the agent is disarmed, if the thread has no place in the table, or if the thread is
/// already inside of the agent. The last case occurs in signal handlers and in the agent's driver calls. A panic is caught here
/// and disarms the agent.
#[inline(always)]
pub fn guard<T>(absent: T, work: impl FnOnce(&'static Core, &'static Thread) -> T) -> T {
    if !status::armed() {
        return absent;
    }
    let (Some(core), Some(thread)) = (Core::get(), threads::current()) else { return absent };
    if thread.busy.load(Relaxed) != 0 {
        return absent;
    }
    thread.busy.store(1, Relaxed);
    let work = || {
        fault_injection::at("guard");
        work(core, thread)
    };
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(value) => {
            thread.busy.store(0, Release); // publishes all stores of the thread's work
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
