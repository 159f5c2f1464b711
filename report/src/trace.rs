//! Writes a run as a trace for Perfetto and chrome://tracing (Trace Event Format): one process, with a thread for each device.
//!
//! ```text
//! M  process_name, thread_name        the process; the meaning of a thread's rows
//! C  GPU 0 used                       {"bytes"}  as NVML read it
//! C  GPU 0 tracked                    {"bytes"}  at exact moments, the peak among them
//! C  GPU 0 untrackable                {"bytes"}
//! C  GPU 0 by layer                   {category: bytes, ...}  the same moments; sums to tracked
//! X  step 17                          an iteration, with its memory
//! C  counter batch                    {"value"}  of the program's own
//! X  load/decode                      a range of the program's own, in a row of its thread; only the latest ones
//! i  OOM, gap +12.0 MiB: ...          an OOM; a change of the gap
//! ```
//!
//! Times are microseconds since the first event of the trace; `otherData` gives that event's time on the run's own clock. Lines
//! of imported logs have no time, so each line counts as a microsecond. Events are in the order of time.
//!
//! Events are written one by one, and the amounts by category of an event become JSON only when it is written. The number of
//! events of a run is bounded, regardless of the number of its records.

use super::{Report, sum};
use crate::labels::{device_name, label};
use crate::plot;
use gpumem_model::escape::escape_json;
use gpumem_model::program_data::{LOST, ProgramData, Span};
use gpumem_model::run::{Clock, Device, Fate, Iteration, Mark, Moment, Oom, UntrackableChange};
use gpumem_model::units::{Unit, signed};
use serde_json::{Map, Value, json};
use std::cmp::Reverse;
use std::io::{self, Write};

/// Maximum number of categories in a counter event: the largest ones. The others are summed as one.
const CATEGORIES: usize = 60;

/// An event before it is written. Its time is absolute; the file has the time since the first event.
#[derive(Default)]
struct Event<'r> {
    time_ns: u64,
    length_ns: Option<u64>,
    /// Kind of the event in the trace format: `C` counter, `X` interval, `i` instant.
    phase: &'static str,
    name: String,
    thread: u32,
    /// Arguments of the event; those that are null are not written.
    values: Vec<(&'static str, Value)>,
    /// Further arguments of a counter event: names, and one amount for each name.
    amounts: (&'r [String], &'r [i64]),
}

/// Returns the trace as a JSON string.
pub fn json(report: &Report<'_>) -> String {
    let mut out = Vec::new();
    // Writes to memory cannot fail, and JSON is UTF-8.
    let _ = write(report, &mut out);
    String::from_utf8(out).unwrap_or_default()
}

