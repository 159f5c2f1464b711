//! PyTorch's blocks, from libraries that have its names and make its calls: found and patched however they are linked, with the
//! right sums in a ledger. Each case runs in a separate process, because slots are patched once.

use crate::common;
use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, Peer, agent};
use crate::common::torch::{Allocator, MAKES, Make, SLOW, STATIC, Torch, build};
use gpumem::base::image::Image;
use gpumem::base::row::Key;
use gpumem::driver::core::Core;
use gpumem::record::status;
use gpumem::sources::torch::patch::{self, SearchResult};
use gpumem_ledger::Pool;
use gpumem_wire::{AgentState, Body, Layer, LayerState, Record};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const CASE: &str = "GPUMEM_TEST_CASE";
const LIBRARIES: &str = "GPUMEM_TEST_LIBRARIES";
const REPORT: &[&CStr] = &[
    c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE",
    c"_ZN3c1027reportMemoryUsageToProfilerEPvlllNS_6DeviceE",
];

/// Runs `case` of `children` in a separate process, with the libraries.
fn run(case: &str, make: &Make) {
    let folder = Folder::new(&format!("torch-{case}-{}", make.name));
    if build(&folder, make).is_none() {
        return;
    }
    let output = Command::new(std::env::current_exe().expect("a path"))
        .args(["--exact", "torch_blocks::children", "--nocapture"])
        .env(CASE, format!("{case} {}", make.name))
        .env(LIBRARIES, &folder.0)
        .output()
        .expect("it runs");
    let told =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{case} {}: {told}", make.name);
    assert!(told.contains("child is done"), "{case} {}: {told}", make.name);
}

/// Runs the case in such a process.
#[test]
fn children() {
    let Ok(case) = std::env::var(CASE) else { return };
    let folder = PathBuf::from(std::env::var_os(LIBRARIES).expect("a folder"));
    let (case, make) = case.split_once(' ').expect("two words");
    match case {
        "patch" => patch_and_forward(&folder, make),
        "amid" => amid(&folder),
        "ledger" => ledger(&folder),
        "late" => late(&folder),
        "adopted" => adopted(&folder),
        "retained" => retained(&folder),
        "blocked" => blocked(&folder),
        "off" => off(&folder),
        "without" => without(&folder),
        "silent" => silent(&folder),
        "single" => single(&folder),
        "drift" => drift(&folder),
        _ => panic!("no case {case}"),
    }
    println!("child is done");
}

#[test]
fn every_make_is_patched_and_forwarded() {
    MAKES.iter().for_each(|make| run("patch", make));
}
#[test]
fn who_looked_in_the_middle_of_a_dlopen_looks_again() {
    run("amid", &SLOW);
}
#[test]
fn segments_and_blocks_add_up() {
    run("ledger", &MAKES[0]);
}
#[test]
fn what_came_before_is_known_by_its_bytes() {
    run("late", &MAKES[1]);
}
#[test]
fn what_came_before_is_taken_over_from_a_list() {
    run("adopted", &MAKES[1]);
}
#[test]
fn what_is_taken_over_may_be_retained() {
    run("retained", &MAKES[1]);
}
#[test]
fn who_hears_no_driver_call_takes_nothing_over() {
    run("blocked", &MAKES[1]);
}
#[test]
fn switched_off_means_untouched() {
    run("off", &MAKES[0]);
}
#[test]
fn without_a_slot_the_layer_says_so() {
    run("without", &STATIC);
}
#[test]
fn segments_without_blocks_are_noticed() {
    run("silent", &MAKES[0]);
}
#[test]
fn tensors_that_are_driver_allocations_are_told_so() {
    run("single", &MAKES[0]);
}
#[test]
fn missed_reports_are_told() {
    run("drift", &MAKES[0]);
}

