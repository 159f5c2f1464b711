//! Shared code of the importers: builds records from file contents, and limits the memory that a file may take.
//!
//! ```text
//! Feed      records of the host: devices, NVML readings; counts unreadable input
//! Speaker   records of one process: names, allocations
//! lines     lines of a text file; unreadable ones are counted
//! ```

use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::units::{plural, thousands};
use gpumem_runs::builder::Sink;
use gpumem_wire::{
    Absence, Body, ByeReason, ClockKind, DeviceIdKind, Flags, MAX_TAG_BYTES, MemoryKind, Phase, PoolOwner,
    Reading, Record, Role, Stamp,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

pub(super) const MIB: u64 = 1 << 20;
/// Maximum size of an allocation (256 TiB, more than any GPU has); larger values are invalid.
pub(super) const MAX_BYTES: u64 = 1 << 48;
/// First generated address. Files of other tools contain no usable addresses, so the importers generate them.
const FIRST_ADDRESS: u64 = 1 << 40;
/// Maximum number of unreadable places that a message lists; further ones are only counted.
const NAMED: usize = 5;
/// Maximum number of names of a process. Further memory gets the name [`MORE_NAMES`], so memory is bounded and sums stay exact.
const MAX_NAMES: usize = 1 << 16;
const MORE_NAMES: &str = "(more names)";
/// Maximum number of allocations of a process with rows of their own; further allocations are summed by name.
const MAX_ROWS: u64 = 1 << 18;

/// Places in a file that cannot be read.
#[derive(Debug, Default)]
pub(super) struct Rejects {
    pub count: u64,
    named: Vec<String>,
}

impl Rejects {
    pub fn add(&mut self, place: impl FnOnce() -> String) {
        self.count += 1;
        if self.named.len() < NAMED {
            self.named.push(place());
        }
    }

    /// Returns the first places as text: `4, 7, 9, ...`.
    pub fn places(&self) -> String {
        let more = if self.count > self.named.len() as u64 { ", ..." } else { "" };
        self.named.join(", ") + more
    }
}

/// Emits records of the host (devices, NVML readings) and caveats about the file.
pub(super) struct Feed<'s> {
    pub sink: &'s mut dyn Sink,
    /// Time of the next record; a line number if the file has no clock.
    pub time_ns: u64,
    pub rejects: Rejects,
    /// Slots (numbers of devices in records) for which a device record was emitted.
    devices: BTreeSet<u8>,
    /// Number of NVML readings emitted so far.
    sample: u64,
}

impl<'s> Feed<'s> {
    /// Returns a feed whose times are line numbers or other positions in the file.
    pub fn of_lines(sink: &'s mut dyn Sink) -> Self {
        let mut feed = Feed::silent(sink);
        feed.anchor(ClockKind::Ordinal, 0);
        feed
    }

    /// Returns a feed whose clock is not defined yet. Without a later call of [`Feed::anchor`], times are ns since the first
    /// time.
    pub fn silent(sink: &'s mut dyn Sink) -> Self {
        Feed { sink, time_ns: 0, rejects: Rejects::default(), devices: BTreeSet::new(), sample: 0 }
    }

    /// Defines the clock: with [`ClockKind::Wall`], time 0 is `realtime_ns` nanoseconds after 1970.
    pub fn anchor(&mut self, clock: ClockKind, realtime_ns: u64) {
        self.host(Stamp::default(), Body::ClockAnchor { realtime_ns, boottime_ns: 0, clock });
    }

    fn say(&mut self, origin: Origin, stamp: Stamp, body: Body<'_>) {
        let stamp = Stamp { time_ns: self.time_ns, ..stamp };
        self.sink.observe(origin, &Record { stamp, body });
    }

    fn host(&mut self, stamp: Stamp, body: Body<'_>) {
        self.say(Origin::Host, stamp, body);
    }

    /// Emits a device that the file identifies only by its number, `slot`.
    pub fn device(&mut self, slot: u8, total_bytes: Option<u64>) {
        if self.devices.insert(slot) || total_bytes.is_some() {
            self.host(on(slot), by_number(slot, total_bytes));
        }
    }

