//! The first screen of `gpumemctl oom`: the failed request, its causes, the other processes, and fragmentation.

use super::holders::{holders_of, name};
use super::{Entry, caught_lines, end_lines, entries, place, ranks, uncounted_lines, verdict, why_no_record};
use crate::Report;
use crate::amounts::sum;
use crate::findings::{self, FRAGMENTED_SHARE, Finding, Kind};
use crate::labels::{command_line_of, exit, label_with_pid};
use gpumem_model::ending::Ending;
use gpumem_model::run::{Fate, Oom, OomKind, Run};
use gpumem_model::time::Times;
use gpumem_model::units::{Unit, plural, signed, thousands};

/// Maximum width of the command in the title, in columns of the terminal.
const COMMAND: usize = 72;
/// Maximum number of other processes that are named.
const NAMED: usize = 3;
/// Smaller changes of other processes' memory, in bytes, count as no change.
const LEAST_CHANGE: i64 = 1 << 20;
/// Divisor: memory taken by others since NVML's reading is stated if it is at least the device's size divided by this.
const TAKEN_SHARE: i64 = 50;
/// Divisor: the size of the pool's request to the driver is stated if it exceeds the program's request by more than that request
/// divided by this.
const SEGMENT_SHARE: i64 = 20;

/// Returns the lines of the first screen. `job` has the runs of the job's other processes.
pub(super) fn lines(report: &Report<'_>, job: &[Run]) -> Vec<String> {
    let run = report.run;
    let times = Times::of(run);
    let ending = Ending::of(run);
    let mut lines = end_lines(run, ending.as_ref(), times);
    let (pressure, mut others): (Vec<_>, Vec<_>) = entries(run).into_iter().partition(Entry::is_pressure);
    let decisive = findings::decisive(report).map(|(_, oom, _)| oom);
    match others.extract_if(.., |entry| decisive.is_some_and(|oom| std::ptr::eq(oom, entry.oom))).next() {
        Some(entry) => {
            lines.extend(of_entry(report, entry, ending.as_ref(), job, times));
            if !report.command.is_empty() {
                let command = report.command.replacen("gpumemctl report", "gpumemctl oom", 1);
                lines.push(format!("next: {command} --verbose | --all | --json; {}", report.command));
            }
        }
        None => lines.push(format!("{}: {}", label_with_pid(run), why_no_record(run))),
    }
    others.retain(|entry| !entry.oom.is_suspected());
    lines.extend(caught_lines(&others, times));
    lines.extend(uncounted_lines(run, &pressure, times));
    lines
}

/// Returns the lines on one out-of-memory record.
pub(super) fn of_entry(
    report: &Report<'_>,
    entry: Entry<'_>,
    ending: Option<&Ending>,
    job: &[Run],
    times: Times,
) -> Vec<String> {
    let Entry { device, oom, .. } = entry;
    let run = report.run;
    let often = match oom.count {
        0 | 1 => String::new(),
        count => format!(", {} until {}", plural(count, "time"), times.time(oom.last_ns)),
    };
    let status = match oom.fate {
        Fate::Fatal { status: Some(status), .. } => format!(", {}", exit(status)),
        Fate::Fatal { status: None, .. } => ", ended".to_owned(),
        Fate::Survived => ", survived".to_owned(),
        Fate::Open => ", outcome not known yet".to_owned(),
    };
    let pid = if run.process.pid == 0 { String::new() } else { format!("pid {}, ", run.process.pid) };
    let what = if oom.is_suspected() { "PERHAPS OUT OF MEMORY" } else { "OUT OF MEMORY" };
    let (time, command) = (times.time(oom.time_ns), command_line_of(run, COMMAND));
    let mut lines =
        vec![format!("{what}  {time}{often}  {command}  {pid}GPU {}{status}", device.ordinal), request(oom)];
    if let (true, Some(ending)) = (oom.is_suspected(), ending) {
        lines.push(format!("not an OOM: {}", verdict::sentence(ending)));
        return lines;
    }
    let causes = findings::of_request(report, device, oom);
    for (number, cause) in (1..).zip(&causes) {
        lines.push(format!("{number}. {}", cause.sentence()));
        lines.extend(cause.spare_bytes.map(|spare| {
            format!("   Without {} the request fits with {} to spare.", subject(cause), amount(spare))
        }));
    }
    lines.extend(other_processes(oom));
    lines.extend(fragmentation(oom, &causes));
    let unit = Unit::for_largest(oom.device.as_ref().map_or(0, |device| signed(device.total_bytes)));
    lines.extend(ranks::ranks(run, job, oom.last_ns, unit).map(|ranks| format!("Ranks: {ranks}")));
    if oom.is_partial {
        lines.push(
            "Incomplete: memory from before the daemon's start, or from lost records, is missing in the amounts by name."
                .to_owned(),
        );
    }
    lines
}

/// Returns the words for a cause in the sentence that states whether the request would have fitted without this cause.
fn subject(cause: &Finding) -> &'static str {
    match cause.kind {
        Kind::PoolLimit => "the limit",
        Kind::Growth => "the growth",
        Kind::NoBackward => "these activations",
        Kind::OtherProcesses => "them",
        Kind::Fragmentation => "fragmentation",
        _ => "it",
    }
}

