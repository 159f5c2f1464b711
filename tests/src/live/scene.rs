//! A machine, a daemon and programs that follow commands; at the end everything is compared with the machine's truth.

use super::mixer::Answer;
use super::{Daemon, Machine, Mixer, Replay, replay, until};
use gpumem_ledger::ClosedSample;

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";

/// A machine, a daemon, and programs on it.
#[derive(Debug)]
pub struct Scene {
    /// The machine.
    pub machine: Machine,
    /// The daemon, which lists processes twenty times a second.
    pub daemon: Daemon,
}

impl Scene {
    /// Creates a machine of 16 GiB with these keys, and a daemon on it.
    pub fn new(keys: &[&str]) -> Self {
        let machine = Machine::new(&[&["memory=16G"], keys].concat());
        let daemon = Daemon::start(&machine, "daemon", FAST);
        Scene { machine, daemon }
    }

    /// Starts a program on the first device.
    pub fn mixer(&self) -> Mixer {
        let mut mixer = Mixer::start(&self.machine, &self.daemon);
        mixer.ok("device 0");
        mixer
    }

    /// Starts a program that uses pools of the driver.
    pub fn pooled(&self) -> Mixer {
        let mut mixer = self.mixer();
        mixer.is_polled = true;
        mixer
    }

    /// Makes a checkpoint at which `tracked` bytes are expected on device 0.
    ///
    /// # Panics
    /// If the daemon takes no sample.
    pub fn look(&self, mixer: &mut Mixer, what: &str, tracked: i64) {
        mixer.holds(&self.machine, &self.daemon, what, &[tracked]);
    }

    /// Makes a checkpoint after the daemon agrees with the machine: see [`Mixer::settles`].
    ///
    /// # Panics
    /// If the daemon takes no sample.
    pub fn look_settled(&self, mixer: &mut Mixer, what: &str, tracked: i64) {
        mixer.settles(&self.machine, &self.daemon);
        self.look(mixer, what, tracked);
    }

    /// Ends the programs and compares.
    ///
    /// # Panics
    /// If a value differs.
    pub fn end(&mut self, mixers: &mut [&mut Mixer]) -> Replay {
        mixers.iter_mut().for_each(|mixer| mixer.end());
        self.compare(mixers)
    }

    /// Compares after the programs have ended.
    ///
    /// # Panics
    /// If a value differs.
    pub fn compare(&mut self, mixers: &mut [&mut Mixer]) -> Replay {
        until(20, "closed runs", || {
            let known = self.daemon.pids(&self.machine);
            mixers.iter().all(|mixer| !known.contains(&u64::from(mixer.pid()))).then_some(())
        });
        self.daemon.stop();
        let (seen, truth) = (replay(&self.daemon.recording), self.machine.truth());
        assert_eq!(seen.rejected, 0);
        mixers.iter().for_each(|mixer| mixer.verify(&seen, &truth, &self.daemon.recording));
        let shown = self.machine.tool("show", &[]);
        assert!(shown.contains("\nviolations=0\n") && shown.contains("\nstrays=0\n"), "{shown}");
        seen
    }
}

/// Returns the samples during a call.
pub fn between<'a>(seen: &'a Replay, mixer: &Mixer, call: &Answer) -> impl Iterator<Item = &'a ClosedSample> {
    let (pid, began_ns, ended_ns) = (mixer.pid(), call.began_ns, call.ended_ns);
    let of_it = seen.samples.iter().filter(move |(key, ..)| key.pid == pid).map(|(_, _, sample)| sample);
    of_it.filter(move |sample| sample.t0_ns > began_ns && sample.t1_ns < ended_ns)
}

/// Returns the samples during a call.
///
/// # Panics
/// If there are fewer than two.
pub fn inside<'a>(seen: &'a Replay, mixer: &Mixer, call: &Answer) -> Vec<&'a ClosedSample> {
    let inside: Vec<_> = between(seen, mixer, call).collect();
    assert!(inside.len() >= 2, "samples while it ran: {}", inside.len());
    inside
}
