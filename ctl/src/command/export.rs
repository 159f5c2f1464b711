//! `gpumemctl export RUN -o FILE`: writes a run to a file, for another machine.

use super::import::{digest, uid};
use crate::args::Export as Args;
use crate::command::report;
use crate::exit::Kind;
use crate::output::deliver;
use crate::when::now_ns;
use anyhow::Result;
use gpumem_model::harmless::{clean, quoted};
use gpumem_model::run::Run;
use gpumem_model::units::thousands;
use gpumem_report::text::label;
use gpumem_runs::export::{self, From};
use gpumem_runs::store::{RunId, Store};
use std::io::{IsTerminal, Write};
use std::path::Path;

/// Writes the run, and prints on standard error how to import it.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.output.path().is_none() && std::io::stdout().is_terminal() {
        return Err(Kind::Usage.error("an exported run is no text for a terminal: give a file (-o FILE)"));
    }
    let (run, id, _) = report::single(&args.report())?;
    let uid = name(&run, id.as_deref(), args)?;
    let from = From {
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        id,
        time_s: now_ns() / 1_000_000_000,
        program: concat!("gpumemctl ", env!("CARGO_PKG_VERSION")).to_owned(),
    };
    let file = export::write(&run, &uid, &from)?;
    deliver(&file, &args.output)?;
    if let Some(path) = args.output.path() {
        let path = clean(&quoted(&path.display().to_string()));
        // Standard error may be closed or full; the file is written anyway.
        let _ = writeln!(
            std::io::stderr(),
            "{path}: {} ({} bytes); there: gpumemctl import {path}, or gpumemctl report {path}",
            label(&run),
            thousands(file.len() as u64)
        );
    }
    Ok(())
}

/// Returns the run's uid, which is the same in every store.
fn name(run: &Run, id: Option<&str>, args: &Args) -> Result<String> {
    let file = Path::new(&args.run);
    let is_number = args.run.parse::<u32>().is_ok();
    if id.is_none() && !is_number && file.exists() {
        return Ok(uid(run, digest(file)?));
    }
    // The store may belong to another daemon, so the stored run must have the same pid.
    let number: Option<RunId> = id.and_then(|id| id.parse().ok());
    if let (Some(number), Ok(store)) = (number, Store::open_read_only(args.source.store.readable()?)) {
        let is_it =
            |stored: &&gpumem_runs::store::RunSummary| stored.id == number && stored.pid == run.process.pid;
        if let Some(stored) = store.list()?.iter().find(is_it) {
            return Ok(stored.uid.clone());
        }
    }
    // Has the same form as the daemon's uid.
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    Ok(format!("{}:{}:{}", boot.trim_end(), run.process.pid, run.process.start_ticks))
}
