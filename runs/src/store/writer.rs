//! Who writes a run, so that a reader can tell a run that goes on from one whose watcher died.

use super::columns::{bits, execute, unsigned};
use gpumem_model::run::State;
use rusqlite::{Connection, Row, params};
use std::io;
use std::sync::OnceLock;

/// One process of one boot. A pid alone is reused; with its start time it is not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Writer {
    pub(super) pid: u32,
    /// Field 22 of /proc/pid/stat.
    pub(super) start_ticks: u64,
    pub(super) boot_id: String,
}

const SELF_STAT: &str = "/proc/self/stat";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

impl Writer {
    /// This process.
    pub(super) fn this() -> io::Result<Self> {
        let Some((_, start_ticks)) = parse_stat(&std::fs::read(SELF_STAT)?) else {
            let what = format!("{SELF_STAT}: no start time in it");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        };
        Ok(Writer { pid: std::process::id(), start_ticks, boot_id: boot_id()? })
    }

    /// Whether it still runs. What cannot be read counts as dead: a run that is called interrupted is
    /// corrected by the next look, one that is called open misleads for ever.
    pub(super) fn lives(&self) -> bool {
        let stat = || std::fs::read(format!("/proc/{}/stat", self.pid)).ok();
        boot_id().is_ok_and(|boot| boot == self.boot_id)
            && stat().and_then(|stat| parse_stat(&stat)).is_some_and(|(state, start_ticks)| {
                // A zombie has ended; only its parent has not asked.
                !matches!(state, b'Z' | b'X' | b'x') && start_ticks == self.start_ticks
            })
    }
}

/// Read once: asked for each run of a store, and the same for as long as we live.
fn boot_id() -> io::Result<String> {
    static KNOWN: OnceLock<String> = OnceLock::new();
    if let Some(known) = KNOWN.get() {
        return Ok(known.clone());
    }
    let read = std::fs::read_to_string(BOOT_ID)?.trim_end().to_owned();
    Ok(KNOWN.get_or_init(|| read).clone())
}

/// State and start time. The name, field 2, is in parentheses and may itself hold any byte, spaces and
/// parentheses too: fields are counted from the last `)`.
fn parse_stat(stat: &[u8]) -> Option<(u8, u64)> {
    let name_end = stat.iter().rposition(|&byte| byte == b')')?;
    let mut fields = std::str::from_utf8(&stat[name_end + 1..]).ok()?.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// Writer from the columns writer_pid, writer_start, writer_boot.
pub(super) fn writer(row: &Row<'_>, at: usize) -> rusqlite::Result<Option<Writer>> {
    let Some(pid) = row.get(at)? else { return Ok(None) };
    Ok(Some(Writer { pid, start_ticks: unsigned(row, at + 1)?, boot_id: row.get(at + 2)? }))
}

pub(super) fn set_writer(db: &Connection, id: i64, writer: Option<&Writer>) -> rusqlite::Result<()> {
    let sql = "UPDATE run SET writer_pid = ?, writer_start = ?, writer_boot = ? WHERE id = ?";
    let pid = writer.map(|writer| writer.pid);
    let start = writer.map(|writer| bits(writer.start_ticks));
    execute(db, sql, params![pid, start, writer.map(|writer| &writer.boot_id), id])?;
    Ok(())
}

pub(super) fn state_now(state: State, writer: Option<&Writer>) -> State {
    match state {
        State::Open if !writer.is_some_and(Writer::lives) => State::Interrupted,
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
            // Of a cut line nothing is required, but that it is survived.
            let _ = parse_stat(&stat[..cut]);
        }
    }

    #[test]
    fn this_process_lives_and_another_start_or_boot_does_not() {
        let this = Writer::this().unwrap();
        assert!(this.lives());
        assert!(!Writer { start_ticks: this.start_ticks + 1, ..this.clone() }.lives());
        assert!(!Writer { boot_id: "another".into(), ..this }.lives());
        assert!(!Writer { pid: u32::MAX, ..this }.lives());
    }
}
