//! `gpumemctl oom`: out-of-memory events (OOMs) of a run. The first screen (answer.rs) states the causes. The long form shows
//! each failed request, the holders of the device's memory, and the process's own memory. Every sum adds up as printed.

mod answer;
pub mod at;
mod holders;
mod place;
mod ranks;
mod verdict;

pub(crate) use holders::beside_holders;
pub use verdict::sentence;

use super::Report;
use crate::encode::object;
use crate::findings::{self, Findings};
use crate::labels::{device_name, exit, label_with_pid, pid};
use crate::lines::{Lines, span};
use crate::ooms;
use gpumem_model::ending::Ending;
use gpumem_model::escape::escape;
use gpumem_model::run::{Device, Fate, Oom, OomKind, Run, State};
use gpumem_model::time::Times;
use gpumem_model::units::{Unit, plural, signed, thousands};
use holders::composition;
pub(super) use holders::{holders_of, name as holder_name};
pub(super) use place::place;
use serde::Serialize;
use std::collections::BTreeMap;

/// Maximum number of OOMs that are shown in full; older ones are only counted.
const MOST: usize = 5;
/// Maximum number of places in the code that are listed for survived OOMs.
const PLACES: usize = 4;

/// Options of the text form.
#[derive(Debug, Clone, Copy, Default)]
pub struct OomOptions<'a> {
    /// Whether the long form is shown, with holders and composition.
    pub verbose: bool,
    /// Whether the long form is shown for every entry.
    pub all: bool,
    /// Runs of the other processes of the job.
    pub job: &'a [Run],
    /// Columns of the terminal, at which the short form is wrapped; `None` for no terminal.
    pub width: Option<usize>,
}

/// An out-of-memory record with its device, and its number: pressure records are numbered separately from all others.
#[derive(Debug, Clone, Copy)]
struct Entry<'r> {
    device: &'r Device,
    oom: &'r Oom,
    number: usize,
}

impl Entry<'_> {
    /// Returns whether memory really ran out and the process survived this OOM.
    fn is_caught(&self) -> bool {
        self.oom.is_out_of_memory() && self.oom.fate == Fate::Survived
    }

    fn is_pressure(&self) -> bool {
        !self.oom.is_out_of_memory() && !self.oom.is_suspected()
    }
}

fn entries<'r>(run: &'r Run) -> Vec<Entry<'r>> {
    let mut entries: Vec<Entry<'r>> =
        ooms(run).map(|(device, oom)| Entry { device, oom, number: 0 }).collect();
    entries.sort_by_key(|entry| entry.oom.time_ns);
    let mut numbers = [0, 0];
    for entry in &mut entries {
        let number = &mut numbers[usize::from(entry.is_pressure())];
        *number += 1;
        entry.number = *number;
    }
    entries
}

/// Returns the text form: the causes of the OOM that decides the outcome (see `findings::decisive`), or with `verbose` or `all`
/// each OOM in full.
pub fn text(report: &Report<'_>, form: OomOptions<'_>) -> String {
    let is_long = form.verbose || form.all;
    let mut out = Lines::new(form.width.filter(|_| !is_long));
    for line in if is_long { long(report, form) } else { answer::lines(report, form.job) } {
        let text = line.trim_start_matches(' ');
        out.indented(&line[..line.len() - text.len()], text);
    }
    out.lines.into_iter().map(|line| line + "\n").collect()
}

