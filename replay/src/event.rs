//! What a program asked of the allocator, in the order in which the allocator's lock was taken.

/// Names a request until its memory is free again; chosen by the caller, an address for example.
pub type RequestId = u64;
/// Names a stream: numbered by first use, because handles differ from run to run.
pub type StreamId = u32;
/// Names a pool; 0 is the default pool.
pub type PoolId = u32;

/// The device of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Bytes of the whole device, as `totalGlobalMem` has it.
    pub total_bytes: u64,
    /// Bytes that others use: the context, libraries, other processes.
    pub other_bytes: u64,
}

/// Who made a private pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolKind {
    /// The capture of a CUDA graph.
    #[default]
    Graph,
    /// `torch.cuda.MemPool`.
    User {
        /// Segments come from an allocator that the program provides.
        has_own_allocator: bool,
        /// Blocks are never split.
        no_split: bool,
        /// Serves other requests when memory is short.
        use_on_oom: bool,
    },
}

/// One event of a recording.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The program requests memory.
    Request {
        /// Name of the request.
        id: RequestId,
        /// Bytes the program asked for, not the size of the block that it got.
        bytes: u64,
        /// Stream that was current.
        stream: StreamId,
        /// Pool that serves the request.
        pool: PoolId,
        /// The recorded program got no memory.
        has_failed: bool,
    },
    /// The program frees the memory of a request.
    Free {
        /// Name of the request.
        id: RequestId,
        /// Other streams may still use the memory (`record_stream`): a `Return` follows.
        is_pending: bool,
    },
    /// The memory of a pending free is available again.
    Return {
        /// Name of the request.
        id: RequestId,
    },
    /// `torch.cuda.empty_cache()`.
    EmptyCache {
        /// The only pool to be emptied, if the call named one.
        pool: Option<PoolId>,
    },
    /// A private pool begins.
    PoolBegins {
        /// Name of the pool.
        pool: PoolId,
        /// Who made it.
        kind: PoolKind,
    },
    /// The graphs or the `MemPool` object of a private pool are gone.
    PoolEnds {
        /// Name of the pool.
        pool: PoolId,
    },
    /// Requests begin to go to a private pool: a capture, or `use_mem_pool`.
    ScopeBegins {
        /// Name of the pool.
        pool: PoolId,
    },
    /// The scope of a private pool ends.
    ScopeEnds {
        /// Name of the pool.
        pool: PoolId,
    },
    /// `set_per_process_memory_fraction`.
    Fraction(f64),
    /// The bytes that others use on the device have changed.
    OtherMemory {
        /// Bytes in use.
        bytes: u64,
    },
}
