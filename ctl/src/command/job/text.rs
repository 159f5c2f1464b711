//! Text output of `gpumemctl job`. Columns add up as printed.

use super::member::{Member, Sum, ranges};
use crate::command::report::processes;
use crate::output::width;
use gpumem_model::time::duration;
use gpumem_model::units::{Unit, plural, thousands};
use gpumem_report::group::{Line, ProcessAmounts, table};
use gpumem_report::table::width as width_of;
use gpumem_report::text::{command_line, escape, exit, wrapped};
use std::collections::BTreeSet;
use std::fmt::Write;

/// Maximum number of members with a row of their own; the largest members have one.
const ROWS: usize = 64;
/// Maximum number of ended members that are named.
const ENDED: usize = 8;
/// Maximum and minimum width of a command, in columns of the terminal.
const COMMAND: usize = 100;
const LEAST_COMMAND: usize = 20;

/// Returns the text on one job; `source` is the place from which its members come.
pub(crate) fn one(id: &str, members: &[Member], sum: &Sum, source: &str) -> String {
    let rows: Vec<&Member> = members.iter().filter(|member| sum.counts(member)).collect();
    let mut out = title(id, members, sum) + "\n";
    out.extend(command(&rows, sum).map(|line| line + "\n"));
    out += "\n";
    out += &(table_of(&rows, sum).join("\n") + "\n\n");
    let unit = Unit::for_largest(rows.iter().filter_map(|member| member.used_bytes).max().unwrap_or(0));
    let mut add = |text: String| out += &(wrapped(&text, width()).join("\n") + "\n");
    let largest = sum.worst.and_then(|place| members.get(place));
    if let Some((worst, used)) = largest.and_then(|worst| Some((worst, worst.used_bytes?))) {
        let mean = sum.imbalance.zip(sum.mean_used_bytes).map(|(times, mean)| {
            format!(": {times:.2} times the mean of {}", unit.amount_with_name(mean.round() as i64))
        });
        let (used, mean) = (unit.amount_with_name(used), mean.unwrap_or_default());
        add(format!("most: {} with {used}{mean}", name(worst)));
    }
    let highest = sum.highest_peak.and_then(|place| members.get(place));
    if let Some((peak, bytes)) = highest.and_then(|peak| Some((peak, peak.peak_used_bytes?))) {
        add(format!("highest peak used: {} with {}", name(peak), unit.amount_with_name(bytes)));
    }
    if sum.used_unknown > 0 {
        let used = plural(sum.used_unknown as u64, "row");
        add(format!("used is unknown for {used}: not in the sum"));
    }
    let failed: Vec<String> =
        members.iter().filter(|member| member.ooms.is_some_and(|ooms| ooms > 0)).map(name).collect();
    if !failed.is_empty() {
        add(format!("out of memory: {} (gpumemctl oom PID)", failed.join(", ")));
    } else if let Some((count @ 1.., member)) = members
        .iter()
        .filter_map(|member| Some((member.failed_allocations?, member)))
        .max_by_key(|(count, _)| *count)
    {
        add(format!("most refused allocations: {}, {} times", name(member), thousands(count)));
    }
    if !sum.missing_ranks.is_empty() {
        let here = if members.iter().any(|member| member.node.is_some()) { "anywhere" } else { "here" };
        add(format!(
            "missing: rank {}: no running process {here} with GPU memory",
            ranges(&sum.missing_ranks)
        ));
    }
    warnings(&rows).into_iter().for_each(&mut add);
    let ended: Vec<&Member> = members.iter().filter(|member| !sum.counts(member)).collect();
    if !ended.is_empty() {
        let more = and_more(ended.len(), ENDED);
        let named: Vec<String> =
            ended.iter().take(ENDED).map(|member| format!("{} ({})", name(member), end(member))).collect();
        add(format!("ended, and not in the sums: {}{more}", named.join(", ")));
    }
    let one = largest.or(members.first());
    let pid = one.map_or("PID".to_owned(), |member| member.pid.to_string());
    let on = one
        .and_then(|member| member.node.as_deref())
        .map(|node| format!(" on {}", escape(node)))
        .unwrap_or_default();
    add(format!("from {}; next: gpumemctl report {pid}{on}", escape(source)));
    out
}

