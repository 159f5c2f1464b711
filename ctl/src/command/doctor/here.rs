//! What is to be seen without a daemon: sockets, the agent's library, CUPTI, the driver's device files.

use crate::client::{AGENT, Daemon, sibling};
use crate::command::run::library;
use gpumem_wire::control::{Finding, Level};
use rustix::fs::{Access, access};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

pub(super) fn finding(level: Level, subject: &str, text: String, remedy: Option<&str>) -> Finding {
    Finding { level, subject: subject.into(), text, remedy: remedy.map(str::to_owned) }
}

/// The sockets of the daemon that was found, as this user sees them.
pub(super) fn sockets(daemon: &Daemon) -> Finding {
    let agent = sibling(&daemon.control, AGENT);
    let control = told(&daemon.control);
    if access(&agent, Access::WRITE_OK).is_ok() {
        return finding(Level::Good, "sockets", format!("{control}; {}", told(&agent)), None);
    }
    let why = if agent.exists() { "this user may not write to it" } else { "it is not there" };
    finding(
        Level::Bad,
        "sockets",
        format!("{control}; processes cannot report at {}: {why}", agent.display()),
        Some("the agent socket must have mode 0666: restart the daemon, or mend its systemd socket unit"),
    )
}

/// A socket with its owner and mode.
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

/// What `gpumemctl run` needs.
pub(super) fn libraries() -> Vec<Finding> {
    let agent = match library::find() {
        Ok(path) => finding(Level::Good, "libgpumem.so", path.display().to_string(), None),
        Err(looked_at) => finding(
            Level::Bad,
            "libgpumem.so",
            format!("was not found: {looked_at}"),
            Some("install it beside gpumemctl or in ../lib/gpumem/VERSION, or name it: GPUMEM_LIBRARY"),
        ),
    };
    let cupti = match cupti() {
        Some(path) => finding(Level::Good, "libcupti", path.display().to_string(), None),
        None => finding(
            Level::Degraded,
            "libcupti",
            "is in none of the usual places; a program that brings its own (as PyTorch's wheels do) is covered all \
             the same"
                .into(),
            Some("pip install nvidia-cuda-cupti, the toolkit's extras/CUPTI, or LD_LIBRARY_PATH"),
        ),
    };
    vec![agent, cupti]
}

/// Why NVML may have nothing to say.
pub(super) fn driver() -> Finding {
    if Path::new("/dev/nvidiactl").exists() {
        return finding(Level::Good, "driver", "/dev/nvidiactl is there".into(), None);
    }
    finding(
        Level::Degraded,
        "driver",
        "no /dev/nvidiactl: no NVIDIA driver is loaded, or this container has no GPU".into(),
        None,
    )
}

/// libcupti where the agent too would look for it once a program has not loaded its own.
fn cupti() -> Option<PathBuf> {
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

/// Entries of a folder whose names begin so, the highest first.
fn matching(folder: &Path, start: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(start));
    let mut found: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    found.sort_by(|a, b| b.cmp(a));
    found
}
