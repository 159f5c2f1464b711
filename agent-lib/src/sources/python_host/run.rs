//! Decides when the agent's Python code runs: as soon as PyTorch is loaded, on the main thread, between two statements of the
//! program. The sender requests it with `Py_AddPendingCall`, which needs no lock of the interpreter, and never waits.
//!
//! ```text
//! IDLE -> ASKED -> DONE             PyTorch was found; the run was requested; it has finished
//!           |  `-> LATER -> ASKED   PyTorch is still being imported, or the program is tracing its computation
//!           |  `-> AGAIN -> ASKED   some work was left for when the program is quiet
//!           `----> FAILED
//! ```
//!
//! After that, the code is requested regularly to process new objects, if memory was allocated (`tick`).

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
const ASKED: u8 = 1;
const DONE: u8 = 2;
const LATER: u8 = 3;
const FAILED: u8 = 4;
const AGAIN: u8 = 5;

static STATE: AtomicU8 = AtomicU8::new(IDLE);
/// The agent's code has finished at least once.
static BEGUN: AtomicBool = AtomicBool::new(false);
/// Time of the last request, or time from which the next delay counts.
static SINCE_NS: AtomicU64 = AtomicU64::new(0);
/// Records at the last tick.
static RECORDS: AtomicU64 = AtomicU64::new(0);
/// The last tick found no optimizer: only ticks find new objects then.
static TRAINS_NOTHING: AtomicBool = AtomicBool::new(false);
/// The program reports its steps itself.
static STEPS: AtomicBool = AtomicBool::new(false);
/// Used only with the interpreter's lock, by the main thread.
static NAMESPACE: Mutex<Option<Held>> = Mutex::new(None);

#[derive(Debug, Clone, Copy)]
struct Held(Api, Option<Namespace>);
// SAFETY: addresses of functions, and a Python object that is used only with the interpreter's lock.
unsafe impl Send for Held {}

