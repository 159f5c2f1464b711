//! Peers that do their worst on the agent socket and on the control socket, beside an honest program: it is heard as before, to
//! the byte; the daemon stays small, closes what it was given, and says whom it refused and why.
#![allow(missing_docs)]

use gpumem_tests::live::hostile::{
    MOST_FDS, NOBODY, Peer, SEALS, Shared, hello, now_ns, ordered, own_start_ticks, part, play, record,
    say_and_stay, start_ticks, unordered,
};
use gpumem_tests::live::{Daemon, Job, Machine, Mixer, crowd, until};
use gpumem_wire::{
    Body, DestroyScope, DeviceIdKind, Flags, MemoryKind, Phase, PoolOwner, Reading, Role, SLOT_BYTES, Stamp,
};
use rustix::fs::SealFlags;
use serde_json::Value;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Of the daemon, whatever anybody does: what it may remember (below), and the rest of it.
const MOST_RSS_MIB: u64 = 128;
const CONFIG: &str = "[agent]\nmemory_mib = 48\nmemory_mib_per_uid = 24\nconnections_per_uid = 256\n\
                      connections_without_hello = 128\n[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n\
                      [metrics]\nlisten = \"off\"\n";

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
        name: "Fake GPU of a liar",
    };
    record(unordered(), body)
}

/// So many records as packets of nearly the largest size.
fn flood(peer: &Peer, count: u64, mut say: impl FnMut(u64) -> Vec<u8>) -> bool {
    let mut packet = Vec::new();
    for n in 1..=count {
        packet.extend(say(n));
        if packet.len() > 59 << 10 || n == count {
            if !peer.send(&packet) {
                return false;
            }
            packet.clear();
        }
    }
    true
}

/// Everything that a peer does here is done by a process of its own, of a user who has nothing.
#[test]
fn as_somebody_else() {
    let Some(part) = part() else { return };
    let path = |name: &str| PathBuf::from(std::env::var_os(name).unwrap_or_default());
    let socket = path("SOCKET");
    let small = Shared::small();
    let stays: Vec<Peer> = match part.as_str() {
        "says nothing" => (0..600).filter_map(|_| Peer::connect(&socket)).collect(),
        "half frames" => {
            let whole = hello(small.header.start_ticks);
            for n in 0..400 {
                if let Some(peer) = Peer::connect(&socket) {
                    peer.send(&whole[..n % whole.len()]);
                }
            }
            Vec::new()
        }
        "descriptors" => descriptors(&socket, &small),
        "allocations" => allocations(&socket, &small),
        "names" => names(&socket, &small),
        "numbers" => numbers(&socket),
        "costly words" => costly(&socket, &small),
        "memory" => memory(&socket),
        "others' words" => others(&socket),
        "comings and goings" => {
            for _ in 0..400 {
                drop(Peer::welcomed(&socket, &small));
            }
            Vec::new()
        }
        "control" => control(&path("CONTROL")),
        "holds much" => holds_much(&socket, &small),
        "asks all the time" => asks_all_the_time(&path("CONTROL")),
        other => panic!("{other}"),
    };
    println!("\n{} stay", stays.len());
    say_and_stay("done");
}

