//! Requests to the daemon: HTTP/1.1 and JSON over its control socket (`gpumem_model::control`).
mod http;
pub(crate) mod prometheus;
mod samples;
mod search;

pub(crate) use search::{AGENT, CONTROL, agent_socket, named_socket, private_directory, runtime};

use crate::exit::{Kind, Unreachable};
use anyhow::Result;
use gpumem_model::control::{Doctor, HiddenRun, Marked, Ps, Recorded, Refusal, Released};
use gpumem_model::run::Run;
use gpumem_report::oom::at::TimeWindow;
use hyper::body::Bytes;
use hyper::{Method, StatusCode};
use samples::percent_encoded;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Timeout for most replies, which take milliseconds. A stopped or swapped-out daemon must not block a terminal.
const ANSWER: Duration = Duration::from_secs(5);
/// Timeout for requests that wait for an agent, which may be busy.
const RECORD: Duration = Duration::from_secs(15);
/// Timeout for runs, which contain values over time and up to tens of thousands of tags (names of memory).
const RUNS: Duration = Duration::from_secs(30);

/// A daemon whose control socket accepts connections. A request fails if the daemon does not answer or refuses it.
#[derive(Debug, Clone)]
pub(crate) struct Daemon {
    /// The daemon's control socket.
    pub socket: search::Socket,
    /// Upper limit for the timeout of each request.
    max_timeout: Duration,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum RunSelector<'a> {
    /// Runs of all live processes.
    Live,
    Pid(u32),
    /// Runs of the process with this pid and of those that it started.
    Tree(u32),
    /// Runs of the job with this name or id.
    Job(&'a str),
    /// Runs whose process ended or ran out of memory around a time.
    TimeWindow(TimeWindow),
}

/// Part of a reply: [`RunReply::id`]. It is read apart from the run, because the two in one structure would need a second parser.
#[derive(Deserialize)]
struct StoredId {
    #[serde(default)]
    id: Option<String>,
}

#[derive(Debug)]
pub(crate) struct RunReply {
    /// The run's id in the daemon's store, if it is stored.
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

    fn answering(given: Option<&Path>, limit: usize) -> Result<Vec<Daemon>, Unreachable> {
        let (mut found, mut tried) = (Vec::new(), Vec::new());
        for socket in search::candidates(given) {
            match socket.check().and_then(|()| http::check_connection(&socket)) {
                Ok(()) => found.push(Daemon { socket, max_timeout: Duration::MAX }),
                Err(why) => tried.push((socket.path, why)),
            }
            if found.len() == limit {
                break;
            }
        }
        if found.is_empty() { Err(Unreachable { tried }) } else { Ok(found) }
    }

    pub(crate) fn with_max_timeout(&self, max_timeout: Duration) -> Daemon {
        Daemon { max_timeout, ..self.clone() }
    }

    pub(crate) fn ps(&self) -> Result<Ps> {
        self.get("/v1/ps", ANSWER)
    }

    /// Returns the daemon's report on its health, with facts about the process `pid` if it is given.
    pub(crate) fn doctor(&self, pid: Option<u32>) -> Result<Doctor> {
        let query = pid.map(|pid| format!("?pid={pid}")).unwrap_or_default();
        self.get(&format!("/v1/doctor{query}"), ANSWER)
    }

    /// Returns the path of the daemon's run store; `None` if it has none or does not answer.
    pub(crate) fn store(&self) -> Option<PathBuf> {
        let facts = self.doctor(None).ok()?.facts;
        facts.into_iter().find(|(name, _)| name == "store").map(|(_, path)| PathBuf::from(path))
    }

    pub(crate) fn metrics(&self) -> Result<String> {
        self.get("/v1/metrics", ANSWER)
    }

