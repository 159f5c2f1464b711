//! Checks of one process, as far as /proc permits: why it has no agent, or why the daemon does not receive its agent's reports.
//!
//! ```text
//! proc_snapshot    data of the process in /proc
//! text             parsers of its files
//! variable         finds the process that dropped CUDA_INJECTION64_PATH
//! file             whether the process can load the library
//! socket           whether the process can reach the daemon
//! ```

mod file;
mod proc_snapshot;
mod socket;
mod text;
mod variable;

use super::elf::Elf;
use super::findings::{DoctorReport, finding};
use crate::command::run::library;
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use proc_snapshot::ProcSnapshot;
use std::path::Path;
use text::files;
pub(super) use text::mapped;

const INJECTION: &str = "CUDA_INJECTION64_PATH";
const AGENT: &str = "libgpumem.so";
/// Name of the agent's memory, `/memfd:gpumem-agent.PID.ADDRESS`, with the pid of the process that started the agent.
const MEMORY: &str = "memfd:gpumem-agent.";
/// Longest interval between an agent's connection attempts, in seconds, with a margin.
const SOON_S: u64 = 6;

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

/// The checks of one process.
struct ProcessCase<'a> {
    seen: ProcSnapshot,
    subject: String,
    /// The daemon receives the agent's reports, or has explained why it does not.
    covered: bool,
    /// The daemon's control socket.
    control: Option<&'a Path>,
    uptime_s: Option<u64>,
    findings: &'a mut Vec<Finding>,
}

/// Checks a process.
pub(super) fn look(
    pid: u32,
    control: Option<&Path>,
    covered: bool,
    told: &DoctorReport,
    findings: &mut Vec<Finding>,
) {
    let seen = ProcSnapshot::look(pid);
    let uptime_s = told.daemon.as_ref().map(|(_, doctor)| doctor.uptime_s);
    ProcessCase { subject: format!("pid {pid}"), seen, covered, control, uptime_s, findings }.judge();
}

