//! Runs the events of a recording through the allocator.

pub use crate::allocator::SegmentAddresses;
use crate::allocator::{Allocator, Number};
use crate::driver_pool::DriverPool;
use crate::event::{Device, Event, RequestId};
use crate::figures::{Fault, Figures, Outcome};
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
    /// Fraction of the device's memory that `set_per_process_memory_fraction` has set before the first event. It overrides that of
    /// the settings, except for `throw_on_cudamalloc_oom`.
    pub fraction: Option<f64>,
    /// Size of the device, and the bytes in use outside the allocator.
    pub device: Device,
    /// How the driver chooses addresses of segments; affects results only up to release 2.11.
    pub addresses: SegmentAddresses,
    /// When memory becomes available that was freed while another stream may still use it.
    pub returns: EventReturn,
}

/// The allocator that serves the requests.
#[derive(Clone, Debug)]
enum Model {
    Native { allocator: Box<Allocator>, live: HashMap<RequestId, Number>, returns: EventReturn },
    DriverPool(DriverPool),
}

/// A replay in progress.
#[derive(Clone, Debug)]
pub struct Replay {
    model: Model,
    events: u64,
    unknown_frees: u64,
    has_ended: bool,
    serves_recorded_failure: bool,
}

impl Replay {
    /// Starts a replay on an empty device.
    pub fn new(options: Options) -> Self {
        let Options { release, settings, fraction, device, addresses, returns } = options;
        let fraction = fraction.or(settings.fraction);
        let model = match settings.backend {
            Backend::CudaMallocAsync => Model::DriverPool(DriverPool::new(device, fraction)),
            Backend::Native => Model::Native {
                allocator: Box::new(Allocator::new(release.rules(), settings, fraction, device, addresses)),
                live: HashMap::default(),
                returns,
            },
        };
        Replay { model, events: 0, unknown_frees: 0, has_ended: false, serves_recorded_failure: false }
    }

    /// Applies the next event. The replay ends at the first request that fails only in the replay, or that failed only in the
    /// recorded program. The real program would have continued differently, so later events are ignored.
    pub fn apply(&mut self, event: &Event) -> Result<(), Fault> {
        let number = self.events;
        self.events += 1;
        if self.has_ended {
            return Ok(());
        }
        let outcome = match &mut self.model {
            Model::Native { allocator, live, returns } => serve(allocator, live, *returns, event, number)?,
            Model::DriverPool(pool) => pool.apply(event, number)?,
        };
        self.unknown_frees += u64::from(outcome == Outcome::FreesUnknown);
        self.serves_recorded_failure = outcome == Outcome::ServesRecordedFailure;
        self.has_ended = matches!(outcome, Outcome::Fails | Outcome::ServesRecordedFailure);
        Ok(())
    }

    /// Returns the totals and peaks so far. Under `backend:cudaMallocAsync`, they are lower bounds.
    pub fn figures(&self) -> &Figures {
        match &self.model {
            Model::Native { allocator, .. } => &allocator.figures,
            Model::DriverPool(pool) => &pool.figures,
        }
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

/// Applies an event to PyTorch's caching allocator. `live` has the blocks of the live requests.
fn serve(
    allocator: &mut Allocator,
    live: &mut HashMap<RequestId, Number>,
    returns: EventReturn,
    event: &Event,
    number: u64,
) -> Result<Outcome, Fault> {
    match *event {
        Event::Request { id, bytes, stream, pool, has_failed } => {
            if live.contains_key(&id) {
                return Err(Fault::RequestedTwice { event: number, id });
            }
            match allocator.request(bytes, stream, pool, number) {
                // The request failed in the recording, so the recording contains no free of this memory.
                Ok(block) if has_failed => {
                    allocator.free(block, None);
                    return Ok(Outcome::ServesRecordedFailure);
                }
                Ok(block) => _ = live.insert(id, block),
                Err(_) if has_failed => {}
                Err(_) => return Ok(Outcome::Fails),
            }
        }
        Event::Free { id, is_pending } => {
            let Some(block) = live.remove(&id) else { return Ok(Outcome::FreesUnknown) };
            let waits = is_pending && returns != EventReturn::AtOnce;
            allocator.free(block, waits.then_some(id));
        }
        Event::Return { id } => {
            if returns == EventReturn::AsRecorded {
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
    Ok(Outcome::Continues)
}
