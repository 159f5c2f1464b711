//! The agent's implementations of NVTX functions, which do nothing by default.

use super::scopes;
use super::text::Message;
use crate::base::fault_injection;
use crate::driver::core::Core;
use crate::driver::guard::guard;
use crate::threads::OWNERS;
use crate::threads::Thread;
use cupti_sys::nvtx::{EventAttributes, NOT_TRACKED, core, core2};
use std::ffi::{c_char, c_int, c_void};

/// The default domain.
const DEFAULT: usize = 0;
/// Result of a pop without a push.
const NOTHING_OPEN: c_int = -1;

type Attributes = *const EventAttributes;

/// Returns a function's address; called when the table is filled.
type Address = fn() -> usize;

macro_rules! addresses {
    ($( $number:path => $function:ident ),* $(,)?) => {
        &[$( ($number, || $function as *const () as usize) ),*]
    };
}

/// Functions of module CORE.
pub(crate) const CORE: &[(u32, Address)] = addresses![
    core::MARK_EX => mark_ex,
    core::MARK_A => mark_a,
    core::MARK_W => mark_w,
    core::RANGE_START_EX => start_ex,
    core::RANGE_START_A => start_a,
    core::RANGE_START_W => start_w,
    core::RANGE_END => end,
    core::RANGE_PUSH_EX => push_ex,
    core::RANGE_PUSH_A => push_a,
    core::RANGE_PUSH_W => push_w,
    core::RANGE_POP => pop,
];

/// Functions of module CORE2.
pub(crate) const CORE2: &[(u32, Address)] = addresses![
    core2::DOMAIN_MARK_EX => domain_mark,
    core2::DOMAIN_RANGE_START_EX => domain_start,
    core2::DOMAIN_RANGE_END => domain_end,
    core2::DOMAIN_RANGE_PUSH_EX => domain_push,
    core2::DOMAIN_RANGE_POP => domain_pop,
    core2::DOMAIN_REGISTER_STRING_A => register_a,
    core2::DOMAIN_REGISTER_STRING_W => register_w,
    core2::DOMAIN_CREATE_A => create_a,
    core2::DOMAIN_CREATE_W => create_w,
    core2::DOMAIN_DESTROY => destroy,
];

/// Runs `work` for a domain whose ranges count.
#[inline(always)]
fn within<T: Copy>(
    place: &str,
    domain: usize,
    absent: T,
    work: impl FnOnce(&'static Core, &'static Thread, u8) -> T,
) -> T {
    let Some(owner) = scopes::owner(domain) else { return absent };
    guard(absent, |core, thread| {
        fault_injection::at(place);
        work(core, thread, owner)
    })
}

#[inline(always)]
fn push(domain: usize, message: Message<'_>) -> c_int {
    within("nvtx.push", domain, NOT_TRACKED, |core, thread, owner| {
        core.open_scope(thread, owner, |parent| message.tag(core, parent)).into()
    })
}

#[inline(always)]
fn pop_of(domain: usize) -> c_int {
    within("nvtx.pop", domain, NOT_TRACKED, |core, thread, owner| {
        core.close_scope(thread, owner).map_or(NOTHING_OPEN, c_int::from)
    })
}

fn mark(domain: usize, message: Message<'_>) {
    within("nvtx.mark", domain, (), |core, thread, _| core.mark_tag(thread, message.tag(core, 0)));
}

fn start(domain: usize, message: Message<'_>) -> u64 {
    within("nvtx.start", domain, 0, |core, _, _| scopes::start_range(core, |outer| message.tag(core, outer)))
}

fn ended(id: u64) {
    guard((), |core, _| {
        fault_injection::at("nvtx.end");
        scopes::end_range(core, id);
    });
}

fn register(domain: usize, message: Message<'_>) -> *mut c_void {
    within("nvtx.register", domain, 0, |core, _, _| message.tag(core, 0) as usize) as *mut c_void
}

