//! What waits for the store: the newest state of each run, in a bounded part of memory.
//!
//! Who keeps a run puts it here and goes on, whatever the thread that writes does: a disk that stands still must not make the daemon
//! grow. When there is no room, the user whose runs take most loses first, and of theirs those that go on: these come again.

use gpumem_runs::run::{Run, State};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Runs that may wait.
const WAITING: usize = 512;
/// Bytes of them, unless the configuration says otherwise.
pub(super) const BYTES: usize = 64 << 20;

/// A run that is to be written.
#[derive(Debug)]
pub(super) struct Waiting {
    pub uid: String,
    pub run: Box<Run>,
    pub over: bool,
    bytes: usize,
}

impl Waiting {
    pub fn new(uid: String, run: Run, over: bool) -> Self {
        let bytes = run.weight() + uid.len();
        Waiting { uid, run: Box::new(run), over, bytes }
    }

    pub fn is_rolled(&self) -> bool {
        matches!(self.run.state, State::Rolled { .. })
    }
}

/// All that wait, oldest first.
#[derive(Debug)]
pub(super) struct Shelf {
    waiting: VecDeque<Arc<Waiting>>,
    bytes: usize,
    /// Set while the thread writes it; it may be in `waiting` no more.
    writing: Option<Arc<Waiting>>,
    pub most: usize,
    /// The thread has been told that there is something, and has not looked yet.
    pub is_told: bool,
}

impl Default for Shelf {
    fn default() -> Self {
        Shelf { waiting: VecDeque::new(), bytes: 0, writing: None, most: BYTES, is_told: false }
    }
}

impl Shelf {
    /// How many runs, and how many bytes they take.
    pub fn load(&self) -> (usize, usize) {
        (self.waiting.len(), self.bytes)
    }

    pub fn all(&self) -> impl DoubleEndedIterator<Item = &Arc<Waiting>> {
        self.waiting.iter()
    }

    /// The next one to be written: until it is [`done`](Self::done), or the next one is asked for.
    pub fn first(&mut self) -> Option<Arc<Waiting>> {
        self.writing = self.waiting.front().cloned();
        self.writing.clone()
    }

    /// The newest state of a part takes the place of an older one; a part that has rolled is not the next one. Says how many runs
    /// are lost for want of room.
    pub fn put(&mut self, new: Waiting) -> u64 {
        self.bytes += new.bytes;
        match self.waiting.iter_mut().find(|waiting| waiting.uid == new.uid && !waiting.is_rolled()) {
            Some(waiting) => {
                self.bytes -= waiting.bytes;
                *waiting = Arc::new(new);
            }
            None => self.waiting.push_back(Arc::new(new)),
        }
        let mut lost = 0;
        while self.waiting.len() > WAITING || self.bytes > self.most {
            let Some(place) = self.least_wanted() else { break };
            lost += u64::from(self.remove(place).is_some_and(|waiting| waiting.over));
        }
        lost
    }

    fn least_wanted(&self) -> Option<usize> {
        let is_written = |waiting: &Arc<Waiting>| {
            self.writing.as_ref().is_some_and(|writing| Arc::ptr_eq(writing, waiting))
        };
        let mut users = BTreeMap::<Option<u64>, usize>::new();
        for waiting in self.waiting.iter().filter(|waiting| !is_written(waiting)) {
            *users.entry(waiting.run.process.uid).or_default() += waiting.bytes;
        }
        let (user, _) = users.into_iter().max_by_key(|(_, bytes)| *bytes)?;
        let is_theirs = |waiting: &Arc<Waiting>| waiting.run.process.uid == user && !is_written(waiting);
        let living = self.waiting.iter().position(|waiting| is_theirs(waiting) && !waiting.over);
        living.or_else(|| self.waiting.iter().position(is_theirs))
    }

    fn remove(&mut self, place: usize) -> Option<Arc<Waiting>> {
        let removed = self.waiting.remove(place);
        self.bytes -= removed.as_ref().map_or(0, |waiting| waiting.bytes);
        removed
    }

    /// This one is written. If there is a newer state by now, it comes after the others.
    pub fn done(&mut self, written: &Arc<Waiting>) {
        self.writing = None;
        if let Some(place) = self.waiting.iter().position(|waiting| Arc::ptr_eq(waiting, written)) {
            self.remove(place);
            return;
        }
        let mut of_life = (0..).zip(&self.waiting).filter(|(_, waiting)| waiting.uid == written.uid);
        // Parts of one life are written in their order.
        if let (Some((place, _)), None) = (of_life.next(), of_life.next())
            && let Some(newer) = self.waiting.remove(place)
        {
            self.waiting.push_back(newer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::run;
    use super::*;

    fn waiting(uid: u64, life: u64, over: bool, tag: usize) -> Waiting {
        let mut run = run(life);
        run.process.uid = Some(uid);
        run.process.facts.insert("command".into(), "x".repeat(tag));
        Waiting::new(format!("{uid}:{life}"), run, over)
    }

    fn names(shelf: &Shelf) -> Vec<&str> {
        shelf.all().map(|waiting| waiting.uid.as_str()).collect()
    }

    #[test]
    fn who_takes_most_loses_first_and_of_theirs_what_comes_again() {
        let mut shelf = Shelf { most: 1 << 20, ..Shelf::default() };
        assert_eq!(shelf.put(waiting(1, 1, true, 1000)), 0);
        let mut lost = 0;
        for life in 0..100 {
            lost += shelf.put(waiting(2, life, life % 2 == 0, 100_000));
        }
        // Ten or fewer have room: those that are over, the newest of them.
        let (count, bytes) = shelf.load();
        assert!(count >= 9 && bytes <= 1 << 20, "{count} of {bytes} bytes");
        assert_eq!(names(&shelf)[0], "1:1");
        assert!(shelf.all().all(|waiting| waiting.over));
        assert_eq!(lost + count as u64 - 1, 50, "each that is over waits or is counted");
        // One that has no room at all is lost, and everything else stays.
        assert_eq!(shelf.put(waiting(3, 1, true, 2 << 20)), 1);
        assert_eq!(shelf.load(), (count, bytes));
    }

    #[test]
    fn what_became_newer_while_it_was_written_comes_after_the_others() {
        let mut shelf = Shelf::default();
        shelf.put(waiting(1, 1, false, 1));
        shelf.put(waiting(1, 2, false, 1));
        let first = shelf.first().expect("it waits");
        shelf.put(waiting(1, 1, true, 1));
        shelf.done(&first);
        assert_eq!(names(&shelf), ["1:2", "1:1"]);
        let second = shelf.first().expect("it waits");
        shelf.done(&second);
        assert_eq!(names(&shelf), ["1:1"]);
        assert_eq!(shelf.load().1, shelf.first().expect("it waits").bytes);
    }
}
