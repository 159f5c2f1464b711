//! `gpumemctl job [ID]`: the sum of a job's processes, on this node or on all nodes that a Prometheus scrapes.
mod join;
mod member;
mod sources;
mod text;

use crate::args::Job as Args;
use crate::exit::Kind;
use crate::output::print;
use anyhow::Result;
use gpumem_report::text::escape;
use member::{Member, Sum};
use serde::Serialize;
use std::collections::BTreeMap;

/// A job as JSON (docs/who.md).
#[derive(Serialize)]
struct Document<'a> {
    job: Option<&'a str>,
    #[serde(flatten)]
    sum: &'a Sum,
    #[serde(skip_serializing_if = "Option::is_none")]
    members: Option<&'a [Member]>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    print(&match &args.id {
        Some(id) => one(id, args)?,
        None => all(args)?,
    })
}

fn one(id: &str, args: &Args) -> Result<String> {
    let (mut members, source) = match &args.prometheus {
        Some(url) => sources::job_in_fleet(url, id)?,
        None => sources::job_on_node(id, args)?,
    };
    member::order(&mut members);
    let sum = Sum::of(&members);
    Ok(if args.json {
        gpumem_model::escape::json(&Document { job: Some(id), sum: &sum, members: Some(&members) })
    } else {
        text::one(id, &members, &sum, &source)
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
    // The entry for processes without a job comes last.
    let mut jobs: Vec<(Option<String>, Vec<Member>)> = jobs.into_iter().collect();
    jobs.sort_by_key(|(job, _)| job.is_none());
    let jobs: Vec<_> = jobs.into_iter().map(|(job, members)| (job, Sum::of(&members), members)).collect();
    if args.json {
        let jobs = jobs.iter().map(|(job, sum, _)| Document { job: job.as_deref(), sum, members: None });
        return Ok(gpumem_model::escape::json(&jobs.collect::<Vec<_>>()));
    }
    Ok(text::all(&jobs, args.prometheus.as_deref()))
}

/// Returns the error for an unknown job. `searched` is a text on the places that were searched, `known` are the existing jobs.
fn not_found(id: &str, searched: &str, known: impl Iterator<Item = String>) -> anyhow::Error {
    const SHOWN: usize = 8;
    let mut known: Vec<String> = known.map(|job| escape(&job)).collect();
    known.sort();
    known.dedup();
    let more = text::and_more(known.len(), SHOWN);
    known.truncate(SHOWN);
    let known = match known.is_empty() {
        true => "no process there belongs to a job".to_owned(),
        false => format!("there are: {}{more}", known.join(", ")),
    };
    Kind::NotFound.error(format!("no job {}: {searched}; {known}", escape(id)))
}
