//! Injected faults: one at a time, each from a shuffled deck, so that each occurs before any repeats.

use super::manager::{End, Start};
use super::{Clients, Manager, Random, Troupe};
use crate::live::machine::Machine;
use crate::live::prometheus::get;
use crate::live::until;
use std::net::SocketAddr;

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// The daemon is asked to end, and its successor gets all descriptors.
    ToldKept,
    /// The daemon is killed, and its successor gets all descriptors.
    KilledKept,
    /// The daemon is asked to end, and nothing is kept.
    ToldBare,
    /// The daemon is killed, and nothing is kept.
    KilledBare,
    /// The daemon is stopped for a while.
    Stopped,
    /// The daemon reloads a valid configuration.
    Reload,
    /// The daemon reloads an invalid configuration.
    BadReload,
    /// Its disk is full for a while.
    DiskFull,
    /// A call of NVML does not return.
    Hung,
    /// A GPU falls off the bus and comes back.
    Lost,
    /// NVML is closed for a while.
    Released,
    /// The process that reads NVML is killed.
    PollerKilled,
    /// Many programs are killed at once and replaced.
    Massacre,
    /// Some programs are stopped for a while.
    Frozen,
}

impl Fault {
    /// Faults that end the daemon.
    pub const ENDS: [Fault; 4] = [Fault::ToldKept, Fault::KilledKept, Fault::ToldBare, Fault::KilledBare];
    /// All other faults.
    pub const REST: [Fault; 10] = [
        Fault::Stopped,
        Fault::Reload,
        Fault::BadReload,
        Fault::DiskFull,
        Fault::Hung,
        Fault::Lost,
        Fault::Released,
        Fault::PollerKilled,
        Fault::Massacre,
        Fault::Frozen,
    ];

    /// Log lines at warning or error that it may cause.
    pub fn says(self) -> &'static [&'static str] {
        match self {
            Fault::BadReload => &["the configuration stays as it was"],
            Fault::DiskFull => &["runs are kept in memory until the store works again"],
            Fault::Hung | Fault::PollerKilled => &["nvml poller lost", "nvml is down"],
            _ => &[],
        }
    }
}

/// Injects faults.
#[derive(Debug)]
pub struct Injector {
    pack: Vec<Fault>,
    cards: Vec<Fault>,
    /// Injected faults by life of the daemon, from 1.
    pub injected: Vec<(u64, Fault)>,
    good: String,
    http: SocketAddr,
}

impl Injector {
    /// Makes an injector for a daemon with this configuration.
    ///
    /// # Panics
    /// If the configuration cannot be read.
    pub fn new(manager: &Manager, http: SocketAddr) -> Self {
        let good = std::fs::read_to_string(manager.config()).expect("read");
        // To examine single faults: SOAK_FAULTS=KilledKept,Stopped.
        let wanted = std::env::var("SOAK_FAULTS").unwrap_or_default();
        let is_wanted =
            |fault: &Fault| wanted.is_empty() || wanted.split(',').any(|of| of == format!("{fault:?}"));
        let pack = Fault::ENDS.into_iter().chain(Fault::REST).filter(is_wanted).collect();
        Injector { pack, cards: Vec::new(), injected: Vec::new(), good, http }
    }

    /// Excludes faults that end the daemon, from now on.
    pub fn spare_the_daemon(&mut self) {
        self.pack.retain(|fault| !Fault::ENDS.contains(fault));
        self.cards.clear();
    }

    /// Returns the number of different faults.
    pub fn pack(&self) -> usize {
        self.pack.len()
    }

    /// Draws the next fault.
    pub fn draw(&mut self, random: &mut Random) -> Fault {
        if self.cards.is_empty() {
            self.cards = self.pack.clone();
            random.shuffle(&mut self.cards);
        }
        self.cards.pop().unwrap_or(Fault::Stopped)
    }

