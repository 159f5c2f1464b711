//! What hostile peers do, one part each.

use super::scene::asks_now_and_then;
use gpumem_tests::live::hostile::{
    MOST_FDS, NOBODY, Peer, SEALS, Shared, hello, now_ns, ordered, own_start_ticks, record, start_ticks,
    unordered,
};
use gpumem_tests::live::until;
use gpumem_wire::{
    Body, DestroyScope, DeviceIdKind, Flags, MemoryKind, Phase, PoolOwner, Reading, Role, SLOT_BYTES, Stamp,
};
use rustix::fs::SealFlags;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Silent connections of one user; with two users there are twice as many.
pub const IDLE: usize = 3000;
/// A hostile peer's last claim about an address that belongs to the victim.
pub const LIED: u64 = 7 << 20;

fn alloc(address: u64, bytes: u64) -> Body<'static> {
    Body::AllocEnd { address, bytes, pool: 0, took_us: 1, memory: MemoryKind::Device }
}

fn device(low: u64) -> Vec<u8> {
    let total_bytes = Reading::of(1 << 40);
    let body = Body::Device {
        uuid_high: 0x5100_6d75_1a7e_4d00,
        uuid_low: 0x8000_4750_5500_0000 + low,
        total_bytes,
        ordinal: 0,
        id: DeviceIdKind::Gpu,
        name: "Fake GPU of a hostile peer",
    };
    record(unordered(), body)
}

/// Sends `count` records in packets of nearly the maximum size.
fn flood(peer: &Peer, count: u64, mut say: impl FnMut(u64) -> Vec<u8>) -> bool {
    let mut packet = Vec::new();
    for n in 1..=count {
        let frame = say(n);
        if packet.len() + frame.len() > 60 << 10 && !peer.send(&std::mem::take(&mut packet)) {
            return false;
        }
        packet.extend(frame);
    }
    peer.send(&packet)
}

/// Plays a part. Returns the connections that must stay open.
pub fn played(part: &str, socket: &Path, control: &Path) -> Vec<Peer> {
    let small = Shared::small();
    match part {
        "silent" => {
            let mut limit = getrlimit(Resource::Nofile);
            limit.current = limit.maximum;
            let _ = setrlimit(Resource::Nofile, limit); // what there is
            let peers = (0..IDLE).filter_map(|_| Peer::connect(socket)).collect();
            // Closed connections are reopened after a pause; reconnecting at once is another part.
            std::thread::sleep(Duration::from_secs(1));
            peers
        }
        "half frames" => {
            let whole = hello(small.header.start_ticks);
            for n in 0..400 {
                if let Some(peer) = Peer::connect(socket) {
                    peer.send(&whole[..n % whole.len()]);
                }
            }
            Vec::new()
        }
        "descriptors" => descriptors(socket, &small),
        "allocations" => allocations(socket, &small),
        "names" => names(socket, &small),
        "numbers" => numbers(socket),
        "costly records" => costly(socket, &small),
        "memory" => memory(socket),
        "others' records" => others(socket),
        "hungry segments" => hungry(socket, &small),
        "addresses" => addresses(socket, &small),
        "connects and disconnects" => {
            for _ in 0..400 {
                drop(Peer::welcomed(socket, &small));
            }
            Vec::new()
        }
        "control" => asks(control),
        "holds much" => holds_much(socket, &small),
        "fills" => fills(socket, &small),
        "asks now and then" => asks_now_and_then(control),
        "asks all the time" => asks_all_the_time(control),
        other => panic!("{other}"),
    }
}

fn descriptors(socket: &Path, small: &Shared) -> Vec<Peer> {
    let many: Vec<BorrowedFd<'_>> = vec![small.fd.as_fd(); MOST_FDS];
    for n in 0..60 {
        let Some(peer) = Peer::connect(socket) else { continue };
        match n % 3 {
            0 => _ = peer.send_with(&hello(small.header.start_ticks), &many),
            // Some packets stay unread on the socket until it closes.
            1 => while peer.send_with(b"x", &many[..100]) && peer.hear(0).is_none() {},
            _ => {
                peer.send_with(&hello(small.header.start_ticks), &many[..1]);
                peer.send_with(&record(unordered(), Body::Marker {}), &many);
            }
        }
    }
    // The kernel lets a user have so many under way, which those above may be: one that is surely in and surely sends them.
    let sent = |peer: Peer| peer.send_with(&record(unordered(), Body::Marker {}), &many);
    until(60, "descriptors in the middle", || Peer::welcomed(socket, small).is_some_and(sent).then_some(()));
    // Descriptors of sockets that hold descriptors.
    let (a, b) = UnixStream::pair().expect("a pair");
    if let Some(peer) = Peer::connect(socket) {
        peer.send_with(b"x", &[a.as_fd(), b.as_fd()]);
    }
    Vec::new()
}

