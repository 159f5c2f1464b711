//! `gpumemctl import FILE...`, with its older form `gpumemctl import FORMAT FILE...`, and `gpumemctl export RUN -o FILE`.

use crate::args::{Export, Import, Report, quoted_suffix};
use crate::command::report;
use crate::exit::Kind;
use crate::output::{deliver, is_broken_pipe, print, print_error};
use crate::when::now_ns;
use anyhow::Result;
use gpumem_import::{Format, format, read_file};
use gpumem_model::escape::{escape, quoted};
use gpumem_model::run::Run;
use gpumem_model::units::{plural, thousands};
use gpumem_report::text::label;
use gpumem_runs::export::{self, From};
use gpumem_runs::input::Input;
use gpumem_runs::store::{RunId, Store};
use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

/// Imports the runs of files into the store. A file that cannot be read, or a closed output pipe, does not stop the others.
pub(crate) fn run(args: &Import) -> Result<()> {
    let path = args.store.path()?;
    let (format, files) = format_and_files(args);
    let (mut first_error, mut is_pipe_open) = (None, true);
    for file in files {
        match import(args, format, &path, file)
            .and_then(|summary| if is_pipe_open { print(&summary) } else { Ok(()) })
        {
            Ok(()) => {}
            Err(error) if is_broken_pipe(&error) => is_pipe_open = false,
            Err(error) if first_error.is_none() => first_error = Some(error),
            Err(error) => _ = print_error(&error),
        }
    }
    first_error.map_or(Ok(()), Err)
}

/// Returns the format and the files. The first word is a format if it has the name of one, files follow, and no such file exists.
fn format_and_files(args: &Import) -> (Option<&'static Format>, &[PathBuf]) {
    if let Some((name, files @ [_, ..])) = args.files.split_first()
        && args.format.is_none()
        && !name.exists()
        && let Some(format) = name.to_str().and_then(format)
    {
        return (Some(format), files);
    }
    (args.format, &args.files)
}

fn import(args: &Import, format: Option<&'static Format>, store_path: &Path, file: &Path) -> Result<String> {
    let runs = read(file, format)?;
    if runs.is_empty() {
        return Err(report::no_process(file));
    }
    let mut store = Store::open(store_path)?;
    let mut text = String::new();
    for (run, uid) in &runs {
        let (id, new) = store.insert(run, uid)?;
        text += &summary(run, &id.to_string(), new);
        text += &format!("    next: gpumemctl report {id}{}\n", quoted_suffix(&args.store.words()));
    }
    Ok(text)
}

/// Returns the runs of a file, each with its uid, the id that is the same in all stores. An exported run contains its uid.
fn read(file: &Path, format: Option<&'static Format>) -> Result<Vec<(Run, String)>> {
    let is_exported = |input: &Input| export::looks_like(input.head());
    if format.is_none_or(|format| format.name == export::FORMAT) {
        let input = Input::open(file)?;
        if format.is_some() || is_exported(&input) {
            let read = export::read(input)?;
            return Ok(vec![(read.run, read.uid)]);
        }
    }
    let runs = read_file(file, format)?;
    let content = digest(file)?;
    let uids: Vec<String> = runs.iter().map(|run| uid(run, content)).collect();
    Ok(runs.into_iter().zip(uids).collect())
}

/// Returns the uid of a run from a file with this [`digest`].
fn uid(run: &Run, content: u64) -> String {
    format!("{}:{content:016x}:{}:{}", run.source.kind, run.process.pid, run.process.start_ticks)
}

fn summary(run: &Run, id: &str, new: bool) -> String {
    let coverage = &run.coverage;
    let pid = if run.process.pid == 0 { String::new() } else { format!(" pid {}", run.process.pid) };
    let mut text = format!(
        "{id}{}  {}{pid}: {} of {} bytes, {} rejected, {}\n",
        if new { "" } else { " (already stored)" },
        label(run),
        plural(coverage.allocations, "allocation"),
        thousands(coverage.allocated_bytes),
        plural(coverage.rejected, "record"),
        plural(coverage.samples, "NVML sample"),
    );
    for caveat in run.caveats.iter().filter(|caveat| caveat.code == "rejected_lines") {
        text += &format!("    {}\n", caveat.text);
    }
    text
}

/// Returns a hash of a file's content (FNV-1a, but of eight bytes at a time). It must never change, because uids contain it.
fn digest(path: &Path) -> Result<u64> {
    const PRIME: u64 = 0x0100_0000_01b3;
    let file = File::open(path)?;
    let (mut hash, mut length) = (0xcbf2_9ce4_8422_2325_u64, 0_u64);
    let mut piece = Vec::new();
    while (&file).take(1 << 20).read_to_end(&mut piece)? > 0 {
        for word in piece.chunks(8) {
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            hash = (hash ^ u64::from_le_bytes(bytes)).wrapping_mul(PRIME).rotate_left(29);
        }
        length += piece.len() as u64;
        piece.clear();
    }
    Ok((hash ^ length).wrapping_mul(PRIME))
}

/// Writes a run to a file, and prints on standard error how to import it.
pub(crate) fn export(args: &Export) -> Result<()> {
    if args.output.path().is_none() && std::io::stdout().is_terminal() {
        return Err(Kind::Usage.error("an exported run cannot be shown on a terminal: give a file (-o FILE)"));
    }
    let (name, source) = (Some(args.run.clone()), args.source.clone());
    let (run, id, _) = report::single(&Report { run: name, pid: args.pid, source, ..Report::default() })?;
    let uid = uid_of_run(&run, id.as_deref(), args)?;
    let from = From {
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        id,
        time_s: now_ns() / 1_000_000_000,
        program: concat!("gpumemctl ", env!("CARGO_PKG_VERSION")).to_owned(),
    };
    let file = export::write(&run, &uid, &from)?;
    deliver(&file, &args.output)?;
    if let Some(path) = args.output.path() {
        let path = escape(&quoted(&path.display().to_string()));
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

/// Returns the uid of a run from a file, the store or the daemon.
fn uid_of_run(run: &Run, id: Option<&str>, args: &Export) -> Result<String> {
    let file = Path::new(&args.run);
    let is_number = args.run.parse::<u32>().is_ok();
    if id.is_none() && !is_number && file.exists() {
        return Ok(uid(run, digest(file)?));
    }
    // The store may belong to another daemon, so the stored run must have the same pid.
    let number: Option<RunId> = id.and_then(|id| id.parse().ok());
    if let (Some(number), Ok(store)) = (number, Store::open_read_only(args.source.store.readable()?)) {
        let mut runs = store.list()?.into_iter();
        if let Some(stored) = runs.find(|stored| stored.id == number && stored.pid == run.process.pid) {
            return Ok(stored.uid);
        }
    }
    // Makes the uid that the daemon gives to a live process.
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    Ok(format!("{}:{}:{}", boot.trim_end(), run.process.pid, run.process.start_ticks))
}
