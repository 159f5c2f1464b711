//! gpumemd as users install it: the package in a clean Debian booted by a real systemd, in both modes of control
//! groups, next to a program that trains on the simulated GPU. docs/systemd.md has the guarantees.
mod boot;

use boot::{Boot, OLD, packages, project};
use gpumem_ledger::ClosedSample;
use gpumem_tests::live::daemon::ask;
use gpumem_tests::live::programs::fake;
use gpumem_tests::live::{replay, truth, try_replay, until};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

const MACHINE: &str = "/dev/shm/machine";
const TRUTH: &str = "/dev/shm/truth";
const CONFIG: &str = "/etc/gpumemd/gpumemd.toml";
/// Limit for a restart to restore the complete state, on an idle machine.
const RESTARTED: Duration = Duration::from_millis(500);
/// Watchdog timeout that the test sets, longer than a busy machine keeps a daemon waiting; a stopped daemon's restart may take that much longer.
const WATCHDOG: Duration = Duration::from_secs(3);
/// Allowed delay of systemd's timers: here the watchdog's and `RestartSec`'s.
const SLACK: Duration = Duration::from_millis(250);

/// A booted machine with a simulated GPU, the previous package, and a job of the user ana.
struct Node {
    boot: Boot,
    /// The job's process.
    pid: u32,
    /// Its connection, by the inode of its socket.
    connection: String,
}

/// Checks that a step did not exceed its limit.
fn is_in_time(what: &str, took: Duration, bar: Duration) {
    gpumem_test_support::bar(what, took, bar);
}

/// Prints the duration of a step.
fn timed<T>(what: &str, step: impl FnOnce() -> T) -> T {
    let since = Instant::now();
    let done = step();
    println!("  {what}: {:.1} s", since.elapsed().as_secs_f64());
    done
}

/// A drop-in for the unit.
fn drop_in(boot: &Boot, name: &str, text: &str) {
    let dir = "/run/systemd/system/gpumemd.service.d";
    boot.sh(&format!(
        "mkdir -p {dir}; printf '%s\n' '[Service]' \"{text}\" > {dir}/{name}.conf; systemctl daemon-reload"
    ));
}

/// Environment of programs that use the simulated GPU.
fn environment() -> String {
    format!("GPUMEM_SIM={MACHINE} LD_LIBRARY_PATH=/opt/fake GPUMEM_SITES=0")
}

fn install(boot: &Boot, package: &std::path::Path) {
    let copy = boot.file("/tmp/gpumemd.deb");
    std::fs::copy(package, copy).expect("copied");
    boot.sh("dpkg -i /tmp/gpumemd.deb");
}

/// Starts a trainer under gpumemctl by systemd. Returns the trainer's pid.
fn train(boot: &Boot, unit: &str, arguments: &str) -> u32 {
    let trainer = fake().join("bin/trainer");
    boot.sh(&format!(
        "systemd-run --quiet --unit={unit} --uid=ana --working-directory=/tmp -p StandardOutput=file:/tmp/{unit}.out \
         env {} gpumemctl run -- {} {arguments}",
        environment(),
        trainer.display(),
    ));
    until(30, "a trainer", || {
        let printed = boot.sh_may_fail(&format!("cat /tmp/{unit}.out")).1;
        printed
            .lines()
            .find_map(|line| line.strip_prefix("ready pid=")?.split_whitespace().next()?.parse().ok())
    })
}

impl Node {
    fn new(mode: &str) -> Option<Self> {
        let boot = Boot::start(mode)?;
        let packages = packages();
        timed("install", || install(&boot, &packages.old));
        assert_eq!(boot.show("gpumemd", "ActiveState"), "active", "{}", boot.journal());
        assert_eq!(boot.sh("systemctl --failed --quiet --no-legend"), "", "failed units");

        let tool = fake().join("bin/fake-gpu");
        boot.sh(&format!(
            "useradd -m -u 1500 ana; cp -r {}/lib /opt/fake; {} init {MACHINE} devices=2 truth={TRUTH}; touch {TRUTH}; \
             chmod 666 {MACHINE} {TRUTH}",
            fake().display(),
            tool.display(),
        ));
        drop_in(&boot, "10-fake", &format!("Environment={}", environment()));
        boot.sh(&format!(
            "sed -i 's|^# record = .*|record = \"/var/lib/gpumemd/%t.gpumem\"|; s|^list_every_s = .*|list_every_s = 0.1|; \
             s|^list_budget = .*|list_budget = 1.0|' {CONFIG}; gpumemd --check; systemctl restart gpumemd"
        ));
        let pid = train(&boot, "job", "--devices 0,1 --steps 1000000 --step-ms 5 --hold 600 --quiet");
        let mut node = Node { boot, pid, connection: String::new() };
        node.until_covered();
        node.connection = node.sockets();
        assert!(node.connection.contains("socket:["), "{}", node.connection);
        Some(node)
    }

