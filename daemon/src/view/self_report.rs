//! What a program is told about itself: the report of its own run, as it stands.

use super::{ViewContext, ViewSettings};
use crate::aggregator::Query;
use crate::config::Tenants;
use crate::limits::user_share::AnswerSlot;
use gpumem_ledger::{ProcessKey, ProcessView};
use gpumem_model::run::Run;
use gpumem_report::rules::Groupings;
use gpumem_report::text::{self, Layout};
use gpumem_report::{By, Report, csv, json};
use std::sync::Arc;
use tokio::sync::oneshot;

/// How a report is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReportFormat {
    /// For people.
    Text,
    /// docs/report-json.md.
    Json,
    /// One line per name and moment.
    Csv,
}

/// What a report shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SelfReportRequest {
    /// How.
    pub form: ReportFormat,
    /// Rows of the table.
    pub by: Option<By>,
    /// Every category, however small.
    pub all: bool,
}

/// The report of a process; `None`: there is no run of it.
///
/// Root in a container asks here too: whatever user it is, their answers have a share.
pub(crate) async fn report(
    context: Arc<ViewContext>,
    key: ProcessKey,
    uid: u32,
    wish: SelfReportRequest,
) -> Option<String> {
    let is_own = uid != 0 && uid == rustix::process::geteuid().as_raw();
    let AnswerSlot { charge, .. } = &context.turn(uid, is_own).await;
    let (reply, runs) = oneshot::channel();
    let takes = move |process: &ProcessView| process.key == key;
    context.asks.send(Query::Runs(Box::new(takes), charge.clone(), reply)).await.ok()?;
    let mut run = context.keeper.whole(runs.await.ok()?).await.into_iter().next()?;
    let ViewSettings { rules, tenants, .. } = context.shown();
    if tenants == Tenants::Anonymous {
        super::visibility::hide_others(&mut run);
    }
    // Beside the loop: a report of a large run takes milliseconds.
    context.shares.beside(charge, move || told(&run, &rules, wish)).await
}

fn told(run: &Run, rules: &Groupings, wish: SelfReportRequest) -> String {
    // Rules that somebody chose stand; `default` is what fits the run.
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
