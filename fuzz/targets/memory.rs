//! Shared memory of a dead agent, with hostile content: reading it must end, in parts of bounded size.
#![no_main]
#![allow(dead_code)]

#[path = "../../daemon/src/source/agent/frames.rs"]
mod frames;
#[path = "../../daemon/src/source/agent/memory.rs"]
mod memory;
#[path = "../../daemon/src/source/agent/post_mortem.rs"]
mod post_mortem;

/// What the included files use of the daemon.
mod source {
    use gpumem_wire::{Body, Record, Stamp};

    pub(crate) fn frame_of(stamp: Stamp, body: Body<'_>) -> Vec<u8> {
        let mut frame = Vec::new();
        Record { stamp, body }.append_frame(&mut frame);
        frame
    }
}

use gpumem_fuzz::number;
use gpumem_wire::layout::{HEADER_BYTES, Header};
use gpumem_wire::{MAJOR, MINOR, SLOT_BYTES, frame};
use libfuzzer_sys::fuzz_target;
use memory::Memory;
use post_mortem::UnsentRecords;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::pwrite;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

/// Bytes of the memory after the header.
const BODY: usize = 4096;
const FILE: usize = HEADER_BYTES + BODY;

/// Returns the memory for all inputs. Its size is sealed, its content is not.
fn file() -> &'static OwnedFd {
    static FD: OnceLock<OwnedFd> = OnceLock::new();
    FD.get_or_init(|| {
        let fd = memfd_create("fuzz", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&fd, FILE as u64).expect("room");
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).expect("sealed");
        fd
    })
}

fuzz_target!(|bytes: &[u8]| {
    let mut from = bytes;
    let (how, last_seq) = (number(&mut from, 1), number(&mut from, 8));
    // Small numbers, because they usually fit into the memory.
    let header = Header {
        major: MAJOR,
        minor: MINOR,
        pid: 1,
        start_ticks: 1,
        ring_slots: 1 << (number(&mut from, 1) % 7),
        live_rows: number(&mut from, 1) % 40,
        name_bytes: number(&mut from, 2) % 2048,
        head_seq: number(&mut from, if how & 2 == 0 { 2 } else { 8 }),
        lost: 0,
        names_end: number(&mut from, 2) % 2048,
    };
    let last_seq = if how & 4 == 0 { last_seq & 0xffff } else { last_seq };
    let fd = file();
    let mut image = [0; FILE];
    image[..72].copy_from_slice(&header.encode());
    let body = from.len().min(BODY);
    image[HEADER_BYTES..][..body].copy_from_slice(&from[..body]);
    assert_eq!(pwrite(fd, &image, 0).ok(), Some(FILE));
    let Ok(memory) = Memory::accept(fd.try_clone().expect("a descriptor"), FILE as u64) else { return };
    let Ok(mut unsent) = UnsentRecords::new(memory, (last_seq, how & 8 != 0), 1, 20) else { return };
    static RUNTIME: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    let new_runtime = || tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let runtime = RUNTIME.get_or_init(new_runtime);
    let (mut pieces, mut records) = (0_u64, 0_u64);
    gpumem_fuzz::memory::bounded(4 << 20, || {
        while let Ok(Some(frames)) = runtime.block_on(unsent.next_piece(5)) {
            pieces += 1;
            assert!(pieces < 64, "the file has {FILE} bytes");
            assert!(frames.len() <= 4096 * (SLOT_BYTES + frame::PREFIX_BYTES));
            for record in frame::records(&frames) {
                assert!(record.is_ok(), "whole frames");
                records += 1;
            }
        }
    });
    assert!(records < 200, "{records} records in {FILE} bytes");
});
