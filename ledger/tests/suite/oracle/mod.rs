//! A naive model of one process on one device, written from the booking rules: plain lists of live objects, and every sum
//! computed from scratch after each record. It has no cells, epochs or indices.
//!
//! The driver (drive.rs) generates only sequences that a real process could produce, so the model need not define the effect of
//! invalid ones; scripts test those.

mod calls;
pub mod drive;
mod restate;
mod sums;

use gpumem_ledger::Class;
use gpumem_wire::*;
use std::collections::BTreeMap;

/// A record that can be restated.
#[derive(Debug, Clone, Copy)]
pub struct Said {
    pub stamp: Stamp,
    pub body: Body<'static>,
}

/// Names of a row: tag, first tag, role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    pub tag: u32,
    pub origin: u32,
    pub role: Role,
}

impl Name {
    pub fn at_birth(said: &Said) -> Self {
        let role = match said.body {
            Body::BlockAlloc { use_as, .. } => use_as.0,
            _ => Role::Unknown,
        };
        Name { tag: said.stamp.tag, origin: 0, role }
    }

    fn renamed(self, tag: u32, role: Role) -> Self {
        let mut name = self;
        if tag != 0 && tag != name.tag {
            name.origin = if name.origin == 0 { name.tag } else { name.origin };
            name.tag = tag;
            name.origin = if name.origin == tag { 0 } else { name.origin };
        }
        name.role = if role == Role::Unknown { name.role } else { role };
        name
    }

    pub fn cell(&self, class: Class) -> String {
        let tag = |id| if id == 0 { "-".to_owned() } else { format!("t{id}") };
        let mut cell =
            format!("{}:{}", if class == Class::Direct { "direct" } else { "block" }, tag(self.tag));
        if self.origin != 0 {
            cell += &format!("<{}", tag(self.origin));
        }
        if self.role != Role::Unknown {
            cell += &format!("@{:?}", self.role);
        }
        cell
    }
}

#[derive(Debug, Clone)]
pub struct Alloc {
    pub seq: u64,
    pub address: u64,
    pub bytes: u64,
    pub kind: MemoryKind,
    pub pool: u64,
    pub captured: bool,
    pub name: Name,
    /// Number of the record that began the free.
    pub freeing: Option<u64>,
    pub said: Said,
}

impl Alloc {
    pub fn is_direct(&self) -> bool {
        use MemoryKind::{Managed, Pinned, StreamOrdered};
        !self.captured && !matches!(self.kind, Managed | Pinned | StreamOrdered)
    }
}

#[derive(Debug, Clone)]
pub struct Backing {
    pub seq: u64,
    pub handle: u64,
    pub bytes: u64,
    pub references: u16,
    /// Numbers of the records that began releases.
    pub releasing: Vec<u64>,
    pub name: Name,
    pub said: Said,
}

#[derive(Debug, Clone)]
pub struct Mapping {
    pub address: u64,
    pub bytes: u64,
    pub backing: u64,
    pub unmapping: Option<u64>,
    pub said: Said,
}

#[derive(Debug, Clone)]
pub struct DriverPool {
    pub id: u64,
    pub reserved: u64,
    pub gone: bool,
}

#[derive(Debug, Clone)]
pub struct FrameworkPool {
    pub id: u64,
    pub parent: u64,
    pub opaque: bool,
}

#[derive(Debug, Clone)]
pub struct Segment {
    pub seq: u64,
    pub address: u64,
    pub bytes: u64,
    pub pool: u64,
    /// Allocations whose address was unbound when the segment was added: it does not belong to them.
    pub not_of: Vec<u64>,
    /// Reported by an allocation for the pool.
    pub by_birth: bool,
    pub said: Said,
}

#[derive(Debug, Clone)]
pub struct Block {
    pub seq: u64,
    pub address: u64,
    pub bytes: u64,
    pub pool: u64,
    pub booked: bool,
    pub pending: bool,
    pub name: Name,
    pub said: Said,
}

/// Composition of the peak, row by row.
#[derive(Debug, Clone, Default)]
pub struct Peak {
    pub bytes: i64,
    /// Number, class, name, and bytes in its own cell.
    pub rows: Vec<(u64, bool, Name, i64)>,
    pub idle: i64,
    pub opaque: i64,
    /// Bytes that segments took and gave up.
    pub let_go: i64,
    /// The rows are known (not after a loss).
    pub known: bool,
}

