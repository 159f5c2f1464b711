//! Quotas: how many peers may be there at once, in all, of one user, and without having said hello.

use super::turns::Turn;
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
pub enum Full {
    /// All are taken.
    All,
    /// This user's are.
    OfUid,
    /// Those for peers that have not said hello.
    Waiting,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    waiting: usize,
    by_uid: HashMap<u32, usize>,
    waiting_by_uid: HashMap<u32, usize>,
    turns: HashMap<u32, Arc<Turn>>,
}

/// Who sits.
#[derive(Debug, Default)]
pub struct Seats(Mutex<Taken>);

/// A place among the connections; given back when dropped.
#[derive(Debug)]
pub struct Seat {
    seats: Arc<Seats>,
    uid: u32,
    waiting: bool,
    /// What it shares with the others of its user.
    pub turn: Arc<Turn>,
}

impl Seats {
    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connections now, and how many of them have not said hello.
    pub fn count(&self) -> (usize, usize) {
        let taken = self.taken();
        (taken.all, taken.waiting)
    }

    /// Connections that have said hello.
    pub fn welcomed(&self) -> usize {
        let taken = self.taken();
        taken.all - taken.waiting
    }

    /// A seat for a peer that has said nothing yet.
    ///
    /// # Errors
    /// [`Full`].
    pub fn take(self: &Arc<Self>, uid: u32, limits: &Limits) -> Result<Seat, Full> {
        self.take_as(uid, limits, true)
    }

    /// A seat for a peer whose hello has come: it does not count among those that wait.
    ///
    /// # Errors
    /// [`Full`].
    pub fn take_for_hello(self: &Arc<Self>, uid: u32, limits: &Limits) -> Result<Seat, Full> {
        self.take_as(uid, limits, false)
    }

    fn take_as(self: &Arc<Self>, uid: u32, limits: &Limits, waiting: bool) -> Result<Seat, Full> {
        let mut taken = self.taken();
        let of = |map: &HashMap<u32, usize>| map.get(&uid).copied().unwrap_or(0);
        if taken.all >= limits.connections {
            return Err(Full::All);
        }
        if of(&taken.by_uid) >= limits.connections_per_uid {
            return Err(Full::OfUid);
        }
        // One user's silent peers leave three quarters to the others.
        let is_full =
            taken.waiting >= limits.waiting || of(&taken.waiting_by_uid) >= (limits.waiting / 4).max(1);
        if waiting && is_full {
            return Err(Full::Waiting);
        }
        taken.all += 1;
        *taken.by_uid.entry(uid).or_default() += 1;
        if waiting {
            taken.waiting += 1;
            *taken.waiting_by_uid.entry(uid).or_default() += 1;
        }
        let turn = Arc::clone(taken.turns.entry(uid).or_default());
        Ok(Seat { seats: Arc::clone(self), uid, waiting, turn })
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
    pub fn welcomed(&mut self) {
        if std::mem::take(&mut self.waiting) {
            let mut taken = self.seats.taken();
            taken.waiting -= 1;
            less(&mut taken.waiting_by_uid, self.uid);
        }
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
        assert_eq!(seats.take(1, &limits).unwrap_err(), Full::Waiting, "a quarter of those that wait");
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
        assert!(seats.taken().by_uid.is_empty() && seats.taken().waiting_by_uid.is_empty());
        assert!(seats.taken().turns.is_empty());
    }
}
