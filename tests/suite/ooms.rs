//! `gpumemctl oom` on the simulated GPU, live: another tenant grew; the victim was killed before a record was sent; its
//! pool was fragmented; it had no agent; it was caught five hundred times; and ends that were no OOM.
use gpumem_tests::live::{Daemon, Job, Machine, Mixer, own_user, until};
use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
const MIB: i64 = 1 << 20;

struct Scene {
    machine: Machine,
    daemon: Daemon,
}

impl Scene {
    fn new(config: &str) -> Self {
        let machine = Machine::new(&["memory=16G"]);
        let daemon = Daemon::start(&machine, "daemon", &format!("{FAST}{config}"));
        Scene { machine, daemon }
    }

    /// Creates a scene whose kernel log is a file of the test.
    fn with_log(name: &str) -> (Self, PathBuf) {
        let log = std::env::temp_dir().join(format!("gpumem-kmsg-{name}-{}", std::process::id()));
        std::fs::write(&log, "").expect("written");
        (Scene::new(&format!("[kernel]\nlog = {log:?}\n")), log)
    }

    fn covered(&self) -> Mixer {
        let mut mixer = Mixer::start(&self.machine, &self.daemon);
        mixer.ok("device 0");
        mixer
    }

    fn bare(&self) -> Mixer {
        let mut command = Mixer::command(&self.machine, &self.daemon);
        command.env_remove("CUDA_INJECTION64_PATH");
        let mut mixer = Mixer::run(&mut command);
        mixer.ok("device 0");
        mixer
    }

    /// Waits until NVML has reported this many bytes of a process.
    fn used(&self, pid: u32, at_least: i64) {
        self.row(pid, &format!("{at_least} of {pid}"), |row| row["used_bytes"].as_i64() >= Some(at_least));
    }

    /// Also waits until the agent has reported that memory.
    fn explained(&self, pid: u32, at_least: i64) {
        self.row(pid, &format!("{at_least} of {pid}, explained"), |row| {
            row["used_bytes"].as_i64() >= Some(at_least)
                && row["tracked_bytes"].as_i64() >= Some(at_least)
                && row["untrackable_bytes"].is_i64()
        });
    }

    fn row(&self, pid: u32, what: &str, is_so: impl Fn(&Value) -> bool) {
        until(30, what, || {
            let ps = self.daemon.asked("/v1/ps")?;
            let mut rows =
                ps["processes"].as_array()?.iter().filter(|row| row["pid"].as_u64() == Some(pid.into()));
            rows.any(&is_so).then_some(())
        });
    }

    /// Waits until its run is closed.
    fn over(&self, pid: u32) {
        until(60, &format!("the end of {pid}"), || {
            let runs = self.daemon.asked(&format!("/v1/runs?pid={pid}"))?;
            (runs[0]["state"]["state"] == "closed").then_some(())
        });
    }

