//! Extracts the requests of a program to PyTorch's allocator on one device from a recording, for a replay.
//!
//! The records become entries like those of PyTorch's own history (torch_snapshot/model.rs), and so have the same rules. A block
//! states its request, if the agent could read it ([`Request`]). Otherwise the size of the block stands for it, and is counted.

use crate::roles::RoleCollector;
use crate::torch_snapshot::model::{Action, Block, Event as Entry};
use crate::torch_snapshot::{self, Requests};
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::units::plural;
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use gpumem_runs::recording;
use gpumem_runs::requests::{Damaged, POOL_NAME, allocator_settings, read_booked};
use gpumem_wire::{Body, Flags, FreeState, PoolOwner, Record, Request, Role, Stamp};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

/// Maximum size in bytes of a segment or block, as in the ledger, and of all segments together.
const MAX_BYTES: u64 = 1 << 48;

/// Returns whether a file begins like a recording.
pub use gpumem_runs::recording::looks_like;

/// Reads what a process requested from PyTorch's allocator, for each of its devices, the one with the most requests first; with
/// `device`, for this one only. Without `pid`, the process with the most requests on one device counts. `has_roles`: whether the roles
/// of memory are read, too, which takes longer.
///
/// # Errors
/// Those of [`recording::read`]. [`Error::Unsuitable`] if there are no such requests, or if records are missing between them.
pub fn requests(
    input: Input,
    (pid, device): (Option<u32>, Option<u8>),
    has_roles: bool,
) -> Result<Vec<Requests>, Error> {
    let path = input.path.clone();
    let mut programs = Programs { roles: has_roles.then(RoleCollector::new), ..Programs::default() };
    recording::read(input, &mut programs)?;
    programs.requests(pid, device).map_err(|what| Error::Unsuitable { path, what })
}

/// Reads what a process requested from PyTorch's allocator, from the stream that the daemon kept with a run. `name` is
/// the run's name in errors; the rest as in [`requests`].
///
/// # Errors
/// [`Error::Unsuitable`] as in [`requests`], or if the stream is damaged.
pub fn kept_requests(
    pieces: &[Vec<u8>],
    name: &Path,
    device: Option<u8>,
    has_roles: bool,
) -> Result<Vec<Requests>, Error> {
    let key = ProcessKey { pid: 0, start_ticks: 0 };
    let pieces = || pieces.iter().map(Vec::as_slice);
    let read = || {
        let mut programs = Programs::default();
        gpumem_runs::requests::read(pieces(), key, &mut programs)?;
        if has_roles {
            read_booked(pieces(), key, programs.roles.insert(RoleCollector::new()))?;
        }
        Ok(programs)
    };
    let programs: Result<Programs, Damaged> = read();
    let requests =
        programs.map_err(|damage| damage.to_string()).and_then(|programs| programs.requests(None, device));
    requests.map_err(|what| Error::Unsuitable { path: name.into(), what })
}

struct Live {
    seq: u64,
    bytes: u64,
    stream: u32,
    pool: u32,
    tag: u32,
    /// Number of the block in the process, from 0.
    number: usize,
    is_pending: bool,
}

/// A segment, or a part of an expandable one.
#[derive(Clone, Copy)]
struct Segment {
    bytes: u64,
    /// Private pool; 0 for the default pool.
    pool: u32,
    is_mapped: bool,
}

/// History of the allocator's pool on a device.
#[derive(Default)]
struct History {
    device: u8,
    entries: Vec<Entry>,
    /// Indices in `entries`, and the numbers of the blocks that these are about.
    numbers: Vec<(usize, usize)>,
    live: HashMap<u64, Live>,
    segments: BTreeMap<u64, Segment>,
    /// Ids of private pools, by their numbers in the recording. A number is used again after its pool has ended.
    pools: HashMap<u16, u32>,
    pool_count: u32,
    /// Bytes of all segments.
    reserved: u64,
    /// Bytes of segments that are older than the agent.
    unseen: u64,
    requests: u64,
    /// Number of requests whose bytes are those of the block.
    unknown: u64,
    /// Free bytes of the device when the driver last refused memory.
    free_bytes: Option<u64>,
    /// Whether the driver has refused memory since the last request.
    is_refused: bool,
    last_stream: u32,
}

