//! Handles CUPTI's callbacks about contexts, modules and graph nodes.

use super::subscribe;
use super::table::{self, Meaning};
use crate::base::{elf, fault_injection, wake};
use crate::driver::core::Core;
use crate::record::recorder::RecordContext;
use crate::threads::Thread;
use cupti_sys::{GraphData, ModuleResourceData, ResourceData, ids};
use gpumem_wire::{DestroyScope, DriverEventKind, NONE_DEVICE};

/// Returns the number of the library that made the driver call in which this callback arrives. Returns 0 (unknown) if that call
/// is not subscribed: then the place of its parameters on the stack is unknown.
fn caller(core: &Core, thread: &Thread, data: &ResourceData) -> u16 {
    // SAFETY: this is the callback's own thread, and no other reference is in use.
    let call = unsafe { thread.own() }.innermost().copied();
    call.map_or(0, |call| core.caller(thread, call.id, call.params, (&raw const data) as usize))
}

/// Whether a call is open that records its new context when it returns, or that creates a context without memory of its own.
fn is_recorded_by_call(thread: &Thread) -> bool {
    // SAFETY: this is the callback's own thread, and no other reference is in use.
    let own = unsafe { thread.own() };
    let open = own.calls.get(..own.open).unwrap_or_default();
    open.iter().flatten().any(|call| call.creating || table::meaning(call.id) == Some(&Meaning::GreenCreate))
}

/// Records a context that no subscribed call creates: the program used a private function table of the driver.
#[cold]
fn created(core: &Core, thread: &Thread, data: &ResourceData) {
    let handle = data.context as usize;
    let Some(ordinal) = subscribe::device_id(handle) else { return };
    let uid = subscribe::context_id(handle).unwrap_or(0);
    let at = RecordContext { module: caller(core, thread, data), ..core.here(thread) };
    core.context_seen(thread, handle, uid, core.devices.slot_in_resource(ordinal), Some(at));
    core.devices.set_primary_if_unknown(ordinal, handle);
}

/// Handles a resource callback. The driver may hold its locks. So no driver function may be called here, and of CUPTI only those
/// that return data of this context.
///
/// # Safety
/// `data` must be that of the resource callback `id`.
pub(crate) unsafe fn resource(core: &Core, thread: &Thread, id: u32, data: &ResourceData) {
    fault_injection::at("cupti.resource");
    let context = data.context as usize;
    match id {
        ids::resource::CONTEXT_CREATED if is_recorded_by_call(thread) => {}
        ids::resource::CONTEXT_CREATED => created(core, thread, data),
        ids::resource::CONTEXT_DESTROY_STARTING => {
            if let Some((device, uid)) = core.devices.forget_context(context) {
                let at = RecordContext { context: uid, device, ..RecordContext::NOWHERE };
                core.context_ended(thread, at, DestroyScope::Context);
                wake::wake();
            }
        }
        ids::resource::MODULE_LOADED | ids::resource::MODULE_UNLOAD_STARTING => {
            // SAFETY: these ids come with this descriptor, which is valid during the callback.
            let Some(module) = (unsafe { data.descriptor.cast::<ModuleResourceData>().as_ref() }) else {
                return;
            };
            let event = match id {
                ids::resource::MODULE_LOADED => DriverEventKind::ModuleLoaded,
                _ => DriverEventKind::ModuleUnloaded,
            };
            let bytes = match module.cubin.is_null() {
                true => 0,
                // SAFETY: CUPTI passes an image of this size.
                false => unsafe {
                    elf::loadable_bytes(std::slice::from_raw_parts(module.cubin, module.cubin_bytes))
                },
            };
            let (device, uid) = core.devices.known(context).unwrap_or((NONE_DEVICE, 0));
            let called = RecordContext { module: caller(core, thread, data), ..core.here(thread) };
            let at = RecordContext { context: uid, device, ..called };
            core.other_memory_changed(thread, at, event, bytes, module.module_id.into());
        }
        ids::resource::GRAPHNODE_CREATED => {
            // SAFETY: as above.
            let Some(node) = (unsafe { data.descriptor.cast::<GraphData>().as_ref() }) else { return };
            if matches!(node.node_type, GraphData::MEM_ALLOC | GraphData::MEM_FREE) {
                // SAFETY: this is the callback's own thread, and no other reference is in use.
                if let Some(call) = unsafe { thread.own() }.innermost() {
                    call.captured = true;
                }
            }
        }
        _ => {}
    }
}