/// Returns the slot of the report in libc10_cuda.so: its address and value.
fn slot() -> (usize, usize) {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, found: *mut c_void) -> c_int {
        // SAFETY: dl_iterate_phdr passes valid data.
        unsafe {
            let info = &*info;
            let name = CStr::from_ptr(info.dlpi_name).to_bytes();
            let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
            let image = Image::new(info.dlpi_addr as usize, headers);
            if name.ends_with(b"libc10_cuda.so") {
                *found.cast::<usize>() = image.slots(&[REPORT])[0].map_or(0, |slot| slot.at);
            }
        }
        0
    }
    let mut at = 0_usize;
    // SAFETY: a function of this type; a mapped word.
    unsafe {
        libc::dl_iterate_phdr(Some(visit), (&raw mut at).cast());
        (at, if at == 0 { 0 } else { (at as *const usize).read() })
    }
}

fn is_writable(at: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let line = maps.lines().find(|line| {
        let (start, end) = line.split_once(' ').expect("a range").0.split_once('-').expect("two ends");
        let number = |text| usize::from_str_radix(text, 16).expect("a number");
        number(start) <= at && at < number(end)
    });
    line.expect("mapped").split(' ').nth(1).expect("rights").starts_with("rw")
}

/// Returns the kinds of records since `from`, without totals, which arrive at any time, and the ring's new head.
fn told(core: &Core, from: u64) -> (Vec<u8>, u64) {
    let head = core.recorder.ring.head();
    let kind = |seq| core.recorder.ring.get(seq).map_or(0, |row| (row[7] >> 32) as u8);
    ((from + 1..=head).map(kind).filter(|kind| !matches!(kind, 25 | 27)).collect(), head)
}

fn scoped(path: &str, work: impl FnOnce()) {
    let name = CString::new(path).expect("no 0");
    // SAFETY: a C string; no arguments.
    unsafe {
        gpumem::gpumem_push(name.as_ptr());
        work();
        gpumem::gpumem_pop();
    }
}

/// Searches as the sender may, until it finds the library, which is then usually not relocated yet.
fn amid(folder: &Path) {
    agent(&folder.join("nobody.sock"), |_| {});
    let looking = std::thread::spawn(|| {
        while patch::search_result() == SearchResult::Nothing {
            patch::search(false);
        }
    });
    let _torch = Torch::load(folder);
    looking.join().expect("no panic");
    patch::search_if_changed();
    assert_eq!(patch::search_result(), SearchResult::Patched);
}

