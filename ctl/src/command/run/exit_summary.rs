//! The summary after the command has ended: five lines, or one if no GPU was used.

use super::{Listener, Words};
use crate::client::{Daemon, RunReply, RunSelector};
use gpumem_model::harmless::quoted;
use gpumem_model::run::State;
use gpumem_report::brief::{Ended, brief};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Longest wait for the final records. They are in the agent's socket when the process ends, and the daemon reads them at once.
/// The next NVML sample can take a second.
const LAST_WORDS: Duration = Duration::from_millis(1500);
/// Wait before concluding that no agent reported.
const SILENCE: Duration = Duration::from_millis(250);
/// Timeout for each request, so that a stopped daemon does not block the caller's shell.
const PATIENCE: Duration = Duration::from_secs(2);
/// Interval of polling.
const PAUSE: Duration = Duration::from_millis(25);

/// Data for the summary.
#[derive(Debug)]
pub(crate) struct Farewell<'a> {
    /// The receiver of the reports.
    pub listener: &'a Listener,
    /// The agent's library was found.
    pub library_found: bool,
    /// Id of the job.
    pub job: &'a str,
    /// Path pattern of the recording.
    pub record: Option<&'a Path>,
    /// The `--socket` option as typed.
    pub socket: String,
    /// The command's pid.
    pub pid: u32,
    /// Start time of the command.
    pub started: Instant,
}

impl Farewell<'_> {
    /// Prints the summary.
    pub(crate) fn say(&self, words: &mut Words) {
        if let Some(record) = self.record {
            return self.say_recordings(&super::absolute(record), words);
        }
        let daemon = match self.listener {
            Listener::Daemon(daemon) => daemon,
            Listener::AgentAlone(agent) => {
                return words.say(&format!(
                    "reported to {}, whose daemon cannot be asked from here; where it runs: gpumemctl report --job {}",
                    agent.display(),
                    self.job
                ));
            }
            Listener::Nobody => return,
        };
        let told = match self.last_words(&daemon.hurried(PATIENCE)) {
            Ok(told) => told,
            Err(error) => {
                return words.say(&format!(
                    "{error:#}; ask later: gpumemctl report --job {}{}",
                    self.job, self.socket
                ));
            }
        };
        if told.is_empty() {
            return words.say(&format!("no GPU memory: {}", self.why_nothing()));
        }
        let ended: Vec<Ended<'_>> =
            told.iter().map(|told| Ended { id: told.id.as_deref(), run: &told.run }).collect();
        let job = format!("--job {}", self.job);
        for line in brief(&ended, &job) {
            words.say(&format!("{line}{}", if line.starts_with("next: ") { &self.socket } else { "" }));
        }
    }

    /// Waits until the job's runs have ended, or for a limited time, and returns them.
    fn last_words(&self, daemon: &Daemon) -> anyhow::Result<Vec<RunReply>> {
        let since = Instant::now();
        loop {
            let mut told = daemon.runs(RunSelector::Job(self.job))?;
            told.retain(|told| self.is_ours(told));
            let open = told.iter().any(|told| told.run.state == State::Open);
            let enough = match (told.is_empty(), open) {
                (false, false) => true,
                (false, true) => since.elapsed() > LAST_WORDS,
                (true, _) => since.elapsed() > SILENCE,
            };
            if enough && told.is_empty() {
                // Without an agent the daemon does not know the job's id, but NVML may have seen the processes.
                told = daemon.runs(RunSelector::Tree(self.pid))?;
                told.retain(|told| self.is_ours(told));
                let open = told.iter().any(|told| told.run.state == State::Open);
                if !open || since.elapsed() > LAST_WORDS {
                    return Ok(told);
                }
            } else if enough {
                return Ok(told);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Returns whether a run belongs to this command. The job's id may be older, so only processes that began after us count.
    fn is_ours(&self, told: &RunReply) -> bool {
        let ticks = told.run.process.start_ticks;
        ticks == 0 || own_start_ticks().is_none_or(|own| ticks >= own)
    }

    fn why_nothing(&self) -> &'static str {
        if self.library_found {
            "no process of the command initialised CUDA with libgpumem.so (no libcuda was opened, or the \
             environment was cleared on the way)"
        } else {
            "libgpumem.so was not found, so nothing but NVML could have seen any"
        }
    }

    fn say_recordings(&self, pattern: &Path, words: &mut Words) {
        let written = recordings(pattern, self.started);
        match written.as_slice() {
            [] => words.say(&format!("no recording was written: {}", self.why_nothing())),
            files => {
                let size = |file: &PathBuf| std::fs::metadata(file).map_or(0, |file| file.len());
                let bytes: u64 = files.iter().map(size).sum();
                let largest = files.iter().max_by_key(|file| size(file)).unwrap_or(&files[0]);
                let what = gpumem_model::units::plural(files.len() as u64, "recording");
                let bytes = gpumem_model::units::plural(bytes, "byte");
                words.say(&format!(
                    "{what} of {bytes}; next: gpumemctl report {}",
                    quoted(&largest.to_string_lossy())
                ));
            }
        }
    }
}

/// Returns the files that match a pattern with `%p` and were written since a time.
fn recordings(pattern: &Path, since: Instant) -> Vec<PathBuf> {
    let name = pattern.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let folder = pattern.parent().unwrap_or(Path::new("/"));
    let began = SystemTime::now().checked_sub(since.elapsed() + Duration::from_secs(1));
    let fresh = |path: &PathBuf| {
        let file = std::fs::metadata(path).ok().filter(|file| file.is_file() && file.len() > 0);
        file.and_then(|file| file.modified().ok())
            .is_some_and(|written| began.is_none_or(|began| written >= began))
    };
    let matches = |file: &str| match name.split_once("%p") {
        Some((before, after)) => {
            let pid = file.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
            pid.is_some_and(|pid| !pid.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit()))
        }
        None => file == name || is_numbered(file, &name),
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| matches(&entry.file_name().to_string_lossy()));
    let mut found: Vec<PathBuf> = named.map(|entry| entry.path()).filter(fresh).collect();
    found.sort();
    found
}

/// Returns whether a file is a numbered variant, such as `run-2.gpumem` of `run.gpumem`, which was used because the name existed.
fn is_numbered(file: &str, name: &str) -> bool {
    let (stem, extension) = match name.rsplit_once('.') {
        Some((stem, extension)) if !stem.is_empty() => (stem, format!(".{extension}")),
        _ => (name, String::new()),
    };
    let number = file.strip_prefix(stem).and_then(|rest| rest.strip_suffix(extension.as_str()));
    let number = number.and_then(|rest| rest.strip_prefix('-'));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

fn own_start_ticks() -> Option<u64> {
    let stat = std::fs::read("/proc/self/stat").ok()?;
    String::from_utf8_lossy(&stat).rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}
