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
use crate::base::row::{RowCopy, RowExtra, device_of, kind, kind_of, memory_of, pool_owner};
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
/// The high-water mark of the open range.
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
    let phase = match named.phase {
        Phase::Setup => "setup",
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Optimizer => "optimizer",
        Phase::Evaluation => "evaluation",
        _ => "unknown",
    };
    let mut text = python::text::Out::new(out);
    for part in [core.recorder.names.path(named.tag).unwrap_or_default(), b" ", phase.as_bytes(), b"\n"] {
        text.put(part);
    }
    let used = text.used();
    used + python::stack_text(thread, &mut out[used..])
}

/// Returns a string as a JSON literal.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for char in text.chars() {
        match char {
            '"' | '\\' => out.extend(['\\', char]),
            char if char.is_control() => drop(write!(out, "\\u{:04x}", char as u32)),
            char => out.push(char),
        }
    }
    out.push('"');
    out
}

/// Converts `OptimizerState` to `optimizer_state`.
fn word(value: impl Debug) -> String {
    let mut out = String::new();
    for char in format!("{value:?}").chars() {
        if char.is_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.extend(char.to_lowercase());
    }
    out
}

fn list(parts: impl IntoIterator<Item = String>) -> String {
    format!("[{}]", parts.into_iter().collect::<Vec<_>>().join(","))
}

fn path(core: &Core, tag: u32) -> String {
    core.recorder.names.path(tag).map_or_else(String::new, |path| String::from_utf8_lossy(path).into_owned())
}

fn status(core: &Core) -> String {
    crate::sources::api::scope::look();
    let said = |said: &status::StatusReport| {
        format!(
            "{{\"since_ns\":{},\"state\":{},\"detail\":{}}}",
            said.time_ns,
            quoted(&word(said.state)),
            quoted(&said.detail)
        )
    };
    let layers = status::layers().into_iter().map(|said| {
        format!(
            "{{\"layer\":{},\"state\":{},\"reason\":{}}}",
            quoted(&word(said.layer)),
            quoted(&word(said.state)),
            quoted(&said.reason)
        )
    });
    let refused = core.recorder.live.refused.load(Relaxed) + crate::threads::refused();
    format!(
        "{{\"pid\":{},\"time_ns\":{},\"said\":{},\"layers\":{},\"connected\":{},\"recording\":{},\"recorded\":{},\
         \"lost\":{},\"rows_refused\":{},\"names_refused\":{}}}",
        core.pid,
        core.recorder.clock.now(),
        list(status::reports_after(0, core.recorder.clock.now()).iter().map(said)),
        list(layers),
        own_thread::connected(),
        core.settings.record.as_ref().map_or("null".to_owned(), |path| quoted(&path.to_string_lossy())),
        core.recorder.ring.head(),
        core.recorder.ring.lost(),
        refused,
        core.recorder.names.refused.load(Relaxed),
    )
}

fn high(core: &Core) -> String {
    if !high_water::open() {
        return String::new();
    }
    let family = |device: usize, name: &str, family: Family| {
        let (high, live, tags) = high_water::read(device, family);
        let tags = tags
            .iter()
            .map(|&(tag, bytes)| format!("{{\"path\":{},\"bytes\":{bytes}}}", quoted(&path(core, tag))));
        format!("\"{name}\":{{\"high_bytes\":{high},\"live_bytes\":{live},\"tags\":{}}}", list(tags))
    };
    let device = |device: u8| {
        let at = usize::from(device);
        (at < high_water::DEVICES).then(|| {
            format!(
                "{{\"ordinal\":{device},{},{}}}",
                family(at, "allocations", Family::Allocations),
                family(at, "blocks", Family::Blocks)
            )
        })
    };
    format!("{{\"devices\":{}}}", list(core.devices.seen().filter_map(device)))
}

/// Returns the device's UUID in the format of NVML and the daemon's report; null if the driver does not return it.
fn uuid(core: &Core, ordinal: u8) -> String {
    let mut uuid = [0_u8; 16];
    let get = core.devices.driver().and_then(|driver| driver.device_get_uuid);
    // SAFETY: a function of the loaded driver; `uuid` has room for its answer.
    if get.is_none_or(|get| unsafe { get(&mut uuid, ordinal.into()) } != 0) {
        return "null".to_owned();
    }
    let mut out = String::from("\"GPU");
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 0 | 4 | 6 | 8 | 10) {
            out.push('-');
        }
        let _ = write!(out, "{byte:02x}");
    }
    out.push('"');
    out
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

