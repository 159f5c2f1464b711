//! Running out of memory: what was asked for, who had the device, and what the process itself held.
//!
//! A driver call that fails is no end: frameworks give back what they hold idle and try again. So an entry
//! begins as **pressure**; the framework's own word (`Oom`) with the driver's result makes it a true one of the device. The word
//! without a result is a limit of the **pool**, which did not ask. Whether the process survived is judged by what
//! follows, by who makes runs.
//!
//! A process without an agent says nothing: if it ends while its device is nearly full, that is **suspected**.
//!
//! ```text
//! idle      what pools hold and nobody uses
//! device    who had the device, of one reading
//! tell      which reading that is
//! ```
//!
//! Entries are few: what is said again and again is one, the most are capped, and the cost of taking one
//! (a copy of the cells, a look at every block) is spread over the records in between.

mod device;
mod idle;

pub(crate) use device::Listing;
pub use device::{Holder, OomDevice};
pub use idle::Idle;

use crate::process::Process;
use crate::rules::holdings::Holdings;
use crate::untrackable::Names;
use gpumem_model::oom::OomKind;
use gpumem_wire::{
    Body, Flags, FrameFormat, Layer, LayerState, OomOutcome, PHASE_SAID, Phase, Reading, Stamp,
};
use std::collections::VecDeque;
use std::sync::Arc;

/// One entry, as it is kept: names are ids.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub book: u8,
    pub stamp: Stamp,
    pub said: OomView,
    /// Refusals since somebody got memory.
    pub fresh: u64,
    /// Allocations of the process at the last refusal.
    pub at_allocations: u64,
}

/// Where and when it is said.
#[derive(Debug, Clone, Copy)]
struct Place {
    book: u8,
    thread: u32,
    time_ns: u64,
}

impl Entry {
    fn is_near(&self, place: Place) -> bool {
        self.book == place.book && place.time_ns.abs_diff(self.said.last_ns) <= TOGETHER_NS
    }
}

/// One time at which memory ran out.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OomView {
    /// What.
    pub kind: OomKind,
    /// When it was first said.
    pub time_ns: u64,
    /// When it was last said.
    pub last_ns: u64,
    /// How often: the same request at the same place within some seconds is one entry.
    pub count: u64,
    /// Failed driver calls.
    pub refusals: u64,
    /// What was asked for: of the pool where it gave up, else of the driver.
    pub asked_bytes: u64,
    /// What the driver was asked for, where it refused.
    pub driver_asked_bytes: Option<u64>,
    /// Free on the device right after the driver had refused.
    pub device_free_bytes: Option<u64>,
    /// The pool's own word of what it had handed out, and of what it held.
    pub pool_used_bytes: Option<u64>,
    /// See `pool_used_bytes`.
    pub pool_reserved_bytes: Option<u64>,
    /// How it ended, as far as the reporter knew.
    pub outcome: OomOutcome,
    /// The driver's result.
    pub result: u16,
    /// Tag of the request.
    pub tag: Option<Arc<str>>,
    /// Library that asked.
    pub library: Option<Arc<str>>,
    /// Frames, one a line, innermost first.
    pub stack: Option<Arc<str>>,
    /// When in a step.
    pub phase: Phase,
    /// The program's number of the step.
    pub step: Option<u64>,
    /// Sum of `amounts`.
    pub tracked_bytes: i64,
    /// What the process held, by index of `ProcessView::cells`.
    pub amounts: Arc<[i64]>,
    /// Older than the agent, as at the last sample.
    pub predates_bytes: Option<i64>,
    /// As at the last sample.
    pub untrackable_bytes: Option<i64>,
    /// Idle bytes of framework pools; absent where none reports its blocks.
    pub idle: Option<Idle>,
    /// Absent where NVML was not read.
    pub device: Option<OomDevice>,
    /// No framework of the process says when it gives up: a refusal may have been the end.
    pub is_unheard: bool,
    /// The thread that was told has got memory since: it went on.
    pub went_on: bool,
}

/// Refusals that are this near to each other, and to the word that follows, belong together: making room may take a while.
const TOGETHER_NS: u64 = 10_000_000_000;
/// Entries of a process: the first half, and the latest.
const MAX_ENTRIES: usize = 32;
/// Holders that are named.
const MAX_HOLDERS: usize = 16;
/// Stacks that are remembered, and how much of each.
const MAX_STACKS: usize = 128;
const MAX_STACK_BYTES: usize = 2048;
/// What the driver calls it.
const OUT_OF_MEMORY: u16 = 2;

/// What a process has said of running out.
#[derive(Debug, Default)]
pub(crate) struct Ooms {
    pub entries: Vec<Entry>,
    /// Times of the entries that were left out.
    pub dropped: u64,
    /// The newest entry waits for who had the device.
    pub wants_holders: bool,
    /// A reading up to then may be nearer to the newest entry; 0: none is waited for.
    pub reading_until_ns: u64,
    /// Text of recent stacks.
    stacks: VecDeque<(u32, Arc<str>)>,
    /// Records that must have come before the next composition is taken.
    next_at: u64,
    /// Whether the thread of an entry goes on is not known yet.
    pub is_watched: bool,
    pub step: Option<u64>,
}

