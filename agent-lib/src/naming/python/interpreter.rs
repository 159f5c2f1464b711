//! Finds the Python interpreter in this process by symbol name, because the agent does not link to Python.
//!
//! In each process, [`check`] verifies the layout: it compares the frames that the walk (walk.rs) finds with Python's list for
//! the same thread. Memory is read through the kernel, so a wrong layout causes an error and not a fault.

use crate::naming::python::layout::{self, Layout, NO_GIL};
use crate::naming::python::memory::{Careful, Memory, Pointer};
use crate::naming::python::text::Types;
use crate::naming::python::walk::Reader;
use std::ffi::{CStr, c_char, c_int, c_void};

/// The functions and offsets of the interpreter that the walk of frames uses. Never freed.
pub(crate) struct Interpreter {
    pub functions: Functions,
    pub layout: Layout,
    pub types: Types,
}

/// Functions of the C API, which may be called at any time and without the GIL.
#[derive(Clone, Copy)]
pub(crate) struct Functions {
    /// PyGILState_GetThisThreadState: returns the calling thread's state.
    state: unsafe extern "C" fn() -> *mut c_void,
    /// Py_IsInitialized: 0 as soon as the interpreter begins to destroy the states of other threads.
    running: unsafe extern "C" fn() -> c_int,
}

impl Functions {
    #[inline(always)]
    pub(crate) fn is_running(&self) -> bool {
        // SAFETY: may be called at any time.
        unsafe { (self.running)() != 0 }
    }

    /// Returns the address of the calling thread's Python state, if it has one.
    #[inline(always)]
    pub(crate) fn state(&self) -> Option<u64> {
        // SAFETY: as above.
        let state = unsafe { (self.state)() } as u64;
        (state != 0).then_some(state)
    }
}

/// Returns the address of a global symbol of the program and its libraries, as extension modules find it.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

pub(crate) fn present() -> bool {
    symbol(c"PyGILState_GetThisThreadState").is_some()
}

/// Finds the interpreter. An error is the reason why its frames are not read.
pub(crate) fn find(careful: &Careful) -> Result<Interpreter, String> {
    let need =
        |name: &CStr| symbol(name).ok_or_else(|| format!("no {} in this process", name.to_string_lossy()));
    let kind = |name: &CStr| need(name).map(|found| found as u64);
    let version: *mut c_void = need(c"Py_GetVersion")?;
    // SAFETY: this function of the C API has this type and needs no GIL.
    let version: unsafe extern "C" fn() -> *const c_char = unsafe { std::mem::transmute(version) };
    // SAFETY: a C string that is never freed.
    let text = unsafe { CStr::from_ptr(version()) }.to_string_lossy();
    let (version, gil) = layout::version(&text).ok_or_else(|| format!("a version like {text:.40}"))?;
    if !gil {
        return Err(NO_GIL.to_owned());
    }
    let runtime = symbol(c"_PyRuntime").and_then(|found| Pointer::new(found as u64));
    let layout = layout::of(version, careful, runtime)?;
    let (state, running) = (need(c"PyGILState_GetThisThreadState")?, need(c"Py_IsInitialized")?);
    let (code, text) = (kind(c"PyCode_Type")?, kind(c"PyUnicode_Type")?);
    let types = Types { code, text, bytes: kind(c"PyBytes_Type")?, cell: kind(c"PyCell_Type")? };
    // SAFETY: functions of the C API with these types.
    let (state, running) = unsafe {
        (
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *mut c_void>(state),
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(running),
        )
    };
    Ok(Interpreter { functions: Functions { state, running }, layout, types })
}

/// Maximum number of frames to compare.
pub(crate) const MAX_FRAMES: usize = 64;
/// Minimum number of frames: with fewer, the check does not show that the walk follows the chain of frames.
const MIN_FRAMES: usize = 4;

/// The calling thread's frames according to Python, the innermost first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PythonFrames<'a> {
    /// Address of each frame's code object.
    pub codes: &'a [u64],
    /// Address of each frame's first local variable; 0 if it is not compared.
    pub firsts: &'a [u64],
    /// Line number of each frame; 0 if it is not compared.
    pub lines: &'a [i32],
}

/// Compares the frames that the walk finds with Python's list; an error is the first difference.
pub(crate) fn check<M: Memory>(
    reader: &Reader<'_, M>,
    state: u64,
    python: PythonFrames<'_>,
) -> Result<(), String> {
    let count = python.codes.len();
    let compared = python.firsts.iter().filter(|&&first| first != 0).count();
    if count < MIN_FRAMES || compared == 0 {
        return Err(format!("only {count} frames to compare, {compared} with a variable"));
    }
    let mut frames = reader.frames(state).filter(|&frame| !reader.internal(frame));
    for (index, &expected) in python.codes.iter().enumerate().take(MAX_FRAMES) {
        let wrong = |what: &str| format!("frame {index} of {count}: {what}");
        let frame = frames.next().ok_or_else(|| wrong("the chain of frames ends"))?;
        if reader.code(frame) != Some(expected) {
            return Err(wrong("another code object"));
        }
        let first = python.firsts.get(index).copied().unwrap_or(0);
        if first != 0 && reader.local(frame, 0) != Some(first) {
            return Err(wrong("another first variable"));
        }
        let code = Pointer::new(expected).ok_or_else(|| wrong("no code object"))?;
        if reader.memory.word(code, layout::TYPE) != Some(reader.types.code) {
            return Err(wrong("its code object has a different type"));
        }
        let line = python.lines.get(index).copied().unwrap_or(0);
        let found = if line == 0 { None } else { reader.line_number(frame, code) };
        if line != 0 && found != Some(line) {
            return Err(wrong(&format!("line {found:?}, not {line}")));
        }
    }
    match frames.next() {
        Some(_) if count < MAX_FRAMES => Err(format!("more frames than {count}")),
        _ => Ok(()),
    }
}
