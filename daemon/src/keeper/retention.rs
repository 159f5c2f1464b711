//! What is deleted from the store, a little at a time: checkpoints wait for nothing longer than one run's deletion.

use crate::stats::{Count, Stats};
use gpumem_runs::store::{Over, Store, StoreError};
use std::collections::VecDeque;
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
    /// Runs that may be deleted, the oldest first.
    plan: VecDeque<Over>,
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
            plan: VecDeque::new(),
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
        if started >= self.next_plan || self.down_to.is_some() && self.plan.is_empty() && !self.is_too_large {
            self.plan = store.over()?.into();
            self.next_plan = started + PLAN;
        }
        while let Some(&oldest) = self.plan.front() {
            let by_age = self.is_too_old(oldest);
            let is_too_much = self.down_to.is_some_and(|bytes| room.used_bytes() > bytes);
            if !by_age && !is_too_much {
                break;
            }
            self.plan.pop_front();
            if store.delete(oldest)? {
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
        self.plan.clear();
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

    fn is_too_old(&self, over: Over) -> bool {
        let written = Duration::from_secs(over.written_s.try_into().unwrap_or(0));
        let age = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default()
            .saturating_sub(written);
        self.retention.age.is_some_and(|most| age > most)
    }
}
