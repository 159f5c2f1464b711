//! Sums of a job's members.

use super::member::Member;
use serde::Serialize;
use std::collections::BTreeSet;

/// Ranks beyond this are not checked individually, because claimed sizes may be arbitrarily large.
const RANKS: u32 = 1 << 20;
/// Most missing ranks in the result.
const MISSING: usize = 1024;

/// Sums of the running members, or of all if none is running.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Sum {
    /// Number of processes.
    pub processes: usize,
    /// Number of nodes; 0 for this node.
    pub nodes: usize,
    /// Number of devices.
    pub devices: usize,
    /// All processes have ended; amounts are the last ones of each.
    pub is_over: bool,
    /// Largest world size claimed by a process.
    pub world_size: Option<u32>,
    /// Ranks of which no process is known.
    pub missing_ranks: Vec<u32>,
    /// Sum of the known values.
    pub used_bytes: Option<i64>,
    /// Number of members whose `used` is unknown.
    pub used_unknown: usize,
    /// Sum over the members with an agent.
    pub tracked_bytes: Option<i64>,
    pub untrackable_bytes: Option<i64>,
    /// Number of members without an agent.
    pub uncovered: usize,
    /// Used memory divided by the number of members.
    pub mean_used_bytes: Option<f64>,
    /// Highest used value divided by the mean; 1 is balanced.
    pub imbalance: Option<f64>,
    /// Index in `members` of the one with the highest used value.
    pub worst: Option<usize>,
    /// Index of the one with the highest peak.
    pub highest_peak: Option<usize>,
    /// Number of times that memory ran out, as far as known.
    pub ooms: Option<u64>,
}

impl Sum {
    /// Computes the sums; `members` must be sorted.
    pub(crate) fn of(members: &[Member]) -> Self {
        let is_over = !members.iter().any(Member::is_running);
        let counted = || members.iter().enumerate().filter(move |(_, member)| is_over || member.is_running());
        let all = |of: fn(&Member) -> Option<i64>| total(counted().filter_map(|(_, member)| of(member)));
        let highest = |of: fn(&Member) -> Option<i64>| {
            let known = counted().filter_map(|(place, member)| Some((of(member)?, place)));
            // Of several equal members the first is chosen, which has the lowest rank.
            known.max_by_key(|(bytes, place)| (*bytes, std::cmp::Reverse(*place))).map(|(_, place)| place)
        };
        let used = |member: &Member| member.used_bytes;
        let known = counted().filter(|(_, member)| member.used_bytes.is_some()).count();
        let used_bytes = all(used);
        let mean = used_bytes.filter(|_| known > 0).map(|sum| sum as f64 / known as f64);
        let worst = highest(used);
        let most = worst.and_then(|place| members.get(place)?.used_bytes);
        let world_size = members.iter().filter_map(Member::world_size).max();
        let there: BTreeSet<u32> = counted().filter_map(|(_, member)| member.rank).collect();
        let missing = (0..world_size.unwrap_or(0).min(RANKS)).filter(|rank| !there.contains(rank));
        Sum {
            processes: counted().map(|(_, member)| member.process()).collect::<BTreeSet<_>>().len(),
            nodes: counted().filter_map(|(_, member)| member.node.as_ref()).collect::<BTreeSet<_>>().len(),
            devices: counted().map(|(_, member)| (&member.node, &member.uuid)).collect::<BTreeSet<_>>().len(),
            is_over,
            world_size,
            missing_ranks: missing.take(MISSING).collect(),
            used_bytes,
            used_unknown: counted().count() - known,
            tracked_bytes: all(|member| member.tracked_bytes),
            untrackable_bytes: all(|member| member.untrackable_bytes),
            uncovered: counted().filter(|(_, member)| member.tracked_bytes.is_none()).count(),
            mean_used_bytes: mean,
            imbalance: mean
                .zip(most)
                .filter(|(mean, _)| known > 1 && *mean > 0.0)
                .map(|(mean, most)| most as f64 / mean),
            worst,
            highest_peak: highest(|member| member.peak_used_bytes),
            ooms: total(members.iter().filter_map(|member| i64::try_from(member.ooms?).ok()))
                .map(i64::cast_unsigned),
        }
    }
}

/// Returns the sum, or `None` of no amounts: unknown is never zero.
fn total(amounts: impl Iterator<Item = i64>) -> Option<i64> {
    amounts.fold(None, |sum: Option<i64>, amount| Some(sum.unwrap_or(0).saturating_add(amount)))
}

/// Formats numbers as ranges such as `0-3, 5, 9-11`.
pub(crate) fn ranges(numbers: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match parts.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => parts.push((number, number)),
        }
    }
    let part = |(first, last): &(u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    parts.iter().map(part).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(rank: u32, used: Option<i64>) -> Member {
        let who = [("world_size".to_owned(), "4".to_owned())].into();
        Member { rank: Some(rank), pid: rank, used_bytes: used, state: "running", who, ..Member::default() }
    }

    #[test]
    fn the_worst_is_the_largest_that_is_known() {
        let members = [member(0, Some(10)), member(1, None), member(3, Some(30))];
        let sum = Sum::of(&members);
        assert_eq!((sum.used_bytes, sum.used_unknown, sum.worst), (Some(40), 1, Some(2)));
        assert_eq!((sum.imbalance, sum.missing_ranks, sum.is_over), (Some(1.5), vec![2], false));
        assert_eq!((sum.tracked_bytes, sum.uncovered, sum.ooms), (None, 3, None), "unknown is never zero");
        assert_eq!(Sum::of(&members[..1]).imbalance, None, "one alone is not out of balance");
        assert_eq!(Sum::of(&[]), Sum { is_over: true, ..Sum::default() });
    }

    #[test]
    fn what_has_ended_is_in_no_sum_with_what_runs() {
        let ended = Member { state: "ended", ..member(1, Some(100)) };
        let sum = Sum::of(&[member(0, Some(10)), ended.clone()]);
        assert_eq!((sum.used_bytes, sum.processes, sum.worst), (Some(10), 1, Some(0)));
        let sum = Sum::of(&[ended]);
        assert_eq!((sum.used_bytes, sum.is_over), (Some(100), true));
    }

    #[test]
    fn a_world_may_be_as_large_as_somebody_says() {
        let mut liar = member(0, Some(1));
        liar.who.insert("world_size".into(), u32::MAX.to_string());
        assert_eq!(Sum::of(&[liar]).missing_ranks.len(), MISSING);
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(ranges(&[u32::MAX]), u32::MAX.to_string());
        assert_eq!(ranges(&[]), "");
    }
}
