//! Whatever a process sends, the ledger uses no more memory for it than its user's share, as counted by the allocator.
use gpumem_ledger::{Ledger, Limits, Origin, ProcessKey, RefusedRecords};
use gpumem_wire::{
    Body, DestroyScope, DeviceIdKind, DriverEventKind, Edge, Flags, FreeState, MemoryKind, OomOutcome, Phase,
    PoolOwner, Reading, Record, Role, Stamp,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// Bytes that this thread allocated and did not free; counted by thread, because other tests run at the same time.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator; this type only adds up the sizes.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.set(LIVE.get() + layout.size() as isize);
        MOST.set(MOST.get().max(LIVE.get()));
        // SAFETY: as we were called.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get() - layout.size() as isize);
        // SAFETY: as we were called.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MIB: usize = 1 << 20;
const LIAR: ProcessKey = ProcessKey { pid: 666, start_ticks: 1 };
const HONEST: ProcessKey = ProcessKey { pid: 7, start_ticks: 1 };

fn of(key: ProcessKey, uid: u64) -> (Origin, Record<'static>) {
    let body =
        Body::ProcessFacts { start_ticks: key.start_ticks, uid: Reading::of(uid), parent_pid: 0, facts: "" };
    (Origin::Host, Record { stamp: Stamp { thread: key.pid, ..Stamp::default() }, body })
}

fn alloc(address: u64, bytes: u64) -> Body<'static> {
    Body::AllocEnd { address, bytes, pool: 0, took_us: 0, memory: MemoryKind::Device }
}

fn device(low: u64) -> Body<'static> {
    let (total_bytes, id) = (Reading::ABSENT, DeviceIdKind::Gpu);
    Body::Device { uuid_high: 5, uuid_low: low, total_bytes, ordinal: 0, id, name: "GPU" }
}

/// Name of a flood, and the function that sends its record of a given number.
type Flood<'a> = (&'a str, &'a dyn Fn(u64, &mut dyn FnMut(Stamp, Body<'_>)));

#[test]
fn who_names_devices_without_end_leaves_places_for_those_of_others() {
    let mut ledger = Ledger::new();
    for pid in 0..20_u32 {
        let key = ProcessKey { pid: 1000 + pid, start_ticks: 1 };
        let (origin, facts) = of(key, 65_534);
        ledger.observe(origin, &facts);
        for slot in 0..60_u8 {
            let stamp = Stamp { device: slot, ..Stamp::default() };
            let low = 1000 * u64::from(pid) + u64::from(slot) + 1;
            ledger.observe(Origin::Process(key), &Record { stamp, body: device(low) });
            ledger.observe(Origin::Process(key), &Record { stamp, body: alloc(low << 30, 64) });
        }
    }
    assert_eq!(ledger.devices().len(), 64);
    let (origin, facts) = of(HONEST, 1000);
    ledger.observe(origin, &facts);
    let stamp = Stamp { device: 0, ..Stamp::default() };
    ledger.observe(Origin::Process(HONEST), &Record { stamp, body: device(999_999) });
    ledger.observe(Origin::Process(HONEST), &Record { stamp, body: alloc(7 << 30, 64) });
    let snapshot = ledger.snapshot();
    let of_pid = |pid: u32| snapshot.processes.iter().find(|process| process.key.pid == pid).expect("it");
    let honest = of_pid(HONEST.pid);
    assert_eq!((ledger.devices().len(), honest.odd.devices_beyond), (65, 0));
    assert_eq!(honest.accounts.iter().filter(|account| account.device == Some(64)).count(), 1);
    // Records about further devices are counted in one sum.
    let last = of_pid(1019);
    assert_eq!(last.odd.devices_beyond, 60);
    assert_eq!(last.accounts.iter().map(|account| account.tracked_bytes).sum::<i64>(), 60 * 64);
}