    /// Begins a fault.
    ///
    /// # Panics
    /// If it cannot be injected.
    pub fn begin(
        &mut self,
        fault: Fault,
        (machine, manager, clients): (&Machine, &mut Manager, &Clients),
        (troupe, random): (&mut Troupe, &mut Random),
    ) {
        self.injected.push((manager.lives, fault));
        match fault {
            Fault::ToldKept | Fault::ToldBare => {
                clients.doubt(true);
                manager.end(End::Told);
            }
            Fault::KilledKept | Fault::KilledBare => {
                clients.doubt(true);
                manager.end(End::Killed);
            }
            Fault::Stopped => {
                clients.doubt(true);
                manager.stop(true);
            }
            Fault::Reload => {
                let other = format!("{}tags = 8\n[agent]\nmib_per_s = 50\n", self.good);
                self.reload(&other, manager, "gpumemd_reloads_total");
            }
            Fault::BadReload => {
                let bad = format!("{}tagz = 8\n", self.good);
                self.reload(&bad, manager, "gpumemd_reload_errors_total");
            }
            Fault::DiskFull => manager.disk(Some("write ENOSPC")),
            Fault::Hung => machine.set(&["gpu1.fault=hang"]),
            Fault::Lost => machine.set(&["gpu1.fault=lost"]),
            Fault::Released => {
                let output = manager.daemon().ctl(machine, &["nvml", "release", "--for", "2s"]).output();
                assert!(output.expect("gpumemctl runs").status.success());
            }
            Fault::PollerKilled => {
                let daemon = manager.daemon().job.pid();
                for poller in super::health::children(daemon) {
                    let pid = rustix::process::Pid::from_raw(poller.0 as i32).expect("a pid");
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
            Fault::Massacre => {
                troupe.kill(24, random);
                troupe.fill(machine, random);
            }
            Fault::Frozen => troupe.freeze(Some(8)),
        }
    }

    /// Ends a fault.
    ///
    /// # Panics
    /// If the daemon does not recover.
    pub fn end(&mut self, fault: Fault, machine: &Machine, manager: &mut Manager, clients: &Clients) {
        match fault {
            Fault::ToldKept | Fault::KilledKept => {
                manager.follow(machine, Start::Kept);
                clients.doubt(false);
            }
            Fault::ToldBare | Fault::KilledBare => {
                manager.follow(machine, Start::Bare);
                clients.doubt(false);
            }
            Fault::Stopped => {
                manager.stop(false);
                clients.doubt(false);
            }
            Fault::Reload | Fault::BadReload => {
                let good = self.good.clone();
                self.reload(&good, manager, "gpumemd_reloads_total");
            }
            Fault::DiskFull => {
                self.until("the full disk to be noticed", |text| {
                    value(text, "gpumemd_store_errors_total") > Some(0.0)
                });
                manager.disk(None);
                self.until("the store to work again", |text| {
                    value(text, "gpumemd_source_up{source=\"store\"}") == Some(1.0)
                });
            }
            Fault::Hung => {
                self.until("the hang to be noticed", |text| {
                    text.lines().any(|line| line.starts_with("gpumem_device_unavailable{"))
                });
                machine.set(&["gpu1.fault=none"]);
            }
            Fault::Lost => machine.set(&["gpu1.fault=none"]),
            Fault::Released | Fault::PollerKilled | Fault::Massacre | Fault::Frozen => {}
        }
    }

    fn until(&self, what: &str, is_so: impl Fn(&str) -> bool) {
        until(60, what, || get(self.http, "/metrics").filter(|text| is_so(text)).map(drop));
    }

    fn reload(&self, text: &str, manager: &Manager, counts: &str) {
        let count = || value(&get(self.http, "/metrics")?, counts);
        let before = until(20, "an exposition", count);
        std::fs::write(manager.config(), text).expect("written");
        manager.daemon().job.signal("HUP");
        until(20, &format!("{counts} to count"), || count().filter(|now| *now > before));
    }
}

/// Returns the value of a series in an exposition.
pub fn value(text: &str, series: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?;
    line.parse().ok()
}
