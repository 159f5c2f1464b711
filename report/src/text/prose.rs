//! Writes the text above and below the tables: name and owner of the process, how complete the numbers are, and suggestions for
//! next commands.

use crate::labels::{self, COMMAND, command_line_of, device_title, end_ns, exit};
use crate::lines::{Lines, in_brackets};
use crate::{GroupBy, Report, advice, findings, growth, own};
use gpumem_model::escape::escape;
use gpumem_model::layers;
use gpumem_model::owner::Owner;
use gpumem_model::run::{BlindWindow, Clock, Device, Oom, Run, SUBSCRIPTION_HELD, State};
use gpumem_model::time::Times;
use gpumem_model::units::{plural, thousands};
use gpumem_model::window::{Window, WindowKind};

/// Adds everything before the tables.
pub(super) fn head(report: &Report<'_>, times: Times, out: &mut Lines) {
    out.prose(&heading(report));
    verdict(report).iter().for_each(|line| out.prose(line));
    warnings(report.run).iter().for_each(|line| out.prose(line));
    source(report, times, out);
}

/// Adds where the run comes from, how it ended, and how complete its numbers are.
pub(super) fn source(report: &Report<'_>, times: Times, out: &mut Lines) {
    let run = report.run;
    out.prose(&provenance(run, times));
    if let Some(window) = report.window {
        out.prose(&window_line(window, times));
    }
    out.prose(&coverage(run, times));
    if run.coverage.odd > 0 {
        let odd = plural(run.coverage.odd, "record");
        out.prose(&format!(
            "odd: {odd} contradicted earlier ones (frees of unknown addresses, ids without a name, \
             impossible sizes)"
        ));
    }
    if run.devices.is_empty() {
        out.prose("no GPU memory was observed");
    }
}

/// Adds everything after the tables and facts of the devices.
pub(super) fn tail(report: &Report<'_>, out: &mut Lines) {
    own::line(report.run).iter().for_each(|line| out.prose(line));
    for caveat in &report.run.caveats {
        out.prose(&format!("note: {}", caveat.text));
    }
    let conflicts = report.conflicts();
    if let Some((tag, winner, loser)) = conflicts.first() {
        let match_ = if conflicts.len() == 1 { "matches" } else { "match" };
        out.prose(&format!(
            "rules: {} {match_} two categories; the first counts: {tag} is {winner}, not {loser}",
            plural(conflicts.len() as u64, "tag"),
        ));
    }
    let suggestions = if report.window.is_none() { advice::own_advice(report).len() } else { 0 };
    navigation(report, true, suggestions, out);
}

/// Adds how to report other processes, and next commands. `suggestions` is the number of those of `gpumemctl why`.
pub(super) fn navigation(report: &Report<'_>, is_verbose: bool, suggestions: usize, out: &mut Lines) {
    other_processes(&report.others, out);
    if let Some((job, more)) = &report.job {
        let more = plural(*more, "more process").replace("processs", "processes");
        out.prose(&format!("its job has {more}: gpumemctl report {job}"));
    }
    out.prose(&(next_commands(report, is_verbose) + &ooms(report) + &why(report, suggestions)));
}

/// Returns the words on the number of suggestions; empty if there are none.
fn why(report: &Report<'_>, suggestions: usize) -> String {
    let command = command(report, "why");
    match suggestions {
        0 => String::new(),
        _ if command.contains(" --job ") => String::new(),
        count => format!("    why: {} ({command})", plural(count as u64, "suggestion")),
    }
}

/// Returns the command `name` for the process of a report. It is about the whole run and has no categories, so options for a time or
/// for rules are removed.
fn command(report: &Report<'_>, name: &str) -> String {
    let mut command = report.command.replacen("gpumemctl report", &format!("gpumemctl {name}"), 1);
    for flag in [" --since ", " --at ", " --between ", " --rules "] {
        command.truncate(command.find(flag).unwrap_or(command.len()));
    }
    command
}

/// Returns the words on whether memory ran out; empty if that is unknown.
fn ooms(report: &Report<'_>) -> String {
    let run = report.run;
    let command = command(report, "oom");
    let all = || crate::ooms(run).map(|(_, oom)| oom);
    let count = |fits: fn(&&Oom) -> bool| gpumem_model::oom::times(all().filter(fits));
    match (count(|oom| oom.is_out_of_memory()), count(|oom| !oom.is_out_of_memory() && !oom.is_suspected())) {
        (0, _) if gpumem_model::ending::Ending::of(run).is_some() => {
            format!("    oom: none, ended by something else ({command})")
        }
        _ if all().any(Oom::is_suspected) => format!("    oom: suspected ({command})"),
        (0, 0) if !run.records_ooms() => String::new(),
        (0, 0) => "    oom: none".to_owned(),
        (0, times) => format!("    oom: none, pressure {} times ({command})", thousands(times)),
        (number, _) => format!("    oom: {} ({command})", thousands(number)),
    }
}

