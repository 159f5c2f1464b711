//! Starting: what happens inside `InitializeInjection`, on the thread that called cuInit, in a few milliseconds.

use crate::core::Core;
use crate::cupti::subscribe;
use crate::env::Settings;
use crate::{fork, second, sender, state};
use cupti_sys::{Driver, Library};
use std::sync::Mutex;

/// One start at a time.
static STARTING: Mutex<()> = Mutex::new(());

fn settings() -> Settings {
    // SAFETY: no arguments, never fails.
    Settings::read(std::process::id(), unsafe { libc::getuid() })
}

/// Everything but CUPTI: memory, thread, handlers. Also for programs that only report pools of their own.
pub fn start() -> Option<&'static Core> {
    if let Some(core) = Core::get() {
        return Some(core);
    }
    start_with(settings())
}

/// As `start`, with settings that are given.
pub fn start_with(settings: Settings) -> Option<&'static Core> {
    let _starting = STARTING.lock().ok()?;
    if let Some(core) = Core::get() {
        return Some(core);
    }
    if settings.disabled {
        return None;
    }
    let core = Core::install(Core::new(settings)?);
    if let Some(driver) = Driver::loaded() {
        core.devices.set_driver(driver);
    }
    second::publish(core);
    fork::install();
    state::arm();
    sender::start(core);
    Some(core)
}

/// What the driver calls while it initialises.
pub fn injected() {
    let settings = settings();
    if settings.disabled || second::is_there() {
        return;
    }
    if let Some(path) = &settings.next_injection {
        chain(path);
    }
    let Some(core) = start_with(settings) else { return };
    if let Some(driver) = Driver::loaded() {
        core.devices.set_driver(driver);
        if context_exists(&driver) {
            subscribe::note_late();
        }
        subscribe::attach(core);
    }
}

/// Whether a device has a context already: then there were allocations that nobody saw. Inside cuInit the driver answers
/// that it is not initialised.
fn context_exists(driver: &Driver) -> bool {
    let mut count = 0;
    // SAFETY: functions of the loaded driver, each with places for its answers.
    unsafe {
        if driver.device_get_count.is_none_or(|get| get(&mut count) != 0) {
            return false;
        }
        let Some(get) = driver.primary_ctx_get_state else { return false };
        (0..count).any(|device| {
            let (mut flags, mut active) = (0, 0);
            get(device, &mut flags, &mut active) == 0 && active != 0
        })
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
