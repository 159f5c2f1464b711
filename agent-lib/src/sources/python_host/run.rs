//! Decides when the agent's Python code runs: as soon as PyTorch is loaded, on the main thread, between two statements of the
//! program. The sender requests a run with `Py_AddPendingCall`, which needs no lock of the interpreter, and never waits.
//!
//! ```text
//! IDLE -> REQUESTED -> DONE                 PyTorch was found; a run was requested; it has finished
//!           |      `-> LATER -> REQUESTED   PyTorch is still being imported, the program is tracing, or it interrupted the code
//!           |      `-> AGAIN -> REQUESTED   some work was left, which continues after 0.2 s
//!           `--------> FAILED
//! ```
//!
//! The first run calls the Python function `start`. Later runs call `tick`, which processes new objects. They are requested every
//! 0.5 s if records were made since the last one. A quiet program without an optimizer gets them after 0.2 s.

use crate::driver::core::Core;
use crate::naming::{autograd, callers, slot};
use crate::record::{panic, status};
use crate::sources::python_host::bootstrap::{Ended, Functions, Namespace};
use crate::sources::python_host::idle;
use gpumem_wire::{Layer, LayerState};
use std::ffi::{CStr, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::*};

const IDLE: u8 = 0;
const REQUESTED: u8 = 1;
const DONE: u8 = 2;
const LATER: u8 = 3;
const FAILED: u8 = 4;
const AGAIN: u8 = 5;

static STATE: AtomicU8 = AtomicU8::new(IDLE);
/// Whether the agent's Python code has finished at least one run.
static BEGUN: AtomicBool = AtomicBool::new(false);
/// Time from which the delay to the next request counts: that of the last request or the end of the last run.
static SINCE_NS: AtomicU64 = AtomicU64::new(0);
/// Number of records at the last request of a tick (run of the agent's Python code after the first).
static RECORDS: AtomicU64 = AtomicU64::new(0);
/// Whether the last tick found no optimizer. Then only ticks find new Python objects.
static TRAINS_NOTHING: AtomicBool = AtomicBool::new(false);
/// Whether the program reports its steps itself.
static STEPS: AtomicBool = AtomicBool::new(false);
/// The interpreter, once it was found. Its namespace is used only with the interpreter's lock.
static PYTHON: Mutex<Option<Python>> = Mutex::new(None);

/// Functions of the interpreter, and the namespace of the agent's Python code once it was loaded.
#[derive(Clone, Copy)]
struct Python(Api, Option<Namespace>);
// SAFETY: addresses of functions, and a Python object that is used only with the interpreter's lock.
unsafe impl Send for Python {}

/// Delay before the next request in state `LATER`. Also the delay before the agent's own thread runs the code for the main
/// thread.
const LATER_NS: u64 = 50_000_000;
/// Delay before the tick that continues unfinished work of an earlier tick, and before each tick of a quiet program without an
/// optimizer.
const AGAIN_NS: u64 = 200_000_000;
const TICK_NS: u64 = 500_000_000;
/// Longest wait (ns) for the first run of the agent's Python code. If the main thread executes no Python statement for longer, the
/// roles of tensors are reported as not exact.
const SILENCE_NS: u64 = 5_000_000_000;

#[derive(Clone, Copy)]
pub(crate) struct Api {
    /// Functions that exist in all versions.
    pub functions: Functions,
    /// Py_IsFinalizing: not 0 while the interpreter ends.
    is_finalizing: Option<unsafe extern "C" fn() -> c_int>,
}

impl Api {
    fn find() -> Option<Self> {
        let functions = Functions::find(symbol)?;
        let is_finalizing = symbol(c"Py_IsFinalizing").or_else(|| symbol(c"_Py_IsFinalizing"));
        // SAFETY: both functions have this type.
        let is_finalizing = is_finalizing
            .map(|at| unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(at) });
        Some(Api { functions, is_finalizing })
    }

    fn runs(&self) -> bool {
        // SAFETY: both may be called at any time, without the interpreter's lock.
        unsafe { (self.functions.is_initialized)() != 0 && self.is_finalizing.is_none_or(|ask| ask() == 0) }
    }
}

