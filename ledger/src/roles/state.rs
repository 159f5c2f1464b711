//! State from which roles are derived: phases that a process reports, and phases and threads on each device.

use crate::roles::iterations::Iterations;
use crate::roles::undecided::{List, UndecidedBlocks};
use gpumem_wire::{Phase, Role};

/// Forward passes keep only results if each keeps at most 1/`RESULTS` of the blocks that a forward pass before a backward pass
/// keeps.
const RESULTS: u64 = 4;
/// Maximum number of forward threads, and of backward threads, that are kept for each device.
const THREADS: usize = 8;

/// State of one device that decides the phase of training (forward, backward, ...) in which a block is allocated, and the role
/// (parameter, gradient, ...) of the block.
#[derive(Debug, Default)]
pub(crate) struct Roles {
    pub undecided: UndecidedBlocks,
    pub iterations: Iterations,
    /// The training phase in which blocks are allocated now; `Unknown` between phases.
    pub now: Phase,
    /// Number of the record that began the phase.
    pub since_seq: u64,
    /// Whether a backward pass or an optimizer step has occurred.
    pub is_trained: bool,
    /// Number of completed optimizer steps.
    pub optimized: u64,
    /// Whether a forward pass has begun since the last optimizer step, or since the last training step if the program reports
    /// steps.
    pub has_worked: bool,
    /// Whether an optimizer step has completed and no forward pass has begun since.
    pub is_iterated: bool,
    /// Whether a backward pass has begun since the last forward pass began.
    pub has_backward: bool,
    /// Number of the record of the last failed request; 0 if none failed.
    pub failed_seq: u64,
    /// Maximum of the temporary bytes of an optimizer step so far.
    pub optimizer_temporary: i64,
    /// The same of a backward pass; `None` before the first one has ended.
    pub backward_temporary: Option<i64>,
    /// Whether a thread that waits for the backward pass has allocated a block since the pass allocated its last one, so that the next
    /// one begins another pass.
    pub is_backward_over: bool,
    /// Threads whose last block was allocated outside of modules.
    pub outside_threads: Threads,
    /// The thread on which the last forward pass began.
    pub pass_thread: u32,
    pub passes: PassCounts,
    /// Threads that ran forward passes, and threads that ran backward passes; a thread can be in both.
    pub forward_threads: Threads,
    pub backward_threads: Threads,
    /// The thread that made the last block of a forward pass; 0 if there is none.
    pub forward_thread: u32,
    /// The thread that was last seen to call `backward()`; 0 if there is none.
    pub caller: u32,
    /// The thread that made the first block of the backward pass in progress, if no other thread has made one since; else 0.
    pub backward_caller: u32,
    /// For each workspace size: whether a parameter of that size exists.
    pub parameters: [bool; WORKSPACE_SIZES],
    /// For each workspace size: whether more blocks of that size existed than there can be workspaces.
    pub ambiguous: [bool; WORKSPACE_SIZES],
    /// Whether the agent has named the parameters of a model.
    pub knows_parameters: bool,
}

/// Numbers of forward passes, from which passes that are not for training are detected.
#[derive(Debug, Default)]
pub(crate) struct PassCounts {
    /// Number of forward passes that began after the first one.
    pub after_first: u64,
    /// Number of forward passes that began since the last backward pass began.
    pub since_backward: u64,
    /// Number of these that began with gradients enabled.
    pub with_gradients: u64,
    /// Number of forward passes whose blocks are in the list of the forward pass.
    undecided: u64,
    /// Number of forward passes between the last two backward passes.
    last: u64,
    /// Number of forward passes before a backward pass, if two backward passes in a row had the same number; the latest such
    /// number. 0 if unknown.
    usual: u64,
    /// Number of blocks that were kept for the last backward pass.
    kept: usize,
}

impl PassCounts {
    /// Whether no forward pass has begun after the first one, which is not counted, and no backward pass has begun.
    pub fn is_first(&self) -> bool {
        (self.since_backward, self.kept) == (0, 0)
    }

    /// Counts a backward pass that begins with `kept` undecided blocks of its forward passes.
    pub fn begin_backward(&mut self, kept: usize) {
        let passes = std::mem::take(&mut self.since_backward);
        self.with_gradients = 0;
        self.undecided = 0;
        if passes > 0 {
            self.usual = if passes == self.last { passes } else { self.usual };
            (self.last, self.kept) = (passes, kept);
        }
    }
}

/// The last few threads that were added, each once: a ring buffer, and the index of its next entry.
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

    /// Removes a thread; returns whether it was there. 0 stands for an unknown thread.
    pub fn remove(&mut self, thread: u32) -> bool {
        let found = self.0.iter_mut().find(|other| **other == thread && thread != 0);
        found.map(|other| *other = 0).is_some()
    }
}

impl Roles {
    pub fn is_backward_thread(&self, thread: u32) -> bool {
        self.backward_threads.has(thread) && !self.forward_threads.has(thread)
    }

    /// Records that a thread has made a block of a backward pass. If another thread continues after the first block, the first one has
    /// called `backward()`, and runs none of it.
    pub fn note_backward(&mut self, thread: u32) {
        let caller = std::mem::take(&mut self.backward_caller);
        if self.now != Phase::Backward || self.is_backward_over {
            self.backward_caller = thread;
        } else if caller == thread {
            self.backward_caller = caller;
        } else {
            self.backward_threads.remove(caller);
            self.caller = if caller == 0 { self.caller } else { caller };
        }
        self.backward_threads.note(thread);
    }

    /// Whether a thread may wait for the backward pass in progress: it ran the last forward pass. Without modules, it has called
    /// `backward()`; if no thread is known to have, it may be any.
    pub fn may_wait_for_backward(&self, thread: u32) -> bool {
        let waiting = if self.forward_thread == 0 { self.caller } else { self.forward_thread };
        waiting == 0 || waiting == thread
    }

