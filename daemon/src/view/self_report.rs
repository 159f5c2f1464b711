//! Report that a program requests about itself: its own current run.

use super::{ViewContext, ViewSettings};
use crate::config::Tenants;
use crate::limits::user_share::AnswerSlot;
use gpumem_ledger::ProcessKey;
use gpumem_model::run::Run;
use gpumem_report::rules::Groupings;
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
    pub form: ReportFormat,
    pub by: Option<By>,
    /// Shows small categories too.
    pub all: bool,
}

/// Returns the report of a process; `None` if it has no run.
///
/// Root in a container uses this too, so all users have a share of the processing time here.
pub(crate) async fn report(
    context: Arc<ViewContext>,
    key: ProcessKey,
    uid: u32,
    wish: SelfReportRequest,
) -> Option<String> {
    let is_own = uid != 0 && uid == rustix::process::geteuid().as_raw();
    let AnswerSlot { charge, .. } = &context.answer_slot(uid, is_own).await;
    let runs = context.live_runs(move |process| process.key == key, charge).await.ok()?;
    let mut run = context.keeper.join_earlier(runs).await.into_iter().next()?;
    let ViewSettings { rules, tenants, .. } = context.shown();
    if tenants == Tenants::Anonymous {
        super::visibility::hide_others(&mut run);
    }
    // On another thread: a report of a large run takes milliseconds.
    context.shares.beside(charge, move || told(&run, &rules, wish)).await
}

fn told(run: &Run, rules: &Groupings, wish: SelfReportRequest) -> String {
    // Configured rules are used as they are; `default` is replaced by the rules that fit the run.
    let rules = if rules.name == "default" { Groupings::of_run(run) } else { rules.clone() };
    let mut report = Report::new(run, rules, wish.by);
    report.command = format!("gpumemctl report {}", run.process.pid);
    match wish.form {
        ReportFormat::Json => json::json(&report),
        ReportFormat::Csv => csv::csv(&report),
        ReportFormat::Text => {
            let categories = if wish.all { usize::MAX } else { Layout::default().categories };
            text::text(&report, Layout { categories, ..Layout::default() })
        }
    }
}
