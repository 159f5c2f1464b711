//! A run as a trace for Perfetto and chrome://tracing (Trace Event Format): one process, a thread per device.
//!
//! ```text
//! M  process_name, thread_name        who; what a thread's rows are
//! C  GPU 0 used                       {"bytes"}  as NVML read it
//! C  GPU 0 tracked                    {"bytes"}  at exact moments, the peak among them
//! C  GPU 0 untrackable                {"bytes"}
//! C  GPU 0 by layer                   {category: bytes, ...}  the same moments; sums to tracked
//! X  step 17                          an iteration, with what it held
//! i  OOM, gap +12.0 MiB: ...          when memory ran out; when the gap changed
//! ```
//!
//! Times are microseconds since the first thing in the trace; `otherData` says what that is on the run's own clock. Lines of
//! a log, which have no time, are a microsecond each. Events are in the order of their times.

use super::text::{device_name, label};
use super::units::Unit;
use super::{By, Report};
use crate::harmless::in_json;
use crate::marks::Mark;
use crate::plot;
use crate::run::{Clock, Device, Fate, Iteration, Moment, Oom, Step};
use serde_json::{Map, Value, json};

/// Categories of a counter at most, the largest; the rest is one.
const CATEGORIES: usize = 60;

/// An event before its time is known relative to the first.
struct Event {
    time_ns: u64,
    /// Length, of a piece of time.
    length_ns: Option<u64>,
    phase: &'static str,
    name: String,
    thread: u32,
    args: Map<String, Value>,
}

/// The document.
pub fn json(report: &Report<'_>) -> String {
    let run = report.run;
    let pid = if run.process.pid == 0 { 1 } else { run.process.pid };
    let mut lines: Vec<Value> = Vec::new();
    let mut about = |name: &str, thread: u32, key: &str, value: Value| {
        lines.push(json!({ "ph": "M", "name": name, "pid": pid, "tid": thread, "args": { key: value } }));
    };
    about("process_name", 0, "name", label(run).into());
    if run.clock == Clock::Lines {
        about("process_labels", 0, "labels", "a microsecond is a line of the log".into());
    }
    let mut events = Vec::new();
    for (thread, device) in (1_u32..).zip(&run.devices) {
        about("thread_name", thread, "name", device_name(device).into());
        about("thread_sort_index", thread, "sort_index", thread.into());
        of_device(report, device, thread, &mut events);
    }
    // Stable: what is at the same time stays in the order in which it was said.
    events.sort_by_key(|event| event.time_ns);
    let first_ns = events.first().map_or(0, |event| event.time_ns);
    lines.extend(events.into_iter().map(|event| event.line(first_ns, pid, run.clock)));
    let other = json!({
        "generator": "gpumemd",
        "first_ns": first_ns,
        "clock": run.clock,
        "source": run.source.kind,
        "origin": run.source.origin,
    });
    let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
    let document = format!(
        "{{\"displayTimeUnit\":\"ms\",\"otherData\":{other},\"traceEvents\":[\n{}\n]}}\n",
        lines.join(",\n")
    );
    in_json(&document, |_| false)
}

impl Event {
    fn line(self, first_ns: u64, pid: u32, clock: Clock) -> Value {
        let micros = |ns: u64| match clock {
            Clock::Lines => ns as f64,
            Clock::Monotonic { .. } => ns as f64 / 1000.0,
        };
        let mut line = json!({
            "ph": self.phase,
            "name": self.name,
            "pid": pid,
            "tid": self.thread,
            "ts": micros(self.time_ns - first_ns),
            "args": self.args,
        });
        if let Some(line) = line.as_object_mut() {
            if let Some(length_ns) = self.length_ns {
                line.insert("dur".into(), micros(length_ns).into());
            }
            if self.phase == "i" {
                line.insert("s".into(), "t".into());
            }
        }
        line
    }
}

/// The counters of a device.
struct Counters {
    name: String,
    thread: u32,
}

impl Counters {
    fn event(&self, time_ns: u64, what: &str, args: Map<String, Value>) -> Event {
        let name = format!("{} {what}", self.name);
        Event { time_ns, length_ns: None, phase: "C", name, thread: self.thread, args }
    }

    fn bytes(&self, time_ns: u64, what: &str, bytes: i64) -> Event {
        self.event(time_ns, what, Map::from_iter([("bytes".to_owned(), bytes.into())]))
    }
}

fn of_device(report: &Report<'_>, device: &Device, thread: u32, events: &mut Vec<Event>) {
    let counters = Counters { name: format!("GPU {}", device.ordinal), thread };
    let buckets = &device.series.buckets;
    let is_point = |time_ns: u64| device.peak_used.is_some_and(|(_, peak_ns)| peak_ns == time_ns);
    for bucket in buckets {
        // Of several readings in a bucket the last is known to be the last; the highest has its own time below.
        if let Some(used) = bucket.used.filter(|_| !is_point(bucket.time_ns)) {
            events.push(counters.bytes(bucket.time_ns, "used", used.last));
        }
        if let Some(untrackable) = bucket.untrackable {
            events.push(counters.bytes(bucket.time_ns, "untrackable", untrackable.last));
        }
    }
    if let Some((used, time_ns)) = device.peak_used {
        events.push(counters.bytes(time_ns, "used", i64::try_from(used).unwrap_or(i64::MAX)));
    }
    held(report, device, &counters, events);
    let rows = device.details.iterations.rows.iter().chain(&device.details.iterations.open);
    events.extend(rows.map(|row| iteration(row, thread)));
    events.extend(device.details.ooms.iter().map(|entry| oom(entry, thread)));
    events.extend(device.details.steps.iter().filter(|step| step.time_ns != 0).map(|step| gap(step, thread)));
    // Marks are of the process: once, in the first row.
    if report.run.devices.first().is_some_and(|first| std::ptr::eq(first, device)) {
        events.extend(report.run.coverage.marks.iter().map(|named| mark(named, thread)));
    }
}

