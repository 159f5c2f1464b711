//! What a source hands to the owner of the ledger. Neither side names the other.

use gpumem_ledger::Origin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;

/// What costs the ledger a look at all that a process holds is taken a few words at a time, and rests so many times as long as it
/// took.
const COSTLY_RESTS: u32 = 16;
/// If it took that long.
const COSTLY: Duration = Duration::from_millis(1);

/// What a source saw: frames of one origin, in order.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Who said it: the host, or one process.
    pub origin: Origin,
    /// Frames, see `gpumem_wire::frame`.
    pub frames: Vec<u8>,
    /// What it takes of its user's part of the inbox, until the ledger has it.
    pub place: Option<Place>,
}

impl Batch {
    /// Frames of the host.
    pub(crate) fn of_host(frames: Vec<u8>) -> Self {
        Batch { origin: Origin::Host, frames, place: None }
    }
}

/// A place in the ledger's inbox; given back when dropped.
#[derive(Debug, Clone)]
pub struct Place {
    permit: Arc<OwnedSemaphorePermit>,
    is_costly: bool,
}

impl Place {
    /// A place that this permit stands for.
    pub(crate) fn new(permit: OwnedSemaphorePermit) -> Self {
        Place { permit: Arc::new(permit), is_costly: false }
    }

    /// What lies in it may take long.
    pub(crate) fn costly(self) -> Self {
        Place { is_costly: true, ..self }
    }

    /// Whether somebody wants to know how long it took.
    pub(crate) fn is_costly(&self) -> bool {
        self.is_costly
    }

    /// The ledger has taken it, in so much time of the processor.
    pub(crate) fn took(self, time: Duration) {
        if time >= COSTLY {
            tokio::spawn(async move {
                tokio::time::sleep(time * COSTLY_RESTS).await;
                drop(self.permit);
            });
        }
    }
}
