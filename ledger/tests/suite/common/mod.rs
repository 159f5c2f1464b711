//! Short scripts about one process: records as input, one text as result.
//!
//! [`check`] runs a script and compares the ledger with lines such as
//!
//! ```text
//! tracked 300 = direct:a 100 + block:w 150 + idle 50
//! peak 400 = direct:a 400
//! beside pinned 10
//! odd unknown_frees 1
//! flags partial
//! ```
//!
//! `tracked`, `beside`, `odd` and `flags` are always compared (a missing line means that there must be none), `peak` only if it
//! is expected. A cell is `class:tag`, `-` for no tag, then `<origin`, `@role`, `%phase`, `^` for the process's tag; cells of
//! zero bytes do not appear.
#![allow(dead_code)]

pub mod gap;
pub mod joined;

use gpumem_ledger::{
    AccountView, CellView, Class, ClosedSample, Ledger, Origin, ProcessKey, ProcessView, UntrackableParts,
};
use gpumem_wire::*;
use std::collections::BTreeMap;

pub const KEY: ProcessKey = ProcessKey { pid: 42, start_ticks: 7 };
/// `MemoryKind::Device`, the kind of nearly every allocation here.
pub const DEV: MemoryKind = MemoryKind::Device;
pub const NOTHING: (Role, Phase) = (Role::Unknown, Phase::Unknown);
pub const MIB: u64 = 1 << 20;

/// One process with one device, in slot 0 of the process and of the host.
pub struct Script {
    pub ledger: Ledger,
    pub seq: u64,
    pub time_ns: u64,
    /// Applies to the next record only.
    pub tag: u32,
    pub stamp: Stamp,
    pub tags: BTreeMap<String, u32>,
}

pub fn device(low: u64) -> Body<'static> {
    Body::Device {
        uuid_high: 1,
        uuid_low: low,
        total_bytes: Reading::of(1 << 34),
        ordinal: 0,
        id: DeviceIdKind::Gpu,
        name: "test",
    }
}

impl Script {
    pub fn new() -> Self {
        let stamp = Stamp { device: 0, context: 1, ..Stamp::default() };
        let mut script =
            Script { ledger: Ledger::new(), seq: 0, time_ns: 0, tag: 0, stamp, tags: BTreeMap::new() };
        script.ledger.keep_blocks();
        script.host(device(9));
        script.control(device(9));
        script
    }

    /// The next ordered record uses this tag.
    pub fn tag(&mut self, path: &str) -> &mut Self {
        let next = self.tags.len() as u32 + 1;
        let id = *self.tags.entry(path.into()).or_insert(next);
        if id == next {
            let stamp = Stamp { tag: id, ..Stamp::default() };
            self.push(stamp, Body::Tag { path });
        }
        self.tag = id;
        self
    }

    pub fn push(&mut self, stamp: Stamp, body: Body<'_>) {
        self.ledger.observe(Origin::Process(KEY), &Record { stamp, body });
        verify(&self.process());
    }

    /// Sends an ordered record, 10 ns after the last one; returns its number.
    pub fn say(&mut self, body: Body<'_>) -> u64 {
        self.time_ns += 10;
        self.seq += 1;
        let stamp =
            Stamp { seq: self.seq, time_ns: self.time_ns, tag: std::mem::take(&mut self.tag), ..self.stamp };
        self.push(stamp, body);
        self.seq
    }

    /// Sends a record without a number.
    pub fn control(&mut self, body: Body<'_>) {
        self.push(Stamp { time_ns: self.time_ns, ..self.stamp }, body);
    }

    /// Restates the row of record `seq` in a resync.
    pub fn restate(&mut self, seq: u64, body: Body<'_>) {
        let tag = std::mem::take(&mut self.tag);
        self.push(Stamp { seq, time_ns: self.time_ns, tag, flags: Flags::RESTATED, ..self.stamp }, body);
    }

    pub fn host(&mut self, body: Body<'_>) {
        self.host_as(0, body);
    }

    /// Sends a record of the host about process `pid`.
    pub fn host_as(&mut self, pid: u32, body: Body<'_>) {
        let stamp = Stamp { time_ns: self.time_ns, thread: pid, device: 0, ..Stamp::default() };
        self.ledger.observe(Origin::Host, &Record { stamp, body });
    }

