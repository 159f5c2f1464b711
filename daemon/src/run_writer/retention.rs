//! Deletes old runs from the store, a few at a time. So a run waits to be written at most for the deletion of one other run.

use crate::clock;
use crate::stats::{Count, Stats};
use gpumem_runs::store::{DeletableRun, Store, StoreError};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Rules for deleting runs from the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// Time after its last write for which a run is kept; `None`: no limit.
    pub age: Option<Duration>,
    /// Time for which the wall clock must be without a jump before runs are deleted for their age.
    pub steady: Duration,
    /// Limit of the size of the store's file in bytes; `None`: no limit.
    pub bytes: Option<u64>,
}

/// Interval for comparing the store's size with its limit.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// Interval for comparing the ages of runs with the limit.
const PLAN_INTERVAL: Duration = Duration::from_secs(600);
/// Duration of one turn of deletions, or longer if deleting one run takes longer. The next turn follows after [`PAUSE`].
const TURN: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of free database pages that are returned to the file system in a turn.
const PAGES: u32 = 256;
/// Free bytes that stay in the file for future runs: the file's size divided by this, and at least [`LEAST_SLACK`]. If more are
/// free, the file shrinks.
const SLACK: u64 = 16;
const LEAST_SLACK: u64 = 1 << 20;

/// A larger change of the wall clock against the boot clock is a jump. A correction by a time server is smaller.
const JUMP: Duration = Duration::from_secs(60);
/// After a longer gap between two writes, the wall clock is doubtful until it is this far beyond the end of the gap.
const GAP: Duration = Duration::from_secs(7 * 86_400);

/// Reason why no run is deleted for its age although some are old by the wall clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Doubt {
    /// The daemon has started a short time ago.
    #[error("the daemon started less than runs.keep_steady_s ago")]
    Begun,
    /// The wall clock has jumped since the daemon's start.
    #[error("the clock jumped less than runs.keep_steady_s ago")]
    Jumped,
    /// The wall clock is far later than the last write to the store, so it may be wrong.
    #[error("the clock is {days} days after the latest write of a run, and may be wrong")]
    Gap {
        /// Number of days between two writes, or between the last one and now.
        days: u64,
    },
}

/// Detects jumps of the wall clock by comparing it with the boot clock.
#[derive(Debug)]
struct ClockWatch {
    /// Wall clock minus time since boot, in s, at the last comparison.
    offset_s: i64,
    /// Time since boot at which the wall clock last jumped, or the daemon started.
    steady_since: Duration,
    has_jumped: bool,
}

impl ClockWatch {
    fn new(wall_s: i64, up: Duration) -> Self {
        ClockWatch { offset_s: offset_s(wall_s, up), steady_since: up, has_jumped: false }
    }

    /// Compares both clocks. Returns whether the wall clock has jumped since the last comparison.
    fn compare(&mut self, wall_s: i64, up: Duration) -> bool {
        let offset_s = offset_s(wall_s, up);
        let jumps = offset_s.abs_diff(self.offset_s) > JUMP.as_secs();
        if jumps {
            (self.steady_since, self.has_jumped) = (up, true);
            tracing::warn!(seconds = offset_s.saturating_sub(self.offset_s), "the clock was set");
        }
        // Each comparison is with the previous one, so small corrections do not add up to a jump.
        self.offset_s = offset_s;
        jumps
    }

