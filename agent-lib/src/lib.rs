//! `libgpumem.so`: the agent of gpumemd inside a process that uses a GPU. A guest: it never blocks, never allocates on a
//! callback, never unwinds into the host, and never survives a fork armed.
//!
//! ```text
//! lib.rs          every exported symbol                 attach.rs  starting
//! ffi.rs          guard(): the one way in               fork.rs    children, exit
//! core.rs         the parts together; how a record is made
//! cupti/          callbacks -> booking                  elf.rs     what of a module is loaded
//! book.rs         allocations, frees, imports           vmm.rs     handles and mappings      multicast.rs
//! pools.rs        pools of frameworks                   driver_pools.rs  pools of the driver, polled
//! devices.rs      devices and contexts                  scope.rs   tags
//! live.rs         state: the live table                 ring.rs    history                   names.rs
//! memfd.rs        what the daemon is handed             threads.rs what each thread has
//! sender/         the one thread: ring -> socket or file; resync
//! clock.rs  env.rs  state.rs  second.rs  glibc.rs                 include/gpumem.h: the C API
//! ```
//!
//! The symbols here are the whole interface: the driver calls `InitializeInjection`, programs call the rest through
//! gpumem.h. Strings are UTF-8 ending with 0, or null; what is not UTF-8 is shown as `?`.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::panic))]

pub mod attach;
pub mod book;
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
pub mod live;
pub mod memfd;
pub mod multicast;
pub mod names;
pub mod pools;
pub mod ring;
pub mod scope;
mod second;
pub mod sender;
pub mod state;
pub mod threads;
pub mod vmm;

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

/// Called by the driver inside of cuInit. Always 1: with 0 the driver would unload the library and load it again.
#[unsafe(no_mangle)]
pub extern "C" fn InitializeInjection() -> c_int {
    shielded((), attach::injected);
    1
}

/// Whether the agent records.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_available() -> c_int {
    c_int::from(state::armed())
}

/// Opens a scope on this thread.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpumem_push(name: *const c_char) {
    // SAFETY: as the caller says.
    guard((), |core, thread| core.push(thread, unsafe { bytes(name) }));
}

/// Closes the innermost scope of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_pop() {
    guard((), |core, thread| core.pop(thread));
}

/// Sets the tag of threads without scopes.
///
/// # Safety
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpumem_process_tag(path: *const c_char) {
    // SAFETY: as the caller says.
    guard((), |core, _| core.set_process_tag(unsafe { bytes(path) }));
}

/// A step begins.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_step(number: u64) {
    guard((), |core, thread| core.step(thread, number));
}

/// A phase begins.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_phase(phase: c_int) {
    guard((), |core, thread| core.phase(thread, phase));
}

/// Something worth a mark happened.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpumem_mark(name: *const c_char) {
    // SAFETY: as the caller says.
    guard((), |core, thread| core.mark(thread, unsafe { bytes(name) }));
}

/// A new pool; 0 if the agent does not record.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpumem_pool_create(name: *const c_char, cuda_ordinal: c_int, parent: u64) -> u64 {
    // SAFETY: as the caller says.
    guard(0, |core, thread| core.pool_create(thread, unsafe { bytes(name) }, cuda_ordinal, parent))
}

/// A pool is gone.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_pool_destroy(pool: u64) {
    guard((), |core, thread| core.pool_destroy(thread, pool));
}

/// A pool took a range.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_segment_add(pool: u64, address: u64, bytes: u64) {
    guard((), |core, thread| core.segment_add(thread, pool, address, bytes));
}

/// A pool gave a range back.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_segment_remove(pool: u64, address: u64, bytes: u64) {
    guard((), |core, thread| core.segment_remove(thread, pool, address, bytes));
}

/// A pool handed out a block.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_block_alloc(pool: u64, address: u64, bytes: u64, stream: u32) {
    guard((), |core, thread| core.block_alloc(thread, pool, address, bytes, stream));
}

/// A block came back.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_block_free(pool: u64, address: u64, pending: c_int) {
    guard((), |core, thread| core.block_free(thread, pool, address, pending != 0));
}

/// What a pool says of itself.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_pool_state(pool: u64, reserved_bytes: u64, used_bytes: u64) {
    guard((), |core, thread| core.pool_state(thread, pool, reserved_bytes, used_bytes));
}

/// A pool's total, to be compared.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_pool_check(pool: u64, total_bytes: u64) {
    guard((), |core, thread| core.pool_check(thread, pool, total_bytes));
}

/// What is known by now of an allocation (pool 0) or block.
///
/// # Safety
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpumem_retag(
    pool: u64,
    address: u64,
    path: *const c_char,
    role: c_int,
    phase: c_int,
) {
    let code = |number: c_int| u8::try_from(number).unwrap_or(0);
    let use_as = (Role::from_code(code(role)), Phase::from_code(code(phase)));
    // SAFETY: as the caller says.
    guard((), |core, thread| core.retag(thread, pool, address, unsafe { bytes(path) }, use_as));
}

/// Gives the CUPTI subscription to somebody else for a while.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_pause() {
    shielded((), cupti::subscribe::pause);
}

/// Takes it back.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_resume() {
    shielded((), || {
        if let Some(core) = core::Core::get().filter(|_| state::armed()) {
            cupti::subscribe::resume(core);
        }
    });
}
