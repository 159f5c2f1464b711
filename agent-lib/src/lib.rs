//! `libgpumem.so`: the agent of gpumemd inside a process that uses a GPU. A guest: it never blocks, never allocates on a
//! callback, never unwinds into the host, and never survives a fork armed.
//!
//! ```text
//! lib.rs          every exported symbol                 attach.rs  starting
//! ffi.rs          guard(): the one way in               fork.rs    children, exit
//! core.rs         the parts together; how a record is made
//! cupti/          callbacks -> booking                  elf.rs     what of a module is loaded
//! callers/        which library made a call
//! book.rs         allocations, frees, imports           vmm.rs     handles and mappings      multicast.rs
//! pools.rs        pools of frameworks                   driver_pools.rs  pools of the driver, polled
//! devices.rs      devices and contexts                  scope.rs   tags
//! naming.rs       what an allocation is called: scopes (nvtx/), modules (python/, torch/)       layers.rs  how each of them is
//! live.rs         state: the live table                 ring.rs    history                   names.rs
//! memfd.rs        what the daemon is handed             threads.rs what each thread has
//! sender/         the one thread: ring -> socket or file; resync
//! clock.rs  env.rs  state.rs  second.rs  glibc.rs                 include/gpumem.h: the C API
//! ```
//!
//! The symbols here are the whole interface: the driver calls `InitializeInjection`, programs call the rest through
//! gpumem.h. Strings are UTF-8 ending with 0, or null; what is not UTF-8 is shown as `?`.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::panic))]
#![allow(clippy::unused_unit)] // the table of exports below says every result

pub mod attach;
pub mod book;
pub mod callers;
pub mod clock;
pub mod core;
pub mod cupti;
pub mod devices;
pub mod driver_pools;
mod elf;
pub mod env;
pub mod ffi;
mod fork;
mod glibc;
pub mod layers;
pub mod live;
pub mod memfd;
pub mod multicast;
pub mod names;
pub mod naming;
pub mod nvtx;
pub mod pools;
pub mod python;
pub mod ring;
pub mod scope;
mod second;
pub mod sender;
pub mod state;
pub mod threads;
pub mod torch;
pub mod vmm;

use cupti_sys::nvtx::GetExportTable;
use ffi::{guard, shielded};
use gpumem_wire::{Phase, Role};
use std::ffi::{c_char, c_int};

/// The bytes of a C string; none for null.
///
/// # Safety
/// `text` is null or a C string that outlives the result.
#[inline(always)]
unsafe fn bytes<'a>(text: *const c_char) -> &'a [u8] {
    if text.is_null() {
        return &[];
    }
    // SAFETY: a C string, says the caller.
    unsafe { std::slice::from_raw_parts(text.cast(), libc::strlen(text)) }
}

/// Numbers of the caller's; none for null.
///
/// # Safety
/// `words` is null or has `count` of them, which outlive the result.
unsafe fn words<'a>(words: *const u64, count: usize) -> &'a [u64] {
    if words.is_null() {
        return &[];
    }
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts(words, count) }
}

macro_rules! text {
    ($text:ident) => {
        // SAFETY: null or a C string, says the caller of each function that has one.
        unsafe { bytes($text) }
    };
}

/// Each line is an exported function: its symbol, its name in [`Functions`], what it gives while nothing is recorded, and
/// what it does. A copy of the library that came second hands the call to the first.
macro_rules! exports {
    ($( $(#[$doc:meta])* $symbol:ident as $field:ident ( $($arg:ident : $type:ty),* ) -> $result:ty {
        $absent:expr; |$core:pat_param, $thread:pat_param| $work:expr
    } )*) => {
        /// The interface as a table: for a second copy of the library in the process.
        #[repr(C)]
        #[derive(Debug)]
        #[allow(missing_docs)]
        pub struct Functions {
            pub magic: u64,
            pub initialize: extern "C" fn() -> c_int,
            pub initialize_nvtx: extern "C" fn(Option<GetExportTable>) -> c_int,
            $( pub $field: unsafe extern "C" fn($($type),*) -> $result, )*
        }

        /// Of this copy.
        pub static FUNCTIONS: Functions = Functions {
            magic: second::MAGIC,
            initialize: InitializeInjection,
            initialize_nvtx: InitializeInjectionNvtx2,
            $( $field: $symbol, )*
        };

        /// Where they are, by their names in [`Functions`]: for code that is handed addresses.
        pub fn addresses() -> Vec<(&'static str, usize)> {
            vec![$( (stringify!($field), $symbol as *const () as usize), )*]
        }

        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// A `name` or `path` is null or a C string.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $symbol($($arg: $type),*) -> $result {
                if !state::armed() {
                    match attach::elsewhere() {
                        // SAFETY: as our caller says.
                        Some(first) => return unsafe { (first.$field)($($arg),*) },
                        None if !state::armed() => return $absent,
                        None => {}
                    }
                }
                guard($absent, |$core, $thread| $work)
            }
        )*
    };
}