impl History {
    fn push(&mut self, action: Action, stamp: &Stamp, address: u64, bytes: u64) -> &mut Entry {
        let time_us = stamp.time_ns / 1000;
        self.entries.push(Entry { action, address, bytes, time_us, ..Entry::default() });
        let last = self.entries.len() - 1;
        &mut self.entries[last]
    }

    /// Adds an entry for a segment. Neighbouring parts of an expandable segment are one entry.
    fn push_segment(&mut self, [whole, part]: [Action; 2], stamp: &Stamp, address: u64, segment: Segment) {
        let Segment { bytes, pool, is_mapped } = segment;
        let follows = |last: &&mut Entry| {
            is_mapped && last.action == part && last.address.checked_add(last.bytes) == Some(address)
        };
        match self.entries.last_mut().filter(follows) {
            Some(last) => last.bytes += bytes,
            None => self.push(if is_mapped { part } else { whole }, stamp, address, bytes).pool = pool,
        }
    }

    /// Adds a segment, or a part of an expandable one.
    fn add_segment(&mut self, stamp: &Stamp, address: u64, bytes: u64, is_mapped: bool) {
        if self.segments.contains_key(&address) || self.reserved.saturating_add(bytes) > MAX_BYTES {
            return;
        }
        self.reserved += bytes;
        let segment = Segment { bytes, pool: 0, is_mapped };
        self.segments.insert(address, segment);
        if !is_older(stamp) {
            self.push_segment([Action::SegmentAlloc, Action::SegmentMap], stamp, address, segment);
        }
    }

    fn remove_segments(&mut self, stamp: &Stamp, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes.max(1));
        let gone: Vec<u64> = self.segments.range(address..end).map(|(address, _)| *address).collect();
        for address in gone {
            let Some(segment) = self.segments.remove(&address) else { continue };
            self.reserved -= segment.bytes;
            // Segments of a private pool are released after its end, or for a request that the driver has refused.
            if segment.pool != 0 && !self.is_refused {
                self.pools.retain(|_, id| *id != segment.pool);
            }
            self.push_segment([Action::SegmentFree, Action::SegmentUnmap], stamp, address, segment);
        }
    }

    fn allocate(&mut self, stamp: &Stamp, address: u64, bytes: u64, number: usize) {
        if self.live.get(&address).is_some_and(|live| live.seq == stamp.seq) || bytes > MAX_BYTES {
            return; // restated, or repeated after a resync
        }
        let request = Request::of(stamp);
        let unused = request.map_or(0, |request| u64::from(request.unused_bytes));
        let (stream, pool) = request.map_or((0, 0), |request| (request.stream.into(), request.pool));
        let pool = self.pool_id(pool);
        let bytes = bytes.saturating_sub(unused);
        self.requests += 1;
        self.unknown += u64::from(request.is_none());
        let live = Live { seq: stamp.seq, bytes, stream, pool, tag: stamp.tag, number, is_pending: false };
        self.live.insert(address, live);
        if let Some((_, segment)) = self.segments.range_mut(..=address).next_back() {
            segment.pool = pool;
        }
        if !is_older(stamp) {
            (self.last_stream, self.is_refused) = (stream, false);
            self.numbers.push((self.entries.len(), number));
            let entry = self.push(Action::Alloc, stamp, address, bytes);
            (entry.stream, entry.pool, entry.frames) = (stream, pool, stamp.tag);
        }
    }

    /// Returns the id of a private pool; 0 for the default pool.
    fn pool_id(&mut self, number: u16) -> u32 {
        if number == 0 {
            return 0;
        }
        *self.pools.entry(number).or_insert_with(|| {
            self.pool_count += 1;
            self.pool_count
        })
    }

    fn free(&mut self, stamp: &Stamp, address: u64, state: FreeState) {
        // Blocks that were allocated before the recording are unknown.
        let Some(live) = self.live.get_mut(&address) else { return };
        let was_pending = std::mem::replace(&mut live.is_pending, true);
        let entry = Entry {
            address,
            bytes: live.bytes,
            time_us: stamp.time_ns / 1000,
            stream: live.stream,
            pool: live.pool,
            frames: live.tag,
            ..Entry::default()
        };
        if !was_pending {
            self.numbers.push((self.entries.len(), live.number));
            self.entries.push(Entry { action: Action::FreeRequested, ..entry });
        }
        if state != FreeState::Pending {
            self.entries.push(Entry { action: Action::FreeCompleted, ..entry });
            self.live.remove(&address);
        }
    }

    fn fail(&mut self, stamp: &Stamp, bytes: u64, is_refused: bool) {
        let free = self.free_bytes.take().filter(|_| is_refused);
        self.is_refused = false;
        let stream = self.last_stream;
        let entry = self.push(Action::Oom, stamp, free.unwrap_or(u64::MAX), bytes);
        (entry.stream, entry.frames) = (stream, stamp.tag);
    }

    /// `roles`: those of blocks, by their numbers.
    fn requests(mut self, settings: &str, names: Arc<HashMap<u32, String>>, roles: &[Role]) -> Requests {
        let role = |number: usize| roles.get(number).copied().unwrap_or_default();
        for (index, number) in self.numbers {
            self.entries[index].role = role(number);
        }
        let block = |(address, live): (u64, Live)| Block {
            address,
            requested: live.bytes,
            stream: live.stream,
            frames: live.tag,
            role: role(live.number),
            ..Block::default()
        };
        let history = torch_snapshot::History {
            device: self.device,
            entries: &self.entries,
            blocks: self.live.into_iter().map(block).collect(),
            reserved_bytes: self.reserved,
            has_private_pools: self.segments.values().any(|segment| segment.pool != 0),
            has_pools: self.unknown == 0,
            settings: settings.to_owned(),
        };
        let mut requests = history.requests(names);
        requests.block_sizes = self.unknown;
        if self.unseen > 0 {
            requests.older = (requests.older.0.max(1), requests.older.1.saturating_add(self.unseen));
        }
        requests
    }
}

