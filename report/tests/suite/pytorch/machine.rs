//! The machine of EXAMPLES: a training process on an H100, and a process of another user.

use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::run::{Run, Source};
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_wire::*;

pub const MIB: u64 = 1 << 20;
pub const SECOND: u64 = 1_000_000_000;
pub const PID: u32 = 41_873;
pub const POOL: u64 = 0x707;
const BOB: u32 = 52_110;
const TOTAL: u64 = 81_559 * MIB;
const SYSTEM: u64 = 623 * MIB;

pub struct Machine {
    builder: RunBuilder,
    pub seq: u64,
    pub time_ns: u64,
    pub stamp: Stamp,
    address: u64,
    /// Address of the pool's next block.
    block: u64,
    bob: u64,
}

impl Machine {
    pub fn new() -> Self {
        let source = Source { kind: "daemon".into(), origin: "node7".into(), preset: None };
        let stamp = Stamp { device: 0, context: 1, ..Stamp::default() };
        let mut machine = Machine {
            builder: RunBuilder::new(source),
            seq: 0,
            time_ns: SECOND,
            stamp,
            address: 1 << 40,
            block: 0,
            bob: 3_310 * MIB,
        };
        let device = Body::Device {
            uuid_high: 0,
            uuid_low: 3,
            total_bytes: Reading::of(TOTAL),
            ordinal: 3,
            id: DeviceIdKind::Gpu,
            name: "",
        };
        machine
            .host(0, Body::ClockAnchor { realtime_ns: SECOND, boottime_ns: 0, clock: ClockKind::Monotonic });
        machine.host(0, device);
        machine.control(device);
        for (pid, facts) in [(PID, "user=alice\ncomm=python\ncommand=python train.py"), (BOB, "user=bob")] {
            machine.host(
                pid,
                Body::ProcessFacts { start_ticks: 1, uid: Reading::of(pid.into()), parent_pid: 1, facts },
            );
        }
        for (tag, path) in [
            (1, "torch"),
            (2, "GPT/h.0/mlp"),
            (3, "GPT/h.1/attn"),
            (4, "GPT/h.1/attn"),
            (5, "GPT/h.1/mlp/up_proj"),
        ] {
            machine.push(Stamp { tag, ..Stamp::default() }, Body::Tag { path });
        }
        machine
    }

    fn push(&mut self, stamp: Stamp, body: Body<'_>) {
        let key = ProcessKey { pid: PID, start_ticks: 1 };
        self.builder.observe(Origin::Process(key), &Record { stamp, body });
    }

    pub fn host(&mut self, pid: u32, body: Body<'_>) {
        let stamp = Stamp { time_ns: self.time_ns, thread: pid, device: 0, ..Stamp::default() };
        self.builder.observe(Origin::Host, &Record { stamp, body });
    }

    pub fn control(&mut self, body: Body<'_>) {
        self.push(Stamp { time_ns: self.time_ns, ..self.stamp }, body);
    }

    pub fn say(&mut self, body: Body<'_>) {
        (self.seq, self.time_ns) = (self.seq + 1, self.time_ns + 1_000);
        let stamp = Stamp { seq: self.seq, time_ns: self.time_ns, ..self.stamp };
        self.push(stamp, body);
        self.stamp.tag = 0;
    }

    /// Sets the tag of the next ordered record.
    pub fn tag(&mut self, tag: u32) {
        self.stamp.tag = tag;
    }

    pub fn module(&mut self, module: u16, path: &str) {
        self.push(Stamp { module, ..Stamp::default() }, Body::Module { base: 0, bytes: 1, path });
    }

    pub fn layer(&mut self, layer: Layer, state: LayerState, reason: &str) {
        self.control(Body::Layer { layer, state, reason });
    }

    pub fn alloc(&mut self, bytes: u64, pool: u64) -> u64 {
        let address = self.address;
        self.address += bytes + (1 << 30);
        self.say(Body::AllocEnd { address, bytes, pool, took_us: 0, memory: MemoryKind::Device });
        address
    }

    pub fn pool(&mut self) {
        self.tag(1);
        self.say(Body::PoolCreate { pool: POOL, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework });
    }

    /// Allocates a segment of PyTorch's pool; its blocks are contiguous.
    pub fn segment(&mut self, bytes: u64) {
        self.block = self.alloc(bytes, POOL);
    }

