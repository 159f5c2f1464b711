//! Reads memory counters in the Chrome trace of MXNet 1.x's profiler.
//!
//! ```text
//! {"traceEvents": [ ..., {"name": "Memory: gpu/0", "cat": "Device Storage", "ph": "C", "ts": MICROSECONDS,
//!   "args": {"Memory: gpu/0": BYTES}, "pid": HASH, "tid": HASH}, ... ], "displayTimeUnit": "ms"}
//! ```
//!
//! The trace has one counter value after each allocation and free on a device: the bytes that the program holds, without names.
//! Values are not sorted by time. A file that is written while the program runs has no end. MXNet 0.12 wrote no such counters.

use super::feed::{Feed, MAX_BYTES, Piece, Rejects, Speaker};
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
/// Number of counter values that are buffered to sort them by time. When the buffer is full, the earliest values are emitted.
const WINDOW: usize = 1 << 20;
/// A time in 2001, in microseconds since 1970; smaller values are not wall-clock times.
const FIRST_WALL_US: u64 = 1_000_000_000_000_000;
/// Maximum number of counters (kinds of memory) that are read.
const MAX_POOLS: usize = 64;

/// Returns whether a file begins like a trace with MXNet's memory counters.
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

/// The memory that a counter counts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Gpu(u8),
    /// Host memory: `cpu/0`, `cpu pinned`, `cpu shared`.
    Host(String),
}

impl Place {
    fn of(name: &str) -> Option<Place> {
        let name = name.strip_prefix("Memory: ")?;
        match name.strip_prefix("gpu/") {
            Some(number) => Some(Place::Gpu(number.parse().ok()?)),
            None => name
                .starts_with("cpu")
                .then(|| Place::Host(name.trim_end_matches('/').chars().take(64).collect())),
        }
    }

    fn name(&self) -> String {
        match self {
            Place::Gpu(number) => format!("gpu/{number}"),
            Place::Host(name) => name.clone(),
        }
    }
}

#[derive(Debug, Default)]
struct Counter {
    readings: u64,
    peak: u64,
    last: u64,
    first_us: u64,
    last_us: u64,
    /// Integral of the value over time: bytes times microseconds.
    integral: u128,
    total: Total,
}

impl Counter {
    fn take(&mut self, time_us: u64, bytes: u64) {
        if self.readings == 0 {
            (self.first_us, self.last_us) = (time_us, time_us);
        }
        self.integral += u128::from(self.last) * u128::from(time_us.saturating_sub(self.last_us));
        self.readings += 1;
        self.peak = self.peak.max(bytes);
        (self.last, self.last_us) = (bytes, time_us.max(self.last_us));
    }

    /// Returns the mean value between the first and the last counter value.
    fn mean(&self) -> u64 {
        let width = u128::from(self.last_us - self.first_us);
        self.integral.checked_div(width).map_or(self.last, |mean| u64::try_from(mean).unwrap_or(u64::MAX))
    }

    fn sentence(&self, place: &Place) -> String {
        let clock = Clock::Monotonic { wall_offset_ns: None };
        let width_ns = (self.last_us - self.first_us).saturating_mul(1000);
        format!(
            "{}: peak {} bytes, time-weighted mean {} bytes over {}, {}",
            place.name(),
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
    place: usize,
}

#[derive(Default)]
struct Trace<'s> {
    /// Output before the first value is emitted. It then becomes `feed`, because the clock begins at that value.
    sink: Option<&'s mut dyn Sink>,
    feed: Option<Feed<'s>>,
    speaker: Speaker,
    counters: Vec<(Place, Counter)>,
    window: Vec<Reading>,
    first_us: u64,
    /// Time of the last emitted value.
    told_us: u64,
    late: u64,
}

impl<'s> Trace<'s> {
    fn add(&mut self, bytes: &[u8]) -> Option<()> {
        let event: Event<'_> = serde_json::from_slice(bytes).ok()?;
        if event.ph != "C" || !event.name.starts_with("Memory: ") {
            return Some(());
        }
        let value = event.args.get(&*event.name).or_else(|| event.args.values().next())?;
        let bytes = value.whole().filter(|bytes| *bytes <= MAX_BYTES)?;
        let time_us = event.ts.whole()?;
        let place = Place::of(&event.name)?;
        let known = self.counters.iter().position(|(known, _)| *known == place);
        let index = known.unwrap_or(self.counters.len());
        if known.is_none() {
            if index >= MAX_POOLS {
                return None;
            }
            self.counters.push((place, Counter::default()));
        }
        self.window.push(Reading { time_us, bytes, place: index });
        if self.window.len() == 2 * WINDOW {
            self.tell(WINDOW);
        }
        Some(())
    }