/// Whether a record is about memory that is older than the recording or the agent.
fn is_older(stamp: &Stamp) -> bool {
    stamp.flags.has(Flags::RESTATED) || stamp.flags.has(Flags::OLDER)
}

#[derive(Default)]
struct Program {
    instance: u16,
    settings: String,
    tags: HashMap<u32, String>,
    /// Pools of PyTorch's allocator, one for each device.
    pools: BTreeMap<u64, History>,
    /// Addresses at which memory is mapped.
    mapped: BTreeSet<u64>,
    /// Number of the last ordered record; 0 before the first.
    last_seq: u64,
    /// Number of missing records.
    missing: u64,
    /// Number of blocks so far.
    blocks: usize,
}

impl Program {
    /// Counts the records that are missing before this one.
    fn note_order(&mut self, stamp: &Stamp) {
        if stamp.seq > self.last_seq && !stamp.flags.has(Flags::RESTATED) {
            if self.last_seq > 0 {
                self.missing = self.missing.saturating_add(stamp.seq - self.last_seq - 1);
            }
            self.last_seq = stamp.seq;
        }
    }

    fn observe(&mut self, stamp: &Stamp, body: &Body<'_>) {
        self.note_order(stamp);
        let of_device = |history: &&mut History| history.device == stamp.device;
        match *body {
            Body::Hello { instance, claims, .. } => self.begin(instance, claims),
            Body::Tag { path } => drop(self.tags.insert(stamp.tag, path.to_owned())),
            Body::ResyncBegin { after_seq, .. } if self.last_seq == 0 => self.last_seq = after_seq,
            Body::Lost { count, .. } => self.missing = self.missing.saturating_add(count),
            Body::PoolCreate { pool, owner: PoolOwner::Framework, .. }
                if self.tags.get(&stamp.tag).is_some_and(|name| name == POOL_NAME) =>
            {
                let history = || History { device: stamp.device, ..History::default() };
                self.pools.entry(pool).or_insert_with(history);
            }
            Body::VmmMap { address, .. } => drop(self.mapped.insert(address)),
            Body::VmmUnmap { address, .. } => drop(self.mapped.remove(&address)),
            Body::SegmentAdd { address, bytes, pool } => {
                let is_mapped = self.mapped.contains(&address);
                if let Some(history) = self.pools.get_mut(&pool) {
                    history.add_segment(stamp, address, bytes, is_mapped);
                }
            }
            Body::SegmentRemove { address, bytes, pool } => {
                if let Some(history) = self.pools.get_mut(&pool) {
                    history.remove_segments(stamp, address, bytes);
                }
            }
            Body::BlockAlloc { address, bytes, pool, .. } => {
                if let Some(history) = self.pools.get_mut(&pool) {
                    history.allocate(stamp, address, bytes, self.blocks);
                }
                self.blocks += 1;
            }
            Body::BlockFree { address, pool, state } => {
                if let Some(history) = self.pools.get_mut(&pool) {
                    history.free(stamp, address, state);
                }
            }
            Body::Pressure { device_free_bytes, .. } => {
                if let Some(history) = self.pools.values_mut().find(of_device) {
                    (history.free_bytes, history.is_refused) = (device_free_bytes.0, true);
                    history.push(Action::Refused, stamp, 0, 0);
                }
            }
            Body::Oom { bytes, result, .. } => {
                if let Some(history) = self.pools.values_mut().find(of_device) {
                    history.fail(stamp, bytes, result != 0);
                }
            }
            Body::Baseline { bytes } => {
                if let Some(history) = self.pools.values_mut().find(of_device) {
                    history.unseen = history.unseen.max(bytes.min(MAX_BYTES));
                }
            }
            _ => {}
        }
    }

