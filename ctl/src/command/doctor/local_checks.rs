//! Checks what gpumemctl itself can see: sockets, the agent's library, CUPTI, the shell's variables.

use super::driver::Driver;
use super::elf::Elf;
use super::findings::finding;
use crate::args::variable;
use crate::client::{AGENT, CONTROL, Daemon};
use crate::command::run::environment;
use crate::proc::{mapped, pids};
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use rustix::fs::{Access, access};
use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Longest path of a socket in bytes, without the final zero.
pub(super) const LONGEST_SOCKET: usize = 107;
/// Maximum number of processes whose agent libraries are checked.
const MAX_PROCESSES: usize = 20_000;

/// Checks whether this user may write to the sockets of the daemon that was found.
pub(super) fn sockets(daemon: &Daemon) -> Finding {
    let agent = daemon.socket.path.with_file_name(AGENT);
    let control = describe(&daemon.socket.path);
    let (state, text, fix) = if access(&agent, Access::WRITE_OK).is_ok() {
        (State::Ok, format!("{control}; {}", describe(&agent)), "")
    } else {
        let why = if agent.exists() { "this user may not write to it" } else { "it is not there" };
        let text = format!("{control}; processes cannot report at {}: {why}", agent.display());
        (
            State::Bad,
            text,
            "the agent socket must have mode 0666: restart the daemon, or fix its systemd socket unit",
        )
    };
    finding(Check::Sockets, state, "sockets", text, fix)
}

/// Returns a socket's path, with mode and user.
fn describe(path: &Path) -> String {
    let name = path.display();
    match path.metadata() {
        Ok(socket) => {
            format!("{name} (mode {:04o}, user {})", socket.permissions().mode() & 0o7777, socket.uid())
        }
        Err(error) => format!("{name} ({error})"),
    }
}

pub(super) fn library() -> Finding {
    let own = Elf::read(Path::new("/proc/self/exe")).map_or(0, |own| own.machine);
    let (state, text, fix) = match environment::library() {
        Err(searched) => {
            let fix = "install it beside gpumemctl or in ../lib/gpumem/VERSION, or name it: GPUMEM_LIBRARY";
            (State::Bad, format!("was not found: {searched}"), fix)
        }
        Ok(path) => match Elf::read(&path) {
            Ok(elf) if own != 0 && elf.machine != own => {
                let text =
                    format!("{} is for {}, and this machine is not", path.display(), elf.machine_name());
                (State::Bad, text, "install the package of this machine's architecture")
            }
            Ok(_) => (State::Ok, path.display().to_string(), ""),
            Err(error) => {
                (State::Bad, format!("{}: {error}", path.display()), "install it again, readable for all")
            }
        },
    };
    finding(Check::AgentLibrary, state, "libgpumem.so", text, fix)
}

/// Checks which agent libraries are loaded. After an update, running processes keep the old library.
pub(super) fn versions() -> Option<Finding> {
    let mut files: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for pid in pids(Path::new("/proc")).take(MAX_PROCESSES) {
        let Ok(maps) = std::fs::read(format!("/proc/{pid}/maps")) else { continue };
        if let Some(path) = mapped(&String::from_utf8_lossy(&maps), "libgpumem.so") {
            files.entry(path).or_default().push(pid);
        }
    }
    let own = environment::library().ok().map(|path| path.display().to_string());
    let listed = |(path, pids): (&String, &Vec<u32>)| {
        let first: Vec<String> = pids.iter().take(3).map(u32::to_string).collect();
        let more = if pids.len() > 3 { format!(" and {} more", pids.len() - 3) } else { String::new() };
        format!("{path} (pid {}{more})", first.join(", "))
    };
    let (deleted, existing): (Vec<_>, Vec<_>) =
        files.iter().partition(|(path, _)| path.ends_with(" (deleted)"));
    let deleted: Vec<String> = deleted.into_iter().map(listed).collect();
    let others = existing.into_iter().filter(|(path, _)| own.as_ref() != Some(path));
    let others: Vec<String> = others.map(listed).collect();
    let (state, text, fix) = if !deleted.is_empty() {
        let text = format!(
            "processes still use an agent library that was replaced or removed: {}",
            deleted.join("; ")
        );
        (State::Warn, text, "this does no harm; they load the new one when they are started again")
    } else if !others.is_empty() {
        let text = format!("processes use another agent library than `gpumemctl run`: {}", others.join("; "));
        (State::Ok, text, "")
    } else {
        return None;
    };
    Some(finding(Check::AgentVersions, state, "libgpumem.so", text, fix))
}

