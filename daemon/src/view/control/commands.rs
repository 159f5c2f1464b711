//! Executes the commands `mark` and `record`. A mark gives the present time a name in the runs of live processes. It changes no
//! number, so users may mark all processes that they see. For `record` the process writes a file, so only the user of the process
//! and root may start the recording.

use super::request::{check_keys, other_owner, query_number, query_value, unescape};
use super::runs::ProcessFilter;
use crate::aggregator::Query;
use crate::view::{AgentCommand, Refused, ViewContext, Viewer};
use gpumem_ledger::ProcessView;
use gpumem_model::control::{Marked, Recorded};
use hyper::StatusCode;
use tokio::sync::oneshot;

/// Maximum length of the name of a mark in bytes, as for tags.
const MAX_NAME: usize = 255;

pub(super) async fn mark(context: &ViewContext, viewer: Viewer, query: &str) -> Result<Marked, Refused> {
    check_keys(query, &["name", "pid", "tree", "job"])?;
    let name = unescape(query_value(query, "name").unwrap_or_default())?;
    if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
        return Err(Refused::bad_request("name= must be 1 to 255 bytes of printable text"));
    }
    let others: Vec<&str> = query.split('&').filter(|pair| !pair.starts_with("name=")).collect();
    let filter = ProcessFilter::of(&others.join("&"))?;
    let missing = match &filter {
        ProcessFilter::Pid(pid) | ProcessFilter::Tree(pid) => no_process(context, viewer, *pid),
        ProcessFilter::Job(job) => format!("no process of job {job} uses a GPU"),
        ProcessFilter::Live | ProcessFilter::TimeWindow(_) => "no process of yours uses a GPU".to_owned(),
    };
    let takes = move |process: &ProcessView| {
        !process.accounts.is_empty() && viewer.sees(process.facts.uid) && filter.has_process(process)
    };
    let ended = || Refused::new(StatusCode::SERVICE_UNAVAILABLE, "the daemon ends");
    let (reply, marked) = oneshot::channel();
    context.queries.send(Query::Mark(name, Box::new(takes), reply)).await.map_err(|_| ended())?;
    let (time_ns, pids) = marked.await.map_err(|_| ended())?;
    if pids.is_empty() {
        return Err(Refused::new(StatusCode::NOT_FOUND, missing));
    }
    Ok(Marked { pids, time_ns })
}

/// Returns the reason why no process with this pid is visible to the viewer.
fn no_process(context: &ViewContext, viewer: Viewer, pid: u32) -> String {
    other_owner(context, viewer, pid)
        .unwrap_or_else(|| format!("pid {pid} is not a process of yours that uses a GPU"))
}

const MAX_PATH: usize = 4096;

pub(super) async fn record(context: &ViewContext, viewer: Viewer, query: &str) -> Result<Recorded, Refused> {
    check_keys(query, &["pid", "do", "output", "steps", "for", "max_size"])?;
    let pid = query_number(query, "pid")?.and_then(|pid| u32::try_from(pid).ok());
    let pid = pid.ok_or_else(|| Refused::bad_request("pid=N is needed"))?;
    let output = query_value(query, "output").map(unescape).transpose()?;
    let path = output.unwrap_or_default();
    if path.len() > MAX_PATH || path.contains('\0') || !path.is_empty() && !path.starts_with('/') {
        return Err(Refused::bad_request("output= must be an absolute path"));
    }
    let verb = query_value(query, "do").unwrap_or_default();
    let limits = limits(query)?;
    let command = match verb {
        "start" => AgentCommand::Start(path + &limits),
        _ if !limits.is_empty() => {
            return Err(Refused::bad_request("steps, for and max_size apply to start only"));
        }
        "dump" => AgentCommand::Dump(path),
        _ if !path.is_empty() => return Err(Refused::bad_request("output applies to start and dump only")),
        "stop" => AgentCommand::Stop,
        "pause" => AgentCommand::Pause,
        "resume" => AgentCommand::Resume,
        _ => return Err(Refused::bad_request("do= must be start, stop, pause, resume or dump")),
    };
    let published = context.reader.read();
    let mut processes = published.snapshot.processes.iter();
    let process = processes.rfind(|process| process.key.pid == pid && process.ended.is_none());
    let Some(process) = process.filter(|process| viewer.sees(process.facts.uid)) else {
        return Err(Refused::new(StatusCode::NOT_FOUND, no_process(context, viewer, pid)));
    };
    let is_theirs = viewer.uid == 0 || process.facts.uid == Some(viewer.uid.into());
    if !is_theirs {
        let text = format!("pid {pid} is another user's: only they and root may make it write files");
        return Err(Refused::new(StatusCode::FORBIDDEN, text));
    }
    let result = context.sources.send_command(process.key, command).await;
    let file = result.map_err(|why| Refused::new(StatusCode::CONFLICT, format!("pid {pid}: {why}")))?;
    Ok(Recorded { pid, done: verb.to_owned(), file: Some(file).filter(|file| !file.is_empty()) })
}

/// Returns the limits of a recording that a query has, in the format of the agent: a NUL before each `key=value`.
pub(super) fn limits(query: &str) -> Result<String, Refused> {
    let is_number =
        |text: &str| !text.is_empty() && text.len() < 20 && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut limits = String::new();
    for (key, form) in [("steps", "FIRST:LAST"), ("for", "SECONDS"), ("max_size", "BYTES")] {
        let Some(text) = query_value(query, key) else { continue };
        let parts: Vec<&str> = text.split(':').collect();
        let count = if key == "steps" { 2 } else { 1 };
        if parts.len() != count || !parts.iter().all(|part| is_number(part)) {
            return Err(Refused::bad_request(format!("{key}={text}: {form} is needed")));
        }
        limits += &format!("\0{key}={text}");
    }
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use super::limits;

    #[test]
    fn limits_are_numbers() {
        let of = |query| limits(query).ok();
        assert_eq!(of("pid=1"), Some(String::new()));
        assert_eq!(of("steps=1:20&for=30&max_size=7").as_deref(), Some("\0steps=1:20\0for=30\0max_size=7"));
        for bad in ["steps=1", "steps=1:2:3", "steps=a:b", "for=", "for=-1", "max_size=1\0x"] {
            assert_eq!(of(bad), None, "{bad:?}");
        }
    }
}
