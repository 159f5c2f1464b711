//! Decodes the less frequent driver calls for decode.rs: handles, imports, arrays, graphs, contexts.

use super::decode::{CallbackContext, read};
use super::table::{Meaning, Request};
use crate::driver::allocations::Allocation;
use crate::driver::pool_polling::AT_ONCE;
use crate::driver::pools::graph_memory;
use crate::threads::Call;
use cupti_sys::GraphData;
use cupti_sys::params::{self, AllocNode, Array2d, Array3d, Pixel, pixel};
use gpumem_wire::{Flags, ImportSource, MemoryKind, PoolOwner};

impl CallbackContext<'_> {
    /// Returns the address and the size of an allocation.
    pub(super) unsafe fn requested(&self, request: Request, result: u32) -> (u64, u64) {
        // SAFETY: layouts match the request; out-parameters are read only after success; descriptors are the caller's, or null.
        unsafe {
            match request {
                Request::Bytes => {
                    let p: params::Alloc = self.params();
                    (read(p.out, result, 0), p.bytes as u64)
                }
                Request::BytesV1 => {
                    let p: params::AllocV1 = self.params();
                    (read(p.out, result, 0).into(), p.bytes.into())
                }
                Request::HostV1 => {
                    let p: params::AllocHostV1 = self.params();
                    (read(p.out, result, 0), p.bytes.into())
                }
                Request::Existing => {
                    let p: params::Register = self.params();
                    (p.address, p.bytes as u64)
                }
                Request::Pitch => {
                    let p: params::AllocPitch = self.params();
                    let pitch = read(p.pitch, result, p.width) as u64;
                    (read(p.out, result, 0), pitch.saturating_mul(p.height as u64))
                }
                Request::PitchV1 => {
                    let p: params::AllocPitchV1 = self.params();
                    let pitch = read(p.pitch, result, p.width);
                    (read(p.out, result, 0).into(), u64::from(pitch) * u64::from(p.height))
                }
                Request::Mipmap => {
                    let p: params::MipmapCreate = self.params();
                    let bytes = p.description.as_ref().map_or(0, |array| levels_bytes(array, p.levels));
                    (read(p.out, result, 0), bytes)
                }
                Request::Array2d | Request::Array3d | Request::Array2dV1 | Request::Array3dV1 => {
                    let p: params::ArrayCreate = self.params();
                    let bytes = match request {
                        _ if p.description.is_null() => 0,
                        Request::Array2d => flat_bytes(&*p.description.cast()),
                        Request::Array2dV1 => {
                            flat_bytes(&(*p.description.cast::<params::Array2dV1>()).into())
                        }
                        Request::Array3dV1 => {
                            levels_bytes(&(*p.description.cast::<params::Array3dV1>()).into(), 1)
                        }
                        _ => levels_bytes(&*p.description.cast(), 1),
                    };
                    (read(p.out, result, 0), bytes)
                }
            }
        }
    }

    /// Handles the return of cuMemCreate, whose memory is on a device or in the host.
    pub(super) unsafe fn handle_created(&self, call: Option<&Call>, result: u32) {
        // SAFETY: this is the call's layout; the properties are the caller's, or null.
        let (p, properties) = unsafe {
            let p: params::MemCreate = self.params();
            (p, p.properties.as_ref())
        };
        let (at, memory) = match properties.and_then(|properties| properties.location.ordinal()) {
            Some(ordinal) => (self.at_device(ordinal), MemoryKind::Vmm),
            None => (self.at(), MemoryKind::HostVmm),
        };
        let (at, bytes) = (self.called(at), p.bytes as u64);
        if result != 0 {
            let what = Allocation { address: 0, bytes, pool: 0, memory, entered_ns: None };
            return self.core.alloc_failed(self.thread, at, result, what);
        }
        // SAFETY: the call succeeded.
        let handle = unsafe { read(p.out, 0, 0) };
        let entered_ns = call.map(|call| call.entered_ns);
        self.core.handle_created(self.thread, at, handle, bytes, memory, entered_ns);
    }

    /// Handles a successful call about handles, mappings or the driver's pools.
    pub(super) unsafe fn handle_or_pool(&self, meaning: Meaning) {
        let (core, thread) = (self.core, self.thread);
        // SAFETY: layouts match the meaning; the call succeeded.
        unsafe {
            match meaning {
                Meaning::MemMap => {
                    let p: params::MemMap = self.params();
                    if core.multicast.objects.has(p.handle) {
                        core.multicast.mappings.add(p.address);
                    } else {
                        let (at, bytes) = (self.called(self.at()), p.bytes as u64);
                        if core.map_handle(thread, at, p.address, bytes, p.handle) {
                            core.note_driver_mapping(thread, at.module, p.address, bytes);
                        }
                    }
                }
                Meaning::MemRetain => {
                    let p: params::MemRetain = self.params();
                    core.handle_retained(thread, self.at(), read(p.out, 0, 0), p.address);
                }
                Meaning::MemImport => {
                    core.handle_imported(thread, self.called(self.at()), read(self.params(), 0, 0));
                }
                Meaning::MemExport => {
                    let p: params::MemExport = self.params();
                    if p.kind == params::FILE_DESCRIPTOR && !p.out.is_null() {
                        let at = self.called(self.at());
                        core.handle_exported(thread, at, p.handle, p.out.read_unaligned());
                    }
                }
                Meaning::MulticastCreate => core.multicast.objects.add(read(self.params(), 0, 0)),
                Meaning::PoolCreate => {
                    let p: params::PoolCreate = self.params();
                    let Some(properties) = p.properties.as_ref() else { return };
                    let pool = read(p.out, 0, 0);
                    match properties.location.ordinal() {
                        _ if properties.kind == params::MANAGED => {
                            core.driver_pools.set_memory_kind(pool, MemoryKind::Managed);
                        }
                        Some(ordinal) => {
                            core.pool_seen(thread, pool, core.device(ordinal), PoolOwner::Driver);
                        }
                        None => core.driver_pools.set_memory_kind(pool, MemoryKind::Pinned),
                    }
                }
                Meaning::PoolTouched => core.poll_pool(thread, self.params(), AT_ONCE),
                Meaning::DeviceSetPool => {
                    let p: params::DeviceSetPool = self.params();
                    core.driver_pools.set_current(p.device, p.pool);
                }
                Meaning::LocationSetPool => {
                    let p: params::LocationSetPool = self.params();
                    let ordinal = p.location.as_ref().and_then(|location| location.ordinal());
                    // cuMemAllocAsync does not use the pool for managed memory.
                    if let Some(ordinal) = ordinal.filter(|_| p.kind == params::PINNED) {
                        core.driver_pools.set_current(ordinal, p.pool);
                    }
                }
                _ => core.poll_pool(thread, graph_memory(core.device(self.params())), AT_ONCE),
            }
        }
    }

    /// Handles a successful import of memory of another process or API.
    pub(super) unsafe fn import(&self, meaning: Meaning) {
        // SAFETY: layouts match the meaning; the call succeeded.
        let (address, description) = unsafe {
            let p: params::ImportExternal = self.params();
            (read(p.out, 0, 0), p.description)
        };
        let (bytes, source) = match meaning {
            // The memory was counted at cuImportExternalMemory.
            Meaning::Import(ImportSource::External) => (0, ImportSource::External),
            Meaning::Import(source) => {
                let (mut base, mut bytes) = (0, 0);
                let get = self.core.devices.driver().and_then(|driver| driver.mem_get_address_range);
                // SAFETY: a function of the loaded driver with room for its answers. The agent has no callback for it.
                let found = get.is_some_and(|get| unsafe { get(&mut base, &mut bytes, address) } == 0);
                (if found { bytes as u64 } else { 0 }, source)
            }
            // SAFETY: the description is the caller's, or null.
            _ => (unsafe { description.as_ref() }.map_or(0, |it| it.bytes), ImportSource::External),
        };
        if address != 0 {
            self.core.imported(self.thread, self.called(self.at()), address, bytes, source);
        }
    }

    /// Returns the description of the node that the call adds to a graph: the parameter at an offset.
    pub(super) unsafe fn graph_node(&self, at: u16) -> Option<*const params::GraphNode> {
        // SAFETY: the call has this parameter.
        let node: *const params::GraphNode = unsafe { self.param(at) };
        (!node.is_null()).then_some(node)
    }

    /// Handles the return of a call that adds a memory allocation node to a graph.
    pub(super) unsafe fn graph_alloc(&self, call: Option<&Call>, result: u32, node: *const AllocNode) {
        // SAFETY: the caller's parameters, filled at EXIT.
        let Some(node) = (unsafe { node.as_ref() }) else { return };
        let mut at = match node.pool.location.ordinal() {
            Some(ordinal) => self.at_device(ordinal),
            None => self.at(),
        };
        at.flags = at.flags.with(Flags::CAPTURED);
        let pool = self.core.graph_memory_used(self.thread, at.device);
        let address = if result == 0 { node.address } else { 0 };
        self.allocated(call, result, at, address, node.bytes as u64, pool, MemoryKind::StreamOrdered);
    }

    /// Handles a successful call that created or retained a context on a device.
    pub(super) unsafe fn context(&self, call: Option<&Call>, ordinal: u32) {
        // SAFETY: the first parameter is the out-parameter, which the successful call has filled.
        let handle = unsafe { read(self.params::<params::Out>(), 0, 0) } as usize;
        let is_current = self.data.context as usize == handle;
        let current_uid = if is_current { self.data.context_uid } else { 0 };
        let uid = super::subscribe::context_id(handle).unwrap_or(current_uid);
        // If the begin of a cuDevicePrimaryCtxRetain was not observed, the context may have existed already.
        let created = call.map_or(!self.retains(), |call| call.creating);
        let at = created.then(|| self.called(self.at_device(ordinal)));
        self.core.context_seen(self.thread, handle, uid, self.core.device(ordinal), at);
        if self.retains() {
            self.core.devices.set_primary(ordinal, handle);
        }
    }
}

