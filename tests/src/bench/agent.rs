//! Cost that the agent adds to a driver call, and cost of a scope. The agent runs as in a program: its sender writes a recording
//! to /dev/null, and no record may be lost.
//!
//! The floor of a record is a bare ring write: a number, the same clock, 64 bytes. The floor of a scope is two calls that change
//! a depth in the thread's own memory. kinds.rs measures the calls of each kind.

use super::rounds::{Contestant, Per, print_table};
use gpumem::base::env::Settings;
use gpumem::base::row::AllocationName;
use gpumem::driver::allocations::Allocation;
use gpumem::driver::core::Core;
use gpumem::record::recorder::RecordContext;
use gpumem::threads::Call;
use gpumem_wire::{Flags, MemoryKind};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const EVENTS: u64 = 20_000;
const ROUNDS: usize = 40;
/// Number of live rows.
const LIVE: u64 = 1_000;
const RING: usize = 1 << 16;
const BASE: u64 = 0x7f00_0000_0000;

/// A ring with a number, the time and 64 bytes in each slot.
struct BareRing {
    head: AtomicU64,
    slots: Vec<[AtomicU64; 8]>,
}

impl BareRing {
    fn new() -> Self {
        let slots = (0..RING).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect();
        BareRing { head: AtomicU64::new(0), slots }
    }

    #[inline(never)]
    fn write(&self, core: &Core, address: u64, bytes: u64, tag: u32) {
        let seq = self.head.fetch_add(1, Ordering::AcqRel) + 1;
        let slot = &self.slots[(seq - 1) as usize & (RING - 1)];
        let row = [core.recorder.clock.now(), address, bytes, 0, tag.into(), 1, 2];
        for (word, value) in slot[1..].iter().zip(row) {
            word.store(value, Ordering::Relaxed);
        }
        slot[0].store(seq, Ordering::Release);
    }
}

/// Like `alloc`, with the library that made the call; the parameters are on this stack.
#[inline(never)]
fn alloc_called(address: u64, bytes: u64, params: &[u64; 2]) {
    let params = black_box(params).as_ptr() as usize;
    gpumem::driver::guard::guard((), |core, thread| {
        let AllocationName { tag, flags, .. } = core.named(thread);
        let module = core.caller(thread, 243, params, (&raw const thread) as usize);
        let at = RecordContext { tag, flags, context: 1, module, device: 0, ..RecordContext::NOWHERE };
        let what = Allocation { address, bytes, pool: 0, memory: MemoryKind::Device, entered_ns: Some(1) };
        core.allocated(thread, at, what);
    });
}

/// Makes the record of an allocation as the agent's callbacks do.
#[inline(never)]
fn alloc(address: u64, bytes: u64) {
    gpumem::driver::guard::guard((), |core, thread| {
        let AllocationName { tag, flags, .. } = core.named(thread);
        let at = RecordContext { tag, flags, context: 1, device: 0, ..RecordContext::NOWHERE };
        let what = Allocation { address, bytes, pool: 0, memory: MemoryKind::Device, entered_ns: Some(1) };
        core.allocated(thread, at, what);
    });
}

#[inline(never)]
fn free(address: u64) {
    gpumem::driver::guard::guard((), |core, thread| {
        let AllocationName { tag, flags, .. } = core.named(thread);
        let mut call = Call::new(1, 1);
        core.free_entered(
            thread,
            RecordContext { tag, flags, context: 1, device: 0, ..RecordContext::NOWHERE },
            &mut call,
            address,
        );
        black_box(&call);
    });
}

/// Makes a whole call through CUPTI's callback: ENTER and EXIT.
fn call(id: u32, params: &[u64], out: Option<(&Cell<u64>, u64)>) {
    let result = 0_u32;
    let mut data = [0_u64; 9];
    data[2] = params.as_ptr() as u64;
    data[5] = 0x1000;
    data[6] = 1;
    data[8] = 7;
    // SAFETY: 72 bytes laid out as CUpti_CallbackData, with parameters of the call `id`.
    unsafe { gpumem::sources::cupti::callback(std::ptr::null_mut(), 1, id, data.as_ptr().cast()) };
    if let Some((place, value)) = out {
        place.set(value);
    }
    data[0] = 1;
    data[3] = (&raw const result) as u64;
    // SAFETY: as above.
    unsafe { gpumem::sources::cupti::callback(std::ptr::null_mut(), 1, id, data.as_ptr().cast()) };
}

fn address(event: u64) -> u64 {
    BASE + event % LIVE * (2 << 20)
}

fn push_pop(name: &std::ffi::CStr) {
    // SAFETY: a C string.
    unsafe {
        gpumem::gpumem_push(name.as_ptr());
        gpumem::gpumem_pop();
    }
}

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

#[inline(never)]
fn deeper(name: *const std::ffi::c_char) {
    DEPTH.set(DEPTH.get() + black_box(usize::from(!name.is_null())));
}

#[inline(never)]
fn shallower() {
    DEPTH.set(DEPTH.get() - 1);
}

