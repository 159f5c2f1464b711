//! State of a process's phases, and of the roles of one device's blocks.

use crate::roles::iterations::Iterations;
use crate::roles::undecided::{List, UndecidedBlocks};
use gpumem_wire::{Phase, Role};

/// Workspace sizes as PyTorch configures them: cuBLAS on Hopper and later `:4096:8`, on others `:4096:2:16:8`; cuBLASLt, whose
/// separate workspaces stay in PyTorch 2.9 to 2.11.
pub(crate) const WORKSPACE_BYTES: [u64; 3] = [33_554_432, 8_519_680, 1_048_576];

/// Maximum number of threads of each kind that are kept, for each device.
const THREADS: usize = 8;

/// Roles of one device's blocks.
#[derive(Debug, Default)]
pub(crate) struct Roles {
    pub young: UndecidedBlocks,
    pub iterations: Iterations,
    /// The phase in which blocks are allocated; `Unknown` between phases.
    pub now: Phase,
    /// Number of the record that began the phase.
    pub since_seq: u64,
    /// A backward pass or an optimizer step was seen.
    pub is_trained: bool,
    /// Number of completed optimizer steps.
    pub optimized: u64,
    /// Forward work was seen since the last optimizer step (since the last step, if the program reports steps).
    pub has_worked: bool,
    /// An optimizer step has completed, and no forward pass has begun since.
    pub is_iterated: bool,
    /// Threads that run forward passes, and threads that run backward passes. A thread can be in both.
    pub forward_threads: Threads,
    pub backward_threads: Threads,
    /// By workspace size: a parameter of this size exists; more blocks of this size existed than there can be workspaces.
    pub parameters: [bool; WORKSPACE_BYTES.len()],
    pub ambiguous: [bool; WORKSPACE_BYTES.len()],
    pub knows_parameters: bool,
}

/// Ring buffer, and the index of its next entry.
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
    /// Whether a thread has only been seen in backward.
    pub fn is_backward_thread(&self, thread: u32) -> bool {
        self.backward_threads.has(thread) && !self.forward_threads.has(thread)
    }

    /// Whether a block with the size of a workspace may be the gradient of a parameter.
    pub fn may_be_gradient(&self, size: usize) -> bool {
        !self.knows_parameters || self.parameters[size]
    }

    /// Returns the most frequent role of blocks in a list.
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

/// Way in which a block ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Its owner frees it.
    Freed,
    /// Its owner frees it, but a stream still uses it.
    LetGo,
    /// It is removed together with something else.
    Taken,
}

/// A block that was unknown until a resync restated it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RestatedBlock {
    pub seq: u64,
    pub list: List,
    pub pool: u32,
    pub address: u64,
}

#[derive(Debug, Default)]
pub(crate) struct PhaseReports {
    pub said: Phase,
    pub stamped: bool,
    /// The program reports its steps.
    pub stepped: bool,
    /// The program's epoch number; 0 if it reports none.
    pub epoch: u64,
    /// Blocks without a phase must be checked.
    pub checks_unstamped: bool,
    /// Allocations are being replayed after a resync: see [`crate::rules::holdings::Holdings::replay`].
    pub replays: bool,
}

pub(crate) fn workspace_index(bytes: u64) -> Option<usize> {
    WORKSPACE_BYTES.iter().position(|&size| size == bytes)
}

pub(crate) fn list_of(phase: Phase) -> Option<List> {
    match phase {
        Phase::Forward => Some(List::Forward),
        Phase::Backward => Some(List::Backward),
        Phase::Optimizer => Some(List::Optimizer),
        Phase::Evaluation => Some(List::Evaluation),
        Phase::Setup | Phase::Between | Phase::Unknown => None,
    }
}
