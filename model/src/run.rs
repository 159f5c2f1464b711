//! A run: the life of one process on its GPUs, as it is stored and reported.
//!
//! All sums of a [`Moment`] are exact: `tracked` is the sum of its amounts, and `used` is
//! `predates + tracked + untrackable` wherever all of them are known.

pub use crate::cell::{Amounts, Cell, Class};
pub use crate::coverage::{BlindWindow, Coverage, Mark, Part, Program, SUBSCRIPTION_HELD};
pub use crate::device::{Accounting, Beside, Details, Device, DeviceReading, MAX_TENANTS, Pool};
pub use crate::gap::{Parts, Step};
pub use crate::iterations::{Iteration, Iterations, Level};
pub use crate::layers::LayerSaid;
pub use crate::moment::Moment;
pub use crate::names::{Named, absence_name};
pub use crate::oom::{Fate, Holder, OPEN_FATE_NS, Oom, OomDevice, OomKind};
pub use crate::parameters::Parameters;
pub use crate::program_data::ProgramData;

use crate::fields::{Field, fields, plain};
pub use crate::timeline::Timeline;
use crate::who;
pub use crate::who::is_job;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

fields! {
    /// The life of one process.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    pub struct Run {
        /// Where the run came from.
        source: Source       => redact keep;
        /// What its times mean.
        clock: Clock         => redact keep;
        /// The process.
        process: Process     => redact Process::redact;
        /// How it ended, or that it has not.
        state: State         => redact keep;
        /// How complete its numbers are.
        coverage: Coverage   => redact hide_coverage;
        /// What a reader must know beside the numbers, in words, most important first.
        caveats: Vec<Caveat> => redact hide_caveats;
        /// Names of cells; amounts are by index here.
        cells: Vec<Cell>     => redact each(Cell::redact);
        /// One per GPU or MIG instance.
        devices: Vec<Device> => redact each(Device::redact);
        /// Counters and ranges of the program.
        #[serde(default, skip_serializing_if = "ProgramData::is_empty")]
        own: ProgramData             => redact clear;
    }
}

/// A refusal has a reason that does not name another client.
fn hide_coverage(coverage: &mut Coverage) {
    let code = coverage.blocked_code;
    coverage.redact();
    if let (Some(by), Some(code)) = (&mut coverage.blocked_by, code)
        && code != SUBSCRIPTION_HELD
    {
        "gpumemctl doctor says why".clone_into(by);
    }
}

/// Leaves caveats that the daemon words itself, with numbers.
fn hide_caveats(caveats: &mut Vec<Caveat>) {
    let codes = ["part", "unnamed_device", "devices_beyond", "accounting_disagrees"];
    caveats.retain(|caveat| codes.contains(&caveat.code.as_str()));
}

/// Leaves what labels of the metrics show: no command line, no directory.
fn hide_identity(of: &mut BTreeMap<String, String>) {
    let sources = [who::MAPPED_JOB, "slurm_job_id", "slurm_step_id"];
    of.retain(|name, _| who::NAMES.contains(&name.as_str()) || sources.contains(&name.as_str()));
}

impl Run {
    /// Bytes that it takes in memory, about; in a store it takes less, by no more than users differ in.
    pub fn weight(&self) -> usize {
        size_of::<Run>() + self.heap_bytes()
    }

    /// Whether the run would have an OOM record if memory had run out: files of other tools need not have a word for it.
    pub fn hears_of_ooms(&self) -> bool {
        self.coverage.covered && self.source.is_own()
    }

    /// Adds cells that the run does not have; returns the index of each in the run.
    pub fn merge_cells(&mut self, cells: &[Cell]) -> Vec<u32> {
        let mut known: HashMap<Cell, u32> =
            (0..).zip(&self.cells).map(|(index, cell)| (cell.clone(), index)).collect();
        let mut index = |cell: &Cell| {
            *known.entry(cell.clone()).or_insert_with_key(|cell| {
                self.cells.push(cell.clone());
                self.cells.len() as u32 - 1
            })
        };
        cells.iter().map(&mut index).collect()
    }
}

plain!(Clock, State);

/// [`Source::kind`] of a run that was exported on another machine.
pub const EXPORT_FORMAT: &str = "gpumem-run";

fields! {
    /// Where a run came from.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Source {
        /// `daemon`, `recording`, or an import format such as `tbd-log`.
        kind: String;
        /// File name of a recording or import; host name for the daemon.
        origin: String;
        /// Preset of rules that goes with the format, if any.
        preset: Option<String>;
    }
}

impl Source {
    /// A daemon watched the process, here or on another machine: `origin` is the machine.
    pub fn is_watched(&self) -> bool {
        self.kind == "daemon" || self.kind == EXPORT_FORMAT
    }

    /// Agents and daemons of ours told it, and not a file of another tool.
    pub fn is_own(&self) -> bool {
        self.is_watched() || self.kind == "recording"
    }
}

/// What record times mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Clock {
    /// Nanoseconds of the host's monotonic clock; wall clock of its zero, where an anchor was seen.
    Monotonic {
        /// Nanoseconds since 1970 at time 0.
        wall_offset_ns: Option<i64>,
    },
    /// Lines of a log: only the order means anything.
    Lines,
}

fields! {
    /// Identity of a process.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Process {
        /// Pid in the daemon's namespace; 0 if unknown.
        pid: u32                          => redact keep;
        /// Start time from /proc, in clock ticks; 0 if unknown.
        start_ticks: u64                  => redact keep;
        /// Owner's uid.
        uid: Option<u64>                  => redact keep;
        /// Command, comm, user and cgroup, from /proc.
        facts: BTreeMap<String, String>   => redact hide_identity;
        /// Rank and job, from the agent's environment.
        claims: BTreeMap<String, String>  => redact hide_identity;
    }
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum State {
    /// It goes on: these are the numbers so far.
    Open,
    /// The process ended.
    Closed {
        /// When.
        time_ns: u64,
        /// Status as waitpid gives it, where it could be known.
        status: Option<u64>,
    },
    /// Nobody watches any more: the daemon died, or the recording stops. The numbers are those of the
    /// last checkpoint or record.
    Interrupted,
    /// The process went on: a run that lasts for days is kept in parts, and the next part begins here.
    Rolled {
        /// When.
        time_ns: u64,
    },
}

fields! {
    /// Something a reader must know.
    #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
    pub struct Caveat {
        /// Stable word for programs: `no_frees`, `rejected_lines`, ...
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