/// Returns bytes with their unit: whole MiB, or a smaller unit for less than 1 MiB.
fn amount(bytes: i64) -> String {
    match bytes {
        0 | 0x10_0000.. => format!("{} MiB", findings::mib(bytes)),
        _ => Unit::for_largest(bytes.saturating_abs()).amount_with_name(bytes),
    }
}

/// Returns the sentence about the failed request: its size, its place, and the free memory.
fn request(oom: &Oom) -> String {
    let free = oom.free_bytes();
    if oom.is_suspected() {
        let free = free.map_or("unknown".to_owned(), amount);
        return format!(
            "Its request is unknown. Lowest free memory of the GPU since NVML last listed the process: {free}."
        );
    }
    let asked = signed(oom.asked_bytes);
    let need = oom.driver_asked_bytes.map_or(asked, signed);
    let is_larger = need.saturating_sub(asked) > asked / SEGMENT_SHARE;
    let segment = if is_larger { format!(" (a segment of {})", amount(need)) } else { String::new() };
    let free = match (free, oom.kind) {
        (None, _) => "the free memory is unknown".to_owned(),
        (Some(free), OomKind::Pool) => {
            format!("the pool's limit refused it, with {} of the device free", amount(free))
        }
        (Some(free), _) => format!("{} were free", amount(free)),
    };
    format!("Asked for {}{segment}{}; {free}.", amount(asked), place(oom))
}

/// Returns the line about the other processes on the device, and the change of their memory.
fn other_processes(oom: &Oom) -> Option<String> {
    let Some(device) = &oom.device else {
        return (!oom.is_suspected())
            .then(|| "Other processes: unknown, because NVML was not read.".to_owned());
    };
    let others = holders_of(oom).get(1..).unwrap_or_default();
    let used = sum(others.iter().map(|holder| holder.used_bytes).chain([device.others.1]));
    let taken = oom.device_free_bytes.map_or(0, |free| device.free_bytes.saturating_sub(signed(free)));
    let taken = if taken >= signed(device.total_bytes) / TAKEN_SHARE && taken > 0 {
        format!("; {} more were taken after NVML's reading", amount(taken))
    } else {
        String::new()
    };
    if others.is_empty() && used == 0 {
        return Some(format!("Other processes: none{taken}."));
    }
    let seconds = |ns: u64| ns.div_ceil(1_000_000_000);
    let over = others.iter().filter_map(|holder| holder.growth_ns).max().map(seconds);
    let change = sum(others.iter().filter_map(|holder| holder.growth_bytes));
    let change = match over {
        None => String::new(),
        Some(over) if change.saturating_abs() < LEAST_CHANGE => format!(", unchanged in the last {over} s"),
        Some(over) => {
            let sign = if change > 0 { "+" } else { "-" };
            format!(", {sign}{} in the last {over} s", amount(change.saturating_abs()))
        }
    };
    let named = others.iter().take(NAMED).map(|holder| match holder.growth_bytes {
        Some(bytes) if bytes >= LEAST_CHANGE => {
            format!("{} {} (+{})", name(holder), amount(holder.used_bytes), amount(bytes))
        }
        _ => format!("{} {}", name(holder), amount(holder.used_bytes)),
    });
    let mut named: Vec<String> = named.collect();
    let more = others.len().saturating_sub(NAMED) as u64 + u64::from(device.others.0);
    if more > 0 {
        named.push(format!("{} more", thousands(more)));
    }
    // If only one process is named, its amount is the sum before the brackets, so it is not printed again.
    let named = match (others, more) {
        ([only], 0) => name(only),
        _ => named.join(", "),
    };
    Some(format!("Other processes: {}{change}{taken} ({named}).", amount(used)))
}

/// Returns the line about unused memory of the allocators.
fn fragmentation(oom: &Oom, causes: &[Finding]) -> Option<String> {
    let (idle, largest) = oom.idle_bytes.zip(oom.largest_idle_bytes)?;
    let (idle, largest) = (signed(idle), signed(largest));
    if idle == 0 {
        return Some("Fragmentation: none, the allocator had no unused memory.".to_owned());
    }
    let held = holders_of(oom).first().map_or(oom.tracked_bytes, |own| own.used_bytes);
    let at = causes.iter().position(|cause| cause.kind == Kind::Fragmentation).map(|at| at + 1);
    let would_do = largest >= signed(oom.asked_bytes);
    if at.is_none() && !would_do && (idle as f64) < held as f64 * FRAGMENTED_SHARE {
        let (idle, largest) = (amount(idle), amount(largest));
        return Some(format!("Fragmentation: none that matters ({idle} unused, largest piece {largest})."));
    }
    let pieces = oom.idle_pieces.map_or(String::new(), |pieces| format!(" in {}", plural(pieces, "piece")));
    let relation = match at {
        Some(at) => format!("see {at}"),
        None if would_do => "large enough, but of another stream or pool".to_owned(),
        None => "all of it is not enough for the request".to_owned(),
    };
    let expandable = if oom.is_expandable { " Expandable segments are on already." } else { "" };
    Some(format!(
        "Fragmentation: {} unused{pieces}, largest piece {}; {relation}.{expandable}",
        amount(idle),
        amount(largest)
    ))
}
