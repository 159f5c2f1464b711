//! `doctor PID` with each real cause of a missing agent, called by the process's owner; and `doctor --bundle`, which must not
//! contain personal data.
use gpumem_tests::live::programs::{copy_program, programs};
use gpumem_tests::live::{Daemon, Job, Machine, until};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

struct Node {
    machine: Machine,
    daemon: Daemon,
}

/// Doctor's result for a check.
#[derive(Debug, Clone)]
struct Finding {
    state: String,
    text: String,
    fix: String,
}

impl Node {
    fn new() -> Node {
        let machine = Machine::new(&["devices=1"]);
        let quick = "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n";
        let daemon = Daemon::start(&machine, "daemon", quick);
        Node { machine, daemon }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.machine.dir.join(name)
    }

    /// Builds the program to examine with these flags.
    fn built(&self, name: &str, flags: &[&str]) -> PathBuf {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("suite/doctor/case.c");
        let program = self.path(name);
        let mut cc = Command::new("cc");
        let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent-lib/include");
        cc.arg("-I").arg(include).arg("-o").arg(&program).arg(source);
        let built = cc.args(flags).arg("-ldl").output().expect("cc");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        program
    }

    /// Returns a command on the simulated machine, with the variables that `gpumemctl run` would set.
    fn covered(&self, program: impl AsRef<Path>, words: &[&str]) -> Command {
        let mut command = self.machine.command(program);
        command.args(words).env("CUDA_INJECTION64_PATH", library());
        command.env("GPUMEM_SOCKET", self.daemon.runtime.join("agent.sock"));
        command
    }

    fn all(&self, pid: u32) -> Vec<(String, Finding)> {
        let output = self
            .daemon
            .ctl(&self.machine, &["doctor", "--json", &pid.to_string()])
            .output()
            .expect("gpumemctl");
        let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let findings = document["findings"].as_array().expect("findings").iter();
        let text = |of: &Value, name: &str| of[name].as_str().unwrap_or("").to_owned();
        let finding =
            |of: &Value| Finding { state: text(of, "state"), text: text(of, "text"), fix: text(of, "fix") };
        let all: Vec<_> = findings.map(|of| (text(of, "id"), finding(of))).collect();
        let is_bad = all.iter().any(|(_, finding)| finding.state == "bad");
        assert_eq!(output.status.code(), Some(if is_bad { 10 } else { 0 }));
        all
    }

    /// Returns the result of a check once it has this state.
    fn finding(&self, pid: u32, id: &str, state: &str) -> Finding {
        let mut all = Vec::new();
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            until(20, id, || {
                all = self.all(pid);
                all.iter()
                    .find(|(of, finding)| of == id && finding.state == state)
                    .map(|(_, finding)| finding.clone())
            })
        }));
        found.unwrap_or_else(|_| panic!("{state} {id} is not in {all:#?}"))
    }
}

fn library() -> PathBuf {
    programs().ours.join("libgpumem.so")
}

/// Starts it; returns the pid that it prints.
fn started(command: &mut Command) -> (Job, u32) {
    let mut job = Job::start(command);
    let line = job.wait_for("ready ");
    let pid = line.trim_start_matches("ready ").trim().parse().expect("a pid");
    (job, pid)
}

#[test]
fn a_covered_process_and_one_without_cuda() {
    let node = Node::new();
    let case = node.built("case", &[]);
    let arguments = ["--devices", "0", "--steps", "2", "--hold", "600"];
    let mut job = Job::start(&mut node.machine.trainer(&node.daemon.runtime, &arguments));
    job.wait_for("holding");
    let finding = node.finding(job.pid(), "process", "ok");
    assert!(finding.text.contains("covered"), "{finding:?}");
    let bad: Vec<_> = node
        .all(job.pid())
        .into_iter()
        .filter(|(id, finding)| id.starts_with("process") && finding.state != "ok")
        .collect();
    assert!(bad.is_empty(), "{bad:?}");

    // CUDA is in use, and nothing is allocated.
    let (_idle, pid) = started(&mut node.covered(&case, &["cuda"]));
    assert!(node.finding(pid, "process", "ok").text.contains("covered"));

    let (_none, pid) = started(&mut node.covered(&case, &[]));
    assert!(node.finding(pid, "process.cuda", "ok").text.contains("has not opened libcuda"));
    assert!(node.finding(pid, "process.variable", "ok").text.contains("libgpumem.so"), "it would be covered");
    let (_plain, pid) = started(&mut node.machine.command(&case));
    let finding = node.finding(pid, "process.variable", "ok");
    assert!(
        finding.text.contains("none of its parents has it") || finding.text.contains("may not read"),
        "{finding:?}"
    );
}

