//! What is deleted from the store, a little at a time: checkpoints wait for nothing longer than one run's deletion.

use crate::stats::{Count, Stats};
use gpumem_runs::store::{Over, Store, StoreError};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant, SystemTime};

/// What may stay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// For so long after its last write; `None`: for ever.
    pub age: Option<Duration>,
    /// In a store of that size; `None`: of any.
    pub bytes: Option<u64>,
}

/// The size is looked at that often.
const LOOK: Duration = Duration::from_secs(30);
/// And ages.
const PLAN: Duration = Duration::from_secs(600);
/// A turn takes that long, or one run; the next one comes after [`PAUSE`].
const TURN: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_millis(100);
/// Pages that are given back in a turn.
const PAGES: u32 = 256;
/// Free pages that stay for the runs to come, as a part of the file; a file grows and shrinks by less than this in peace.
const SLACK: u64 = 16;
const LEAST_SLACK: u64 = 1 << 20;

/// What a turn found.
#[derive(Debug, Default)]
pub(super) struct Swept {
    pub(super) file_bytes: u64,
    pub(super) is_too_large: bool,
}

/// What is to be deleted, and when the next turn is.
#[derive(Debug)]
pub(super) struct Sweeper {
    retention: Retention,
    pub(super) next: Instant,
    next_plan: Instant,
    plan: Plan,
    /// Deletes until this is reached, once the store was too large.
    down_to: Option<u64>,
    /// Since the last word of it in the log: runs by age and by size.
    deleted: [u64; 2],
    is_too_large: bool,
}

impl Sweeper {
    pub(super) fn new(retention: Retention) -> Self {
        let now = Instant::now();
        Sweeper {
            retention,
            next: now,
            next_plan: now,
            plan: Plan::default(),
            down_to: None,
            deleted: [0, 0],
            is_too_large: false,
        }
    }

    /// There is no store to look at.
    pub(super) fn put_off(&mut self) {
        self.next = self.next.max(Instant::now() + LOOK);
    }

    /// Deletes what is too old or too much, for a moment.
    pub(super) fn turn(&mut self, store: &mut Store, stats: &Stats) -> Result<Swept, StoreError> {
        // Whatever goes wrong, not at once again.
        let started = Instant::now();
        self.next = started + LOOK;
        let mut room = store.room()?;
        if let Some(most) = self.retention.bytes.filter(|most| room.used_bytes() > *most) {
            // Well below, so that it does not begin again with the next run.
            self.down_to = Some(most - most / 10);
        }
        if started >= self.next_plan
            || self.down_to.is_some() && self.plan.users.is_empty() && !self.is_too_large
        {
            self.plan = Plan::of(store.over()?);
            self.next_plan = started + PLAN;
        }
        loop {
            let is_too_much = self.down_to.is_some_and(|bytes| room.used_bytes() > bytes);
            let old = self.plan.take_oldest(|over| self.retention.is_too_old(over));
            let by_age = old.is_some();
            let Some(next) = old.or_else(|| if is_too_much { self.plan.take_of_largest() } else { None })
            else {
                break;
            };
            if store.delete(next)? {
                let (count, place) = if by_age { (Count::DeletedAge, 0) } else { (Count::DeletedSize, 1) };
                stats.add(count, 1);
                self.deleted[place] += 1;
                room = store.room()?;
            }
            if started.elapsed() >= TURN {
                self.next = Instant::now() + PAUSE;
                return Ok(self.swept(room.file_bytes));
            }
        }
        self.is_too_large = self.retention.bytes.is_some_and(|most| room.used_bytes() > most);
        if !self.is_too_large {
            self.down_to = None;
        }
        // Nothing is left of the plan but what may stay.
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
                "runs were deleted from the store, as runs.keep_days and runs.max_size_mib say"
            );
        }
        Ok(self.swept(room.file_bytes))
    }

    fn swept(&self, file_bytes: u64) -> Swept {
        Swept { file_bytes, is_too_large: self.is_too_large }
    }
}

impl Retention {
    fn is_too_old(&self, over: &Over) -> bool {
        let written = Duration::from_secs(over.written_s.try_into().unwrap_or(0));
        let age = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default()
            .saturating_sub(written);
        self.age.is_some_and(|most| age > most)
    }
}

/// Runs that may be deleted. Where there is too much, the user whose runs take most loses their oldest: whoever fills the store
/// pushes out their own.
#[derive(Debug, Default)]
struct Plan {
    users: BTreeMap<Option<u64>, OfUser>,
    /// What a run takes of which nobody wrote it down.
    usual: u64,
}

#[derive(Debug, Default)]
struct OfUser {
    /// The oldest first.
    runs: VecDeque<Over>,
    bytes: u64,
}

impl Plan {
    /// Of these, the oldest first.
    fn of(all: Vec<Over>) -> Self {
        let known: Vec<u64> = all.iter().filter_map(|over| over.bytes).collect();
        let usual = known.iter().sum::<u64>().checked_div(known.len() as u64).unwrap_or(1);
        let mut plan = Plan { users: BTreeMap::new(), usual };
        for over in all {
            let of_user = plan.users.entry(over.uid).or_default();
            of_user.bytes += over.bytes.unwrap_or(usual);
            of_user.runs.push_back(over);
        }
        plan
    }

    fn take(&mut self, user: Option<u64>) -> Option<Over> {
        let of_user = self.users.get_mut(&user)?;
        let over = of_user.runs.pop_front()?;
        of_user.bytes -= over.bytes.unwrap_or(self.usual);
        if of_user.runs.is_empty() {
            self.users.remove(&user);
        }
        Some(over)
    }

    fn take_oldest(&mut self, is_wanted: impl Fn(&Over) -> bool) -> Option<Over> {
        let oldest = |of_user: &OfUser| of_user.runs.front().copied();
        let (over, user) = self
            .users
            .iter()
            .filter_map(|(user, of)| Some((oldest(of)?, *user)))
            .min_by_key(|(over, _)| (over.written_s, over.id))?;
        if is_wanted(&over) { self.take(user) } else { None }
    }

    fn take_of_largest(&mut self) -> Option<Over> {
        let (&user, _) = self.users.iter().max_by_key(|(_, of)| of.bytes)?;
        self.take(user)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_runs::store::RunId;

    fn over(id: i64, uid: Option<u64>, bytes: Option<u64>) -> Over {
        Over { id: RunId(id), written_s: id, uid, bytes }
    }

    #[test]
    fn who_takes_most_loses_their_oldest_until_all_take_the_same() {
        // One has little and was there first; another fills the store with large ones, a third with many small ones.
        let mut all = vec![over(1, Some(1), Some(100)), over(2, None, None)];
        all.extend((3..13).map(|id| over(id, Some(2), Some(1000))));
        all.extend((13..63).map(|id| over(id, Some(3), Some(10))));
        let mut plan = Plan::of(all);
        assert_eq!(plan.usual, (100 + 10 * 1000 + 50 * 10) / 61);
        let ids: Vec<i64> = std::iter::from_fn(|| plan.take_of_largest()).map(|over| over.id.0).collect();
        assert_eq!(ids[..9], [3, 4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(ids[9], 12, "the last of them is still the largest");
        assert_eq!(ids.iter().position(|id| *id == 13), Some(10));
        let place = |id: i64| ids.iter().position(|of| *of == id).expect("it was there");
        assert!(place(1) > place(52) && place(2) > place(45), "{ids:?}");
        assert_eq!(ids.len(), 62);
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
