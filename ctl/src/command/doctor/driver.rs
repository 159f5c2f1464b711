//! Checks the driver by its files: kernel module, libraries, device files. The daemon checks NVML, but may not answer.

use super::findings::finding;
use crate::proc::{pids, variable};
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use rustix::fs::{Access, access};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Oldest driver branch (first number of the version) that supports a libcupti of CUDA 11, which the agent needs at least.
const OLDEST: u32 = 450;
/// Folders that may have the driver's libraries, in addition to those of LD_LIBRARY_PATH.
const FOLDERS: [&str; 7] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/nvidia/lib64",
    "run/opengl-driver/lib",
    "usr/lib/wsl/lib",
];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Driver {
    pub version: String,
}

impl Driver {
    fn branch(&self) -> Option<u32> {
        self.version.split('.').next()?.parse().ok()
    }

    /// Returns the highest major version of CUDA that the driver supports.
    pub(crate) fn cuda(&self) -> Option<u32> {
        Some(match self.branch()? {
            580.. => 13,
            525.. => 12,
            450.. => 11,
            _ => 10,
        })
    }
}

/// Checks the driver's files below `root`. Returns the loaded driver.
pub(super) fn check(root: &Path, findings: &mut Vec<Finding>) -> Option<Driver> {
    let driver = check_module(root, findings);
    if let Some(driver) = &driver {
        check_libraries(root, driver, findings);
    }
    check_device_files(root, findings);
    driver
}

fn check_module(root: &Path, findings: &mut Vec<Finding>) -> Option<Driver> {
    let text = fs::read_to_string(root.join("proc/driver/nvidia/version")).ok();
    let driver = text.as_deref().and_then(version).map(|version| Driver { version });
    let exists = |path: &str| root.join(path).exists();
    let (state, text, fix) = match &driver {
        Some(old) if old.branch().is_some_and(|branch| branch < OLDEST) => (
            State::Warn,
            format!(
                "driver {} is older than CUDA 11: NVML reports totals, but the agent has no usable CUPTI",
                old.version
            ),
            "update the driver to 525 or later",
        ),
        Some(Driver { version }) => (State::Ok, format!("kernel module {version}"), ""),
        None if exists("dev/dxg") => (
            State::Warn,
            "WSL: Windows has the driver (/dev/dxg); the bytes of processes are unknown here".into(),
            "agents report tracked memory: gpumemctl run -- COMMAND",
        ),
        None if exists("dev/nvidiactl") => (State::Ok, "/dev/nvidiactl exists".into(), ""),
        None if exists("sys/module/nouveau") => (
            State::Warn,
            "the kernel uses nouveau, which has neither NVML nor CUDA".into(),
            "install NVIDIA's driver, and keep nouveau from being loaded",
        ),
        None => (
            State::Warn,
            "no /dev/nvidiactl: no NVIDIA driver is loaded, or this container has no GPU".into(),
            "modprobe nvidia, or nvidia-smi as root once; in a container: --gpus all, or a GPU in the pod's limits",
        ),
    };
    findings.push(finding(Check::Driver, state, "driver", text, fix));
    driver
}

/// Returns the version in the text of /proc/driver/nvidia/version.
fn version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.contains("NVRM version"))?;
    let is_version = |word: &&str| {
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        word.find('.') == Some(3) && word.split('.').all(is_number)
    };
    line.split_whitespace().find(is_version).map(str::to_owned)
}

