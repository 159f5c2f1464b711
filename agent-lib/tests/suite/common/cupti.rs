//! Callbacks as CUPTI makes them, written byte by byte with the offsets of NVIDIA's reference: no struct of the product is
//! used.

use std::ffi::c_void;
use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

pub const DRIVER: u32 = 1;
pub const RESOURCE: u32 = 3;

pub const ALLOC: u32 = 243;
pub const FREE: u32 = 245;
pub const ALLOC_PITCH: u32 = 244;
pub const ALLOC_MANAGED: u32 = 371;
pub const ALLOC_ASYNC: u32 = 598;
pub const FREE_ASYNC: u32 = 600;
pub const ALLOC_FROM_POOL: u32 = 611;
pub const POOL_CREATE: u32 = 607;
pub const POOL_DESTROY: u32 = 608;
pub const MEM_CREATE: u32 = 549;
pub const MEM_RELEASE: u32 = 550;
pub const MEM_MAP: u32 = 551;
pub const MEM_UNMAP: u32 = 552;
pub const MEM_RETAIN: u32 = 565;
pub const IPC_OPEN: u32 = 567;
pub const IPC_CLOSE: u32 = 330;
pub const CTX_CREATE_V2: u32 = 235;
pub const PRIMARY_RETAIN: u32 = 386;
pub const ARRAY_3D: u32 = 274;
pub const MULTICAST_CREATE: u32 = 706;

/// A context of the program.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    pub handle: u64,
    pub uid: u32,
}

pub const CONTEXT: Context = Context { handle: 0x55_5500_1000, uid: 1 };

static CALLS: AtomicU32 = AtomicU32::new(0);

/// A call between ENTER and EXIT.
#[derive(Debug)]
pub struct Call {
    id: u32,
    correlation: u32,
    context: Context,
    params: Vec<u64>,
    result: u32,
}

/// Packs two 32-bit halves into a 64-bit parameter.
pub fn halves(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

impl Call {
    /// Creates a call with these parameters, 8 bytes each.
    pub fn new(id: u32, context: Context, params: &[u64]) -> Self {
        let correlation = CALLS.fetch_add(1, Relaxed) + 1;
        Call { id, correlation, context, params: params.to_vec(), result: 0 }
    }

    fn tell(&self, site: u32) {
        let mut data = [0_u64; 9]; // 72 bytes
        data[0] = site.into();
        data[2] = self.params.as_ptr() as u64;
        data[3] = if site == 1 { (&raw const self.result) as u64 } else { 0 };
        data[5] = self.context.handle;
        data[6] = self.context.uid.into();
        data[8] = self.correlation.into();
        // SAFETY: 72 bytes laid out as CUpti_CallbackData, with parameters of the call `id`.
        unsafe {
            gpumem::sources::cupti::callback(std::ptr::null_mut(), DRIVER, self.id, data.as_ptr().cast())
        };
    }

    pub fn enter(self) -> Self {
        self.tell(0);
        self
    }

    pub fn exit(self, result: u32) {
        self.leave(result);
    }

    /// As `exit`, but returns the call, so that its memory is not freed while allocations are counted.
    pub fn leave(mut self, result: u32) -> Self {
        self.result = result;
        self.tell(1);
        self
    }
}

/// Makes a call that writes `value` through its first parameter.
pub fn giving(id: u32, value: u64, result: u32, rest: &[u64]) {
    giving_in(CONTEXT, id, value, result, rest);
}

pub fn giving_in(context: Context, id: u32, value: u64, result: u32, rest: &[u64]) {
    let mut out = Box::new(0_u64);
    let mut params = vec![(&raw mut *out) as u64];
    params.extend_from_slice(rest);
    let call = Call::new(id, context, &params).enter();
    *out = value;
    call.exit(result);
}

pub fn alloc(address: u64, bytes: u64) {
    giving(ALLOC, address, 0, &[bytes]);
}

pub fn free(address: u64) {
    taking(FREE, 0, &[address]);
}

/// Makes a call without an out-parameter.
pub fn taking(id: u32, result: u32, params: &[u64]) {
    Call::new(id, CONTEXT, params).enter().exit(result);
}

/// cuDevicePrimaryCtxRetain, cuCtxCreate_v2.
pub fn context(context: Context, device: u32) {
    giving_in(context, CTX_CREATE_V2, context.handle, 0, &[halves(0, device)]);
}

/// Makes a call with its parameters on the stack, as the driver has them. The agent searches for the caller above them.
#[inline(never)]
pub fn on_stack(id: u32, params: &[u64; 2], out: Option<(&mut u64, u64)>) {
    let params = black_box(*params);
    let result = 0_u32;
    let mut data = [0_u64; 9];
    data[2] = params.as_ptr() as u64;
    data[5] = CONTEXT.handle;
    data[6] = CONTEXT.uid.into();
    data[8] = 7;
    // SAFETY: 72 bytes laid out as CUpti_CallbackData, with parameters of the call `id`.
    unsafe { gpumem::sources::cupti::callback(std::ptr::null_mut(), 1, id, data.as_ptr().cast()) };
    if let Some((place, value)) = out {
        *place = value;
    }
    data[0] = 1;
    data[3] = (&raw const result) as u64;
    // SAFETY: as above.
    unsafe { gpumem::sources::cupti::callback(std::ptr::null_mut(), 1, id, data.as_ptr().cast()) };
    black_box(&params);
}

/// Allocates and frees. The caller of this function counts as the caller of the driver.
#[inline(never)]
pub fn allocate_and_free(address: u64, bytes: u64) {
    let mut out = 0_u64;
    let place = (&raw mut out) as u64;
    on_stack(ALLOC, &[place, bytes], Some((&mut out, address)));
    on_stack(FREE, &[address, 0], None);
}

/// Makes a cuMemCreate of `bytes` on device 0.
pub fn mem_create(handle: u64, bytes: u64) {
    let properties = [halves(1, 0), halves(1, 0), 0, 0];
    giving(MEM_CREATE, handle, 0, &[bytes, properties.as_ptr() as u64, 0]);
}

pub fn mem_map(address: u64, bytes: u64, handle: u64) {
    taking(MEM_MAP, 0, &[address, bytes, 0, handle, 0]);
}

/// Makes a callback of the RESOURCE domain; its third word points to `descriptor`.
pub fn resource(id: u32, context: Context, descriptor: *const c_void) {
    let data = [context.handle, 0, descriptor as u64];
    // SAFETY: 24 bytes laid out as CUpti_ResourceData.
    unsafe { gpumem::sources::cupti::callback(std::ptr::null_mut(), RESOURCE, id, data.as_ptr().cast()) };
}
