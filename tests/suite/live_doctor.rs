//! Doctor's findings about GPUs whose memory is not the sum of their processes, and about processes without bytes. A
//! script simulates each machine.
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::{Daemon, Job, Machine, until};
use serde_json::Value;
use std::fs;

const QUICK: &str =
    "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\nextra_lists_every_s = 0.1\ncall_timeout_s = 0.5\n";

/// A finding: id, state, subject, text, fix.
#[derive(Debug, Clone)]
struct Finding {
    id: String,
    state: String,
    subject: String,
    text: String,
    fix: String,
}

fn findings(daemon: &Daemon, machine: &Machine, pid: Option<u32>) -> Vec<Finding> {
    let pid = pid.map(|pid| pid.to_string());
    let mut arguments = vec!["doctor", "--json"];
    arguments.extend(pid.as_deref());
    let output = daemon.ctl(machine, &arguments).output().expect("gpumemctl runs");
    let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let text = |of: &Value, name: &str| of[name].as_str().unwrap_or("").to_owned();
    let findings = document["findings"].as_array().expect("findings").iter();
    findings
        .map(|of| Finding {
            id: text(of, "id"),
            state: text(of, "state"),
            subject: text(of, "subject"),
            text: text(of, "text"),
            fix: text(of, "fix"),
        })
        .collect()
}

/// Waits until doctor reports a finding about `subject` with these words.
fn finding(daemon: &Daemon, machine: &Machine, pid: Option<u32>, subject: &str, words: &str) -> Finding {
    let mut last = Vec::new();
    let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        until(20, words, || {
            last = findings(daemon, machine, pid);
            last.iter().find(|of| of.subject.starts_with(subject) && of.text.contains(words)).cloned()
        })
    }));
    found.unwrap_or_else(|_| panic!("{subject}: {words:?} is not in {last:#?}"))
}

fn start(keys: &[&str]) -> (Machine, Daemon) {
    let machine = Machine::new(keys);
    let daemon = Daemon::start(&machine, "daemon", QUICK);
    (machine, daemon)
}

fn trainer(machine: &Machine, daemon: &Daemon) -> Job {
    let arguments = ["--devices", "0", "--steps", "5", "--hold", "600"];
    let mut job = Job::start(&mut machine.trainer(&daemon.runtime, &arguments));
    job.wait_for("holding");
    job
}

#[test]
fn healthy_machine_has_no_findings() {
    let (machine, daemon) = start(&["devices=1"]);
    let job = trainer(&machine, &daemon);
    finding(&daemon, &machine, Some(job.pid()), "process", "covered");
    let odd: Vec<_> = findings(&daemon, &machine, Some(job.pid()))
        .into_iter()
        .filter(|of| of.subject.starts_with("GPU") || of.subject == "nvml" && of.state != "ok")
        .collect();
    assert!(odd.is_empty(), "{odd:#?}");
}

#[test]
fn doctor_reports_a_stopped_daemon() {
    let (machine, daemon) = start(&["devices=1"]);
    daemon.job.signal("STOP");
    let pid = daemon.job.pid();
    finding(&daemon, &machine, None, "daemon", &format!("process {pid} is stopped; kill -CONT {pid}"));
    daemon.job.signal("CONT");
    finding(&daemon, &machine, None, "daemon", "gpumemd ");
}

#[test]
fn dead_processes_that_still_hold_memory() {
    let (machine, daemon) = start(&["devices=1", "ghosts=2", "ghost_bytes=256M"]);
    // In a PID namespace below the host's, a dead process looks like one of another namespace.
    let sees_all =
        std::fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() == "pid:[4026531836]");
    let (words, remedy) = if sees_all {
        ("which has ended", "fuser")
    } else {
        ("which is not in this PID namespace", "hostPID")
    };
    let dead = finding(&daemon, &machine, None, "GPU 0", words);
    assert!(dead.text.contains("512.0 MiB are charged to pids 5000000, 5000001"), "{dead:?}");
    assert!(dead.state == "warn" && dead.fix.contains(remedy), "{dead:?}");
}

#[test]
fn memory_that_a_checkpoint_moved_to_the_host() {
    let (machine, daemon) = start(&["devices=1"]);
    let job = trainer(&machine, &daemon);
    let pid = job.pid().to_string();
    machine.tool("checkpoint", &[&pid, "2"]);
    let found = finding(&daemon, &machine, Some(job.pid()), "process", "less than its ");
    assert!(found.text.contains("cuda-checkpoint") && found.state == "warn", "{found:?}");
    machine.tool("checkpoint", &[&pid, "1"]);
    finding(
        &daemon,
        &machine,
        Some(job.pid()),
        "process",
        "its memory was moved to the host by a checkpoint",
    );
}

