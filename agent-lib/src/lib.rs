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
    gpumem_step as step(number: u64) -> () { (); |core, thread| core.step(thread, number) }
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
    /// Gives the CUPTI subscription to somebody else for a while.
    gpumem_pause as pause() -> () { (); |core, thread| cupti::subscribe::pause(core, thread) }
    /// Takes it back.
    gpumem_resume as resume() -> () { (); |core, _| cupti::subscribe::resume(core) }
}

fn use_as(role: c_int, phase: c_int) -> (Role, Phase) {
    let code = |number: c_int| u8::try_from(number).unwrap_or(0);
    (Role::from_code(code(role)), Phase::from_code(code(phase)))
}