/// Returns the command, run, owner and GPU of the process.
pub(super) fn heading(report: &Report<'_>) -> String {
    let run = report.run;
    let mut parts = vec![command_line_of(run, COMMAND)];
    if let Some(id) = &report.id {
        parts.push(format!("run {id}"));
    }
    if run.process.pid != 0 {
        let comm = run.process.facts.get("comm").map(|comm| format!(" ({comm})")).unwrap_or_default();
        parts.push(format!("pid {}{comm}", run.process.pid));
    }
    parts.extend(Owner::of(&run.process.facts, &run.process.claims, None).words());
    match run.devices.as_slice() {
        [] => {}
        [device] => parts.push(device_title(device)),
        devices => parts.push(format!("{} GPUs", devices.len())),
    }
    parts.join("  ")
}

/// Returns the conclusions about the whole run; none if the report is about a part of its life.
pub(super) fn verdict(report: &Report<'_>) -> Vec<String> {
    if report.window.is_some() { Vec::new() } else { findings::text::lines(report) }
}

/// Returns the reasons why the sums or the peak are not exact, one for each line at the top of the report.
pub(super) fn warnings(run: &Run) -> Vec<String> {
    let coverage = &run.coverage;
    let mut lines = Vec::new();
    match (&coverage.blocked_by, coverage.blocked_code) {
        (Some(why), Some(code)) if code != SUBSCRIPTION_HELD => {
            lines.push(format!("BLOCKED, allocations are not seen: {}", escape(why)));
        }
        (Some(by), _) => {
            let by = if by.is_empty() { "another CUPTI client" } else { by };
            lines.push(format!("BLOCKED by {}: allocations are not seen while it holds CUPTI", escape(by)));
        }
        (None, _) => {}
    }
    let partial = coverage.partial_state || run.devices.iter().any(|device| device.last.partial);
    let inexact = if coverage.blind_doubt {
        "PARTIAL: sums and peak are not exact, because the agent missed allocations and frees while it was blind"
    } else if coverage.partial_state && run.state == State::Open {
        "PARTIAL: sums are not exact until the agent restates them; peak is a lower bound"
    } else if partial {
        "PARTIAL: sums are not exact, because records were lost; peak is a lower bound"
    } else if coverage.partial_history && coverage.lost == 0 && coverage.withheld > 0 {
        "peak is a lower bound: records were withheld on request (pause)"
    } else if coverage.partial_history {
        "peak is a lower bound: records were lost"
    } else {
        return lines;
    };
    lines.push(inexact.to_owned());
    lines
}

/// Returns the line that states which part of the process's life is reported.
pub(super) fn window_line(window: Window, times: Times) -> String {
    let (from, to) = (times.time(window.from_ns), times.time(window.to_ns));
    let length = times.clock().distance(window.to_ns - window.from_ns.min(window.to_ns));
    let part = match window.part {
        WindowKind::At => format!("memory at {from}"),
        WindowKind::Since => format!("since {from}, {length}"),
        WindowKind::Between => format!("{from} to {to}, {length}"),
    };
    let counts = if window.exact && window.part != WindowKind::At { "the window" } else { "the whole run" };
    format!("{part}; counts cover {counts}")
}

/// Returns where the run comes from, and how it ended.
fn provenance(run: &Run, times: Times) -> String {
    let state = match run.state {
        State::Open => "running".to_owned(),
        State::Closed { .. } if run.own.snapshot.is_some() => "complete: a snapshot of one moment".to_owned(),
        State::Closed { time_ns, .. } if run.coverage.complete => {
            format!("complete: the recording was ended at {}", times.time(time_ns))
        }
        State::Closed { time_ns, status: None } => format!("ended at {}", times.time(time_ns)),
        State::Closed { time_ns, status: Some(status) } => {
            format!("ended at {} ({})", times.time(time_ns), exit(status))
        }
        State::Interrupted => "interrupted: the numbers are the last stored ones".to_owned(),
        State::Rolled { time_ns } => {
            format!("continues after {} in the next part of the run", times.time(time_ns))
        }
    };
    format!("{}; {state}", labels::source(run))
}

/// Returns the total time for which the agent saw nothing, and the longest such interval.
fn blind(run: &Run, times: Times) -> Option<String> {
    let coverage = &run.coverage;
    let end_ns = end_ns(run);
    let length = |window: &BlindWindow| window.to_ns.unwrap_or(end_ns).saturating_sub(window.from_ns);
    let longest = coverage.blind.iter().max_by_key(|window| (window.to_ns.is_none(), length(window)))?;
    // `blind_ns` does not contain intervals that have not ended.
    let open = coverage.blind.iter().filter(|window| window.to_ns.is_none()).map(length);
    let total = run.clock.distance(open.fold(coverage.blind_ns, u64::saturating_add));
    let often = match coverage.blind_count {
        0 | 1 => String::new(),
        count => format!(" in {count} intervals, the longest"),
    };
    let until = longest.to_ns.map_or("now".to_owned(), |to_ns| times.time(to_ns));
    let from = times.time(longest.from_ns);
    Some(format!("blind for {total}{often} {from} to {until}: {}", escape(&longest.why)))
}

