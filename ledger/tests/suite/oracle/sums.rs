//! Sums of a [`World`], each computed from scratch.

use super::{Peak, World, overlap};
use gpumem_ledger::{Class, SideMemory};
use gpumem_wire::*;
use std::collections::BTreeMap;

/// Bytes that a segment takes from an extent.
#[derive(Debug, Clone, Copy)]
pub struct Take {
    pub pool: u64,
    pub segment: u64,
    pub segment_bytes: u64,
    /// Record number of the allocation, backing or outer block.
    pub extent: u64,
    pub bytes: u64,
}

impl World {
    /// Returns the bytes that segments take from the memory under them; older memory first.
    pub fn takes(&self) -> Vec<Take> {
        let mut takes: Vec<Take> = Vec::new();
        for segment in &self.segments {
            let Some(pool) = self.pools.iter().find(|pool| pool.id == segment.pool) else { continue };
            // (extent, its whole size, address, bytes there)
            let mut under: Vec<(u64, u64, u64, u64)> = Vec::new();
            if pool.parent != 0 {
                let outer = self.blocks.iter().filter(|b| b.pool == pool.parent && b.booked);
                under.extend(outer.map(|b| (b.seq, b.bytes, b.address, b.bytes)));
            } else {
                let direct = self.allocs.iter().filter(|a| a.is_direct() && !segment.not_of.contains(&a.seq));
                under.extend(direct.map(|a| (a.seq, a.bytes, a.address, a.bytes)));
                for mapping in &self.mappings {
                    let backing = self.backings.iter().find(|b| b.seq == mapping.backing);
                    let bytes = backing.map_or(0, |b| b.bytes);
                    under.push((mapping.backing, bytes, mapping.address, mapping.bytes));
                }
            }
            under.sort_unstable();
            let mut wants = segment.bytes;
            for (extent, whole, address, bytes) in under {
                let taken: u64 =
                    takes.iter().filter(|take| take.extent == extent).map(|take| take.bytes).sum();
                let shared = overlap(segment.address, segment.bytes, address, bytes);
                let bytes = shared.min(whole - taken).min(wants);
                if bytes > 0 {
                    wants -= bytes;
                    let (pool, segment, segment_bytes) = (segment.pool, segment.address, segment.bytes);
                    takes.push(Take { pool, segment, segment_bytes, extent, bytes });
                }
            }
        }
        takes
    }

    /// Returns the bytes taken, by extent and pool.
    pub fn carved(&self) -> BTreeMap<(u64, u64), u64> {
        let mut carved = BTreeMap::new();
        for take in self.takes() {
            *carved.entry((take.extent, take.pool)).or_default() += take.bytes;
        }
        carved
    }

    /// Returns the bytes that segments take from each existing extent.
    pub fn taken(&self) -> BTreeMap<u64, u64> {
        let direct = self.allocs.iter().filter(|a| a.is_direct()).map(|a| a.seq);
        let blocks = self.blocks.iter().filter(|b| b.booked).map(|b| b.seq);
        let extents = direct.chain(self.backings.iter().map(|b| b.seq)).chain(blocks);
        let mut taken: BTreeMap<u64, u64> = extents.map(|seq| (seq, 0)).collect();
        for take in self.takes() {
            *taken.entry(take.extent).or_default() += take.bytes;
        }
        taken
    }

    pub fn lies_in_booked_segment(&self, pool: u64, address: u64) -> bool {
        let takes = self.takes();
        let over = |s: &&super::Segment| s.pool == pool && overlap(s.address, s.bytes, address, 1) > 0;
        self.segments.iter().find(over).is_some_and(|segment| {
            let of = takes.iter().filter(|t| t.pool == pool && t.segment == segment.address);
            of.map(|take| take.bytes).sum::<u64>() == segment.bytes
        })
    }

    pub fn tracked(&self) -> i64 {
        let direct: u64 = self.allocs.iter().filter(|a| a.is_direct()).map(|a| a.bytes).sum();
        let backings: u64 = self.backings.iter().map(|b| b.bytes).sum();
        let pools: u64 = self.driver_pools.iter().map(|pool| pool.reserved).sum();
        (direct + backings + pools) as i64
    }