impl Ooms {
    /// Remembers the text of a stack.
    pub fn name_stack(&mut self, id: u32, format: FrameFormat, frames: &[u8]) {
        if format != FrameFormat::Text || id == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&frames[..frames.len().min(MAX_STACK_BYTES)]);
        self.stacks.retain(|(known, _)| *known != id);
        if self.stacks.len() >= MAX_STACKS {
            self.stacks.pop_front();
        }
        self.stacks.push_back((id, text.into()));
    }

    /// Only entries whose end is not known yet, and what comes.
    pub fn restart(&mut self, now_ns: u64) {
        self.entries.retain(|entry| now_ns.saturating_sub(entry.said.last_ns) < TOGETHER_NS);
        self.dropped = 0;
        self.wants_holders &= !self.entries.is_empty();
    }

    /// Another program numbers its own.
    pub fn forget_stacks(&mut self) {
        self.stacks.clear();
    }

    fn stack(&self, id: u32) -> Option<Arc<str>> {
        self.stacks.iter().find(|(known, _)| *known == id && id != 0).map(|(_, text)| text.clone())
    }

    pub fn view(&self, names: &Names<'_>) -> Vec<(usize, OomView)> {
        let named = |entry: &Entry| OomView {
            tag: names.tag(entry.stamp.tag),
            library: names.library(entry.stamp.module),
            ..entry.said.clone()
        };
        self.entries.iter().map(|entry| (usize::from(entry.book), named(entry))).collect()
    }

    /// A thread got memory.
    #[cold]
    pub fn went_on(&mut self, stamp: &Stamp) {
        let waiting = |entry: &&mut Entry| !entry.said.went_on && entry.said.kind != OomKind::Pressure;
        self.is_watched = false;
        for entry in self.entries.iter_mut().filter(waiting) {
            entry.said.went_on = entry.stamp.thread == stamp.thread;
            self.is_watched |= !entry.said.went_on;
        }
    }

    /// The newest entry if it is of the same time.
    fn newest(&mut self, place: Place) -> Option<&mut OomView> {
        self.entries.last_mut().filter(|entry| entry.is_near(place)).map(|entry| &mut entry.said)
    }

    /// Refusals of the same thread that nothing has followed yet.
    fn pressure(&self, place: Place) -> Option<usize> {
        self.entries.iter().rposition(|entry| {
            entry.said.kind == OomKind::Pressure && entry.stamp.thread == place.thread && entry.is_near(place)
        })
    }

    pub fn push(&mut self, entry: Entry) {
        if self.entries.len() >= MAX_ENTRIES {
            let oldest = self.entries.iter().position(|entry| entry.said.kind == OomKind::Pressure);
            let dropped = self.entries.remove(oldest.unwrap_or(MAX_ENTRIES / 2));
            self.dropped = self.dropped.saturating_add(dropped.said.count);
        }
        self.entries.push(entry);
        self.wants_holders = true;
    }
}

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

impl Holdings {
    /// The phase in which a thread asks for memory that it does not get, where its frames name none. Loss and glue belong to the pass
    /// that is under way, as in `list_at_birth`; a pass is over for a thread that runs forward passes and is in no backward node.
    pub fn phase_of_request(&self, book: u8, thread: u32) -> Phase {
        let roles = &self.roles[usize::from(book)];
        match (self.phases.said, roles.now) {
            (Phase::Optimizer, _) => Phase::Optimizer,
            (said, _) if !self.phases.stamped => said,
            (_, Phase::Forward) => Phase::Forward,
            (_, Phase::Evaluation) => Phase::Evaluation,
            (_, Phase::Backward) if roles.is_backward_thread(thread) => Phase::Backward,
            (Phase::Setup, Phase::Unknown) => Phase::Setup,
            (_, Phase::Unknown) if !roles.is_trained && !self.phases.stepped => Phase::Unknown,
            _ => Phase::Between,
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
        let time_ns = if stamp.time_ns == 0 { self.applied_ns } else { stamp.time_ns };
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
            is_unheard: !self.layers.is(Layer::OutOfMemory, LayerState::Active),
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
        said.tracked_bytes = self.holdings.books[book].tracked;
        said.amounts = self.holdings.books[book].amounts().into();
        let sample = self.accounts[book].complete.as_ref();
        said.untrackable_bytes = sample.and_then(|sample| sample.untrackable_bytes());
        said.predates_bytes = if self.coverage.late { self.accounts[book].predates } else { Some(0) };
        said.idle = idle::idle(&self.holdings, newest.book);
        self.ooms.wants_holders = true;
        let cost = ((self.holdings.rows() + self.holdings.cells.keys.len()) / 16) as u64;
        self.ooms.next_at = self.coverage.events.saturating_add(cost.min(100_000));
    }
}