/// Returns a title such as `job bert (slurm 8812; user alice): 12 processes on 3 nodes, 12 of 12 ranks`.
fn title(id: &str, members: &[Member], sum: &Sum) -> String {
    let mut about = Vec::new();
    for (key, word) in [("job", "job "), ("slurm_job", "slurm "), ("user", "user ")] {
        let values = owner_names(members, key);
        // Processes of any user may claim the job's name, so the title tells if there are several users.
        if let Some(value) = values.first().filter(|value| **value != id) {
            about.push(format!("{word}{}{}", escape(value), and_more(values.len(), 1)));
        }
    }
    let about = if about.is_empty() { String::new() } else { format!(" ({})", about.join("; ")) };
    let mut title = format!("job {}{about}: {}", escape(id), processes(sum.processes));
    if sum.nodes > 0 {
        let _ = write!(title, " on {}", plural(sum.nodes as u64, "node"));
    }
    let counted = members.iter().filter(|member| sum.counts(member));
    let ranks: BTreeSet<u32> = counted.filter_map(|member| member.rank).collect();
    if let Some(size) = sum.world_size {
        let _ = write!(title, ", {} of {} ranks", thousands(ranks.len() as u64), thousands(size));
    }
    if sum.is_over {
        title += ", all ended: amounts are the last ones of each";
    }
    title
}

/// Returns a line with the command of all members and the time for which they ran; `None` if they have no command, or several.
fn command(rows: &[&Member], sum: &Sum) -> Option<String> {
    let commands: BTreeSet<&str> = rows.iter().filter_map(|member| member.command.as_deref()).collect();
    let (Some(command), 1) = (commands.first(), commands.len()) else { return None };
    let length = rows.iter().filter_map(|member| member.length_ns).max();
    let state = if sum.is_over { "ran" } else { "running" };
    let length = length.map(|length_ns| format!("  {state} for {}", duration(length_ns))).unwrap_or_default();
    let room =
        width().map_or(COMMAND, |columns| columns.saturating_sub(length.len()).clamp(LEAST_COMMAND, COMMAND));
    Some(command_line(command, room) + &length)
}

/// Returns the distinct names of one kind, such as user, among the owners of members.
fn owner_names<'m>(members: &'m [Member], kind: &str) -> BTreeSet<&'m str> {
    members.iter().filter_map(|member| member.who.get(kind).map(String::as_str)).collect()
}

/// Returns a table with a row for each member.
fn table_of(rows: &[&Member], sum: &Sum) -> Vec<String> {
    let has_node = rows.iter().any(|member| member.node.is_some());
    let mut heads = vec!["rank"];
    heads.extend(has_node.then_some("node"));
    heads.extend(["pid", "device"]);
    let line = |member: &&Member| {
        let mut names = vec![member.rank.map_or("-".to_owned(), |rank| rank.to_string())];
        names.extend(has_node.then(|| member.node.clone().unwrap_or_else(|| "-".into())));
        names.push(member.pid.to_string());
        names.push(format!("GPU {}", member.gpu.as_deref().unwrap_or("-")));
        let flags: Vec<&str> =
            member.flags.iter().map(String::as_str).filter(|flag| *flag != "covered").collect();
        let notes = [flags.join(", "), if sum.is_over { end(member) } else { String::new() }];
        let notes: Vec<String> = notes.into_iter().filter(|note| !note.is_empty()).collect();
        Line { names, amounts: member.amounts(), note: notes.join("; ") }
    };
    if rows.len() <= ROWS {
        let mut lines: Vec<Line> = rows.iter().map(line).collect();
        if command(rows, sum).is_none() {
            add_commands(rows, &heads, &mut lines);
        }
        return table(&heads, &lines);
    }
    // The other members are summed in one row, so the column still adds up.
    let mut order: Vec<&&Member> = rows.iter().collect();
    order.sort_by_key(|member| std::cmp::Reverse(member.used_bytes));
    let (shown, rest) = order.split_at(ROWS);
    let mut shown: Vec<&&Member> = shown.to_vec();
    shown.sort_by_key(|member| (member.rank.is_none(), member.rank));
    let mut lines: Vec<Line> = shown.into_iter().map(line).collect();
    let rest: Vec<&Member> = rest.iter().map(|member| **member).collect();
    let mut names = vec![String::new(); heads.len()];
    names[0] = format!("{} more", rest.len());
    lines.push(Line { names, amounts: Member::summed(&rest), note: "smaller ones".to_owned() });
    table(&heads, &lines)
}

/// Adds the commands of members to the notes of their rows, as far as the terminal has room for them.
fn add_commands(rows: &[&Member], heads: &[&str], lines: &mut [Line]) {
    let printed = table(heads, lines).iter().map(|line| width_of(line)).max().unwrap_or(0);
    let room = width().map_or(COMMAND, |columns| columns.saturating_sub(printed + 2));
    if room < LEAST_COMMAND {
        return;
    }
    for (line, member) in lines.iter_mut().zip(rows) {
        let command = member.command.as_deref().map(|command| command_line(command, room));
        let notes = [std::mem::take(&mut line.note), command.unwrap_or_default()];
        line.note = notes.into_iter().filter(|note| !note.is_empty()).collect::<Vec<_>>().join("; ");
    }
}

