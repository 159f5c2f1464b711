//! Converts the values of the pickle to the allocator's state and history. Unknown keys are ignored. Segments, blocks and history
//! entries with impossible values are skipped, counted, and reported with their place.
//!
//! ```text
//! {segments: [{device, address, total_size, allocated_size, requested_size, stream, segment_type, segment_pool_id,
//!              is_expandable, blocks: [{address, size, requested_size, state, frames: [{name, filename, line}]}]}],
//!  device_traces: [[{action, addr, size, stream, time_us, frames, user_metadata, device_free}]],
//!  external_annotations: [{stage, name, device, time_us}], allocator_settings: {...},
//!  host_segments: [...], host_traces: [...]}
//! ```
//!
//! Older snapshots are a bare list of segments, have no `address` in blocks, and have `history` instead of `frames`.
//!
//! A pickle may refer to the same list many times, so a small file can contain the same million blocks a million times. To limit
//! the time, the number of values read is limited in proportion to the number of items in the file. Beyond it, the file is
//! rejected.

use super::arena::{Arena, Kind, NONE, Ref};
use super::stack::part;
use crate::feed::Rejects;
use gpumem_replay::Settings;
use gpumem_wire::Role;
use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;

/// Upper limit of device numbers (exclusive).
const MAX_DEVICES: i64 = 64;
/// Upper limit of addresses and of the ends of ranges; no GPU uses more bits.
const MAX_ADDRESS: i64 = 1 << 56;
/// Maximum size of a segment or block in bytes (as in the ledger).
const MAX_BYTES: i64 = 1 << 48;
/// Maximum number of fields that are read from the dict of one record.
const MAX_FIELDS: usize = 256;

/// A segment (memory that the allocator got from the driver at once) at the time of the snapshot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    pub device: u8,
    pub address: u64,
    pub bytes: u64,
    /// Bytes in live blocks of the segment, according to the segment's field `allocated_size`.
    pub allocated: Option<u64>,
    pub is_expandable: bool,
    pub is_small: bool,
    /// Whether the segment belongs to a private pool (of a CUDA graph or a `MemPool`).
    pub is_private: bool,
    pub is_host: bool,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Block {
    pub device: u8,
    pub address: u64,
    pub bytes: u64,
    pub requested: u64,
    pub stream: u32,
    /// Whether the block was freed, but a stream may still use it.
    pub is_pending: bool,
    pub frames: Ref,
    pub is_host: bool,
    /// Role of the block; only in a recording.
    pub role: Role,
}

/// Kind of an entry in the allocator's history.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Action {
    #[default]
    Alloc,
    FreeRequested,
    FreeCompleted,
    SegmentAlloc,
    SegmentFree,
    /// The allocator mapped a part of an expandable segment.
    SegmentMap,
    SegmentUnmap,
    Oom,
    Annotate,
    Snapshot,
    /// The driver refused memory: segments are released next to serve the same request. Only in recordings.
    Refused,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Event {
    pub action: Action,
    /// Address of the entry's memory. For [`Action::Oom`], the free bytes of the device instead, `u64::MAX` if unknown.
    pub address: u64,
    /// Bytes of the entry; for a block, the requested bytes, before they are rounded to a block size.
    pub bytes: u64,
    pub time_us: u64,
    pub stream: u32,
    /// Number of the pool that serves the request; 0 for the default pool, or if the history lacks the pool.
    pub pool: u32,
    pub frames: Ref,
    /// Text that the program attached to its allocations (`user_metadata`).
    pub metadata: Ref,
    /// Role of the block; only in a recording.
    pub role: Role,
}

/// Begin or end of a profiler range: a named part of the program's work.
#[derive(Debug, Clone, Copy)]
pub(super) struct Annotation {
    pub begins: bool,
    pub name: Ref,
    pub device: u8,
    pub time_us: u64,
}

/// Names in the file that this importer does not know: the number of occurrences, and the first name.
#[derive(Debug, Default)]
pub(super) struct Unknown {
    pub count: u64,
    pub first: String,
}

