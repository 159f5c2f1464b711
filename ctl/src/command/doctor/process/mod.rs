//! Checks one process by its files in /proc: why it has no agent, or why the daemon does not receive its agent's reports.

mod causes;
mod proc_snapshot;

use super::elf::Elf;
use super::findings::{DoctorReport, finding};
use crate::command::run::environment;
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use proc_snapshot::ProcSnapshot;
use std::collections::BTreeSet;
use std::path::Path;

const INJECTION: &str = "CUDA_INJECTION64_PATH";
const AGENT: &str = "libgpumem.so";
/// Start of the name of an agent's shared memory. The pid of the process that started the agent follows.
const MEMORY: &str = "memfd:gpumem-agent.";
/// Time in seconds in which an agent connects to a daemon: the longest interval between its attempts, with a margin.
const CONNECT_S: u64 = 6;

/// Other tools that load themselves into CUDA programs, by the name of their library.
const TOOLS: [(&str, &str); 8] = [
    ("libToolsInjection", "Nsight Systems"),
    ("libInterceptorInjectionTarget", "Nsight Compute"),
    ("libTreeLauncherTargetInjection", "Nsight Compute"),
    ("libcuinj64", "nvprof"),
    ("libsanitizer-collection", "compute-sanitizer"),
    ("libcudadebugger", "cuda-gdb"),
    ("libnsys", "Nsight Systems"),
    ("libkineto", "Kineto (torch.profiler)"),
];

struct ProcessCheck<'a> {
    process: ProcSnapshot,
    /// Whether the daemon receives the agent's reports, or has explained why it does not.
    covered: bool,
    report: &'a DoctorReport,
    findings: &'a mut Vec<Finding>,
}

/// Checks a process. `covered` is whether the daemon receives the agent's reports, or has explained why it does not.
pub(super) fn check(pid: u32, covered: bool, report: &DoctorReport, findings: &mut Vec<Finding>) {
    ProcessCheck { process: ProcSnapshot::read(pid), covered, report, findings }.check();
}

