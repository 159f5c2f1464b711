//! Until the table of processes is there: what this source asks /proc.

use gpumem_ledger::ProcessKey;
use gpumem_wire::{Body, Reading, Record, Stamp};

/// Field 22 of /proc/PID/stat.
pub fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let end = stat.iter().rposition(|&byte| byte == b')')?;
    std::str::from_utf8(&stat[end + 1..]).ok()?.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// `ProcessFacts` as a frame.
pub fn facts(key: ProcessKey, uid: u32, now_ns: u64) -> Vec<u8> {
    let command = std::fs::read(format!("/proc/{}/cmdline", key.pid)).unwrap_or_default();
    let command = String::from_utf8_lossy(&command).replace(|c: char| c.is_control(), " ");
    let facts = format!("command={}", command.trim_end());
    let stamp = Stamp { thread: key.pid, time_ns: now_ns, ..Stamp::default() };
    let start_ticks = key.start_ticks;
    let body =
        Body::ProcessFacts { start_ticks, uid: Reading::of(uid.into()), parent_pid: 0, facts: &facts };
    let mut frames = Vec::new();
    Record { stamp, body }.append_frame(&mut frames);
    frames
}
