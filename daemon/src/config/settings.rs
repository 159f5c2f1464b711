//! Settings: the values that the daemon uses, made from a configuration and the user who runs the daemon.

use super::keys::{
    Config, ControlLimits, Error, KernelSettings, Metrics, Nvml, Page, ProcessSettings, Tenants,
};
use crate::aggregator::AggregatorSettings;
use crate::limits::agent_slots::AgentLimits;
use crate::run_writer::Retention;
use gpumem_model::run::Run;
use gpumem_report::rules::Groupings;
use gpumem_runs::requests::KeepLimits;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Paths and ids of the user who runs the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    /// Effective user id of the daemon.
    pub uid: u32,
    /// Value of `XDG_RUNTIME_DIR`.
    pub runtime: Option<PathBuf>,
    /// Value of `XDG_STATE_HOME`.
    pub state: Option<PathBuf>,
    pub home: Option<PathBuf>,
    /// Value of `GPUMEM_STORE`.
    pub store: Option<PathBuf>,
    /// Values of `STATE_DIRECTORY` and `RUNTIME_DIRECTORY`, which systemd sets if it made these directories.
    pub service: (Option<PathBuf>, Option<PathBuf>),
}

impl Home {
    /// Reads the values from this process's environment.
    pub fn of_process() -> Self {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let absolute = |name| set(name).filter(|path| path.is_absolute());
        Home {
            uid: rustix::process::geteuid().as_raw(),
            runtime: absolute("XDG_RUNTIME_DIR"),
            state: absolute("XDG_STATE_HOME"),
            home: absolute("HOME"),
            store: set("GPUMEM_STORE"),
            service: (absolute("STATE_DIRECTORY"), absolute("RUNTIME_DIRECTORY")),
        }
    }

    fn runtime_dir(&self, private: bool) -> PathBuf {
        if let (false, Some(given)) = (private, &self.service.1) {
            return given.clone();
        }
        match &self.runtime {
            _ if self.uid == 0 && !private => "/run/gpumemd".into(),
            Some(runtime) => runtime.join("gpumem"),
            None => format!("/tmp/gpumem-{}", self.uid).into(),
        }
    }

    fn store(&self, private: bool) -> Option<PathBuf> {
        if let Some(store) = &self.store {
            return Some(store.clone());
        }
        if !private && let Some(state) = &self.service.0 {
            return Some(state.join("runs.sqlite"));
        }
        if self.uid == 0 && !private {
            return Some("/var/lib/gpumemd/runs.sqlite".into());
        }
        let state = self.state.clone().or_else(|| Some(self.home.as_ref()?.join(".local/state")));
        state.map(|state| state.join("gpumem/runs.sqlite"))
    }
}

/// The settings of a running daemon.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Directory with `control.sock`, `agent/agent.sock` and a link to the latter.
    pub runtime_dir: PathBuf,
    /// Whether the daemon serves one user, and ends when it is idle.
    pub private: bool,
    pub store: PathBuf,
    /// Intervals for writing runs to the store and for splitting them into parts, and limits of the ledger.
    pub pace: AggregatorSettings,
    pub retention: Retention,
    /// Limit of the memory, in bytes, of runs that wait to be written to the store.
    pub waiting_bytes: usize,
    /// Path of the recording that the daemon writes; `None`: no recording.
    pub record: Option<PathBuf>,
    pub shown: ViewSettings,
    pub limits: AgentLimits,
    pub nvml: NvmlSettings,
    /// Sources of the kernel's reports: its log and its control groups.
    pub kernel: KernelSettings,
    /// Sources of facts about processes in addition to /proc: cluster software.
    pub who: ProcessSettings,
    /// Address at which metrics are served; `None`: they are not served.
    pub listen: Option<SocketAddr>,
    pub http_connections: usize,
    /// Time without agents and requests after which a private daemon ends; `None`: never.
    pub idle_exit: Option<Duration>,
}

