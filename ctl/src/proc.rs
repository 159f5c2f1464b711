//! Parsers of /proc/PID/environ, maps, stat and status. Programs choose names in these files, with any characters.

use std::path::Path;

/// Fields of /proc/PID/stat.
pub(crate) struct Stat {
    /// State of the process: `T` and `t` are stopped, `Z` has ended but was not waited for.
    pub state: char,
    pub parent: u32,
    /// Session id; 0 if the session began outside this PID namespace.
    pub session: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
}

impl Stat {
    pub(crate) fn of_pid(pid: u32) -> Option<Stat> {
        Stat::parse(&String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/stat")).ok()?))
    }

    pub(crate) fn parse(stat: &str) -> Option<Stat> {
        // The name in parentheses may contain any character, including parentheses.
        let mut fields = stat.rsplit_once(") ")?.1.split_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let session = fields.nth(1)?.parse().ok()?;
        Some(Stat { state, parent, session, start_ticks: fields.nth(15)?.parse().ok()? })
    }
}

/// Returns the age of a process in seconds, from the texts of its stat and of /proc/uptime. A clock tick is 10 ms.
pub(crate) fn age(stat: &str, uptime: &str) -> Option<u64> {
    let up = uptime.split('.').next()?.parse::<u64>().ok()?;
    Some(up.saturating_sub(Stat::parse(stat)?.start_ticks / 100))
}

/// Returns the age in ns of a process that started `start_ticks` clock ticks after boot; `None` if /proc/uptime is unreadable.
pub(crate) fn age_ns(start_ticks: u64) -> Option<u64> {
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    let up_s: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    Some(((up_s * 1e9) as u64).saturating_sub(start_ticks.saturating_mul(10_000_000)))
}

/// Returns a field of /proc/PID/status; empty if the text does not contain it.
pub(crate) fn status_field<'t>(status: &'t str, name: &str) -> &'t str {
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.map(str::trim).unwrap_or_default()
}

/// Returns the pids in the folder `proc`.
pub(crate) fn pids(proc: &Path) -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir(proc).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
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
        // A line has five fields, then blanks and a path, which may contain blanks. Mappings without a file have bracketed names.
        let path = (0..5).try_fold(line, |rest, _| Some(rest.trim_start().split_once(' ')?.1))?.trim_start();
        path.starts_with('/').then_some(path)
    })
}

/// Returns the path of the first mapped file whose name begins with `name`.
pub(crate) fn mapped(maps: &str, name: &str) -> Option<String> {
    let matches = |file: &&str| {
        Path::new(file).file_name().is_some_and(|file| file.to_string_lossy().starts_with(name))
    };
    files(maps).find(matches).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let named = "7f04-7f05 rw-p 0 00:00 0   [anon:/opt/libcuda.so.1]\n7f04-7f05 rw-p 0/1 00:00 0 /\n";
        assert_eq!(mapped(named, "libcuda.so"), None, "the program gave this name itself");
        assert_eq!(variable(b"A=b\0E=\0", "E"), None);
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 5000 0 0";
        assert_eq!(age(stat, "62.31 100.2"), Some(12));
        assert_eq!(age("", ""), None);
    }
}
