//! One record of every kind. Each field differs from zero and from its neighbours, so that a moved, dropped or swapped field is
//! detected.

use gpumem_wire::layout::Header;
use gpumem_wire::*;

// Eight different bytes in each, so that swapped fields or a changed byte order are visible.
const A: u64 = 0xa1a2_a3a4_a5a6_a7a8;
const B: u64 = 0xb1b2_b3b4_b5b6_b7b8;
const C: u64 = 0xc1c2_c3c4_c5c6_c7c8;
const R: u16 = 0xd1d2;

/// Returns an example of every kind in [`Body::KINDS`], in that order.
pub fn records() -> Vec<Record<'static>> {
    Body::KINDS.iter().map(|&(_, kind)| Record { stamp: stamp(kind), body: body(kind) }).collect()
}

/// Returns a header whose fields all differ, and whose parts fit a file of the corresponding size.
pub fn memfd_header() -> Header {
    Header {
        major: MAJOR,
        minor: MINOR,
        pid: 0x5152_5354,
        start_ticks: A,
        ring_slots: 1 << 15,
        live_rows: 0x0001_2345,
        name_bytes: 0x0054_3210,
        head_seq: B,
        lost: C,
        names_end: 0x0012_3456,
    }
}

fn stamp(kind: u8) -> Stamp {
    Stamp {
        seq: 0x0102_0304_0506_0700 + u64::from(kind),
        time_ns: 0x1112_1314_1516_1718,
        tag: 0x2122_2324,
        stack: 0x3132_3334,
        thread: 0x4142_4344,
        context: 0x5152_5354,
        module: 0x6162,
        device: 0x71,
        flags: Flags(0x81),
    }
}