    fn sockets(&self) -> String {
        self.boot.sh(&format!("ls -l /proc/{}/fd | grep -o 'socket:.*' | sort", self.pid))
    }

    fn ctl(&self, arguments: &str) -> Value {
        let printed = self.boot.sh(&format!("gpumemctl {arguments}"));
        serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{arguments}: {error}: {printed}"))
    }

    /// The daemon's reply, requested from outside: starting a program in the machine would distort measurements.
    fn ask(&self, path: &str) -> Option<Value> {
        ask(&self.boot.file("/run/gpumemd/control.sock"), path)
    }

    fn row(&self) -> Option<Value> {
        self.ask("/v1/ps")?["processes"].as_array()?.iter().find(|row| row["pid"] == self.pid).cloned()
    }

    /// Returns the job's current run.
    fn run(&self) -> Option<Value> {
        self.ask("/v1/runs")?.as_array()?.iter().find(|run| run["process"]["pid"] == self.pid).cloned()
    }

    /// Waits until the job's memory is fully covered: its agent has sent its whole state, and there is a sample.
    fn until_covered(&self) {
        let mut coverage = None;
        let deadline = Instant::now() + Duration::from_secs(30);
        while Instant::now() < deadline {
            coverage = self.run().map(|run| run["coverage"].clone());
            let is_whole =
                coverage.as_ref().is_some_and(|of| of["covered"] == true && of["partial_state"] == false);
            if is_whole && self.row().is_some_and(|row| row["untrackable_bytes"].is_i64()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the job is not covered: {coverage:?} {:?}\n{}", self.row(), self.boot.journal());
    }

    fn metric(&self, series: &str) -> Option<f64> {
        let text = self.boot.sh_may_fail("curl -s -m 5 http://127.0.0.1:9837/metrics").1;
        text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.trim().parse().ok())
    }

    fn main_pid(&self) -> u32 {
        self.boot.show("gpumemd", "MainPID").parse().expect("a pid")
    }

    /// Recordings are named by the second.
    fn until_another_second(&self) {
        until(5, "another second", || {
            let newest = self.recordings().pop()?.file_stem()?.to_str()?.parse::<u64>().ok()?;
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
            (now.as_secs() > newest).then_some(())
        });
    }

    /// This life of the daemon has recorded samples of the job in a known state, to be compared later: on a busy machine
    /// its first ones may repeat an older state.
    fn until_recorded(&self) {
        until(30, "recorded samples of the job", || {
            let newest = self.recordings().pop()?;
            let samples = try_replay(&newest).ok()?.samples;
            let is_known =
                |sample: &ClosedSample| sample.tracked_bytes.is_some() && !sample.stale && !sample.partial;
            let known =
                samples.iter().filter(|(key, _, sample)| key.pid == self.pid && is_known(sample)).count();
            (known >= 3).then_some(())
        });
    }

    /// Returns the recording of each life of the daemon, in the order of their starts.
    fn recordings(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.boot.file("/var/lib/gpumemd")).expect("the state directory");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        let mut recordings: Vec<_> =
            paths.filter(|path| path.extension().is_some_and(|extension| extension == "gpumem")).collect();
        recordings.sort();
        recordings
    }

    /// Waits until another daemon than `before` is ready, and asserts that the job's connection is unchanged.
    fn until_replaced(&self, before: u32) {
        until(20, "another daemon", || (![0, before].contains(&self.main_pid())).then_some(()));
        until(20, "a ready one", || (self.boot.show("gpumemd", "ActiveState") == "active").then_some(()));
        self.until_covered();
        assert_eq!(self.sockets(), self.connection, "the agent has connected anew\n{}", self.boot.journal());
    }