impl ProcessCase<'_> {
    fn say(&mut self, check: Check, state: State, text: impl Into<String>, fix: Option<&str>) {
        self.findings.push(finding(check, state, &self.subject, text, fix));
    }

    fn judge(&mut self) {
        if self.seen.is_zombie {
            let text = "has ended; its parent has not looked yet";
            return self.say(Check::ProcessAccess, State::Unknown, text, None);
        }
        if self.seen.comm.starts_with("nvidia-cuda-mps") {
            return self.mps();
        }
        if self.seen.maps.is_none() || self.seen.environ.is_none() {
            let text = "what it has loaded cannot be read by this user";
            self.say(Check::ProcessAccess, State::Unknown, text, Some("ask as its owner or as root"));
            return;
        }
        if !self.program() {
            return;
        }
        let agent = self.seen.mapped(AGENT);
        let uses_cuda = self.cuda();
        match agent {
            Some(path) => self.loaded(&path),
            None => self.not_loaded(uses_cuda),
        }
        self.tools();
    }

    fn mps(&mut self) {
        let text = match self.seen.mapped(AGENT) {
            Some(_) => "is of MPS: its clients have agents; the library that it has loaded is silent in it",
            None => "is of MPS: its clients have agents, it has none",
        };
        self.say(Check::ProcessMps, State::Ok, text, None);
    }

    /// Checks whether the program can load libraries at all.
    fn program(&mut self) -> bool {
        let Some(Ok(elf)) = &self.seen.program else { return true };
        let elf = elf.clone();
        let is_loader =
            |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ld-"));
        let exe = std::fs::read_link(format!("/proc/{}/exe", self.seen.pid)).unwrap_or_default();
        let musl =
            self.seen.mapped("ld-musl").or(elf.interpreter.clone().filter(|name| name.contains("ld-musl")));
        let own = Elf::read(Path::new("/proc/self/exe")).unwrap_or_default();
        if elf.bits == 32 || own.machine != 0 && elf.machine != own.machine {
            let text = format!(
                "is a program for {}: libgpumem.so is for {}",
                elf.machine_name(),
                own.machine_name()
            );
            self.say(
                Check::ProcessProgram,
                State::Bad,
                text,
                Some("CUDA wants 64 bits too; run a build for this machine"),
            );
        } else if elf.interpreter.is_none() && !is_loader(&exe) {
            let text = "is a static program: it loads no libraries, neither CUDA's nor ours";
            let fix = "link it dynamically; what it starts is covered all the same";
            self.say(Check::ProcessProgram, State::Bad, text, Some(fix));
        } else if let Some(loader) = musl {
            let text = format!("runs with musl ({loader}): CUDA and libgpumem.so want glibc");
            self.say(
                Check::ProcessProgram,
                State::Bad,
                text,
                Some("use an image with glibc (Debian, Ubuntu, RHEL)"),
            );
        } else {
            return true;
        }
        false
    }

    fn cuda(&mut self) -> bool {
        let cuda = self.seen.mapped("libcuda.so");
        match &cuda {
            Some(path) => self.say(Check::ProcessCuda, State::Ok, format!("has opened {path}"), None),
            None => {
                let text = "has not opened libcuda: it does not use CUDA (yet), and there is nothing to see";
                self.say(Check::ProcessCuda, State::Ok, text, None);
            }
        }
        cuda.is_some()
    }

    fn not_loaded(&mut self, uses_cuda: bool) {
        // A problem that would prevent the agent is only informational as long as CUDA is not used.
        let state = if uses_cuda { State::Warn } else { State::Ok };
        if self.seen.variable("GPUMEM_DISABLE").is_some_and(|value| value != "0") {
            let text = "GPUMEM_DISABLE is set: it has no agent";
            return self.say(
                Check::ProcessDisabled,
                state,
                text,
                Some("start it again without GPUMEM_DISABLE"),
            );
        }
        let Some(path) = self.seen.variable(INJECTION) else {
            let (text, fix) = variable::lost(&self.seen, &self.seen.ancestors());
            return self.say(Check::ProcessVariable, state, text, Some(&fix));
        };
        if !Path::new(&path).file_name().is_some_and(|name| name.to_string_lossy().starts_with(AGENT)) {
            let text = format!("{INJECTION} names another tool: {path}");
            let fix = "start it with gpumemctl run -- COMMAND, which has both";
            return self.say(Check::ProcessVariable, state, text, Some(fix));
        }
        self.say(Check::ProcessVariable, State::Ok, format!("{INJECTION}={path}"), None);
        if let Some((text, fix)) = file::wrong(&self.seen, &path) {
            return self.say(Check::ProcessFile, State::Bad, text, Some(&fix));
        }
        if !uses_cuda {
            return;
        }
        let text = format!(
            "has opened libcuda and not loaded {path}, which is there: CUDA does so when it is initialised (cuInit)"
        );
        let fix = "nothing, if it holds no GPU memory yet; else was it built for an older glibc? LD_DEBUG=libs tells";
        self.say(Check::ProcessAgent, State::Warn, text, Some(fix));
    }

    fn loaded(&mut self, path: &str) {
        let own = library::find().ok().map(|path| path.display().to_string());
        if path.ends_with(" (deleted)") {
            let text = format!("has loaded {path}: it was replaced or removed since");
            self.say(Check::ProcessAgent, State::Ok, text, Some("a new start takes the new one"));
        } else {
            let other = own.filter(|own| own != path).map(|own| format!(" (gpumemctl run uses {own})"));
            self.say(
                Check::ProcessAgent,
                State::Ok,
                format!("has loaded {path}{}", other.unwrap_or_default()),
                None,
            );
        }
        if self.covered {
            return self.cupti();
        }
        // The name of its memory contains the pid of the process that started the agent.
        let starter = self.seen.mapped(MEMORY).and_then(|file| {
            let name = Path::new(&file).file_name()?.to_str()?.strip_prefix(MEMORY)?.to_owned();
            name.split('.').next()?.parse::<u32>().ok()
        });
        let by = match starter {
            Some(starter) if starter == self.seen.own_pid => Ok(()),
            other => Err(other),
        };
        match by {
            Ok(()) if self.seen.variable("GPUMEM_RECORD").is_some() => {
                let file = self.seen.variable("GPUMEM_RECORD").unwrap_or_default();
                let text =
                    format!("writes a recording ({file}) and reports to no daemon, as GPUMEM_RECORD has it");
                self.say(
                    Check::ProcessSocket,
                    State::Warn,
                    text,
                    Some("start it without GPUMEM_RECORD to see it live"),
                );
            }
            Ok(()) => {
                let is_seen = self.socket();
                self.sandbox();
                if is_seen {
                    self.age();
                }
            }
            Err(Some(starter)) => {
                let text = format!(
                    "was forked from pid {starter} (as that sees itself), whose agent it inherited: it is silent here, since \
                     CUDA does not work in a child that was forked after it was in use"
                );
                let fix = "start such processes anew: multiprocessing's spawn or forkserver instead of fork";
                self.say(Check::ProcessFork, State::Warn, text, Some(fix));
            }
            Err(None) if self.seen.variable("GPUMEM_DISABLE").is_some_and(|value| value != "0") => {
                let text = "GPUMEM_DISABLE is set: its agent does nothing";
                self.say(
                    Check::ProcessDisabled,
                    State::Warn,
                    text,
                    Some("start it again without GPUMEM_DISABLE"),
                );
            }
            Err(None) => {
                let text = "its agent has not started: CUDA is not initialised yet, or it had no memory to start with (memfd)";
                let fix = "nothing, if it holds no GPU memory yet; else look at its limits (ulimit -v, -n) and system call filters";
                self.say(Check::ProcessAgent, State::Warn, text, Some(fix));
                self.sandbox();
            }
        }
        self.cupti();
    }

    fn socket(&mut self) -> bool {
        match socket::look(&self.seen, self.control) {
            Ok(path) => {
                self.say(Check::ProcessSocket, State::Ok, format!("sees {path}"), None);
                true
            }
            Err((state, text, fix)) => {
                self.say(Check::ProcessSocket, state, text, Some(&fix));
                false
            }
        }
    }

    fn sandbox(&mut self) {
        if self.seen.seccomp == 2 {
            let text = "has a filter of system calls (seccomp), which may keep its agent from reporting";
            let fix = "allow memfd_create, socket, connect, sendmsg, recvmsg and poll (the usual profiles of containers do)";
            self.say(Check::ProcessSandbox, State::Warn, text, Some(fix));
        }
    }

    /// The process can reach the daemon, but its reports do not arrive.
    fn age(&mut self) {
        let (Some(age_s), Some(up_s)) = (self.seen.age_s, self.uptime_s) else { return };
        let (text, fix) = if up_s < SOON_S {
            (
                format!("gpumemd is here since {up_s} s, it since {age_s} s"),
                "wait: agents look for a daemon every 5 s at least",
            )
        } else if age_s < SOON_S {
            (format!("it is here since {age_s} s"), "wait: an agent connects when CUDA has been initialised")
        } else {
            let text = format!("its agent runs for up to {age_s} s, sees the daemon and is not heard");
            return self.say(
                Check::ProcessAge,
                State::Warn,
                text,
                Some("see agents.* here, and the daemon's log"),
            );
        };
        self.say(Check::ProcessAge, State::Ok, text, Some(fix));
    }

    fn cupti(&mut self) {
        match self.seen.mapped("libcupti") {
            Some(path) => self.say(Check::ProcessCupti, State::Ok, format!("has loaded {path}"), None),
            None => {
                let text = "has not loaded libcupti: its allocations are not seen";
                let fix = "put the libcupti of its CUDA version where it finds it (LD_LIBRARY_PATH, GPUMEM_CUPTI_PATH)";
                self.say(Check::ProcessCupti, State::Bad, text, Some(fix));
            }
        }
    }

    /// Checks for other tools that use CUPTI.
    fn tools(&mut self) {
        let maps = self.seen.maps.clone().unwrap_or_default();
        let name = |file: &str| Path::new(file).file_name().map(|name| name.to_string_lossy().into_owned());
        let mut loaded: Vec<&str> = files(&maps)
            .filter_map(name)
            .filter_map(|file| TOOLS.iter().find(|(library, _)| file.starts_with(library)))
            .map(|(_, tool)| *tool)
            .collect();
        loaded.sort_unstable();
        loaded.dedup();
        if !loaded.is_empty() {
            let text = format!("{} is in it too: CUPTI serves one client at a time", loaded.join(", "));
            let fix = "without it the agent has CUPTI to itself; for torch.profiler: with gpumem.paused():";
            let state = if self.covered { State::Ok } else { State::Warn };
            self.say(Check::ProcessCupti, state, text, Some(fix));
        }
    }
}