/// Checks that the driver's libraries have the version of the kernel module.
fn check_libraries(root: &Path, driver: &Driver, findings: &mut Vec<Finding>) {
    let mut others = Vec::new();
    let mut same = 0;
    let set = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let given = std::env::split_paths(&set).filter(|folder| folder.is_absolute() && root == Path::new("/"));
    let folders: Vec<PathBuf> = given.chain(FOLDERS.iter().map(|folder| root.join(folder))).collect();
    for name in ["libcuda.so", "libnvidia-ml.so"] {
        for folder in &folders {
            let Ok(file) = fs::canonicalize(folder.join(format!("{name}.1"))) else { continue };
            let file_name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            match file_name.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')) {
                Some(version) if version == driver.version => same += 1,
                // A file named libcuda.so.1 itself does not have the version in its name.
                Some(version) if version.contains('.') && !others.contains(&file) => others.push(file),
                _ => {}
            }
        }
    }
    let mut add =
        |state, text, fix| findings.push(finding(Check::DriverVersions, state, "driver", text, fix));
    if let Some(other) = others.first() {
        let text = format!("the kernel module is {}, the library is {}", driver.version, other.display());
        // If a library of the right version exists too, one of another version affects only programs that find it first.
        let state = if same == 0 { State::Bad } else { State::Warn };
        let fix = match same {
            0 => "the driver was updated and is not loaded yet: reload the nvidia modules, or reboot",
            _ => "remove the library of the other driver, or take its folder out of LD_LIBRARY_PATH",
        };
        add(state, text, fix);
    } else if same > 0 {
        add(State::Ok, format!("libraries and kernel module are {}", driver.version), "");
    }
}

/// Checks whether this user may open the device files.
fn check_device_files(root: &Path, findings: &mut Vec<Finding>) {
    let entries = fs::read_dir(root.join("dev")).into_iter().flatten().flatten();
    let is_ours = |name: &str| {
        let rest = name.strip_prefix("nvidia");
        rest.is_some_and(|rest| rest == "ctl" || rest == "-uvm" || rest.parse::<u32>().is_ok())
    };
    let mut files: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    files.retain(|name| is_ours(name));
    files.sort();
    if files.is_empty() {
        return;
    }
    let mut add = |state, text, fix| findings.push(finding(Check::DriverFiles, state, "driver", text, fix));
    let path = |name: &String| root.join("dev").join(name);
    let closed: Vec<_> =
        files.iter().filter(|name| access(path(name), Access::READ_OK | Access::WRITE_OK).is_err()).collect();
    if let Some(first) = closed.first() {
        let mode = fs::metadata(path(first)).map_or(String::new(), |file| {
            format!(" (mode {:04o}, group {})", file.permissions().mode() & 0o7777, file.gid())
        });
        let names: Vec<&str> = closed.iter().map(|name| name.as_str()).collect();
        let names = names.join(", /dev/");
        let text = format!("this user may not open /dev/{names}{mode}: programs of this user find no GPU");
        let fix =
            "join the group that owns them, or let the driver open them to all: NVreg_DeviceFileMode=0666";
        add(State::Warn, text, fix);
    } else if !files.iter().any(|name| name == "nvidia-uvm") {
        let text = "there is no /dev/nvidia-uvm: CUDA cannot start";
        add(State::Warn, text.into(), "modprobe nvidia-uvm, or nvidia-modprobe -u -c 0");
    } else {
        add(State::Ok, format!("{} device files that this user may open", files.len()), "");
    }
}

