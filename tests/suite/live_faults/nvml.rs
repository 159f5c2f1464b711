//! Effect of a faulty GPU on the other GPUs' figures, and on scrapers.

use super::family;
use gpumem_ledger::Origin;
use gpumem_runs::builder::Sink;
use gpumem_runs::input::Input;
use gpumem_runs::recording;
use gpumem_test_support::ProcessorWait;
use gpumem_tests::live::prometheus::{free_address, get};
use gpumem_tests::live::{Daemon, Job, Machine, replay, until};
use gpumem_wire::{Body, DriverEventKind, Record};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

fn of_gpu(text: &str, name: &str, gpu: &str) -> Option<(String, f64)> {
    family(text, name).into_iter().find(|(labels, _)| labels.contains(&format!("gpu=\"{gpu}\"")))
}

struct Node {
    machine: Machine,
    daemon: Daemon,
    address: SocketAddr,
    jobs: Vec<Job>,
}

impl Node {
    /// Two devices, a covered process on each.
    fn new() -> Self {
        let machine = Machine::new(&["devices=2"]);
        let address = free_address();
        let config = format!(
            "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\ncall_timeout_s = 0.5\nhang_retry_s = 1.0\n[metrics]\nlisten = \"{address}\"\n"
        );
        let daemon = Daemon::start(&machine, "daemon", &config);
        let train = |device| {
            let arguments = ["--devices", device, "--steps", "5", "--hold", "600"];
            let mut job = Job::start(&mut machine.trainer(&daemon.runtime, &arguments));
            job.wait_for("holding");
            job
        };
        let jobs = vec![train("0"), train("1")];
        let node = Node { machine, daemon, address, jobs };
        node.until("both processes", |text| family(text, "gpumem_process_untrackable_bytes").len() == 2);
        node
    }

    /// Scrapes until a condition holds. No scrape may take long.
    fn until(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        until(30, what, || {
            let since = Instant::now();
            let text = get(self.address, "/metrics").expect("an exposition");
            let took = since.elapsed();
            gpumem_test_support::bar(
                &format!("a scrape while waiting for {what}"),
                took,
                Duration::from_millis(500),
            );
            is_so(&text).then_some(text)
        })
    }

    /// Waits until samples of the other device and its process are fresh.
    fn other_is_fresh(&self) {
        self.until("the other device fresh", |text| {
            let fresh = |name| of_gpu(text, name, "1").is_some_and(|(_, age)| age < 2.0);
            let pid = format!("pid=\"{}\"", self.jobs[1].pid());
            fresh("gpumem_device_sample_age_seconds")
                && fresh("gpumem_process_sample_age_seconds")
                && family(text, "gpumem_process_used_bytes").iter().any(|(labels, _)| labels.contains(&pid))
        });
    }

    /// Waits until no fault is reported.
    fn until_well(&self) {
        self.until("everything well again", |text| {
            family(text, "gpumem_process_untrackable_bytes").len() == 2
                && family(text, "gpumem_device_unavailable").is_empty()
                && family(text, "gpumem_process_used_unavailable").is_empty()
        });
    }
}

#[test]
fn failing_device_has_a_reason_and_the_other_continues() {
    let node = Node::new();
    // Fault, metric that reports it, words of the reason.
    for (fault, told_by, words) in [
        ("lost", "gpumem_device_unavailable", "lost"),
        ("no_permission", "gpumem_process_used_unavailable", "permission"),
        ("bytes_unavailable", "gpumem_process_used_unavailable", "not available"),
        ("unknown", "gpumem_device_unavailable", ""),
        ("hang", "gpumem_device_unavailable", "return"),
    ] {
        // Permissions and missing bytes concern the lists; device memory can still be read.
        let lists_only = told_by.contains("process") || fault == "unknown";
        let key = if lists_only { "gpu0.fault_list" } else { "gpu0.fault" };
        node.machine.set(&[&format!("{key}={fault}")]);
        let pid = format!("pid=\"{}\"", node.jobs[0].pid());
        let text = node.until(&format!("{fault} reported, and unknown values absent"), |text| {
            let used = family(text, "gpumem_process_used_bytes");
            of_gpu(text, told_by, "0").is_some() && !used.iter().any(|(labels, _)| labels.contains(&pid))
        });
        let (labels, _) = of_gpu(&text, told_by, "0").expect("it was there");
        println!("{fault}: {labels}");
        let reason = labels.split("reason=\"").nth(1).unwrap_or("").replace('_', " ");
        assert!(reason.contains(words), "{fault}: {labels}");
        if lists_only {
            let memory = of_gpu(&text, "gpumem_device_used_bytes", "0");
            assert!(memory.is_some(), "{fault}: device memory is read as ever");
        }
        node.other_is_fresh();
        node.machine.set(&[&format!("{key}=none")]);
        node.until_well();
    }
}

