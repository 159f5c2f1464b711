//! Views show the published state to clients. A view reads the [`SnapshotReader`] and the app's [`Sources`]. It imports no source
//! and waits for none.

pub mod control;
pub(crate) mod http;
pub mod page;
pub mod prometheus;
mod rows;
pub(crate) mod self_report;
pub(crate) mod text;

pub use crate::agent_command::AgentCommand;
use crate::aggregator::{Query, SnapshotReader};
pub use crate::config::ViewSettings;
use crate::limits::user_share::{AnswerSlot, CpuCharge, UserShares};
use crate::nvml_status::NvmlStatus;
use crate::os::lock;
use crate::run_writer::RunWriter;
use crate::stats::{Count, Stats};
use gpumem_ledger::{ProcessKey, ProcessView};
use gpumem_model::run::Run;
use hyper::StatusCode;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// State of all data sources: NVML, the kernel's log, and agents.
#[derive(Debug, Clone, Default)]
pub struct Health {
    /// State of NVML and its devices.
    pub nvml: NvmlStatus,
    /// Path of the kernel's log; `None` if it is not read.
    pub kernel_log: Option<PathBuf>,
    /// Reason why the kernel's log cannot be read.
    pub kernel_problem: Option<String>,
    /// Number of connected agents.
    pub agents: usize,
    /// Number of connections that have not sent a hello.
    pub agents_waiting: usize,
}

/// Path of the file that the agent wrote (empty if none), or why the command failed.
pub type CommandResult = Pin<Box<dyn Future<Output = Result<String, String>> + Send>>;

/// Requests that views make of the data sources.
pub trait Sources: Send + Sync {
    /// Returns the health of the sources. Never waits.
    fn health(&self) -> Health;
    /// Closes NVML for this time, so that other programs can reset or unbind a GPU.
    fn release(&self, time: Duration);
    /// Sends a command to the agent of a process.
    fn send_command(&self, key: ProcessKey, command: AgentCommand) -> CommandResult;
}

/// Facts that are constant while the daemon runs.
#[derive(Debug, Clone, Default)]
pub struct StartupInfo {
    /// Path of the configuration file, whether or not it exists.
    pub config: PathBuf,
    /// Address of the metrics listener; `None`: there is none.
    pub metrics: Option<SocketAddr>,
}

/// Data and services that all views share.
pub struct ViewContext {
    pub fixed: StartupInfo,
    pub reader: SnapshotReader,
    pub stats: Arc<Stats>,
    /// Access to stored runs, and the state of the store.
    pub run_writer: RunWriter,
    /// Channel to the aggregator for queries about live processes.
    pub queries: mpsc::Sender<Query>,
    pub sources: Box<dyn Sources>,
    pub shown: Mutex<ViewSettings>,
    /// Whether the last reload was refused, so that the configuration before it is in effect.
    pub is_reload_refused: AtomicBool,
    /// Processor time that each user's answers have taken.
    pub shares: UserShares,
    /// Series of processes that scrapes write again.
    pub rendered: prometheus::RenderedProcesses,
}

/// Refusal of a request: the HTTP status, and the reason for the user.
#[derive(Debug)]
pub(crate) struct Refused(StatusCode, String);

impl Refused {
    fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Refused(status, text.into())
    }

    fn bad_request(text: impl Into<String>) -> Self {
        Refused(StatusCode::BAD_REQUEST, text.into())
    }

    fn ending() -> Self {
        Refused::new(StatusCode::SERVICE_UNAVAILABLE, "the daemon is ending")
    }
}

impl ViewContext {
    pub(crate) fn shown(&self) -> ViewSettings {
        lock(&self.shown).clone()
    }

    /// Waits until the user's share of processor time allows another answer. `is_free`: no limit, for users who could stop the
    /// daemon.
    pub(crate) async fn answer_slot(&self, uid: u32, is_free: bool) -> AnswerSlot {
        let share = (!is_free).then(|| self.shown().control.share_per_uid);
        let slot = self.shares.answer_slot(uid, share).await;
        self.stats.add(Count::ControlWaited, u64::from(slot.waited));
        slot
    }

