//! Structs that NVML's functions fill, with the sizes of its header, and parser of the records of a process list.
#![allow(missing_docs)] // their fields are the header's

use crate::source::nvml::answer::Charge;
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

/// Argument of RunningProcessDetailList: `count` is the room for records, then their number.
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
    /// Returns the short name; `None` for no mode and for one of a later header.
    pub(crate) fn name(&self) -> Option<&'static str> {
        match self.value {
            1 => Some("hmm"),
            2 => Some("ats"),
            _ => None,
        }
    }
}

/// Argument of GetMemoryLimits_v1, which has no version.
#[repr(C)]
pub(crate) struct MemoryLimits {
    pub group: *const c_char,
    pub soft: u64,
    pub hard: u64,
    pub used: u64,
}

const _: () = assert!(size_of::<MemoryLimits>() == 32);

/// Argument of SystemEventSetCreate and SystemEventSetFree.
#[repr(C)]
pub(crate) struct SystemEventSet {
    version: u32,
    pub set: *mut c_void,
}

/// Argument of SystemRegisterEvents.
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

/// Argument of SystemEventSetWait: `room` events fit at `data`, `count` were written.
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
    /// Returns the argument for one event, without waiting.
    pub(crate) fn new(set: *mut c_void, data: &mut SystemEventData) -> SystemEventWait {
        SystemEventWait { version: 32 | 1 << 24, timeout_ms: 0, set, data, room: 1, count: 0 }
    }
}

/// Longest record that any driver writes; the buffer has room for records of this size.
pub(super) const RECORD_BYTES: usize = 32;
/// Byte with which the buffer is filled before a call, so that the end of the written data can be found.
pub(super) const UNTOUCHED: u8 = 0xa5;

fn word(buffer: &[u64], byte: usize) -> u64 {
    buffer.get(byte / 8).copied().unwrap_or(0)
}

/// Returns the distance of records in a list of the newest version: 24 bytes, or 32 if the driver has written exactly to the end
/// of `count` records of 32. A driver that first clears the whole array leaves no trace; then its symbols decide.
pub(super) fn stride(buffer: &[u64], count: usize, looks_like_535: bool) -> usize {
    let untouched = u64::from_ne_bytes([UNTOUCHED; 8]);
    let records = buffer.len() * 8 / RECORD_BYTES;
    if count == 0 || count > records || word(buffer, count * 24) == untouched {
        return 24; // nothing was written behind records of 24 bytes
    }
    let ends_at_32 = count == records || word(buffer, count * 32) == untouched;
    let wrote_last = word(buffer, count * 32 - 8) != untouched;
    let wiped = !ends_at_32;
    if (wiped && looks_like_535) || (!wiped && wrote_last) { 32 } else { 24 }
}

/// Reads `count` records, or as many as are in the buffer.
pub(super) fn parse(
    buffer: &[u64],
    count: usize,
    stride: usize,
    has_protected: bool,
    charges: &mut Vec<Charge>,
) {
    let none = u32::MAX;
    for record in buffer.chunks_exact(stride / 8).take(count) {
        let instance = record.get(2).map_or((none, none), |&pair| halves(pair));
        charges.push(Charge {
            pid: halves(record[0]).0,
            bytes: Some(record[1]).filter(|&bytes| bytes != u64::MAX),
            instance: Some(instance).filter(|&(gpu, compute)| gpu != none && compute != none),
            protected_bytes: record.get(3).filter(|&&bytes| has_protected && bytes != u64::MAX).copied(),
        });
    }
}

/// Returns the two u32 in memory order.
fn halves(word: u64) -> (u32, u32) {
    let bytes = word.to_ne_bytes();
    let [a, b, c, d, e, f, g, h] = bytes;
    (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]))
}
