//! Reads the members of a job from this node (its daemon, else its store), or from all nodes that a Prometheus scrapes.
//!
//! For a fleet, one query returns the owners of processes, from the labels of `gpumem_process_info`. A second query returns their
//! numbers at the same time. They are joined here, as PromQL would with `... * on (instance, pid, start) group_left(...)`.

use super::member::{Member, rank};
use super::not_found;
use crate::args::Job as Args;
use crate::client::prometheus::{Prometheus, Sample, quoted};
use crate::client::{Daemon, RunReply, RunSelector};
use crate::command::report;
use anyhow::Result;
use gpumem_model::run::State;
use gpumem_model::who::{CLAIMED, NAMES, Who};
use std::collections::BTreeMap;

/// Returns the members of a job and the name of their source.
pub(crate) fn job_on_node(id: &str, args: &Args) -> Result<(Vec<Member>, String)> {
    let (mut runs, mut from) = match Daemon::find(args.source.socket.as_deref()) {
        Ok(daemon) if args.source.store.words().is_empty() => {
            (daemon.runs(RunSelector::Job(id))?, "this node".to_owned())
        }
        Err(unreachable) if args.source.socket.as_deref().is_some() => return Err(unreachable.into()),
        _ => (Vec::new(), String::new()),
    };
    if runs.is_empty() {
        runs = report::of_job(id, &args.source.store)?;
        from = format!("the store {}", args.source.store.readable()?.display());
    }
    let members = latest(runs);
    if members.is_empty() {
        let looked = format!("looked on this node and in {}", args.source.store.readable()?.display());
        let known = all_on_node(args)
            .unwrap_or_default()
            .into_iter()
            .filter_map(|member| member.who.get("job").cloned());
        return Err(not_found(id, &looked, known));
    }
    Ok((members, from))
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

/// Returns what distinguishes instances of a job: the batch system's number, or the pod, else the id that `gpumemctl run`
/// generated. Instances under a name set by a prolog cannot be distinguished.
fn life(reply: &RunReply) -> Option<String> {
    let process = &reply.run.process;
    let who = Who::of(&process.facts, &process.claims, None);
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
/// Metrics of a process, by device or for the whole process.
const NUMBERS: &str = "gpumem_process_(used|predates|tracked|untrackable|used_peak)_bytes|gpumem_process_flag|\
                       gpumem_process_allocation_failures_total";

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
    let numbers = server.query(
        &format!(
            "({{__name__=~\"{NUMBERS}\"}} {of_these}) or (gpumem_process_category_bytes{{category=\"pool idle\"}} {of_these})"
        ),
        Some(time),
    )?;
    Ok(join(&infos, &numbers))
}

/// Identifies a process: node, pid and start time in clock ticks.
type Key = (String, u32, u64);

/// Joins the samples. Numbers of processes that `infos` do not contain are dropped.
pub(crate) fn join(infos: &[Sample], numbers: &[Sample]) -> Vec<Member> {
    // If two Prometheus jobs scrape the same target, its samples occur twice and count once.
    let whose: BTreeMap<Key, &Sample> =
        infos.iter().filter_map(|sample| Some((key(sample)?, sample))).collect();
    let mut members: BTreeMap<(Key, String), Member> = BTreeMap::new();
    let mut failed: BTreeMap<Key, Option<u64>> = BTreeMap::new();
    for sample in numbers {
        let Some(key) = key(sample) else { continue };
        let Some(info) = whose.get(&key) else { continue };
        let name = sample.label("__name__").unwrap_or_default();
        let Some(uuid) = sample.label("uuid") else {
            if name == "gpumem_process_allocation_failures_total" {
                failed.insert(key, sample.number().and_then(|number| u64::try_from(number).ok()));
            }
            continue;
        };
        let member =
            members.entry((key.clone(), uuid.to_owned())).or_insert_with(|| member(&key, info, sample));
        let number = sample.number();
        match name {
            "gpumem_process_used_bytes" => member.used_bytes = number,
            "gpumem_process_predates_bytes" => member.predates_bytes = number,
            "gpumem_process_tracked_bytes" => member.tracked_bytes = number,
            "gpumem_process_untrackable_bytes" => member.untrackable_bytes = number,
            "gpumem_process_used_peak_bytes" => member.peak_used_bytes = number,
            "gpumem_process_category_bytes" => member.idle_bytes = number,
            "gpumem_process_flag" => {
                let flag = sample.label("flag").unwrap_or_default().to_owned();
                if !member.flags.contains(&flag) {
                    member.flags.push(flag);
                }
            }
            _ => {}
        }
    }
    for ((key, _), member) in &mut members {
        member.failed_allocations = failed.get(key).copied().flatten();
        // A category of a covered process without bytes has no series, so it is 0.
        member.idle_bytes = member.idle_bytes.or(member.tracked_bytes.map(|_| 0));
    }
    members.into_values().collect()
}

fn key(sample: &Sample) -> Option<Key> {
    let number = |label| sample.label(label).and_then(|text| text.parse::<u64>().ok());
    let pid = u32::try_from(number("pid")?).ok()?;
    Some((sample.label("instance").unwrap_or_default().to_owned(), pid, number("start")?))
}

fn member(key: &Key, info: &Sample, sample: &Sample) -> Member {
    let label = |name: &'static str| {
        let label = if name == "job" { "job_name" } else { name };
        // A scrape that adds its own labels renames ours with the prefix `exported_`.
        let value =
            info.label(label).or_else(|| info.label(&format!("exported_{label}")).filter(|_| name != "job"));
        value.map(|value| (name.to_owned(), value.to_owned()))
    };
    let who: BTreeMap<String, String> = NAMES.into_iter().chain([CLAIMED]).filter_map(label).collect();
    Member {
        rank: rank(&who),
        node: Some(key.0.clone()),
        pid: key.1,
        start_ticks: key.2,
        gpu: sample.label("gpu").map(str::to_owned),
        uuid: sample.label("uuid").map(str::to_owned),
        state: "running",
        who,
        ..Member::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(text: &str) -> Vec<Sample> {
        serde_json::from_str(text).expect("samples")
    }

    #[test]
    fn numbers_are_joined_with_their_process() {
        let infos = samples(
            r#"[{"metric":{"instance":"n1:9837","pid":"7","start":"9","job_name":"a","rank":"3","exported_pod":"p","pod":""},"value":[1,"1"]},
                {"metric":{"instance":"n1:9837","job":"again","pid":"7","start":"9","job_name":"a","rank":"3","exported_pod":"p"},"value":[1,"1"]},
                {"metric":{"instance":"n2:9837","pid":"7","start":"9","job_name":"a","rank":"4"},"value":[1,"1"]}]"#,
        );
        let of = |node: &str, name: &str, rest: &str, value: &str| {
            format!(
                r#"{{"metric":{{"__name__":"gpumem_process_{name}","instance":"{node}:9837","pid":"7","start":"9"{rest}}},"value":[1,"{value}"]}}"#
            )
        };
        let device = r#","gpu":"0","uuid":"GPU-1""#;
        let other = r#","gpu":"1","uuid":"GPU-2""#;
        let numbers = [
            of("n1", "used_bytes", device, "100"),
            of("n1", "tracked_bytes", device, "60"),
            of("n1", "used_bytes", other, "5"),
            of("n1", "allocation_failures_total", "", "2"),
            of("n2", "used_bytes", device, "NaN"),
            of("n3", "used_bytes", device, "7"),
            of("n1", "flag", &format!(r#"{device},"flag":"covered""#), "1"),
            r#"{"metric":{"__name__":"gpumem_process_used_bytes","pid":"x"},"value":[1,"1"]}"#.to_owned(),
        ];
        let members = join(&infos, &samples(&format!("[{}]", numbers.join(","))));
        assert_eq!(members.len(), 3);
        assert_eq!(
            (members[0].used_bytes, members[0].tracked_bytes, members[0].idle_bytes),
            (Some(100), Some(60), Some(0))
        );
        assert_eq!(
            (members[0].rank, members[0].failed_allocations, &*members[0].flags),
            (Some(3), Some(2), &["covered".to_owned()][..])
        );
        assert_eq!(members[0].who.get("pod").map(String::as_str), Some("p"));
        assert_eq!(
            (members[1].used_bytes, members[1].tracked_bytes, members[1].idle_bytes),
            (Some(5), None, None)
        );
        assert_eq!(
            (members[2].node.as_deref(), members[2].used_bytes),
            (Some("n2:9837"), None),
            "unknown is never zero"
        );
    }
}
