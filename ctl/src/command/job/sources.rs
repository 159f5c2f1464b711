//! Where the members of a job are from: this node (its daemon, else its store), or all nodes that a Prometheus scrapes.
//!
//! Of a fleet, one query asks whose processes are, by the wide labels of `gpumem_process_info`, a second one for their numbers, at the
//! same moment. They are joined here (join.rs), as PromQL would: `... * on (instance, pid, start) group_left(...)`.

use super::join::join;
use super::member::Member;
use super::not_found;
use crate::args::Job as Args;
use crate::client::prometheus::{Prometheus, Sample, quoted};
use crate::client::{Daemon, RunReply, RunSelector};
use crate::command::report;
use anyhow::Result;
use gpumem_model::run::State;
use gpumem_model::who::Who;
use std::collections::BTreeMap;

/// The members of a job, and where they are from.
pub(crate) fn job_on_node(id: &str, args: &Args) -> Result<(Vec<Member>, String)> {
    let (mut told, mut from) = match Daemon::find(args.socket.as_deref()) {
        Ok(daemon) if args.store.typed().is_empty() => {
            (daemon.runs(RunSelector::Job(id))?, "this node".to_owned())
        }
        Err(unreachable) if args.socket.as_deref().is_some() => return Err(unreachable.into()),
        _ => (Vec::new(), String::new()),
    };
    if told.is_empty() {
        told = report::of_job(id, &args.store)?;
        from = format!("the store {}", args.store.readable()?.display());
    }
    let members = latest(told);
    if members.is_empty() {
        let looked = format!("looked on this node and in {}", args.store.readable()?.display());
        let known = all_on_node(args)
            .unwrap_or_default()
            .into_iter()
            .filter_map(|member| member.who.get("job").cloned());
        return Err(not_found(id, &looked, known));
    }
    Ok((members, from))
}

/// What runs; what has ended, of the newest life of its rank. A job that is started again under its name has its former
/// processes in the store, too: they are another job's.
fn latest(mut told: Vec<RunReply>) -> Vec<Member> {
    let is_open = |told: &RunReply| told.run.state == State::Open;
    let newest = told.iter().max_by_key(|told| (is_open(told), told.run.process.start_ticks)).and_then(life);
    told.retain(|told| is_open(told) || life(told) == newest);
    let mut members: Vec<Member> = told.iter().flat_map(|told| Member::of_run(&told.run)).collect();
    members.sort_by_key(|member| (!member.is_running(), std::cmp::Reverse(member.start_ticks)));
    // Of a rank that was started again, its newest process, whichever device the former one had.
    let mut newest = BTreeMap::new();
    members.retain(|member| {
        let Some(rank) = member.rank else { return true };
        let process = (member.pid, member.start_ticks);
        *newest.entry(rank).or_insert(process) == process || member.is_running()
    });
    members
}

/// What tells one life of a job from the next: the batch system's number, or the pod; else the id that `gpumemctl run` made up.
/// Of two lives under a name that a prolog gave nothing does.
fn life(told: &RunReply) -> Option<String> {
    let process = &told.run.process;
    let who = Who::of(&process.facts, &process.claims, None);
    let id = || process.claims.get("job").map(String::as_str);
    who.get("slurm_job").or_else(|| who.get("pod_uid")).or_else(id).map(str::to_owned)
}

/// All that hold memory on this node.
pub(crate) fn all_on_node(args: &Args) -> Result<Vec<Member>> {
    let ps = Daemon::find(args.socket.as_deref())?.ps()?;
    let member = |row| {
        let row: &gpumem_model::control::ProcessRow = row;
        Some(Member::of_row(row, ps.devices.get(row.device)?))
    };
    Ok(ps.processes.iter().filter_map(member).collect())
}

const INFO: &str = "gpumem_process_info";
/// By which of its labels a job is called.
const CALLED: [&str; 4] = ["job_name", "slurm_job", "pod_uid", "pod"];
/// Numbers of a process: on a device, or of the whole process.
const NUMBERS: &str = "gpumem_process_(used|predates|tracked|untrackable|used_peak)_bytes|gpumem_process_flag|\
                       gpumem_process_allocation_failures_total";

/// The members of a job, and where they are from.
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

/// All that hold memory.
pub(crate) fn all_in_fleet(url: &str) -> Result<Vec<Member>> {
    ask(&Prometheus::of(url)?, INFO)
}

/// The members of what `select` selects.
fn ask(server: &Prometheus, select: &str) -> Result<Vec<Member>> {
    let infos = server.query(select, None)?;
    let Some(time) = infos.first().map(Sample::time) else { return Ok(Vec::new()) };
    let of_these = format!("and on (instance, pid, start) ({select})");
    let numbers = server.query(
        &format!(
            "({{__name__=~\"{NUMBERS}\"}} {of_these}) or (gpumem_process_category_bytes{{category=\"pool idle\"}} {of_these})"
        ),
        Some(time),
    )?;
    Ok(join(&infos, &numbers))
}
