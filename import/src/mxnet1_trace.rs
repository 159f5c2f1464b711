//! Reads memory counters in the Chrome trace of MXNet 1.x's profiler.
//!
//! ```text
//! {"traceEvents": [ ..., {"name": "Memory: gpu/0", "cat": "Device Storage", "ph": "C", "ts": MICROSECONDS,
//!   "args": {"Memory: gpu/0": BYTES}, "pid": HASH, "tid": HASH}, ... ], "displayTimeUnit": "ms"}
//! ```
//!
//! After each allocation and free on a device, the trace has a counter value: the bytes that the program holds, without names.
//! The values are not sorted by time. The trace of a running program has no end. MXNet before 1.0 wrote no such counters.

use super::feed::{Feed, MAX_BYTES, Piece, ProcessFeed, Rejects};
use super::level::Total;
use super::lines::contains;
use super::objects::{Next, Objects};
use gpumem_model::run::Clock;
use gpumem_model::units::{plural, thousands};
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use gpumem_wire::{ClockKind, MemoryKind, Role};
use serde::Deserialize;
use std::borrow::Cow;
use std::collections::BTreeMap;

const EXAMPLE: &str =
    r#"{"name": "Memory: gpu/0", "ph": "C", "ts": 1559670489349250, "args": {"Memory: gpu/0": 201320}}"#;
/// Number of counter values that stay buffered, to sort them by time. With twice this number, the earlier half is emitted.
const WINDOW: usize = 1 << 20;
/// A time in 2001, in microseconds since 1970. Times before it are not taken for wall-clock times.
const FIRST_WALL_US: u64 = 1_000_000_000_000_000;
/// Maximum number of counters that are read, one for each kind of memory.
const MAX_COUNTERS: usize = 64;

pub(super) fn looks_like(head: &[u8]) -> bool {
    let has = |needle: &[u8]| contains(head, needle);
    let is_trace = is_array(head) || has(b"\"traceEvents\"");
    is_trace && (has(b"\"Memory: gpu/") || has(b"\"Device Storage\"") || has(b"\"cpu pinned/\""))
}

/// Returns whether a file begins inside a JSON array. A second dump to the same file begins with a comma.
fn is_array(head: &[u8]) -> bool {
    matches!(head.iter().find(|byte| !byte.is_ascii_whitespace()), Some(b'[' | b','))
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    ph: Cow<'a, str>,
    ts: Number,
    args: BTreeMap<String, Number>,
}

/// A whole number; MXNet may write it as a float.
#[derive(Deserialize, Clone, Copy)]
#[serde(untagged)]
enum Number {
    Whole(u64),
    Broken(f64),
}

impl Number {
    fn whole(self) -> Option<u64> {
        match self {
            Number::Whole(number) => Some(number),
            Number::Broken(number) if (0.0..9e15).contains(&number) => Some(number as u64),
            Number::Broken(_) => None,
        }
    }
}

/// The memory that a counter counts: the GPU's number (`None` for host memory), and a name: `gpu/0`, `cpu/0`, `cpu pinned`.
type Place = (Option<u8>, String);

fn place(counter: &str) -> Option<Place> {
    let name = counter.strip_prefix("Memory: ")?;
    if let Some(number) = name.strip_prefix("gpu/") {
        let number: u8 = number.parse().ok()?;
        return Some((Some(number), format!("gpu/{number}")));
    }
    name.starts_with("cpu").then(|| (None, name.trim_end_matches('/').chars().take(64).collect()))
}

#[derive(Debug, Default)]
struct Counter {
    /// Number of values of the counter.
    readings: u64,
    peak: u64,
    last: u64,
    first_us: u64,
    last_us: u64,
    /// Sum of each value times the time that it lasted, in bytes times microseconds.
    integral: u128,
    total: Total,
}

