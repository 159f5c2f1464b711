//! The world -> observations. A source hands over frames of `wire`, as they would lie in a recording; it knows
//! neither the ledger nor the views.

pub mod agent;
pub mod kernel;
pub mod nvml;
pub mod process;

use gpumem_ledger::Origin;

/// What a source saw: frames of one origin, in order.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Who said it: the host, or one process.
    pub origin: Origin,
    /// Frames, see `gpumem_wire::frame`.
    pub frames: Vec<u8>,
    /// What it takes of its user's part of the inbox, until the ledger has it.
    pub place: Option<agent::Place>,
}

impl Batch {
    /// Frames of the host.
    pub fn of_host(frames: Vec<u8>) -> Self {
        Batch { origin: Origin::Host, frames, place: None }
    }
}