    /// Compares every sample of the recordings with the machine's truth.
    fn compare(&self, least_recordings: usize) {
        let journal = truth::read(&self.boot.file(TRUTH));
        let mut recordings = 0;
        let (mut exact, mut moving, mut excused) = (0, 0, 0);
        for path in self.recordings() {
            let compared = replay(&path).compare(&journal, Some(self.pid));
            recordings += usize::from(compared.exact + compared.torn > 0);
            exact += compared.exact;
            moving += compared.torn + compared.open + compared.close;
            excused += compared.excused;
        }
        println!(
            "  samples: {exact} exact, {moving} while memory moved, {excused} before the state was known"
        );
        assert!(recordings >= least_recordings, "{recordings} recordings with samples of the job");
        assert!(exact >= 10, "{exact} samples at rest");
    }
}

/// Replaces the daemon in every way, under a job that does not notice.
fn replaced(node: &Node) {
    let boot = &node.boot;
    timed("restart", || {
        let before = node.main_pid();
        node.until_recorded();
        node.until_another_second();
        let since = Instant::now();
        boot.sh("systemctl restart gpumemd");
        node.until_covered();
        is_in_time("everything known again after a restart", since.elapsed(), RESTARTED);
        node.until_replaced(before);
        assert_eq!(node.metric("gpumemd_agent_resumed_total"), Some(1.0));
        assert_eq!(boot.show("gpumemd", "NFileDescriptorStore"), "3");
        // Once the run is joined with the part that the previous daemon had written.
        until(20, "a history without a hole", || (node.run()?["coverage"]["lost"] == 0).then_some(()));
        node.until_recorded();
    });
    timed("3 kills", || {
        for _ in 0..3 {
            let before = node.main_pid();
            node.until_another_second();
            boot.sh("systemctl kill -s KILL gpumemd");
            node.until_replaced(before);
            node.until_recorded();
        }
    });
    timed("watchdog", || {
        drop_in(boot, "20-watchdog", "WatchdogSec=3s");
        node.until_another_second();
        boot.sh("systemctl restart gpumemd");
        node.until_covered();
        node.until_recorded();
        node.until_another_second();
        let before = node.main_pid();
        let since = SystemTime::now();
        boot.sh(&format!("kill -STOP {before}"));
        // The stopped daemon does not reply: requests wait for the next one.
        node.until_covered();
        let known = SystemTime::now();
        let took = |since: SystemTime| known.duration_since(since).expect("in this order");
        let noticed = boot.logged("Watchdog timeout");
        println!("  noticed after {:.2} s", (took(since) - took(noticed)).as_secs_f64());
        is_in_time("known again after systemd's turn", took(boot.logged("Scheduled restart")), RESTARTED);
        is_in_time("a stopped daemon", took(since), WATCHDOG + RESTARTED + 2 * SLACK);
        node.until_replaced(before);
        node.until_recorded();
        node.until_another_second();
        boot.sh("rm /run/systemd/system/gpumemd.service.d/20-watchdog.conf; systemctl daemon-reload; systemctl restart gpumemd");
    });
    timed("upgrade", || {
        let before = node.main_pid();
        node.until_another_second();
        install(boot, &packages().new);
        node.until_replaced(before);
        node.until_recorded();
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(boot.sh("readlink /usr/lib/gpumem/current").trim(), version);
        let maps = boot.sh(&format!("grep libgpumem /proc/{}/maps", node.pid));
        assert!(maps.contains(&format!("/usr/lib/gpumem/{OLD}/")) && !maps.contains("(deleted)"), "{maps}");
    });
    timed("reload", || reloaded(node));
    // Before and after the restart, three kills, the restarts with and without the watchdog, the upgrade.
    timed("compare", || node.compare(9));
    timed("10 restarts under scrapes", || {
        boot.sh("systemd-run --quiet --unit=scrapes -p StandardOutput=file:/tmp/scrapes sh -c \
                 'until [ -e /tmp/enough ]; do curl -s -f -m 60 -o /dev/null http://127.0.0.1:9837/metrics && echo ok || echo bad; done'");
        let scrapes = || boot.sh_may_fail("cat /tmp/scrapes").1.lines().count();
        for _ in 0..10 {
            // On a busy machine, a scrape may take longer than several restarts.
            let before = scrapes();
            boot.sh("systemctl restart gpumemd");
            until(10, "another scrape", || (scrapes() > before).then_some(()));
        }
        boot.sh("touch /tmp/enough");
        until(10, "the last scrape", || (boot.show("scrapes", "ActiveState") != "active").then_some(()));
        let printed = boot.sh("cat /tmp/scrapes");
        let failed = printed.matches("bad").count();
        assert_eq!(failed, 0, "of {} scrapes", printed.lines().count());
        node.until_covered();
        assert_eq!(node.sockets(), node.connection);
    });
}

