//! `gpumemctl job [ID]`: the sum of a job's processes, on this node or, with a Prometheus, on all nodes that it scrapes.
//!
//! ```text
//! member     a process on a device, from any source
//! sources    reads members from this node or from a fleet
//! join       joins samples of a Prometheus to members
//! sum        sums, the largest rank, the imbalance, missing ranks
//! text       the text output
//! ```

mod join;
mod member;
mod sources;
mod sum;
mod text;

use crate::args::Job as Args;
use crate::exit::NotFound;
use crate::output::print;
use anyhow::Result;
use gpumem_report::text::clean;
use member::Member;
use serde::Serialize;
use std::collections::BTreeMap;
use sum::Sum;

/// A job as a JSON document.
#[derive(Serialize)]
struct Document<'a> {
    job: &'a str,
    #[serde(flatten)]
    sum: &'a Sum,
    members: &'a [Member],
}

/// Collects the members and prints the result.
pub(crate) fn run(args: &Args) -> Result<()> {
    print(&match &args.id {
        Some(id) => one(id, args)?,
        None => all(args)?,
    })
}

fn one(id: &str, args: &Args) -> Result<String> {
    let (mut members, where_from) = match &args.prometheus {
        Some(url) => sources::job_in_fleet(url, id)?,
        None => sources::job_on_node(id, args)?,
    };
    member::order(&mut members);
    let sum = Sum::of(&members);
    Ok(if args.json {
        gpumem_model::harmless::json(&Document { job: id, sum: &sum, members: &members })
    } else {
        text::one(id, &members, &sum, &where_from)
    })
}

fn all(args: &Args) -> Result<String> {
    let members = match &args.prometheus {
        Some(url) => sources::all_in_fleet(url)?,
        None => sources::all_on_node(args)?,
    };
    let mut jobs: BTreeMap<Option<String>, Vec<Member>> = BTreeMap::new();
    for member in members {
        jobs.entry(member.who.get("job").cloned()).or_default().push(member);
    }
    // Processes without a job come last.
    let mut jobs: Vec<(Option<String>, Vec<Member>)> = jobs.into_iter().collect();
    jobs.sort_by_key(|(job, _)| job.is_none());
    let jobs: Vec<_> = jobs.into_iter().map(|(job, members)| (job, Sum::of(&members), members)).collect();
    if args.json {
        let listed = |(job, sum, _): &(Option<String>, Sum, Vec<Member>)| -> Result<serde_json::Value> {
            let mut value = serde_json::to_value(sum)?;
            value["job"] = serde_json::to_value(job)?;
            Ok(value)
        };
        let jobs: Vec<serde_json::Value> = jobs.iter().map(listed).collect::<Result<_>>()?;
        return Ok(gpumem_model::harmless::json(&jobs));
    }
    Ok(text::all(&jobs, args.prometheus.as_deref()))
}

/// Returns the error for an unknown job. `looked` says where it was searched, `known` lists the existing ones.
fn not_found(id: &str, looked: &str, known: impl Iterator<Item = String>) -> anyhow::Error {
    const SHOWN: usize = 8;
    let mut known: Vec<String> = known.map(|job| clean(&job)).collect();
    known.sort();
    known.dedup();
    let more = if known.len() > SHOWN { format!(" and {} more", known.len() - SHOWN) } else { String::new() };
    known.truncate(SHOWN);
    let there = match known.is_empty() {
        true => "no process of any job uses a GPU there".to_owned(),
        false => format!("there are: {}{more}", known.join(", ")),
    };
    NotFound(format!("no job {}: {looked}; {there}", clean(id))).into()
}
