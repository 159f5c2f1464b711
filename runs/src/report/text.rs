//! The report as people read it in a terminal: at most 35 lines by default, every column adds up as it is
//! printed, the unit is named once, the next step is named last.

use super::units::{Unit, thousands};
use super::{By, Part, Report, Statement};
use crate::run::{Device, Run, State};

/// How much is printed, and where.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Columns of the terminal; `None` when piped: nothing is cut.
    pub width: Option<usize>,
    /// Categories named per device; the rest is one row.
    pub categories: usize,
}

impl Default for Layout {
    fn default() -> Self {
        Layout { width: None, categories: 16 }
    }
}

/// The report.
pub fn text(report: &Report<'_>, layout: Layout) -> String {
    let run = report.run;
    let mut out = Text { lines: Vec::new(), width: layout.width };
    for device in &run.devices {
        out.line(&heading(report, device));
        out.line(&provenance(run));
        out.line(&coverage(run));
        out.line("");
        statement(report, device, layout.categories, &mut out);
        out.line("");
        facts(report, device, &mut out);
    }
    if run.devices.is_empty() {
        out.line(&provenance(run));
        out.line("no GPU memory was seen");
    }
    for caveat in &run.caveats {
        out.line(&format!("note: {}", caveat.text));
    }
    let conflicts = report.conflicts();
    if let Some((tag, winner, loser)) = conflicts.first() {
        let text = format!(
            "rules: {} tags match two categories and go to the first, as {}: {winner}, not {loser}",
            thousands(conflicts.len() as i64),
            clean(tag)
        );
        out.line(&text);
    }
    out.line(&next(report));
    out.lines.join("\n") + "\n"
}

struct Text {
    lines: Vec<String>,
    width: Option<usize>,
}

impl Text {
    fn line(&mut self, line: &str) {
        let line = line.trim_end();
        let cut = match self.width {
            Some(width) if line.chars().count() > width => {
                let kept: String = line.chars().take(width.saturating_sub(1)).collect();
                kept + "~"
            }
            _ => line.to_owned(),
        };
        self.lines.push(cut);
    }
}

