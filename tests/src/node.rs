//! The recording of a small node: one GPU, a process with an agent, one without, and one reading.

use gpumem_ledger::{Origin, ProcessKey};
use gpumem_wire::{
    Absence, Body, ByeReason, ClockKind, DeviceIdKind, DriverEventKind, MemoryKind, Reading, Record, Stamp,
};

/// The process with an agent.
pub const A: ProcessKey = ProcessKey { pid: 41, start_ticks: 7 };
/// The process without an agent.
pub const B: ProcessKey = ProcessKey { pid: 52, start_ticks: 9 };

/// Returns the record of the only GPU, as both origins report it.
pub fn device() -> Body<'static> {
    let total_bytes = Reading::of(80 << 30);
    Body::Device { uuid_high: 1, uuid_low: 2, total_bytes, ordinal: 3, id: DeviceIdKind::Gpu, name: "H100" }
}

/// Returns a daemon's recording of two processes, the second without an agent, and one reading.
pub fn said() -> Vec<(Origin, Record<'static>)> {
    // Times are in tenths of a second.
    let at = |tenths: u64| Stamp { time_ns: tenths * 100_000_000, device: 0, context: 1, ..Stamp::default() };
    let device_record = |tenths: u64| Stamp { context: 0, ..at(tenths) };
    let (host, a) = (Origin::Host, Origin::Process(A));
    let anchor =
        Body::ClockAnchor { realtime_ns: 10_000_000_000, boottime_ns: 0, clock: ClockKind::Monotonic };
    let allocation =
        Body::AllocEnd { address: 4096, bytes: 99 << 20, pool: 0, took_us: 0, memory: MemoryKind::Device };
    let module = Body::DriverEvent { bytes: 11 << 20, value: 1, event: DriverEventKind::ModuleLoaded };
    let used = |mib: u64, start_ticks| Body::ProcessSample {
        start_ticks,
        used_bytes: Reading::of(mib << 20),
        absence: Absence::Unknown,
        lists: 1,
    };
    let memory = Body::DeviceSample {
        used_bytes: 1000 << 20,
        free_bytes: (80 << 30) - (1000 << 20),
        reserved_bytes: Reading::ABSENT,
        unified: false,
    };
    let facts = Body::ProcessFacts {
        start_ticks: A.start_ticks,
        uid: Reading::of(1000),
        parent_pid: 1,
        facts: "command=python train.py\nuser=alice",
    };
    let bodies = [
        (host, at(0), anchor),
        (host, device_record(0), device()),
        (a, device_record(0), device()),
        (host, Stamp { thread: A.pid, ..at(1) }, facts),
        (a, Stamp { tag: 1, ..at(1) }, Body::Tag { path: "model/weights" }),
        (a, Stamp { seq: 1, tag: 1, ..at(2) }, Body::ContextCreate { handle: 1 }),
        (a, Stamp { seq: 2, tag: 1, ..at(3) }, module),
        (a, Stamp { seq: 3, tag: 1, ..at(4) }, allocation),
        (a, at(10), Body::Watermark { last_seq: 3, in_flight_since_ns: 0 }),
        (host, at(10), Body::SampleBegin { number: 1 }),
        (host, at(10), memory),
        (host, Stamp { thread: A.pid, ..at(10) }, used(600, A.start_ticks)),
        (host, Stamp { thread: B.pid, ..at(10) }, used(300, B.start_ticks)),
        (host, at(11), memory),
        (host, at(11), Body::SampleEnd { number: 1, result: 0 }),
        (a, at(20), Body::Bye { reason: ByeReason::Exit }),
        (
            host,
            Stamp { thread: A.pid, ..at(21) },
            Body::ProcessGone { start_ticks: A.start_ticks, status: Reading::of(0) },
        ),
    ];
    bodies.into_iter().map(|(origin, stamp, body)| (origin, Record { stamp, body })).collect()
}
