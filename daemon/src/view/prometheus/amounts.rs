//! Values of a process on a device that can be added to those of other processes. Processes without series of their own are added
//! up and written as one process. So the sum over a metric does not depend on how many processes have series of their own.

use super::families::{Labels, Series, families};
use super::names::{Named, REST};
use crate::stats::Family;
use crate::view::rows::ConsistentSample;
use crate::view::text::Label;
use gpumem_ledger::{AccountView, UntrackableParts};

const OF_DEVICE: &[&str] = &["gpu", "uuid", "pid", "start"];

families! {
    USED: gauge "gpumem_process_used_bytes" OF_DEVICE,
        "Bytes that NVML charges to the process.";
    UNAVAILABLE: gauge "gpumem_process_used_unavailable" &["gpu", "uuid", "pid", "start", "reason"],
        "1 while NVML does not report used bytes, with the reason.";
    PREDATES: gauge "gpumem_process_predates_bytes" OF_DEVICE,
        "Used bytes from before the agent started.";
    UNTRACKABLE: gauge "gpumem_process_untrackable_bytes" OF_DEVICE,
        "Used minus tracked minus predates: context, modules, rounding and unexplained bytes.";
    UNTRACKABLE_PART: gauge "gpumem_process_untrackable_part_bytes" &["gpu", "uuid", "pid", "start", "part"],
        "Untrackable by cause; the parts add up to it. context is measured, modules is an upper bound, local_memory, heaps and rounding are computed by models, unexplained is the rest.";
    TRACKED: gauge "gpumem_process_tracked_bytes" OF_DEVICE,
        "Bytes in live driver allocations at the time of the sample of used bytes.";
    CATEGORY: gauge "gpumem_process_category_bytes" &["gpu", "uuid", "pid", "start", "category"],
        "Tracked bytes by category; the categories add up to tracked.";
    TAG: gauge "gpumem_process_tag_bytes" &["gpu", "uuid", "pid", "start", "tag"],
        "Tracked bytes by tag: the largest tags at the peak, and (other) for the rest; they add up to tracked. Only if the setting metrics.tags, the number of tags, is above 0.";
}

/// Maximum number of series of one process on one device ([`Amounts`]), without categories and tags.
pub(super) const MAX_SERIES: usize = 6 + PARTS.len() - 1;

const PARTS: [&str; 6] = ["context", "modules", "local_memory", "heaps", "rounding", "unexplained"];

fn parts(parts: &UntrackableParts) -> [i64; 6] {
    [
        parts.context_bytes,
        parts.modules_bytes,
        parts.local_memory_bytes,
        parts.heaps_bytes,
        parts.rounding_bytes,
        parts.unexplained_bytes,
    ]
}

/// Bytes of one process on one device, or the sums of several processes. Unknown values are `None`.
#[derive(Debug, Default)]
pub(super) struct Amounts<'a> {
    used: Option<u64>,
    unavailable: Option<&'static str>,
    predates: Option<i64>,
    untrackable: Option<i64>,
    parts: Option<[i64; 6]>,
    tracked: Option<i64>,
    pub categories: Named<'a>,
    pub tags: Named<'a>,
}

impl Amounts<'_> {
    /// Returns the values of an account (a process on a device) at its last sample. Also returns the tracked bytes of each cell
    /// (memory with one tag, role and pool), for sums by category and tag. `covered`: the process has an agent.
    pub(crate) fn of(account: &AccountView, covered: bool) -> (Self, &[i64]) {
        let consistent = ConsistentSample::of(account);
        let gap = consistent.sample.and_then(|sample| Some((sample, sample.untrackable_bytes()?)));
        let (tracked, amounts) = consistent.tracked;
        let values = Amounts {
            used: consistent.used_bytes(),
            unavailable: consistent.absence,
            predates: gap.map(|(sample, _)| sample.predates_bytes),
            untrackable: gap.map(|(_, untrackable)| untrackable),
            parts: gap.and_then(|(sample, _)| sample.parts.as_ref().map(parts)),
            tracked: covered.then_some(tracked),
            ..Amounts::default()
        };
        (values, if covered { amounts } else { &[] })
    }
}

impl<'a> Amounts<'a> {
    /// Adds the values of another process. If some values are unknown, the sum of the known ones is a lower bound, and the reason
    /// stays.
    pub(crate) fn add(&mut self, other: Amounts<'a>) {
        let sum = |sum: &mut Option<i64>, more: Option<i64>| {
            if let Some(more) = more {
                *sum = Some(sum.unwrap_or(0).wrapping_add(more));
            }
        };
        if let Some(used) = other.used {
            self.used = Some(self.used.unwrap_or(0).saturating_add(used));
        }
        self.unavailable = self.unavailable.or(other.unavailable);
        sum(&mut self.predates, other.predates);
        sum(&mut self.untrackable, other.untrackable);
        sum(&mut self.tracked, other.tracked);
        if let Some(parts) = other.parts {
            let sums = self.parts.get_or_insert([0; 6]);
            sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum = sum.wrapping_add(part));
        }
        for (sums, more) in [(&mut self.categories, other.categories), (&mut self.tags, other.tags)] {
            more.0.into_iter().for_each(|(name, bytes)| sums.add(name, bytes));
        }
    }

    pub(crate) fn fold_tags(&mut self) {
        if !self.tags.0.is_empty() {
            let sum = self.tags.0.iter().map(|(_, bytes)| *bytes).fold(0, i64::wrapping_add);
            self.tags = Named(vec![(REST.into(), sum)]);
        }
    }

    pub(crate) fn write(&self, labels: &Labels, out: &mut Series) {
        out.add(&USED, labels, self.used);
        if let Some(reason) = self.unavailable {
            out.add_with(&UNAVAILABLE, labels, ("reason", Label::word(reason)), 1_u64);
        }
        out.add(&PREDATES, labels, self.predates);
        out.add(&UNTRACKABLE, labels, self.untrackable);
        out.add(&TRACKED, labels, self.tracked);
        for (part, bytes) in PARTS.iter().zip(self.parts.iter().flatten()) {
            out.add_with(&UNTRACKABLE_PART, labels, ("part", Label::word(part)), *bytes);
        }
        for (category, bytes) in &self.categories.0 {
            out.add_with(&CATEGORY, labels, ("category", category), *bytes);
        }
        for (tag, bytes) in &self.tags.0 {
            out.add_with(&TAG, labels, ("tag", tag), *bytes);
        }
    }
}
