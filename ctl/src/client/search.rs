//! Finds a daemon's control socket, and checks whether it can be trusted.
//!
//! A socket that is given as an argument or in the environment is the only one tried: a fallback to another daemon would answer a
//! different question. Reports come from the socket, and `run` sends agents to its directory. So a socket in a place where other
//! users could have created it, such as a free name in /tmp, is not used.

use crate::args::variable;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// File name of a daemon's control socket.
pub(crate) const CONTROL: &str = "control.sock";
/// File name of the socket for agents, in the directory of the control socket.
pub(crate) const AGENT: &str = "agent.sock";
/// Directory of sockets of systemd units and daemons that run as root; only root can create it.
const SYSTEM: &str = "/run/gpumemd";

/// A socket of a daemon, or a path at which it may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Socket {
    pub path: PathBuf,
    /// Whether the user gave the path (`--socket`); then the socket's owner is not checked.
    typed: bool,
}

/// Returns the control sockets to try, the preferred one first.
pub(crate) fn candidates(given: Option<&Path>) -> Vec<Socket> {
    if let Some(given) = given {
        return vec![Socket { path: control(given), typed: true }];
    }
    if let Some(named) = variable("GPUMEM_CONTROL") {
        return vec![Socket { path: control(&named), typed: false }];
    }
    // `gpumemctl run` sets GPUMEM_SOCKET for the command and the processes that it starts.
    let agent = variable("GPUMEM_SOCKET").map(|agent| agent.with_file_name(CONTROL));
    let runtime = variable("XDG_RUNTIME_DIR").filter(|path| path.is_absolute());
    let runtime = runtime.map(|runtime| runtime.join("gpumem").join(CONTROL));
    let system = [Path::new(SYSTEM).join(CONTROL), in_tmp().join(CONTROL)];
    let mut unique: Vec<Socket> = Vec::new();
    for path in agent.into_iter().chain(runtime).chain(system) {
        if unique.iter().all(|known| known.path != path) {
            unique.push(Socket { path, typed: false });
        }
    }
    unique
}

/// Returns the socket that the arguments or the environment name.
pub(crate) fn named_socket(given: Option<&Path>) -> Option<PathBuf> {
    given.map(Path::to_owned).or_else(|| variable("GPUMEM_CONTROL"))
}

/// Returns the user's runtime directory; `None` if it does not exist or belongs to another user (after `su`).
pub(crate) fn runtime() -> Option<PathBuf> {
    let path = variable("XDG_RUNTIME_DIR").filter(|path| path.is_absolute())?;
    let folder = std::fs::metadata(&path).ok()?;
    (folder.is_dir() && folder.uid() == user()).then_some(path)
}

/// Returns the directory for the sockets of the user's private daemon.
pub(crate) fn private_directory() -> PathBuf {
    runtime().map_or_else(in_tmp, |runtime| runtime.join("gpumem"))
}

/// Returns an agent socket that accepts connections. A container may get only this one, without the control socket.
pub(crate) fn agent_socket() -> Option<PathBuf> {
    let controls = candidates(None).into_iter();
    let mut agents = controls.map(|control| Socket { path: control.path.with_file_name(AGENT), ..control });
    agents.find(|agent| agent.check().is_ok() && listens(&agent.path)).map(|agent| agent.path)
}

/// Returns whether a SEQPACKET socket accepts a connection at once.
fn listens(path: &Path) -> bool {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None) else {
        return false;
    };
    SocketAddrUnix::new(path).is_ok_and(|address| connect(&socket, &address).is_ok())
}

fn in_tmp() -> PathBuf {
    PathBuf::from(format!("/tmp/gpumem-{}", user()))
}

fn user() -> u32 {
    rustix::process::getuid().as_raw()
}

/// Returns the control socket that is named by its path or by its directory.
fn control(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    if path.is_dir() { path.join(CONTROL) } else { path }
}