fn patch_and_forward(folder: &Path, make: &str) {
    let core = agent(&folder.join("nobody.sock"), |_| {});
    patch::search(true);
    assert_eq!(patch::search_result(), SearchResult::Nothing);
    let looks = patch::SEARCHES.load(Relaxed);
    (0..100).for_each(|_| patch::search_if_changed());
    assert_eq!(patch::SEARCHES.load(Relaxed), looks, "nothing was mapped since");
    let torch = Torch::load(folder);
    if make == "bound" {
        torch.report(0x1000, 512, 512, 2 << 20, 1); // bound, as after a first tensor
        torch.event("record", 1);
    }
    let (before, _) = torch.arrived();
    let (at, _) = slot();
    let was_writable = is_writable(at);
    assert_eq!(was_writable, !matches!(make, "now" | "no-plt"), "{make}");
    patch::search_if_changed();
    assert_eq!(patch::search_result(), SearchResult::Patched);
    assert_eq!(is_writable(at), was_writable, "its rights are as they were");
    let (_, held) = slot();
    assert_eq!(held, gpumem::sources::torch::report::reported as *const () as usize);
    patch::search(true); // a second time changes nothing
    assert_eq!(slot().1, held);

    let mut pool = Allocator::new(&torch, 0);
    pool.reserved = 2 * MIB;
    pool.allocated = if make == "bound" { 512 } else { 0 };
    pool.alloc(0x2000, 1024);
    let (kinds, from) = told(core, 0);
    // The sender searches, too: it may have patched the library before its first tensor.
    let has_first = make == "bound" && kinds.len() == 3;
    assert_eq!(kinds, [24, 50, 50][..2 + usize::from(has_first)], "a pool and each block");
    // Exceptions of the original function pass through; the event was recorded before.
    assert_eq!(torch.report(0x9000, 777, pool.allocated + 777, pool.reserved, 1), 42);
    assert_eq!(torch.report(0x9000, -777, pool.allocated, pool.reserved, 1), 0);
    pool.free(0x2000, 1024);
    let (kinds, from) = told(core, from);
    assert_eq!(kinds, [50, 51, 51]);
    // Host memory is not recorded.
    torch.report(0x3000, 64, 64, 64, 0xff00);
    assert!(told(core, from).0.is_empty());
    torch.out_of_memory(1 << 40, 512, 2 << 20);
    assert_eq!(told(core, from).0, [58]);
    assert_eq!(torch.arrived(), (before + 5, 1), "everything was handed on");
    assert_eq!(torch.event("query", 7), 0);
    assert!(patch::is_patched(patch::EVENT_RECORD) && patch::is_patched(patch::EVENT_SYNCHRONIZE));

    // A child is silent, but still calls the original function.
    let head = core.recorder.ring.head();
    // SAFETY: the child makes calls that are allowed there, and ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            torch.report(0x4000, 512, 512, 2 << 20, 1);
            torch.event("record", 3);
            let fine = torch.arrived().0 == before + 6 && core.recorder.ring.head() == head;
            libc::_exit(if fine { 0 } else { 1 });
        }
        let mut status = 0;
        libc::waitpid(child, &mut status, 0);
        assert_eq!(status, 0, "the child");
    }
    assert_eq!(core.recorder.ring.head(), head);
}

fn sums(expected: &[(&str, u64)]) -> BTreeMap<String, i64> {
    expected.iter().map(|(tag, bytes)| ((*tag).to_owned(), *bytes as i64)).collect()
}

/// Returns the pool of the first device: reserved, live and pending bytes.
fn pool_of(peer: &Peer) -> (u64, u64, u64) {
    let view = peer.view();
    let pool = view.accounts[0].pools.iter().find(|pool| pool.name.as_deref() == Some("torch"));
    let pool: &Pool = pool.expect("PyTorch's pool");
    assert_eq!(pool.segment_bytes, pool.booked_bytes, "all segments are booked");
    (pool.segment_bytes, pool.block_bytes - pool.pending_bytes, pool.pending_bytes)
}

fn check(peer: &mut Peer, pool: &Allocator<'_>, pending: u64) {
    peer.catch_up();
    assert_eq!(pool_of(peer), (pool.reserved, pool.allocated, pending));
}

const A: u64 = 0x7f00_0000_0000;
const B: u64 = 0x7f10_0000_0000;
const C: u64 = 0x7f20_0000_0000;

