//! `gpumemctl oom [PID|RUN|FILE]`, and `gpumemctl oom --at TIME --gpu N`.

use super::find::{self, Found, What, stored_runs_of_job};
use super::{found, past, report};
use crate::args::{Oom, Report as Args, names_device, quoted_suffix};
use crate::client::{Daemon, RunReply, RunSelector};
use crate::output::{print, width};
use anyhow::Result;
use gpumem_model::owner::Owner;
use gpumem_model::run::{Device, Run};
use gpumem_model::units::signed;
use gpumem_report::oom::at::{self, StoredRun, TimeWindow};
use gpumem_report::oom::{self, OomOptions};
use std::collections::BTreeMap;

/// Prints the OOMs of one or several processes, or of a device around a time.
pub(crate) fn oom(args: &Oom) -> Result<()> {
    if let Some(at) = args.at {
        return around(args, at);
    }
    let (all, verbose) = (args.all, args.verbose);
    let args = args.report();
    let formatted = |run: &Run, (id, command): (Option<String>, String), job: &[Run]| -> Result<String> {
        let mut report = report(run, &args)?;
        (report.id, report.command) = (id, command);
        Ok(if args.json {
            oom::json(&report)
        } else {
            oom::text(&report, OomOptions { verbose, all, job, width: width() })
        })
    };
    let Found { what, command } = found(&args)?;
    print(&match what {
        What::One(mut one) => {
            // A run id selects one part of a process's life, a pid all parts.
            let is_id = args.run.as_deref().is_some_and(|name| name.parse::<u32>().is_err());
            if !is_id && one.file.is_none() {
                past::join_parts(&mut one, &args)?;
                if let Some(device) = &args.device {
                    super::only(std::slice::from_mut(&mut one.run), device)?;
                }
            }
            let has_ooms = one.run.devices.iter().any(|device| !device.details.ooms.is_empty());
            let job = if has_ooms && !args.json { job_of(&one.run, &args) } else { Vec::new() };
            let command = format!("gpumemctl report{}", quoted_suffix(&command));
            formatted(&one.run, (one.id, command), &job)?
        }
        What::Group(_, runs) => {
            let command = |run: &Run| format!("gpumemctl report {}", run.process.pid);
            let each: Vec<String> =
                runs.iter().map(|run| formatted(run, (None, command(run)), &runs)).collect::<Result<_>>()?;
            if args.json { super::array(&each) } else { each.join("\n") }
        }
    })
}

/// Returns the runs of the process's job, for the line about other ranks; empty if neither daemon nor store has them.
fn job_of(run: &Run, args: &Args) -> Vec<Run> {
    let who = Owner::of(&run.process.facts, &run.process.claims, None);
    let Some(job) = run.process.claims.get("job").map(String::as_str).or_else(|| who.get("slurm_job")) else {
        return Vec::new();
    };
    let asked = Daemon::find(args.source.socket.as_deref())
        .ok()
        .and_then(|daemon| daemon.runs(RunSelector::Job(job)).ok());
    let found =
        asked.filter(|runs| !runs.is_empty()).or_else(|| stored_runs_of_job(job, &args.source.store).ok());
    found.unwrap_or_default().into_iter().map(|RunReply { run, .. }| run).collect()
}

/// Prints the processes that ended on a device around a time, from the daemon or else from the store.
fn around(args: &Oom, at_ns: i64) -> Result<()> {
    let around = TimeWindow { at_ns, for_ns: signed(args.within_s).saturating_mul(1_000_000_000) };
    let report = args.report();
    let mut hidden = Vec::new();
    let found = match Daemon::find(args.source.socket.as_deref()) {
        Ok(daemon) if args.source.store.words().is_empty() => {
            hidden = daemon.hidden(RunSelector::TimeWindow(around));
            daemon.runs(RunSelector::TimeWindow(around))?
        }
        Err(unreachable) if args.source.socket.as_deref().is_some() => return Err(unreachable.into()),
        _ => find::around(around, &report)?,
    };
    let seen: Vec<StoredRun> = found.into_iter().map(|RunReply { id, run }| StoredRun { id, run }).collect();
    let is_named =
        |index: u32, uuid: &str| args.device.as_deref().is_none_or(|name| names_device(name, index, uuid));
    let is_it = |device: &Device| is_named(device.ordinal.into(), &device.name);
    hidden.retain(|run| run.devices.iter().any(|(index, uuid)| is_named(*index, uuid)));
    let mut users: BTreeMap<String, usize> = BTreeMap::new();
    for run in hidden {
        *users.entry(run.user.unwrap_or_else(|| "another user".to_owned())).or_default() += 1;
    }
    print(&if args.json {
        at::json(&seen, &is_it, around, &users)
    } else {
        at::text(&seen, &is_it, around, &users)
    })
}
