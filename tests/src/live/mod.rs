//! The whole product on the simulated machine: its programs, built and started as a user would, and the machine's own
//! truth to hold them against.
//!
//! ```text
//! programs   what must be built before: the daemon, gpumemctl, the agent, the fake driver, the trainer
//! machine    one simulated machine with its folder; programs that run on it
//! daemon     a daemon on it
//! examples   the project's examples, built
//! packages   Debian's Slurm, Podman and such, laid over this machine for one command
//! prometheus a real Prometheus beside it
//! truth      the machine's journal
//! scene      a machine, a daemon and such programs; everything compared at the end
//! hostile    peers made by hand, and other users
//! soak       64 programs that come and go, with faults mixed in
//! mixer      a program that takes and gives memory of every kind, as it is told
//! torch      unmodified PyTorch wheels on such a machine, and what was recorded of them
//! attribution whose memory such a recording says it is, beside what the program knows
//! compare    a daemon's recording, replayed, beside that journal
//! ```

pub mod attribution;
pub mod compare;
pub mod daemon;
pub mod examples;
pub mod hostile;
pub mod machine;
pub mod mixer;
pub mod packages;
pub mod programs;
pub mod prometheus;
pub mod scene;
pub mod soak;
pub mod torch;
pub mod truth;

pub use compare::{Compared, Replay, replay};
pub use daemon::Daemon;
pub use machine::{Job, Machine};
pub use mixer::Mixer;

use std::time::{Duration, Instant};

/// How many have wanted each processor in the last minute; 1 where there were enough of them.
pub fn crowd() -> f64 {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let wanted: f64 = load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0);
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (wanted / processors as f64).clamp(1.0, 8.0)
}

/// Waits until `done` has something, and fails with `what` when it has taken too long: `seconds`, and as often
/// that as the machine is crowded.
///
/// # Panics
/// After that time without it.
pub fn until<T>(seconds: u64, what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = done() {
            return found;
        }
        let waited = began.elapsed().as_secs_f64();
        assert!(waited < seconds as f64 * crowd(), "not within {waited:.0} s: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