/// Checks the messages of a reloaded configuration.
fn reloaded(node: &Node) {
    let boot = &node.boot;
    let reload = |change: &str| {
        let before = node.metric("gpumemd_reloads_total").unwrap_or_default()
            + node.metric("gpumemd_reload_errors_total").unwrap_or_default();
        boot.sh(&format!("sed -i '{change}' {CONFIG}; systemctl reload gpumemd"));
        until(10, "the configuration to be read", || {
            let now = node.metric("gpumemd_reloads_total")? + node.metric("gpumemd_reload_errors_total")?;
            (now > before).then_some(())
        });
    };
    let pid = node.main_pid();
    reload(
        "s|^max_series = .*|max_series = 500|; s|^memory_hz = .*|memory_hz = 20|; s|^record = .*|# record = \"/x\"|",
    );
    boot.wait_for_log(&["changed", "key=\"metrics.max_series\"", "old=\"10000\"", "new=\"500\""]);
    boot.wait_for_log(&["changed", "key=\"record\"", "new=\"unset\""]);
    boot.wait_for_log(&["needs a restart", "key=\"nvml.memory_hz\"", "old=\"10\"", "new=\"20\""]);
    reload("s|^memory_hz = .*|memory_hz = 2000|");
    boot.wait_for_log(&["stays as it was", CONFIG, "memory_hz"]);
    reload("s|^memory_hz = .*|memory_hz = 10|; s|^max_series = .*|max_series = 10000|");
    assert_eq!((boot.show("gpumemd", "ActiveState").as_str(), node.main_pid()), ("active", pid));
}

/// A process ends while there is no daemon: the next one finds its sent and unsent records.
fn ends_unseen(node: &Node) {
    let boot = &node.boot;
    drop_in(boot, "20-slow", "RestartSec=1500ms");
    let pid = train(boot, "short", "--devices 1 --steps 40 --step-ms 1 --hold 600");
    boot.sh("until grep -q holding /tmp/short.out; do sleep 0.05; done");
    until(20, "the short job", || {
        let ps = node.ctl("ps --json");
        let row = ps["processes"].as_array()?.iter().find(|row| row["pid"] == pid)?.clone();
        row["untrackable_bytes"].is_i64().then_some(())
    });
    let before = node.main_pid();
    boot.sh(&format!("systemctl kill -s KILL gpumemd; kill -KILL {pid}"));
    node.until_replaced(before);
    let of_end = until(20, "its end in the journal", || {
        boot.sh(&format!("{} show {MACHINE}", fake().join("bin/fake-gpu").display()));
        truth::read(&boot.file(TRUTH)).into_iter().rfind(|line| line.is_end() && line.pid == pid)
    });
    let run = until(20, "its run", || {
        let (is_good, printed) = boot.sh_may_fail(&format!("gpumemctl report {pid} --json"));
        let run: Value = serde_json::from_str(&printed).ok().filter(|_| is_good)?;
        (run["state"]["state"] == "closed").then_some(run)
    });
    let held = run["devices"][0]["last"]["tracked_bytes"].as_i64();
    assert_eq!(held, Some(of_end.tracked), "{}", run["devices"][0]["last"]);
    boot.sh("rm /run/systemd/system/gpumemd.service.d/20-slow.conf; systemctl daemon-reload; systemctl reset-failed short");
}

