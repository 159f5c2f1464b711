//! The table of configuration keys: name, type, default, whether a reload applies the key, and the check of its value.
//!
//! config/gpumemd.toml lists every key with its default and meaning.

use super::check;
use crate::aggregator::LIMITS;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    Reload,
    Restart,
    /// The key is a section that has these keys, each with the effect of its change.
    Section(&'static [(&'static str, Effect)]),
}

use Effect::{Reload, Restart, Section};

/// Makes the struct of a section from its keys, with `Default` and the [`Effect`] of each key. The strings name the functions
/// that read and write the value, in check.rs or in this file.
macro_rules! section {
    ($section:ident { $($key:ident: $type:ty = $default:expr, $effect:expr $(, $read:literal $(, $write:literal)?)?;)* }) => {
        #[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $section {
            $($(#[serde(deserialize_with = $read $(, serialize_with = $write)?)])? pub $key: $type,)*
        }

        impl Default for $section {
            fn default() -> Self {
                $section { $($key: $default,)* }
            }
        }

        impl $section {
            const EFFECTS: &[(&str, Effect)] = &[$((stringify!($key), $effect),)*];
        }
    };
}

section! { Config {
    runtime_dir: Option<PathBuf> = None, Restart;
    record: Option<PathBuf> = None, Reload;
    tenants: Tenants = Tenants::default(), Reload;
    agent: Agent = Agent::default(), Section(Agent::EFFECTS);
    nvml: Nvml = Nvml::default(), Section(Nvml::EFFECTS);
    kernel: KernelSettings = KernelSettings::default(), Section(KernelSettings::EFFECTS);
    who: ProcessSettings = ProcessSettings::default(), Section(ProcessSettings::EFFECTS);
    runs: Runs = Runs::default(), Section(Runs::EFFECTS);
    control: ControlLimits = ControlLimits::default(), Section(ControlLimits::EFFECTS);
    metrics: Metrics = Metrics::default(), Section(Metrics::EFFECTS);
    private: Private = Private::default(), Section(Private::EFFECTS);
} }

section! { Agent {
    connections: usize = 1024, Reload, "check::connections";
    connections_per_uid: usize = 512, Reload, "check::connections";
    connections_without_hello: usize = 64, Reload, "check::connections";
    hello_timeout_s: f64 = 5.0, Reload, "check::seconds";
    mib_per_s: u64 = 0, Reload, "check::whole";
    rows_per_process: usize = LIMITS.rows_per_process, Reload, "check::rows";
    memory_mib: usize = LIMITS.bytes >> 20, Reload, "check::memory";
    memory_mib_per_uid: usize = LIMITS.bytes_per_user >> 20, Reload, "check::memory";
    shared_mib: u64 = 2048, Reload, "check::whole";
} }

section! { Nvml {
    library: Option<PathBuf> = None, Restart;
    memory_hz: u32 = 10, Restart, "check::hertz";
    list_every_s: f64 = 1.0, Restart, "check::seconds";
    list_budget: f64 = 0.02, Restart, "check::share";
    list_when_moved_mib: u64 = 2, Restart, "check::whole";
    extra_lists_every_s: f64 = 10.0, Restart, "check::seconds";
    call_timeout_s: f64 = 5.0, Restart, "check::seconds";
    hang_retry_s: f64 = 60.0, Restart, "check::seconds";
    trust_pids: bool = false, Restart;
} }

section! { KernelSettings {
    log: PathBuf = "/dev/kmsg".into(), Restart;
    control_groups: PathBuf = "/sys/fs/cgroup".into(), Restart;
} }

section! { ProcessSettings {
    container_names: Option<PathBuf> = Some("/var/log/containers".into()), Restart, "check::folder";
    job_mapping: Option<PathBuf> = None, Restart, "check::folder";
} }

section! { Runs {
    store: Option<PathBuf> = None, Restart;
    checkpoint_every_s: f64 = 5.0, Reload, "check::seconds";
    roll_every_s: f64 = 86_400.0, Reload, "check::roll";
    keep_days: f64 = 90.0, Reload, "check::days";
    keep_steady_s: f64 = 3600.0, Reload, "check::age";
    max_size_mib: u64 = 2048, Reload, "check::whole";
    waiting_mib: usize = 64, Reload, "check::memory";
    keep_requests: bool = false, Reload;
    keep_requests_s: f64 = 3600.0, Reload, "check::seconds";
    keep_requests_mib: u64 = 64, Reload, "check::whole";
} }

section! { ControlLimits {
    connections: usize = 64, Reload, "check::connections";
    connections_per_uid: usize = 16, Reload, "check::connections";
    share_per_uid: f64 = 0.2, Reload, "check::share";
} }

section! { Metrics {
    listen: Option<SocketAddr> = Some(SocketAddr::from(([127, 0, 0, 1], 9837))), Restart, "check::address", "address";
    connections: usize = 64, Reload, "check::connections";
    max_series: usize = 10_000, Reload, "check::series";
    tags: usize = 0, Reload, "check::tags";
    fold_younger_s: f64 = 10.0, Reload, "check::age";
    rules: String = "default".into(), Reload;
    page: Page = Page::default(), Reload;
    hosts: Vec<String> = Vec::new(), Reload, "check::hosts";
} }

section! { Private {
    idle_exit_s: f64 = 300.0, Reload, "check::seconds";
    listen: Option<SocketAddr> = None, Restart, "check::address", "address";
} }

/// What a user sees of other users' processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tenants {
    /// User, pid and bytes of each process.
    #[default]
    Named,
    /// Only the bytes of each process.
    Anonymous,
}

