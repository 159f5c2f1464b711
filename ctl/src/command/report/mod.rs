//! `gpumemctl report [PID|RUN|FILE]`, and `gpumemctl oom` with the same arguments.
//!
//! A report is made from a run alone, by the same code for all sources.

mod find;
mod oom;
mod past;

pub(crate) use find::{
    Found, What, is_unknown, no_process, stored_children, stored_jobs, stored_runs_of_job, unknown,
};
pub(crate) use oom::oom;
pub(crate) use past::join_parts;

use crate::args::{Report as Args, names_device, no_device, quoted_suffix};
use crate::exit::Kind;
use crate::output::{deliver, deliver_stream, unicode, width};
use anyhow::{Result, anyhow, bail};
use find::One;
use gpumem_import::read_file;
use gpumem_model::escape::quoted;
use gpumem_model::run::{Device, Run};
use gpumem_model::units::thousands;
use gpumem_model::window::Window;
use gpumem_report::diff::sum_of_ranks;
use gpumem_report::plot::{Drawing, Options, Picture, draw};
use gpumem_report::rules::Groupings;
use gpumem_report::text::{self, Layout, escape};
use gpumem_report::{GroupBy, Report, csv, group, growth, html, iterations, json, own, steps};
use gpumem_report::{trace, tree};
use std::path::Path;

/// Finds the requested run, and limits it to the requested device and time.
pub(crate) fn found(args: &Args) -> Result<Found> {
    let Found { mut what, mut command } = select(args)?;
    if let Some(device) = &args.device {
        match &mut what {
            What::One(one) => only(std::slice::from_mut(&mut one.run), device)?,
            What::Group(_, runs) => only(runs, device)?,
        }
        command.extend(["--device".to_owned(), device.clone()]);
    }
    past::window(Found { what, command }, args)
}

/// Returns the run of a single process for other commands, with its id in the store and the arguments that select it.
pub(crate) fn single(args: &Args) -> Result<(Run, Option<String>, String)> {
    let Found { what, command } = found(args)?;
    match what {
        What::One(one) => Ok((one.run, one.id, typed(&command))),
        What::Group(title, runs) => {
            let pids: Vec<String> = runs.iter().map(|run| run.process.pid.to_string()).collect();
            let asked = args.run.as_deref().map(escape).unwrap_or_default();
            let text = format!("{asked} is {}: give one of them, {}", escape(&title), pids.join(", "));
            Err(Kind::NotFound.error(text))
        }
    }
}

/// Returns a run like [`single`], or the sum of several: those of a launcher, of a job, or with `all` of a file.
pub(crate) fn summed(args: &Args, all: bool) -> Result<(Run, Option<String>, String)> {
    if let Some(name) = args.run.as_deref().filter(|_| all) {
        let runs = read_file(Path::new(name), args.format)?;
        let title = format!("{} of {}", processes(runs.len()), escape(name));
        return Ok((sum_of_ranks(&title, runs), None, quoted(name)));
    }
    let Found { what, command } = found(args)?;
    let typed = args.job.as_deref().map_or_else(|| typed(&command), quoted);
    Ok(match (what, &args.job) {
        (What::One(one), None) => (one.run, one.id, typed),
        (What::One(one), Some(job)) => {
            let title = format!("{} of job {}", processes(1), escape(job));
            (sum_of_ranks(&title, vec![one.run]), None, typed)
        }
        (What::Group(title, runs), _) => (sum_of_ranks(&escape(&title), runs), None, typed),
    })
}

fn typed(command: &[String]) -> String {
    quoted_suffix(command).trim_start().to_owned()
}

/// Returns a number with the word process or processes.
pub(crate) fn processes(count: usize) -> String {
    if count == 1 { "1 process".to_owned() } else { format!("{} processes", thousands(count as u64)) }
}

/// Prints the report of a live process, a stored run or a file. Several are printed one after another, or as one picture.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.traced.chrome_trace && args.more.is_empty() {
        return trace_of_one(args);
    }
    let output = match (args.picture.is_asked(), args.more.is_empty()) {
        (true, _) => picture(args)?,
        (false, true) => one(args)?.into_bytes(),
        (false, false) => each(args)?.into_bytes(),
    };
    deliver(&output, &args.output)
}

/// Writes the trace of one process, without holding the whole trace in memory.
fn trace_of_one(args: &Args) -> Result<()> {
    let Found { what, .. } = found(args)?;
    match &what {
        What::One(one) => {
            let report = report(&one.run, args)?;
            deliver_stream(&|out| trace::write(&report, out), &args.output)
        }
        What::Group(_, runs) => Err(needs_one(runs)),
    }
}

