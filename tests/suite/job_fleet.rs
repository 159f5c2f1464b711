//! A job of 12 ranks on three nodes. Each node has its simulated machine and its daemon in a separate network; one real
//! Prometheus scrapes all. `gpumemctl job` sums it and finds the worst rank.
use gpumem_tests::live::prometheus::{Server, free_address, tool};
use gpumem_tests::live::{Daemon, Machine, Mixer, until};
use serde_json::Value;
use std::net::SocketAddr;
use std::process::{Command, Output};

const NODES: usize = 3;
const RANKS: usize = 4;
const MIB: u64 = 1 << 20;
const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n[who]\ncontainer_names = \"off\"\n";

/// A network namespace for a daemon, connected to this one; removed when the test ends.
struct Network {
    name: String,
    address: SocketAddr,
}

impl Network {
    /// `None` where none can be made.
    fn new(number: usize) -> Option<Self> {
        let id = std::process::id() % 100_000;
        let (name, cable) = (format!("gpumem-{id}-{number}"), format!("gm{id}{number}"));
        let ip = |line: &str| {
            Command::new("ip").args(line.split(' ')).output().is_ok_and(|output| output.status.success())
        };
        if !ip(&format!("netns add {name}")) {
            return None;
        }
        // A unique /30 of the addresses reserved for benchmarks, by pid.
        let (high, low) = (id / 64 % 256, id % 64);
        let net = |host: usize| format!("198.18.{high}.{}", (low as usize + 17 * number) % 64 * 4 + host);
        let made = Network { address: format!("{}:9837", net(2)).parse().ok()?, name: name.clone() };
        let is_made = ip(&format!("link add {cable} type veth peer name eth0 netns {name}"))
            && ip(&format!("addr add {}/30 dev {cable}", net(1)))
            && ip(&format!("link set {cable} up"))
            && ip(&format!("-n {name} addr add {}/30 dev eth0", net(2)))
            && ip(&format!("-n {name} link set eth0 up"));
        is_made.then_some(made)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

struct Node {
    daemon: Daemon,
    ranks: Vec<Mixer>,
    machine: Machine,
    address: SocketAddr,
    _network: Option<Network>,
}

impl Node {
    fn new(number: usize) -> Self {
        let machine = Machine::new(&[&format!("devices={RANKS}")]);
        let network = Network::new(number);
        let (address, daemon) = match &network {
            Some(network) => {
                let address = network.address;
                let config = format!("[metrics]\nlisten = \"{address}\"\n{FAST}");
                (address, Daemon::start_by(&machine, &["ip", "netns", "exec", &network.name], &config))
            }
            None => {
                eprintln!(
                    "no network namespace can be created here: node {number} uses a separate port instead"
                );
                let address = free_address();
                (
                    address,
                    Daemon::start(&machine, "daemon", &format!("[metrics]\nlisten = \"{address}\"\n{FAST}")),
                )
            }
        };
        Node { daemon, ranks: Vec::new(), machine, address, _network: network }
    }

    /// Starts a rank on GPU `gpu` that holds `mib` MiB.
    fn rank(&mut self, rank: usize, gpu: usize, mib: u64) {
        let mut command = Mixer::command(&self.machine, &self.daemon);
        for (name, value) in [("RANK", rank), ("LOCAL_RANK", gpu), ("WORLD_SIZE", NODES * RANKS)] {
            command.env(name, value.to_string());
        }
        // Each node's launcher appends its own id to the job's name.
        command
            .env("GPUMEM_JOB", format!("bert.18a2b3c4d5e6f7{}-1f3", rank / RANKS))
            .env("SLURM_JOB_ID", "8812");
        let mut mixer = Mixer::run(&mut command);
        mixer.ok(&format!("device {gpu}; alloc a {mib}M"));
        self.ranks.push(mixer);
    }

    fn ctl(&self, arguments: &[&str]) -> Output {
        self.daemon.ctl(&self.machine, arguments).output().expect("gpumemctl runs")
    }
}

fn text(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn document(output: &Output) -> Value {
    serde_json::from_str(&text(output)).expect("JSON")
}

fn sum(document: &Value, key: &str) -> i64 {
    document["members"].as_array().expect("members").iter().filter_map(|member| member[key].as_i64()).sum()
}

/// Returns the amounts of a table line, without its leading names.
fn amounts(line: &str, names: usize) -> Vec<i64> {
    line.split_whitespace().skip(names).map_while(|word| word.replace([',', '.'], "").parse().ok()).collect()
}

/// Lane `prometheus`.
mod prometheus {
    use super::*;

    #[test]
    fn twelve_ranks_on_three_nodes_are_one_job() {
        let Some(prometheus) = tool("prometheus") else { return };
        let mut nodes: Vec<Node> = (0..NODES).map(Node::new).collect();
        for (number, node) in nodes.iter_mut().enumerate() {
            for gpu in 0..RANKS {
                let rank = number * RANKS + gpu;
                // Rank 7 holds the most by far.
                node.rank(rank, gpu, if rank == 7 { 1024 } else { 256 + rank as u64 });
            }
        }
        let mut leaver = nodes[2].ranks.remove(1);
        let targets: Vec<SocketAddr> = nodes.iter().map(|node| node.address).collect();
        let dir = nodes[0].machine.dir.join("prometheus");
        std::fs::create_dir_all(&dir).expect("a folder");
        let server = Server::of_fleet(&prometheus, &dir, &targets);
        let url = format!("http://{}", server.address());
        let fleet = |arguments: &[&str]| nodes[0].ctl(&[&["job", "--prometheus", &url], arguments].concat());

        let is_whole = |document: &Value| {
            let members = document["members"].as_array().expect("members");
            members.len() == NODES * RANKS
                && members.iter().all(|member| member["untrackable_bytes"].is_i64())
        };
        let whole = until(60, "all ranks in Prometheus", || {
            let output = fleet(&["bert", "--json"]);
            output.status.success().then(|| document(&output)).filter(is_whole)
        });
        assert_eq!(whole["nodes"], NODES);
        assert_eq!(whole["processes"], NODES * RANKS);
        assert_eq!(whole["world_size"], NODES * RANKS);
        assert_eq!(whole["missing_ranks"], serde_json::json!([]));
        let worst = &whole["members"][whole["worst"].as_u64().expect("one") as usize];
        assert_eq!((&worst["rank"], &worst["gpu"]), (&7.into(), &"3".into()));
        assert_eq!(worst["node"], targets[1].to_string());
        assert_eq!(worst["tracked_bytes"], 1024 * MIB);
        assert_eq!((&worst["who"]["job"], &worst["who"]["slurm_job"]), (&"bert".into(), &"8812".into()));
        // Sums are exact: over members, over parts, and against what the programs hold.
        for key in ["used_bytes", "tracked_bytes", "untrackable_bytes"] {
            assert_eq!(sum(&whole, key), whole[key].as_i64().expect("a sum"), "{key}");
        }
        let parts = ["predates_bytes", "tracked_bytes", "untrackable_bytes"].map(|key| sum(&whole, key));
        assert_eq!(whole["used_bytes"], parts.iter().sum::<i64>());
        let held: u64 = (0..NODES * RANKS).map(|rank| if rank == 7 { 1024 } else { 256 + rank as u64 }).sum();
        assert_eq!(whole["tracked_bytes"], held * MIB);
        let mean = whole["used_bytes"].as_f64().expect("a sum") / (NODES * RANKS) as f64;
        let imbalance = worst["used_bytes"].as_f64().expect("known") / mean;
        assert!((whole["imbalance"].as_f64().expect("known") - imbalance).abs() < 1e-9, "{whole}");

        // For people: the columns add up as printed. Slurm's number is the same job.
        let reported = text(&fleet(&["8812"]));
        println!("{reported}");
        assert!(reported.starts_with("job 8812 (job bert; "), "{reported}");
        assert!(reported.contains(": 12 processes on 3 nodes, 12 of 12 ranks\n"), "{reported}");
        let is_row = |line: &&str| line.contains("  GPU ") && line.starts_with(|c: char| c.is_ascii_digit());
        let rows: Vec<Vec<i64>> = reported.lines().filter(is_row).map(|line| amounts(line, 5)).collect();
        assert_eq!(rows.len(), NODES * RANKS, "{reported}");
        let total = amounts(reported.lines().find(|line| line.starts_with("sum")).expect("a sum"), 1);
        for (column, total) in total.iter().enumerate() {
            assert_eq!(rows.iter().map(|row| row[column]).sum::<i64>(), *total, "{reported}");
        }
        for row in rows.iter().chain([&total]) {
            assert_eq!(row[0], row[1] + row[3], "used = tracked + gap: {reported}");
        }
        assert!(reported.contains(&format!("most: rank 7 ({}, GPU 3) with ", targets[1])), "{reported}");

        // One node alone knows its own ranks, and that there are others.
        let here = document(&nodes[1].ctl(&["job", "bert", "--json"]));
        assert_eq!(
            (&here["processes"], &here["missing_ranks"]),
            (&RANKS.into(), &serde_json::json!([0, 1, 2, 3, 8, 9, 10, 11]))
        );
        let reported = text(&nodes[1].ctl(&["job", "bert"]));
        assert!(
            reported.contains("4 of 12 ranks")
                && reported.contains("missing: rank 0-3, 8-11: no running process here"),
            "{reported}"
        );
        assert!(reported.contains("most: rank 7 (GPU 3)"), "{reported}");

        // The list of jobs, everywhere and here.
        let reported = text(&fleet(&[]));
        println!("{reported}");
        assert!(
            reported.lines().any(|line| line.starts_with("bert ") && line.contains(" 12/12 ")),
            "{reported}"
        );
        let reported = text(&nodes[0].ctl(&["job"]));
        assert!(
            reported.lines().any(|line| line.starts_with("bert ") && line.contains(" 4/12 ")),
            "{reported}"
        );

        // A rank that ends is missing in the sum, and known on its node.
        leaver.end();
        until(60, "a missing rank", || {
            let document = document(&fleet(&["bert", "--json"]));
            (document["missing_ranks"] == serde_json::json!([9])).then_some(())
        });
        until(20, "an ended rank", || {
            let reported = text(&nodes[2].ctl(&["job", "bert"]));
            reported.contains("ended, and not in the sums: rank 9 (GPU 1) (exit 0)").then_some(())
        });

        // Errors are reported.
        let failing = |arguments: &[&str]| {
            let output = fleet(arguments);
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let (code, why) = failing(&["bertha"]);
        assert_eq!(code, Some(3), "{why}");
        assert!(why.contains("no job bertha") && why.contains("there are: bert"), "{why}");
        let (code, why) = failing(&["a\"} or vector(1) or gpumem_process_info{job_name=\"b"]);
        assert_eq!(code, Some(3), "{why}");
        let daemon = format!("http://{}", targets[0]);
        let silent = format!("http://{}", free_address());
        for (url, expected, words) in [
            (&*silent, 6, "cannot be reached"),
            (&*daemon, 6, "not as a Prometheus does"),
            ("https://prometheus.invalid", 6, "the Prometheus at https://prometheus.invalid"),
        ] {
            let output = nodes[0].ctl(&["job", "bert", "--prometheus", url]);
            let why = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(expected), "{why}");
            assert!(why.contains(words), "{why}");
        }
    }
}
