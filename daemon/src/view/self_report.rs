//! Makes the report that a program requests about itself, from its current run.

use super::{ViewContext, ViewSettings};
use crate::config::Tenants;
use crate::limits::user_share::AnswerSlot;
use gpumem_ledger::ProcessKey;
use gpumem_model::run::Run;
use gpumem_report::text::{self, Layout};
use gpumem_report::{By, Report, csv, json};
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReportFormat {
    Text,
    /// JSON, see docs/report-json.md.
    Json,
    Csv,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SelfReportRequest {
    pub format: ReportFormat,
    pub by: Option<By>,
    /// Whether to show small categories too.
    pub all: bool,
}

/// Returns the report of a process; `None` if it has no run.
///
/// A container's root uses this too, so root has the same limit of processor time as other users here.
pub(crate) async fn report(
    context: Arc<ViewContext>,
    key: ProcessKey,
    uid: u32,
    request: SelfReportRequest,
) -> Option<String> {
    let is_own = uid != 0 && uid == rustix::process::geteuid().as_raw();
    let AnswerSlot { charge, .. } = &context.answer_slot(uid, is_own).await;
    let runs = context.live_runs(move |process| process.key == key, charge).await.ok()?;
    let mut run = context.keeper.join_earlier(runs).await.into_iter().next()?;
    let shown = context.shown();
    if shown.tenants == Tenants::Anonymous {
        super::visibility::hide_others(&mut run);
    }
    // On another thread: a report of a large run takes milliseconds.
    context.shares.run_beside(charge, move || render(&run, &shown, request)).await
}

fn render(run: &Run, shown: &ViewSettings, request: SelfReportRequest) -> String {
    let mut report = Report::new(run, shown.rules_for(run), request.by);
    report.command = format!("gpumemctl report {}", run.process.pid);
    match request.format {
        ReportFormat::Json => json::json(&report),
        ReportFormat::Csv => csv::csv(&report),
        ReportFormat::Text => {
            let categories = if request.all { usize::MAX } else { Layout::default().categories };
            text::text(&report, Layout { categories, ..Layout::default() })
        }
    }
}
