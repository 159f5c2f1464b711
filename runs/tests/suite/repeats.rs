//! Readings that name only the processes whose bytes have changed: all runs are those of readings that name every process.

use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::run::{Run, Source};
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_wire::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const PIDS: u32 = 5;
const DEVICES: u8 = 2;
const MIB: u64 = 1 << 20;
const SIZE: u64 = 100 * MIB;

/// Something that happens on the machine.
#[derive(Debug, Clone)]
enum Op {
    /// A reading of a device. While it lasts, something else may happen.
    Read {
        device: u8,
        end: End,
        meanwhile: Option<Box<Op>>,
    },
    /// A process gets other used bytes on a device, or none (0 MiB).
    Use {
        pid: u32,
        device: u8,
        mib: u64,
    },
    /// An agent connects; it allocates memory, or it cannot watch the driver.
    Agent {
        pid: u32,
        device: u8,
        works: bool,
    },
    Facts(u32),
    Peak {
        pid: u32,
        device: u8,
    },
    /// A process ends; NVML lists it until its bytes are 0.
    End {
        pid: u32,
        status: u64,
    },
    /// The run of a process is closed after its end.
    Forget(u32),
    /// The part of a run ends.
    Roll(u32),
    /// Runs of some processes are made (one bit for each pid).
    Look(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Good,
    /// The device's memory changed while its list was read.
    Moved,
    /// NVML failed.
    Failed,
    /// The poller was lost.
    Missing,
}

fn op() -> impl Strategy<Value = Op> {
    let (pid, device) = (1..=PIDS, 0..DEVICES);
    let other = prop_oneof![
        6 => (pid.clone(), device.clone(), 0..30_u64).prop_map(|(pid, device, mib)| Op::Use { pid, device, mib }),
        1 => (pid.clone(), device.clone(), any::<bool>())
            .prop_map(|(pid, device, works)| Op::Agent { pid, device, works }),
        1 => pid.clone().prop_map(Op::Facts),
        1 => (pid.clone(), device.clone()).prop_map(|(pid, device)| Op::Peak { pid, device }),
        1 => (pid.clone(), 0..2_u64).prop_map(|(pid, status)| Op::End { pid, status }),
        1 => pid.clone().prop_map(Op::Forget),
        1 => pid.prop_map(Op::Roll),
        2 => any::<u8>().prop_map(Op::Look),
    ];
    let end = prop_oneof![
        20 => Just(End::Good), 2 => Just(End::Moved), 1 => Just(End::Failed), 1 => Just(End::Missing)
    ];
    let read = (device, end, prop::option::weighted(0.15, other.clone().prop_map(Box::new)));
    prop_oneof![4 => read.prop_map(|(device, end, meanwhile)| Op::Read { device, end, meanwhile }), 1 => other]
}

struct Machine {
    /// Gets a record of each process in each reading.
    whole: RunBuilder,
    /// Gets records of changed processes only.
    short: RunBuilder,
    now_ns: u64,
    number: u64,
    seq: BTreeMap<u32, u64>,
    used: BTreeMap<(u8, u32), u64>,
    /// Processes and bytes in the last good list of each device.
    listed: BTreeMap<u8, Vec<(u32, u64)>>,
    ended: BTreeSet<u32>,
    forgotten: BTreeSet<u32>,
    /// Number of readings that named fewer processes than they had.
    shortened: usize,
}

fn key(pid: u32) -> ProcessKey {
    ProcessKey { pid, start_ticks: 1 }
}

fn device_of(device: u8) -> Body<'static> {
    Body::Device {
        uuid_high: 7,
        uuid_low: device.into(),
        total_bytes: Reading::of(SIZE),
        ordinal: device.into(),
        id: DeviceIdKind::Gpu,
        name: "GPU",
    }
}

impl Machine {
    fn new() -> Self {
        let builder =
            || RunBuilder::new(Source { kind: "daemon".into(), origin: "test".into(), preset: None });
        let mut machine = Machine {
            whole: builder(),
            short: builder(),
            now_ns: 1_000_000_000,
            number: 0,
            seq: BTreeMap::new(),
            used: (1..=PIDS).map(|pid| ((pid as u8 % DEVICES, pid), u64::from(pid) * MIB)).collect(),
            listed: BTreeMap::new(),
            ended: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            shortened: 0,
        };
        (0..DEVICES).for_each(|device| machine.both(device, 0, device_of(device)));
        machine
    }

