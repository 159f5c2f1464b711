//! Callbacks about contexts, modules and graph nodes.

use super::subscribe;
use super::table::{self, Meaning};
use crate::base::fault_injection;
use crate::base::row::AllocationName;
use crate::driver::core::Core;
use crate::record::recorder::RecordContext;
use crate::threads::Thread;
use cupti_sys::{GraphData, ModuleResourceData, ResourceData, ids};
use gpumem_wire::{DestroyScope, DriverEventKind, NONE_DEVICE};

/// The library that made the call in which this callback comes; 0 for unknown, outside of a call that is listened to: then frames of the
/// driver lie between, and what is found above them may be left over from earlier calls.
fn caller(core: &Core, thread: &Thread, data: &ResourceData) -> u16 {
    let call = {
        // SAFETY: the callback's own thread, and no other reference is in use.
        let own = unsafe { thread.own() };
        own.open.checked_sub(1).and_then(|open| own.calls.get(open).copied().flatten())
    };
    call.map_or(0, |call| core.caller(thread, call.id, call.params, (&raw const data) as usize))
}

/// Whether a call is under way that books the context it makes when it returns, or whose contexts cost nothing of their own.
fn is_booked_by_call(thread: &Thread) -> bool {
    // SAFETY: the callback's own thread, and no other reference is in use.
    let own = unsafe { thread.own() };
    let open = own.calls.get(..own.open).unwrap_or_default();
    open.iter().flatten().any(|call| call.creating || table::meaning(call.id) == Some(Meaning::GreenCreate))
}

/// A context that no known call made: of the calls that are listened to only a program's own use of a private table makes none.
#[cold]
fn created(core: &Core, thread: &Thread, data: &ResourceData) {
    let handle = data.context as usize;
    let Some(ordinal) = subscribe::device_id(handle) else { return };
    let uid = subscribe::context_id(handle).unwrap_or(0);
    let AllocationName { tag, flags, .. } = core.named(thread);
    let at = RecordContext { tag, flags, module: caller(core, thread, data), ..RecordContext::NOWHERE };
    core.context_seen(thread, handle, uid, core.devices.slot_in_resource(ordinal), Some(at));
    core.devices.set_primary_if_unknown(ordinal, handle);
}

/// Resource callbacks can come while the driver holds its locks: nothing of the driver is called here. CUPTI may be asked about the
/// context that it has just told of.
///
/// # Safety
/// `data` is of the resource callback `id`.
pub(crate) unsafe fn resource(core: &Core, thread: &Thread, id: u32, data: &ResourceData) {
    fault_injection::at("cupti.resource");
    let context = data.context as usize;
    match id {
        ids::resource::CONTEXT_CREATED if is_booked_by_call(thread) => {}
        ids::resource::CONTEXT_CREATED => created(core, thread, data),
        ids::resource::CONTEXT_DESTROY_STARTING => {
            if let Some((device, uid)) = core.devices.forget_context(context) {
                let at = RecordContext { context: uid, device, ..RecordContext::NOWHERE };
                core.context_ended(thread, at, DestroyScope::Context);
                crate::base::wake::wake();
            }
        }
        ids::resource::MODULE_LOADED | ids::resource::MODULE_UNLOAD_STARTING => {
            // SAFETY: what these ids come with, valid during the callback.
            let Some(module) = (unsafe { data.descriptor.cast::<ModuleResourceData>().as_ref() }) else {
                return;
            };
            let loaded = id == ids::resource::MODULE_LOADED;
            let event = if loaded { DriverEventKind::ModuleLoaded } else { DriverEventKind::ModuleUnloaded };
            let bytes = match module.cubin.is_null() {
                true => 0,
                // SAFETY: CUPTI's image of this size.
                false => crate::base::elf::loadable_bytes(unsafe {
                    std::slice::from_raw_parts(module.cubin, module.cubin_bytes)
                }),
            };
            let (device, uid) = core.devices.known(context).unwrap_or((NONE_DEVICE, 0));
            let AllocationName { tag, flags, .. } = core.named(thread);
            let at = RecordContext {
                tag,
                flags,
                context: uid,
                module: caller(core, thread, data),
                device,
                ..RecordContext::NOWHERE
            };
            core.gap_moved(thread, at, event, bytes, module.module_id.into());
        }
        ids::resource::GRAPHNODE_CREATED => {
            // SAFETY: as above.
            let Some(node) = (unsafe { data.descriptor.cast::<GraphData>().as_ref() }) else { return };
            if matches!(node.node_type, GraphData::MEM_ALLOC | GraphData::MEM_FREE) {
                // SAFETY: the callback's own thread, and no other reference is in use.
                let own = unsafe { thread.own() };
                if let Some(Some(call)) = own.open.checked_sub(1).map(|open| &mut own.calls[open]) {
                    call.captured = true;
                }
            }
        }
        _ => {}
    }
}
