//! Makes the requested picture of given runs.

use super::axis::Axis;
use super::bar::{self, Bar, Kind, Segment};
use super::bars::bars;
use super::drawing::Drawing;
use super::frame::Frame;
use super::palette::RANKS;
use super::rows::{Rows, rows_of};
use super::timeline;
use crate::labels::{device_title, label};
use crate::lines::listed;
use crate::{GroupBy, Report, gap_distance};
use gpumem_model::escape::escape;
use gpumem_model::run::{Device, Moment};
use gpumem_model::units::{Unit, plural};

/// Maximum number of categories that a picture names, so that it fits on a page.
const MOST_ROWS: usize = 60;

/// What a picture shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Picture {
    /// The peak of each device, by layer and by data structure, as two stacked bars.
    Peak,
    /// The peak of each device, with one bar for each category.
    Categories,
    /// Memory over time.
    Timeline,
    /// The peaks of several runs side by side.
    Compare,
}

/// Options of a picture.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Title of the picture; `None` for the run's command.
    pub title: Option<String>,
    /// Categories of at most this percentage of the total are summed into one part.
    pub hide_below: Option<f64>,
}

/// Error: there is nothing to draw, for the reason that the text gives.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NothingToDraw(String);

/// Draws a picture of runs; only [`Picture::Compare`] accepts more than one.
///
/// # Errors
/// If the runs have nothing to show, or are too many.
pub fn draw(reports: &[Report<'_>], picture: Picture, options: &Options) -> Result<Drawing, NothingToDraw> {
    let Some(report) = reports.first() else { return Err(NothingToDraw("no run to draw".into())) };
    let nothing = || NothingToDraw("the run had no memory on any GPU: there is nothing to draw".into());
    if reports.iter().all(|report| report.run.devices.is_empty()) {
        return Err(nothing());
    }
    match picture {
        Picture::Compare => compare(reports, options),
        _ if reports.len() > 1 => {
            let runs = plural(reports.len() as u64, "run");
            Err(NothingToDraw(format!("{runs} are drawn side by side only: --plot compare")))
        }
        Picture::Timeline => over_time(report, options),
        Picture::Peak | Picture::Categories => {
            let draw = if picture == Picture::Peak { peak } else { categories };
            of_devices(report, options, |device, hidden| Some(draw(report, device, hidden)))
                .ok_or_else(nothing)
        }
    }
}

/// Returns the bar of a process on a device at a moment. Its parts add up to `used`, or to the known part of `used`.
pub fn bar(report: &Report<'_>, moment: &Moment, by: GroupBy, title: &str) -> Bar {
    let mut segments = Vec::new();
    let mut push = |name: &str, bytes: i64, kind: Kind| {
        if bytes != 0 {
            segments.push(Segment { name: name.to_owned(), bytes, kind });
        }
    };
    if moment.tracked_bytes.is_none() {
        push("used (no agent)", moment.used_bytes().unwrap_or(0), Kind::Opaque);
        return Bar::of(title, segments);
    }
    let composition = report.composition(moment, by);
    for (name, bytes) in &composition.categories {
        push(&escape(name), *bytes, Kind::Category);
    }
    push(by.name_of_rest(), composition.others, Kind::Others);
    push("pool idle", composition.pool_idle, Kind::Idle);
    push("opaque pools", composition.opaque, Kind::Opaque);
    push("predates the agent", moment.predates_bytes.unwrap_or(0), Kind::Predates);
    push("Untrackable", moment.untrackable_bytes.unwrap_or(0), Kind::Untrackable);
    Bar::of(title, segments)
}

/// Returns the title of a device's bar: `what`, with the device's number if there are several devices.
fn titled(report: &Report<'_>, device: &Device, what: &str) -> String {
    if report.run.devices.len() > 1 { format!("GPU {}: {what}", device.ordinal) } else { what.to_owned() }
}

/// Draws a picture for each device, one below the other on one page; `None` if no device has a picture.
fn of_devices(
    report: &Report<'_>,
    options: &Options,
    picture: impl Fn(&Device, &mut Hidden<'_>) -> Option<Drawing>,
) -> Option<Drawing> {
    let mut hidden = Hidden { options, names: Vec::new() };
    let pictures = report.run.devices.iter().filter_map(|device| picture(device, &mut hidden));
    let pictures: Vec<Drawing> = pictures.collect();
    let mut frame = frame(report, options);
    frame.notes.extend(hidden.note());
    (!pictures.is_empty()).then(|| frame.around(pictures, 1))
}

fn peak(report: &Report<'_>, device: &Device, hidden: &mut Hidden<'_>) -> Drawing {
    // A grouping in which no memory has a category is not shown.
    let has_names = |by: &GroupBy| !report.composition(&device.peak, *by).categories.is_empty();
    let mut shown: Vec<GroupBy> =
        [GroupBy::Layer, GroupBy::Structure].into_iter().filter(has_names).collect();
    if shown.is_empty() {
        shown.push(GroupBy::Tag);
    }
    let all = shown.into_iter().map(|by| {
        let what = if device.peak.tracked_bytes.is_some() { by_name(by) } else { "used" };
        hidden.hide(bar(report, &device.peak, by, &titled(report, device, what)))
    });
    bars(&all.collect::<Vec<Bar>>())
}

fn categories(report: &Report<'_>, device: &Device, hidden: &mut Hidden<'_>) -> Drawing {
    let what = titled(report, device, by_name(report.by));
    let bar = hidden.hide(bar(report, &device.peak, report.by, &what));
    let kept = bar::largest(std::slice::from_ref(&bar), MOST_ROWS);
    rows(&[bar::folded(&bar, &kept)], 380.0, 240.0).remove(0)
}

/// Draws a panel of horizontal bars for each of `all`. All panels have one scale and the same rows.
fn rows(all: &[Bar], width: f64, longest: f64) -> Vec<Drawing> {
    let low = all.iter().map(|bar| bar.parts_span().0).min().unwrap_or(0);
    let high = all.iter().map(|bar| bar.parts_span().1).max().unwrap_or(0);
    let (names, ranks, axis) = (&rows_of(all), &bar::largest(all, RANKS), Axis::new(low, high));
    let rows = Rows { names, ranks, axis, width, longest };
    all.iter().map(|bar| rows.panel(bar)).collect()
}

fn over_time(report: &Report<'_>, options: &Options) -> Result<Drawing, NothingToDraw> {
    // All devices share one time axis.
    let spans = report.run.devices.iter().filter_map(timeline::span);
    let span = spans.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or_default();
    let drawn = of_devices(report, options, |device, hidden| {
        hidden.hide(bar(report, &device.peak, report.by, &titled(report, device, "")));
        let names: Vec<String> = hidden.names.iter().map(|(name, _)| name.clone()).collect();
        timeline::timeline(report, device, report.by, &names, span)
    });
    let why = "no data over time: the run was made by an older version, or nothing was observed";
    drawn.ok_or_else(|| NothingToDraw(why.into()))
}

fn compare(reports: &[Report<'_>], options: &Options) -> Result<Drawing, NothingToDraw> {
    /// Maximum number of panels of a picture: eight by eight.
    const MOST: usize = 64;
    let by = reports.first().map_or(GroupBy::Layer, |report| report.by);
    let all = reports.iter().flat_map(|report| {
        let title = |device: &Device| titled(report, device, &run_name(report));
        report.run.devices.iter().map(move |device| bar(report, &device.peak, by, &title(device)))
    });
    let all: Vec<Bar> = all.collect();
    if all.len() > MOST {
        return Err(NothingToDraw(format!("{} panels are too many; at most {MOST} can be drawn", all.len())));
    }
    let (all, names) = match options.hide_below {
        Some(percent) => bar::hide(&all, percent),
        None => (all, Vec::new()),
    };
    let peaks = plural(all.len() as u64, "peak");
    let what = format!("GPU memory at the peak of tracked, {}", by_name(by));
    let mut frame = Frame {
        title: options.title.clone().unwrap_or_else(|| format!("{peaks} side by side")),
        lines: vec![format!("{what}; one scale, one order, one set of colours")],
        notes: Hidden { options, names }.note().into_iter().collect(),
    };
    // A note that holds for all runs is shown once.
    let all_notes: Vec<_> = reports.iter().map(|report| (run_name(report), notes(report))).collect();
    for (name, own) in &all_notes {
        for note in own {
            let is_common = all_notes.iter().all(|(_, other)| other.contains(note));
            let note = if is_common { note.clone() } else { format!("{name}: {note}") };
            if !frame.notes.contains(&note) {
                frame.notes.push(note);
            }
        }
    }
    if let [_, _] = all.as_slice() {
        return Ok(frame.around(vec![bars(&all)], 1));
    }
    let ranks = bar::largest(&all, RANKS);
    let all: Vec<Bar> = all.iter().map(|bar| bar::merged(bar::folded(bar, &ranks))).collect();
    let columns = (1..).find(|columns| columns * columns >= all.len()).unwrap_or(1);
    Ok(frame.around(rows(&all, 170.0, 130.0), columns))
}

/// Returns the name of a run among other runs: its id or file, because commands are often the same.
fn run_name(report: &Report<'_>) -> String {
    let run = report.run;
    match &report.id {
        Some(id) => format!("{id} {}", label(run)),
        None if run.source.kind == "daemon" => format!("{} {}", run.process.pid, label(run)),
        None => escape(&run.source.origin),
    }
}

/// Categories that were summed into one part because they are small.
struct Hidden<'o> {
    options: &'o Options,
    names: Vec<(String, i64)>,
}

impl Hidden<'_> {
    fn hide(&mut self, bar: Bar) -> Bar {
        let Some(percent) = self.options.hide_below else { return bar };
        let (bars, names) = bar::hide(std::slice::from_ref(&bar), percent);
        self.names.extend(names);
        bars.into_iter().next().unwrap_or(bar)
    }

    fn note(&self) -> Option<String> {
        const NAMED: usize = 20;
        let percent = self.options.hide_below.filter(|_| !self.names.is_empty())?;
        let amount = |bytes: i64| Unit::for_largest(bytes).amount_with_name(bytes);
        let named = self.names.iter().map(|(name, bytes)| format!("{name} {}", amount(*bytes)));
        Some(format!("hidden (at most {percent} % of the total): {}", listed(named, NAMED)))
    }
}

/// Returns the name of a grouping in titles.
pub(crate) fn by_name(by: GroupBy) -> &'static str {
    match by {
        GroupBy::Layer => "by layer",
        GroupBy::Structure => "by data structure",
        GroupBy::Tag => "by tag",
    }
}

