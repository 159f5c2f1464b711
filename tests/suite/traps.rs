//! Known errors of other tools, with the test for each.
//!
//! | | trap | test |
//! |---|---|---|
//! | 1 | "not available" (2^64-1) shown as bytes, or as 0 | `daemon/tests/suite/nvml.rs: bytes_that_are_not_available_are_absent`, `daemon/tests/suite/metrics.rs: nothing_unknown_is_zero` |
//! | 2 | a process that could not be matched has 0 bytes | `trap_02_process_that_nobody_explains_has_no_zeros` |
//! | 3 | NVML's pids are the host's, in a container nothing matches | `tests/suite/live_ends.rs: process_in_another_namespace_is_matched_with_its_pid` |
//! | 4 | a pid is used again | `trap_04_pid_used_again_is_another_process` |
//! | 5 | twice in the lists counted twice; several GPUs in one row | `daemon/tests/suite/nvml.rs: a_process_that_computes_and_draws_counts_once`, `trap_05_process_on_two_devices_is_two_rows` |
//! | 6 | runtime and driver calls both counted | `trap_06_only_the_driver_is_listened_to` |
//! | 7 | frees counted at entry although they failed, failed allocations counted | `tests/suite/kinds.rs: direct_allocations_large_and_small`, `tests/suite/kinds.rs: blocking_free_that_fails_keeps_its_bytes`, `tests/suite/kinds.rs: failed_allocation_counts_nothing` |
//! | 8 | virtual memory and pools not seen, or freed on unmap alone | `tests/suite/kinds.rs: handle_released_before_it_is_unmapped`, `tests/suite/kinds.rs: handle_unmapped_before_it_is_released`, `tests/suite/kinds.rs: stream_ordered_memory_of_the_default_pool` |
//! | 9 | unsigned subtraction, clamping at 0 | `trap_09_gap_below_zero_stays_below_zero` |
//! | 10 | "memory utilisation" that is bandwidth | `trap_10_no_memory_figure_is_a_utilisation` |
//! | 11 | a "hidden gap" computed from the allocator's own numbers | `trap_11_growth_that_no_call_explains_is_untrackable` |
//! | 12 | addresses, sizes or command lines as labels | `trap_12_labels_are_few_and_bounded`, `daemon/tests/suite/metrics.rs: what_is_folded_adds_up` |
//! | 13 | a pod's name from the environment, which launchers strip | `trap_13_cgroup_is_known_without_any_environment` |
//! | 14 | tags of one thread only: backward threads have none | `trap_14_thread_without_a_name_has_its_process_name` |
//! | 15 | one CUPTI client per process; whole domains enabled | `trap_15_blocked_agent_says_so_and_claims_nothing` |
//! | 16 | unbounded history, a counter of losses that stays 0 | `tests/suite/live.rs: full_ring_loses_history_but_no_state`, `tests/suite/soak.rs: lost_records_are_repaired_by_a_resync` |
//! | 17 | readers that break on a new field | `tests/suite/recordings.rs: kinds_of_a_newer_version_are_skipped_and_counted` |
//! | 18 | process list sized once, a newcomer is an error | `daemon/tests/suite/nvml.rs: lists_that_grow_while_they_are_read_are_whole` |
//! | 19 | MIG: refused, unknown or zero | `daemon/tests/suite/nvml.rs: a_partitioned_gpu_is_its_instances_and_nothing_is_there_twice` |
//! | 20 | machines where device memory cannot be asked for | `trap_20_device_without_a_memory_reading_has_processes` |
//! | 21 | commands that are documented otherwise; sums larger than the card | `tests/suite/tidy.rs: the_documents_show_what_the_program_prints`, `ctl/tests/suite/cli.rs: every_printed_column_adds_up_as_it_is_shown` |
//!
//! And the sizes of gaps that people have reported, as contexts of simulated devices: `gaps_as_seen_in_the_wild`.
use gpumem_ledger::{Ledger, Origin, ProcessKey};
use gpumem_tests::live::prometheus::{free_address, get};
use gpumem_tests::live::{Daemon, Machine, Mixer, until};
use gpumem_wire::{Absence, Body, ClockKind, DeviceIdKind, MemoryKind, Reading, Record, Stamp};
use serde_json::Value;
use std::path::Path;

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
const M: i64 = 1 << 20;

