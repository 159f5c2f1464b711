//! Reads the members of a job from this node (its daemon, else its store), or from all nodes that a Prometheus scrapes.
//!
//! For a fleet, one query returns the owners of processes, from the labels of `gpumem_process_info`. A second query returns their
//! numbers at the same time. They are joined here, as PromQL would with `... * on (instance, pid, start) group_left(...)`.

use super::join::join;
use super::member::{COUNTERS, Member};
use super::not_found;
use crate::args::Job as Args;
use crate::client::prometheus::{Prometheus, Sample, quoted};
use crate::client::{Daemon, RunReply, RunSelector};
use crate::command::report;
use crate::exit::Kind;
use anyhow::Result;
use gpumem_model::control::HiddenRun;
use gpumem_model::escape::escape;
use gpumem_model::owner::Owner;
use gpumem_model::run::State;
use gpumem_model::units::thousands;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the members of a job and the name of their source.
pub(crate) fn job_on_node(id: &str, args: &Args) -> Result<(Vec<Member>, String)> {
    let daemon = match Daemon::find(args.source.socket.as_deref()) {
        Err(unreachable) if args.source.socket.as_deref().is_some() => return Err(unreachable.into()),
        found => found.ok(),
    };
    let (mut runs, mut from) = match &daemon {
        Some(daemon) if args.source.store.words().is_empty() => {
            (daemon.runs(RunSelector::Job(id))?, "this node".to_owned())
        }
        _ => (Vec::new(), String::new()),
    };
    if runs.is_empty() {
        runs = report::of_job(id, &args.source.store)?;
        from = format!("the store {}", args.source.store.readable()?.display());
    }
    let members = latest(runs);
    if members.is_empty() {
        let hidden = daemon.map(|daemon| daemon.hidden(RunSelector::Job(id))).unwrap_or_default();
        if !hidden.is_empty() {
            return Err(of_others(id, &hidden));
        }
        let looked = format!("looked on this node and in {}", args.source.store.readable()?.display());
        let known = all_on_node(args)
            .unwrap_or_default()
            .into_iter()
            .filter_map(|member| member.who.get("job").cloned());
        return Err(not_found(id, &looked, known));
    }
    Ok((members, from))
}

/// Returns the error for a job of another user.
fn of_others(id: &str, hidden: &[HiddenRun]) -> anyhow::Error {
    let users: BTreeSet<String> =
        hidden.iter().map(|run| run.user.as_deref().map_or("another user".to_owned(), escape)).collect();
    let users = users.into_iter().collect::<Vec<_>>().join(", ");
    let belong = match hidden.len() {
        1 => "1 process belongs".to_owned(),
        many => format!("{} processes belong", thousands(many as u64)),
    };
    Kind::NotFound
        .error(format!("job {}: {belong} to {users}; only that user and root see the memory", escape(id)))
}

/// Returns the running members, and ended ones of the newest instance of the job. If a job was restarted under the same name,
/// processes of earlier instances in the store do not belong to it.
fn latest(mut runs: Vec<RunReply>) -> Vec<Member> {
    let is_open = |reply: &RunReply| reply.run.state == State::Open;
    let newest =
        runs.iter().max_by_key(|reply| (is_open(reply), reply.run.process.start_ticks)).and_then(life);
    runs.retain(|reply| is_open(reply) || life(reply) == newest);
    let mut members: Vec<Member> = runs.iter().flat_map(|reply| Member::of_run(&reply.run)).collect();
    members.sort_by_key(|member| (!member.is_running(), std::cmp::Reverse(member.start_ticks)));
    // If a rank was restarted, only its newest process counts, whichever device the earlier one used.
    let mut newest = BTreeMap::new();
    members.retain(|member| {
        let Some(rank) = member.rank else { return true };
        let process = (member.pid, member.start_ticks);
        *newest.entry(rank).or_insert(process) == process || member.is_running()
    });
    members
}

/// Returns the id that distinguishes instances of a job: the batch system's number, or the pod, else the id that `gpumemctl run`
/// generated. Instances under a name set by a prolog cannot be distinguished.
fn life(reply: &RunReply) -> Option<String> {
    let process = &reply.run.process;
    let who = Owner::of(&process.facts, &process.claims, None);
    let id = || process.claims.get("job").map(String::as_str);
    who.get("slurm_job").or_else(|| who.get("pod_uid")).or_else(id).map(str::to_owned)
}

pub(crate) fn all_on_node(args: &Args) -> Result<Vec<Member>> {
    let ps = Daemon::find(args.source.socket.as_deref())?.ps()?;
    let member = |row| {
        let row: &gpumem_model::control::ProcessRow = row;
        Some(Member::of_row(row, ps.devices.get(row.device)?))
    };
    Ok(ps.processes.iter().filter_map(member).collect())
}

const INFO: &str = "gpumem_process_info";
/// Labels that may contain the job's name.
const CALLED: [&str; 4] = ["job_name", "slurm_job", "pod_uid", "pod"];
/// Metrics of a process by device; [`COUNTERS`] are those of the whole process.
const NUMBERS: &str =
    "gpumem_process_(used|predates|tracked|untrackable|used_peak)_bytes|gpumem_process_flag";

/// Returns the members of a job and the name of their source.
pub(crate) fn job_in_fleet(url: &str, id: &str) -> Result<(Vec<Member>, String)> {
    let server = Prometheus::of(url)?;
    let called: Vec<String> =
        CALLED.iter().map(|label| format!("{INFO}{{{label}={}}}", quoted(id))).collect();
    let members = ask(&server, &called.join(" or "))?;
    if members.is_empty() {
        let known = server.query(&format!("count by (job_name) ({INFO})"), None)?;
        let there = match known.is_empty() {
            true => format!("there is no {INFO} at {url}: does it scrape gpumemd, port 9837?"),
            false => format!("asked {url}"),
        };
        let known = known.iter().filter_map(|sample| sample.label("job_name").map(str::to_owned));
        return Err(not_found(id, &there, known));
    }
    Ok((members, url.to_owned()))
}

pub(crate) fn all_in_fleet(url: &str) -> Result<Vec<Member>> {
    ask(&Prometheus::of(url)?, INFO)
}

fn ask(server: &Prometheus, select: &str) -> Result<Vec<Member>> {
    let infos = server.query(select, None)?;
    let Some(time) = infos.first().map(Sample::time) else { return Ok(Vec::new()) };
    let of_these = format!("and on (instance, pid, start) ({select})");
    let names: Vec<&str> = [NUMBERS].into_iter().chain(COUNTERS.map(|(metric, _)| metric)).collect();
    let names = names.join("|");
    let numbers = server.query(
        &format!(
            "({{__name__=~\"{names}\"}} {of_these}) or (gpumem_process_category_bytes{{category=\"pool idle\"}} {of_these})"
        ),
        Some(time),
    )?;
    Ok(join(&infos, &numbers))
}
