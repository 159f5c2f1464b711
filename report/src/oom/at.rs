//! `gpumemctl oom --at TIME --gpu N`: processes of a device around a time. Shows which processes ended, which ran out of memory
//! or may have, and which grew.

use super::{Entry, answer, entries, entry};
use crate::encode::object;
use crate::labels::{device_title, exit, label};
use crate::lines::count_processes;
use crate::rules::Groupings;
use crate::{Report, ooms};
use gpumem_model::ending::Ending;
use gpumem_model::run::{Clock, Device, Run, State};
use gpumem_model::time::Times;
use gpumem_model::units::Unit;
use gpumem_model::units::signed;
use std::collections::BTreeMap;

/// A wall-clock time, and how far before and after it events are searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeWindow {
    /// Nanoseconds since 1970.
    pub at_ns: i64,
    /// Searched time before and after `at_ns`, in nanoseconds.
    pub for_ns: i64,
}

/// A run with its id in the store.
#[derive(Debug, Clone)]
pub struct StoredRun {
    /// Id in the store, such as `r7`.
    pub id: Option<String>,
    /// The stored run.
    pub run: Run,
}

/// A process that ended or ran out of memory within the searched time, and when.
struct ProcessEnd<'r> {
    seen: &'r StoredRun,
    device: &'r Device,
    /// Wall-clock time of the last OOM in the window, or else of the end, in ns since 1970.
    time_ns: i64,
    entries: Vec<Entry<'r>>,
}

impl TimeWindow {
    /// Returns whether the run's process ended or ran out of memory within the searched time.
    pub fn concerns(self, run: &Run) -> bool {
        let times = ooms(run).map(|(_, oom)| wall_time_ns(run, oom.last_ns));
        times.chain([end_ns(run)]).any(|time_ns| self.contains(time_ns))
    }

    fn contains(self, time_ns: Option<i64>) -> bool {
        time_ns.is_some_and(|time_ns| time_ns.abs_diff(self.at_ns) <= self.for_ns.unsigned_abs())
    }
}

/// Converts a time of the run's clock to wall-clock time in ns since 1970; `None` if the run has no wall-clock time.
fn wall_time_ns(run: &Run, time_ns: u64) -> Option<i64> {
    match run.clock {
        Clock::Monotonic { wall_offset_ns } => signed(time_ns).checked_add(wall_offset_ns?),
        Clock::Lines => None,
    }
}

/// Returns the wall-clock time at which the process ended, in ns since 1970; `None` if it has not ended or this is unknown.
fn end_ns(run: &Run) -> Option<i64> {
    match run.state {
        State::Closed { time_ns, .. } => wall_time_ns(run, time_ns),
        _ => None,
    }
}

/// Returns the processes that ended or ran out of memory on the devices that `is_selected` selects, in the order of time.
fn found<'r>(
    seen: &'r [StoredRun],
    is_selected: &dyn Fn(&Device) -> bool,
    around: TimeWindow,
) -> Vec<ProcessEnd<'r>> {
    let mut found = Vec::new();
    for seen in seen {
        for device in seen.run.devices.iter().filter(|device| is_selected(device)) {
            let mut here = entries(&seen.run);
            here.retain(|entry| {
                let is_then = around.contains(wall_time_ns(&seen.run, entry.oom.last_ns));
                is_then && !entry.is_pressure() && entry.device.name == device.name
            });
            let last = here.last().and_then(|entry| wall_time_ns(&seen.run, entry.oom.last_ns));
            let ended = end_ns(&seen.run).filter(|ended| around.contains(Some(*ended)));
            if let Some(time_ns) = last.or(ended) {
                found.push(ProcessEnd { seen, device, time_ns, entries: here });
            }
        }
    }
    found.sort_by_key(|found| found.time_ns);
    found
}