#[allow(clippy::too_many_lines)]
fn ledger(folder: &Path) {
    let socket = folder.join("agent.sock");
    let daemon = Daemon::listen(&socket);
    let core = agent(&socket, |_| {});
    let mut peer = daemon.accept();
    peer.resync_from(1);
    let torch = Torch::load(folder);
    let mut pool = Allocator::new(&torch, 0);
    context(CONTEXT, 0);

    // The very first segment finds PyTorch, so the first block is recorded. Memory that the block does not overlap is no
    // segment.
    scoped("lib", || alloc(B, 64 * MIB));
    scoped("model", || alloc(A, 20 * MIB));
    pool.reserved = 20 * MIB;
    scoped("model", || {
        pool.alloc(A, 512);
        pool.alloc(A + 512, 5 * MIB);
    });
    pool.alloc(A + 6 * MIB, MIB);
    check(&mut peer, &pool, 0);
    let held = [("lib", 64 * MIB), ("model", 512 + 5 * MIB), ("", MIB), ("(idle)", 14 * MIB - 512)];
    assert_eq!(peer.tags(), sums(&held));

    // A retag without a pool applies to the block, even if the segment has its address.
    // SAFETY: C strings.
    unsafe { gpumem::gpumem_retag(0, A, c"weight".as_ptr(), 1, 0) };
    // SAFETY: as above.
    unsafe { gpumem::gpumem_retag(0, B, c"library".as_ptr(), 0, 0) };
    peer.catch_up();
    let held =
        [("library", 64 * MIB), ("weight", 512), ("model", 5 * MIB), ("", MIB), ("(idle)", 14 * MIB - 512)];
    assert_eq!(peer.tags(), sums(&held));

    // Pieces mapped side by side under one block; another block uses a further piece, and the rest of the last.
    for piece in 0..3 {
        mem_create(0xa0 + piece, 2 * MIB);
    }
    for piece in 0..3 {
        mem_map(C + piece * 2 * MIB, 2 * MIB, 0xa0 + piece);
    }
    pool.reserved += 6 * MIB;
    scoped("big", || pool.alloc(C, 5 * MIB));
    mem_create(0xa3, 2 * MIB);
    mem_map(C + 6 * MIB, 2 * MIB, 0xa3);
    pool.reserved += 2 * MIB;
    scoped("big", || pool.alloc(C + 5 * MIB, 2 * MIB + 4096));
    check(&mut peer, &pool, 0);
    assert_eq!(peer.tags()["big"], (7 * MIB + 4096) as i64);
    pool.free(C + 5 * MIB, 2 * MIB + 4096);
    taking(MEM_UNMAP, 0, &[C + 6 * MIB, 2 * MIB]);
    taking(MEM_RELEASE, 0, &[0xa3]);
    pool.reserved -= 2 * MIB;
    check(&mut peer, &pool, 0);

    // A block that a stream still uses.
    pool.alloc(A + 10 * MIB, MIB);
    torch.set_busy(true);
    pool.free_behind(A + 10 * MIB, MIB, &[0xe1, 0xe2]);
    check(&mut peer, &pool, MIB);
    assert_eq!(torch.event("query", 0xe1), 600);
    pool.alloc(A + 12 * MIB, 1024); // a report in between: its events do not belong to the next free
    pool.free(A + 12 * MIB, 1024);
    check(&mut peer, &pool, MIB);
    // The state sent again contains that the block is pending.
    peer.resync(2);
    check(&mut peer, &pool, MIB);
    torch.set_busy(false);
    torch.event("query", 0xe1);
    check(&mut peer, &pool, MIB);
    torch.event("synchronize", 0xe2);
    check(&mut peer, &pool, 0);
    // Memory that is handed out again is not pending, whatever the agent assumed.
    pool.alloc(A + 10 * MIB, MIB);
    pool.free_behind(A + 10 * MIB, MIB, &[0xe3]);
    check(&mut peer, &pool, MIB);
    pool.alloc(A + 10 * MIB + 512, 2048);
    check(&mut peer, &pool, 0);
    pool.free(A + 10 * MIB + 512, 2048);
    // Unrelated events are recorded by another place of the library, elsewhere on the stack.
    pool.alloc(A + 10 * MIB, MIB);
    deep_record(&torch, 0xe4);
    pool.free(A + 10 * MIB, MIB);
    check(&mut peer, &pool, 0);
    // Blocks beyond the limit count as free, and that is reported.
    for block in 0..1030 {
        pool.alloc(A + 10 * MIB + block * 512, 512);
    }
    for block in 0..1030 {
        pool.free_behind(A + 10 * MIB + block * 512, 512, &[0x1000 + block]);
    }
    check(&mut peer, &pool, 1024 * 512);
    assert_eq!(core.torch.unrecorded_pending.load(Relaxed), 6);
    for block in 0..1030 {
        torch.event("query", 0x1000 + block);
    }
    check(&mut peer, &pool, 0);

    // A segment that another thread allocated for it is still found.
    std::thread::scope(|scope| {
        scope.spawn(|| alloc(B + 1024 * MIB, 2 * MIB)).join().expect("no panic");
    });
    pool.reserved += 2 * MIB;
    pool.alloc(B + 1025 * MIB, 512);
    check(&mut peer, &pool, 0);
    pool.free(B + 1025 * MIB, 512);
    // Segments whose free fails stay; others go.
    taking(FREE, 1, &[B + 1024 * MIB]);
    check(&mut peer, &pool, 0);
    free(B + 1024 * MIB);
    pool.reserved -= 2 * MIB;
    check(&mut peer, &pool, 0);
    taking(MEM_UNMAP, 1, &[C, 2 * MIB]);
    check(&mut peer, &pool, 0);
    peer.resync(3);
    check(&mut peer, &pool, 0);

    // A second device has its own pool.
    let other = Context { handle: 0x55_5500_2000, uid: 2 };
    context(other, 1);
    giving_in(other, ALLOC, B + 4096 * MIB, 0, &[2 * MIB]);
    let mut second = Allocator::new(&torch, 1);
    second.reserved = 2 * MIB;
    second.alloc(B + 4096 * MIB, 4096);
    peer.catch_up();
    let view = peer.view();
    let pools = view.accounts.iter().flat_map(|account| &account.pools);
    assert_eq!(pools.filter(|pool| pool.name.as_deref() == Some("torch")).count(), 2);

    // Its totals arrive with a report, once a second.
    let start = Instant::now();
    let checked = |peer: &Peer| peer.view().accounts[0].pools[0].check;
    while checked(&peer).is_none() {
        assert!(start.elapsed() < common::daemon::patience(), "no totals");
        pool.alloc(A + 15 * MIB, 512);
        pool.free(A + 15 * MIB, 512);
        peer.take(Duration::from_millis(50));
    }
    let (theirs, ours) = checked(&peer).expect("just seen");
    assert_eq!(theirs, ours);

    // A failed driver call of PyTorch is pressure; with PyTorch's report that it gives up, an OOM.
    torch.driver(ALLOC, 40 * MIB, C + 512 * MIB, 0); // so that the library has a number
    let start = Instant::now();
    while peer.seen.iter().all(|kind| kind != "Pressure") {
        assert!(start.elapsed() < common::daemon::patience(), "no pressure");
        torch.driver(ALLOC, 40 * MIB, 0, 2);
        peer.take(Duration::from_millis(50));
    }
    let (_, from) = told(core, 0);
    torch.out_of_memory(40 << 20, pool.allocated, pool.reserved);
    torch.out_of_memory(40 << 20, pool.allocated, pool.reserved);
    let results: Vec<u16> = (from + 1..=from + 2).map(|seq| oom_result(core, seq)).collect();
    assert_eq!(results, [2, 0], "the driver refused the first; the second is a limit of the pool's own");
    until_layer(Layer::OutOfMemory, LayerState::Active, "");
    // 1,030 at a time exceeded the limit; and the last allocation was never a segment.
    until_layer(Layer::Blocks, LayerState::Degraded, "6 frees");
}

