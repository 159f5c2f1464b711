//! What a command found for what was typed.

use gpumem_model::run::Run;
use gpumem_model::window::Window;
use std::path::PathBuf;

/// What is asked for, and how to ask for it again.
pub(super) struct Found {
    pub what: What,
    pub command: Vec<String>,
}

pub(super) enum What {
    One(Box<One>),
    /// Several processes under a title.
    Group(String, Vec<Run>),
}

/// One process.
pub(super) struct One {
    pub run: Run,
    pub id: Option<String>,
    /// Pids of the other processes in the same file.
    pub others: Vec<u32>,
    /// What tells of its job's other processes, and how many there are.
    pub job: Option<(String, u64)>,
    /// The file that it was read from.
    pub file: Option<PathBuf>,
    /// It is of a part of the run's life.
    pub window: Option<Window>,
}

impl One {
    pub(super) fn found(run: Run, id: Option<String>, command: Vec<String>) -> Found {
        let one = One { run, id, others: Vec::new(), job: None, file: None, window: None };
        Found { what: What::One(Box::new(one)), command }
    }
}
