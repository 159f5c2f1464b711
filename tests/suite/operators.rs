//! An operator's view: a real Prometheus scrapes a full node and a DCGM exporter, with config/prometheus loaded. The
//! node has 8 devices with 16 processes each, three of which have an agent. Every panel of config/grafana and every
//! example of docs/metrics.md shows data. Every alert fires and clears because of events on the node.
//!
//! A minute of the rules is a second here.
use gpumem_tests::live::prometheus::{Server, check_metrics, free_address, get, tool};
use gpumem_tests::live::{Daemon, Job, Machine, Mixer, until};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const DEVICES: u32 = 8;
const PROCESSES: u32 = 16;
const MIB: u64 = 1 << 20;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path).expect("a file of the project")
}

/// The rules with seconds for minutes: `for: 5m`, `[15m]`, `offset 45m`, `[1h]`.
fn hurried(rules: &str) -> String {
    let mut rules = rules.replace("[1h]", "[60s]");
    for before in ["for: ", "[", "offset "] {
        let mut hurried = String::new();
        let mut rest = rules.as_str();
        while let Some(at) = rest.find(before) {
            let (done, after) = rest.split_at(at + before.len());
            let digits = after.bytes().take_while(u8::is_ascii_digit).count();
            hurried += done;
            hurried += &after[..digits];
            let is_minutes = digits > 0 && after[digits..].starts_with('m');
            hurried += if is_minutes { "s" } else { "" };
            rest = &after[digits + usize::from(is_minutes)..];
        }
        rules = hurried + rest;
    }
    rules
}

/// Answers every request with the current result of `body`.
fn serve(body: impl Fn() -> String + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let body = body();
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\n";
            let _ = write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len());
        }
    });
    address
}

fn uuids(machine: &Machine) -> Vec<String> {
    let shown = machine.tool("show", &[]);
    shown.lines().filter_map(|line| line.split_once(".uuid=")).map(|(_, uuid)| uuid.to_owned()).collect()
}

/// Metrics of dcgm-exporter for the same machine, with its own names.
fn dcgm(uuids: &[String]) -> String {
    let mut text = String::new();
    for (name, value) in
        [("DCGM_FI_DEV_FB_USED", 512), ("DCGM_FI_DEV_GPU_UTIL", 7), ("DCGM_FI_DEV_POWER_USAGE", 300)]
    {
        text += &format!("# HELP {name} .\n# TYPE {name} gauge\n");
        for (gpu, uuid) in uuids.iter().enumerate() {
            text += &format!(
                "{name}{{gpu=\"{gpu}\",UUID=\"{uuid}\",pci_bus_id=\"00000000:{gpu:02}:00.0\",device=\"nvidia{gpu}\",modelName=\"FAKE\",Hostname=\"node\"}} {value}\n"
            );
        }
    }
    text
}

/// The node and its monitoring.
struct Node {
    machine: Machine,
    daemon: Daemon,
    metrics: SocketAddr,
    server: Server,
    /// Simulates stale data, which no command can cause.
    is_old: Arc<AtomicBool>,
    sleepers: Vec<Job>,
}