/// Returns the long form. OOMs that ended the process, or may have, are shown in full. Survived ones are shown in full too, if
/// there are at most [`MOST`] OOMs or `all` is set. Otherwise they are counted, and the latest is shown if there is no other.
fn long(report: &Report<'_>, form: OomOptions<'_>) -> Vec<String> {
    let run = report.run;
    let times = Times::of(run);
    let mut shown = entries(run);
    let mut caught: Vec<Entry<'_>> = Vec::new();
    let mut pressure: Vec<Entry<'_>> = Vec::new();
    if !form.all {
        pressure = shown.extract_if(.., |entry| entry.is_pressure()).collect();
        // A few survived OOMs are shown in full. Many (of programs that search for their batch size) are only counted.
        if shown.len() > MOST {
            caught = shown.extract_if(.., |entry| entry.is_caught()).collect();
            shown.extend(caught.last().filter(|_| shown.is_empty()).copied());
        }
    }
    let ending = Ending::of(run);
    let mut lines = end_lines(run, ending.as_ref(), times);
    let hidden = if form.all { 0 } else { shown.len().saturating_sub(MOST) };
    if hidden > 0 {
        lines.push(format!("{} earlier (--all)", thousands(hidden as u64)));
    }
    for entry in shown.iter().skip(hidden) {
        if !lines.is_empty() {
            lines.push(String::new());
        }
        full(report, *entry, ending.as_ref(), form.job, times, &mut lines);
    }
    if shown.is_empty() {
        lines.push(format!("{}: {}", label_with_pid(run), why_no_record(run)));
    }
    lines.extend(caught_lines(&caught, times));
    lines.extend(uncounted_lines(run, &pressure, times));
    lines
}

/// Returns the lines about what ended the process, if that was not GPU memory.
fn end_lines(run: &Run, ending: Option<&Ending>, times: Times) -> Vec<String> {
    let Some(ending) = ending else { return Vec::new() };
    let what = sentence(ending);
    let first = format!("END {} pid {}: {what}", times.time(ending.time_ns), run.process.pid);
    [first].into_iter().chain(ending.line.as_ref().map(|line| format!("    {line}"))).collect()
}

/// Returns the lines that count refusals which the process survived, and OOMs without an entry.
fn uncounted_lines(run: &Run, pressure: &[Entry<'_>], times: Times) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(last) = pressure.last().map(|entry| entry.oom) {
        let often = plural(gpumem_model::oom::times(pressure.iter().map(|entry| entry.oom)), "time");
        let asked = signed(last.asked_bytes);
        lines.push(format!(
            "pressure: the driver refused {often} and the process continued; last at {}, {} (--all)",
            times.time(last.last_ns),
            Unit::for_largest(asked).amount_with_name(asked)
        ));
    }
    if run.coverage.ooms_dropped > 0 {
        lines.push(format!("{} further OOMs are only counted", thousands(run.coverage.ooms_dropped)));
    }
    lines
}

/// Returns the lines without control characters and trailing blanks.
fn printed(lines: &[String]) -> impl Iterator<Item = String> {
    lines.iter().map(|line| escape(line).trim_end().to_owned())
}

/// Returns the out-of-memory records of a device in the order of time, each with its lines of text.
pub(super) fn lines_by_record<'r>(report: &Report<'r>, device: &Device) -> Vec<(&'r Oom, Vec<String>)> {
    let (times, ending) = (Times::of(report.run), Ending::of(report.run));
    let of_device = entries(report.run).into_iter().filter(|entry| std::ptr::eq(entry.device, device));
    let lines = |entry: Entry<'r>| {
        let mut lines = Vec::new();
        full(report, entry, ending.as_ref(), &[], times, &mut lines);
        (entry.oom, printed(&lines).collect())
    };
    of_device.map(lines).collect()
}

/// Returns the process's memory by name at the OOM: categories, the largest first, then other kinds of memory. Empty for a
/// suspected OOM.
pub(super) fn memory_by_name(report: &Report<'_>, oom: &Oom) -> Vec<(String, i64)> {
    if oom.is_suspected() { Vec::new() } else { composition(report, oom).parts }
}

/// Returns the text that explains why a run has no out-of-memory record.
fn why_no_record(run: &Run) -> &'static str {
    match (run.coverage.covered, run.state) {
        _ if run.records_ooms() => "GPU memory has not run out",
        (true, _) => "the file does not report OOMs, so whether memory ran out is unknown",
        (false, State::Closed { .. }) => {
            "no agent reported whether memory ran out; its device was not nearly full when it ended, or it ended normally"
        }
        (false, _) => "it has no agent, which would report OOMs (start it with gpumemctl run -- COMMAND)",
    }
}

