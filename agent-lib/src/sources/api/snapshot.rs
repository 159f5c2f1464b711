//! Writes the process's live memory, the agent's status, and the peak of an open range as JSON for the program itself
//! (`gpumem_snapshot`). Not for callbacks: it allocates. The live table is read while other threads continue. So the figures are
//! exact only if nothing is allocated or freed meanwhile.
//!
//! ```text
//! tracked + unseen = direct + blocks + pool_idle + opaque        bytes of each device, exactly
//!   tracked   live driver allocations; for driver pools the reserved bytes
//!   unseen    parts of segments that lie in no known allocation
//!   direct    allocations that are not segments of a framework's pool
//!   blocks    blocks of the innermost pools, including pending ones
//!   pool_idle parts of segments without a block; for driver pools, reserved but unused bytes
//!   opaque    segments of pools that report no blocks
//! ```

use crate::base::own_thread;
use crate::base::row::{RowCopy, device_of, kind, kind_of, memory_of, pool_owner};
use crate::driver::core::Core;
use crate::naming::python;
use crate::record::high_water::{self, Family};
use crate::record::status;
use crate::threads::Thread;
use gpumem_wire::{MemoryKind, NONE_DEVICE, Phase, PoolOwner, Role};
use std::collections::{BTreeMap, HashMap};
use std::fmt::{Debug, Write};
use std::sync::atomic::Ordering::Relaxed;

const LIVE: i32 = 0;
const STATUS: i32 = 1;
const HIGH: i32 = 2;

/// Returns the JSON text that `what` selects; empty for an unknown number.
pub(crate) fn text(core: &Core, what: i32) -> String {
    let _uncancelled = own_thread::Uncancelled::now();
    match what {
        LIVE => live(core),
        STATUS => status(core),
        HIGH => high(core),
        _ => String::new(),
    }
}

/// Writes the name that an allocation by this thread would get now, then the thread's Python stack. For diagnosis and tests.
pub(crate) fn describe_here(core: &Core, thread: &Thread, out: &mut [u8]) -> usize {
    let named = core.named(thread);
    let mut text = python::text::TextBuffer::new(out);
    python::text::put(&mut text, core.recorder.names.path(named.tag).unwrap_or_default());
    let tag_end = text.position() as usize;
    let _ = std::io::Write::write_fmt(&mut text, format_args!(" {:?}\n", named.phase));
    let used = text.position() as usize;
    out[tag_end..used].make_ascii_lowercase();
    used + python::stack_text(python::text::SENTENCE, &mut out[used..])
}

pub(crate) trait Json {
    fn write(&self, out: &mut String);
}

/// JSON text.
pub(crate) struct Raw(pub String);

impl Json for Raw {
    fn write(&self, out: &mut String) {
        *out += &self.0;
    }
}

impl<T: Json> Json for Option<T> {
    fn write(&self, out: &mut String) {
        match self {
            Some(value) => value.write(out),
            None => *out += "null",
        }
    }
}

impl Json for &str {
    fn write(&self, out: &mut String) {
        out.push('"');
        for char in self.chars() {
            match char {
                '"' | '\\' => out.extend(['\\', char]),
                char if char.is_control() => drop(write!(out, "\\u{:04x}", char as u32)),
                char => out.push(char),
            }
        }
        out.push('"');
    }
}

impl Json for String {
    fn write(&self, out: &mut String) {
        self.as_str().write(out);
    }
}

macro_rules! numbers {
    ($($type:ty),*) => { $(
        impl Json for $type {
            fn write(&self, out: &mut String) {
                let _ = write!(out, "{self}");
            }
        }
    )* };
}
numbers!(bool, u8, u32, u64, i64, usize, f64);

macro_rules! object {
    ($( $key:ident: $value:expr ),* $(,)?) => {
        $crate::sources::api::snapshot::joined('{', '}', [$( {
            let mut out = concat!("\"", stringify!($key), "\":").to_owned();
            $crate::sources::api::snapshot::Json::write(&$value, &mut out);
            out
        } ),*])
    };
}
pub(crate) use object;

/// Joins the parts of an object or a list.
pub(crate) fn joined(open: char, close: char, parts: impl IntoIterator<Item = String>) -> Raw {
    let parts = parts.into_iter().collect::<Vec<_>>().join(",");
    Raw(format!("{open}{parts}{close}"))
}

