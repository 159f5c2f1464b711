//! Starts the agent, usually in `InitializeInjection` on the thread that calls cuInit. The start takes a few milliseconds.

use crate::base::env::Settings;
use crate::base::fault_injection;
use crate::base::seccomp::syscalls_allowed;
use crate::driver::core::Core;
use crate::driver::devices::Devices;
use crate::entry::{fork, second_copy};
use crate::record::{panic, status};
use crate::sources::cupti::subscribe;
use crate::sources::{nvtx, torch};
use crate::{Functions, sender, threads};
use cupti_sys::Driver;
use cupti_sys::nvtx::GetExportTable;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::Duration;

/// Lock for starting the agent: pid of the process whose thread holds it; 0 for none. A child forked meanwhile sees the parent's
/// pid; with a mutex it would wait forever.
static STARTING: AtomicU32 = AtomicU32::new(0);

struct Starting;

impl Starting {
    fn take(pid: u32) -> Self {
        while let Err(holder) = STARTING.compare_exchange(0, pid, Acquire, Relaxed) {
            if holder != pid && STARTING.compare_exchange(holder, pid, Acquire, Relaxed).is_ok() {
                break; // a thread of the parent process held it at the fork
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Starting
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        STARTING.store(0, Release);
    }
}

fn settings() -> Settings {
    // SAFETY: takes no arguments, never fails.
    Settings::read(std::process::id(), unsafe { libc::getuid() })
}

/// Returns the functions of another copy of the library, if that copy was started first. If the C API is called before CUDA is
/// initialised, makes the agent's memory, so that scopes and names are recorded from the beginning.
#[cold]
pub(crate) fn elsewhere() -> Option<&'static Functions> {
    if status::fresh() {
        crate::record::panic::shielded((), || {
            prepare(settings);
        });
    }
    second_copy::first()
}

/// Returns the process's core, which is made on first use; `None` if the agent is disabled or another copy runs.
#[cold]
fn ready() -> Option<&'static Core> {
    if status::fresh() {
        elsewhere();
    }
    // A forked child records nothing until it initialises CUDA itself. NVTX functions installed now work from then on.
    Core::get().filter(|core| status::armed() || core.pid != std::process::id())
}

/// Makes the core and installs the handlers of fork and exit. Does not use the driver. `None` if the agent is disabled or another
/// copy runs.
fn prepare(settings: impl FnOnce() -> Settings) -> Option<&'static Core> {
    let pid = std::process::id();
    let _starting = Starting::take(pid);
    // Initialises Rust's thread-local data of this thread now. If memory is used up later, this would end the process.
    std::hint::black_box(std::thread::current().id());
    let old = Core::get();
    if let Some(core) = old.filter(|core| core.pid == pid) {
        return Some(core);
    }
    if second_copy::first().is_some() || second_copy::find(pid).is_some() {
        status::disarm();
        return None;
    }
    panic::install_hook();
    fault_injection::read();
    let settings = settings();
    let is_wanted = !settings.disabled && syscalls_allowed();
    let core = if is_wanted { Core::new(settings, second_copy::own_table()) } else { None };
    let Some(core) = core else {
        status::disarm();
        return None;
    };
    if let Some(parent) = old {
        // The process was forked before CUDA was initialised. Names and open scopes are kept, everything else is reset.
        fork::reset();
        core.recorder.names.adopt(&parent.recorder.names);
        threads::reset_after_fork();
        crate::sources::python_host::run::restart();
    }
    let core = Core::install(core);
    fork::install();
    status::arm();
    Some(core)
}

/// Starts everything but CUPTI; `None` if the agent is disabled or its thread cannot be started.
pub fn start_with(settings: Settings) -> Option<&'static Core> {
    let core = prepare(|| settings)?;
    crate::naming::python::started(core);
    sender::start(core);
    status::armed().then_some(core) // disarmed if the sender's thread could not be started
}

/// Pid of the process of which a thread is inside of `injected`; 0 for none.
static INJECTING: AtomicU32 = AtomicU32::new(0);

/// Starts the agent, in cuInit or later when a program loads it. A nested call does nothing: CUPTI may call cuInit itself.
pub(crate) fn injected() {
    let pid = std::process::id();
    if INJECTING.swap(pid, Acquire) != pid {
        inject();
        INJECTING.store(0, Release);
    }
}

/// Called by a library with its first NVTX call. Returns 0 if the library's NVTX calls are not needed.
pub(crate) fn injected_into_nvtx(get_export_table: Option<GetExportTable>) -> c_int {
    let Some(get) = get_export_table else { return 0 };
    match ready() {
        Some(core) => nvtx::initialize(core, get),
        None => second_copy::first().map_or(0, |first| (first.initialize_nvtx)(get_export_table)),
    }
}

fn inject() {
    fault_injection::at("start");
    let settings = settings();
    let next = settings.next_injection.clone();
    if let Some(path) = next.filter(|_| !settings.disabled) {
        second_copy::chain(&path);
    }
    let Some(core) = start_with(settings) else {
        if let Some(first) = second_copy::first() {
            (first.initialize)();
        }
        return;
    };
    if let Some(driver) = Driver::loaded() {
        let _ = core.devices.driver.set(driver);
        for ordinal in active_devices(&core.devices) {
            subscribe::note_late();
            core.device(ordinal); // records the device, so that earlier memory can be attributed to it
            core.torch.is_late.store(true, Relaxed);
        }
        subscribe::attach(core);
    }
    if core.settings.layers.torch {
        torch::patch::search(true);
    }
    // Called here, too, and not only by the sender, so that the Python code runs before the program's next statement.
    crate::sources::python_host::run::request_if_due(core);
}

/// Returns the devices whose primary context exists already: allocations on them may be older than the agent. There are none
/// during cuInit, because the driver returns an error then.
fn active_devices(devices: &Devices) -> impl Iterator<Item = u32> {
    let count = devices.count().filter(|(result, _)| *result == 0).map_or(0, |(_, count)| count);
    let active = (0..count).filter(|&device| devices.is_primary_active(device) == Some(true));
    active.map(i32::cast_unsigned)
}
