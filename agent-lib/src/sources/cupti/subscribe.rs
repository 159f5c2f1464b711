//! Subscribes to CUPTI's callbacks. A process has one subscription (several since CUPTI version `MULTIPLE`), and the first client
//! gets it. A refusal is reported as a state and retried. A client that finalizes CUPTI (Kineto with TEARDOWN_CUPTI=1) ends every
//! subscription without notice.

use super::find::{c_path, candidates};
use super::table::{CALLS, RESOURCES, STATES};
use crate::base::locks::ForkMutex;
use crate::base::own_thread::Uncancelled;
use crate::driver::core::{Core, report_status};
use crate::naming::callers;
use crate::record::status;
use crate::threads::{CALLBACKS_SINCE_NS, Thread};
use cupti_sys::{
    Api, CUDA_ERROR_NOT_INITIALIZED, CuptiResult, GetNumber, SubscriberHandle, SubscriberParams, domain,
    friendly, ids,
};
use gpumem_wire::AgentState;
use std::ffi::{CStr, c_void};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

/// CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED: another client has the subscription.
const TAKEN: CuptiResult = 39;
/// CUPTI_ERROR_UNKNOWN.
const UNKNOWN: CuptiResult = 999;
/// CUDA_ERROR_NO_DEVICE: a result of the program's cuInit, not of CUPTI.
const NO_DEVICE: u16 = 100;
/// First version of CUPTI in which the parameters of a subscription have a word for several clients.
const LARGER_PARAMETERS: u32 = 130_200;
/// First version of CUPTI in which several clients at a time are requested. Before, that mode was experimental and crashed.
const MULTIPLE: u32 = 130_301;
/// Ids of the calls whose callbacks are required: memory cannot be tracked without them.
const VITAL: [u32; 2] = [ids::cuMemAlloc_v2, ids::cuMemFree_v2];

/// The current subscription. CUPTI requires that only one thread at a time enables callbacks.
static SUBSCRIPTION: ForkMutex<State> = ForkMutex::new(State::default);

/// Whether memory may be unknown: a context existed before the agent, or calls were missed.
static LATE: AtomicBool = AtomicBool::new(false);
/// Whether CUPTI has reported a fatal error of its own, which ends the subscription.
static DEAD: AtomicBool = AtomicBool::new(false);
/// Number of pauses that the program has requested and not ended.
static PAUSES: AtomicU32 = AtomicU32::new(0);
/// cuptiGetContextId and cuptiGetDeviceId of the library in use, for callbacks, which must not wait for the mutex.
static CONTEXT_ID: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static DEVICE_ID: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

#[derive(Debug, Default)]
struct State {
    subscription: Option<(Api, Handle)>,
    /// Whether callbacks have stopped without notice. Then the subscription's handle is not used again.
    lost: bool,
    /// Number that identifies the subscription; increases when one begins or ends.
    number: u64,
}

