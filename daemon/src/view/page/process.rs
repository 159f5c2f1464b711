//! One process: its current report, without data that the viewer may not see.

use super::response_cache::{Text, aside};
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

/// Limit of the bytes that the page draws; names and points beyond it are summed.
const MOST_DRAWN: usize = 256 << 10;
/// Limit of the bytes of a report. Reports with tens of thousands of tags are longer, and only the control socket returns them.
const MOST_REPORT: usize = 4 << 20;

/// Refuses a process without a report, so that the aggregator is not asked for it.
pub(super) fn is_there(context: &ViewContext, key: ProcessKey, tenants: Tenants) -> Result<(), Refused> {
    if tenants == Tenants::Anonymous {
        let text = "processes are anonymous here (tenants in the configuration): gpumemctl report PID tells you yours";
        return Err(Refused::new(StatusCode::FORBIDDEN, text));
    }
    let published = context.board.read();
    let mut processes = published.snapshot.processes.iter();
    match processes.find(|process| process.key == key) {
        Some(process) if process.ended.is_none() && !process.accounts.is_empty() => Ok(()),
        _ => Err(none(key)),
    }
}

fn none(key: ProcessKey) -> Refused {
    let text = format!(
        "process {} has ended, or has not used a GPU (gpumemctl runs lists those that are over)",
        key.pid
    );
    Refused(StatusCode::NOT_FOUND, text)
}

pub(super) async fn report(
    context: &Arc<ViewContext>,
    shown: ViewSettings,
    key: ProcessKey,
) -> Result<Text, Refused> {
    let text = make(context, shown, key, |report, _| json::json(report)).await?;
    if text.text.len() > MOST_REPORT {
        let why =
            format!("the report has more than {MOST_REPORT} bytes: gpumemctl report {} --json", key.pid);
        return Err(Refused(StatusCode::PAYLOAD_TOO_LARGE, why));
    }
    Ok(text)
}

pub(super) async fn drawn(
    context: &Arc<ViewContext>,
    shown: ViewSettings,
    key: ProcessKey,
) -> Result<Text, Refused> {
    make(context, shown, key, |report, tags| html::data(report, tags, MOST_DRAWN)).await
}

async fn make(
    context: &Arc<ViewContext>,
    shown: ViewSettings,
    key: ProcessKey,
    format: fn(&Report<'_>, bool) -> String,
) -> Result<Text, Refused> {
    let began = Instant::now();
    let runs = context.live_runs(move |process| process.key == key, &CpuCharge::default()).await?;
    let aggregator_time = began.elapsed();
    let run = context.keeper.join_earlier(runs).await.into_iter().next().ok_or_else(|| none(key))?;
    let mut text = aside(move || render(run, &shown, format)).await?;
    text.cost += aggregator_time;
    Ok(text)
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