impl Node {
    fn new(prometheus: &Path) -> Self {
        let machine = Machine::new(&[&format!("devices={DEVICES}"), "memory=16G"]);
        let metrics = free_address();
        let config = format!(
            "[nvml]\nlist_every_s = 0.5\nlist_budget = 0.2\n[metrics]\nlisten = \"{metrics}\"\ntags = 3\n"
        );
        let daemon = Daemon::start(&machine, "daemon", &config);
        let uuids = uuids(&machine);
        let dcgm = serve(move || dcgm(&uuids));
        let is_old = Arc::new(AtomicBool::new(false));
        let reported = Arc::clone(&is_old);
        let old = serve(move || {
            let age = if reported.load(Ordering::Relaxed) { 100 } else { 0 };
            format!(
                "# HELP gpumemd_snapshot_age_seconds .\n# TYPE gpumemd_snapshot_age_seconds gauge\ngpumemd_snapshot_age_seconds {age}\n"
            )
        });
        let rules = machine.dir.join("rules.yml");
        std::fs::write(&rules, hurried(&read(folder("config/prometheus/gpumemd.rules.yml"))))
            .expect("written");
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{}]\nscrape_configs:\n\
             - {{job_name: gpumemd, static_configs: [{{targets: ['{metrics}']}}]}}\n\
             - {{job_name: old-gpumemd, static_configs: [{{targets: ['{old}']}}]}}\n\
             - {{job_name: dcgm, static_configs: [{{targets: ['{dcgm}']}}]}}\n",
            rules.display()
        );
        let server = Server::with_config(prometheus, &machine.dir, &config);
        Node { machine, daemon, metrics, server, is_old, sleepers: Vec::new() }
    }

    fn covered(&self, device: u32) -> Mixer {
        let mut mixer = Mixer::run(
            Mixer::command(&self.machine, &self.daemon)
                .env("GPUMEM_JOB", "train")
                .env("RANK", device.to_string()),
        );
        mixer.ok(&format!("device {device}; tag model/weights; alloc w 64M; tag model/grads; alloc g 32M"));
        mixer
    }

    /// A process without an agent.
    fn bare(&self, device: u32, bytes: u64) -> Job {
        let job = Job::start(Command::new("sleep").arg("1000"));
        self.machine.tool("hold", &[&job.pid().to_string(), &device.to_string(), &bytes.to_string()]);
        job
    }

    /// Returns the firing alerts.
    fn firing(&self) -> BTreeSet<String> {
        let alerts = self.server.query("ALERTS{alertstate=\"firing\"}");
        alerts.iter().filter_map(|(labels, _)| Some(labels["alertname"].as_str()?.to_owned())).collect()
    }

    fn fires(&self, alert: &str) {
        let since = std::time::Instant::now();
        until(150, &format!("{alert} fires"), || self.firing().contains(alert).then_some(()));
        println!("{alert} fires after {:.0?}", since.elapsed());
    }

    fn clears(&self, alert: &str) {
        let since = std::time::Instant::now();
        until(150, &format!("{alert} clears"), || (!self.firing().contains(alert)).then_some(()));
        println!("{alert} clears after {:.0?}", since.elapsed());
    }

    /// Asserts that the texts of alerts have numbers with units, no missing values, and only existing commands.
    fn annotations_are_whole(&self) {
        let answer = self.server.ask("/api/v1/alerts").expect("alerts");
        let help = self.daemon.ctl(&self.machine, &["--help"]).output().expect("gpumemctl runs").stdout;
        let help = String::from_utf8_lossy(&help).into_owned();
        let commands: BTreeSet<&str> =
            help.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
        for alert in answer["data"]["alerts"].as_array().expect("alerts") {
            for key in ["summary", "description", "runbook"] {
                let text = alert["annotations"][key].as_str().unwrap_or_default();
                let is_whole =
                    !["<no value>", "%!", "error ", "  ", "()", "{{"].iter().any(|bad| text.contains(bad));
                assert!(!text.is_empty() && is_whole, "{key} of {alert}");
                for command in text.split("gpumemctl ").skip(1) {
                    let word = command.split([' ', ';', ',']).next().unwrap_or_default();
                    assert!(commands.contains(word), "there is no gpumemctl {word}: {text}");
                }
            }
        }
    }

    fn panel_queries(&self, pid: u32) {
        let mut count = 0;
        for name in ["node", "process", "fleet", "health"] {
            let board: Value =
                serde_json::from_str(&read(folder("config/grafana").join(format!("{name}.json"))))
                    .expect("JSON");
            let mut values =
                BTreeMap::from([("$__rate_interval", "10s".to_owned()), ("$__range", "60s".to_owned())]);
            for variable in board["templating"]["list"].as_array().expect("variables").iter().skip(1) {
                let definition = variable["query"]["query"].as_str().expect("a query");
                let inside = definition.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
                let (query, label) =
                    inside.and_then(|inside| inside.rsplit_once(", ")).expect("label_values");
                let query = fill(query, &values);
                let found: Vec<String> = until(30, &format!("{name}: {definition}"), || {
                    let series = self.server.query(&query);
                    let values: Vec<_> = series
                        .iter()
                        .filter_map(|(labels, _)| Some(labels[label].as_str()?.to_owned()))
                        .collect();
                    (!values.is_empty()).then_some(values)
                });
                let name = variable["name"].as_str().expect("a name");
                let (name, value) = match name {
                    "job" => ("$job", found[0].clone()),
                    "instance" if variable["multi"] == true => ("$instance", ".+".to_owned()),
                    "instance" => ("$instance", found[0].clone()),
                    "job_name" => ("$job_name", ".+".to_owned()),
                    "pid" => {
                        ("$pid", found.iter().find(|found| **found == pid.to_string()).expect("ours").clone())
                    }
                    _ => panic!("{name} is new"),
                };
                values.insert(name, value);
            }
            for panel in board["panels"].as_array().expect("panels") {
                for target in panel["targets"].as_array().expect("targets") {
                    let query = fill(target["expr"].as_str().expect("a query"), &values);
                    // Findings and growth exist only while a process grows.
                    let may_be_empty =
                        ["gpumem_process_finding", ":growth45m"].iter().any(|of| query.contains(of));
                    until(40, &format!("{name}, {}: {query}", panel["title"]), || {
                        let series = self.server.query(&query);
                        (may_be_empty || series.iter().any(|(_, value)| value.is_finite())).then_some(())
                    });
                    count += 1;
                }
            }
        }
        println!("{count} queries of panels");
        assert!(count > 60, "{count}");
    }

    fn examples_of_the_reference(&self) {
        let text = read(folder("docs/metrics.md"));
        let part = text
            .split("<!-- promql:")
            .nth(1)
            .and_then(|part| part.split("or once for all").next())
            .expect("examples");
        let queries = part.split("\n\n").filter(|block| block.contains("    # "));
        let mut count = 0;
        for query in queries {
            let query: Vec<&str> =
                query.lines().map(str::trim).filter(|line| !line.starts_with('#')).collect();
            let query = query.join(" ");
            let series = self.server.query(&query);
            println!("{} of {query}", series.len());
            // One device is not read.
            assert!(series.len() >= DEVICES as usize - 1, "{query}: {}", series.len());
            count += 1;
        }
        assert_eq!(count, 3);
    }
}

