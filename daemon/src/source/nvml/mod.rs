//! Reads device memory and process lists from NVML in a child process (the poller).
//!
//! A call into a failing driver may never return, and an open NVML blocks GPU resets. So the daemon never opens NVML; the child
//! `gpumemd nvml-poller` does. The child can be killed, abandoned and replaced.
//!
//! ```text
//! watch.rs       the parent: starts, reads, supervises and replaces the poller
//! hung.rs        devices whose calls hang, and the process that probes them
//! translate.rs   converts the poller's frames to frames for the ledger
//! poller.rs      the child: commands in, frames out
//! session.rs     reads the devices of one opened library
//! schedule.rs    decides which call is next; pure, takes the time as an argument
//! library.rs     finds, opens and closes the library; lists devices
//! answer.rs      NVML's answers: numbers, error codes and their texts
//! raw.rs         calls that nvml-wrapper lacks or handles badly: unsafe code
//! call_state.rs  the poller's current call, readable while it hangs
//! protocol.rs    arguments and messages between the poller and its parent
//! ```

mod answer;
mod call_state;
mod hung;
mod library;
mod poller;
mod protocol;
mod raw;
mod schedule;
mod session;
mod translate;
mod watch;

pub use poller::poller_main;

use super::Batch;
use super::process::Processes;
use crate::config::NvmlSettings;
use crate::nvml_status::{NvmlStatus, STARTING};
use crate::os::lock;
use crate::stats::Stats;
use gpumem_ledger::DeviceName;
use protocol::{Command, Uuid};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc;
use translate::Translator;

/// Handle of the NVML source. Clones share the source, which ends when the last one is dropped.
#[derive(Debug, Clone)]
pub struct Nvml {
    translator: Arc<Mutex<Translator>>,
    commands: mpsc::UnboundedSender<Command>,
}

impl Nvml {
    /// Starts the source as a task of this tokio runtime. Never fails: problems appear in [`NvmlStatus`], and as `Source`
    /// records whose reason begins with `nvml: `. Such a record is about a device if its stamp has a device.
    ///
    /// All frames sent to `out` belong to [`gpumem_ledger::Origin::Host`]. The records of one reading are in order and not mixed
    /// with those of another reading. A long reading begins in an earlier batch than it ends, so that the ledger can mark its
    /// accounts in time. Each reading that begins also ends, even if its poller is lost. `ProcessFacts` precede a process's
    /// first sample.
    pub fn start(
        settings: NvmlSettings,
        processes: Processes,
        out: mpsc::Sender<Batch>,
        stats: Arc<Stats>,
    ) -> Nvml {
        let (commands, received) = mpsc::unbounded_channel();
        let (reason, since_ns) = (STARTING.to_owned(), crate::clock::now_ns());
        let status = NvmlStatus { reason, since_ns, ..NvmlStatus::default() };
        let translator = Arc::<Mutex<Translator>>::default();
        lock(&translator).status = status;
        let shared = Arc::clone(&translator);
        tokio::spawn(watch::Watch::new(settings, processes, out, received, stats, shared).run());
        Nvml { translator, commands }
    }

    /// Requests that this device's process lists are read soon, within the budget, because of an agent's event.
    pub fn hint(&self, device: DeviceName) {
        let _ = self.commands.send(Command::List(Uuid(device)));
    }

    /// Closes NVML, so that a GPU can be reset or partitioned. NVML is opened again after `time`.
    pub fn release(&self, time: Duration) {
        let _ = self.commands.send(Command::Release(time.as_secs_f64().ceil() as u64));
    }

    /// Opens NVML again before the time given to [`Nvml::release`] is over.
    pub fn resume(&self) {
        let _ = self.commands.send(Command::Resume);
    }

    /// Returns the current status without waiting for NVML.
    pub fn status(&self) -> NvmlStatus {
        lock(&self.translator).status.clone()
    }
}
