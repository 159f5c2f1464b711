//! Finds why a process has no agent, or why its agent's reports do not arrive: a variable that is not set, a library that the
//! process cannot load, a socket that it cannot reach.

use super::proc_snapshot::ProcSnapshot;
use super::{AGENT, INJECTION};
use crate::client::{AGENT as SOCKET, CONTROL};
use crate::command::doctor::elf::Elf;
use crate::command::doctor::local_checks::LONGEST_SOCKET;
use gpumem_model::control::State;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

/// Returns the remedy for a program that does not pass its environment to the processes that it starts.
fn fix_for(program: &str) -> &'static str {
    match program {
        "sudo" => {
            "sudo --preserve-env=CUDA_INJECTION64_PATH,NVTX_INJECTION64_PATH,GPUMEM_SOCKET,GPUMEM_JOB COMMAND, or sudo \
             gpumemctl run -- COMMAND"
        }
        "su" | "runuser" | "login" => "su --preserve-environment, or gpumemctl run after it",
        "sshd" | "ssh" => "gpumemctl run on the other machine: ssh HOST gpumemctl run -- COMMAND",
        "systemd" => "systemd-run --setenv=CUDA_INJECTION64_PATH, or Environment= in the unit",
        "orted" | "prted" | "mpirun" | "mpiexec" | "hydra_pmi_proxy" => {
            "mpirun -x CUDA_INJECTION64_PATH -x GPUMEM_SOCKET, or mpirun gpumemctl run -- COMMAND"
        }
        "srun" | "slurmstepd" => "srun --export=ALL, or srun gpumemctl run -- COMMAND",
        "dockerd" | "containerd-shim" | "conmon" | "podman" | "docker" => {
            "docker run -e CUDA_INJECTION64_PATH with the library and the socket's folder mounted"
        }
        "raylet" | "ray" => "runtime_env={\"env_vars\": {...}} of ray.init, or gpumemctl run -- ray start",
        _ => "put gpumemctl run right before it: gpumemctl run -- COMMAND",
    }
}

/// Returns why a process was started without `CUDA_INJECTION64_PATH`, and the remedy.
pub(super) fn variable(process: &ProcSnapshot, ancestors: &[ProcSnapshot]) -> (String, String) {
    let has_it = |process: &ProcSnapshot| {
        let path = process.variable(INJECTION);
        path.is_some_and(|path| path.rsplit('/').next().is_some_and(|file| file.starts_with(AGENT)))
    };
    let name = |process: &ProcSnapshot| format!("{} (pid {})", process.comm, process.pid);
    // Returns the process that an ancestor started, in the chain down to the checked process.
    let child_of =
        |index: usize| index.checked_sub(1).and_then(|index| ancestors.get(index)).unwrap_or(process);
    let holder = ancestors.iter().position(has_it);
    let Some((index, holder)) = holder.and_then(|index| Some((index, ancestors.get(index)?))) else {
        // `gpumemctl run` sets the variable for its children, but does not have it itself.
        let run = ancestors.iter().position(|process| process.comm == "gpumemctl");
        let text = match (run, ancestors.iter().find(|process| process.environ.is_none())) {
            (Some(index), _) => {
                format!("was started by gpumemctl run, and {} lost {INJECTION}", name(child_of(index)))
            }
            (None, Some(unreadable)) => format!(
                "was started without {INJECTION}, and none of its parents has it up to {}; this user may not read further",
                name(unreadable)
            ),
            (None, None) => format!("was started without {INJECTION}, and none of its parents has it"),
        };
        return (text, "start it with: gpumemctl run -- COMMAND".to_owned());
    };
    let (has, lost) = (name(holder), name(child_of(index)));
    let text = format!("was started without {INJECTION}: {has} has it, and {lost} that it started does not");
    (text, fix_for(&holder.comm).to_owned())
}

/// Returns why the process cannot load the agent from `path`, and the remedy; `None` if it can.
pub(super) fn library(process: &ProcSnapshot, path: &str) -> Option<(String, String)> {
    if !path.starts_with('/') {
        let text = format!("{path} is not an absolute path: CUDA searches the loader's folders for it");
        return Some((text, "set the whole path, as gpumemctl run does".to_owned()));
    }
    let file = process.path_from_here(path);
    match Elf::read(&file) {
        Ok(elf) => {
            let program = process.program.as_ref().and_then(|program| program.as_ref().ok());
            if let Some(program) = program.filter(|program| program.machine != elf.machine) {
                let (its, ours) = (program.machine_name(), elf.machine_name());
                let text = format!("{path} is for {ours}, the program for {its}");
                return Some((text, "mount the library of the program's architecture".to_owned()));
            }
        }
        Err(error) if error.kind() == ErrorKind::InvalidData => {
            return Some((format!("{path} is not a library"), "install it again".to_owned()));
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let fix = format!("chmod a+rx {path} and the folders above it");
            return Some((format!("{path} cannot be read in the process's mount namespace"), fix));
        }
        Err(_) if mounts_differ(process.pid) => {
            let folder = Path::new(path).parent().unwrap_or(Path::new("/")).display();
            let fix = format!("mount {folder} into the container at the same path");
            return Some((
                format!("{path} does not exist in the process's mount namespace (a container?)"),
                fix,
            ));
        }
        Err(_) => {
            let fix = "install it again, or start the process again".to_owned();
            return Some((format!("{path} no longer exists"), fix));
        }
    }
    // Reading as root does not show whether the process's user may read the file.
    let file = file.metadata().ok()?;
    let mode = file.permissions().mode() & 0o7777;
    let is_readable = match process.uid? {
        0 => true,
        uid if uid == file.uid() => mode & 0o400 != 0,
        _ => mode & 0o044 != 0,
    };
    let text = format!("{path} has mode {mode:04o}: the user of the process may not read it");
    (!is_readable).then(|| (text, format!("chmod a+r {path}")))
}

