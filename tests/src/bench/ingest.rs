//! From the agent socket into the ledger: 1 million live rows, 1,000 tags, pairs of a free of a random row and an
//! allocation, in packets of 60 KiB as agents send them, into a real gpumemd that records nothing.
//!
//! The floor receives the same packets from a socket of the same kind on a separate thread, decodes them and keeps one
//! map and one sum for each tag. Packets are made beforehand; sending uses its own core. Wall time ends when the
//! daemon's count of records includes the last one. One or two scrapes detect that, and their cost is in the daemon's
//! figures.

use super::cost::{cpu, cpu_of_thread, now_ns, resident_mib};
use super::node::{Node, machine, uuids};
use super::peer::{Peer, packed};
use super::rounds::{Contestant, Per, print_table};
use super::traffic::{Floor, ROWS, Stream, TAGS, Traffic, tag_name};
use gpumem_model::run::{Class, Run};
use gpumem_wire::frame;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

const PAIRS_PER_ROUND: usize = 200_000;
const ROUNDS: usize = 9;
const RECORDS: &str = "gpumemd_records_total";

/// The bare loop, on its own thread.
struct Bare {
    socket: OwnedFd,
    /// CPU time, sent after each run of this many events.
    done: Receiver<Duration>,
    expect: Sender<usize>,
    thread: std::thread::JoinHandle<Floor>,
}

impl Bare {
    fn start() -> Self {
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("sockets");
        let (tell, done) = channel();
        let (expect, expected) = channel();
        let thread = std::thread::spawn(move || take(&pair.1, &expected, &tell));
        Bare { socket: pair.0, done, expect, thread }
    }

    /// Sends these events and returns its CPU time.
    fn feed(&self, events: usize, packets: &[Vec<u8>]) -> Duration {
        self.expect.send(events).expect("a thread");
        for packet in packets {
            assert_eq!(send(&self.socket, packet, SendFlags::NOSIGNAL), Ok(packet.len()));
        }
        self.done.recv().expect("a thread")
    }
}

fn take(socket: &OwnedFd, expected: &Receiver<usize>, tell: &Sender<Duration>) -> Floor {
    let mut floor = Floor::new();
    let mut buffer = vec![0; 64 << 10];
    while let Ok(mut left) = expected.recv() {
        let before = cpu_of_thread();
        while left > 0 {
            let (bytes, _) = recv(socket, &mut buffer, RecvFlags::empty()).expect("a packet");
            for record in frame::records(&buffer[..bytes]) {
                floor.apply(&record.expect("whole frames").expect("known kinds"));
                left -= 1;
            }
        }
        tell.send(cpu_of_thread() - before).expect("the receiver counts");
    }
    floor
}

/// The daemon, with this process as its agent.
struct Real {
    node: Node,
    peer: Peer,
}

impl Real {
    /// Sends these events and returns the elapsed time and the CPU time.
    fn feed(&self, events: usize, packets: &[Vec<u8>]) -> (Duration, Duration) {
        // Host records count too: a few dozen in a round of hundreds of thousands.
        let target = self.node.number(RECORDS) + events as u64;
        let (start, before) = (Instant::now(), cpu(self.node.pid()));
        packets.iter().for_each(|packet| self.peer.send(packet));
        while self.node.number(RECORDS) < target {
            assert!(start.elapsed().as_secs() < 60, "records are missing");
        }
        (start.elapsed(), cpu(self.node.pid()) - before)
    }
}

/// Returns live bytes by tag, and idle bytes, from a run.
fn live(run: &Run) -> (Vec<i64>, i64) {
    let ids: HashMap<String, usize> = (1..=TAGS).map(|tag| (tag_name(tag), tag as usize)).collect();
    let (mut sums, mut idle) = (vec![0; TAGS as usize + 1], 0);
    for &(cell, bytes) in run.devices.iter().flat_map(|device| &device.last.amounts) {
        let cell = &run.cells[cell as usize];
        match cell.class {
            Class::PoolIdle => idle += bytes,
            _ => sums[cell.tag.as_deref().and_then(|tag| ids.get(tag).copied()).unwrap_or(0)] += bytes,
        }
    }
    (sums, idle)
}