#[test]
fn process_that_lost_the_variable_is_reported() {
    let node = Node::new();
    let case = node.built("case", &[]);
    let script = format!("env -u CUDA_INJECTION64_PATH '{}' cuda; true", case.display());
    let (job, pid) = started(&mut node.covered("sh", &["-c", &script]));
    let finding = node.finding(pid, "process.variable", "warn");
    let words = format!("sh (pid {}) has it, and case (pid {pid}) that it started does not", job.pid());
    assert!(finding.text.contains(&words), "{finding:?}");
    assert!(finding.fix.contains("gpumemctl run -- COMMAND"), "{finding:?}");

    // As `gpumemctl run` starts it.
    let script = format!(
        "exec env -i PATH=\"$PATH\" LD_LIBRARY_PATH=\"$LD_LIBRARY_PATH\" GPUMEM_SIM=\"$GPUMEM_SIM\" '{}' cuda",
        case.display()
    );
    let (_run, pid) = started(&mut node.daemon.ctl(&node.machine, &["run", "-q", "--", "sh", "-c", &script]));
    let finding = node.finding(pid, "process.variable", "warn");
    assert!(
        finding.text.contains(&format!("started by gpumemctl run, and case (pid {pid}) lost")),
        "{finding:?}"
    );
}

#[test]
fn disabled_recording_or_another_injection_library() {
    let node = Node::new();
    let case = node.built("case", &[]);
    let (_off, pid) = started(node.covered(&case, &["cuda"]).env("GPUMEM_DISABLE", "1"));
    assert!(node.finding(pid, "process.disabled", "warn").fix.contains("without GPUMEM_DISABLE"));

    let file = node.path("case.%p.gpumem");
    let (_records, pid) = started(node.covered(&case, &["cuda"]).env("GPUMEM_RECORD", &file));
    assert!(node.finding(pid, "process.socket", "warn").text.contains("case.%p.gpumem"));

    // A library of that name, as Nsight Systems has it.
    let (source, tool) = (node.path("tool.c"), node.path("libToolsInjection64.so"));
    std::fs::write(&source, "int InitializeInjection(void) { return 1; }").expect("written");
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&tool).arg(&source).status().expect("cc");
    assert!(built.success());
    let (_other, pid) = started(node.covered(&case, &["cuda"]).env("CUDA_INJECTION64_PATH", &tool));
    assert!(node.finding(pid, "process.variable", "warn").text.contains("names another tool"));
    assert!(node.finding(pid, "process.cupti", "warn").text.contains("Nsight Systems is loaded too"));
}

#[test]
fn programs_that_do_not_load_the_library() {
    let node = Node::new();
    let (_static, pid) = started(&mut node.covered(node.built("static", &["-static"]), &[]));
    assert!(node.finding(pid, "process.program", "bad").text.contains("static program"));
    let (_pie, pid) = started(&mut node.covered(node.built("static-pie", &["-static-pie"]), &[]));
    assert!(node.finding(pid, "process.program", "bad").text.contains("static program"));

    // The loader's name identifies musl: this one is glibc's under that name.
    let (loader, elf) = (node.path("ld-musl-x86_64.so.1"), node.built("plain", &[]));
    let readelf = Command::new("readelf").arg("-l").arg(&elf).output().expect("readelf");
    let text = String::from_utf8_lossy(&readelf.stdout).into_owned();
    let asked = text.split("interpreter: ").nth(1).and_then(|rest| rest.split(']').next()).expect("a loader");
    std::fs::copy(asked, &loader).expect("copied");
    let linked = format!("-Wl,--dynamic-linker={}", loader.display());
    let (_musl, pid) = started(&mut node.covered(node.built("musl", &[&linked]), &[]));
    let finding = node.finding(pid, "process.program", "bad");
    assert!(finding.text.contains("musl") && finding.fix.contains("glibc"), "{finding:?}");
}

#[test]
fn agent_without_a_thread_is_reported() {
    let node = Node::new();
    let case = node.built("case", &[]);
    let (_job, pid) = started(&mut node.covered(&case, &["threadless", "cuda"]));
    let mut all = Vec::new();
    let finding = until(20, "why it is silent", || {
        all = node.all(pid);
        all.iter().find(|(_, finding)| finding.text.contains("its thread could not be started")).cloned()
    });
    assert_eq!(finding.1.state, "warn", "{finding:?}");
    assert!(finding.1.text.contains("RLIMIT_NPROC") && finding.1.fix.contains("ulimit -u"), "{finding:?}");
}

#[test]
fn child_forked_after_cuda_was_initialised() {
    let node = Node::new();
    let case = node.built("case", &[]);
    let (job, child) = started(&mut node.covered(&case, &["cuda", "fork"]));
    assert_ne!(job.pid(), child);
    let finding = node.finding(child, "process.fork", "warn");
    assert!(finding.text.contains(&format!("forked from pid {}", job.pid())), "{finding:?}");
    assert!(finding.fix.contains("spawn"), "{finding:?}");
}