/// Sum and number of memory pieces.
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

type Name = (u32, u8, u8);

fn name_of(taken: &RowCopy) -> Name {
    let row = &taken.row;
    let own = if kind_of(row) == kind::BLOCK_ALLOC { (row[7] >> 56) as u8 } else { 0 };
    let told = if taken.beside.flags & RowExtra::RETAGGED != 0 { taken.beside.use_as } else { 0 };
    let (role, phase) = (told & 15, told >> 4);
    (row[5] as u32, if role == 0 { own & 15 } else { role }, if phase == 0 { own >> 4 } else { phase })
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
    pools: Vec<String>,
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
    let devices = list(devices.collect::<Vec<_>>());
    let host = host.iter().map(|(kind, heap)| {
        format!("{}:{{\"bytes\":{},\"count\":{}}}", quoted(kind), heap.bytes, heap.count)
    });
    format!(
        "{{\"schema\":1,\"pid\":{},\"time_ns\":{},\"devices\":{devices},\"host\":{{{}}}}}",
        core.pid,
        core.recorder.clock.now(),
        host.collect::<Vec<_>>().join(",")
    )
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
        self.pools.push(format!(
            "{{\"id\":{id},\"name\":\"\",\"owner\":{},\"parent\":0,\"reserved_bytes\":{},\"used_bytes\":{handed_out},\
             \"idle_bytes\":{idle}}}",
            quoted(&word(owner)),
            told.map_or("null".to_owned(), |(reserved, _)| reserved.to_string()),
        ));
    }

    fn framework_pool(&mut self, core: &Core, id: u64, pool: &Pool, segments: u64, inner: &Ranges) {
        let (mut all, mut own, mut pending) = (0, Heap::default(), 0);
        for block in &pool.blocks {
            let bytes = block.row[3];
            let left = bytes - inner.overlap(block.row[2], bytes);
            all += bytes;
            if block.beside.flags & RowExtra::PENDING != 0 {
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
        self.pools.push(format!(
            "{{\"id\":{id},\"name\":{},\"owner\":\"framework\",\"parent\":{parent},\"opaque\":{opaque},\
             \"segments\":{},\"segment_bytes\":{segments},\"blocks\":{},\"block_bytes\":{all},\
             \"pending_bytes\":{pending},\"idle_bytes\":{idle}}}",
            quoted(&path(core, tag)),
            pool.segments.len(),
            pool.blocks.len(),
        ));
    }

    fn text(&self, core: &Core, number: u8) -> String {
        let names = |names: &BTreeMap<Name, Heap>, of: &str| {
            let line = |(&(tag, role, phase), heap): (&Name, &Heap)| {
                format!(
                    "{{\"of\":\"{of}\",\"path\":{},\"role\":{},\"phase\":{},\"bytes\":{},\"count\":{}}}",
                    quoted(&path(core, tag)),
                    quoted(&word(Role::from_code(role))),
                    quoted(&word(Phase::from_code(phase))),
                    heap.bytes,
                    heap.count
                )
            };
            names.iter().map(line).collect::<Vec<_>>()
        };
        let tags = [names(&self.block_names, "blocks"), names(&self.direct_names, "direct")].concat();
        format!(
            "{{\"ordinal\":{number},\"uuid\":{},\"tracked_bytes\":{},\"unseen_bytes\":{},\"direct_bytes\":{},\"direct\":{},\
             \"block_bytes\":{},\"blocks\":{},\"pending_bytes\":{},\"pool_idle_bytes\":{},\"opaque_bytes\":{},\
             \"pools\":{},\"tags\":{}}}",
            uuid(core, number),
            self.tracked,
            self.unseen,
            self.direct.bytes,
            self.direct.count,
            self.blocks.bytes,
            self.blocks.count,
            self.pending,
            self.idle,
            self.opaque,
            list(self.pools.iter().cloned()),
            list(tags)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn texts_are_json() {
        assert_eq!(quoted("a\"b\\c\n\u{e9}"), "\"a\\\"b\\\\c\\u000a\u{e9}\"");
    }
}
