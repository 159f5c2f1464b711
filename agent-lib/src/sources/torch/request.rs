//! Reads the request that a block serves: its bytes before rounding, its stream and its private pool. The report of the block
//! states only the block's size, but PyTorch's object for the block has them all:
//!
//! ```text
//! Block      device, stream, streams of record_stream, size, requested size, BlockPool, address, ...
//! BlockPool  free blocks (a std::set), unmapped blocks (another, since 2.1), is_small, PrivatePool or null, ...
//! ```
//!
//! PyTorch loads the report's arguments from the block, so a register still has the block's address at the call. On x86-64 it is
//! rax in all wheels examined (2.4.1, 2.8.0, 2.12.0, 2.15.0). The offsets differ between releases. They are found at the first
//! reports, by comparing size and address with the report. The block is read through a pipe, where a wrong address is an error
//! and not a fault. The result holds for this call site only, because other code may use the register for something else. Each
//! later report is compared, too, and through the pipe where no block was seen before. So a register without a block causes no
//! fault. At the first difference, reading ends for the rest of the process. Without a result, and on other processors, blocks
//! are recorded without their requests.
//!
//! PyTorch holds its mutex for the device during the report, so the objects do not change meanwhile.

use crate::naming::python::memory::{Careful, Memory, Plain, Pointer};
use crate::sources::torch::report::Report;
use gpumem_wire::{Flags, Request};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// Index of the stream in a block, in words of 8 bytes.
const STREAM: u16 = 1;
/// Indices, relative to that of the size, of the requested size, the pool, and the address.
const REQUESTED: u16 = 1;
const POOL: u16 = 2;
const ADDRESS: u16 = 3;
/// Indices of a block's words that may be the size: the size follows a set of streams.
const SIZES: std::ops::Range<u16> = 3..16;
/// Possible indices of `is_small` in a pool, the largest first; the private pool is the next word.
const KINDS: [u16; 3] = [18, 12, 6];
/// Largest size in bytes of blocks in pools of small blocks.
const SMALL_BYTES: u64 = 1 << 20;

/// The call site << 16 | index of the size in a block << 8 | index of the private pool in a pool; 0 while they are unknown.
static LAYOUT: AtomicU64 = AtomicU64::new(0);
/// Remaining number of reports that may be used to find the layout.
static TRIES: AtomicU32 = AtomicU32::new(16);

/// Logarithm of the size of a region. The C library's heaps for threads have this size and alignment.
const REGION_BITS: u32 = 26;
/// Regions of memory that have had a block: direct reads of a possible block are only made there. A region has one place.
static REGIONS: [AtomicU64; 256] = [const { AtomicU64::new(0) }; 256];

/// Returns the number of the region of an address, from 1 on, and its place in [`REGIONS`].
#[inline(always)]
fn region(address: u64) -> (u64, &'static AtomicU64) {
    let region = (address >> REGION_BITS) + 1;
    (region, &REGIONS[region as usize % REGIONS.len()])
}

/// Addresses of objects, numbered from 1 in the order in which they were first seen. An address that is used again for another
/// object keeps its number.
struct Numbers {
    addresses: [AtomicU64; 255],
    /// The address whose number was searched last << 8 | that number.
    last: AtomicU64,
}

static STREAMS: Numbers = Numbers::new();
static PRIVATE_POOLS: Numbers = Numbers::new();

impl Numbers {
    const fn new() -> Self {
        Numbers { addresses: [const { AtomicU64::new(0) }; 255], last: AtomicU64::new(0) }
    }

    /// Returns the number of an address, 0 for address 0; `None` if there are no numbers left.
    #[inline(always)]
    fn number(&self, address: u64) -> Option<u16> {
        if address == 0 {
            return Some(0);
        }
        let last = self.last.load(Relaxed);
        if last >> 8 == address { Some((last & 255) as u16) } else { self.search(address) }
    }

    #[inline(never)]
    fn search(&self, address: u64) -> Option<u16> {
        let is_its = |place: &AtomicU64| match place.load(Relaxed) {
            0 => match place.compare_exchange(0, address, Relaxed, Relaxed) {
                Ok(_) => true,
                Err(known) => known == address,
            },
            known => known == address,
        };
        let number = self.addresses.iter().position(is_its)? as u64 + 1;
        self.last.store(address << 8 | number, Relaxed);
        Some(number as u16)
    }
}

/// A request in one word, which the usual case keeps in a register: unused bytes | context << 32 | `KNOWN`. 0 if it is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct PackedRequest(u64);

/// Bit 63, which is free: a stream and a pool have numbers up to 255.
const KNOWN: u64 = 1 << 63;