/// Checks that the run's sums are the floor's, and that no record was lost or odd.
fn is_right(run: &Run, floor: &Floor, events: u64, segment: Option<u64>) -> Result<(), String> {
    let (sums, idle) = live(run);
    let expected: i64 = floor.sums.iter().sum();
    let coverage = &run.coverage;
    let counts = (coverage.events, coverage.lost, coverage.odd, coverage.rejected);
    let say =
        |what: &str| Err(format!("{what}: {counts:?}, {} bytes of {expected}", sums.iter().sum::<i64>()));
    match () {
        () if counts != (events, 0, 0, 0) => say("events, lost, odd, rejected"),
        () if coverage.partial_state || coverage.partial_history => say("partial"),
        () if sums != floor.sums => say("bytes per tag"),
        () if segment.is_some_and(|bytes| idle + expected != bytes as i64) => say("idle bytes"),
        () => Ok(()),
    }
}

fn measure(stream: Stream, title: &str) {
    let machine = machine(1);
    let uuid = uuids(&machine).remove(0);
    let pid = std::process::id();
    machine.tool("hold", &[&pid.to_string(), "0", "1073741824"]);
    let node = Node::start(&machine, "");
    let peer = Peer::connect(&node.runtime.join("agent.sock"), &uuid, TAGS);
    let real = Real { node, peer };
    let bare = Bare::start();
    let mut traffic = Traffic::new(stream, ROWS, TAGS);
    traffic.time_ns = now_ns();
    let events = traffic.fill();
    let packets = packed(&events);
    bare.feed(events.len(), &packets);
    real.feed(events.len(), &packets);
    drop((events, packets));

    let names = ["gpumemd, by the clock", "floor, by the clock"];
    let [mut clock, mut clock_floor] = names.map(Contestant::new);
    let [mut used, mut used_floor] = ["gpumemd, CPU time", "floor, CPU time"].map(Contestant::new);
    for round in 0..ROUNDS {
        // Times increase, and are never in the future when they are sent.
        traffic.time_ns = traffic.time_ns.max(now_ns());
        let events = traffic.round(PAIRS_PER_ROUND);
        let packets = packed(&events);
        real.peer.watermark(traffic.seq - events.len() as u64);
        for turn in [round % 2, 1 - round % 2] {
            if turn == 0 {
                let (time, cpu) = real.feed(events.len(), &packets);
                clock.took(events.len(), time);
                used.took(events.len(), cpu);
            } else {
                let start = Instant::now();
                used_floor.took(events.len(), bare.feed(events.len(), &packets));
                clock_floor.took(events.len(), start.elapsed());
            }
        }
    }
    let all = [&mut clock, &mut clock_floor, &mut used, &mut used_floor];
    all.into_iter().for_each(|contestant| contestant.forget_warm_up());
    print_table(title, Per::Event, &[&clock, &clock_floor]);
    print_table("CPU time of the daemon, of the floor's thread", Per::Event, &[&used, &used_floor]);

    drop(bare.expect);
    let floor = bare.thread.join().expect("no panic");
    let segment = (stream == Stream::Blocks).then(|| traffic.segment_bytes());
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        real.peer.watermark(traffic.seq);
        let runs = real.node.runs(pid);
        assert_eq!(runs.len(), 1, "one run of this process");
        match is_right(&runs[0], &floor, traffic.seq, segment) {
            Ok(()) => break,
            Err(why) => assert!(Instant::now() < deadline, "{why}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(real.node.number("gpumemd_agent_dropped_total"), 0);
    assert_eq!(real.node.number("gpumemd_agent_records_skipped_total"), 0);
    println!(
        "resident after {} events: {:.0} MiB with {ROWS} live rows\n",
        traffic.seq,
        resident_mib(real.node.pid())
    );
}

/// Runs both streams.
pub fn run() {
    measure(Stream::Driver, "driver allocations: FreeBegin, FreeEnd, AllocEnd");
    measure(Stream::Blocks, "framework blocks: BlockFree, BlockAlloc in one pool with one segment");
    println!("target: 5 million events/s of one core (CPU time of 200 ns each), nothing dropped");
    println!(
        "end states checked over the control socket: every sum per tag equals the floor's, nothing lost or odd\n"
    );
}
