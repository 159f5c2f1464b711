//! Asking the daemon: HTTP/1.1 and JSON over its control socket (`gpumem_model::control`).
//!
//! ```text
//! search      where the socket may be, and who may own it
//! http        one request, one answer, within a time and a size
//! prometheus  instant queries to a Prometheus, which is asked about many nodes
//! samples     their text, and that of its answers
//! ```

mod http;
pub(crate) mod prometheus;
mod samples;
mod search;

pub(crate) use search::{AGENT, agent_alone, named, private_directory, runtime, sibling};

use crate::exit::{NoAnswer, NotFound, Refused, TooOld, Unreachable};
use anyhow::Result;
use gpumem_model::control::{Doctor, HiddenRun, Marked, Ps, Recorded, Refusal, Released};
use gpumem_model::run::Run;
use gpumem_report::oom::at::Around;
use hyper::{Method, StatusCode};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A daemon takes its answers from what it has prepared: milliseconds. One that is stopped or swapped out
/// should not hold up a terminal.
const ANSWER: Duration = Duration::from_secs(5);
/// An agent that is busy sending answers late.
const RECORD: Duration = Duration::from_secs(15);
/// Runs hold series and, at their largest, tens of thousands of tags.
const RUNS: Duration = Duration::from_secs(30);

/// A daemon whose control socket takes connections.
#[derive(Debug, Clone)]
pub(crate) struct Daemon {
    /// Its control socket.
    pub control: PathBuf,
    candidate: search::Candidate,
    /// No answer is waited for longer.
    patience: Duration,
}

/// Runs that are asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RunSelector<'a> {
    /// All that are live.
    Live,
    /// Those of a process.
    Pid(u32),
    /// Those of a process and its descendants.
    Tree(u32),
    /// Those of a job.
    Job(&'a str),
    /// Those whose process ended, or ran out of memory, around a time.
    Around(Around),
}

/// A run as the daemon tells it.
#[derive(Debug)]
pub(crate) struct RunReply {
    /// Its name in the daemon's store, where it has one.
    pub id: Option<String>,
    /// The run.
    pub run: Run,
}

impl Daemon {
    /// The first that answers, of those that are named and of the usual ones.
    ///
    /// # Errors
    /// [`Unreachable`]: where it was looked for, and what was there.
    pub(crate) fn find(given: Option<&Path>) -> Result<Daemon, Unreachable> {
        let mut tried = Vec::new();
        for candidate in search::candidates(given) {
            match candidate.check().and_then(|()| http::reach(&candidate)) {
                Ok(()) => {
                    return Ok(Daemon {
                        control: candidate.path.clone(),
                        candidate,
                        patience: Duration::MAX,
                    });
                }
                Err(why) => tried.push((candidate.path, why)),
            }
        }
        Err(Unreachable { tried })
    }

    /// All that answer, of those that are named and of the usual ones: the system's and the user's own.
    ///
    /// # Errors
    /// [`Unreachable`]: none does.
    pub(crate) fn all(given: Option<&Path>) -> Result<Vec<Daemon>, Unreachable> {
        let (mut found, mut tried) = (Vec::new(), Vec::new());
        for candidate in search::candidates(given) {
            match candidate.check().and_then(|()| http::reach(&candidate)) {
                Ok(()) => {
                    let control = candidate.path.clone();
                    found.push(Daemon { control, candidate, patience: Duration::MAX });
                }
                Err(why) => tried.push((candidate.path, why)),
            }
        }
        if found.is_empty() { Err(Unreachable { tried }) } else { Ok(found) }
    }

    /// The same, for a caller who has something else to do.
    pub(crate) fn hurried(&self, patience: Duration) -> Daemon {
        Daemon { patience, ..self.clone() }
    }

    /// What holds the devices.
    ///
    /// # Errors
    /// No answer, or a refusal.
    pub(crate) fn ps(&self) -> Result<Ps> {
        self.get("/v1/ps", ANSWER)
    }

    /// How the daemon is, and what it says of a process.
    ///
    /// # Errors
    /// No answer, or a refusal.
    pub(crate) fn doctor(&self, pid: Option<u32>) -> Result<Doctor> {
        let of = pid.map(|pid| format!("?pid={pid}")).unwrap_or_default();
        self.get(&format!("/v1/doctor{of}"), ANSWER)
    }

    /// What a scrape would be told.
    ///
    /// # Errors
    /// No answer, or a refusal.
    pub(crate) fn metrics(&self) -> Result<String> {
        self.get("/v1/metrics", ANSWER)
    }

    /// Runs, the newest first.
    ///
    /// # Errors
    /// No answer, or a refusal.
    pub(crate) fn runs(&self, which: RunSelector<'_>) -> Result<Vec<RunReply>> {
        let query = match which {
            RunSelector::Live => String::new(),
            RunSelector::Pid(pid) => format!("?pid={pid}"),
            RunSelector::Tree(pid) => format!("?tree={pid}"),
            RunSelector::Job(job) => format!("?job={}", percent(job)),
            RunSelector::Around(Around { at_ns, for_ns }) => format!("?around={at_ns}&within={for_ns}"),
        };
        let list: Vec<Value> = self.get(&format!("/v1/runs{query}"), RUNS)?;
        list.into_iter().map(|told| self.told(told)).collect()
    }