/// Returns the names and texts of a bundle's files.
fn unpacked(archive: &Path) -> Vec<(String, String)> {
    let listed = Command::new("tar").arg("-tzf").arg(archive).output().expect("tar");
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let names = String::from_utf8(listed.stdout).expect("names");
    let text = |name: &str| {
        let output = Command::new("tar").arg("-xzOf").arg(archive).arg(name).output().expect("tar");
        assert!(output.status.success(), "{name}");
        String::from_utf8(output.stdout).expect("text")
    };
    names.lines().map(|name| (name.to_owned(), text(name))).collect()
}

#[test]
fn a_bundle_holds_no_secret() {
    let node = Node::new();
    let case = node.built("case", &[]);
    // Secrets in an environment, a command line, a tag, a job's name, a comment and a key of the configuration, and a log.
    let words = ["cuda", "hold", "hunter2-tag", "--password=hunter2-line"];
    let mut command = node.covered(&case, &words);
    let (_job, pid) =
        started(command.env("API_TOKEN", "hunter2-environment").env("GPUMEM_JOB", "hunter2-job"));
    until(20, "its bytes in the published data", || {
        let metrics = node.daemon.asked("/v1/metrics")?;
        metrics.as_str()?.contains("\ngpumem_process_used_bytes{").then_some(())
    });
    let file = node.path("daemon.toml");
    let text = std::fs::read_to_string(&file).expect("a configuration");
    std::fs::write(
        &file,
        format!("# hunter2-comment\ntenants = \"named\" # hunter2-behind\n{text}# hunter2-end\nhunter = 2\n"),
    )
    .expect("written");
    let log = "2026-01-01T00:00:00Z  INFO of hunter2-shell\n2026-01-01T00:00:01Z  WARN password=hunter2-log token: hunter2-token by ann-of-here\n";
    std::fs::write(node.daemon.runtime.join("gpumemd.log"), log).expect("written");

    let archive = node.path("all.tar.gz");
    let ask = |archive: &Path| {
        let archive = archive.to_string_lossy().into_owned();
        let mut command = node.daemon.ctl(&node.machine, &["doctor", &pid.to_string(), "--bundle", &archive]);
        command
            .env("SECRET_OF_SHELL", "hunter2-shell")
            .env("USER", "ann-of-here")
            .output()
            .expect("gpumemctl")
    };
    let output = ask(&archive);
    assert!(output.status.success(), "{output:?}");
    let finding = String::from_utf8(output.stdout).expect("UTF-8");
    let files = unpacked(&archive);
    for (name, text) in &files {
        assert!(!text.contains("hunter2") && !text.contains("ann-of-here"), "{name}: {text}");
        assert!(!text.contains(&*node.machine.dir.to_string_lossy()), "{name} names its home: {text}");
        assert!(
            name == "contents.txt" || finding.contains(&format!("\n  {name} ")),
            "{name} was not listed: {finding}"
        );
    }
    assert!(!finding.contains("hunter2"), "{finding}");
    let file = |name: &str| {
        &files.iter().find(|(of, _)| of == name).unwrap_or_else(|| panic!("{name}: {finding}")).1
    };
    assert!(file("doctor.json").contains("\"schema\": \"gpumem.doctor\""));
    assert!(file("doctor.txt").contains("process.agent") && file("versions.txt").contains("gpumemctl "));
    assert!(
        file("config.toml").contains("tenants = \"named\"\n")
            && file("config.toml").contains("list_budget = 1.0\n")
    );
    assert!(file("metrics.prom").contains("\ngpumem_device_used_bytes{"), "{}", file("metrics.prom"));
    assert!(file("metrics.prom").contains("\ngpumem_process_used_bytes{"), "{}", file("metrics.prom"));
    assert!(
        file("log.txt").contains("password=[secret]") && file("log.txt").contains("by user-"),
        "{}",
        file("log.txt")
    );
    assert!(file("processes.txt").contains(&format!(" {pid} ")), "{}", file("processes.txt"));

    // Nothing is written over.
    let before = std::fs::read(&archive).expect("read");
    let again = ask(&archive);
    assert!(
        !again.status.success() && String::from_utf8_lossy(&again.stderr).contains("exists already"),
        "{again:?}"
    );
    assert_eq!(std::fs::read(&archive).expect("read"), before);
    let mode = std::os::unix::fs::PermissionsExt::mode(&archive.metadata().expect("there").permissions());
    assert_eq!(mode & 0o777, 0o600);
}

/// Lane `privileged`.
mod privileged {
    use super::*;

