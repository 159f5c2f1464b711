//! The process's live memory, the agent's status, and the high-water mark of an open range, as JSON for the program itself
//! (`gpumem_snapshot`). Must not be called in a hook: it allocates. Amounts are bytes. It reads the live table while other
//! threads continue, so it is exact only if nothing is allocated or freed meanwhile.
//!
//! ```text
//! tracked + unseen = direct + blocks + pool_idle + opaque        for each device, exactly
//!   tracked   live driver allocations; for driver pools the reserved bytes
//!   unseen    bytes of segments without a known allocation below them
//!   direct    bytes of allocations that are not segments of a framework's pool
//!   blocks    blocks of the innermost pools, including pending ones
//!   pool_idle bytes of segments without a block; for driver pools, reserved but unused bytes
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

/// Returns the JSON text of `what`; empty if that is unknown.
pub(crate) fn text(core: &Core, what: i32) -> String {
    let _uncancelled = crate::base::own_thread::Uncancelled::now();
    match what {
        LIVE => live(core),
        STATUS => status(core),
        HIGH => high(core),
        _ => String::new(),
    }
}

/// Writes the name that an allocation of this thread would get now, then its Python stack. For diagnosis and tests.
pub(crate) fn describe_here(core: &Core, thread: &Thread, out: &mut [u8]) -> usize {
    let named = core.named(thread);
    let mut text = python::text::TextBuffer::new(out);
    text.put(core.recorder.names.path(named.tag).unwrap_or_default());
    let tag_end = text.used();
    let _ = writeln!(text, " {:?}", named.phase);
    let used = text.used();
    out[tag_end..used].make_ascii_lowercase();
    used + python::stack_text(&mut out[used..])
}

pub(crate) trait Json {
    fn write(&self, out: &mut String);
}

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

