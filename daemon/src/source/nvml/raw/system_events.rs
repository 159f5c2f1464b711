//! System events, which drivers from R575 on send: the driver is being unbound from a GPU.

use super::super::answer::Code;
use super::layouts::{SystemEventData, SystemEventRegister, SystemEventSet, SystemEventWait};
use super::{Return, checked, symbol};
use nvml_wrapper::Nvml;
use std::ffi::c_void;

/// `nvmlSystemEventTypeGpuDriverUnbind`.
const UNBIND: u64 = 1;

/// Functions; all or none.
#[derive(Clone, Copy)]
pub(crate) struct Calls {
    create: unsafe extern "C" fn(*mut SystemEventSet) -> Return,
    free: unsafe extern "C" fn(*mut SystemEventSet) -> Return,
    register: unsafe extern "C" fn(*mut SystemEventRegister) -> Return,
    wait: unsafe extern "C" fn(*mut SystemEventWait) -> Return,
}

impl Calls {
    pub(crate) fn of(nvml: &Nvml) -> Option<Calls> {
        // SAFETY: the types are those of the header.
        unsafe {
            Some(Calls {
                create: symbol(nvml, "nvmlSystemEventSetCreate")?,
                free: symbol(nvml, "nvmlSystemEventSetFree")?,
                register: symbol(nvml, "nvmlSystemRegisterEvents")?,
                wait: symbol(nvml, "nvmlSystemEventSetWait")?,
            })
        }
    }
}

/// Event set for unbindings. Must be dropped before its library is closed.
pub(crate) struct Unbindings {
    calls: Calls,
    set: *mut c_void,
}

impl Unbindings {
    /// Starts watching for unbindings.
    ///
    /// # Errors
    /// NVML's error.
    pub(crate) fn watch(calls: Calls) -> Result<Unbindings, Code> {
        let mut created = SystemEventSet::new(std::ptr::null_mut());
        // SAFETY: the struct has the size of its version; the function writes the pointer.
        checked(unsafe { (calls.create)(&raw mut created) })?;
        let unbindings = Unbindings { calls, set: created.set }; // freed if the next call fails
        let mut register = SystemEventRegister::new(UNBIND, unbindings.set);
        // SAFETY: the same; the set belongs to this library.
        checked(unsafe { (calls.register)(&raw mut register) })?;
        Ok(unbindings)
    }

    /// Returns the driver's number of a GPU from which it is being unbound, if any. Does not wait.
    ///
    /// # Errors
    /// NVML's error.
    pub(crate) fn next(&self) -> Result<Option<u32>, Code> {
        let mut data = SystemEventData::default();
        let mut wait = SystemEventWait::new(self.set, &mut data);
        // SAFETY: the struct has the size of its version, and has room for one event at `data`, which outlives the call.
        match checked(unsafe { (self.calls.wait)(&raw mut wait) }) {
            Ok(()) => Ok((wait.count != 0 && data.kind & UNBIND != 0).then_some(data.gpu)),
            Err(Code::TIMEOUT) => Ok(None),
            Err(code) => Err(code),
        }
    }
}

impl Drop for Unbindings {
    fn drop(&mut self) {
        let mut set = SystemEventSet::new(self.set);
        // SAFETY: the library is still open, and the set is used nowhere else.
        unsafe { (self.calls.free)(&raw mut set) };
    }
}