/// Returns the error for a format that shows a single process.
fn needs_one(runs: &[Run]) -> anyhow::Error {
    anyhow!("this form shows one process, and {} were found: name one by its pid", runs.len())
}

fn one(args: &Args) -> Result<String> {
    let Found { mut what, mut command } = found(args)?;
    if let What::One(one) = &mut what
        && args.html
    {
        past::add_kept_blocks(one, args)?;
    }
    if let Some(rules) = &args.rules {
        command.extend(["--rules".to_owned(), rules.clone()]);
    }
    let command = format!("gpumemctl report{}", quoted_suffix(&command));
    Ok(match what {
        What::One(one) => {
            let One { run, id, others, job, window, .. } = *one;
            let mut report = report(&run, args)?;
            (report.id, report.others, report.job) = (id, others, job);
            (report.window, report.command) = (window, command);
            formatted(&report, args)
        }
        What::Group(title, runs) => formatted_group(&title, &runs, args, &command)?,
    })
}

/// Finds the requested run. Numbers are pids; a file whose name is a number or run id is given as `./7`.
fn select(args: &Args) -> Result<Found> {
    let pid = args.run.as_deref().and_then(|name| name.parse::<u32>().ok());
    let is_unnamed = args.run.is_none() && args.pid.is_none();
    match (pid, &args.job) {
        _ if args.format.is_some() => find::stored(args),
        (_, Some(job)) => find::by_job(job, args),
        (Some(pid), None) => find::by_pid(pid, args),
        (None, None) if is_unnamed => find::newest(args)?.map_or_else(|| find::stored(args), Ok),
        (None, None) => find::stored(args),
    }
}

/// Returns the categories of the named rules, or of the default rules for the run.
pub(crate) fn groupings(rules: Option<&str>, run: &Run) -> Result<Groupings> {
    Ok(match rules {
        Some(rules) => Groupings::load(rules)?,
        None => Groupings::of_run(run),
    })
}

/// Makes the report of a run with the requested rules and rows.
pub(crate) fn report<'r>(run: &'r Run, args: &Args) -> Result<Report<'r>> {
    let groupings = groupings(args.rules.as_deref(), run)?;
    let by = if args.tags { Some(GroupBy::Tag) } else { args.by.map(|rows| rows.by) };
    let report = Report::new(run, groupings, by);
    Ok(if args.by.is_some_and(|rows| rows.lines) { report.by_line() } else { report })
}

/// Returns the report of a process in the requested format.
fn formatted(report: &Report<'_>, args: &Args) -> String {
    let categories = if args.all || args.tags { usize::MAX } else { Layout::default().categories };
    if args.html {
        html::html(report)
    } else if args.iterations {
        let choice = iterations::IterationFilter { every: args.every.unwrap_or(1), columns: args.columns };
        match (args.json, args.csv) {
            (true, _) => iterations::json(report, choice),
            (_, true) => iterations::csv(report, choice),
            _ => iterations::text(report, choice),
        }
    } else if args.counters {
        if args.json { own::json(report) } else { own::text(report) }
    } else if args.traced.collapsed {
        tree::collapsed(report)
    } else if args.traced.treemap {
        tree::treemap(report)
    } else if args.json {
        json::json(report)
    } else if args.csv {
        csv::csv(report)
    } else if args.steps {
        steps::text(report)
    } else if args.growth {
        growth::table(report, args.all)
    } else {
        let is_short = !(args.verbose || args.all || args.tags);
        text::text(report, Layout { width: width(), categories, unicode: unicode(), is_short })
    }
}

