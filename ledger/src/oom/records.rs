//! Out-of-memory entries of a process.

use crate::oom::device::OomDevice;
use crate::rows::pool::Idle;
use crate::untrackable::event::Names;
use gpumem_model::oom::OomKind;
use gpumem_wire::{FrameFormat, OomOutcome, Phase, Stamp};
use std::collections::VecDeque;
use std::sync::Arc;

/// An entry in internal form, with ids instead of names.
#[derive(Debug, Clone)]
pub(crate) struct OomEntry {
    pub book: u8,
    pub stamp: Stamp,
    pub view: OomView,
    /// Number of refusals since a thread last got memory.
    pub fresh: u64,
    /// The process's count of allocations at the last refusal.
    pub at_allocations: u64,
}

/// Where and when memory was requested.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestPlace {
    pub book: u8,
    pub thread: u32,
    pub time_ns: u64,
}

impl OomEntry {
    pub fn is_near(&self, place: RequestPlace) -> bool {
        self.book == place.book && place.time_ns.abs_diff(self.view.last_ns) <= TOGETHER_NS
    }
}

/// One out-of-memory event.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OomView {
    /// What ran out of memory.
    pub kind: OomKind,
    /// Time of the first report.
    pub time_ns: u64,
    /// Time of the last report.
    pub last_ns: u64,
    /// Number of reports: repeated failures of the same request at the same place within some seconds share one entry.
    pub count: u64,
    /// Failed driver calls.
    pub refusals: u64,
    /// Bytes requested: from the pool where it failed, else from the driver.
    pub asked_bytes: u64,
    /// Bytes requested from the driver, if it refused.
    pub driver_asked_bytes: Option<u64>,
    /// Free device bytes right after the driver refused.
    pub device_free_bytes: Option<u64>,
    /// Bytes that the pool had allocated, as it reports them.
    pub pool_used_bytes: Option<u64>,
    /// Bytes that the pool held, as it reports them.
    pub pool_reserved_bytes: Option<u64>,
    /// Outcome, as far as the reporter knew it.
    pub outcome: OomOutcome,
    /// The driver's result.
    pub result: u16,
    /// Tag of the request.
    pub tag: Option<Arc<str>>,
    /// Library that made the request.
    pub library: Option<Arc<str>>,
    /// Frames, one a line, innermost first.
    pub stack: Option<Arc<str>>,
    /// Phase of the step.
    pub phase: Phase,
    /// The program's number of the step.
    pub step: Option<u64>,
    /// Sum of `amounts`.
    pub tracked_bytes: i64,
    /// Bytes that the process held, by index of `ProcessView::cells`.
    pub amounts: Arc<[i64]>,
    /// Bytes allocated before the agent started, as of the last sample.
    pub predates_bytes: Option<i64>,
    /// Untrackable of the last sample.
    pub untrackable_bytes: Option<i64>,
    /// Idle bytes of framework pools; absent where none reports its blocks.
    pub idle: Option<Idle>,
    /// The device at that time; absent where NVML was not read.
    pub device: Option<OomDevice>,
    /// No framework of the process reports failures: a refusal may have been fatal.
    pub is_unheard: bool,
    /// The reporting thread has got memory since: the program continued.
    pub went_on: bool,
}

/// Maximum time between refusals, and between a refusal and a report, that belong together: a framework may take a while to free
/// memory.
const TOGETHER_NS: u64 = 10_000_000_000;

/// Maximum number of entries of a process: the first half, and the latest ones.
const MAX_ENTRIES: usize = 32;

/// Maximum number of stacks that are kept, and maximum bytes of each.
const MAX_STACKS: usize = 128;

const MAX_STACK_BYTES: usize = 2048;

/// Out-of-memory entries of a process.
#[derive(Debug, Default)]
pub(crate) struct Ooms {
    pub entries: Vec<OomEntry>,
    /// Number of reports in entries that were dropped.
    pub dropped: u64,
    /// The newest entry waits for the holders of its device.
    pub wants_holders: bool,
    /// A reading up to this time may be nearer to the newest entry; 0 if none is expected.
    pub reading_until_ns: u64,
    /// Text of recent stacks.
    stacks: VecDeque<(u32, Arc<str>)>,
    /// Number of records after which the next composition is taken.
    pub next_at: u64,
    /// For some entry it is undecided whether its thread continues.
    pub is_watched: bool,
    pub step: Option<u64>,
}

impl Ooms {
    /// Keeps the text of a stack.
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

    /// Drops entries whose outcome is decided.
    pub fn restart(&mut self, now_ns: u64) {
        self.entries.retain(|entry| now_ns.saturating_sub(entry.view.last_ns) < TOGETHER_NS);
        self.dropped = 0;
        self.wants_holders &= !self.entries.is_empty();
    }

    /// Drops all stacks, because another program has its own stack ids.
    pub fn forget_stacks(&mut self) {
        self.stacks.clear();
    }

    pub fn stack(&self, id: u32) -> Option<Arc<str>> {
        self.stacks.iter().find(|(known, _)| *known == id && id != 0).map(|(_, text)| text.clone())
    }

    pub fn view(&self, names: &Names<'_>) -> Vec<(usize, OomView)> {
        let named = |entry: &OomEntry| OomView {
            tag: names.tag(entry.stamp.tag),
            library: names.library(entry.stamp.module),
            ..entry.view.clone()
        };
        self.entries.iter().map(|entry| (usize::from(entry.book), named(entry))).collect()
    }

    /// Notes that a thread got memory.
    #[cold]
    pub fn went_on(&mut self, stamp: &Stamp) {
        let waiting = |entry: &&mut OomEntry| !entry.view.went_on && entry.view.kind != OomKind::Pressure;
        self.is_watched = false;
        for entry in self.entries.iter_mut().filter(waiting) {
            entry.view.went_on = entry.stamp.thread == stamp.thread;
            self.is_watched |= !entry.view.went_on;
        }
    }

    /// Returns the newest entry if the request belongs to it.
    pub fn newest(&mut self, place: RequestPlace) -> Option<&mut OomView> {
        self.entries.last_mut().filter(|entry| entry.is_near(place)).map(|entry| &mut entry.view)
    }

    /// Finds refusals of the same thread that no later record has resolved.
    pub fn pressure(&self, place: RequestPlace) -> Option<usize> {
        self.entries.iter().rposition(|entry| {
            entry.view.kind == OomKind::Pressure && entry.stamp.thread == place.thread && entry.is_near(place)
        })
    }

    pub fn push(&mut self, entry: OomEntry) {
        if self.entries.len() >= MAX_ENTRIES {
            let oldest = self.entries.iter().position(|entry| entry.view.kind == OomKind::Pressure);
            let dropped = self.entries.remove(oldest.unwrap_or(MAX_ENTRIES / 2));
            self.dropped = self.dropped.saturating_add(dropped.view.count);
        }
        self.entries.push(entry);
        self.wants_holders = true;
    }
}