/// Returns lines that count the survived OOMs by the place in the code where they happened.
fn caught_lines(caught: &[Entry<'_>], times: Times) -> Vec<String> {
    let mut places: BTreeMap<&str, Vec<&Oom>> = BTreeMap::new();
    for entry in caught {
        places.entry(entry.oom.tag.as_deref().unwrap_or_default()).or_default().push(entry.oom);
    }
    let mut places: Vec<(&str, Vec<&Oom>)> = places.into_iter().collect();
    let count = |ooms: &[&Oom]| gpumem_model::oom::times(ooms.iter().copied());
    places.sort_by_key(|(_, ooms)| std::cmp::Reverse(count(ooms)));
    let more = places.split_off(places.len().min(PLACES));
    let line = |(place, ooms): &(&str, Vec<&Oom>)| {
        let asked = || ooms.iter().map(|oom| signed(oom.asked_bytes));
        let (least, most) = (asked().min().unwrap_or(0), asked().max().unwrap_or(0));
        let unit = Unit::for_largest(most);
        let asked = span(unit.amount(least), unit.amount(most));
        let at = if place.is_empty() { String::new() } else { format!(" at {place}") };
        let first = ooms.iter().map(|oom| oom.time_ns).min().unwrap_or(0);
        let last = ooms.iter().map(|oom| oom.last_ns).max().unwrap_or(0);
        let when = span(times.time(first), times.time(last));
        let often = plural(count(ooms), "time");
        format!("caught: it ran out {often} and continued, {when}{at}, asked {asked} {} (--all)", unit.name)
    };
    let mut lines: Vec<String> = places.iter().map(line).collect();
    if !more.is_empty() {
        let often = more.iter().map(|(_, ooms)| count(ooms)).fold(0, u64::saturating_add);
        let (often, places) = (plural(often, "time"), plural(more.len() as u64, "other place"));
        lines.push(format!("caught: {often} at {places} (--all)"));
    }
    lines
}

/// Adds all lines about one out-of-memory record. `job` has the runs of the job's other processes.
fn full(
    report: &Report<'_>,
    entry: Entry<'_>,
    ending: Option<&Ending>,
    job: &[Run],
    times: Times,
    lines: &mut Vec<String>,
) {
    let Entry { device, oom, number } = entry;
    let own = (!oom.is_suspected()).then(|| composition(report, oom));
    let total = oom.device.as_ref().map_or(0, |device| signed(device.total_bytes));
    let held = own.as_ref().map_or(0, |own| own.total);
    let unit = Unit::for_largest(total.max(held).max(signed(oom.asked_bytes)));
    let often = match oom.count {
        0 | 1 => String::new(),
        count => format!("  {} until {}", plural(count, "time"), times.time(oom.last_ns)),
    };
    let (kind, time) = (kind(oom).to_uppercase(), times.time(oom.time_ns));
    let (name, pid, fate) = (device_name(device), pid(report.run), fate(oom));
    lines.push(format!("{kind} #{number} {time} {name}{pid} {fate}{often}  ({})", unit.name));
    lines.push(request(oom, unit));
    let place = place::parts(oom);
    if !place.is_empty() {
        lines.push(format!("at {}", place.join(", ")));
    }
    if let Some(device) = &oom.device {
        holders::holders(oom, device, own.as_ref(), unit, times, lines);
    }
    lines.push(match &own {
        Some(own) => format!("you      {}", own.sum(unit)),
        None => "you      unknown: it had no agent (start it with gpumemctl run -- COMMAND)".to_owned(),
    });
    lines.extend(verdict::idle(oom, unit).map(|idle| format!("idle     {idle}")));
    lines.extend(ranks::ranks(report.run, job, oom.last_ns, unit).map(|ranks| format!("ranks    {ranks}")));
    lines.push(format!("verdict  {}", verdict::verdict(report, (device, oom), ending, unit)));
}

pub(super) fn kind(oom: &Oom) -> &'static str {
    match (oom.is_out_of_memory(), oom.is_suspected()) {
        (true, _) => "oom",
        (_, true) => "suspected",
        _ => "pressure",
    }
}

fn fate(oom: &Oom) -> String {
    match oom.fate {
        Fate::Fatal { status, .. } if oom.is_suspected() => status.map_or("ended".to_owned(), exit),
        Fate::Fatal { after_ns, status } if oom.is_out_of_memory() => {
            let status = status.map_or("ended".to_owned(), exit);
            format!("FATAL ({status} after {}.{} s)", after_ns / 1_000_000_000, after_ns / 100_000_000 % 10)
        }
        Fate::Fatal { .. } | Fate::Survived => "survived".to_owned(),
        Fate::Open => "outcome unknown so far".to_owned(),
    }
}