impl Counter {
    fn add(&mut self, time_us: u64, bytes: u64) {
        if self.readings == 0 {
            (self.first_us, self.last_us) = (time_us, time_us);
        }
        self.integral += u128::from(self.last) * u128::from(time_us.saturating_sub(self.last_us));
        self.readings += 1;
        self.peak = self.peak.max(bytes);
        (self.last, self.last_us) = (bytes, time_us.max(self.last_us));
    }

    /// Returns the mean over the time from the first to the last value.
    fn mean(&self) -> u64 {
        let width = u128::from(self.last_us - self.first_us);
        self.integral.checked_div(width).map_or(self.last, |mean| u64::try_from(mean).unwrap_or(u64::MAX))
    }

    fn sentence(&self, name: &str) -> String {
        let clock = Clock::Monotonic { wall_offset_ns: None };
        let width_ns = (self.last_us - self.first_us).saturating_mul(1000);
        format!(
            "{name}: peak {} bytes, time-weighted mean {} bytes over {}, {}",
            thousands(self.peak),
            thousands(self.mean()),
            clock.distance(width_ns),
            plural(self.readings, "reading")
        )
    }
}

struct Reading {
    time_us: u64,
    bytes: u64,
    /// Index of the counter in the list of counters.
    counter: usize,
}

struct Trace<'s> {
    feed: Feed<'s>,
    process: ProcessFeed,
    counters: Vec<(Place, Counter)>,
    window: Vec<Reading>,
    /// Time of the first emitted value, at which the run's clock begins.
    first_us: Option<u64>,
    /// Time of the last emitted value.
    emitted_us: u64,
    /// Number of values that came after later values had been emitted.
    late: u64,
}

impl<'s> Trace<'s> {
    /// Parses an event and buffers its counter value, if it has one. `None` if the event is invalid.
    fn add(&mut self, bytes: &[u8]) -> Option<()> {
        let event: Event<'_> = serde_json::from_slice(bytes).ok()?;
        if event.ph != "C" || !event.name.starts_with("Memory: ") {
            return Some(());
        }
        let value = event.args.get(&*event.name).or_else(|| event.args.values().next())?;
        let bytes = value.whole().filter(|bytes| *bytes <= MAX_BYTES)?;
        let time_us = event.ts.whole()?;
        let place = place(&event.name)?;
        let known = self.counters.iter().position(|(known, _)| *known == place);
        let index = known.unwrap_or(self.counters.len());
        if known.is_none() {
            if index >= MAX_COUNTERS {
                return None;
            }
            self.counters.push((place, Counter::default()));
        }
        self.window.push(Reading { time_us, bytes, counter: index });
        if self.window.len() == 2 * WINDOW {
            self.emit_earliest(WINDOW);
        }
        Some(())
    }

    fn emit_earliest(&mut self, count: usize) {
        self.window.sort_by_key(|reading| reading.time_us); // stable: values of the same microsecond keep their order
        let later = self.window.split_off(count.min(self.window.len()));
        let now = std::mem::replace(&mut self.window, later);
        let Some(first) = now.first() else { return };
        let first_us = *self.first_us.get_or_insert_with(|| {
            if first.time_us >= FIRST_WALL_US {
                self.feed.anchor(ClockKind::Wall, first.time_us.saturating_mul(1000));
            }
            first.time_us
        });
        self.emitted_us = self.emitted_us.max(first_us);
        for reading in now {
            self.late += u64::from(reading.time_us < self.emitted_us);
            self.emitted_us = self.emitted_us.max(reading.time_us);
            self.feed.time_ns = (self.emitted_us - first_us).saturating_mul(1000);
            let Some((place, counter)) = self.counters.get_mut(reading.counter) else { continue };
            counter.add(self.emitted_us, reading.bytes);
            if let (Some(slot), _) = *place {
                counter.total.set(&mut self.process, &mut self.feed, slot, reading.bytes);
            }
        }
    }
}