/// Level of detail of the live page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Page {
    Off,
    /// Categories of each process's memory, and the values that the metrics have.
    #[default]
    Categories,
    /// Tags in addition to [`Categories`](Self::Categories).
    Tags,
}

/// Path of the configuration file if the user names none.
pub(crate) const USUAL_PATH: &str = "/etc/gpumemd/gpumemd.toml";

/// Reason why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: {source}", path.display())]
    Parse { path: PathBuf, source: Box<toml::de::Error> },
    /// No directory for the run store is configured, and the environment names none.
    #[error("no home directory is known: set HOME, or {0} in the configuration")]
    NoHome(&'static str),
    #[error(transparent)]
    Rules(#[from] gpumem_report::rules::Error),
}

impl Config {
    /// Loads the file at `path`; without one, the usual file if it exists.
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

    pub fn parse(text: &str, path: &Path) -> Result<Self, Error> {
        toml::from_str(text).map_err(|error| Error::Parse { path: path.to_owned(), source: Box::new(error) })
    }
}

/// All keys with their values in the file's syntax. Keys without a value are absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keys(BTreeMap<String, String>);

/// A key whose value a reload changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Name of the key with its section, such as `nvml.memory_hz`.
    pub key: String,
    /// Earlier value in the file's syntax; `unset` if there was none.
    pub old: String,
    /// New value in the file's syntax; `unset` if there is none.
    pub new: String,
    /// Whether the change takes effect without a restart.
    pub at_once: bool,
}

impl Keys {
    /// Returns the keys of a configuration.
    pub fn of(config: &Config) -> Self {
        let mut keys = BTreeMap::new();
        // Fails only for a path that is not UTF-8, which a configuration file cannot contain.
        if let Ok(value) = serde_json::to_value(config) {
            flatten("", &value, &mut keys);
        }
        Keys(keys)
    }