/// Waits until the rows of `gpumemctl ps` for a process satisfy a condition, and returns them.
fn rows(daemon: &Daemon, pid: u32, what: &str, are_so: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    until(30, what, || {
        let ps = daemon.asked("/v1/ps")?;
        let mine =
            ps["processes"].as_array()?.iter().filter(|row| row["pid"] == pid).cloned().collect::<Vec<_>>();
        are_so(&mine).then_some(mine)
    })
}

fn has(row: &Value, flag: &str) -> bool {
    row["flags"].as_array().is_some_and(|flags| flags.iter().any(|one| one == flag))
}

/// Asserts that the sums of a device's report at a moment add up.
fn adds_up(moment: &Value) {
    let number = |name: &str| moment[name].as_i64().unwrap_or_else(|| panic!("{name}: {moment}"));
    let (tracked, untrackable) = (number("tracked_bytes"), number("untrackable_bytes"));
    assert_eq!(number("used_bytes"), number("predates_bytes") + tracked + untrackable, "{moment}");
    let sum = |list: &str| -> i64 {
        moment[list]
            .as_array()
            .expect("a list")
            .iter()
            .map(|part| part["bytes"].as_i64().expect("bytes"))
            .sum()
    };
    assert_eq!(sum("untrackable"), untrackable, "{moment}");
    assert_eq!(sum("cells"), tracked, "{moment}");
    let pools = number("pool_idle_bytes") + number("opaque_bytes");
    assert_eq!(sum("layers") + pools, tracked, "{moment}");
    assert_eq!(sum("structures") + pools, tracked, "{moment}");
}

