//! Runs the events of a recording through the allocator.

pub use crate::allocator::SegmentAddresses;
use crate::allocator::{Allocator, Number};
use crate::event::{Device, Event, RequestId};
use crate::figures::Figures;
use crate::release::Release;
use crate::settings::{Backend, Settings};
use foldhash::HashMap;

/// When memory becomes available that another stream may still use. The recorded moments are the best estimate; the other two
/// show how much depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventReturn {
    /// When it did in the recording.
    #[default]
    AsRecorded,
    /// With its free.
    AtOnce,
    /// Only when everything is released.
    AtSynchronisation,
}

/// What the replay assumes.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The release whose rules apply.
    pub release: Release,
    /// The settings.
    pub settings: Settings,
    /// The device.
    pub device: Device,
    /// Where segments lie; matters up to 2.11.
    pub addresses: SegmentAddresses,
    /// When memory becomes available that another stream may still use.
    pub returns: EventReturn,
}

/// Why an event cannot follow those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A request has the name of one whose memory is still in use.
    #[error("event {event}: request {id} begins a second time")]
    RequestedTwice {
        /// Number of the event.
        event: u64,
        /// Name of the request.
        id: RequestId,
    },
    /// Another allocator than the native one serves the requests.
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
    served_failures: u64,
}

impl Replay {
    /// Begins with an empty device.
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
            served_failures: 0,
        })
    }

    /// Applies the next event. After the first request without memory the recorded program would have gone another way, unless
    /// it got no memory for this request either: later events change nothing then.
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
                    // The recording has no free of this memory.
                    Ok(block) if has_failed => {
                        allocator.free(block, None);
                        self.served_failures += 1;
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
            Event::PoolBegins { pool, kind } => allocator.begin_pool(pool, kind),
            Event::PoolEnds { pool } => allocator.end_pool(pool),
            Event::ScopeBegins { pool } => allocator.begin_scope(pool),
            Event::ScopeEnds { pool } => allocator.end_scope(pool),
            Event::Fraction(fraction) => allocator.set_fraction(fraction),
            Event::OtherMemory { bytes } => allocator.set_other_bytes(bytes),
        }
        Ok(())
    }

    /// Returns totals and peaks up to now.
    pub fn figures(&self) -> &Figures {
        &self.allocator.figures
    }

    /// Number of frees whose requests are older than the recording.
    pub fn unknown_frees(&self) -> u64 {
        self.unknown_frees
    }

    /// Whether events are no longer applied, because the program would have gone another way.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Whether a request got memory that got none in the recording.
    pub fn serves_recorded_failure(&self) -> bool {
        self.served_failures > 0
    }
}
