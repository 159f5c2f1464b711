//! Runs the events of a recording through the allocator.

pub use crate::allocator::SegmentAddresses;
use crate::allocator::{Allocator, Number};
use crate::event::{Device, Event, RequestId};
use crate::figures::Figures;
use crate::release::Release;
use crate::settings::{Backend, Settings};
use foldhash::HashMap;

/// When memory becomes available that was freed while another stream may still use it. The recorded times are the best estimate;
/// the other two show how much depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventReturn {
    /// When the memory became available in the recording.
    #[default]
    AsRecorded,
    /// When the program frees it.
    AtOnce,
    /// When all free memory is released, which waits for all streams.
    AtSynchronisation,
}

/// Assumptions of a replay.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The release of PyTorch whose rules apply.
    pub release: Release,
    /// Settings of the allocator.
    pub settings: Settings,
    /// Size of the device, and the bytes in use outside the allocator.
    pub device: Device,
    /// How the driver chooses addresses of segments; affects results only up to release 2.11.
    pub addresses: SegmentAddresses,
    /// When memory becomes available that was freed while another stream may still use it.
    pub returns: EventReturn,
}

/// Error: the events contradict each other, or cannot be replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A request has the id of a request whose memory is still in use.
    #[error("event {event}: request {id} begins a second time")]
    RequestedTwice {
        /// Number of the event.
        event: u64,
        /// Id of the request.
        id: RequestId,
    },
    /// The settings select another allocator than the native one.
    #[error(
        "only the native backend can be replayed; the memory of cudaMallocAsync is at least the sum of the live requests"
    )]
    Backend,
}

/// A replay in progress.
#[derive(Clone, Debug)]
pub struct Replay {
    allocator: Allocator,
    returns: EventReturn,
    live: HashMap<RequestId, Number>,
    events: u64,
    unknown_frees: u64,
    has_ended: bool,
    serves_recorded_failure: bool,
}

impl Replay {
    /// Starts a replay on an empty device.
    pub fn new(options: Options) -> Result<Self, Fault> {
        if options.settings.backend != Backend::Native {
            return Err(Fault::Backend);
        }
        let Options { release, settings, device, addresses, returns } = options;
        Ok(Replay {
            allocator: Allocator::new(release.rules(), settings, device, addresses),
            returns,
            live: HashMap::default(),
            events: 0,
            unknown_frees: 0,
            has_ended: false,
            serves_recorded_failure: false,
        })
    }

    /// Applies the next event. The replay ends at the first request that fails only in the replay, or that failed only in the
    /// recorded program. The real program would have continued differently, so later events are ignored.
    pub fn apply(&mut self, event: &Event) -> Result<(), Fault> {
        let number = self.events;
        self.events += 1;
        if self.has_ended {
            return Ok(());
        }
        let allocator = &mut self.allocator;
        match *event {
            Event::Request { id, bytes, stream, pool, has_failed } => {
                if self.live.contains_key(&id) {
                    return Err(Fault::RequestedTwice { event: number, id });
                }
                match allocator.request(bytes, stream, pool, number) {
                    // The request failed in the recording, so the recording contains no free of this memory.
                    Ok(block) if has_failed => {
                        allocator.free(block, None);
                        self.serves_recorded_failure = true;
                        self.has_ended = true;
                    }
                    Ok(block) => {
                        self.live.insert(id, block);
                    }
                    Err(_) => self.has_ended = !has_failed,
                }
            }
            Event::Free { id, is_pending } => match self.live.remove(&id) {
                Some(block) => {
                    let waits = is_pending && self.returns != EventReturn::AtOnce;
                    allocator.free(block, waits.then_some(id));
                }
                None => self.unknown_frees += 1,
            },
            Event::Return { id } => {
                if self.returns == EventReturn::AsRecorded {
                    allocator.return_pending(id);
                }
            }
            Event::EmptyCache { pool } => allocator.empty_cache(pool),
            Event::PoolBegins { pool, kind } => _ = allocator.begin_pool(pool, kind),
            Event::PoolEnds { pool } => allocator.end_pool(pool),
            Event::ScopeBegins { pool } => allocator.begin_scope(pool),
            Event::ScopeEnds { pool } => allocator.end_scope(pool),
            Event::Fraction(fraction) => allocator.set_fraction(fraction),
            Event::OtherMemory { bytes } => allocator.set_other_bytes(bytes),
        }
        Ok(())
    }

    /// Returns the totals and peaks so far.
    pub fn figures(&self) -> &Figures {
        &self.allocator.figures
    }

    /// Returns the number of frees whose requests are older than the recording.
    pub fn unknown_frees(&self) -> u64 {
        self.unknown_frees
    }

    /// Returns whether the replay has ended, because the real program would have continued differently.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Returns whether a request succeeded that failed in the recording.
    pub fn serves_recorded_failure(&self) -> bool {
        self.serves_recorded_failure
    }
}
