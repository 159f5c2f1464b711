//! `gpumemctl why [PID|RUN|FILE]`: what to change so that a program uses less memory.

use super::report::{Found, What, array, found, join_parts, report, stored_children};
use super::whatif::{self, Target};
use crate::args::{Report as Args, Why};
use crate::client::{Daemon, RunReply, RunSelector};
use crate::output::print;
use anyhow::Result;
use gpumem_import::{recorded, torch_snapshot};
use gpumem_model::run::{Run, State};
use gpumem_report::advice::{self, Evidence};
use gpumem_runs::input::Input;
use std::path::Path;

/// Prints the advice on one or several processes.
pub(crate) fn run(args: &Why) -> Result<()> {
    let report_args = args.report();
    let Found { what, .. } = found(&report_args)?;
    print(&match what {
        What::One(mut one) => {
            let is_id = report_args.run.as_deref().is_some_and(|name| name.parse::<u32>().is_err());
            if !is_id && one.file.is_none() {
                join_parts(&mut one, &report_args)?;
            }
            let children = if one.file.is_none() { children(&one.run, args) } else { Vec::new() };
            advised(&one.run, (one.id, one.file.as_deref()), &children, &report_args)?
        }
        What::Group(_, runs) => {
            let each = runs.iter().map(|run| advised(run, (None, None), &[], &report_args));
            let each = each.collect::<Result<Vec<String>>>()?;
            if args.json { array(&each) } else { each.join("\n") }
        }
    })
}

/// Returns the advice on a run as text or JSON. The run has its id in the store, or the file that it was read from.
fn advised(
    run: &Run,
    (id, file): (Option<String>, Option<&Path>),
    children: &[Run],
    args: &Args,
) -> Result<String> {
    let mut report = report(run, args)?;
    report.id = id;
    let pid = Some(run.process.pid).filter(|pid| *pid != 0);
    let replayed = |target, pid| whatif::replay(target, pid, &args.source.store);
    let replay = match (file, &report.id) {
        _ if !advice::needs_replay(&report) => None,
        (Some(file), _) => {
            has_requests(file).then(|| replayed(Target::Named(file), pid).map_err(|error| error.to_string()))
        }
        // Most runs were stored without their requests.
        (None, Some(id)) => id.parse().ok().and_then(|id| replayed(Target::Run(id), None).ok().map(Ok)),
        (None, None) => pid.and_then(|_| replayed(Target::Process(&run.process), None).ok().map(Ok)),
    };
    let advice = advice::advise(&report, &Evidence { replay, children });
    Ok(if args.json { advice::json(&report, &advice) } else { advice::text(&report, &advice) })
}

/// Returns the live processes that a live process has started. For an ended process, returns the ended ones that it had started.
fn children(run: &Run, args: &Why) -> Vec<Run> {
    let pid = run.process.pid;
    let is_live = run.state == State::Open;
    let found = if is_live {
        let daemon = Daemon::find(args.source.socket.as_deref()).ok();
        daemon.and_then(|daemon| daemon.runs(RunSelector::Tree(pid)).ok())
    } else {
        stored_children(run, &args.source.store).ok()
    };
    let runs = found.unwrap_or_default().into_iter().map(|RunReply { run, .. }| run);
    runs.filter(|child| child.process.pid != pid && (child.state == State::Open) == is_live).collect()
}

/// Returns whether a file may have requests to PyTorch's allocator.
fn has_requests(file: &Path) -> bool {
    Input::open(file)
        .is_ok_and(|input| recorded::looks_like(input.head()) || torch_snapshot::looks_like(input.head()))
}
