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

/// Prints the report of a stored run, or of a file that is read on the spot.
pub fn run(args: &Args) -> Result<()> {
    let (run, id) = find(args)?;
    let groupings = match &args.rules {
        Some(rules) => Groupings::load(rules)?,
        None => Groupings::preset(run.source.preset.as_deref()),
    };
    let mut report = Report::new(&run, groupings, args.by.map(Into::into));
    report.id = id;
    let categories = if args.all { usize::MAX } else { Layout::default().categories };
    print(&if args.json {
        json::json(&report)
    } else if args.csv {
        csv::csv(&report)
    } else {
        text::text(&report, Layout { width: width(), categories })
    })
}

fn find(args: &Args) -> Result<(Run, Option<String>)> {
    let name = args.run.as_deref();
    // A file may be called like a run; a run is never called like a path.
    let run: Option<RunId> = name.and_then(|name| name.parse().ok());
    match (name, run) {
        (Some(name), None) if looks_like_run(name) && !Path::new(name).exists() => {
            let text = format!("{name} is neither a file nor a run: runs are named r1, r2, ...");
            return Err(NotFound(text).into());
        }
        (Some(name), None) => return Ok((from_file(Path::new(name), args)?, None)),
        (Some(name), Some(_)) if args.format.is_some() => {
            return Ok((from_file(Path::new(name), args)?, None));
        }
        _ => {}
    }
    let path = args.store.path()?;
    let store = Store::open_read_only(&path)?;
    let id = match run {
        Some(id) => id,
        None => store.latest()?.ok_or_else(|| {
            NotFound(format!("{}: holds no run yet; give a recording or log, or import one", path.display()))
        })?,
    };
    Ok((store.load(id)?, Some(id.to_string())))
}

/// Meant as a run, though no run can have that name.
fn looks_like_run(name: &str) -> bool {
    let number = name.strip_prefix('r').unwrap_or("");
    !number.is_empty() && number.chars().all(|character| character.is_ascii_digit() || character == '-')
}

/// The process with most memory, unless one is asked for.
fn from_file(path: &Path, args: &Args) -> Result<Run> {
    let mut runs = read_file(path, args.format)?;
    let pids: Vec<String> = runs.iter().map(|run| run.process.pid.to_string()).collect();
    if let Some(pid) = args.pid {
        runs.retain(|run| run.process.pid == pid);
    }
    let peak = |run: &Run| run.devices.iter().filter_map(|device| device.peak.tracked_bytes).sum::<i64>();
    runs.into_iter().max_by_key(|run| (run.coverage.covered, peak(run))).ok_or_else(|| {
        let text = match args.pid {
            Some(pid) => format!("{}: has no pid {pid}; there are: {}", path.display(), pids.join(", ")),
            None => return NoProcess(path.to_owned()).into(),
        };
        NotFound(text).into()
    })
}
