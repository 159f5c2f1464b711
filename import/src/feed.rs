//! Shared code of the importers: emits records for the contents of a file, and limits the memory that a file may take.
//!
//! ```text
//! Feed          records of the host: devices, NVML readings; counts unreadable input
//! ProcessFeed   records of one process: names, allocations
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
/// First generated address. Records need the address of each allocation, but files of other tools contain none that can be used.
const FIRST_ADDRESS: u64 = 1 << 40;
/// Maximum number of unreadable places in a file that a message lists.
const MAX_PLACES: usize = 5;
/// Maximum number of allocation names of a process. Allocations with further names get the name [`MORE_NAMES`], which limits the
/// memory.
const MAX_NAMES: usize = 1 << 16;
const MORE_NAMES: &str = "(more names)";
/// Maximum number of allocations of a process that get a record each. Further allocations with the same name are summed.
const MAX_ROWS: u64 = 1 << 18;

/// Places in a file that cannot be read: their number, and the first of them.
#[derive(Debug, Default)]
pub(super) struct Rejects {
    pub count: u64,
    places: Vec<String>,
}

impl Rejects {
    pub fn add(&mut self, place: impl FnOnce() -> String) {
        self.count += 1;
        if self.places.len() < MAX_PLACES {
            self.places.push(place());
        }
    }

    /// Returns the first unreadable places as text: `4, 7, 9, ...`.
    pub fn listed(&self) -> String {
        let more = if self.count > self.places.len() as u64 { ", ..." } else { "" };
        self.places.join(", ") + more
    }
}

/// Emits records of the host (devices, NVML readings), and caveats (notes for readers of the run) about the file.
pub(super) struct Feed<'s> {
    pub sink: &'s mut dyn Sink,
    /// Time of the next record in ns; a line number if the file has no clock.
    pub time_ns: u64,
    pub rejects: Rejects,
    /// Slots of the devices for which a device record was emitted. A slot is the number of a device in records.
    devices: BTreeSet<u8>,
    /// Number of NVML readings emitted so far.
    readings: u64,
}

impl<'s> Feed<'s> {
    /// Returns a feed for a file without clock: its times are line numbers or other positions.
    pub fn without_clock(sink: &'s mut dyn Sink) -> Self {
        let mut feed = Feed::new(sink);
        feed.anchor(ClockKind::Ordinal, 0);
        feed
    }

    /// Returns a feed whose clock [`Feed::anchor`] may define later. Otherwise times are ns since the first time in the file.
    pub fn new(sink: &'s mut dyn Sink) -> Self {
        Feed { sink, time_ns: 0, rejects: Rejects::default(), devices: BTreeSet::new(), readings: 0 }
    }

    /// Defines the clock. For [`ClockKind::Wall`], `realtime_ns` is the wall-clock time of time 0, in ns since 1970.
    pub fn anchor(&mut self, clock: ClockKind, realtime_ns: u64) {
        self.host(Stamp::default(), Body::ClockAnchor { realtime_ns, boottime_ns: 0, clock });
    }

    fn send(&mut self, origin: Origin, stamp: Stamp, body: Body<'_>) {
        let stamp = Stamp { time_ns: self.time_ns, ..stamp };
        self.sink.observe(origin, &Record { stamp, body });
    }

    fn host(&mut self, stamp: Stamp, body: Body<'_>) {
        self.send(Origin::Host, stamp, body);
    }

