//! `gpumemctl report [RUN|FILE]`

use crate::args::Report as Args;
use crate::exit::{NoProcess, NotFound};
use crate::output::{print, width};
use anyhow::Result;
use gpumem_runs::import::read_file;
use gpumem_runs::report::text::{self, Layout};
use gpumem_runs::report::{Report, csv, json};
use gpumem_runs::rules::Groupings;
use gpumem_runs::run::Run;
use gpumem_runs::store::{RunId, Store};
use std::path::Path;

/// What is asked for, and how to ask for it again.
struct Found {
    run: Run,
    id: Option<String>,
    /// Pids of the other processes in the same file.
    others: Vec<u32>,
    command: Vec<String>,
}

/// Prints the report of a stored run, or of a file that is read on the spot.
pub fn run(args: &Args) -> Result<()> {
    let Found { run, id, others, mut command } = find(args)?;
    let groupings = match &args.rules {
        Some(rules) => Groupings::load(rules)?,
        None => Groupings::preset(run.source.preset.as_deref()),
    };
    let mut report = Report::new(&run, groupings, args.by.map(Into::into));
    report.id = id;
    report.others = others;
    if let Some(rules) = &args.rules {
        command.extend(["--rules".to_owned(), rules.clone()]);
    }
    let command: Vec<String> = command.iter().map(|word| quoted(word)).collect();
    report.command = format!("gpumemctl report {}", command.join(" "));
    let categories = if args.all { usize::MAX } else { Layout::default().categories };
    print(&if args.json {
        json::json(&report)
    } else if args.csv {
        csv::csv(&report)
    } else {
        text::text(&report, Layout { width: width(), categories })
    })
}

fn find(args: &Args) -> Result<Found> {
    let name = args.run.as_deref();
    // A file may be called like a run; a run is never called like a path.
    let id: Option<RunId> = name.and_then(|name| name.parse().ok());
    match (name, id) {
        (Some(name), None) if looks_like_run(name) && !Path::new(name).exists() => {
            let text = format!("{name} is neither a file nor a run: runs are named r1, r2, ...");
            return Err(NotFound(text).into());
        }
        (Some(name), None) => return from_file(name, args),
        (Some(name), Some(_)) if args.format.is_some() => return from_file(name, args),
        _ => {}
    }
    let path = args.store.path()?;
    let store = Store::open_read_only(&path)?;
    let id = match id {
        Some(id) => id,
        None => store.latest()?.ok_or_else(|| {
            NotFound(format!("{}: holds no run yet; give a recording or log, or import one", path.display()))
        })?,
    };
    let run = store.load(id)?;
    if let Some(pid) = args.pid.filter(|pid| *pid != run.process.pid) {
        return Err(NotFound(format!("run {id} is of pid {}, not {pid}", run.process.pid)).into());
    }
    let mut command = vec![id.to_string()];
    if !args.store.typed().is_empty() {
        command.extend(["--store".to_owned(), path.to_string_lossy().into_owned()]);
    }
    Ok(Found { run, id: Some(id.to_string()), others: Vec::new(), command })
}

/// Meant as a run, though no run can have that name.
fn looks_like_run(name: &str) -> bool {
    let number = name.strip_prefix('r').unwrap_or("");
    !number.is_empty() && number.chars().all(|character| character.is_ascii_digit() || character == '-')
}

/// The process with most memory, unless one is asked for.
fn from_file(name: &str, args: &Args) -> Result<Found> {
    let path = Path::new(name);
    let runs = read_file(path, args.format)?;
    let mut pids: Vec<u32> = runs.iter().map(|run| run.process.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    let peak = |run: &Run| {
        let peaks = run.devices.iter().filter_map(|device| device.peak.tracked_bytes);
        peaks.fold(0, i64::saturating_add)
    };
    let asked_for = runs.into_iter().filter(|run| args.pid.is_none_or(|pid| run.process.pid == pid));
    let most = asked_for.max_by_key(|run| (run.coverage.covered, peak(run)));
    let run = most.ok_or_else(|| match args.pid {
        Some(pid) => {
            let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
            let there = pids.join(", ");
            NotFound(format!("{}: has no pid {pid}; there are: {there}", path.display())).into()
        }
        None => anyhow::Error::from(NoProcess(path.to_owned())),
    })?;
    pids.retain(|pid| *pid != run.process.pid);
    let mut command = vec![name.to_owned()];
    if let Some(format) = args.format {
        command.extend(["--format".to_owned(), format.name.to_owned()]);
    }
    if let Some(pid) = args.pid {
        command.extend(["--pid".to_owned(), pid.to_string()]);
    }
    Ok(Found { run, id: None, others: pids, command })
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "._/+:@%=-".contains(character);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn words_survive_a_shell() {
        let words = ["r1", "a/b-c.log", "", "my log", "it's"].map(quoted);
        assert_eq!(words, ["r1", "a/b-c.log", "''", "'my log'", r"'it'\''s'"]);
    }
}