    /// Returns the bytes that calls in flight may already have freed.
    pub fn leaving(&self) -> i64 {
        let freeing = self.allocs.iter().filter(|a| a.is_direct() && a.freeing.is_some());
        let held = |b: &&super::Backing| {
            b.references == 0 && !self.mappings.iter().any(|m| m.backing == b.seq && m.unmapping.is_none())
        };
        let leaving = self.backings.iter().filter(held).map(|b| b.bytes);
        (freeing.map(|a| a.bytes).sum::<u64>() + leaving.sum::<u64>()) as i64
    }

    /// Returns the present composition, in the form of a peak.
    pub fn composition(&self) -> Peak {
        let takes = self.takes();
        let own = |seq: u64, bytes: u64| {
            let taken: u64 = takes.iter().filter(|take| take.extent == seq).map(|take| take.bytes).sum();
            bytes as i64 - taken as i64
        };
        let mut now = Peak { bytes: self.tracked(), known: true, ..Peak::default() };
        for a in self.allocs.iter().filter(|a| a.is_direct()) {
            now.rows.push((a.seq, true, a.name, own(a.seq, a.bytes)));
        }
        for b in &self.backings {
            now.rows.push((b.seq, true, b.name, own(b.seq, b.bytes)));
        }
        for a in self.allocs.iter().filter(|a| a.kind == MemoryKind::StreamOrdered && !a.captured) {
            now.rows.push((a.seq, false, a.name, a.bytes as i64));
            now.idle -= a.bytes as i64;
        }
        now.idle += self.driver_pools.iter().map(|pool| pool.reserved as i64).sum::<i64>();
        for b in self.blocks.iter().filter(|b| b.booked) {
            now.rows.push((b.seq, false, b.name, own(b.seq, b.bytes)));
            now.idle -= b.bytes as i64;
        }
        for take in &takes {
            let opaque = self.pools.iter().any(|pool| pool.id == take.pool && pool.opaque);
            *(if opaque { &mut now.opaque } else { &mut now.idle }) += take.bytes as i64;
        }
        let taken = self.taken();
        let most = |(extent, bytes): (&u64, &u64)| {
            (self.most_carved.get(extent).map_or(0, |most| most - bytes)) as i64
        };
        now.let_go = taken.iter().map(most).sum();
        now
    }

    pub fn beside(&self) -> SideMemory {
        let mut beside = SideMemory::default();
        for a in self.allocs.iter().filter(|a| !a.captured) {
            match a.kind {
                MemoryKind::Pinned => beside.pinned_bytes += a.bytes as i64,
                MemoryKind::Managed => beside.managed_bytes += a.bytes as i64,
                _ => {}
            }
        }
        for b in &self.blocks {
            beside.unbooked_block_bytes += if b.booked { 0 } else { b.bytes as i64 };
            beside.pending_block_bytes += if b.pending { b.bytes as i64 } else { 0 };
        }
        beside
    }

    /// Finishes a booked record. The moment is a peak if `tracked` is higher, or equal with fewer unnamed bytes (or bytes given
    /// up).
    pub fn settle(&mut self) {
        let now = self.composition();
        let unnamed = |peak: &Peak| peak.idle + peak.opaque + peak.let_go;
        if now.bytes > self.peak.bytes
            || now.bytes == self.peak.bytes && now.bytes > 0 && unnamed(&now) < unnamed(&self.peak)
        {
            let before = std::mem::replace(&mut self.peak, now);
            self.as_full.retain(|peak| peak.bytes == self.peak.bytes);
            self.as_full.extend((self.unsure && before.bytes == self.peak.bytes).then_some(before));
        } else if self.unsure && now.bytes == self.peak.bytes {
            self.as_full.push(now);
        }
    }
}

impl Peak {
    /// Formats it like `common::composition`.
    pub fn line(&self) -> String {
        let mut cells: BTreeMap<(Class, String), i64> = BTreeMap::new();
        for (_, direct, name, bytes) in &self.rows {
            let class = if *direct { Class::Direct } else { Class::Block };
            *cells.entry((class, name.cell(class))).or_default() += bytes;
        }
        cells.insert((Class::PoolIdle, "idle".into()), self.idle);
        cells.insert((Class::Opaque, "opaque".into()), self.opaque);
        cells.retain(|_, bytes| *bytes != 0);
        let parts: Vec<String> = cells.iter().map(|((_, name), bytes)| format!("{name} {bytes}")).collect();
        format!("{} = {}", self.bytes, if parts.is_empty() { "0".into() } else { parts.join(" + ") })
    }
}
