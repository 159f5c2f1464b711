#![doc = include_str!("../README.md")]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]
#![allow(clippy::unused_unit)] // the exports table states every result

pub mod base;
pub mod driver;
pub mod entry;
pub mod naming;
pub mod record;
pub mod sender;
pub mod sources;
pub mod threads;

use base::{c_text, fault_injection};
use cupti_sys::nvtx::GetExportTable;
use driver::guard::guard;
use entry::{ask, attach, control, dump, second_copy};
use gpumem_wire::AskKind;
use naming::{autograd, gradient, python};
use record::panic::shielded;
use record::{high_water, status};
use sources::api::recordings::{RecordingReply, RecordingRequest};
use sources::api::{scope, snapshot};
use sources::cupti;
use sources::python_host::run;
use std::ffi::{c_char, c_int};

macro_rules! text {
    ($text:ident) => {
        // SAFETY: null or a C string, as the caller of each function with a text guarantees.
        unsafe { c_text::bytes($text) }
    };
}

/// Declares the exported functions. Each has a symbol, a field name in [`Functions`], a result for a disarmed agent, and a
/// body. A second copy of the library in the process forwards the call to the first.
macro_rules! exports {
    ($( $(#[$doc:meta])* $symbol:ident as $field:ident ( $($arg:ident : $type:ty),* ) -> $result:ty {
        $absent:expr; |$core:pat_param, $thread:pat_param| $work:expr
    } )*) => {
        /// The interface as a table, for a second copy of the library in the process.
        #[repr(C)]
        #[derive(Debug)]
        pub(crate) struct Functions {
            pub magic: u64,
            pub initialize: extern "C" fn() -> c_int,
            pub initialize_nvtx: extern "C" fn(Option<GetExportTable>) -> c_int,
            $( pub $field: unsafe extern "C" fn($($type),*) -> $result, )*
        }

        pub(crate) static FUNCTIONS: Functions = Functions {
            magic: second_copy::MAGIC,
            initialize: InitializeInjection,
            initialize_nvtx: InitializeInjectionNvtx2,
            $( $field: $symbol, )*
        };

        /// Returns the name in [`Functions`] and address of each function, for Python code, which calls them by address.
        pub(crate) fn addresses() -> Vec<(&'static str, usize)> {
            vec![$( (stringify!($field), $symbol as *const () as usize), )*]
        }

        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// A `name` or `path` is null or a C string, a `buffer` null or of the given size.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $symbol($($arg: $type),*) -> $result {
                if !status::armed() {
                    match attach::elsewhere() {
                        // SAFETY: the caller guarantees the arguments.
                        Some(first) => return unsafe { (first.$field)($($arg),*) },
                        None if !status::armed() => return $absent,
                        None => {}
                    }
                }
                guard($absent, |$core, $thread| {
                    fault_injection::at(concat!("api.", stringify!($field)));
                    $work
                })
            }
        )*
    };
}

/// Called by the driver in cuInit. Always returns 1: after 0 the driver would unload the library and load it again.
#[unsafe(no_mangle)]
pub extern "C" fn InitializeInjection() -> c_int {
    shielded((), attach::injected);
    1
}

/// Called by each library with its first NVTX call, while the library's own lock is held. If this returns 0, all NVTX calls of
/// that library do nothing.
#[unsafe(no_mangle)]
pub extern "C" fn InitializeInjectionNvtx2(get_export_table: Option<GetExportTable>) -> c_int {
    shielded(0, || attach::injected_into_nvtx(get_export_table))
}

