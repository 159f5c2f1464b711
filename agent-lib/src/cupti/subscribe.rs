//! The subscription: one per process, taken by whoever comes first. Refusals are a state that is told, and tried again.

use super::find::{c_path, candidates};
use super::table::{CALLS, RESOURCES, STATES};
use crate::core::Core;
use crate::state;
use cupti_sys::{Api, CuptiResult, SubscriberHandle, SubscriberParams, domain, friendly, ids};
use gpumem_wire::AgentState;
use std::ffi::{CStr, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::*};

/// CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED.
const TAKEN: CuptiResult = 39;
/// From this version on several clients may subscribe, if the driver can.
const MULTIPLE: u32 = 130_200;

/// What is subscribed; enabling callbacks must be done by one thread at a time.
static SUBSCRIPTION: Mutex<Option<Subscription>> = Mutex::new(None);
/// A context existed before we came, or calls were missed.
static LATE: AtomicBool = AtomicBool::new(false);
/// CUPTI said that it has given up.
static DEAD: AtomicBool = AtomicBool::new(false);
/// 0 nobody asked, 1 paused by the program.
static PAUSED: AtomicU8 = AtomicU8::new(0);
/// Of the library in use, for callbacks: they must not wait for the mutex.
static CONTEXT_ID: std::sync::OnceLock<unsafe extern "C" fn(*const c_void, *mut u32) -> CuptiResult> =
    std::sync::OnceLock::new();

#[derive(Debug)]
struct Subscription {
    api: Api,
    handle: SubscriberHandle,
}

// SAFETY: an opaque pointer that CUPTI takes from any thread.
unsafe impl Send for Subscription {}

/// What came of trying.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Callbacks will come.
    Subscribed,
    /// Somebody else has it, or nothing fits: worth trying again.
    Refused,
}

/// Tries every candidate, best first. Call it only with libcuda loaded and cuInit under way or done.
pub fn attach(core: &Core) -> Outcome {
    let Ok(mut subscription) = SUBSCRIPTION.lock() else { return Outcome::Refused };
    if subscription.is_some() {
        return Outcome::Subscribed;
    }
    let version = core.devices.driver().and_then(|driver| driver.version());
    let mut refusal = None;
    for path in candidates(&core.settings, version) {
        let Some(file) = c_path(&path) else { continue };
        let Ok(api) = Api::open(&file) else { continue };
        match subscribe(&api) {
            Ok(handle) => {
                if let Some(get) = api.get_context_id {
                    let _ = CONTEXT_ID.set(get);
                }
                enable(&api, handle);
                *subscription = Some(Subscription { api, handle });
                DEAD.store(false, Relaxed);
                drop(subscription);
                say_covered();
                return Outcome::Subscribed;
            }
            Err((TAKEN, holder)) => {
                let by = if holder.is_empty() { "another CUPTI client" } else { holder.as_str() };
                state::set(AgentState::Blocked, TAKEN as u16, by);
                return Outcome::Refused; // it stays open: the holder may use this very copy
            }
            Err((result, _)) => {
                api.library.close();
                // The best candidate's: it is the one that should have worked.
                refusal.get_or_insert_with(|| (result, format!("{} ({})", friendly(result), path.display())));
            }
        }
    }
    let nothing =
        || (0, "no libcupti was found: install nvidia-cuda-cupti of the CUDA version in use".to_owned());
    let (result, cause) = refusal.unwrap_or_else(nothing);
    state::set(AgentState::Blocked, u16::try_from(result).unwrap_or(u16::MAX), &cause);
    Outcome::Refused
}

