//! Requests to the daemon: HTTP/1.1 and JSON over its control socket (`gpumem_model::control`).
//!
//! ```text
//! search        places of the socket, and their permitted owners
//! http          one request and its reply, with limits for time and size; https through curl
//! prometheus    instant queries to a Prometheus, for data of many nodes
//! samples       the text of such queries and replies
//! ```

mod http;
pub(crate) mod prometheus;
mod samples;
mod search;

pub(crate) use search::{AGENT, agent_alone, named, private_directory, runtime, sibling};

use crate::exit::{Kind, Unreachable};
use anyhow::Result;
use gpumem_model::control::{Doctor, HiddenRun, Marked, Ps, Recorded, Refusal, Released};
use gpumem_model::run::Run;
use gpumem_report::oom::at::Around;
use hyper::{Method, StatusCode};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Timeout for most replies. A daemon replies from prepared data within milliseconds; a stopped or swapped-out one must not block
/// a terminal.
const ANSWER: Duration = Duration::from_secs(5);
/// Timeout for requests that wait for an agent, which may be busy.
const RECORD: Duration = Duration::from_secs(15);
/// Timeout for runs, which contain series and up to tens of thousands of tags.
const RUNS: Duration = Duration::from_secs(30);

/// A daemon whose control socket accepts connections. A request fails if the daemon does not answer or refuses it.
#[derive(Debug, Clone)]
pub(crate) struct Daemon {
    pub control: PathBuf,
    candidate: search::Candidate,
    /// Upper limit for all timeouts of this client.
    patience: Duration,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum RunSelector<'a> {
    Live,
    Pid(u32),
    Tree(u32),
    Job(&'a str),
    /// Runs whose process ended or ran out of memory around a time.
    Around(Around),
}

#[derive(Debug)]
pub(crate) struct RunReply {
    /// Its id in the daemon's store, if it is stored.
    pub id: Option<String>,
    pub run: Run,
}

impl Daemon {
    /// Returns the first daemon that answers, at the given or the default sockets.
    pub(crate) fn find(given: Option<&Path>) -> Result<Daemon, Unreachable> {
        Daemon::answering(given, 1).map(|mut found| found.remove(0))
    }

    /// Returns all daemons that answer, at the given or the default sockets: the user's and the system's. At least one.
    pub(crate) fn all(given: Option<&Path>) -> Result<Vec<Daemon>, Unreachable> {
        Daemon::answering(given, usize::MAX)
    }

    fn answering(given: Option<&Path>, most: usize) -> Result<Vec<Daemon>, Unreachable> {
        let (mut found, mut tried) = (Vec::new(), Vec::new());
        for candidate in search::candidates(given) {
            match candidate.check().and_then(|()| http::reach(&candidate)) {
                Ok(()) => {
                    let control = candidate.path.clone();
                    found.push(Daemon { control, candidate, patience: Duration::MAX });
                }
                Err(why) => tried.push((candidate.path, why)),
            }
            if found.len() == most {
                break;
            }
        }
        if found.is_empty() { Err(Unreachable { tried }) } else { Ok(found) }
    }

    pub(crate) fn hurried(&self, patience: Duration) -> Daemon {
        Daemon { patience, ..self.clone() }
    }

    pub(crate) fn ps(&self) -> Result<Ps> {
        self.get("/v1/ps", ANSWER)
    }

    /// Returns the daemon's health, and its facts about a process.
    pub(crate) fn doctor(&self, pid: Option<u32>) -> Result<Doctor> {
        let of = pid.map(|pid| format!("?pid={pid}")).unwrap_or_default();
        self.get(&format!("/v1/doctor{of}"), ANSWER)
    }

    /// Returns the path of its run store; `None` if it has none or does not answer.
    pub(crate) fn store(&self) -> Option<PathBuf> {
        let facts = self.doctor(None).ok()?.facts;
        facts.into_iter().find(|(name, _)| name == "store").map(|(_, path)| PathBuf::from(path))
    }

    pub(crate) fn metrics(&self) -> Result<String> {
        self.get("/v1/metrics", ANSWER)
    }

