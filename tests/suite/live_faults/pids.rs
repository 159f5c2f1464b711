//! A pid that is reused.

use super::{QUICK, can};
use gpumem_runs::store::Store;
use gpumem_tests::live::hostile::{NOBODY, Shared, hello, start_ticks};
use gpumem_tests::live::prometheus::{free_address, get};
use gpumem_tests::live::{Daemon, Job, Machine, replay, until};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Starts a process with an agent; on command kills it, and gives its pid to a process without an agent.
const SCRIPT: &str = r#"
"$@" --devices 0 > /dev/null & first=$!
echo "first $first"
until [ -e "$GO" ]; do sleep 0.02; done
kill -9 $first; wait $first 2> /dev/null
unset CUDA_INJECTION64_PATH
for try in $(seq 100); do
    echo $((first - 1)) > /proc/sys/kernel/ns_last_pid
    "$@" --devices 1 > /dev/null & second=$!
    [ $second = $first ] && break
    kill -9 $second; wait $second 2> /dev/null
done
echo "second $second"
wait
"#;

/// A process connects as user `uid`, and passes the socket to another process. In `dies` it ends at once; in `lives`,
/// after the daemon has accepted; in `stopped`, while the daemon is stopped; in `tick`, so fast that the victim starts
/// in the same clock tick. A victim that belongs to root gets its pid, by ns_last_pid or in a pid space that wraps.
/// Then the other process sends hello on the socket, with the contents of the file of that name. `honest`: it connects
/// itself.
const TAKEOVER: &str = r#"
import fcntl, os, signal, socket, subprocess, sys, time
how, uid, path, place = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
def wait(name):
    while not os.path.exists(f"{place}/{name}"): time.sleep(0.01)
    return open(f"{place}/{name}", "rb").read()
def say(words): print(words, flush=True)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if how == "honest":
    s.connect(path)
    say(f"victim {os.getpid()}")
elif how == "tick":
    def start(pid): return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[19]
    while True:
        pid = os.fork()
        if pid == 0:
            s.connect(path)
            time.sleep(0.003) # the daemon accepts it
            os._exit(0)
        began = start(pid)
        os.waitpid(pid, 0)
        open("/proc/sys/kernel/ns_last_pid", "w").write(str(pid - 1))
        victim = os.fork()
        if victim == 0:
            time.sleep(600)
            os._exit(0)
        if victim == pid and start(pid) == began: break
        os.kill(victim, 9)
        os.waitpid(victim, 0)
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    say("connected")
    say(f"victim {victim}")
else:
    wrap = how == "wraps"
    if wrap:
        open("/proc/sys/kernel/pid_max", "w").write("400")
        while True: # the first 300 are given out once
            pid = os.fork()
            if pid == 0: os._exit(0)
            os.waitpid(pid, 0)
            if pid > 320: break
    r, w = os.pipe()
    if how == "stopped": os.kill(1, signal.SIGSTOP)
    pid = os.fork()
    if pid == 0:
        os.setuid(uid)
        s.connect(path)
        os.close(w)
        if how == "lives": wait("accepted")
        os._exit(0)
    os.close(w); os.read(r, 1)
    say("connected")
    os.waitpid(pid, 0)
    for attempt in range(20000):
        if not wrap: open("/proc/sys/kernel/ns_last_pid", "w").write(str(pid - 1))
        victim = os.fork()
        if victim == 0:
            if not wrap or os.getpid() == pid: time.sleep(600)
            os._exit(0)
        if victim == pid: break
        if not wrap: os.kill(victim, 9)
        os.waitpid(victim, 0)
    say(f"victim {victim}")
    if victim != pid: sys.exit(3)
hello, header = wait("hello"), wait("header")
memory = os.memfd_create("memory", os.MFD_ALLOW_SEALING)
os.write(memory, header)
fcntl.fcntl(memory, 1033, 7)
try: socket.send_fds(s, [hello], [memory])
except BrokenPipeError: pass
if how == "stopped": os.kill(1, signal.SIGCONT)
s.settimeout(20)
try: answer = s.recv(65536)
except ConnectionResetError: answer = b""
say(f"answer {len(answer)}")
time.sleep(600)
"#;