    fn oom_text(&self, arguments: &[&str]) -> String {
        let output = self.daemon.ctl(&self.machine, arguments).output().expect("gpumemctl runs");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Returns the first screen, with the long form after it, and the JSON document.
    fn oom(&self, pid: u32) -> (String, Value) {
        let pid = pid.to_string();
        let text = self.oom_text(&["oom", &pid]) + &self.oom_text(&["oom", &pid, "--verbose"]);
        println!("{text}");
        let json = serde_json::from_str(&self.oom_text(&["oom", &pid, "--json"])).expect("JSON");
        (text, json)
    }
}

fn bytes(value: &Value) -> i64 {
    value.as_i64().unwrap_or_else(|| panic!("{value} is not a number"))
}

/// Asserts that every sum of an entry adds up.
fn adds_up(oom: &Value) {
    assert!(oom["gpu"].as_str().is_some_and(|gpu| gpu.starts_with("GPU-")), "{oom}");
    let of = &oom["device"];
    let holders =
        of["holders"].as_array().expect("holders").iter().map(|holder| bytes(&holder["used_bytes"]));
    let beside = bytes(&of["others"][1]) + bytes(&of["unaccounted_bytes"]) + bytes(&of["free_bytes"]);
    let sum = holders.sum::<i64>() + beside + of["system_bytes"].as_i64().unwrap_or(0);
    assert_eq!(sum, bytes(&of["total_bytes"]), "{oom}");
    if let Some(held) = oom["held_bytes"].as_i64() {
        let parts = oom["held"].as_array().expect("parts").iter().map(|part| bytes(&part["bytes"]));
        assert_eq!(parts.sum::<i64>(), held, "{oom}");
        assert_eq!(held, bytes(&of["holders"][0]["used_bytes"]), "you are the first holder: {oom}");
    }
}

/// Asserts the same for the text: the numbers before and after each `=`.
fn adds_up_as_printed(text: &str) {
    let numbers = |words: &str| -> Vec<i64> {
        let words = words.split(|letter: char| !letter.is_ascii_digit() && !",.-".contains(letter));
        let tenths = |word: &str| {
            let word = word.trim_matches(',').replace(',', "");
            word.parse::<f64>().ok().map(|number| (number * 10.0).round() as i64)
        };
        words.filter_map(tenths).collect()
    };
    let total = |line: &str| numbers(line.split(" = ").nth(1).unwrap_or_default())[0];
    let lines: Vec<&str> = text.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        if line.starts_with("you ") && line.contains(" = ") {
            let parts: i64 = line.split(" = ").next().expect("parts").split(" + ").map(last).sum();
            assert_eq!(parts, total(line), "{line}");
        }
        if line.contains(" with above") {
            let first = lines.iter().take(at).rposition(|line| line.starts_with("holders")).expect("holders");
            let above: i64 =
                lines[first..at].iter().map(|line| last(line.split("  (").next().expect("a line"))).sum();
            let parts: i64 = line.split(" = ").next().expect("parts").split(" + ").map(last).sum();
            assert_eq!(above + parts, total(line), "{text}");
        }
    }
}

/// Returns the last number of the words, in tenths.
fn last(words: &str) -> i64 {
    let word = words.split_whitespace().next_back().expect("a word").replace(',', "");
    (word.parse::<f64>().unwrap_or_else(|_| panic!("{words:?}")) * 10.0).round() as i64
}

#[test]
fn oom_because_another_tenant_grew() {
    let scene = Scene::new("");
    let mut tenant = scene.bare();
    tenant.ok("alloc a 1G");
    let mut victim = scene.covered();
    victim.ok("tag model/weights; alloc a 4G");
    scene.used(tenant.pid(), 1024 * MIB);
    scene.explained(victim.pid(), 4096 * MIB);
    tenant.ok("alloc b 6G");
    scene.used(tenant.pid(), 7168 * MIB);
    // Killed before the agent's thread has sent any record.
    victim.send("tag model/activations\nalloc b 6G\ndie");
    scene.over(victim.pid());
    let (text, json) = scene.oom(victim.pid());
    let oom = &json["ooms"][0];
    adds_up(oom);
    adds_up_as_printed(&text);
    assert_eq!((json["schema"].as_str(), json["version"].as_u64()), (Some("gpumem.oom"), Some(1)));
    assert_eq!((oom["what"].as_str(), oom["asked_bytes"].as_i64()), (Some("oom"), Some(6144 * MIB)));
    let holder = &oom["device"]["holders"][1];
    assert_eq!(
        (holder["pid"].as_u64(), holder["user"].as_str()),
        (Some(tenant.pid().into()), Some(&*own_user()))
    );
    assert!(bytes(&holder["used_bytes"]) >= 7168 * MIB, "{holder}");
    assert!(bytes(&holder["growth_bytes"]) >= 6144 * MIB, "{holder}");
    assert_eq!(oom["tag"], "model/activations");
    assert_eq!(oom["fate"]["fate"], "fatal");
    let weights =
        oom["held"].as_array().expect("parts").iter().any(|part| bytes(&part["bytes"]) == 4096 * MIB);
    assert!(weights, "its own tags: {oom}");
    for expected in [
        "FATAL (",
        " asked 6,144",
        "at model/activations\n",
        &format!("{} {}", own_user(), tenant.pid()),
        "Asked for 6,144 MiB by model/activations; ",
        "1. other processes hold ",
        "\n   Without them the request fits with ",
        &format!("\nnext: gpumemctl oom {} --verbose | --all | --json; gpumemctl report ", victim.pid()),
    ] {
        assert!(text.contains(expected.trim_start()), "{expected:?} in {text}");
    }
    tenant.end();
}

