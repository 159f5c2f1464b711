//! The summary after the command has ended: the verdict and the peak, or one line if no GPU was used.

use super::{Listener, Notes};
use crate::args::{Run, quoted_suffix};
use crate::client::{Daemon, RunReply, RunSelector};
use crate::proc::Stat;
use gpumem_model::escape::quoted;
use gpumem_model::run::State;
use gpumem_model::units::plural;
use gpumem_report::brief::{EndedRun, brief};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Longest wait for the final records. They are in the agent's socket when the process ends, and the daemon reads them at once.
/// The next NVML sample can take a second.
const FINAL_RECORDS: Duration = Duration::from_millis(1500);
/// Longest wait for the first run of the job. After it, runs without an agent are searched too.
const FIRST_RUN: Duration = Duration::from_millis(250);
/// Timeout for each request, so that a stopped daemon does not block the caller's shell.
const REQUEST: Duration = Duration::from_secs(2);
/// Pause between two requests.
const PAUSE: Duration = Duration::from_millis(25);

#[derive(Debug)]
pub(crate) struct ExitSummary<'a> {
    pub args: &'a Run,
    pub listener: &'a Listener,
    pub library_found: bool,
    pub job: &'a str,
    /// Pid of the command.
    pub pid: u32,
    pub started: Instant,
}

impl ExitSummary<'_> {
    pub(crate) fn print(&self, notes: &Notes) {
        if let Some(record) = &self.args.record {
            return self.print_recordings(&super::absolute(record), notes);
        }
        let (job, socket) = (self.job, &quoted_suffix(&self.args.socket.words()));
        let daemon = match (&self.listener.daemon, &self.listener.agent) {
            (Some(daemon), _) => daemon,
            (None, Some(agent)) => {
                let agent = agent.display();
                return notes.print(&format!(
                    "reported to {agent}, whose daemon does not answer here; where it runs: gpumemctl report --job {job}"
                ));
            }
            (None, None) => return,
        };
        let runs = match self.final_runs(&daemon.with_max_timeout(REQUEST)) {
            Ok(runs) => runs,
            Err(error) => {
                return notes.print(&format!("{error:#}; ask later: gpumemctl report --job {job}{socket}"));
            }
        };
        if runs.is_empty() {
            return notes.print(&format!("no GPU memory: {}", self.why_nothing()));
        }
        let ended: Vec<EndedRun<'_>> =
            runs.iter().map(|reply| EndedRun { id: reply.id.as_deref(), run: &reply.run }).collect();
        for line in brief(&ended, &format!("--job {job}")) {
            notes.print(&if line.starts_with("next: ") { line + socket } else { line });
        }
    }

    /// Waits until the job's runs have ended, or for a limited time, and returns them.
    fn final_runs(&self, daemon: &Daemon) -> anyhow::Result<Vec<RunReply>> {
        let since = Instant::now();
        let ours = |selector| -> anyhow::Result<Vec<RunReply>> {
            let mut runs = daemon.runs(selector)?;
            runs.retain(|reply| self.is_ours(reply));
            Ok(runs)
        };
        loop {
            let mut runs = ours(RunSelector::Job(self.job))?;
            let mut is_reported = !runs.is_empty();
            if !is_reported && since.elapsed() > FIRST_RUN {
                // Without an agent the daemon does not know the job's id, but NVML may have seen the processes.
                runs = ours(RunSelector::Tree(self.pid))?;
                is_reported = true;
            }
            let is_open = runs.iter().any(|reply| reply.run.state == State::Open);
            if is_reported && (!is_open || since.elapsed() > FINAL_RECORDS) {
                return Ok(runs);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Returns whether the process of a run began after gpumemctl. An inherited job id may also have older processes.
    fn is_ours(&self, reply: &RunReply) -> bool {
        let ticks = reply.run.process.start_ticks;
        ticks == 0 || Stat::of_pid(std::process::id()).is_none_or(|own| ticks >= own.start_ticks)
    }

    /// Returns why no process of the command may have reported GPU memory.
    fn why_nothing(&self) -> &'static str {
        match self.library_found {
            true => {
                "no process of the command initialised CUDA with libgpumem.so (libcuda was not opened, or the \
                 environment was cleared)"
            }
            false => "libgpumem.so was not found, so only NVML could report memory",
        }
    }

    fn print_recordings(&self, pattern: &Path, notes: &Notes) {
        let files = recordings(pattern, self.started);
        let size = |file: &PathBuf| std::fs::metadata(file).map_or(0, |file| file.len());
        let Some(largest) = files.iter().max_by_key(|file| size(file)) else {
            return notes.print(&format!("no recording was written: {}", self.why_nothing()));
        };
        let count = plural(files.len() as u64, "recording");
        let bytes = plural(files.iter().map(size).sum(), "byte");
        let largest = quoted(&largest.to_string_lossy());
        notes.print(&format!("{count} of {bytes}; next: gpumemctl report {largest}"));
    }
}

/// Returns the non-empty files that were written since a time and match a path in which `%p` stands for a pid.
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
            file.strip_prefix(before).and_then(|rest| rest.strip_suffix(after)).is_some_and(is_number)
        }
        None => file == name || is_numbered(file, &name),
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| matches(&entry.file_name().to_string_lossy()));
    let mut found: Vec<PathBuf> = named.map(|entry| entry.path()).filter(fresh).collect();
    found.sort();
    found
}

/// Returns whether a file name is a variant as `run-2.gpumem` of `run.gpumem`, which an agent writes if the file exists.
fn is_numbered(file: &str, name: &str) -> bool {
    let (stem, extension) = match name.rsplit_once('.') {
        Some((stem, extension)) if !stem.is_empty() => (stem, format!(".{extension}")),
        _ => (name, String::new()),
    };
    let number = file.strip_prefix(stem).and_then(|rest| rest.strip_suffix(extension.as_str()));
    number.and_then(|rest| rest.strip_prefix('-')).is_some_and(is_number)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}
