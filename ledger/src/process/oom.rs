//! Records of a process that memory ran out.

use crate::oom::records::{Entry, OomView, Place};
use crate::process::Process;
use gpumem_model::oom::OomKind;
use gpumem_wire::{Body, Flags, Layer, LayerState, OomOutcome, PHASE_SAID, Phase, Reading, Stamp};

/// What the driver calls it.
const OUT_OF_MEMORY: u16 = 2;

/// A record of the three that tell of it, in one form.
#[derive(Debug, Clone, Copy)]
struct Said {
    /// What the thread's frames and nodes say; `None` where nothing is said of that, and of `AllocFailed`.
    phase: Option<Phase>,
    is_refusal: bool,
    bytes: u64,
    device_free: Reading,
    pool: (Reading, Reading),
    outcome: OomOutcome,
    result: u16,
}

impl Said {
    fn of(body: &Body<'_>) -> Option<Self> {
        let unknown = (Reading::ABSENT, Reading::ABSENT);
        let refused = |bytes, device_free, result| Said {
            phase: None,
            is_refusal: true,
            bytes,
            device_free,
            pool: unknown,
            outcome: OomOutcome::Unknown,
            result,
        };
        match *body {
            Body::AllocFailed { bytes, device_free_bytes, result: OUT_OF_MEMORY, .. } => {
                Some(refused(bytes, device_free_bytes, OUT_OF_MEMORY))
            }
            Body::Pressure { bytes, device_free_bytes } => Some(refused(bytes, device_free_bytes, 0)),
            Body::Oom { bytes, pool_used_bytes, pool_reserved_bytes, outcome, result } => Some(Said {
                phase: None,
                is_refusal: false,
                bytes,
                device_free: Reading::ABSENT,
                pool: (pool_used_bytes, pool_reserved_bytes),
                outcome,
                result,
            }),
            _ => None,
        }
    }
}

impl Process {
    /// Memory was handed out: whoever had run out of it goes on.
    #[inline(always)]
    pub fn note_going_on(&mut self, stamp: &Stamp) {
        if self.ooms.is_watched && !stamp.flags.has(Flags::RESTATED) {
            self.ooms.went_on(stamp);
        }
    }

    /// Takes a record that memory ran out.
    #[cold]
    pub fn run_out(&mut self, stamp: &Stamp, body: &Body<'_>) {
        let Some(mut said) = Said::of(body) else { return };
        let book = self.book(stamp.device);
        said.phase = self.phase_of_request(book, stamp, body);
        let time_ns = self.stream.time_of(stamp);
        let place = Place { book, thread: stamp.thread, time_ns };
        if said.is_refusal {
            self.refused(&said, stamp, place);
        } else if said.outcome == OomOutcome::Unknown && said.result == OUT_OF_MEMORY {
            // Nobody can say whether it was the end (cudaMallocAsync): what follows will.
            if self.ooms.pressure(place).is_none() {
                self.refused(&Said { is_refusal: true, ..said }, stamp, place);
            }
            if let Some(at) = self.ooms.pressure(place) {
                self.ooms.entries[at].said.is_unheard = true;
            }
        } else {
            self.gave_up(&said, stamp, place);
        }
    }

    /// The driver refused.
    fn refused(&mut self, said: &Said, stamp: &Stamp, place: Place) {
        let allocations = self.coverage.allocations;
        if let Some(at) = self.ooms.pressure(place) {
            let Entry { said: entry, fresh, at_allocations, .. } = &mut self.ooms.entries[at];
            entry.last_ns = place.time_ns;
            entry.device_free_bytes = said.device_free.0.or(entry.device_free_bytes);
            entry.phase = said.phase.unwrap_or(entry.phase);
            // A mark of the framework follows the failed call: one refusal, said twice.
            if said.result == 0 {
                return;
            }
            // Once somebody got memory the last one was survived; or it was another's end.
            if *at_allocations != allocations || *fresh == 0 {
                entry.count += 1;
                (*fresh, *at_allocations, entry.asked_bytes) = (0, allocations, 0);
            }
            *fresh += 1;
            entry.refusals += 1;
            entry.asked_bytes = entry.asked_bytes.max(said.bytes);
            entry.driver_asked_bytes = Some(entry.asked_bytes);
            return;
        }
        if let (false, Some(newest)) = (self.is_affordable(), self.ooms.newest(place)) {
            newest.refusals += 1;
            newest.last_ns = place.time_ns;
            return;
        }
        self.enter(OomKind::Pressure, said, stamp, place);
    }