fn allocations(socket: &Path, small: &Shared) -> Vec<Peer> {
    let welcomed = || Peer::welcomed(socket, small);
    let peers: Vec<Peer> = (0..3).filter_map(|_| welcomed()).collect();
    let use_as = (Role::Unknown, Phase::Unknown);
    for (n, peer) in peers.iter().enumerate() {
        peer.send(&device(0));
        flood(peer, 120_000, |at| match n {
            0 => record(ordered(at), alloc(at << 21, 1 << 47)),
            1 => record(unordered(), alloc(at << 22, 64)),
            _ => {
                let stamp = Stamp { flags: Flags::RESTATED, ..unordered() };
                record(stamp, Body::BlockAlloc { address: at << 9, bytes: 512, pool: 7, use_as })
            }
        });
    }
    peers
}

fn names(socket: &Path, small: &Shared) -> Vec<Peer> {
    let Some(peer) = Peer::welcomed(socket, small) else { return Vec::new() };
    let long = "\u{202e}../../etc/passwd\t\n<script>\"'".repeat(5);
    let large = "y".repeat(50_000);
    peer.send(&device(0));
    flood(&peer, 60_000, |n| {
        record(Stamp { tag: n as u32, ..unordered() }, Body::Tag { path: &long[..200.min(long.len())] })
    });
    flood(&peer, 1000, |n| {
        record(Stamp { module: n as u16, ..unordered() }, Body::Module { path: &large, base: 0, bytes: 1 })
    });
    flood(&peer, 30_000, |n| record(Stamp { tag: n as u32, ..ordered(n) }, alloc(n << 21, 64)));
    // Devices without limit.
    let more: Vec<Peer> = (0..20).filter_map(|_| Peer::welcomed(socket, small)).collect();
    for (n, peer) in more.iter().enumerate() {
        flood(peer, 200, |at| {
            let mut frame = device(0x1000 + 200 * n as u64 + at);
            frame[4 + 61] = at as u8;
            frame
        });
    }
    vec![peer]
}

fn numbers(socket: &Path) -> Vec<Peer> {
    let lies: [&dyn Fn(u64) -> Vec<u8>; 8] = [
        &|n| record(ordered(u64::MAX - n % 3), alloc(n << 21, 1 << 30)),
        &|n| record(ordered(1 << (n % 64)), alloc(n << 21, 1 << 30)),
        &|n| record(unordered(), Body::Watermark { last_seq: u64::MAX - n, in_flight_since_ns: u64::MAX }),
        &|n| record(ordered(n), Body::Lost { count: u64::MAX, first_seq: u64::MAX }),
        &|n| record(ordered(n), Body::FreeBegin { address: u64::MAX - n }),
        &|n| record(ordered(n), Body::FreeEnd { begin_seq: n ^ 1, result: 0 }),
        &|n| record(ordered(n), Body::Baseline { bytes: u64::MAX - n }),
        &|n| record(Stamp { time_ns: n, ..ordered(n) }, Body::Step { number: u64::MAX - n }),
    ];
    let mut stay = Vec::new();
    for lie in lies {
        // The shared memory and the socket have the same records: unsent ones are read when the socket closes.
        let mut shared = Shared::small();
        shared.header.head_seq = u64::MAX;
        shared.say();
        let Some(peer) = Peer::welcomed(socket, &shared) else { continue };
        peer.send(&device(0));
        flood(&peer, 2000, lie);
        stay.push(peer);
    }
    stay.truncate(2);
    stay
}