    pub fn block(&mut self, tag: u32, mib: u64, role: Role) -> u64 {
        let address = self.block;
        self.block += mib * MIB;
        self.tag(tag);
        self.say(Body::BlockAlloc { address, bytes: mib * MIB, pool: POOL, use_as: (role, Phase::Unknown) });
        address
    }

    pub fn sample(&mut self, own: u64) {
        let number = self.time_ns;
        let used = own + self.bob + 64 * MIB;
        let memory = Body::DeviceSample {
            used_bytes: used,
            free_bytes: TOTAL.saturating_sub(SYSTEM + used),
            reserved_bytes: Reading::of(SYSTEM),
            unified: false,
        };
        self.host(0, Body::SampleBegin { number });
        self.host(0, memory);
        for (pid, used) in [(PID, own), (BOB, self.bob)] {
            let used_bytes = Reading::of(used);
            let absence = Absence::Unknown;
            self.host(pid, Body::ProcessSample { start_ticks: 1, used_bytes, absence, lists: 1 });
        }
        self.host(0, memory);
        self.host(0, Body::SampleEnd { number, result: 0 });
        self.time_ns += 1_000;
        self.control(Body::Watermark { last_seq: self.seq, in_flight_since_ns: 0 });
    }

    /// The state of EXAMPLES: 60,006 MiB of blocks in 68,654 of segments, NCCL's memory, and 71,204 used.
    pub fn train(&mut self) {
        self.layer(Layer::Blocks, LayerState::Active, "");
        self.layer(Layer::ModulePath, LayerState::Active, "");
        self.module(1, "/usr/lib/libnccl.so.2");
        self.pool();
        for (tag, mib, role) in [
            (3, 13_476, Role::Parameter),
            (4, 13_476, Role::Gradient),
            (2, 26_952, Role::OptimizerState),
            (2, 5_120, Role::Activation),
            (2, 768, Role::Workspace),
            (2, 214, Role::Unknown),
        ] {
            self.segment(mib * MIB);
            self.block(tag, mib, role);
        }
        self.segment(100 * MIB);
        let address = self.block(2, 100, Role::Temporary);
        self.say(Body::BlockFree { address, pool: POOL, state: FreeState::Pending });
        self.segment(8_548 * MIB);
        self.stamp.module = 1;
        self.alloc(1_264 * MIB, 0);
        self.stamp.module = 0;
        self.control(Body::Step { number: 18_221 });
        self.control(Body::PhaseBegin { phase: Phase::Forward });
        self.time_ns = 140 * SECOND;
        self.sample(71_204 * MIB);
    }

    pub fn refuse(&mut self, bytes: u64, free: u64) {
        let device_free_bytes = Reading::of(free);
        self.tag(5);
        self.say(Body::AllocFailed {
            bytes,
            pool: 0,
            device_free_bytes,
            result: 2,
            memory: MemoryKind::Device,
        });
    }

    /// A minute after [`Machine::train`], both processes have grown. The driver refuses memory twice, PyTorch gives up, and the
    /// process ends.
    pub fn run_out(&mut self) {
        self.time_ns = 141 * SECOND;
        self.sample(71_204 * MIB);
        self.bob += 3_334 * MIB;
        self.segment(1_922 * MIB);
        self.time_ns = 200 * SECOND;
        self.sample(73_126 * MIB);
        self.push(
            Stamp { stack: 9, ..Stamp::default() },
            Body::Stack {
                format: FrameFormat::Text,
                frames: b"linear\t/x/site-packages/torch/nn/functional.py\t10\nforward\t/home/alice/train.py\t212",
            },
        );
        self.time_ns = 201 * SECOND;
        self.refuse(2_048 * MIB, 1_102 * MIB);
        self.refuse(2_048 * MIB, 1_102 * MIB);
        (self.stamp.tag, self.stamp.stack) = (5, 9);
        let (pool_used_bytes, pool_reserved_bytes) = (Reading::of(60_006 * MIB), Reading::of(70_576 * MIB));
        let outcome = OomOutcome::Fatal;
        self.say(Body::Oom { bytes: 2_048 * MIB, pool_used_bytes, pool_reserved_bytes, outcome, result: 2 });
        self.stamp.stack = 0;
        self.time_ns += 800_000_000;
        self.host(PID, Body::ProcessGone { start_ticks: 1, status: Reading::of(256) });
    }

    pub fn run(&mut self) -> Run {
        self.builder.runs(true).into_iter().find(|run| run.process.pid == PID).expect("the run")
    }
}