/// Returns ` and N more` for the entries of a list that are not shown; empty if all are shown.
pub(crate) fn and_more(count: usize, shown: usize) -> String {
    if count > shown { format!(" and {} more", count - shown) } else { String::new() }
}

/// Returns warnings if several users have a job of this name, or several processes claim the same rank.
fn warnings(rows: &[&Member]) -> Vec<String> {
    let mut warnings = Vec::new();
    let users: BTreeSet<&String> = rows.iter().filter_map(|member| member.who.get("user")).collect();
    if users.len() > 1 {
        let users: Vec<String> = users.into_iter().map(|user| escape(user)).collect();
        warnings.push(format!("several users have a job of this name: {}", users.join(", ")));
    }
    let mut ranks: Vec<_> = rows.iter().filter_map(|member| Some((member.rank?, member.process()))).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let mut twice: Vec<u32> =
        ranks.windows(2).filter(|pair| pair[0].0 == pair[1].0).map(|pair| pair[0].0).collect();
    twice.dedup();
    if !twice.is_empty() {
        warnings.push(format!("more than one process claims to be rank {}", ranges(&twice)));
    }
    warnings
}

/// Returns `rank 7 (n2, GPU 3)`, or the pid instead of the rank.
fn name(member: &Member) -> String {
    let rank = member.rank.map_or(format!("pid {}", member.pid), |rank| format!("rank {rank}"));
    let node = member.node.as_deref().map(|node| format!("{}, ", escape(node))).unwrap_or_default();
    format!("{rank} ({node}GPU {})", escape(member.gpu.as_deref().unwrap_or("-")))
}

/// Returns how the process ended, or else its state.
fn end(member: &Member) -> String {
    match member.status {
        Some(status) => exit(status),
        None => member.state.to_owned(),
    }
}

/// Returns a table with one row for each job: its name, owners, number of processes, and sums.
pub(crate) fn all(jobs: &[(Option<String>, Sum, Vec<Member>)], prometheus: Option<&str>) -> String {
    if jobs.is_empty() {
        return match prometheus {
            Some(url) => {
                format!("no process uses a GPU, or {} does not scrape gpumemd (port 9837)\n", escape(url))
            }
            None => "no process uses a GPU\n".to_owned(),
        };
    }
    let has_nodes = jobs.iter().any(|(_, sum, _)| sum.nodes > 0);
    let mut heads = vec!["job", "user", "slurm", "processes"];
    heads.extend(has_nodes.then_some("nodes"));
    heads.extend(["devices", "ranks"]);
    let mut lines = Vec::new();
    for (job, sum, members) in jobs {
        let owner = |kind: &str| {
            let names = owner_names(members, kind);
            match names.first() {
                None => "-".to_owned(),
                Some(name) if names.len() == 1 => escape(name),
                Some(_) => format!("{} different", names.len()),
            }
        };
        let job_name = job.as_deref().map_or("(no job)".to_owned(), escape);
        let mut names = vec![job_name, owner("user"), owner("slurm_job"), sum.processes.to_string()];
        names.extend(has_nodes.then(|| sum.nodes.to_string()));
        names.push(sum.devices.to_string());
        let ranks: BTreeSet<u32> = members.iter().filter_map(|member| member.rank).collect();
        names.push(match sum.world_size {
            Some(size) if job.is_some() => format!("{}/{size}", ranks.len()),
            _ => "-".to_owned(),
        });
        let mut amounts = Member::summed(&members.iter().collect::<Vec<_>>());
        if sum.uncovered > 0 {
            // Members without an agent have no tracked bytes, so the other columns would not add up to `used`.
            amounts = ProcessAmounts { used_bytes: amounts.used_bytes, ..ProcessAmounts::default() };
        }
        let mut notes = Vec::new();
        if sum.uncovered > 0 {
            notes.push(format!("{} without an agent", thousands(sum.uncovered as u64)));
        }
        if sum.used_unknown > 0 {
            notes.push(format!("{} unknown", thousands(sum.used_unknown as u64)));
        }
        if let (Some(times), true) = (sum.imbalance.filter(|times| *times >= 1.005), job.is_some()) {
            notes.push(format!("imbalance {times:.2}"));
        }
        lines.push(Line { names, amounts, note: notes.join(", ") });
    }
    let url = prometheus.map(|url| format!(" --prometheus {}", escape(url))).unwrap_or_default();
    table(&heads, &lines).join("\n") + &format!("\n\nnext: gpumemctl job ID{url}\n")
}
