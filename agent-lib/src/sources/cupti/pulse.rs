//! Whether our callbacks still come. Another client may finalize CUPTI (Kineto does with TEARDOWN_CUPTI=1): that ends
//! every subscription of the process, and nobody is told.
//!
//! The question is a driver call and not one of CUPTI's: a finalized CUPTI may answer anything, and may be in the middle of it.
//! cuDeviceGetCount needs no context, takes no memory, changes nothing, and programs call it a few times in their lives.
//! Its callback arrives on the calling thread before it returns, so silence is known at once.

use crate::driver::core::Core;
use cupti_sys::ids;
use std::sync::atomic::{AtomicU64, Ordering::*};

/// The call whose callback is listened to for this alone.
pub(crate) const CALL: u32 = ids::cuDeviceGetCount;

/// Callbacks of it, whoever called.
static HEARD: AtomicU64 = AtomicU64::new(0);

/// A callback of a call that means nothing else.
#[cold]
pub(crate) fn heard(id: u32) {
    if id == CALL {
        HEARD.fetch_add(1, Relaxed);
    }
}

/// What was heard of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pulse {
    /// The driver did not want it: nothing follows.
    Unknown,
    /// Its callback came.
    Heard,
    /// It did not.
    Silent,
}

/// Makes the call. Not from a callback, and only on a thread that is not inside of the agent: it would not hear itself.
pub(crate) fn ask(core: &Core) -> Pulse {
    let before = HEARD.load(Relaxed);
    if call(core) != Some(0) {
        return Pulse::Unknown; // not initialised yet, or not any more
    }
    if HEARD.load(Relaxed) == before { Pulse::Silent } else { Pulse::Heard }
}

/// Whether the driver is not initialised: cuInit failed, or is not done. Makes the same call as [`ask`].
pub(crate) fn is_uninitialised(core: &Core) -> bool {
    const NOT_INITIALIZED: u32 = 3;
    call(core) == Some(NOT_INITIALIZED)
}

/// Result of the call; `None` without a driver that has it.
fn call(core: &Core) -> Option<u32> {
    let get = core.devices.driver()?.device_get_count?;
    let mut count = 0;
    // SAFETY: a function of the loaded driver, with a place for its answer.
    Some(unsafe { get(&mut count) })
}

/// Whether its callback has come at least once: on a driver that tells nobody of this call silence means nothing.
pub(crate) fn was_heard() -> bool {
    HEARD.load(Relaxed) != 0
}
