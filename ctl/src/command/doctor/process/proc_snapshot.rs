//! Data of a process in /proc.

use crate::command::doctor::elf::Elf;
use std::io;
use std::path::{Path, PathBuf};

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
            // If the link cannot be followed, nothing is known about the program.
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

/// Returns a non-empty environment variable; the first entry counts.
pub(crate) fn variable(environ: &[u8], name: &str) -> Option<String> {
    let mut entries = environ.split(|byte| *byte == 0);
    let value = entries.find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    Some(String::from_utf8_lossy(value).into_owned()).filter(|value| !value.is_empty())
}

/// Returns the paths of mapped files; those of removed files end in ` (deleted)`.
pub(crate) fn files(maps: &str) -> impl Iterator<Item = &str> {
    maps.lines().filter_map(|line| {
        // A line has five fields, then blanks and a path that may contain blanks. Mappings without a file have names in brackets.
        let path = (0..5).try_fold(line, |rest, _| Some(rest.trim_start().split_once(' ')?.1))?.trim_start();
        path.starts_with('/').then_some(path)
    })
}

/// Returns the first mapped file whose name begins with `name`.
pub(crate) fn mapped(maps: &str, name: &str) -> Option<String> {
    let is_it = |file: &&str| {
        Path::new(file).file_name().is_some_and(|file| file.to_string_lossy().starts_with(name))
    };
    files(maps).find(is_it).map(str::to_owned)
}

/// Returns the age in seconds; clock ticks are hundredths of a second.
pub(crate) fn age(stat: &str, uptime: &str) -> Option<u64> {
    // The name in parentheses may contain any character.
    let started = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse::<u64>().ok()?;
    let up = uptime.split('.').next()?.parse::<u64>().ok()?;
    Some(up.saturating_sub(started / 100))
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

    #[test]
    fn odd_lines_are_read() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 42   /opt/my tools/libgpumem.so (deleted)\n7f02-7f03 rw-p 0 00:00 0 \n\
                    7f04-7f05 rw-p 0 00:00 0   [heap]\n7f06-7f07 rw-s 0 00:01 9   /memfd:gpumem-agent.7.ff (deleted)\n";
        assert_eq!(mapped(maps, "libgpumem").as_deref(), Some("/opt/my tools/libgpumem.so (deleted)"));
        assert_eq!(
            mapped(maps, "memfd:gpumem-agent.").as_deref(),
            Some("/memfd:gpumem-agent.7.ff (deleted)")
        );
        assert_eq!((files(maps).count(), mapped(maps, "libcuda.so")), (2, None));
        let named = "7f04-7f05 rw-p 0 00:00 0   [anon:/opt/libcuda.so.1]\n7f04-7f05 rw-p 0/1 00:00 0 /\n";
        assert_eq!(mapped(named, "libcuda.so"), None, "the program gave this name itself");
        assert_eq!(variable(b"A=b\0XCUDA=1\0CUDA=2\0E=\0", "CUDA").as_deref(), Some("2"));
        assert_eq!(variable(b"A=b\0E=\0", "E"), None);
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 5000 0 0";
        assert_eq!(age(stat, "62.31 100.2"), Some(12));
        assert_eq!(age("", ""), None);
    }
}