pub(crate) fn list(parts: impl IntoIterator<Item = Raw>) -> Raw {
    joined('[', ']', parts.into_iter().map(|part| part.0))
}

/// Converts `OptimizerState` to `optimizer_state`.
pub(crate) fn word(value: impl Debug) -> String {
    let mut out = String::new();
    for char in format!("{value:?}").chars() {
        if char.is_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.extend(char.to_lowercase());
    }
    out
}

pub(crate) fn path(core: &Core, tag: u32) -> String {
    core.recorder.names.path(tag).map_or_else(String::new, |path| String::from_utf8_lossy(path).into_owned())
}

fn status(core: &Core) -> String {
    crate::sources::api::scope::report_state();
    let now = core.recorder.clock.now();
    let reports = status::reports_after(0, now)
        .into_iter()
        .map(|report| object! { since_ns: report.time_ns, state: word(report.state), detail: report.detail });
    let layers = status::layers()
        .into_iter()
        .map(|layer| object! { layer: word(layer.layer), state: word(layer.state), reason: layer.reason });
    let recording = core.settings.record.as_ref().map(|path| path.to_string_lossy().into_owned());
    let status = object! {
        pid: core.pid, time_ns: now, said: list(reports), layers: list(layers), connected: own_thread::connected(),
        recording: recording, recorded: core.recorder.ring.head(), lost: core.recorder.ring.lost(),
        rows_refused: core.recorder.live.refused.load(Relaxed) + crate::threads::refused(),
        names_refused: core.recorder.names.refused.load(Relaxed),
    };
    status.0
}

fn high(core: &Core) -> String {
    if !high_water::open() {
        return String::new();
    }
    let family = |device: usize, family: Family| {
        let (high, live, tags) = high_water::read(device, family);
        let tags = tags.iter().map(|&(tag, bytes)| object! { path: path(core, tag), bytes: bytes });
        object! { high_bytes: high, live_bytes: live, tags: list(tags) }
    };
    let device = |ordinal: u8| {
        let family = |which| family(usize::from(ordinal), which);
        object! { ordinal: ordinal, allocations: family(Family::Allocations), blocks: family(Family::Blocks) }
    };
    let seen = core.devices.seen().filter(|&ordinal| usize::from(ordinal) < high_water::DEVICES);
    object! { devices: list(seen.map(device)) }.0
}

/// Returns the device's UUID in NVML's format; `None` if the driver does not return it.
fn uuid(core: &Core, ordinal: u8) -> Option<String> {
    let mut uuid = [0_u8; 16];
    let get = core.devices.driver()?.device_get_uuid?;
    // SAFETY: a function of the loaded driver; `uuid` has room for its answer.
    if unsafe { get(&mut uuid, ordinal.into()) } != 0 {
        return None;
    }
    let mut out = String::from("GPU");
    for (at, byte) in uuid.iter().enumerate() {
        let dash = if matches!(at, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
        let _ = write!(out, "{dash}{byte:02x}");
    }
    Some(out)
}

/// Sorted, merged address ranges.
struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    fn merged(mut ranges: Vec<(u64, u64)>) -> Self {
        ranges.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
        for (start, end) in ranges {
            match merged.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => merged.push((start, end)),
            }
        }
        Ranges(merged)
    }

    /// Returns how many bytes of the range from `start` on lie in these ranges.
    fn overlap(&self, start: u64, bytes: u64) -> u64 {
        let end = start.saturating_add(bytes);
        let first = self.0.partition_point(|range| range.1 <= start);
        let over = self.0[first..].iter().take_while(|range| range.0 < end);
        over.map(|range| range.1.min(end) - range.0.max(start)).sum()
    }
}

/// Returns the start and the end address of a row's memory.
fn range(row: &RowCopy) -> (u64, u64) {
    (row.row[2], row.row[2].saturating_add(row.row[3]))
}

#[derive(Default)]
struct Sum {
    bytes: u64,
    count: u64,
}

impl Sum {
    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.count += 1;
    }
}

/// What identifies a line of the snapshot: tag, role and phase.
type Name = (u32, (Role, Phase));

fn name_of(copy: &RowCopy) -> Name {
    (copy.row[5] as u32, copy.use_as())
}

