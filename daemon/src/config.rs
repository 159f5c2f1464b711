//! The configuration: the file as typed ([`Config`]), and the settings as meant ([`Settings`]), with what the
//! file leaves open decided by who runs the daemon.
//!
//! A key that does not exist, or a value that makes no sense, is refused with file, line, key and what is
//! allowed: a daemon that guessed would be found out a week later.

mod changes;
mod check;

pub use changes::{Change, Keys};

use crate::aggregator::{LIMITS, Pace};
use crate::run_writer::Retention;
use crate::source::agent::Limits;
use crate::source::{kernel, nvml, process};
use crate::view::{self, Shown};
use gpumem_report::rules::Groupings;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The configuration file that is read when none is named.
pub(crate) const USUAL_PATH: &str = "/etc/gpumemd/gpumemd.toml";

/// The file as typed. config/gpumemd.toml has every key with its default and what it means.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)] // documented where people read it
pub struct Config {
    pub runtime_dir: Option<PathBuf>,
    pub record: Option<PathBuf>,
    pub tenants: Tenants,
    pub agent: Agent,
    pub nvml: Nvml,
    pub kernel: Kernel,
    pub who: Who,
    pub runs: Runs,
    pub control: Control,
    pub metrics: Metrics,
    pub private: Private,
}

/// How much of other users' processes is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tenants {
    /// User, pid and bytes.
    #[default]
    Named,
    /// Bytes.
    Anonymous,
}

#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct Agent {
    #[serde(deserialize_with = "check::connections")]
    pub connections: usize,
    #[serde(deserialize_with = "check::connections")]
    pub connections_per_uid: usize,
    #[serde(deserialize_with = "check::connections")]
    pub connections_without_hello: usize,
    #[serde(deserialize_with = "check::seconds")]
    pub hello_timeout_s: f64,
    #[serde(deserialize_with = "check::whole")]
    pub mib_per_s: u64,
    #[serde(deserialize_with = "check::rows")]
    pub rows_per_process: usize,
    #[serde(deserialize_with = "check::memory")]
    pub memory_mib: usize,
    #[serde(deserialize_with = "check::memory")]
    pub memory_mib_per_uid: usize,
    #[serde(deserialize_with = "check::whole")]
    pub shared_mib: u64,
}

#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct Nvml {
    pub library: Option<PathBuf>,
    #[serde(deserialize_with = "check::hertz")]
    pub memory_hz: u32,
    #[serde(deserialize_with = "check::seconds")]
    pub list_every_s: f64,
    #[serde(deserialize_with = "check::share")]
    pub list_budget: f64,
    #[serde(deserialize_with = "check::whole")]
    pub list_when_moved_mib: u64,
    #[serde(deserialize_with = "check::seconds")]
    pub extra_lists_every_s: f64,
    #[serde(deserialize_with = "check::seconds")]
    pub call_timeout_s: f64,
    #[serde(deserialize_with = "check::seconds")]
    pub hang_retry_s: f64,
    pub trust_pids: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct Kernel {
    pub log: PathBuf,
    pub control_groups: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct Who {
    #[serde(deserialize_with = "check::folder")]
    pub container_names: Option<PathBuf>,
    #[serde(deserialize_with = "check::folder")]
    pub job_mapping: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct Runs {
    pub store: Option<PathBuf>,
    #[serde(deserialize_with = "check::seconds")]
    pub checkpoint_every_s: f64,
    #[serde(deserialize_with = "check::roll")]
    pub roll_every_s: f64,
    #[serde(deserialize_with = "check::days")]
    pub keep_days: f64,
    #[serde(deserialize_with = "check::age")]
    pub keep_steady_s: f64,
    #[serde(deserialize_with = "check::whole")]
    pub max_size_mib: u64,
    #[serde(deserialize_with = "check::memory")]
    pub waiting_mib: usize,
}

#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct Metrics {
    #[serde(deserialize_with = "check::address", serialize_with = "changes::address")]
    pub listen: Option<SocketAddr>,
    #[serde(deserialize_with = "check::connections")]
    pub connections: usize,
    #[serde(deserialize_with = "check::series")]
    pub max_series: usize,
    #[serde(deserialize_with = "check::tags")]
    pub tags: usize,
    #[serde(deserialize_with = "check::age")]
    pub fold_younger_s: f64,
    pub rules: String,
    pub page: Page,
    #[serde(deserialize_with = "check::hosts")]
    pub hosts: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct Control {
    #[serde(deserialize_with = "check::connections")]
    pub connections: usize,
    #[serde(deserialize_with = "check::connections")]
    pub connections_per_uid: usize,
    #[serde(deserialize_with = "check::share")]
    pub share_per_uid: f64,
}

/// What the live page tells whoever can open it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Page {
    /// There is none.
    Off,
    /// Categories, and what metrics tell.
    #[default]
    Categories,
    /// Tags too.
    Tags,
}

#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct Private {
    #[serde(deserialize_with = "check::seconds")]
    pub idle_exit_s: f64,
    #[serde(deserialize_with = "check::address", serialize_with = "changes::address")]
    pub listen: Option<SocketAddr>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            runtime_dir: None,
            record: None,
            tenants: Tenants::Named,
            agent: Agent::default(),
            nvml: Nvml::default(),
            kernel: Kernel::default(),
            who: Who::default(),
            runs: Runs::default(),
            control: Control::default(),
            metrics: Metrics::default(),
            private: Private::default(),
        }
    }
}