#[derive(Debug, Clone, Copy)]
struct Handle(SubscriberHandle);
// SAFETY: an opaque pointer that CUPTI accepts from any thread.
unsafe impl Send for Handle {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SubscriptionState {
    Ours,
    /// The agent has a subscription, but its callbacks have stopped.
    Lost,
    Nothing,
    /// The agent has no subscription, because the program has paused it.
    Unwanted,
}

/// Subscribes with the first candidate that works. Requires that libcuda is loaded and cuInit has been called. Returns whether
/// callbacks will arrive. A later try may succeed if another client has the subscription, no library fits, or the program has
/// paused the agent.
pub(crate) fn attach(core: &Core) -> bool {
    let Ok(mut state) = SUBSCRIPTION.lock() else { return false };
    if paused() {
        report_status(AgentState::Paused, 0, PAUSED);
        return false;
    }
    if state.subscription.is_some() && !state.lost {
        return true;
    }
    let version = core.devices.driver().and_then(|driver| driver.version());
    let mut refusal = None;
    for path in candidates(&core.settings, version) {
        let Some(file) = c_path(&path) else { continue };
        let Some(api) = Api::open(&file) else { continue };
        let since_ns = if state.number == 0 { 0 } else { core.recorder.clock.now() };
        match subscribe(&api) {
            Ok(handle) => {
                CALLBACKS_SINCE_NS.store(since_ns, Release);
                // libcupti was loaded just now. It must be in the table of libraries, so that it does not count as a caller.
                callers::update_table(core);
                for (function, get) in [(&CONTEXT_ID, api.get_context_id), (&DEVICE_ID, api.get_device_id)] {
                    function.store(get.map_or(std::ptr::null_mut(), |get| get as *mut c_void), Release);
                }
                let subscription = Some((api, Handle(handle)));
                *state = State { subscription, lost: false, number: state.number + 1 };
                DEAD.store(false, Relaxed);
                report_covered();
                return true;
            }
            Err((TAKEN, holder)) => {
                let by = if holder.is_empty() { "another CUPTI client" } else { holder.as_str() };
                report_status(AgentState::Blocked, TAKEN as u16, by);
                return false;
            }
            // The library stays loaded, see cupti-sys. The error of the best candidate is reported.
            Err((result, what)) => {
                refusal.get_or_insert_with(|| {
                    (result, format!("{}{what} ({})", friendly(result), path.display()))
                });
            }
        }
    }
    let nothing = "no libcupti was found: install nvidia-cuda-cupti of the CUDA version in use";
    let (result, cause) = refusal.unwrap_or_else(|| (0, nothing.to_owned()));
    report_status(AgentState::Blocked, u16::try_from(result).unwrap_or(u16::MAX), &cause);
    false
}

/// Subscribes and enables the callbacks. An error is CUPTI's result, with the name of the other client or an explanation.
fn subscribe(api: &Api) -> Result<SubscriberHandle, (CuptiResult, String)> {
    let handle = claim(api)?;
    enable(api, handle).map_err(|result| {
        // SAFETY: the agent's own handle, which is not used again.
        unsafe { (api.unsubscribe)(handle) };
        (result, "; it delivers no allocations".to_owned())
    })?;
    Ok(handle)
}

/// Subscribes. An error is CUPTI's result, with the name of the other client if CUPTI returns it.
fn claim(api: &Api) -> Result<SubscriberHandle, (CuptiResult, String)> {
    let mut handle: SubscriberHandle = std::ptr::null_mut();
    let version = api.version().unwrap_or(0);
    let mut holder = [0_u8; 128];
    if let Some(subscribe) = api.subscribe_v2 {
        let allow: &[u8] = if version >= MULTIPLE { &[1, 0] } else { &[0] };
        let is_larger = version >= LARGER_PARAMETERS;
        let struct_bytes =
            if is_larger { SubscriberParams::BYTES_13_2 } else { SubscriberParams::BYTES_13_0 };
        let mut result = 0;
        for &allow_multiple in allow {
            holder = [0; 128];
            let mut params = SubscriberParams {
                struct_bytes,
                name: c"gpumemd".as_ptr(),
                holder: holder.as_mut_ptr().cast(),
                holder_bytes: holder.len() - 1,
                allow_multiple,
            };
            // SAFETY: a function of this library, and a struct of its version's size. The buffer's last byte stays 0.
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
        TAKEN => Err((TAKEN, text(&holder))),
        result => Err((result, String::new())),
    }
}

fn text(buffer: &[u8]) -> String {
    CStr::from_bytes_until_nul(buffer).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Enables all callbacks. Older versions of CUPTI refuse ids that they do not know, which is an error only for those in `VITAL`.
fn enable(api: &Api, handle: SubscriberHandle) -> Result<(), CuptiResult> {
    let calls = CALLS.iter().map(|(id, _)| (domain::DRIVER_API, *id));
    let resources = RESOURCES.iter().map(|id| (domain::RESOURCE, *id));
    let states = STATES.iter().map(|id| (domain::STATE, *id));
    let pulse = (domain::DRIVER_API, PULSE);
    for (domain, id) in calls.chain(resources).chain(states).chain([pulse]) {
        // SAFETY: a live subscription; the mutex allows one thread at a time.
        let result = unsafe { (api.enable_callback)(1, handle, domain, id) };
        if result != 0 && domain == domain::DRIVER_API && VITAL.contains(&id) {
            return Err(result);
        }
    }
    Ok(())
}

fn report_covered() {
    match LATE.load(Relaxed) {
        true => report_status(AgentState::Late, 0, "attached after the first allocations"),
        false => report_status(AgentState::Covered, 0, ""),
    }
}

/// Reports that the program's cuInit has failed, so there is nothing to subscribe to.
pub(crate) fn note_no_device() {
    let what = "the CUDA driver is not initialised: cuInit found no GPU that this program may use";
    report_status(AgentState::Blocked, NO_DEVICE, what);
}

/// Stores that a context existed before the agent, or that calls were missed, so that memory may be unknown.
pub(crate) fn note_late() {
    LATE.store(true, Relaxed);
}

/// Stores that callbacks no longer arrive.
fn note_blind() {
    note_late();
    CALLBACKS_SINCE_NS.store(u64::MAX, Release);
}

/// Returns CUPTI's number of a context (contextUid).
pub(crate) fn context_id(handle: usize) -> Option<u32> {
    number_of(handle, &CONTEXT_ID)
}

pub(crate) fn device_id(handle: usize) -> Option<u32> {
    number_of(handle, &DEVICE_ID)
}

fn number_of(handle: usize, get: &AtomicPtr<c_void>) -> Option<u32> {
    let get = get.load(Acquire);
    if get.is_null() {
        return None;
    }
    let mut number = 0;
    // SAFETY: `attach` stores only a function of this type; the library stays loaded.
    let get = unsafe { std::mem::transmute::<*mut c_void, GetNumber>(get) };
    // SAFETY: a function of the library in use, with room for its answer.
    (unsafe { get(handle as *const c_void, &mut number) } == 0).then_some(number)
}

/// Handles a callback of the STATE domain.
pub(crate) fn note_state(id: u32) {
    if id == ids::state::FATAL_ERROR {
        DEAD.store(true, Relaxed);
    }
}

fn paused() -> bool {
    PAUSES.load(Relaxed) != 0
}

/// Returns the state of the subscription, and its number. The sender calls it regularly.
pub(crate) fn subscription_state() -> (SubscriptionState, u64) {
    let Ok(mut state) = SUBSCRIPTION.lock() else { return (SubscriptionState::Unwanted, 0) };
    if DEAD.swap(false, Relaxed) && state.subscription.is_some() && !state.lost {
        // CUPTI has finalized itself, so the handle is invalid.
        *state = State { number: state.number + 1, ..State::default() };
        note_blind();
        report_status(AgentState::Blocked, UNKNOWN as u16, "CUPTI stopped after a fatal error of its own");
    }
    let held = match (&state.subscription, state.lost) {
        _ if paused() => SubscriptionState::Unwanted,
        (Some(_), false) => SubscriptionState::Ours,
        (Some(_), true) => SubscriptionState::Lost,
        (None, _) => SubscriptionState::Nothing,
    };
    (held, state.number)
}

/// Returns the state, locked, if there is a subscription and the program has not paused it.
fn active() -> Option<MutexGuard<'static, State>> {
    SUBSCRIPTION.lock().ok().filter(|state| state.subscription.is_some() && !paused())
}

/// Marks the subscription as lost: its callbacks have stopped. The last callback was seen at `heard_ns`.
pub(crate) fn mark_lost(heard_ns: u64) {
    let Some(mut state) = active() else { return };
    state.lost = true;
    note_blind();
    status::report(heard_ns, AgentState::Blocked, 0, "CUPTI was finalized by another client");
}

/// Marks the subscription as working: its callbacks arrive again.
pub(crate) fn mark_found(core: &Core) {
    let Some(mut state) = active() else { return };
    state.lost = false;
    state.number += 1;
    CALLBACKS_SINCE_NS.store(core.recorder.clock.now(), Release);
    report_covered();
}

const PAUSED: &str = "paused by the program";

/// Ends the subscription for another client of the program. Runs on the caller's thread, so that CUPTI is free on return.
pub(crate) fn pause(core: &Core, thread: &Thread) {
    let _uncancelled = Uncancelled::now();
    PAUSES.fetch_add(1, Relaxed);
    let Ok(mut state) = SUBSCRIPTION.lock() else { return };
    let lost = std::mem::replace(&mut state.lost, false);
    if let Some((api, Handle(handle))) = state.subscription.take() {
        // If another client has finalized CUPTI, the handle points to freed memory and must not be used. A driver that never
        // reports the call of the check is always silent.
        thread.busy.store(0, Relaxed);
        let is_alive = check_pulse(core) != Pulse::Silent || PULSES.load(Relaxed) == 0;
        thread.busy.store(1, Relaxed);
        if is_alive && !lost && !DEAD.load(Relaxed) {
            // SAFETY: the agent's own handle, which is not used again. Callbacks in progress end in code that stays mapped.
            unsafe { (api.unsubscribe)(handle) };
        }
        state.number += 1;
        note_blind();
    }
    if core.devices.driver().is_some() {
        report_status(AgentState::Paused, 0, PAUSED);
    }
}

/// Ends a pause. Pauses nest: the agent subscribes again when the outermost one ends.
pub(crate) fn resume(core: &Core) {
    let _uncancelled = Uncancelled::now();
    let one_less = |pauses: u32| pauses.checked_sub(1);
    if PAUSES.fetch_update(Relaxed, Relaxed, one_less) == Ok(1) && core.devices.driver().is_some() {
        note_late(); // the pause may have begun before cuInit
        // With `teardown`, the sender subscribes once the other client has finalized CUPTI.
        if !core.settings.teardown {
            attach(core);
        }
    }
}

// A driver call, not a CUPTI call, checks whether callbacks still arrive: a finalized CUPTI may return anything, and its
// finalization may be in progress. cuDeviceGetCount needs no context, takes no memory and changes nothing, and programs call it
// rarely. Its callback arrives on the calling thread before the call returns, so a missing callback is detected at once.

/// The call whose callback is subscribed only for this check.
const PULSE: u32 = ids::cuDeviceGetCount;
/// Number of callbacks of cuDeviceGetCount so far, whoever called it.
static PULSES: AtomicU64 = AtomicU64::new(0);

/// Counts a callback if it is that of the call used only for the check (`PULSE`).
#[cold]
pub(crate) fn count_pulse(id: u32) {
    if id == PULSE {
        PULSES.fetch_add(1, Relaxed);
    }
}

/// Result of `check_pulse`: whether the callback arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pulse {
    /// The driver refused the call, which shows nothing about callbacks.
    Unknown,
    Arrived,
    Silent,
}

/// Calls cuDeviceGetCount and checks whether its callback arrives. Not for callbacks or code inside of the agent, where
/// callbacks are ignored.
pub(crate) fn check_pulse(core: &Core) -> Pulse {
    let before = PULSES.load(Relaxed);
    if core.devices.count().is_none_or(|(result, _)| result != 0) {
        return Pulse::Unknown; // not initialised yet, or not any more
    }
    if PULSES.load(Relaxed) == before { Pulse::Silent } else { Pulse::Arrived }
}

/// Whether the driver is not initialised: cuInit failed or has not finished. Makes the same call as [`check_pulse`].
pub(crate) fn is_uninitialised(core: &Core) -> bool {
    core.devices.count().is_some_and(|(result, _)| result == CUDA_ERROR_NOT_INITIALIZED)
}
