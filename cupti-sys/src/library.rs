//! Loads libraries and finds their symbols (dlopen and dlsym).

use core::ffi::{CStr, c_int, c_void};

/// A loaded library. After the first call of one of its functions it must stay loaded. NVIDIA's libraries register a
/// destructor of thread-specific data, which the C library calls when the thread ends. After an unload that would crash.
#[derive(Debug, Clone, Copy)]
pub struct Library(*mut c_void);

// SAFETY: a handle of the loader may be used on any thread.
unsafe impl Send for Library {}
// SAFETY: as above; the loader locks for itself.
unsafe impl Sync for Library {}

impl Library {
    fn with_flags(path: &CStr, flags: c_int) -> Option<Self> {
        // SAFETY: `path` is a C string. The library's constructors run, as they do however it is loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), flags) };
        (!handle.is_null()).then_some(Library(handle))
    }

    /// Loads the library at `path` with local symbols (RTLD_LOCAL).
    pub fn open(path: &CStr) -> Option<Self> {
        Self::with_flags(path, libc::RTLD_NOW | libc::RTLD_LOCAL)
    }

    /// Returns the library at `path` if it is already loaded.
    pub fn loaded(path: &CStr) -> Option<Self> {
        Self::with_flags(path, libc::RTLD_NOW | libc::RTLD_NOLOAD)
    }

    /// Unloads a library that is not usable, before any of its functions was called.
    pub(crate) fn close(self) {
        // SAFETY: the handle came from dlopen and is not used again: `self` is gone.
        unsafe { libc::dlclose(self.0) };
    }

    pub fn symbol(self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: a live handle and a C string.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }

    /// Returns the function with this name.
    ///
    /// # Safety
    /// `F` must be the type of a function pointer, and the right one for that symbol.
    pub unsafe fn function<F: Copy>(self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the caller guarantees that `F` is a function pointer; the assertion checks its size.
        self.symbol(name).map(|address| unsafe { core::mem::transmute_copy::<*mut c_void, F>(&address) })
    }
}