#[test]
fn wsl_reports_no_process_bytes() {
    let (machine, daemon) = start(&["devices=1", "nvml.wsl=1"]);
    let job = trainer(&machine, &daemon);
    let wsl = finding(&daemon, &machine, None, "nvml", "this is WSL");
    assert!(wsl.id == "driver.wsl" && wsl.state == "warn" && wsl.fix.contains("gpumemctl run"), "{wsl:?}");
    finding(
        &daemon,
        &machine,
        Some(job.pid()),
        "process",
        "this is WSL, and Windows does not report bytes of processes",
    );
}

#[test]
fn unavailable_bytes_without_a_known_reason() {
    let (machine, daemon) = start(&["devices=1", "fault_list=bytes_unavailable"]);
    let job = trainer(&machine, &daemon);
    let absent = finding(&daemon, &machine, None, "GPU 0", "bytes of pid");
    assert!(absent.text.contains(&job.pid().to_string()), "{absent:?}");
    finding(&daemon, &machine, Some(job.pid()), "process", "the driver reports them as not available");
}

#[test]
fn displays_confidential_computing_and_unattributed_memory() {
    let (machine, daemon) =
        start(&["devices=3", "gpu0.unaccounted=512M", "gpu1.unaccounted=300M", "gpu1.display=1"]);
    let bare = finding(&daemon, &machine, None, "GPU 0", "in use belong to no process");
    assert!(
        bare.text.starts_with("512.0 MiB in use") && bare.text.contains("contexts of the driver itself"),
        "{bare:?}"
    );
    let screen = finding(&daemon, &machine, None, "GPU 1", "because it drives a display");
    assert!(screen.text.starts_with("300.0 MiB in use") && screen.state == "ok", "{screen:?}");
    let last = findings(&daemon, &machine, None);
    assert!(!last.iter().any(|of| of.subject.starts_with("GPU 2")), "{last:#?}");
    let (machine, daemon) = start(&["devices=1", "nvml.cc=1", "unaccounted=100M"]);
    finding(&daemon, &machine, None, "nvml", "confidential computing is on");
    finding(&daemon, &machine, None, "GPU 0", "staging buffers of confidential computing");
}

#[test]
fn mps_and_graphics_processes_are_distinguished() {
    let (machine, daemon) = start(&["devices=2", "gpu0.mps=1", "gpu1.graphics=1"]);
    let job = trainer(&machine, &daemon);
    let mut on_both = machine.bare_trainer(&["--devices", "1", "--steps", "2", "--hold", "600"]);
    let drawing = Job::start(&mut on_both);
    let mps = finding(&daemon, &machine, None, "GPU 0", "through MPS");
    assert!(mps.text.contains(&format!("pid {}", job.pid())) && mps.state == "ok", "{mps:?}");
    let draws = finding(&daemon, &machine, None, "GPU 1", "counted once");
    assert!(draws.text.contains(&format!("pid {}", drawing.pid())), "{draws:?}");
}

#[test]
fn mig_without_the_monitor_capability() {
    let (machine, daemon) =
        start(&["devices=2", "gpu0.mig=2", "gpu0.mig_hidden=1", "gpu1.fault_list=no_permission"]);
    let hidden = finding(&daemon, &machine, None, "GPU 0", "none of its instances is visible");
    assert!(hidden.fix.contains("NVIDIA_MIG_MONITOR_DEVICES=all"), "{hidden:?}");
    machine.set(&["gpu0.fault=no_permission"]);
    let refused = finding(&daemon, &machine, None, "GPU 0", "no permission: MIG is on");
    assert!(refused.fix.contains("NVIDIA_MIG_MONITOR_DEVICES=all"), "{refused:?}");
    let plain = finding(&daemon, &machine, None, "GPU 1", "process list: no permission");
    assert!(plain.fix.contains("/dev/nvidiactl"), "{plain:?}");
}

#[test]
fn unified_memory_is_reported_without_a_remainder() {
    let (machine, daemon) = start(&["devices=1", "unified=1"]);
    let job = trainer(&machine, &daemon);
    let unified = finding(&daemon, &machine, None, "GPU 0", "unified memory");
    assert!(
        unified.id == "gpu.unified" && unified.state == "ok" && unified.text.contains("/proc/meminfo"),
        "{unified:?}"
    );
    until(20, "used bytes of the process", || {
        let output = daemon.ctl(&machine, &["ps", "--json"]).output().expect("gpumemctl runs");
        let ps: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let row = ps["processes"].as_array()?.iter().find(|row| row["pid"] == job.pid())?;
        row["used_bytes"].as_u64().filter(|_| ps["devices"][0]["unaccounted_bytes"].is_i64())
    });
    let same = findings(&daemon, &machine, Some(job.pid()));
    assert!(!same.iter().any(|of| of.text.contains("its used bytes")), "{same:#?}");
    let of_gpu = findings(&daemon, &machine, None);
    assert!(!of_gpu.iter().any(|of| of.id == "gpu.remainder" || of.id == "gpu"), "{of_gpu:#?}");
}