/// Called by the driver inside of cuInit. Always 1: with 0 the driver would unload the library and load it again.
#[unsafe(no_mangle)]
pub extern "C" fn InitializeInjection() -> c_int {
    shielded((), attach::injected);
    1
}

/// Called by each library with NVTX in it, on its first NVTX call and under a lock of its own. 0: all its calls are nothing.
#[unsafe(no_mangle)]
pub extern "C" fn InitializeInjectionNvtx2(get_export_table: Option<GetExportTable>) -> c_int {
    shielded(0, || nvtx::initialize(get_export_table))
}

exports! {
    /// Whether the agent records.
    gpumem_available as available() -> c_int { 0; |_, _| 1 }
    /// Opens a scope on this thread.
    gpumem_push as push(name: *const c_char) -> () { (); |core, thread| core.push(thread, text!(name)) }
    /// Closes the innermost scope of this thread.
    gpumem_pop as pop() -> () { (); |core, thread| core.pop(thread) }
    /// Sets the tag of threads without scopes.
    gpumem_process_tag as process_tag(path: *const c_char) -> () { (); |core, _| core.set_process_tag(text!(path)) }
    /// A step begins.
    gpumem_step as step(number: u64) -> () { 
        (); |core, thread| {
            python::run::program_steps();
            core.step(thread, number)
        }
    }
    /// An optimizer's step has ended, the next step begins: unless the program says so itself.
    gpumem_auto_step as auto_step(number: u64) -> () {
        (); |core, thread| if python::run::are_steps_ours() { core.step(thread, number) }
    }
    /// A phase begins.
    gpumem_phase as phase(phase: c_int) -> () { (); |core, thread| core.phase(thread, phase) }
    /// Something worth a mark happened.
    gpumem_mark as mark(name: *const c_char) -> () { (); |core, thread| core.mark(thread, text!(name)) }
    /// A new pool; 0 if the agent does not record.
    gpumem_pool_create as pool_create(name: *const c_char, cuda_ordinal: c_int, parent: u64) -> u64 {
        0; |core, thread| core.pool_create(thread, text!(name), cuda_ordinal, parent)
    }
    /// A pool is gone.
    gpumem_pool_destroy as pool_destroy(pool: u64) -> () { (); |core, thread| core.pool_destroy(thread, pool) }
    /// A pool took a range.
    gpumem_segment_add as segment_add(pool: u64, address: u64, bytes: u64) -> () {
        (); |core, thread| core.segment_add(thread, pool, address, bytes)
    }
    /// A pool gave a range back.
    gpumem_segment_remove as segment_remove(pool: u64, address: u64, bytes: u64) -> () {
        (); |core, thread| core.segment_remove(thread, pool, address, bytes)
    }
    /// A pool handed out a block.
    gpumem_block_alloc as block_alloc(pool: u64, address: u64, bytes: u64, stream: u32) -> () {
        (); |core, thread| core.block_alloc(thread, pool, address, bytes, stream)
    }
    /// A block came back.
    gpumem_block_free as block_free(pool: u64, address: u64, pending: c_int) -> () {
        (); |core, thread| core.block_free(thread, pool, address, pending != 0)
    }
    /// What a pool says of itself.
    gpumem_pool_state as pool_state(pool: u64, reserved_bytes: u64, used_bytes: u64) -> () {
        (); |core, thread| core.pool_state(thread, pool, reserved_bytes, used_bytes)
    }
    /// A pool's total, to be compared.
    gpumem_pool_check as pool_check(pool: u64, total_bytes: u64) -> () {
        (); |core, thread| core.pool_check(thread, pool, total_bytes)
    }
    /// What is known by now of an allocation (pool 0) or block.
    gpumem_retag as retag(pool: u64, address: u64, path: *const c_char, role: c_int, phase: c_int) -> () {
        (); |core, thread| core.retag(thread, pool, address, text!(path), use_as(role, phase))
    }
    /// How the layer of exact roles is: a number of the wire format, and why.
    gpumem_roles as roles(state: c_int, reason: *const c_char) -> () {
        (); |_, _| python::run::say_roles(state, text!(reason))
    }
    /// The number that the next node of autograd on this thread will have; the largest of all without PyTorch.
    gpumem_autograd_number as autograd_number() -> u64 {
        u64::MAX; |core, _| {
            torch::autograd::attach(core);
            torch::autograd::next_number().unwrap_or(u64::MAX)
        }
    }
    /// Finds out where nodes have their numbers: see `torch::autograd::calibrate`. 1 if it is known now.
    gpumem_autograd_calibrate as autograd_calibrate(objects: *const u64, count: u32, first: u64) -> c_int {
        0; |_, _| {
            // SAFETY: so many numbers, says the caller, of objects that exist.
            c_int::from(unsafe { torch::autograd::calibrate(words(objects, count as usize), first) })
        }
    }
    /// A module object exists, of this type, as child `name` of `parent` (0: of none).
    gpumem_module as module(object: u64, kind: u64, parent: u64, name: *const c_char) -> () {
        (); |core, _| python::say_module(core, object, kind, parent, text!(name))
    }
    /// A module object is about to be freed.
    gpumem_module_gone as module_gone(object: u64) -> () { (); |_, _| python::MODULES.gone(object) }
    /// What a code object means: see `python::say_code`. The caller keeps it alive.
    gpumem_code as code(code_object: u64, what: c_int) -> () { (); |core, _| python::say_code(core, code_object, what) }
    /// Compares the calling thread's Python frames, the innermost first, with what Python says of them (places of `count` numbers each),
    /// and uses them from now on. 1 if they are the same; else 0, and why.
    gpumem_frames_selftest as frames_selftest(
        codes: *const u64, firsts: *const u64, lines: *const i32, count: u64, reason: *mut c_char, reason_bytes: u64
    ) -> c_int {
        0; |core, _| {
            // SAFETY: places of that size, says the caller.
            let said = unsafe { python::selftest::Said::new(codes, firsts, lines, count) };
            let proved = python::prove(core, said);
            // SAFETY: as above.
            unsafe { fill(reason, reason_bytes, |out| python::put(out, proved.as_ref().err())) };
            c_int::from(proved.is_ok())
        }
    }
    /// Module calls so far that met an object which nobody has said.
    gpumem_modules_unknown as modules_unknown() -> u64 {
        0; |_, _| python::MODULES.unknown.load(std::sync::atomic::Ordering::Relaxed)
    }
    /// How an allocation that this thread made now would be named, and its Python stack, as text. Its length.
    gpumem_here as here(out: *mut c_char, bytes: u64) -> u64 {
        0; |core, thread| {
            // SAFETY: room of that size, says the caller.
            unsafe { fill(out, bytes, |out| python::describe(core, thread, out)) }
        }
    }
    /// Gives the CUPTI subscription to somebody else for a while.
    gpumem_pause as pause() -> () { (); |core, thread| cupti::subscribe::pause(core, thread) }
    /// Takes it back.
    gpumem_resume as resume() -> () { (); |core, _| cupti::subscribe::resume(core) }
}

/// Lets `write` fill a C string in the caller's room; its length.
///
/// # Safety
/// `out` is null or has room for `bytes` bytes.
unsafe fn fill(out: *mut c_char, bytes: u64, write: impl FnOnce(&mut [u8]) -> usize) -> u64 {
    let Some(most) = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_sub(1)) else { return 0 };
    if out.is_null() {
        return 0;
    }
    // SAFETY: as our caller says.
    let room = unsafe { std::slice::from_raw_parts_mut(out.cast::<u8>(), most + 1) };
    let used = write(&mut room[..most]).min(most);
    room[used] = 0;
    used as u64
}

fn use_as(role: c_int, phase: c_int) -> (Role, Phase) {
    let code = |number: c_int| u8::try_from(number).unwrap_or(0);
    (Role::from_code(code(role)), Phase::from_code(code(phase)))
}
