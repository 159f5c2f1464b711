//! The process that writes a run. By it, a reader distinguishes an open run from one whose writer has ended.

use super::tables::{bits, unsigned};
use gpumem_model::run::State;
use rusqlite::{Connection, OptionalExtension, Row, params};
use std::io;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// A process. A pid may be used again; boot, pid and start time together are unique.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Writer {
    pub(super) pid: u32,
    /// Start time of the process in clock ticks after boot, field 22 of /proc/PID/stat.
    pub(super) start_ticks: u64,
    pub(super) boot_id: String,
}

const SELF_STAT: &str = "/proc/self/stat";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

impl Writer {
    pub(super) fn this() -> io::Result<Self> {
        let Some((_, start_ticks)) = parse_stat(&std::fs::read(SELF_STAT)?) else {
            let what = format!("{SELF_STAT}: no start time in it");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        };
        Ok(Writer { pid: std::process::id(), start_ticks, boot_id: boot_id()? })
    }

    /// Returns whether the process still runs; false if that cannot be determined. A run that is wrongly shown as interrupted is
    /// corrected by the next check, but a run that is wrongly shown as open would stay so.
    pub(super) fn is_alive(&self) -> bool {
        let stat = || std::fs::read(format!("/proc/{}/stat", self.pid)).ok();
        boot_id().is_ok_and(|boot| boot == self.boot_id)
            && stat().and_then(|stat| parse_stat(&stat)).is_some_and(|(state, start_ticks)| {
                // A zombie (Z) or dead (X) process has ended, although its parent has not collected its status yet.
                !matches!(state, b'Z' | b'X' | b'x') && start_ticks == self.start_ticks
            })
    }
}

/// Returns the id of the system's boot. Reads it only once, because it does not change while this process runs.
fn boot_id() -> io::Result<String> {
    static KNOWN: OnceLock<String> = OnceLock::new();
    if let Some(known) = KNOWN.get() {
        return Ok(known.clone());
    }
    let read = std::fs::read_to_string(BOOT_ID)?.trim_end().to_owned();
    Ok(KNOWN.get_or_init(|| read).clone())
}

/// Parses state and start time in the text of /proc/PID/stat. Field 2, the name, is in parentheses and may contain any byte.
/// Therefore fields are counted from the last `)`.
fn parse_stat(stat: &[u8]) -> Option<(u8, u64)> {
    let name_end = stat.iter().rposition(|&byte| byte == b')')?;
    let mut fields = std::str::from_utf8(&stat[name_end + 1..]).ok()?.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// Reads the writer from the columns writer_pid, writer_start, writer_boot.
pub(super) fn writer(row: &Row<'_>, at: usize) -> rusqlite::Result<Option<Writer>> {
    let Some(pid) = row.get(at)? else { return Ok(None) };
    Ok(Some(Writer { pid, start_ticks: unsigned(row, at + 1)?, boot_id: row.get(at + 2)? }))
}

/// Sets the writer of a run that has just been written. Returns its new `written_ns`; `None` if there is no such run.
pub(super) fn set_writer(db: &Connection, id: i64, writer: Option<&Writer>) -> rusqlite::Result<Option<i64>> {
    let sql = "UPDATE run SET writer_pid = ?, writer_start = ?, writer_boot = ?, written_ns = max(written_ns + 1, ?)
        WHERE id = ? RETURNING written_ns";
    let now_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i64);
    let (pid, start) = (writer.map(|writer| writer.pid), writer.map(|writer| bits(writer.start_ticks)));
    let values = params![pid, start, writer.map(|writer| &writer.boot_id), now_ns, id];
    db.prepare_cached(sql)?.query_row(values, |row| row.get(0)).optional()
}

/// Returns the state of a run: an open run without a live writer is interrupted.
pub(super) fn state_now(state: State, writer: Option<&Writer>) -> State {
    match state {
        State::Open if !writer.is_some_and(Writer::is_alive) => State::Interrupted,
        state => state,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_with_a_hostile_name() {
        let stat = b"7 (a) S 1 (\xff) Z 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20\n";
        assert_eq!(parse_stat(stat), Some((b'Z', 4242)));
        for cut in 0..stat.len() {
            // A truncated line may give any result but must not panic.
            let _ = parse_stat(&stat[..cut]);
        }
    }

    #[test]
    fn this_process_lives_and_another_start_or_boot_does_not() {
        let this = Writer::this().unwrap();
        assert!(this.is_alive());
        assert!(!Writer { start_ticks: this.start_ticks + 1, ..this.clone() }.is_alive());
        assert!(!Writer { boot_id: "another".into(), ..this }.is_alive());
        assert!(!Writer { pid: u32::MAX, ..this }.is_alive());
    }
}