    pub fn gpu(&mut self, slot: u8, uuid: u128, model: &str) {
        let (uuid_high, uuid_low, ordinal) = ((uuid >> 64) as u64, uuid as u64, u16::from(slot));
        let (total_bytes, id) = (Reading::ABSENT, DeviceIdKind::Gpu);
        self.host(on(slot), Body::Device { uuid_high, uuid_low, total_bytes, ordinal, id, name: model });
        self.devices.insert(slot);
    }

    /// Emits one NVML reading: the bytes that NVML charged to processes on a device, or why they are absent.
    pub fn reading(&mut self, slot: u8, charged: &[(ProcessKey, Result<u64, Absence>)]) {
        self.sample += 1;
        let (stamp, number) = (on(slot), self.sample);
        self.host(stamp, Body::SampleBegin { number });
        for &(ProcessKey { pid, start_ticks }, used) in charged {
            let absence = used.err().unwrap_or_default();
            let used_bytes = Reading(used.ok());
            let body = Body::ProcessSample { start_ticks, used_bytes, absence, lists: 0 };
            self.host(Stamp { thread: pid, ..stamp }, body);
        }
        self.host(stamp, Body::SampleEnd { number, result: 0 });
    }

    pub fn device_memory(&mut self, slot: u8, total_bytes: u64, free_bytes: u64) {
        let used_bytes = total_bytes.saturating_sub(free_bytes);
        let body =
            Body::DeviceSample { used_bytes, free_bytes, reserved_bytes: Reading::ABSENT, unified: false };
        self.host(on(slot), body);
    }

    /// Emits the fact `key=value` of a process; control characters are removed from the value.
    pub fn fact(&mut self, of: ProcessKey, key: &str, value: &str) {
        let value: String = value.chars().filter(|character| !character.is_control()).take(4096).collect();
        let facts = &*format!("{key}={value}");
        let ProcessKey { pid, start_ticks } = of;
        let body = Body::ProcessFacts { start_ticks, uid: Reading::ABSENT, parent_pid: 0, facts };
        self.host(Stamp { thread: pid, ..Stamp::default() }, body);
    }

    pub fn gone(&mut self, ProcessKey { pid, start_ticks }: ProcessKey) {
        let body = Body::ProcessGone { start_ticks, status: Reading::ABSENT };
        self.host(Stamp { thread: pid, ..Stamp::default() }, body);
    }

    pub fn reject(&mut self, place: u64) {
        self.rejects.add(|| place.to_string());
        self.sink.reject(1);
    }

    /// Adds a caveat if input was rejected. `what` names one rejected item, `place` the unit of its place, such as `line`.
    pub fn tell_rejects(&mut self, what: &str, place: &str, example: &str) {
        if self.rejects.count > 0 {
            let (what, places) = (plural(self.rejects.count, what), self.rejects.places());
            let text = format!("{what} cannot be read ({place} {places}); right is: {example}");
            self.sink.caveat("rejected_lines", text);
        }
    }

    pub fn caveat(&mut self, code: &str, text: impl Into<String>) {
        self.sink.caveat(code, text.into());
    }

    /// Adds the caveats whose condition is true. Each is (code, condition, text).
    pub fn caveats<const N: usize>(&mut self, caveats: [(&str, bool, String); N]) {
        for (code, _, text) in caveats.into_iter().filter(|(_, applies, _)| *applies) {
            self.caveat(code, text);
        }
    }
}

fn on(slot: u8) -> Stamp {
    Stamp { device: slot, ..Stamp::default() }
}

fn by_number(slot: u8, total_bytes: Option<u64>) -> Body<'static> {
    let (total_bytes, id) = (Reading(total_bytes), DeviceIdKind::Ordinal);
    Body::Device { uuid_high: 0, uuid_low: 0, total_bytes, ordinal: u16::from(slot), id, name: "" }
}

/// A piece of memory that a file lists, such as one allocation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub slot: u8,
    pub bytes: u64,
    /// Id returned by [`Speaker::tag`]; 0 for none.
    pub tag: u32,
    pub memory: MemoryKind,
    pub role: Role,
    /// Whether the file states only a rounded size.
    pub estimated: bool,
}

impl Piece {
    pub fn new(slot: u8, bytes: u64, tag: u32, role: Role) -> Self {
        Piece { slot, bytes, tag, memory: MemoryKind::Device, role, estimated: false }
    }
}