/// Checks whether MPS (its control daemon or its server) runs, and whether it loads the agent. The server inherits the control
/// daemon's environment. The kernel truncates both names to `nvidia-cuda-mps`.
pub(super) fn mps(root: &Path) -> Option<Finding> {
    let proc = root.join("proc");
    let file = |pid: u32, name: &str| fs::read(proc.join(pid.to_string()).join(name)).unwrap_or_default();
    let of_mps: Vec<u32> =
        pids(&proc).filter(|pid| file(*pid, "comm").trim_ascii_end() == b"nvidia-cuda-mps").collect();
    let has_agent = |pid: &&u32| {
        let library = variable(&file(**pid, "environ"), "CUDA_INJECTION64_PATH");
        library.is_some_and(|path| path.contains("libgpumem"))
    };
    let with_agent = of_mps.iter().find(has_agent);
    let subject = format!("pid {}", with_agent.or(of_mps.first())?);
    let text = match with_agent {
        Some(_) => {
            "MPS runs with CUDA_INJECTION64_PATH set: the agent is off in the MPS server, and each client has its \
                 own agent"
        }
        None => {
            "MPS runs: from Volta on, NVML lists the bytes of each client; on older GPUs the server has all bytes"
        }
    };
    Some(finding(Check::DriverMps, State::Ok, &subject, text, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A temporary root directory, deleted on drop.
    struct Root(PathBuf);

    impl Root {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("gpumemctl-driver-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(path.join("dev")).expect("a folder");
            Root(path)
        }

        fn file(&self, name: &str, text: &str) -> &Self {
            let path = self.0.join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("written");
            self
        }

        fn report(&self) -> Vec<(String, State, String)> {
            let mut findings = Vec::new();
            check(&self.0, &mut findings);
            findings.into_iter().map(|of| (of.id, of.state, of.text)).collect()
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const OPEN: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build  (archlinux)\n\
                        GCC version:  gcc version 13.2.1 20230801 (GCC)\n";

    #[test]
    fn versions_of_both_kinds_of_module_are_read() {
        assert_eq!(version(OPEN).as_deref(), Some("550.54.14"));
        let closed =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023";
        assert_eq!(version(closed).as_deref(), Some("535.104.05"));
        assert_eq!(version("GCC version: 535.1.2"), None);
        for (of, cuda) in [("450.80.02", 11), ("535.54.03", 12), ("580.65.06", 13), ("440.33", 10)] {
            assert_eq!(Driver { version: of.into() }.cuda(), Some(cuda));
        }
    }

    #[test]
    fn a_machine_without_a_driver_says_why() {
        let none = Root::new("none");
        assert!(none.report()[0].2.starts_with("no /dev/nvidiactl"), "{:?}", none.report());
        none.file("sys/module/nouveau/version", "");
        assert!(none.report()[0].2.contains("nouveau"));
        none.file("dev/dxg", "");
        assert!(none.report()[0].2.contains("WSL"));
        let old = Root::new("old");
        old.file(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  390.157  Wed",
        );
        assert!(old.report()[0].2.contains("older than CUDA 11"), "{:?}", old.report());
    }

    #[test]
    fn a_library_that_is_newer_than_the_module_is_told() {
        let root = Root::new("mixed");
        root.file("proc/driver/nvidia/version", OPEN).file("usr/lib64/libcuda.so.560.28.03", "");
        std::os::unix::fs::symlink("libcuda.so.560.28.03", root.0.join("usr/lib64/libcuda.so.1"))
            .expect("a link");
        let report = root.report();
        let found = report.iter().find(|(id, ..)| id == "driver.versions").expect("it is report");
        assert!(
            found.1 == State::Bad && found.2.contains("550.54.14") && found.2.contains("560.28.03"),
            "{found:?}"
        );
        root.file("usr/lib/libcuda.so.550.54.14", "");
        std::os::unix::fs::symlink("libcuda.so.550.54.14", root.0.join("usr/lib/libcuda.so.1"))
            .expect("a link");
        assert!(root.report().iter().any(|(id, state, _)| id == "driver.versions" && *state == State::Warn));
        fs::remove_dir_all(root.0.join("usr/lib64")).expect("removed");
        assert!(root.report().iter().any(|(id, state, _)| id == "driver.versions" && *state == State::Ok));
    }

    #[test]
    fn device_files_that_are_missing_are_told() {
        let root = Root::new("files");
        root.file("dev/nvidiactl", "").file("dev/nvidia0", "").file("dev/nvidia-modeset", "");
        let device_files =
            |root: &Root| root.report().into_iter().find(|(id, ..)| id == "driver.files").expect("report");
        assert!(device_files(&root).2.contains("no /dev/nvidia-uvm"));
        root.file("dev/nvidia-uvm", "");
        assert_eq!(device_files(&root).1, State::Ok);
    }

    #[test]
    fn mps_is_named() {
        let root = Root::new("mps");
        assert!(mps(&root.0).is_none());
        root.file("proc/77/comm", "nvidia-cuda-mps\n").file("proc/77/environ", "HOME=/\0");
        assert_eq!(mps(&root.0).map(|of| (of.state, of.subject)), Some((State::Ok, "pid 77".into())));
        root.file("proc/77/environ", "HOME=/\0CUDA_INJECTION64_PATH=/usr/lib/gpumem/libgpumem.so\0");
        assert!(mps(&root.0).is_some_and(|of| of.text.contains("off in the MPS server")));
    }
}