/// Records an event that belongs to no free: from far down the stack.
#[inline(never)]
fn deep_record(torch: &Torch, event: u64) {
    let room = std::hint::black_box([0_u8; 8192]);
    torch.event("record", event);
    std::hint::black_box(&room);
}

fn oom_result(core: &Core, seq: u64) -> u16 {
    let row = core.recorder.ring.get(seq).expect("a record");
    match Record::decode(&gpumem::base::row::slot_of(&row), &[]).expect("a kind").body {
        Body::Oom { result, .. } => result,
        other => panic!("{other:?}"),
    }
}

fn until_layer(layer: Layer, state: LayerState, why: &str) {
    let start = Instant::now();
    loop {
        let said = status::layers().into_iter().find(|said| said.layer == layer);
        if said.as_ref().is_some_and(|said| said.state == state && said.reason.contains(why)) {
            return;
        }
        assert!(start.elapsed() < common::daemon::patience(), "{said:?}, not {state:?} {why}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn late(folder: &Path) {
    let torch = Torch::load(folder);
    let mut pool = Allocator::new(&torch, 0);
    pool.reserved = 40 * MIB;
    pool.alloc(A, 10 * MIB);
    pool.alloc(A + 10 * MIB, 5 * MIB);
    let core = agent(&folder.join("nobody.sock"), |_| {});
    patch::search(true);
    pool.free(A + 10 * MIB, 5 * MIB);
    pool.alloc(A + 20 * MIB, 1024);
    until_layer(Layer::Blocks, LayerState::Degraded, "10485760 bytes are older");
    assert_eq!(core.torch.devices[0].drift.load(Relaxed), 0);
    pool.free(A + 20 * MIB, 1024);
    pool.free(A, 10 * MIB);
    let (kinds, _) = told(core, 0);
    assert_eq!(
        kinds.iter().filter(|kind| **kind == 51).count(),
        1,
        "frees of what we never saw are not told"
    );
    assert_eq!(core.torch.devices[0].older.load(Relaxed), 0);
}

fn adopted(folder: &Path) {
    const SMALL: u64 = 20_000;
    let socket = folder.join("agent.sock");
    let daemon = Daemon::listen(&socket);
    let torch = Torch::load(folder);
    let mut pool = Allocator::new(&torch, 0);
    pool.reserved = 40 * MIB;
    pool.alloc(A, 10 * MIB);
    pool.alloc(A + 10 * MIB, 5 * MIB);
    pool.alloc(B, SMALL * 64);
    let core = agent(&socket, |_| {});
    let mut peer = daemon.accept();
    peer.resync_from(1);
    context(CONTEXT, 0);
    let list = [
        [0, 0, A, 20 * MIB],
        [0, 1, A, 10 * MIB],
        [0, 1, A + 10 * MIB, 5 * MIB],
        [0, 2, B, 20 * MIB], // is mapped
        [1, 1, C, MIB],      // of a device without segments
    ];
    let adopt = || {
        // SAFETY: parts of four numbers.
        unsafe { gpumem::gpumem_adopt(list.as_ptr().cast(), list.len() as u64) }
    };
    // SAFETY: takes no arguments.
    let begins = || unsafe { gpumem::gpumem_adoption_begins() };
    assert_eq!(begins(), 0, "nothing is older");
    patch::search(true);
    core.torch.is_late.store(true, Relaxed);

    // A record after the list was requested: nothing is adopted.
    assert_eq!(begins(), 1);
    pool.alloc(A + 16 * MIB, 1024);
    assert_eq!(adopt(), 0);
    assert_eq!(begins(), 1);
    pool.free(A + 16 * MIB, 1024);
    assert_eq!(adopt(), 0);
    peer.catch_up();
    assert_eq!(peer.view().accounts[0].tracked_bytes, 0);
    assert_eq!(core.torch.devices[0].older.load(Relaxed), 15 * MIB + SMALL * 64);

    // A record while it is adopted: everything recorded so far is reversed.
    assert_eq!(begins(), 1);
    let (booked, told) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !booked.load(Relaxed) {
                let is_booked = core.recorder.live.get(Key::Allocation(A)).is_some();
                if is_booked {
                    scoped("meanwhile", || told.store(true, Relaxed));
                    // SAFETY: takes a number.
                    unsafe { gpumem::gpumem_step(1) };
                }
                booked.store(is_booked, Relaxed);
            }
        });
        let many: Vec<[u64; 4]> =
            list.into_iter().chain((0..SMALL).map(|n| [0, 1, B + n * 64, 64])).collect();
        // SAFETY: as above.
        assert_eq!(unsafe { gpumem::gpumem_adopt(many.as_ptr().cast(), many.len() as u64) }, 0);
    });
    assert!(told.load(Relaxed));
    peer.catch_up();
    assert_eq!((peer.view().accounts[0].tracked_bytes, peer.tags().len()), (0, 0), "{:?}", peer.tags());
    pool.free(B, SMALL * 64);
    assert_eq!(core.torch.devices[0].older.load(Relaxed), 15 * MIB);
    assert_eq!(core.torch.devices[0].segments.load(Relaxed), 0);

    // Without other records, all older memory is adopted.
    assert_eq!(begins(), 1);
    assert_eq!(adopt(), 1);
    check(&mut peer, &pool, 0);
    let held = [("before the agent", 15 * MIB), ("(idle)", 25 * MIB)];
    assert_eq!(peer.tags(), sums(&held));
    assert_eq!(core.torch.devices[0].older.load(Relaxed), 0);
    assert_eq!(begins(), 1);
    assert_eq!(adopt(), 1, "a second time nothing is new");
    check(&mut peer, &pool, 0);

    // From now on they are like any other blocks.
    // SAFETY: a C string.
    unsafe { gpumem::gpumem_retag(0, A, c"weight".as_ptr(), 1, 0) };
    pool.free(A + 10 * MIB, 5 * MIB);
    taking(MEM_UNMAP, 0, &[B, 20 * MIB]);
    taking(MEM_RELEASE, 0, &[4711]); // its handle, which was never reported
    pool.reserved -= 20 * MIB;
    check(&mut peer, &pool, 0);
    assert_eq!(peer.tags(), sums(&[("weight", 10 * MIB), ("(idle)", 10 * MIB)]));
    until_layer(Layer::Blocks, LayerState::Active, "");
    assert_eq!(core.torch.devices[0].drift.load(Relaxed), 0);
    assert_eq!(peer.view().odd, Default::default(), "nothing odd");
}