impl Unknown {
    fn add(&mut self, name: &str) {
        self.count += 1;
        if self.first.is_empty() {
            self.first = part(name);
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Snapshot {
    pub segments: Vec<Segment>,
    pub blocks: Vec<Block>,
    pub idle_blocks: u64,
    /// History of each device, the oldest entry first.
    pub traces: Vec<Vec<Event>>,
    pub annotations: Vec<Annotation>,
    pub settings: Settings,
    pub rejects: Rejects,
    /// Unknown actions in entries of the history.
    pub unknown_actions: Unknown,
    /// Unknown states of blocks. These blocks count as in use.
    pub unknown_states: Unknown,
    /// Number of entries in the history of host memory; these are not replayed.
    pub host_entries: u64,
    pub streams: Streams,
    /// Text of the allocator's settings.
    pub settings_text: String,
    /// Whether the entries of the history state their pool.
    pub has_pools: bool,
    pools: HashMap<(i64, i64), u32>,
}

/// Numbers the CUDA streams in the order of their first use, by the stream's address. 0 is the default stream.
#[derive(Debug, Default)]
pub(super) struct Streams(HashMap<i64, u32>);

impl Streams {
    fn number(&mut self, stream: i64) -> u32 {
        if stream == 0 {
            return 0;
        }
        let next = self.0.len() as u32 + 1;
        *self.0.entry(stream).or_insert(next)
    }
}

/// Reason why a pickle is not a snapshot.
#[derive(Debug)]
pub(super) struct Unfit(pub String);

/// Reads values from the arena, up to a maximum number of values.
struct Walk<'a> {
    arena: &'a Arena,
    /// Number of values that may still be read.
    left: Cell<u64>,
}

impl<'a> Walk<'a> {
    fn spend(&self, count: usize) -> Result<(), Unfit> {
        let left = self.left.get().checked_sub(count as u64 + 1);
        self.left.set(left.ok_or_else(|| {
            Unfit("its lists and dicts refer to each other too many times to be read".into())
        })?);
        Ok(())
    }

    /// Like [`Arena::fields`], with at most [`MAX_FIELDS`] pairs.
    fn fields<const N: usize>(&self, dict: Ref, names: &str) -> Result<Option<[Ref; N]>, Unfit> {
        if self.arena.kind(dict) == Some(Kind::Dict) {
            let items: usize = self.arena.runs(dict).map(<[Ref]>::len).sum();
            self.spend(items)?;
        }
        Ok(self.arena.fields(dict, names, MAX_FIELDS))
    }

    /// Calls `visit` for the items of a list or tuple; does nothing for other values.
    fn each(&self, list: Ref, mut visit: impl FnMut(usize, Ref) -> Result<(), Unfit>) -> Result<(), Unfit> {
        if !matches!(self.arena.kind(list), Some(Kind::List | Kind::Tuple)) {
            return Ok(());
        }
        let mut index = 0;
        for run in self.arena.runs(list) {
            self.spend(run.len())?;
            for &item in run {
                visit(index, item)?;
                index += 1;
            }
        }
        Ok(())
    }

    /// Returns a number if it is in `range`, which contains no negative numbers.
    fn within(&self, value: Ref, range: Range<i64>) -> Option<u64> {
        self.arena.int(value).filter(|number| range.contains(number)).map(|number| number as u64)
    }

    fn size(&self, value: Ref) -> Option<u64> {
        self.within(value, 0..MAX_BYTES + 1)
    }

    fn address(&self, value: Ref) -> Option<u64> {
        self.within(value, 1..MAX_ADDRESS)
    }

    fn device(&self, value: Ref) -> Option<u8> {
        self.within(value, 0..MAX_DEVICES).map(|device| device as u8)
    }

    fn time(&self, value: Ref) -> u64 {
        // The importer multiplies this time in us by 1000; the result in ns must fit into 63 bits.
        self.within(value, 0..i64::MAX / 2000).unwrap_or(0)
    }

    fn is_text(&self, value: Ref, text: &str) -> bool {
        self.arena.bytes_of(value) == Some(text.as_bytes())
    }
}

pub(super) fn read(arena: &Arena, root: Ref) -> Result<Snapshot, Unfit> {
    let walk = Walk { arena, left: Cell::new(arena.filled.saturating_mul(8).saturating_add(10_000)) };
    let mut snapshot = Snapshot::default();
    let names = "segments device_traces external_annotations allocator_settings host_segments host_traces";
    let is_list = |value: Ref| arena.kind(value) == Some(Kind::List);
    match (arena.kind(root), walk.fields(root, names)?) {
        (_, Some([segments, traces, annotations, settings, host_segments, host_traces]))
            if is_list(segments) || is_list(traces) =>
        {
            snapshot.settings = read_settings(&walk, settings)?;
            if let Some([text]) = walk.fields(settings, "PYTORCH_CUDA_ALLOC_CONF")? {
                snapshot.settings_text = arena.text(text).unwrap_or_default().into();
            }
            walk.each(segments, |index, segment| snapshot.segment(&walk, index, segment, false))?;
            walk.each(host_segments, |index, segment| snapshot.segment(&walk, index, segment, true))?;
            walk.each(traces, |device, trace| snapshot.trace(&walk, device, trace))?;
            walk.each(host_traces, |_, entry| {
                // An element of `host_traces` is one entry, or a list of entries.
                let mut count = u64::from(arena.kind(entry) == Some(Kind::Dict));
                walk.each(entry, |_, _| {
                    count += 1;
                    Ok(())
                })?;
                snapshot.host_entries += count;
                Ok(())
            })?;
            walk.each(annotations, |index, annotation| snapshot.annotation(&walk, index, annotation))?;
        }
        (Some(Kind::List), _) => {
            walk.each(root, |index, segment| snapshot.segment(&walk, index, segment, false))?;
            if snapshot.segments.is_empty() {
                return Err(Unfit("is a pickle of a list without a segment of PyTorch's allocator".into()));
            }
        }
        _ => {
            let what = arena.describe(root);
            return Err(Unfit(format!(
                "is a pickle of {what}; a snapshot is a dict with the lists `segments` and `device_traces`, as \
                 torch.cuda.memory._dump_snapshot() writes it"
            )));
        }
    }
    Ok(snapshot)
}

fn read_settings(walk: &Walk<'_>, settings: Ref) -> Result<Settings, Unfit> {
    let Some([divisions, max_split]) = walk.fields(settings, "roundup_power2_divisions max_split_size")?
    else {
        return Ok(Settings::default());
    };
    let mut read = Settings::default();
    if let Some(bytes) = walk.arena.int(max_split).filter(|&bytes| bytes > 0) {
        read.max_split_bytes = Some(bytes as u64);
    }
    let sizes = "1 2 4 8 16 32 64 128 256 512 1024 2048 4096 8192 16384 32768";
    if let Some(found) = walk.fields::<16>(divisions, sizes)? {
        for (to, from) in read.divisions.iter_mut().zip(found) {
            *to = walk.arena.int(from).and_then(|count| u32::try_from(count).ok()).map_or(0, u64::from);
        }
    }
    Ok(read)
}

impl Snapshot {
    fn segment(&mut self, walk: &Walk<'_>, index: usize, segment: Ref, is_host: bool) -> Result<(), Unfit> {
        let names = "device address total_size allocated_size stream segment_pool_id is_expandable segment_type blocks";
        let list = if is_host { "host segment" } else { "segment" };
        let fields = walk.fields(segment, names)?;
        let [device, address, total, allocated, stream, pool, expandable, kind, blocks] =
            fields.unwrap_or([NONE; 9]);
        let device = if is_host || device == NONE { Some(0) } else { walk.device(device) };
        let (Some(device), Some(address), Some(bytes)) = (device, walk.address(address), walk.size(total))
        else {
            self.rejects.add(|| format!("{list} {index} (device, address or total_size)"));
            return Ok(());
        };
        if bytes == 0 {
            return Ok(());
        }
        let mut is_private = false;
        walk.each(pool, |_, part| {
            is_private |= walk.arena.int(part).is_some_and(|part| part != 0);
            Ok(())
        })?;
        let stream = self.streams.number(walk.arena.int(stream).unwrap_or(0));
        self.segments.push(Segment {
            device,
            address,
            bytes,
            allocated: walk.size(allocated),
            is_expandable: walk.arena.is_true(expandable),
            is_small: walk.is_text(kind, "small"),
            is_private,
            is_host,
        });
        let mut next = address;
        walk.each(blocks, |place, block| {
            let defaults = Block { device, address: next, stream, is_host, ..Block::default() };
            match self.block(walk, block, defaults, address.saturating_add(bytes))? {
                Some(end) => next = end,
                None => self.rejects.add(|| format!("{list} {index}, block {place} (address or size)")),
            }
            Ok(())
        })
    }

    /// Reads a block. Returns its end address, or `None` if its address or size is impossible. `defaults` has the segment's
    /// values, and the end of the previous block as address, for files without `address`. `limit` is the end of the segment.
    fn block(
        &mut self,
        walk: &Walk<'_>,
        block: Ref,
        defaults: Block,
        limit: u64,
    ) -> Result<Option<u64>, Unfit> {
        let fields = walk.fields(block, "address size requested_size state frames history")?;
        let Some([address, size, requested, state, frames, history]) = fields else { return Ok(None) };
        let address = if address == NONE { Some(defaults.address) } else { walk.address(address) };
        let (Some(address), Some(bytes)) = (address, walk.size(size)) else { return Ok(None) };
        let end = address.saturating_add(bytes);
        if end > limit || address < defaults.address || bytes == 0 {
            return Ok(None); // blocks must lie in their segment and be sorted by address
        }
        let is_pending =
            walk.is_text(state, "active_pending_free") || walk.is_text(state, "active_awaiting_free");
        if walk.is_text(state, "inactive") {
            self.idle_blocks += 1;
            return Ok(Some(end));
        }
        if !is_pending && !walk.is_text(state, "active_allocated") {
            self.unknown_states.add(&walk.arena.text(state).unwrap_or("none".into()));
        }
        let (mut frames, mut requested) = (frames, walk.size(requested));
        let mut first = true;
        walk.each(history, |_, allocation| {
            if std::mem::take(&mut first)
                && let Some([own_frames, real_size]) = walk.fields(allocation, "frames real_size")?
            {
                (frames, requested) = (own_frames, walk.size(real_size).or(requested));
            }
            Ok(())
        })?;
        let requested = requested.filter(|&requested| requested <= bytes).unwrap_or(bytes);
        self.blocks.push(Block { address, bytes, requested, is_pending, frames, ..defaults });
        Ok(Some(end))
    }

    fn trace(&mut self, walk: &Walk<'_>, device: usize, trace: Ref) -> Result<(), Unfit> {
        let mut events = Vec::new();
        walk.each(trace, |index, entry| {
            let place = || format!("device {device}, trace entry {index} (action, addr or size)");
            let names = "action addr size stream time_us frames user_metadata device_free pool_id";
            let Some([action, addr, size, stream, time, frames, metadata, free, pool]) =
                walk.fields(entry, names)?
            else {
                self.rejects.add(place);
                return Ok(());
            };
            let known = ACTIONS.iter().find(|(name, _)| walk.is_text(action, name));
            let (Some(&(_, action)), true) = (known, (device as i64) < MAX_DEVICES) else {
                match walk.arena.text(action) {
                    Some(name) if known.is_none() => self.unknown_actions.add(&name),
                    _ => self.rejects.add(place),
                }
                return Ok(());
            };
            let address = match action {
                Action::Oom => Some(walk.size(free).unwrap_or(u64::MAX)),
                Action::Snapshot => Some(0),
                _ => walk.address(addr),
            };
            let bytes =
                walk.size(size).or(matches!(action, Action::Snapshot | Action::Annotate).then_some(0));
            let (Some(address), Some(bytes)) = (address, bytes) else {
                self.rejects.add(place);
                return Ok(());
            };
            let pool = self.pool(walk, pool)?;
            events.push(Event {
                action,
                address,
                bytes,
                time_us: walk.time(time),
                stream: self.streams.number(walk.arena.int(stream).unwrap_or(0)),
                pool,
                frames,
                metadata,
                role: Role::Unknown,
            });
            Ok(())
        })?;
        if (device as i64) < MAX_DEVICES {
            self.traces.push(events);
        }
        Ok(())
    }

    /// Returns the number of a pool; the history identifies a pool by two numbers.
    fn pool(&mut self, walk: &Walk<'_>, pool: Ref) -> Result<u32, Unfit> {
        let mut name = [0; 2];
        walk.each(pool, |index, part| {
            self.has_pools = true;
            if let Some(place) = name.get_mut(index) {
                *place = walk.arena.int(part).unwrap_or(0);
            }
            Ok(())
        })?;
        if name == [0, 0] {
            return Ok(0);
        }
        let next = self.pools.len() as u32 + 1;
        Ok(*self.pools.entry((name[0], name[1])).or_insert(next))
    }

    fn annotation(&mut self, walk: &Walk<'_>, index: usize, annotation: Ref) -> Result<(), Unfit> {
        let fields = walk.fields(annotation, "stage name device time_us")?;
        let [stage, name, device, time] = fields.unwrap_or([NONE; 4]);
        let begins = walk.is_text(stage, "START");
        match walk.device(device) {
            Some(device) if begins || walk.is_text(stage, "END") => {
                self.annotations.push(Annotation { begins, name, device, time_us: walk.time(time) });
            }
            _ => self.rejects.add(|| format!("external annotation {index}: invalid stage or device")),
        }
        Ok(())
    }
}

const ACTIONS: [(&str, Action); 10] = [
    ("alloc", Action::Alloc),
    ("free_requested", Action::FreeRequested),
    ("free_completed", Action::FreeCompleted),
    ("segment_alloc", Action::SegmentAlloc),
    ("segment_free", Action::SegmentFree),
    ("segment_map", Action::SegmentMap),
    ("segment_unmap", Action::SegmentUnmap),
    ("oom", Action::Oom),
    ("annotate", Action::Annotate),
    ("snapshot", Action::Snapshot),
];
