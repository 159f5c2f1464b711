//! The whole product on the simulated machine: its programs, built and started as a user would, and the machine's own
//! truth for comparison.
//!
//! ```text
//! programs   the programs that must be built first: the daemon, gpumemctl, the agent, the fake driver, the trainer
//! machine    one simulated machine with its folder; programs that run on it
//! daemon     a daemon on it
//! examples   the project's examples, built
//! packages   Debian's Slurm, Podman and others, mounted over this machine for one command
//! prometheus a real Prometheus that scrapes it
//! truth      the machine's journal
//! scene      a machine, a daemon and such programs; everything compared at the end
//! hostile    hand-written peers, and other users
//! soak       64 programs that come and go, with faults mixed in
//! mixer      a program that allocates and frees memory of every kind on command
//! torch      unmodified PyTorch wheels on such a machine, and their recordings
//! attribution a recording's attribution compared with the program's own
//! compare    a daemon's recording, replayed, compared with that journal
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

pub use compare::{Compared, Replay, replay, try_replay};
pub use daemon::Daemon;
pub use machine::{Job, Machine};
pub use mixer::Mixer;

use gpumem_test_support::{DEADLINE, on_this_machine};
use std::time::{Duration, Instant};

/// Returns the name of the user who runs the tests as the tested programs show it, or else the number.
///
/// # Panics
/// If id(1) is missing.
pub fn own_user() -> String {
    let output = std::process::Command::new("id").arg("-un").output().expect("id runs");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Waits until `done` returns a value, and returns that. `seconds` is the longest time on an idle machine. A busy one may take
/// far longer, so the wait fails only after [`DEADLINE`], see [`on_this_machine`].
///
/// # Panics
/// After that time without a value.
#[track_caller]
pub fn until<T>(seconds: u64, what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    let deadline = DEADLINE.max(Duration::from_secs(seconds));
    loop {
        if let Some(found) = done() {
            return found;
        }
        let waited = began.elapsed();
        assert!(
            waited < deadline || waited < on_this_machine(deadline),
            "not within {} s: {what}",
            waited.as_secs()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}
