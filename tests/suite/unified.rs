//! A GPU without separate memory (GB10, Jetson): every view shows the host's memory, marked as unified, and each
//! process's memory.
use gpumem_tests::live::prometheus::{free_address, get};
use gpumem_tests::live::{Daemon, Job, Machine, until};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// MemTotal of this host in bytes.
fn host_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").expect("/proc/meminfo");
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).expect("MemTotal");
    line.trim().strip_suffix(" kB").and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
}

fn text(daemon: &Daemon, machine: &Machine, arguments: &[&str]) -> String {
    let output = daemon.ctl(machine, arguments).output().expect("gpumemctl runs");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn unified_memory_is_the_hosts_on_every_surface() {
    let machine = Machine::new(&["devices=2", "gpu1.unified=1", "context=64M"]);
    let http = free_address();
    let config = format!(
        "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n[metrics]\nlisten = \"{http}\"\npage = \"categories\"\n"
    );
    let daemon = Daemon::start(&machine, "daemon", &config);
    let arguments = ["--devices", "1", "--steps", "5", "--hold", "600"];
    let mut job = Job::start(&mut machine.trainer(&daemon.runtime, &arguments));
    job.wait_for("holding");
    let total = host_bytes();

    let (device, used) = until(20, "a device with its process", || {
        let ps = daemon.asked("/v1/ps")?;
        let row = ps["processes"].as_array()?.iter().find(|row| row["pid"] == job.pid())?;
        let used = row["used_bytes"].as_u64().filter(|used| *used > 64 * MIB)?;
        assert_eq!(row["device"], 1, "{row}");
        Some(ps["devices"][1].clone()).filter(|device| device["unaccounted_bytes"].is_i64()).zip(Some(used))
    });
    let number = |of: &Value, name: &str| of[name].as_i64().unwrap_or_else(|| panic!("{name} of {of}"));
    assert_eq!((&device["unified"], &device["why"]), (&true.into(), &Value::Null), "{device}");
    assert_eq!(device["total_bytes"], total, "{device}");
    assert_eq!(number(&device, "used_bytes") + number(&device, "free_bytes"), total as i64, "{device}");
    assert!(device["system_bytes"].is_null(), "{device}");
    let own = daemon.asked("/v1/ps").expect("an answer")["devices"][0].clone();
    assert_eq!((&own["unified"], number(&own, "total_bytes")), (&false.into(), 85_520_809_984), "{own}");

    let ps = text(&daemon, &machine, &["ps"]);
    assert!(ps.contains(" available ") && ps.contains("(unified, rest of the host "), "{ps}");
    let top = text(&daemon, &machine, &["top", "--once"]);
    assert!(top.contains("unified, Simulated"), "{top}");
    let doctor = text(&daemon, &machine, &["doctor", "--json"]);
    let doctor: Value = serde_json::from_str(&doctor).expect("JSON");
    let findings = doctor["findings"].as_array().expect("findings");
    let named: Vec<&Value> = findings.iter().filter(|of| of["id"] == "gpu.unified").collect();
    let [named] = named[..] else { panic!("one finding: {doctor:#}") };
    assert!(named["subject"].as_str().is_some_and(|subject| subject.starts_with("GPU 1 ")), "{named}");
    assert_eq!(named["state"], "ok", "{named}");

    // A report is of one sample: its parts add up to the host's memory.
    let pid = job.pid().to_string();
    let report = text(&daemon, &machine, &["report", "--verbose", &pid]);
    let line =
        report.lines().find(|line| line.contains("rest of the host")).unwrap_or_else(|| panic!("{report}"));
    assert!(line.contains(" available = "), "{report}");
    assert!(report.contains("unified: the host's memory"), "{report}");
    let report: Value =
        serde_json::from_str(&text(&daemon, &machine, &["report", &pid, "--json"])).expect("JSON");
    let reported = &report["devices"][0];
    assert_eq!((&reported["reading"]["unified"], &reported["total_bytes"]), (&true.into(), &total.into()));
    let sum = number(&reported["last"], "used_bytes") + number(reported, "unaccounted_bytes");
    assert_eq!(sum, number(&reported["reading"], "used_bytes"), "{reported:#}");

    let metrics = get(http, "/metrics").expect("metrics");
    let value = |name: &str, gpu: &str| {
        let start = format!("{name}{{gpu=\"{gpu}\"");
        let line = metrics.lines().find(|line| line.starts_with(&start))?;
        line.rsplit_once(' ')?.1.parse::<f64>().ok()
    };
    assert_eq!(value("gpumem_device_unified", "1"), Some(1.0), "{metrics}");
    assert_eq!(value("gpumem_device_unified", "0"), None, "{metrics}");
    assert_eq!(value("gpumem_device_total_bytes", "1"), Some(total as f64));
    assert!(value("gpumem_device_unavailable", "1").is_none(), "{metrics}");
    let used_metric = value("gpumem_process_used_bytes", "1");
    assert!(used_metric.is_some_and(|bytes| bytes >= used as f64 / 2.0), "{used_metric:?}, {used}");

    let page: Value =
        serde_json::from_str(&get(http, "/api/processes").expect("the page's data")).expect("JSON");
    let shown = &page["devices"][1];
    assert_eq!(
        (&shown["reading"]["unified"], &shown["total_bytes"]),
        (&true.into(), &total.into()),
        "{shown}"
    );
    assert!(
        page["processes"].as_array().is_some_and(|rows| rows.iter().any(|row| row["device"] == 1)),
        "{page}"
    );
}