    /// Runs that a question about a time is also about, which are other users'. None of a daemon that does not tell.
    pub(crate) fn hidden(&self, around: Around) -> Vec<HiddenRun> {
        let Around { at_ns, for_ns } = around;
        self.get(&format!("/v1/hidden?around={at_ns}&within={for_ns}"), RUNS).unwrap_or_default()
    }

    /// Closes NVML for a while.
    ///
    /// # Errors
    /// No answer, or a refusal.
    pub(crate) fn release(&self, for_s: u64) -> Result<Released> {
        self.ask(Method::POST, &format!("/v1/nvml/release?for_s={for_s}"), ANSWER)
    }

    /// Has the agent of a process do something. `limits`: of a recording, as a query has them (`&steps=1:2`).
    ///
    /// # Errors
    /// No answer, or a refusal.
    pub(crate) fn record(
        &self,
        pid: u32,
        verb: &str,
        output: Option<&Path>,
        limits: &str,
    ) -> Result<Recorded> {
        let output = output.map(|path| format!("&output={}", percent(&path.to_string_lossy())));
        let path = format!("/v1/record?pid={pid}&do={verb}{}{limits}", output.unwrap_or_default());
        self.ask(Method::POST, &path, RECORD)
    }

    /// Gives this moment a name.
    ///
    /// # Errors
    /// No answer, a refusal, or no such process.
    pub(crate) fn mark(&self, name: &str, which: RunSelector<'_>) -> Result<Marked> {
        let whose = match which {
            RunSelector::Live | RunSelector::Around(_) => String::new(),
            RunSelector::Pid(pid) => format!("&pid={pid}"),
            RunSelector::Tree(pid) => format!("&tree={pid}"),
            RunSelector::Job(job) => format!("&job={}", percent(job)),
        };
        self.ask(Method::POST, &format!("/v1/mark?name={}{whose}", percent(name)), ANSWER)
    }

    fn told(&self, told: Value) -> Result<RunReply> {
        // Beside the fields of the run itself, the name under which it is stored.
        let id = told.get("id").and_then(Value::as_str).map(str::to_owned);
        let run = serde_json::from_value(told).map_err(|error| self.not_understood("a run", &error))?;
        Ok(RunReply { id, run })
    }

    fn get<T: serde::de::DeserializeOwned>(&self, path: &str, within: Duration) -> Result<T> {
        self.ask(Method::GET, path, within)
    }

    fn ask<T: serde::de::DeserializeOwned>(&self, method: Method, path: &str, within: Duration) -> Result<T> {
        let (status, body) = http::request(&self.candidate, method, path, within.min(self.patience))
            .map_err(|why| NoAnswer(format!("the daemon at {}: {why}", self.control.display())))?;
        if status.is_success() {
            return Ok(serde_json::from_slice(&body).map_err(|error| self.not_understood(path, &error))?);
        }
        Err(self.refused(status, path, &body))
    }

    fn refused(&self, status: StatusCode, path: &str, body: &[u8]) -> anyhow::Error {
        let said = serde_json::from_slice::<Refusal>(body).ok().map(|refusal| refusal.error);
        let at = self.control.display();
        match (status, said) {
            (StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED, said) => {
                Refused(format!("the daemon at {at} refused: {}", said.unwrap_or_else(|| status.to_string())))
                    .into()
            }
            (StatusCode::NOT_FOUND, Some(said)) if path.contains('?') => NotFound(said).into(),
            (StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED, said) => {
                let said = said.map(|said| format!(" ({said})")).unwrap_or_default();
                TooOld(format!("the daemon at {at} does not know {path}{said}; {}", versions())).into()
            }
            (_, Some(said)) => anyhow::anyhow!("the daemon at {at}: {said}"),
            (_, None) => anyhow::anyhow!("the daemon at {at} answered {status} to {path}"),
        }
    }

    fn not_understood(&self, what: &str, error: &serde_json::Error) -> TooOld {
        let at = self.control.display();
        TooOld(format!(
            "the daemon at {at} speaks of {what} in a way that is not understood ({error}); {}",
            versions()
        ))
    }
}

fn versions() -> &'static str {
    concat!(
        "is it of another version than this gpumemctl ",
        env!("CARGO_PKG_VERSION"),
        "? restart it after an update"
    )
}

/// A word as the value in a query. What a query may hold as it is stays as it is, so that a server need
/// not unescape the names that people give.
fn percent(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$'()*+,;:@/".contains(&byte);
    word.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::percent;

    #[test]
    fn a_word_stays_one_word_in_a_query() {
        assert_eq!(percent("a-b.c_d~9@x:1+2"), "a-b.c_d~9@x:1+2");
        assert_eq!(percent("a b&c=%#ü"), "a%20b%26c%3D%25%23%C3%BC");
    }
}