    /// Notes the program that begins; a process may run several, one after the other.
    fn begin(&mut self, instance: u16, claims: &str) {
        if instance != self.instance {
            *self = Program { instance, blocks: self.blocks, ..Program::default() };
        }
        self.settings = allocator_settings(claims).to_owned();
    }
}

/// Collects the programs of a recording.
#[derive(Default)]
struct Programs {
    of: BTreeMap<ProcessKey, Program>,
    roles: Option<RoleCollector>,
    /// Reasons why only a part of the file was read.
    caveats: Vec<String>,
}

impl Programs {
    /// Returns the requests of one process on each of its devices, or the reason why there are none.
    fn requests(mut self, pid: Option<u32>, device: Option<u8>) -> Result<Vec<Requests>, String> {
        let is_wanted = |key: &ProcessKey| pid.is_none_or(|pid| key.pid == pid);
        let found = self.of.into_iter().filter(|(key, _)| is_wanted(key));
        let histories = found.filter_map(|(key, mut program)| {
            let is_wanted = |history: &History| device.is_none_or(|device| history.device == device);
            let pools: Vec<History> =
                std::mem::take(&mut program.pools).into_values().filter(is_wanted).collect();
            let most = pools.iter().map(|history| history.requests).max()?;
            Some((most, key, program, pools))
        });
        let Some((most, key, program, histories)) = histories.max_by_key(|(most, ..)| *most) else {
            let what = "has no blocks of PyTorch's allocator for this process and GPU; gpumemctl report lists those that it has";
            return Err(self
                .caveats
                .iter()
                .fold(what.to_owned(), |text, caveat| format!("{text}; {caveat}")));
        };
        if program.missing > 0 {
            let records = plural(program.missing, "record");
            return Err(format!(
                "lacks {records}{}, so what the program requested is unknown (lost, or withheld while it was muted)",
                if key.pid == 0 { String::new() } else { format!(" of process {}", key.pid) }
            ));
        }
        let names = Arc::new(program.tags);
        let roles = self.roles.as_mut().map(|roles| roles.of(key)).unwrap_or_default();
        let used = histories.into_iter().filter(|history| history.requests > 0 || most == 0);
        let mut devices: Vec<Requests> =
            used.map(|history| history.requests(&program.settings, Arc::clone(&names), &roles)).collect();
        devices.iter_mut().for_each(|requests| requests.caveats.clone_from(&self.caveats));
        Requests::sort(&mut devices);
        Ok(devices)
    }
}

impl Sink for Programs {
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        if let Some(roles) = &mut self.roles {
            roles.observe(origin, record);
        }
        if let Origin::Process(key) = origin {
            self.of.entry(key).or_default().observe(&record.stamp, &record.body);
        }
    }

    fn caveat(&mut self, code: &str, text: String) {
        // Records of kinds that a later version adds are not about memory.
        if code != "unknown_kinds" {
            self.caveats.push(text);
        }
    }
}

#[cfg(test)]
mod tests;