/// Writes the trace as JSON, event by event.
pub fn write(report: &Report<'_>, out: &mut dyn Write) -> io::Result<()> {
    let run = report.run;
    let pid = if run.process.pid == 0 { 1 } else { run.process.pid };
    let mut about: Vec<Value> = Vec::new();
    let mut metadata = |name: &str, thread: u32, key: &str, value: Value| {
        about.push(json!({ "ph": "M", "name": name, "pid": pid, "tid": thread, "args": { key: value } }));
    };
    metadata("process_name", 0, "name", label(run).into());
    if run.clock == Clock::Lines {
        metadata("process_labels", 0, "labels", "one microsecond stands for a line of the log".into());
    }
    let tracked: Vec<Tracked> = run.devices.iter().map(|device| Tracked::of(report, device)).collect();
    let mut events = Vec::new();
    for (thread, (device, tracked)) in (1_u32..).zip(run.devices.iter().zip(&tracked)) {
        metadata("thread_name", thread, "name", device_name(device).into());
        metadata("thread_sort_index", thread, "sort_index", thread.into());
        of_device(report, device, tracked, thread, &mut events);
    }
    let rows = ranges(&run.own, run.devices.len() as u32 + 1, &mut events);
    for (thread, name) in rows {
        metadata("thread_name", thread, "name", name.into());
        metadata("thread_sort_index", thread, "sort_index", thread.into());
    }
    counters(&run.own, &mut events);
    if run.devices.is_empty() {
        events.extend(run.coverage.marks.iter().map(|named| mark(named, 0)));
    }
    // The sort is stable: events with the same time keep their order.
    events.sort_by_key(|event| event.time_ns);
    let first_ns = events.first().map_or(0, |event| event.time_ns);
    let (clock, source, origin) = (run.clock, &run.source.kind, &run.source.origin);
    let other = json!({ "generator": "gpumemd", "first_ns": first_ns, "clock": clock, "source": source, "origin": origin });
    let harmless = |value: &Value| escape_json(&value.to_string(), |_| false);
    write!(out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[", harmless(&other))?;
    let lines = about.into_iter().chain(events.iter().map(|event| event.json(first_ns, pid, run.clock)));
    for (number, line) in lines.enumerate() {
        write!(out, "{}{}", if number == 0 { "\n" } else { ",\n" }, harmless(&line))?;
    }
    out.write_all(b"\n]}\n")
}

impl<'r> Event<'r> {
    fn new<const N: usize>(
        phase: &'static str,
        time_ns: u64,
        name: impl Into<String>,
        thread: u32,
        values: [(&'static str, Value); N],
    ) -> Self {
        let (name, values) = (name.into(), values.into());
        Event { time_ns, phase, name, thread, values, ..Event::default() }
    }

    /// Makes the event an interval that ends at `end_ns`.
    fn until(self, end_ns: u64) -> Self {
        Event { length_ns: Some(end_ns.saturating_sub(self.time_ns)), ..self }
    }

    fn json(&self, first_ns: u64, pid: u32, clock: Clock) -> Value {
        let micros = |ns: u64| match clock {
            Clock::Lines => ns as f64,
            Clock::Monotonic { .. } => ns as f64 / 1000.0,
        };
        let values = self.values.iter().filter(|(_, value)| !value.is_null());
        let values = values.map(|(name, value)| ((*name).to_owned(), value.clone()));
        let amounts = self.amounts.0.iter().cloned().zip(self.amounts.1.iter().map(|bytes| (*bytes).into()));
        let mut json = json!({
            "ph": self.phase,
            "name": self.name,
            "pid": pid,
            "tid": self.thread,
            "ts": micros(self.time_ns - first_ns),
            "args": values.chain(amounts).collect::<Map<_, _>>(),
        });
        if let Some(length_ns) = self.length_ns {
            json["dur"] = micros(length_ns).into();
        }
        if self.phase == "i" {
            json["s"] = "t".into();
        }
        json
    }
}

fn of_device<'r>(
    report: &Report<'r>,
    device: &'r Device,
    tracked: &'r Tracked,
    thread: u32,
    events: &mut Vec<Event<'r>>,
) {
    let counter = |what: &str, time_ns: u64, bytes: i64| {
        let name = format!("GPU {} {what}", device.ordinal);
        Event::new("C", time_ns, name, thread, [("bytes", bytes.into())])
    };
    let is_peak = |time_ns: u64| device.peak_used.is_some_and(|(_, peak_ns)| peak_ns == time_ns);
    for bucket in &device.series.buckets {
        // Only the last reading of a bucket becomes an event, because the times of its other readings are unknown. The peak has
        // its own time and is added below.
        let used = bucket.used.filter(|_| !is_peak(bucket.time_ns));
        let values = [("used", used), ("untrackable", bucket.untrackable)];
        events.extend(
            values.iter().filter_map(|(what, value)| Some(counter(what, bucket.time_ns, (*value)?.last))),
        );
    }
    events.extend(device.peak_used.map(|(used, time_ns)| counter("used", time_ns, signed(used))));
    for (moment, amounts) in tracked.moments.iter().zip(&tracked.amounts) {
        events.push(counter("tracked", moment.time_ns, moment.tracked_bytes.unwrap_or(0)));
        let name = format!("GPU {} by {}", device.ordinal, report.by.name());
        // A viewer keeps the last value of a name that an event lacks, so each event has all names.
        let event = Event::new("C", moment.time_ns, name, thread, []);
        events.push(Event { amounts: (&tracked.names, amounts), ..event });
    }
    if tracked.moments.is_empty() {
        // Runs of older versions have only buckets (intervals): each one's last value is used, as the time of its highest is
        // unknown.
        let buckets = device.series.buckets.iter();
        events.extend(
            buckets.filter_map(|bucket| Some(counter("tracked", bucket.time_ns, bucket.tracked?.last))),
        );
    }
    let rows = device.details.iterations.rows.iter().chain(&device.details.iterations.open);
    events.extend(rows.map(|row| iteration(row, thread)));
    events.extend(device.details.ooms.iter().map(|entry| oom(entry, thread)));
    events.extend(device.details.steps.iter().filter(|step| step.time_ns != 0).map(|step| gap(step, thread)));
    // Marks (times that the program named) belong to the process: they are written once, in the thread of the first device.
    if report.run.devices.first().is_some_and(|first| std::ptr::eq(first, device)) {
        events.extend(report.run.coverage.marks.iter().map(|named| mark(named, thread)));
    }
}

/// Adds an event for each change of the program's counters.
fn counters(own: &ProgramData, events: &mut Vec<Event<'_>>) {
    for counter in &own.counters {
        let name = format!("counter {}", counter.name.as_deref().unwrap_or(LOST));
        // The last value is repeated at the end of the counter's life, so that its line extends to there.
        let last = (counter.until_ns, counter.value);
        let is_new = counter.points.last().is_none_or(|(time_ns, _)| *time_ns < last.0);
        let points = counter.points.iter().copied().chain(is_new.then_some(last));
        events.extend(
            points.map(|(time_ns, value)| Event::new("C", time_ns, &*name, 0, [("value", value.into())])),
        );
    }
}

/// Adds the program's ranges. Returns the ids of the rows, starting at `first`, with their names. NVTX permits ranges of a thread
/// that overlap without being nested; such a range goes to an additional row.
fn ranges(own: &ProgramData, first: u32, events: &mut Vec<Event<'_>>) -> Vec<(u32, String)> {
    let mut spans: Vec<&Span> = own.spans.iter().collect();
    // Outer ranges come before those nested in them.
    spans.sort_by_key(|Span(_, thread, from_ns, to_ns)| (*thread, *from_ns, Reverse(*to_ns)));
    // For each row, the thread, and the ends of its ranges that enclose the present one.
    let mut rows: Vec<(u32, Vec<u64>)> = Vec::new();
    for &&Span(range, thread, from_ns, to_ns) in &spans {
        let fits = |(of, ends): &mut (u32, Vec<u64>)| {
            if *of == thread {
                ends.retain(|end_ns| *end_ns > from_ns);
            }
            *of == thread && ends.last().is_none_or(|end_ns| *end_ns >= to_ns)
        };
        let at = rows.iter_mut().position(fits).unwrap_or(rows.len());
        match rows.get_mut(at) {
            Some((_, ends)) => ends.push(to_ns),
            None => rows.push((thread, vec![to_ns])),
        }
        let name = own.ranges.get(range as usize).map_or(LOST, |range| range.title());
        let event = Event::new("X", from_ns, name, first + at as u32, [("thread", thread.into())]);
        events.push(event.until(to_ns));
    }
    (first..).zip(rows).map(|(row, (thread, _))| (row, format!("ranges of thread {thread}"))).collect()
}

fn mark<'r>(mark: &Mark, thread: u32) -> Event<'r> {
    let name = mark.name.as_deref().unwrap_or(LOST);
    Event::new("i", mark.time_ns, name, thread, [("by", mark.by.as_str().into())])
}

/// `tracked` in total and by category, at moments when it is exact.
struct Tracked {
    moments: Vec<Moment>,
    names: Vec<String>,
    /// For each moment, the bytes of each category in `names`.
    amounts: Vec<Vec<i64>>,
}

impl Tracked {
    fn of(report: &Report<'_>, device: &Device) -> Self {
        let moments = moments(device);
        let bars = moments.iter().map(|moment| plot::bar(report, moment, report.by, ""));
        let (names, bars) = plot::folded_to(&bars.collect::<Vec<_>>(), CATEGORIES);
        let of = |bar: &plot::Bar, name: &String| {
            sum(bar.segments.iter().filter(|part| part.name == *name).map(|part| part.bytes))
        };
        let amounts = bars.iter().map(|bar| names.iter().map(|name| of(bar, name)).collect()).collect();
        Tracked { moments, names, amounts }
    }
}

/// Returns the moments of the timeline, of the peak and of the end; only `tracked` and its amounts are set.
fn moments(device: &Device) -> Vec<Moment> {
    let of = |time_ns: u64, amounts: &[(u32, i64)], rest: i64| Moment {
        time_ns,
        tracked_bytes: Some(sum(amounts.iter().map(|(_, bytes)| *bytes).chain([rest]))),
        // Bytes of the point that belong to no cell get an index that no cell has, so they go to `Others`.
        amounts: amounts.iter().copied().chain((rest != 0).then_some((u32::MAX, rest))).collect(),
        ..Moment::default()
    };
    let points = &device.details.timeline.points;
    let ends = [&device.peak, &device.last].into_iter().filter(|moment| moment.tracked_bytes.is_some());
    let mut moments: Vec<Moment> = ends.map(|moment| of(moment.time_ns, &moment.amounts, 0)).collect();
    moments.dedup_by_key(|moment| moment.time_ns);
    let known: Vec<u64> = moments.iter().map(|moment| moment.time_ns).collect();
    let others = points.iter().filter(|point| !known.contains(&point.time_ns));
    moments.extend(others.map(|point| of(point.time_ns, &point.amounts, point.rest_bytes)));
    moments.sort_by_key(|moment| moment.time_ns);
    moments
}

fn iteration<'r>(row: &Iteration, thread: u32) -> Event<'r> {
    let name = match row.first == row.last {
        true => format!("step {}", row.first),
        false => format!("steps {} to {}", row.first, row.last),
    };
    let values = [
        ("tracked_peak_bytes", row.tracked.peak_bytes.into()),
        ("activations_peak_bytes", row.activations.peak_bytes.into()),
        ("temporaries_peak_bytes", row.temporaries.peak_bytes.into()),
    ];
    Event::new("X", row.start_ns, name, thread, values).until(row.end_ns)
}

fn oom<'r>(oom: &Oom, thread: u32) -> Event<'r> {
    let fate = match oom.fate {
        Fate::Open => "open",
        Fate::Fatal { .. } => "fatal",
        Fate::Survived => "survived",
    };
    let values = [
        ("asked_bytes", oom.asked_bytes.into()),
        ("fate", fate.into()),
        ("count", oom.count.into()),
        ("tag", json!(oom.tag)),
        ("phase", json!(oom.phase)),
        ("free_bytes", json!(oom.free_bytes())),
    ];
    let name = if oom.is_out_of_memory() { "OOM" } else { "memory pressure" };
    Event::new("i", oom.time_ns, name, thread, values)
}

fn gap<'r>(step: &UntrackableChange, thread: u32) -> Event<'r> {
    let unit = Unit::for_largest(step.bytes);
    let sign = if step.bytes < 0 { "" } else { "+" };
    let name = format!("Untrackable {sign}{}: {}", unit.amount_with_name(step.bytes), step.cause);
    let values = [
        ("bytes", step.bytes.into()),
        ("cause", step.cause.as_str().into()),
        ("kind", step.kind.as_str().into()),
        ("tag", json!(step.tag)),
        ("library", json!(step.library)),
    ];
    Event::new("i", step.time_ns, name, thread, values)
}
