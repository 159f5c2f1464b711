//! `gpumemctl runs`

use crate::args::Runs;
use crate::output::print;
use anyhow::Result;
use gpumem_runs::report::text::{clean, short_command};
use gpumem_runs::report::time::date_minute;
use gpumem_runs::report::units::{Unit, thousands};
use gpumem_runs::run::State;
use gpumem_runs::store::{RunSummary, Store};

/// Lists what the store holds, newest first.
pub fn run(args: &Runs) -> Result<()> {
    let store = Store::open_read_only(args.store.readable()?)?;
    let runs = store.list()?;
    if args.json {
        let list: Vec<_> = runs.iter().map(line_json).collect();
        return print(&(serde_json::to_string_pretty(&list)? + "\n"));
    }
    let largest = runs.iter().filter_map(|run| run.peak_tracked_bytes).max().unwrap_or(0);
    let unit = Unit::for_largest(largest);
    let mut out = format!(
        "{:<6} {:<17} {:>8} {:<11} {:>10} {:>12}  LABEL\n",
        "RUN", "STORED", "PID", "STATE", "PEAK", "EVENTS"
    );
    for run in &runs {
        out += &format!(
            "{:<6} {:<17} {:>8} {:<11} {:>10} {:>12}  {}\n",
            run.id.to_string(),
            date_minute(run.stored_s),
            if run.pid == 0 { "-".to_owned() } else { run.pid.to_string() },
            state(run.state),
            run.peak_tracked_bytes.map_or("-".to_owned(), |bytes| unit.amount(bytes)),
            thousands(i64::try_from(run.events).unwrap_or(i64::MAX)),
            label(run)
        );
    }
    out += &format!("peak of tracked in {}; next: gpumemctl report RUN\n", unit.name);
    print(&out)
}

/// The command, and the file it came from.
fn label(run: &RunSummary) -> String {
    let (mut label, origin) = (short_command(&run.label), clean(&run.source_origin));
    match run.continues {
        Some(before) => label += &format!("  part {} of its life, after {before}", run.part),
        None if run.part > 1 => label += &format!("  part {} of its life", run.part),
        None => {}
    }
    match run.source_kind.as_str() {
        "daemon" => label,
        _ if label == origin => label,
        _ => format!("{label} ({origin})"),
    }
}

fn state(state: State) -> &'static str {
    match state {
        State::Open => "running",
        State::Closed { .. } => "ended",
        State::Interrupted => "interrupted",
        State::Rolled { .. } => "rolled",
    }
}

fn line_json(run: &RunSummary) -> serde_json::Value {
    serde_json::json!({
        "run": run.id.to_string(),
        "uid": run.uid,
        "label": run.label,
        "pid": run.pid,
        "source": run.source_kind,
        "origin": run.source_origin,
        "state": state(run.state),
        "stored_s": run.stored_s,
        "part": run.part,
        "continues": run.continues.map(|id| id.to_string()),
        "started_ns": run.started_ns,
        "last_ns": run.last_ns,
        "peak_tracked_bytes": run.peak_tracked_bytes,
        "events": run.events,
    })
}
