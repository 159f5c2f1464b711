//! What a recording is limited to: steps, a time, a size.
//!
//! A window of steps is opened and closed by the thread that says the step: it waits for the sender (a second at most) to have said
//! the state, so that what is recorded begins and ends exactly there. While no window is wanted, a step costs one load more.

use crate::driver::core::Core;
use crate::sources::api::control::{self, Wish};
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::Duration;

/// A step waits so long for the sender; the next one tries again.
const PATIENCE: Duration = Duration::from_secs(1);

/// The number from which on a step concerns a recording.
static NEXT: AtomicU64 = AtomicU64::new(u64::MAX);

/// Of one recording.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// First and last step.
    pub steps: Option<(u64, u64)>,
    /// For how long.
    pub for_ns: Option<u64>,
    /// How large the file may become.
    pub max_bytes: Option<u64>,
}

impl Limits {
    /// Sets one: `steps` (`100:110`), `for` (seconds), `max_size` (bytes); empty takes it away. False if there is none such.
    pub fn set(&mut self, key: &str, value: &str) -> bool {
        let seconds =
            |value: &str| value.parse::<f64>().ok().filter(|seconds| *seconds > 0.0 && *seconds <= 1e9);
        match (key, value.is_empty()) {
            ("steps", true) => self.steps = None,
            ("for", true) => self.for_ns = None,
            ("max_size", true) => self.max_bytes = None,
            ("steps", false) => {
                let steps = value
                    .split_once(':')
                    .and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
                let steps = steps.filter(|(first, last): &(u64, u64)| first <= last && *last < u64::MAX);
                self.steps = steps.or(self.steps);
                return steps.is_some();
            }
            ("for", false) => {
                let for_ns = seconds(value).map(|seconds| (seconds * 1e9) as u64);
                self.for_ns = for_ns.or(self.for_ns);
                return for_ns.is_some();
            }
            ("max_size", false) => {
                let bytes = value.parse().ok().filter(|bytes| *bytes > 0);
                self.max_bytes = bytes.or(self.max_bytes);
                return bytes.is_some();
            }
            _ => return false,
        }
        true
    }

    /// A file and limits as the daemon says them: `FILE\0key=value\0...`. None if there is one that is not known.
    pub fn of_command(payload: &str) -> Option<(String, Limits)> {
        let mut parts = payload.split('\0');
        let path = parts.next()?.to_owned();
        let mut limits = Limits::default();
        let is_known =
            parts.all(|part| part.split_once('=').is_some_and(|(key, value)| limits.set(key, value)));
        is_known.then_some((path, limits))
    }
}

/// For the sender: the step from which on it wants to know; `u64::MAX`: none.
pub fn wait_for(number: u64) {
    NEXT.store(number, Release);
}

/// A step begins, of which nothing is recorded yet.
#[inline(always)]
pub fn step(core: &'static Core, number: u64) {
    if number >= NEXT.load(Relaxed) {
        crossed(core, number);
    }
}

#[cold]
fn crossed(core: &'static Core, number: u64) {
    // If the sender is late, the window begins with the next step.
    let _ = control::post_within(core, Wish::Step(number), PATIENCE);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_what_they_say() {
        let of = |payload: &str| Limits::of_command(payload);
        assert_eq!(of(""), Some((String::new(), Limits::default())));
        let steps = Limits { steps: Some((100, 110)), for_ns: Some(1_500_000_000), max_bytes: Some(7) };
        assert_eq!(of("/a b\0steps=100:110\0for=1.5\0max_size=7"), Some(("/a b".into(), steps)));
        for bad in [
            "\0steps=110:100",
            "\0steps=1",
            "\0steps=a:b",
            "\0for=0",
            "\0for=-1",
            "\0max_size=x",
            "\0other=1",
            "\0x",
        ] {
            assert_eq!(of(bad), None, "{bad:?}");
        }
        let mut limits = steps;
        assert!(limits.set("steps", "") && limits.steps.is_none());
        assert!(!limits.set("for", "x") && limits.for_ns == steps.for_ns, "what is wrong changes nothing");
    }
}