    pub fn alloc(&mut self, address: u64, bytes: u64) -> u64 {
        self.alloc_as(address, bytes, DEV, 0)
    }
    pub fn alloc_as(&mut self, address: u64, bytes: u64, memory: MemoryKind, pool: u64) -> u64 {
        self.say(Body::AllocEnd { address, bytes, pool, took_us: 0, memory })
    }
    pub fn begin(&mut self, address: u64) -> u64 {
        self.say(Body::FreeBegin { address })
    }
    pub fn end(&mut self, begin_seq: u64, result: u16) {
        self.say(Body::FreeEnd { begin_seq, result });
    }
    pub fn free(&mut self, address: u64) {
        let begin = self.begin(address);
        self.end(begin, 0);
    }
    pub fn pool(&mut self, pool: u64, parent: u64, blocks: bool, owner: PoolOwner) {
        self.say(Body::PoolCreate { pool, parent, reports_blocks: blocks.into(), owner });
    }
    pub fn state(&mut self, pool: u64, reserved_bytes: u64) {
        self.say(Body::PoolState { pool, reserved_bytes, used_bytes: 0, took_us: 0 });
    }
    pub fn segment(&mut self, address: u64, bytes: u64, pool: u64) -> u64 {
        self.say(Body::SegmentAdd { address, bytes, pool })
    }
    pub fn unsegment(&mut self, address: u64, bytes: u64, pool: u64) {
        self.say(Body::SegmentRemove { address, bytes, pool });
    }
    pub fn block(&mut self, address: u64, bytes: u64, pool: u64) -> u64 {
        self.say(Body::BlockAlloc { address, bytes, pool, use_as: NOTHING })
    }
    pub fn unblock(&mut self, address: u64, pool: u64) {
        self.say(Body::BlockFree { address, pool, state: FreeState::Done });
    }
    pub fn retag(&mut self, address: u64, pool: u64, block_seq: u64, role: Role) {
        self.say(Body::Retag { address, block_seq, pool, use_as: (role, Phase::Unknown) });
    }
    pub fn create(&mut self, handle: u64, bytes: u64) -> u64 {
        self.say(Body::VmmCreate { handle, bytes, references: 1, memory: MemoryKind::Vmm })
    }
    pub fn map(&mut self, address: u64, bytes: u64, handle: u64) -> u64 {
        self.say(Body::VmmMap { address, bytes, handle })
    }
    pub fn unmap(&mut self, address: u64, bytes: u64) {
        let begin = self.say(Body::VmmUnmap { address, bytes });
        self.end(begin, 0);
    }
    pub fn release(&mut self, handle: u64) {
        let begin = self.say(Body::VmmRelease { handle });
        self.end(begin, 0);
    }
    pub fn resync(&mut self, rows: u64, restate: impl FnOnce(&mut Self)) {
        self.control(Body::ResyncBegin { epoch: 1, after_seq: self.seq });
        restate(self);
        self.control(Body::ResyncEnd { epoch: 1, head_seq: self.seq, rows });
    }
    /// Sends a watermark: everything up to now was sent.
    pub fn watermark(&mut self, in_flight_since_ns: u64) {
        self.control(Body::Watermark { last_seq: self.seq, in_flight_since_ns });
    }
    pub fn at(&mut self, time_ns: u64) -> &mut Self {
        self.time_ns = time_ns;
        self
    }

    pub fn sample_begin(&mut self, t0_ns: u64) {
        self.at(t0_ns).host(Body::SampleBegin { number: t0_ns });
    }
    pub fn listed(&mut self, pid: u32, used: Option<u64>) {
        let absence = if used.is_some() { Absence::Unknown } else { Absence::NoPermission };
        let used_bytes = Reading(used);
        self.host_as(pid, Body::ProcessSample { start_ticks: 7, used_bytes, absence, lists: 1 });
    }
    pub fn sample_end(&mut self, t0_ns: u64, t1_ns: u64) {
        self.at(t1_ns).host(Body::SampleEnd { number: t0_ns, result: 0 });
    }
    /// A complete reading of [t0, t1] that lists this process with `used`.
    pub fn sample(&mut self, t0_ns: u64, t1_ns: u64, used: u64) {
        self.sample_begin(t0_ns);
        self.listed(KEY.pid, Some(used));
        self.sample_end(t0_ns, t1_ns);
    }
    /// Returns the closed samples of this process.
    pub fn closed(&mut self) -> Vec<ClosedSample> {
        let taken = self.ledger.take_samples();
        taken
            .into_iter()
            .filter(|(key, ..)| *key == KEY)
            .map(|(_, _, sample)| std::sync::Arc::unwrap_or_clone(sample))
            .collect()
    }
    pub fn only_sample(&mut self) -> ClosedSample {
        let mut closed = self.closed();
        assert_eq!(closed.len(), 1, "{closed:?}");
        closed.remove(0)
    }