#[test]
fn no_flood_takes_more_than_its_users_share() {
    const SHARE: usize = 4 * MIB;
    const RECORDS: u64 = 60_000;
    let use_as = (Role::Unknown, Phase::Unknown);
    let at = |seq: u64| Stamp { seq, time_ns: seq * 1000, device: 0, ..Stamp::default() };
    let long = "x".repeat(250);
    let floods: [Flood<'_>; 22] = [
        ("allocations", &|n, say| say(at(n), alloc(n << 21, 64))),
        ("allocations out of order", &|n, say| {
            say(Stamp { seq: u64::from(n == 1), ..at(n) }, alloc(n << 21, 64))
        }),
        ("allocations said again", &|n, say| {
            let flags = if n == 1 { Flags::default() } else { Flags::RESTATED };
            say(Stamp { flags, ..at(n) }, alloc(n << 21, 64));
        }),
        ("frees that never end", &|n, say| {
            let body =
                if n % 2 == 1 { alloc(n << 21, 64) } else { Body::FreeBegin { address: (n - 1) << 21 } };
            say(at(n), body);
        }),
        ("blocks", &|n, say| say(at(n), Body::BlockAlloc { address: n << 9, bytes: 512, pool: 3, use_as })),
        ("blocks of phases", &|n, say| {
            let use_as = (Role::Unknown, Phase::Forward);
            say(
                Stamp { device: (n % 60) as u8, ..at(n) },
                Body::BlockAlloc { address: n << 9, bytes: 512, pool: n % 60 + 1, use_as },
            );
        }),
        ("blocks that wait", &|n, say| {
            let state = FreeState::Pending;
            let body = match n % 2 {
                1 => Body::BlockAlloc { address: n << 9, bytes: 512, pool: 3, use_as },
                _ => Body::BlockFree { address: (n - 1) << 9, pool: 3, state },
            };
            say(at(n), body);
        }),
        ("pools", &|n, say| {
            say(
                at(n),
                Body::PoolCreate { pool: n, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework },
            );
        }),
        ("pools that were destroyed", &|n, say| {
            let body = match n % 2 {
                1 => Body::PoolCreate { pool: n, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework },
                _ => Body::PoolDestroy { pool: n - 1 },
            };
            say(at(n), body);
        }),
        ("pools by their state alone", &|n, say| {
            say(at(n), Body::PoolState { pool: n, reserved_bytes: 1, used_bytes: 1, took_us: 0 });
        }),
        ("segments", &|n, say| say(at(n), Body::SegmentAdd { address: n << 21, bytes: 1 << 20, pool: 3 })),
        ("segments of allocations", &|n, say| {
            let address = n.div_ceil(2) << 22;
            let body = if n % 2 == 1 {
                alloc(address, 2 << 20)
            } else {
                Body::SegmentAdd { address, bytes: 1 << 20, pool: 3 }
            };
            say(at(n), body);
        }),
        ("handles and mappings", &|n, say| {
            let handle = n.div_ceil(2);
            let (bytes, memory) = (2 << 20, MemoryKind::Vmm);
            let body = match n % 2 {
                1 => Body::VmmCreate { handle, bytes, references: 1, memory },
                _ => Body::VmmMap { address: n << 21, bytes, handle },
            };
            say(at(n), body);
        }),
        ("tags", &|n, say| say(Stamp { tag: n as u32, ..at(0) }, Body::Tag { path: &long })),
        ("modules", &|n, say| {
            let path = "y".repeat(50_000);
            say(Stamp { module: n as u16, ..at(0) }, Body::Module { path: &path, base: 0, bytes: 1 });
        }),
        ("cells on every device", &|n, say| {
            let stamp = Stamp { device: (n % 60) as u8, tag: n as u32, ..at(n) };
            say(stamp, alloc(n << 21, 64));
        }),
        ("what is taken over on every device, and no reading", &|n, say| {
            for seq in 16 * n..16 * (n + 1) {
                let stamp = Stamp { device: (n % 60) as u8, flags: Flags::OLDER, ..at(seq) };
                say(stamp, alloc((n % 60 + 1) << 21, 64));
            }
        }),
        ("names that are given again and again", &|n, say| {
            let body = match n {
                1..=100 => alloc(n << 21, 64),
                _ => Body::Retag { address: (n % 100 + 1) << 21, block_seq: n % 100 + 1, pool: 0, use_as },
            };
            say(Stamp { tag: n as u32, device: (n % 60) as u8, ..at(n) }, body);
        }),
        ("rows that go all at once, again and again", &|n, say| match n {
            1..=20_000 => say(Stamp { tag: n as u32, ..at(n) }, alloc(n << 21, 64)),
            _ if n % 1000 == 0 => say(at(n), Body::ContextDestroy { scope: DestroyScope::ALL[1] }),
            _ if n % 1000 < 20 => say(at(n), Body::SegmentAdd { address: n << 12, bytes: 1 << 47, pool: n }),
            _ if n % 1000 < 40 => say(at(n), Body::SegmentRemove { address: 0, bytes: 1 << 47, pool: n }),
            _ if n % 1000 < 60 => {
                let owner = PoolOwner::Framework;
                say(
                    Stamp { tag: n as u32, ..at(n) },
                    Body::PoolCreate { pool: n, parent: n - 1, reports_blocks: 1, owner },
                );
            }
            _ if n % 1000 < 80 => say(at(n), Body::Step { number: n }),
            _ => say(at(n), Body::Pressure { bytes: n, device_free_bytes: Reading::ABSENT }),
        }),
        ("counters", &|n, say| {
            say(Stamp { tag: n as u32, ..at(n) }, Body::Counter { value: n as i64 });
        }),
        ("ranges that end or do not", &|n, say| {
            let edge = if n % 3 == 2 { Edge::End } else { Edge::Begin };
            say(Stamp { tag: (n / 3) as u32, thread: (n / 200) as u32, ..at(n) }, Body::Scope { edge });
        }),
        ("everything that is only noted", &|n, say| {
            let stamp =
                Stamp { tag: n as u32, stack: n as u32, context: n as u32, thread: n as u32, ..at(n) };
            match n % 8 {
                0 => say(stamp, Body::Marker {}),
                1 => say(stamp, Body::ContextCreate { handle: n }),
                2 => say(
                    stamp,
                    Body::DriverEvent {
                        bytes: n,
                        value: n,
                        event: DriverEventKind::ALL[n as usize / 8 % DriverEventKind::ALL.len()],
                    },
                ),
                3 => say(stamp, Body::Step { number: n }),
                4 => say(stamp, Body::PhaseBegin { phase: Phase::ALL[n as usize / 8 % Phase::ALL.len()] }),
                5 => say(stamp, device(n)),
                6 => say(stamp, Body::Pressure { bytes: n, device_free_bytes: Reading::ABSENT }),
                _ => {
                    let (pool_used_bytes, pool_reserved_bytes) = (Reading::ABSENT, Reading::ABSENT);
                    let outcome = OomOutcome::Survived;
                    say(
                        stamp,
                        Body::Oom { bytes: n, pool_used_bytes, pool_reserved_bytes, outcome, result: 2 },
                    );
                }
            }
        }),
    ];
    for (name, flood) in floods {
        let before = LIVE.get();
        MOST.set(before);
        let mut ledger = Ledger::new();
        ledger.set_limits(Limits { rows_per_process: 4_000_000, bytes_per_user: SHARE, bytes: 4 * SHARE });
        for (origin, record) in [of(LIAR, 1), of(HONEST, 2)] {
            ledger.observe(origin, &record);
        }
        ledger.observe(Origin::Process(HONEST), &Record { stamp: at(1), body: alloc(1 << 21, 4096) });
        for n in 1..=RECORDS {
            flood(n, &mut |stamp, body| ledger.observe(Origin::Process(LIAR), &Record { stamp, body }));
        }
        let took = (MOST.get() - before).unsigned_abs();
        assert!(took < SHARE * 3 / 2 + 2 * MIB, "{name}: {} MiB", took / MIB);
        let (bytes, refused) = ledger.memory_use();
        assert!(bytes < SHARE * 4, "{name}: thinks of {} MiB", bytes / MIB);
        // The other user's process is not limited.
        ledger.observe(Origin::Process(HONEST), &Record { stamp: at(2), body: alloc(2 << 21, 4096) });
        let snapshot = ledger.snapshot();
        let process =
            |key| snapshot.processes.iter().find(|process| process.key == key).expect("it is there");
        assert_eq!(process(HONEST).accounts[0].tracked_bytes, 8192, "{name}");
        assert!(!process(HONEST).coverage.partial_history, "{name}");
        if refused != RefusedRecords::default() {
            assert!(process(LIAR).coverage.partial_history, "{name}: it is marked");
        }
        ledger.remove_process(LIAR);
        ledger.remove_process(HONEST);
        assert_eq!(ledger.memory_use(), (0, refused), "{name}: what is forgotten is given back");
    }
}

