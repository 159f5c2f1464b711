//! Formats the result as text and as JSON.

use super::model::Model;
use super::trials::{Recorded, Trial};
use gpumem_model::escape::{self, escape};
use gpumem_model::units::{Unit, plural, signed, thousands};
use gpumem_replay::{Figures, Release};
use gpumem_report::table::Table;
use serde_json::{Value, json};
use std::path::Path;

/// Largest difference of peaks that was measured with sizes of blocks instead of requests, see docs/whatif.md.
const BLOCK_SIZES_OFF: &str = "17 %";
/// Version of the JSON document.
const SCHEMA: u32 = 1;

/// Answer for one device.
pub(super) struct Shown<'a> {
    pub(super) recorded: &'a Recorded,
    /// Replays under other settings, the best first.
    pub(super) trials: &'a [Trial],
    pub(super) models: Vec<&'a Model<'a>>,
    pub(super) file: &'a Path,
    pub(super) release: Release,
    /// Whether the user named the release of PyTorch (`--torch`).
    pub(super) is_release_known: bool,
    /// Whether the text names the device.
    pub(super) names_gpu: bool,
    /// Device memory in bytes that the user assumes; `None` for that of the recording.
    pub(super) memory: Option<u64>,
}

fn amount(bytes: u64) -> String {
    Unit::for_largest(signed(bytes)).amount_with_name(signed(bytes))
}

