//! Starts the agent inside of `InitializeInjection`, on the thread that called cuInit. It takes a few milliseconds.

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

/// The process that is starting the agent, 0 for none. Not a mutex: a child that is forked meanwhile would wait forever.
static STARTING: AtomicU32 = AtomicU32::new(0);

struct Starting;

impl Starting {
    fn take(pid: u32) -> Self {
        while let Err(holder) = STARTING.compare_exchange(0, pid, Acquire, Relaxed) {
            if holder != pid && STARTING.compare_exchange(holder, pid, Acquire, Relaxed).is_ok() {
                break; // left by the parent: its thread does not exist here
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

/// Returns the functions of another copy of the library in this process, if it was first. The very first call of the C API may
/// come before CUDA is initialised. Then only the memory is made, so that scopes and names count from the beginning.
#[cold]
pub(crate) fn elsewhere() -> Option<&'static Functions> {
    if status::fresh() {
        crate::record::panic::shielded((), || {
            prepare(settings);
        });
    }
    second_copy::first()
}

/// Returns the process's agent, made on first use; `None` if it is disabled or another copy runs.
#[cold]
fn ready() -> Option<&'static Core> {
    if status::fresh() {
        elsewhere();
    }
    // A forked child is silent until it initialises CUDA itself. NVTX functions that it gets now work from then on.
    Core::get().filter(|core| status::armed() || core.pid != std::process::id())
}

/// Makes the memory and installs the handlers, without the driver. `None` if disabled, or if another copy runs.
fn prepare(settings: impl FnOnce() -> Settings) -> Option<&'static Core> {
    let pid = std::process::id();
    let _starting = Starting::take(pid);
    // Initialises the thread-locals of this thread now. Doing so later without memory would end the process.
    std::hint::black_box(std::thread::current().id());
    let old = Core::get();
    if let Some(core) = old.filter(|core| core.pid == pid) {
        return Some(core);
    }
    if second_copy::first().is_some() || second_copy::look(pid).is_some() {
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
        // Forked before CUDA was initialised: open scopes keep their names, everything else is reset.
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
    status::armed().then_some(core) // without the sender there is no agent
}

/// The process of which a thread is inside of `injected`; 0 for none.
static INJECTING: AtomicU32 = AtomicU32::new(0);

/// Starts the agent, in cuInit or when a program attaches late. Not recursive: subscribing may make CUPTI call cuInit.
pub(crate) fn injected() {
    let pid = std::process::id();
    if INJECTING.swap(pid, Acquire) != pid {
        inject();
        INJECTING.store(0, Release);
    }
}

/// Called by a library with its first NVTX call. Returns 0 if the library's NVTX calls must do nothing.
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
        core.devices.set_driver(driver);
        for ordinal in active_devices(&core.devices) {
            subscribe::note_late();
            core.device(ordinal); // records the device, to which its earlier memory is attributed
            core.torch.is_late.store(true, Relaxed);
        }
        subscribe::attach(core);
    }
    if core.settings.layers.torch {
        torch::patch::look(true);
    }
    // Not left to the sender, which may be late: the Python code should run before the program's next statement.
    crate::sources::python_host::run::look(core);
}

/// Returns the devices that have a context already: their allocations before the agent's start were not observed. Inside of
/// cuInit the driver returns that it is not initialised, so the list is empty.
fn active_devices(devices: &Devices) -> impl Iterator<Item = u32> {
    let count = devices.count().filter(|(result, _)| *result == 0).map_or(0, |(_, count)| count);
    let active = (0..count).filter(|&device| devices.is_primary_active(device) == Some(true));
    active.map(i32::cast_unsigned)
}