    /// Returns why ages by the wall clock are not trusted; `None` if they are. `least`: required time without a jump.
    /// `written`: times of writes in any order, in s since 1970.
    fn doubt(&self, wall_s: i64, up: Duration, least: Duration, written: &[i64]) -> Option<Doubt> {
        let steady = up.saturating_sub(self.steady_since);
        if steady < least {
            return Some(if self.has_jumped { Doubt::Jumped } else { Doubt::Begun });
        }
        // Go back from the start of the steady period of the clock, from each write to the one before, to the first gap.
        let gap_s = GAP.as_secs().cast_signed();
        let mut since_s = wall_s.saturating_sub(steady.as_secs().cast_signed());
        let mut written: Vec<i64> = written.iter().copied().filter(|at| *at < since_s).collect();
        written.sort_unstable();
        for at_s in written.into_iter().rev() {
            let apart_s = since_s.saturating_sub(at_s);
            if apart_s > gap_s {
                let days = apart_s.unsigned_abs() / 86_400;
                return (wall_s.saturating_sub(since_s) < gap_s).then_some(Doubt::Gap { days });
            }
            since_s = at_s;
        }
        None
    }
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

fn offset_s(wall_s: i64, up: Duration) -> i64 {
    wall_s.saturating_sub(up.as_secs().cast_signed())
}

/// Deletes runs in turns: the planned deletions, and the time of the next turn.
#[derive(Debug)]
pub(super) struct Sweeper {
    retention: Retention,
    pub(super) next: Instant,
    next_plan: Instant,
    plan: Plan,
    /// If the store was too large: size in bytes down to which runs are deleted.
    target_bytes: Option<u64>,
    /// Numbers of runs deleted since the last log line: first for their age, then for the store's size.
    deleted: [u64; 2],
    /// Whether the store is larger than its limit although no run in it may be deleted.
    pub(super) is_too_large: bool,
    watch: ClockWatch,
    pub(super) doubt: Option<Doubt>,
}

impl Sweeper {
    pub(super) fn new(retention: Retention) -> Self {
        let now = Instant::now();
        Sweeper {
            retention,
            next: now,
            next_plan: now,
            plan: Plan::default(),
            target_bytes: None,
            deleted: [0, 0],
            is_too_large: false,
            watch: ClockWatch::new(seconds(clock::wall()), clock::since_boot()),
            doubt: None,
        }
    }

    /// Applies other limits. The observations of the clock are kept.
    pub(super) fn set_retention(&mut self, retention: Retention) {
        let now = Instant::now();
        (self.retention, self.next, self.next_plan) = (retention, now, now);
        (self.plan, self.target_bytes, self.is_too_large) = (Plan::default(), None, false);
    }

    /// Decides whether ended runs are deleted for their age by the wall clock. Logs a change of the decision.
    fn update_doubt(&mut self, over: &[DeletableRun], wall: Duration, up: Duration) {
        let written: Vec<i64> = over.iter().map(|over| over.written_s).collect();
        let has_old = over.iter().any(|over| self.retention.is_too_old(over, wall));
        let wall_s = seconds(wall);
        let doubt = self.watch.doubt(wall_s, up, self.retention.steady, &written).filter(|_| has_old);
        if doubt != self.doubt {
            match doubt {
                Some(doubt) => tracing::warn!(why = %doubt, "no run is deleted for its age"),
                None => tracing::info!("the clock is trusted again: runs that are too old are deleted"),
            }
        }
        self.doubt = doubt;
    }

    /// Postpones the next turn, because the store is not open.
    pub(super) fn postpone(&mut self) {
        self.next = self.next.max(Instant::now() + CHECK_INTERVAL);
    }