impl Default for Agent {
    fn default() -> Self {
        Agent {
            connections: 1024,
            connections_per_uid: 512,
            connections_without_hello: 64,
            hello_timeout_s: 5.0,
            mib_per_s: 0,
            rows_per_process: LIMITS.rows_per_process,
            memory_mib: LIMITS.bytes >> 20,
            memory_mib_per_uid: LIMITS.bytes_per_user >> 20,
            shared_mib: 2048,
        }
    }
}

impl Default for Nvml {
    fn default() -> Self {
        Nvml {
            library: None,
            memory_hz: 10,
            list_every_s: 1.0,
            list_budget: 0.02,
            list_when_moved_mib: 2,
            extra_lists_every_s: 10.0,
            call_timeout_s: 5.0,
            hang_retry_s: 60.0,
            trust_pids: false,
        }
    }
}

impl Default for Kernel {
    fn default() -> Self {
        Kernel { log: "/dev/kmsg".into(), control_groups: "/sys/fs/cgroup".into() }
    }
}

impl Default for Who {
    fn default() -> Self {
        Who { container_names: Some("/var/log/containers".into()), job_mapping: None }
    }
}

impl Default for Runs {
    fn default() -> Self {
        Runs {
            store: None,
            checkpoint_every_s: 5.0,
            roll_every_s: 86_400.0,
            keep_days: 90.0,
            keep_steady_s: 3600.0,
            max_size_mib: 2048,
            waiting_mib: 64,
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics {
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 9837))),
            connections: 64,
            max_series: 10_000,
            tags: 0,
            fold_younger_s: 10.0,
            rules: "default".into(),
            page: Page::default(),
            hosts: Vec::new(),
        }
    }
}

impl Default for Control {
    fn default() -> Self {
        let view::control::Limits { connections, connections_per_uid, share_per_uid } =
            view::control::Limits::default();
        Control { connections, connections_per_uid, share_per_uid }
    }
}

impl Default for Private {
    fn default() -> Self {
        Private { idle_exit_s: 300.0, listen: None }
    }
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Error {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// It does not say what a configuration says.
    #[error("{}: {source}", path.display())]
    Parse { path: PathBuf, source: Box<toml::de::Error> },
    /// Nothing says where files are to be kept.
    #[error("no home directory is known: set HOME, or {0} in the configuration")]
    NoHome(&'static str),
}

impl Config {
    /// The file at `path`; without one the usual file, if it is there.
    ///
    /// # Errors
    /// [`Error`]; that the usual file is missing is none.
    pub fn load(path: Option<&Path>) -> Result<Self, Error> {
        let named = path.unwrap_or(Path::new(USUAL_PATH));
        match std::fs::read_to_string(named) {
            Ok(text) => Config::parse(&text, named),
            Err(error) if path.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
                Ok(Config::default())
            }
            Err(source) => Err(Error::Read { path: named.to_owned(), source }),
        }
    }

    /// The configuration in a text.
    ///
    /// # Errors
    /// [`Error::Parse`], with line and key.
    pub fn parse(text: &str, path: &Path) -> Result<Self, Error> {
        toml::from_str(text).map_err(|error| Error::Parse { path: path.to_owned(), source: Box::new(error) })
    }
}

/// Where things are for who runs the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    /// Who.
    pub uid: u32,
    /// `XDG_RUNTIME_DIR`.
    pub runtime: Option<PathBuf>,
    /// `XDG_STATE_HOME`.
    pub state: Option<PathBuf>,
    /// `HOME`.
    pub home: Option<PathBuf>,
    /// `GPUMEM_STORE`.
    pub store: Option<PathBuf>,
    /// `STATE_DIRECTORY` and `RUNTIME_DIRECTORY`, when systemd made them.
    pub service: (Option<PathBuf>, Option<PathBuf>),
}