/// Delay before the next request after the result "later", and before another thread runs what the main thread should run.
const PATIENCE_NS: u64 = 50_000_000;
/// Delay before the tick that continues unfinished work of an earlier tick.
const AGAIN_NS: u64 = 200_000_000;
const TICK_NS: u64 = 500_000_000;
/// If the main thread runs no statement for this long, the layer is reported as degraded.
const SILENCE_NS: u64 = 5_000_000_000;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Api {
    /// Functions that exist in all versions.
    pub functions: Functions,
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
    // SAFETY: the name is a C string; dlsym returns the first library's symbol.
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

/// Notes that the program calls `gpumem_step`, so steps of optimizers are not counted as steps.
#[inline]
pub(crate) fn program_steps() {
    if !STEPS.load(Relaxed) {
        STEPS.store(true, Relaxed);
    }
}

/// Whether an optimizer's step counts as the program's step.
pub(crate) fn are_steps_ours() -> bool {
    !STEPS.load(Relaxed)
}

/// Steps of optimizers while they count as the program's steps, and their number when the epoch began.
static AUTO: AtomicU64 = AtomicU64::new(0);
static BEFORE: AtomicU64 = AtomicU64::new(0);

/// Returns the number in its epoch of the step after `count` steps of an optimizer.
pub(crate) fn auto_number(count: u64) -> u64 {
    AUTO.store(count, Relaxed);
    count.saturating_sub(BEFORE.load(Relaxed))
}

/// Begins an epoch, which restarts step numbers. Returns whether optimizers number the steps and have done so already. Before
/// the first optimizer step the source of step numbers is unknown, and the first forward pass begins the first step.
pub(crate) fn begin_epoch() -> bool {
    let count = AUTO.load(Relaxed);
    BEFORE.store(count, Relaxed);
    are_steps_ours() && count > 0
}

/// Reports the state of the layer of exact roles, as determined by the agent's Python code.
pub(crate) fn say_roles(state: i32, reason: &[u8]) {
    let state = LayerState::from_code(u8::try_from(state).unwrap_or(0));
    status::report_layer(Layer::Roles, state, &String::from_utf8_lossy(reason));
}

/// Requests the agent's Python code once an interpreter can run it. Called each round and at injection; cheap without work.
pub(crate) fn look(core: &Core) {
    let may = core.settings.layers;
    if STATE.load(Relaxed) == IDLE {
        let off = "switched off with GPUMEM_AUTOGRAD=0";
        status::report_no_torch(Layer::Autograd, may.torch, may.autograd, off);
        let off = "switched off with GPUMEM_PYTHON=0";
        status::report_no_torch(Layer::Roles, may.torch, may.python, off);
        if !autograd::is_seen() {
            return;
        }
    }
    if !may.torch {
        return;
    }
    if !may.python {
        return autograd::attach(core);
    }
    let now = core.recorder.clock.now();
    let waited = now.saturating_sub(SINCE_NS.load(Relaxed));
    idle::note(core.recorder.ring.head(), now);
    let is_due = waited > TICK_NS || waited > AGAIN_NS && TRAINS_NOTHING.load(Relaxed) && idle::is_quiet(now);
    match STATE.load(Acquire) {
        IDLE if SINCE_NS.load(Relaxed) == 0 || waited > TICK_NS => ask(core, now),
        LATER if waited > PATIENCE_NS => ask(core, now),
        AGAIN if waited > AGAIN_NS => ask(core, now),
        DONE if is_due && RECORDS.swap(core.recorder.ring.head(), Relaxed) != core.recorder.ring.head() => {
            ask(core, now)
        }
        // The main thread has a pending request but runs no statement.
        ASKED if BEGUN.load(Acquire) && waited > PATIENCE_NS && loaded().is_some() => idle::look(core, now),
        ASKED if waited > SILENCE_NS && !BEGUN.load(Relaxed) => {
            status::report_layer(
                Layer::Roles,
                LayerState::Degraded,
                "the main thread executes no Python statement",
            );
        }
        _ => {}
    }
}

fn held() -> Option<Held> {
    NAMESPACE.try_lock().map_or(None, |held| *held)
}

/// Returns the interpreter's functions and the namespace, if the interpreter runs and the code was loaded.
pub(crate) fn loaded() -> Option<(Functions, Namespace)> {
    let Held(api, namespace) = held().filter(|Held(api, _)| api.runs())?;
    Some((api.functions, namespace?))
}

fn ask(core: &Core, now: u64) {
    SINCE_NS.store(now, Relaxed);
    let Ok(mut held) = NAMESPACE.try_lock() else { return };
    if held.is_none() {
        *held = Api::find().map(|api| Held(api, None));
    }
    let Some(Held(api, _)) = *held else {
        autograd::attach(core);
        return status::report_layer(Layer::Roles, LayerState::Absent, "no Python in this process");
    };
    drop(held);
    if !api.runs() {
        return;
    }
    let before = STATE.swap(ASKED, AcqRel);
    // SAFETY: may be called on any thread; the function lives as long as the process.
    if unsafe { (api.functions.add_pending)(run, std::ptr::null_mut()) } != 0 {
        STATE.store(before, Release); // the interpreter's queue is full
    }
}

/// Called by the interpreter. Returns -1 to pass on a raised error.
extern "C" fn run(_: *mut c_void) -> c_int {
    panic::shielded(0, || {
        if !status::armed() || STATE.load(Acquire) != ASKED {
            return 0;
        }
        let done = run_ours();
        TRAINS_NOTHING.store(matches!(done, Ok(3 | 4)), Relaxed);
        let (state, answer) = match done {
            Ok(0 | 4) => (DONE, 0),
            Ok(1) => (LATER, 0),
            Ok(3) => (AGAIN, 0),
            Ok(_) => (FAILED, 0),
            Err(Ended::Failed) => {
                let why = "the agent's Python code raised an error";
                status::report_layer(Layer::Roles, LayerState::Failed, why);
                (FAILED, 0)
            }
            Err(Ended::Interrupted) => (LATER, -1),
        };
        if state == DONE {
            BEGUN.store(true, Release);
        }
        if let Some(core) = Core::get() {
            SINCE_NS.store(core.recorder.clock.now(), Relaxed);
        }
        STATE.store(state, Release);
        answer
    })
}

fn run_ours() -> Result<i64, Ended> {
    // A signal handler may interrupt the agent's code, but this function is never called recursively.
    let Some(Held(api, namespace)) = held() else { return Ok(1) };
    if !api.runs() {
        return Ok(1);
    }
    if let Some(core) = Core::get() {
        autograd::attach(core);
    }
    // SAFETY: the interpreter calls with its lock held and no error raised.
    unsafe {
        let namespace = match namespace {
            Some(namespace) => namespace,
            None => {
                let namespace = api.load()?;
                if let Ok(mut held) = NAMESPACE.lock() {
                    *held = Some(Held(api, Some(namespace)));
                }
                namespace
            }
        };
        api.call(namespace, if BEGUN.load(Acquire) { c"tick" } else { c"start" })
    }
}