#[derive(Debug, Clone, Default)]
pub struct World {
    pub allocs: Vec<Alloc>,
    pub backings: Vec<Backing>,
    pub mappings: Vec<Mapping>,
    pub driver_pools: Vec<DriverPool>,
    pub pools: Vec<FrameworkPool>,
    pub segments: Vec<Segment>,
    pub blocks: Vec<Block>,
    pub peak: Peak,
    /// Maximum bytes that segments took from an extent, by its number.
    pub most_carved: BTreeMap<u64, u64>,
    /// Bytes taken before a loss are unknown: any of several equally full moments may be the peak.
    pub unsure: bool,
    /// Moments as full as `peak`.
    pub as_full: Vec<Peak>,
    /// Last role of removed rows, by number.
    pub dead: BTreeMap<u64, Role>,
}

/// Returns by how much the ranges [start, start+bytes) overlap.
pub fn overlap(a: u64, a_bytes: u64, b: u64, b_bytes: u64) -> u64 {
    (a + a_bytes).min(b + b_bytes).saturating_sub(a.max(b))
}

impl World {
    pub fn apply(&mut self, said: &Said) {
        let before = self.carved();
        self.book(said);
        // A segment may take bytes that the peak already contained.
        let after = self.carved();
        for ((extent, pool), bytes) in after {
            let fresh = bytes - before.get(&(extent, pool)).copied().unwrap_or(0).min(bytes);
            for peak in std::iter::once(&mut self.peak).chain(&mut self.as_full) {
                let Some(row) = peak.rows.iter_mut().find(|row| row.0 == extent) else { continue };
                let moved = (fresh as i64).min(row.3);
                row.3 -= moved;
                match self.pools.iter().any(|other| other.id == pool && other.opaque) {
                    true => peak.opaque += moved,
                    false => peak.idle += moved,
                }
            }
        }
        let taken = self.taken();
        self.most_carved.retain(|extent, _| taken.contains_key(extent));
        for (extent, bytes) in taken {
            let most = self.most_carved.entry(extent).or_default();
            *most = bytes.max(*most);
        }
        let waits: Vec<usize> = (0..self.blocks.len()).filter(|&at| !self.blocks[at].booked).collect();
        for at in waits {
            self.blocks[at].booked =
                self.lies_in_booked_segment(self.blocks[at].pool, self.blocks[at].address);
        }
    }

    fn book(&mut self, said: &Said) {
        let seq = said.stamp.seq;
        let name = Name::at_birth(said);
        match said.body {
            Body::AllocEnd { address, bytes, pool, memory, .. } => {
                let captured = said.stamp.flags.has(Flags::CAPTURED);
                self.allocs.push(Alloc {
                    seq,
                    address,
                    bytes,
                    kind: memory,
                    pool,
                    captured,
                    name,
                    freeing: None,
                    said: *said,
                });
                if memory == MemoryKind::StreamOrdered && !captured {
                    let live = self.live_in(pool);
                    let pool = self.driver_pool(pool);
                    pool.reserved = pool.reserved.max(live);
                } else if pool != 0 {
                    self.add_segment(address, bytes, pool, said, true);
                }
            }
            Body::FreeBegin { address } => {
                let found = self.allocs.iter_mut().find(|a| a.address == address && a.freeing.is_none());
                found.expect("the driver frees what is bound").freeing = Some(seq);
            }
            Body::FreeEnd { begin_seq, result } => self.end(begin_seq, result),
            Body::PoolState { pool, reserved_bytes, .. } => {
                let live = self.live_in(pool);
                self.driver_pool(pool).reserved = reserved_bytes.max(live);
            }
            Body::PoolCreate { pool, parent, reports_blocks, owner: PoolOwner::Framework } => {
                self.pools.push(FrameworkPool { id: pool, parent, opaque: reports_blocks == 0 });
            }
            Body::PoolDestroy { pool } => self.destroy_pool(pool),
            Body::VmmCreate { handle, bytes, references, .. } => {
                let releasing = Vec::new();
                let said = *said;
                self.backings.push(Backing { seq, handle, bytes, references, releasing, name, said });
            }
            Body::VmmMap { address, bytes, handle } => {
                let backing = self.by_handle(handle).seq;
                self.mappings.push(Mapping { address, bytes, backing, unmapping: None, said: *said });
            }
            Body::VmmRetain { address, .. } => {
                let bound =
                    |m: &&Mapping| m.unmapping.is_none() && overlap(m.address, m.bytes, address, 1) > 0;
                let id = self.mappings.iter().find(bound).expect("retained through a mapping").backing;
                self.backings.iter_mut().find(|b| b.seq == id).expect("mapped").references += 1;
            }
            Body::VmmRelease { handle } => {
                let backing = self.by_handle(handle);
                backing.references -= 1;
                backing.releasing.push(seq);
            }
            Body::VmmUnmap { address, bytes } => {
                for mapping in self.mappings.iter_mut().filter(|m| m.unmapping.is_none()) {
                    if overlap(mapping.address, mapping.bytes, address, bytes) > 0 {
                        mapping.unmapping = Some(seq);
                    }
                }
            }
            Body::SegmentAdd { address, bytes, pool } => self.add_segment(address, bytes, pool, said, false),
            Body::SegmentRemove { address, bytes, pool } => self.cut(address, bytes, pool),
            Body::BlockAlloc { address, bytes, pool, .. } => {
                self.pools.iter_mut().find(|p| p.id == pool).expect("created").opaque = false;
                let booked = self.lies_in_booked_segment(pool, address);
                let said = *said;
                self.blocks.push(Block { seq, address, bytes, pool, booked, pending: false, name, said });
            }
            Body::BlockFree { address, pool, state } => {
                let at = self.blocks.iter().position(|b| b.pool == pool && b.address == address);
                let at = at.expect("the pool frees what is live");
                if state == FreeState::Pending {
                    self.blocks[at].pending = true;
                } else {
                    let block = self.blocks.remove(at);
                    self.dead.insert(block.seq, block.name.role);
                }
            }
            Body::Retag { block_seq, use_as, .. } => self.retag(block_seq, said.stamp.tag, use_as.0),
            Body::ContextDestroy { scope: DestroyScope::Device } => self.reset(),
            Body::ContextDestroy { .. } => self.end_context(said.stamp.context),
            _ => {}
        }
    }

