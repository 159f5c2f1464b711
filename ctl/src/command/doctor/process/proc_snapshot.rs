//! Reads the data of a process from /proc.

use crate::command::doctor::elf::Elf;
use crate::proc::{age, mapped, status_field, variable};
use std::io;
use std::path::PathBuf;

const MAX_ANCESTORS: usize = 64;

/// A process, as far as this user may read its data.
#[derive(Debug, Default)]
pub(crate) struct ProcSnapshot {
    pub pid: u32,
    /// The kernel's name of the process, at most 15 bytes.
    pub comm: String,
    pub uid: Option<u32>,
    /// Pid of the parent process; `None` if it is not in this PID namespace.
    pub parent: Option<u32>,
    /// Pid of the process in its own PID namespace.
    pub own_pid: u32,
    /// Seccomp mode; 2 means that a filter of system calls is active.
    pub seccomp: u32,
    /// Whether the process has ended and its parent has not waited for it.
    pub is_zombie: bool,
    pub age_s: Option<u64>,
    pub maps: Option<String>,
    pub environ: Option<Vec<u8>>,
    pub program: Option<io::Result<Elf>>,
    /// Root folder of the process, as a path in our mount namespace.
    pub root: PathBuf,
}

impl ProcSnapshot {
    pub(crate) fn read(pid: u32) -> ProcSnapshot {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let text = |name: &str| {
            std::fs::read(folder.join(name)).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        };
        let status = text("status").unwrap_or_default();
        let field = |name: &str| status_field(&status, name);
        let program = folder.join("exe");
        ProcSnapshot {
            pid,
            comm: text("comm").unwrap_or_default().trim_end().to_owned(),
            uid: field("Uid").split_whitespace().next().and_then(|uid| uid.parse().ok()),
            parent: field("PPid").parse().ok().filter(|parent| *parent > 0),
            own_pid: field("NSpid").split_whitespace().last().and_then(|own| own.parse().ok()).unwrap_or(pid),
            seccomp: field("Seccomp").parse().unwrap_or(0),
            is_zombie: field("State").starts_with('Z'),
            age_s: age(
                &text("stat").unwrap_or_default(),
                &std::fs::read_to_string("/proc/uptime").unwrap_or_default(),
            ),
            maps: text("maps").filter(|maps| !maps.is_empty()),
            environ: std::fs::read(folder.join("environ")).ok(),
            // If this user may not read the link, the program is unknown.
            program: std::fs::read_link(&program).is_ok().then(|| Elf::read(&program)),
            root: folder.join("root"),
        }
    }

    pub(crate) fn variable(&self, name: &str) -> Option<String> {
        variable(self.environ.as_deref()?, name)
    }

    pub(crate) fn mapped(&self, name: &str) -> Option<String> {
        mapped(self.maps.as_deref()?, name)
    }

    /// Converts a path in the process's mount namespace to one in ours.
    pub(crate) fn path_from_here(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Returns the parent process, its parent, and so on.
    pub(crate) fn ancestors(&self) -> Vec<ProcSnapshot> {
        let parent = |process: &ProcSnapshot| process.parent.map(ProcSnapshot::read);
        std::iter::successors(parent(self), parent).take(MAX_ANCESTORS).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_seen() {
        let own = ProcSnapshot::read(std::process::id());
        assert!(
            own.maps.is_some() && own.environ.is_some() && own.program.is_some_and(|program| program.is_ok())
        );
        assert!(own.parent.is_some() && own.uid.is_some() && own.age_s.is_some_and(|age| age < 3_600));
    }
}
