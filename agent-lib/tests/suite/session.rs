//! A whole session: driver calls and the C API give the right sums in a ledger, with a first daemon and, by resync, with a
//! second one.

use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, Peer, agent};
use gpumem_test_support::alone;
use gpumem_wire::layout::Header;
use std::collections::BTreeMap;
use std::ffi::CString;

const MIB: u64 = 1 << 20;

fn scoped(path: &str, work: impl FnOnce()) {
    let names: Vec<CString> = path.split(' ').map(|name| CString::new(name).expect("no 0")).collect();
    for name in &names {
        // SAFETY: C strings.
        unsafe { gpumem::gpumem_push(name.as_ptr()) };
    }
    work();
    for _ in &names {
        // SAFETY: takes no arguments.
        unsafe { gpumem::gpumem_pop() };
    }
}

fn sums(expected: &[(&str, u64)]) -> BTreeMap<String, i64> {
    expected.iter().map(|(tag, bytes)| ((*tag).to_owned(), *bytes as i64)).collect()
}

/// A program that uses every feature a little.
fn program() {
    context(CONTEXT, 0);
    scoped("model layer.0", || {
        alloc(0x7000_0000, 10 * MIB);
        scoped("weight", || alloc(0x7100_0000, MIB + 1));
    });
    alloc(0x7200_0000, 7);
    // Freed; a free that failed; an allocation that failed.
    scoped("gone", || alloc(0x7300_0000, 5 * MIB));
    free(0x7300_0000);
    scoped("kept", || alloc(0x7400_0000, 3 * MIB));
    taking(FREE, 1, &[0x7400_0000]);
    giving(ALLOC, 0, 2, &[1 << 40]);
    free(0); // NULL
    // The driver's pitch counts.
    let pitch = Box::new(512_usize);
    scoped("pitched", || {
        giving(ALLOC_PITCH, 0x7500_0000, 0, &[(&raw const *pitch) as u64, 500, 100, 4]);
    });
    giving(ALLOC_MANAGED, 0x7600_0000, 0, &[9 * MIB, 1]);
    let array = [64_u64, 32, 0, halves(0x20, 4), 0];
    scoped("array", || giving(ARRAY_3D, 0x5550, 0, &[array.as_ptr() as u64]));
    // VMM: released before it is unmapped, and retained.
    scoped("vmm", || mem_create(0xa1, 2 * MIB));
    mem_map(0x10_0000_0000, 2 * MIB, 0xa1);
    taking(MEM_RELEASE, 0, &[0xa1]);
    scoped("vmm2", || mem_create(0xa1, 4 * MIB)); // the number is reused
    mem_map(0x10_0020_0000, 4 * MIB, 0xa1);
    giving(MEM_RETAIN, 0xa1, 0, &[0x10_0020_0000]);
    taking(MEM_RELEASE, 0, &[0xa1]);
    taking(MEM_UNMAP, 0, &[0x10_0020_0000, 4 * MIB]);
    scoped("vmm3", || mem_create(0xa3, 6 * MIB));
    taking(MEM_RELEASE, 1, &[0xa3]); // it fails
    // Multicast objects are not memory.
    giving(MULTICAST_CREATE, 0xcc, 0, &[0]);
    mem_map(0x20_0000_0000, 2 * MIB, 0xcc);
    taking(MEM_UNMAP, 0, &[0x20_0000_0000, 2 * MIB]);
    taking(MEM_RELEASE, 0, &[0xcc]);
    // IPC: opened twice at one address, closed once.
    giving(IPC_OPEN, 0x7700_0000, 0, &[0; 9]);
    giving(IPC_OPEN, 0x7700_0000, 0, &[0; 9]);
    taking(IPC_CLOSE, 0, &[0x7700_0000]);
    // A pool of the driver.
    let properties = [halves(1, 0), halves(1, 0), 0, 0, 0, 0, 0, 0, 0, 0, 0];
    giving(POOL_CREATE, 0x9000_0000, 0, &[properties.as_ptr() as u64]);
    scoped("async", || giving(ALLOC_FROM_POOL, 0x7800_0000, 0, &[3 * MIB, 0x9000_0000, 0]));
    giving(ALLOC_FROM_POOL, 0x7900_0000, 0, &[MIB, 0x9000_0000, 0]);
    taking(FREE_ASYNC, 0, &[0x7900_0000, 0]);
}

/// A framework's pool on top: a segment with blocks.
fn framework() -> u64 {
    scoped("segment", || alloc(0x8000_0000, 20 * MIB));
    // SAFETY: C strings.
    unsafe {
        let pool = gpumem::gpumem_pool_create(c"caching".as_ptr(), 0, 0);
        assert_ne!(pool, 0);
        gpumem::gpumem_segment_add(pool, 0x8000_0000, 20 * MIB);
        scoped("weights", || gpumem::gpumem_block_alloc(pool, 0x8000_0000, 4 * MIB, 1));
        scoped("activations", || gpumem::gpumem_block_alloc(pool, 0x8040_0000, 8 * MIB, 1));
        scoped("pending", || gpumem::gpumem_block_alloc(pool, 0x80c0_0000, MIB, 1));
        scoped("freed", || gpumem::gpumem_block_alloc(pool, 0x80e0_0000, MIB, 1));
        gpumem::gpumem_block_free(pool, 0x80e0_0000, 0);
        gpumem::gpumem_block_free(pool, 0x80c0_0000, 1);
        gpumem::gpumem_retag(pool, 0x8000_0000, c"parameters/w".as_ptr(), 1, 0);
        gpumem::gpumem_pool_check(pool, 13 * MIB);
        pool
    }
}