    pub fn process(&self) -> ProcessView {
        self.process_of(KEY)
    }
    pub fn process_of(&self, key: ProcessKey) -> ProcessView {
        let snapshot = self.ledger.snapshot();
        let found = snapshot.processes.iter().find(|process| process.key == key);
        (**found.expect("it is known")).clone()
    }
    pub fn account(&self) -> AccountView {
        self.process().accounts.remove(0)
    }
}

/// Checks that live blocks and the bytes in no block add up to the tracked bytes, and cells to the pinned bytes. Returns the
/// bytes of the live blocks of the first account.
pub fn verify_blocks(ledger: &Ledger, process: &ProcessView) -> i64 {
    let live = process.accounts.iter().enumerate().map(|(index, account)| {
        let blocks = ledger.blocks(process.key, index).blocks;
        let live: u64 = blocks.iter().filter(|block| block.freed_ns.is_none()).map(|block| block.bytes).sum();
        let in_no_block = |cell: &CellView| matches!(cell.class, Class::PoolIdle | Class::Opaque);
        let amounts = process.cells.iter().zip(&account.amounts);
        let rest: i64 = amounts.filter(|(cell, _)| in_no_block(cell)).map(|(_, bytes)| bytes).sum();
        assert_eq!(live as i64 + rest, account.tracked_bytes, "blocks and bytes in no block");
        let pinned = ledger.trend(process.key, index).pinned_cells;
        if pinned.len() < gpumem_model::growth::PINNED_CELLS {
            let sum: i64 = pinned.iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(sum, account.beside.pinned_bytes, "cells of pinned memory");
        }
        live as i64
    });
    live.collect::<Vec<_>>().first().copied().unwrap_or(0)
}

/// Checks the invariants that hold at every moment, whatever the records are.
pub fn verify(process: &ProcessView) {
    for account in &process.accounts {
        assert_eq!(sum(&account.amounts), account.tracked_bytes, "cells sum to tracked");
        let peak = &account.peak;
        assert_eq!(sum(&peak.amounts), peak.tracked_bytes, "cells at the peak sum to the peak");
        if let Some(ClosedSample { tracked_bytes: Some(tracked), amounts, .. }) = account.latest.as_deref() {
            assert_eq!(sum(amounts), *tracked, "cells of a sample sum to its tracked");
        }
        for sample in account.latest.iter().chain(&account.complete) {
            let parts = sample.parts.map(|parts| parts.sum());
            assert_eq!(parts, sample.untrackable_bytes(), "parts sum to untrackable");
        }
        let gap = peak.gap.map(|gap| (gap.parts.map(|parts| parts.sum()), Some(gap.untrackable_bytes)));
        assert!(
            gap.is_none_or(|(parts, untrackable)| parts == untrackable),
            "parts of the peak's gap sum to it"
        );
        if let Some(parts) = account.latest.as_ref().and_then(|sample| sample.parts) {
            let of = |part: fn(&UntrackableParts) -> i64| {
                sum(&account.steps.iter().map(|step| part(&step.parts)).collect::<Vec<_>>())
            };
            let stepped = [
                of(|p| p.context_bytes),
                of(|p| p.modules_bytes),
                of(|p| p.local_memory_bytes),
                of(|p| p.heaps_bytes),
                of(|p| p.rounding_bytes),
            ];
            let booked =
                [parts.context_bytes, parts.modules_bytes, parts.local_memory_bytes, parts.heaps_bytes, 0];
            assert_eq!(stepped, booked, "what was booked came in steps");
        }
    }
}