/// Finds a symbol by name: a global symbol of the program and its libraries, or one of a libpython that was loaded privately.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a C string.
    let found = callers::in_loader(|| unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })?;
    if !found.is_null() {
        return Some(found);
    }
    let is_python = |file: &[u8]| file.starts_with(b"libpython3.") && file.len() > b"libpython3.so".len();
    slot::with(is_python, |image| image.defines(name)).flatten().map(|at| at as *mut c_void)
}

pub(crate) fn in_child() {
    STATE.store(FAILED, Relaxed);
}

/// Restarts in a forked child that initialises CUDA itself. Python code loaded before the fork is kept.
pub(crate) fn restart() {
    BEGUN.store(false, Relaxed);
    idle::restart();
    STATE.store(IDLE, Release);
}

/// Stores that the program calls `gpumem_step`. From then on, optimizer steps do not count as steps of the program.
#[inline]
pub(crate) fn note_program_step() {
    if !STEPS.load(Relaxed) {
        STEPS.store(true, Relaxed);
    }
}

/// Whether optimizer steps count as the program's steps: the program does not report steps itself.
pub(crate) fn are_optimizer_steps_counted() -> bool {
    !STEPS.load(Relaxed)
}

/// Number of optimizer steps that counted as the program's steps, in total and when the epoch began.
static OPTIMIZER_STEPS: AtomicU64 = AtomicU64::new(0);
static STEPS_BEFORE_EPOCH: AtomicU64 = AtomicU64::new(0);

/// Stores `count`, the number of optimizer steps so far. Returns the number of the next step, counted from the epoch's start.
pub(crate) fn step_number_after(count: u64) -> u64 {
    OPTIMIZER_STEPS.store(count, Relaxed);
    count.saturating_sub(STEPS_BEFORE_EPOCH.load(Relaxed))
}

/// Begins an epoch, which restarts step numbers. Returns whether optimizer steps have numbered steps so far. Before the first
/// optimizer step it is unknown which steps count, and the first forward pass begins the first step.
pub(crate) fn begin_epoch() -> bool {
    let count = OPTIMIZER_STEPS.load(Relaxed);
    STEPS_BEFORE_EPOCH.store(count, Relaxed);
    are_optimizer_steps_counted() && count > 0
}

/// Reports whether the agent's Python code finds exact roles of tensors. `state` is a `LayerState` of the wire format.
pub(crate) fn report_roles(state: i32, reason: &[u8]) {
    let state = LayerState::from_code(u8::try_from(state).unwrap_or(0));
    status::report_layer(Layer::Roles, state, &String::from_utf8_lossy(reason));
}

/// Reports the sizes of the program's models that the agent's Python code found.
pub(crate) fn report_models(models: &[u8]) {
    status::report_models(&String::from_utf8_lossy(models));
}

/// Requests a run of the agent's Python code if one is due. Called by the sender each round and at the start; cheap otherwise.
pub(crate) fn request_if_due(core: &Core) {
    let enabled = core.settings.layers;
    if STATE.load(Relaxed) == IDLE {
        let off = "switched off with GPUMEM_AUTOGRAD=0";
        status::report_no_torch(Layer::Autograd, enabled.torch, enabled.autograd, off);
        let off = "switched off with GPUMEM_PYTHON=0";
        status::report_no_torch(Layer::Roles, enabled.torch, enabled.python, off);
        if !autograd::is_torch_loaded() {
            return;
        }
    }
    if !enabled.torch {
        return;
    }
    if !enabled.python {
        return autograd::attach(core);
    }
    let now = core.recorder.clock.now();
    let waited = now.saturating_sub(SINCE_NS.load(Relaxed));
    idle::note(core.recorder.ring.head(), now);
    let is_due = waited > TICK_NS || waited > AGAIN_NS && TRAINS_NOTHING.load(Relaxed) && idle::is_quiet(now);
    match STATE.load(Acquire) {
        IDLE if SINCE_NS.load(Relaxed) == 0 || waited > TICK_NS => request(core, now),
        LATER if waited > LATER_NS => request(core, now),
        AGAIN if waited > AGAIN_NS => request(core, now),
        DONE if is_due && RECORDS.swap(core.recorder.ring.head(), Relaxed) != core.recorder.ring.head() => {
            request(core, now)
        }
        // The main thread runs no statement, so the request stays pending.
        REQUESTED if BEGUN.load(Acquire) && waited > LATER_NS && loaded().is_some() => {
            idle::start_if_idle(core, now);
        }
        REQUESTED if waited > SILENCE_NS && !BEGUN.load(Relaxed) => {
            status::report_layer(
                Layer::Roles,
                LayerState::Degraded,
                "the main thread executes no Python statement",
            );
        }
        _ => {}
    }
}