#[test]
fn many_processes_of_one_user_share_and_others_have_theirs() {
    let mut ledger = Ledger::new();
    ledger.set_limits(Limits { rows_per_process: 4_000_000, bytes_per_user: 8 * MIB, bytes: 12 * MIB });
    let key = |pid| ProcessKey { pid, start_ticks: 1 };
    let fill = |ledger: &mut Ledger, pid: u32, uid: u64| {
        let (origin, record) = of(key(pid), uid);
        ledger.observe(origin, &record);
        for n in 1..=20_000 {
            let stamp = Stamp { seq: n, time_ns: n, device: 0, ..Stamp::default() };
            ledger.observe(Origin::Process(key(pid)), &Record { stamp, body: alloc(n << 21, 64) });
        }
    };
    for pid in 1..=40 {
        fill(&mut ledger, pid, 1);
    }
    let (bytes, refused) = ledger.memory_use();
    assert!((8 * MIB..10 * MIB).contains(&bytes), "{bytes}");
    assert!(refused.user > 0 && refused.rows == 0 && refused.all == 0, "{refused:?}");
    fill(&mut ledger, 100, 2);
    assert_eq!(ledger.memory_use().1, refused, "the other user's share is untouched");
    // Two users at their limits exceed the limit for all.
    (101..=140).for_each(|pid| fill(&mut ledger, pid, 2));
    let (bytes, refused) = ledger.memory_use();
    assert!((12 * MIB..14 * MIB).contains(&bytes) && refused.all > 0, "{bytes} {refused:?}");
    // A process that ends releases its share.
    (1..=40).for_each(|pid| ledger.remove_process(key(pid)));
    let before = ledger.memory_use().1;
    fill(&mut ledger, 200, 3);
    assert_eq!(ledger.memory_use().1, before);
}