pub fn sum(amounts: &[i64]) -> i64 {
    amounts.iter().fold(0, |sum, amount| sum.wrapping_add(*amount))
}

fn cell_name(cell: &CellView) -> String {
    let mut name = match cell.class {
        Class::Direct => "direct:",
        Class::Block => "block:",
        Class::PoolIdle => return "idle".into(),
        Class::Opaque => return "opaque".into(),
    }
    .to_owned();
    name += cell.tag.as_deref().unwrap_or("-");
    if let Some(origin) = &cell.origin {
        name += &format!("<{origin}");
    }
    if cell.role != Role::Unknown {
        name += &format!("@{:?}", cell.role);
    }
    if cell.phase != Phase::Unknown {
        name += &format!("%{:?}", cell.phase);
    }
    if cell.inherited {
        name += "^";
    }
    name
}

pub fn composition(cells: &[CellView], amounts: &[i64]) -> String {
    // Cells that differ only in their pool, or in waiting for a stream, have one name here.
    let mut parts: BTreeMap<(Class, String), i64> = BTreeMap::new();
    for (cell, amount) in cells.iter().zip(amounts) {
        *parts.entry((cell.class, cell_name(cell))).or_default() += amount;
    }
    parts.retain(|_, amount| *amount != 0);
    let parts: Vec<String> =
        parts.into_iter().map(|((_, name), amount)| format!("{name} {amount}")).collect();
    format!("{} = {}", sum(amounts), if parts.is_empty() { "0".into() } else { parts.join(" + ") })
}

fn nonzero(word: &str, parts: &[(&str, i64)]) -> Option<String> {
    let parts: Vec<String> = parts
        .iter()
        .filter(|(_, value)| *value != 0)
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    (!parts.is_empty()).then(|| format!("{word} {}", parts.join(" ")))
}

/// Returns the lines of device 0 (see the top of this file), the peak last.
pub fn lines(process: &ProcessView) -> Vec<String> {
    let account = &process.accounts[0];
    let (beside, odd, coverage) = (&account.beside, &process.odd, &process.coverage);
    let mut flags = Vec::new();
    for (name, set) in [
        ("late", coverage.late),
        ("blocked", coverage.blocked.is_some()),
        ("paused", coverage.paused),
        ("partial", coverage.partial_state),
        ("was_partial", coverage.partial_history && !coverage.partial_state),
    ] {
        if set {
            flags.push(name);
        }
    }
    let beside = [
        ("managed", beside.managed_bytes),
        ("pinned", beside.pinned_bytes),
        ("registered", beside.registered_bytes),
        ("imported", beside.imported_bytes),
        ("host_vmm", beside.host_vmm_bytes),
        ("unbooked", beside.unbooked_block_bytes),
        ("pending", beside.pending_block_bytes),
    ];
    let odd = [
        ("unknown_frees", odd.unknown_frees as i64),
        ("unknown_ends", odd.unknown_ends as i64),
        ("replaced", odd.replaced as i64),
        ("unknown_handles", odd.unknown_handles as i64),
        ("impossible", odd.impossible as i64),
        ("duplicates", odd.duplicates as i64),
        ("overflowed", odd.overflowed as i64),
        ("devices_beyond", odd.devices_beyond as i64),
    ];
    let mut lines = vec![format!("tracked {}", composition(&process.cells, &account.amounts))];
    lines.extend(nonzero("beside", &beside));
    lines.extend(nonzero("odd", &odd));
    lines.extend((!flags.is_empty()).then(|| format!("flags {}", flags.join(" "))));
    lines.push(format!("peak {}", composition(&process.cells, &account.peak.amounts)));
    lines
}

/// Runs a script and compares the ledger with `expected`.
#[track_caller]
pub fn check(script: impl FnOnce(&mut Script), expected: &[&str]) {
    let mut running = Script::new();
    script(&mut running);
    expect(&running, expected);
}

#[track_caller]
pub fn expect(script: &Script, expected: &[&str]) {
    let process = script.process();
    verify_blocks(&script.ledger, &process);
    let mut found = lines(&process);
    if !expected.iter().any(|line| line.starts_with("peak ")) {
        found.pop();
    }
    assert_eq!(found, expected);
}