/// Adopts 20 MiB that are mapped at B.
fn take_over_a_page() {
    let list = [[0, 2, B, 20 * MIB], [0, 1, B, MIB]];
    // SAFETY: no arguments; parts of four numbers.
    unsafe {
        assert_eq!(gpumem::gpumem_adoption_begins(), 1);
        assert_eq!(gpumem::gpumem_adopt(list.as_ptr().cast(), list.len() as u64), 1);
    }
}

/// Its handle gets a number when it is first retained, and ends with the last reference, as any other.
fn retained(folder: &Path) {
    let socket = folder.join("agent.sock");
    let daemon = Daemon::listen(&socket);
    let _torch = Torch::load(folder);
    let core = agent(&socket, |_| {});
    let mut peer = daemon.accept();
    peer.resync_from(1);
    context(CONTEXT, 0);
    patch::search(true);
    core.torch.is_late.store(true, Relaxed);
    take_over_a_page();
    peer.catch_up();
    assert_eq!(peer.view().accounts[0].tracked_bytes, 20 * MIB as i64);
    giving(MEM_RETAIN, 0xa7, 0, &[B + MIB]);
    taking(MEM_UNMAP, 0, &[B, 20 * MIB]);
    peer.catch_up();
    assert_eq!(peer.view().accounts[0].tracked_bytes, 20 * MIB as i64, "it has a reference");
    taking(MEM_RELEASE, 0, &[0xa7]);
    peer.catch_up();
    assert_eq!(peer.view().accounts[0].tracked_bytes, 0);
    let rows: Vec<_> = core.recorder.live.scan().map(|taken| (taken.row[7] >> 32) as u8).collect();
    assert!(!rows.contains(&32) && !rows.contains(&33), "its row is left in the table: {rows:?}");
}

