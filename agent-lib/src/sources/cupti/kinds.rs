//! What the seldom calls mean: handles, imports, arrays, graphs, contexts. decode.rs hands them over.

use super::arrays;
use super::decode::{Here, read};
use super::table::Meaning;
use crate::driver::allocations::Allocation;
use crate::threads::Call;
use cupti_sys::{GraphData, params};
use gpumem_wire::{Flags, ImportSource, MemoryKind};

impl Here<'_> {
    /// A call failed that takes no row when it succeeds; a failed cuMemCreate is an allocation that failed.
    pub(super) unsafe fn failed(&self, meaning: Meaning, result: u32) {
        if meaning != Meaning::MemCreate {
            return;
        }
        // SAFETY: cuMemCreate's.
        let p: params::MemCreate = unsafe { self.params() };
        // SAFETY: the caller's properties, or null.
        let ordinal = unsafe { p.properties.as_ref() }.and_then(|properties| properties.location.ordinal());
        let at = ordinal.map_or_else(|| self.at(), |ordinal| self.at_device(ordinal));
        let memory = if ordinal.is_some() { MemoryKind::Vmm } else { MemoryKind::HostVmm };
        let what = Allocation { address: 0, bytes: p.bytes as u64, pool: 0, memory, entered_ns: None };
        self.core.allocation_failed(self.thread, self.called(at), result, what);
    }

    pub(super) unsafe fn handle(&self, meaning: Meaning, call: Option<&Call>) {
        let (core, thread) = (self.core, self.thread);
        // SAFETY: shapes by meaning; the call succeeded.
        unsafe {
            match meaning {
                Meaning::MemCreate => {
                    let p: params::MemCreate = self.params();
                    let ordinal = p.properties.as_ref().and_then(|properties| properties.location.ordinal());
                    let at = ordinal.map_or_else(|| self.at(), |ordinal| self.at_device(ordinal));
                    let memory = if ordinal.is_some() { MemoryKind::Vmm } else { MemoryKind::HostVmm };
                    let entered_ns = call.map(|call| call.entered_ns);
                    let (at, handle) = (self.called(at), read(p.out, 0));
                    core.handle_created(thread, at, handle, p.bytes as u64, memory, entered_ns);
                }
                Meaning::MemMap => {
                    let p: params::MemMap = self.params();
                    if core.multicast.is_object(p.handle) {
                        core.multicast.remember_mapping(p.address);
                    } else {
                        core.mapped(thread, self.called(self.at()), p.address, p.bytes as u64, p.handle);
                    }
                }
                Meaning::MemRetain => {
                    let p: params::MemRetain = self.params();
                    core.handle_retained(thread, self.at(), read(p.out, 0), p.address);
                }
                Meaning::MemImport => {
                    let p: params::MemImport = self.params();
                    core.handle_imported(thread, self.called(self.at()), read(p.out, 0));
                }
                Meaning::MemExport => {
                    let p: params::MemExport = self.params();
                    if p.kind == params::FILE_DESCRIPTOR && !p.out.is_null() {
                        core.handle_exported(
                            thread,
                            self.called(self.at()),
                            p.handle,
                            p.out.read_unaligned(),
                        );
                    }
                }
                _ => {
                    let p: params::MulticastCreate = self.params();
                    core.multicast.remember(read(p.out, 0));
                }
            }
        }
    }

    /// Size of the allocation at an address, in bytes; 0 where the driver does not say.
    fn bytes_at(&self, address: u64) -> u64 {
        let (mut base, mut bytes) = (0, 0);
        let get = self.core.devices.driver().and_then(|driver| driver.mem_get_address_range);
        // SAFETY: a function of the loaded driver, with places for its answers; no callback of ours is enabled for it.
        let found = get.is_some_and(|get| unsafe { get(&mut base, &mut bytes, address) } == 0);
        if found { bytes as u64 } else { 0 }
    }

    pub(super) unsafe fn import(&self, meaning: Meaning) {
        // SAFETY: shapes by meaning; the call succeeded.
        let (address, bytes, source) = unsafe {
            match meaning {
                Meaning::IpcOpen => {
                    let address = read(self.params::<params::IpcOpen>().out, 0);
                    (address, self.bytes_at(address), ImportSource::Ipc)
                }
                Meaning::ExternalImport => {
                    let p: params::ImportExternal = self.params();
                    let bytes = p.description.as_ref().map_or(0, |description| description.bytes);
                    (read(p.out, 0), bytes, ImportSource::External)
                }
                // The memory was counted when it was imported.
                Meaning::ExternalBuffer => {
                    (read(self.params::<params::MappedBuffer>().out, 0), 0, ImportSource::External)
                }
                Meaning::ExternalMipmap => {
                    (read(self.params::<params::MappedMipmap>().out, 0), 0, ImportSource::External)
                }
                _ => {
                    let address = read(self.params::<params::PoolImportPointer>().out, 0);
                    (address, self.bytes_at(address), ImportSource::PoolPointer)
                }
            }
        };
        if address != 0 {
            self.core.imported(self.thread, self.called(self.at()), address, bytes, source);
        }
    }

    pub(super) unsafe fn array(&self, meaning: Meaning, call: Option<&Call>, result: u32) {
        // SAFETY: shapes by meaning; descriptors are the caller's, or null.
        let (out, bytes) = unsafe {
            if meaning == Meaning::Mipmap {
                let p: params::MipmapCreate = self.params();
                (p.out, p.description.as_ref().map_or(0, |a| arrays::levels(a, p.levels)))
            } else {
                let p: params::ArrayCreate = self.params();
                let bytes = match meaning {
                    _ if p.description.is_null() => 0,
                    Meaning::Array2d => arrays::bytes(&*p.description.cast()),
                    Meaning::Array2dV1 => arrays::bytes(&(*p.description.cast::<params::Array2dV1>()).into()),
                    Meaning::Array3dV1 => {
                        arrays::levels(&(*p.description.cast::<params::Array3dV1>()).into(), 1)
                    }
                    _ => arrays::levels(&*p.description.cast(), 1),
                };
                (p.out, bytes)
            }
        };
        let mut at = self.at();
        at.flags = at.flags.with(Flags::ESTIMATED);
        // SAFETY: the caller's out-parameter.
        let address = unsafe { read(out, result) };
        self.booked(call, result, at, address, bytes, 0, MemoryKind::Array);
    }

    /// What the call adds to a graph.
    pub(super) unsafe fn graph_node(&self, meaning: Meaning) -> Option<*const params::GraphNode> {
        // SAFETY: shapes by meaning.
        let node = unsafe {
            match meaning {
                Meaning::GraphAddNode => self.params::<params::GraphAddNode>().parameters,
                Meaning::GraphAddNodeV2 => self.params::<params::GraphAddNodeV2>().parameters,
                _ => std::ptr::null(),
            }
        };
        (!node.is_null()).then_some(node)
    }

    pub(super) unsafe fn graph_alloc(
        &self,
        call: Option<&Call>,
        result: u32,
        node: *const params::AllocNode,
    ) {
        // SAFETY: the caller's parameters, filled at EXIT.
        let Some(node) = (unsafe { node.as_ref() }) else { return };
        let mut at = match node.pool.location.ordinal() {
            Some(ordinal) => self.at_device(ordinal),
            None => self.at(),
        };
        at.flags = at.flags.with(Flags::CAPTURED);
        let pool = self.core.graph_memory_used(self.thread, at.device);
        let address = if result == 0 { node.address } else { 0 };
        self.booked(call, result, at, address, node.bytes as u64, pool, MemoryKind::StreamOrdered);
    }

    pub(super) unsafe fn context(&self, call: Option<&Call>, out: params::Out, ordinal: u32) {
        // SAFETY: the call succeeded, so its out-parameter is filled.
        let handle = unsafe { read(out, 0) } as usize;
        let uid =
            super::subscribe::context_id(handle).unwrap_or(match self.data.context as usize == handle {
                true => self.data.context_uid,
                false => 0,
            });
        // A retain that was entered before we listened may have found the context there.
        let created = call.map_or(self.id != cupti_sys::ids::cuDevicePrimaryCtxRetain, |call| call.creating);
        let at = created.then(|| self.called(self.at_device(ordinal)));
        self.core.context_seen(self.thread, handle, uid, self.core.device(ordinal), at);
    }
}

/// The address that a graph node frees.
pub(super) fn freed_by(node: *const params::GraphNode) -> Option<u64> {
    // SAFETY: the caller's parameters, not null.
    let node = unsafe { &*node };
    let address = u64::from(node.alloc.pool.kind) | u64::from(node.alloc.pool.handle_types) << 32;
    (node.kind == GraphData::MEM_FREE).then_some(address)
}
