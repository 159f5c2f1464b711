//! Parses lines of the kernel's log. Program names in them may be any 15 bytes, so pids are read at positions that a name cannot
//! reach.

/// Maximum number of characters kept of a line.
const KEPT: usize = 300;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LogEvent {
    /// A process was killed for lack of host memory. `in_group`: whether a group's limit was the cause, if known.
    Killed { pid: u32, in_group: Option<bool> },
    /// A process is about to be killed. `group`: the control group at its limit; `None`: the machine's memory is full.
    Constraint { pid: u32, group: Option<String> },
    /// Control group of the kill in the next line; older kernels write it on a line of its own.
    Limit { group: String },
    /// A fault of the GPU driver, with the pid of the process if the line has one.
    Xid { pid: Option<u32>, xid: u64 },
}

/// Returns the message in a record of /dev/kmsg (`priority,number,time,flags;text`) or in a line of a file. Returns `None` for a
/// record of /dev/kmsg that the kernel did not write, because privileged programs may write there too.
pub(crate) fn message(record: &str) -> Option<&str> {
    let line = record.lines().next().unwrap_or_default();
    let Some((head, text)) = line.split_once(';') else { return Some(line) };
    let fields: Vec<&str> = head.split(',').collect();
    let is_head = fields.len() >= 4
        && fields.iter().take(3).all(|field| field.bytes().all(|byte| byte.is_ascii_digit()));
    if !is_head {
        return Some(line);
    }
    let priority: u32 = fields.first()?.parse().ok()?;
    (priority >> 3 == 0).then_some(text)
}

/// Texts with which relevant lines begin, after the log's own prefix.
const BEGIN: [&str; 4] = ["oom-kill:constraint=", "Task in ", "Killed process ", "NVRM: Xid ("];