fn descriptors(socket: &Path, small: &Shared) -> Vec<Peer> {
    let many: Vec<BorrowedFd<'_>> = vec![small.fd.as_fd(); MOST_FDS];
    for n in 0..60 {
        let Some(peer) = Peer::connect(socket) else { continue };
        match n % 3 {
            0 => _ = peer.send_with(&hello(small.header.start_ticks), &many),
            // Some that nobody takes off the socket before it is closed.
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
    // Devices without end.
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
        // The memory says what the socket says: what was not sent is read when it is closed.
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

/// Words that make much work, as many as fit into packets.
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
        // A state that is said again and again, with nothing in it: everything goes each time.
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

/// Memory that is rewritten while it is read, that is cut, or that is not what it should be.
fn memory(socket: &Path) -> Vec<Peer> {
    // What can shrink or grow is not taken; neither is what is no memory at all.
    for seals in [SealFlags::empty(), SealFlags::SHRINK, SealFlags::GROW | SealFlags::SEAL, SealFlags::WRITE]
    {
        let weak = Shared::new(16, 8, seals);
        assert!(Peer::welcomed(socket, &weak).is_none(), "{seals:?}");
    }
    let file = std::fs::File::open("/proc/self/exe").expect("a file");
    let peer = Peer::connect(socket).expect("a daemon");
    assert!(peer.send_with(&hello(own_start_ticks()), &[file.as_fd()]) && peer.is_closed(20));
    // What is taken cannot be cut by its owner any more.
    let sealed = Shared::small();
    assert!(rustix::fs::ftruncate(&sealed.fd, 0).is_err(), "sealed");
    // 150,000 rows of nothing else, and a ring of lies.
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
    // A huge one, full of holes: only its size costs.
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

/// What only the host, or the victim itself, may say.
fn others(socket: &Path) -> Vec<Peer> {
    let victim: u32 = std::env::var("VICTIM").ok().and_then(|pid| pid.parse().ok()).expect("a victim");
    let shared = Shared::small();
    // Its start time, in a hello and in the memory: refused, because the kernel says another pid.
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
        Body::DeviceFault { xid: 79 },
        Body::SampleEnd { number: 1, result: 0 },
    ];
    for body in words {
        peer.send(&record(stamp, body));
    }
    // Its addresses, on its device, with its thread: they are this process's own all the same.
    peer.send(&device(0));
    for n in 1..=64 {
        let stamp = Stamp { thread: victim, ..ordered(n) };
        peer.send(&record(stamp, alloc(n << 21, 1 << 30)));
        peer.send(&record(stamp, Body::FreeBegin { address: n << 21 }));
    }
    vec![peer]
}

fn control(path: &Path) -> Vec<Peer> {
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

/// Something that makes answers long.
fn holds_much(socket: &Path, small: &Shared) -> Vec<Peer> {
    let Some(peer) = Peer::welcomed(socket, small) else { return Vec::new() };
    peer.send(&device(0));
    let path = |n: u64| format!("a/name/that/is/not/short/{n}");
    flood(&peer, 2000, |n| record(Stamp { tag: n as u32, ..unordered() }, Body::Tag { path: &path(n) }));
    flood(&peer, 2000, |n| record(Stamp { tag: n as u32, ..ordered(n) }, alloc(n << 21, 64)));
    vec![peer]
}

/// On as many connections as it gets.
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
                // Every other one is not read: what was made for it must not pile up. None of them spins: whom the kernel gives
                // the processors is not the daemon's.
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

/// The honest program, and how the daemon is.
struct Scene {
    machine: Machine,
    daemon: Daemon,
    mixer: Mixer,
    held: u64,
}

impl Scene {
    fn new() -> Self {
        let machine = Machine::new(&["devices=1", "memory=64G"]);
        let daemon = Daemon::start(&machine, "daemon", CONFIG);
        let mut mixer = Mixer::start(&machine, &daemon);
        mixer.ok("device 0; tag honest; alloc first 96M");
        let mut scene = Scene { machine, daemon, mixer, held: 96 * MIB };
        scene.is_exact("at the beginning");
        scene
    }

    fn status(&self, key: &str) -> u64 {
        let text =
            std::fs::read_to_string(format!("/proc/{}/status", self.daemon.job.pid())).expect("it lives");
        let line = text.lines().find_map(|line| line.strip_prefix(key)).expect("a line");
        line.split_whitespace().nth(0).and_then(|word| word.parse().ok()).expect("a number")
    }

    /// What it has had of a processor.
    fn cpu(&self) -> Duration {
        let path = format!("/proc/{}/stat", self.daemon.job.pid());
        let stat = std::fs::read_to_string(path).expect("it lives");
        let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_ascii_whitespace().collect();
        let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().expect("a number")).sum();
        Duration::from_millis(ticks * 10)
    }

    /// How long an answer takes that is for somebody else: the middle of many, asked for in so much time.
    fn answer_time(&self, time: Duration) -> Duration {
        let (began, mut times) = (Instant::now(), Vec::new());
        while began.elapsed() < time {
            let asked = Instant::now();
            self.daemon.asked("/v1/ps").expect("an answer");
            times.push(asked.elapsed());
            std::thread::sleep(Duration::from_millis(10));
        }
        times.sort();
        times[times.len() / 2]
    }

    fn fds(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.daemon.job.pid())).expect("it lives").count()
    }

    fn metric(&self, series: &str) -> f64 {
        let text = self.daemon.asked("/v1/metrics").expect("metrics");
        let text = text.as_str().expect("a text");
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {series}"))
    }

    fn row(&self, pid: u32) -> Option<Value> {
        let ps = self.daemon.asked("/v1/ps")?;
        ps["processes"].as_array()?.iter().find(|row| row["pid"] == pid).cloned()
    }

    fn doctor(&self, arguments: &[&str]) -> String {
        let output =
            self.daemon.ctl(&self.machine, &[&["doctor"], arguments].concat()).output().expect("it runs");
        String::from_utf8_lossy(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// What the daemon shows of the honest program is what the machine holds, to the byte.
    fn is_exact(&mut self, when: &str) {
        let pid = self.mixer.pid();
        until(60, &format!("the honest program as it is {when}"), || {
            let row = self.row(pid)?;
            let truths = self.machine.latest_truth();
            let truth = truths.iter().rev().find(|truth| truth.pid == pid && !truth.is_end())?;
            let flags = row["flags"].as_array()?;
            let is_well = flags.iter().all(|flag| flag == "covered");
            let is_so = truth.tracked == self.held as i64
                && row["tracked_bytes"] == truth.tracked
                && row["used_bytes"] == truth.used;
            (is_well && is_so).then_some(())
        });
    }

    /// Whose process it is, and root, see that it is not to be believed.
    fn is_marked(&self, pid: u32, part: &str) {
        let doctor = self.doctor(&[&pid.to_string()]);
        let marks = ["process.limit", "process.odd", "process.lost"];
        assert!(marks.iter().any(|mark| doctor.contains(mark)), "{part}: {doctor}");
        // One that holds nothing, because all of its share went into names, is in no list.
        if let Some(row) = self.row(pid).filter(|row| row["tracked_bytes"] != 0) {
            let flags = row["flags"].as_array().expect("flags");
            assert!(flags.iter().any(|flag| flag == "partial"), "{part}: {row}");
        }
    }

    /// From an allocation to its being shown: the middle of several.
    fn latency(&mut self) -> Duration {
        let mut times = Vec::new();
        for n in 0..9 {
            let began = Instant::now();
            self.mixer.ok(&format!("alloc l{n} 1M"));
            self.held += MIB;
            let pid = self.mixer.pid();
            until(60, "an allocation to be shown", || {
                self.row(pid).filter(|row| row["tracked_bytes"] == self.held).map(drop)
            });
            times.push(began.elapsed());
        }
        for n in 0..9 {
            self.mixer.ok(&format!("free l{n}"));
        }
        self.held -= 9 * MIB;
        times.sort();
        times[4]
    }

    fn play(&self, part: &str) -> Job {
        let (agents, control) =
            (self.daemon.runtime.join("agent.sock"), self.daemon.runtime.join("control.sock"));
        let victim = self.mixer.pid().to_string();
        let environment: [(&str, &OsStr); 3] =
            [("SOCKET", agents.as_ref()), ("CONTROL", control.as_ref()), ("VICTIM", victim.as_ref())];
        play(NOBODY, part, &environment)
    }
}

#[test]
fn whatever_peers_do_others_are_served_and_the_daemon_stays_small() {
    let mut scene = Scene::new();
    let quiet = scene.latency();
    let fds = scene.fds();
    for part in [
        "says nothing",
        "half frames",
        "descriptors",
        "allocations",
        "names",
        "numbers",
        "costly words",
        "memory",
        "others' words",
        "comings and goings",
        "control",
    ] {
        if std::env::var("GPUMEM_PART").is_ok_and(|only| only != part) {
            continue;
        }
        let began = Instant::now();
        let mut liars: Vec<Job> = (0..2).map(|_| scene.play(part)).collect();
        let busy = scene.latency();
        for liar in &mut liars {
            liar.wait_for("done");
        }
        let took = began.elapsed();
        scene.is_exact(part);
        let (now, most) = (scene.status("VmRSS:") >> 10, scene.status("VmHWM:") >> 10);
        println!(
            "{part}: {took:?}, latency {quiet:?} -> {busy:?}, RSS {now} MiB, at most {most} MiB, fds {}",
            scene.fds()
        );
        assert!(most <= MOST_RSS_MIB, "{part}: {most} MiB");
        // Others than these may want the processors, and then everything takes so much longer.
        let crowd = crowd();
        let most = (2 * quiet + Duration::from_millis(50)).mul_f64(crowd);
        assert!(busy < most, "{part}: {quiet:?}, then {busy:?}, in a crowd of {crowd}");
        if ["allocations", "names", "numbers"].contains(&part) {
            scene.is_marked(liars[0].pid(), part);
        }
        drop(liars);
        until(60, "the descriptors to be closed", || (scene.fds() <= fds + 2).then_some(()));
    }
    scene.is_exact("at the end");
    if std::env::var_os("GPUMEM_PART").is_some() {
        return;
    }
    // Each refusal has its count, and what a person can do about it.
    for (family, reason) in [
        ("agent_refused", "connections_without_hello"),
        ("agent_refused", "no_hello"),
        ("agent_refused", "descriptors"),
        ("agent_refused", "memory"),
        ("agent_refused", "identity"),
        ("agent_dropped", "descriptors"),
        ("ledger_refused_records", "memory_mib_per_uid"),
        ("agent_records_skipped", "not_for_agents"),
        ("control_refused", "connections_per_uid"),
    ] {
        let series = format!("gpumemd_{family}_total{{reason=\"{reason}\"}}");
        assert!(scene.metric(&series) > 0.0, "{series}");
    }
    let doctor = scene.doctor(&[]);
    for words in
        ["agent.connections_without_hello", "agent.memory_mib_per_uid", "control.connections_per_uid"]
    {
        assert!(doctor.contains(&format!("raise {words}")), "{words}: {doctor}");
    }
    let log = std::fs::metadata(scene.machine.dir.join("daemon.log")).expect("a log").len();
    assert!(log < MIB, "what is said of one user's peers does not fill the log: {log} bytes");
}

#[test]
fn who_asks_all_the_time_has_a_share_of_the_processor_and_others_are_answered_as_before() {
    const TIME: Duration = Duration::from_secs(3);
    let scene = Scene::new();
    let mut holds = scene.play("holds much");
    holds.wait_for("done");
    let measured = || {
        let before = scene.cpu();
        let time = scene.answer_time(TIME);
        (time, scene.cpu() - before)
    };
    let (quiet, idle) = measured();
    let _liar = scene.play("asks all the time");
    let waited = "gpumemd_control_waited_total";
    until(60, "the liar to be kept waiting", || (scene.metric(waited) > 0.0).then_some(()));
    let (busy, with) = measured();
    println!(
        "answers in {quiet:?}, then {busy:?}; of the processor {idle:?}, then {with:?}; {} waited, RSS at most {} MiB",
        scene.metric(waited),
        scene.status("VmHWM:") >> 10
    );
    // A fifth of the time, and what may be taken at once.
    let most = idle + TIME.mul_f64(0.2) + Duration::from_millis(100);
    assert!(with < most.mul_f64(1.25), "{with:?} of the processor, {most:?} are their share");
    assert!(busy < 2 * quiet + Duration::from_millis(5).mul_f64(crowd()), "{quiet:?}, then {busy:?}");
    assert!(scene.status("VmHWM:") >> 10 <= MOST_RSS_MIB);
    assert!(scene.doctor(&[]).contains("raise control.share_per_uid"), "{}", scene.doctor(&[]));
}
