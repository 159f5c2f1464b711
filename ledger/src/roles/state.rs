//! What is known of the phases of a process, and of the roles of one device's blocks.

use crate::roles::iterations::Iterations;
use crate::roles::undecided::{List, UndecidedBlocks};
use gpumem_wire::{Phase, Role};

/// Sizes of workspaces as PyTorch configures them: cuBLAS on Hopper and later `:4096:8`, on others `:4096:2:16:8`; cuBLASLt, whose
/// own workspaces stay in PyTorch 2.9 to 2.11.
pub(crate) const WORKSPACE_BYTES: [u64; 3] = [33_554_432, 8_519_680, 1_048_576];

/// Threads of a kind that are known, per device.
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
    /// There was forward work since the last optimizer step (or step, where the program says them).
    pub has_worked: bool,
    /// An optimizer step is over, and no forward pass has begun since.
    pub is_iterated: bool,
    /// Threads that run forward passes, and those that run backward passes. One can be both.
    pub forward_threads: Threads,
    pub backward_threads: Threads,
    /// Parameters of these sizes exist; more workspaces of them than there can be were seen.
    pub parameters: [bool; WORKSPACE_BYTES.len()],
    pub ambiguous: [bool; WORKSPACE_BYTES.len()],
    pub knows_parameters: bool,
}

/// A ring, and its next place.
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
    /// It does nothing else, as far as is known.
    pub fn is_backward_thread(&self, thread: u32) -> bool {
        self.backward_threads.has(thread) && !self.forward_threads.has(thread)
    }

    /// Whether what has the size of a workspace may be the gradient of a parameter.
    pub fn may_be_gradient(&self, size: usize) -> bool {
        !self.knows_parameters || self.parameters[size]
    }

    /// The role of most blocks that are born in a list.
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

/// How a block comes to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Its owner frees it.
    Freed,
    /// Its owner lets it go, and it waits for a stream.
    LetGo,
    /// Something else takes it with it.
    Taken,
}

/// A block that a resync brought anew.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RestatedBlock {
    pub seq: u64,
    pub list: List,
    pub pool: u32,
    pub address: u64,
}

/// What a process says of its phases, on all devices.
#[derive(Debug, Default)]
pub(crate) struct PhaseReports {
    /// The last `PhaseBegin`.
    pub said: Phase,
    /// Blocks are stamped with phases.
    pub stamped: bool,
    /// The program says its steps.
    pub stepped: bool,
    /// The program's number of its epoch; 0: it says none.
    pub epoch: u64,
    /// Blocks without a phase have to be looked at.
    pub checks_unstamped: bool,
    /// What is told happened before, and was not heard: see [`Holdings::replay`].
    pub replays: bool,
}

pub(crate) fn workspace_index(bytes: u64) -> Option<usize> {
    WORKSPACE_BYTES.iter().position(|&size| size == bytes)
}

/// The list of a phase that blocks are born in.
pub(crate) fn list_of(phase: Phase) -> Option<List> {
    match phase {
        Phase::Forward => Some(List::Forward),
        Phase::Backward => Some(List::Backward),
        Phase::Optimizer => Some(List::Optimizer),
        Phase::Evaluation => Some(List::Evaluation),
        Phase::Setup | Phase::Between | Phase::Unknown => None,
    }
}
