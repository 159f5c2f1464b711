//! Finds the Python interpreter in this process by symbol name, because the agent does not link to Python.

use crate::naming::python::layout::{self, Layout, NO_GIL};
use crate::naming::python::memory::{Careful, Pointer};
use crate::naming::python::text::Types;
use std::ffi::{CStr, c_char, c_int, c_void};

/// The parts of the interpreter that the walk uses. Never freed.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Interpreter {
    /// PyGILState_GetThisThreadState: returns the calling thread's state, also without the GIL.
    pub state: unsafe extern "C" fn() -> *mut c_void,
    /// Py_IsInitialized: 0 as soon as the interpreter begins to destroy the states of other threads.
    pub running: unsafe extern "C" fn() -> c_int,
    pub layout: Layout,
    pub types: Types,
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
pub(crate) fn interpreter(careful: &Careful) -> Result<Interpreter, String> {
    let need = |name: &CStr| {
        let missing = || format!("no {} in this process", name.to_string_lossy());
        symbol(name).ok_or_else(missing)
    };
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
    // SAFETY: functions of the C API with these types.
    let (state, running) = unsafe {
        (
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *mut c_void>(need(
                c"PyGILState_GetThisThreadState",
            )?),
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(need(c"Py_IsInitialized")?),
        )
    };
    let (code, text) = (kind(c"PyCode_Type")?, kind(c"PyUnicode_Type")?);
    let types = Types { code, text, bytes: kind(c"PyBytes_Type")?, cell: kind(c"PyCell_Type")? };
    Ok(Interpreter { layout, state, running, types })
}