/// Waits until the sender has everything, so that a round never finds the ring full.
fn drained(core: &Core) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while core.recorder.ring.sent() < core.recorder.ring.head() {
        assert!(Instant::now() < deadline, "the sender is stuck");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs the whole benchmark.
pub fn run() {
    let settings = Settings {
        record: Some("/dev/null".into()),
        ring_slots: 1 << 16,
        live_rows: 1 << 18,
        name_bytes: 1 << 20,
        cupti: Some(super::kinds::cupti()),
        ..Settings::default()
    };
    let core = gpumem::entry::attach::start_with(settings).expect("an agent");
    std::thread::sleep(Duration::from_millis(100)); // the clock is calibrated by then
    // SAFETY: a C string.
    unsafe { gpumem::gpumem_push(c"model".as_ptr()) };

    let here = gpumem::threads::current().expect("a place");
    core.context_seen(here, 0x1000, 1, 0, None);

    let bare = BareRing::new();
    let names = [
        "alloc record, tag, live row",
        "the same with its library",
        "free record, tag, live row",
        "bare ring write, time stamp",
    ];
    let [mut allocs, mut named, mut frees, mut floor] = names.map(Contestant::new);
    let mut pairs = Contestant::new("cuMemAlloc, cuMemFree (all)");
    let mut both = Contestant::new("alloc and free, 2 threads");
    let mut both_floor = Contestant::new("bare ring write, 2 threads");
    for _ in 0..ROUNDS {
        // Frees make room for the allocations of the next burst.
        let bursts = EVENTS / LIVE;
        let (mut allocating, mut freeing) = (Duration::ZERO, Duration::ZERO);
        for burst in 0..bursts {
            let events = burst * LIVE..(burst + 1) * LIVE;
            let start = Instant::now();
            events.clone().for_each(|event| alloc(address(event), 512 + event));
            allocating += start.elapsed();
            let start = Instant::now();
            events.for_each(|event| free(address(event)));
            freeing += start.elapsed();
        }
        allocs.took(EVENTS as usize, allocating);
        frees.took(EVENTS as usize, freeing);
        drained(core);
        let mut allocating = Duration::ZERO;
        for burst in 0..bursts {
            let events = burst * LIVE..(burst + 1) * LIVE;
            let start = Instant::now();
            events.clone().for_each(|event| alloc_called(address(event), 512 + event, &[1, 2]));
            allocating += start.elapsed();
            events.for_each(|event| free(address(event)));
        }
        named.took(EVENTS as usize, allocating);
        floor.round(EVENTS as usize, || {
            (0..EVENTS).for_each(|event| bare.write(core, address(event), 512 + event, 1));
        });
        drained(core);
        let out = Cell::new(0_u64);
        pairs.round(3 * EVENTS as usize, || {
            for event in 0..EVENTS {
                call(243, &[out.as_ptr() as u64, 512 + event], Some((&out, address(event))));
                call(245, &[address(event)], None);
            }
        });
        drained(core);
        together(&mut both, |thread, event| match event / LIVE % 2 {
            0 => alloc(BASE + (thread << 40) + address(event), 512),
            _ => free(BASE + (thread << 40) + address(event)),
        });
        together(&mut both_floor, |_, event| bare.write(core, address(event), 512, 1));
        drained(core);
    }
    assert_eq!(core.recorder.ring.lost(), 0, "a round found the ring full");
    assert_eq!(core.recorder.live.scan().count(), 0, "every row was freed");
    assert_eq!(core.recorder.live.refused.load(Ordering::Relaxed), 0);
    for contestant in
        [&mut allocs, &mut named, &mut frees, &mut pairs, &mut floor, &mut both, &mut both_floor]
    {
        contestant.forget_warm_up();
    }
    print_table("a record", Per::Event, &[&allocs, &named, &frees, &pairs, &floor]);
    println!("(the line of whole calls has 3 records and 4 callbacks per pair, shown per record)\n");
    print_table("the same from two threads at once, per record of each", Per::Event, &[&both, &both_floor]);
    scopes();
    super::kinds::run(core, drained);
    assert_eq!(core.named(gpumem::threads::current().expect("a place")).flags, Flags(0));
}

/// Runs two threads; the round takes as long as the slower one.
fn together(contestant: &mut Contestant, work: impl Fn(u64, u64) + Sync) {
    let barrier = std::sync::Barrier::new(2);
    let times: Vec<Duration> = std::thread::scope(|scope| {
        let run = |thread| {
            let (work, barrier) = (&work, &barrier);
            move || {
                barrier.wait();
                let start = Instant::now();
                (0..EVENTS).for_each(|event| work(thread, event));
                start.elapsed()
            }
        };
        let threads = [scope.spawn(run(0)), scope.spawn(run(1))];
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    contestant.took(EVENTS as usize, times.into_iter().max().unwrap_or_default());
}

fn scopes() {
    const PAIRS: usize = 100_000;
    let [mut known, mut long, mut floor] =
        ["push + pop of \"layer.17\"", "push + pop, 40 bytes", "two calls"].map(Contestant::new);
    for _ in 0..ROUNDS {
        known.round(PAIRS, || (0..PAIRS).for_each(|_| push_pop(black_box(c"layer.17"))));
        let name = c"encoder.layers.17.attention.self.query_w";
        long.round(PAIRS, || (0..PAIRS).for_each(|_| push_pop(black_box(name))));
        floor.round(PAIRS, || {
            for _ in 0..PAIRS {
                deeper(black_box(c"layer.17".as_ptr()));
                shallower();
            }
        });
    }
    [&mut known, &mut long, &mut floor].into_iter().for_each(|contestant| contestant.forget_warm_up());
    print_table("a scope", Per::Event, &[&known, &long, &floor]);
}
