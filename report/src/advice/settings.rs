//! Settings of PyTorch's allocator and other environment variables: which are in force, and what a replay found.

use super::item::{Basis, Item, Kind, Memory};
use crate::findings::has_pools_of_graphs;
use gpumem_model::run::{Device, Run};

/// Minimum saving by a setting, as a share of the reserved bytes.
const LEAST_SHARE: f64 = 0.05;
/// The change for private pools of CUDA graphs.
pub(super) const ONE_POOL: &str =
    "Capture the CUDA graphs into one pool: torch.cuda.graph(graph, pool=first.pool())";

/// Figures of one replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trial {
    /// The settings that were changed, such as `expandable_segments:True`.
    pub changes: String,
    /// All settings, as the variable has them.
    pub settings: String,
    /// Highest reserved bytes; if a request fails, the bytes that it needed in addition are included.
    pub peak_bytes: i64,
    /// Whether a request fails for lack of memory.
    pub fails: bool,
}

/// A replay of the run's requests to PyTorch's allocator under several settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replay {
    /// Variable that sets the allocator in this release of PyTorch.
    pub variable: &'static str,
    /// The replay under the recorded settings.
    pub own: Trial,
    /// Replays under other settings, the best first.
    pub trials: Vec<Trial>,
    /// A replay in which all requests use one stream; `None` if the program used one.
    pub one_stream: Option<Trial>,
    /// A replay in which all private pools are one; `None` if the program has fewer than two.
    pub one_pool: Option<Trial>,
    /// Whether the replay under the recorded settings has the recorded figures.
    pub is_exact: bool,
    /// Difference between its peak and the recorded one. A saving that is not larger is not known.
    pub error_bytes: u64,
}

impl Replay {
    fn saving(&self, trial: &Trial) -> i64 {
        self.own.peak_bytes.saturating_sub(trial.peak_bytes)
    }

    /// Returns whether a trial saves enough for advice.
    fn helps(&self, trial: &Trial) -> bool {
        let is_much = self.saving(trial) as f64 >= self.own.peak_bytes as f64 * LEAST_SHARE;
        let is_known = self.saving(trial) > i64::try_from(self.error_bytes).unwrap_or(i64::MAX);
        !trial.fails && (is_much && is_known || self.own.fails)
    }

    /// Returns the changed settings that save nothing.
    pub(super) fn useless(&self) -> Vec<String> {
        let useless =
            self.trials.iter().filter(|trial| self.saving(trial) <= 0 && trial.fails == self.own.fails);
        useless.map(|trial| trial.changes.clone()).collect()
    }

    /// Returns the best settings, and the use of one stream or of one pool for all CUDA graphs if that helps. With several devices, the one with the most requests
    /// was replayed, and its number is not known.
    pub(super) fn items(&self, device: &Device, is_only_device: bool) -> Vec<Item> {
        let item = |kind, change: String, trial: &Trial| {
            let accuracy =
                if self.is_exact { "the replay reproduces the recording" } else { "the replay is not exact" };
            let fits = if self.own.fails { "; the request that failed then fits" } else { "" };
            let of_device = if is_only_device { "" } else { " on the GPU with the most requests" };
            Item {
                device: Some(device.ordinal).filter(|_| is_only_device),
                saves_bytes: Some([self.saving(trial); 2]),
                basis: Basis::Replayed,
                formula: format!("reserved by PyTorch at the peak{of_device}; {accuracy}{fits}"),
                ..Item::new(kind, Memory::Cached, device, change)
            }
        };
        let best = self.trials.first().filter(|trial| self.helps(trial));
        let setting = best.map(|trial| {
            // The recorded settings are text from the program.
            let change = match is_plain(&trial.settings) {
                true => format!("Set {}={}", self.variable, trial.settings),
                false => format!("Add {} to {}", trial.changes, self.variable),
            };
            item(Kind::AllocatorSetting, change, trial)
        });
        let stream = self.one_stream.as_ref().filter(|trial| self.helps(trial)).map(|trial| {
            let change = "Reuse one CUDA stream: memory that one stream caches serves no other";
            item(Kind::Streams, change.into(), trial)
        });
        let graphs = self.one_pool.as_ref().filter(|trial| has_pools_of_graphs(device) && self.helps(trial));
        let graphs = graphs.map(|trial| item(Kind::GraphPools, ONE_POOL.into(), trial));
        let mut items: Vec<Item> = setting.into_iter().chain(stream).chain(graphs).collect();
        items.sort_by_key(|item| std::cmp::Reverse(item.most()));
        items
    }
}

/// Returns the allocator's settings that the process's environment has.
pub(super) fn allocator(run: &Run) -> &str {
    let claims = &run.process.claims;
    claims.get("alloc_conf").or_else(|| claims.get("cuda_alloc_conf")).map_or("", String::as_str)
}

/// Returns whether a text has only letters that a setting has.
fn is_plain(text: &str) -> bool {
    let is_known = |letter: char| letter.is_ascii_alphanumeric() || "_:.,[]>-".contains(letter);
    text.len() <= 200 && text.chars().all(is_known)
}

/// Returns `NAME=VALUE` of the allocator's variable, with `setting` added to the settings in force. `None` if its key is set
/// already, or cannot be added.
pub(super) fn with_setting(run: &Run, setting: &str) -> Option<String> {
    let key = setting.split(':').next().unwrap_or(setting);
    let own = allocator(run);
    let is_set = own.split(',').any(|part| part.split(':').next().map(str::trim) == Some(key));
    let variable = if run.process.claims.contains_key("alloc_conf") {
        "PYTORCH_ALLOC_CONF"
    } else {
        "PYTORCH_CUDA_ALLOC_CONF"
    };
    let separator = if own.is_empty() { "" } else { "," };
    (!is_set && is_plain(own) && !own.contains("backend:"))
        .then(|| format!("{variable}={own}{separator}{setting}"))
}
