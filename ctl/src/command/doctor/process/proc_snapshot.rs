//! Data of a process in /proc.

use super::text::{age, mapped, variable};
use crate::command::doctor::elf::Elf;
use std::io;
use std::path::PathBuf;

const MOST_ANCESTORS: usize = 64;

/// A process, as far as this user may read its data.
#[derive(Debug, Default)]
pub(crate) struct ProcSnapshot {
    pub pid: u32,
    /// The kernel's short name of the process.
    pub comm: String,
    pub uid: Option<u32>,
    pub parent: Option<u32>,
    /// Its pid in its innermost PID namespace.
    pub own_pid: u32,
    /// Seccomp mode; 2 means that a filter of system calls is active.
    pub seccomp: u32,
    /// It has ended, and its parent has not waited for it.
    pub is_zombie: bool,
    pub age_s: Option<u64>,
    pub maps: Option<String>,
    pub environ: Option<Vec<u8>>,
    pub program: Option<io::Result<Elf>>,
    /// Its root folder, as a path in our namespace.
    pub root: PathBuf,
}

impl ProcSnapshot {
    pub(crate) fn look(pid: u32) -> ProcSnapshot {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let text = |name: &str| {
            std::fs::read(folder.join(name)).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        };
        let status = text("status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(str::trim).unwrap_or_default()
        };
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
            // If the link cannot be followed, all facts about the program are unknown.
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

    /// Converts a path in the process's namespace to one in ours.
    pub(crate) fn within(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    pub(crate) fn ancestors(&self) -> Vec<ProcSnapshot> {
        let mut all = Vec::new();
        let mut parent = self.parent;
        while let Some(pid) = parent.filter(|_| all.len() < MOST_ANCESTORS) {
            let seen = ProcSnapshot::look(pid);
            parent = seen.parent;
            all.push(seen);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_seen() {
        let own = ProcSnapshot::look(std::process::id());
        assert!(
            own.maps.is_some() && own.environ.is_some() && own.program.is_some_and(|program| program.is_ok())
        );
        assert!(own.parent.is_some() && own.uid.is_some() && own.age_s.is_some_and(|age| age < 3_600));
    }
}
