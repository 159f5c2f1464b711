//! Extracts the requests of a program to PyTorch's allocator on one device from the history of a snapshot, for a replay.
//!
//! The history does not contain calls of `empty_cache` and ends of private pools. Both are inferred from entries that return
//! segments to the driver. If a new segment or an out-of-memory entry follows, the request that needed memory may be the cause.
//! Otherwise it was `empty_cache`.

use super::arena::{Arena, Ref};
use super::model::{Action, Block, Event as Entry, Snapshot};
use super::stack::Stacks;
use gpumem_model::names::Named;
use gpumem_replay::{Event, PoolId, RequestId};
use gpumem_wire::Role;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Requests of a program on one device, and how its allocator served them.
#[derive(Debug, Default)]
pub struct Requests {
    /// Device, by its number in the program.
    pub device: u8,
    /// Requests, frees and inferred calls of the program, the oldest first.
    pub events: Vec<Event>,
    /// Time of each event in microseconds since 1970; 0 if unknown.
    pub times_us: Vec<u64>,
    /// Python stack of each event.
    frames: Vec<Ref>,
    /// Role of the memory of each event; `Role::Unknown` if roles were not read.
    roles: Vec<Role>,
    arena: Arc<Arena>,
    /// Names of memory in a recording, by their ids in `frames`; `None` for a snapshot.
    pub(crate) names: Option<Arc<HashMap<Ref, String>>>,
    /// Number of requests whose bytes are unknown. The bytes of the block stand for them.
    pub block_sizes: u64,
    /// Number and bytes of requests that were made before the history began. They are the first of `events`.
    pub older: (u64, u64),
    /// Text of PYTORCH_CUDA_ALLOC_CONF, if the snapshot has it.
    pub settings: String,
    /// Whether the history states the pool of each request (PyTorch 2.12 and later).
    pub names_pools: bool,
    /// Whether some segments belong to private pools: of CUDA graphs, or of `MemPool`.
    pub has_private_pools: bool,
    /// Indices of the events before which memory was returned to the driver, either for the next request or by `empty_cache`.
    pub uncertain_releases: Vec<usize>,
    /// Bytes of segments: the maximum, and the value at the begin of the history.
    pub reserved: (u64, u64),
    /// Number of driver calls that allocated memory, and number of those that freed memory.
    pub driver_calls: (u64, u64),
    /// Reasons why only a part of a recording was read.
    pub caveats: Vec<String>,
    /// Bytes available to PyTorch at the first failed request: bytes of its own segments plus free bytes of the device.
    pub capacity: Option<u64>,
}

impl Requests {
    /// Inserts a call of `empty_cache` at each of `uncertain_releases`.
    pub fn with_uncertain_releases(mut self) -> Self {
        let mut releases = std::mem::take(&mut self.uncertain_releases).into_iter().peekable();
        let (times_us, frames) = (std::mem::take(&mut self.times_us), std::mem::take(&mut self.frames));
        let roles = std::mem::take(&mut self.roles);
        for (number, event) in std::mem::take(&mut self.events).into_iter().enumerate() {
            let released = releases.next_if_eq(&number).map(|_| Event::EmptyCache { pool: None });
            for event in released.into_iter().chain([event]) {
                self.events.push(event);
                self.times_us.push(times_us[number]);
                self.frames.push(frames[number]);
                self.roles.push(roles[number]);
            }
        }
        self
    }

    /// Returns the number of requests.
    pub fn count(&self) -> u64 {
        self.events.iter().filter(|event| matches!(event, Event::Request { .. })).count() as u64
    }

    /// Sorts the requests of several devices: the device with the most requests first.
    pub(crate) fn sort(devices: &mut [Requests]) {
        devices.sort_by_cached_key(|requests| (Reverse(requests.count()), requests.device));
    }

    /// Returns whether the requests come from a recording, not from PyTorch's own history.
    pub fn is_recording(&self) -> bool {
        self.names.is_some()
    }

    /// Returns for each event whether its [`place`](Self::place) contains a text.
    pub fn named(&self, text: &str) -> Vec<bool> {
        let mut known = HashMap::new();
        let mut is_named = |(event, frames): (usize, &Ref)| {
            let find = || self.place(event).is_some_and(|place| place.contains(text));
            *known.entry(*frames).or_insert_with(find)
        };
        self.frames.iter().enumerate().map(&mut is_named).collect()
    }

    /// Returns for each event whether it is about memory of a role.
    pub fn of_role(&self, role: Role) -> Vec<bool> {
        self.roles.iter().map(|other| *other == role).collect()
    }

