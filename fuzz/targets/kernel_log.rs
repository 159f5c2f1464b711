//! Records of the kernel's log. A program's name has at most 15 arbitrary bytes, and must not be parsed as a pid.
#![no_main]
#![allow(dead_code)]

#[path = "../../daemon/src/source/kernel/parse.rs"]
mod parse;

use libfuzzer_sys::fuzz_target;
use parse::LogEvent;

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    if let Some(message) = parse::message(&text) {
        assert!(!message.contains('\n'));
        let _ = parse::parse(message);
    }
    let _ = parse::parse(&text);
    let told = parse::harmless(&text);
    assert!(!told.chars().any(char::is_control) && told.chars().count() <= 300);

    // A hostile name in each kind of line with a pid.
    let name: String = text.chars().filter(|one| *one != '\n' && *one != '\0').collect();
    let mut end = name.len().min(15);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let name = &name[..end];
    let killed = format!("Out of memory: Killed process 4711 ({name}) total-vm:1kB, anon-rss:2kB, UID:0");
    assert_eq!(
        parse::parse(&killed),
        Some(LogEvent::Killed { pid: 4711, in_group: Some(false) }),
        "{killed}"
    );
    let limit = format!(
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a,task_memcg=/a/b,task={name},pid=4711,uid=0"
    );
    assert_eq!(
        parse::parse(&limit),
        Some(LogEvent::Constraint { pid: 4711, group: Some("/a".into()) }),
        "{limit}"
    );
    let all = format!(
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/a,task={name},pid=4711,uid=0"
    );
    assert_eq!(parse::parse(&all), Some(LogEvent::Constraint { pid: 4711, group: None }), "{all}");
    let xid = format!("NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name={name}, Ch 00000008");
    assert_eq!(parse::parse(&xid), Some(LogEvent::Xid { pid: Some(4711), xid: 31 }), "{xid}");
});
