//! Who says a record.

/// A process for as long as it lives: pids are used again, a pid with its start time is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessKey {
    /// Pid in the daemon's namespace.
    pub pid: u32,
    /// Field 22 of /proc/PID/stat; 0 where it cannot be known (imports).
    pub start_ticks: u64,
}

/// Whose word a record is. Ids inside a record are local to its origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The daemon: NVML and /proc.
    Host,
    /// The agent in that process.
    Process(ProcessKey),
}
