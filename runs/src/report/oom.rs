//! `gpumemctl oom`: what was asked for when memory ran out, who had it, what the process itself held, and what would
//! have helped. Every sum adds up as it is printed.

use super::names::library;
use super::text::{clean, device_name, exit, label};
use super::time::Times;
use super::units::{Unit, plural, thousands};
use super::{By, Report};
use crate::run::{Device, Fate, Holder, Moment, Oom, OomDevice, OomKind};
use gpumem_ledger::category::OTHERS;
use serde::Serialize;

/// Entries that are told in full; older ones are counted.
const MOST: usize = 5;
/// Names of what the process held.
const NAMED: usize = 8;
/// Holders that have a line each.
const MOST_HOLDERS: usize = 6;

/// All true ones, the newest last, and how often there was pressure. `all`: every entry in full.
pub fn text(report: &Report<'_>, all: bool) -> String {
    let run = report.run;
    let times = Times::of(run);
    let entries =
        run.devices.iter().flat_map(|device| device.details.ooms.iter().map(move |oom| (device, oom)));
    let mut entries: Vec<(&Device, &Oom)> = entries.collect();
    entries.sort_by_key(|(_, oom)| oom.time_ns);
    let (told, pressure): (Vec<_>, Vec<_>) = entries.iter().partition(|(_, oom)| all || oom.is_true());
    let mut lines = Vec::new();
    let hidden = if all { 0 } else { told.len().saturating_sub(MOST) };
    if hidden > 0 {
        lines.push(format!("{} earlier (--all)", thousands(hidden as u64)));
    }
    for (number, (device, oom)) in told.iter().enumerate().skip(hidden) {
        if !lines.is_empty() {
            lines.push(String::new());
        }
        one(report, device, oom, number + 1, times, &mut lines);
    }
    if told.is_empty() {
        lines.push(format!("{}  pid {}: memory has not run out", label(run), run.process.pid));
    }
    if let Some((_, last)) = pressure.last() {
        let times_said: u64 = pressure.iter().map(|(_, oom)| oom.count).sum();
        let unit = Unit::for_largest(signed(last.asked_bytes));
        lines.push(format!(
            "pressure: the driver refused {} and the process went on; last at {}, {} {} (--all)",
            plural(times_said, "time"),
            times.time(last.last_ns),
            unit.amount(signed(last.asked_bytes)),
            unit.name
        ));
    }
    if run.coverage.ooms_dropped > 0 {
        lines.push(format!("{} more are not kept", thousands(run.coverage.ooms_dropped)));
    }
    lines.iter().map(|line| clean(line).trim_end().to_owned() + "\n").collect()
}

/// One entry as lines.
pub(super) fn one(
    report: &Report<'_>,
    device: &Device,
    oom: &Oom,
    number: usize,
    times: Times,
    lines: &mut Vec<String>,
) {
    let own = composition(report, oom);
    let total = oom.device.as_ref().map_or(0, |device| signed(device.total_bytes));
    let unit = Unit::for_largest(total.max(own.total).max(signed(oom.asked_bytes)));
    let mut often = String::new();
    if oom.count > 1 {
        often = format!("  {} until {}", plural(oom.count, "time"), times.time(oom.last_ns));
    }
    let what = if oom.is_true() { "OOM" } else { "PRESSURE" };
    lines.push(format!(
        "{what} #{number} {} {} pid {} {}{often}  ({})",
        times.time(oom.time_ns),
        device_name(device),
        report.run.process.pid,
        fate(oom),
        unit.name
    ));
    lines.push(request(oom, unit));
    let place = place(oom);
    if !place.is_empty() {
        lines.push(format!("at {}", place.join(", ")));
    }
    if let Some(device) = &oom.device {
        holders(oom, device, &own, unit, times, lines);
    }
    lines.push(format!("you      {}", own.sum(unit)));
    if let (Some(idle), Some(largest)) = (oom.idle_bytes, oom.largest_idle_bytes) {
        let asked = oom.asked_bytes;
        let relation = if largest < asked { "<" } else { ">=" };
        lines.push(format!(
            "idle     {}, largest block {} {relation} {}",
            unit.amount(signed(idle)),
            unit.amount(signed(largest)),
            unit.amount(signed(asked))
        ));
    }
    lines.push(format!("verdict  {}", verdict(oom, unit)));
}

