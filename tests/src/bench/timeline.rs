//! Cost of timelines for a daemon: 64 processes with 2,000 tags each, once with full timelines, and once with a single point
//! because all events have the same time. An idle process costs nothing either way, because points are made by events.

use super::rounds::{Contestant, Per, print_table};
use gpumem_ledger::{Ledger, MAX_POINTS, Origin, ProcessKey};
use gpumem_wire::{Body, DeviceIdKind, MemoryKind, Reading, Record, Stamp};

const PROCESSES: u32 = 64;
const TAGS: u32 = 2_000;
const ROUNDS: usize = 5;
/// Events of each process in a round.
const EVENTS: u64 = 4_000;

/// Processes with memory under each of their tags.
struct Node {
    ledger: Ledger,
    seq: u64,
    /// Time between two events.
    step_ns: u64,
}

impl Node {
    fn new(step_ns: u64) -> Self {
        let mut node = Node { ledger: Ledger::new(), seq: 0, step_ns };
        for pid in 1..=PROCESSES {
            let device = Body::Device {
                uuid_high: 1,
                uuid_low: 2,
                total_bytes: Reading::of(80 << 30),
                ordinal: 0,
                id: DeviceIdKind::Gpu,
                name: "bench",
            };
            node.say(pid, Stamp::default(), device);
            for tag in 1..=TAGS {
                let path = format!("model/layers.{}/part.{}", tag / 10, tag % 10);
                node.say(pid, Stamp { tag, ..Stamp::default() }, Body::Tag { path: &path });
            }
        }
        let seq = node.seq;
        for pid in 1..=PROCESSES {
            node.seq = seq;
            (0..u64::from(TAGS)).for_each(|slot| node.take(pid, slot));
        }
        node
    }

    fn say(&mut self, pid: u32, stamp: Stamp, body: Body<'_>) {
        let process = ProcessKey { pid, start_ticks: 1 };
        self.ledger.observe(Origin::Process(process), &Record { stamp, body });
    }

    fn next(&mut self, tag: u32) -> Stamp {
        self.seq += 1;
        Stamp { seq: self.seq, time_ns: 1_000_000_000 + self.seq * self.step_ns, tag, ..Stamp::default() }
    }

    fn take(&mut self, pid: u32, slot: u64) {
        let stamp = self.next(slot as u32 % TAGS + 1);
        let (address, memory) = ((slot + 1) << 30, MemoryKind::Device);
        self.say(
            pid,
            stamp,
            Body::AllocEnd { address, bytes: (slot % 97 + 1) << 12, pool: 0, took_us: 0, memory },
        );
    }

    /// Frees and reallocates one slot after another.
    fn round(&mut self) {
        let seq = self.seq;
        for pid in 1..=PROCESSES {
            self.seq = seq;
            for slot in (0..EVENTS / 3).map(|event| event % u64::from(TAGS)) {
                let stamp = self.next(0);
                self.say(pid, stamp, Body::FreeBegin { address: (slot + 1) << 30 });
                let end = self.next(0);
                self.say(pid, end, Body::FreeEnd { begin_seq: stamp.seq, result: 0 });
                self.take(pid, slot);
            }
        }
    }

    fn points(&self) -> usize {
        let of = |pid| self.ledger.timeline(ProcessKey { pid, start_ticks: 1 }, 0).points.len();
        (1..=PROCESSES).map(of).sum()
    }
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

pub fn run() {
    let mut sizes = Vec::new();
    // All events of one moment give one point; 20 ms apart they fill the timelines.
    let mut made = [("one moment each", 0), ("full timelines", 20_000_000)].map(|(name, step_ns)| {
        let before = resident_bytes();
        let mut node = Node::new(step_ns);
        node.round();
        sizes.push(resident_bytes().saturating_sub(before));
        (Contestant::new(name), node)
    });
    for _ in 0..=ROUNDS {
        for (contestant, node) in &mut made {
            contestant.round(EVENTS as usize / 3 * 3 * PROCESSES as usize, || node.round());
        }
    }
    let [without, with] = [made[0].1.points(), made[1].1.points()];
    println!(
        "{PROCESSES} processes with {TAGS} tags: {without} points, {with} points of at most {MAX_POINTS} each"
    );
    let mut contestants = made.map(|(contestant, _)| contestant);
    contestants.iter_mut().for_each(Contestant::forget_warm_up);
    print_table("one event", Per::Event, &contestants.iter().rev().collect::<Vec<_>>());
    let [without, with] = sizes[..] else { return };
    println!("resident: {:.1} MiB, with full timelines {:.1} MiB\n", mib(without), mib(with));
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
