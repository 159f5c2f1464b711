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

/// A process for which some facts are retried.
#[derive(Debug, Clone)]
pub(super) struct LateFacts {
    key: ProcessKey,
    /// Id of the process's container, until the container's names are known.
    container: Option<String>,
    /// GPUs that the process has used, if files may assign them to jobs.
    gpus: Vec<Gpu>,
    /// Time at which the retries end.
    until: Instant,
}

impl LateFacts {
    /// Returns the search for the container names of a new process; `None` if it is in no container, or names are not searched.
    pub(super) fn of_container(settings: &ProcessSettings, key: ProcessKey, facts: &Facts) -> Option<Self> {
        settings.container_names.as_ref()?;
        let container = Some(facts.place.container.clone()?);
        Some(LateFacts { key, container, gpus: Vec::new(), until: Instant::now() + PATIENCE })
    }
}

impl Processes {
    /// Stores that a process has memory on this GPU, whose files are then searched for its job.
    pub(crate) fn note_gpu(&self, key: ProcessKey, gpu: Gpu) {
        if self.inner.settings.job_mapping.is_none() {
            return;
        }
        let table = &mut *self.lock();
        let Some(entry) = table.entry_mut(key) else { return };
        // A job found in the process's own control group is more precise than one of its GPUs.
        if entry.facts.place.slurm_job.is_some() || entry.gpus.contains(&gpu) {
            return;
        }
        entry.gpus.push(gpu);
        let (gpus, until) = (entry.gpus.clone(), Instant::now() + PATIENCE);
        match table.late.iter_mut().find(|late| late.key == key) {
            Some(late) => (late.gpus, late.until) = (gpus, until),
            None => table.late.push(LateFacts { key, container: None, gpus, until }),
        }
    }

    /// Retries the missing facts. Reads files but makes no requests.
    pub(crate) fn read_late_facts(&self) {
        let all = self.lock().late.clone();
        let has_container = all.iter().any(|late| late.container.is_some());
        let directory = self.inner.settings.container_names.as_ref().filter(|_| has_container);
        let pods = directory.map(|directory| find_pods(directory)).unwrap_or_default();
        for late in &all {
            let names = late.container.as_ref().and_then(|id| pods.get(id)).cloned();
            let directory = self.inner.settings.job_mapping.as_ref().filter(|_| !late.gpus.is_empty());
            let job = directory
                .and_then(|directory| job_of_gpus(directory, &late.gpus, began(late.key.start_ticks)?));
            self.store_late_facts(late, names, job);
        }
    }

    /// Stores the result of one search. Ends the search if all is found or its time is over.
    fn store_late_facts(&self, late: &LateFacts, names: Option<PodNames>, job: Option<String>) {
        let table = &mut *self.lock();
        let key = late.key;
        let Some(entry) = table.entry_mut(key) else {
            table.late.retain(|other| other.key != key);
            return;
        };
        let facts = &entry.facts;
        let (has_names, has_job) = (names.is_some(), job.is_some());
        // The job was found while the process used one GPU, and does not match the second GPU.
        let is_wrong = facts.mapped_job.is_some() && !has_job && !late.gpus.is_empty();
        let job = if is_wrong { Some(String::new()) } else { job };
        if (has_names && facts.names != names) || (job.is_some() && facts.mapped_job != job) {
            let facts = Arc::make_mut(&mut entry.facts);
            facts.names = names.or(facts.names.take());
            facts.mapped_job = job.or(facts.mapped_job.take());
            let facts = Arc::clone(&entry.facts);
            table.announce(key, facts);
        }
        if let Some(open) = table.late.iter_mut().find(|other| other.key == key) {
            if has_names {
                open.container = None;
            }
            // Search no longer, unless the process uses another GPU by now.
            if has_job && open.gpus == late.gpus {
                open.gpus.clear();
            }
        }
        let now = Instant::now();
        table.late.retain(|open| open.until > now && (open.container.is_some() || !open.gpus.is_empty()));
    }
}

/// Returns the wall-clock time at which a process began, for comparison with file times.
fn began(start_ticks: u64) -> Option<SystemTime> {
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let began = Duration::from_millis(start_ticks.checked_mul(1000)? / per_second);
    SystemTime::now().checked_sub(clock::since_boot().saturating_sub(began))
}