#[derive(Default)]
struct Pool {
    /// Row of the pool; `None` if only its segments and blocks are in the table.
    row: Option<RowCopy>,
    /// Start and end address of each segment of the pool.
    segments: Vec<(u64, u64)>,
    blocks: Vec<RowCopy>,
}

impl Pool {
    fn parent(&self) -> u64 {
        self.row.map_or(0, |row| row.row[4])
    }

    fn owner(&self) -> PoolOwner {
        self.row.map_or(PoolOwner::Framework, |row| pool_owner(&row.row))
    }
}

/// Sums of a device's memory, in bytes, with the names of the module's docs.
#[derive(Default)]
struct Device {
    tracked: u64,
    unseen: i64,
    direct: Sum,
    blocks: Sum,
    pending: u64,
    idle: u64,
    opaque: u64,
    direct_names: BTreeMap<Name, Sum>,
    block_names: BTreeMap<Name, Sum>,
    pools: Vec<Raw>,
}

fn live(core: &Core) -> String {
    let mut pools: BTreeMap<u64, Pool> = BTreeMap::new();
    let mut by_device: BTreeMap<u8, Vec<RowCopy>> = BTreeMap::new();
    let mut host: BTreeMap<String, Sum> = BTreeMap::new();
    let mut mappings: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
    for device in core.devices.seen() {
        by_device.entry(device).or_default();
    }
    for copy in core.recorder.live.scan() {
        let row = &copy.row;
        match kind_of(row) {
            kind::POOL_CREATE => {
                pools.entry(row[2]).or_default().row = Some(copy);
                by_device.entry(device_of(row)).or_default();
            }
            kind::SEGMENT_ADD => pools.entry(row[4]).or_default().segments.push(range(&copy)),
            kind::BLOCK_ALLOC => pools.entry(row[4]).or_default().blocks.push(copy),
            kind::VMM_MAP => mappings.entry(copy.beside.backing).or_default().push(range(&copy)),
            kind::IMPORT => host.entry("imported".to_owned()).or_default().add(row[3]),
            kind::ALLOC_END | kind::VMM_CREATE => match memory_of(row) {
                memory @ (MemoryKind::Managed
                | MemoryKind::Pinned
                | MemoryKind::Registered
                | MemoryKind::Imported
                | MemoryKind::HostVmm) => host.entry(word(memory)).or_default().add(row[3]),
                _ => by_device.entry(device_of(row)).or_default().push(copy),
            },
            _ => {}
        }
    }
    by_device.remove(&NONE_DEVICE);
    let devices = by_device.iter().map(|(&number, allocations)| {
        let mut device = Device::default();
        device.fill(core, number, &pools, allocations, &mappings);
        device.text(core, number)
    });
    let devices = list(devices);
    let host = host
        .iter()
        .map(|(kind, sum)| format!("\"{kind}\":{}", object! { bytes: sum.bytes, count: sum.count }.0));
    let (time_ns, host) = (core.recorder.clock.now(), joined('{', '}', host));
    object! { schema: 1_u64, pid: core.pid, time_ns: time_ns, devices: devices, host: host }.0
}

impl Device {
    /// Adds the rows of device `number`. `mappings` has the mapped ranges of each handle, by the number of its record.
    fn fill(
        &mut self,
        core: &Core,
        number: u8,
        pools: &BTreeMap<u64, Pool>,
        allocations: &[RowCopy],
        mappings: &HashMap<u64, Vec<(u64, u64)>>,
    ) {
        let is_here = |pool: &Pool| pool.row.is_some_and(|row| device_of(&row.row) == number);
        let segments_in = |parent: u64| {
            let is_child = |pool: &&Pool| {
                is_here(pool) && pool.owner() == PoolOwner::Framework && pool.parent() == parent
            };
            Ranges::merged(pools.values().filter(is_child).flat_map(|pool| pool.segments.clone()).collect())
        };
        let outermost = segments_in(0);
        let mut handed_out: HashMap<u64, u64> = HashMap::new();
        for copy in allocations {
            let (row, bytes) = (&copy.row, copy.row[3]);
            let in_segments = match kind_of(row) {
                kind::VMM_CREATE => {
                    let ranges = mappings.get(&copy.seq()).map_or(&[][..], |ranges| ranges);
                    let overlaps = ranges.iter().map(|(start, end)| outermost.overlap(*start, end - start));
                    overlaps.sum::<u64>().min(bytes)
                }
                _ => outermost.overlap(row[2], bytes),
            };
            if memory_of(row) == MemoryKind::StreamOrdered {
                *handed_out.entry(row[4]).or_default() += bytes;
            }
            self.tracked += bytes;
            if in_segments < bytes {
                self.direct.add(bytes - in_segments);
                self.direct_names.entry(name_of(copy)).or_default().add(bytes - in_segments);
            }
        }
        for (&id, pool) in pools.iter().filter(|(_, pool)| is_here(pool)) {
            if pool.owner() == PoolOwner::Framework {
                self.framework_pool(core, id, pool, &segments_in(id));
            } else {
                self.driver_pool(core, id, pool, handed_out.get(&id).copied().unwrap_or(0));
            }
        }
        let sum = self.direct.bytes + self.blocks.bytes + self.idle + self.opaque;
        self.unseen = sum.cast_signed() - self.tracked.cast_signed();
    }