fn fate(oom: &Oom) -> String {
    match oom.fate {
        Fate::Fatal { after_ns, status } if oom.is_true() => {
            let status = status.map_or("ended".to_owned(), exit);
            format!("FATAL ({status} after {}.{} s)", after_ns / 1_000_000_000, after_ns / 100_000_000 % 10)
        }
        Fate::Fatal { .. } | Fate::Survived => "survived".to_owned(),
        Fate::Open => "what follows is not known yet".to_owned(),
    }
}

/// What was asked, of whom, and what was there.
fn request(oom: &Oom, unit: Unit) -> String {
    let amount = |bytes: u64| unit.amount(signed(bytes));
    let asked = amount(oom.asked_bytes);
    if oom.kind == OomKind::Pool {
        let mut words = format!("asked {asked} of the pool, which gave up without asking the driver");
        if let (Some(used), Some(reserved)) = (oom.pool_used_bytes, oom.pool_reserved_bytes) {
            words += &format!(": it held {}, {} handed out", amount(reserved), amount(used));
        }
        if let Some(free) = oom.free_bytes() {
            words += &format!("; the device had {} free", unit.amount(free));
        }
        return words;
    }
    let need = oom.driver_asked_bytes.unwrap_or(oom.asked_bytes);
    let segment =
        if need == oom.asked_bytes { String::new() } else { format!(" (a segment of {})", amount(need)) };
    let refused = match oom.refusals {
        0 | 1 => String::new(),
        refusals => format!(", the driver refused {refusals} times"),
    };
    let free = match oom.free_bytes() {
        // As printed: what is short is what is missing between the two numbers beside it.
        Some(free) if free < signed(need) => {
            let (needed, free) = (unit.round(signed(need)), unit.round(free));
            format!(", free {}: {} short", unit.print(free), unit.print(needed - free))
        }
        Some(free) => {
            format!(", free {}: enough, but not in one piece or not for this process", unit.amount(free))
        }
        None => ", free: not known".to_owned(),
    };
    format!("asked {asked}{segment}{free}{refused}")
}

fn place(oom: &Oom) -> Vec<String> {
    let mut place: Vec<String> = oom.tag.iter().cloned().collect();
    place.extend(oom.phase.clone());
    place.extend(oom.step.map(|step| format!("step {}", thousands(step))));
    place.extend(oom.stack.as_deref().and_then(frame));
    if oom.tag.is_none() {
        place.extend(oom.library.as_deref().map(|path| format!("by {}", library(path))));
    }
    place
}

/// The innermost frame of the program's own: `train.py:212`.
fn frame(stack: &str) -> Option<String> {
    let frames: Vec<Vec<&str>> = stack.lines().map(|line| line.split('\t').collect()).collect();
    let is_own = |frame: &&Vec<&str>| {
        frame.get(1).is_some_and(|file| !file.contains("-packages/") && !file.starts_with('<'))
    };
    let frame = frames.iter().find(is_own).or(frames.first())?;
    let file = frame.get(1).map(|file| file.rsplit('/').next().unwrap_or(file));
    match (file, frame.get(2)) {
        (Some(file), Some(line)) => Some(format!("{file}:{line}")),
        _ => frame.first().map(|name| (*name).to_owned()).filter(|name| !name.is_empty()),
    }
}

/// What the process held, named.
struct Own {
    parts: Vec<(String, i64)>,
    total: i64,
    /// Something of `used` is missing in it.
    is_tracked_only: bool,
}

impl Own {
    fn sum(&self, unit: Unit) -> String {
        let bytes: Vec<i64> = self.parts.iter().map(|(_, bytes)| *bytes).collect();
        let total = unit.round(self.total);
        let shown = unit.apportion(total, &bytes).into_iter().zip(&self.parts);
        // What prints as nothing says nothing.
        let shown = shown.filter(|(steps, _)| *steps != 0);
        let mut shown: Vec<String> =
            shown.map(|(steps, (name, _))| format!("{name} {}", unit.print(steps))).collect();
        if shown.is_empty() {
            shown.push("nothing".to_owned());
        }
        let what = if self.is_tracked_only { " tracked" } else { "" };
        format!("{} = {}{what}", shown.join(" + "), unit.print(total))
    }
}

/// What the process held then, largest first.
pub(super) fn held(report: &Report<'_>, oom: &Oom) -> Vec<(String, i64)> {
    composition(report, oom).parts
}

