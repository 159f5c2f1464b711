//! `gpumemctl import FORMAT FILE...`

use crate::args::Import;
use crate::exit::NotFound;
use crate::output::print;
use anyhow::Result;
use gpumem_runs::import::read_file;
use gpumem_runs::report::text::label;
use gpumem_runs::report::units::thousands;
use gpumem_runs::run::Run;
use gpumem_runs::store::Store;

/// Reads each file and stores its runs. Reading the same file again changes nothing.
pub fn run(args: &Import) -> Result<()> {
    let path = args.store.path()?;
    for file in &args.files {
        let runs = read_file(file, Some(args.format))?;
        if runs.is_empty() {
            let text = format!("{}: no process speaks in it", file.display());
            return Err(NotFound(text).into());
        }
        let mut store = Store::open(&path)?;
        for run in &runs {
            let (id, new) = store.insert(run, &identity(run))?;
            print(&summary(run, &id.to_string(), new))?;
        }
    }
    Ok(())
}

fn summary(run: &Run, id: &str, new: bool) -> String {
    let coverage = &run.coverage;
    let count = |number: u64| thousands(i64::try_from(number).unwrap_or(i64::MAX));
    let mut text = format!(
        "{id}{}  {}: {} allocation records, {} bytes, {} rejected, {} NVML samples\n",
        if new { "" } else { " (was there)" },
        label(run),
        count(coverage.allocations),
        count(coverage.allocated_bytes),
        count(coverage.rejected),
        count(coverage.samples),
    );
    for caveat in run.caveats.iter().filter(|caveat| caveat.code == "rejected_lines") {
        text += &format!("    {}\n", caveat.text);
    }
    text + &format!("    next: gpumemctl report {id}\n")
}

/// What makes two imports the same: all that the file says. FNV-1a, which will not change.
fn identity(run: &Run) -> String {
    let text = serde_json::to_string(run).unwrap_or_default();
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{}:{}:{hash:016x}", run.source.kind, run.process.pid)
}
