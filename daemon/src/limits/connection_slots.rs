//! Quotas: how many peers may be there at once, in all, of one user, and without having said hello.

use super::user_queue::Turn;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What peers on the agent socket may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once.
    pub connections: usize,
    /// Of one user.
    pub connections_per_uid: usize,
    /// That have not said hello.
    pub waiting: usize,
    /// Time for the hello.
    pub hello: Duration,
    /// What one connection may send in a second; more waits. 0: as much as the daemon can take.
    pub bytes_per_s: u64,
    /// Largest memory that an agent may hand over.
    pub shared_bytes: u64,
    /// Rows of it that are read when it ends with holes in its history.
    pub rows: usize,
}

/// Why there is no seat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// All are taken.
    All,
    /// This user's are.
    OfUid,
    /// Those for peers that have not said hello.
    Waiting,
}

/// How long a peer may wait to say hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// [`Limits::hello`].
    Whole,
    /// [`BRIEF`]: the seats of those that may wait for longer are taken. A program that is about to say hello may have been
    /// interrupted between connect(2) and its hello, and if it lives for milliseconds it does not come again.
    Brief,
}

/// Time for the hello of a peer that came when as many as may were waiting.
pub(crate) const BRIEF: Duration = Duration::from_millis(500);
/// Peers that may wait that briefly, as a multiple of [`Limits::waiting`].
const BRIEF_SHARE: usize = 4;

/// Peers that have not said hello.
#[derive(Debug, Default)]
struct Waiting {
    all: usize,
    by_uid: HashMap<u32, usize>,
}

impl Waiting {
    /// Whether `limit`, or a quarter of it for one user, is reached: silent peers of one user leave three quarters to the others.
    fn is_full(&self, uid: u32, limit: usize) -> bool {
        let of_uid = self.by_uid.get(&uid).copied().unwrap_or(0);
        self.all >= limit || of_uid >= (limit / 4).max(1)
    }
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    by_uid: HashMap<u32, usize>,
    waiting: Waiting,
    brief: Waiting,
    turns: HashMap<u32, Arc<Turn>>,
}

impl Taken {
    fn waiting(&mut self, patience: Patience) -> &mut Waiting {
        match patience {
            Patience::Whole => &mut self.waiting,
            Patience::Brief => &mut self.brief,
        }
    }
}

/// Who sits.
#[derive(Debug, Default)]
pub(crate) struct Seats(Mutex<Taken>);

/// A place among the connections; given back when dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    seats: Arc<Seats>,
    uid: u32,
    /// Until its hello.
    waits: Option<Patience>,
    /// What it shares with the others of its user.
    pub turn: Arc<Turn>,
}

impl Seats {
    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connections now, and how many of them have not said hello, without those that may wait briefly only.
    pub(crate) fn count(&self) -> (usize, usize) {
        let taken = self.taken();
        (taken.all - taken.brief.all, taken.waiting.all)
    }

    /// Connections that have said hello.
    pub(crate) fn welcomed(&self) -> usize {
        let taken = self.taken();
        taken.all - taken.waiting.all - taken.brief.all
    }

    /// A seat for a peer that has said nothing yet.
    ///
    /// # Errors
    /// [`Full`].
    pub(crate) fn take(self: &Arc<Self>, uid: u32, limits: &Limits) -> Result<Seat, Full> {
        self.take_as(uid, limits, true)
    }

    /// A seat for a peer whose hello has come: it does not count among those that wait.
    ///
    /// # Errors
    /// [`Full`].
    pub(crate) fn take_for_hello(self: &Arc<Self>, uid: u32, limits: &Limits) -> Result<Seat, Full> {
        self.take_as(uid, limits, false)
    }

