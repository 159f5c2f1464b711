//! One line about the other ranks (processes) of the job at the time when one rank ran out of memory.

use crate::amounts::sum;
use crate::labels::rank as rank_of;
use crate::lines::{listed, span};
use crate::ooms;
use gpumem_model::escape::escape;
use gpumem_model::run::{OPEN_FATE_NS, Run, State};
use gpumem_model::units::{Unit, signed};

/// Maximum number of ranks that are named individually.
const NAMED: usize = 6;

/// State of another process of the job at the time of the out-of-memory event.
struct Rank {
    name: String,
    /// The rank as a number, for sorting; `u64::MAX` if the rank is not a number.
    number: u64,
    used: Option<i64>,
    /// Time from the OOM to the end of this process in ns; negative if the process ended first. `None` if it ended much later or
    /// not at all.
    ended: Option<i64>,
    ran_out: bool,
}

/// Returns the line about the job's other processes on this machine; `None` if there is none.
pub(super) fn ranks(run: &Run, others: &[Run], time_ns: u64, unit: Unit) -> Option<String> {
    let others = others.iter().filter(|other| other.process != run.process && other.clock == run.clock);
    let mut ranks: Vec<Rank> = others.map(|other| rank(other, time_ns)).collect();
    if ranks.is_empty() {
        return None;
    }
    ranks.sort_by(|a, b| (a.number, &a.name).cmp(&(b.number, &b.name)));
    let of_world = run.process.claims.get("world_size").map(|size| format!(" of {size}")).unwrap_or_default();
    let own =
        run.process.claims.get("rank").map_or("this".to_owned(), |rank| format!("this is {rank}{of_world}"));
    let mut words = vec![own];
    let is_well = |rank: &&Rank| rank.ended.is_none_or(|ended| ended >= 0) && !rank.ran_out;
    let well: Vec<&Rank> = ranks.iter().filter(is_well).collect();
    if !well.is_empty() {
        words.push(format!("alive {}{}", rank_ranges(&well), used_range(&well, unit)));
    }
    let out: Vec<&Rank> = ranks.iter().filter(|rank| rank.ran_out).collect();
    if !out.is_empty() {
        words.push(format!("also ran out {}{}", rank_ranges(&out), used_range(&out, unit)));
    }
    let is_gone = |rank: &&Rank| rank.ended.is_some_and(|ended| ended < 0) && !rank.ran_out;
    let gone: Vec<&Rank> = ranks.iter().filter(is_gone).collect();
    if !gone.is_empty() {
        let first = gone.iter().filter_map(|rank| rank.ended).min().unwrap_or(0);
        words.push(format!("ended before {} (the first {} before)", rank_ranges(&gone), seconds(-first)));
    }
    let follows: Vec<&&Rank> = well.iter().filter(|rank| rank.ended.is_some()).collect();
    if let Some(first) = follows.iter().filter_map(|rank| rank.ended).min() {
        let which = if follows.len() == well.len() { "all".to_owned() } else { follows.len().to_string() };
        words.push(format!("{which} of them ended after it, the first {} later", seconds(first)));
    }
    Some(words.join("; "))
}

fn seconds(ns: i64) -> String {
    format!("{}.{} s", ns / 1_000_000_000, ns / 100_000_000 % 10)
}

fn rank(run: &Run, time_ns: u64) -> Rank {
    let used = run.devices.iter().filter_map(|device| {
        let before = device.series.buckets.iter().rev().find(|bucket| bucket.time_ns <= time_ns);
        let at = before.and_then(|bucket| Some(bucket.used?.last));
        at.or_else(|| device.last.used_bytes())
    });
    let used: Vec<i64> = used.collect();
    let near = |ns: u64| ns.abs_diff(time_ns) <= OPEN_FATE_NS;
    let ended = match run.state {
        State::Closed { time_ns: ended_ns, .. } if ended_ns <= time_ns || near(ended_ns) => {
            Some(signed(ended_ns).saturating_sub(signed(time_ns)))
        }
        _ => None,
    };
    Rank {
        name: run.process.claims.get("rank").cloned().unwrap_or_else(|| format!("pid {}", run.process.pid)),
        number: rank_of(run).unwrap_or(u64::MAX),
        used: (!used.is_empty()).then(|| sum(used)),
        ended,
        ran_out: ooms(run).any(|(_, oom)| oom.is_out_of_memory() && (near(oom.time_ns) || near(oom.last_ns))),
    }
}

/// Returns the ranks as text, with ranges such as `0-2, 4, 6-7`.
fn rank_ranges(ranks: &[&Rank]) -> String {
    let mut spans: Vec<(u64, u64, &str)> = Vec::new();
    for rank in ranks {
        match spans.last_mut() {
            Some((_, last, _)) if rank.number != u64::MAX && last.checked_add(1) == Some(rank.number) => {
                *last = rank.number;
            }
            _ => spans.push((rank.number, rank.number, &rank.name)),
        }
    }
    let words = spans.iter().map(|(first, last, name)| {
        let name = escape(name);
        if first == last { name } else { format!("{name}-{last}") }
    });
    listed(words, NAMED)
}

/// Returns the range of the ranks' used memory, such as ` (used 68,120 to 70,112)`.
fn used_range(ranks: &[&Rank], unit: Unit) -> String {
    let used = || ranks.iter().filter_map(|rank| rank.used);
    let ends = used().min().zip(used().max());
    let ends = ends.map(|(least, most)| span(unit.amount(least), unit.amount(most)));
    ends.map(|used| format!(" (used {used})")).unwrap_or_default()
}
