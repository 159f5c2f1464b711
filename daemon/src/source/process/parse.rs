//! Parses the text of files in /proc. Names that processes choose for themselves cannot confuse these functions.

/// Fields of /proc/PID/stat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stat {
    /// Name of the program as the kernel keeps it: up to 15 bytes of any value.
    pub comm: Vec<u8>,
    /// State of the first thread; `Z` if that thread has ended.
    pub state: u8,
    /// Field 4: pid of the parent.
    pub parent_pid: u32,
    /// Field 20: number of threads, including a first thread that has ended.
    pub threads: u64,
    /// Field 22: start time in ticks since boot.
    pub start_ticks: u64,
    /// Field 52: exit status as waitpid encodes it, after the end; 0 for readers without permission.
    pub status: Option<u64>,
}

/// Parses /proc/PID/stat. Field 3 follows the last `)`, because the name in parentheses may be anything, even `) Z 1`.
pub(crate) fn stat(text: &[u8]) -> Option<Stat> {
    let open = text.iter().position(|&byte| byte == b'(')?;
    let close = text.iter().rposition(|&byte| byte == b')')?;
    let comm = text.get(open + 1..close)?.to_vec();
    let mut fields = text.get(close + 1..)?.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
    let state = *fields.next()?.first()?;
    let parent_pid = number(fields.next()?)?.try_into().ok()?;
    let threads = number(fields.nth(15)?)?;
    let start_ticks = number(fields.nth(1)?)?;
    let status = fields.nth(29).and_then(number);
    Some(Stat { comm, state, parent_pid, threads, start_ticks, status })
}

impl Stat {
    /// Returns whether the process has ended and its parent has not waited for it. If `main` left with `pthread_exit`, the first
    /// thread has ended but other threads keep the process alive.
    pub(crate) fn has_ended(&self) -> bool {
        self.state == b'Z' && self.threads <= 1
    }
}

/// Fields of /proc/PID/status that are not in /proc/PID/stat.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// Real user id.
    pub uid: Option<u64>,
    /// Effective user id.
    pub effective_uid: Option<u64>,
    /// Pid in the process's innermost PID namespace, if different.
    pub inner_pid: Option<u32>,
}

/// Parses /proc/PID/status. A name cannot fake a line: `Name:` comes first, and the kernel escapes newlines in it.
pub(crate) fn status(text: &[u8]) -> Status {
    let mut status = Status::default();
    for line in text.split(|&byte| byte == b'\n') {
        let numbers = |name| {
            let fields = line.strip_prefix(name)?.split(|&byte| byte == b'\t');
            Some(fields.filter(|field| !field.is_empty()).map_while(number).collect::<Vec<u64>>())
        };
        if let Some(uids) = numbers(b"Uid:".as_slice()) {
            (status.uid, status.effective_uid) = (uids.first().copied(), uids.get(1).copied());
        } else if let Some([_, .., inner]) = numbers(b"NSpid:").as_deref() {
            status.inner_pid = (*inner).try_into().ok();
        }
    }
    status
}

/// Returns the control group's path in the unified hierarchy (version 2), or else the longest path in the other hierarchies.
pub(crate) fn cgroup(text: &[u8]) -> Option<&[u8]> {
    let mut longest: Option<&[u8]> = None;
    for line in text.split(|&byte| byte == b'\n') {
        let parts: Vec<&[u8]> = line.splitn(3, |&byte| byte == b':').collect();
        let [number, _controllers, path] = parts[..] else { continue };
        if number == b"0" && path.len() > 1 {
            return Some(path);
        }
        if longest.is_none_or(|longest| path.len() > longest.len()) {
            longest = Some(path);
        }
    }
    longest.filter(|path| !path.is_empty())
}

/// Joins NUL-separated arguments into one line. Quotes arguments with spaces like a shell, except a title that the process has
/// set itself (one argument that is not a path).
pub(crate) fn command(text: &[u8]) -> Option<String> {
    let end = text.iter().rposition(|&byte| byte != 0)? + 1;
    let arguments: Vec<&[u8]> = text[..end].split(|&byte| byte == 0).collect();
    let is_title = arguments.len() == 1 && !arguments[0].starts_with(b"/");
    let quoted = |argument: &&[u8]| match line(argument) {
        argument if !is_title && argument.contains(' ') => format!("'{}'", argument.replace('\'', "'\\''")),
        argument => argument,
    };
    Some(arguments.iter().map(quoted).collect::<Vec<_>>().join(" "))
}

