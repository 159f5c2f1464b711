//! Published state -> the world. A view reads the [`SnapshotReader`] and what the app tells it of the sources; it names no
//! source, and waits for none.

pub mod control;
pub mod health;
pub(crate) mod http;
pub mod page;
pub mod prometheus;
mod rows;
pub(crate) mod self_report;
pub(crate) mod text;
pub(crate) mod visibility;

use crate::aggregator::{Query, SnapshotReader};
use crate::limits::user_share::{AnswerSlot, UserShares};
use crate::run_writer::RunWriter;
use crate::stats::{Count, Stats};
use gpumem_ledger::ProcessKey;
use health::Health;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;
pub use visibility::ViewSettings;

/// What the agent of a process is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentCommand {
    /// Write a recording to this file; empty for a name of its own.
    Start(String),
    /// No longer.
    Stop,
    /// Keep its history to itself.
    Pause,
    /// Tell it again.
    Resume,
    /// Write its state to this file; empty for a name of its own.
    Dump(String),
}

/// The file that was written, where there is one; or why not.
pub type CommandResult = Pin<Box<dyn Future<Output = Result<String, String>> + Send>>;

/// What views may ask of the sources.
pub trait Sources: Send + Sync {
    /// How they are. Never waits.
    fn health(&self) -> Health;
    /// Closes NVML for a while.
    fn release(&self, time: Duration);
    /// Tells the agent of a process what to do.
    fn errand(&self, key: ProcessKey, errand: AgentCommand) -> CommandResult;
}

/// What does not change while the daemon runs.
#[derive(Debug, Clone, Default)]
pub struct StartupInfo {
    /// The configuration file that was read, or would be if it were there.
    pub config: PathBuf,
    /// Where metrics are served.
    pub metrics: Option<SocketAddr>,
}

/// What every view has.
pub struct ViewContext {
    /// What does not change.
    pub fixed: StartupInfo,
    /// The state.
    pub board: SnapshotReader,
    /// What is counted.
    pub stats: Arc<Stats>,
    /// Runs that are over.
    pub keeper: RunWriter,
    /// Runs that go on.
    pub asks: mpsc::Sender<Query>,
    /// The sources.
    pub sources: Box<dyn Sources>,
    /// What can change.
    pub shown: Mutex<ViewSettings>,
    /// Who asks.
    pub shares: UserShares,
}

impl ViewContext {
    /// What is shown now.
    pub(crate) fn shown(&self) -> ViewSettings {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until a user may have another answer made. `is_free`: whoever they are, they may stop this daemon, or are its own user;
    /// a limit would protect nobody from them.
    pub(crate) async fn turn(&self, uid: u32, is_free: bool) -> AnswerSlot {
        let share = (!is_free).then(|| self.shown().control.share_per_uid);
        let turn = self.shares.answer_slot(uid, share).await;
        self.stats.add(Count::ControlWaited, u64::from(turn.waited));
        turn
    }

    /// Shows something else from now on.
    pub fn show(&self, shown: ViewSettings) {
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = shown;
    }
}