/// Checks the unit's restrictions from inside the daemon's namespaces.
fn shut_in(node: &Node, mode: &str) {
    let boot = &node.boot;
    let status = boot.sh(&format!("cat /proc/{}/status", node.main_pid()));
    for line in ["CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "Seccomp:\t2", "NoNewPrivs:\t1"] {
        assert!(status.contains(line), "{line}: {status}");
    }
    assert!(!status.contains("Uid:\t0"), "{status}");
    // Of the driver's devices, which appear after the service's start: allowed is ENXIO from the missing driver, not EPERM.
    let probe = "for at in /dev/nvidiactl /dev/strange /dev/kmsg /etc/probe /root/probe /var/lib/gpumemd/probe; do \
                 sh -c \"exec 3<>$at\"; done > /var/lib/gpumemd/probes 2>&1";
    std::fs::write(boot.file("/opt/probe"), probe).expect("written");
    drop_in(boot, "20-probe", "ExecStartPost=-/bin/sh /opt/probe");
    boot.sh("mknod -m 666 /dev/strange c 10 200; mknod -m 666 /dev/nvidiactl c 195 255; touch /var/lib/gpumemd/probes; \
             chown gpumemd: /var/lib/gpumemd/probes; systemctl restart gpumemd");
    let printed = boot.sh("cat /var/lib/gpumemd/probes");
    println!("{printed}");
    let reported =
        |path: &str| printed.lines().find(|line| line.contains(path)).unwrap_or_default().to_owned();
    assert!(reported("/dev/nvidiactl").contains("No such device or address"), "{printed}");
    assert!(reported("/dev/strange").contains("not permitted"), "{printed}");
    assert!(reported("/etc/probe").contains("Read-only"), "{printed}");
    assert!(reported("/root/probe").contains("ermission denied"), "{printed}");
    assert!(!reported("/dev/kmsg").is_empty(), "{printed}");
    assert_eq!(reported("/var/lib/gpumemd/probe:"), "", "{printed}");
    boot.sh("rm /dev/nvidiactl /run/systemd/system/gpumemd.service.d/20-probe.conf; systemctl daemon-reload; systemctl restart gpumemd");
    if mode == "hybrid" {
        let group = |controller: &str, file: &str| {
            let path = format!("/sys/fs/cgroup/{controller}/system.slice/gpumemd.service/{file}");
            boot.sh(&format!("cat {path}")).trim().to_owned()
        };
        assert_eq!(group("memory", "memory.limit_in_bytes"), (512 << 20).to_string());
        assert_eq!(group("pids", "pids.max"), "64");
    }
    node.until_covered();
}

/// The driver's library is not there at the start, and comes later.
fn waits_for_the_driver(node: &Node) {
    let boot = &node.boot;
    boot.sh("mv /opt/fake/libnvidia-ml.so.1 /opt/fake/away; systemctl restart gpumemd");
    assert_eq!(boot.show("gpumemd", "ActiveState"), "active");
    boot.wait_for_log(&["nvml is down", "was not found"]);
    assert_eq!(node.metric("gpumemd_source_up{source=\"nvml\"}"), Some(0.0));
    let status = until(10, "a status", || {
        Some(boot.show("gpumemd", "StatusText")).filter(|text| text.contains("down: "))
    });
    assert!(status.contains("1 agents, nvml down: "), "{status}");
    // Agents are served meanwhile.
    let row = until(10, "the job", || node.row());
    assert!(row["tracked_bytes"].is_i64() && row["used_bytes"].is_null(), "{row}");
    boot.sh("mv /opt/fake/away /opt/fake/libnvidia-ml.so.1");
    let since = Instant::now();
    node.until_covered();
    println!("  found after {:.1} s", since.elapsed().as_secs_f64());
    assert_eq!(node.metric("gpumemd_source_up{source=\"nvml\"}"), Some(1.0));
}

/// Whether the kernel's log is readable is reported; the administrator decides.
fn kernel_log(node: &Node) {
    let boot = &node.boot;
    let finding = || {
        let doctor = boot.sh_may_fail("gpumemctl doctor").1;
        doctor
            .lines()
            .find(|line| line.contains("kernel log"))
            .unwrap_or_else(|| panic!("{doctor}"))
            .to_owned()
    };
    let before = finding();
    assert!(before.contains("/dev/kmsg:") && !before.starts_with("ok"), "{before}");
    let drop_in = std::fs::read_to_string(project().join("systemd/drop-ins/10-kernel-log.conf")).expect("it");
    std::fs::create_dir_all(boot.file("/etc/systemd/system/gpumemd.service.d")).expect("made");
    std::fs::write(boot.file("/etc/systemd/system/gpumemd.service.d/10-kernel-log.conf"), drop_in)
        .expect("written");
    boot.sh("systemctl daemon-reload; systemctl restart gpumemd");
    let after = finding();
    assert!(after.starts_with("ok") && after.contains("/dev/kmsg"), "{after}");
    boot.sh("rm /etc/systemd/system/gpumemd.service.d/10-kernel-log.conf; systemctl daemon-reload; systemctl restart gpumemd");
    node.until_covered();
}