#[test]
fn doctor_shows_addressing_mode_and_numa_node() {
    let (machine, daemon) = start(&[
        "devices=3",
        "gpu0.addressing=ats",
        "gpu0.numa_node=4",
        "gpu0.unaccounted=300M",
        "gpu1.addressing=hmm",
    ]);
    let grace = finding(&daemon, &machine, None, "GPU 0", "(ATS)");
    assert!(grace.id == "gpu.addressing" && grace.state == "ok", "{grace:?}");
    assert!(grace.text.contains("NUMA node 4"), "{grace:?}");
    let remainder = finding(&daemon, &machine, None, "GPU 0", "because its memory is NUMA node 4");
    assert!(remainder.id == "gpu.remainder" && remainder.state == "ok", "{remainder:?}");
    let plain = finding(&daemon, &machine, None, "GPU 1", "(HMM)");
    assert!(!plain.text.contains("NUMA"), "{plain:?}");
    let last = findings(&daemon, &machine, None);
    assert!(!last.iter().any(|of| of.subject.starts_with("GPU 2")), "{last:#?}");
}

#[test]
fn memory_limits_of_control_groups_are_reported() {
    let (machine, daemon) = start(&["devices=2", "gpu0.memory_limit=64G"]);
    let job = trainer(&machine, &daemon);
    let group = fs::read_to_string(format!("/proc/{}/cgroup", job.pid())).expect("its control groups");
    let is_named =
        |text: &str| group.lines().any(|line| text.contains(line.rsplit(':').next().unwrap_or(line)));
    let roomy = finding(&daemon, &machine, None, "GPU 0", "of 65536.0 MiB (soft limit: 32768.0 MiB)");
    assert!(roomy.id == "gpu.limits" && roomy.state == "ok" && is_named(&roomy.text), "{roomy:?} {group}");
    machine.set(&["gpu0.memory_limit=200M"]);
    let full = finding(&daemon, &machine, None, "GPU 0", "of 200.0 MiB");
    assert!(full.state == "warn", "{full:?}");
    let all = findings(&daemon, &machine, None);
    assert!(!all.iter().any(|of| of.id == "gpu.limits" && of.subject.starts_with("GPU 1")), "{all:#?}");
}

#[test]
fn managed_memory_is_charged_to_no_process() {
    let (machine, daemon) = start(&["devices=1", "unaccounted=80M"]);
    let _job = trainer(&machine, &daemon); // which makes some
    finding(&daemon, &machine, None, "GPU 0", "managed memory (UVM)");
}

#[test]
fn early_535_driver_and_its_namespaces() {
    let machine = Machine::new(&["devices=1", "ghosts=0"]);
    let library = programs().fake.join("lib-535/libnvidia-ml.so.1");
    let daemon = Daemon::start(&machine, "daemon", &format!("{QUICK}library = {library:?}\n"));
    let long = finding(&daemon, &machine, None, "nvml", "list records of 32 bytes");
    assert!(long.text.contains("535.54.03") && long.fix.contains("535.104.05"), "{long:?}");
}

#[test]
fn faults_are_reported_with_their_gpu() {
    let (machine, daemon) = start(&["devices=2"]);
    until(20, "events that are listened for", || {
        machine.tool("show", &[]).contains("call nvmlEventSetWait_v2 ").then_some(())
    });
    machine.tool("xid", &["1", "79"]);
    machine.tool("xid", &["0", "31"]);
    let lost = finding(&daemon, &machine, None, "GPU 1", "1 x 79 (the GPU has fallen off the bus)");
    assert!(lost.state == "bad" && lost.fix.contains("dmesg"), "{lost:?}");
    let program = finding(&daemon, &machine, None, "GPU 0", "1 x 31");
    assert!(program.state == "warn" && program.fix.contains("a program caused it"), "{program:?}");
    let log = std::fs::read_to_string(machine.dir.join("daemon.log")).expect("a log");
    assert!(log.lines().any(|line| line.contains("Xid") && line.contains("79")), "{log}");
}