    /// Deletes runs that are too old, or that make the store too large. Stops after the length of a turn.
    pub(super) fn turn(&mut self, store: &mut Store, stats: &Stats) -> Result<u64, StoreError> {
        // After any error, the next turn is after the normal interval.
        let started = Instant::now();
        self.next = started + CHECK_INTERVAL;
        let mut room = store.room()?;
        if let Some(max) = self.retention.bytes.filter(|max| room.used_bytes() > *max) {
            // The target is well below the limit, so that the next stored run does not exceed the limit again.
            self.target_bytes = Some(max - max / 10);
        }
        let (wall, up) = (clock::wall(), clock::since_boot());
        if self.watch.compare(seconds(wall), up) {
            // The plan was made before the clock jumped, so it is made anew.
            self.next_plan = started;
        }
        if started >= self.next_plan
            || self.target_bytes.is_some() && self.plan.users.is_empty() && !self.is_too_large
        {
            let over = store.deletable_runs()?;
            self.update_doubt(&over, wall, up);
            self.plan = Plan::of(over);
            self.next_plan = started + PLAN_INTERVAL;
        }
        loop {
            let is_too_much = self.target_bytes.is_some_and(|bytes| room.used_bytes() > bytes);
            let is_old = |over: &DeletableRun| self.doubt.is_none() && self.retention.is_too_old(over, wall);
            let (next, count, index) = if let Some(old) = self.plan.take_oldest(is_old) {
                (old, Count::DeletedAge, 0)
            } else if is_too_much && let Some(next) = self.plan.take_oldest_of_largest() {
                (next, Count::DeletedSize, 1)
            } else {
                break;
            };
            if store.delete(next)? {
                stats.add(count, 1);
                self.deleted[index] += 1;
                room = store.room()?;
            }
            if started.elapsed() >= TURN {
                self.next = Instant::now() + PAUSE;
                return Ok(room.file_bytes);
            }
        }
        self.is_too_large = self.retention.bytes.is_some_and(|max| room.used_bytes() > max);
        if !self.is_too_large {
            self.target_bytes = None;
        }
        // The store is small enough, or no other run may be deleted, so the plan is done.
        self.plan = Plan::default();
        if room.free_bytes > (room.file_bytes / SLACK).max(LEAST_SLACK) {
            store.shrink(PAGES)?;
            store.merge()?;
            self.next = Instant::now() + PAUSE;
        } else if self.deleted != [0, 0] {
            let [by_age, by_size] = std::mem::take(&mut self.deleted);
            let mib = room.file_bytes >> 20;
            tracing::info!(
                by_age,
                by_size,
                mib,
                "runs were deleted from the store, because of runs.keep_days or runs.max_size_mib"
            );
        }
        Ok(room.file_bytes)
    }
}

impl Retention {
    fn is_too_old(&self, over: &DeletableRun, wall: Duration) -> bool {
        let age = wall.saturating_sub(Duration::from_secs(over.written_s.try_into().unwrap_or(0)));
        self.age.is_some_and(|max| age > max)
    }
}

/// Runs that may be deleted. If the store is too large, the user with the most bytes loses their oldest runs. So a user who fills
/// the store loses only their own runs.
#[derive(Debug, Default)]
struct Plan {
    users: BTreeMap<Option<u64>, UserRuns>,
    /// Assumed size, in bytes, of a run whose size is not recorded.
    default_bytes: u64,
}

#[derive(Debug, Default)]
struct UserRuns {
    /// Runs of the user, oldest first.
    runs: VecDeque<DeletableRun>,
    bytes: u64,
}

impl Plan {
    /// Makes a plan from the ended runs `all`, which are ordered by age, oldest first.
    fn of(all: Vec<DeletableRun>) -> Self {
        let known: Vec<u64> = all.iter().filter_map(|over| over.bytes).collect();
        let default_bytes = known.iter().sum::<u64>().checked_div(known.len() as u64).unwrap_or(1);
        let mut plan = Plan { users: BTreeMap::new(), default_bytes };
        for over in all {
            let user_runs = plan.users.entry(over.uid).or_default();
            user_runs.bytes += over.bytes.unwrap_or(default_bytes);
            user_runs.runs.push_back(over);
        }
        plan
    }

    fn take(&mut self, user: Option<u64>) -> Option<DeletableRun> {
        let user_runs = self.users.get_mut(&user)?;
        let over = user_runs.runs.pop_front()?;
        user_runs.bytes -= over.bytes.unwrap_or(self.default_bytes);
        if user_runs.runs.is_empty() {
            self.users.remove(&user);
        }
        Some(over)
    }

    fn take_oldest(&mut self, is_wanted: impl Fn(&DeletableRun) -> bool) -> Option<DeletableRun> {
        let oldest = |user_runs: &UserRuns| user_runs.runs.front().copied();
        let (over, user) = self
            .users
            .iter()
            .filter_map(|(user, runs)| Some((oldest(runs)?, *user)))
            .min_by_key(|(over, _)| (over.written_s, over.id))?;
        if is_wanted(&over) { self.take(user) } else { None }
    }