    fn driver_pool(&mut self, core: &Core, id: u64, pool: &Pool, handed_out: u64) {
        let reserved = core.driver_pools.state(id).map(|(reserved, _)| reserved);
        let idle = reserved.unwrap_or(0).saturating_sub(handed_out);
        self.tracked += idle;
        self.idle += idle;
        self.pools.push(object! {
            id: id, name: "", owner: word(pool.owner()), parent: 0_u64, reserved_bytes: reserved,
            used_bytes: handed_out, idle_bytes: idle,
        });
    }

    /// Adds a framework's pool. `inner`: the segments of pools whose parent is this pool; they lie in its blocks.
    fn framework_pool(&mut self, core: &Core, id: u64, pool: &Pool, inner: &Ranges) {
        let (mut all, mut pending) = (0, 0);
        for block in &pool.blocks {
            let bytes = block.row[3];
            let left = bytes - inner.overlap(block.row[2], bytes);
            all += bytes;
            if block.is_pending() {
                pending += bytes;
            }
            if left > 0 {
                self.blocks.add(left);
                self.block_names.entry(name_of(block)).or_default().add(left);
            }
        }
        let segments: u64 = pool.segments.iter().map(|(start, end)| end - start).sum();
        // Byte 58 of the pool's row is not 0 if the pool reports blocks.
        let reports_blocks = pool.row.is_some_and(|row| row.row[7] >> 16 & 0xffff != 0);
        let opaque = !reports_blocks && pool.blocks.is_empty();
        let idle = if opaque { 0 } else { segments.saturating_sub(all) };
        self.pending += pending;
        self.idle += idle;
        self.opaque += if opaque { segments } else { 0 };
        let tag = pool.row.map_or(0, |row| row.row[5] as u32);
        self.pools.push(object! {
            id: id, name: path(core, tag), owner: "framework", parent: pool.parent(), opaque: opaque,
            segments: pool.segments.len(), segment_bytes: segments, blocks: pool.blocks.len(), block_bytes: all,
            pending_bytes: pending, idle_bytes: idle,
        });
    }

    fn text(self, core: &Core, number: u8) -> Raw {
        let names = |names: BTreeMap<Name, Sum>, of: &'static str| {
            names.into_iter().map(move |((tag, (role, phase)), sum)| {
                let (role, phase) = (word(role), word(phase));
                object! {
                    of: of, path: path(core, tag), role: role, phase: phase, bytes: sum.bytes, count: sum.count,
                }
            })
        };
        let tags = names(self.block_names, "blocks").chain(names(self.direct_names, "direct"));
        object! {
            ordinal: number, uuid: uuid(core, number), tracked_bytes: self.tracked, unseen_bytes: self.unseen,
            direct_bytes: self.direct.bytes, direct: self.direct.count, block_bytes: self.blocks.bytes,
            blocks: self.blocks.count, pending_bytes: self.pending, pool_idle_bytes: self.idle,
            opaque_bytes: self.opaque, pools: list(self.pools), tags: list(tags),
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn texts_are_json() {
        let object = object! { text: "a\"b\\c\n\u{e9}", none: None::<u64>, number: 1_u8 };
        assert_eq!(object.0, "{\"text\":\"a\\\"b\\\\c\\u000a\u{e9}\",\"none\":null,\"number\":1}");
    }
}
