//! List of a process's out-of-memory (OOM) entries.

use crate::untrackable::event::Names;
use gpumem_model::keeper::Keeper;
use gpumem_model::oom::{Fate, Oom, OomKind};
use gpumem_wire::{FrameFormat, Stamp};
use std::collections::VecDeque;

/// An out-of-memory (OOM) entry. [`Ooms::view`] fills in tag and library of `record` from the stamp.
#[derive(Debug, Clone)]
pub(crate) struct OomEntry {
    pub book: u8,
    pub stamp: Stamp,
    /// The OOM as runs store it. Its fate is open, or [`Fate::Survived`] if the reporting thread has got memory since.
    pub record: Oom,
    /// Number of failed driver calls since the process last got memory from the driver.
    pub new_refusals: u64,
    /// Number of the framework's last record of this failure; 0 for none.
    pub failed_seq: u64,
    /// The process's count of allocations at the last failed driver call.
    pub at_allocations: u64,
}

/// Book, thread and time of a failed request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestPlace {
    pub book: u8,
    pub thread: u32,
    pub time_ns: u64,
}

impl OomEntry {
    /// Whether a request is on the same device and close in time.
    pub fn is_near(&self, place: RequestPlace) -> bool {
        self.book == place.book && place.time_ns.abs_diff(self.record.last_ns) <= TOGETHER_NS
    }
}

/// Maximum time (ns) between failed driver calls and a framework's report of the same OOM. A framework may need seconds to free
/// memory before it gives up.
const TOGETHER_NS: u64 = 10_000_000_000;

/// Maximum time (ns) between two entries of which the later one gets the amounts by cell of the earlier one. After that time, all
/// cells may be copied again.
pub(crate) const SAME_NS: u64 = 1_000_000_000;

/// Maximum number of entries of a process; of more, the oldest pressure entries are dropped, else those in the middle.
const MAX_ENTRIES: usize = 32;

/// Maximum number of reports on keepers whose failed request is not recorded yet. An agent sends three.
const MAX_KEEPERS: usize = 4;

/// Maximum number of stacks that are kept, and maximum bytes of each: as many as an agent sends.
const MAX_STACKS: usize = 128;
const MAX_STACK_BYTES: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Ooms {
    pub entries: Vec<OomEntry>,
    /// Number of out-of-memory reports whose entries were dropped.
    pub dropped: u64,
    /// Whether the newest entry still lacks the processes that held its device.
    pub wants_holders: bool,
    /// Whether the next NVML reading may be nearer to the newest entry than the one used.
    pub awaits_reading: bool,
    pub stacks: VecDeque<(u32, String)>,
    /// Names that keep tensors, by the number of a record of a failed request that has not come yet.
    keepers: VecDeque<(u64, Vec<Keeper>)>,
    /// Number of the process's records at which the bytes of all cells may be copied again.
    pub next_copy_at: u64,
    /// Time (ns) of the entry that got the last copy.
    pub copied_ns: u64,
    /// Whether that entry is a refused driver call.
    pub is_copy_of_refusal: bool,
    /// Whether the thread of an entry may still get memory, so that the entry counts as survived.
    pub is_watched: bool,
    /// Number of the current training step, as the program counts.
    pub step: Option<u64>,
}