/// What a scrape says about a device, and when it was made: between these two times.
struct Look {
    began: Instant,
    ended: Instant,
    /// Age of each GPU's last reading.
    ages: [Option<f64>; 2],
    is_hung: bool,
}

/// The first hang: no agent is connected, so nothing but the views' own clock makes readings older.
#[test]
fn healthy_gpu_is_fresh_and_ages_are_true_while_another_hangs() {
    let machine = Machine::new(&["devices=2"]);
    let address = free_address();
    let config = format!(
        "[nvml]\nmemory_hz = 10\ncall_timeout_s = 5.0\nhang_retry_s = 1.0\n[metrics]\nlisten = \"{address}\"\n"
    );
    let _daemon = Daemon::start(&machine, "daemon", &config);
    let look = || {
        let began = Instant::now();
        let text = get(address, "/metrics").expect("an exposition");
        let age = |gpu| of_gpu(&text, "gpumem_device_sample_age_seconds", gpu).map(|(_, age)| age);
        let is_hung = of_gpu(&text, "gpumem_device_unavailable", "0").is_some();
        let hangs = text.lines().find_map(|line| line.strip_prefix("gpumemd_nvml_hangs_total "));
        let hangs = hangs.and_then(|count| count.parse::<f64>().ok()).unwrap_or(0.0);
        (Look { began, ended: Instant::now(), ages: ["0", "1"].map(age), is_hung }, hangs)
    };
    until(20, "both GPUs", || look().0.ages.iter().all(Option::is_some).then_some(()));
    let waits = ProcessorWait::measure();
    machine.set(&["gpu0.fault_open=hang", "gpu0.fault=hang"]);
    let mut looks = Vec::new();
    until(60, "the call to be given up", || {
        let (look, hangs) = look();
        looks.push(look);
        (hangs >= 1.0).then_some(())
    });
    // A second and two periods; each step on the way to the next reading may wait for a processor.
    let most = 1.0 + 2.0 / 10.0 + 8.0 * waits.longest().as_secs_f64();
    let oldest = looks.iter().map(|look| look.ages[1].expect("the healthy GPU is always shown"));
    let oldest = oldest.fold(0.0, f64::max);
    println!("{} looks, the oldest reading of the healthy GPU {oldest:.3} s of {most:.3} s", looks.len());
    assert!(oldest <= most, "{oldest} of {most} s");
    // Without a new reading, a reading ages as fast as time passes.
    let pairs = looks.windows(2).filter(|pair| pair[0].is_hung && pair[1].is_hung);
    let grown = pairs.filter_map(|pair| {
        let grown = pair[1].ages[0]? - pair[0].ages[0]?;
        let least = pair[1].began.saturating_duration_since(pair[0].ended).as_secs_f64();
        let most = pair[1].ended.duration_since(pair[0].began).as_secs_f64();
        assert!((least - 0.001..=most + 0.001).contains(&grown), "{least} to {most} s: {grown}");
        Some(grown)
    });
    let grown: Vec<f64> = grown.collect();
    println!("the age of the other one grew {} times, by {:.3} s", grown.len(), grown.iter().sum::<f64>());
    assert!(!grown.is_empty(), "its last reading was shown while it hung");
}

