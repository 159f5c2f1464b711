//! Lower bound of the memory under `backend:cudaMallocAsync`: bytes that the program has requested and not yet freed.
//!
//! With this backend, each request is an allocation from the driver's pool, of exactly the requested size. CUDA does not document
//! how the pool grows and when it reuses memory. It keeps all memory that it has, so only the bytes of the live requests are certain.
//! During the capture of a CUDA graph the driver allocates nothing, so requests to private pools do not count.

use crate::event::{Device, Event, PoolId, RequestId};
use crate::figures::{Failure, Fault, Figures, Gauge, Outcome};
use foldhash::HashMap;

#[derive(Clone, Debug)]
pub(crate) struct DriverPool {
    device: Device,
    /// Maximum number of bytes of all live requests; `None` for no limit.
    allowed: Option<u64>,
    /// Bytes and pool of each live request.
    live: HashMap<RequestId, (u64, PoolId)>,
    /// Bytes of all live requests, those to private pools included.
    used: u64,
    /// The amounts are the lower bound; driver calls and retries are unknown and stay 0.
    pub(crate) figures: Figures,
}

impl DriverPool {
    pub(crate) fn new(device: Device, fraction: Option<f64>) -> Self {
        let (live, figures) = (HashMap::default(), Figures::default());
        let mut pool = DriverPool { device, allowed: None, live, used: 0, figures };
        if let Some(fraction) = fraction {
            pool.set_fraction(fraction);
        }
        pool
    }

    fn set_fraction(&mut self, fraction: f64) {
        self.allowed = Some((fraction * self.device.total_bytes as f64) as u64);
    }

    pub(crate) fn apply(&mut self, event: &Event, number: u64) -> Result<Outcome, Fault> {
        match *event {
            Event::Request { id, bytes, pool, has_failed, .. } => {
                if self.live.contains_key(&id) {
                    return Err(Fault::RequestedTwice { event: number, id });
                }
                if self.is_refused(bytes, pool) {
                    self.fail(bytes, number);
                    return Ok(if has_failed { Outcome::Continues } else { Outcome::Fails });
                }
                if has_failed {
                    return Ok(Outcome::ServesRecordedFailure);
                }
                self.live.insert(id, (bytes, pool));
                self.used = self.used.saturating_add(bytes);
                if pool == 0 {
                    self.gauges().into_iter().for_each(|gauge| gauge.add(bytes));
                    self.figures.allocated_at_peak = self.figures.allocated.peak;
                }
            }
            Event::Free { id, .. } => {
                let Some((bytes, pool)) = self.live.remove(&id) else { return Ok(Outcome::FreesUnknown) };
                self.used = self.used.saturating_sub(bytes);
                if pool == 0 {
                    self.gauges().into_iter().for_each(|gauge| gauge.remove(bytes));
                }
            }
            Event::Fraction(fraction) => self.set_fraction(fraction),
            Event::OtherMemory { bytes } => self.device.other_bytes = bytes,
            Event::Return { .. }
            | Event::EmptyCache { .. }
            | Event::PoolBegins { .. }
            | Event::PoolEnds { .. }
            | Event::ScopeBegins { .. }
            | Event::ScopeEnds { .. } => {}
        }
        Ok(Outcome::Continues)
    }

    fn gauges(&mut self) -> [&mut Gauge; 4] {
        let Figures { reserved, allocated, active, requested, .. } = &mut self.figures;
        [reserved, allocated, active, requested]
    }

    /// Returns whether a request certainly fails: it exceeds the process's share, which PyTorch checks, or the device.
    fn is_refused(&self, bytes: u64, pool: PoolId) -> bool {
        let exceeds = |live: u64, limit: u64| live.saturating_add(bytes) > limit;
        let share = self.allowed.is_some_and(|allowed| exceeds(self.used, allowed));
        let room = self.device.total_bytes.saturating_sub(self.device.other_bytes);
        share || pool == 0 && exceeds(self.figures.reserved.now, room)
    }

    fn fail(&mut self, bytes: u64, event: u64) {
        self.figures.ooms += 1;
        self.figures.failure.get_or_insert(Failure {
            event,
            rounded_bytes: bytes,
            segment_bytes: bytes,
            reserved_bytes: self.figures.reserved.now,
            allocated_bytes: self.figures.allocated.now,
        });
    }
}
