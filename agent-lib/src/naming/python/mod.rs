//! Names allocations after the calling thread's Python frames, with the code objects and modules that Python code registered.
//!
//! No frame is read before Python code (sources/python_host) has called [`prove`] with its own list of the thread's frames.

mod codes;
#[cfg(test)]
mod fuzz;
pub(crate) mod interpreter;
mod layout;
mod lines;
pub(crate) mod memory;
mod modules;
pub(crate) mod text;
mod walk;

use crate::base::hot::HOT_WORDS;
use crate::base::row::AllocationName;
use crate::driver::core::Core;
use crate::record::status;
use codes::{CodeKind, Codes};
use gpumem_wire::{Layer, LayerState};
use interpreter::{Functions, Interpreter, PythonFrames};
use lines::Lines;
use memory::{Careful, Plain, Pointer};
use modules::Modules;
use std::sync::atomic::{AtomicPtr, Ordering::*};
use text::{Separators, TextBuffer};
use walk::{NameSearch, Reader};

/// The [`Armed`] interpreter whose frames are read; null while no frames are read.
const ARMED: &AtomicPtr<()> = &HOT_WORDS.interpreter;
/// Meanings of code objects, registered by Python with gpumem_code.
pub(crate) static CODES: Codes = Codes::new();
/// Meanings of code objects that are needed only when memory runs out.
static RARE_CODES: Codes = Codes::new();
/// Lines of the program that allocate untagged memory.
static LINES: Lines = Lines::new();
/// Module objects, registered by Python with gpumem_module.
pub(crate) static MODULES: Modules = Modules::new();

/// Returns the name from the calling thread's Python frames; `None` if no frame runs a registered code object. The tag is 0 if
/// only the phase or the role is known.
#[inline(always)]
pub(crate) fn name() -> Option<AllocationName> {
    let armed = armed()?;
    let state = armed.state()?;
    // Threads of the backward pass run no Python code.
    let innermost = armed.search.reader.innermost(state)?;
    find_name(&armed.search, state, innermost)
}

#[unsafe(link_section = ".text.hot.gpumem")]
#[inline(never)]
fn find_name(search: &NameSearch<'static, Plain>, state: u64, innermost: Pointer) -> Option<AllocationName> {
    search.find(state, innermost)
}

/// An interpreter that [`prove`] has accepted: what the name of an allocation needs, in one cache line.
#[repr(align(64))]
struct Armed {
    functions: Functions,
    search: NameSearch<'static, Plain>,
}
const _: () = assert!(size_of::<Armed>() == 64);

impl Armed {
    /// Returns the address of the calling thread's Python state, if it has one. An interpreter that ends frees the states of
    /// threads that still run, so from then on nothing is read. A new interpreter has to call `prove` again.
    #[inline(always)]
    fn state(&self) -> Option<u64> {
        if !self.functions.is_running() {
            ARMED.store(std::ptr::null_mut(), Relaxed);
            return None;
        }
        self.functions.state()
    }
}

/// Returns the interpreter whose frames are read.
#[inline(always)]
fn armed() -> Option<&'static Armed> {
    // SAFETY: null, or leaked by `prove`.
    unsafe { ARMED.load(Acquire).cast::<Armed>().as_ref() }
}

/// Runs `work` with a reader and the address of the calling thread's Python state; `None` if the thread has no state.
#[inline(always)]
fn in_frames<T>(work: impl FnOnce(&Reader<'_, Plain>, u64) -> T) -> Option<T> {
    let armed = armed()?;
    let state = armed.state()?;
    Some(work(&armed.search.reader, state))
}

/// Returns the tag of the program's line that the calling thread executes, for untagged memory; 0 without such a line.
#[inline(never)]
pub(crate) fn line(core: &Core) -> u32 {
    if !core.settings.layers.sites {
        return 0;
    }
    in_frames(|reader, state| LINES.tag(&core.recorder.names, reader, state)).unwrap_or(0)
}

/// Returns whether a frame of the calling thread sets gradients to zero, and whether one is a function with its own backward
/// pass.
#[cold]
pub(crate) fn rare_frames() -> (bool, bool) {
    let search = |reader: &Reader<'_, Plain>, state: u64| {
        let codes = reader.frames(state).filter_map(|frame| RARE_CODES.get(reader.code(frame)?));
        codes.fold((false, false), |(clears, custom), (kind, _)| {
            (clears || kind == CodeKind::ZeroGrad, custom || kind == CodeKind::CustomFunction)
        })
    };
    in_frames(search).unwrap_or_default()
}

/// Writes the calling thread's Python stack, one frame on each line, the innermost first. Returns the number of bytes written; 0
/// without frames.
pub(crate) fn stack_text(separators: Separators, out: &mut [u8]) -> usize {
    let mut out = TextBuffer::new(out);
    in_frames(|reader, state| reader.write_stack(state, separators, &mut out));
    out.position() as usize
}

/// Writes the Python stack of the thread that waits for the backward pass which the calling thread runs. Returns the number of
/// bytes written; 0 if no thread, or more than one, waits for a backward pass. Another thread's frames may change, so the kernel
/// reads them; this makes system calls.
#[cold]
pub(crate) fn stack_of_backward(separators: Separators, out: &mut [u8]) -> usize {
    let mut out = TextBuffer::new(out);
    let mut write = || {
        let armed = armed()?;
        let (own, memory) = (armed.state()?, Careful::new()?);
        let Reader { layout, types, .. } = armed.search.reader;
        let reader = Reader { memory: &memory, layout, types };
        let mut waiting = reader.states(own).filter(|state| reader.waits_for_backward(*state));
        let found = waiting.next().filter(|_| waiting.next().is_none())?;
        reader.write_stack(found, separators, &mut out);
        Some(())
    };
    write();
    out.position() as usize
}