#[test]
fn source_is_down_while_its_only_gpu_hangs() {
    let machine = Machine::new(&["devices=1"]);
    let address = free_address();
    let config =
        format!("[nvml]\ncall_timeout_s = 5.0\nhang_retry_s = 1.0\n[metrics]\nlisten = \"{address}\"\n");
    let daemon = Daemon::start(&machine, "daemon", &config);
    let source = |text: &str| {
        let all = family(text, "gpumemd_source_up");
        all.into_iter().find(|(labels, _)| labels.contains("nvml")).map(|(_, up)| up)
    };
    let is_read = |text: &str| of_gpu(text, "gpumem_device_sample_age_seconds", "0").is_some();
    let scrape = || get(address, "/metrics").expect("an exposition");
    until(20, "a source that is up", || {
        Some(scrape()).filter(|text| source(text) == Some(1.0) && is_read(text))
    });
    machine.set(&["gpu0.fault=hang"]);
    until(20, "a source that is down", || Some(scrape()).filter(|text| source(text) == Some(0.0)));
    until(20, "doctor's reason", || {
        let is_it = |of: &&[String; 3]| of[0] == "nvml" && of[1].contains("has not returned");
        doctor(&daemon, &machine).iter().find(is_it).map(|_| ())
    });
    // It stays down when the call has been given up: still no GPU is read.
    let hangs = |text: &str| {
        let count = text.lines().find_map(|line| line.strip_prefix("gpumemd_nvml_hangs_total "));
        count.and_then(|count| count.parse::<f64>().ok()).unwrap_or(0.0)
    };
    until(60, "two calls that were given up", || {
        let text = scrape();
        assert_eq!(source(&text), Some(0.0), "{text}");
        assert!(!is_read(&text) || hangs(&text) == 0.0, "{text}");
        (hangs(&text) >= 2.0).then_some(())
    });
    machine.set(&["gpu0.fault=none"]);
    until(60, "a source that is up again", || {
        Some(scrape()).filter(|text| source(text) == Some(1.0) && is_read(text))
    });
}

#[test]
fn driver_installed_later_is_found() {
    let machine = Machine::new(&["devices=1", "nvml.driver=absent"]);
    let address = free_address();
    let _daemon = Daemon::start(&machine, "daemon", &format!("[metrics]\nlisten = \"{address}\"\n"));
    let up = || {
        let text = get(address, "/metrics").expect("an exposition");
        family(&text, "gpumemd_source_up")
            .into_iter()
            .find(|(labels, _)| labels.contains("nvml"))
            .map(|(_, up)| up)
    };
    until(10, "a source that is down", || up().filter(|up| *up == 0.0));
    machine.set(&["nvml.driver=ok"]);
    until(60, "a source that is up", || up().filter(|up| *up == 1.0));
}

/// NVML's codes, each with a part of the expected reason and of the expected remedy.
const CODES: [(u32, &str, &str); 16] = [
    (1, "not initialised", "opens the library again"),
    (2, "invalid argument", "MIG partition"),
    (3, "not supported", "another branch"),
    (4, "no permission", "/dev/nvidiactl"),
    (6, "not found", "MIG partition"),
    (7, "kept growing", "gpumemd retries"),
    (9, "not loaded", "modprobe nvidia"),
    (10, "timeout", "NVRM"),
    (15, "lost", "Xid"),
    (16, "needs a reset", "--gpu-reset"),
    (18, "different versions", "reload the nvidia modules"),
    (19, "in use", "exclusively"),
    (25, "version mismatch", "same driver release"),
    (27, "not ready", "starting"),
    (28, "GPU not found", "was removed"),
    (999, "unknown error", "Xid"),
];

fn is_of_library(code: u32) -> bool {
    matches!(code, 1 | 9 | 18)
}

/// Doctor's findings: subject, text and remedy.
fn doctor(daemon: &Daemon, machine: &Machine) -> Vec<[String; 3]> {
    let output = daemon.ctl(machine, &["doctor", "--json"]).output().expect("gpumemctl runs");
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let findings = document["findings"].as_array().expect("findings").iter();
    let text = |of: &serde_json::Value, name: &str| of[name].as_str().unwrap_or("").to_owned();
    findings.map(|of| ["subject", "text", "fix"].map(|name| text(of, name))).collect()
}

