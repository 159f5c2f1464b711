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

/// Facts of one process that are retried.
#[derive(Debug, Clone)]
pub(super) struct LateFacts {
    /// Id of the process's container, until the container's names are known.
    container: Option<String>,
    /// GPUs that the process has used, if files may assign them to jobs.
    gpus: Vec<Gpu>,
    /// Time at which the retries end.
    until: Instant,
}

impl LateFacts {
    /// Returns the search for the container names of a new process; `None` if it is in no container, or names are not searched.
    pub(super) fn of_container(settings: &ProcessSettings, facts: &Facts) -> Option<Self> {
        settings.container_names.as_ref()?;
        let container = Some(facts.place.container.clone()?);
        Some(LateFacts { container, gpus: Vec::new(), until: Instant::now() + PATIENCE })
    }
}

impl Processes {
    /// Stores that a process has memory on this GPU, whose files are then searched for its job.
    pub(crate) fn note_gpu(&self, key: ProcessKey, gpu: Gpu) {
        if self.inner.settings.job_mapping.is_none() {
            return;
        }
        let mut table = self.lock();
        let Some(entry) = table.entry_mut(key) else { return };
        // A job found in the process's own control group is more precise than one of its GPUs.
        if entry.facts.place.slurm_job.is_some() || entry.gpus.contains(&gpu) {
            return;
        }
        entry.gpus.push(gpu);
        let container = entry.late.take().and_then(|late| late.container);
        let (gpus, until) = (entry.gpus.clone(), Instant::now() + PATIENCE);
        entry.late = Some(LateFacts { container, gpus, until });
        table.has_late = true;
    }

    /// Retries the missing facts. Reads files but makes no requests.
    pub(crate) fn read_late_facts(&self) {
        let all: Vec<(ProcessKey, LateFacts)> = {
            let mut table = self.lock();
            if !table.has_late {
                return;
            }
            let late = table.live.values().filter_map(|entry| Some((entry.key, entry.late.clone()?)));
            let all: Vec<_> = late.collect();
            table.has_late = !all.is_empty();
            all
        };
        let has_container = all.iter().any(|(_, late)| late.container.is_some());
        let directory = self.inner.settings.container_names.as_ref().filter(|_| has_container);
        let pods = directory.map(|directory| find_pods(directory)).unwrap_or_default();
        for (key, late) in &all {
            let names = late.container.as_ref().and_then(|id| pods.get(id)).cloned();
            let directory = self.inner.settings.job_mapping.as_ref().filter(|_| !late.gpus.is_empty());
            let job =
                directory.and_then(|directory| job_of_gpus(directory, &late.gpus, began(key.start_ticks)?));
            self.store_late_facts(*key, late, names, job);
        }
    }

    /// Stores the result of one search. Ends the search if all is found or its time is over.
    fn store_late_facts(
        &self,
        key: ProcessKey,
        late: &LateFacts,
        names: Option<PodNames>,
        job: Option<String>,
    ) {
        let mut table = self.lock();
        let Some(entry) = table.entry_mut(key) else { return };
        let (has_names, has_job) = (names.is_some(), job.is_some());
        // Search for the job no longer, unless the process has begun to use another GPU meanwhile.
        entry.late = entry.late.take().map(|open| LateFacts {
            container: open.container.filter(|_| !has_names),
            gpus: if has_job && open.gpus == late.gpus { Vec::new() } else { open.gpus },
            ..open
        });
        let is_over = |open: &mut LateFacts| open.container.is_none() && open.gpus.is_empty();
        entry.late.take_if(|open| open.until <= Instant::now() || is_over(open));
        // The job was found while the process used one GPU, and does not match the second GPU.
        let is_wrong = entry.facts.mapped_job.is_some() && !has_job && !late.gpus.is_empty();
        let job = if is_wrong { Some(String::new()) } else { job };
        if (has_names && entry.facts.names != names) || (job.is_some() && entry.facts.mapped_job != job) {
            let facts = Arc::make_mut(&mut entry.facts);
            facts.names = names.or(facts.names.take());
            facts.mapped_job = job.or(facts.mapped_job.take());
            let facts = Arc::clone(&entry.facts);
            table.announce(key, facts);
        }
    }
}

/// Returns the wall-clock time at which a process began, for comparison with file times.
fn began(start_ticks: u64) -> Option<SystemTime> {
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let began = Duration::from_millis(start_ticks.checked_mul(1000)? / per_second);
    SystemTime::now().checked_sub(clock::since_boot().saturating_sub(began))
}