fn report(machine: &Machine, daemon: &Daemon, pid: u32) -> Value {
    let output =
        daemon.ctl(machine, &["report", &pid.to_string(), "--json"]).output().expect("gpumemctl runs");
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn trap_02_process_that_nobody_explains_has_no_zeros() {
    let machine = Machine::new(&["devices=1"]);
    let address = free_address();
    let daemon = Daemon::start(&machine, "daemon", &format!("{FAST}[metrics]\nlisten = \"{address}\"\n"));
    let mut bare = machine.command(gpumem_tests::live::programs::programs().fake.join("bin/mixer"));
    let mut mixer = Mixer::run(&mut bare);
    mixer.ok("device 0; alloc a 64M");
    let row = rows(&daemon, mixer.pid(), "an uncovered row", |rows| {
        rows.len() == 1 && rows[0]["used_bytes"].as_i64().is_some_and(|used| used > 64 * M)
    });
    assert!(has(&row[0], "uncovered"), "{row:?}");
    for unknown in ["tracked_bytes", "idle_bytes", "untrackable_bytes"] {
        assert!(row[0][unknown].is_null(), "{unknown}: {row:?}");
    }
    let pid = format!("pid=\"{}\"", mixer.pid());
    let text = until(30, "its metrics", || get(address, "/metrics").filter(|text| text.contains(&pid)));
    let of_it: Vec<&str> = text.lines().filter(|line| line.contains(&pid)).collect();
    assert!(of_it.iter().any(|line| line.starts_with("gpumem_process_used_bytes")), "{of_it:?}");
    assert!(!of_it.iter().any(|line| line.contains("tracked") || line.contains("untrackable")), "{of_it:?}");
}

/// A machine made of records: a device, and processes that send records.
struct Script {
    ledger: Ledger,
    time_ns: u64,
}

impl Script {
    fn new() -> Self {
        let mut script = Script { ledger: Ledger::new(), time_ns: 0 };
        script.host(Body::ClockAnchor { realtime_ns: 1, boottime_ns: 1, clock: ClockKind::Monotonic }, 0);
        let total_bytes = Reading::of(80 << 30);
        let name = "a device";
        script.host(
            Body::Device { uuid_high: 1, uuid_low: 2, total_bytes, ordinal: 0, id: DeviceIdKind::Gpu, name },
            0,
        );
        script
    }

    fn stamp(&mut self) -> Stamp {
        self.time_ns += 1000;
        Stamp { time_ns: self.time_ns, ..Stamp::default() }
    }

    fn host(&mut self, body: Body<'_>, pid: u32) {
        let stamp = Stamp { thread: pid, ..self.stamp() };
        self.ledger.observe(Origin::Host, &Record { stamp, body });
    }

    fn says(&mut self, key: ProcessKey, seq: u64, body: Body<'_>) {
        let stamp = Stamp { seq, ..self.stamp() };
        self.ledger.observe(Origin::Process(key), &Record { stamp, body });
    }

    /// A process connects and allocates.
    fn lives(&mut self, key: ProcessKey, bytes: u64) {
        let start_ticks = key.start_ticks;
        self.says(key, 0, Body::Hello { start_ticks, versions: 0, capabilities: 0, instance: 1, claims: "" });
        let (total_bytes, name) = (Reading::of(80 << 30), "a device");
        let id = DeviceIdKind::Gpu;
        self.says(key, 0, Body::Device { uuid_high: 1, uuid_low: 2, total_bytes, ordinal: 0, id, name });
        let memory = MemoryKind::Device;
        self.says(key, 1, Body::AllocEnd { address: 4096, bytes, pool: 0, took_us: 0, memory });
    }
}

#[test]
fn trap_04_pid_used_again_is_another_process() {
    let mut script = Script::new();
    let (old, new) = (ProcessKey { pid: 42, start_ticks: 7 }, ProcessKey { pid: 42, start_ticks: 9 });
    script.lives(old, 1000);
    script.host(Body::ProcessGone { start_ticks: 7, status: Reading::of(0) }, 42);
    script.lives(new, 30);
    let snapshot = script.ledger.snapshot();
    let of = |key: ProcessKey| {
        let process = snapshot.processes.iter().find(|process| process.key == key).expect("known");
        (process.ended.is_some(), process.accounts.iter().map(|account| account.tracked_bytes).sum::<i64>())
    };
    assert_eq!(snapshot.processes.len(), 2);
    assert_eq!((of(old), of(new)), ((true, 1000), (false, 30)));
}

#[test]
fn trap_05_process_on_two_devices_is_two_rows() {
    let machine = Machine::new(&["devices=3"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut mixer = Mixer::start(&machine, &daemon);
    mixer.ok("device 2; alloc a 3M; device 0; alloc b 5M");
    let by_device = |rows: &[Value]| {
        let mut sums: Vec<_> =
            rows.iter().map(|row| (row["device"].as_u64(), row["tracked_bytes"].as_i64())).collect();
        sums.sort();
        sums == [(Some(0), Some(5 * M)), (Some(2), Some(3 * M))]
    };
    rows(&daemon, mixer.pid(), "a row on each of two devices", by_device);
}

#[test]
fn trap_06_only_the_driver_is_listened_to() {
    // Of CUPTI's domains, only selected callbacks of the driver's and of resources and states.
    let cupti = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent-lib/src/sources/cupti");
    let text: String = std::fs::read_dir(cupti)
        .expect("the agent's sources")
        .map(|entry| std::fs::read_to_string(entry.expect("a file").path()).expect("text"))
        .collect();
    assert!(!text.to_ascii_lowercase().contains("runtime_api"), "the runtime's domain");
    assert!(!text.contains("enable_domain"), "a whole domain");
}

#[test]
fn trap_09_gap_below_zero_stays_below_zero() {
    let mut script = Script::new();
    let key = ProcessKey { pid: 42, start_ticks: 7 };
    script.lives(key, 1000);
    script.host(Body::SampleBegin { number: 1 }, 0);
    let (used_bytes, absence) = (Reading::of(400), Absence::Unknown);
    script.host(Body::ProcessSample { start_ticks: 7, used_bytes, absence, lists: 1 }, 42);
    script.host(Body::SampleEnd { number: 1, result: 0 }, 0);
    script.says(key, 0, Body::Watermark { last_seq: 1, in_flight_since_ns: 0 });
    let samples: Vec<_> = script.ledger.take_samples().collect();
    assert_eq!(samples.len(), 1);
    let sample = &samples[0].2;
    assert_eq!((sample.tracked_bytes, sample.untrackable_bytes()), (Some(1000), Some(-600)));
}

#[test]
fn trap_10_no_memory_figure_is_a_utilisation() {
    let metrics = include_str!("../golden/metrics/node.prom").to_ascii_lowercase();
    for word in ["util", "percent", "ratio", "bandwidth"] {
        assert!(!metrics.contains(word), "{word}: bytes are bytes");
    }
    // NVML's `memory` rate is the time in which memory was read or written. Only the rate of kernels is read, and only for devices.
    let machine = Machine::new(&["devices=1", "gpu0.utilization=87"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut mixer = Mixer::start(&machine, &daemon);
    mixer.ok("device 0; alloc a 3M");
    rows(&daemon, mixer.pid(), "a row", |rows| rows.len() == 1);
    until(20, "the rate of kernels", || {
        let ps = daemon.ctl(&machine, &["ps", "--json"]).output().expect("gpumemctl runs");
        let ps = String::from_utf8_lossy(&ps.stdout).into_owned();
        (ps.matches("utilization").count() == 1 && ps.contains("\"utilization_percent\": 87")).then_some(())
    });
}

#[test]
fn trap_11_growth_that_no_call_explains_is_untrackable() {
    let machine = Machine::new(&["devices=1"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut mixer = Mixer::start(&machine, &daemon);
    mixer.ok("device 0; alloc a 4M");
    let gap = |rows: &[Value]| rows.first().and_then(|row| row["untrackable_bytes"].as_i64());
    let of =
        |rows: &[Value]| rows.first().is_some_and(|row| row["tracked_bytes"] == 4 * M) && gap(rows).is_some();
    let before = gap(&rows(&daemon, mixer.pid(), "the allocation", of)).expect("a gap");
    let pid = mixer.pid().to_string();
    machine.tool("grow", &[&pid, "0", &(64 * M).to_string()]);
    let after = rows(&daemon, mixer.pid(), "the growth", |rows| gap(rows).is_some_and(|gap| gap != before));
    assert_eq!(gap(&after), Some(before + 64 * M));
    assert!(of(&after), "and nothing else moved: {after:?}");
}

#[test]
fn trap_12_labels_are_few_and_bounded() {
    let metrics = include_str!("../golden/metrics/node.prom");
    for line in metrics.lines().filter(|line| !line.starts_with('#')) {
        let Some((_, rest)) = line.split_once('{') else { continue };
        let labels = rest.rsplit_once("} ").expect("a value").0;
        for label in labels.split("\",") {
            let (name, value) = label.split_once("=\"").expect("a label");
            let value = value.trim_end_matches('"');
            assert!(
                !name.contains("address") && !name.contains("bytes") && !name.contains("command"),
                "{line}"
            );
            assert!(!value.starts_with("0x"), "an address: {line}");
            let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
            assert!(
                !is_number
                    || ["gpu", "pid", "start", "job_name", "rank", "world_size", "slurm_job", "slurm_step"]
                        .contains(&name),
                "{name}: {line}"
            );
        }
    }
}

#[test]
fn trap_13_cgroup_is_known_without_any_environment() {
    let machine = Machine::new(&["devices=1"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut command = Mixer::command(&machine, &daemon);
    for name in ["HOME", "USER", "PATH", "POD_NAME", "SLURM_JOB_ID"] {
        command.env_remove(name);
    }
    let mut mixer = Mixer::run(&mut command);
    mixer.ok("device 0; alloc a 1M");
    rows(&daemon, mixer.pid(), "a row", |rows| rows.len() == 1);
    let theirs = std::fs::read_to_string(format!("/proc/{}/cgroup", mixer.pid())).expect("it runs");
    let runs = daemon.asked(&format!("/v1/runs?pid={}", mixer.pid())).expect("an answer");
    let ours = runs[0]["process"]["facts"]["cgroup"]
        .as_str()
        .unwrap_or_else(|| panic!("no cgroup: {}", runs[0]["process"]["facts"]));
    let paths = || theirs.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let longest = paths().map(str::len).max();
    let unified = theirs.lines().find_map(|line| line.strip_prefix("0::")).filter(|path| path.len() > 1);
    assert!(paths().any(|path| path == ours), "{ours} in {theirs}");
    assert!(
        unified.is_none_or(|path| path == ours) && (unified.is_some() || Some(ours.len()) == longest),
        "{ours}"
    );
}

#[test]
fn trap_14_thread_without_a_name_has_its_process_name() {
    let machine = Machine::new(&["devices=1"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut mixer = Mixer::start(&machine, &daemon);
    mixer.ok("device 0; process-tag model/backward; later alloc a 6M");
    assert_eq!(mixer.say("join").result, 0);
    rows(&daemon, mixer.pid(), "the allocation", |rows| {
        rows.first().is_some_and(|row| row["tracked_bytes"] == 6 * M && row["untrackable_bytes"].is_i64())
    });
    let document = report(&machine, &daemon, mixer.pid());
    let last = &document["devices"][0]["last"];
    adds_up(last);
    let cells = last["cells"].as_array().expect("cells");
    assert_eq!(
        (cells.len(), &cells[0]["tag"], &cells[0]["bytes"]),
        (1, &"model/backward".into(), &(6 * M).into())
    );
}

#[test]
fn trap_15_blocked_agent_says_so_and_claims_nothing() {
    let machine = Machine::new(&["devices=1"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut command = Mixer::command(&machine, &daemon);
    command.env("GPUMEM_SIM_CUPTI", "subscribe:39");
    let mut mixer = Mixer::run(&mut command);
    mixer.ok("device 0; alloc a 6M; free a; alloc b 2M");
    let row = rows(&daemon, mixer.pid(), "a blocked row", |rows| {
        rows.first().is_some_and(|row| has(row, "blocked") && row["used_bytes"].is_i64())
    });
    assert!(row[0]["tracked_bytes"].is_null() && row[0]["untrackable_bytes"].is_null(), "{row:?}");
    // No subscribed call is on the path of a launch.
    let table = include_str!("../../agent-lib/src/sources/cupti/table.rs");
    for call in ["cuLaunchKernel", "cuGraphLaunch", "cuMemcpy", "cuEventRecord", "cuStreamSynchronize"] {
        assert!(!table.contains(call), "{call}");
    }
}

#[test]
fn trap_20_device_without_a_memory_reading_has_processes() {
    let machine = Machine::new(&["devices=1", "fault_memory=unknown"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut mixer = Mixer::start(&machine, &daemon);
    mixer.ok("device 0; alloc a 6M");
    rows(&daemon, mixer.pid(), "a whole row", |rows| {
        rows.first().is_some_and(|row| row["tracked_bytes"] == 6 * M && row["used_bytes"].is_i64())
    });
    let ps = daemon.asked("/v1/ps").expect("an answer");
    let device = &ps["devices"][0];
    assert!(device["used_bytes"].is_null() && device["free_bytes"].is_null(), "{device}");
    assert!(device["unaccounted_bytes"].is_null(), "{device}");
    assert!(device["why"].is_string(), "{device}");
}

/// Sizes of contexts, from reported differences between a tracker and the driver, in bytes.
const GAPS: [u64; 15] = [
    155_189_248,   // HAMi #1623
    266_338_304,   // HAMi #555
    300_000_000,   // lazy loading, pytorch #107667
    1_100_000_000, // before it
    1214 << 20,    // HAMi #952
    878 << 20,     // HAMi #446
    544_000_000,   // NCCL, a process group: nccl #964
    688_000_000,
    1_060_000_000, // NCCL at the first all-to-all: nccl #1685
    4_340_000_000,
    1_922_000_000, // vLLM without torch, TP1: vllm #10511
    3_844_000_000, // TP2
    171_798_691,   // vllm #12126
    645 << 20,     // MXNet 2.0
    460 << 20,     // TBD logs
];

#[test]
fn gaps_as_seen_in_the_wild() {
    let contexts: Vec<String> =
        GAPS.iter().enumerate().map(|(device, bytes)| format!("gpu{device}.context={bytes}")).collect();
    let devices = format!("devices={}", GAPS.len());
    let keys: Vec<&str> =
        std::iter::once(devices.as_str()).chain(contexts.iter().map(String::as_str)).collect();
    let machine = Machine::new(&keys);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut mixer = Mixer::start(&machine, &daemon);
    // Odd sizes, so that there is rounding too.
    let tracked = |device: usize| 3 * M + device as i64 * 100_003 + 700;
    for device in 0..GAPS.len() {
        mixer.ok(&format!(
            "device {device}; tag model; alloc a{device} {}; alloc b{device} 700",
            tracked(device) - 700
        ));
    }
    // A large allocation takes whole granules of 2 MiB, the small one shares one.
    let rounding = |device: usize| {
        let large = tracked(device) - 700;
        (large + 2 * M - 1) / (2 * M) * (2 * M) - large + 2 * M - 700
    };
    let untrackable = |device: usize| GAPS[device] as i64 + rounding(device);
    rows(&daemon, mixer.pid(), "every device", |rows| {
        rows.len() == GAPS.len()
            && rows.iter().all(|row| {
                let device = row["device"].as_u64().unwrap_or(99) as usize;
                row["tracked_bytes"] == tracked(device)
                    && row["untrackable_bytes"] == untrackable(device)
                    && row["used_bytes"] == tracked(device) + untrackable(device)
            })
    });
    let document = report(&machine, &daemon, mixer.pid());
    let devices = document["devices"].as_array().expect("devices");
    assert_eq!(devices.len(), GAPS.len());
    for device in devices {
        let ordinal = device["ordinal"].as_u64().expect("an ordinal") as usize;
        let last = &device["last"];
        adds_up(last);
        assert_eq!(last["tracked_bytes"], tracked(ordinal), "{ordinal}");
        assert_eq!(last["untrackable_bytes"], untrackable(ordinal), "{ordinal}");
    }
}

/// Every test in the table above must exist.
#[test]
fn every_trap_has_its_test() {
    let (root, text) = (Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), include_str!("traps.rs"));
    let table: Vec<&str> = text.lines().filter(|line| line.starts_with("//! | ")).skip(1).collect();
    let numbers: Vec<_> =
        table.iter().filter_map(|line| line.split('|').nth(1)?.trim().parse::<u32>().ok()).collect();
    assert_eq!(numbers, (1..=21).collect::<Vec<_>>());
    for line in table {
        let tests = line.split('|').nth(3).expect("three columns");
        let mut count = 0;
        for name in tests.split('`').skip(1).step_by(2) {
            let (file, name) = name.rsplit_once(": ").unwrap_or(("tests/suite/traps.rs", name));
            let source =
                std::fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
            let at = source.find(&format!("fn {name}(")).unwrap_or_else(|| panic!("{file} has no {name}"));
            let above = source[..at].trim_end_matches("async ").lines().last().unwrap_or("");
            let attribute = source[..at].rfind("test]").map(|test| &source[test..at]);
            assert!(
                attribute.is_some_and(|between| between.lines().count() <= 4),
                "{file}: {name} is not a test: {above}"
            );
            count += 1;
        }
        assert!(count > 0, "{line}");
    }
}
