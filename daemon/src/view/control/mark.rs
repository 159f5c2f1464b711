//! Giving a moment a name, in the runs of processes that live. It changes no number, so who may see a run may mark it.

use super::record::unescaped;
use super::runs::Which;
use super::{Refused, of_another, only, value};
use crate::access::Viewer;
use crate::aggregator::Ask;
use crate::view::Sight;
use gpumem_ledger::ProcessView;
use gpumem_model::control::Marked;
use hyper::StatusCode;
use tokio::sync::oneshot;

/// Longest name: that of a tag.
const MAX_NAME: usize = 255;

pub(super) async fn mark(sight: &Sight, viewer: Viewer, query: &str) -> Result<Marked, Refused> {
    only(query, &["name", "pid", "tree", "job"])?;
    let bad = |text: &str| Refused::new(StatusCode::BAD_REQUEST, text);
    let name = unescaped(value(query, "name").unwrap_or_default())?;
    if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
        return Err(bad("name= must be 1 to 255 bytes of printable text"));
    }
    let whose: Vec<&str> = query.split('&').filter(|pair| !pair.starts_with("name=")).collect();
    let which = Which::of(&whose.join("&"))?;
    let missing = match &which {
        Which::Pid(pid) | Which::Tree(pid) => of_another(sight, viewer, *pid)
            .unwrap_or_else(|| format!("pid {pid} is no process of yours that uses a GPU")),
        Which::Job(job) => format!("no process of job {job} uses a GPU"),
        Which::Live | Which::Around(_) => "no process of yours uses a GPU".to_owned(),
    };
    let takes = move |process: &ProcessView| {
        let facts = &process.facts;
        let is_on_gpu = !process.accounts.is_empty();
        is_on_gpu && viewer.sees(facts.uid) && which.takes(process.key.pid, &facts.seen, &facts.claims)
    };
    let ended = || Refused::new(StatusCode::SERVICE_UNAVAILABLE, "the daemon ends");
    let (reply, marked) = oneshot::channel();
    sight.asks.send(Ask::Mark(name, Box::new(takes), reply)).await.map_err(|_| ended())?;
    let (time_ns, pids) = marked.await.map_err(|_| ended())?;
    if pids.is_empty() {
        return Err(Refused::new(StatusCode::NOT_FOUND, missing));
    }
    Ok(Marked { pids, time_ns })
}
