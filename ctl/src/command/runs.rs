//! `gpumemctl runs`

use crate::args::Runs;
use crate::output::print;
use anyhow::Result;
use gpumem_runs::report::text::clean;
use gpumem_runs::report::units::{Unit, thousands};
use gpumem_runs::store::Store;

/// Lists what the store holds, newest first.
pub fn run(args: &Runs) -> Result<()> {
    let store = Store::open_read_only(&args.store.path()?)?;
    let runs = store.list()?;
    if args.json {
        return print(&(serde_json::to_string_pretty(&runs)? + "\n"));
    }
    let largest = runs.iter().map(|run| run.peak_tracked_bytes).max().unwrap_or(0);
    let unit = Unit::for_largest(largest);
    let mut out = format!("{:<6} {:>8} {:<12} {:>12} {:>12}  LABEL\n", "RUN", "PID", "STATE", "PEAK", "EVENTS");
    for run in &runs {
        out += &format!(
            "{:<6} {:>8} {:<12} {:>12} {:>12}  {}\n",
            run.id.to_string(),
            run.pid,
            run.state,
            unit.amount(run.peak_tracked_bytes),
            thousands(i64::try_from(run.events).unwrap_or(i64::MAX)),
            clean(&run.label)
        );
    }
    out += &format!("peak of tracked in {}; next: gpumemctl report RUN\n", unit.name);
    print(&out)
}
