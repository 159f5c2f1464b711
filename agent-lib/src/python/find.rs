//! The interpreter in this process: its functions, types and version. Found by name, so that nothing of Python is linked.

use super::layout::{self, Layout, NO_GIL};
use super::memory::{Careful, Pointer};
use super::text::Types;
use std::ffi::{CStr, c_char, c_int, c_void};

/// What the walk needs of it. Never freed.
#[derive(Debug)]
pub struct Interpreter {
    /// Where things are.
    pub layout: Layout,
    /// PyGILState_GetThisThreadState: the calling thread's state, also without the GIL.
    pub state: unsafe extern "C" fn() -> *mut c_void,
    /// Py_IsInitialized: 0 from the moment on when it begins to take down the states of other threads.
    pub running: unsafe extern "C" fn() -> c_int,
    /// PyCell_Type.
    pub cell: u64,
    /// For texts.
    pub types: Types,
}

/// An address by name: of what the program and its libraries offer, else of a libpython that was loaded for one of them only.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if !found.is_null() {
        return Some(found);
    }
    let library = loaded()?;
    // SAFETY: a library that is loaded and stays so: the handle is never closed.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// A libpython among what is loaded.
fn loaded() -> Option<*mut c_void> {
    unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, found: *mut c_void) -> c_int {
        // SAFETY: the loader's, while this runs.
        let name = unsafe { (*info).dlpi_name };
        if name.is_null() {
            return 0;
        }
        // SAFETY: a C string.
        let name = unsafe { CStr::from_ptr(name) };
        let file = name.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        if !file.starts_with(b"libpython3.") || file.len() < b"libpython3.9.so".len() {
            return 0;
        }
        // SAFETY: the place below.
        let room = unsafe { &mut *found.cast::<[c_char; 4096]>() };
        for (to, &byte) in room.iter_mut().zip(name.to_bytes_with_nul()) {
            *to = byte as c_char;
        }
        room[4095] = 0;
        1
    }
    let mut path = [0 as c_char; 4096];
    // SAFETY: the function has this type; a place for the path.
    let found = unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut path).cast()) };
    // SAFETY: a C string; nothing is loaded that is not.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    (found != 0 && !library.is_null()).then_some(library)
}

/// Whether there is one.
pub fn present() -> bool {
    symbol(c"PyGILState_GetThisThreadState").is_some()
}

/// Looks at it; else why it is not read.
pub fn interpreter(careful: &Careful) -> Result<Interpreter, String> {
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
    let types =
        Types { code: kind(c"PyCode_Type")?, text: kind(c"PyUnicode_Type")?, bytes: kind(c"PyBytes_Type")? };
    Ok(Interpreter { layout, state, running, cell: kind(c"PyCell_Type")?, types })
}