fn mark(mark: &Mark, thread: u32) -> Event {
    let name = mark.name.clone().unwrap_or_else(|| "(its name was lost)".to_owned());
    let args = Map::from_iter([("by".to_owned(), mark.by.clone().into())]);
    Event { time_ns: mark.time_ns, length_ns: None, phase: "i", name, thread, args }
}

/// `tracked`, whole and by category, at the moments at which it is exact.
fn held(report: &Report<'_>, device: &Device, counters: &Counters, events: &mut Vec<Event>) {
    let what = match report.by {
        By::Layer => "by layer",
        By::Structure => "by structure",
        By::Tag => "by tag",
    };
    let moments = moments(device);
    let bars: Vec<plot::Bar> =
        moments.iter().map(|moment| plot::bar(report, moment, report.by, "")).collect();
    let (names, bars) = plot::folded_to(&bars, CATEGORIES);
    for (moment, bar) in moments.iter().zip(&bars) {
        let tracked = moment.tracked_bytes.unwrap_or(0);
        events.push(counters.bytes(moment.time_ns, "tracked", tracked));
        // A counter keeps what it is not told: every name each time.
        let of = |name: &String| -> i64 {
            let own = bar.segments.iter().filter(|part| part.name == *name);
            own.map(|part| part.bytes).fold(0, i64::saturating_add)
        };
        let parts = names.iter().map(|name| (name.clone(), of(name).into()));
        events.push(counters.event(moment.time_ns, what, parts.collect()));
    }
    if moments.is_empty() {
        // A run of an older version: buckets, whose highest has no exact time.
        for (bucket, tracked) in
            device.series.buckets.iter().filter_map(|bucket| Some((bucket, bucket.tracked?)))
        {
            events.push(counters.bytes(bucket.time_ns, "tracked", tracked.last));
        }
    }
}

/// What was held over time, the peak, and the end; without what is not `tracked`.
fn moments(device: &Device) -> Vec<Moment> {
    let of = |time_ns: u64, amounts: &[(u32, i64)], rest: i64| Moment {
        time_ns,
        tracked_bytes: Some(amounts.iter().map(|(_, bytes)| *bytes).fold(rest, i64::saturating_add)),
        // What no cell of the point has is of no cell: `Others`.
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

fn iteration(row: &Iteration, thread: u32) -> Event {
    let name = match row.first == row.last {
        true => format!("step {}", row.first),
        false => format!("steps {} to {}", row.first, row.last),
    };
    let levels = [
        ("tracked_peak_bytes", row.tracked.peak_bytes),
        ("activations_peak_bytes", row.activations.peak_bytes),
        ("temporaries_peak_bytes", row.temporaries.peak_bytes),
    ];
    let args = levels.into_iter().map(|(name, bytes)| (name.to_owned(), bytes.into()));
    Event {
        time_ns: row.start_ns,
        length_ns: Some(row.end_ns.saturating_sub(row.start_ns)),
        phase: "X",
        name,
        thread,
        args: args.collect(),
    }
}

fn oom(entry: &Oom, thread: u32) -> Event {
    let fate = match entry.fate {
        Fate::Open => "open",
        Fate::Fatal { .. } => "fatal",
        Fate::Survived => "survived",
    };
    let mut args = Map::from_iter([
        ("asked_bytes".to_owned(), entry.asked_bytes.into()),
        ("fate".to_owned(), fate.into()),
        ("count".to_owned(), entry.count.into()),
    ]);
    let texts = [("tag", &entry.tag), ("phase", &entry.phase)];
    args.extend(texts.into_iter().filter_map(|(name, text)| Some((name.to_owned(), text.clone()?.into()))));
    args.extend(entry.free_bytes().map(|bytes| ("free_bytes".to_owned(), bytes.into())));
    let name = if entry.is_true() { "OOM" } else { "memory pressure" };
    Event { time_ns: entry.time_ns, length_ns: None, phase: "i", name: name.into(), thread, args }
}

fn gap(step: &Step, thread: u32) -> Event {
    let unit = Unit::for_largest(step.bytes);
    let sign = if step.bytes < 0 { "" } else { "+" };
    let name = format!("gap {sign}{} {}: {}", unit.amount(step.bytes), unit.name, step.cause);
    let mut args = Map::from_iter([
        ("bytes".to_owned(), step.bytes.into()),
        ("cause".to_owned(), step.cause.clone().into()),
        ("kind".to_owned(), step.kind.clone().into()),
    ]);
    let texts = [("tag", &step.tag), ("library", &step.library)];
    args.extend(texts.into_iter().filter_map(|(name, text)| Some((name.to_owned(), text.clone()?.into()))));
    Event { time_ns: step.time_ns, length_ns: None, phase: "i", name, thread, args }
}