/// # Panics
/// If the wire format has a kind without an example.
fn body(kind: u8) -> Body<'static> {
    match kind {
        1 => Body::Hello {
            start_ticks: A,
            versions: B,
            capabilities: C,
            instance: 0,
            claims: "rank=3\njob=größe\n",
        },
        2 => Body::ClockAnchor { realtime_ns: A, boottime_ns: B, clock: ClockKind::Wall },
        3 => Body::Device {
            uuid_high: A,
            uuid_low: C,
            total_bytes: Reading::of(B),
            ordinal: R,
            id: DeviceIdKind::Mig,
            name: "NVIDIA A100-SXM4-80GB",
        },
        4 => Body::Tag { path: "model/encoder/φ" },
        5 => Body::Module { base: A, bytes: B, path: "/usr/lib/libcublas.so.12" },
        6 => Body::Stack { format: FrameFormat::Address, frames: &[8, 7, 6, 5, 4, 3, 2, 0xff] },
        7 => Body::Origin { start_ticks: A },
        16 => Body::AllocEnd { address: A, bytes: B, pool: C, took_us: 0, memory: MemoryKind::Managed },
        17 => Body::FreeBegin { address: A },
        18 => Body::FreeEnd { begin_seq: C, result: R },
        19 => Body::AllocFailed {
            bytes: B,
            pool: C,
            device_free_bytes: Reading::of(A),
            result: R,
            memory: MemoryKind::StreamOrdered,
        },
        20 => Body::Import { address: A, bytes: B, source: ImportSource::External },
        21 => Body::Baseline { bytes: B },
        24 => Body::PoolCreate { pool: A, parent: C, reports_blocks: R, owner: PoolOwner::Framework },
        25 => Body::PoolState { pool: A, reserved_bytes: B, used_bytes: C, took_us: 0 },
        26 => Body::PoolDestroy { pool: A },
        27 => Body::PoolCheck { pool: A, total_bytes: B },
        32 => Body::VmmCreate { handle: A, bytes: B, references: R, memory: MemoryKind::HostVmm },
        33 => Body::VmmMap { address: A, bytes: B, handle: C },
        34 => Body::VmmUnmap { address: A, bytes: B },
        35 => Body::VmmRetain { handle: C, address: A },
        36 => Body::VmmRelease { handle: A },
        40 => Body::ContextCreate { handle: A },
        41 => Body::ContextDestroy { scope: DestroyScope::Device },
        48 => Body::SegmentAdd { address: A, bytes: B, pool: C },
        49 => Body::SegmentRemove { address: A, bytes: B, pool: C },
        50 => Body::BlockAlloc { address: A, bytes: B, pool: C, use_as: (Role::Workspace, Phase::Backward) },
        51 => Body::BlockFree { address: A, pool: C, state: FreeState::Pending },
        52 => Body::Retag {
            address: A,
            block_seq: B,
            pool: C,
            use_as: (Role::OptimizerState, Phase::Evaluation),
        },
        53 => Body::PhaseBegin { phase: Phase::Optimizer },
        57 => Body::Pressure { bytes: B, device_free_bytes: Reading::of(A) },
        58 => Body::Oom {
            bytes: B,
            pool_used_bytes: Reading::of(A),
            pool_reserved_bytes: Reading::of(C),
            outcome: OomOutcome::Survived,
            result: R,
        },
        64 => Body::DriverEvent { bytes: B, value: C, event: DriverEventKind::GreenContextCreated },
        72 => Body::Step { number: C },
        73 => Body::Counter { value: -0x0102_0304_0506_0708 },
        74 => Body::Marker {},
        75 => Body::Scope { edge: Edge::End },
        76 => Body::Epoch { number: C },
        80 => Body::Lost { count: B, first_seq: C },
        81 => Body::Watermark { last_seq: C, in_flight_since_ns: B },
        82 => Body::ResyncBegin { epoch: A, after_seq: C },
        83 => Body::ResyncEnd { epoch: A, head_seq: C, rows: B },
        84 => Body::Bye { reason: ByeReason::Requested },
        85 => Body::Agent { result: R, state: AgentState::Blocked, detail: "nsys 2025.1" },
        86 => Body::Layer {
            layer: Layer::Autograd,
            state: LayerState::Degraded,
            reason: "12 of 400 nodes not known",
        },
        88 => Body::Models { models: "Net\tfloat32\t4096\t4096\t0" },
        89 => {
            Body::Keepers { oom_seq: C, keepers: "global\thistory\t\ttrain.py\tlist\t40\t4096\t40\tpartial" }
        }
        87 => Body::Done { result: R, command: 0x71, told: "/tmp/a.gpumem" },
        96 => Body::SampleBegin { number: C },
        97 => Body::DeviceSample {
            used_bytes: B,
            free_bytes: A,
            reserved_bytes: Reading::of(C),
            unified: false,
        },
        98 => Body::ProcessSample {
            start_ticks: A,
            used_bytes: Reading::of(B),
            absence: Absence::WrongNamespace,
            lists: 5,
        },
        99 => Body::SampleEnd { number: C, result: R },
        100 => Body::ProcessFacts {
            start_ticks: A,
            uid: Reading::of(B),
            parent_pid: C,
            facts: "comm=python\ncommand=python train.py\n",
        },
        101 => Body::ProcessGone { start_ticks: A, status: Reading::of(B) },
        102 => Body::Source { up: true, reason: "driver 580.65 reloaded" },
        103 => Body::Tick {},
        104 => Body::AccountedPeak { start_ticks: A, peak_bytes: B },
        105 => Body::DeviceFault { xid: C },
        106 => Body::ProtectedSample { start_ticks: A, protected_bytes: B },
        107 => Body::SameProcesses {},
        108 => Body::ProcessMark { start_ticks: A, name: "warm-up over" },
        109 => Body::EarlierLife { start_ticks: A, events: B, lost: C, instance: 0 },
        112 => Body::Welcome { epoch: A, versions: B, capabilities: C },
        113 => Body::ResyncRequest { epoch: A },
        114 => Body::RecordControl { on: true, path: "" },
        115 => Body::Pause {},
        116 => Body::Resume {},
        117 => Body::Dump { path: "" },
        118 => Body::Ask { what: AskKind::ReportJson, options: "tags=1\n" },
        119 => Body::Answer { result: R, last: true, text: b"{}" },
        other => panic!("record kind {other} has no example: add one above, then run with UPDATE_GOLDEN=1"),
    }
}
