//! A job on all nodes that a Prometheus scrapes.
//!
//! One query asks whose processes are, by the wide labels of `gpumem_process_info`, a second one for their numbers, at the same
//! moment. They are joined here (join.rs), as PromQL would: `... * on (instance, pid, start) group_left(...)`.

use super::join::join;
use super::member::Member;
use super::not_found;
use crate::client::prometheus::{Prometheus, Sample, quoted};
use anyhow::Result;

const INFO: &str = "gpumem_process_info";
/// By which of its labels a job is called.
const CALLED: [&str; 4] = ["job_name", "slurm_job", "pod_uid", "pod"];
/// Numbers of a process: on a device, or of the whole process.
const NUMBERS: &str = "gpumem_process_(used|predates|tracked|untrackable|used_peak)_bytes|gpumem_process_flag|\
                       gpumem_process_allocation_failures_total";

/// The members of a job, and where they are from.
pub(crate) fn job(url: &str, id: &str) -> Result<(Vec<Member>, String)> {
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
pub(crate) fn all(url: &str) -> Result<Vec<Member>> {
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