#[test]
fn every_gpu_error_is_in_metrics_and_doctor_and_recovers() {
    let codes: Vec<_> = CODES.into_iter().filter(|(code, ..)| !is_of_library(*code)).collect();
    let well = codes.len();
    let machine = Machine::new(&[&format!("devices={}", well + 1)]);
    let address = free_address();
    let config =
        format!("[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n[metrics]\nlisten = \"{address}\"\n");
    let daemon = Daemon::start(&machine, "daemon", &config);
    let text = || get(address, "/metrics").expect("an exposition");
    until(20, "all devices", || {
        (family(&text(), "gpumem_device_used_bytes").len() == well + 1).then_some(())
    });
    let faults = codes.iter().enumerate().map(|(gpu, (code, ..))| format!("gpu{gpu}.fault=code:{code}"));
    let faults: Vec<String> = faults.collect();
    machine.set(&faults.iter().map(String::as_str).collect::<Vec<_>>());
    until(30, "each reason, and no numbers", || {
        let text = text();
        let reported = codes.iter().enumerate().all(|(gpu, (_, reason, _))| {
            let gpu = gpu.to_string();
            of_gpu(&text, "gpumem_device_unavailable", &gpu)
                .is_some_and(|(labels, _)| labels.contains(reason))
                && of_gpu(&text, "gpumem_device_used_bytes", &gpu).is_none()
        });
        reported.then_some(())
    });
    let exposition = text();
    assert!(of_gpu(&exposition, "gpumem_device_unavailable", &well.to_string()).is_none());
    assert!(of_gpu(&exposition, "gpumem_device_used_bytes", &well.to_string()).is_some());
    let findings = doctor(&daemon, &machine);
    for (gpu, (code, reason, remedy)) in codes.iter().enumerate() {
        let is_it = |of: &&[String; 3]| of[0].starts_with(&format!("GPU {gpu} ")) && of[1].contains(reason);
        let finding = findings.iter().find(is_it);
        assert!(finding.is_some_and(|of| of[2].contains(remedy)), "{code}: {finding:?} of {findings:#?}");
    }
    machine.set(&["fault=none"]);
    until(60, "all well again", || {
        let text = text();
        let is_well = family(&text, "gpumem_device_unavailable").is_empty();
        (is_well && family(&text, "gpumem_device_used_bytes").len() == well + 1).then_some(())
    });
    assert_eq!(
        family(&text(), "gpumemd_source_up").iter().find(|(of, _)| of.contains("nvml")).map(|(_, up)| *up),
        Some(1.0)
    );
}

#[test]
fn every_library_error_is_in_metrics_and_doctor_and_recovers() {
    for (code, reason, remedy) in CODES.into_iter().filter(|(code, ..)| is_of_library(*code)) {
        let machine = Machine::new(&["devices=2"]);
        let address = free_address();
        let config = format!("[nvml]\nlist_every_s = 0.1\n[metrics]\nlisten = \"{address}\"\n");
        let daemon = Daemon::start(&machine, "daemon", &config);
        let up = || {
            let text = get(address, "/metrics").expect("an exposition");
            family(&text, "gpumemd_source_up")
                .into_iter()
                .find(|(of, _)| of.contains("nvml"))
                .map(|(_, up)| up)
        };
        until(20, "a source that is up", || up().filter(|up| *up == 1.0));
        machine.set(&[&format!("fault=code:{code}"), &format!("nvml.driver=code:{code}")]);
        until(20, &format!("{code}: a source that is down"), || up().filter(|up| *up == 0.0));
        until(20, &format!("{code}: its reason and remedy"), || {
            let is_it =
                |of: &&[String; 3]| of[0] == "nvml" && of[1].contains(reason) && of[2].contains(remedy);
            doctor(&daemon, &machine).iter().find(is_it).map(|_| ())
        });
        until(20, "all devices without a reading", || {
            let text = get(address, "/metrics").expect("an exposition");
            (family(&text, "gpumem_device_unavailable").len() == 2).then_some(())
        });
        machine.set(&["fault=none", "nvml.driver=ok"]);
        until(60, &format!("{code}: a source that is up again"), || up().filter(|up| *up == 1.0));
    }
}

