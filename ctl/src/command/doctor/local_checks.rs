//! Checks on the client's side: sockets, the agent's library, CUPTI, the shell's variables.

use super::driver::Driver;
use super::elf::Elf;
use super::findings::finding;
use crate::client::{AGENT, Daemon, sibling};
use crate::command::run::library;
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use rustix::fs::{Access, access};
use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Longest path of a socket in bytes, without the final zero.
pub(super) const LONGEST_SOCKET: usize = 107;
/// Name of a control socket.
const CONTROL: &str = "control.sock";
/// Most processes whose libraries are checked.
const MOST_PROCESSES: usize = 20_000;

/// Checks the sockets of the daemon that was found, as seen by this user.
pub(super) fn sockets(daemon: &Daemon) -> Finding {
    let agent = sibling(&daemon.control, AGENT);
    let control = told(&daemon.control);
    let say = |state, text: String, fix| finding(Check::Sockets, state, "sockets", text, fix);
    if access(&agent, Access::WRITE_OK).is_ok() {
        return say(State::Ok, format!("{control}; {}", told(&agent)), None);
    }
    let why = if agent.exists() { "this user may not write to it" } else { "it is not there" };
    let text = format!("{control}; processes cannot report at {}: {why}", agent.display());
    let fix = "the agent socket must have mode 0666: restart the daemon, or mend its systemd socket unit";
    say(State::Bad, text, Some(fix))
}

/// Returns a socket's path with its owner and mode.
fn told(path: &Path) -> String {
    match path.metadata() {
        Ok(socket) => format!(
            "{} (mode {:04o}, user {})",
            path.display(),
            socket.permissions().mode() & 0o7777,
            socket.uid()
        ),
        Err(error) => format!("{} ({error})", path.display()),
    }
}

/// Checks the agent that `gpumemctl run` would use.
pub(super) fn library() -> Finding {
    let say = |state, text: String, fix| finding(Check::AgentLibrary, state, "libgpumem.so", text, fix);
    let path = match library::find() {
        Ok(path) => path,
        Err(looked_at) => {
            let fix = "install it beside gpumemctl or in ../lib/gpumem/VERSION, or name it: GPUMEM_LIBRARY";
            return say(State::Bad, format!("was not found: {looked_at}"), Some(fix));
        }
    };
    let own = Elf::read(Path::new("/proc/self/exe")).map(|own| own.machine).unwrap_or(0);
    match Elf::read(&path) {
        Ok(elf) if own != 0 && elf.machine != own => {
            let text = format!("{} is for {}, and this machine is not", path.display(), elf.machine_name());
            say(State::Bad, text, Some("install the package of this machine's architecture"))
        }
        Ok(_) => say(State::Ok, path.display().to_string(), None),
        Err(error) => say(
            State::Bad,
            format!("{}: {error}", path.display()),
            Some("install it again, readable for all"),
        ),
    }
}

/// Checks which agent libraries are loaded: after an update, running processes keep old ones.
pub(super) fn versions() -> Option<Finding> {
    let mut files: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for pid in pids.take(MOST_PROCESSES) {
        let Ok(maps) = std::fs::read(format!("/proc/{pid}/maps")) else { continue };
        if let Some(path) = super::process::mapped(&String::from_utf8_lossy(&maps), "libgpumem.so") {
            files.entry(path).or_default().push(pid);
        }
    }
    let own = library::find().ok().map(|path| path.display().to_string());
    let say = |state, text: String, fix| finding(Check::AgentVersions, state, "libgpumem.so", text, fix);
    let told = |(path, pids): (&String, &Vec<u32>)| {
        let first: Vec<String> = pids.iter().take(3).map(u32::to_string).collect();
        let more = if pids.len() > 3 { format!(" and {} more", pids.len() - 3) } else { String::new() };
        format!("{path} (pid {}{more})", first.join(", "))
    };
    let (gone, there): (Vec<_>, Vec<_>) = files.iter().partition(|(path, _)| path.ends_with(" (deleted)"));
    if !gone.is_empty() {
        let gone: Vec<String> = gone.into_iter().map(told).collect();
        let text = format!("processes still run what was replaced or removed: {}", gone.join("; "));
        return Some(say(
            State::Warn,
            text,
            Some("nothing is harmed; they take the new one when they start again"),
        ));
    }
    let others = there.into_iter().filter(|(path, _)| own.as_ref() != Some(path));
    let others: Vec<String> = others.map(told).collect();
    (!others.is_empty()).then(|| {
        let text =
            format!("processes have loaded another one than `gpumemctl run` uses: {}", others.join("; "));
        say(State::Ok, text, None)
    })
}

