//! Limits a run to the window of time of `--since`, `--at` or `--between`. The store may have a long run in several parts; they
//! are joined first. Adds the single blocks of a window.

use super::find::{Found, One, What};
use crate::args::Report as Args;
use crate::exit::Kind;
use crate::when::{When, now_ns};
use anyhow::{Result, bail};
use gpumem_model::run::{Caveat, Clock, Run, State};
use gpumem_model::time;
use gpumem_model::window::{self, Window, WindowKind};
use gpumem_runs::requests::add_blocks;
use gpumem_runs::store::{RunId, RunSummary, Store};

/// Number of parts of a run that are joined, the newest ones: about two months of a server.
const MOST_PARTS: usize = 64;

/// Limits the run to the requested window; unchanged if none was requested.
pub(crate) fn window(found: Found, args: &Args) -> Result<Found> {
    let (flag, part, from, to) = match (&args.window.since, &args.window.at, &args.window.between) {
        (Some(since), ..) => ("--since", WindowKind::Since, since, None),
        (_, Some(at), _) => ("--at", WindowKind::At, at, Some(at)),
        (.., Some((from, to))) => ("--between", WindowKind::Between, from, Some(to)),
        (None, None, None) => return Ok(found),
    };
    let Found { what, mut command } = found;
    let mut one = match what {
        What::One(one) => one,
        What::Group(title, _) => {
            bail!("{flag} shows one process, and {title} were found: name one by its pid")
        }
    };
    let alone = one.run.clone();
    let parts = if one.file.is_none() { join_parts(&mut one, args)? } else { Vec::new() };
    let run = &one.run;
    let Some((first_ns, last_ns)) = window::span(run) else {
        return Err(Kind::NotFound
            .error(format!("{flag}: the run has no moment with a time; use the report without {flag}")));
    };
    let end_ns =
        if run.state == State::Open { now_on(run.clock).unwrap_or(last_ns).max(last_ns) } else { last_ns };
    let marks: Vec<(String, u64)> =
        run.coverage.marks.iter().filter_map(|mark| Some((mark.name.clone()?, mark.time_ns))).collect();
    let resolve = |when: &When| {
        when.in_run(run, end_ns, &marks).map_err(|why| Kind::NotFound.error(format!("{flag}: {why}")))
    };
    let from_ns = resolve(from)?;
    let to_ns = to.map_or(Ok(end_ns), resolve)?;
    let shown = |time_ns: u64| time::with_day(run, time_ns);
    if to_ns < first_ns || from_ns > end_ns {
        let span = format!("the run has data from {} to {}", shown(first_ns), shown(end_ns));
        let what = if to_ns < first_ns { shown(to_ns) } else { shown(from_ns) };
        return Err(Kind::NotFound.error(format!("{flag}: {what} is outside of the run: {span}")));
    }
    if from_ns > to_ns {
        return Err(Kind::NotFound.error(format!(
            "{flag}: {} is after {}; give the earlier time first",
            shown(from_ns),
            shown(to_ns)
        )));
    }
    let mut window = Window { part, from_ns: from_ns.max(first_ns), to_ns: to_ns.min(end_ns), exact: false };
    // The file has every event, and the run only some points in time. So the file is read again for exact amounts.
    let exact = match &one.file {
        Some(file) => gpumem_import::reread(file, args.format, run, &window, args.html)?,
        None => None,
    };
    window.exact = exact.is_some();
    let mut past = exact.unwrap_or_else(|| window::of(run, &window));
    if let Some(text) = span_note(&parts, &window) {
        past.caveats.insert(0, Caveat { code: "parts".into(), text });
    } else if parts.is_empty() {
        past.coverage.part = alone.coverage.part;
    }
    if let Some(device) = &args.device {
        super::only(std::slice::from_mut(&mut past), device)?;
    }
    one.run = past;
    one.window = Some(window);
    // The id of a stored run selects one part, and the pid all of them.
    if let (true, Some(word), Some(pid)) = (parts.len() > 1, command.first_mut(), &args.run)
        && pid.parse::<u32>().is_ok()
    {
        word.clone_from(pid);
    }
    let mut times = vec![from.to_string()];
    times.extend(to.filter(|_| part == WindowKind::Between).map(When::to_string));
    command.extend([flag.to_owned(), times.join(",")]);
    Ok(Found { what: What::One(one), command })
}