/// Returns the address that a graph node frees; `None` if the node does not free memory.
pub(super) fn freed_by(node: *const params::GraphNode) -> Option<u64> {
    // SAFETY: the caller's parameters, not null.
    let node = unsafe { &*node };
    let address = u64::from(node.alloc.pool.kind) | u64::from(node.alloc.pool.handle_types) << 32;
    (node.kind == GraphData::MEM_FREE).then_some(address)
}

// Sizes of arrays are estimated from their descriptions, because the driver tiles and pads arrays. An array of unknown format
// counts 0 bytes, so its memory stays in Untrackable, the used bytes without an allocation.

/// Returns the product of the sides; each side counts as at least 1.
fn pixels(sides: [usize; 3]) -> u64 {
    sides.iter().map(|&side| side.max(1) as u64).fold(1, u64::saturating_mul)
}

fn array_bytes([width, height, depth]: [usize; 3], format: u32, channels: u32) -> u64 {
    match pixel(format) {
        Some(Pixel::Channel(bytes)) => {
            pixels([width, height, depth]).saturating_mul(bytes).saturating_mul(channels.max(1).into())
        }
        Some(Pixel::Bits(bits)) => pixels([width, height, depth]).saturating_mul(bits).div_ceil(8),
        Some(Pixel::Block(bytes)) => {
            pixels([width.div_ceil(4), height.div_ceil(4), depth]).saturating_mul(bytes)
        }
        None => 0,
    }
}