    fn take_as(self: &Arc<Self>, uid: u32, limits: &Limits, waiting: bool) -> Result<Seat, Full> {
        let mut taken = self.taken();
        if taken.all >= limits.connections {
            return Err(Full::All);
        }
        if taken.by_uid.get(&uid).copied().unwrap_or(0) >= limits.connections_per_uid {
            return Err(Full::OfUid);
        }
        let waits = match waiting {
            false => None,
            true if !taken.waiting.is_full(uid, limits.waiting) => Some(Patience::Whole),
            true if !taken.brief.is_full(uid, limits.waiting.saturating_mul(BRIEF_SHARE)) => {
                Some(Patience::Brief)
            }
            true => return Err(Full::Waiting),
        };
        taken.all += 1;
        *taken.by_uid.entry(uid).or_default() += 1;
        if let Some(patience) = waits {
            let waiting = taken.waiting(patience);
            waiting.all += 1;
            *waiting.by_uid.entry(uid).or_default() += 1;
        }
        let turn = Arc::clone(taken.turns.entry(uid).or_default());
        Ok(Seat { seats: Arc::clone(self), uid, waits, turn })
    }
}

fn less(map: &mut HashMap<u32, usize>, uid: u32) {
    if let Some(count) = map.get_mut(&uid) {
        *count -= 1;
        if *count == 0 {
            map.remove(&uid);
        }
    }
}

impl Seat {
    /// The peer has said hello.
    pub(crate) fn welcomed(&mut self) {
        if let Some(patience) = self.waits.take() {
            let mut taken = self.seats.taken();
            let waiting = taken.waiting(patience);
            waiting.all -= 1;
            less(&mut waiting.by_uid, self.uid);
        }
    }

    /// How long it may wait to say hello.
    pub(crate) fn patience(&self) -> Patience {
        self.waits.unwrap_or(Patience::Whole)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.welcomed();
        let mut taken = self.seats.taken();
        taken.all -= 1;
        less(&mut taken.by_uid, self.uid);
        if !taken.by_uid.contains_key(&self.uid) {
            taken.turns.remove(&self.uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_holds_and_is_given_back() {
        let limits = Limits {
            connections: 3,
            connections_per_uid: 2,
            waiting: 4,
            hello: Duration::from_secs(1),
            bytes_per_s: 0,
            shared_bytes: 0,
            rows: 0,
        };
        let seats = Arc::new(Seats::default());
        let mut first = seats.take(1, &limits).unwrap();
        let brief =
            seats.take(1, &limits).expect("it may wait briefly: a quarter of those that wait is taken");
        assert_eq!((first.patience(), brief.patience()), (Patience::Whole, Patience::Brief));
        assert_eq!((seats.count(), seats.welcomed()), ((1, 1), 0));
        drop(brief);
        drop(seats.take_for_hello(1, &limits).expect("it does not wait"));
        first.welcomed();
        let mut second = seats.take(1, &limits).unwrap();
        second.welcomed();
        assert_eq!(seats.take(1, &limits).unwrap_err(), Full::OfUid);
        let other = seats.take(2, &limits).unwrap();
        assert_eq!(seats.take(3, &limits).unwrap_err(), Full::All);
        assert_eq!(seats.count(), (3, 1));
        drop((first, second, other));
        assert_eq!(seats.count(), (0, 0));
        assert!(seats.taken().by_uid.is_empty() && seats.taken().waiting.by_uid.is_empty());
        assert!(seats.taken().brief.by_uid.is_empty());
        assert!(seats.taken().turns.is_empty());
    }

    #[test]
    fn those_that_may_wait_briefly_are_bounded_too() {
        let limits = Limits {
            connections: 1000,
            connections_per_uid: 1000,
            waiting: 8,
            hello: Duration::from_secs(1),
            bytes_per_s: 0,
            shared_bytes: 0,
            rows: 0,
        };
        let seats = Arc::new(Seats::default());
        let of = |uid| std::iter::from_fn(|| seats.take(uid, &limits).ok()).collect::<Vec<_>>();
        let one = of(1);
        assert_eq!(one.len(), 2 + 8);
        assert_eq!(seats.take(1, &limits).unwrap_err(), Full::Waiting);
        let others: Vec<_> = (2..9).flat_map(of).collect();
        assert_eq!(one.len() + others.len(), 8 + 32, "a user's silent peers leave most to the others");
    }
}