    /// Applies `new` and returns the changes. A key that needs a restart keeps its present value here, so the next reload reports
    /// the change again.
    pub fn take(&mut self, new: &Keys) -> Vec<Change> {
        let all: BTreeSet<String> = self.0.keys().chain(new.0.keys()).cloned().collect();
        let mut changes = Vec::new();
        for key in all {
            let (before, after) = (self.0.get(&key), new.0.get(&key));
            if before == after {
                continue;
            }
            let at_once = effect_of(&key) == Some(Reload);
            let value = |value: Option<&String>| value.cloned().unwrap_or_else(|| "unset".to_owned());
            changes.push(Change { key: key.clone(), old: value(before), new: value(after), at_once });
            match after.cloned() {
                _ if !at_once => {}
                Some(after) => drop(self.0.insert(key, after)),
                None => drop(self.0.remove(&key)),
            }
        }
        changes
    }
}

/// Returns when a change of a key takes effect. `key` includes the section; `None` if the table does not have the key.
fn effect_of(key: &str) -> Option<Effect> {
    let find = |keys: &[(&str, Effect)], name: &str| {
        keys.iter().find(|(known, _)| *known == name).map(|(_, effect)| *effect)
    };
    match key.split_once('.') {
        None => find(Config::EFFECTS, key),
        Some((section, name)) => match find(Config::EFFECTS, section)? {
            Section(keys) => find(keys, name),
            Reload | Restart => None,
        },
    }
}

fn flatten(section: &str, value: &Value, keys: &mut BTreeMap<String, String>) {
    match value {
        Value::Null => {}
        Value::Object(table) => {
            for (key, value) in table {
                let key = if section.is_empty() { key.clone() } else { format!("{section}.{key}") };
                flatten(&key, value, keys);
            }
        }
        value => drop(keys.insert(section.to_owned(), value.to_string())),
    }
}

fn address<S: Serializer>(address: &Option<SocketAddr>, to: S) -> Result<S::Ok, S::Error> {
    match address {
        Some(address) => to.collect_str(address),
        None => to.serialize_str("off"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Keys {
        Keys::of(&Config::parse(text, Path::new("test.toml")).unwrap())
    }

    fn told(changes: &[Change]) -> Vec<String> {
        let told = |Change { key, old, new, at_once }: &Change| {
            format!("{key} {old} -> {new}{}", if *at_once { "" } else { " (restart)" })
        };
        changes.iter().map(told).collect()
    }

    #[test]
    fn each_key_is_told_with_both_values_and_what_needs_a_restart_again_and_again() {
        let mut running = keys("");
        let new = keys(
            "record = \"/tmp/x\"\n[agent]\nconnections = 7\n[nvml]\nmemory_hz = 20\n\
             [runs]\ncheckpoint_every_s = 1.0\n[metrics]\nlisten = \"off\"\n",
        );
        let restart =
            ["metrics.listen \"127.0.0.1:9837\" -> \"off\" (restart)", "nvml.memory_hz 10 -> 20 (restart)"];
        let expected = [
            "agent.connections 1024 -> 7",
            restart[0],
            restart[1],
            "record unset -> \"/tmp/x\"",
            "runs.checkpoint_every_s 5.0 -> 1.0",
        ];
        assert_eq!(told(&running.take(&new)), expected);
        assert_eq!(told(&running.take(&new)), restart);
        assert_eq!(
            told(&running.take(&keys("[agent]\nconnections = 7\n[runs]\ncheckpoint_every_s = 1.0\n"))),
            ["record \"/tmp/x\" -> unset"]
        );
    }

    #[test]
    fn each_key_is_in_the_table() {
        let Keys(known) = keys(
            "record = \"x\"\nruntime_dir = \"/x\"\n[nvml]\nlibrary = \"x\"\n[who]\njob_mapping = \"/x\"\n",
        );
        assert!(known.len() > 40, "{known:?}");
        for key in known.keys() {
            assert!(effect_of(key).is_some(), "{key}");
        }
        assert_eq!(effect_of("agent.shared_mib"), Some(Reload));
        assert_eq!((effect_of("agent.none"), effect_of("none")), (None, None));
    }
}