    fn end(&mut self, begin: u64, result: u16) {
        let failed = result != 0 && result != 4; // 4: the driver has shut down and freed all memory
        if let Some(at) = self.allocs.iter().position(|a| a.freeing == Some(begin)) {
            if failed {
                self.allocs[at].freeing = None;
            } else {
                self.take_alloc(at);
            }
        }
        for backing in &mut self.backings {
            if let Some(at) = backing.releasing.iter().position(|&seq| seq == begin) {
                backing.releasing.remove(at);
                backing.references += u16::from(failed);
            }
        }
        if failed {
            self.mappings.iter_mut().filter(|m| m.unmapping == Some(begin)).for_each(|m| m.unmapping = None);
        }
        self.mappings.retain(|m| m.unmapping != Some(begin));
        let mappings = &self.mappings;
        let dead = &mut self.dead;
        self.backings.retain(|b| {
            let held = b.references > 0
                || !b.releasing.is_empty()
                || mappings.iter().any(|mapping| mapping.backing == b.seq);
            if !held {
                dead.insert(b.seq, b.name.role);
            }
            held
        });
    }

    fn take_alloc(&mut self, at: usize) {
        let alloc = self.allocs.remove(at);
        self.segments.retain(|segment| !(segment.by_birth && segment.seq == alloc.seq));
        if alloc.kind == MemoryKind::StreamOrdered && !alloc.captured {
            let live = self.live_in(alloc.pool);
            let pool = self.driver_pool(alloc.pool);
            if pool.gone && live == 0 {
                pool.reserved = 0;
            }
        }
        self.dead.insert(alloc.seq, alloc.name.role);
    }

    pub fn live_in(&self, pool: u64) -> u64 {
        let of_pool = |a: &&Alloc| a.pool == pool && a.kind == MemoryKind::StreamOrdered && !a.captured;
        self.allocs.iter().filter(of_pool).map(|a| a.bytes).sum()
    }

    fn driver_pool(&mut self, id: u64) -> &mut DriverPool {
        if !self.driver_pools.iter().any(|pool| pool.id == id) {
            self.driver_pools.push(DriverPool { id, reserved: 0, gone: false });
        }
        self.driver_pools.iter_mut().find(|pool| pool.id == id).expect("just made")
    }

    fn by_handle(&mut self, handle: u64) -> &mut Backing {
        let found = self.backings.iter_mut().find(|b| b.handle == handle && b.references > 0);
        found.expect("the driver knows its handles")
    }

