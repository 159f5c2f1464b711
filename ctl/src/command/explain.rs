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

    /// Returns the headings of a printed text: names of columns, names of rows with amounts, and words before a colon.
    fn headings(text: &str) -> Vec<String> {
        let is_amount = |cell: &&str| {
            let digits = cell.trim_start_matches(['~', '+', '-']).trim_end_matches('*');
            cell.trim() == "-"
                || !digits.is_empty() && digits.chars().all(|c| c.is_ascii_digit() || ",.".contains(c))
        };
        let mut found = Vec::new();
        for line in text.lines() {
            let cells: Vec<&str> = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
            if cells.get(1).is_some_and(is_amount) {
                found.push(cells[0].to_owned());
            } else if cells.len() > 2 && !line.contains(|c: char| c.is_ascii_digit()) {
                found.extend(cells.iter().map(|cell| (*cell).to_owned()));
            }
            let label =
                line.split_once(": ").map(|(label, _)| label.split(" (").next().unwrap_or_default().trim());
            found.extend(
                label.filter(|label| label.chars().all(|c| c.is_alphabetic() || c == ' ')).map(str::to_owned),
            );
        }
        // Names of a program and numbers of folded rows are not headings.
        found.retain(|name| {
            let first = name.trim_start_matches('(').chars().next();
            !name.contains(['/', '_']) && first.is_some_and(char::is_alphabetic) && !name.contains(" is ")
        });
        found
    }

    #[test]
    fn headings_of_all_printed_texts_are_explained() {
        let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
        let texts = ["reports", "diffs"].into_iter().flat_map(|folder| {
            let files = std::fs::read_dir(golden.join(folder)).expect("goldens").flatten();
            files.filter(|file| file.path().extension().is_some_and(|ending| ending == "txt"))
        });
        let mut seen = 0;
        let mut unknown = std::collections::BTreeSet::new();
        for file in texts {
            let text = std::fs::read_to_string(file.path()).expect("a text");
            let words = headings(&text);
            seen += words.len();
            // `untagged` is a tag of the shipped log.
            unknown.extend(words.into_iter().filter(|word| !is_known(word) && word != "untagged"));
        }
        let columns = runs::COLUMNS.map(|(name, _)| name).into_iter().chain(["TIME", "COMMAND"]);
        unknown.extend(columns.filter(|word| !is_known(word)).map(str::to_owned));
        let checks = gpumem_model::checks::Check::ALL.iter().map(|check| check.id());
        unknown.extend(checks.filter(|word| !is_known(word)).map(str::to_owned));
        assert!(seen > 150, "only {seen} headings");
        assert!(unknown.is_empty(), "not explained: {unknown:?}");
    }
}