impl Home {
    /// Of this process.
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

/// What the daemon does.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Holds `control.sock`, `agent/agent.sock` and a link to that.
    pub runtime_dir: PathBuf,
    /// For one user, ending by itself.
    pub private: bool,
    /// Where runs are kept.
    pub store: PathBuf,
    /// How often they are written, and when they roll.
    pub pace: Pace,
    /// How long they are kept.
    pub retention: Retention,
    /// What runs that wait for the store may take of the memory.
    pub waiting_bytes: usize,
    /// Where what is seen is recorded.
    pub record: Option<PathBuf>,
    /// What others see.
    pub tenants: Tenants,
    /// What agents may do.
    pub limits: Limits,
    /// How NVML is read.
    pub nvml: nvml::Settings,
    /// Where the kernel speaks.
    pub kernel: kernel::Settings,
    /// Where the machine says whose processes are.
    pub who: process::Settings,
    /// Where metrics are served.
    pub listen: Option<SocketAddr>,
    /// Connections for metrics at once.
    pub http_connections: usize,
    /// Series of one scrape.
    pub max_series: usize,
    /// Tags of a process that are series.
    pub tags: usize,
    /// Processes younger than this have no series of their own.
    pub young: Duration,
    /// Rules that name categories.
    pub rules: String,
    /// What the live page tells.
    pub page: Page,
    /// Names by which it may be asked for.
    pub hosts: Vec<String>,
    /// Who may be connected to the control socket.
    pub control: view::control::Limits,
    /// A private daemon without agents and requests ends after this.
    pub idle_exit: Option<Duration>,
}

impl Settings {
    /// What a configuration means for who runs it.
    ///
    /// # Errors
    /// [`Error::NoHome`].
    pub fn of(config: &Config, private: bool, home: &Home) -> Result<Self, Error> {
        let seconds = Duration::from_secs_f64;
        let (agent, nvml) = (&config.agent, &config.nvml);
        let store = config.runs.store.clone().or_else(|| home.store(private));
        Ok(Settings {
            runtime_dir: config.runtime_dir.clone().unwrap_or_else(|| home.runtime_dir(private)),
            private,
            store: store.ok_or(Error::NoHome("runs.store"))?,
            pace: Pace {
                checkpoint: seconds(config.runs.checkpoint_every_s),
                limits: gpumem_ledger::Limits {
                    rows_per_process: agent.rows_per_process,
                    bytes_per_user: agent.memory_mib_per_uid << 20,
                    bytes: agent.memory_mib << 20,
                },
                roll: not_zero(config.runs.roll_every_s).map(seconds),
            },
            retention: Retention {
                age: not_zero(config.runs.keep_days).map(|days| seconds(days * 86_400.0)),
                steady: seconds(config.runs.keep_steady_s),
                bytes: (config.runs.max_size_mib > 0).then_some(config.runs.max_size_mib << 20),
            },
            waiting_bytes: config.runs.waiting_mib << 20,
            record: config.record.clone(),
            tenants: config.tenants,
            limits: Limits {
                connections: agent.connections,
                connections_per_uid: agent.connections_per_uid,
                waiting: agent.connections_without_hello,
                hello: seconds(agent.hello_timeout_s),
                bytes_per_s: agent.mib_per_s << 20,
                shared_bytes: agent.shared_mib << 20,
                // A quarter of what the ledger may remember of them.
                rows: agent
                    .rows_per_process
                    .min((agent.memory_mib_per_uid << 20) / 4 / gpumem_wire::SLOT_BYTES),
            },
            nvml: nvml::Settings {
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
            },
            kernel: kernel::Settings {
                log: Some(&config.kernel.log).filter(|log| log.as_os_str() != "off").cloned(),
                groups: config.kernel.control_groups.clone(),
            },
            who: process::Settings {
                container_names: config.who.container_names.clone(),
                job_mapping: config.who.job_mapping.clone(),
            },
            listen: if private { config.private.listen } else { config.metrics.listen },
            http_connections: config.metrics.connections,
            max_series: config.metrics.max_series,
            tags: config.metrics.tags,
            young: seconds(config.metrics.fold_younger_s),
            rules: config.metrics.rules.clone(),
            page: config.metrics.page,
            hosts: config.metrics.hosts.clone(),
            control: view::control::Limits {
                connections: config.control.connections,
                connections_per_uid: config.control.connections_per_uid,
                share_per_uid: config.control.share_per_uid,
            },
            idle_exit: private.then(|| seconds(config.private.idle_exit_s)),
        })
    }

    /// What views show, with these rules.
    pub(crate) fn shown(&self, rules: Arc<Groupings>) -> Shown {
        let Settings { tenants, max_series, tags, young, page, control, .. } = *self;
        Shown { tenants, max_series, tags, young, rules, page, hosts: self.hosts.clone().into(), control }
    }
}

/// Zero means never.
fn not_zero(value: f64) -> Option<f64> {
    (value > 0.0).then_some(value)
}