/// Returns the answers for each device as text, in the order of their numbers.
pub(super) fn text(devices: &[Shown<'_>]) -> String {
    let mut devices: Vec<&Shown<'_>> = devices.iter().collect();
    devices.sort_by_key(|shown| shown.recorded.requests.device);
    devices.into_iter().map(Shown::text).collect::<Vec<_>>().join("\n")
}

/// Returns the answer for the first device as a JSON document, with those for others in a list.
pub(super) fn json(devices: &[Shown<'_>]) -> String {
    let mut answers: Vec<Value> = devices.iter().map(Shown::json).collect();
    let others = answers.split_off(1);
    answers[0]["other_gpus"] = others.into();
    escape::json(&answers[0])
}

impl Shown<'_> {
    fn text(&self) -> String {
        let own = &self.recorded.own;
        let is_same = |trial: &&Trial| trial.figures == own.figures;
        let different = self.trials.iter().filter(|trial| !is_same(trial));
        let rows: Vec<&Trial> = std::iter::once(own).chain(different).collect();
        let largest = rows.iter().map(|trial| signed(trial.figures.reserved.peak)).max();
        let unit = Unit::for_largest(largest.unwrap_or(0));
        let in_unit = |bytes: u64| unit.amount_with_name(signed(bytes));
        let mut table = Table::of_numbers(0, 6);
        let head = ["RESERVED", "ALLOCATED", "CACHED", "SEGMENTS", "DRIVER CALLS", "RETRIES"];
        table.row_with_note(head, "SETTINGS");
        for trial in rows {
            let Figures {
                reserved, allocated_at_peak, segments, device_allocs, device_frees, retries, ..
            } = trial.figures;
            let cells = match trial.is_bound() {
                true => {
                    let unknown = || "-".to_owned();
                    let least = format!(">= {}", in_unit(reserved.peak));
                    [least, unknown(), unknown(), unknown(), unknown(), unknown()]
                }
                false => [
                    in_unit(reserved.peak),
                    in_unit(allocated_at_peak),
                    in_unit(reserved.peak - allocated_at_peak),
                    thousands(segments.peak),
                    thousands(device_allocs + device_frees),
                    thousands(retries),
                ],
            };
            table.row_with_note(cells, &self.name(trial));
        }
        let same: Vec<_> = self.trials.iter().filter(is_same).map(|trial| escape(&trial.changes)).collect();
        let same =
            if same.is_empty() { String::new() } else { format!("No difference: {}\n", same.join("; ")) };
        format!(
            "What PyTorch {}'s allocator would have reserved{}: {}, {}{}\n\n{}{same}\n\
             Bytes are those at the moment of the highest reserved amount. Cached bytes are free blocks that the allocator kept.\n{}{}\n\
             {}\n{}\n",
            self.release,
            if self.names_gpu { format!(" on GPU {}", self.recorded.requests.device) } else { String::new() },
            escape(&self.file.display().to_string()),
            plural(self.recorded.requests.count(), "request"),
            self.memory(),
            table.text(),
            self.record_stream(unit),
            self.models.iter().map(|model| model.text(unit)).collect::<String>(),
            self.conclusion(),
            self.accuracy(),
        )
    }

    /// Returns the range of the recorded and the best peak, if the program used `record_stream`.
    fn record_stream(&self, unit: Unit) -> String {
        let own = &self.recorded.own;
        if own.ends.is_none() {
            return String::new();
        }
        let mut ranges = Vec::new();
        for trial in std::iter::once(own).chain(self.trials.first()) {
            let (least, most) = trial.reserved_range();
            let name = if std::ptr::eq(trial, own) { "as recorded".into() } else { escape(&trial.changes) };
            let may_fail = if trial.may_fail() { ", may run out of memory" } else { "" };
            if least < most || trial.may_fail() {
                let (least, most) = (unit.amount(signed(least)), unit.amount_with_name(signed(most)));
                ranges.push(format!("{name} {least} to {most}{may_fail}"));
            }
        }
        let effect = if ranges.is_empty() { "no effect on a peak".to_owned() } else { ranges.join("; ") };
        format!("If record_stream returned memory at once, or only at a synchronisation: {effect}.\n")
    }

    fn memory(&self) -> String {
        match (self.memory, self.recorded.requests.capacity) {
            (Some(bytes), _) => format!(", with {} of memory", amount(bytes)),
            (None, Some(bytes)) => format!(", with {} of memory as recorded", amount(bytes)),
            (None, None) => String::new(),
        }
    }

    /// Returns the settings of a replay, and how the replay ended.
    fn name(&self, trial: &Trial) -> String {
        let name = match (std::ptr::eq(trial, &self.recorded.own), trial.text.is_empty()) {
            (true, true) => "as recorded (default settings)".to_owned(),
            (true, false) => format!("as recorded: {}", escape(&trial.text)),
            (false, _) => escape(&trial.changes),
        };
        match (&trial.figures.failure, trial.ended_at) {
            (Some(failure), _) => {
                let (after, place) = self.end(trial);
                format!("{name}: out of memory{after}, request of {}{place}", amount(failure.segment_bytes))
            }
            (None, Some(_)) => format!("{name}: the request that failed would have succeeded"),
            (None, None) => name,
        }
    }

    /// Returns the time from the recording's begin to the replay's end, and the program's line that made the last request.
    fn end(&self, trial: &Trial) -> (String, String) {
        let requests = &self.recorded.requests;
        let event = trial.ended_at.or(trial.figures.failure.map(|failure| failure.event as usize));
        let begin = requests.times_us.iter().find(|time| **time > 0);
        let end = event.and_then(|event| requests.times_us.get(event));
        let after = match (begin, end) {
            (Some(begin), Some(end)) if end >= begin => format!(" after {:.1} s", (end - begin) as f64 / 1e6),
            _ => String::new(),
        };
        let place = event.and_then(|event| requests.place(event));
        (after, place.map(|place| format!(" at {}", escape(&place))).unwrap_or_default())
    }

    fn conclusion(&self) -> String {
        let bound = self.trials.iter().find(|trial| trial.is_bound()).map(Self::bound).unwrap_or_default();
        let Some(best) = self.trials.first().filter(|trial| !trial.is_bound()) else {
            return match bound.is_empty() {
                true => "This release has none of the settings that are tried.".into(),
                false => bound.trim_end().to_owned(),
            };
        };
        format!("{bound}{}", self.best(best))
    }

    /// Returns the reason for the lower bound of a trial.
    fn bound(trial: &Trial) -> String {
        let fails = if trial.fails() { "Memory runs out" } else { "The program may need more" };
        format!(
            "backend:cudaMallocAsync is not replayed, because CUDA does not document how its pool grows: {} is what the program had \
             requested and not freed. {fails}.\n",
            amount(trial.figures.reserved.peak)
        )
    }

    fn best(&self, best: &Trial) -> String {
        let own = &self.recorded.own;
        let line = format!("{}={}", super::variable(self.release), escape(&best.text));
        if best.fails() {
            return "Memory runs out under all of these settings.".into();
        }
        if own.fails() {
            return format!("The request that failed fits with:  {line}");
        }
        let (before, after) = (own.figures.reserved.peak, best.figures.reserved.peak);
        let requests = &self.recorded.requests;
        // A saving that is not above the error of the replay is not known. The error is large if the peak is older than the history.
        let error = self.recorded.error_bytes();
        if error > 0 && error >= before.saturating_sub(after) {
            let more = if requests.is_recording() { "" } else { ", with a larger max_entries" };
            let remedy = format!(" Record from the start of the program{more}.");
            return format!(
                "No setting is advised: the replay is off by {}, and the largest saving is {}.{}",
                amount(error),
                amount(before.saturating_sub(after)),
                if requests.older.0 > 0 { remedy.as_str() } else { "" }
            );
        }
        if after >= before {
            return "None of these settings reserves less.".into();
        }
        let percent = (before - after) as f64 * 100.0 / before as f64;
        format!("Least: {} instead of {} ({percent:.1} % less) with:  {line}", amount(after), amount(before))
    }

    fn accuracy(&self) -> String {
        let Recorded { requests, own, is_exact } = self.recorded;
        let calls = requests.driver_calls.0 + requests.driver_calls.1;
        let (replayed, recorded) = (own.figures.reserved.peak, requests.reserved.0);
        let mut text = match (is_exact, replayed == recorded) {
            (true, _) => format!(
                "Exact: under the recorded settings, the replay has the recorded peak and all {}.",
                plural(calls, "driver call")
            ),
            (false, true) => {
                "Estimate: under the recorded settings, the replay has the recorded peak, but not the same driver calls."
                    .to_owned()
            }
            (false, false) => format!(
                "Estimate: under the recorded settings, the replay reserves {} bytes at most, and the program had {}.",
                thousands(replayed),
                thousands(recorded)
            ),
        };
        let source = if requests.is_recording() { "recording" } else { "history" };
        if requests.block_sizes > 0 {
            text += &format!(
                " For {} of {}, the recording has only the size of the block, so other settings may be off by {BLOCK_SIZES_OFF}.",
                thousands(requests.block_sizes),
                plural(self.recorded.requests.count(), "request"),
            );
        }
        for caveat in &requests.caveats {
            text += &format!(" Only a part was read: {}.", escape(caveat));
        }
        if requests.older.0 > 0 {
            let (bytes, blocks) = (amount(requests.older.1), plural(requests.older.0, "block"));
            text += &format!(
                " The {source} began late: {bytes} in {blocks} are older, and their places are assumed."
            );
        }
        if !requests.names_pools && requests.has_private_pools {
            text += &format!(" The {source} does not tell which requests belong to CUDA graphs or MemPools.");
        }
        if requests.is_recording() && !self.is_release_known {
            text += " The recording does not state PyTorch's release: --torch names it.";
        }
        if self.release < Release::new(12) {
            text += " Before 2.12, PyTorch chooses among equal blocks by address, so other settings may be off by a few percent.";
        }
        if !self.release.is_known() {
            let known = Release::LAST;
            text +=
                &format!(" The rules of PyTorch {} are not known; those of {known} were used.", self.release);
        }
        text
    }

    fn json(&self) -> Value {
        let requests = &self.recorded.requests;
        let trial = |trial: &Trial| {
            let figures = &trial.figures;
            let exact = |value: u64| (!trial.is_bound()).then_some(value);
            let failure = trial.figures.failure.map(|failure| {
                json!({
                    "event": failure.event,
                    "place": requests.place(failure.event as usize),
                    "rounded_bytes": failure.rounded_bytes,
                    "segment_bytes": failure.segment_bytes,
                    "reserved_bytes": failure.reserved_bytes,
                    "allocated_bytes": failure.allocated_bytes,
                })
            });
            let (least, most) = trial.reserved_range();
            json!({
                "settings": trial.text,
                "peak_reserved_bytes": exact(figures.reserved.peak),
                "peak_reserved_range": [Some(least), exact(most)],
                "peak_allocated_bytes": exact(figures.allocated.peak),
                "allocated_at_peak_bytes": exact(figures.allocated_at_peak),
                "peak_segments": exact(figures.segments.peak),
                "driver_allocations": exact(figures.device_allocs),
                "driver_frees": exact(figures.device_frees),
                "retries": exact(figures.retries),
                "failure": failure,
            })
        };
        let model = |model: &&Model<'_>| {
            let (least, most) = model.range();
            json!({
                "name": model.scale.name,
                "factor": model.scale.factor,
                "share_without_role": model.without_role,
                "peak_reserved_range": [least, most],
                "fails": model.ends.each_ref().map(|figures| figures.failure.is_some()),
            })
        };
        let trials: Vec<Value> = self.trials.iter().map(trial).collect();
        json!({
            "schema": SCHEMA,
            "release": self.release.to_string(),
            "gpu": requests.device,
            "requests": self.recorded.requests.count(),
            "block_sizes": requests.block_sizes,
            "is_exact": self.recorded.is_exact,
            "caveats": requests.caveats,
            "older_blocks": requests.older.0,
            "older_bytes": requests.older.1,
            "recorded": {
                "peak_reserved_bytes": requests.reserved.0,
                "driver_allocations": requests.driver_calls.0,
                "driver_frees": requests.driver_calls.1,
            },
            "own": trial(&self.recorded.own),
            "trials": trials,
            "models": self.models.iter().map(model).collect::<Vec<Value>>(),
        })
    }
}
