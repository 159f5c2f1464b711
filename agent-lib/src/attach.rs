//! Starting: what happens inside `InitializeInjection`, on the thread that called cuInit, in a few milliseconds.

use crate::core::Core;
use crate::cupti::subscribe;
use crate::env::Settings;
use crate::{Functions, fork, python, second, sender, state, threads, torch};
use cupti_sys::{Driver, Library};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::*};

/// One start at a time.
static STARTING: Mutex<()> = Mutex::new(());

fn settings() -> Settings {
    // SAFETY: no arguments, never fails.
    Settings::read(std::process::id(), unsafe { libc::getuid() })
}

/// Another copy of the library in this process, if it was first. The very first call of the C API may come before CUDA is
/// initialised: then the memory is made, so that scopes and names count from the beginning, and nothing else.
#[cold]
pub fn elsewhere() -> Option<&'static Functions> {
    if state::fresh() {
        crate::ffi::shielded((), || {
            prepare(settings);
        });
    }
    second::first()
}

/// The process's agent, made if nobody has called so far; `None` if it is disabled or another copy has it.
#[cold]
pub fn ready() -> Option<&'static Core> {
    if state::fresh() {
        elsewhere();
    }
    // A forked child is silent until it initialises CUDA itself; what it is given now works then.
    Core::get().filter(|core| state::armed() || core.pid != std::process::id())
}

/// Memory and handlers; also for programs that never call the driver. `None` if disabled, or if another copy has it.
fn prepare(settings: impl FnOnce() -> Settings) -> Option<&'static Core> {
    let _starting = STARTING.lock().ok()?;
    let pid = std::process::id();
    let old = Core::get();
    if let Some(core) = old.filter(|core| core.pid == pid) {
        return Some(core);
    }
    if second::first().is_some() || second::look(pid).is_some() {
        state::disarm();
        return None;
    }
    let settings = settings();
    let core = if settings.disabled { None } else { Core::new(settings) };
    let Some(core) = core else {
        state::disarm();
        return None;
    };
    if let Some(parent) = old {
        // Forked before CUDA was initialised: scopes that are open keep their names, everything else begins anew.
        core.names.adopt(&parent.names);
        threads::adopt();
        python::run::restart();
    }
    let core = Core::install(core);
    fork::install();
    state::arm();
    Some(core)
}

/// Everything but CUPTI.
pub fn start_with(settings: Settings) -> Option<&'static Core> {
    let core = prepare(|| settings)?;
    crate::python::started(core);
    sender::start(core);
    Some(core)
}

/// A thread is inside of `injected`.
static INJECTING: AtomicBool = AtomicBool::new(false);

/// What the driver calls while it initialises, and a program that comes late. Subscribing may make CUPTI call cuInit, and that this.
pub fn injected() {
    if !INJECTING.swap(true, Acquire) {
        inject();
        INJECTING.store(false, Release);
    }
}

fn inject() {
    let settings = settings();
    let next = settings.next_injection.clone();
    if let Some(path) = next.filter(|_| !settings.disabled) {
        chain(&path);
    }
    let Some(core) = start_with(settings) else {
        if let Some(first) = second::first() {
            (first.initialize)();
        }
        return;
    };
    if let Some(driver) = Driver::loaded() {
        core.devices.set_driver(driver);
        for ordinal in active_devices(&driver) {
            subscribe::note_late();
            core.device(ordinal); // what it holds is known by this name
            core.torch.is_late.store(true, Relaxed);
        }
        subscribe::attach(core);
    }
    if core.settings.layers.torch {
        torch::patch::look(true);
    }
    // Not left to the sender, which may come late on a busy machine: our code is to run before the program's next statement.
    python::run::look(core);
}

/// Devices that have a context already: there were allocations that nobody saw. Inside cuInit the driver answers that it is
/// not initialised.
fn active_devices(driver: &Driver) -> Vec<u32> {
    let mut count = 0;
    // SAFETY: functions of the loaded driver, each with places for its answers.
    unsafe {
        if driver.device_get_count.is_none_or(|get| get(&mut count) != 0) {
            return Vec::new();
        }
        let Some(get) = driver.primary_ctx_get_state else { return Vec::new() };
        let is_active = |device: &i32| {
            let (mut flags, mut active) = (0, 0);
            get(*device, &mut flags, &mut active) == 0 && active != 0
        };
        (0..count).filter(is_active).map(i32::cast_unsigned).collect()
    }
}

/// Another tool's library, which was to be injected where we are: it goes first.
fn chain(path: &std::path::Path) {
    let Some(file) = crate::cupti::find::c_path(path) else { return };
    let Some(library) = Library::open(&file) else { return };
    // SAFETY: an injection library exports this function with this type.
    let initialize: Option<unsafe extern "C" fn() -> i32> =
        unsafe { library.function(c"InitializeInjection") };
    if let Some(initialize) = initialize {
        // SAFETY: called once, where the driver would have called it.
        unsafe { initialize() };
    }
}
