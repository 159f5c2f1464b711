//! Result of resolving a command's arguments.

use gpumem_model::run::Run;
use gpumem_model::window::Window;
use std::path::PathBuf;

/// The runs that were requested, and the arguments to request them again.
pub(super) struct Found {
    pub what: What,
    pub command: Vec<String>,
}

pub(super) enum What {
    One(Box<One>),
    /// Several processes with a title.
    Group(String, Vec<Run>),
}

/// A single process.
pub(super) struct One {
    pub run: Run,
    pub id: Option<String>,
    /// Pids of the other processes in the same file.
    pub others: Vec<u32>,
    /// The arguments that select its job's other processes, and their number.
    pub job: Option<(String, u64)>,
    /// The file that contained it.
    pub file: Option<PathBuf>,
    /// The part of the run's life that is reported.
    pub window: Option<Window>,
}

impl One {
    pub(super) fn found(run: Run, id: Option<String>, command: Vec<String>) -> Found {
        let one = One { run, id, others: Vec::new(), job: None, file: None, window: None };
        Found { what: What::One(Box::new(one)), command }
    }
}
