//! Memory control groups: number of killed processes, and memory limits.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Maximum number of control groups read for a process: its own and the groups above it.
const DEPTH: usize = 16;
/// A limit from this value on means no limit, for which version 1 writes a huge number.
const UNLIMITED: u64 = 1 << 60;

#[derive(Debug)]
pub(crate) struct Groups {
    /// Directory of the control groups, for example /sys/fs/cgroup.
    root: PathBuf,
    /// /proc, except in tests.
    proc: PathBuf,
}

/// A memory control group, and the number of its processes killed for lack of memory when it was read.
#[derive(Debug)]
pub(crate) struct GroupKills {
    /// Path of the group as the kernel writes it.
    path: String,
    directory: PathBuf,
    kills: u64,
}

impl Groups {
    pub(crate) fn new(root: &Path, proc: &Path) -> Self {
        Groups { root: root.to_owned(), proc: proc.to_owned() }
    }

    /// Reads the numbers of kills in a process's control group and in the groups above it, innermost first. `None` if there are
    /// none.
    pub(crate) fn count(&self, pid: u32) -> Option<Vec<GroupKills>> {
        let (root, path) = self.of_process(&read(&self.proc.join(pid.to_string()).join("cgroup"))?)?;
        let mut groups = Vec::new();
        let mut path = path.trim_end_matches('/');
        while !path.is_empty() && groups.len() < DEPTH {
            let directory = root.join(path.trim_start_matches('/'));
            if let Some(kills) = kills(&directory) {
                groups.push(GroupKills { path: path.to_owned(), directory, kills });
            }
            path = path.rsplit_once('/').map_or("", |(above, _)| above);
        }
        (!groups.is_empty()).then_some(groups)
    }

    /// Returns the memory limit of the group with this path, if it has one.
    pub(crate) fn limit(&self, path: &str) -> Option<u64> {
        let inner = path.trim_start_matches('/');
        // A path from the log must not lead out of the directory of control groups.
        if inner.split('/').any(|part| part == "..") {
            return None;
        }
        [self.root.join("memory"), self.root.clone(), self.root.join("unified")]
            .iter()
            .find_map(|root| limit(&root.join(inner)))
    }

    /// Returns the hierarchy's directory and the path of the group that counts the process's memory. That is in version 1 if it
    /// has the memory controller, else in version 2.
    fn of_process(&self, text: &str) -> Option<(PathBuf, String)> {
        let lines = || text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let old = lines().find(|(controllers, _)| controllers.split(',').any(|name| name == "memory"));
        if let Some((_, path)) = old {
            return Some((self.root.join("memory"), path.to_owned()));
        }
        let (_, path) = lines().find(|(controllers, _)| controllers.is_empty())?;
        // For a process in another cgroup namespace the kernel writes paths with `..`, which have no meaning here.
        let is_inside = !path.split('/').any(|part| part == "..");
        is_inside.then(|| (self.root.clone(), path.to_owned()))
    }
}

/// Compares the kills of the innermost group that still exists with those in `before`. If they have increased, returns the path
/// and the limit of the nearest group with a limit, or else the path of the group itself.
pub(crate) fn killed_group(before: &[GroupKills]) -> Option<(&str, Option<u64>)> {
    let (at, now) = before.iter().enumerate().find_map(|(at, group)| Some((at, kills(&group.directory)?)))?;
    let group = before.get(at).filter(|group| now > group.kills)?;
    let limited =
        before.iter().skip(at).find_map(|group| Some((&*group.path, Some(limit(&group.directory)?))));
    Some(limited.unwrap_or((&group.path, None)))
}

/// Reads the number of kills from a group's directory, for either cgroup version.
fn kills(directory: &Path) -> Option<u64> {
    let text =
        read(&directory.join("memory.events")).or_else(|| read(&directory.join("memory.oom_control")))?;
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "))?;
    line.trim().parse().ok()
}

fn limit(directory: &Path) -> Option<u64> {
    let text =
        read(&directory.join("memory.max")).or_else(|| read(&directory.join("memory.limit_in_bytes")))?;
    text.trim().parse().ok().filter(|limit| *limit < UNLIMITED)
}

fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(16 * 1024).read_to_string(&mut text).ok()?;
    Some(text)
}
