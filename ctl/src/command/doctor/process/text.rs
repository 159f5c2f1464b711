//! Parsers for /proc/PID/maps, environ and stat.

use std::path::Path;

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