impl Json for str {
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

impl<T: Json + ?Sized> Json for &T {
    fn write(&self, out: &mut String) {
        (*self).write(out);
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
    crate::sources::api::scope::look();
    let now = core.recorder.clock.now();
    let said = status::reports_after(0, now)
        .into_iter()
        .map(|said| object! { since_ns: said.time_ns, state: word(said.state), detail: said.detail });
    let layers = status::layers()
        .into_iter()
        .map(|said| object! { layer: word(said.layer), state: word(said.state), reason: said.reason });
    let recording = core.settings.record.as_ref().map(|path| path.to_string_lossy().into_owned());
    let status = object! {
        pid: core.pid, time_ns: now, said: list(said), layers: list(layers), connected: own_thread::connected(),
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

/// Returns the device's UUID in the format of NVML and the daemon's report; `None` if the driver does not return it.
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
#[derive(Default)]
struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    fn of(mut ranges: Vec<(u64, u64)>) -> Self {
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

    fn overlap(&self, start: u64, bytes: u64) -> u64 {
        let end = start.saturating_add(bytes);
        let first = self.0.partition_point(|range| range.1 <= start);
        let over = self.0[first..].iter().take_while(|range| range.0 < end);
        over.map(|range| range.1.min(end) - range.0.max(start)).sum()
    }
}

fn range(row: &RowCopy) -> (u64, u64) {
    (row.row[2], row.row[2].saturating_add(row.row[3]))
}

#[derive(Default, Clone, Copy)]
struct Heap {
    bytes: u64,
    count: u64,
}

impl Heap {
    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.count += 1;
    }
}

/// Tag, role and phase.
type Name = (u32, (Role, Phase));

fn name_of(taken: &RowCopy) -> Name {
    (taken.row[5] as u32, taken.use_as())
}

#[derive(Default)]
struct Pool {
    row: Option<RowCopy>,
    segments: Vec<(u64, u64)>,
    blocks: Vec<RowCopy>,
}

impl Pool {
    fn parent(&self) -> u64 {
        self.row.map_or(0, |row| row.row[4])
    }

    fn reports_blocks(&self) -> bool {
        self.row.is_some_and(|row| row.row[7] >> 16 & 0xffff != 0) || !self.blocks.is_empty()
    }
}

#[derive(Default)]
struct Device {
    tracked: u64,
    unseen: i64,
    direct: Heap,
    blocks: Heap,
    pending: u64,
    idle: u64,
    opaque: u64,
    direct_names: BTreeMap<Name, Heap>,
    block_names: BTreeMap<Name, Heap>,
    pools: Vec<Raw>,
}

fn live(core: &Core) -> String {
    let rows: Vec<RowCopy> = core.recorder.live.scan().collect();
    let mut pools: BTreeMap<u64, Pool> = BTreeMap::new();
    let mut by_device: BTreeMap<u8, (Device, Vec<RowCopy>)> = BTreeMap::new();
    let mut host: BTreeMap<String, Heap> = BTreeMap::new();
    let mut mappings: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
    for device in core.devices.seen() {
        by_device.entry(device).or_default();
    }
    for taken in &rows {
        let row = &taken.row;
        match kind_of(row) {
            kind::POOL_CREATE => pools.entry(row[2]).or_default().row = Some(*taken),
            kind::SEGMENT_ADD => pools.entry(row[4]).or_default().segments.push(range(taken)),
            kind::BLOCK_ALLOC => pools.entry(row[4]).or_default().blocks.push(*taken),
            kind::VMM_MAP => mappings.entry(taken.beside.backing).or_default().push(range(taken)),
            kind::IMPORT => host.entry("imported".to_owned()).or_default().add(row[3]),
            kind::ALLOC_END | kind::VMM_CREATE => match memory_of(row) {
                memory @ (MemoryKind::Managed
                | MemoryKind::Pinned
                | MemoryKind::Registered
                | MemoryKind::Imported
                | MemoryKind::HostVmm) => host.entry(word(memory)).or_default().add(row[3]),
                _ => by_device.entry(device_of(row)).or_default().1.push(*taken),
            },
            _ => {}
        }
    }
    for pool in pools.values() {
        if let Some(row) = pool.row {
            by_device.entry(device_of(&row.row)).or_default();
        }
    }
    let parts = by_device.into_iter().filter(|(device, _)| *device != NONE_DEVICE);
    let devices = parts.map(|(number, (mut device, allocations))| {
        device.fill(core, number, &pools, &allocations, &mappings);
        device.text(core, number)
    });
    let devices = list(devices);
    let host = host
        .iter()
        .map(|(kind, heap)| format!("\"{kind}\":{}", object! { bytes: heap.bytes, count: heap.count }.0));
    let (time_ns, host) = (core.recorder.clock.now(), joined('{', '}', host));
    object! { schema: 1_u64, pid: core.pid, time_ns: time_ns, devices: devices, host: host }.0
}

impl Device {
    fn fill(
        &mut self,
        core: &Core,
        number: u8,
        pools: &BTreeMap<u64, Pool>,
        allocations: &[RowCopy],
        mappings: &HashMap<u64, Vec<(u64, u64)>>,
    ) {
        let here = |pool: &Pool| pool.row.is_some_and(|row| device_of(&row.row) == number);
        let is_framework =
            |pool: &Pool| pool.row.is_none_or(|row| pool_owner(&row.row) == PoolOwner::Framework);
        let carved = |inner: Option<u64>| {
            let of = pools.values().filter(|pool| here(pool) && is_framework(pool));
            let of = of.filter(|pool| inner.map_or(pool.parent() == 0, |parent| pool.parent() == parent));
            Ranges::of(of.flat_map(|pool| pool.segments.iter().copied()).collect())
        };
        let outermost = carved(None);
        let mut handed_out: HashMap<u64, u64> = HashMap::new();
        for taken in allocations {
            let (row, bytes) = (&taken.row, taken.row[3]);
            let covered = match kind_of(row) {
                kind::VMM_CREATE => {
                    let places = mappings.get(&taken.seq()).map_or(&[][..], |places| places);
                    let over = places.iter().map(|(start, end)| outermost.overlap(*start, end - start));
                    over.sum::<u64>().min(bytes)
                }
                _ => outermost.overlap(row[2], bytes),
            };
            if memory_of(row) == MemoryKind::StreamOrdered {
                *handed_out.entry(row[4]).or_default() += bytes;
            }
            self.tracked += bytes;
            if covered < bytes {
                self.direct.add(bytes - covered);
                self.direct_names.entry(name_of(taken)).or_default().add(bytes - covered);
            }
        }
        for (&id, pool) in pools.iter().filter(|(_, pool)| here(pool)) {
            if !is_framework(pool) {
                self.driver_pool(core, id, pool, handed_out.get(&id).copied().unwrap_or(0));
                continue;
            }
            let segments: u64 = pool.segments.iter().map(|(start, end)| end - start).sum();
            self.framework_pool(core, id, pool, segments, &carved(Some(id)));
        }
        let named = self.direct.bytes + self.blocks.bytes + self.idle + self.opaque;
        self.unseen = named.cast_signed() - self.tracked.cast_signed();
    }

    fn driver_pool(&mut self, core: &Core, id: u64, pool: &Pool, handed_out: u64) {
        let told = core.driver_pools.state(id);
        let idle = told.map_or(0, |(reserved, _)| reserved.saturating_sub(handed_out));
        self.tracked += idle;
        self.idle += idle;
        let owner = pool.row.map_or(PoolOwner::Unknown, |row| pool_owner(&row.row));
        self.pools.push(object! {
            id: id, name: "", owner: word(owner), parent: 0_u64, reserved_bytes: told.map(|(reserved, _)| reserved),
            used_bytes: handed_out, idle_bytes: idle,
        });
    }

    fn framework_pool(&mut self, core: &Core, id: u64, pool: &Pool, segments: u64, inner: &Ranges) {
        let (mut all, mut own, mut pending) = (0, Heap::default(), 0);
        for block in &pool.blocks {
            let bytes = block.row[3];
            let left = bytes - inner.overlap(block.row[2], bytes);
            all += bytes;
            if block.is_pending() {
                pending += bytes;
            }
            if left > 0 {
                own.add(left);
                self.block_names.entry(name_of(block)).or_default().add(left);
            }
        }
        let opaque = !pool.reports_blocks();
        let idle = if opaque { 0 } else { segments.saturating_sub(all) };
        self.blocks.bytes += own.bytes;
        self.blocks.count += own.count;
        self.pending += pending;
        self.idle += idle;
        if opaque {
            self.opaque += segments;
        }
        let (tag, parent) = pool.row.map_or((0, 0), |row| (row.row[5] as u32, row.row[4]));
        self.pools.push(object! {
            id: id, name: path(core, tag), owner: "framework", parent: parent, opaque: opaque,
            segments: pool.segments.len(), segment_bytes: segments, blocks: pool.blocks.len(), block_bytes: all,
            pending_bytes: pending, idle_bytes: idle,
        });
    }

    fn text(self, core: &Core, number: u8) -> Raw {
        let names = |names: BTreeMap<Name, Heap>, of: &'static str| {
            names.into_iter().map(move |((tag, (role, phase)), heap)| {
                let (role, phase) = (word(role), word(phase));
                object! {
                    of: of, path: path(core, tag), role: role, phase: phase, bytes: heap.bytes, count: heap.count,
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