    /// A framework gave up.
    fn gave_up(&mut self, said: &Said, stamp: &Stamp, place: Place) {
        let pressure = if said.result == 0 { None } else { self.ooms.pressure(place) };
        let mut refusals = (0, None, None);
        let mut was_looked_at = false;
        if let Some(at) = pressure {
            let entry = &mut self.ooms.entries[at];
            let view = &mut entry.said;
            refusals = (entry.fresh, view.driver_asked_bytes, view.device_free_bytes);
            (view.count, view.refusals) = (view.count - 1, view.refusals.saturating_sub(entry.fresh));
            entry.fresh = 0;
            if view.count == 0 {
                // It becomes what follows, and so does the look that was taken for it.
                was_looked_at = !self.ooms.entries.remove(at).said.amounts.is_empty();
            }
        }
        // The refusal's own look leaves time for that of its end: else another request's end would be taken for it.
        if was_looked_at {
            self.ooms.next_at = 0;
        }
        let kind = if said.result == 0 { OomKind::Pool } else { OomKind::Device };
        let is_affordable = self.is_affordable();
        let again = self.ooms.entries.iter_mut().rev().find(|entry| {
            let is_same = entry.said.asked_bytes == said.bytes
                && entry.stamp.tag == stamp.tag
                && said.phase.is_none_or(|phase| phase == entry.said.phase);
            entry.said.kind == kind && entry.is_near(place) && (is_same || !is_affordable)
        });
        // As often as a program tries; or more often than there is time to look.
        if let Some(Entry { said: entry, .. }) = again {
            entry.count += 1;
            entry.last_ns = place.time_ns;
            entry.refusals += refusals.0;
            entry.went_on = false;
            self.ooms.is_watched = true;
            return;
        }
        self.enter(kind, said, stamp, place);
        self.ooms.is_watched = true;
        if let Some(Entry { said: entry, .. }) = self.ooms.entries.last_mut() {
            (entry.refusals, entry.driver_asked_bytes, entry.device_free_bytes) = refusals;
        }
    }

    /// The phase of a request that failed, if the record says it: see `Body::Pressure`.
    fn phase_of_request(&self, book: u8, stamp: &Stamp, body: &Body<'_>) -> Option<Phase> {
        let code = match body {
            Body::Pressure { .. } | Body::Oom { .. } if stamp.context & PHASE_SAID != 0 => {
                stamp.context & !PHASE_SAID
            }
            _ => return None,
        };
        match Phase::from_code(u8::try_from(code).unwrap_or(0)) {
            Phase::Unknown => Some(self.holdings.phase_of_request(book, stamp.thread)),
            phase => Some(phase),
        }
    }

    fn is_affordable(&self) -> bool {
        self.coverage.events >= self.ooms.next_at
    }

    /// A new entry.
    fn enter(&mut self, kind: OomKind, said: &Said, stamp: &Stamp, place: Place) {
        let is_refusal = kind == OomKind::Pressure;
        let view = OomView {
            kind,
            time_ns: place.time_ns,
            last_ns: place.time_ns,
            count: 1,
            refusals: u64::from(is_refusal),
            asked_bytes: said.bytes,
            driver_asked_bytes: is_refusal.then_some(said.bytes),
            device_free_bytes: said.device_free.0,
            pool_used_bytes: said.pool.0.0,
            pool_reserved_bytes: said.pool.1.0,
            outcome: said.outcome,
            result: said.result,
            stack: self.ooms.stack(stamp.stack),
            phase: said.phase.unwrap_or_else(|| self.holdings.phase_of_request(place.book, place.thread)),
            step: self.ooms.step,
            is_unheard: !self.program.layers.is(Layer::OutOfMemory, LayerState::Active),
            ..OomView::default()
        };
        let at_allocations = self.coverage.allocations;
        self.ooms.push(Entry { book: place.book, stamp: *stamp, said: view, fresh: 1, at_allocations });
        if self.is_affordable() {
            self.look_around();
        }
    }

    /// What the process holds now, into the newest entry.
    fn look_around(&mut self) {
        let Some(newest) = self.ooms.entries.last_mut() else { return };
        let book = usize::from(newest.book);
        let said = &mut newest.said;
        said.tracked_bytes = self.holdings.books()[book].tracked;
        said.amounts = self.holdings.books()[book].amounts().into();
        let sample = self.accounts[book].complete.as_ref();
        said.untrackable_bytes = sample.and_then(|sample| sample.untrackable_bytes());
        said.predates_bytes = if self.coverage.late { self.accounts[book].predates } else { Some(0) };
        said.idle = self.holdings.idle(newest.book);
        self.ooms.wants_holders = true;
        let cost = ((self.holdings.rows() + self.holdings.cells().keys.len()) / 16) as u64;
        self.ooms.next_at = self.coverage.events.saturating_add(cost.min(100_000));
    }
}
