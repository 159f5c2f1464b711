//! A run: the life of one process on its GPUs, as it is stored and reported.

pub use crate::cell::{Amounts, Cell, Class};
pub use crate::coverage::{BlindWindow, Coverage, Mark, Part, Program, SUBSCRIPTION_HELD};
pub use crate::device::{Accounting, Details, Device, DeviceReading, MAX_TENANTS, Pool, SideMemory};
pub use crate::gap::{UntrackableChange, UntrackableParts};
pub use crate::iterations::{Iteration, Iterations, Level};
pub use crate::layers::LayerReport;
pub use crate::moment::Moment;
pub use crate::names::{Named, absence_name};
pub use crate::oom::{Fate, Holder, OPEN_FATE_NS, Oom, OomDevice, OomKind};
pub use crate::parameters::Parameters;
pub use crate::program_data::ProgramData;

use crate::fields::{Field, fields, merge, plain};
use crate::owner;
pub use crate::owner::is_job;
pub use crate::timeline::Timeline;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

fields! {
    /// The life of one process.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    pub struct Run {
        source: Source       => redact keep;
        clock: Clock         => redact keep;
        process: Process     => redact Process::redact;
        state: State         => redact keep;
        coverage: Coverage   => redact hide_coverage;
        /// Notes that a reader needs in addition to the numbers, most important first.
        caveats: Vec<Caveat> => redact hide_caveats;
        /// Cells of the run (properties by which bytes are summed); amounts refer to them by index.
        cells: Vec<Cell>     => redact each(Cell::redact);
        /// One device for each GPU or MIG instance.
        devices: Vec<Device> => redact each(Device::redact);
        /// Counters and ranges of the program.
        #[serde(default, skip_serializing_if = "ProgramData::is_empty")]
        own: ProgramData             => redact clear;
    }
}

/// Redacts the coverage. The reason why CUPTI refused the agent may name another client, so a hint replaces it.
fn hide_coverage(coverage: &mut Coverage) {
    let code = coverage.blocked_code;
    coverage.redact();
    if let (Some(by), Some(code)) = (&mut coverage.blocked_by, code)
        && code != SUBSCRIPTION_HELD
    {
        "gpumemctl doctor says why".clone_into(by);
    }
}

/// Keeps only caveats whose text the daemon builds itself, from numbers.
fn hide_caveats(caveats: &mut Vec<Caveat>) {
    let codes = ["part", "unnamed_device", "devices_beyond", "accounting_disagrees"];
    caveats.retain(|caveat| codes.contains(&caveat.code.as_str()));
}

/// Keeps only names that metric labels show, and the keys from which they are derived. Removes the command line and directories.
fn hide_identity(facts: &mut BTreeMap<String, String>) {
    let sources = [owner::MAPPED_JOB, "slurm_job_id", "slurm_step_id"];
    facts.retain(|name, _| owner::NAMES.contains(&name.as_str()) || sources.contains(&name.as_str()));
}

impl Run {
    /// Returns the approximate bytes of the run in memory. Stored runs are smaller, all by a similar factor.
    pub fn weight(&self) -> usize {
        size_of::<Run>() + self.heap_bytes()
    }

    /// Whether the run has OOM records if memory ran out; files of other tools may lack them.
    pub fn records_ooms(&self) -> bool {
        self.coverage.covered && self.source.is_own()
    }

    /// Adds the cells that the run lacks; returns the run's index of each given cell.
    pub fn merge_cells(&mut self, cells: &[Cell]) -> Vec<u32> {
        merge(&mut self.cells, cells.iter().cloned())
    }
}

plain!(Clock, State);

/// [`Source::kind`] of a run exported on another machine.
pub const EXPORT_FORMAT: &str = "gpumem-run";

fields! {
    /// Where a run came from.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Source {
        /// `daemon`, `recording`, [`EXPORT_FORMAT`], or an import format such as `tbd-log`.
        kind: String;
        /// File name of a recording or import; for a daemon, its host name.
        origin: String;
        /// Preset of category rules for the format, if any.
        preset: Option<String>;
    }
}

impl Source {
    /// Whether a daemon recorded the process, here or on the machine `origin`.
    pub fn is_watched(&self) -> bool {
        self.kind == "daemon" || self.kind == EXPORT_FORMAT
    }

    /// Whether gpumemd's own agents and daemons reported the run, as opposed to a file of another tool.
    pub fn is_own(&self) -> bool {
        self.is_watched() || self.kind == "recording"
    }
}

/// Meaning of record times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Clock {
    /// Nanoseconds of the host's monotonic clock.
    Monotonic {
        /// Wall-clock time of the clock's zero, in ns since 1970; absent if no anchor was recorded.
        wall_offset_ns: Option<i64>,
    },
    /// Line numbers of a log: only their order has a meaning.
    Lines,
}

fields! {
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Process {
        /// Pid in the daemon's namespace; 0 if unknown.
        pid: u32                          => redact keep;
        /// Start time from /proc, in clock ticks since boot; 0 if unknown.
        start_ticks: u64                  => redact keep;
        uid: Option<u64>                  => redact keep;
        /// Values from the kernel and from files of the machine: command, comm, user, cgroup, ...
        facts: BTreeMap<String, String>   => redact hide_identity;
        /// Values from the process's environment, as its agent reports them: rank, job, ...
        claims: BTreeMap<String, String>  => redact hide_identity;
    }
}

/// Whether and how a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum State {
    /// The process runs: the numbers are those so far.
    Open,
    Closed {
        /// Time of the process's end (ns).
        time_ns: u64,
        /// Exit status as waitpid returns it; absent if unknown.
        status: Option<u64>,
    },
    /// Observation stopped because the daemon died or the recording ends. The numbers are those of the last checkpoint or record.
    Interrupted,
    /// The process continues in the next part: a run of several days is stored in parts.
    Rolled {
        /// End of this part and start of the next (ns).
        time_ns: u64,
    },
}

fields! {
    /// A note that a reader needs in addition to the numbers.
    #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
    pub struct Caveat {
        /// Stable identifier for programs: `no_frees`, `rejected_lines`, ...
        code: String;
        /// One sentence.
        text: String;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_lists_weigh() {
        let mut run = Run {
            source: Source { kind: "daemon".into(), origin: "host".into(), preset: None },
            clock: Clock::Lines,
            process: Process::default(),
            state: State::Open,
            coverage: Coverage::default(),
            caveats: Vec::new(),
            cells: Vec::new(),
            devices: Vec::new(),
            own: ProgramData::default(),
        };
        let empty = run.weight();
        assert!(empty < 2000, "{empty}");
        run.cells = vec![Cell { tag: Some("x".repeat(1000)), ..Cell::default() }; 100];
        let cells = run.weight() - empty;
        assert!((100_000..130_000).contains(&cells), "{cells}");
        run.process.facts.insert("command".into(), "y".repeat(5000));
        assert!(run.weight() - empty - cells >= 5000);
    }
}