/// Checks the lengths of configured socket paths, which the kernel limits.
pub(super) fn paths() -> Vec<Finding> {
    let runtime = variable("XDG_RUNTIME_DIR").map(|path| path.join("gpumem").join(CONTROL));
    let named = ["GPUMEM_SOCKET", "GPUMEM_CONTROL"].map(|name| (name, variable(name)));
    let named = named.into_iter().chain([("XDG_RUNTIME_DIR", runtime)]);
    let long = named.filter_map(|(name, path)| Some((name, path?.as_os_str().len())));
    let long = long.filter(|(_, length)| *length > LONGEST_SOCKET);
    long.map(|(name, length)| {
        let text =
            format!("{name} gives a socket path of {length} bytes; the kernel allows {LONGEST_SOCKET}");
        let fix = "give a shorter one: runtime_dir in the configuration, or that variable";
        finding(Check::SocketPath, State::Bad, name, text, fix)
    })
    .collect()
}

/// Checks the variables that programs started from this shell inherit.
pub(super) fn environment() -> Vec<Finding> {
    const INJECTION: &str = "CUDA_INJECTION64_PATH";
    let mut findings = Vec::new();
    let mut add = |state, name: &str, text: String, fix: &str| {
        findings.push(finding(Check::AgentEnvironment, state, name, text, fix));
    };
    if variable("GPUMEM_DISABLE").is_some_and(|value| value.as_os_str() != "0") {
        let text = "is set here: programs that are started from this shell have no agent";
        add(State::Warn, "GPUMEM_DISABLE", text.into(), "unset GPUMEM_DISABLE");
    }
    if let Some(path) = variable(INJECTION) {
        let is_ours = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libgpumem"));
        if !path.is_file() {
            let text = format!("is {}, which does not exist: CUDA continues without it", path.display());
            add(State::Bad, INJECTION, text, "unset CUDA_INJECTION64_PATH, or correct it");
        } else if !is_ours {
            let text = format!("names another tool: {}", path.display());
            let fix = "no action with gpumemctl run, which loads both; otherwise set \
                 CUDA_INJECTION64_PATH to libgpumem.so, and GPUMEM_NEXT_INJECTION64_PATH to the other tool";
            add(State::Ok, INJECTION, text, fix);
        }
    }
    if let Some(file) = variable("GPUMEM_RECORD") {
        let text = format!("is {}: processes write recordings and report to no daemon", file.display());
        add(State::Warn, "GPUMEM_RECORD", text, "unset GPUMEM_RECORD to see them live");
    }
    findings
}

/// Checks whether there is a libcupti, and whether the driver supports its version.
pub(super) fn cupti(driver: Option<&Driver>) -> Finding {
    let add = |state, text: String, fix| finding(Check::AgentCupti, state, "libcupti", text, fix);
    let Some(path) = find_cupti() else {
        let text = "is in none of the usual folders; programs that bring their own, as PyTorch's wheels do, are covered";
        let fix = "pip install nvidia-cuda-cupti, or add the toolkit's extras/CUPTI/lib64 to LD_LIBRARY_PATH";
        return add(State::Warn, text.into(), fix);
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // The library's name may have a year, as libcupti.so.2024.3.2, which is not a CUDA version.
    let major =
        name.strip_prefix("libcupti.so.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    let major = major.filter(|major| *major < 100);
    match (major, driver.and_then(|driver| Some((driver.cuda()?, driver)))) {
        (Some(major), Some((cuda, Driver { version }))) if major > cuda => {
            let text = format!(
                "{} is of CUDA {major}, but driver {version} supports CUDA {cuda}: it does not work",
                path.display()
            );
            let fix = "install nvidia-cuda-cupti of the CUDA version that nvidia-smi shows, or set GPUMEM_CUPTI_PATH";
            add(State::Warn, text, fix)
        }
        _ => add(State::Ok, path.display().to_string(), ""),
    }
}

/// Searches libcupti in the folders in which the agent searches it if the program has not loaded one.
fn find_cupti() -> Option<PathBuf> {
    let mut folders: Vec<PathBuf> =
        variable("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths).collect();
    let roots = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable);
    for root in roots.chain(matching(Path::new("/usr/local"), "cuda")) {
        let below = ["extras/CUPTI/lib64", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];
        folders.extend(below.map(|folder| root.join(folder)));
    }
    let machine = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    folders.extend([machine.into(), "/usr/lib64".into(), "/usr/lib".into()]);
    if let Some(environment) = variable("VIRTUAL_ENV").or_else(|| variable("CONDA_PREFIX")) {
        for python in matching(&environment.join("lib"), "python3") {
            let packages = python.join("site-packages/nvidia");
            folders.extend([packages.join("cuda_cupti/lib"), packages.join("cu13/lib")]);
        }
        folders.push(environment.join("lib"));
    }
    folders.iter().find_map(|folder| matching(folder, "libcupti.so").into_iter().next())
}

/// Returns the paths in a folder whose names begin with `start`, the last in alphabetical order first.
fn matching(folder: &Path, start: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(start));
    let mut found: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    found.sort_by(|a, b| b.cmp(a));
    found
}