    #[test]
    fn daemon_outside_the_processs_view() {
        let node = Node::new();
        let case = node.built("case", &[]);
        let nowhere = node.path("nowhere/agent.sock");
        let (_alone, pid) = started(node.covered(&case, &["cuda"]).env("GPUMEM_SOCKET", &nowhere));
        let finding = node.finding(pid, "process.socket", "bad");
        assert!(
            finding.text.contains("finds no daemon") && finding.fix.contains("GPUMEM_SOCKET="),
            "{finding:?}"
        );

        let machine = Machine::new(&["devices=1"]);
        let other = Daemon::start(&machine, "other", "");
        let (_other, pid) =
            started(node.covered(&case, &["cuda"]).env("GPUMEM_SOCKET", other.runtime.join("agent.sock")));
        let finding = node.finding(pid, "process.socket", "warn");
        assert!(finding.text.contains("another daemon") && finding.fix.contains("--socket"), "{finding:?}");

        let long = format!("/{}", "x".repeat(150));
        let (_long, pid) = started(node.covered(&case, &["cuda"]).env("GPUMEM_SOCKET", &long));
        assert!(node.finding(pid, "process.socket", "bad").text.contains("151 bytes"));

        let (_filtered, pid) =
            started(node.covered(&case, &["filter", "cuda"]).env("GPUMEM_SOCKET", &nowhere));
        assert!(node.finding(pid, "process.sandbox", "warn").text.contains("seccomp"));

        let runtime = node.daemon.runtime.display();
        let script = format!("mount -t tmpfs none {runtime} && exec {} cuda", case.display());
        if Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success()) {
            let (_contained, pid) = started(&mut node.covered("unshare", &["--mount", "sh", "-c", &script]));
            let finding = node.finding(pid, "process.socket", "bad");
            assert!(
                finding.fix.contains("into the container") && finding.fix.contains("/agent "),
                "{finding:?}"
            );
        }
    }

    #[test]
    fn library_that_is_missing_unreadable_or_of_another_architecture() {
        let node = Node::new();
        let case = node.built("case", &[]);
        let folder = node.path("lib");
        std::fs::create_dir(&folder).expect("a folder");
        let copy = folder.join("libgpumem.so");
        std::fs::copy(library(), &copy).expect("copied");

        let gone = folder.join("gone/libgpumem.so");
        let (_gone, pid) = started(node.covered(&case, &["cuda"]).env("CUDA_INJECTION64_PATH", &gone));
        assert!(node.finding(pid, "process.file", "bad").text.contains("no longer exists"));

        // As in a container that was not given it.
        let script = format!("mount -t tmpfs none {} && exec {} cuda", folder.display(), case.display());
        if Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success()) {
            let mut command = node.covered("unshare", &["--mount", "sh", "-c", &script]);
            let (_elsewhere, pid) = started(command.env("CUDA_INJECTION64_PATH", &copy));
            let finding = node.finding(pid, "process.file", "bad");
            assert!(
                finding.text.contains("does not exist in the process's mount namespace")
                    && finding.fix.contains("mount "),
                "{finding:?}"
            );
        } else {
            gpumem_test_support::skip("no mount namespace can be made here", "sudo make test-all");
        }

        let mut bytes = std::fs::read(&copy).expect("read");
        bytes[18..20].copy_from_slice(&183_u16.to_le_bytes());
        let other = folder.join("libgpumem.so.arm");
        std::fs::write(&other, bytes).expect("written");
        let (_other, pid) = started(node.covered(&case, &["cuda"]).env("CUDA_INJECTION64_PATH", &other));
        assert!(node.finding(pid, "process.file", "bad").text.contains("is for aarch64, the program for"));

        std::fs::write(folder.join("libgpumem.so.txt"), "no library").expect("written");
        let text = folder.join("libgpumem.so.txt");
        let (_text, pid) = started(node.covered(&case, &["cuda"]).env("CUDA_INJECTION64_PATH", &text));
        assert!(node.finding(pid, "process.file", "bad").text.contains("is not a library"));
    }

    #[test]
    fn user_without_access_is_referred_to_the_owner() {
        let node = Node::new();
        let case = node.built("case", &[]);
        let (_job, pid) = started(&mut node.covered(&case, &["cuda"]));
        // In a folder that others cannot read.
        let program = node.path("gpumemctl");
        copy_program(programs().ours.join("gpumemctl"), &program);
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&program);
        let output = command.args(["doctor", &pid.to_string()]).output().expect("setpriv");
        let text = String::from_utf8_lossy(&output.stdout);
        if output.status.code().is_none_or(|code| code != 0 && code != 10) {
            gpumem_test_support::skip(
                "only root can become another user",
                "sudo make test-all LANES=privileged",
            );
            return;
        }
        let line =
            text.lines().find(|line| line.contains("process.access")).unwrap_or_else(|| panic!("{text}"));
        assert!(line.starts_with("unknown") && text.contains("ask as its owner or as root"), "{text}");
        assert!(!text.contains("CUDA_INJECTION64_PATH="), "{text}");
    }
}