impl Settings {
    /// Makes the settings from a configuration. `home` is of the user who runs the daemon.
    pub fn of(config: &Config, private: bool, home: &Home) -> Result<Self, Error> {
        let seconds = Duration::from_secs_f64;
        let (agent, nvml) = (&config.agent, &config.nvml);
        let store = config.runs.store.clone().or_else(|| home.store(private));
        Ok(Settings {
            runtime_dir: config.runtime_dir.clone().unwrap_or_else(|| home.runtime_dir(private)),
            private,
            store: store.ok_or(Error::NoHome("runs.store"))?,
            pace: AggregatorSettings {
                checkpoint: seconds(config.runs.checkpoint_every_s),
                limits: gpumem_ledger::Limits {
                    rows_per_process: agent.rows_per_process,
                    bytes_per_user: agent.memory_mib_per_uid << 20,
                    bytes: agent.memory_mib << 20,
                },
                roll: not_zero(config.runs.roll_every_s).map(seconds),
                requests: config.runs.keep_requests.then_some(KeepLimits {
                    time_ns: (config.runs.keep_requests_s * 1e9) as u64,
                    bytes: config.runs.keep_requests_mib << 20,
                }),
            },
            retention: Retention {
                age: not_zero(config.runs.keep_days).map(|days| seconds(days * 86_400.0)),
                steady: seconds(config.runs.keep_steady_s),
                bytes: (config.runs.max_size_mib > 0).then_some(config.runs.max_size_mib << 20),
            },
            waiting_bytes: config.runs.waiting_mib << 20,
            record: config.record.clone(),
            shown: ViewSettings::of(config, Groupings::load(&config.metrics.rules)?),
            limits: AgentLimits {
                connections: agent.connections,
                connections_per_uid: agent.connections_per_uid,
                waiting: agent.connections_without_hello,
                hello: seconds(agent.hello_timeout_s),
                bytes_per_s: agent.mib_per_s << 20,
                shared_bytes: agent.shared_mib << 20,
                // At most a quarter of the memory that the ledger may use for this user's processes.
                rows: agent
                    .rows_per_process
                    .min((agent.memory_mib_per_uid << 20) / 4 / gpumem_wire::SLOT_BYTES),
            },
            nvml: NvmlSettings::of(nvml),
            kernel: config.kernel.clone(),
            who: config.who.clone(),
            listen: if private { config.private.listen } else { config.metrics.listen },
            http_connections: config.metrics.connections,
            idle_exit: private.then(|| seconds(config.private.idle_exit_s)),
        })
    }
}

/// Returns `None` for 0, which means never.
fn not_zero(value: f64) -> Option<f64> {
    (value > 0.0).then_some(value)
}

/// Settings of views that can change while the daemon runs.
#[derive(Debug, Clone)]
pub struct ViewSettings {
    pub tenants: Tenants,
    pub max_series: usize,
    /// Maximum number of tags of a process on a device that have series of their own; the tags with the most bytes have them.
    pub tags: usize,
    /// Processes younger than this have no series of their own: the metrics show their sum as one process.
    pub young: Duration,
    pub rules: Arc<Groupings>,
    pub page: Page,
    pub hosts: Arc<[String]>,
    pub control: ControlLimits,
}

impl ViewSettings {
    fn of(config: &Config, rules: Groupings) -> Self {
        let Metrics { max_series, tags, fold_younger_s, page, hosts, .. } = &config.metrics;
        ViewSettings {
            tenants: config.tenants,
            max_series: *max_series,
            tags: *tags,
            young: Duration::from_secs_f64(*fold_younger_s),
            rules: Arc::new(rules),
            page: *page,
            hosts: hosts.clone().into(),
            control: config.control.clone(),
        }
    }

    /// Returns the rules for the report of a run: the configured ones, or instead of `default` those that fit the run.
    pub(crate) fn rules_for(&self, run: &Run) -> Groupings {
        if self.rules.name == "default" { Groupings::of_run(run) } else { (*self.rules).clone() }
    }
}

impl Default for ViewSettings {
    /// Returns the settings of a configuration without keys.
    fn default() -> Self {
        ViewSettings::of(&Config::default(), Groupings::preset(None).clone())
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct NvmlSettings {
    pub library: Option<PathBuf>,
    pub memory_hz: u32,
    pub list_interval: Duration,
    pub list_budget: f64,
    pub list_threshold_bytes: u64,
    pub extra_interval: Duration,
    pub call_timeout: Duration,
    pub hang_retry: Duration,
    pub trust_pids: bool,
    /// Program that is started with the subcommand `nvml-poller`; `None`: this program.
    #[serde(skip)]
    pub program: Option<PathBuf>,
}

impl NvmlSettings {
    fn of(nvml: &Nvml) -> Self {
        let seconds = Duration::from_secs_f64;
        NvmlSettings {
            library: nvml.library.clone(),
            memory_hz: nvml.memory_hz,
            list_interval: seconds(nvml.list_every_s),
            list_budget: nvml.list_budget,
            list_threshold_bytes: nvml.list_when_moved_mib << 20,
            extra_interval: seconds(nvml.extra_lists_every_s),
            call_timeout: seconds(nvml.call_timeout_s),
            hang_retry: seconds(nvml.hang_retry_s),
            trust_pids: nvml.trust_pids,
            program: None,
        }
    }
}

impl Default for NvmlSettings {
    fn default() -> Self {
        NvmlSettings::of(&Nvml::default())
    }
}