#[test]
fn faults_are_counted_by_their_numbers() {
    let machine = Machine::new(&["devices=2"]);
    let address = free_address();
    let _daemon = Daemon::start(&machine, "daemon", &format!("[metrics]\nlisten = \"{address}\"\n"));
    until(20, "events that are listened for", || {
        machine.tool("show", &[]).contains("call nvmlEventSetWait_v2 ").then_some(())
    });
    for xid in (100..120).chain([79, 79]) {
        machine.tool("xid", &["1", &xid.to_string()]);
    }
    let counted = until(20, "all of them", || {
        let text = get(address, "/metrics").expect("an exposition");
        let counted = family(&text, "gpumem_device_xid_errors_total");
        (counted.iter().map(|(_, count)| count).sum::<f64>() == 22.0).then_some(counted)
    });
    assert_eq!(counted.len(), 17, "sixteen numbers, and the others: {counted:?}");
    assert!(counted.iter().all(|(labels, _)| labels.contains("gpu=\"1\"")));
    assert!(
        counted.iter().any(|(labels, count)| labels.contains("xid=\"other\"") && *count == 6.0),
        "{counted:?}"
    );
}

#[test]
fn health_events_are_counted_by_kind_and_in_doctor() {
    let machine = Machine::new(&["devices=2"]);
    let address = free_address();
    let daemon = Daemon::start(&machine, "daemon", &format!("[metrics]\nlisten = \"{address}\"\n"));
    until(20, "events that are listened for", || {
        machine.tool("show", &[]).contains("call nvmlEventSetWait_v2 ").then_some(())
    });
    let kinds = [
        ("0x400", "dram_retirement"),
        ("0x800", "dram_retirement_failure"),
        ("0x1000", "poison_nonfatal"),
        ("0x2000", "poison_fatal"),
        ("0x4000", "gpu_unavailable"),
        ("0x8000", "recovery_action"),
    ];
    let found = |text: &str| doctor(&daemon, &machine).into_iter().find(|of| of[1].contains(text));
    machine.tool("event", &["1", kinds[0].0, "0"]);
    let mild = until(20, "a retirement in doctor", || found("1 x DRAM retired"));
    assert!(mild[0].starts_with("GPU 1 ") && mild[2].contains("ROW_REMAPPER"), "{mild:?}");
    for (bit, _) in kinds {
        machine.tool("event", &["1", bit, "0"]);
    }
    let counted = until(20, "all kinds", || {
        let counted = family(&get(address, "/metrics")?, "gpumem_device_events_total");
        (counted.iter().map(|(_, count)| count).sum::<f64>() == 7.0).then_some(counted)
    });
    for (_, name) in kinds {
        let count = if name == "dram_retirement" { 2.0 } else { 1.0 };
        let label = format!("event=\"{name}\"");
        let is_it = |(labels, of): &&(String, f64)| labels.contains(&label) && *of == count;
        let of_kind = counted.iter().find(is_it).unwrap_or_else(|| panic!("{name}: {counted:?}"));
        assert!(of_kind.0.contains("gpu=\"1\""), "{counted:?}");
    }
    let grave = found("1 x GPU unavailable").expect("in doctor");
    assert!(grave[1].contains("2 x DRAM retired") && grave[2].contains("GPU Recovery Action"), "{grave:?}");
    assert!(family(&get(address, "/metrics").expect("metrics"), "gpumem_device_xid_errors_total").is_empty());
}

