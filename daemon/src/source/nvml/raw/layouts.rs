//! Structs that NVML's functions fill, with the sizes of its header.
#![allow(missing_docs)] // their fields are the header's

use std::ffi::{c_char, c_void};

#[repr(C)]
pub(crate) struct EventData {
    pub device: *mut c_void,
    pub kind: u64,
    pub data: u64,
    pub instance: (u32, u32),
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct Account {
    pub utilization: [u32; 2],
    pub most_bytes: u64,
    pub time_ms: u64,
    pub start_us: u64,
    pub is_running: u32,
    pub reserved: [u32; 5],
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct Confidence {
    pub environment: u32,
    pub feature: u32,
    pub tools: u32,
}

/// The argument of RunningProcessDetailList: `count` is the room for records, then their number.
#[repr(C)]
pub(crate) struct DetailList {
    pub version: u32,
    pub mode: u32,
    pub count: u32,
    pub records: *mut c_void,
}

pub(crate) const DETAIL_LIST_V1: u32 = 24 | 1 << 24;
const _: () = assert!(size_of::<DetailList>() == 24);
const _: () = assert!(size_of::<EventData>() == 32 && size_of::<Account>() == 56);

#[repr(C)]
#[derive(Default)]
pub(crate) struct MemoryV1 {
    pub total: u64,
    pub free: u64,
    pub used: u64,
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct MemoryV2 {
    pub version: u32,
    pub total: u64,
    pub reserved: u64,
    pub free: u64,
    pub used: u64,
}

const _: () = assert!(size_of::<MemoryV1>() == 24 && size_of::<MemoryV2>() == 40);
const _: () = assert!(std::mem::offset_of!(MemoryV2, total) == 8);
pub(crate) const MEMORY_V2: u32 = 40 | 2 << 24;

#[repr(C)]
pub(crate) struct AddressingMode {
    version: u32,
    value: u32,
}

const _: () = assert!(size_of::<AddressingMode>() == 8);

impl Default for AddressingMode {
    fn default() -> AddressingMode {
        AddressingMode { version: 8 | 1 << 24, value: 0 }
    }
}

impl AddressingMode {
    /// Its short name; `None` for no mode and for one of a later header.
    pub(crate) fn name(&self) -> Option<&'static str> {
        match self.value {
            1 => Some("hmm"),
            2 => Some("ats"),
            _ => None,
        }
    }
}

/// The argument of GetMemoryLimits_v1, which has no version.
#[repr(C)]
pub(crate) struct MemoryLimits {
    pub group: *const c_char,
    pub soft: u64,
    pub hard: u64,
    pub used: u64,
}

const _: () = assert!(size_of::<MemoryLimits>() == 32);

/// The argument of SystemEventSetCreate and SystemEventSetFree.
#[repr(C)]
pub(crate) struct SystemEventSet {
    version: u32,
    pub set: *mut c_void,
}

/// The argument of SystemRegisterEvents.
#[repr(C)]
pub(crate) struct SystemEventRegister {
    version: u32,
    kinds: u64,
    set: *mut c_void,
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct SystemEventData {
    pub kind: u64,
    pub gpu: u32,
}

/// The argument of SystemEventSetWait: `room` events fit at `data`, `count` were written.
#[repr(C)]
pub(crate) struct SystemEventWait {
    version: u32,
    timeout_ms: u32,
    set: *mut c_void,
    data: *mut SystemEventData,
    room: u32,
    pub count: u32,
}

const _: () = assert!(size_of::<SystemEventSet>() == 16 && size_of::<SystemEventRegister>() == 24);
const _: () = assert!(size_of::<SystemEventWait>() == 32 && size_of::<SystemEventData>() == 16);

impl SystemEventSet {
    pub(crate) fn new(set: *mut c_void) -> SystemEventSet {
        SystemEventSet { version: 16 | 1 << 24, set }
    }
}

impl SystemEventRegister {
    pub(crate) fn new(kinds: u64, set: *mut c_void) -> SystemEventRegister {
        SystemEventRegister { version: 24 | 1 << 24, kinds, set }
    }
}

impl SystemEventWait {
    /// For one event, which is not waited for.
    pub(crate) fn new(set: *mut c_void, data: &mut SystemEventData) -> SystemEventWait {
        SystemEventWait { version: 32 | 1 << 24, timeout_ms: 0, set, data, room: 1, count: 0 }
    }
}
