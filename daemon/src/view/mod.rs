//! Views: published state -> clients. A view reads the [`SnapshotReader`] and the app's [`Sources`]. It depends on no source and
//! waits for none.

pub mod control;
pub(crate) mod http;
pub mod page;
pub mod prometheus;
mod rows;
pub(crate) mod self_report;
pub(crate) mod text;
pub(crate) mod visibility;

use crate::aggregator::{Query, SnapshotReader};
pub use crate::config::ViewSettings;
use crate::limits::user_share::{AnswerSlot, CpuCharge, UserShares};
use crate::nvml_status::NvmlStatus;
use crate::os::lock;
use crate::run_writer::RunWriter;
use crate::stats::{Count, Stats};
use gpumem_ledger::{ProcessKey, ProcessView};
use gpumem_model::run::Run;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Health of all sources.
#[derive(Debug, Clone, Default)]
pub struct Health {
    /// State of NVML and its devices.
    pub nvml: NvmlStatus,
    /// Path of the kernel's log; `None` if disabled.
    pub kernel_log: Option<PathBuf>,
    /// Reason why it cannot be read.
    pub kernel_problem: Option<String>,
    /// Connected agents.
    pub agents: usize,
    /// Connections without a hello so far.
    pub agents_waiting: usize,
}

/// Command to the agent of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentCommand {
    /// Write a recording to this file; if empty, the agent chooses the name.
    Start(String),
    /// Stop the recording.
    Stop,
    /// Stop sending records of events.
    Pause,
    /// Send records of events again.
    Resume,
    /// Write its state to this file; if empty, the agent chooses the name.
    Dump(String),
}

/// The path of the file that was written, if any; or why the command failed.
pub type CommandResult = Pin<Box<dyn Future<Output = Result<String, String>> + Send>>;

/// Requests of views to the sources.
pub trait Sources: Send + Sync {
    /// Returns the health of the sources. Never waits.
    fn health(&self) -> Health;
    /// Closes NVML for this time.
    fn release(&self, time: Duration);
    /// Sends a command to the agent of a process.
    fn errand(&self, key: ProcessKey, errand: AgentCommand) -> CommandResult;
}

/// Facts that are constant while the daemon runs.
#[derive(Debug, Clone, Default)]
pub struct StartupInfo {
    /// Path of the configuration file, whether or not it exists.
    pub config: PathBuf,
    /// Address of the metrics listener; `None`: there is none.
    pub metrics: Option<SocketAddr>,
}

/// State that all views share.
pub struct ViewContext {
    /// Facts that are constant while the daemon runs.
    pub fixed: StartupInfo,
    /// Reader of the published state.
    pub board: SnapshotReader,
    /// Counters.
    pub stats: Arc<Stats>,
    /// Store of ended runs.
    pub keeper: RunWriter,
    /// Requests to the aggregator, for runs of live processes.
    pub asks: mpsc::Sender<Query>,
    /// The sources.
    pub sources: Box<dyn Sources>,
    /// Settings that can change.
    pub shown: Mutex<ViewSettings>,
    /// Processing time shares of users.
    pub shares: UserShares,
}

impl ViewContext {
    /// Returns the current settings.
    pub(crate) fn shown(&self) -> ViewSettings {
        lock(&self.shown).clone()
    }

    /// Waits until a user may have another answer made. `is_free`: no limit, for users who could stop this daemon anyway.
    pub(crate) async fn turn(&self, uid: u32, is_free: bool) -> AnswerSlot {
        let share = (!is_free).then(|| self.shown().control.share_per_uid);
        let turn = self.shares.answer_slot(uid, share).await;
        self.stats.add(Count::ControlWaited, u64::from(turn.waited));
        turn
    }

    /// Asks the aggregator for the current runs of processes that match. `None`: the daemon is ending.
    pub(crate) async fn live_runs(
        &self,
        takes: impl Fn(&ProcessView) -> bool + Send + 'static,
        charge: &CpuCharge,
    ) -> Option<Vec<Run>> {
        let (reply, runs) = oneshot::channel();
        self.asks.send(Query::Runs(Box::new(takes), charge.clone(), reply)).await.ok()?;
        runs.await.ok()
    }

    /// Changes the settings.
    pub fn show(&self, shown: ViewSettings) {
        *lock(&self.shown) = shown;
    }
}
