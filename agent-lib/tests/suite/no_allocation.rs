//! The hot path never calls the allocator: it may be the host's own, and may itself call the driver.

use crate::common::counting;
use crate::common::cupti::*;
use crate::common::daemon::{Folder, agent};
use gpumem_test_support::alone;
use std::ffi::c_char;

/// Returns the allocations and deallocations of this thread during `work`.
fn counted(work: impl FnOnce()) -> u64 {
    counting::counted(work).0
}

#[test]
fn callbacks_and_scopes_allocate_nothing() {
    alone(|| {
        let folder = Folder::new("no-allocation");
        agent(&folder.0.join("nobody.sock"), |settings| settings.ring_slots = 1 << 12);
        context(CONTEXT, 0);
        assert_eq!(counted(|| drop(Box::new(1))), 2, "the counter counts");

        // Calls are built beforehand: only the callbacks are counted.
        let mut out = Box::new(0_u64);
        let place = (&raw mut *out) as u64;
        for round in 0..3 {
            let mut calls = Vec::new();
            for n in 0..10_000_u64 {
                calls.push((
                    Call::new(ALLOC, CONTEXT, &[place, 512]),
                    Call::new(FREE, CONTEXT, &[0x1000 + n * 512]),
                    n,
                ));
            }
            // Parameters are dropped after the counting, too.
            let mut spent = Vec::with_capacity(2 * calls.len());
            let names: Vec<String> = (0..100).map(|n| format!("layer.{n}.{round}\0")).collect();
            let count = counted(|| {
                for (allocate, free, n) in calls.drain(..) {
                    let name = names[n as usize % names.len()].as_ptr().cast::<c_char>();
                    // SAFETY: a C string.
                    unsafe { gpumem::gpumem_push(name) };
                    let allocate = allocate.enter();
                    *out = 0x1000 + n * 512;
                    spent.push(allocate.leave(0));
                    // SAFETY: takes no arguments.
                    unsafe { gpumem::gpumem_pop() };
                    spent.push(free.enter().leave(u32::from(n % 9 == 0)));
                }
            });
            assert_eq!(count, 0, "round {round}");
        }

        // The search for the caller does not allocate, on this thread's stack and on others, cached or not.
        let search = || (0..1000).for_each(|turn| deeper(turn % 50));
        assert_eq!(counted(search), 0);
        let other = std::thread::spawn(move || counted(search));
        assert_eq!(other.join().expect("no panic"), 0);

        // Neither does the first call of a thread, nor a framework's blocks.
        let other = std::thread::spawn(|| {
            counted(|| {
                // SAFETY: C strings.
                unsafe {
                    gpumem::gpumem_push(c"first".as_ptr());
                    let pool = gpumem::gpumem_pool_create(c"pool".as_ptr(), 0, 0);
                    gpumem::gpumem_segment_add(pool, 1 << 40, 1 << 30);
                    for n in 0..1000 {
                        gpumem::gpumem_block_alloc(pool, (1 << 40) + n * 512, 512, 0);
                        gpumem::gpumem_retag(pool, (1 << 40) + n * 512, c"again".as_ptr(), 1, 2);
                        gpumem::gpumem_block_free(pool, (1 << 40) + n * 512, 0);
                    }
                    gpumem::gpumem_segment_remove(pool, (1 << 40) + 512, 512);
                    gpumem::gpumem_pool_destroy(pool);
                    torch_reports(1000);
                    gpumem::gpumem_step(1);
                    gpumem::gpumem_pop();
                }
            })
        });
        assert_eq!(other.join().expect("no panic"), 0);

        // Neither do a program's ranges: known and new names, wide ones, marks, on a separate thread.
        let calls = nvtx();
        let other = std::thread::spawn(move || counted(|| ranges(calls)));
        assert_eq!(other.join().expect("no panic"), 0);
    });
}

