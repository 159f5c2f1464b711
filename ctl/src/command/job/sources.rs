//! Reads the members of a job from this node (its daemon, else its store), or from all nodes that a Prometheus scrapes (`fleet`).
//!
//! One query to the Prometheus returns the owners of processes, which are labels of `gpumem_process_info`. A second query returns
//! the numbers of these processes at the same time. `join` puts them together.

use super::join::join;
use super::member::{FAILED_ALLOCATIONS, Member};
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
        runs = report::stored_runs_of_job(id, &args.source.store)?;
        from = format!("the store {}", args.source.store.readable()?.display());
    }
    let members = latest(runs);
    if members.is_empty() {
        let hidden = daemon.as_ref().map(|daemon| daemon.hidden(RunSelector::Job(id))).unwrap_or_default();
        if !hidden.is_empty() {
            return Err(job_of_others(id, &hidden));
        }
        let running = match &daemon {
            Some(daemon) if args.source.store.words().is_empty() => Some(members_of(daemon)?),
            _ => None,
        };
        let asked = if running.is_some() { "asked the daemon, searched" } else { "searched" };
        let searched = format!("{asked} {}", args.source.store.readable()?.display());
        let running = running.into_iter().flatten().filter_map(|mut member| member.who.remove("job"));
        return Err(not_found(id, &searched, running.chain(report::stored_jobs(&args.source.store)?)));
    }
    Ok((members, from))
}

/// Returns the error for a job whose processes all belong to other users.
fn job_of_others(id: &str, hidden: &[HiddenRun]) -> anyhow::Error {
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

/// Returns the running members, and the ended ones of the newest instance. A restarted job has several instances.
fn latest(mut runs: Vec<RunReply>) -> Vec<Member> {
    let is_open = |reply: &RunReply| reply.run.state == State::Open;
    let newest =
        runs.iter().max_by_key(|reply| (is_open(reply), reply.run.process.start_ticks)).and_then(instance);
    runs.retain(|reply| is_open(reply) || instance(reply) == newest);
    let mut members: Vec<Member> = runs.iter().flat_map(|reply| Member::of_run(&reply.run)).collect();
    members.sort_by_key(|member| (!member.is_running(), std::cmp::Reverse(member.start_ticks)));
    // If a rank was restarted, only its newest process counts, even if an earlier one used another device.
    let mut newest = BTreeMap::new();
    members.retain(|member| {
        let Some(rank) = member.rank else { return true };
        let process = (member.pid, member.start_ticks);
        *newest.entry(rank).or_insert(process) == process || member.is_running()
    });
    members
}

/// Returns the id of the job's instance to which a run belongs: the batch system's number, or the pod, else the job's id. If a
/// Slurm prolog sets a fixed name as id, instances cannot be distinguished.
fn instance(reply: &RunReply) -> Option<String> {
    let process = &reply.run.process;
    let who = Owner::of(&process.facts, &process.claims, None);
    let id = || process.claims.get("job").map(String::as_str);
    who.get("slurm_job").or_else(|| who.get("pod_uid")).or_else(id).map(str::to_owned)
}

/// Returns the processes of all jobs on this node, and those without a job.
pub(crate) fn all_on_node(args: &Args) -> Result<Vec<Member>> {
    members_of(&Daemon::find(args.source.socket.as_deref())?)
}

fn members_of(daemon: &Daemon) -> Result<Vec<Member>> {
    let ps = daemon.ps()?;
    let rows = ps.processes.iter();
    Ok(rows.filter_map(|row| Some(Member::of_row(row, ps.devices.get(row.device)?))).collect())
}

/// Metric whose labels are the owner of a process.
const INFO: &str = "gpumem_process_info";
/// Labels that may contain the job's name or id.
const JOB_LABELS: [&str; 4] = ["job_name", "slurm_job", "pod_uid", "pod"];
/// Metrics with a series for each device of a process, as a regular expression.
const NUMBERS: &str =
    "gpumem_process_(used|predates|tracked|untrackable|used_peak)_bytes|gpumem_process_flag";

/// Returns the members of a job and the name of their source.
pub(crate) fn job_in_fleet(url: &str, id: &str) -> Result<(Vec<Member>, String)> {
    let server = Prometheus::parse(url)?;
    let with_label = |label: &&str| format!("{INFO}{{{label}={}}}", quoted(id));
    let members = query(&server, &JOB_LABELS.iter().map(with_label).collect::<Vec<_>>().join(" or "))?;
    if members.is_empty() {
        let known = server.query(&format!("count by (job_name) ({INFO})"), None)?;
        let searched = match known.is_empty() {
            true => format!("{url} has no metric {INFO}: check that it scrapes gpumemd (port 9837)"),
            false => format!("asked {url}"),
        };
        let known = known.iter().filter_map(|sample| sample.label("job_name").map(str::to_owned));
        return Err(not_found(id, &searched, known));
    }
    Ok((members, url.to_owned()))
}

/// Returns the processes of all jobs on all nodes, and those without a job.
pub(crate) fn all_in_fleet(url: &str) -> Result<Vec<Member>> {
    query(&Prometheus::parse(url)?, INFO)
}

/// Returns the processes whose info series are selected by a PromQL expression.
fn query(server: &Prometheus, selector: &str) -> Result<Vec<Member>> {
    let infos = server.query(selector, None)?;
    let Some(time) = infos.first().map(Sample::time) else { return Ok(Vec::new()) };
    let of_these = format!("and on (instance, pid, start) ({selector})");
    let numbers = format!(
        "({{__name__=~\"{NUMBERS}|{FAILED_ALLOCATIONS}\"}} {of_these}) \
         or (gpumem_process_category_bytes{{category=\"pool idle\"}} {of_these})"
    );
    Ok(join(&infos, &server.query(&numbers, Some(time))?))
}