/// A subscription, or why not: the result, and who holds it where CUPTI says.
fn subscribe(api: &Api) -> Result<SubscriberHandle, (CuptiResult, String)> {
    let mut handle: SubscriberHandle = std::ptr::null_mut();
    let version = api.version().unwrap_or(0);
    let mut holder = [0_u8; 128];
    if let Some(subscribe) = api.subscribe_v2 {
        let allow: &[u8] = if version >= MULTIPLE { &[1, 0] } else { &[0] };
        let mut result = 0;
        for &allow_multiple in allow {
            let mut params = SubscriberParams {
                struct_bytes: if version >= MULTIPLE {
                    SubscriberParams::BYTES_13_2
                } else {
                    SubscriberParams::BYTES_13_0
                },
                name: c"gpumemd".as_ptr(),
                holder: holder.as_mut_ptr().cast(),
                holder_bytes: holder.len() - 1,
                allow_multiple,
            };
            // SAFETY: a function of this library; the struct has the size that this version expects, its buffer is told one
            // byte short and ends with 0.
            result = unsafe { subscribe(&mut handle, super::callback, std::ptr::null_mut(), &mut params) };
            if result == 0 {
                return Ok(handle);
            }
        }
        if result == TAKEN {
            return Err((result, text(&holder)));
        }
    }
    // SAFETY: a function of this library; the callback lives as long as the process (-z nodelete).
    match unsafe { (api.subscribe)(&mut handle, super::callback, std::ptr::null_mut()) } {
        0 => Ok(handle),
        result => Err((result, text(&holder))),
    }
}

fn text(buffer: &[u8]) -> String {
    CStr::from_bytes_until_nul(buffer).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Ids that a library does not know are refused by it and left out.
fn enable(api: &Api, handle: SubscriberHandle) {
    let calls = CALLS.iter().map(|(id, _)| (domain::DRIVER_API, *id));
    let resources = RESOURCES.iter().map(|id| (domain::RESOURCE, *id));
    let states = STATES.iter().map(|id| (domain::STATE, *id));
    for (domain, id) in calls.chain(resources).chain(states) {
        // SAFETY: a live subscription; one thread at a time, says the mutex.
        unsafe { (api.enable_callback)(1, handle, domain, id) };
    }
}

fn say_covered() {
    match LATE.load(Relaxed) {
        true => state::set(AgentState::Late, 0, "attached after the first allocations"),
        false => state::set(AgentState::Covered, 0, ""),
    }
}

/// There was a context before the agent: what it holds is not known.
pub fn note_late() {
    LATE.store(true, Relaxed);
}

/// CUPTI's number of a context.
pub fn context_id(handle: usize) -> Option<u32> {
    let get = CONTEXT_ID.get()?;
    let mut id = 0;
    // SAFETY: a function of the library in use, with a place for its answer.
    (unsafe { get(handle as *const c_void, &mut id) } == 0).then_some(id)
}

/// A callback of the STATE domain.
pub fn said_about_itself(id: u32) {
    if id == ids::state::FATAL_ERROR {
        DEAD.store(true, Relaxed);
    }
}

/// For the sender, now and then: whether it should attach again.
pub fn wants_attaching() -> bool {
    if DEAD.swap(false, Relaxed) {
        // CUPTI has finalized itself: the handle means nothing any more.
        LATE.store(true, Relaxed);
        if let Ok(mut subscription) = SUBSCRIPTION.lock() {
            *subscription = None;
        }
        state::set(AgentState::Blocked, 999, "CUPTI stopped after a fatal error of its own");
    }
    PAUSED.load(Relaxed) == 0 && SUBSCRIPTION.lock().is_ok_and(|subscription| subscription.is_none())
}

/// The program wants the subscription for another client. On the caller's thread, so that it is free when this returns.
pub fn pause() {
    PAUSED.store(1, Relaxed);
    let Ok(mut subscription) = SUBSCRIPTION.lock() else { return };
    if let Some(Subscription { api, handle }) = subscription.take() {
        // SAFETY: our own handle, not used again. Callbacks under way end in code that stays mapped.
        unsafe { (api.unsubscribe)(handle) };
        LATE.store(true, Relaxed);
        state::set(AgentState::Paused, 0, "paused by the program");
    }
}

/// The other client is done.
pub fn resume(core: &Core) {
    if PAUSED.swap(0, Relaxed) != 0 && core.devices.driver().is_some() {
        attach(core);
    }
}