/// Push, wide push, pop and mark, as NVTX gets them.
type Nvtx = [usize; 4];

fn nvtx() -> Nvtx {
    use cupti_sys::nvtx::{Callbacks, ETID_CALLBACKS, MODULE_CORE, Table, core};
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    static SLOTS: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];
    static TABLE: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];
    unsafe extern "C" fn module(module: u32, table: *mut Table, count: *mut u32) -> i32 {
        if module != MODULE_CORE {
            return 0;
        }
        // SAFETY: the caller's pointers are valid.
        unsafe {
            *table = TABLE.as_ptr().cast_mut().cast();
            *count = 16;
        }
        1
    }
    static CALLBACKS: Callbacks =
        Callbacks { struct_size: size_of::<Callbacks>(), get_module_function_table: Some(module) };
    unsafe extern "C" fn export_table(id: u32) -> *const std::ffi::c_void {
        if id == ETID_CALLBACKS { (&raw const CALLBACKS).cast() } else { std::ptr::null() }
    }
    TABLE.iter().zip(&SLOTS).for_each(|(place, slot)| place.store(slot.as_ptr() as usize, Relaxed));
    assert_eq!(gpumem::InitializeInjectionNvtx2(Some(export_table)), 1);
    [core::RANGE_PUSH_A, core::RANGE_PUSH_W, core::RANGE_POP, core::MARK_A]
        .map(|id| SLOTS[id as usize].load(Relaxed))
}

fn ranges([push, push_wide, pop, mark]: Nvtx) {
    // SAFETY: the functions have these types, and the texts end with 0.
    unsafe {
        let push: unsafe extern "C" fn(*const c_char) -> i32 = std::mem::transmute(push);
        let push_wide: unsafe extern "C" fn(*const u32) -> i32 = std::mem::transmute(push_wide);
        let pop: unsafe extern "C" fn() -> i32 = std::mem::transmute(pop);
        let mark: unsafe extern "C" fn(*const c_char) = std::mem::transmute(mark);
        let mut name = *b"range 0000\0";
        for n in 0..9000_u32 {
            name[6..10].copy_from_slice(
                &[n / 1000, n / 100 % 10, n / 10 % 10, n % 10].map(|digit| b'0' + digit as u8),
            );
            assert_eq!(push(name.as_ptr().cast()), 0);
            assert_eq!(push_wide([0xe9, 0x1f600, 0].as_ptr()), 1);
            assert_eq!((pop(), pop()), (1, 0));
        }
        mark(c"here".as_ptr());
    }
}

/// Makes PyTorch's reports of blocks, segments and events; the slots have no original functions.
unsafe fn torch_reports(count: u64) {
    let device = 1;
    alloc_now(1 << 44, 1 << 30);
    for n in 0..count {
        // SAFETY: PyTorch's arguments.
        unsafe {
            let address = ((1 << 44) + n * 512) as *mut std::ffi::c_void;
            gpumem::sources::torch::report::reported(address, 512, 512, 1 << 31, device);
            gpumem::sources::torch::pending::recorded(address, std::ptr::null_mut());
            gpumem::sources::torch::report::reported(address, -512, 0, 1 << 31, device);
            gpumem::sources::torch::pending::queried(address);
            gpumem::sources::torch::oom::reported(1 << 40, 0, 1 << 31, device);
        }
    }
}

/// Makes a driver allocation whose parameters lie on this stack.
fn alloc_now(address: u64, bytes: u64) {
    let mut out = 0_u64;
    let place = &raw mut out as u64;
    on_stack(ALLOC, &[place, bytes], Some((&mut out, address)));
}

/// Makes calls from frames at many addresses.
#[inline(never)]
fn deeper(times: u64) {
    let room = std::hint::black_box([times; 37]);
    if times > 0 {
        deeper(times - 1);
    }
    allocate_and_free(0x9000_0000 + times * 512, 512);
    std::hint::black_box(&room);
}
