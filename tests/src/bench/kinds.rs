//! Cost that the agent adds to each kind of driver call. Calls of the simulated driver with callbacks alternate with
//! calls without a subscriber in the same process. The simulated driver costs only its own bookkeeping. So the
//! difference is the cost of agent and CUPTI; the ratio would be far smaller on a GPU.

use super::rounds::{Contestant, Per, print_table};
use crate::live::Machine;
use crate::live::programs::fake;
use cupti_sys::Library;
use gpumem::driver::core::Core;
use std::ffi::{CString, c_void};
use std::path::PathBuf;

const ROUNDS: usize = 24;
const CALLS: usize = 200;
const MIB: usize = 1 << 20;

/// Returns the path of the simulated libcupti.
pub fn cupti() -> PathBuf {
    fake().join("lib/libcupti.so.12")
}

macro_rules! driver {
    ($( $field:ident = $symbol:literal ( $($type:ty),* ) ),* $(,)?) => {
        /// Functions of the simulated driver.
        #[derive(Debug, Clone, Copy)]
        struct Driver { $( $field: unsafe extern "C" fn($($type),*) -> u32, )* }

        impl Driver {
            fn open() -> Self {
                let path = fake().join("lib/libcuda.so.1");
                let path = CString::new(path.to_str().expect("UTF-8")).expect("no 0");
                let library = Library::open(&path).expect("the simulated driver");
                // SAFETY: each type is the function's.
                unsafe { Driver { $( $field: library.function($symbol).expect("a function"), )* } }
            }
        }
    };
}

driver! {
    init = c"cuInit"(u32),
    retain = c"cuDevicePrimaryCtxRetain"(*mut usize, i32),
    set_current = c"cuCtxSetCurrent"(usize),
    alloc = c"cuMemAlloc_v2"(*mut u64, usize),
    free = c"cuMemFree_v2"(u64),
    alloc_async = c"cuMemAllocAsync"(*mut u64, usize, usize),
    free_async = c"cuMemFreeAsync"(u64, usize),
    reserve = c"cuMemAddressReserve"(*mut u64, usize, usize, u64, u64),
    create = c"cuMemCreate"(*mut u64, usize, *const c_void, u64),
    map = c"cuMemMap"(u64, usize, usize, u64, u64),
    unmap = c"cuMemUnmap"(u64, usize),
    release = c"cuMemRelease"(u64),
    alloc_managed = c"cuMemAllocManaged"(*mut u64, usize, u32),
    host_alloc = c"cuMemHostAlloc"(*mut u64, usize, u32),
    host_free = c"cuMemFreeHost"(u64),
    array_create = c"cuArrayCreate_v2"(*mut u64, *const c_void),
    array_destroy = c"cuArrayDestroy"(u64),
    module_load = c"cuModuleLoadData"(*mut u64, *const c_void),
    module_unload = c"cuModuleUnload"(u64),
}

fn ok(result: u32) {
    assert_eq!(result, 0, "a call of the simulated driver failed");
}

/// A kind: its name, and a function that makes and frees one allocation (at the reserved address, if it needs one).
type Kind = (&'static str, fn(&Driver, u64));

// SAFETY for all: each call passes the parameters of its function, with room for the results.
#[allow(clippy::undocumented_unsafe_blocks)]
const KINDS: &[Kind] = &[
    ("cuMemAlloc + Free", |driver, _| unsafe {
        let mut address = 0;
        ok((driver.alloc)(&mut address, 4 * MIB));
        ok((driver.free)(address));
    }),
    ("cuMemAllocAsync + FreeAsync", |driver, _| unsafe {
        let mut address = 0;
        ok((driver.alloc_async)(&mut address, 4 * MIB, 0));
        ok((driver.free_async)(address, 0));
    }),
    ("create, map, unmap, release", |driver, at| unsafe {
        let properties: [u32; 8] = [1, 0, 1, 0, 0, 0, 0, 0];
        let mut handle = 0;
        ok((driver.create)(&mut handle, 2 * MIB, properties.as_ptr().cast(), 0));
        ok((driver.map)(at, 2 * MIB, 0, handle, 0));
        ok((driver.unmap)(at, 2 * MIB));
        ok((driver.release)(handle));
    }),
    ("cuMemAllocManaged + Free", |driver, _| unsafe {
        let mut address = 0;
        ok((driver.alloc_managed)(&mut address, 4 * MIB, 1));
        ok((driver.free)(address));
    }),
    ("cuMemHostAlloc + FreeHost", |driver, _| unsafe {
        let mut address = 0;
        ok((driver.host_alloc)(&mut address, 4 * MIB, 0));
        ok((driver.host_free)(address));
    }),
    ("cuArrayCreate + Destroy", |driver, _| unsafe {
        let description: [u64; 3] = [1024, 1024, 0x20 | 1 << 32];
        let mut handle = 0;
        ok((driver.array_create)(&mut handle, description.as_ptr().cast()));
        ok((driver.array_destroy)(handle));
    }),
    ("cuModuleLoadData + Unload", |driver, _| unsafe {
        let mut module = 0;
        ok((driver.module_load)(&mut module, c"no ELF file".as_ptr().cast()));
        ok((driver.module_unload)(module));
    }),
];

/// Measures all kinds. `core` is the process's agent, which has seen no driver so far; `drained` waits for its sender.
pub fn run(core: &Core, drained: fn(&Core)) {
    let machine = Machine::new(&["devices=1"]);
    // SAFETY: the agent's thread reads no environment.
    unsafe { std::env::set_var("GPUMEM_SIM", machine.sim()) };
    let driver = Driver::open();
    let (mut context, mut at) = (0, 0);
    // SAFETY: as at KINDS.
    unsafe {
        ok((driver.init)(0));
        assert_eq!(gpumem::InitializeInjection(), 1);
        ok((driver.retain)(&mut context, 0));
        ok((driver.set_current)(context));
        ok((driver.reserve)(&mut at, 2 * MIB, 0, 0, 0));
    }
    for (name, life) in KINDS {
        let mut heard = Contestant::new(name);
        let mut bare = Contestant::new("the driver's calls alone");
        for _ in 0..ROUNDS {
            let before = core.recorder.ring.head();
            heard.round(CALLS, || (0..CALLS).for_each(|_| life(&driver, at)));
            assert!(core.recorder.ring.head() >= before + 2 * CALLS as u64, "the agent recorded no {name}");
            drained(core);
            // SAFETY: no arguments.
            unsafe { gpumem::gpumem_pause() };
            let before = core.recorder.ring.head();
            bare.round(CALLS, || (0..CALLS).for_each(|_| life(&driver, at)));
            assert_eq!(core.recorder.ring.head(), before, "a subscriber is active");
            // SAFETY: as above.
            unsafe { gpumem::gpumem_resume() };
        }
        heard.forget_warm_up();
        bare.forget_warm_up();
        print_table("a life, from the first call to the last", Per::Event, &[&heard, &bare]);
    }
    assert_eq!(core.recorder.ring.lost(), 0, "a round found the ring full");
}
