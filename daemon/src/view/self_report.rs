//! Makes the report that a program requests about itself, from its current run.

use super::{ViewContext, ViewSettings};
use crate::config::Tenants;
use crate::limits::user_share::AnswerSlot;
use gpumem_ledger::ProcessKey;
use gpumem_model::run::Run;
use gpumem_report::text::{self, Layout};
use gpumem_report::{GroupBy, Report};
use std::sync::Arc;

/// Function that writes a report in one format. The flag, for texts only: whether to show small categories too.
pub(crate) type Format = fn(&Report<'_>, bool) -> String;

/// Returns the report of a process; `None` if it has no run.
///
/// A container's root uses this too, so root has the same limit of processor time as other users here.
pub(crate) async fn report(
    context: Arc<ViewContext>,
    (key, uid): (ProcessKey, u32),
    by: Option<GroupBy>,
    format: Format,
    all: bool,
) -> Option<String> {
    let is_own = uid != 0 && uid == rustix::process::geteuid().as_raw();
    let AnswerSlot { charge, .. } = &context.answer_slot(uid, is_own).await;
    let runs = context.live_runs(move |process| process.key == key, charge).await.ok()?;
    let mut run = context.run_writer.join_earlier(runs).await.into_iter().next()?;
    let shown = context.shown();
    if shown.tenants == Tenants::Anonymous {
        super::hide_others(&mut run);
    }
    // On another thread: a report of a large run takes milliseconds.
    context.shares.run_beside(charge, move || render(&run, &shown, by, format, all)).await
}

fn render(run: &Run, shown: &ViewSettings, by: Option<GroupBy>, format: Format, all: bool) -> String {
    let mut report = Report::new(run, shown.rules_for(run), by);
    report.command = format!("gpumemctl report {}", run.process.pid);
    format(&report, all)
}

/// The format of a report as text.
pub(crate) fn text(report: &Report<'_>, all: bool) -> String {
    let categories = if all { usize::MAX } else { Layout::default().categories };
    text::text(report, Layout { categories, ..Layout::default() })
}
