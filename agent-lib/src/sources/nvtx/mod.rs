//! Turns NVTX ranges, with which programs annotate themselves, into scopes.
//!
//! Each library that contains NVTX requests the functions on its first NVTX call, under its own spin lock. Every library gets
//! the same functions, so domains and strings are numbers with one meaning in the whole process. A push opens a scope on the
//! same stack as the C API, and a pop closes the last scope of the same domain. Ranges that are started and ended belong to the
//! process. They count only with `GPUMEM_NVTX_RANGES=1`, as the tag of threads without any other name.

mod calls;
mod scopes;
mod text;

use crate::driver::core::Core;
use crate::record::status;
use cupti_sys::nvtx::{self, Callbacks, GetExportTable, Table, VersionInfo};
use gpumem_wire::{Layer, LayerState};
use std::ffi::c_int;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::*};

/// Number of libraries that requested functions and got them.
static SERVED: AtomicU32 = AtomicU32::new(0);
/// Number of libraries that requested functions, but whose tables have no place for them.
static UNKNOWN_LAYOUT: AtomicU32 = AtomicU32::new(0);

/// Gives a library its functions; returns 0 if it should go without.
pub(crate) fn initialize(core: &Core, get: GetExportTable) -> c_int {
    if !core.settings.layers.nvtx {
        return 0; // every NVTX call of that library then does nothing
    }
    // SAFETY: NVTX's own function, called while it initialises. It returns null for unknown numbers.
    let filled = unsafe { fill(get) };
    if filled == 0 { &UNKNOWN_LAYOUT } else { &SERVED }.fetch_add(1, AcqRel);
    c_int::from(filled > 0)
}

/// Writes the agent's functions into the library's tables. Returns the number of functions written.
///
/// # Safety
/// `get` must be NVTX's function.
unsafe fn fill(get: GetExportTable) -> usize {
    // SAFETY: the caller guarantees `get`; tables are null or structures that live as long as the library.
    unsafe {
        let version = get(nvtx::ETID_VERSION_INFO).cast::<VersionInfo>().as_ref();
        if let Some(version) = version.filter(|version| version.struct_size >= size_of::<VersionInfo>())
            && let Some(set) = version.set_injection_version
        {
            set(nvtx::VERSION);
        }
        let callbacks = get(nvtx::ETID_CALLBACKS).cast::<Callbacks>().as_ref();
        let callbacks = callbacks.filter(|callbacks| callbacks.struct_size >= size_of::<Callbacks>());
        let Some(get_table) = callbacks.and_then(|callbacks| callbacks.get_module_function_table) else {
            return 0;
        };
        let mut filled = 0;
        for (module, functions) in [(nvtx::MODULE_CORE, calls::CORE), (nvtx::MODULE_CORE2, calls::CORE2)] {
            let (mut table, mut count): (Table, u32) = (std::ptr::null_mut(), 0);
            if get_table(module, &mut table, &mut count) != 1 || table.is_null() {
                continue;
            }
            for &(id, function) in functions.iter().filter(|(id, _)| *id < count) {
                let place = *table.add(id as usize);
                if !place.is_null() {
                    *place = function();
                    filled += 1;
                }
            }
        }
        filled
    }
}

/// Reports the layer's state. For the sender: it locks and allocates.
pub(crate) fn look(core: &Core) {
    let (served, unknown) = (SERVED.load(Acquire), UNKNOWN_LAYOUT.load(Acquire));
    let (state, reason) = match (core.settings.layers.nvtx, served, unknown) {
        (false, ..) => (LayerState::Off, "GPUMEM_NVTX=0".to_owned()),
        (_, 0, 0) => (LayerState::Absent, absence(core.settings.nvtx_injection.as_deref())),
        (_, 0, _) => {
            (LayerState::Failed, "the program's NVTX has a layout that this agent does not know".to_owned())
        }
        (_, _, 0) => (LayerState::Active, counted(core)),
        _ => (
            LayerState::Degraded,
            "the NVTX of one of the program's libraries has a layout that this agent does not know"
                .to_owned(),
        ),
    };
    status::report_layer(Layer::Nvtx, state, &reason);
}

/// Returns the reason why no library has requested functions.
fn absence(injection: Option<&Path>) -> String {
    let file = injection.and_then(Path::file_name).map(|file| file.to_string_lossy().into_owned());
    match file {
        None => "NVTX_INJECTION64_PATH is not set".to_owned(),
        Some(file) if file.starts_with("libgpumem") => "the program has made no NVTX call".to_owned(),
        Some(file) => format!("NVTX_INJECTION64_PATH names another library: {file}"),
    }
}

/// Returns which domains count.
fn counted(core: &Core) -> String {
    let named = core.settings.nvtx_domains.join(", ");
    let named = if named.is_empty() { String::new() } else { format!(" and {named}") };
    let left = if scopes::are_left_out() { "; other domains are left out (GPUMEM_NVTX_DOMAINS)" } else { "" };
    format!("ranges of the default domain{named}{left}")
}
