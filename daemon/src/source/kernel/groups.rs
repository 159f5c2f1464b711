//! Control groups of memory: how many of their processes were killed, and how much they may have.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Groups above a process that are looked at.
const DEPTH: usize = 16;
/// A limit that is none: version 1 says so by a huge number.
const UNLIMITED: u64 = 1 << 60;

/// The mounted hierarchies.
#[derive(Debug)]
pub(crate) struct Groups {
    root: PathBuf,
    proc: PathBuf,
}

/// A group and those above it, innermost first, with what they had counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Counted(Vec<Group>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    /// As the kernel writes it.
    path: String,
    directory: PathBuf,
    kills: u64,
}

/// A group in which somebody was killed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Risen {
    /// The one whose limit is nearest, or itself.
    pub group: String,
    /// That limit.
    pub limit_bytes: Option<u64>,
}

impl Groups {
    /// Those below `root`, of processes that `proc` knows.
    pub(crate) fn new(root: &Path, proc: &Path) -> Self {
        Groups { root: root.to_owned(), proc: proc.to_owned() }
    }

    /// What the groups of a process have counted so far.
    pub(crate) fn count(&self, pid: u32) -> Option<Counted> {
        let (root, path) = self.of_process(&read(&self.proc.join(pid.to_string()).join("cgroup"))?)?;
        let mut groups = Vec::new();
        let mut path = path.trim_end_matches('/');
        while !path.is_empty() && groups.len() < DEPTH {
            let directory = root.join(path.trim_start_matches('/'));
            if let Some(kills) = kills(&directory) {
                groups.push(Group { path: path.to_owned(), directory, kills });
            }
            path = path.rsplit_once('/').map_or("", |(above, _)| above);
        }
        (!groups.is_empty()).then_some(Counted(groups))
    }

    /// Whether the innermost group that is still there has counted more since.
    pub(crate) fn risen(&self, before: &Counted) -> Option<Risen> {
        let there = before.0.iter().enumerate().find_map(|(at, group)| Some((at, kills(&group.directory)?)));
        let (at, now) = there?;
        let group = before.0.get(at).filter(|group| now > group.kills)?;
        let limited = before.0.iter().skip(at).find_map(|group| Some((group, limit(&group.directory)?)));
        Some(match limited {
            Some((group, limit_bytes)) => Risen { group: group.path.clone(), limit_bytes: Some(limit_bytes) },
            None => Risen { group: group.path.clone(), limit_bytes: None },
        })
    }

    /// The limit of a group that the log names.
    pub(crate) fn limit(&self, path: &str) -> Option<u64> {
        let inner = path.trim_start_matches('/');
        // A name from a log leads nowhere else.
        if inner.split('/').any(|part| part == "..") {
            return None;
        }
        [self.root.join("memory"), self.root.clone(), self.root.join("unified")]
            .iter()
            .find_map(|root| limit(&root.join(inner)))
    }

    /// Where its memory is counted: by version 1 if that has the controller, else by version 2.
    fn of_process(&self, text: &str) -> Option<(PathBuf, String)> {
        let lines = || text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let old = lines().find(|(controllers, _)| controllers.split(',').any(|name| name == "memory"));
        if let Some((_, path)) = old {
            return Some((self.root.join("memory"), path.to_owned()));
        }
        let (_, path) = lines().find(|(controllers, _)| controllers.is_empty())?;
        // From a namespace of its own the kernel writes ways out of it, which lead nowhere here.
        let is_inside = !path.split('/').any(|part| part == "..");
        is_inside.then(|| (self.root.clone(), path.to_owned()))
    }
}

/// Of both versions.
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