/// Lane `privileged`.
mod privileged {
    use super::*;

    /// Returns the kernel's version.
    fn kernel() -> (u32, u32) {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("a kernel");
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|word| word.parse().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
    }

    /// Returns the outer pid of the daemon, which is pid 1 in its namespace: the only child of unshare.
    fn inner(daemon: &Daemon) -> u32 {
        let unshare = daemon.job.pid();
        let children = fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"));
        children.ok().and_then(|children| children.trim().parse().ok()).expect("a child")
    }

    /// Returns the outer pid of the process that is `pid` in the namespace of `of`.
    fn outer(of: u32, pid: u32) -> Option<u32> {
        let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let is_it = |candidate: &u32| {
            let status = fs::read_to_string(format!("/proc/{candidate}/status")).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
            line.split_whitespace().last() == Some(&pid.to_string()) && namespace(*candidate) == namespace(of)
        };
        let entries =
            fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        entries.into_iter().find(is_it)
    }

    fn takeover(how: &str, uid: u32) {
        let machine = Machine::new(&["devices=1"]);
        let address = free_address();
        let config = format!("[metrics]\nlisten = \"{address}\"\n");
        let Some(daemon) = Daemon::start_elsewhere(&machine, "daemon", &config) else {
            can("PID namespaces", &mut Command::new("false"));
            return;
        };
        let (inner, place) = (inner(&daemon), machine.dir.join("place"));
        fs::create_dir(&place).expect("a folder");
        let write = |name: &str, bytes: &[u8]| {
            fs::write(place.join("part"), bytes)
                .and_then(|()| fs::rename(place.join("part"), place.join(name)))
        };
        let mut command = Command::new("nsenter");
        command.args(["--target", &inner.to_string(), "--pid", "--mount", "python3", "-c", TAKEOVER, how]);
        command.arg(uid.to_string()).arg(daemon.runtime.join("agent.sock")).arg(&place);
        let mut job = Job::start(&mut command);
        let number = |line: String| line.rsplit_once(' ').and_then(|(_, it)| it.parse::<u32>().ok());
        if how != "honest" {
            job.wait_for("connected");
            if how != "stopped" {
                // Accepted, or refused already.
                let is_accepted = |line: &str| {
                    let value = line.rsplit_once(' ').is_some_and(|(_, value)| value != "0");
                    value
                        && (line.starts_with("gpumemd_agents_waiting ")
                            || line.starts_with("gpumemd_agent_refused_total{"))
                };
                until(10, "the connection to be accepted", || {
                    get(address, "/metrics")?.lines().any(is_accepted).then_some(())
                });
            }
            write("accepted", b"").expect("written");
        }
        let victim = number(job.wait_for("victim ")).expect("a pid");
        let ticks = start_ticks(outer(inner, victim).expect("the victim"));
        let shared = Shared::small();
        let mut memory = vec![0; shared.header.file_bytes().expect("a size") as usize];
        let header = shared.header.encode();
        memory[..header.len()].copy_from_slice(&header);
        write("header", &memory).and_then(|()| write("hello", &hello(ticks))).expect("written");
        let answer = number(job.wait_for("answer ")).expect("a length");
        let agents = || {
            get(address, "/metrics")?
                .lines()
                .find_map(|line| line.strip_prefix("gpumemd_agents ")?.parse().ok())
        };
        let agents: f64 = until(10, "the number of agents", agents);
        if how == "honest" {
            assert!(answer > 0 && agents == 1.0, "the hello is good");
        } else {
            assert!(answer == 0 && agents == 0.0, "{how} as {uid}: the victim was taken over");
        }
    }

    #[test]
    fn process_is_not_taken_over_by_a_connection_that_was_made_before_it_had_its_pid() {
        if !Path::new("/proc/sys/kernel/ns_last_pid").exists() {
            can("choosing the next pid", &mut Command::new("false"));
            return;
        }
        takeover("honest", 0);
        for how in ["dies", "lives", "stopped"] {
            takeover(how, NOBODY);
        }
        // The same user: only times and pidfds distinguish the processes, and a daemon that did not run needs
        // SO_PEERPIDFD.
        takeover("dies", 0);
        takeover("lives", 0);
        takeover("tick", 0);
        if kernel() >= (6, 5) {
            takeover("stopped", 0);
        }
    }

