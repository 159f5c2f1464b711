//! Findings of live processes. They are made from the runs that the thread writes, so no view builds runs for them.

use super::key_of;
use crate::os::lock;
use gpumem_ledger::ProcessKey;
use gpumem_model::run::{Run, State};
use gpumem_report::Report;
use gpumem_report::findings::{Finding, Findings};
use gpumem_report::rules::Groupings;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Maximum number of processes with findings. At the maximum, the findings of all processes are dropped, and made again when their
/// runs are next written.
const MAX_PROCESSES: usize = 16_384;

/// Minimum pause before findings of a process are made again, as a multiple of the product of two values: the time that making them
/// took, and the number of processes. So findings take at most 1 % of the time.
const PAUSE_FACTOR: u32 = 100;

/// Findings of one process, the most important first, each with the UUID of its device. `None`: about the whole process.
pub(crate) type ProcessFindings = Arc<[(Option<String>, Finding)]>;

/// Findings of each live process with an agent, as of its newest written run.
#[derive(Debug, Default)]
pub(crate) struct LiveFindings(Mutex<HashMap<ProcessKey, Entry>>);

#[derive(Debug)]
struct Entry {
    findings: ProcessFindings,
    made: Instant,
    took: Duration,
}

/// Findings of all processes. The thread that writes runs waits while this exists.
pub(crate) struct FindingsReader<'a>(MutexGuard<'a, HashMap<ProcessKey, Entry>>);

impl FindingsReader<'_> {
    /// Returns the findings of a process; `None` if its run has not been written yet, or if it has no agent.
    pub(crate) fn of(&self, key: ProcessKey) -> Option<ProcessFindings> {
        self.0.get(&key).map(|entry| Arc::clone(&entry.findings))
    }
}

impl LiveFindings {
    /// Locks the findings for reading those of several processes.
    pub(crate) fn read(&self) -> FindingsReader<'_> {
        FindingsReader(lock(&self.0))
    }

    /// Returns the findings of a process; see [`FindingsReader::of`].
    pub(crate) fn of(&self, key: ProcessKey) -> Option<ProcessFindings> {
        self.read().of(key)
    }

    /// Replaces the findings of the run's process if their pause is over. Removes them if the process has ended.
    pub(super) fn update(&self, run: &Run) {
        match run.state {
            State::Open if run.coverage.covered && self.is_due(key_of(run)) => {
                let made = Instant::now();
                let entry = Entry { findings: findings(run), made, took: made.elapsed() };
                let mut all = lock(&self.0);
                if all.len() >= MAX_PROCESSES {
                    all.clear();
                }
                all.insert(key_of(run), entry);
            }
            State::Open | State::Rolled { .. } => {}
            State::Closed { .. } | State::Interrupted => drop(lock(&self.0).remove(&key_of(run))),
        }
    }

    fn is_due(&self, key: ProcessKey) -> bool {
        let all = lock(&self.0);
        let count = u32::try_from(all.len()).unwrap_or(u32::MAX);
        let pause = |took: Duration| took.saturating_mul(PAUSE_FACTOR).saturating_mul(count);
        all.get(&key).is_none_or(|entry| entry.made.elapsed() >= pause(entry.took))
    }
}

fn findings(run: &Run) -> ProcessFindings {
    let report = Report::new(run, Groupings::of_run(run), None);
    let uuid = |ordinal| {
        run.devices.iter().find(|device| device.ordinal == ordinal).map(|device| device.name.clone())
    };
    let findings = Findings::of(&report).findings.into_iter();
    findings.map(|finding| (finding.device.and_then(uuid), finding)).collect()
}
