//! State of the phases of a process, and of the roles of one device's blocks.

use crate::roles::iterations::Iterations;
use crate::roles::undecided::{List, UndecidedBlocks};
use gpumem_wire::{Phase, Role};

/// Sizes of workspaces as PyTorch configures them: cuBLAS on Hopper and later `:4096:8`, on others `:4096:2:16:8`; cuBLASLt, whose own
/// workspaces stay in PyTorch 2.9 to 2.11.
pub(crate) const WORKSPACE_BYTES: [u64; 3] = [33_554_432, 8_519_680, 1_048_576];

/// Threads of each kind that are kept, for each device.
const THREADS: usize = 8;

/// Roles of one device's blocks.
#[derive(Debug, Default)]
pub(crate) struct Roles {
    pub young: UndecidedBlocks,
    pub iterations: Iterations,
    /// The phase that blocks are born in; `Unknown` between phases.
    pub now: Phase,
    /// Seq of the record that began it.
    pub since_seq: u64,
    /// A backward pass or an optimizer was seen.
    pub is_trained: bool,
    /// Optimizer steps that are over.
    pub optimized: u64,
    /// There was forward work since the last optimizer step (or since the last step, if the program reports steps).
    pub has_worked: bool,
    /// An optimizer step is over, and no forward pass has begun since.
    pub is_iterated: bool,
    /// Threads that run forward passes, and those that run backward passes. One can be both.
    pub forward_threads: Threads,
    pub backward_threads: Threads,
    /// By workspace size: parameters of this size exist; there were more blocks of this size than there can be workspaces.
    pub parameters: [bool; WORKSPACE_BYTES.len()],
    pub ambiguous: [bool; WORKSPACE_BYTES.len()],
    pub knows_parameters: bool,
}

/// A ring, and the index of its next entry.
#[derive(Debug, Default)]
pub(crate) struct Threads([u32; THREADS], usize);

impl Threads {
    pub fn has(&self, thread: u32) -> bool {
        self.0.contains(&thread)
    }

    pub fn note(&mut self, thread: u32) {
        if !self.has(thread) {
            self.0[self.1] = thread;
            self.1 = (self.1 + 1) % THREADS;
        }
    }
}

impl Roles {
    /// Whether a thread is known to work in backward only.
    pub fn is_backward_thread(&self, thread: u32) -> bool {
        self.backward_threads.has(thread) && !self.forward_threads.has(thread)
    }

    /// Whether a block with the size of a workspace may be the gradient of a parameter.
    pub fn may_be_gradient(&self, size: usize) -> bool {
        !self.knows_parameters || self.parameters[size]
    }

    /// Returns the role of most blocks that are born in a list.
    pub fn likely(&self, list: List) -> Role {
        match list {
            List::Forward if self.is_trained => Role::Activation,
            List::Backward => Role::Temporary,
            List::Optimizer if self.optimized == 0 => Role::OptimizerState,
            List::Optimizer => Role::Temporary,
            _ => Role::Unknown,
        }
    }
}

/// How a block ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Its owner frees it.
    Freed,
    /// Its owner frees it, and a stream still uses it.
    LetGo,
    /// It goes with something else.
    Taken,
}

/// A block that only a resync brought.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RestatedBlock {
    pub seq: u64,
    pub list: List,
    pub pool: u32,
    pub address: u64,
}

/// What a process reports of its phases, on all devices.
#[derive(Debug, Default)]
pub(crate) struct PhaseReports {
    /// The last `PhaseBegin`.
    pub said: Phase,
    /// Blocks are stamped with phases.
    pub stamped: bool,
    /// The program reports its steps.
    pub stepped: bool,
    /// The program's number of its epoch; 0 if it has none.
    pub epoch: u64,
    /// Blocks without a phase have to be checked.
    pub checks_unstamped: bool,
    /// Births are replayed after a resync: see [`crate::rules::holdings::Holdings::replay`].
    pub replays: bool,
}

pub(crate) fn workspace_index(bytes: u64) -> Option<usize> {
    WORKSPACE_BYTES.iter().position(|&size| size == bytes)
}

/// Returns the list of blocks that are born in a phase.
pub(crate) fn list_of(phase: Phase) -> Option<List> {
    match phase {
        Phase::Forward => Some(List::Forward),
        Phase::Backward => Some(List::Backward),
        Phase::Optimizer => Some(List::Optimizer),
        Phase::Evaluation => Some(List::Evaluation),
        Phase::Setup | Phase::Between | Phase::Unknown => None,
    }
}