fn frame(report: &Report<'_>, options: &Options) -> Frame {
    let run = report.run;
    let label = label(run);
    let mut about = Vec::new();
    if options.title.is_some() {
        about.push(label.clone());
    }
    about.extend(report.id.as_ref().map(|id| format!("run {id}")));
    if run.source.kind != "daemon" && run.source.origin != label {
        about.push(run.source.origin.clone());
    }
    if run.process.pid != 0 {
        about.push(format!("pid {}", run.process.pid));
    }
    about.extend(run.process.facts.get("user").cloned());
    let mut lines = vec![about.join(", ")];
    lines.retain(|line| !line.is_empty());
    for device in &run.devices {
        let when = run.clock.time(device.peak.time_ns);
        let what = if run.coverage.covered { "at the peak of tracked" } else { "as NVML read it last" };
        lines.push(format!("{}, {what}, {when}", device_title(device)));
    }
    Frame { title: options.title.clone().unwrap_or(label), lines, notes: notes(report) }
}

/// Returns notes on the picture's numbers, such as reasons why they are not exact.
fn notes(report: &Report<'_>) -> Vec<String> {
    /// Maximum number of caveats of the run that the picture shows as notes.
    const CAVEATS: usize = 3;
    let run = report.run;
    let mut notes = Vec::new();
    for device in &run.devices {
        let moment = &device.peak;
        let of = if run.devices.len() > 1 { format!("GPU {}: ", device.ordinal) } else { String::new() };
        if moment.tracked_bytes.is_some() && moment.untrackable_bytes.is_none() {
            notes.push(format!(
                "{of}NVML has no reading for the process: Untrackable is unknown and not in the sum"
            ));
        } else if moment.gap_distance_ns != 0 {
            notes.push(format!("{of}Untrackable was measured {} the peak", gap_distance(run, moment)));
        }
        if moment.tracked_bytes.is_some() && moment.predates_bytes.is_none() {
            notes.push(format!("{of}memory older than the agent is unknown and not in the sum"));
        }
    }
    if run.coverage.partial_history {
        notes.push("records were lost: the peak is a lower bound".into());
    }
    notes.extend(run.caveats.iter().take(CAVEATS).map(|caveat| caveat.text.clone()));
    notes
}