impl Socket {
    /// Checks that the path is a socket that only root or this user can have created. The error is the reason if not.
    pub(crate) fn check(&self) -> Result<(), String> {
        let socket = std::fs::metadata(&self.path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => "is not there".to_owned(),
            std::io::ErrorKind::PermissionDenied => "no permission to read its directory".to_owned(),
            _ => error.to_string(),
        })?;
        if !socket.file_type().is_socket() {
            return Err("is not a socket".into());
        }
        if self.typed {
            return Ok(());
        }
        check_path(&self.path, socket.uid())?;
        // The agents' socket is a link to one in another directory, whose permissions must be safe too.
        let real = std::fs::canonicalize(&self.path).map_err(|error| error.to_string())?;
        check_path(&real, socket.uid())
    }

    /// Checks the user id of the process that accepted the connection. [`check`](Self::check) is not enough, because the socket
    /// may have been replaced between that check and the connection.
    pub(crate) fn check_server(&self, server: u32) -> Result<(), String> {
        if self.typed || is_systems(&self.path) || server == 0 || server == user() {
            return Ok(());
        }
        Err(not_ours(server))
    }
}

/// Returns whether a path is in the system's directory, which only root can create. Its sockets belong to the daemon's user.
fn is_systems(path: &Path) -> bool {
    path.starts_with(SYSTEM)
}

/// Checks a socket's owner and the permissions of its directory.
fn check_path(path: &Path, owner: u32) -> Result<(), String> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let directory = std::fs::metadata(directory).map_err(|error| error.to_string())?;
    let is_our_group = directory.gid() == 0 || directory.gid() == rustix::process::getgid().as_raw();
    check_owners(is_systems(path), owner, (directory.uid(), directory.mode(), is_our_group), user())
}

/// Checks a socket's owner. `directory` is (owner, mode, whether the group is ours or root's) of the socket's directory.
fn check_owners(is_systems: bool, owner: u32, directory: (u32, u32, bool), user: u32) -> Result<(), String> {
    let (holder, mode, is_our_group) = directory;
    if mode & 0o002 != 0 || mode & 0o020 != 0 && !is_our_group {
        return Err("not used: other users may write to the socket's directory".into());
    }
    if owner != 0 && owner != user && !is_systems {
        return Err(not_ours(owner));
    }
    // The directory's owner can replace the socket, also by a link.
    if holder != 0 && holder != user && !is_systems {
        return Err(format!(
            "not used: the socket's directory belongs to user {holder} (--socket skips this check)"
        ));
    }
    Ok(())
}

fn not_ours(owner: u32) -> String {
    format!("not used: the socket belongs to user {owner} (--socket skips this check)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_and_the_caller_are_believed() {
        let ok = |systems, owner, holder, mode, group| {
            check_owners(systems, owner, (holder, mode, group), 1000).is_ok()
        };
        for (systems, owner, holder, mode, group) in [
            (false, 0, 0, 0o755, false),
            (false, 1000, 1000, 0o700, false),
            (false, 1000, 1000, 0o775, true),
            (true, 990, 990, 0o755, false),
        ] {
            assert!(ok(systems, owner, holder, mode, group), "{owner} in {holder}'s {mode:o}");
        }
        for (systems, owner, holder, mode, group) in [
            (false, 1001, 1000, 0o755, false),
            (false, 1000, 1000, 0o777, true),
            (false, 1000, 1000, 0o775, false),
            (true, 0, 0, 0o777, false),
            // A link to root's socket, in a directory whose owner can replace the link at any time.
            (false, 0, 1001, 0o755, false),
        ] {
            assert!(!ok(systems, owner, holder, mode, group), "{owner} in {holder}'s {mode:o}");
        }
        let own = |typed| Socket { path: "/home/a/control.sock".into(), typed };
        assert!(own(false).check_server(user() + 1).is_err() && own(true).check_server(user() + 1).is_ok());
    }

    #[test]
    fn what_is_typed_is_taken_alone() {
        let typed = candidates(Some(Path::new("/nowhere/at.sock")));
        assert_eq!(typed, [Socket { path: "/nowhere/at.sock".into(), typed: true }]);
        let folder = std::env::temp_dir();
        assert_eq!(candidates(Some(&folder))[0].path, folder.join("control.sock"));
    }
}