    fn take_oldest_of_largest(&mut self) -> Option<DeletableRun> {
        let (&user, _) = self.users.iter().max_by_key(|(_, runs)| runs.bytes)?;
        self.take(user)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_runs::store::RunId;

    fn over(id: i64, uid: Option<u64>, bytes: Option<u64>) -> DeletableRun {
        DeletableRun { id: RunId(id), written_s: id, uid, bytes }
    }

    #[test]
    fn who_takes_most_loses_their_oldest_until_all_take_the_same() {
        // One user has few bytes and was first; another fills the store with large runs, a third with many small ones.
        let mut all = vec![over(1, Some(1), Some(100)), over(2, None, None)];
        all.extend((3..13).map(|id| over(id, Some(2), Some(1000))));
        all.extend((13..63).map(|id| over(id, Some(3), Some(10))));
        let mut plan = Plan::of(all);
        assert_eq!(plan.default_bytes, (100 + 10 * 1000 + 50 * 10) / 61);
        let ids: Vec<i64> =
            std::iter::from_fn(|| plan.take_oldest_of_largest()).map(|over| over.id.0).collect();
        assert_eq!(ids[..9], [3, 4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(ids[9], 12, "the last of them is still the largest");
        assert_eq!(ids.iter().position(|id| *id == 13), Some(10));
        let place = |id: i64| ids.iter().position(|of| *of == id).expect("it was there");
        assert!(place(1) > place(52) && place(2) > place(45), "{ids:?}");
        assert_eq!(ids.len(), 62);
    }

    const DAY: i64 = 86_400;
    const HOUR: Duration = Duration::from_secs(3600);

    /// Returns the doubt about a clock at `wall_s` that was steady for `steady`, with runs written this many days before `NOW`.
    fn doubt(wall_s: i64, steady: Duration, days_before: &[i64]) -> Option<Doubt> {
        let up = Duration::from_secs(1000);
        let begun_s = wall_s - steady.as_secs().cast_signed();
        let written: Vec<i64> = days_before.iter().map(|days| NOW - days * DAY).collect();
        let mut watch = ClockWatch::new(begun_s, up);
        watch.compare(wall_s, up + steady);
        watch.doubt(wall_s, up + steady, HOUR, &written)
    }

    const NOW: i64 = 20_000 * DAY;

    #[test]
    fn ages_count_by_a_clock_that_has_been_steady() {
        let daily: Vec<i64> = (0..144).collect();
        assert_eq!(doubt(NOW, HOUR, &daily), None);
        assert_eq!(doubt(NOW, HOUR / 2, &daily), Some(Doubt::Begun));
        // A year ahead at the start, and with runs that the daemon wrote by that clock.
        let year = NOW + 365 * DAY;
        assert_eq!(doubt(year, HOUR / 2, &daily), Some(Doubt::Begun));
        assert_eq!(doubt(year, HOUR, &daily), Some(Doubt::Gap { days: 364 }));
        let written = [&daily[..], &[-365]].concat();
        assert_eq!(doubt(year + DAY, HOUR, &written), Some(Doubt::Gap { days: 365 }));
        // Steady for long enough to be trusted. A daemon that ran all the time needs no writes.
        assert_eq!(doubt(year, Duration::from_secs(8 * 86_400), &daily), None);
        assert_eq!(doubt(NOW + 30 * DAY, Duration::from_secs(30 * 86_400), &daily), None);
        assert_eq!(doubt(NOW, HOUR, &[]), None);
    }

    #[test]
    fn clock_that_jumps_is_not_believed_for_a_while() {
        let up = Duration::from_secs(1000);
        let mut watch = ClockWatch::new(NOW, up);
        for (hours, ahead_s) in [(1_u32, 0), (2, 20), (3, 40), (4, 90)] {
            watch.compare(NOW + 3600 * i64::from(hours) + ahead_s, up + HOUR * hours);
        }
        let at = |hours: u32, ahead_s: i64| (NOW + 3600 * i64::from(hours) + ahead_s, up + HOUR * hours);
        let (wall_s, later) = at(4, 90);
        assert_eq!(watch.doubt(wall_s, later, HOUR, &[NOW]), None, "time servers correct a little");
        let (wall_s, later) = at(5, 365 * DAY);
        watch.compare(wall_s, later);
        assert_eq!(watch.doubt(wall_s, later, HOUR, &[NOW]), Some(Doubt::Jumped));
        let (wall_s, later) = at(6, 365 * DAY);
        watch.compare(wall_s, later);
        assert_eq!(watch.doubt(wall_s, later, HOUR, &[NOW]), Some(Doubt::Gap { days: 365 }));
        // Corrected again.
        let (wall_s, later) = at(7, 0);
        watch.compare(wall_s, later);
        assert_eq!(watch.doubt(wall_s, later, HOUR, &[NOW]), Some(Doubt::Jumped));
        let (wall_s, later) = at(8, 0);
        watch.compare(wall_s, later);
        assert_eq!(watch.doubt(wall_s, later, HOUR, &[NOW]), None);
    }

    #[test]
    fn age_asks_nobody_whose_it_is() {
        let mut plan =
            Plan::of(vec![over(1, Some(2), Some(1)), over(2, Some(1), Some(9)), over(3, Some(2), Some(1))]);
        let mut old = || plan.take_oldest(|over| over.written_s < 3).map(|over| over.id.0);
        assert_eq!([old(), old(), old()], [Some(1), Some(2), None]);
        assert_eq!(plan.users.len(), 1);
    }
}