#[test]
fn a_slow_driver_delays_neither_agents_nor_scrapes() {
    const LIST: Duration = Duration::from_millis(700);
    let takes = format!("nvml.list_us={}", LIST.as_micros());
    let machine = Machine::new(&["devices=1", &takes, "latency=sleep"]);
    let address = free_address();
    let config =
        format!("[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n[metrics]\nlisten = \"{address}\"\n");
    let daemon = Daemon::start(&machine, "daemon", &config);
    until(20, "a list that takes its time", || {
        let text = get(address, "/metrics").expect("an exposition");
        family(&text, "gpumem_device_used_bytes").first().map(|_| ())
    });
    let arguments = ["--devices", "0", "--steps", "20", "--step-ms", "0", "--hold", "600"];
    let began = Instant::now();
    let mut job = Job::start(&mut machine.trainer(&daemon.runtime, &arguments));
    job.wait_for("holding");
    let ran = began.elapsed();
    let mut bare = Job::start(&mut machine.bare_trainer(&arguments));
    let began = Instant::now();
    bare.wait_for("holding");
    println!("with an agent {ran:?}, without {:?}", began.elapsed());
    gpumem_test_support::bar(
        "a program beside slow lists",
        ran,
        began.elapsed() + Duration::from_millis(500),
    );
    let (mut longest, mut seen) = (Duration::ZERO, false);
    for _ in 0..100 {
        let since = Instant::now();
        let text = get(address, "/metrics").expect("an exposition");
        longest = longest.max(since.elapsed());
        seen |= !family(&text, "gpumem_process_tracked_bytes").is_empty();
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("longest scrape {longest:?}");
    assert!(seen, "the agent's data is shown");
    gpumem_test_support::bar("a scrape beside slow lists", longest, LIST.min(Duration::from_millis(300)));
}

/// Times of the agent's context records, and of the readings of its device.
#[derive(Default)]
struct Times {
    contexts: Vec<u64>,
    readings: Vec<u64>,
}

impl Sink for Times {
    fn observe(&mut self, _: Origin, record: &Record<'_>) {
        match record.body {
            Body::ContextCreate { .. } | Body::DriverEvent { event: DriverEventKind::ContextCreated, .. } => {
                self.contexts.push(record.stamp.time_ns);
            }
            Body::SampleBegin { .. } => self.readings.push(record.stamp.time_ns),
            _ => {}
        }
    }
}

#[test]
fn a_context_is_followed_by_a_list() {
    let machine = Machine::new(&["devices=2", "cuda.context_us=150000", "latency=sleep"]);
    let mut daemon = Daemon::start(&machine, "daemon", "");
    let arguments = ["--devices", "1", "--steps", "2", "--step-ms", "200", "--hold", "1"];
    let mut job = Job::start(&mut machine.trainer(&daemon.runtime, &arguments));
    job.finish();
    daemon.stop();
    let mut times = Times::default();
    recording::read(Input::open(&daemon.recording).expect("a recording"), &mut times).expect("read");
    let waits = times.contexts.iter().filter_map(|&made| {
        let next = times.readings.iter().find(|&&begun| begun >= made)?;
        Some((next - made) as f64 / 1e6)
    });
    let waits: Vec<f64> = waits.collect();
    println!("from a context to the list that follows, ms: {waits:.1?}");
    assert!(!waits.is_empty() && waits[0] <= 200.0, "{waits:?}");
}

#[test]
fn crashing_or_lying_library_is_survived() {
    let mut node = Node::new();
    let pids = [node.jobs[0].pid(), node.jobs[1].pid()];
    for fault in ["crash", "garbage"] {
        for lane in ["fault_list", "fault_memory"] {
            node.machine.set(&[&format!("gpu0.{lane}={fault}")]);
            // A GPU whose calls crash the poller is no longer queried. Impossible values are refused and reported.
            if fault == "crash" {
                node.until(&format!("{lane} {fault} reported"), |text| {
                    let reported = [
                        of_gpu(text, "gpumem_device_unavailable", "0"),
                        of_gpu(text, "gpumem_process_used_unavailable", "0"),
                    ];
                    reported.iter().any(Option::is_some)
                });
            } else {
                let text = node.until(&format!("{lane} {fault} reported"), |text| {
                    let reported = of_gpu(text, "gpumem_device_unavailable", "0");
                    let counted = text
                        .lines()
                        .filter_map(|line| line.strip_prefix("gpumemd_nvml_refused_values_total "));
                    reported.is_some_and(|(labels, _)| labels.contains("impossible"))
                        && counted.filter_map(|count| count.parse().ok()).any(|count: f64| count > 0.0)
                });
                let size = of_gpu(&text, "gpumem_device_total_bytes", "0").expect("its size").1;
                let all =
                    ["gpumem_device_used_bytes", "gpumem_device_free_bytes", "gpumem_process_used_bytes"];
                for (labels, bytes) in all.into_iter().flat_map(|name| family(&text, name)) {
                    assert!(bytes <= size, "{labels}: {bytes}");
                }
            }
            node.other_is_fresh();
            node.machine.set(&[&format!("gpu0.{lane}=none")]);
            node.until_well();
        }
    }
    node.daemon.stop();
    let (replay, truths) = (replay(&node.daemon.recording), node.machine.truth());
    // The other one's numbers are exact all the time.
    let compared = replay.compare(&truths, Some(pids[1]));
    println!("{compared:?}");
    assert!(compared.exact > 20, "{compared:?}");
}
