//! Checks whether the process can reach the daemon's socket, in its mount namespace and with its environment.

use super::file::mounts_differ;
use super::proc_snapshot::ProcSnapshot;
use crate::client::{AGENT, sibling};
use crate::command::doctor::local_checks::LONGEST_SOCKET;
use gpumem_model::control::State;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

/// Returns the paths that the process's agent tries, the best first, like the code in agent-lib.
fn places(process: &ProcSnapshot) -> Vec<String> {
    if let Some(named) = process.variable("GPUMEM_SOCKET") {
        return vec![named];
    }
    let runtime = process.variable("XDG_RUNTIME_DIR").map(|folder| format!("{folder}/gpumem/{AGENT}"));
    let own = process.uid.map(|uid| format!("/tmp/gpumem-{uid}/{AGENT}"));
    runtime.into_iter().chain([format!("/run/gpumemd/{AGENT}")]).chain(own).collect()
}

/// Returns the socket that it can reach, or else the state, the problem and the remedy.
pub(super) fn look(
    process: &ProcSnapshot,
    control: Option<&Path>,
) -> Result<String, (State, String, String)> {
    let places = places(process);
    let daemons = control.map(|control| sibling(control, AGENT));
    let identity = |path: &Path| path.metadata().ok().map(|file| (file.dev(), file.ino()));
    if let Some(long) = places.iter().find(|path| path.len() > LONGEST_SOCKET) {
        let text = format!(
            "its GPUMEM_SOCKET has {} bytes: no socket's path is longer than {LONGEST_SOCKET}",
            long.len()
        );
        return Err((State::Bad, text, "give gpumemd a shorter runtime_dir".to_owned()));
    }
    for path in &places {
        let there = process.within(path);
        let Ok(file) = there.metadata() else { continue };
        if !file.file_type().is_socket() {
            let text = format!("{path} is no socket");
            return Err((
                State::Bad,
                text,
                "start it again with gpumemctl run, or correct GPUMEM_SOCKET".to_owned(),
            ));
        }
        let is_own = process.uid == Some(file.uid()) || process.uid == Some(0);
        if !is_own && file.permissions().mode() & 0o002 == 0 {
            let text =
                format!("its user may not write to {path} (mode {:04o})", file.permissions().mode() & 0o7777);
            return Err((
                State::Bad,
                text,
                "the agent socket must have mode 0666: mend its systemd socket unit".to_owned(),
            ));
        }
        return match &daemons {
            Some(daemons) if identity(daemons) != identity(&there) => {
                let text =
                    format!("reports to another daemon, at {path}; this one is at {}", daemons.display());
                let fix = format!(
                    "ask that one: gpumemctl --socket {}",
                    Path::new(path).with_file_name("control.sock").display()
                );
                Err((State::Warn, text, fix.replace("gpumemctl --socket", "gpumemctl ps --socket")))
            }
            _ => Ok(path.clone()),
        };
    }
    let looked = places.join(", ");
    let fix = match (mounts_differ(process.pid), &daemons) {
        (true, Some(daemons)) => {
            // The file next to the control socket is a link to a folder that contains only the agent socket.
            let socket = daemons.canonicalize().unwrap_or_else(|_| daemons.clone());
            let folder = socket.parent().unwrap_or(Path::new("/run/gpumemd/agent")).display();
            format!(
                "mount {folder} into the container at the same place, and set GPUMEM_SOCKET={}",
                socket.display()
            )
        }
        (true, None) => "mount the folder of the daemon's agent.sock into the container".to_owned(),
        (false, Some(daemons)) => {
            format!("start it with GPUMEM_SOCKET={}, or with gpumemctl run", daemons.display())
        }
        (false, None) => "start a daemon: systemctl start gpumemd, or gpumemctl run".to_owned(),
    };
    Err((
        State::Bad,
        format!("its agent finds no daemon: none of {looked} is there, as the process sees it"),
        fix,
    ))
}