/// Joins all stored parts of the process's life to one run. Returns name, first and last time of each part, if there are parts.
pub(crate) fn join_parts(one: &mut One, args: &Args) -> Result<Vec<(String, u64, u64)>> {
    let run = &one.run;
    let may_have = run.coverage.part.is_some() || matches!(run.state, State::Rolled { .. });
    if !may_have || run.source.kind != "daemon" || args.source.store.readable().is_err() {
        return Ok(Vec::new());
    }
    let Some(store) = super::find::open(&args.source.store)? else { return Ok(Vec::new()) };
    let is_of = |summary: &&RunSummary| summary.pid == run.process.pid && summary.source_kind == "daemon";
    let summaries: Vec<RunSummary> = store.list()?.iter().filter(is_of).take(MOST_PARTS).cloned().collect();
    let number = |run: &Run| run.coverage.part.map_or(1, |part| part.number);
    // Parts of one life have the same uid. Their clocks may differ, because each daemon measures the distance to the wall clock.
    let own = summaries.iter().find(|summary| one.id == Some(summary.id.to_string()));
    let mut life = own.map(life_of);
    let mut parts: Vec<(String, Run)> = Vec::new();
    for summary in &summaries {
        let part = store.load(summary.id)?;
        if part.process.start_ticks != run.process.start_ticks {
            continue;
        }
        let part_life = life_of(summary);
        // `run` is newer than the stored copy of its part, so the copy is not used.
        if *life.get_or_insert(part_life) == part_life && number(&part) != number(run) {
            parts.push((summary.id.to_string(), part));
        }
    }
    parts.sort_by_key(|(_, part)| number(part));
    let name = one.id.clone().unwrap_or_else(|| "the part that continues".to_owned());
    let at = parts.partition_point(|(_, part)| number(part) < number(run));
    parts.insert(at, (name, run.clone()));
    let spans =
        parts.iter().filter_map(|(name, part)| window::span(part).map(|(from, to)| (name.clone(), from, to)));
    let spans: Vec<_> = spans.collect();
    if let Some(run) = window::join_parts(parts.into_iter().map(|(_, part)| part).collect()) {
        one.run = run;
    }
    Ok(spans)
}

/// Adds the single blocks of a stored run or of its window, from the requests that the daemon kept with the run.
pub(super) fn add_kept_blocks(one: &mut One, args: &Args) -> Result<()> {
    let stores = if one.run.source.kind == "daemon" { args.source.store.all_readable()? } else { Vec::new() };
    for store in stores.iter().filter_map(|path| Store::open_read_only(path).ok()) {
        let summaries = store.list()?;
        let Some(part) = part_with_requests(&summaries, one) else { continue };
        let pieces = store.requests(part)?;
        if let Err(damaged) = add_blocks(&mut one.run, pieces.iter().map(Vec::as_slice), one.window.as_ref())
        {
            let text = format!("{damaged}: the page may lack single blocks");
            one.run.caveats.push(Caveat { code: "requests".into(), text });
        }
        break;
    }
    Ok(())
}

/// Returns the stored part of a process's life whose requests are shown, because each part has its own: the part in which the window
/// ends, without a window the run itself, else the newest part.
fn part_with_requests(summaries: &[RunSummary], one: &One) -> Option<RunId> {
    let end = format!(":{}:{}", one.run.process.pid, one.run.process.start_ticks);
    let is_of = |summary: &&RunSummary| summary.source_kind == "daemon" && life_of(summary).ends_with(&end);
    let own = summaries.iter().filter(is_of).find(|summary| one.id == Some(summary.id.to_string()));
    // After a restart of the machine, another process may have the same pid and start time.
    let life = life_of(own.or_else(|| summaries.iter().find(is_of))?);
    let mut parts: Vec<&RunSummary> =
        summaries.iter().filter(is_of).filter(|part| life_of(part) == life).collect();
    parts.sort_by_key(|summary| summary.part);
    let of_window =
        |window: Window| parts.iter().copied().find(|summary| summary.last_ns >= Some(window.to_ns));
    let part = if let Some(window) = one.window { of_window(window) } else { own };
    part.or(parts.last().copied()).map(|summary| summary.id)
}

/// Returns the uid of the first part of a life, which identifies the life.
fn life_of(summary: &RunSummary) -> &str {
    let uid = summary.uid.as_str();
    uid.strip_suffix(&format!("/{}", summary.part)).filter(|_| summary.part > 1).unwrap_or(uid)
}

/// Returns a note on the parts whose times overlap the window; `None` without parts.
fn span_note(parts: &[(String, u64, u64)], window: &Window) -> Option<String> {
    let touched = parts.iter().filter(|(_, from, to)| *from <= window.to_ns && *to >= window.from_ns);
    let names: Vec<&str> = touched.map(|(name, ..)| name.as_str()).collect();
    match names.as_slice() {
        [] => None,
        [one] => Some(format!("the window is of {one}")),
        parts => {
            let (count, names) = (parts.len(), parts.join(", "));
            Some(format!("the window covers {count} parts of the process's life, which are joined: {names}"))
        }
    }
}

/// Returns the present time on the clock of a run.
fn now_on(clock: Clock) -> Option<u64> {
    let Clock::Monotonic { wall_offset_ns: Some(offset) } = clock else { return None };
    u64::try_from(i128::from(now_ns()) - i128::from(offset)).ok()
}