impl PackedRequest {
    #[inline(always)]
    fn of(request: Option<Request>) -> Self {
        let pack = |request: Request| u64::from(request.unused_bytes) | u64::from(request.context()) << 32;
        PackedRequest(request.map_or(0, |request| pack(request) | KNOWN))
    }

    /// Returns the flags, the stack and the context of the block's stamp.
    #[inline(always)]
    pub(super) fn of_stamp(self) -> (Flags, u32, u32) {
        let flags = if self.0 & KNOWN == 0 { Flags(0) } else { Flags::REQUEST };
        (flags, self.0 as u32, ((self.0 & !KNOWN) >> 32) as u32)
    }
}

/// Returns the request that the block of a report serves. Rare cases get the report's fields as arguments: the address of a report
/// would make the usual case store it.
#[inline(always)]
pub(super) fn read(report: &Report) -> PackedRequest {
    let layout = LAYOUT.load(Relaxed);
    if layout >> 16 != site(report) {
        let &Report { address, bytes, device, block, stack, .. } = report;
        return calibrated(address, bytes, device, block, stack);
    }
    let (number, place) = region(report.block);
    if place.load(Relaxed) != number {
        return first_in_region(report.address, report.bytes, report.block, layout);
    }
    // SAFETY: the layout was proved for this call site, blocks were in this region, and PyTorch keeps the block and its pool during
    // the report.
    let memory = unsafe { Plain::new() };
    if !is_block(&memory, report, layout) {
        give_up();
        return PackedRequest::default();
    }
    PackedRequest::of(request(&memory, report, layout))
}

/// Reads the request of a block in a region that has had no block so far.
#[cold]
#[inline(never)]
fn first_in_region(address: u64, bytes: i64, block: u64, layout: u64) -> PackedRequest {
    let Some(memory) = Careful::new() else { return PackedRequest::default() };
    let report = Report { address, bytes, block, ..Report::default() };
    if !is_block(&memory, &report, layout) {
        give_up();
        return PackedRequest::default();
    }
    let (number, place) = region(report.block);
    place.store(number, Relaxed);
    PackedRequest::of(request(&memory, &report, layout))
}

/// Whether a block with the size and address of the report is at its place.
#[inline(always)]
fn is_block(memory: &impl Memory, report: &Report, layout: u64) -> bool {
    let size = (layout >> 8 & 255) as u16;
    Pointer::new(report.block).is_some_and(|block| {
        memory.word(block, size * 8) == Some(report.bytes as u64)
            && memory.word(block, (size + ADDRESS) * 8) == Some(report.address)
    })
}

/// Returns the return address of the report's call.
#[inline(always)]
fn site(report: &Report) -> u64 {
    // SAFETY: on x86-64 the stack pointer at a call leads to the return address; elsewhere the block is unknown.
    if report.block == 0 { 0 } else { unsafe { *(report.stack as *const u64) } }
}

#[inline(always)]
fn request(memory: &impl Memory, report: &Report, layout: u64) -> Option<Request> {
    let (size, private) = ((layout >> 8 & 255) as u16, (layout & 255) as u16);
    let block = Pointer::new(report.block)?;
    let word = |index: u16| memory.word(block, index * 8);
    let unused_bytes = (report.bytes as u64).checked_sub(word(size + REQUESTED)?)?;
    let unused_bytes = u32::try_from(unused_bytes).ok()?;
    let pool = Pointer::new(word(size + POOL)?)?;
    let stream = STREAMS.number(word(STREAM)?)?;
    let pool = PRIVATE_POOLS.number(memory.word(pool, private * 8)?)?;
    Some(Request { unused_bytes, stream, pool })
}

#[cold]
#[inline(never)]
fn give_up() {
    TRIES.store(0, Relaxed);
    LAYOUT.store(0, Relaxed);
}

#[cold]
#[inline(never)]
fn calibrated(address: u64, bytes: i64, device: u16, block: u64, stack: usize) -> PackedRequest {
    PackedRequest::of(calibrate(address, bytes, device, block, stack))
}

/// Finds the layout with a report. Returns the request of its block, if the layout was found.
fn calibrate(address: u64, bytes: i64, device: u16, block: u64, stack: usize) -> Option<Request> {
    TRIES.fetch_update(Relaxed, Relaxed, |tries| tries.checked_sub(1)).ok()?;
    let report = Report { address, bytes, device, block, stack, ..Report::default() };
    let block = Pointer::new(report.block)?;
    let memory = Careful::new()?;
    let (size, private) = find(&memory, block, &report)?;
    let layout = site(&report) << 16 | u64::from(size) << 8 | u64::from(private);
    let request = request(&memory, &report, layout)?;
    let (number, place) = region(report.block);
    place.store(number, Relaxed);
    LAYOUT.store(layout, Relaxed);
    Some(request)
}