    #[test]
    fn wrapped_pid_space_allows_no_takeover() {
        // Before, pid_max is the machine's.
        if kernel() < (6, 14) {
            can("a small pid space of a namespace", &mut Command::new("false"));
            return;
        }
        takeover("wraps", NOBODY);
        takeover("wraps", 0);
    }

    #[test]
    fn reused_pid_inherits_nothing_of_the_old_process() {
        let machine = Machine::new(&["devices=2"]);
        let Some(mut daemon) = Daemon::start_elsewhere(&machine, "daemon", QUICK) else {
            can("PID namespaces", &mut Command::new("false"));
            return;
        };
        // unshare has one child: the daemon, which is 1 in there.
        let unshare = daemon.job.pid();
        let children = std::fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"));
        let inner = children.ok().and_then(|children| children.trim().parse::<u32>().ok()).expect("a child");
        let trainer = machine.trainer(&daemon.runtime, &["--steps", "5", "--step-ms", "1", "--hold", "600"]);
        let go = machine.dir.join("go");
        let mut command = machine.command("nsenter");
        command.args(["--target", &inner.to_string(), "--pid", "--mount", "bash", "-c", SCRIPT, "bash"]);
        command.arg(trainer.get_program()).args(trainer.get_args()).env("GO", &go);
        command.envs(trainer.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut job = Job::start(&mut command);
        let pid =
            |line: String| line.rsplit_once(' ').and_then(|(_, pid)| pid.parse::<u32>().ok()).expect("a pid");
        let first = pid(job.wait_for("first "));
        let rows = || -> Vec<serde_json::Value> {
            let ps = daemon.asked("/v1/ps").unwrap_or_default();
            ps["processes"].as_array().cloned().unwrap_or_default()
        };
        until(30, "the first, to the last byte", || {
            rows().iter().find(|row| row["pid"] == first && row["untrackable_bytes"].is_i64()).map(|_| ())
        });
        std::fs::write(&go, "").expect("a file");
        let second = pid(job.wait_for("second "));
        if first != second {
            can("a pid that is given out again", &mut Command::new("false"));
            return;
        }
        // From now on only the second one: not a single look may mix them.
        until(30, "the second", || {
            let rows = rows();
            assert!(rows.len() <= 2, "{rows:?}");
            rows.iter().find(|row| row["device"] == 1 && row["used_bytes"].is_u64()).map(|_| ())
        });
        until(30, "the end of the first", || rows().iter().all(|row| row["device"] == 1).then_some(()));
        let row = rows().remove(0);
        assert_eq!((&row["pid"], &row["flags"][0]), (&second.into(), &"uncovered".into()), "{row}");
        assert!(row["tracked_bytes"].is_null(), "{row}");
        // One process has lived for a few hundredths of a second when the other starts.
        let ctl = |daemon: &Daemon| {
            let stop = Command::new("kill").arg(inner.to_string()).status();
            assert!(stop.is_ok_and(|status| status.success()));
            let _ = daemon;
        };
        ctl(&daemon);
        daemon.job.end();
        let store = Store::open_read_only(machine.dir.join("runs.sqlite")).expect("a store");
        let runs: Vec<_> =
            store.list().expect("runs").iter().map(|line| store.load(line.id).expect("a run")).collect();
        let covered: Vec<_> = runs.iter().filter(|run| run.coverage.covered).collect();
        assert!(
            covered.len() == 1 && covered[0].devices.len() == 1 && covered[0].devices[0].ordinal == 0,
            "{runs:?}"
        );
        let uncovered = runs.iter().filter(|run| !run.coverage.covered);
        assert!(uncovered.clone().count() >= 1 && uncovered.clone().all(|run| run.devices.len() == 1));
        let starts: std::collections::BTreeSet<_> = runs.iter().map(|run| run.process.start_ticks).collect();
        assert_eq!(starts.len(), runs.len(), "each has its own start");
        let compared = replay(&daemon.recording).compare(&machine.truth(), Some(first));
        println!("{} runs, {compared:?}", runs.len());
        assert!(compared.exact > 0 && compared.uncovered > 0, "{compared:?}");
    }
}