    fn both(&mut self, device: u8, pid: u32, body: Body<'_>) {
        let stamp = Stamp { time_ns: self.now_ns, thread: pid, device, ..Stamp::default() };
        for builder in [&mut self.whole, &mut self.short] {
            builder.observe(Origin::Host, &Record { stamp, body });
        }
    }

    fn agent(&mut self, pid: u32, device: u8, body: Body<'_>) {
        let seq = match body {
            Body::AllocEnd { .. } => {
                let seq = self.seq.entry(pid).or_default();
                *seq += 1;
                *seq
            }
            _ => 0,
        };
        let stamp = Stamp { time_ns: self.now_ns, device, seq, ..Stamp::default() };
        for builder in [&mut self.whole, &mut self.short] {
            builder.observe(Origin::Process(key(pid)), &Record { stamp, body });
        }
    }

    fn process_sample(builder: &mut RunBuilder, time_ns: u64, device: u8, (pid, used): (u32, u64)) {
        let stamp = Stamp { time_ns, thread: pid, device, ..Stamp::default() };
        let (used_bytes, absence) = (Reading::of(used), Absence::Unknown);
        let body = Body::ProcessSample { start_ticks: 1, used_bytes, absence, lists: 1 };
        builder.observe(Origin::Host, &Record { stamp, body });
    }

    fn read(&mut self, device: u8, end: End, meanwhile: Option<Op>) {
        self.number += 1;
        let number = self.number;
        let listed: Vec<(u32, u64)> = self
            .used
            .iter()
            .filter(|((on, _), used)| *on == device && **used > 0)
            .map(|(&(_, pid), &used)| (pid, used))
            .collect();
        let sum: u64 = listed.iter().map(|(_, used)| used).sum();
        let memory = |used_bytes: u64| Body::DeviceSample {
            used_bytes,
            free_bytes: SIZE.saturating_sub(used_bytes),
            reserved_bytes: Reading::ABSENT,
            unified: false,
        };
        self.both(device, 0, Body::SampleBegin { number });
        self.both(device, 0, memory(sum));
        let last = self.listed.remove(&device).filter(|last| {
            last.len() == listed.len() && last.iter().zip(&listed).all(|(last, now)| last.0 == now.0)
        });
        self.now_ns += 1_000_000;
        for at in 0..listed.len() {
            let row = listed[at];
            if self.forgotten.contains(&row.0) {
                continue; // the aggregator drops its samples
            }
            Self::process_sample(&mut self.whole, self.now_ns, device, row);
            if last.as_ref().is_none_or(|last| last[at] != row) {
                Self::process_sample(&mut self.short, self.now_ns, device, row);
            }
        }
        if last.is_some() {
            self.shortened += 1;
            let stamp = Stamp { time_ns: self.now_ns, device, ..Stamp::default() };
            self.short.observe(Origin::Host, &Record { stamp, body: Body::SameProcesses {} });
        }
        if let Some(op) = meanwhile {
            self.run(op);
        }
        if end == End::Missing {
            return;
        }
        self.both(device, 0, memory(sum + u64::from(end == End::Moved)));
        self.both(device, 0, Body::SampleEnd { number, result: if end == End::Failed { 999 } else { 0 } });
        if end != End::Failed {
            self.listed.insert(device, listed);
        }
    }

    fn run(&mut self, op: Op) {
        self.now_ns += 20_000_000;
        match op {
            Op::Read { device, end, meanwhile } => self.read(device, end, meanwhile.map(|op| *op)),
            Op::Use { pid, device, mib } if !self.ended.contains(&pid) || mib == 0 => {
                self.used.insert((device, pid), mib * MIB);
            }
            Op::Agent { pid, device, works } if !self.ended.contains(&pid) => {
                self.agent(
                    pid,
                    device,
                    Body::Hello {
                        start_ticks: 1,
                        versions: 1 << 16,
                        capabilities: 0,
                        instance: 1,
                        claims: "",
                    },
                );
                self.agent(pid, device, device_of(device));
                if works {
                    let address = (self.seq.len() as u64 + self.now_ns) << 20;
                    let memory = MemoryKind::Device;
                    self.agent(
                        pid,
                        device,
                        Body::AllocEnd { address, bytes: MIB, pool: 0, took_us: 1, memory },
                    );
                } else {
                    self.agent(
                        pid,
                        device,
                        Body::Agent { result: 39, state: AgentState::Blocked, detail: "" },
                    );
                }
            }
            Op::Facts(pid) if !self.forgotten.contains(&pid) => {
                let (uid, facts) = (Reading::of(1), "comm=a");
                self.both(0, pid, Body::ProcessFacts { start_ticks: 1, uid, parent_pid: 1, facts });
            }
            Op::Peak { pid, device } if !self.forgotten.contains(&pid) => {
                self.both(device, pid, Body::AccountedPeak { start_ticks: 1, peak_bytes: self.now_ns });
            }
            Op::End { pid, status } if self.ended.insert(pid) => {
                self.both(0, pid, Body::ProcessGone { start_ticks: 1, status: Reading::of(status) });
            }
            Op::Forget(pid) if self.ended.contains(&pid) && self.forgotten.insert(pid) => {
                self.compare(|of| of == pid);
                self.whole.forget(key(pid));
                self.short.forget(key(pid));
            }
            Op::Roll(pid) if !self.ended.contains(&pid) => {
                let keys = [key(pid)];
                let [whole, short] =
                    [&mut self.whole, &mut self.short].map(|builder| builder.roll(&keys, self.now_ns));
                assert_eq!(short, whole);
            }
            Op::Look(pids) => self.compare(|pid| pids >> pid & 1 != 0),
            _ => {}
        }
        self.compare_views();
    }