/// Text from strangers without anything that a terminal would act on.
pub fn clean(text: &str) -> String {
    let harmless = |character: char| {
        let bidi =
            matches!(character, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if character.is_control() || bidi || matches!(character, '\u{2028}' | '\u{2029}') {
            '\u{fffd}'
        } else {
            character
        }
    };
    text.chars().map(harmless).collect()
}

/// The command without the directories of its program and script, or where the run came from.
pub fn label(run: &Run) -> String {
    let Some(command) = run.process.facts.get("command") else { return clean(&run.source.origin) };
    let mut words = command.split(' ').filter(|word| !word.is_empty());
    let base = |word: &str| word.rsplit('/').next().unwrap_or(word).to_owned();
    let first = words.next().map(base).unwrap_or_default();
    let interpreter = first.starts_with("python") || first == "bash" || first == "sh";
    let script = if interpreter { words.next().map(base).map(|word| format!(" {word}")) } else { None };
    clean(&(first + &script.unwrap_or_default()))
}

fn heading(report: &Report<'_>, device: &Device) -> String {
    let run = report.run;
    let mut parts = vec![label(run)];
    if let Some(id) = &report.id {
        parts.push(format!("run {id}"));
    }
    if run.process.pid != 0 {
        let comm =
            run.process.facts.get("comm").map(|comm| format!(" ({})", clean(comm))).unwrap_or_default();
        parts.push(format!("pid {}{comm}", run.process.pid));
    }
    if let Some(user) = run.process.facts.get("user") {
        parts.push(clean(user));
    }
    let model = if device.model.is_empty() { String::new() } else { format!(" {}", clean(&device.model)) };
    // As much of the UUID as nvidia-smi needs.
    let name = match device.name.get(..12) {
        Some(name) if !device.name.starts_with("ordinal-") => format!(" ({name})"),
        _ => String::new(),
    };
    parts.push(match device.name.strip_prefix("unnamed-") {
        Some(_) => clean(&device.name),
        None => format!("GPU {}{model}{name}", device.ordinal),
    });
    parts.join("  ")
}

fn provenance(run: &Run) -> String {
    let state = match run.state {
        State::Open => "running".to_owned(),
        State::Closed { time_ns, status: None } => format!("ended at {}", run.clock.time(time_ns)),
        State::Closed { time_ns, status: Some(status) } => {
            format!("ended at {} ({})", run.clock.time(time_ns), exit(status))
        }
        State::Interrupted => "interrupted: the numbers are the last ones kept".to_owned(),
    };
    let origin = match run.source.kind.as_str() {
        "daemon" => format!("on {}", clean(&run.source.origin)),
        kind => format!("from {kind} {}", clean(&run.source.origin)),
    };
    format!("{origin}; {state}")
}

fn exit(status: u64) -> String {
    match status & 0x7f {
        0 => format!("exit {}", status >> 8 & 0xff),
        signal => format!("signal {signal}"),
    }
}

fn coverage(run: &Run) -> String {
    let coverage = &run.coverage;
    if !coverage.covered {
        return "uncovered: no agent spoke for this process, NVML only".into();
    }
    let mut parts =
        vec![if coverage.late { "covered late".to_owned() } else { "covered since start".to_owned() }];
    if let Some(by) = &coverage.blocked_by {
        let by = if by.is_empty() { "another CUPTI client".to_owned() } else { clean(by) };
        parts.push(format!("BLOCKED by {by}"));
    }
    let count = |number: u64, what: &str| format!("{} {what}", thousands(number as i64));
    let plural = |number: u64, what: &str| count(number, what) + if number == 1 { "" } else { "s" };
    parts.push(format!(
        "{} of {} bytes",
        plural(coverage.allocations, "allocation"),
        thousands(coverage.allocated_bytes as i64)
    ));
    parts.push(count(coverage.lost, "events lost"));
    if run.source.kind != "daemon" {
        parts.push(count(coverage.rejected, "rejected"));
    }
    if coverage.odd > 0 {
        parts.push(count(coverage.odd, "odd"));
    }
    if coverage.partial_state {
        parts.push("PARTIAL: sums are not exact until the agent restates them".into());
    } else if coverage.partial_history {
        parts.push("peak is a lower bound".into());
    }
    parts.push(match coverage.samples {
        0 => "no NVML sample".to_owned(),
        samples => {
            let doubtful = [(coverage.torn_samples, "torn"), (coverage.stale_samples, "stale")];
            let doubtful = doubtful.iter().filter(|(number, _)| *number > 0);
            let doubtful: Vec<String> = doubtful.map(|(number, what)| format!("{number} {what}")).collect();
            let doubtful =
                if doubtful.is_empty() { String::new() } else { format!(" ({})", doubtful.join(", ")) };
            plural(samples, "NVML sample") + &doubtful
        }
    });
    parts.join(", ")
}

/// Amounts as they are printed: each column apportioned from the top, so that it adds up as shown.
fn printed(statement: &Statement, unit: Unit) -> Vec<Vec<Option<i64>>> {
    let mut steps: Vec<Vec<Option<i64>>> = statement
        .rows
        .iter()
        .map(|row| row.bytes.iter().map(|bytes| bytes.map(|bytes| unit.round(bytes))).collect())
        .collect();
    for parent in 0..steps.len() {
        for (column, total) in steps[parent].clone().into_iter().enumerate() {
            let Some(total) = total else { continue };
            let known = |row: &usize| statement.rows[*row].bytes[column].is_some();
            let inside = |row: &usize| statement.rows[*row].parent == Some(parent);
            let parts: Vec<usize> = (0..steps.len()).filter(inside).filter(known).collect();
            let bytes: Vec<i64> = parts.iter().filter_map(|&row| statement.rows[row].bytes[column]).collect();
            for (row, shown) in parts.into_iter().zip(unit.apportion(total, &bytes)) {
                steps[row][column] = Some(shown);
            }
        }
    }
    steps
}

fn statement(report: &Report<'_>, device: &Device, categories: usize, out: &mut Text) {
    let run = report.run;
    let moments = [&device.last, &device.peak];
    let totals = moments.iter().flat_map(|moment| [moment.used_bytes(), moment.tracked_bytes]).flatten();
    let unit = Unit::for_largest(totals.map(i64::saturating_abs).max().unwrap_or(0));
    let smallest = if categories == usize::MAX { 0 } else { unit.smallest() };
    let statement = report.statement(device, categories, smallest);
    let steps = printed(&statement, unit);
    let last = if run.state == State::Open { "now" } else { "last" };
    let heads = [
        (last.to_owned(), run.clock.time(device.last.time_ns)),
        ("at peak".to_owned(), run.clock.time(device.peak.time_ns)),
    ];
    let cell =
        |row: usize, column: usize| match (steps[row][column], carried(device, &statement, row, column)) {
            (None, _) => "-".to_owned(),
            (Some(steps), true) => format!("~{}", unit.print(steps)),
            (Some(steps), false) => unit.print(steps),
        };
    let cells: Vec<[String; 2]> = (0..steps.len()).map(|row| [cell(row, 0), cell(row, 1)]).collect();
    let width = |column: usize| {
        let cells = cells.iter().map(|cells| cells[column].chars().count());
        let (head, time) = &heads[column];
        cells.chain([head.chars().count(), time.chars().count()]).max().unwrap_or(0)
    };
    let widths = [width(0), width(1)];
    let depth = |mut row: usize| {
        let mut depth = 0;
        while let Some(parent) = statement.rows[row].parent {
            (row, depth) = (parent, depth + 1);
        }
        depth
    };
    let names: Vec<String> =
        (0..steps.len()).map(|row| " ".repeat(depth(row)) + &clean(&statement.rows[row].name)).collect();
    let room = out.width.map_or(usize::MAX, |terminal| terminal.saturating_sub(widths[0] + widths[1] + 16));
    let name_width =
        names.iter().map(|name| name.chars().count()).max().unwrap_or(0).clamp(10, room.clamp(10, 60));
    let mut row = |name: &str, cells: [&str; 2], note: &str| {
        let name = shorten(name, name_width);
        out.line(&format!(
            "{name:<name_width$}  {:>first$}  {:>second$}  {note}",
            cells[0],
            cells[1],
            first = widths[0],
            second = widths[1]
        ));
    };
    row(unit.name, [&heads[0].0, &heads[1].0], "");
    row("", [&heads[0].1, &heads[1].1], "");
    for (index, name) in names.iter().enumerate() {
        let unknown = statement.rows[index].bytes.iter().all(Option::is_none);
        let note = match statement.rows[index].part {
            Part::Unexplained => "at least",
            Part::Untrackable if unknown => "not known: NVML was not read",
            _ => "",
        };
        row(name, [&cells[index][0], &cells[index][1]], note);
    }
}

/// Whether an amount rests on a gap that was measured at another time.
fn carried(device: &Device, statement: &Statement, row: usize, column: usize) -> bool {
    let moment = [&device.last, &device.peak][column];
    let rests_on_gap = matches!(statement.rows[row].part, Part::Used | Part::Untrackable | Part::Unexplained);
    rests_on_gap && (moment.gap_distance_ns != 0 || moment.stale)
}

/// Keeps the end of a path, which tells more than its beginning.
fn shorten(name: &str, width: usize) -> String {
    let length = name.chars().count();
    if length <= width {
        return name.to_owned();
    }
    let indent = name.chars().take_while(|character| *character == ' ').count();
    let kept: String = name.chars().skip(length - (width - indent - 1)).collect();
    format!("{}~{kept}", " ".repeat(indent))
}

fn facts(report: &Report<'_>, device: &Device, out: &mut Text) {
    let run = report.run;
    let clock = &run.clock;
    if device.peak.gap_distance_ns != 0 {
        let side = if device.peak.gap_distance_ns < 0 { "before" } else { "after" };
        let distance = clock.distance(device.peak.gap_distance_ns.abs());
        out.line(&format!("~ the gap was measured {distance} {side} the peak"));
    }
    if let Some((low, high)) = device.last.torn {
        let unit = Unit::for_largest(high);
        let text = format!(
            "memory moved while NVML was read: tracked was between {} and {} {}",
            unit.amount(low),
            unit.amount(high),
            unit.name
        );
        out.line(&text);
    }
    let others = report.others(&device.last, report.by);
    if report.by != By::Tag && !others.is_empty() {
        let total: i64 = others.iter().map(|(_, bytes)| bytes).sum();
        let unit = Unit::for_largest(total);
        let named = others.iter().take(3).map(|(tag, bytes)| {
            let tag = if tag.is_empty() { "(no tag)".to_owned() } else { clean(tag) };
            format!("{tag} {}", unit.amount(*bytes))
        });
        let more = if others.len() > 3 { format!(", {} more", others.len() - 3) } else { String::new() };
        out.line(&format!("Others ({}): {}{more}", unit.name, named.collect::<Vec<_>>().join(", ")));
    }
    out.line(&device_line(report, device));
    beside(device, out);
}

fn device_line(report: &Report<'_>, device: &Device) -> String {
    let clock = &report.run.clock;
    let Some(reading) = device.reading else { return "device: device memory was not read".into() };
    let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let total = device.total_bytes.map_or(reading.used_bytes + reading.free_bytes, |total| total);
    let unit = Unit::for_largest(bytes(total));
    let (Some(unaccounted), Some(used)) = (device.unaccounted_bytes, device.last.used_bytes()) else {
        return format!(
            "device ({}): {} used + {} free = {}, read at {}: not with the process, so no remainder is computed",
            unit.name,
            unit.amount(bytes(reading.used_bytes)),
            unit.amount(bytes(reading.free_bytes)),
            unit.amount(bytes(reading.used_bytes + reading.free_bytes)),
            clock.time(reading.time_ns)
        );
    };
    let mut parts = vec![("this process".to_owned(), used)];
    match device.tenants.as_slice() {
        [] => {}
        [(pid, used)] => parts.push((format!("pid {pid}"), used.map_or(0, bytes))),
        many => {
            let (more, more_used) = device.other_tenants;
            let used: i64 = many.iter().filter_map(|(_, used)| used.map(bytes)).sum();
            let count = thousands(many.len() as i64 + i64::from(more));
            parts.push((format!("{count} other processes"), used.saturating_add(bytes(more_used))));
        }
    }
    parts.push(("unaccounted".to_owned(), unaccounted));
    if let Some(system) = reading.system_reserved_bytes {
        parts.push(("system".to_owned(), bytes(system)));
    }
    parts.push(("free".to_owned(), bytes(reading.free_bytes)));
    let amounts: Vec<i64> = parts.iter().map(|(_, bytes)| *bytes).collect();
    let sum = unit.round(amounts.iter().sum());
    let shown = unit.apportion(sum, &amounts).into_iter().zip(&parts);
    let shown: Vec<String> =
        shown.map(|(steps, (name, _))| format!("{} {name}", unit.print(steps))).collect();
    format!("device ({}): {} = {}", unit.name, shown.join(" + "), unit.print(sum))
}

fn beside(device: &Device, out: &mut Text) {
    let beside = &device.beside;
    let kinds = [
        ("managed", beside.managed_bytes),
        ("pinned host", beside.pinned_bytes),
        ("registered host", beside.registered_bytes),
        ("imported", beside.imported_bytes),
        ("host VMM", beside.host_vmm_bytes),
        ("blocks in memory that predates the agent", beside.unbooked_block_bytes),
    ];
    let there: Vec<_> = kinds.iter().filter(|(_, bytes)| *bytes != 0).collect();
    if there.is_empty() {
        return;
    }
    let unit = Unit::for_largest(there.iter().map(|(_, bytes)| bytes.abs()).max().unwrap_or(0));
    let named: Vec<String> =
        there.iter().map(|(name, bytes)| format!("{name} {}", unit.amount(*bytes))).collect();
    out.line(&format!("beside the sum ({}): {}", unit.name, named.join(", ")));
}

fn next(report: &Report<'_>) -> String {
    let other = match report.by {
        By::Layer => "--by structure | --by tag",
        By::Structure => "--by layer | --by tag",
        By::Tag => "--by layer | --by structure",
    };
    format!("next: report {other} | --all | --json | --csv")
}
