//! What a configuration that was read again changes, key by key.

use super::Config;
use serde::Serializer;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Keys, and sections, that take effect while the daemon runs. A key that is not here needs a restart, and is said to.
const AT_ONCE: &[&str] = &[
    "tenants",
    "record",
    "agent",
    "runs.checkpoint_every_s",
    "runs.roll_every_s",
    "runs.keep_days",
    "runs.keep_steady_s",
    "runs.max_size_mib",
    "runs.waiting_mib",
    "control",
    "metrics.connections",
    "metrics.max_series",
    "metrics.tags",
    "metrics.fold_younger_s",
    "metrics.rules",
    "metrics.page",
    "metrics.hosts",
    "private.idle_exit_s",
];

/// Every key with its value as it would be typed; one that was left open is not there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keys(BTreeMap<String, String>);

/// A key that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// With its section.
    pub key: String,
    /// As it would be typed; `unset` where it was left open.
    pub old: String,
    /// The same.
    pub new: String,
    /// It takes effect now.
    pub at_once: bool,
}

impl Keys {
    /// Of a configuration.
    pub fn of(config: &Config) -> Self {
        let mut keys = BTreeMap::new();
        // Fails only for a path that is no text, and then a file could not have said it.
        if let Ok(value) = serde_json::to_value(config) {
            flatten("", &value, &mut keys);
        }
        Keys(keys)
    }

    /// What `new` changes. What needs a restart goes on as it is here, so the next time it is told again.
    pub fn take(&mut self, new: &Keys) -> Vec<Change> {
        let all = self.0.keys().chain(new.0.keys()).cloned().collect::<std::collections::BTreeSet<_>>();
        let mut changes = Vec::new();
        for key in all {
            let (before, after) = (self.0.get(&key), new.0.get(&key));
            if before == after {
                continue;
            }
            let at_once = AT_ONCE.iter().any(|live| {
                key.strip_prefix(live).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            });
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

/// An address as the file has it.
pub(super) fn address<S: Serializer>(address: &Option<SocketAddr>, to: S) -> Result<S::Ok, S::Error> {
    match address {
        Some(address) => to.collect_str(address),
        None => to.serialize_str("off"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

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
    fn what_takes_effect_at_once_is_a_key_that_exists() {
        let Keys(known) = keys("record = \"x\"\n");
        for live in AT_ONCE {
            let is_there = |key: &String| key == live || key.starts_with(&format!("{live}."));
            assert!(known.keys().any(is_there), "{live}");
        }
    }
}
