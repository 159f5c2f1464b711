//! What a program is told about itself: the report of its own run, as it stands.

use super::{Shown, Sight};
use crate::aggregator::Ask;
use crate::config::Tenants;
use crate::limits::user_share::Turn;
use gpumem_ledger::{ProcessKey, ProcessView};
use gpumem_model::run::Run;
use gpumem_report::rules::Groupings;
use gpumem_report::text::{self, Layout};
use gpumem_report::{By, Report, csv, json};
use std::sync::Arc;
use tokio::sync::oneshot;

/// How a report is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// For people.
    Text,
    /// docs/report-json.md.
    Json,
    /// One line per name and moment.
    Csv,
}

/// What a report shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wish {
    /// How.
    pub form: Form,
    /// Rows of the table.
    pub by: Option<By>,
    /// Every category, however small.
    pub all: bool,
}

/// The report of a process; `None`: there is no run of it.
///
/// Root in a container asks here too: whatever user it is, their answers have a share.
pub(crate) async fn report(sight: Arc<Sight>, key: ProcessKey, uid: u32, wish: Wish) -> Option<String> {
    let is_own = uid != 0 && uid == rustix::process::geteuid().as_raw();
    let Turn { bill, .. } = &sight.turn(uid, is_own).await;
    let (reply, runs) = oneshot::channel();
    let takes = move |process: &ProcessView| process.key == key;
    sight.asks.send(Ask::Runs(Box::new(takes), bill.clone(), reply)).await.ok()?;
    let mut run = sight.keeper.whole(runs.await.ok()?).await.into_iter().next()?;
    let Shown { rules, tenants, .. } = sight.shown();
    if tenants == Tenants::Anonymous {
        super::visibility::hide_others(&mut run);
    }
    // Beside the loop: a report of a large run takes milliseconds.
    sight.fair.beside(bill, move || told(&run, &rules, wish)).await
}

fn told(run: &Run, rules: &Groupings, wish: Wish) -> String {
    // Rules that somebody chose stand; `default` is what fits the run.
    let rules = if rules.name == "default" { Groupings::of_run(run) } else { rules.clone() };
    let mut report = Report::new(run, rules, wish.by);
    report.command = format!("gpumemctl report {}", run.process.pid);
    match wish.form {
        Form::Json => json::json(&report),
        Form::Csv => csv::csv(&report),
        Form::Text => {
            let categories = if wish.all { usize::MAX } else { Layout::default().categories };
            text::text(&report, Layout { categories, ..Layout::default() })
        }
    }
}
