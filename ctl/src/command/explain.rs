//! `gpumemctl explain WORD [PID|RUN|FILE]`: explains a term of a report, with the numbers of a run.

use crate::args::{self, Explain as Args};
use crate::client::{Daemon, RunReply, RunSelector};
use crate::command::report;
use crate::exit::Kind;
use crate::output::{print, width};
use anyhow::Result;
use gpumem_model::run::Run;
use gpumem_report::Report;
use gpumem_report::explain::{explain, list};
use gpumem_report::text::escape;
use gpumem_runs::store::Store;

pub(crate) fn run(args: &Args) -> Result<()> {
    let Some(word) = &args.word else { return print(&list(width())) };
    let found = match args.run.clone() {
        None => largest(&args.source),
        run => {
            let report = args::Report { run, source: args.source.clone(), ..args::Report::default() };
            let (run, id, _) = report::single(&report)?;
            Some((run, id))
        }
    };
    let mut report = None;
    if let Some((run, id)) = &found {
        let groupings = report::groupings(args.rules.as_deref(), run)?;
        report.insert(Report::new(run, groupings, None)).id.clone_from(id);
    }
    match explain(word, report.as_ref(), width()) {
        Ok(text) => print(&text),
        Err(nearest) => {
            let mut text = format!("{}: no report has this word.", escape(word));
            if !nearest.is_empty() {
                text += &format!(" Did you mean {}?", escape(&nearest.join(", ")));
            }
            Err(Kind::NotFound.error(text + " gpumemctl explain lists all words"))
        }
    }
}

/// Returns the run of the live process with most memory, else the latest stored run, with its id; `None` if there is neither.
pub(super) fn largest(source: &args::DataSource) -> Option<(Run, Option<String>)> {
    let live =
        Daemon::find(source.socket.as_deref()).ok().and_then(|daemon| daemon.runs(RunSelector::Live).ok());
    let used = |reply: &RunReply| {
        let moments = reply.run.devices.iter().map(|device| &device.last);
        moments.filter_map(|moment| moment.used_bytes().or(moment.tracked_bytes)).max()
    };
    let most = live.into_iter().flatten().filter(|reply| !reply.run.devices.is_empty()).max_by_key(used);
    most.map(|reply| (reply.run, reply.id)).or_else(|| {
        let store = Store::open_read_only(source.store.readable().ok()?).ok()?;
        let id = store.latest().ok()??;
        Some((store.load(id).ok()?, Some(id.to_string())))
    })
}

#[cfg(test)]
mod tests {
    use crate::command::top::DEVICE_HEADS;
    use crate::command::{ps, runs};
    use gpumem_model::control::{ClaimRow, DeviceRow, ProcessRow, Ps};
    use gpumem_report::explain::is_known;

    #[test]
    fn what_ps_prints_is_explained() {
        let listed = Ps {
            devices: vec![DeviceRow::default()],
            processes: vec![ProcessRow::default()],
            claims: vec![ClaimRow::default()],
            ..Ps::default()
        };
        let value = serde_json::to_value(&listed).expect("JSON");
        let rows =
            ["devices", "processes", "claims"].map(|list| value[list][0].as_object().expect("a row").clone());
        let keys = rows.iter().flat_map(|row| row.keys().cloned());
        // The flags in the documentation of `ProcessRow::flags`.
        let flags = [
            "covered",
            "uncovered",
            "late",
            "blocked",
            "partial",
            "stale",
            "paused",
            "restarted",
            "free",
            "NOT FRESH",
        ];
        let all = keys.chain(ps::HEADS.map(str::to_owned)).chain(flags.map(str::to_owned));
        let unknown: Vec<String> = all.filter(|word| !is_known(word)).collect();
        assert!(unknown.is_empty(), "not explained: {unknown:?}");
    }

    #[test]
    fn columns_and_checks_are_explained() {
        let columns = runs::COLUMNS
            .map(|(name, _)| name)
            .into_iter()
            .chain(DEVICE_HEADS)
            .filter(|name| !name.is_empty());
        let checks = gpumem_model::checks::Check::ALL.iter().map(|check| check.id());
        let unknown: Vec<&str> = columns.chain(checks).filter(|word| !is_known(word)).collect();
        assert!(unknown.is_empty(), "not explained: {unknown:?}");
    }
}