/// Returns the line that states how complete the numbers are.
fn coverage(run: &Run, times: Times) -> String {
    let coverage = &run.coverage;
    if !coverage.covered {
        let blind = blind(run, times).map_or(String::new(), |blind| format!(", {blind}"));
        let why = if coverage.blocked_by.is_some() {
            "the agent could not attach to CUPTI"
        } else {
            "no agent in this process"
        };
        return format!("uncovered: {why}, only NVML's figures{blind}");
    }
    let mut parts = vec![if coverage.late { "covered late" } else { "covered since start" }.to_owned()];
    parts.extend(names(run));
    parts.push(format!(
        "{} of {}",
        plural(coverage.allocations, "allocation"),
        plural(coverage.allocated_bytes, "byte")
    ));
    parts.push(plural(coverage.lost, "event") + " lost");
    if coverage.withheld > 0 {
        parts.push(thousands(coverage.withheld) + " withheld on request");
    }
    if !run.source.is_watched() {
        parts.push(plural(coverage.rejected, "record") + " rejected");
    }
    parts.push(match coverage.samples {
        0 => "no NVML sample".to_owned(),
        samples => {
            let doubtful = [(coverage.torn_samples, "torn"), (coverage.stale_samples, "stale")];
            let doubtful = doubtful.iter().filter(|(number, _)| *number > 0);
            let doubtful = doubtful.map(|(number, what)| format!("{} {what}", thousands(*number)));
            plural(samples, "NVML sample") + &in_brackets(&doubtful.collect::<Vec<_>>().join(", "))
        }
    });
    parts.extend(blind(run, times));
    parts.join(", ")
}

/// Returns the best source of names (`layer`: for example a framework's hooks), the share of memory with a name, and the sources
/// that do not work fully.
fn names(run: &Run) -> Option<String> {
    let layers = &run.coverage.layers;
    let level = layers::level(layers)?;
    let (mut named, mut by_line, mut all) = (0_i64, 0_i64, 0_i64);
    for device in &run.devices {
        let (with_name, with_or_without) = crate::named(run, &device.last);
        by_line = by_line.saturating_add(crate::named_by_line(run, &device.last));
        (named, all) = (named.saturating_add(with_name), all.saturating_add(with_or_without));
    }
    let share = match (all, by_line) {
        (1.., 0) => format!(" ({:.1} % of bytes)", share(named, all)),
        (1.., _) => {
            let others = share(named.saturating_sub(by_line), all);
            format!(" ({others:.1} % of bytes) + lines ({:.1} %)", share(by_line, all))
        }
        _ => String::new(),
    };
    let describe_degraded = layers::describe_degraded(layers, 60);
    let describe_degraded = if describe_degraded.is_empty() {
        String::new()
    } else {
        format!(" [{}]", describe_degraded.join("; "))
    };
    Some(format!("names: {level}{share}{}", escape(&describe_degraded)))
}

/// Returns `part` as a percentage of `whole`, rounded down so that only the whole is 100 %.
fn share(part: i64, whole: i64) -> f64 {
    (1000.0 * part as f64 / whole as f64).floor() / 10.0
}

/// Adds the pids of other processes in the same file.
fn other_processes(pids: &[u32], out: &mut Lines) {
    const NAMED: usize = 8;
    if pids.is_empty() {
        return;
    }
    let mut named: Vec<String> = pids.iter().take(NAMED).map(u32::to_string).collect();
    if pids.len() > NAMED {
        named.push("...".to_owned());
    }
    let count = thousands(pids.len() as u64);
    out.prose(&format!("other processes in this file: --pid {} ({count})", named.join(" | ")));
}

fn next_commands(report: &Report<'_>, is_verbose: bool) -> String {
    let run = report.run;
    let is_asked_of_daemon = report.command == format!("gpumemctl report {}", run.process.pid);
    if is_asked_of_daemon && !run.coverage.covered && run.state == State::Open {
        return format!(
            "next: gpumemctl doctor {} (why it is uncovered) | {} --json | --csv",
            run.process.pid, report.command
        );
    }
    let mut options: Vec<String> = (!is_verbose).then(|| "--verbose".to_owned()).into_iter().collect();
    if let [first, _, ..] = run.devices.as_slice() {
        options.push(format!("--device {}", first.ordinal));
    }
    let others = GroupBy::ALL.into_iter().filter(|by| *by != report.by);
    options.extend(others.map(|by| format!("--by {}", by.name())));
    if matches!(run.devices.as_slice(), [device] if growth::line(report, device).is_some()) {
        options.push("--growth".to_owned());
    }
    let has_iterations = |device: &Device| !device.details.iterations.rows.is_empty();
    if run.clock != Clock::Lines && run.devices.iter().any(has_iterations) {
        options.push("--iterations".to_owned());
    }
    format!("next: {} {} | --all | --json | --csv", report.command, options.join(" | "))
}