/// Removal leaves only the data to keep, and purge not even that.
fn removed(node: &Node) {
    let boot = &node.boot;
    boot.sh("systemctl stop job; systemctl stop gpumemd");
    assert_eq!(boot.show("gpumemd", "Result"), "success", "{}", boot.journal());
    boot.sh("dpkg -r gpumemd");
    assert!(!boot.file("/usr/bin/gpumemd").exists() && boot.file(CONFIG).exists());
    boot.sh("dpkg -P gpumemd");
    for path in ["/etc/gpumemd", "/var/lib/gpumemd", "/usr/lib/gpumem", "/run/gpumemd/control.sock"] {
        assert!(!boot.file(path).exists(), "{path} is left");
    }
    let (_, units) = boot.sh_may_fail("systemctl list-unit-files --quiet --no-legend 'gpumemd*'");
    assert_eq!(units, "");
    assert_eq!(boot.sh("systemctl --failed --quiet --no-legend"), "", "failed units");
}

fn life(mode: &str) {
    // One machine at a time: timings need an idle system.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let since = Instant::now();
    let Some(node) = Node::new(mode) else { return };
    println!("{mode}: a covered job after {:.1} s", since.elapsed().as_secs_f64());
    replaced(&node);
    timed("an end without a daemon", || ends_unseen(&node));
    timed("shut in", || shut_in(&node, mode));
    timed("the driver comes later", || waits_for_the_driver(&node));
    timed("kernel log", || kernel_log(&node));
    let report = node.boot.sh(&format!("gpumemctl report {}", node.pid));
    assert!(report.contains("trainer") && report.contains("  2 GPUs"), "{report}");
    assert!(!report.contains("unnamed"), "an unknown device: {report}");
    timed("remove and purge", || removed(&node));
    println!("{mode}: {:.1} s", since.elapsed().as_secs_f64());
}

#[test]
fn service_under_systemd_with_the_unified_hierarchy() {
    life("v2");
}

#[test]
fn service_under_systemd_with_version_1_control_groups() {
    life("hybrid");
}

/// The exposure score is as expected, and this systemd supports each directive.
#[test]
fn the_unit_is_tight_and_right() {
    let unit = project().join("systemd/gpumemd.service");
    let analyze = |arguments: &[&str]| Command::new("systemd-analyze").args(arguments).output();
    let path = unit.to_str().expect("text");
    let Ok(output) = analyze(&["security", "--offline=true", "--threshold=7", "--no-pager", path]) else {
        gpumem_test_support::skip("there is no systemd-analyze", "apt-get install systemd");
        return;
    };
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{}", printed.lines().last().unwrap_or_default());
    assert!(output.status.success(), "{printed}");
    // An unknown directive causes a warning and no failure: there must be none. The program is not installed here.
    let copies = std::env::temp_dir().join(format!("gpumem-units-{}", std::process::id()));
    std::fs::create_dir_all(&copies).expect("a folder");
    let mut verify = vec!["verify".to_owned(), "--man=no".to_owned()];
    for name in ["gpumemd.service", "gpumemd-agent.socket", "gpumemd-control.socket", "gpumemd-http.socket"] {
        let text = std::fs::read_to_string(project().join("systemd").join(name)).expect("a unit");
        let copy = copies.join(name);
        std::fs::write(&copy, text.replace("/usr/bin/gpumemd", "/bin/true")).expect("written");
        verify.push(copy.to_str().expect("text").to_owned());
    }
    let verified = analyze(&verify.iter().map(String::as_str).collect::<Vec<_>>()).expect("it is there");
    let _ = std::fs::remove_dir_all(&copies);
    let printed = String::from_utf8_lossy(&verified.stderr);
    assert!(verified.status.success() && printed.is_empty(), "{printed}");
    // Peers must be identified by the kernel, so settings that prevent that are not used, even if they improve the score.
    let text = std::fs::read_to_string(&unit).expect("the unit");
    let set = |key: &str| text.lines().any(|line| line.split('=').next() == Some(key));
    for key in ["PrivateUsers", "ProtectProc", "ProcSubset", "PrivateDevices", "DynamicUser"] {
        assert!(!set(key), "{key} hides who is who, or the devices");
        assert!(
            text.lines().any(|line| line.starts_with('#') && line.contains(key)),
            "no reason for {key} not being there"
        );
    }
}
