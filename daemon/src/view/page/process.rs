//! Makes the current report of one process, without data that the viewer may not see.

use super::response_cache::{Text, make_in_thread};
use crate::config::{Page, Tenants};
use crate::limits::user_share::CpuCharge;
use crate::view::{Refused, ViewContext, ViewSettings};
use gpumem_ledger::ProcessKey;
use gpumem_model::run::Run;
use gpumem_report::redacted::RedactedRun;
use gpumem_report::{Report, html, json};
use hyper::StatusCode;
use std::sync::Arc;
use std::time::Instant;

/// Limit of the bytes of the data that the page draws. If the data is larger, the limits of its parts are halved.
const MAX_DRAWN_BYTES: usize = 256 << 10;
/// Limit of the bytes of a report. Reports with tens of thousands of tags are longer, and only the control socket returns them.
const MAX_REPORT_BYTES: usize = 4 << 20;

/// Refuses a process that has no report: one that neither lives nor is one of the last that ended. Reads published state only.
pub(super) fn check(context: &ViewContext, key: ProcessKey, tenants: Tenants) -> Result<(), Refused> {
    if tenants == Tenants::Anonymous {
        let text = "processes are anonymous here (tenants in the configuration): use gpumemctl report PID for your \
             own process";
        return Err(Refused::new(StatusCode::FORBIDDEN, text));
    }
    let published = context.reader.read();
    let mut processes = published.snapshot.processes.iter();
    match processes.find(|process| process.key == key) {
        Some(process) if process.ended.is_none() && !process.accounts.is_empty() => Ok(()),
        _ if context.run_writer.ended().id_of(key).is_some() => Ok(()),
        _ => Err(no_report(key)),
    }
}

fn no_report(key: ProcessKey) -> Refused {
    let text = format!(
        "process {pid} has ended, or has not used a GPU: gpumemctl report {pid} shows its run, if there is one",
        pid = key.pid
    );
    Refused(StatusCode::NOT_FOUND, text)
}

/// Returns the report of a process as JSON. `drawn`: returns the report's data as the page draws it.
pub(super) async fn answer(
    context: &Arc<ViewContext>,
    shown: ViewSettings,
    key: ProcessKey,
    drawn: bool,
) -> Result<Text, Refused> {
    let began = Instant::now();
    let runs = context.live_runs(move |process| process.key == key, &CpuCharge::default()).await?;
    let aggregator_time = began.elapsed();
    let run = match context.run_writer.join_earlier(runs).await.into_iter().next() {
        None => ended(context, key).await,
        live => live,
    };
    let run = run.ok_or_else(|| no_report(key))?;
    let format: fn(&Report<'_>, bool) -> String = match drawn {
        true => |report, tags| html::data(report, tags, MAX_DRAWN_BYTES),
        false => |report, _| json::json(report),
    };
    let mut text = make_in_thread(move || render(run, &shown, format)).await?;
    text.cost += aggregator_time;
    if !drawn && text.text.len() > MAX_REPORT_BYTES {
        let pid = key.pid;
        let why = format!("the report has more than {MAX_REPORT_BYTES} bytes: gpumemctl report {pid} --json");
        return Err(Refused::new(StatusCode::PAYLOAD_TOO_LARGE, why));
    }
    Ok(text)
}

/// Returns the stored run of one of the processes that ended last.
async fn ended(context: &ViewContext, key: ProcessKey) -> Option<Run> {
    let run = context.run_writer.load(context.run_writer.ended().id_of(key)?).await;
    // If the store's file was replaced, another run may have the id.
    run.filter(|run| (run.process.pid, run.process.start_ticks) == (key.pid, key.start_ticks))
}

fn render(mut run: Run, shown: &ViewSettings, format: fn(&Report<'_>, bool) -> String) -> String {
    let rules = shown.rules_for(&run);
    let command = format!("gpumemctl report {}", run.process.pid);
    if shown.page == Page::Tags {
        run.process.redact();
        let mut report = Report::new(&run, rules, None);
        report.command = command;
        return format(&report, true);
    }
    let redacted = RedactedRun::of(&run, rules);
    let mut report = redacted.report();
    report.command = command;
    format(&report, false)
}