/// Returns the interpreter, if it was found and runs.
fn running() -> Option<Python> {
    PYTHON.try_lock().map_or(None, |python| *python).filter(|Python(api, _)| api.runs())
}

/// Returns the interpreter's functions and the namespace, if the interpreter runs and the agent's code was loaded.
pub(crate) fn loaded() -> Option<(Api, Namespace)> {
    let Python(api, namespace) = running()?;
    Some((api, namespace?))
}

fn request(core: &Core, now: u64) {
    SINCE_NS.store(now, Relaxed);
    let Ok(mut python) = PYTHON.try_lock() else { return };
    if python.is_none() {
        *python = Api::find().map(|api| Python(api, None));
    }
    let Some(Python(api, _)) = *python else {
        autograd::attach(core);
        return status::report_layer(Layer::Roles, LayerState::Absent, "no Python in this process");
    };
    drop(python);
    if !api.runs() {
        return;
    }
    let before = STATE.swap(REQUESTED, AcqRel);
    // SAFETY: may be called on any thread; the function lives as long as the process.
    if unsafe { (api.functions.add_pending)(run, std::ptr::null_mut()) } != 0 {
        STATE.store(before, Release); // the interpreter's queue is full
    }
}

/// Runs the agent's Python code; called by the interpreter. Returns -1 if the program was interrupted, so that the error stays
/// raised.
extern "C" fn run(_: *mut c_void) -> c_int {
    panic::shielded(0, || {
        if !status::armed() || STATE.load(Acquire) != REQUESTED {
            return 0;
        }
        let result = call_python();
        TRAINS_NOTHING.store(matches!(result, Ok(3 | 4)), Relaxed);
        // The numbers that `start` and `tick` (`_core.py`) return.
        let state = match result {
            Ok(0 | 4) => DONE,
            Ok(1) | Err(Ended::Interrupted) => LATER,
            Ok(3) => AGAIN,
            Ok(_) | Err(Ended::Failed) => FAILED,
        };
        if result == Err(Ended::Failed) {
            let why = "the agent's Python code raised an error";
            status::report_layer(Layer::Roles, LayerState::Failed, why);
        }
        if matches!(state, DONE | AGAIN) {
            BEGUN.store(true, Release);
        }
        if let Some(core) = Core::get() {
            SINCE_NS.store(core.recorder.clock.now(), Relaxed);
        }
        STATE.store(state, Release);
        if result == Err(Ended::Interrupted) { -1 } else { 0 }
    })
}

/// Calls the agent's Python code, and loads it the first time. Returns the number that the code returns; 1 if it could not be
/// called.
fn call_python() -> Result<i64, Ended> {
    // A signal handler may interrupt the agent's code, but this function is never called recursively.
    let Some(Python(api, namespace)) = running() else { return Ok(1) };
    if let Some(core) = Core::get() {
        autograd::attach(core);
    }
    // SAFETY: the interpreter calls with its lock held and no error raised.
    unsafe {
        let namespace = match namespace {
            Some(namespace) => namespace,
            None => {
                let namespace = api.load()?;
                if let Ok(mut python) = PYTHON.lock() {
                    *python = Some(Python(api, Some(namespace)));
                }
                namespace
            }
        };
        api.call(namespace, if BEGUN.load(Acquire) { c"tick" } else { c"start" })
    }
}