/// Sends records that are expensive to process, as many as fit into packets.
fn costly(socket: &Path, small: &Shared) -> Vec<Peer> {
    let Some(peer) = Peer::welcomed(socket, small) else { return Vec::new() };
    peer.send(&device(0));
    flood(&peer, 30_000, |n| record(Stamp { tag: n as u32, ..ordered(n) }, alloc(n << 21, 64)));
    let mut seq = 100_000;
    let mut next = || {
        seq += 1;
        ordered(seq)
    };
    let lost = next();
    peer.send(&record(lost, alloc(1, 1)));
    flood(&peer, 400, |n| {
        // An empty state, sent again and again: each time everything is removed.
        let body = match n % 2 {
            1 => Body::ResyncBegin { epoch: n, after_seq: 0 },
            _ => Body::ResyncEnd { epoch: n, head_seq: u64::MAX, rows: 1 << 40 },
        };
        record(unordered(), body)
    });
    flood(&peer, 400, |n| record(next(), Body::Step { number: n }));
    flood(&peer, 400, |n| {
        record(next(), Body::PhaseBegin { phase: Phase::ALL[n as usize % Phase::ALL.len()] })
    });
    flood(&peer, 400, |_| record(next(), Body::ContextDestroy { scope: DestroyScope::ALL[0] }));
    flood(&peer, 400, |n| record(next(), Body::SegmentAdd { address: n << 12, bytes: 1 << 47, pool: n }));
    flood(&peer, 400, |n| record(next(), Body::SegmentRemove { address: 0, bytes: 1 << 47, pool: n }));
    flood(&peer, 400, |n| {
        let owner = PoolOwner::Framework;
        record(next(), Body::PoolCreate { pool: n, parent: n - 1, reports_blocks: 1, owner })
    });
    flood(&peer, 400, |n| record(next(), Body::Pressure { bytes: n, device_free_bytes: Reading::ABSENT }));
    vec![peer]
}

/// Memory that is rewritten while it is read, truncated, or invalid.
fn memory(socket: &Path) -> Vec<Peer> {
    // Memory that can shrink or grow is refused, as are other descriptors.
    for seals in [SealFlags::empty(), SealFlags::SHRINK, SealFlags::GROW | SealFlags::SEAL, SealFlags::WRITE]
    {
        let weak = Shared::new(16, 8, seals);
        assert!(Peer::welcomed(socket, &weak).is_none(), "{seals:?}");
    }
    let file = std::fs::File::open("/proc/self/exe").expect("a file");
    let peer = Peer::connect(socket).expect("a daemon");
    assert!(peer.send_with(&hello(own_start_ticks()), &[file.as_fd()]) && peer.is_closed(20));
    // The owner cannot truncate accepted memory any more.
    let sealed = Shared::small();
    assert!(rustix::fs::ftruncate(&sealed.fd, 0).is_err(), "sealed");
    // 150,000 rows, and a ring with false positions.
    let mut large = Shared::new(1 << 14, 150_000, SEALS);
    let rows: Vec<u8> = (1..=150_000)
        .flat_map(|n| Shared::slot(Stamp { device: 0, ..ordered(n) }, alloc(n << 21, 64)))
        .collect();
    let live = large.header.live_offset().expect("an offset");
    large.write(&rows, live);
    for head in [u64::MAX, u64::MAX / 2 + 1, 1 << 40, 5] {
        large.header.head_seq = head;
        large.say();
        drop(Peer::welcomed(socket, &large));
    }
    // Huge sparse memory: only its size has a cost.
    let huge = Shared::new(1 << 20, 1 << 20, SEALS);
    drop(Peer::welcomed(socket, &huge));
    // Rewritten while it is read.
    let until_ns = now_ns() + 1_500_000_000;
    std::thread::scope(|scope| {
        let fd = large.fd.as_fd();
        scope.spawn(move || {
            let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
            let mut bytes = [0_u8; 4096];
            while now_ns() < until_ns {
                for byte in &mut bytes {
                    noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    *byte = (noise >> 56) as u8;
                }
                // The header's sizes, the ring and the names; its magic sometimes.
                let at = [24, 48, 4096, 4096 + 9000, live + (noise % 150_000) * SLOT_BYTES as u64]
                    [noise as usize % 5];
                let len = if at < 4096 { 24 } else { bytes.len() };
                let _ = rustix::io::pwrite(fd, &bytes[..len], at);
            }
        });
        while now_ns() < until_ns {
            large.say();
            drop(Peer::welcomed(socket, &large));
        }
    });
    Vec::new()
}