    /// Emits a device that the file identifies only by its number, `slot`. Emits a device again only if `total_bytes` is given.
    pub fn device(&mut self, slot: u8, total_bytes: Option<u64>) {
        if self.devices.insert(slot) || total_bytes.is_some() {
            self.host(on(slot), numbered_device(slot, total_bytes));
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
        self.readings += 1;
        let (stamp, number) = (on(slot), self.readings);
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

    /// Emits the fact `key=value` about a process, such as its command. Removes control characters from the value.
    pub fn fact(&mut self, process: ProcessKey, key: &str, value: &str) {
        let value: String = value.chars().filter(|character| !character.is_control()).take(4096).collect();
        let facts = &*format!("{key}={value}");
        let ProcessKey { pid, start_ticks } = process;
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

    /// Adds a caveat if input was rejected. `what` names one rejected item, such as `row`; `place` is the unit of its place, such
    /// as `line`.
    pub fn caveat_rejects(&mut self, what: &str, place: &str, example: &str) {
        if self.rejects.count > 0 {
            let (what, places) = (plural(self.rejects.count, what), self.rejects.listed());
            let text = format!("{what} cannot be read ({place} {places}); a correct one: {example}");
            self.sink.caveat("rejected_lines", text);
        }
    }

    pub fn caveat(&mut self, code: &str, text: impl Into<String>) {
        self.sink.caveat(code, text.into());
    }

    /// Adds the caveats whose condition is true. A caveat is (code, condition, text).
    pub fn caveats<const N: usize>(&mut self, caveats: [(&str, bool, String); N]) {
        for (code, _, text) in caveats.into_iter().filter(|(_, applies, _)| *applies) {
            self.caveat(code, text);
        }
    }
}

fn on(slot: u8) -> Stamp {
    Stamp { device: slot, ..Stamp::default() }
}

fn numbered_device(slot: u8, total_bytes: Option<u64>) -> Body<'static> {
    let (total_bytes, id) = (Reading(total_bytes), DeviceIdKind::Ordinal);
    Body::Device { uuid_high: 0, uuid_low: 0, total_bytes, ordinal: u16::from(slot), id, name: "" }
}

/// An allocation, or other piece of memory, that a file lists.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub slot: u8,
    pub bytes: u64,
    /// Id returned by [`ProcessFeed::tag`]; 0 for none.
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

/// Emits the records of one process in a file. The default value stands for the only process of a file.
#[derive(Debug, Default)]
pub(super) struct ProcessFeed {
    pub key: ProcessKey,
    seq: u64,
    /// Number of bytes of generated addresses so far; the next allocation begins after these.
    used: u64,
    tags: HashMap<String, u32>,
    devices: BTreeSet<u8>,
    /// Number of allocations.
    rows: u64,
    /// Allocations that [`ProcessFeed::emit_deferred`] emits together.
    deferred: Vec<Piece>,
    /// Number and bytes of the allocations beyond [`MAX_ROWS`], by (slot, tag, memory kind, role).
    summed: BTreeMap<(u8, u32, u8, u8), (u64, u64)>,
    /// Number of tag paths that were too long.
    cut_tags: u64,
    /// Slots of the devices on which the process has a pool.
    pools: BTreeSet<u8>,
}

impl ProcessFeed {
    /// Returns a feed for the process with this number in the file; its pid is unknown.
    pub fn new(number: u64) -> Self {
        ProcessFeed { key: ProcessKey { pid: 0, start_ticks: number }, ..ProcessFeed::default() }
    }

    fn send(&self, feed: &mut Feed<'_>, stamp: Stamp, body: Body<'_>) {
        feed.send(Origin::Process(self.key), stamp, body);
    }

    /// Emits a record with the next sequence number, and returns that number.
    fn emit(&mut self, feed: &mut Feed<'_>, stamp: Stamp, body: Body<'_>) -> u64 {
        self.seq += 1;
        self.send(feed, Stamp { seq: self.seq, ..stamp }, body);
        self.seq
    }

    /// Adds a device to the process, even if it has no memory there.
    pub fn device(&mut self, feed: &mut Feed<'_>, slot: u8) {
        feed.device(slot, None);
        if self.devices.insert(slot) {
            self.send(feed, on(slot), numbered_device(slot, None));
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
        self.send(feed, Stamp { tag: id, ..Stamp::default() }, Body::Tag { path });
        self.tags.insert(path.to_owned(), id);
        id
    }

    /// Emits an allocation that is not freed before the end of the file.
    pub fn allocate(&mut self, feed: &mut Feed<'_>, piece: Piece) {
        self.device(feed, piece.slot);
        if self.admit_row(piece) {
            self.row(feed, piece, 0);
        }
    }

    /// Adds an allocation that is emitted before the next watermark or at the end of the file. For files that describe the state at
    /// one time.
    pub fn defer(&mut self, piece: Piece) {
        if self.admit_row(piece) {
            self.deferred.push(piece);
        }
    }

    /// Counts an allocation. Returns whether it gets a record of its own; if not, adds it to the sums in `summed`.
    fn admit_row(&mut self, piece: Piece) -> bool {
        self.rows += 1;
        if self.rows > MAX_ROWS {
            let name = (piece.slot, piece.tag, piece.memory.to_code(), piece.role.to_code());
            let (count, bytes) = self.summed.entry(name).or_default();
            *count += 1;
            *bytes = bytes.saturating_add(piece.bytes);
        }
        self.rows <= MAX_ROWS
    }

    /// Emits an allocation and returns its generated address.
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

    /// Returns the id of the process's driver pool on a device; emits the pool if it is new. level.rs explains its use.
    pub fn pool(&mut self, feed: &mut Feed<'_>, slot: u8) -> u64 {
        self.device(feed, slot);
        let pool = 1 + u64::from(slot);
        if self.pools.insert(slot) {
            let body = Body::PoolCreate { pool, parent: 0, reports_blocks: 1, owner: PoolOwner::Driver };
            self.emit(feed, on(slot), body);
        }
        pool
    }

    /// Emits an allocation from the device's pool and returns its address.
    pub fn pool_allocate(&mut self, feed: &mut Feed<'_>, piece: Piece) -> u64 {
        let pool = self.pool(feed, piece.slot);
        self.row(feed, Piece { memory: MemoryKind::StreamOrdered, ..piece }, pool)
    }

    /// Emits that an allocation returned to the device's pool.
    pub fn pool_free(&mut self, feed: &mut Feed<'_>, slot: u8, address: u64) {
        let begin_seq = self.emit(feed, on(slot), Body::FreeBegin { address });
        self.emit(feed, on(slot), Body::FreeEnd { begin_seq, result: 0 });
    }

    /// Emits the bytes that the process's pool on the device holds from the driver.
    pub fn set_reserved(&mut self, feed: &mut Feed<'_>, slot: u8, bytes: u64) {
        let pool = self.pool(feed, slot);
        let body = Body::PoolState { pool, reserved_bytes: bytes, used_bytes: bytes, took_us: 0 };
        self.emit(feed, on(slot), body);
    }

    pub fn step(&mut self, feed: &mut Feed<'_>, number: u64) {
        self.emit(feed, Stamp::default(), Body::Step { number });
    }

    /// Emits the allocations in `deferred` and the sums in `summed`. Must be called before an NVML reading of the process.
    fn emit_deferred(&mut self, feed: &mut Feed<'_>) {
        for piece in std::mem::take(&mut self.deferred) {
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

    /// Emits a watermark. It states that no earlier record is missing, so an NVML reading may be compared with the records.
    pub fn watermark(&mut self, feed: &mut Feed<'_>) {
        self.emit_deferred(feed);
        let body = Body::Watermark { last_seq: self.seq, in_flight_since_ns: 0 };
        self.send(feed, Stamp::default(), body);
    }

    /// Emits the remaining records, the caveats about names, and the end of the process.
    pub fn end(&mut self, feed: &mut Feed<'_>) {
        self.emit_deferred(feed);
        let (cut, most) = (plural(self.cut_tags, "name"), thousands(MAX_NAMES as u64));
        let cut = format!("{cut} are longer than {MAX_TAG_BYTES} bytes and were cut");
        let more = format!("there are more than {most} names: the others are summed as {MORE_NAMES}");
        feed.caveats([
            ("cut_tags", self.cut_tags > 0, cut),
            ("many_names", self.tags.contains_key(MORE_NAMES), more),
        ]);
        self.send(feed, Stamp::default(), Body::Bye { reason: ByeReason::Exit });
        feed.gone(self.key);
    }
}