/// Finds the thread whose frames run these code objects, the innermost first. Writes the addresses in the first `slots[n]`
/// variables of each frame to `objects`, one frame after the other. Returns whether the thread was found and `objects` was large
/// enough. The caller holds the interpreter's lock, so no frame changes; the kernel reads the memory, because threads may end.
#[cold]
pub(crate) fn locals(codes: &[u64], slots: &[u64], mut objects: &mut [u64]) -> bool {
    let mut write = || {
        let armed = armed()?;
        let (own, memory) = (armed.state()?, Careful::new()?);
        let Reader { layout, types, .. } = armed.search.reader;
        let reader = Reader { memory: &memory, layout, types };
        let frames = |state| reader.frames(state).filter(|frame| !reader.internal(*frame));
        let runs_these = |state: &u64| {
            let mut found = frames(*state).zip(codes).map(|(frame, code)| reader.code(frame) == Some(*code));
            found.next() == Some(true) && found.all(|is_same| is_same)
        };
        let state = std::iter::once(own).chain(reader.states(own)).find(runs_these)?;
        for (frame, count) in frames(state).zip(slots) {
            let (here, rest) = std::mem::take(&mut objects).split_at_mut_checked(*count as usize)?;
            objects = rest;
            for (slot, object) in (0..).zip(here) {
                *object = reader.local(frame, slot).unwrap_or(0);
            }
        }
        Some(())
    };
    write().is_some()
}

/// Writes the reason for which frames are not read; returns the number of bytes written.
pub(crate) fn put(out: &mut [u8], reason: Option<&String>) -> usize {
    let mut out = TextBuffer::new(out);
    text::put(&mut out, reason.map_or("", |reason| reason).as_bytes());
    out.position() as usize
}

/// Registers the meaning of a code object. `what & 127` is its kind (see `CodeKind`); bit 7 means that the variable lies in a
/// cell object. `what >> 8` is the index of the local variable that holds the module. The index is 0, except before 3.11 if
/// inner functions use the variable: it then lies behind the other variables.
pub(crate) fn register_code(core: &Core, code: u64, what: i32) {
    let what = what as u32;
    if let Some(kind) = CodeKind::from_code(what & 127).filter(|_| core.settings.layers.frames) {
        let codes = if kind.is_in(codes::RARE) { &RARE_CODES } else { &CODES };
        codes.register(code, kind, what >> 8, what & 128 != 0);
    }
}

/// Registers a module in [`MODULES`], if names from Python frames are enabled.
pub(crate) fn register_module(core: &Core, object: u64, kind: u64, parent: u64, name: &[u8]) {
    if core.settings.layers.frames {
        MODULES.register(object, kind, parent, name);
    }
}

/// Reports whether Python frames give names, unless Python code has made that known before the agent starts.
pub(crate) fn started(core: &Core) {
    if status::layer(Layer::ModulePath).is_some() {
        return;
    }
    let (state, reason) = match (core.settings.layers.frames, interpreter::present()) {
        (false, _) => (LayerState::Off, OFF),
        (true, false) => (LayerState::Absent, "no Python in this process"),
        (true, true) => (LayerState::Absent, "Python is loaded, and has not imported PyTorch or gpumem yet"),
    };
    status::report_layer(Layer::ModulePath, state, reason);
}

const OFF: &str = "GPUMEM_FRAMES=0";

/// Compares the calling thread's frames with Python's own list. If they are equal, frames are read from now on; an error is
/// the reason why not. Must run on a thread that holds the interpreter's lock, or held it until this call.
pub(crate) fn prove(core: &'static Core, python: PythonFrames<'_>) -> Result<(), String> {
    if !core.settings.layers.frames {
        return Err(OFF.to_owned());
    }
    let proved = compare(python);
    LINES.prepare();
    let (state, reason, armed) = match &proved {
        Ok(interpreter) => {
            let (major, minor) = interpreter.layout.version;
            (LayerState::Active, &format!("CPython {major}.{minor}"), arm(core, interpreter))
        }
        Err(reason) => (LayerState::Failed, reason, std::ptr::null_mut()),
    };
    status::report_layer(Layer::ModulePath, state, reason);
    ARMED.store(armed, Release);
    proved.map(|_| ())
}

/// Returns the address of the [`Armed`] for an interpreter whose layout was proved.
fn arm(core: &'static Core, interpreter: &'static Interpreter) -> *mut () {
    // SAFETY: the layout was proved in this process, and searches begin at the calling thread's own state.
    let memory: &Plain = Box::leak(Box::new(unsafe { Plain::new() }));
    let reader = Reader { memory, layout: &interpreter.layout, types: &interpreter.types };
    let search = NameSearch { reader, codes: &CODES, modules: &MODULES, names: &core.recorder.names };
    Box::into_raw(Box::new(Armed { functions: interpreter.functions, search })).cast()
}

fn compare(python: PythonFrames<'_>) -> Result<&'static Interpreter, String> {
    let careful = Careful::new().ok_or("no file descriptors for the test")?;
    let interpreter = interpreter::find(&careful)?;
    let state = interpreter.functions.state().filter(|_| interpreter.functions.is_running());
    let state = state.ok_or("no Python on this thread")?;
    let reader = Reader { memory: &careful, layout: &interpreter.layout, types: &interpreter.types };
    interpreter::check(&reader, state, python)?;
    Ok(Box::leak(Box::new(interpreter))) // some hundred bytes for each interpreter
}

/// Disables frame reading in a forked child. Makes only stores, as the child of a process with threads must.
pub(crate) fn in_child() {
    ARMED.store(std::ptr::null_mut(), Relaxed);
    MODULES.in_child();
}
