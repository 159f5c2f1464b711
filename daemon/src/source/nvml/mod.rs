//! Device memory and process lists, read by a child process that may be lost.
//!
//! A call into a sick driver can stay in the kernel for ever, and an open NVML blocks GPU resets. So the daemon
//! never opens NVML: `gpumemd nvml-poller` does, and is killed, abandoned and replaced.
//!
//! ```text
//! watch.rs      the parent: starts, listens, notices silence, replaces
//! hung.rs       devices that did not answer, and the process that tries them again
//! translate.rs  the poller's frames -> the host's
//! poller.rs     the child: commands in, frames out
//! session.rs    one generation of the library, turn by turn
//! schedule.rs   what to call next: pure, time is handed in
//! library.rs    finding, opening and closing the library; which devices there are
//! answer.rs     what NVML answers: numbers, codes and their words
//! raw.rs        the calls that nvml-wrapper lacks or does badly: unsafe code
//! call_state.rs  what the poller is doing, where the parent can see it without its help
//! protocol.rs   how the poller is started, and what it and its parent exchange
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
use gpumem_ledger::DeviceName;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

/// The daemon's handle on the source. Clones are the same source; it ends with the last of them.
#[derive(Debug, Clone)]
pub struct Nvml {
    status: Arc<Mutex<NvmlStatus>>,
    commands: mpsc::UnboundedSender<Command>,
}

#[derive(Debug)]
enum Command {
    Hint(DeviceName),
    Release(Duration),
    Resume,
}

impl Nvml {
    /// Starts the source as a task of this tokio runtime. Never fails: what is wrong is told in [`NvmlStatus`] and as
    /// `Source` records, whose reason begins with `nvml: `; with a device in its stamp such a record is about that
    /// device.
    ///
    /// Everything in `out` is [`gpumem_ledger::Origin::Host`]'s. A reading's records are in order and not mixed with
    /// another reading's; one that takes long is begun in an earlier batch than it ends, so that the ledger can mark
    /// its books in time, and every one that begins ends, even if its poller is lost. `ProcessFacts` come before a
    /// process's first sample.
    pub fn start(settings: NvmlSettings, processes: Processes, out: mpsc::Sender<Batch>) -> Nvml {
        let (commands, orders) = mpsc::unbounded_channel();
        let status = NvmlStatus {
            reason: STARTING.to_owned(),
            since_ns: crate::clock::now_ns(),
            ..NvmlStatus::default()
        };
        let status = Arc::new(Mutex::new(status));
        tokio::spawn(watch::Watch::new(settings, processes, out, Arc::clone(&status), orders).run());
        Nvml { status, commands }
    }

    /// An agent told of something worth a sample on this device: list it soon, within the budget.
    pub fn hint(&self, device: DeviceName) {
        let _ = self.commands.send(Command::Hint(device));
    }

    /// Closes NVML, so that a GPU can be reset or partitioned; it opens by itself after `time`.
    pub fn release(&self, time: Duration) {
        let _ = self.commands.send(Command::Release(time));
    }

    /// Ends a release early.
    pub fn resume(&self) {
        let _ = self.commands.send(Command::Resume);
    }

    /// How it is now. Never waits for NVML.
    pub fn status(&self) -> NvmlStatus {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