/// Parses a line of the kernel's log. Names of programs and groups may contain one of the texts of `BEGIN`, so the first one
/// counts.
pub(crate) fn parse(line: &str) -> Option<LogEvent> {
    let found = BEGIN.into_iter().filter_map(|begin| Some((line.find(begin)?, begin)));
    let (at, begin) = found.min()?;
    let (before, rest) = (line.get(..at)?, line.get(at + begin.len()..)?);
    match begin {
        "oom-kill:constraint=" => {
            // Search from the end: the group's name comes before the pid and may contain commas.
            let pid = number(rest.get(rest.rfind(",pid=")? + ",pid=".len()..)?)?;
            let group = rest.strip_prefix("CONSTRAINT_MEMCG,").and_then(|rest| rest.split_once("oom_memcg="));
            let group =
                group.map(|(_, group)| group.split_once(",task_memcg=").map_or(group, |(group, _)| group));
            Some(LogEvent::Constraint { pid, group: group.map(str::to_owned) })
        }
        "Task in " => {
            let (_, group) = rest.split_once(" killed as a result of limit of ")?;
            Some(LogEvent::Limit { group: group.trim().to_owned() })
        }
        "Killed process " => {
            let in_group = match before {
                _ if before.contains("Memory cgroup out of memory") => Some(true),
                _ if before.contains("Out of memory") => Some(false),
                _ => None,
            };
            Some(LogEvent::Killed { pid: number(rest)?, in_group })
        }
        _ => {
            let (_, rest) = rest.split_once("): ")?;
            let xid = number::<u64>(rest)?;
            let pid = rest.split_once("pid=").and_then(|(_, rest)| number(rest.trim_start_matches('\'')));
            Some(LogEvent::Xid { pid: pid.filter(|pid| *pid != 0), xid })
        }
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Option<T> {
    let end = text.bytes().take_while(u8::is_ascii_digit).count();
    text.get(..end)?.parse().ok()
}

/// Returns the line in a form that is safe in a `key=value` line and on a terminal.
pub(crate) fn harmless(line: &str) -> String {
    let kept = line.trim().chars().take(KEPT);
    kept.map(|character| if character.is_control() { '\u{fffd}' } else { character }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn killed(pid: u32, in_group: Option<bool>) -> Option<LogEvent> {
        Some(LogEvent::Killed { pid, in_group })
    }

    #[test]
    fn kills_of_old_and_new_kernels() {
        let new =
            "Out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:2kB, UID:0 pgtables:1kB";
        assert_eq!(parse(new), killed(4711, Some(false)));
        let group =
            "Memory cgroup out of memory: Killed process 978 (python3) total-vm:221368kB, anon-rss:40576kB";
        assert_eq!(parse(group), killed(978, Some(true)));
        let file = format!("Nov 21 18:00:00 node7 kernel: [ 34.5] {group}");
        assert_eq!(parse(&file), killed(978, Some(true)));
        assert_eq!(parse("Killed process 9 (a) total-vm:1kB"), killed(9, None));
        assert_eq!(parse("Out of memory: Kill process 9 (a) score 9 or sacrifice child"), None, "not yet");
        assert_eq!(parse("oom_reaper: reaped process 978 (python3), now anon-rss:0kB"), None);
        let limit = "Task in /slurm/uid_0/job_5/step_0 killed as a result of limit of /slurm/uid_0/job_5";
        assert_eq!(parse(limit), Some(LogEvent::Limit { group: "/slurm/uid_0/job_5".into() }));
    }

    #[test]
    fn whose_limit_it_was() {
        let line = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,\
                    oom_memcg=/slurm/job_5,task_memcg=/slurm/job_5/step_0,task=python3,pid=978,uid=0";
        assert_eq!(parse(line), Some(LogEvent::Constraint { pid: 978, group: Some("/slurm/job_5".into()) }));
        let all = "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,\
                   task_memcg=/a,task=x,pid=1,y,pid=77,uid=0";
        assert_eq!(parse(all), Some(LogEvent::Constraint { pid: 77, group: None }), "a name is not a pid");
    }

    #[test]
    fn faults_with_and_without_a_process() {
        let xid = |pid, xid| Some(LogEvent::Xid { pid, xid });
        let line =
            "NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python, Ch 00000008, intr 00000000. MMU Fault";
        assert_eq!(parse(line), xid(Some(1234), 31));
        assert_eq!(
            parse("NVRM: Xid (PCI:0000:01:00): 13, pid='<unknown>', name=<unknown>, x"),
            xid(None, 13)
        );
        assert_eq!(parse("NVRM: Xid (0000:05:00): 43, Ch 00000010, engmask 00000101"), xid(None, 43));
        assert_eq!(parse("NVRM: Xid (PCI:0000:3b:00): 94, pid='77', name=a, Contained"), xid(Some(77), 94));
        assert_eq!(parse("NVRM: GPU at PCI:0000:3b:00: GPU-1"), None);
    }

    /// A program may have a name like the beginning of another line.
    #[test]
    fn names_are_no_lines() {
        for name in
            ["Killed process ", "NVRM: Xid (a): ", "Task in ", "a,pid=1,", "a,oom_memcg=/ab", "x pid=9"]
        {
            let line = format!("NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name={name}, Ch 00000008");
            assert_eq!(parse(&line), Some(LogEvent::Xid { pid: Some(4711), xid: 31 }), "{line}");
            let line = format!("Out of memory: Killed process 4711 ({name}) total-vm:1kB");
            assert_eq!(parse(&line), killed(4711, Some(false)), "{line}");
            let line = format!(
                "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,\
                 task_memcg=/a,task={name},pid=4711,uid=0"
            );
            assert_eq!(parse(&line), Some(LogEvent::Constraint { pid: 4711, group: None }), "{line}");
        }
    }

    #[test]
    fn only_the_kernel_is_believed() {
        assert_eq!(
            message("3,434,34543236423,-;Killed process 1 (a)\n SUBSYSTEM=x"),
            Some("Killed process 1 (a)")
        );
        assert_eq!(message("12,434,34543236423,-;Killed process 1 (a)"), None, "a program wrote that");
        assert_eq!(message("plain; text"), Some("plain; text"));
        assert_eq!(message(""), Some(""));
    }

    #[test]
    fn whatever_stands_there_is_read_without_harm() {
        for line in [
            "Killed process ",
            "Killed process 99999999999999999999 (a)",
            "oom-kill:constraint=",
            "oom-kill:constraint=x,pid=",
            "NVRM: Xid (",
            "NVRM: Xid (a): ",
            "NVRM: Xid (a): x, pid=1",
            "\u{0}\u{1b}[2J\u{202e}",
        ] {
            assert_eq!(parse(line), None, "{line:?}");
        }
        assert_eq!(harmless("a\u{1b}[2Jb"), "a\u{fffd}[2Jb");
        assert_eq!(harmless(&"x".repeat(10_000)).len(), KEPT);
    }
}