/// Another client holds CUPTI: the agent would not notice that adopted memory is freed.
fn blocked(folder: &Path) {
    let socket = folder.join("agent.sock");
    let daemon = Daemon::listen(&socket);
    let _torch = Torch::load(folder);
    let core = agent(&socket, |_| {});
    let mut peer = daemon.accept();
    peer.resync_from(1);
    patch::search(true);
    core.torch.is_late.store(true, Relaxed);
    for state in [AgentState::Blocked, AgentState::Paused] {
        gpumem::driver::core::report_status(state, 39, "another CUPTI client");
        // SAFETY: takes no arguments.
        assert_eq!(unsafe { gpumem::gpumem_adoption_begins() }, 0, "{state:?}");
    }
    gpumem::driver::core::report_status(AgentState::Late, 0, "");
    take_over_a_page();
    peer.catch_up();
}

fn off(folder: &Path) {
    let torch = Torch::load(folder);
    let (at, held) = slot();
    assert!(at != 0);
    let core = agent(&folder.join("nobody.sock"), |settings| settings.layers.torch = false);
    alloc(A, 2 * MIB);
    until_layer(Layer::Blocks, LayerState::Off, "GPUMEM_TORCH");
    until_layer(Layer::OutOfMemory, LayerState::Off, "GPUMEM_TORCH");
    assert_eq!(slot(), (at, held));
    torch.report(A, 512, 512, 2 << 20, 1);
    assert!(!told(core, 0).0.contains(&50));
}

