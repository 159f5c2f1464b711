//! Retries facts of a process that other programs write some time after starting it: container names and jobs.

use super::cluster::{Gpu, PodNames, find_pods, job_of_gpus};
use super::{Facts, Processes};
use crate::clock;
use crate::config::ProcessSettings;
use gpumem_ledger::ProcessKey;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Time for which the facts of a process are retried.
const PATIENCE: Duration = Duration::from_secs(30);

impl LateFacts {
    /// Returns what to retry for a new process; `None` if nothing needs a retry.
    pub(super) fn of(settings: &ProcessSettings, key: ProcessKey, facts: &Facts) -> Option<Self> {
        let container = facts.place.container.clone().filter(|_| settings.container_names.is_some());
        container.is_some().then(|| LateFacts {
            key,
            container,
            gpus: Vec::new(),
            until: Instant::now() + PATIENCE,
        })
    }
}

/// A process for which some facts are retried.
#[derive(Debug, Clone)]
pub(super) struct LateFacts {
    key: ProcessKey,
    /// Id of the process's container, until the container's names are known.
    container: Option<String>,
    /// GPUs that the process has used, if files may assign them to jobs.
    gpus: Vec<Gpu>,
    until: Instant,
}

impl Processes {
    /// Stores that a process has memory on this GPU, whose files are then searched for its job.
    pub(crate) fn uses(&self, key: ProcessKey, gpu: Gpu) {
        if self.inner.settings.job_mapping.is_none() {
            return;
        }
        let mut table = self.lock();
        let table = &mut *table;
        let Some(entry) = table.live.get_mut(&key.pid).filter(|entry| entry.key == key) else { return };
        // A job found in the process's own control group is more precise than one of its GPUs.
        if entry.facts.place.slurm_job.is_some() || entry.gpus.contains(&gpu) {
            return;
        }
        entry.gpus.push(gpu);
        let (gpus, until) = (entry.gpus.clone(), Instant::now() + PATIENCE);
        match table.sought.iter_mut().find(|sought| sought.key == key) {
            Some(sought) => (sought.gpus, sought.until) = (gpus, until),
            None => table.sought.push(LateFacts { key, container: None, gpus, until }),
        }
    }

    /// Retries the missing facts. Reads files but makes no requests.
    pub(crate) fn read_late_facts(&self) {
        let sought: Vec<LateFacts> = self.lock().sought.clone();
        if sought.is_empty() {
            return;
        }
        let ids: Vec<&str> = sought.iter().filter_map(|sought| sought.container.as_deref()).collect();
        let mut named = match &self.inner.settings.container_names {
            Some(directory) if !ids.is_empty() => find_pods(directory, &ids),
            _ => vec![None; ids.len()],
        }
        .into_iter();
        let now = Instant::now();
        for sought in &sought {
            let names = sought.container.as_ref().and_then(|_| named.next().flatten());
            let directory = self.inner.settings.job_mapping.as_ref().filter(|_| !sought.gpus.is_empty());
            let job = directory
                .and_then(|directory| job_of_gpus(directory, &sought.gpus, began(sought.key.start_ticks)?));
            self.found(sought, names, job, now);
        }
    }

    fn found(&self, sought: &LateFacts, names: Option<PodNames>, job: Option<String>, now: Instant) {
        let mut table = self.lock();
        let table = &mut *table;
        let key = sought.key;
        let Some(entry) = table.live.get_mut(&key.pid).filter(|entry| entry.key == key) else {
            table.sought.retain(|other| other.key != key);
            return;
        };
        let facts = &entry.facts;
        let (has_names, has_job) = (names.is_some(), job.is_some());
        // The job was found while the process used one GPU, and does not match the second GPU.
        let is_wrong = facts.mapped_job.is_some() && !has_job && !sought.gpus.is_empty();
        let job = if is_wrong { Some(String::new()) } else { job };
        if (has_names && facts.names != names) || (job.is_some() && facts.mapped_job != job) {
            let facts = Arc::make_mut(&mut entry.facts);
            facts.names = names.or(facts.names.take());
            facts.mapped_job = job.or(facts.mapped_job.take());
            if !table.unannounced.contains(&key) {
                table.unannounced.push(key);
            }
        }
        if let Some(open) = table.sought.iter_mut().find(|other| other.key == key) {
            if has_names {
                open.container = None;
            }
            // Search no longer, unless the process uses another GPU by now.
            if has_job && open.gpus == sought.gpus {
                open.gpus.clear();
            }
        }
        table.sought.retain(|open| open.until > now && (open.container.is_some() || !open.gpus.is_empty()));
    }
}

/// Returns the wall-clock time at which a process began, for comparison with file times.
fn began(start_ticks: u64) -> Option<SystemTime> {
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let began = Duration::from_millis(start_ticks.checked_mul(1000)? / per_second);
    SystemTime::now().checked_sub(clock::since_boot().saturating_sub(began))
}
