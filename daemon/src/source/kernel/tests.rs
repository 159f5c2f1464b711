use super::*;
use std::io::Write as _;

const SECOND: u64 = 1_000_000_000;

struct Place {
    dir: PathBuf,
}

impl Place {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("gpumem-kernel-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).expect("a folder");
        Place { dir }
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.dir.join(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, text).expect("written");
    }

    fn kernel(&self) -> Kernel {
        let kernel = Kernel::new(&KernelSettings {
            log: self.dir.join("log"),
            control_groups: self.dir.join("cgroup"),
        });
        kernel.0.lock().expect("unharmed").groups =
            Groups::new(&self.dir.join("cgroup"), &self.dir.join("proc"));
        kernel
    }

    fn say(&self, line: &str) {
        let mut log =
            std::fs::OpenOptions::new().append(true).create(true).open(self.dir.join("log")).expect("a log");
        log.write_all(line.as_bytes()).expect("written");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn key(pid: u32) -> ProcessKey {
    ProcessKey { pid, start_ticks: 1 }
}

#[test]
fn a_kill_is_told_with_the_limit_it_was_for() {
    let place = Place::new("kill");
    place.say("Memory cgroup out of memory: Killed process 41 (old) total-vm:1kB\n");
    place.put("cgroup/memory/slurm/job_5/memory.limit_in_bytes", "68719476736\n");
    let kernel = place.kernel();
    place.say("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/slurm/job_5,task_memcg=/slurm/job_5/a,task=python,pid=42,uid=0\n");
    place.say("Memory cgroup out of memory: Killed process 42 (python) total-vm:1kB, UID:0");
    kernel.read_log(SECOND);
    assert_eq!(kernel.end_facts(key(41), SECOND), "", "that was before we listened");
    place.say(" pgtables:140kB\nOut of memory: Killed process 43 (b) total-vm:1kB\n");
    let lines = kernel.end_facts(key(42), 2 * SECOND);
    assert_eq!(
        lines,
        "host_oom=cgroup\nhost_oom_ns=1000000000\n\
         host_oom_line=Memory cgroup out of memory: Killed process 42 (python) total-vm:1kB, UID:0 pgtables:140kB\n\
         host_oom_cgroup=/slurm/job_5\nhost_oom_limit=68719476736\n"
    );
    assert!(kernel.end_facts(key(43), 3 * SECOND).starts_with("host_oom=host\n"));
    assert_eq!(kernel.end_facts(key(42), 3 * SECOND), "", "told once: the pid may be another's");
}

#[test]
fn the_first_fault_is_the_cause() {
    let place = Place::new("xid");
    place.say("");
    let kernel = place.kernel();
    place.say("NVRM: Xid (PCI:0000:3b:00): 31, pid=42, name=python, MMU Fault\n");
    place.say("NVRM: Xid (PCI:0000:3b:00): 43, pid=42, name=python, Ch 1\n");
    let lines = kernel.end_facts(key(42), SECOND);
    assert!(lines.starts_with("xid=31\nxid_ns=1000000000\nxid_line=NVRM: Xid"), "{lines}");
    place.say("NVRM: Xid (PCI:0000:3b:00): 13, pid=44, name=python\n");
    kernel.read_log(2 * SECOND);
    assert_eq!(kernel.end_facts(key(44), 500 * SECOND), "", "of long ago");
}

#[test]
fn a_log_that_is_not_there_is_said_and_one_that_is_replaced_is_followed() {
    let place = Place::new("replaced");
    let kernel = place.kernel();
    let status = kernel.status();
    assert!(status.problem.is_some_and(|why| why.contains("No such file")), "no log yet");
    place.say("");
    kernel.read_log(60 * SECOND);
    assert_eq!(kernel.status().problem, None, "it is tried again");
    place.say("Out of memory: Killed process 7 (b) total-vm:1kB\n");
    kernel.read_log(61 * SECOND);
    std::fs::rename(place.dir.join("log"), place.dir.join("log.1")).expect("renamed");
    place.say("Out of memory: Killed process 8 (b) total-vm:1kB\n");
    kernel.read_log(62 * SECOND);
    assert!(kernel.end_facts(key(7), 63 * SECOND).starts_with("host_oom=host"));
    assert!(kernel.end_facts(key(8), 63 * SECOND).starts_with("host_oom=host"));
    // Many lines, and lines without an end, use bounded memory.
    place.say(&"x".repeat(1 << 20));
    place.say(&"Out of memory: Killed process 9 (b)\n".repeat(1000));
    (0..4).for_each(|_| kernel.read_log(64 * SECOND));
    let desk = kernel.0.lock().expect("unharmed");
    assert!(desk.notes.len() <= MAX_NOTES);
}

#[test]
fn a_pipe_can_be_the_log() {
    let place = Place::new("pipe");
    let made = std::process::Command::new("mkfifo").arg(place.dir.join("log")).status().expect("mkfifo runs");
    assert!(made.success());
    let kernel = place.kernel();
    kernel.read_log(SECOND);
    assert_eq!(kernel.status().problem, None, "nobody writes: nothing is waited for");
    place.say("Out of memory: Killed process 7 (b) total-vm:1kB\n");
    assert!(kernel.end_facts(key(7), 2 * SECOND).starts_with("host_oom=host"));
}

#[test]
fn groups_count_of_both_versions() {
    let place = Place::new("groups");
    let old = "5:cpu:/x\n4:memory:/slurm/uid_0/job_5/step_0\n0::/\n";
    place.put("proc/42/cgroup", old);
    let step = "cgroup/memory/slurm/uid_0/job_5/step_0";
    place.put(&format!("{step}/memory.oom_control"), "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n");
    place.put("cgroup/memory/slurm/uid_0/job_5/memory.oom_control", "oom_kill 1\n");
    place.put(&format!("{step}/memory.limit_in_bytes"), "9223372036854771712\n");
    place.put("cgroup/memory/slurm/uid_0/job_5/memory.limit_in_bytes", "4294967296\n");
    let kernel = place.kernel();
    kernel.note_start(key(42));
    assert_eq!(kernel.end_facts(key(42), SECOND), "", "nobody was killed since");
    kernel.note_start(key(42));
    place.put(&format!("{step}/memory.oom_control"), "oom_kill 2\n");
    let told = "host_oom=count\nhost_oom_ns=1000000000\nhost_oom_cgroup=/slurm/uid_0/job_5\nhost_oom_limit=4294967296\n";
    assert_eq!(kernel.end_facts(key(42), SECOND), told);
    // The group of the Slurm step is removed at the end of the step, so the group of the job counts.
    kernel.note_start(key(42));
    std::fs::remove_dir_all(place.dir.join(step)).expect("removed");
    assert_eq!(kernel.end_facts(key(42), SECOND), "");
    place.put(&format!("{step}/memory.oom_control"), "oom_kill 2\n");
    kernel.note_start(key(42));
    std::fs::remove_dir_all(place.dir.join(step)).expect("removed");
    place.put("cgroup/memory/slurm/uid_0/job_5/memory.oom_control", "oom_kill 3\n");
    assert_eq!(kernel.end_facts(key(42), SECOND), told);
    // Control groups version 2.
    place.put("proc/43/cgroup", "0::/user.slice/a.scope\n");
    place.put("cgroup/user.slice/a.scope/memory.events", "low 0\noom 1\noom_kill 0\n");
    kernel.note_start(key(43));
    place.put("cgroup/user.slice/a.scope/memory.events", "low 0\noom 1\noom_kill 1\n");
    place.put("cgroup/user.slice/a.scope/memory.max", "max\n");
    assert_eq!(
        kernel.end_facts(key(43), SECOND),
        "host_oom=count\nhost_oom_ns=1000000000\nhost_oom_cgroup=/user.slice/a.scope\n"
    );
    for odd in ["", "0::/../../x\n", "garbage", "1:memory\n"] {
        place.put("proc/44/cgroup", odd);
        kernel.note_start(key(44));
        assert_eq!(kernel.end_facts(key(44), SECOND), "", "{odd:?}");
    }
}