/// Checks the lengths of configured socket paths, which the kernel limits.
pub(super) fn paths() -> Vec<Finding> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let runtime = set("XDG_RUNTIME_DIR").map(|path| path.join("gpumem").join(CONTROL));
    let named = [("GPUMEM_SOCKET", set("GPUMEM_SOCKET")), ("GPUMEM_CONTROL", set("GPUMEM_CONTROL"))];
    let named = named.into_iter().chain([("XDG_RUNTIME_DIR", runtime)]);
    let long = named.filter_map(|(name, path)| Some((name, path?.as_os_str().len())));
    let long = long.filter(|(_, length)| *length > LONGEST_SOCKET);
    long.map(|(name, length)| {
        let text = format!(
            "{name} gives a socket's path of {length} bytes: more than the {LONGEST_SOCKET} that there are"
        );
        let fix = "give a shorter one: runtime_dir in the configuration, or that variable";
        finding(Check::SocketPath, State::Bad, name, text, Some(fix))
    })
    .collect()
}

/// Checks the variables that this shell passes to programs.
pub(super) fn environment() -> Vec<Finding> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let say = |state, name: &str, text: String, fix| finding(Check::AgentEnvironment, state, name, text, fix);
    let mut findings = Vec::new();
    if set("GPUMEM_DISABLE").is_some_and(|value| value.as_os_str() != "0") {
        let text = "is set here: what is started from this shell has no agent";
        findings.push(say(State::Warn, "GPUMEM_DISABLE", text.into(), Some("unset GPUMEM_DISABLE")));
    }
    if let Some(path) = set("CUDA_INJECTION64_PATH") {
        let is_ours = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libgpumem"));
        if !path.is_file() {
            let text = format!("is {}, which is not there: CUDA goes on without it", path.display());
            findings.push(say(
                State::Bad,
                "CUDA_INJECTION64_PATH",
                text,
                Some("unset CUDA_INJECTION64_PATH, or correct it"),
            ));
        } else if !is_ours {
            let text = format!("names another tool: {}", path.display());
            let fix = "nothing under gpumemctl run, which has both; set by hand: GPUMEM_NEXT_INJECTION64_PATH is for the other";
            findings.push(say(State::Ok, "CUDA_INJECTION64_PATH", text, Some(fix)));
        }
    }
    if let Some(file) = set("GPUMEM_RECORD") {
        let text = format!("is {}: processes write recordings and report to no daemon", file.display());
        findings.push(say(State::Warn, "GPUMEM_RECORD", text, Some("unset GPUMEM_RECORD to see them live")));
    }
    findings
}

/// Checks whether there is a libcupti, and whether the driver supports its version.
pub(super) fn cupti(driver: Option<&Driver>) -> Finding {
    let say = |state, text: String, fix| finding(Check::AgentCupti, state, "libcupti", text, fix);
    let Some(path) = find_cupti() else {
        let text = "is in none of the usual places; a program that brings its own (as PyTorch's wheels do) is covered all \
                    the same";
        let fix = "pip install nvidia-cuda-cupti, the toolkit's extras/CUPTI, or LD_LIBRARY_PATH";
        return say(State::Warn, text.into(), Some(fix));
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // The name may have a year, as in libcupti.so.2024.3.2, which is no CUDA version.
    let major =
        name.strip_prefix("libcupti.so.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    let major = major.filter(|major| *major < 100);
    match (major, driver.and_then(|driver| Some((driver.cuda()?, driver)))) {
        (Some(major), Some((cuda, driver))) if major > cuda => {
            let text = format!(
                "{} is of CUDA {major}, driver {} serves CUDA {cuda}: it refuses to work",
                path.display(),
                driver.version
            );
            let fix = "nvidia-cuda-cupti of the CUDA version that nvidia-smi shows, or GPUMEM_CUPTI_PATH";
            say(State::Warn, text, Some(fix))
        }
        _ => say(State::Ok, path.display().to_string(), None),
    }
}

/// Returns libcupti from the folders in which the agent also searches, if the program has not loaded its own.
fn find_cupti() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let mut folders: Vec<PathBuf> = set("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths).collect();
    let roots = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(set).map(PathBuf::from);
    let roots = roots.chain(matching(Path::new("/usr/local"), "cuda"));
    for root in roots {
        folders.extend(
            ["extras/CUPTI/lib64", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"]
                .map(|folder| root.join(folder)),
        );
    }
    let machine = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    folders.extend([machine.into(), "/usr/lib64".into(), "/usr/lib".into()]);
    if let Some(environment) = set("VIRTUAL_ENV").or_else(|| set("CONDA_PREFIX")).map(PathBuf::from) {
        for python in matching(&environment.join("lib"), "python3") {
            let packages = python.join("site-packages/nvidia");
            folders.extend([packages.join("cuda_cupti/lib"), packages.join("cu13/lib")]);
        }
        folders.push(environment.join("lib"));
    }
    folders.iter().find_map(|folder| matching(folder, "libcupti.so").into_iter().next())
}

/// Returns entries of a folder whose names begin with `start`, in descending order.
fn matching(folder: &Path, start: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(start));
    let mut found: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    found.sort_by(|a, b| b.cmp(a));
    found
}