fn create(name: &[u8]) -> *mut c_void {
    // With a disarmed agent, returns a domain whose ranges do not count.
    const _: () = assert!(OWNERS > 2);
    guard(1, |core, _| {
        fault_injection::at("nvtx.create");
        scopes::create(core, name)
    }) as *mut c_void
}

// SAFETY of the functions below: the program follows NVTX's contract: texts end with 0, attributes have the size that they
// state.

unsafe extern "C" fn mark_ex(attributes: Attributes) {
    // SAFETY: NVTX's contract.
    mark(DEFAULT, unsafe { Message::of(attributes) });
}
unsafe extern "C" fn mark_a(text: *const c_char) {
    // SAFETY: NVTX's contract.
    mark(DEFAULT, unsafe { Message::narrow(text) });
}
unsafe extern "C" fn mark_w(text: *const u32) {
    // SAFETY: NVTX's contract.
    mark(DEFAULT, unsafe { Message::wide(text) });
}
unsafe extern "C" fn start_ex(attributes: Attributes) -> u64 {
    // SAFETY: NVTX's contract.
    start(DEFAULT, unsafe { Message::of(attributes) })
}
unsafe extern "C" fn start_a(text: *const c_char) -> u64 {
    // SAFETY: NVTX's contract.
    start(DEFAULT, unsafe { Message::narrow(text) })
}
unsafe extern "C" fn start_w(text: *const u32) -> u64 {
    // SAFETY: NVTX's contract.
    start(DEFAULT, unsafe { Message::wide(text) })
}
unsafe extern "C" fn end(id: u64) {
    ended(id);
}
unsafe extern "C" fn push_ex(attributes: Attributes) -> c_int {
    // SAFETY: NVTX's contract.
    push(DEFAULT, unsafe { Message::of(attributes) })
}
unsafe extern "C" fn push_a(text: *const c_char) -> c_int {
    // SAFETY: NVTX's contract.
    push(DEFAULT, unsafe { Message::narrow(text) })
}
unsafe extern "C" fn push_w(text: *const u32) -> c_int {
    // SAFETY: NVTX's contract.
    push(DEFAULT, unsafe { Message::wide(text) })
}
unsafe extern "C" fn pop() -> c_int {
    pop_of(DEFAULT)
}
unsafe extern "C" fn domain_mark(domain: usize, attributes: Attributes) {
    // SAFETY: NVTX's contract.
    mark(domain, unsafe { Message::of(attributes) });
}
unsafe extern "C" fn domain_start(domain: usize, attributes: Attributes) -> u64 {
    // SAFETY: NVTX's contract.
    start(domain, unsafe { Message::of(attributes) })
}
unsafe extern "C" fn domain_end(_: usize, id: u64) {
    ended(id);
}
unsafe extern "C" fn domain_push(domain: usize, attributes: Attributes) -> c_int {
    // SAFETY: NVTX's contract.
    push(domain, unsafe { Message::of(attributes) })
}
unsafe extern "C" fn domain_pop(domain: usize) -> c_int {
    pop_of(domain)
}
unsafe extern "C" fn register_a(domain: usize, text: *const c_char) -> *mut c_void {
    // SAFETY: NVTX's contract.
    register(domain, unsafe { Message::narrow(text) })
}
unsafe extern "C" fn register_w(domain: usize, text: *const u32) -> *mut c_void {
    // SAFETY: NVTX's contract.
    register(domain, unsafe { Message::wide(text) })
}
unsafe extern "C" fn create_a(name: *const c_char) -> *mut c_void {
    // SAFETY: NVTX's contract.
    create(unsafe { crate::base::c_text::bytes(name) })
}
unsafe extern "C" fn create_w(name: *const u32) -> *mut c_void {
    if name.is_null() {
        return create(&[]);
    }
    // SAFETY: NVTX's contract, and not null.
    let (buffer, len) = unsafe { super::text::plain(name) };
    create(buffer.get(..len).unwrap_or_default())
}
unsafe extern "C" fn destroy(_: usize) {}