#[test]
fn accounting_peak_is_shown_and_a_difference_is_reported() {
    for extra in ["0", "512M"] {
        let (machine, daemon) = start(&["devices=1", "accounting=1", &format!("accounting_extra={extra}")]);
        finding(&daemon, &machine, None, "accounting", "accounting mode is on");
        let mut job = trainer(&machine, &daemon);
        let pid = job.pid().to_string();
        let report = |arguments: &[&str]| {
            let output =
                daemon.ctl(&machine, &[&["report", &pid], arguments].concat()).output().expect("runs");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        until(20, "its used bytes are the driver's", || {
            report(&["--verbose"])
                .lines()
                .find(|line| line.contains("driver accounting: peak "))
                .map(str::to_owned)
        });
        job.enough();
        daemon.wait_for_the_end_of(&machine, &[&job]);
        let text = report(&["--verbose"]);
        let line = text.lines().find(|line| line.contains("driver accounting: peak ")).expect("a line");
        println!("{line}");
        let document: Value = serde_json::from_str(&report(&["--json"])).expect("JSON");
        let accounting = &document["devices"][0]["driver_accounting"];
        let (theirs, ours) = (accounting["driver_bytes"].as_u64(), accounting["our_bytes"].as_u64());
        let (theirs, ours) = (theirs.expect("the driver's"), ours.expect("ours"));
        let reported = document["caveats"].as_array().expect("a list").iter();
        let reported: Vec<_> = reported.filter(|caveat| caveat["code"] == "accounting_disagrees").collect();
        // Our peak may differ if its gap was measured at another time; any difference is reported.
        let is_apart = theirs.abs_diff(ours) > 2 << 20;
        assert_eq!(reported.len(), usize::from(is_apart), "{theirs}, {ours}: {reported:?}");
        assert!(theirs.abs_diff(ours) < 64 << 20 || extra != "0", "{theirs}, {ours}");
        if extra != "0" {
            assert!(
                theirs - ours > 400 << 20 && text.contains("bytes more than the one shown, on GPU-"),
                "{text}"
            );
        }
        assert!(!machine.tool("show", &[]).contains("call nvmlDeviceSetAccountingMode"));
    }
}

#[test]
fn processes_without_an_agent_are_counted_and_a_virtual_gpu_is_reported() {
    let (machine, daemon) = start(&["devices=1", "name=NVIDIA A40-48Q"]);
    let covered = trainer(&machine, &daemon);
    let arguments = ["--devices", "0", "--steps", "2", "--hold", "600"];
    let mut bare = Job::start(&mut machine.bare_trainer(&arguments));
    bare.wait_for("holding");
    let words = format!("pid {} ", bare.pid());
    let reported = finding(&daemon, &machine, None, "processes", &words);
    assert!(
        reported.id == "processes.uncovered"
            && reported.text.starts_with("1 process without an agent (1 covered) holds "),
        "{reported:?}"
    );
    assert!(reported.fix.contains(&format!("gpumemctl doctor {}", bare.pid())), "{reported:?}");
    assert!(!reported.text.contains(&format!("pid {} ", covered.pid())), "{reported:?}");
    let share = finding(&daemon, &machine, None, "GPU 0", "a virtual GPU (vGPU)");
    assert!(share.id == "gpu.vgpu" && share.state == "ok", "{share:?}");
}

#[test]
fn limits_that_agents_met_are_told_with_their_key() {
    let machine = Machine::new(&["devices=1"]);
    let daemon = Daemon::start(&machine, "daemon", &format!("[agent]\nconnections = 1\n{QUICK}"));
    let _first = trainer(&machine, &daemon);
    let _second = trainer(&machine, &daemon);
    let reported = finding(&daemon, &machine, None, "agents", "because all connections were taken");
    assert!(
        reported.id == "agent.limits"
            && reported.state == "warn"
            && reported.fix.contains("agent.connections"),
        "{reported:?}"
    );
    // A refused configuration is reported until one is accepted, also after an earlier reload was accepted.
    let file = machine.dir.join("daemon.toml");
    let good = std::fs::read_to_string(&file).expect("read");
    for _ in 0..2 {
        std::fs::write(&file, format!("{good}\nnonsense = 1\n")).expect("written");
        daemon.job.signal("HUP");
        let reported = finding(&daemon, &machine, None, "configuration", "the last reload was refused");
        assert!(reported.id == "daemon.config" && reported.fix.contains("gpumemd --check"), "{reported:?}");
        std::fs::write(&file, &good).expect("written");
        daemon.job.signal("HUP");
        until(20, "no findings", || {
            findings(&daemon, &machine, None).iter().all(|of| of.id != "daemon.config").then_some(())
        });
    }
}

/// Lane `privileged`.
mod privileged {
    use super::*;

    #[test]
    fn driver_with_mixed_pid_namespaces() {
        for (driver, words) in
            [("470.256.02", "lists the host's pids"), ("550.163.01", "whichever host process")]
        {
            let machine = Machine::new(&["devices=1", &format!("nvml.driver_version={driver}")]);
            let Some(daemon) = Daemon::start_elsewhere(&machine, "daemon", QUICK) else {
                gpumem_test_support::skip("no PID namespace can be made here", "sudo make test-all");
                return;
            };
            let mixed = finding(&daemon, &machine, None, "nvml", words);
            assert!(mixed.state == "warn" && mixed.fix.contains("host's PID namespace"), "{mixed:?}");
        }
    }
}