/// Records that only the host, or the victim itself, may send.
fn others(socket: &Path) -> Vec<Peer> {
    let victim: u32 = std::env::var("VICTIM").ok().and_then(|pid| pid.parse().ok()).expect("a victim");
    let shared = Shared::small();
    // The victim's start time in a hello and in the memory: refused, because the kernel reports another pid.
    let peer = Peer::connect(socket).expect("a daemon");
    assert!(peer.send_with(&hello(start_ticks(victim)), &[shared.fd.as_fd()]) && peer.is_closed(20));
    let peer = Peer::welcomed(socket, &shared).expect("its own hello");
    let stamp = Stamp { thread: victim, ..unordered() };
    let ticks = start_ticks(victim);
    let words = [
        Body::ProcessGone { start_ticks: ticks, status: Reading::of(9) },
        Body::ProcessSample {
            start_ticks: ticks,
            used_bytes: Reading::of(1),
            lists: 1,
            absence: gpumem_wire::Absence::ALL[1],
        },
        Body::ProcessFacts {
            start_ticks: ticks,
            uid: Reading::of(u64::from(NOBODY)),
            parent_pid: 1,
            facts: "user=nobody\n",
        },
        Body::ProcessMark { start_ticks: ticks, name: "not mine" },
        Body::AccountedPeak { start_ticks: ticks, peak_bytes: 1 },
        Body::Source { up: false, reason: "gone" },
        Body::ProtectedSample { start_ticks: ticks, protected_bytes: 1 },
        Body::DeviceFault { xid: 79 },
        Body::SampleEnd { number: 1, result: 0 },
    ];
    for body in words {
        peer.send(&record(stamp, body));
    }
    // The victim's addresses, device and thread number: the allocations still count as this process's own.
    peer.send(&device(0));
    for n in 1..=64 {
        let stamp = Stamp { thread: victim, ..ordered(n) };
        peer.send(&record(stamp, alloc(n << 21, 1 << 30)));
        peer.send(&record(stamp, Body::FreeBegin { address: n << 21 }));
    }
    vec![peer]
}

/// Segments that wait for memory at one address, and memory there that is too small for the first: each allocation
/// examines all segments.
fn hungry(socket: &Path, small: &Shared) -> Vec<Peer> {
    let Some(peer) = Peer::welcomed(socket, small) else { return Vec::new() };
    peer.send(&device(0));
    let segment = |n: u64| Body::SegmentAdd { address: n << 21, bytes: 1 << 46, pool: 9 };
    flood(&peer, 2000, |n| record(ordered(n), segment(n)));
    flood(&peer, 400, |n| record(ordered(2000 + n), alloc((2000 + n) << 21, 2 << 20)));
    vec![peer]
}

/// Allocates the victim's address and its own addresses repeatedly without a free in between; and frees the victim's
/// address, which only the victim may.
fn addresses(socket: &Path, small: &Shared) -> Vec<Peer> {
    let address: u64 = std::env::var("ADDRESS").ok().and_then(|text| text.parse().ok()).expect("an address");
    let Some(peer) = Peer::welcomed(socket, small) else { return Vec::new() };
    peer.send(&device(0));
    let mut seq = 0;
    let mut next = || {
        seq += 1;
        ordered(seq)
    };
    flood(&peer, 5000, |n| record(next(), alloc(address, n << 20)));
    flood(&peer, 5000, |_| record(next(), Body::FreeBegin { address }));
    flood(&peer, 5000, |n| record(next(), Body::FreeEnd { begin_seq: 5000 + n, result: 0 }));
    // Parts of the range, its surroundings, and mappings, segments and blocks inside.
    flood(&peer, 5000, |n| record(next(), alloc(address + ((n % 96) << 20), 1 << 30)));
    flood(&peer, 1000, |n| {
        let body = match n % 4 {
            0 => Body::VmmMap { address, bytes: 96 << 20, handle: n },
            1 => Body::VmmUnmap { address, bytes: 96 << 20 },
            2 => Body::SegmentAdd { address, bytes: 96 << 20, pool: 7 },
            _ => {
                Body::BlockAlloc { address, bytes: 1 << 20, pool: 7, use_as: (Role::Unknown, Phase::Unknown) }
            }
        };
        record(next(), body)
    });
    flood(&peer, 5000, |_| record(unordered(), alloc(address, LIED)));
    vec![peer]
}

