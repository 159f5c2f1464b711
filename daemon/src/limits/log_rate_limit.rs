//! What is logged about peers: everything, as long as it is little. A user who comes and goes all the time must not push what the
//! daemon says of others out of the log.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines about the peers of one user,
const LINES: u32 = 50;
/// in so much time.
const WINDOW: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Window {
    since: Instant,
    by_uid: HashMap<u32, u32>,
}

/// Who was spoken of.
#[derive(Debug)]
pub(crate) struct Voice(Mutex<Window>);

impl Default for Voice {
    fn default() -> Self {
        Voice(Mutex::new(Window { since: Instant::now(), by_uid: HashMap::new() }))
    }
}

impl Voice {
    /// Whether to say one more thing about a peer of this user. The last one that is said tells that no more will be.
    pub(crate) fn speaks(&self, uid: u32) -> bool {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if window.since.elapsed() >= WINDOW {
            *window = Window { since: Instant::now(), by_uid: HashMap::new() };
        }
        let said = window.by_uid.entry(uid).or_default();
        *said = said.saturating_add(1);
        if *said == LINES {
            tracing::warn!(
                uid,
                "much is to be said of this user's peers: the rest of {WINDOW:?} is counted only"
            );
        }
        *said < LINES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_is_spoken_of_so_often_and_others_as_well() {
        let voice = Voice::default();
        assert_eq!((0..1000).filter(|_| voice.speaks(7)).count(), LINES as usize - 1);
        assert!(voice.speaks(8));
    }
}