    /// Returns the bytes requested for each role, by its name; that of an unknown role is empty.
    pub fn bytes_of_roles(&self) -> BTreeMap<&'static str, u64> {
        let mut bytes_of = BTreeMap::new();
        for (event, role) in self.events.iter().zip(&self.roles) {
            if let Event::Request { bytes, .. } = event {
                let sum: &mut u64 = bytes_of.entry(role.name().unwrap_or_default()).or_default();
                *sum = sum.saturating_add(*bytes);
            }
        }
        bytes_of
    }

    /// Returns the [places](Self::place) of the requests, without duplicates.
    pub fn places(&self) -> BTreeSet<String> {
        let frames: HashMap<Ref, usize> = self.frames.iter().copied().zip(0..).collect();
        frames.into_values().filter_map(|event| self.place(event)).collect()
    }

    /// Returns the innermost Python line outside PyTorch that made a request, as `file.py:line(function)`; `None` without stacks.
    /// For a recording, returns the name of the memory.
    pub fn place(&self, event: usize) -> Option<String> {
        let frames = *self.frames.get(event)?;
        if let Some(names) = &self.names {
            return names.get(&frames).cloned();
        }
        let mut stacks = Stacks::default();
        let path = &stacks.classify(&self.arena, frames)?.path;
        path.rsplit('/').next().filter(|part| !part.is_empty()).map(str::to_owned)
    }
}

/// History of an allocator on a device, and its state at the end.
#[derive(Debug, Default)]
pub(crate) struct History<'a> {
    pub device: u8,
    /// Entries, the oldest first.
    pub entries: &'a [Entry],
    pub blocks: Vec<Block>,
    pub reserved_bytes: u64,
    pub has_private_pools: bool,
    /// Whether the entries state their pool.
    pub has_pools: bool,
    /// Text of PYTORCH_CUDA_ALLOC_CONF.
    pub settings: String,
}

impl History<'_> {
    /// Returns the requests, the oldest first; `names` are those of memory, by the ids in the entries' `frames`.
    pub(crate) fn requests(self, names: Arc<HashMap<Ref, String>>) -> Requests {
        Requests { names: Some(names), ..of_history(self) }
    }
}

#[derive(Default)]
struct Collector {
    requests: Requests,
    live: HashMap<u64, RequestId>,
    next: RequestId,
    /// Private pool of the last request; 0 for the default pool.
    scope: PoolId,
    /// Whether the driver has refused memory for the next request.
    is_refused: bool,
    time_us: u64,
    frames: Ref,
    role: Role,
}

impl Collector {
    fn push(&mut self, event: Event) {
        self.requests.frames.push(self.frames);
        self.requests.roles.push(self.role);
        self.requests.events.push(event);
        self.requests.times_us.push(self.time_us);
    }

    /// Notes the pool to which requests go. A private pool usually serves the capture of a CUDA graph, so its requests are treated
    /// as part of a capture.
    fn enter(&mut self, pool: PoolId) {
        if pool == self.scope {
            return;
        }
        if self.scope != 0 {
            self.push(Event::ScopeEnds { pool: self.scope });
        }
        if pool != 0 {
            self.push(Event::ScopeBegins { pool });
        }
        self.scope = pool;
    }

    fn request(&mut self, entry: &Entry, has_failed: bool) {
        self.is_refused = false;
        self.enter(entry.pool);
        self.next += 1;
        let &Entry { bytes, stream, pool, address, .. } = entry;
        self.push(Event::Request { id: self.next, bytes, stream, pool, has_failed });
        if !has_failed {
            self.live.insert(address, self.next);
        }
    }

    /// Adds the events for `run`, consecutive entries that return memory to the driver. `next` is the entry after them.
    fn given_back(&mut self, run: &[Entry], next: Option<&Entry>) {
        let needs_memory =
            |entry: &Entry| matches!(entry.action, Action::SegmentAlloc | Action::SegmentMap | Action::Oom);
        let pools: BTreeSet<PoolId> = run.iter().map(|entry| entry.pool).filter(|pool| *pool != 0).collect();
        // No memory of the default pool is released during a capture.
        if run.iter().any(|entry| entry.pool == 0) {
            self.enter(0);
        }
        for &pool in &pools {
            self.push(Event::PoolEnds { pool });
        }
        if self.is_refused {
            // The replay releases the memory for the same reason.
        } else if !pools.is_empty() && run.iter().all(|entry| entry.pool != 0) {
            // A `MemPool` object releases its own memory at its end. `empty_cache()` has the same effect if it finds nothing else.
            pools.into_iter().for_each(|pool| self.push(Event::EmptyCache { pool: Some(pool) }));
        } else if next.is_some_and(needs_memory) {
            self.requests.uncertain_releases.push(self.requests.events.len());
        } else {
            self.push(Event::EmptyCache { pool: None });
        }
    }
}