/// Returns the bytes of an array with `count` levels, each half of the one before; 0 for an array without memory (`UNBACKED`).
fn levels_bytes(array: &Array3d, count: u32) -> u64 {
    if array.flags & Array3d::UNBACKED != 0 {
        return 0;
    }
    let level = |level: u32| {
        let sides = [array.width, array.height, array.depth].map(|side| side >> level);
        array_bytes(sides, array.format, array.channels)
    };
    (0..count.clamp(1, 32)).map(level).fold(0, u64::saturating_add)
}

fn flat_bytes(array: &Array2d) -> u64 {
    array_bytes([array.width, array.height, 0], array.format, array.channels)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SQUARE: Array3d = Array3d { width: 64, height: 64, depth: 0, format: 0x20, channels: 4, flags: 0 };

    #[test]
    fn mipmaps_are_a_third_more_and_unbacked_arrays_nothing() {
        assert_eq!(levels_bytes(&SQUARE, 1), 64 * 64 * 16);
        assert_eq!(levels_bytes(&SQUARE, 3), (64 * 64 + 32 * 32 + 16 * 16) * 16);
        assert_eq!(levels_bytes(&Array3d { flags: 0x40, ..SQUARE }, 1), 0);
        assert_eq!(flat_bytes(&Array2d { width: 10, height: 0, format: 0x10, channels: 1 }), 20);
    }

    #[test]
    fn a_format_decides_what_a_pixel_takes() {
        let of = |format, channels| levels_bytes(&Array3d { format, channels, ..SQUARE }, 1);
        // UNORM_INT8X4, SNORM_INT16X2, NV12, P010, AYUV, Y416: the channels are part of the format.
        let formats =
            [(0xc2, 4, 4.0), (0xca, 2, 4.0), (0xb0, 3, 1.5), (0x9f, 3, 3.0), (0xa8, 4, 4.0), (0xb1, 4, 8.0)];
        for (format, channels, bytes) in formats {
            assert_eq!(of(format, channels), (64.0 * 64.0 * bytes) as u64, "{format:#x}");
        }
        // BC1 and BC7: blocks of 4 x 4 pixels.
        assert_eq!((of(0x91, 4), of(0x9d, 4)), (16 * 16 * 8, 16 * 16 * 16));
        let small = Array3d { width: 2, height: 5, format: 0x9d, ..SQUARE };
        assert_eq!(levels_bytes(&small, 1), 2 * 16, "blocks are whole");
        assert_eq!(of(0x7f, 4), 0, "unknown");
    }
}