/// Returns the text form. `hidden` counts the processes of other users whose runs the reader may not see.
pub fn text(
    seen: &[StoredRun],
    is_selected: &dyn Fn(&Device) -> bool,
    around: TimeWindow,
    hidden: &BTreeMap<String, usize>,
) -> String {
    let found = found(seen, is_selected, around);
    let mut lines: Vec<String> = Vec::new();
    let clock = Clock::Monotonic { wall_offset_ns: Some(0) };
    let time = |ns: i64| clock.time(u64::try_from(ns).unwrap_or(0));
    let devices = || seen.iter().flat_map(|seen| &seen.run.devices).filter(|device| is_selected(device));
    let title = devices().next().map_or("this GPU".to_owned(), device_title);
    let (from, to) = (around.at_ns.saturating_sub(around.for_ns), around.at_ns.saturating_add(around.for_ns));
    let (out_of_memory, others): (Vec<&ProcessEnd<'_>>, Vec<&ProcessEnd<'_>>) =
        found.iter().partition(|found| !found.entries.is_empty());
    let count = match found.len() {
        0 if !hidden.is_empty() => "no process of yours".to_owned(),
        0 => "no process".to_owned(),
        count => count_processes(count),
    };
    let (from, to) = (time(from), time(to));
    lines.push(format!("{title}, {from} to {to}: {count} ended or ran out of memory then"));
    for found in &out_of_memory {
        lines.push(String::new());
        let run = &found.seen.run;
        let id = found.seen.id.as_ref().map(|id| format!("  run {id}")).unwrap_or_default();
        let user = run.process.facts.get("user").map(|user| format!("  {user}")).unwrap_or_default();
        lines.push(format!("{}  pid {}{user}{id}", label(run), run.process.pid));
        let mut report = Report::new(run, Groupings::of_run(run), None);
        report.id.clone_from(&found.seen.id);
        let name = found.seen.id.clone().unwrap_or_else(|| run.process.pid.to_string());
        report.command = format!("gpumemctl report {name}");
        if let Some(entry) = found.entries.last() {
            lines.extend(answer::of_entry(&report, *entry, Ending::of(run).as_ref(), &[], Times::of(run)));
        }
        let more = found.entries.len().saturating_sub(1);
        if more > 0 {
            lines.push(format!("{more} more before it: gpumemctl oom {}", run.process.pid));
        }
    }
    if !others.is_empty() {
        lines.push(String::new());
        lines.push("ended then without signs of an OOM:".to_owned());
    }
    lines.extend(others.iter().map(|found| format!("  {} {}", time(found.time_ns), end_line(found))));
    for (user, count) in hidden {
        let belong = match count {
            1 => "1 hidden process belongs".to_owned(),
            many => format!("{many} hidden processes belong"),
        };
        lines.push(format!("{belong} to {user}: ask as {user}, as root or as a member of the group gpumemd"));
    }
    if found.is_empty() {
        lines.push("search a longer time: --for 10m".to_owned());
    }
    super::printed(&lines).map(|line| line + "\n").collect()
}

/// Returns the line for a process that ended without a sign of running out of GPU memory.
fn end_line(found: &ProcessEnd<'_>) -> String {
    let (run, device) = (&found.seen.run, found.device);
    let total = device.total_bytes.map_or(0, signed);
    let used = device.last.used_bytes();
    let unit = Unit::for_largest(total.max(used.unwrap_or(0)));
    let user = run.process.facts.get("user").map_or("-", String::as_str);
    let held = used.map_or("used: unknown".to_owned(), |used| format!("used {}", unit.amount(used)));
    let free = device.reading.map_or("free: unknown".to_owned(), |reading| {
        format!("free {} at its last reading", unit.amount(signed(reading.free_bytes)))
    });
    let status = match run.state {
        State::Closed { status: Some(status), .. } => exit(status),
        _ => "status unknown".to_owned(),
    };
    let ending = Ending::of(run).map(|ending| format!("; {}", super::sentence(&ending))).unwrap_or_default();
    format!("{user} {} {}: {status}, {held}, {free} ({}){ending}", run.process.pid, label(run), unit.name)
}

/// Returns the processes around a time as one JSON document (docs/oom.md).
pub fn json(
    seen: &[StoredRun],
    is_selected: &dyn Fn(&Device) -> bool,
    around: TimeWindow,
    hidden: &BTreeMap<String, usize>,
) -> String {
    let found = found(seen, is_selected, around);
    let processes = found.iter().map(|found| {
        let run = &found.seen.run;
        let report = Report::new(run, Groupings::of_run(run), None);
        object! {
            run: found.seen.id.as_deref(),
            pid: run.process.pid,
            user: run.process.facts.get("user"),
            device: &found.device.name,
            // Wall-clock time in ns since 1970.
            ended_ns: end_ns(run),
            status: match run.state {
                State::Closed { status, .. } => status,
                _ => None,
            },
            last_used_bytes: found.device.last.used_bytes(),
            free_bytes: found.device.reading.map(|reading| reading.free_bytes),
            ending: Ending::of(run),
            ooms: found.entries.iter().map(|one| entry(&report, one.device, one.oom)).collect::<Vec<_>>(),
        }
    });
    gpumem_model::escape::json(&object! {
        schema: "gpumem.oom_at",
        version: 1,
        at_ns: around.at_ns,
        for_ns: around.for_ns,
        processes: processes.collect::<Vec<_>>(),
        // Number of processes whose runs the reader may not see, by user.
        hidden,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_other_users_are_counted_and_not_denied() {
        let around = TimeWindow { at_ns: 1_795_200_000_000_000_000, for_ns: 60_000_000_000 };
        let told = |hidden: &BTreeMap<String, usize>| text(&[], &|_| true, around, hidden);
        assert!(told(&BTreeMap::new()).contains("no process ended or ran out of memory"));
        let hidden = BTreeMap::from([("alice".to_owned(), 1), ("b\u{1b}ob".to_owned(), 2)]);
        let text = told(&hidden);
        assert!(!text.contains("nobody") && text.contains("no process of yours ended or ran out"), "{text}");
        assert!(text.contains("1 hidden process belongs to alice: ask as alice, as root"), "{text}");
        assert!(text.contains(r"2 hidden processes belong to b\u{1b}ob: "), "{text}");
        let json: serde_json::Value =
            serde_json::from_str(&json(&[], &|_| true, around, &hidden)).expect("JSON");
        assert_eq!(json["hidden"]["alice"], 1);
    }
}