    /// Asks the aggregator for the current runs of processes that match the filter. Refuses if the daemon is ending.
    pub(crate) async fn live_runs(
        &self,
        filter: impl Fn(&ProcessView) -> bool + Send + 'static,
        charge: &CpuCharge,
    ) -> Result<Vec<Run>, Refused> {
        let (reply, runs) = oneshot::channel();
        let query = Query::Runs(Box::new(filter), charge.clone(), reply);
        self.queries.send(query).await.map_err(|_| Refused::ending())?;
        runs.await.map_err(|_| Refused::ending())
    }

    pub fn show(&self, shown: ViewSettings) {
        *lock(&self.shown) = shown;
    }
}

/// Group whose members see every process.
const GROUP: &str = "gpumemd";

/// A user who makes a request. The kernel reports the user of a socket's peer. The user's groups come from /etc/group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Viewer {
    pub uid: u32,
    /// Whether the user may see the processes of all users.
    pub all: bool,
}

impl Viewer {
    /// Returns the viewer with these credentials. Root, members of [`GROUP`] and the user who runs the daemon see all processes.
    pub(crate) fn of(uid: u32, gid: u32) -> Self {
        let all = uid == 0 || uid == rustix::process::geteuid().as_raw() || {
            let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
            let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
            is_member(&groups, &users, uid, gid)
        };
        Viewer { uid, all }
    }

    /// Returns whether the viewer may see a process of the user `uid`. If the user is unknown, the process is hidden.
    pub(crate) fn sees(&self, uid: Option<u64>) -> bool {
        self.all || uid == Some(self.uid.into())
    }
}

fn is_member(groups: &str, users: &str, uid: u32, gid: u32) -> bool {
    let fields = |line: &str, at: usize| line.split(':').nth(at).map(str::to_owned);
    let Some(group) = groups.lines().find(|line| line.split(':').next() == Some(GROUP)) else { return false };
    if fields(group, 2).and_then(|id| id.parse().ok()) == Some(gid) {
        return true;
    }
    let is_uid = |line: &&str| fields(line, 2).and_then(|id| id.parse().ok()) == Some(uid);
    let Some(name) = users.lines().find(is_uid).and_then(|line| fields(line, 0)) else { return false };
    !name.is_empty()
        && fields(group, 3).is_some_and(|members| members.split(',').any(|member| member == name))
}

/// Removes from a run the pids and users of other processes.
pub(crate) fn hide_others(run: &mut Run) {
    for device in &mut run.devices {
        device.tenants.iter_mut().for_each(|(pid, _)| *pid = 0);
        let seen = device.details.ooms.iter_mut().filter_map(|oom| oom.device.as_mut());
        let seen = seen.flat_map(|device| device.holders.iter_mut().skip(1));
        for holder in seen.chain(&mut device.details.largest_tenant) {
            (holder.pid, holder.user) = (0, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_see_all() {
        let groups = "root:x:0:\ngpumemd:x:77:ana,bob\n";
        let users = "ana:x:1000:1000::/:\nbo:x:1001:1001::/:\nbroken\n";
        assert!(is_member(groups, users, 1000, 1000), "named in the group");
        assert!(is_member(groups, users, 5, 77), "their own group");
        assert!(!is_member(groups, users, 1001, 1001), "bo is not bob");
        assert!(!is_member("", users, 1000, 1000));
    }

    #[test]
    fn the_daemons_own_user_sees_all() {
        let own = rustix::process::geteuid().as_raw();
        assert!(Viewer::of(own, u32::MAX).all);
        assert!(!Viewer::of(own.wrapping_add(54_321), u32::MAX).all);
    }

    #[test]
    fn others_see_their_own() {
        let viewer = Viewer { uid: 7, all: false };
        assert!(viewer.sees(Some(7)));
        assert!(!viewer.sees(Some(8)) && !viewer.sees(None));
        assert!(Viewer { uid: 7, all: true }.sees(None));
    }
}
