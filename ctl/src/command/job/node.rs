//! A job on this node: from the daemon, else from the store.

use super::member::Member;
use super::not_found;
use crate::args::Job as Args;
use crate::client::{Daemon, Told, Which};
use crate::command::report;
use anyhow::Result;
use gpumem_model::run::State;
use gpumem_model::who::Who;
use std::collections::BTreeMap;

/// The members of a job, and where they are from.
pub(crate) fn job(id: &str, args: &Args) -> Result<(Vec<Member>, String)> {
    let (mut told, mut from) = match Daemon::find(args.socket.as_deref()) {
        Ok(daemon) if args.store.typed().is_empty() => (daemon.runs(Which::Job(id))?, "this node".to_owned()),
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
        let known =
            all(args).unwrap_or_default().into_iter().filter_map(|member| member.who.get("job").cloned());
        return Err(not_found(id, &looked, known));
    }
    Ok((members, from))
}

/// What runs; what has ended, of the newest life of its rank. A job that is started again under its name has its former
/// processes in the store, too: they are another job's.
fn latest(mut told: Vec<Told>) -> Vec<Member> {
    let is_open = |told: &Told| told.run.state == State::Open;
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
fn life(told: &Told) -> Option<String> {
    let process = &told.run.process;
    let who = Who::of(&process.facts, &process.claims, None);
    let id = || process.claims.get("job").map(String::as_str);
    who.get("slurm_job").or_else(|| who.get("pod_uid")).or_else(id).map(str::to_owned)
}

/// All that hold memory on this node.
pub(crate) fn all(args: &Args) -> Result<Vec<Member>> {
    let ps = Daemon::find(args.socket.as_deref())?.ps()?;
    let member = |row| {
        let row: &gpumem_model::control::ProcessRow = row;
        Some(Member::of_row(row, ps.devices.get(row.device)?))
    };
    Ok(ps.processes.iter().filter_map(member).collect())
}