impl ProcessCheck<'_> {
    fn add(&mut self, check: Check, state: State, text: impl Into<String>, fix: &str) {
        self.findings.push(finding(check, state, &format!("pid {}", self.process.pid), text, fix));
    }

    fn check(&mut self) {
        if self.process.is_zombie {
            let text = "has ended; its parent has not waited for it yet";
            return self.add(Check::ProcessAccess, State::Unknown, text, "");
        }
        let agent = self.process.mapped(AGENT);
        if self.process.comm.starts_with("nvidia-cuda-mps") {
            let text = match agent {
                Some(_) => {
                    "belongs to MPS: its clients have agents; the library that it has loaded does nothing"
                }
                None => "belongs to MPS: its clients have agents, and it has none",
            };
            return self.add(Check::ProcessMps, State::Ok, text, "");
        }
        if self.process.maps.is_none() || self.process.environ.is_none() {
            let text = "this user may not read which files the process has loaded";
            return self.add(Check::ProcessAccess, State::Unknown, text, "ask as its owner or as root");
        }
        if let Some((text, fix)) = self.cannot_load() {
            return self.add(Check::ProcessProgram, State::Bad, text, fix);
        }
        let cuda = self.process.mapped("libcuda.so");
        let text = match &cuda {
            Some(path) => format!("has opened {path}"),
            None => {
                "has not opened libcuda: it does not use CUDA yet, so there is no GPU memory to see".into()
            }
        };
        self.add(Check::ProcessCuda, State::Ok, text, "");
        match agent {
            Some(path) => self.loaded(&path),
            None => self.not_loaded(cuda.is_some()),
        }
        self.tools();
    }

    /// Returns why the program of the process cannot load the agent at all, with a remedy; `None` if it can, or if its ELF file
    /// cannot be read.
    fn cannot_load(&self) -> Option<(String, &'static str)> {
        let Some(Ok(elf)) = &self.process.program else { return None };
        let is_loader =
            |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ld-"));
        let exe = std::fs::read_link(format!("/proc/{}/exe", self.process.pid)).unwrap_or_default();
        let musl = self
            .process
            .mapped("ld-musl")
            .or(elf.interpreter.clone().filter(|name| name.contains("ld-musl")));
        let own = Elf::read(Path::new("/proc/self/exe")).unwrap_or_default();
        if elf.bits == 32 || own.machine != 0 && elf.machine != own.machine {
            let (its, ours) = (elf.machine_name(), own.machine_name());
            let text = format!("is a program for {its}: libgpumem.so is for {ours}");
            return Some((text, "run a build of the program for this machine; CUDA has no 32-bit support"));
        }
        if elf.interpreter.is_none() && !is_loader(&exe) {
            let text = "is a static program: it can load neither CUDA's libraries nor ours";
            return Some((text.into(), "link it dynamically; programs that it starts are covered"));
        }
        let text = format!("runs with musl ({}): CUDA and libgpumem.so need glibc", musl?);
        Some((text, "use an image with glibc (Debian, Ubuntu, RHEL)"))
    }

    fn is_disabled(&self) -> bool {
        self.process.variable("GPUMEM_DISABLE").is_some_and(|value| value != "0")
    }

    /// Explains why the process has not loaded the agent.
    fn not_loaded(&mut self, uses_cuda: bool) {
        // A missing agent is a warning only if the process uses CUDA.
        let state = if uses_cuda { State::Warn } else { State::Ok };
        if self.is_disabled() {
            let text = "GPUMEM_DISABLE is set: it has no agent";
            return self.add(Check::ProcessDisabled, state, text, "start it again without GPUMEM_DISABLE");
        }
        let Some(path) = self.process.variable(INJECTION) else {
            let (text, fix) = causes::variable(&self.process, &self.process.ancestors());
            return self.add(Check::ProcessVariable, state, text, &fix);
        };
        if !Path::new(&path).file_name().is_some_and(|name| name.to_string_lossy().starts_with(AGENT)) {
            let text = format!("{INJECTION} names another tool: {path}");
            let fix = "start it with gpumemctl run -- COMMAND, which loads both";
            return self.add(Check::ProcessVariable, state, text, fix);
        }
        self.add(Check::ProcessVariable, State::Ok, format!("{INJECTION}={path}"), "");
        if let Some((text, fix)) = causes::library(&self.process, &path) {
            return self.add(Check::ProcessFile, State::Bad, text, &fix);
        }
        if uses_cuda {
            let text = format!(
                "has opened libcuda but not loaded {path}: CUDA loads it when it is initialised (cuInit)"
            );
            let fix = "no action if it holds no GPU memory yet; else check whether it was built for an older glibc \
                 (LD_DEBUG=libs)";
            self.add(Check::ProcessAgent, State::Warn, text, fix);
        }
    }

    /// Checks a process that has loaded the agent from `path`.
    fn loaded(&mut self, path: &str) {
        let own = environment::library().ok().map(|path| path.display().to_string());
        let (text, fix) = match own.filter(|own| own != path) {
            _ if path.ends_with(" (deleted)") => (
                format!("has loaded {path}: it was replaced or removed since"),
                "a restart of the program loads the new one",
            ),
            Some(own) => (format!("has loaded {path} (gpumemctl run uses {own})"), ""),
            None => (format!("has loaded {path}"), ""),
        };
        self.add(Check::ProcessAgent, State::Ok, text, fix);
        if !self.covered {
            self.not_covered();
        }
        match self.process.mapped("libcupti") {
            Some(path) => self.add(Check::ProcessCupti, State::Ok, format!("has loaded {path}"), ""),
            None => {
                let text = "has not loaded libcupti: its allocations are not seen";
                let fix = "put the libcupti of its CUDA version where it finds it (LD_LIBRARY_PATH, GPUMEM_CUPTI_PATH)";
                self.add(Check::ProcessCupti, State::Bad, text, fix);
            }
        }
    }

    /// Explains why the records of a loaded agent do not reach the daemon.
    fn not_covered(&mut self) {
        let starter = self.process.mapped(MEMORY).and_then(|file| {
            let name = Path::new(&file).file_name()?.to_str()?.strip_prefix(MEMORY)?.to_owned();
            name.split('.').next()?.parse::<u32>().ok()
        });
        match starter {
            Some(starter) if starter != self.process.own_pid => {
                let text = format!(
                    "was forked from pid {starter} (in its own namespace), whose agent it inherited: the agent is off here, \
                     because CUDA does not work in a child that was forked after CUDA was used"
                );
                let fix = "start child processes with multiprocessing's spawn or forkserver, not with fork";
                self.add(Check::ProcessFork, State::Warn, text, fix);
            }
            Some(_) => {
                if let Some(file) = self.process.variable("GPUMEM_RECORD") {
                    let text = format!(
                        "writes a recording ({file}) and reports to no daemon, because GPUMEM_RECORD is set"
                    );
                    let fix = "start it without GPUMEM_RECORD to see it live";
                    return self.add(Check::ProcessSocket, State::Warn, text, fix);
                }
                let control = self.report.daemon.as_ref().map(|(control, _)| control.as_path());
                let socket = causes::socket(&self.process, control);
                let is_reachable = socket.is_ok();
                let socket = socket.map(|path| (State::Ok, format!("sees {path}"), String::new()));
                let (state, text, fix) = socket.unwrap_or_else(|problem| problem);
                self.add(Check::ProcessSocket, state, text, &fix);
                self.sandbox();
                if is_reachable {
                    self.age();
                }
            }
            None if self.is_disabled() => {
                let text = "GPUMEM_DISABLE is set: its agent does nothing";
                self.add(Check::ProcessDisabled, State::Warn, text, "start it again without GPUMEM_DISABLE");
            }
            None => {
                let text = "its agent has not started: CUDA is not initialised yet, or no memory was left for it (memfd)";
                let fix = "no action if it holds no GPU memory yet; else check its limits (ulimit -v, -n) and \
                     system call filters";
                self.add(Check::ProcessAgent, State::Warn, text, fix);
                self.sandbox();
            }
        }
    }

    /// Warns of a filter of system calls.
    fn sandbox(&mut self) {
        if self.process.seccomp == 2 {
            let text = "has a filter of system calls (seccomp), which may keep its agent from reporting";
            let fix = "allow memfd_create, socket, connect, sendmsg, recvmsg and poll (the usual profiles of containers do)";
            self.add(Check::ProcessSandbox, State::Warn, text, fix);
        }
    }

    /// Compares the ages of process and daemon, to explain why reports do not arrive although the process can reach the daemon.
    fn age(&mut self) {
        let up_s = self.report.daemon.as_ref().map(|(_, doctor)| doctor.uptime_s);
        let (Some(age_s), Some(up_s)) = (self.process.age_s, up_s) else { return };
        let (state, text, fix) = if up_s < CONNECT_S {
            let text = format!("gpumemd has run for {up_s} s, and the process for {age_s} s");
            (State::Ok, text, "wait: agents try to connect at least every 5 s")
        } else if age_s < CONNECT_S {
            (
                State::Ok,
                format!("runs for {age_s} s"),
                "wait: an agent connects when CUDA has been initialised",
            )
        } else {
            let text =
                format!("its agent runs for up to {age_s} s and sees the daemon, but no report arrives");
            (State::Warn, text, "see the findings agents.* of gpumemctl doctor, and the daemon's log")
        };
        self.add(Check::ProcessAge, state, text, fix);
    }

    /// Names other tools that the process has loaded.
    fn tools(&mut self) {
        let loaded = TOOLS.iter().filter(|(library, _)| self.process.mapped(library).is_some());
        let loaded: BTreeSet<&str> = loaded.map(|(_, tool)| *tool).collect();
        if !loaded.is_empty() {
            let loaded = Vec::from_iter(loaded).join(", ");
            let text = format!("{loaded} is loaded too: CUPTI serves one client at a time");
            let fix =
                "without that library the agent can use CUPTI; for torch.profiler: with gpumem.paused():";
            let state = if self.covered { State::Ok } else { State::Warn };
            self.add(Check::ProcessCupti, state, text, fix);
        }
    }
}
