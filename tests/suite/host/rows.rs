//! The programs under test.

use gpumem_tests::live::Machine;
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::torch::{self, Wheel};
use std::path::Path;
use std::process::Command;

/// One program.
#[derive(Debug)]
pub struct Row {
    pub name: &'static str,
    program: Program,
    argument: &'static str,
    /// Its end without an agent.
    pub end: &'static str,
    /// Whether its own process has an agent, not only its children.
    pub agent: bool,
    /// Its threads or processes print in any order.
    pub unordered: bool,
}

#[derive(Debug)]
enum Program {
    C,
    Cxx,
    /// A program with its own CUDA runtime.
    Static,
    Python,
    /// Takes seconds, so it runs only with the named daemons.
    Torch(Wheel, &'static [&'static str]),
    /// A program under PyTorch's own profiler.
    Watched(Wheel),
    /// With calls of NVTX.
    Nvtx,
}

impl Row {
    /// Returns its command on this machine, without any part of gpumem.
    pub fn command(&self, machine: &Machine) -> Command {
        let bin = programs().fake.join("bin");
        let mut command = match &self.program {
            Program::C => machine.command(bin.join("host")),
            Program::Cxx => machine.command(bin.join("host-cxx")),
            Program::Static => machine.command(bin.join("host-static")),
            Program::Torch(wheel, _) => wheel.bare(machine, "host.py", &[]),
            Program::Watched(wheel) => wheel.bare(machine, "watched.py", &[]),
            Program::Nvtx => machine.command(bin.join("host-nvtx")),
            Program::Python => {
                let mut command = machine.command("python3");
                command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("trainer/host.py"));
                command
            }
        };
        command.arg(self.argument).env_remove("GPUMEM_SITES");
        command
    }

    /// Returns the command with the agent, which has every source enabled.
    pub fn covered(&self, machine: &Machine, socket: &Path) -> Command {
        let mut command = self.command(machine);
        for loader in ["CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"] {
            command.env(loader, programs().ours.join("libgpumem.so"));
        }
        command.env("GPUMEM_NVTX_DOMAINS", "*").env("GPUMEM_NVTX_RANGES", "1").env("GPUMEM_SOCKET", socket);
        // The default, as for users: some daemons here never answer.
        command.env_remove("GPUMEM_EXIT_WAIT_MS");
        command
    }

    /// Returns whether it runs with that daemon. With GPUMEM_HOST_ALL set every program does.
    pub fn is_for(&self, column: &str) -> bool {
        let some: &[&str] = match &self.program {
            Program::Torch(_, some) => some,
            _ => return true,
        };
        some.contains(&column) || std::env::var_os("GPUMEM_HOST_ALL").is_some()
    }
}

/// Trainings with unmodified wheels of PyTorch, if available. These are the slowest rows, so they start first. Each
/// takes a processor for 3 s, 1.5 s to load PyTorch, and waits 10 s more for its workers. One training meets each
/// state of the daemon.
pub fn trainings() -> Vec<Row> {
    let some: [(_, _, _, &[&str]); 3] = [
        ("torch spawns", "2.15.0", "spawn", &["absent"]),
        ("torch 2.15", "2.15.0", "fork", &["killed", "slow", "gone at once", "older", "bossy"]),
        ("torch 2.4", "2.4.1", "fork", &["running", "stopped", "silent", "gone later", "newer", "babbling"]),
    ];
    let row = |(name, version, argument, columns): (_, &str, _, _)| {
        let program = Program::Torch(torch::wheel(version)?, columns);
        Some(Row { name, program, argument, end: "5", agent: true, unordered: false })
    };
    some.into_iter().filter_map(row).collect()
}

/// Returns the program for faults of the agent; `None` if the wheel is not available.
pub fn watched() -> Option<Row> {
    let program = Program::Watched(torch::wheel("2.4.1")?);
    Some(Row { name: "watched", program, argument: "", end: "5", agent: true, unordered: false })
}

/// Returns the timed programs: those in C.
pub fn timed() -> Vec<Row> {
    rows().into_iter().filter(|row| matches!(row.program, Program::C | Program::Nvtx)).collect()
}

/// Returns a program that has sent more than a daemon could receive by its end.
pub fn much() -> Row {
    Row { name: "much", program: Program::C, argument: "much", end: "0", agent: true, unordered: false }
}

/// Returns programs with actions that only root may perform.
pub fn of_root() -> Vec<Row> {
    let row =
        |name| Row { name, program: Program::C, argument: name, end: "0", agent: true, unordered: false };
    vec![row("locked"), row("chroot"), row("setuid")]
}

/// Returns the available programs, each with its end.
pub fn rows() -> Vec<Row> {
    let mut rows = all();
    if !gpumem_test_support::has_cxx() {
        rows.retain(|row| !matches!(row.program, Program::Cxx));
    }
    rows
}

fn all() -> Vec<Row> {
    use Program::{C, Cxx, Nvtx, Python, Static};
    let row = |name, program, argument, end, agent, unordered| Row {
        name,
        program,
        argument,
        end,
        agent,
        unordered,
    };
    let c = |name, end| row(name, C, name, end, true, false);
    let alone = |name, end| row(name, C, name, end, false, false);
    let many = |name, end| row(name, C, name, end, true, true);
    vec![
        c("plain", "7"),
        c("long", "0"),
        c("tags", "0"),
        alone("no-gpu", "0"),
        // Threads.
        c("threads", "0"),
        c("cancel", "0"),
        c("leave", "0"),
        many("exit-thread", "5"),
        row("C++", Cxx, "", "0", true, true),
        row("C++ exit in a thread", Cxx, "exit", "6", true, true),
        row("C++ terminate", Cxx, "terminate", "signal 6", true, true),
        row("static runtime", Static, "", "0", true, true),
        row("nvtx", Nvtx, "", "0", true, false),
        // Signals.
        c("handlers", "0"),
        c("waits", "0"),
        c("faults", "0"),
        c("interrupted", "0"),
        // Ends.
        c("_exit", "3"),
        c("quick_exit", "4"),
        c("abort", "signal 6"),
        c("segv", "signal 11"),
        c("kill", "signal 9"),
        c("term", "signal 15"),
        // Families.
        many("fork", "0"),
        row("fork-first", C, "fork-first", "0", false, true),
        c("fork-amid", "0"),
        alone("fork-at-first", "0"),
        c("clone", "0"),
        c("fork-exec", "0"),
        c("spawn", "0"),
        c("exec", "7"),
        alone("daemonize", "0"),
        c("plugin", "0"),
        // Filters: an agent that lacks a required permission is inactive.
        alone("no-socket", "0"),
        alone("no-socket-kill", "0"),
        c("late-filter", "0"),
        alone("no-memfd", "0"),
        alone("no-memfd-kill", "0"),
        c("no-pidfd", "0"),
        alone("no-pidfd-kill", "0"),
        // Limits.
        c("few-files", "0"),
        alone("no-files", "0"),
        c("no-memory", "0"),
        alone("little-memory", "0"),
        alone("small-files", "0"),
        c("no-threads", "0"),
        // Descriptors, who and where.
        c("closed", "0"),
        c("closefrom", "0"),
        c("elsewhere", "0"),
        // Python without PyTorch.
        row("python", Python, "plain", "3", true, true),
        row("python fails", Python, "fails", "1", true, true),
        row("python forks", Python, "forks", "0", true, true),
        row("python spawns", Python, "spawns", "0", true, true),
    ]
}