    /// Returns the selected runs, the newest first.
    pub(crate) fn runs(&self, which: RunSelector<'_>) -> Result<Vec<RunReply>> {
        let list: Vec<Value> = self.get(&format!("/v1/runs{}", which.query('?')), RUNS)?;
        list.into_iter().map(|reply| self.run_of(reply)).collect()
    }

    /// Returns pid, user and devices of the selected runs of other users; empty if the daemon does not support this.
    pub(crate) fn hidden(&self, which: RunSelector<'_>) -> Vec<HiddenRun> {
        self.get(&format!("/v1/hidden{}", which.query('?')), RUNS).unwrap_or_default()
    }

    /// Closes NVML for `for_s` seconds.
    pub(crate) fn release(&self, for_s: u64) -> Result<Released> {
        self.ask(Method::POST, &format!("/v1/nvml/release?for_s={for_s}"), ANSWER)
    }

    /// Makes the agent of a process start or stop a recording, pause, resume or dump. `limits` are query parameters such as
    /// `&steps=1:2`.
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

    pub(crate) fn mark(&self, name: &str, which: RunSelector<'_>) -> Result<Marked> {
        self.ask(Method::POST, &format!("/v1/mark?name={}{}", percent(name), which.query('&')), ANSWER)
    }

    /// Reads a run. The JSON has the run's fields, and its id in the daemon's store.
    fn run_of(&self, reply: Value) -> Result<RunReply> {
        let id = reply.get("id").and_then(Value::as_str).map(str::to_owned);
        let run = serde_json::from_value(reply).map_err(|error| self.not_understood("a run", &error))?;
        Ok(RunReply { id, run })
    }

    fn get<T: serde::de::DeserializeOwned>(&self, path: &str, within: Duration) -> Result<T> {
        self.ask(Method::GET, path, within)
    }

    fn ask<T: serde::de::DeserializeOwned>(&self, method: Method, path: &str, within: Duration) -> Result<T> {
        let at = self.control.display();
        let (status, body) = http::request(&self.candidate, method, path, within.min(self.patience))
            .map_err(|why| Kind::NoAnswer.error(format!("the daemon at {at}: {why}")))?;
        if status.is_success() {
            return serde_json::from_slice(&body).map_err(|error| self.not_understood(path, &error));
        }
        let reason = serde_json::from_slice::<Refusal>(&body).ok().map(|refusal| refusal.error);
        Err(match (status, reason) {
            (StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED, reason) => {
                let reason = reason.unwrap_or_else(|| status.to_string());
                Kind::Refused.error(format!("the daemon at {at} refused: {reason}"))
            }
            (StatusCode::NOT_FOUND, Some(reason)) if path.contains('?') => Kind::NotFound.error(reason),
            (
                StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED,
                reason,
            ) => {
                let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
                self.other_version(&format!("does not know {path}{reason}"))
            }
            (_, Some(reason)) => anyhow::anyhow!("the daemon at {at}: {reason}"),
            (_, None) => anyhow::anyhow!("the daemon at {at} answered {status} to {path}"),
        })
    }

    fn not_understood(&self, what: &str, error: &serde_json::Error) -> anyhow::Error {
        self.other_version(&format!("sends {what} in an unknown form ({error})"))
    }

    fn other_version(&self, what: &str) -> anyhow::Error {
        const OWN: &str = env!("CARGO_PKG_VERSION");
        let at = self.control.display();
        Kind::OtherVersion.error(format!(
            "the daemon at {at} {what}; is it of another version than this gpumemctl {OWN}? restart it after an update"
        ))
    }
}

impl RunSelector<'_> {
    /// Returns the parameter of a request after a separator; empty for all live runs.
    fn query(self, separator: char) -> String {
        match self {
            RunSelector::Live => String::new(),
            RunSelector::Pid(pid) => format!("{separator}pid={pid}"),
            RunSelector::Tree(pid) => format!("{separator}tree={pid}"),
            RunSelector::Job(job) => format!("{separator}job={}", percent(job)),
            RunSelector::Around(Around { at_ns, for_ns }) => {
                format!("{separator}around={at_ns}&within={for_ns}")
            }
        }
    }
}

/// Encodes a word as a query value. Characters that are valid in a query are not escaped, so that servers need not decode common
/// names.
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