/// Emits the records of one process in a file. The default value is for a file with only one process.
#[derive(Debug, Default)]
pub(super) struct Speaker {
    pub key: ProcessKey,
    seq: u64,
    /// Bytes of the address range that is used so far, for the next generated address.
    used: u64,
    tags: HashMap<String, u32>,
    devices: BTreeSet<u8>,
    rows: u64,
    /// Allocations that [`Speaker::settle`] emits together.
    held: Vec<Piece>,
    /// Allocations beyond [`MAX_ROWS`], summed by (slot, tag, memory kind, role); the values are (number, bytes).
    summed: BTreeMap<(u8, u32, u8, u8), (u64, u64)>,
    cut_tags: u64,
    /// Slots of the devices on which the process has a pool.
    pools: BTreeSet<u8>,
}

impl Speaker {
    /// Returns the process with this number in the file; its pid is unknown.
    pub fn new(number: u64) -> Self {
        Speaker { key: ProcessKey { pid: 0, start_ticks: number }, ..Speaker::default() }
    }

    fn say(&self, feed: &mut Feed<'_>, stamp: Stamp, body: Body<'_>) {
        feed.say(Origin::Process(self.key), stamp, body);
    }

    /// Emits a record with the next sequence number, and returns that number.
    fn emit(&mut self, feed: &mut Feed<'_>, stamp: Stamp, body: Body<'_>) -> u64 {
        self.seq += 1;
        self.say(feed, Stamp { seq: self.seq, ..stamp }, body);
        self.seq
    }

    /// Adds a device to the process, even if it has no memory there.
    pub fn device(&mut self, feed: &mut Feed<'_>, slot: u8) {
        feed.device(slot, None);
        if self.devices.insert(slot) {
            self.say(feed, on(slot), by_number(slot, None));
        }
    }

    /// Returns the id of a tag path. Emits a record for a new path.
    pub fn tag(&mut self, feed: &mut Feed<'_>, path: &str) -> u32 {
        let mut end = path.len().min(MAX_TAG_BYTES);
        while !path.is_char_boundary(end) {
            end -= 1;
        }
        self.cut_tags += u64::from(end < path.len());
        let mut path = path.get(..end).unwrap_or_default();
        if let Some(&id) = self.tags.get(path) {
            return id;
        }
        if self.tags.len() >= MAX_NAMES {
            path = MORE_NAMES;
            if let Some(&id) = self.tags.get(path) {
                return id;
            }
        }
        let id = self.tags.len() as u32 + 1;
        self.say(feed, Stamp { tag: id, ..Stamp::default() }, Body::Tag { path });
        self.tags.insert(path.to_owned(), id);
        id
    }

    /// Emits an allocation that is not freed before the end of the file.
    pub fn allocate(&mut self, feed: &mut Feed<'_>, piece: Piece) {
        self.device(feed, piece.slot);
        if self.is_room(piece) {
            self.row(feed, piece, 0);
        }
    }

    /// Adds an allocation of a file that describes a state. All of them are emitted together at the end of the file.
    pub fn hold(&mut self, piece: Piece) {
        if self.is_room(piece) {
            self.held.push(piece);
        }
    }

    /// Returns whether an allocation may have its own row; if not, adds it to the sums in `summed`.
    fn is_room(&mut self, piece: Piece) -> bool {
        self.rows += 1;
        if self.rows > MAX_ROWS {
            let name = (piece.slot, piece.tag, piece.memory.to_code(), piece.role.to_code());
            let (count, bytes) = self.summed.entry(name).or_default();
            *count += 1;
            *bytes = bytes.saturating_add(piece.bytes);
        }
        self.rows <= MAX_ROWS
    }

    fn row(&mut self, feed: &mut Feed<'_>, piece: Piece, pool: u64) -> u64 {
        let address = FIRST_ADDRESS.wrapping_add(self.used);
        self.used = self.used.wrapping_add(piece.bytes.max(1).next_multiple_of(512));
        let flags = if piece.estimated { Flags::ESTIMATED } else { Flags::default() };
        let stamp = Stamp { tag: piece.tag, flags, ..on(piece.slot) };
        let body = Body::AllocEnd { address, bytes: piece.bytes, pool, took_us: 0, memory: piece.memory };
        let block_seq = self.emit(feed, stamp, body);
        if piece.role != Role::Unknown {
            let use_as = (piece.role, Phase::Unknown);
            self.emit(feed, on(piece.slot), Body::Retag { address, block_seq, pool: 0, use_as });
        }
        address
    }

