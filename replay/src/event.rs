//! Events of a recording: what a program requested from the allocator, in the order in which it took the allocator's lock.

/// Identifies a request until its memory is free again. The caller chooses it, for example an address.
pub type RequestId = u64;
/// Identifies a stream. Streams are numbered by first use, because their handles differ from run to run.
pub type StreamId = u32;
/// Identifies a pool; 0 is the default pool.
pub type PoolId = u32;

/// The device of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Memory of the whole device, as in CUDA's `totalGlobalMem`.
    pub total_bytes: u64,
    /// Bytes in use outside the allocator: the CUDA context, libraries, other processes.
    pub other_bytes: u64,
}

/// What a private pool is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolKind {
    /// The pool belongs to captures of CUDA graphs.
    #[default]
    Graph,
    /// A pool that the program created (`torch.cuda.MemPool`).
    User {
        /// Whether the pool's segments come from an allocator that the program provides.
        has_own_allocator: bool,
        /// Whether the pool's blocks are never split.
        no_split: bool,
        /// Whether the pool also serves other requests when memory is short.
        use_on_oom: bool,
    },
}

/// One event of a recording.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The program requests memory.
    Request {
        /// Id of the request.
        id: RequestId,
        /// Bytes that the program requested; the block may be larger.
        bytes: u64,
        /// CUDA stream for which the memory was requested.
        stream: StreamId,
        /// Pool that serves the request.
        pool: PoolId,
        /// Whether this request failed for lack of memory in the recorded program.
        has_failed: bool,
    },
    /// The program frees the memory of a request.
    Free {
        /// Id of the request.
        id: RequestId,
        /// Whether other streams may still use the memory (`record_stream`); a `Return` with the same id then follows.
        is_pending: bool,
    },
    /// Memory of a pending free becomes available.
    Return {
        /// Id of the request.
        id: RequestId,
    },
    /// `torch.cuda.empty_cache()`.
    EmptyCache {
        /// The private pool to empty; `None` for all pools.
        pool: Option<PoolId>,
    },
    /// The program creates a private pool.
    PoolBegins {
        /// Id of the pool.
        pool: PoolId,
        /// What the pool is for.
        kind: PoolKind,
    },
    /// The graphs, or the `MemPool` object, of a private pool no longer exist.
    PoolEnds {
        /// Id of the pool.
        pool: PoolId,
    },
    /// Requests go to a private pool from now on: a capture or `use_mem_pool` begins.
    ScopeBegins {
        /// Id of the pool.
        pool: PoolId,
    },
    /// The capture or `use_mem_pool` of a private pool ends.
    ScopeEnds {
        /// Id of the pool.
        pool: PoolId,
    },
    /// The program calls `set_per_process_memory_fraction`.
    Fraction(f64),
    /// The bytes in use outside the allocator have changed.
    OtherMemory {
        /// New number of bytes in use outside the allocator.
        bytes: u64,
    },
}