impl Ooms {
    pub fn name_stack(&mut self, id: u32, format: FrameFormat, frames: &[u8]) {
        if format != FrameFormat::Text || id == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&frames[..frames.len().min(MAX_STACK_BYTES)]);
        self.stacks.retain(|(stack, _)| *stack != id);
        if self.stacks.len() >= MAX_STACKS {
            self.stacks.pop_front();
        }
        self.stacks.push_back((id, text.into_owned()));
    }

    /// Adds the names that keep tensors to the entry of the failed request that is record `oom_seq`. Names may come before it.
    pub fn add_keepers(&mut self, oom_seq: u64, keepers: Vec<Keeper>) {
        if oom_seq == 0 {
            return;
        }
        match self.entries.iter_mut().rev().find(|entry| entry.failed_seq == oom_seq) {
            Some(entry) => entry.record.keepers = keepers,
            None => {
                self.keepers.truncate(MAX_KEEPERS - 1);
                self.keepers.push_front((oom_seq, keepers));
            }
        }
    }

    /// Returns the names that came before record `oom_seq` of a failed request.
    pub fn early_keepers(&mut self, oom_seq: u64) -> Option<Vec<Keeper>> {
        let at = self.keepers.iter().position(|(seq, _)| *seq == oom_seq)?;
        self.keepers.remove(at).map(|(_, keepers)| keepers)
    }

    /// Removes entries whose outcome (fatal or survived) is decided by now.
    pub fn restart(&mut self, now_ns: u64) {
        self.entries.retain(|entry| now_ns.saturating_sub(entry.record.last_ns) < TOGETHER_NS);
        self.dropped = 0;
        self.wants_holders &= !self.entries.is_empty();
    }

    pub fn stack(&self, id: u32) -> Option<String> {
        self.stacks.iter().find(|(stack, _)| *stack == id && id != 0).map(|(_, text)| text.clone())
    }

    /// Returns the OOM records, each with the index of its book; `allocations` is the process's count of driver allocations.
    pub fn view(&self, names: &Names<'_>, allocations: u64) -> Vec<(usize, Oom)> {
        let named = |entry: &OomEntry| Oom {
            tag: names.tag(entry.stamp.tag),
            library: names.library(entry.stamp.module),
            is_stalled: entry.at_allocations == allocations,
            ..entry.record.clone()
        };
        self.entries.iter().map(|entry| (usize::from(entry.book), named(entry))).collect()
    }

    /// Marks a thread's out-of-memory entries as survived, because the thread got memory afterwards. Leaves out pressure entries
    /// whose failure a framework would report.
    #[cold]
    pub fn note_progress(&mut self, stamp: &Stamp) {
        self.is_watched = false;
        for OomEntry { record, stamp: request, .. } in &mut self.entries {
            if record.fate == Fate::Survived || record.kind == OomKind::Pressure && !record.is_unheard {
                continue;
            }
            if request.thread == stamp.thread {
                record.fate = Fate::Survived;
            } else {
                self.is_watched = true;
            }
        }
    }

    /// Returns the newest entry if it is on the same device as the request and close in time.
    pub fn newest(&mut self, place: RequestPlace) -> Option<&mut Oom> {
        self.entries.last_mut().filter(|entry| entry.is_near(place)).map(|entry| &mut entry.record)
    }

    /// Returns the index of the latest pressure entry (failed driver calls only) of the same thread that is close in time.
    pub fn pressure(&self, place: RequestPlace) -> Option<usize> {
        self.entries.iter().rposition(|entry| {
            entry.record.kind == OomKind::Pressure
                && entry.stamp.thread == place.thread
                && entry.is_near(place)
        })
    }

    /// Copies the amounts of an earlier entry close in time to the newest. Reading them again so soon would cost too much.
    pub fn reuse_amounts(&mut self) {
        let Some((newest, earlier)) = self.entries.split_last_mut() else { return };
        let is_near = |entry: &&OomEntry| {
            entry.book == newest.book
                && !entry.record.amounts.is_empty()
                && entry.record.last_ns.abs_diff(newest.record.time_ns) <= SAME_NS
        };
        let Some(OomEntry { record: from, .. }) = earlier.iter().rev().find(is_near) else { return };
        let to = std::mem::take(&mut newest.record);
        newest.record = Oom {
            tracked_bytes: from.tracked_bytes,
            amounts: from.amounts.clone(),
            predates_bytes: from.predates_bytes,
            untrackable_bytes: from.untrackable_bytes,
            idle_bytes: from.idle_bytes,
            idle_pieces: from.idle_pieces,
            largest_idle_bytes: from.largest_idle_bytes,
            is_expandable: from.is_expandable,
            is_partial: from.is_partial,
            ..to
        };
    }

    pub fn push(&mut self, entry: OomEntry) {
        if self.entries.len() >= MAX_ENTRIES {
            let oldest = self.entries.iter().position(|entry| entry.record.kind == OomKind::Pressure);
            let dropped = self.entries.remove(oldest.unwrap_or(MAX_ENTRIES / 2));
            self.dropped = self.dropped.saturating_add(dropped.record.count);
        }
        self.entries.push(entry);
        self.wants_holders = true;
    }
}
