//! Structs that NVML's functions fill, with the sizes of its header.
#![allow(missing_docs)] // their fields are the header's

use std::ffi::c_void;

#[repr(C)]
pub struct EventData {
    pub device: *mut c_void,
    pub kind: u64,
    pub data: u64,
    pub instance: (u32, u32),
}

#[repr(C)]
#[derive(Default)]
pub struct Account {
    pub utilization: [u32; 2],
    pub most_bytes: u64,
    pub time_ms: u64,
    pub start_us: u64,
    pub is_running: u32,
    pub reserved: [u32; 5],
}

#[repr(C)]
#[derive(Default)]
pub struct Confidence {
    pub environment: u32,
    pub feature: u32,
    pub tools: u32,
}

/// The argument of RunningProcessDetailList: `count` is the room for records, then their number.
#[repr(C)]
pub struct DetailList {
    pub version: u32,
    pub mode: u32,
    pub count: u32,
    pub records: *mut c_void,
}

pub const DETAIL_LIST_V1: u32 = 24 | 1 << 24;
const _: () = assert!(size_of::<DetailList>() == 24);
const _: () = assert!(size_of::<EventData>() == 32 && size_of::<Account>() == 56);

#[repr(C)]
#[derive(Default)]
pub struct MemoryV1 {
    pub total: u64,
    pub free: u64,
    pub used: u64,
}

#[repr(C)]
#[derive(Default)]
pub struct MemoryV2 {
    pub version: u32,
    pub total: u64,
    pub reserved: u64,
    pub free: u64,
    pub used: u64,
}

const _: () = assert!(size_of::<MemoryV1>() == 24 && size_of::<MemoryV2>() == 40);
const _: () = assert!(std::mem::offset_of!(MemoryV2, total) == 8);
pub const MEMORY_V2: u32 = 40 | 2 << 24;

#[repr(C)]
pub struct AddressingMode {
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
    pub fn name(&self) -> Option<&'static str> {
        match self.value {
            1 => Some("hmm"),
            2 => Some("ats"),
            _ => None,
        }
    }
}
