//! The kinds of entries in a stream, and its pieces.

/// Unit of times in the stream, in ns.
pub(super) const TICK_NS: u64 = 1 << 14;
/// Name of the pool of PyTorch's allocator, as the agent gives it.
pub const POOL_NAME: &str = "torch";

/// Returns the settings of PyTorch's allocator in the claims of a hello; empty if it has none.
pub fn allocator_settings(claims: &str) -> &str {
    let claim = |name: &str| claims.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    claim("alloc_conf").or_else(|| claim("cuda_alloc_conf")).unwrap_or_default()
}

/// A piece of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub number: u64,
    /// Number of the first piece that is still needed.
    pub first: u64,
    /// Entries; see the module's documentation.
    pub bytes: Vec<u8>,
}

/// Operation of an entry; flags are in the upper bits of the same byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Operation {
    State,
    StateEnd,
    Program,
    Name,
    Pool,
    Segment,
    SegmentEnd,
    Allocate,
    Free,
    FreeLater,
    Refused,
    Failed,
    Older,
    Lost,
    Use,
    Phase,
}

impl Operation {
    pub(super) const ALL: [Operation; 16] = {
        use Operation::{
            Allocate, Failed, Free, FreeLater, Lost, Name, Older, Phase, Pool, Program, Refused, Segment,
            SegmentEnd, State, StateEnd, Use,
        };
        [
            State, StateEnd, Program, Name, Pool, Segment, SegmentEnd, Allocate, Free, FreeLater, Refused,
            Failed, Older, Lost, Use, Phase,
        ]
    };
}

/// Flags of an entry: the fields that follow because they differ from those of the entry before.
pub(super) mod flags {
    /// A pool follows.
    pub(in crate::requests) const POOL: u8 = 1;
    /// A tag follows.
    pub(in crate::requests) const TAG: u8 = 2;
    /// A stream and a private pool follow.
    pub(in crate::requests) const REQUEST: u8 = 4;
    /// The request is unknown, and the block's size stands for it. For a segment: the segment is mapped to an expandable range.
    /// For a use: it is that of one block from now on. For a phase: a training step begins.
    pub(in crate::requests) const OTHER: u8 = 8;
}