/// Returns the index of the size in a block, and that of the private pool in a pool.
fn find(memory: &impl Memory, block: Pointer, report: &Report) -> Option<(u16, u16)> {
    let bytes = report.bytes as u64;
    let word = |index: u16| memory.word(block, index * 8);
    let is_size = |size: &u16| {
        word(*size) == Some(bytes)
            && word(*size + ADDRESS) == Some(report.address)
            && word(*size + REQUESTED).is_some_and(|requested| (1..=bytes).contains(&requested))
    };
    let size = SIZES.into_iter().find(is_size)?;
    let is_device = memory.byte(block, 0) == Some((report.device >> 8) as u8);
    let pool = memory.pointer(block, (size + POOL) * 8).filter(|_| is_device)?;
    let word = |index: u16| memory.word(pool, index * 8);
    let is_pointer = |word: u64| Pointer::new(word).is_some();
    // A set ends with its leftmost and rightmost nodes and the number of its elements.
    let is_kind = |kind: &u16| {
        let follows_set = word(*kind - 3).is_some_and(is_pointer)
            && word(*kind - 2).is_some_and(is_pointer)
            && word(*kind - 1).is_some_and(|count| count < 1 << 32);
        follows_set
            && memory.byte(pool, *kind * 8) == Some(u8::from(bytes <= SMALL_BYTES))
            && word(*kind + 1).is_some_and(|private| private == 0 || is_pointer(private))
    };
    KINDS.into_iter().find(is_kind).map(|kind| (size, kind + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block with its pool, as words; `leaked` so that addresses stay valid.
    fn block(requested: u64, bytes: u64, stream: u64, private: u64) -> &'static [u64] {
        let node = Box::leak(Box::new([0_u64; 4])).as_ptr() as u64;
        let mut pool = [0_u64; 20];
        (pool[9], pool[10], pool[11]) = (node, node, 3);
        (pool[12], pool[13]) = (u64::from(bytes <= SMALL_BYTES) | 0xab00, private);
        let pool = Box::leak(Box::new(pool)).as_ptr() as u64;
        let mut block = [7_u64; 16];
        (block[0], block[STREAM as usize]) = (0, stream);
        block[6..10].copy_from_slice(&[bytes, requested, pool, 0x7f00_0000_0000]);
        Box::leak(Box::new(block))
    }

    fn report(block: &[u64], bytes: u64) -> Report {
        let stack = Box::leak(Box::new(0x40_1234_u64)) as *const u64 as usize;
        let (block, address) = (block.as_ptr() as u64, 0x7f00_0000_0000);
        Report { address, bytes: bytes as i64, allocated: bytes, reserved: 2 << 20, device: 1, block, stack }
    }

    #[test]
    fn request_is_read_until_a_block_differs() {
        let read = |report: &Report| {
            let (flags, unused_bytes, context) = super::read(report).of_stamp();
            let (stream, pool) = (context as u16, (context >> 16) as u16);
            flags.has(Flags::REQUEST).then_some(Request { unused_bytes, stream, pool })
        };
        // No block: the register has something else.
        assert_eq!(read(&report(&[3; 16], 512)), None);
        assert_eq!(read(&Report { block: 0x10_0000, ..report(&[3; 16], 512) }), None, "unmapped memory");
        let private = Box::leak(Box::new(0_u64)) as *const u64 as u64;
        let first = block(40, 512, 0, 0);
        let expected = Request { unused_bytes: 472, stream: 0, pool: 0 };
        assert_eq!(read(&report(first, 512)), Some(expected), "read through the pipe");
        assert_eq!(read(&report(first, 512)), Some(expected), "read directly");
        let second = block((3 << 20) - 100, 3 << 20, 0x5555_0000, private);
        let expected = Request { unused_bytes: 100, stream: 1, pool: 1 };
        assert_eq!(read(&report(second, 3 << 20)), Some(expected));
        let layout = LAYOUT.load(Relaxed);
        for unmapped in [0x20_0000, 0x10_0000_0000] {
            let unmapped = Report { block: unmapped, ..report(second, 3 << 20) };
            assert_eq!(read(&unmapped), None, "no block at the known call site, in unmapped memory");
            assert_eq!(read(&report(first, 512)), None, "reading has ended");
            LAYOUT.store(layout, Relaxed);
            assert!(read(&report(first, 512)).is_some());
        }
        assert_eq!(read(&report(second, 4 << 20)), None, "the size differs");
        assert_eq!(read(&report(first, 512)), None, "reading has ended");
    }
}