pub(super) fn of(arena: Arc<Arena>, snapshot: &Snapshot, device: u8) -> Requests {
    let own = || snapshot.segments.iter().filter(|segment| !segment.is_host && segment.device == device);
    let blocks = snapshot.blocks.iter().filter(|block| !block.is_host && block.device == device);
    let history = History {
        device,
        entries: snapshot.traces.get(usize::from(device)).map_or(&[], Vec::as_slice),
        blocks: blocks.copied().collect(),
        reserved_bytes: own().map(|segment| segment.bytes).sum(),
        has_private_pools: own().any(|segment| segment.is_private),
        has_pools: snapshot.has_pools,
        settings: snapshot.settings_text.clone(),
    };
    Requests { arena, ..of_history(history) }
}

fn of_history(history: History<'_>) -> Requests {
    let trace = history.entries;
    let mut collector = Collector::default();
    older(&mut collector, &history.blocks, trace);
    reserved(&mut collector.requests, history.reserved_bytes, trace);
    collector.requests.device = history.device;
    collector.requests.names_pools = history.has_pools;
    collector.requests.has_private_pools = history.has_private_pools;
    collector.requests.settings = history.settings;
    let mut place = 0;
    while let Some(entry) = trace.get(place) {
        (collector.time_us, collector.frames, collector.role) = (entry.time_us, entry.frames, entry.role);
        place += 1;
        match entry.action {
            Action::Alloc | Action::Oom => collector.request(entry, entry.action == Action::Oom),
            Action::FreeRequested => {
                // Without a live request, the history frees this memory a second time.
                let Some(&id) = collector.live.get(&entry.address) else { continue };
                let is_final = trace.get(place).is_some_and(|next| {
                    next.action == Action::FreeCompleted && next.address == entry.address
                });
                place += usize::from(is_final);
                if is_final {
                    collector.live.remove(&entry.address);
                }
                collector.push(Event::Free { id, is_pending: !is_final });
            }
            Action::FreeCompleted => {
                if let Some(id) = collector.live.remove(&entry.address) {
                    collector.push(Event::Return { id });
                }
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                let is_part =
                    |entry: &&Entry| matches!(entry.action, Action::SegmentFree | Action::SegmentUnmap);
                let length = trace[place..].iter().take_while(is_part).count();
                let run = &trace[place - 1..place + length];
                place += length;
                collector.given_back(run, trace.get(place));
            }
            Action::Refused => collector.is_refused = true,
            Action::SegmentAlloc | Action::SegmentMap | Action::Annotate | Action::Snapshot => {}
        }
    }
    collector.requests
}

/// Adds requests from before the history: of blocks that it frees, and of blocks at its end, whose allocation it lacks.
fn older(collector: &mut Collector, blocks: &[Block], trace: &[Entry]) {
    let mut known = BTreeSet::new();
    let mut found = Vec::new();
    for entry in trace {
        match entry.action {
            Action::Alloc => {
                known.insert(entry.address);
            }
            Action::FreeRequested if known.insert(entry.address) => found.push(*entry),
            _ => {}
        }
    }
    for &Block { address, requested, stream, frames, role, .. } in blocks {
        if known.insert(address) {
            found.push(Entry { address, bytes: requested, stream, frames, role, ..Entry::default() });
        }
    }
    found.sort_unstable_by_key(|entry| entry.address);
    let bytes = found.iter().fold(0, |sum: u64, entry| sum.saturating_add(entry.bytes));
    collector.requests.older = (found.len() as u64, bytes);
    for entry in found {
        (collector.frames, collector.role) = (entry.frames, entry.role);
        collector.request(&entry, false);
    }
}

/// Computes the bytes of segments and the driver calls. `end` is the bytes of segments at the end of the history.
fn reserved(requests: &mut Requests, end: u64, trace: &[Entry]) {
    let change = |entry: &Entry| match entry.action {
        Action::SegmentAlloc | Action::SegmentMap => entry.bytes as i64,
        Action::SegmentFree | Action::SegmentUnmap => -(entry.bytes as i64),
        _ => 0,
    };
    let whole: i64 = trace.iter().map(change).sum();
    let mut now = (end as i64).saturating_sub(whole);
    requests.reserved = (now.max(0) as u64, now.max(0) as u64);
    for entry in trace {
        let change = change(entry);
        now = now.saturating_add(change);
        requests.reserved.0 = requests.reserved.0.max(now.max(0) as u64);
        requests.driver_calls.0 += u64::from(change > 0);
        requests.driver_calls.1 += u64::from(change < 0);
        if entry.action == Action::Oom && entry.address != u64::MAX {
            requests.capacity.get_or_insert((now.max(0) as u64).saturating_add(entry.address));
        }
    }
}