    /// Returns the selected runs, the newest first. Each element of the reply has the fields of the run, and the id of the run in
    /// the daemon's store.
    pub(crate) fn runs(&self, selector: RunSelector<'_>) -> Result<Vec<RunReply>> {
        let body = self.body(Method::GET, &format!("/v1/runs{}", selector.query('?')), RUNS)?;
        let unknown = |error| self.not_understood("a run", &error);
        let ids: Vec<StoredId> = serde_json::from_slice(&body).map_err(unknown)?;
        let runs: Vec<Run> = serde_json::from_slice(&body).map_err(unknown)?;
        Ok(ids.into_iter().zip(runs).map(|(StoredId { id }, run)| RunReply { id, run }).collect())
    }

    /// Returns pid, user and devices of the selected runs of other users; empty if the daemon does not support this.
    pub(crate) fn hidden(&self, selector: RunSelector<'_>) -> Vec<HiddenRun> {
        self.get(&format!("/v1/hidden{}", selector.query('?')), RUNS).unwrap_or_default()
    }

    /// Makes the daemon close NVML for `for_s` seconds.
    pub(crate) fn release_nvml(&self, for_s: u64) -> Result<Released> {
        self.request(Method::POST, &format!("/v1/nvml/release?for_s={for_s}"), ANSWER)
    }

    /// Makes the agent of a process start a recording, stop, pause, resume or dump. `limits` are parameters as `&steps=1:2`.
    pub(crate) fn record(
        &self,
        pid: u32,
        verb: &str,
        output: Option<&Path>,
        limits: &str,
    ) -> Result<Recorded> {
        let output = output.map(|path| format!("&output={}", query_value(&path.to_string_lossy())));
        let path = format!("/v1/record?pid={pid}&do={verb}{}{limits}", output.unwrap_or_default());
        self.request(Method::POST, &path, RECORD)
    }

    pub(crate) fn mark(&self, name: &str, selector: RunSelector<'_>) -> Result<Marked> {
        let path = format!("/v1/mark?name={}{}", query_value(name), selector.query('&'));
        self.request(Method::POST, &path, ANSWER)
    }

    fn get<T: DeserializeOwned>(&self, path: &str, within: Duration) -> Result<T> {
        self.request(Method::GET, path, within)
    }

    fn request<T: DeserializeOwned>(&self, method: Method, path: &str, within: Duration) -> Result<T> {
        let body = self.body(method, path, within)?;
        serde_json::from_slice(&body).map_err(|error| self.not_understood(path, &error))
    }

    /// Returns the body of a successful reply.
    fn body(&self, method: Method, path: &str, within: Duration) -> Result<Bytes> {
        let at = self.socket.path.display();
        let (status, body) = http::request(&self.socket, method, path, within.min(self.max_timeout))
            .map_err(|why| Kind::NoAnswer.error(format!("the daemon at {at}: {why}")))?;
        if status.is_success() {
            return Ok(body);
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
        let at = self.socket.path.display();
        Kind::OtherVersion.error(format!(
            "the daemon at {at} {what}; is it of another version than this gpumemctl {OWN}? restart the daemon after an update"
        ))
    }
}

impl RunSelector<'_> {
    /// Returns the parameters of a request with a separator before them; empty for all live runs.
    fn query(self, separator: char) -> String {
        match self {
            RunSelector::Live => String::new(),
            RunSelector::Pid(pid) => format!("{separator}pid={pid}"),
            RunSelector::Tree(pid) => format!("{separator}tree={pid}"),
            RunSelector::Job(job) => format!("{separator}job={}", query_value(job)),
            RunSelector::TimeWindow(TimeWindow { at_ns, for_ns }) => {
                format!("{separator}around={at_ns}&within={for_ns}")
            }
        }
    }
}

/// Encodes a text as the value of a query parameter for a daemon. Characters that are valid in a query stay unchanged.
fn query_value(text: &str) -> String {
    percent_encoded(text, b"-._~!$'()*+,;:@/")
}

#[cfg(test)]
mod tests {
    use super::query_value;

    #[test]
    fn a_word_stays_one_word_in_a_query() {
        assert_eq!(query_value("a-b.c_d~9@x:1+2"), "a-b.c_d~9@x:1+2");
        assert_eq!(query_value("a b&c=%#ü"), "a%20b%26c%3D%25%23%C3%BC");
    }
}