/// Returns whether a process has another mount namespace than this one, as in a container.
fn mounts_differ(pid: u32) -> bool {
    let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    let (its, ours) = (namespace(&pid.to_string()), namespace("self"));
    its.is_some() && its != ours
}

/// Returns the socket paths that the process's agent tries, in order. The agent has the same list.
fn socket_paths(process: &ProcSnapshot) -> Vec<String> {
    if let Some(named) = process.variable("GPUMEM_SOCKET") {
        return vec![named];
    }
    let runtime = process.variable("XDG_RUNTIME_DIR").map(|folder| format!("{folder}/gpumem/{SOCKET}"));
    let own = process.uid.map(|uid| format!("/tmp/gpumem-{uid}/{SOCKET}"));
    runtime.into_iter().chain([format!("/run/gpumemd/{SOCKET}")]).chain(own).collect()
}

/// Returns the socket of the daemon at `control`, if the process's agent can reach it. The error is state, problem and remedy.
pub(super) fn socket(
    process: &ProcSnapshot,
    control: Option<&Path>,
) -> Result<String, (State, String, String)> {
    let paths = socket_paths(process);
    let daemons = control.map(|control| control.with_file_name(SOCKET));
    let identity = |path: &Path| path.metadata().ok().map(|file| (file.dev(), file.ino()));
    if let Some(long) = paths.iter().find(|path| path.len() > LONGEST_SOCKET) {
        let text = format!("its GPUMEM_SOCKET has {} bytes; the kernel allows {LONGEST_SOCKET}", long.len());
        return Err((State::Bad, text, "give gpumemd a shorter runtime_dir".to_owned()));
    }
    for path in &paths {
        let local = process.path_from_here(path);
        let Ok(file) = local.metadata() else { continue };
        if !file.file_type().is_socket() {
            let fix = "start it again with gpumemctl run, or correct GPUMEM_SOCKET".to_owned();
            return Err((State::Bad, format!("{path} is not a socket"), fix));
        }
        let is_own = process.uid == Some(file.uid()) || process.uid == Some(0);
        let mode = file.permissions().mode() & 0o7777;
        if !is_own && mode & 0o002 == 0 {
            let fix = "the agent socket must have mode 0666: fix its systemd socket unit".to_owned();
            return Err((
                State::Bad,
                format!("the user of the process may not write to {path} (mode {mode:04o})"),
                fix,
            ));
        }
        return match &daemons {
            Some(daemons) if identity(daemons) != identity(&local) => {
                let ours = daemons.display();
                let text = format!("reports to another daemon, at {path}; this one is at {ours}");
                let other = Path::new(path).with_file_name(CONTROL);
                Err((
                    State::Warn,
                    text,
                    format!("query that daemon: gpumemctl ps --socket {}", other.display()),
                ))
            }
            _ => Ok(path.clone()),
        };
    }
    let fix = match (mounts_differ(process.pid), &daemons) {
        (true, Some(daemons)) => {
            // The agent socket next to the control socket is a link to one in a folder of its own, which can be mounted alone.
            let socket = daemons.canonicalize().unwrap_or_else(|_| daemons.clone());
            let folder = socket.parent().unwrap_or(Path::new("/run/gpumemd/agent")).display();
            let socket = socket.display();
            format!("mount {folder} into the container at the same place, and set GPUMEM_SOCKET={socket}")
        }
        (true, None) => "mount the folder of the daemon's agent.sock into the container".to_owned(),
        (false, Some(daemons)) => {
            format!("start it with GPUMEM_SOCKET={}, or with gpumemctl run", daemons.display())
        }
        (false, None) => "start a daemon: systemctl start gpumemd, or gpumemctl run".to_owned(),
    };
    let searched = paths.join(", ");
    let text = format!("its agent finds no daemon: the process sees none of {searched}");
    Err((State::Bad, text, fix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(pid: u32, comm: &str, environ: Option<&str>) -> ProcSnapshot {
        let environ = environ.map(|text| text.replace(' ', "\0").into_bytes());
        ProcSnapshot { pid, comm: comm.into(), environ, ..ProcSnapshot::default() }
    }

    #[test]
    fn the_one_that_lost_it_is_named() {
        const OURS: Option<&str> = Some("CUDA_INJECTION64_PATH=/usr/lib/gpumem/libgpumem.so A=b");
        let process = seen(9, "python", Some("A=b"));
        let parents = [seen(8, "bash", Some("A=b")), seen(7, "sudo", OURS), seen(6, "bash", OURS)];
        let (text, fix) = variable(&process, &parents);
        assert!(text.contains("sudo (pid 7) has it, and bash (pid 8) that it started does not"), "{text}");
        assert!(fix.contains("--preserve-env"), "{fix}");
        let (text, _) = variable(&process, &parents[1..]);
        assert!(text.contains("python (pid 9) that it started"), "{text}");

        let (text, fix) = variable(&process, &[seen(8, "bash", Some("A=b"))]);
        assert!(text.contains("none of its parents") && fix.contains("gpumemctl run --"), "{text}");
        let other = seen(8, "bash", Some("CUDA_INJECTION64_PATH=/opt/nsys.so"));
        assert!(variable(&process, &[other]).0.contains("none of its parents"));
        let (text, _) = variable(&process, &[seen(8, "bash", Some("")), seen(1, "init", None)]);
        assert!(text.contains("up to init (pid 1)"), "{text}");
        let (text, _) = variable(&process, &[seen(8, "env", Some("")), seen(7, "gpumemctl", Some(""))]);
        assert!(text.contains("gpumemctl run, and env (pid 8) lost"), "{text}");
    }
}