/// Converts bytes to text for one `key=value` line. Replaces invalid UTF-8 and control characters: a newline would begin another
/// line, and an escape sequence would reach a terminal.
pub(crate) fn line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|character| if is_harmless(character) { character } else { '\u{fffd}' }).collect()
}

fn is_harmless(character: char) -> bool {
    // Also replace line and paragraph separators and text direction marks: they are unsafe, but not control characters.
    !character.is_control() && !matches!(character, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns the name of the user with this uid in the text of /etc/passwd.
pub(crate) fn user_name(passwd: &str, uid: u64) -> Option<&str> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, _, id) = (fields.next()?, fields.next()?, fields.next()?);
        (id.parse() == Ok(uid) && !name.is_empty()).then_some(name)
    })
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat_of(comm: &[u8]) -> Vec<u8> {
        let mut text = b"4711 (".to_vec();
        text.extend_from_slice(comm);
        text.extend_from_slice(
            b") S 17 4711 4711 34816 4711 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 10 11 12\n",
        );
        text
    }

    #[test]
    fn names_cannot_forge_fields() {
        for comm in [&b"python"[..], b"a b", b") Z 1 (", b"))))", b"", b"\xff\x00\n", b"x) R 1 1 1"] {
            let stat = stat(&stat_of(comm)).expect("a line");
            assert_eq!((stat.comm.as_slice(), stat.state), (comm, b'S'));
            assert_eq!((stat.parent_pid, stat.start_ticks), (17, 987_654));
        }
    }

    #[test]
    fn a_process_outlives_its_first_thread() {
        let zombie = |threads: &str| {
            let text = format!("1 (a) Z 1 1 1 0 -1 4 0 0 0 0 0 0 0 0 20 0 {threads} 0 77 0");
            stat(text.as_bytes()).expect("a line").has_ended()
        };
        assert!(zombie("1"));
        assert!(!zombie("2"));
    }

    #[test]
    fn cut_or_foreign_text_is_nothing() {
        let whole = stat_of(b"python");
        for end in 0..whole.len() - 10 {
            assert!(stat(&whole[..end]).is_none_or(|stat| stat.start_ticks <= 987_654), "{end}");
        }
        assert_eq!(stat(b")("), None);
        assert_eq!(stat(b"1 (a) S -1 0"), None);
        assert_eq!(status(b"\xff\xfe:\nUid:\nNSpid:\t"), Status::default());
        assert_eq!(cgroup(b"nothing here"), None);
        assert_eq!(cgroup(b""), None);
    }

    #[test]
    fn status_tells_user_and_inner_pid() {
        let text = b"Name:\tUid:\\n\nUid:\t1500\t1501\t0\t0\nNSpid:\t4711\t12\t1\n";
        assert_eq!(status(text), Status { uid: Some(1500), effective_uid: Some(1501), inner_pid: Some(1) });
        assert_eq!(status(b"Uid:\t0\t0\nNSpid:\t4711\n").inner_pid, None);
    }

    #[test]
    fn the_unified_cgroup_is_preferred() {
        assert_eq!(cgroup(b"12:memory:/a/b:c\n0::/unified:x\n"), Some(&b"/unified:x"[..]));
        assert_eq!(cgroup(b"12:memory:/job/uid\n3:cpu:/job\n0::/\n"), Some(&b"/job/uid"[..]));
        assert_eq!(cgroup(b"0::/\n"), Some(&b"/"[..]));
    }

    #[test]
    fn commands_are_one_harmless_line() {
        assert_eq!(command(b"python\0train.py\0--x\0\0").as_deref(), Some("python train.py --x"));
        assert_eq!(command(b"a\nuid=0\x1b[2J\0").as_deref(), Some("a\u{fffd}uid=0\u{fffd}[2J"));
        assert_eq!(command(b"\xff\xe2\x80\xae"), Some("\u{fffd}\u{fffd}".to_owned()));
        assert_eq!(command(b"\0\0"), None);
        assert_eq!(
            command(b"/a b/python\0-c\0it's 1\0x\0").as_deref(),
            Some("'/a b/python' -c 'it'\\''s 1' x")
        );
        assert_eq!(command(b"/a b/mixer\0").as_deref(), Some("'/a b/mixer'"));
        assert_eq!(command(b"postgres: ana idle\0").as_deref(), Some("postgres: ana idle"), "a title");
    }

    #[test]
    fn users_are_found_by_number() {
        let passwd = "root:x:0:0::/root:/bin/sh\n:x:7:\nbroken\nana:x:1500:1500::/:/bin/sh\n";
        assert_eq!(user_name(passwd, 1500), Some("ana"));
        assert_eq!((user_name(passwd, 7), user_name(passwd, 15)), (None, None));
    }
}