    /// Returns the id of the process's driver pool on a device; creates it if needed. See level.rs.
    pub fn pool(&mut self, feed: &mut Feed<'_>, slot: u8) -> u64 {
        self.device(feed, slot);
        let pool = 1 + u64::from(slot);
        if self.pools.insert(slot) {
            let body = Body::PoolCreate { pool, parent: 0, reports_blocks: 1, owner: PoolOwner::Driver };
            self.emit(feed, on(slot), body);
        }
        pool
    }

    /// Allocates memory from the device's pool and returns its address.
    pub fn take(&mut self, feed: &mut Feed<'_>, piece: Piece) -> u64 {
        let pool = self.pool(feed, piece.slot);
        self.row(feed, Piece { memory: MemoryKind::StreamOrdered, ..piece }, pool)
    }

    /// Frees memory to the device's pool.
    pub fn give(&mut self, feed: &mut Feed<'_>, slot: u8, address: u64) {
        let begin_seq = self.emit(feed, on(slot), Body::FreeBegin { address });
        self.emit(feed, on(slot), Body::FreeEnd { begin_seq, result: 0 });
    }

    /// Sets the bytes that the process's pool on the device reserves from the driver.
    pub fn keep(&mut self, feed: &mut Feed<'_>, slot: u8, bytes: u64) {
        let pool = self.pool(feed, slot);
        let body = Body::PoolState { pool, reserved_bytes: bytes, used_bytes: bytes, took_us: 0 };
        self.emit(feed, on(slot), body);
    }

    pub fn step(&mut self, feed: &mut Feed<'_>, number: u64) {
        self.emit(feed, Stamp::default(), Body::Step { number });
    }

    /// Emits the allocations in `held` and the sums in `summed`. Must precede an NVML reading that covers the whole process.
    fn settle(&mut self, feed: &mut Feed<'_>) {
        for piece in std::mem::take(&mut self.held) {
            self.device(feed, piece.slot);
            self.row(feed, piece, 0);
        }
        let summed = std::mem::take(&mut self.summed);
        if summed.is_empty() {
            return;
        }
        let count: u64 = summed.values().map(|(count, _)| count).sum();
        for ((slot, tag, memory, role), (_, mut rest)) in summed {
            let memory = MemoryKind::from_code(memory);
            // A sum may exceed the maximum size of one allocation, so it is split.
            while rest > 0 {
                let bytes = rest.min(MAX_BYTES);
                self.row(feed, Piece { memory, ..Piece::new(slot, bytes, tag, Role::from_code(role)) }, 0);
                rest -= bytes;
            }
        }
        let (rows, most) = (plural(count, "row"), thousands(MAX_ROWS));
        let text =
            format!("{rows} beyond the first {most} are summed by name: sums are exact, their number is not");
        feed.caveat("summed_rows", text);
    }

    /// Emits a watermark: all records up to now are complete, so an NVML reading may be compared with them.
    pub fn watermark(&mut self, feed: &mut Feed<'_>) {
        self.settle(feed);
        let body = Body::Watermark { last_seq: self.seq, in_flight_since_ns: 0 };
        self.say(feed, Stamp::default(), body);
    }

    /// Emits the remaining records, the caveats about names, and the end of the process.
    pub fn end(&mut self, feed: &mut Feed<'_>) {
        self.settle(feed);
        let (cut, most) = (plural(self.cut_tags, "name"), thousands(MAX_NAMES as u64));
        let cut = format!("{cut} are longer than {MAX_TAG_BYTES} bytes and were cut");
        let more = format!("there are more than {most} names: the others are summed as {MORE_NAMES}");
        feed.caveats([
            ("cut_tags", self.cut_tags > 0, cut),
            ("many_names", self.tags.contains_key(MORE_NAMES), more),
        ]);
        self.say(feed, Stamp::default(), Body::Bye { reason: ByeReason::Exit });
        feed.gone(self.key);
    }
}