pub(super) fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let path = input.path.clone();
    let is_array = is_array(input.head());
    let mut objects = Objects::new(input.into_reader(), b"\"traceEvents\"", is_array);
    let mut trace = Trace {
        feed: Feed::new(sink),
        process: ProcessFeed::default(),
        counters: Vec::new(),
        window: Vec::new(),
        first_us: None,
        emitted_us: 0,
        late: 0,
    };
    let (mut events, mut rejects) = (0_u64, Rejects::default());
    let end = loop {
        let offset = objects.offset;
        let next = objects.next().map_err(|source| Error::Read { path: path.clone(), offset, source })?;
        let is_read = match next {
            // A trace has thousands of other events for each memory event, so only memory events are parsed.
            Next::Object => !contains(&objects.bytes, b"\"Memory: ") || trace.add(&objects.bytes).is_some(),
            Next::Bad => false,
            end => break end,
        };
        events += 1;
        if !is_read {
            rejects.add(|| events.to_string());
        }
    };
    trace.emit_earliest(usize::MAX);
    let Trace { mut feed, mut process, counters, first_us, late, .. } = trace;
    if first_us.is_none() {
        let what = format!(
            "none of its {} is a counter of memory; MXNet writes them from 1.0 on, with profile_memory. One looks like: {EXAMPLE}",
            plural(events, "event")
        );
        return Err(Error::Unsuitable { path, what });
    }
    feed.sink.reject(rejects.count);
    feed.rejects = rejects;
    caveats(&counters, &end, [objects.offset, events, late], &mut feed);
    feed.caveat_rejects("event", "event", EXAMPLE);
    pinned(&counters, &mut process, &mut feed);
    process.end(&mut feed);
    Ok(())
}

/// Adds the caveats of the run. `end` is how the trace ended: at byte `offset`, after `events` events.
fn caveats(counters: &[(Place, Counter)], end: &Next, [offset, events, late]: [u64; 3], feed: &mut Feed<'_>) {
    let sentences = |is_gpu: bool| {
        let mut all: Vec<_> = counters.iter().filter(|((gpu, _), _)| gpu.is_some() == is_gpu).collect();
        all.sort_by_key(|(place, _)| place);
        all.iter().map(|((_, name), counter)| counter.sentence(name)).collect::<Vec<_>>().join("; ")
    };
    let (gpus, hosts) = (sentences(true), sentences(false));
    let (offset, after) = (thousands(offset), plural(events, "event"));
    let no_names = "a trace has amounts and no names: memory in use by the program, without memory that its pool caches and \
                    without the driver's share";
    let late_readings =
        format!("{} far out of order; each got the time of the one before", plural(late, "reading"));
    let cut = format!("the trace ends at byte {offset} without its closing bracket, after {after}");
    let hole = format!("there is no event for 16 MiB up to byte {offset}: nothing after it was read");
    feed.caveats([
        ("no_names", true, no_names.to_owned()),
        ("means", !gpus.is_empty(), gpus),
        ("host_memory", !hosts.is_empty(), format!("host memory, in no sum: {hosts}")),
        ("cut", matches!(end, Next::Cut), cut),
        ("endless_line", matches!(end, Next::Hole), hole),
        ("late_readings", late > 0, late_readings),
    ]);
}

/// Emits the last value of page-locked memory as host memory, which no GPU's sum includes. Records need a device, so the first
/// GPU gets it.
fn pinned(counters: &[(Place, Counter)], process: &mut ProcessFeed, feed: &mut Feed<'_>) {
    let gpus = counters.iter().filter_map(|((gpu, _), _)| *gpu);
    let pinned = counters.iter().find(|((_, name), counter)| name == "cpu pinned" && counter.last > 0);
    if let (Some(slot), Some((_, counter))) = (gpus.min(), pinned) {
        let tag = process.tag(feed, "cpu pinned");
        let piece = Piece::new(slot, counter.last, tag, Role::Unknown);
        process.allocate(feed, Piece { memory: MemoryKind::Pinned, ..piece });
    }
}