fn composition(report: &Report<'_>, oom: &Oom) -> Own {
    let moment = Moment { amounts: oom.amounts.clone(), ..Moment::default() };
    let composition = report.composition(&moment, report.by);
    let mut parts: Vec<(String, i64)> = composition.categories.into_iter().collect();
    parts.retain(|(_, bytes)| *bytes != 0);
    parts.sort_by(|a, b| b.1.saturating_abs().cmp(&a.1.saturating_abs()).then_with(|| a.0.cmp(&b.0)));
    if parts.len() > NAMED {
        let rest = parts.split_off(NAMED - 1);
        let sum = rest.iter().fold(0_i64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        parts.push((format!("({} smaller)", thousands(rest.len() as u64)), sum));
    }
    let others = if report.by == By::Tag { "(no tag)" } else { OTHERS };
    let beside = [
        (others, composition.others),
        ("opaque pools", composition.opaque),
        ("idle", composition.pool_idle),
        ("predates the agent", oom.predates_bytes.unwrap_or(0)),
        ("Untrackable", oom.untrackable_bytes.unwrap_or(0)),
    ];
    parts.extend(
        beside.into_iter().filter(|(_, bytes)| *bytes != 0).map(|(name, bytes)| (name.to_owned(), bytes)),
    );
    let total = parts.iter().fold(0_i64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let is_tracked_only = oom.untrackable_bytes.is_none() || oom.predates_bytes.is_none();
    Own { parts, total, is_tracked_only }
}

fn holders(oom: &Oom, device: &OomDevice, own: &Own, unit: Unit, times: Times, lines: &mut Vec<String>) {
    let total = unit.round(signed(device.total_bytes));
    let (mut named, mut folded) = (device.holders.clone(), device.others);
    for holder in named.split_off(named.len().min(MOST_HOLDERS)) {
        folded = (folded.0 + 1, folded.1.saturating_add(holder.used_bytes));
    }
    // The driver's own word of what was free is newer than the reading: others have moved since.
    let free = oom.device_free_bytes.map_or(device.free_bytes, signed);
    let moved = device.free_bytes.saturating_sub(free);
    let mut parts: Vec<i64> = named.iter().map(|holder| holder.used_bytes).collect();
    parts.extend([folded.1, moved, device.unaccounted_bytes, signed(device.system_bytes.unwrap_or(0)), free]);
    let mut steps = unit.apportion(total, &parts);
    // The process itself reads as it is told below.
    if let (false, Some(first)) = (own.is_tracked_only, steps.first().copied()) {
        let told = unit.round(own.total);
        if let (true, Some(last)) = (first != told && parts[0] == own.total, steps.last_mut()) {
            *last += first - told;
            steps[0] = told;
        }
    }
    let who = |index: usize, holder: &Holder| {
        let user = holder.user.clone().unwrap_or_else(|| "-".to_owned());
        match (index, holder.pid) {
            (_, 0) => user,
            (_, pid) => format!("{user} {pid}"),
        }
    };
    let names: Vec<String> = named.iter().enumerate().map(|(index, holder)| who(index, holder)).collect();
    let names: Vec<String> = names.iter().map(|name| clean(name)).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let column = steps.iter().map(|steps| unit.print(*steps).len()).max().unwrap_or(0);
    for (index, (holder, name)) in named.iter().zip(&names).enumerate() {
        let head = if index == 0 { "holders" } else { "" };
        let growth = growth(holder, unit).map_or(String::new(), |growth| format!("  ({growth})"));
        lines.push(format!("{head:<8} {name:<width$}  {:>column$}{growth}", unit.print(steps[index])));
    }
    let rest = &steps[named.len()..];
    let mut beside = Vec::new();
    for (name, bytes, steps) in [
        (format!("{} other processes", thousands(folded.0)), folded.1, rest[0]),
        ("others since".to_owned(), moved, rest[1]),
        ("unaccounted".to_owned(), device.unaccounted_bytes, rest[2]),
        ("system".to_owned(), signed(device.system_bytes.unwrap_or(0)), rest[3]),
    ] {
        if bytes != 0 || steps != 0 {
            beside.push(format!("{name} {}", unit.print(steps)));
        }
    }
    beside.push(format!("free {}", unit.print(rest[4])));
    let age = oom.time_ns.saturating_sub(device.read_ns);
    let read = if age > 2_000_000_000 {
        format!(" (read at {})", times.time(device.read_ns))
    } else {
        String::new()
    };
    lines.push(format!("         {} = {} with above{read}", beside.join(" + "), unit.print(total)));
}

fn growth(holder: &Holder, unit: Unit) -> Option<String> {
    let (bytes, in_ns) = holder.growth_bytes.zip(holder.growth_ns)?;
    let plus = if bytes >= 0 { "+" } else { "" };
    Some(format!("{plus}{} in {} s", unit.amount(bytes), in_ns.div_ceil(1_000_000_000)))
}

/// What would have helped, the surest first.
fn verdict(oom: &Oom, unit: Unit) -> String {
    let asked = signed(oom.asked_bytes);
    let need = oom.driver_asked_bytes.map_or(asked, signed);
    let mut words = Vec::new();
    let Some(free) = oom.free_bytes() else {
        return "not known: nobody said what was free".to_owned();
    };
    if oom.kind == OomKind::Pool && free >= asked {
        words.push(format!(
            "a limit of the pool's own (set_per_process_memory_fraction?): the device had {} free",
            unit.amount(free)
        ));
    }
    let device = oom.device.as_ref();
    let most = device.and_then(|device| {
        let others = device.holders.iter().skip(1);
        others.max_by_key(|holder| holder.growth_bytes.unwrap_or(0))
    });
    let fits_without = |growth: i64| growth > 0 && free < need && free.saturating_add(growth) >= need;
    if let Some((holder, growth)) = most.and_then(|holder| Some((holder, holder.growth_bytes?)))
        && fits_without(growth)
    {
        let who = holder.user.as_deref().map_or("another process".to_owned(), clean);
        words
            .push(format!("fits without {who}'s growth ({} free)", unit.amount(free.saturating_add(growth))));
    }
    let own = device.and_then(|device| device.holders.first()?.growth_bytes);
    if words.is_empty() && own.is_some_and(fits_without) {
        words.push(format!(
            "fits without what you grew by ({})",
            device.and_then(|device| growth(device.holders.first()?, unit)).unwrap_or_default()
        ));
    }
    if let (Some(idle), Some(largest)) = (oom.idle_bytes, oom.largest_idle_bytes)
        && signed(idle) >= asked
        && signed(largest) < asked
    {
        words.push("fragmented: what is idle would do in one piece (expandable_segments:True)".to_owned());
    }
    let most_of_all = device
        .map(|device| signed(device.total_bytes).saturating_sub(signed(device.system_bytes.unwrap_or(0))));
    if most_of_all.is_some_and(|most| need > most) {
        words.push("more than the whole device has".to_owned());
    }
    if words.is_empty() && free < need {
        let others = device.map_or(0, |device| {
            let named = device.holders.iter().skip(1).map(|holder| holder.used_bytes);
            named.fold(device.others.1, i64::saturating_add)
        });
        let short = unit.print(unit.round(need) - unit.round(free));
        words.push(format!("{short} short; others hold {}", unit.amount(others)));
    }
    if words.is_empty() {
        words.push("the driver refused although so much was free".to_owned());
    }
    words.join("; ")
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    version: u32,
    run: Option<&'a str>,
    pid: u32,
    clock: &'a crate::run::Clock,
    dropped: u64,
    ooms: Vec<OomJson<'a>>,
}

#[derive(Serialize)]
pub(super) struct OomJson<'a> {
    device: &'a str,
    /// `oom` or `pressure`.
    what: &'static str,
    verdict: String,
    /// Without amounts: `held` has them by name.
    #[serde(flatten)]
    oom: Oom,
    held: Vec<Held>,
}

#[derive(Serialize)]
struct Held {
    name: String,
    bytes: i64,
}

/// An entry for programs: as it is kept, with what the process held by name.
pub(super) fn entry<'a>(report: &Report<'_>, device: &'a Device, oom: &'a Oom) -> OomJson<'a> {
    let bytes = Unit::for_largest(0);
    let held = composition(report, oom).parts;
    OomJson {
        device: &device.name,
        what: if oom.is_true() { "oom" } else { "pressure" },
        verdict: verdict(oom, bytes) + " (bytes)",
        oom: Oom { amounts: Vec::new(), ..oom.clone() },
        held: held.into_iter().map(|(name, bytes)| Held { name, bytes }).collect(),
    }
}

/// All entries as one JSON document.
pub fn json(report: &Report<'_>) -> String {
    let run = report.run;
    let entries = run
        .devices
        .iter()
        .flat_map(|device| device.details.ooms.iter().map(move |oom| entry(report, device, oom)));
    let document = Document {
        schema: "gpumem.oom",
        version: 1,
        run: report.id.as_deref(),
        pid: run.process.pid,
        clock: &run.clock,
        dropped: run.coverage.ooms_dropped,
        ooms: entries.collect(),
    };
    super::json::harmless(serde_json::to_string_pretty(&document).unwrap_or_default()) + "\n"
}