    fn add_segment(&mut self, address: u64, bytes: u64, pool: u64, said: &Said, by_birth: bool) {
        self.segments.retain(|segment| segment.pool != pool || segment.address != address);
        let not_of = self.allocs.iter().filter(|a| a.freeing.is_some()).map(|a| a.seq).collect();
        let seq = said.stamp.seq;
        self.segments.push(Segment { seq, address, bytes, pool, not_of, by_birth, said: *said });
    }

    fn cut(&mut self, address: u64, bytes: u64, pool: u64) {
        for segment in std::mem::take(&mut self.segments) {
            if segment.pool != pool || overlap(segment.address, segment.bytes, address, bytes) == 0 {
                self.segments.push(segment);
                continue;
            }
            let (end, cut_end) = (segment.address + segment.bytes, address + bytes);
            for (start, end) in [(segment.address, address), (cut_end, end)] {
                if start < end {
                    let mut rest = Segment { address: start, bytes: end - start, ..segment.clone() };
                    rest.said.body = Body::SegmentAdd { address: start, bytes: end - start, pool };
                    self.segments.push(rest);
                }
            }
        }
    }

    fn destroy_pool(&mut self, id: u64) {
        if self.pools.iter().any(|pool| pool.id == id) {
            self.pools.retain(|pool| pool.id != id);
            self.segments.retain(|segment| segment.pool != id);
            self.take_blocks(|block| block.pool == id);
        } else {
            let live = self.live_in(id);
            let pool = self.driver_pool(id);
            pool.gone = true;
            if live == 0 {
                pool.reserved = 0; // with live blocks the driver keeps the whole pool
            }
        }
    }

    fn take_blocks(&mut self, goes: impl Fn(&Block) -> bool) {
        for block in self.blocks.iter().filter(|block| goes(block)) {
            self.dead.insert(block.seq, block.name.role);
        }
        self.blocks.retain(|block| !goes(block));
    }

    fn reset(&mut self) {
        self.take_blocks(|_| true);
        self.segments.clear();
        self.pools.clear();
        for alloc in std::mem::take(&mut self.allocs) {
            self.dead.insert(alloc.seq, alloc.name.role);
        }
        for backing in std::mem::take(&mut self.backings) {
            self.dead.insert(backing.seq, backing.name.role);
        }
        self.mappings.clear();
        self.driver_pools.clear();
    }

    fn end_context(&mut self, context: u32) {
        let goes = |a: &Alloc| {
            a.said.stamp.context == context && (a.kind != MemoryKind::StreamOrdered || a.captured)
        };
        let extents: Vec<u64> = self.allocs.iter().filter(|a| goes(a)).map(|a| a.seq).collect();
        let mut dying: Vec<(u64, u64, u64)> = Vec::new();
        let dead_segments = |world: &World, extents: &[u64]| -> Vec<(u64, u64, u64)> {
            let takes = world.takes();
            let of = takes.iter().filter(|take| extents.contains(&take.extent));
            of.map(|take| (take.pool, take.segment, take.segment_bytes)).collect()
        };
        dying.extend(dead_segments(self, &extents));
        while let Some((pool, address, bytes)) = dying.pop() {
            let inside = |b: &Block| b.pool == pool && overlap(b.address, 1, address, bytes) > 0;
            let blocks: Vec<u64> = self.blocks.iter().filter(|b| inside(b)).map(|b| b.seq).collect();
            dying.extend(dead_segments(self, &blocks));
            self.take_blocks(inside);
            self.segments.retain(|segment| segment.pool != pool || segment.address != address);
        }
        while let Some(at) = self.allocs.iter().position(goes) {
            self.take_alloc(at);
        }
    }

    fn retag(&mut self, seq: u64, tag: u32, role: Role) {
        let alloc = self.allocs.iter_mut().find(|a| a.seq == seq && a.freeing.is_none()).map(|a| &mut a.name);
        let block = self.blocks.iter_mut().find(|b| b.seq == seq).map(|b| &mut b.name);
        let backing = self.backings.iter_mut().find(|b| b.seq == seq).map(|b| &mut b.name);
        let live = alloc.or(block).or(backing);
        let applies = match &live {
            Some(_) => true,
            None => self.dead.get(&seq) == Some(&Role::Unknown),
        };
        if let Some(name) = live {
            *name = name.renamed(tag, role);
        }
        for peak in std::iter::once(&mut self.peak).chain(&mut self.as_full).filter(|_| applies) {
            if let Some(row) = peak.rows.iter_mut().find(|row| row.0 == seq) {
                row.2 = row.2.renamed(tag, role);
            }
        }
    }
}