    /// Emits the earliest `count` buffered values.
    fn tell(&mut self, count: usize) {
        self.window.sort_by_key(|reading| reading.time_us); // stable: values of the same microsecond keep their order
        let later = self.window.split_off(count.min(self.window.len()));
        let now = std::mem::replace(&mut self.window, later);
        if let (Some(sink), Some(first)) = (self.sink.take(), now.first()) {
            self.first_us = first.time_us;
            self.told_us = first.time_us;
            let mut feed = Feed::silent(sink);
            if first.time_us >= FIRST_WALL_US {
                feed.anchor(ClockKind::Wall, first.time_us.saturating_mul(1000));
            }
            self.feed = Some(feed);
        }
        let Some(feed) = &mut self.feed else { return };
        for reading in now {
            self.late += u64::from(reading.time_us < self.told_us);
            self.told_us = self.told_us.max(reading.time_us);
            feed.time_ns = (self.told_us - self.first_us).saturating_mul(1000);
            let Some((place, counter)) = self.counters.get_mut(reading.place) else { continue };
            counter.take(self.told_us, reading.bytes);
            if let Place::Gpu(slot) = place {
                counter.total.set(&mut self.speaker, feed, *slot, reading.bytes);
            }
        }
    }
}

pub(super) fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let path = input.path.clone();
    let is_array = is_array(input.head());
    let mut objects = Objects::new(input.into_reader(), b"\"traceEvents\"", is_array);
    let mut trace = Trace { sink: Some(sink), ..Trace::default() };
    let (mut events, mut rejects) = (0_u64, Rejects::default());
    let end = loop {
        let offset = objects.offset;
        let next = objects.next().map_err(|source| Error::Read { path: path.clone(), offset, source })?;
        let is_read = match next {
            // Parses only memory events: a trace has thousands of other events for each memory event.
            Next::Object => !contains(&objects.bytes, b"\"Memory: ") || trace.add(&objects.bytes).is_some(),
            Next::Bad => false,
            end => break end,
        };
        events += 1;
        if !is_read {
            rejects.add(|| events.to_string());
        }
    };
    trace.tell(usize::MAX);
    let Trace { feed, mut speaker, counters, late, .. } = trace;
    let Some(mut feed) = feed else {
        let what = format!(
            "none of its {} is a counter of memory; MXNet writes them from 1.0 on, with profile_memory. One looks like: {EXAMPLE}",
            plural(events, "event")
        );
        return Err(Error::NoMemory { path, what });
    };
    feed.sink.reject(rejects.count);
    feed.rejects = rejects;
    caveats(&counters, &end, [objects.offset, events, late], &mut feed);
    feed.tell_rejects("event", "event", EXAMPLE);
    pinned(&counters, &mut speaker, &mut feed);
    speaker.end(&mut feed);
    Ok(())
}

/// Adds the caveats of the run. `end` is how the trace ended: at byte `offset`, after `events` events.
fn caveats(counters: &[(Place, Counter)], end: &Next, [offset, events, late]: [u64; 3], feed: &mut Feed<'_>) {
    let sentences = |is_gpu: bool| {
        let mut all: Vec<_> =
            counters.iter().filter(|(place, _)| matches!(place, Place::Gpu(_)) == is_gpu).collect();
        all.sort_by_key(|(place, _)| place);
        all.iter().map(|(place, counter)| counter.sentence(place)).collect::<Vec<_>>().join("; ")
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

/// Records the last amount of page-locked memory as host memory of the first GPU. The GPU's sum does not include it.
fn pinned(counters: &[(Place, Counter)], speaker: &mut Speaker, feed: &mut Feed<'_>) {
    let gpus = counters.iter().filter_map(|(place, _)| match place {
        Place::Gpu(slot) => Some(*slot),
        Place::Host(_) => None,
    });
    let pinned = counters.iter().find(|(place, counter)| place.name() == "cpu pinned" && counter.last > 0);
    if let (Some(slot), Some((_, counter))) = (gpus.min(), pinned) {
        let tag = speaker.tag(feed, "cpu pinned");
        let piece = Piece::new(slot, counter.last, tag, Role::Unknown);
        speaker.allocate(feed, Piece { memory: MemoryKind::Pinned, ..piece });
    }
}
