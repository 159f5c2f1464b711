//! Device memory and process lists, read by a child process that may be lost.
//!
//! A call into a sick driver can stay in the kernel for ever, and an open NVML blocks GPU resets. So the daemon
//! never opens NVML: `gpumemd nvml-poller` does, and is killed, abandoned and replaced.
//!
//! ```text
//! raw.rs      the calls that nvml-wrapper lacks or does badly; the only unsafe code of the daemon
//! library.rs  finding, opening and closing the library; which devices there are
//! lanes.rs    what to call next: pure, time is handed in
//! poller.rs   the child: commands in, frames out
//! watch.rs    the parent: starts, listens, notices silence, replaces
//! status.rs   how it is
//! ```

mod status;

pub use status::{Counters, DeviceStatus, Status};

use super::Batch;
use super::process::Processes;
use gpumem_ledger::DeviceName;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

/// How NVML is read.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// A library to open instead of searching for one.
    pub library: Option<PathBuf>,
    /// Device memory reads per second and device: 1 to 100.
    pub memory_hz: u32,
    /// Each device's process list at least that often, as far as the budget allows.
    pub list_interval: Duration,
    /// Share of wall time that list calls may take: each of them stops the driver for every GPU.
    pub list_budget: f64,
    /// A device is listed sooner when its `used` has moved by at least this much.
    pub list_threshold_bytes: u64,
    /// Graphics and MPS lists that were empty are looked at that often.
    pub extra_interval: Duration,
    /// A call that takes longer is taken for one that will not return.
    pub call_timeout: Duration,
    /// Bytes per process are believed even where pids look like another namespace's.
    pub trust_pids: bool,
    /// The program that has `nvml-poller`; this one if not given.
    pub program: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            library: None,
            memory_hz: 10,
            list_interval: Duration::from_secs(1),
            list_budget: 0.02,
            list_threshold_bytes: 2 << 20,
            extra_interval: Duration::from_secs(10),
            call_timeout: Duration::from_secs(5),
            trust_pids: false,
            program: None,
        }
    }
}

/// The daemon's handle on the source. Clones are the same source; it ends with the last of them.
#[derive(Debug, Clone)]
pub struct Nvml {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    status: Mutex<Status>,
    commands: mpsc::UnboundedSender<Command>,
}

#[derive(Debug)]
enum Command {
    Hint(DeviceName),
    Release(Duration),
    Resume,
}

impl Nvml {
    /// Starts the source within a tokio runtime. Never fails: what is wrong is told in [`Status`] and as `Source` records.
    ///
    /// Each reading is one `SampleBegin` ... `SampleEnd` run in `out`, not mixed with other devices' readings, with
    /// `ProcessFacts` before a process's first sample.
    pub fn start(settings: Settings, processes: Processes, out: mpsc::Sender<Batch>) -> Nvml {
        let (commands, _todo) = mpsc::unbounded_channel();
        let _ = (settings, processes, out);
        Nvml { shared: Arc::new(Shared { status: Mutex::default(), commands }) }
    }

    /// An agent told of something worth a sample on this device: list it soon, within the budget.
    pub fn hint(&self, device: DeviceName) {
        let _ = self.shared.commands.send(Command::Hint(device));
    }

    /// Closes NVML, so that a GPU can be reset or partitioned; it opens by itself after `time`.
    pub fn release(&self, time: Duration) {
        let _ = self.shared.commands.send(Command::Release(time));
    }

    /// Ends a release early.
    pub fn resume(&self) {
        let _ = self.shared.commands.send(Command::Resume);
    }

    /// How it is now. Never waits for NVML.
    pub fn status(&self) -> Status {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Status> {
        self.shared.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