    /// Counts a forward pass that begins. Returns whether the passes before it are not for training: there were more of them than
    /// before other backward passes, and they kept few blocks, which are their results.
    pub fn begin_pass(&mut self) -> bool {
        let PassCounts { since_backward, undecided, usual, kept, .. } = self.passes;
        // For each pass, 1/`RESULTS` of the blocks that a pass for training keeps.
        let most = (kept as u64).saturating_mul(undecided) / (usual * RESULTS).max(1);
        let is_unusual = usual > 0 && since_backward > usual;
        let remaining = self.undecided.iter(List::Forward).take(most as usize + 1);
        let has_only_results = is_unusual && remaining.count() as u64 <= most;
        self.passes.after_first += 1;
        self.passes.since_backward += 1;
        self.passes.undecided = if has_only_results { 1 } else { undecided + 1 };
        has_only_results
    }

    /// Whether a block with the size of a workspace may be the gradient of a parameter.
    pub fn may_be_gradient(&self, size: usize) -> bool {
        !self.knows_parameters || self.parameters[size]
    }

    /// Returns the most frequent role of blocks in a list: their preliminary role.
    pub fn likely_role(&self, list: List) -> Role {
        match list {
            List::Forward if self.is_trained => Role::Activation,
            List::Backward => Role::Temporary,
            List::Optimizer if self.optimized == 0 => Role::OptimizerState,
            List::Optimizer => Role::Temporary,
            _ => Role::Unknown,
        }
    }
}

/// How the program's use of a block ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Freed,
    /// The program frees the block, but a CUDA stream still uses it.
    Pending,
    /// The block is removed together with its pool, segment or context.
    Removed,
}

/// A block that was unknown until a resync restated it; see [`crate::rules::holdings::Holdings::replay`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct RestatedBlock {
    pub seq: u64,
    pub list: List,
    pub pool: u32,
    pub address: u64,
    /// The sender's number of the block's stream; 0 if it is unknown.
    pub stream: u16,
    /// The thread that allocated the block; 0 if it is unknown.
    pub thread: u32,
}

#[derive(Debug, Default)]
pub(crate) struct PhaseReports {
    /// Phase of the last `PhaseBegin` record.
    pub last: Phase,
    /// Whether blocks have their phase in their own records.
    pub in_blocks: bool,
    pub has_steps: bool,
    /// The program's epoch number; 0 if it reports none.
    pub epoch: u64,
    /// Whether any phase was reported, so that blocks without a phase need a role too.
    pub any_phase: bool,
    /// Whether the ledger derives the roles of blocks that a resync added. Steps and passes are not measured meanwhile.
    pub is_replay: bool,
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

/// Workspaces of PyTorch without a setting, in bytes: cuBLAS on Hopper and later (`:4096:8`), cuBLAS on other GPUs (`:4096:2:16:8`),
/// cuBLASLt in PyTorch 2.9 to 2.11.
const DEFAULT_BYTES: [u64; WORKSPACE_SIZES] = [33_554_432, 8_519_680, 1_048_576];
pub(crate) const WORKSPACE_SIZES: usize = 3;

/// Sizes in bytes of the workspaces that PyTorch allocates for cuBLAS, one for each handle (thread) and stream, until the process
/// ends; 0 in a place that the process does not use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkspaceSizes([u64; WORKSPACE_SIZES]);

impl Default for WorkspaceSizes {
    fn default() -> Self {
        WorkspaceSizes(DEFAULT_BYTES)
    }
}

impl WorkspaceSizes {
    /// Returns the sizes in a process whose `CUBLAS_WORKSPACE_CONFIG` is `setting`: pairs `:KIB:COUNT`. PyTorch ignores a setting
    /// without such a pair.
    pub fn with_setting(setting: Option<&str>) -> Self {
        let numbers: Vec<&str> = setting.unwrap_or_default().split(':').skip(1).collect();
        let product = |pair: &[&str]| -> Option<u64> {
            let (kib, count) = (pair.first()?.parse::<u64>().ok()?, pair.get(1)?.parse::<u64>().ok()?);
            kib.checked_mul(count)?.checked_mul(1024)
        };
        let sums: Option<Vec<u64>> = numbers.chunks(2).map(product).collect();
        match sums.filter(|sums| !sums.is_empty()) {
            Some(sums) => {
                WorkspaceSizes([sums.into_iter().fold(0, u64::saturating_add), 0, DEFAULT_BYTES[2]])
            }
            None => WorkspaceSizes::default(),
        }
    }

    /// Returns the index of this size, if it is a workspace's.
    pub fn index(&self, bytes: u64) -> Option<usize> {
        self.0.iter().position(|&size| size == bytes && size > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_replaces_the_sizes_of_cublas() {
        let sizes = |setting| WorkspaceSizes::with_setting(Some(setting)).0;
        assert_eq!(sizes(":4096:8"), [32 << 20, 0, 1 << 20]);
        assert_eq!(sizes(":4096:2:16:8"), [(8 << 20) + (128 << 10), 0, 1 << 20]);
        assert_eq!(sizes(":16:8"), [128 << 10, 0, 1 << 20]);
        assert_eq!(sizes(":0:0"), [0, 0, 1 << 20]);
        for unusable in ["", ":", "4096", ":4096", ":4096:8:16", ":4096:many", ":18446744073709551615:2"] {
            assert_eq!(sizes(unusable), DEFAULT_BYTES, "{unusable}");
        }
        assert_eq!(WorkspaceSizes::with_setting(None).0, DEFAULT_BYTES);
        assert_eq!(WorkspaceSizes::with_setting(Some(":0:0")).index(0), None);
    }
}