// Functions of the C API are documented in include/gpumem.h; the others are for the agent's Python code.
exports! {
    gpumem_available as available() -> c_int { 0; |_, _| 1 }
    gpumem_push as push(name: *const c_char) -> () { (); |core, thread| core.push_scope(thread, text!(name)) }
    gpumem_pop as pop() -> () { (); |core, thread| core.pop_scope(thread) }
    gpumem_process_tag as process_tag(path: *const c_char) -> () { (); |core, _| core.set_process_tag(text!(path)) }
    gpumem_step as step(number: u64) -> () {
        (); |core, thread| {
            run::note_program_step();
            control::step(core, number);
            core.step(thread, number)
        }
    }
    /// Marks the end of an optimizer's step and the start of the next step; ignored once the program has called `gpumem_step`.
    gpumem_auto_step as auto_step(number: u64) -> () {
        (); |core, thread| if run::are_optimizer_steps_counted() {
            control::step(core, number);
            core.step(thread, run::step_number_after(number))
        }
    }
    /// Returns the number of the current step, as the report shows it.
    gpumem_step_number as step_number() -> u64 { 0; |_, _| scope::STEP.load(std::sync::atomic::Ordering::Relaxed) }
    gpumem_epoch as epoch(number: u64) -> () {
        (); |core, thread| {
            core.epoch(thread, number);
            // A program that calls gpumem_step begins the first step itself.
            if run::begin_epoch() {
                core.step(thread, 0);
            }
        }
    }
    gpumem_phase as phase(phase: c_int) -> () { (); |core, thread| core.phase(thread, phase) }
    gpumem_mark as mark(name: *const c_char) -> () { (); |core, thread| core.mark(thread, text!(name)) }
    gpumem_pool_create as pool_create(name: *const c_char, cuda_ordinal: c_int, parent: u64) -> u64 {
        0; |core, thread| core.pool_create(thread, text!(name), cuda_ordinal, parent)
    }
    gpumem_pool_destroy as pool_destroy(pool: u64) -> () { (); |core, thread| core.pool_destroy(thread, pool) }
    gpumem_segment_add as segment_add(pool: u64, address: u64, bytes: u64) -> () {
        (); |core, thread| core.segment_add(thread, pool, address, bytes)
    }
    gpumem_segment_remove as segment_remove(pool: u64, address: u64, bytes: u64) -> () {
        (); |core, thread| core.segment_remove(thread, pool, address, bytes)
    }
    gpumem_block_alloc as block_alloc(pool: u64, address: u64, bytes: u64, stream: u32) -> () {
        (); |core, thread| core.block_alloc(thread, pool, address, bytes, stream)
    }
    gpumem_block_free as block_free(pool: u64, address: u64, pending: c_int) -> () {
        (); |core, thread| core.block_free(thread, pool, address, pending != 0)
    }
    gpumem_pool_state as pool_state(pool: u64, reserved_bytes: u64, used_bytes: u64) -> () {
        (); |core, thread| core.pool_state(thread, pool, reserved_bytes, used_bytes)
    }
    gpumem_pool_check as pool_check(pool: u64, total_bytes: u64) -> () {
        (); |core, thread| core.pool_check(thread, pool, total_bytes)
    }
    gpumem_retag as retag(pool: u64, address: u64, path: *const c_char, role: c_int, phase: c_int) -> () {
        (); |core, thread| core.retag(thread, pool, address, text!(path), c_text::use_as(role, phase))
    }
    /// Reports changed module paths, a text of `bytes` bytes; see sources/torch/rename.rs. Returns the number of the next
    /// record.
    gpumem_rename as rename(paths: *const c_char, bytes: u64) -> u64 {
        0; |core, thread| {
            // SAFETY: the caller guarantees this number of bytes.
            let paths = unsafe { c_text::slice(paths.cast::<u8>(), bytes) };
            core.rename(thread, paths)
        }
    }
    /// Updates the cached names of PyTorch modules, after all modules with a new parent were reported.
    gpumem_modules_settle as modules_settle() -> () { (); |core, _| python::MODULES.settle(&core.recorder.names) }
    /// Reports that Python code has named all parameters after their modules.
    gpumem_parameters_named as parameters_named() -> () { (); |_, _| python::MODULES.name_parameters() }
    /// Reports whether exact roles of tensors (parameter, gradient, ...) are found, as a number of `LayerState`, and the reason.
    gpumem_roles as roles(state: c_int, reason: *const c_char) -> () {
        (); |_, _| run::report_roles(state, text!(reason))
    }
    /// Reports the sizes of the program's models, as the lines of `Body::Models`.
    gpumem_models as models(models: *const c_char) -> () { (); |_, _| run::report_models(text!(models)) }
    /// Returns whether the names that keep tensors are wanted when memory runs out (`GPUMEM_KEEPERS`).
    gpumem_keepers_wanted as keepers_wanted() -> c_int { 0; |core, _| c_int::from(core.settings.layers.keepers) }
    /// Reports the names that keep tensors, as the lines of `Body::Keepers`, after the calling thread's last failed request.
    gpumem_keepers as keepers(lines: *const c_char) -> () { (); |core, thread| core.report_keepers(thread, text!(lines)) }
    /// Finds the thread whose Python frames run these `count` code objects, the innermost first. Stores the addresses of the
    /// objects in the first `slots[n]` variables of each frame, one after the other, in `objects`, an array of `total` numbers.
    /// Returns 1 if the thread was found.
    gpumem_locals as locals(codes: *const u64, slots: *const u64, count: u64, objects: *mut u64, total: u64) -> c_int {
        0; |_, _| {
            // SAFETY: the caller guarantees arrays of this size.
            let (codes, slots, objects) = unsafe {
                (c_text::slice(codes, count), c_text::slice(slots, count), c_text::slice_mut(objects, total))
            };
            c_int::from(python::locals(codes, slots, objects))
        }
    }
    /// Prepares the adoption of memory that PyTorch had before the agent (sources/torch/adopt.rs). Called before PyTorch's list
    /// is requested. Returns 0 if no CUDA context is older than the agent, or while adoption is impossible.
    gpumem_adoption_begins as adoption_begins() -> c_int { 0; |core, _| c_int::from(core.adoption_begins()) }
    /// Adopts the entries of PyTorch's list, four numbers each: device, kind (sources/torch/adopt.rs), address, bytes. Returns 0
    /// if the list must be requested again.
    gpumem_adopt as adopt(parts: *const u64, count: u64) -> c_int {
        1; |core, thread| {
            // SAFETY: the caller guarantees this number of parts with four numbers each.
            let parts = unsafe { c_text::slice(parts, count * 4) };
            c_int::from(core.adopt(thread, parts.as_chunks().0))
        }
    }
    /// Returns the sequence number that the next autograd node of this thread gets; `u64::MAX` without PyTorch.
    gpumem_autograd_number as autograd_number() -> u64 {
        u64::MAX; |core, _| {
            autograd::attach(core);
            autograd::next_number().unwrap_or(u64::MAX)
        }
    }
    /// Finds at which offset autograd nodes store their sequence number; see `autograd::calibrate`. Returns 1 if it was found.
    gpumem_autograd_calibrate as autograd_calibrate(objects: *const u64, count: u32, first: u64) -> c_int {
        0; |_, _| {
            // SAFETY: the caller guarantees this number of addresses of existing objects.
            c_int::from(unsafe { autograd::calibrate(c_text::slice(objects, count.into()), first) })
        }
    }
    /// Finds the offsets that lead to gradients from `count` examples of four numbers each; see `gradient::Example`. Returns 1 if
    /// they were found.
    gpumem_autograd_gradients as autograd_gradients(examples: *const u64, count: u32) -> c_int {
        0; |_, _| {
            // SAFETY: the caller guarantees this number of addresses of existing objects.
            let numbers = unsafe { c_text::slice(examples, 4 * u64::from(count)) };
            c_int::from(gradient::calibrate(numbers.as_chunks().0))
        }
    }
    /// Registers a PyTorch module, an object of type `kind`, as child `name` of `parent`. Parent 0 means none; the object itself
    /// means that a compiler generated the module, see `python::Modules`.
    gpumem_module as module(object: u64, kind: u64, parent: u64, name: *const c_char) -> () {
        (); |core, _| python::register_module(core, object, kind, parent, text!(name))
    }
    /// Removes a PyTorch module object that will be freed.
    gpumem_module_gone as module_gone(object: u64) -> () { (); |_, _| python::MODULES.gone(object) }
    /// Registers a Python code object with its meaning `what`; see `python::register_code`. The caller keeps the object alive.
    gpumem_code as code(code_object: u64, what: c_int) -> () { (); |core, _| python::register_code(core, code_object, what) }
    /// Compares the calling thread's Python frames with Python's own list of `count` frames, the innermost first. Each array has
    /// one entry for each frame. Returns 1 and uses frames from now on if they are equal; else returns 0 and writes the reason.
    gpumem_frames_selftest as frames_selftest(
        codes: *const u64, firsts: *const u64, lines: *const i32, count: u64, reason: *mut c_char, reason_bytes: u64
    ) -> c_int {
        0; |core, _| {
            // SAFETY: the caller guarantees arrays of this size.
            let said = unsafe {
                let count = count.min(1 << 16);
                let (codes, firsts) = (c_text::slice(codes, count), c_text::slice(firsts, count));
                python::interpreter::PythonFrames { codes, firsts, lines: c_text::slice(lines, count) }
            };
            let proved = python::prove(core, said);
            // SAFETY: as above.
            unsafe { c_text::fill(reason, reason_bytes, |out| python::put(out, proved.as_ref().err())) };
            c_int::from(proved.is_ok())
        }
    }
    /// Returns how many times module objects were called that were not registered.
    gpumem_modules_unknown as modules_unknown() -> u64 {
        0; |_, _| python::MODULES.unknown.load(std::sync::atomic::Ordering::Relaxed)
    }
    /// Writes the name and Python stack that an allocation by this thread would get now. Returns the length of the text.
    gpumem_here as here(out: *mut c_char, bytes: u64) -> u64 {
        0; |core, thread| {
            // SAFETY: the caller guarantees a buffer of this size.
            unsafe { c_text::fill(out, bytes, |out| snapshot::describe_here(core, thread, out)) }
        }
    }
    /// Returns the address of the word with the tag of the calling thread's innermost scope; null while nothing is recorded. Python
    /// writes to it.
    gpumem_scope_word as scope_word() -> *mut u32 { std::ptr::null_mut(); |_, thread| thread.scope.as_ptr() }
    /// Records the begin or end of the scope whose tag Python has written to the word of `gpumem_scope_word`.
    gpumem_scope_edge as scope_edge(begins: c_int) -> () {
        (); |core, thread| core.scope_edge(thread, begins != 0)
    }
    /// Returns the tag of `parent/name`, which Python writes to that word; 0 if the table of names is full.
    gpumem_intern as intern(parent: u32, name: *const c_char) -> u32 {
        0; |core, _| { scope::note_used(); core.recorder.names.intern(parent, text!(name)) }
    }
    gpumem_snapshot as snapshot(what: c_int, buffer: *mut c_char, capacity: u64) -> u64 {
        // SAFETY: the caller guarantees null or a buffer of this capacity.
        0; |core, _| unsafe { c_text::copy(&snapshot::text(core, what), buffer, capacity) }
    }
    gpumem_peak as peak(what: c_int) -> c_int {
        0; |core, _| match what {
            1 => c_int::from(core.recorder.live.begin_high_water()),
            2 => { high_water::reset(); 1 }
            _ => { high_water::end(); 1 }
        }
    }
    gpumem_peak_bytes as peak_bytes(cuda_ordinal: c_int, bytes: *mut u64, block_bytes: *mut u64) -> c_int {
        0; |_, _| {
            let device = usize::try_from(cuda_ordinal).ok().filter(|&device| device < high_water::DEVICES && high_water::open());
            let Some(device) = device else { return 0 };
            let high = |family| high_water::high(device, family);
            // SAFETY: the caller guarantees null or valid pointers.
            unsafe {
                c_text::store(bytes, high(high_water::Family::Allocations));
                c_text::store(block_bytes, high(high_water::Family::Blocks));
            }
            1
        }
    }
    gpumem_pause as pause() -> () { (); |core, thread| cupti::subscribe::pause(core, thread) }
    gpumem_resume as resume() -> () { (); |core, _| cupti::subscribe::resume(core) }
    gpumem_configure as configure(key: *const c_char, value: *const c_char) -> c_int {
        0; |core, _| control::configure(core, &c_text::text(text!(key)), &c_text::text(text!(value))).into()
    }
    gpumem_start as start() -> c_int { 0; |core, _| control::start(core).into() }
    gpumem_stop as stop() -> c_int { 0; |core, _| done(control::post(core, RecordingRequest::Stop)) }
    gpumem_mute as mute() -> () { (); |core, _| control::mute(core) }
    gpumem_unmute as unmute() -> () { (); |core, _| control::unmute(core) }
    gpumem_dump as dump(path: *const c_char, finished: c_int) -> c_int {
        0; |core, _| {
            let path = c_text::text(text!(path));
            done(control::post(core, RecordingRequest::Dump { path, finished: finished != 0 }))
        }
    }
    gpumem_dumps as dumps(format: *const c_char, sort: *const c_char, ascending: c_int, reset: c_int) -> *mut c_char {
        std::ptr::null_mut(); |core, _| {
            let format = match text!(format) {
                b"" | b"text" | b"table" => Some(AskKind::ReportText),
                b"json" => Some(AskKind::ReportJson),
                _ => None,
            };
            match (format, dump::order_of(&c_text::text(text!(sort)))) {
                (Some(format), Some(order)) => {
                    c_text::handed(&dump::dumps(core, format, order, ascending != 0, reset != 0))
                }
                _ => std::ptr::null_mut(),
            }
        }
    }
    gpumem_report as report(format: *const c_char, options: *const c_char) -> *mut c_char {
        std::ptr::null_mut(); |core, _| {
            let options = c_text::text(text!(options));
            let (what, options) = match text!(format) {
                b"json" => (AskKind::ReportJson, options),
                b"csv" => (AskKind::ReportText, format!("format=csv\n{options}")),
                _ => (AskKind::ReportText, options),
            };
            ask::report(core, what, &options).map_or(std::ptr::null_mut(), |text| c_text::handed(&text))
        }
    }
    gpumem_counter_set as counter_set(name: *const c_char, value: i64) -> () {
        (); |core, thread| core.count(thread, text!(name), |_| value)
    }
    gpumem_counter_add as counter_add(name: *const c_char, change: i64) -> () {
        (); |core, thread| core.count(thread, text!(name), |value| value.saturating_add(change))
    }
    gpumem_memory_info as memory_info(cuda_ordinal: c_int, free_bytes: *mut u64, total_bytes: *mut u64) -> c_int {
        0; |core, _| {
            let Some((free, total)) = dump::memory_info(core, cuda_ordinal) else { return 0 };
            // SAFETY: the caller guarantees null or valid pointers.
            unsafe {
                c_text::store(free_bytes, free);
                c_text::store(total_bytes, total);
            }
            1
        }
    }
}

fn done(reply: RecordingReply) -> c_int {
    c_int::from(reply.errno == 0)
}