fn expected() -> BTreeMap<String, i64> {
    sums(&[
        ("model/layer.0", 10 * MIB),
        ("model/layer.0/weight", MIB + 1),
        ("", 7),
        ("kept", 3 * MIB),
        ("pitched", 51_200),
        ("array", 64 * 32 * 4 * 4),
        ("vmm", 2 * MIB),
        ("vmm2", 4 * MIB),
        ("vmm3", 6 * MIB),
        ("async", 3 * MIB),
        ("parameters/w", 4 * MIB),
        ("activations", 8 * MIB),
        ("pending", MIB),
        ("(idle)", 7 * MIB + MIB), // 7 of the segment, 1 that the driver's pool keeps
    ])
}

fn check_memory(peer: &Peer, core: &gpumem::driver::core::Core) {
    let header: Header = peer.header();
    assert_eq!((header.pid, header.start_ticks), (std::process::id(), peer.key.start_ticks));
    assert_eq!(header.head_seq, core.recorder.ring.head());
    // SAFETY: only reads the seals.
    let seals = unsafe { libc::fcntl(peer.memory, libc::F_GET_SEALS) };
    assert_eq!(seals & 7, libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW);
    // Names can be read to their end.
    let names = peer.read(header.names_offset().expect("fits"), header.names_end as usize);
    let mut told = 0;
    for record in gpumem_wire::frame::records(&names) {
        record.expect("a frame").expect("a kind");
        told += 1;
    }
    assert!(told > 10);
    // The last record is at the offset that layout.rs gives.
    let slot = peer.read(header.slot_offset(header.head_seq), 64);
    assert_eq!(slot[..8], header.head_seq.to_le_bytes());
    // The live rows are there, too.
    let rows = peer.read(header.live_offset().expect("fits"), header.live_rows as usize * 64);
    assert!(rows.chunks(64).filter(|row| row[..8] != [0; 8]).count() >= 15);
}

#[test]
fn sums_arrive_and_a_second_daemon_gets_them_too() {
    alone(|| {
        let folder = Folder::new("session");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        let core = agent(&socket, |_| {});
        let mut first = daemon.accept();
        assert_eq!(first.seen[0], "Hello");
        first.resync(1);
        program();
        let pool = framework();
        first.catch_up();
        assert_eq!(first.tags(), expected());
        let view = first.view();
        assert_eq!(view.odd, Default::default());
        assert_eq!(view.coverage.lost, 0);
        assert_eq!(view.coverage.failed_allocations, 1);
        assert!(view.coverage.covered && !view.coverage.late);
        assert_eq!(view.facts.claims.get("rank").map(String::as_str), Some("3"));
        check_memory(&first, core);
        let told = view;

        // The daemon goes away and the program continues. Another daemon without room comes, and then one that has room.
        let heard = first.watermark;
        drop(first);
        alloc(0xb000_0000, 11 * MIB);
        free(0xb000_0000);
        scoped("later", || alloc(0xb000_0000, 12 * MIB));
        daemon.refuse();
        let mut second = daemon.accept();
        second.resync(2);
        assert_eq!(
            second.view().coverage.lost,
            heard,
            "only what the first one had: the ring keeps the rest"
        );
        let mut later = expected();
        later.insert("later".to_owned(), 12 * MIB as i64);
        // The bytes that the driver's pool keeps are polled, but there is no driver here.
        later.insert("(idle)".to_owned(), 7 * MIB as i64);
        assert_eq!(second.tags(), later);
        let view = second.view();
        assert_eq!(view.odd, Default::default());
        assert!(!view.coverage.partial_state, "the state is whole");
        let beside = |view: &gpumem_ledger::ProcessView| view.accounts[0].beside;
        assert_eq!(beside(&view), beside(&told));
        assert_eq!(beside(&view).managed_bytes, 9 * MIB as i64);
        assert_eq!(beside(&view).pending_block_bytes, MIB as i64);

        // From here both ways must agree: everything is removed.
        let end = || {
            for address in
                [0x7000_0000, 0x7100_0000, 0x7200_0000, 0x7400_0000, 0x7500_0000, 0x7600_0000, 0xb000_0000]
            {
                free(address);
            }
            taking(89, 0, &[0x5550]);
            taking(MEM_UNMAP, 0, &[0x10_0000_0000, 2 * MIB]);
            taking(MEM_RELEASE, 0, &[0xa1]);
            taking(MEM_RELEASE, 0, &[0xa3]);
            taking(IPC_CLOSE, 0, &[0x7700_0000]);
            taking(FREE_ASYNC, 0, &[0x7800_0000, 0]);
            taking(POOL_DESTROY, 0, &[0x9000_0000]);
            // SAFETY: passes no strings.
            unsafe {
                gpumem::gpumem_segment_remove(pool, 0x8000_0000, 20 * MIB);
                gpumem::gpumem_pool_destroy(pool);
            }
            free(0x8000_0000);
        };
        end();
        second.catch_up();
        assert_eq!(second.tags(), BTreeMap::new());
        assert_eq!(second.account().tracked_bytes, 0);
        assert_eq!(second.view().odd, Default::default());
        assert_eq!(core.recorder.live.scan().count(), 0, "the agent's own table is empty too");

        // The end of a context removes its allocations.
        alloc(0xc000_0000, MIB);
        resource(2, CONTEXT, std::ptr::null());
        second.catch_up();
        assert_eq!(second.account().tracked_bytes, 0);
        assert_eq!(core.recorder.live.scan().count(), 0);
    });
}