#[test]
fn fragmented_pool_causes_oom() {
    let scene = Scene::new("");
    let mut victim = scene.covered();
    victim.ok("caching torch; alloc a 12G; segment torch a 12G; tag model/blocks");
    for at in 0..6 {
        victim.ok(&format!("block torch a {}G 1G", 2 * at));
    }
    scene.explained(victim.pid(), 12_288 * MIB);
    victim.send("alloc c 6G\nleave 1");
    scene.over(victim.pid());
    let (text, json) = scene.oom(victim.pid());
    let oom = &json["ooms"][0];
    adds_up(oom);
    adds_up_as_printed(&text);
    let idle = ["idle_bytes", "idle_pieces", "largest_idle_bytes"].map(|key| bytes(&oom[key]));
    assert_eq!(idle, [6144 * MIB, 6, 1024 * MIB]);
    for expected in [
        "\n1. 6,144 MiB of the pool are unused, and the largest piece of 1,024 MiB is too small for 6,144 MiB",
        "\n   Without fragmentation the request fits with ",
        "\nOther processes: none.\n",
        "\nFragmentation: 6,144 MiB unused in 6 pieces, largest piece 1,024 MiB; see 1.\n",
    ] {
        assert!(text.contains(expected), "{expected:?} in {text}");
    }
    assert!(text.contains("idle     6,144 in 6 pieces, largest block 1,024 < 6,144\n"), "{text}");
}

#[test]
fn oom_of_a_process_without_an_agent_is_inferred() {
    let scene = Scene::new("");
    let mut tenant = scene.covered();
    tenant.ok("tag other; alloc a 1G");
    let mut victim = scene.bare();
    victim.ok("alloc a 13G");
    scene.used(victim.pid(), 13_312 * MIB);
    scene.used(tenant.pid(), 1024 * MIB);
    victim.send("alloc b 9G\nleave 1");
    scene.over(victim.pid());
    let mut modest = scene.bare();
    modest.ok("alloc a 1G");
    scene.used(modest.pid(), 1024 * MIB);
    modest.send("leave 1");
    scene.over(modest.pid());
    let (text, json) = scene.oom(victim.pid());
    let oom = &json["ooms"][0];
    adds_up(oom);
    assert_eq!((oom["what"].as_str(), oom["asked_bytes"].as_i64()), (Some("suspected"), None));
    assert!(
        text.starts_with("PERHAPS OUT OF MEMORY  ") && text.contains("verdict  suspected: it ended while "),
        "{text}"
    );
    let (text, json) = scene.oom(modest.pid());
    assert_eq!(json["ooms"].as_array().map(Vec::len), Some(0));
    assert_eq!(json["covered"], false);
    assert!(text.contains("no agent reported whether memory ran out"), "{text}");
    // By time and device.
    let at = scene.oom_text(&["oom", "--at", "1s", "--gpu", "0", "--for", "2m"]);
    println!("{at}");
    for expected in [
        ": 2 processes ended or ran out of memory then".to_owned(),
        format!("pid {}  {}", victim.pid(), own_user()),
        "PERHAPS OUT OF MEMORY  ".to_owned(),
        format!("{} {} mixer: exit 1, used 1,522", own_user(), modest.pid()),
    ] {
        assert!(at.contains(&expected), "{expected:?} in {at}");
    }
    let at: Value =
        serde_json::from_str(&scene.oom_text(&["oom", "--at", "1s", "--gpu", "0", "--json"])).expect("JSON");
    let found: Vec<_> =
        at["processes"].as_array().expect("processes").iter().map(|of| of["pid"].as_u64()).collect();
    assert_eq!(found, [Some(victim.pid().into()), Some(modest.pid().into())]);
    assert_eq!(at["processes"][0]["ooms"][0]["what"], "suspected");
    let long_ago = scene.oom_text(&["oom", "--at", "2d", "--gpu", "0"]);
    assert!(long_ago.contains("no process ended or ran out of memory then"), "{long_ago}");
    tenant.end();
}