/// Returns the line about the failed request: its size, the allocator, and the free memory.
fn request(oom: &Oom, unit: Unit) -> String {
    let amount = |bytes: u64| unit.amount(signed(bytes));
    if oom.is_suspected() {
        let free = oom.free_bytes().map_or("not known".to_owned(), |free| unit.amount(free));
        return format!("asked: unknown; lowest free memory since its last reading: {free}");
    }
    let asked = amount(oom.asked_bytes);
    if oom.kind == OomKind::Pool {
        let mut words = format!("asked {asked} of the pool, which failed without a request to the driver");
        if let (Some(used), Some(reserved)) = (oom.pool_used_bytes, oom.pool_reserved_bytes) {
            words += &format!(": it held {}, {} handed out", amount(reserved), amount(used));
        }
        if let Some(free) = oom.free_bytes() {
            words += &format!("; the device had {} free", unit.amount(free));
        }
        return words;
    }
    let need = oom.driver_asked_bytes.unwrap_or(oom.asked_bytes);
    let is_segment = need != oom.asked_bytes;
    let segment = if is_segment { format!(" (a segment of {})", amount(need)) } else { String::new() };
    let refused = match oom.refusals {
        0 | 1 => String::new(),
        refusals => format!(", the driver refused {refusals} times"),
    };
    let free = match oom.free_bytes() {
        // The missing amount is the difference of the two rounded numbers, so that it matches them as printed.
        Some(free) if free < signed(need) => {
            let (needed, free) = (unit.round(signed(need)), unit.round(free));
            format!(", free {}: {} short", unit.print(free), unit.print(needed - free))
        }
        Some(free) => {
            format!(", free {}: enough, but not in one piece or not for this process", unit.amount(free))
        }
        None => ", free: unknown".to_owned(),
    };
    format!("asked {asked}{segment}{free}{refused}")
}

/// Returns an out-of-memory record for the JSON document: the stored record, with the process's memory by name.
pub(crate) fn entry<'a>(report: &Report<'_>, device: &'a Device, oom: &'a Oom) -> impl Serialize + use<'a> {
    let unit = Unit::for_largest(i64::MAX);
    let own = (!oom.is_suspected()).then(|| composition(report, oom));
    let held_bytes = own.as_ref().map(|own| own.total);
    let held = own.map(|own| own.parts).unwrap_or_default();
    object! {
        // UUID of the GPU.
        gpu: &device.name,
        // `oom`, `suspected` or `pressure`.
        what: kind(oom),
        verdict: verdict::verdict(report, (device, oom), Ending::of(report.run).as_ref(), unit),
        // The causes of the failed request, as in the report.
        findings: if oom.is_out_of_memory() || oom.is_suspected() {
            findings::of_request(report, device, oom)
        } else {
            Vec::new()
        },
        // The record without its amounts by cell; `held` has the amounts by name.
        #[serde(flatten)]
        oom: Oom { amounts: Default::default(), ..oom.clone() },
        // Bytes of the process at the OOM, by name; empty without an agent.
        held: held.into_iter().map(|(name, bytes)| object! { name, bytes }).collect::<Vec<_>>(),
        // Sum of `held`.
        held_bytes,
    }
}

/// Returns all out-of-memory records as one JSON document (docs/oom.md).
pub fn json(report: &Report<'_>) -> String {
    let run = report.run;
    let entries = ooms(run).map(|(device, oom)| entry(report, device, oom));
    gpumem_model::escape::json(&object! {
        schema: "gpumem.oom",
        version: 1,
        run: report.id.as_deref(),
        pid: run.process.pid,
        clock: &run.clock,
        // Whether the process had an agent. Without one no OOM is reported, so an empty list means nothing.
        covered: run.coverage.covered,
        // Cause of the process's end other than GPU memory; null if unknown, or if the process has not ended.
        ending: Ending::of(run),
        dropped: run.coverage.ooms_dropped,
        // Conclusions about the run, in the fields `outcome` and `findings`.
        #[serde(flatten)]
        findings: Findings::of(report),
        ooms: entries.collect::<Vec<_>>(),
    })
}