/// Returns the report of several processes in the requested format. The text is a table of processes. The reports of all
/// processes follow, or replace the table, if the options ask for details.
fn formatted_group(title: &str, runs: &[Run], args: &Args, command: &str) -> Result<String> {
    if args.traced.is_asked() {
        return Err(needs_one(runs));
    }
    let borrowed: Vec<&Run> = runs.iter().collect();
    if args.html {
        let reports: Vec<Report<'_>> = runs.iter().map(|run| report(run, args)).collect::<Result<_>>()?;
        return Ok(html::group(title, &reports, command));
    }
    if args.csv && !args.iterations {
        return Ok(group::csv(&borrowed));
    }
    if args.json || args.csv {
        let each = runs.iter().map(|run| Ok(formatted(&report(run, args)?, args)));
        let each = each.collect::<Result<Vec<String>>>()?;
        if args.json {
            return Ok(array(&each));
        }
        // The CSV tables of iterations are merged into one, so only the first keeps its heading.
        let rows = each.into_iter().enumerate().map(|(number, table)| match table.split_once('\n') {
            Some((_, rows)) if number > 0 => rows.to_owned(),
            _ => table,
        });
        return Ok(rows.collect());
    }
    let asked = args.growth || args.steps || args.iterations || args.counters;
    let mut out = if asked { String::new() } else { group::text(title, &borrowed, command) };
    if args.all || asked || args.tags || args.by.is_some() {
        for run in runs {
            let mut report = report(run, args)?;
            report.command = format!("gpumemctl report {}", run.process.pid);
            out += &format!("\n{}", formatted(&report, args));
        }
    }
    Ok(out)
}

/// Returns for each named run the arguments that name it alone; unchanged arguments if no run is named.
fn alone(args: &Args) -> Vec<Args> {
    let names = args.run.iter().chain(&args.more);
    let alone: Vec<Args> =
        names.map(|name| Args { run: Some(name.clone()), more: Vec::new(), ..args.clone() }).collect();
    if alone.is_empty() { vec![args.clone()] } else { alone }
}

/// Returns all reports in order: texts one after another, JSON documents as an array.
fn each(args: &Args) -> Result<String> {
    if args.csv || args.html || args.traced.is_asked() {
        bail!(
            "--csv, --html and traces show one run, and several are named: name one (a file to write follows -o), or use the text, --json or a picture"
        );
    }
    let output: Vec<String> = alone(args).iter().map(one).collect::<Result<_>>()?;
    Ok(if args.json { array(&output) } else { output.join("\n") })
}

/// Joins JSON documents to an array.
pub(crate) fn array(documents: &[String]) -> String {
    let documents: Vec<&str> = documents.iter().map(|document| document.trim_end()).collect();
    format!("[{}]\n", documents.join(",\n"))
}

fn picture(args: &Args) -> Result<Vec<u8>> {
    let mut runs: Vec<(Option<String>, Run, Option<Window>)> = Vec::new();
    for alone in alone(args) {
        let Found { what, .. } = found(&alone)?;
        match what {
            What::One(one) => runs.push((one.id, one.run, one.window)),
            What::Group(_, group) => runs.extend(group.into_iter().map(|run| (None, run, None))),
        }
    }
    let reports = runs.iter().map(|(id, run, window)| {
        let mut report = report(run, args)?;
        (report.id, report.window) = (id.clone(), *window);
        Ok(report)
    });
    let reports: Vec<Report<'_>> = reports.collect::<Result<_>>()?;
    let usual = if reports.len() > 1 { Picture::Compare } else { Picture::Peak };
    let picture = args.picture.plot.unwrap_or(usual);
    let options = Options { title: args.picture.title.clone(), hide_below: args.picture.hide_below };
    file_of(&draw(&reports, picture, &options)?, args.picture.svg, args.picture.pdf)
}

/// Returns a picture as SVG or PDF, else as PNG.
pub(crate) fn file_of(drawing: &Drawing, svg: bool, pdf: bool) -> Result<Vec<u8>> {
    Ok(match (svg, pdf) {
        (true, _) => drawing.svg().into_bytes(),
        (_, true) => drawing.pdf(),
        _ => drawing.png()?,
    })
}

/// Removes all devices but the one called `name` from the runs. Fails if no run has memory on that device.
fn only(runs: &mut [Run], name: &str) -> Result<()> {
    let mut known: Vec<(u32, String)> = Vec::new();
    for run in runs.iter_mut() {
        known.extend(run.devices.iter().map(|device| (device.ordinal.into(), device.name.clone())));
        let is_named = |device: &Device| names_device(name, device.ordinal.into(), &device.name);
        let (kept, removed): (Vec<Device>, Vec<Device>) =
            std::mem::take(&mut run.devices).into_iter().partition(is_named);
        run.devices = kept;
        let is_of_removed =
            |text: &str| removed.iter().any(|device| text.contains(&format!(" on {}:", device.name)));
        run.caveats.retain(|caveat| caveat.code != "accounting_disagrees" || !is_of_removed(&caveat.text));
    }
    if runs.iter().any(|run| !run.devices.is_empty()) {
        return Ok(());
    }
    Err(no_device(name, "is not a device with memory of the run", known.into_iter()))
}
