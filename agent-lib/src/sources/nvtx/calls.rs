//! Implements NVTX's functions, which do nothing without an agent.

use super::text::Message;
use crate::base::fault_injection;
use crate::driver::core::Core;
use crate::driver::guard::guard;
use crate::threads::{OWNERS, Thread};
use cupti_sys::nvtx::{EventAttributes, NOT_TRACKED, core, core2};
use std::ffi::{c_char, c_int, c_void};

/// Handle of the default domain.
const DEFAULT: usize = 0;
/// Result of a pop without a push.
const NOTHING_OPEN: c_int = -1;

type Attributes = *const EventAttributes;

/// A function that returns the address of a function.
type Address = fn() -> usize;

/// Declares the functions of an NVTX module, and a table of their NVTX ids and addresses. By NVTX's contract, texts end with 0,
/// and attributes have the size that they state.
macro_rules! functions {
    ($module:ident; $( $number:path => $function:ident($($argument:ident: $type:ty),*) -> $result:ty { $work:expr } )*) => {
        pub(crate) const $module: &[(u32, Address)] = &[$( ($number, || $function as *const () as usize) ),*];

        $(
            #[allow(unused_unsafe)] // some functions have no text
            unsafe extern "C" fn $function($($argument: $type),*) -> $result {
                // SAFETY: NVTX's contract.
                unsafe { $work }
            }
        )*
    };
}

functions! { CORE;
    core::MARK_EX => mark_ex(attributes: Attributes) -> () { mark(DEFAULT, Message::of(attributes)) }
    core::MARK_A => mark_a(text: *const c_char) -> () { mark(DEFAULT, Message::narrow(text)) }
    core::MARK_W => mark_w(text: *const u32) -> () { mark(DEFAULT, Message::wide(text)) }
    core::RANGE_START_EX => start_ex(attributes: Attributes) -> u64 { start(DEFAULT, Message::of(attributes)) }
    core::RANGE_START_A => start_a(text: *const c_char) -> u64 { start(DEFAULT, Message::narrow(text)) }
    core::RANGE_START_W => start_w(text: *const u32) -> u64 { start(DEFAULT, Message::wide(text)) }
    core::RANGE_END => end(id: u64) -> () { ended(id) }
    core::RANGE_PUSH_EX => push_ex(attributes: Attributes) -> c_int { push(DEFAULT, Message::of(attributes)) }
    core::RANGE_PUSH_A => push_a(text: *const c_char) -> c_int { push(DEFAULT, Message::narrow(text)) }
    core::RANGE_PUSH_W => push_w(text: *const u32) -> c_int { push(DEFAULT, Message::wide(text)) }
    core::RANGE_POP => pop() -> c_int { pop_of(DEFAULT) }
}

functions! { CORE2;
    core2::DOMAIN_MARK_EX => domain_mark(domain: usize, attributes: Attributes) -> () { mark(domain, Message::of(attributes)) }
    core2::DOMAIN_RANGE_START_EX => domain_start(domain: usize, attributes: Attributes) -> u64 { start(domain, Message::of(attributes)) }
    core2::DOMAIN_RANGE_END => domain_end(_domain: usize, id: u64) -> () { ended(id) }
    core2::DOMAIN_RANGE_PUSH_EX => domain_push(domain: usize, attributes: Attributes) -> c_int { push(domain, Message::of(attributes)) }
    core2::DOMAIN_RANGE_POP => domain_pop(domain: usize) -> c_int { pop_of(domain) }
    core2::DOMAIN_REGISTER_STRING_A => register_a(domain: usize, text: *const c_char) -> *mut c_void { register(domain, Message::narrow(text)) }
    core2::DOMAIN_REGISTER_STRING_W => register_w(domain: usize, text: *const u32) -> *mut c_void { register(domain, Message::wide(text)) }
    core2::DOMAIN_CREATE_A => create_a(name: *const c_char) -> *mut c_void { create(crate::base::c_text::bytes(name)) }
    core2::DOMAIN_CREATE_W => create_w(name: *const u32) -> *mut c_void { create_wide(name) }
    core2::DOMAIN_DESTROY => destroy(_domain: usize) -> () { () }
}

/// Runs `work` with the domain's owner number; returns `absent` if ranges of the domain do not count. `place` is the name of the
/// injection point for test faults.
#[inline(always)]
fn within<T: Copy>(
    place: &str,
    domain: usize,
    absent: T,
    work: impl FnOnce(&'static Core, &'static Thread, u8) -> T,
) -> T {
    let Some(owner) = super::owner(domain) else { return absent };
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
    within("nvtx.start", domain, 0, |core, _, _| super::start_range(core, |outer| message.tag(core, outer)))
}

fn ended(id: u64) {
    guard((), |core, _| {
        fault_injection::at("nvtx.end");
        super::end_range(core, id);
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
        super::create_domain(core, name)
    }) as *mut c_void
}

/// # Safety
/// `name` must be null or end with 0.
unsafe fn create_wide(name: *const u32) -> *mut c_void {
    if name.is_null() {
        return create(&[]);
    }
    // SAFETY: the caller guarantees the name, which is not null.
    let (buffer, len) = unsafe { super::text::plain(name) };
    create(buffer.get(..len).unwrap_or_default())
}