/// Longest names first: $job is the beginning of $job_name.
fn fill(query: &str, values: &BTreeMap<&str, String>) -> String {
    values.iter().rev().fold(query.to_owned(), |query, (name, value)| query.replace(name, value))
}

#[test]
fn rules_are_scaled_from_minutes_to_seconds() {
    let text = "for: 15m\nexpr: min_over_time(a:min15m[15m]) > b offset 45m and c[1h]";
    assert_eq!(hurried(text), "for: 15s\nexpr: min_over_time(a:min15m[15s]) > b offset 45s and c[60s]");
}

/// Lane `prometheus`.
mod prometheus {
    use super::*;

    #[test]
    fn panels_show_data_and_alerts_fire_and_clear() {
        let (Some(prometheus), Some(promtool)) = (tool("prometheus"), tool("promtool")) else { return };
        let mut node = Node::new(&prometheus);
        let mut covered: Vec<Mixer> = (0..3).map(|device| node.covered(device)).collect();
        for number in 0..DEVICES * PROCESSES - 3 {
            node.sleepers.push(node.bare(number % DEVICES, (u64::from(number % 7) + 1) * 8 * MIB));
        }

        until(60, "three targets and the first recordings", || {
            let is_there = |query: &str| !node.server.query(query).is_empty();
            (is_there("sum(up) == 3") && is_there("instance:gpumem_process_covered:ratio > 0")).then_some(())
        });
        assert_eq!(node.firing(), BTreeSet::new(), "a node that is well");

        // What happens on the node.
        node.is_old.store(true, Ordering::Relaxed);
        let mut full = node.bare(7, 14_800 * MIB);
        let mut large = node.bare(6, 2048 * MIB);
        let mut command = Mixer::command(&node.machine, &node.daemon);
        let mut blocked = Mixer::run(command.env("GPUMEM_SIM_CUPTI", "subscribe:39"));
        blocked.ok("device 3; alloc a 8M");
        node.machine.set(&["gpu5.fault=unknown"]);
        let (leak, gap) = (covered[0].pid(), covered[1].pid().to_string());
        let stopped = covered[2].pid().to_string();
        let signal = |name: &str, pid: &str| {
            assert!(
                Command::new("kill").args(["-s", name, pid]).status().is_ok_and(|status| status.success())
            )
        };

        // A leak is detected after a while; meanwhile everything else is checked.
        let mut step = 0;
        let mut grow = |node: &Node, covered: &mut Vec<Mixer>| {
            step += 1;
            covered[0].ok(&format!("alloc leak{step} 12M"));
            node.machine.tool("grow", &[&gap, "1", &(4 * MIB).to_string()]);
            std::thread::sleep(Duration::from_millis(900));
        };
        let both = ["GpumemProcessGrowing", "GpumemUntrackableGrowing"];
        (0..12).for_each(|_| grow(&node, &mut covered));
        assert_eq!(check_metrics(&promtool, &get(node.metrics, "/metrics").expect("a scrape")), "");
        node.panel_queries(leak);
        node.examples_of_the_reference();
        signal("STOP", &stopped);
        until(200, "growth that is noticed", || {
            grow(&node, &mut covered);
            both.iter().all(|alert| node.firing().contains(*alert)).then_some(())
        });
        for alert in [
            "GpumemDeviceNearlyFull",
            "GpumemUncoveredProcess",
            "GpumemAgentBlocked",
            "GpumemDeviceStale",
            "GpumemCoverageLost",
            "GpumemdStateOld",
            "GpumemProcessLeaks",
        ] {
            node.fires(alert);
        }
        node.annotations_are_whole();

        // The condition ends, or is repaired.
        signal("CONT", &stopped);
        node.machine.set(&["gpu5.fault=none"]);
        node.is_old.store(false, Ordering::Relaxed);
        for job in [&mut full, &mut large] {
            job.signal("KILL");
            job.end();
        }
        blocked.end();
        // A process without an agent was killed while its device was full, which is the best available evidence.
        node.fires("GpumemOutOfMemory");
        node.annotations_are_whole();
        for alert in [
            "GpumemDeviceNearlyFull",
            "GpumemUncoveredProcess",
            "GpumemAgentBlocked",
            "GpumemDeviceStale",
            "GpumemCoverageLost",
            "GpumemdStateOld",
            "GpumemOutOfMemory",
            "GpumemProcessGrowing",
            "GpumemUntrackableGrowing",
        ] {
            node.clears(alert);
        }

        // gpumemd itself: NVML closed, series limit reached, and a daemon that is stopped while an agent has many
        // records.
        let printed = node
            .daemon
            .ctl(&node.machine, &["nvml", "release", "--for", "15s"])
            .output()
            .expect("gpumemctl runs");
        assert!(printed.status.success(), "{printed:?}");
        let file = node.machine.dir.join("daemon.toml");
        let config = read(&file);
        let set = |text: &str| {
            std::fs::write(&file, text).expect("written");
            node.daemon.job.signal("HUP");
        };
        set(&config.replace("tags = 3", "tags = 3\nmax_series = 300"));
        node.fires("GpumemdSourceDown");
        node.fires("GpumemdSeriesFolded");
        node.annotations_are_whole();
        set(&config);
        node.clears("GpumemdSourceDown");
        node.clears("GpumemdSeriesFolded");
        let mut chatty =
            node.machine.trainer(&node.daemon.runtime, &["--steps", "1000000", "--step-ms", "1"]);
        let mut chatty = Job::start(chatty.env("GPUMEM_RING_SLOTS", "2048"));
        chatty.wait_for("ready");
        node.daemon.job.signal("STOP");
        node.fires("GpumemdDown");
        node.daemon.job.signal("CONT");
        node.fires("GpumemdDrops");
        node.annotations_are_whole();
        chatty.enough();
        node.clears("GpumemdDown");
        node.clears("GpumemdDrops");
        // What leaked is held until its process ends.
        covered.iter_mut().for_each(Mixer::end);
        node.clears("GpumemProcessLeaks");
        assert_eq!(node.firing(), BTreeSet::new(), "nothing is left");
        node.daemon.stop();
    }
}