fn asks(path: &Path) -> Vec<Peer> {
    let ask = |request: &str| {
        let Ok(mut stream) = UnixStream::connect(path) else { return };
        drop(stream.set_read_timeout(Some(Duration::from_secs(20))));
        drop(stream.write_all(request.as_bytes()));
        drop(stream.read_to_end(&mut Vec::new()));
    };
    let silent: Vec<_> = (0..200).filter_map(|_| UnixStream::connect(path).ok()).collect();
    let slow: Vec<_> = silent.iter().map(|mut stream| stream.write_all(b"GET /v1/ps HT")).collect();
    drop((slow, silent));
    ask(&format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(1 << 20)));
    ask(&format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(100_000)));
    ask("POST /v1/nvml/release?for_s=10 HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let began = Instant::now();
                for path in ["/v1/runs", "/v1/doctor", "/v1/ps", "/v1/metrics"].repeat(15) {
                    if began.elapsed() < Duration::from_secs(3) {
                        ask(&format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"));
                    }
                }
            });
        }
    });
    Vec::new()
}

/// Fills every limit: rows, names, and the most expensive records for their size.
fn fills(socket: &Path, small: &Shared) -> Vec<Peer> {
    let peers: Vec<Peer> = (0..2).filter_map(|_| Peer::welcomed(socket, small)).collect();
    let use_as = (Role::Unknown, Phase::Unknown);
    let (long, large) = ("x".repeat(190), "y".repeat(50_000));
    peers.iter().for_each(|peer| _ = peer.send(&device(0)));
    for round in 0..7_u64 {
        for (n, peer) in peers.iter().enumerate() {
            let base = (round * 2 + n as u64) * 100_000;
            flood(peer, 50_000, |at| record(unordered(), alloc((base + at) << 21, 1 << 21)));
            flood(peer, 20_000, |at| {
                let body = Body::BlockAlloc { address: (base + at) << 9, bytes: 512, pool: at % 100, use_as };
                record(unordered(), body)
            });
            flood(peer, 5000, |at| {
                let path = format!("{long}/{}", base + at);
                record(Stamp { tag: (base + at) as u32, ..unordered() }, Body::Tag { path: &path })
            });
            flood(peer, 200, |at| {
                let module = (round * 200 + at) as u16;
                record(Stamp { module, ..unordered() }, Body::Module { path: &large, base: 0, bytes: 1 })
            });
        }
    }
    peers
}

/// Holds many named allocations, which makes replies long.
fn holds_much(socket: &Path, small: &Shared) -> Vec<Peer> {
    let Some(peer) = Peer::welcomed(socket, small) else { return Vec::new() };
    peer.send(&device(0));
    let path = |n: u64| format!("a/name/that/is/not/short/{n}");
    flood(&peer, 2000, |n| record(Stamp { tag: n as u32, ..unordered() }, Body::Tag { path: &path(n) }));
    flood(&peer, 2000, |n| record(Stamp { tag: n as u32, ..ordered(n) }, alloc(n << 21, 64)));
    vec![peer]
}

/// Sends requests continuously, on as many connections as it gets.
fn asks_all_the_time(control: &Path) -> Vec<Peer> {
    for n in 0..15 {
        let control = control.to_owned();
        std::thread::spawn(move || {
            for path in
                ["/v1/runs", "/v1/runs?around=0&within=0", "/v1/metrics", "/v1/doctor"].iter().cycle().skip(n)
            {
                let Ok(mut stream) = UnixStream::connect(&control) else { continue };
                let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
                drop(stream.write_all(request.as_bytes()));
                // Every other one is not read: its reply must not pile up. None spins, because the kernel's scheduling
                // is not under test.
                if n % 2 == 0 {
                    drop(stream.read_to_end(&mut Vec::new()));
                } else {
                    std::thread::sleep(Duration::from_millis(300));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
    }
    Vec::new()
}
