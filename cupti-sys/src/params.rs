//! Parameters of driver calls, as CUPTI passes them: one struct for each layout, shared by the calls with that layout.
//! Sizes and offsets are those of the headers of CUDA 11.8 to 13.5; they are checked at compile time.
//!
//! Out-parameters point into the caller's memory: the pointers are valid during the callback, their targets at EXIT.

use core::ffi::c_void;

/// Declares structs with the size of each, and for each field its documentation, name, offset and type.
macro_rules! layouts {
    ($( $(#[$doc:meta])* $name:ident = $bytes:literal {
        $( $(#[$field_doc:meta])* $field:ident @ $offset:literal : $type:ty ),* $(,)?
    } )*) => { $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub struct $name { $( $(#[$field_doc])* pub $field: $type ),* }
        const _: () = assert!(size_of::<$name>() == $bytes);
        $( const _: () = assert!(::core::mem::offset_of!($name, $field) == $offset); )*
    )* };
}
pub(crate) use layouts;

/// A C pointer to a number; null if the caller passed null.
pub type Out = *const u64;

layouts! {
    /// cuMemAlloc_v2, cuMemAllocHost_v2; the first parameters of cuMemAllocManaged, cuMemHostAlloc.
    Alloc = 16 { out @ 0: Out, bytes @ 8: usize }
    /// cuMemAlloc of CUDA 2: size and device pointer have 32 bits.
    AllocV1 = 16 { out @ 0: *const u32, bytes @ 8: u32 }
    /// cuMemAllocHost of CUDA 2: its size has 32 bits, its host pointer 64.
    AllocHostV1 = 16 { out @ 0: Out, bytes @ 8: u32 }
    /// cuMemHostRegister and _v2.
    Register = 24 { address @ 0: u64, bytes @ 8: usize, flags @ 16: u32 }
    /// cuMemAllocPitch_v2.
    AllocPitch = 40 { out @ 0: Out, pitch @ 8: *const usize, width @ 16: usize, height @ 24: usize, element @ 32: u32 }
    /// cuMemAllocPitch of CUDA 2.
    AllocPitchV1 = 32 { out @ 0: *const u32, pitch @ 8: *const u32, width @ 16: u32, height @ 20: u32, element @ 24: u32 }
    /// cuMemFreeAsync.
    FreeAsync = 16 { address @ 0: u64, stream @ 8: u64 }
    /// cuMemAllocAsync.
    AllocAsync = 24 { out @ 0: Out, bytes @ 8: usize, stream @ 16: u64 }
    /// cuMemAllocFromPoolAsync.
    AllocFromPool = 32 { out @ 0: Out, bytes @ 8: usize, pool @ 16: u64, stream @ 24: u64 }
    /// cuMemPoolCreate.
    PoolCreate = 16 { out @ 0: Out, properties @ 8: *const PoolProperties }
    /// cuMemPoolImportFromShareableHandle.
    PoolImport = 32 { out @ 0: Out, handle @ 8: u64, kind @ 16: u32, flags @ 24: u64 }
    /// cuDeviceSetMemPool.
    DeviceSetPool = 16 { device @ 0: u32, pool @ 8: u64 }
    /// cuMemSetMemPool, from CUDA 13.0.
    LocationSetPool = 24 { location @ 0: *const Location, kind @ 8: u32, pool @ 16: u64 }
    /// cuMemCreate.
    MemCreate = 32 { out @ 0: Out, bytes @ 8: usize, properties @ 16: *const AllocationProperties, flags @ 24: u64 }
    /// cuMemMap.
    MemMap = 40 { address @ 0: u64, bytes @ 8: usize, offset @ 16: usize, handle @ 24: u64, flags @ 32: u64 }
    /// cuMemUnmap.
    Range = 16 { address @ 0: u64, bytes @ 8: usize }
    /// cuMemRetainAllocationHandle.
    MemRetain = 16 { out @ 0: Out, address @ 8: u64 }
    /// cuMemExportToShareableHandle; `kind` determines the type of `out`.
    MemExport = 32 { out @ 0: *const i32, handle @ 8: u64, kind @ 16: u32, flags @ 24: u64 }
    /// cuMemImportFromShareableHandle.
    MemImport = 24 { out @ 0: Out, os_handle @ 8: u64, kind @ 16: u32 }
    /// cuMulticastCreate.
    MulticastCreate = 16 { out @ 0: Out, properties @ 8: *const c_void }
    /// cuImportExternalMemory.
    ImportExternal = 16 { out @ 0: Out, description @ 8: *const ExternalMemory }
    /// cuArrayCreate, cuArray3DCreate and their _v2; they differ in the type of the description.
    ArrayCreate = 16 { out @ 0: Out, description @ 8: *const c_void }
    /// cuMipmappedArrayCreate.
    MipmapCreate = 24 { out @ 0: Out, description @ 8: *const Array3d, levels @ 16: u32 }
    /// cuGraphAddMemAllocNode.
    GraphAddAlloc = 40 { node @ 0: Out, graph @ 8: u64, dependencies @ 16: u64, count @ 24: usize, parameters @ 32: *const AllocNode }
    /// cuGraphAddMemFreeNode.
    GraphAddFree = 40 { node @ 0: Out, graph @ 8: u64, dependencies @ 16: u64, count @ 24: usize, address @ 32: u64 }
    /// cuGraphAddNode.
    GraphAddNode = 40 { node @ 0: Out, graph @ 8: u64, dependencies @ 16: u64, count @ 24: usize, parameters @ 32: *const GraphNode }
    /// cuGraphAddNode_v2 and _v3.
    GraphAddNodeV2 = 48 { node @ 0: Out, graph @ 8: u64, dependencies @ 16: u64, data @ 24: u64, count @ 32: usize, parameters @ 40: *const GraphNode }
    /// cuCtxCreate, _v2.
    CtxCreate = 16 { out @ 0: Out, flags @ 8: u32, device @ 12: u32 }
    /// cuCtxCreate_v3.
    CtxCreateV3 = 32 { out @ 0: Out, parameters @ 8: u64, count @ 16: u32, flags @ 20: u32, device @ 24: u32 }
    /// cuCtxCreate_v4.
    CtxCreateV4 = 24 { out @ 0: Out, parameters @ 8: u64, flags @ 16: u32, device @ 20: u32 }
    /// cuDevicePrimaryCtxRetain.
    PrimaryRetain = 16 { out @ 0: Out, device @ 8: u32 }
    /// cuCtxSetLimit.
    SetLimit = 16 { limit @ 0: u32, value @ 8: usize }
    /// cuGreenCtxCreate.
    GreenCreate = 24 { out @ 0: Out, description @ 8: u64, device @ 16: u32, flags @ 20: u32 }
}

// Types that parameters point to.
layouts! {
    /// CUmemLocation.
    Location = 8 { kind @ 0: u32, id @ 4: u32 }
    /// CUmemAllocationProp.
    AllocationProperties = 32 { kind @ 0: u32, handle_types @ 4: u32, location @ 8: Location, win32 @ 16: u64, flags @ 24: u64 }
    /// CUmemPoolProps.
    PoolProperties = 88 { kind @ 0: u32, handle_types @ 4: u32, location @ 8: Location, security @ 16: u64, max_bytes @ 24: u64, usage @ 32: u16, rest @ 34: [u8; 54] }
    /// CUDA_MEM_ALLOC_NODE_PARAMS.
    AllocNode = 120 { pool @ 0: PoolProperties, access @ 88: u64, access_count @ 96: usize, bytes @ 104: usize, address @ 112: u64 }
    /// CUgraphNodeParams. If `kind` is MEM_ALLOC, `alloc` has the parameters. If it is MEM_FREE, the first 8 bytes of `alloc`
    /// (`alloc.pool.kind` and `handle_types`) are the address.
    GraphNode = 256 { kind @ 0: u32, reserved @ 4: [u32; 3], alloc @ 16: AllocNode, rest @ 136: [u64; 15] }
    /// CUDA_ARRAY_DESCRIPTOR.
    Array2d = 24 { width @ 0: usize, height @ 8: usize, format @ 16: u32, channels @ 20: u32 }
    /// CUDA_ARRAY3D_DESCRIPTOR.
    Array3d = 40 { width @ 0: usize, height @ 8: usize, depth @ 16: usize, format @ 24: u32, channels @ 28: u32, flags @ 32: u32 }
    /// CUDA_ARRAY_DESCRIPTOR_v1: of cuArrayCreate.
    Array2dV1 = 16 { width @ 0: u32, height @ 4: u32, format @ 8: u32, channels @ 12: u32 }
    /// CUDA_ARRAY3D_DESCRIPTOR_v1: of cuArray3DCreate.
    Array3dV1 = 24 { width @ 0: u32, height @ 4: u32, depth @ 8: u32, format @ 12: u32, channels @ 16: u32, flags @ 20: u32 }
    /// First fields of CUDA_EXTERNAL_MEMORY_HANDLE_DESC, up to the size of the memory.
    ExternalMemory = 32 { kind @ 0: u32, handle @ 8: [u64; 2], bytes @ 24: u64 }
}

impl Location {
    /// CU_MEM_LOCATION_TYPE_DEVICE: `id` is the ordinal.
    pub const DEVICE: u32 = 1;
    /// CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, from CUDA 13.5: the ordinal is the low byte of `id`.
    pub const DEVICE_LOCALITY_DOMAIN: u32 = 6;

    /// Returns the CUDA ordinal, or `None` for host memory.
    pub fn ordinal(&self) -> Option<u32> {
        match self.kind {
            Self::DEVICE => Some(self.id),
            Self::DEVICE_LOCALITY_DOMAIN => Some(self.id & 0xff),
            _ => None,
        }
    }
}

/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
pub const FILE_DESCRIPTOR: u32 = 1;
/// CU_MEM_ALLOCATION_TYPE_PINNED: memory that does not migrate; device memory unless its location is the host.
pub const PINNED: u32 = 1;
/// CU_MEM_ALLOCATION_TYPE_MANAGED, from CUDA 13.0: a pool of memory that migrates.
pub const MANAGED: u32 = 2;

impl From<Array2dV1> for Array2d {
    fn from(array: Array2dV1) -> Self {
        let Array2dV1 { width, height, format, channels } = array;
        Array2d { width: width as usize, height: height as usize, format, channels }
    }
}

impl From<Array3dV1> for Array3d {
    fn from(array: Array3dV1) -> Self {
        let Array3dV1 { width, height, depth, format, channels, flags } = array;
        let [width, height, depth] = [width, height, depth].map(|side| side as usize);
        Array3d { width, height, depth, format, channels, flags }
    }
}

impl Array3d {
    /// CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING: an array with one of these flags has no memory yet.
    pub const UNBACKED: u32 = 0x40 | 0x80;
}

/// Size of one pixel of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pixel {
    /// Bytes for each channel.
    Channel(u64),
    /// Bits for each pixel, whatever its channels. Planes of lower resolution count with their average bits for each pixel.
    Bits(u64),
    /// Bytes for each block of 4 x 4 pixels.
    Block(u64),
}

/// Returns the pixel size of a CUarray_format of CUDA 13.5; `None` for an unknown format.
pub fn pixel(format: u32) -> Option<Pixel> {
    use Pixel::*;
    Some(match format {
        // Integers, half and float.
        0x01 | 0x08 => Channel(1),
        0x02 | 0x09 | 0x10 => Channel(2),
        0x03 | 0x0a | 0x20 => Channel(4),
        // UNORM_INT_101010_2.
        0x50 => Bits(32),
        // PACKED_422, PACKED_444.
        0x51 => Bits(16),
        0x52 => Bits(32),
        // SEMIPLANAR_420, _422 and _444, of 8 and of 16 bits, then PLANAR.
        0x53 | 0x59 => Bits(12),
        0x54 | 0x5a => Bits(24),
        0x55 | 0x5b => Bits(16),
        0x56 | 0x5c => Bits(32),
        0x57 | 0x5d => Bits(24),
        0x58 | 0x5e => Bits(48),
        // BC1 and BC4; BC2, BC3, BC5, BC6H and BC7.
        0x91 | 0x92 | 0x97 | 0x98 => Block(8),
        0x93..=0x96 | 0x99..=0x9e => Block(16),
        // P010, P016; NV16; P210, P216; YUY2; Y210, Y216; AYUV, Y410.
        0x9f | 0xa1 => Bits(24),
        0xa2 => Bits(16),
        0xa3 | 0xa4 => Bits(32),
        0xa5 => Bits(16),
        0xa6..=0xa9 => Bits(32),
        // NV12; Y416; Y444_PLANAR8 and 10; YUV444 semi-planar of 8 and 16 bits.
        0xb0 => Bits(12),
        0xb1 => Bits(64),
        0xb2 | 0xb4 => Bits(24),
        0xb3 | 0xb5 => Bits(48),
        // UNORM_INT and then SNORM_INT: 8X1, 8X2, 8X4, 16X1, 16X2, 16X4.
        0xc0 | 0xc6 => Bits(8),
        0xc1 | 0xc3 | 0xc7 | 0xc9 => Bits(16),
        0xc2 | 0xc4 | 0xc8 | 0xca => Bits(32),
        0xc5 | 0xcb => Bits(64),
        _ => return None,
    })
}