fn without(folder: &Path) {
    let torch = Torch::load(folder);
    agent(&folder.join("nobody.sock"), |_| {});
    alloc(A, 2 * MIB);
    assert_eq!(patch::search_result(), SearchResult::NoSlot);
    torch.report(A, 512, 512, 2 << 20, 1);
    until_layer(Layer::Blocks, LayerState::Failed, "no function pointer to hook");
}

fn silent(folder: &Path) {
    agent(&folder.join("nobody.sock"), |_| {});
    until_layer(Layer::Blocks, LayerState::Absent, "no PyTorch");
    let torch = Torch::load(folder);
    until_layer(Layer::Blocks, LayerState::Absent, "allocated no block");
    context(CONTEXT, 0);
    torch.driver(ALLOC, 20 * MIB, A, 0);
    until_layer(Layer::Blocks, LayerState::Failed, "PyTorch reports no blocks");
    let mut pool = Allocator::new(&torch, 0);
    pool.reserved = 20 * MIB;
    pool.alloc(A, 512);
    until_layer(Layer::Blocks, LayerState::Active, "");
}

fn single(folder: &Path) {
    agent(&folder.join("nobody.sock"), |_| {});
    let torch = Torch::load(folder);
    context(CONTEXT, 0);
    until_layer(Layer::Blocks, LayerState::Absent, "allocated no block");
    torch.driver(ALLOC, 20 * MIB, A, 0);
    torch.driver(ALLOC, 4000, B, 0);
    until_layer(Layer::Blocks, LayerState::Absent, "tensors are driver allocations");
}

fn drift(folder: &Path) {
    let core = agent(&folder.join("nobody.sock"), |_| {});
    let torch = Torch::load(folder);
    context(CONTEXT, 0);
    let mut pool = Allocator::new(&torch, 0);
    alloc(A, 2 * MIB);
    pool.reserved = 2 * MIB;
    pool.alloc(A, 512);
    until_layer(Layer::Blocks, LayerState::Active, "");
    pool.allocated += 1000; // without a report
    pool.alloc(A + 4096, 512);
    pool.alloc(A + 8192, 512);
    assert_eq!(core.torch.devices[0].drift.load(Relaxed), 1000, "once");
    until_layer(Layer::Blocks, LayerState::Degraded, "1000 bytes");
    // Reserved bytes without segments are reported separately from missed reports.
    pool.reserved += 2 * MIB;
    pool.alloc(B, 512);
    until_layer(Layer::Blocks, LayerState::Degraded, "of 4194304 bytes of segments, 2097152 were not seen");
}