#[test]
fn host_oom_kill_is_no_gpu_oom() {
    let (scene, log) = Scene::with_log("host");
    let mut victim = scene.covered();
    victim.ok("tag model; alloc a 12G");
    victim.refused("alloc b 9G");
    scene.explained(victim.pid(), 12_288 * MIB);
    let mut file = std::fs::OpenOptions::new().append(true).open(&log).expect("the log");
    let pid = victim.pid();
    writeln!(
        file,
        "6,1,1,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/slurm/uid_0/job_8812,\
         task_memcg=/slurm/uid_0/job_8812/step_0,task=mixer,pid={pid},uid=0\n\
         3,2,1,-;Memory cgroup out of memory: Killed process {pid} (mixer) total-vm:9kB, anon-rss:8kB, UID:0"
    )
    .expect("written");
    victim.kill();
    scene.over(pid);
    let (text, json) = scene.oom(pid);
    assert_eq!(json["ending"]["cause"], "cgroup_memory");
    assert_eq!(json["ending"]["owner"], "Slurm job 8812");
    assert!(
        text.contains(
            "killed by the kernel for HOST memory, not GPU memory: the limit of Slurm job 8812 was reached\n"
        ),
        "{text}"
    );
    assert!(!text.contains("FATAL"), "what the driver refused was survived: {text}");
    let doctor = scene.oom_text(&["doctor"]);
    assert!(doctor.contains(&format!("kernel log: {}", log.display())), "{doctor}");
    let _ = std::fs::remove_file(log);
}

#[test]
fn end_by_a_gpu_fault_is_no_oom() {
    let (scene, log) = Scene::with_log("xid");
    let mut victim = scene.bare();
    victim.ok("alloc a 14G");
    scene.used(victim.pid(), 14_336 * MIB);
    let pid = victim.pid();
    let line = format!(
        "NVRM: Xid (PCI:0000:01:00): 31, pid={pid}, name=mixer, Ch 00000008, MMU Fault: ENGINE GRAPHICS\n"
    );
    std::fs::write(&log, line).expect("written");
    victim.send("leave 1");
    scene.over(pid);
    let (text, json) = scene.oom(pid);
    assert_eq!((json["ending"]["cause"].as_str(), json["ending"]["xid"].as_u64()), (Some("xid"), Some(31)));
    assert_eq!(json["ooms"].as_array().map(Vec::len), Some(0), "nothing is suspected");
    assert!(text.contains("Xid 31 (MMU fault: ") && text.contains("a fault, not an OOM"), "{text}");
    let _ = std::fs::remove_file(log);
}

#[test]
fn unreadable_kernel_log_is_reported() {
    let scene = Scene::new("[kernel]\nlog = \"/nonexistent/kmsg\"\n");
    // A daemon that has only begun has no NVML yet, and doctor calls that bad.
    let doctor = until(20, "NVML", || {
        let output = scene.daemon.ctl(&scene.machine, &["doctor"]).output().expect("gpumemctl runs");
        output.status.success().then(|| String::from_utf8(output.stdout).expect("UTF-8"))
    });
    let line =
        doctor.lines().find(|line| line.contains(" kernel.log ")).unwrap_or_else(|| panic!("{doctor}"));
    assert!(line.starts_with("warn ") && line.contains("/nonexistent/kmsg: No such file"), "{line}");
}

/// Lane `torch`.
mod torch {
    use super::*;
    use gpumem_tests::live::torch as wheels;
    use gpumem_tests::live::torch::VERSIONS;

    #[test]
    fn five_hundred_caught_ooms() {
        let Some(wheel) = wheels::wheel(VERSIONS[1]) else { return };
        let machine = wheels::machine(&[]);
        let daemon = Daemon::start(&machine, "daemon", FAST);
        let scene = Scene { machine, daemon };
        let mut job = Job::start(&mut wheel.covered(&scene.machine, &scene.daemon.runtime, "caught.py", &[]));
        let printed = wheels::finished(&mut job);
        assert_eq!(printed[0]["caught"], 500);
        scene.daemon.wait_for_the_end_of(&scene.machine, &[&job]);
        let (text, json) = scene.oom(job.pid());
        let ooms = json["ooms"].as_array().expect("entries");
        let true_ones = ooms.iter().filter(|oom| oom["what"] == "oom");
        let kept: i64 = true_ones.clone().map(|oom| bytes(&oom["count"])).sum();
        assert_eq!(kept + bytes(&json["dropped"]), 500, "each is counted once: {text}");
        assert!(ooms.len() <= 32 && true_ones.clone().all(|oom| oom["fate"]["fate"] == "survived"), "{text}");
        assert!(text.lines().count() <= 25 && text.contains("caught: "), "{text}");
    }
}