    fn compare(&mut self, wanted: impl Fn(u32) -> bool) {
        let keys: Vec<ProcessKey> = (1..=PIDS).filter(|pid| wanted(*pid)).map(key).collect();
        let [whole, short] = [&mut self.whole, &mut self.short].map(|builder| builder.runs_of(&keys, true));
        assert_eq!(short, whole);
    }

    /// Compares what views show of each process, without making it catch up.
    fn compare_views(&self) {
        let [whole, short] = [&self.whole, &self.short].map(|builder| builder.ledger().snapshot());
        assert_eq!(short.processes.len(), whole.processes.len());
        for (short_process, whole_process) in short.processes.iter().zip(whole.processes.iter()) {
            assert_eq!(short_process.key, whole_process.key);
            let accounts = short_process.accounts.iter().zip(&whole_process.accounts);
            for (at, (short_account, whole_account)) in accounts.enumerate() {
                assert_eq!(short_account.peak_used, whole_account.peak_used);
                for (found, expected) in [
                    (&short_account.latest, &whole_account.latest),
                    (&short_account.complete, &whole_account.complete),
                ] {
                    let shown = found.as_ref().filter(|sample| sample.used_bytes.is_ok());
                    let Some(expected) = expected.as_ref().filter(|sample| sample.used_bytes.is_ok()) else {
                        assert!(shown.is_none());
                        continue;
                    };
                    let shown = shown.expect("a sample");
                    assert_eq!(shown.used_bytes, expected.used_bytes);
                    let is_latest = whole_account.latest.as_ref() == Some(expected);
                    let read_ns = short.read_ns(short_process, short_account, shown);
                    assert!(
                        !is_latest || read_ns == expected.t1_ns,
                        "pid {}, account {at}: {read_ns}",
                        whole_process.key.pid
                    );
                }
            }
        }
        for (short, whole) in short.devices.iter().zip(&whole.devices) {
            assert_eq!((short.agreed, short.latest), (whole.agreed, whole.latest));
        }
    }

    fn runs(&mut self) -> [Vec<Run>; 2] {
        [&mut self.whole, &mut self.short].map(|builder| builder.runs(true))
    }
}

fn cases() -> ProptestConfig {
    let cases =
        if std::env::var_os("PROPTEST_CASES").is_some() { ProptestConfig::default().cases } else { 150 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases())]
    #[test]
    fn short_readings_make_the_same_runs(ops in prop::collection::vec(op(), 1..120)) {
        let mut machine = Machine::new();
        ops.into_iter().for_each(|op| machine.run(op));
        let [whole, short] = machine.runs();
        prop_assert_eq!(short, whole);
    }
}

/// More readings than a device keeps for processes that lag.
#[test]
fn process_that_never_changes_has_all_samples() {
    let mut machine = Machine::new();
    for _ in 0..1000 {
        machine.read(1, End::Good, None);
        machine.now_ns += 1_000_000_000;
    }
    assert_eq!(machine.shortened, 999);
    let [whole, short] = machine.runs();
    assert!(short.iter().any(|run| run.coverage.samples == 1000));
    assert_eq!(short, whole);
}

#[test]
fn short_reading_without_the_one_before_it_has_failed() {
    let mut machine = Machine::new();
    machine.both(0, 0, Body::SampleBegin { number: 1 });
    machine.both(0, 0, Body::SameProcesses {});
    machine.both(0, 0, Body::SampleEnd { number: 1, result: 0 });
    assert_eq!(machine.short.ledger().snapshot().devices[0].agreed, None);
}
