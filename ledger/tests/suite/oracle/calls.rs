//! Calls of [`Drive`] that depend on the present state: frees, VMM, segments, blocks.

use super::drive::{Drive, FAR, NESTED, OPAQUE, Op, POOL, VA, pick};
use crate::common::MIB;
use gpumem_wire::*;

impl Drive {
    pub fn free(&mut self, op: Op) {
        let bound: Vec<_> = self.world.allocs.iter().filter(|a| a.freeing.is_none()).cloned().collect();
        let Some(alloc) = pick(&bound, op.a) else { return };
        let takes = self.world.takes();
        let over: Vec<_> = takes.iter().filter(|take| take.extent == alloc.seq).collect();
        let blocks = |pool: u64, address: u64, bytes: u64| {
            self.world
                .blocks
                .iter()
                .any(|b| b.pool == pool && super::overlap(b.address, b.bytes, address, bytes) > 0)
        };
        if over.iter().any(|take| blocks(take.pool, take.segment, take.segment_bytes))
            || over.iter().any(|take| take.bytes < take.segment_bytes)
        {
            return;
        }
        let born = |pool: u64, at: u64| {
            self.world.segments.iter().any(|s| s.pool == pool && s.address == at && s.seq == alloc.seq)
        };
        let remove: Vec<_> = over
            .iter()
            .filter(|take| !born(take.pool, take.segment))
            .map(|t| Body::SegmentRemove { address: t.segment, bytes: t.segment_bytes, pool: t.pool })
            .collect();
        let after = op.b.is_multiple_of(2);
        if !after {
            remove.iter().for_each(|&body| {
                self.say(body, 0);
            });
        }
        self.begin(Body::FreeBegin { address: alloc.address });
        self.unbound.push(alloc.address);
        if after {
            remove.iter().for_each(|&body| {
                self.say(body, 0);
            });
        }
    }

    pub fn end(&mut self, op: Op) {
        if !self.begun.is_empty() {
            let at = usize::from(op.a) % self.begun.len();
            let (begin_seq, can_fail) = self.begun.remove(at);
            let result = if can_fail && op.b.is_multiple_of(3) { 1 } else { 4 * (op.b % 2) };
            self.say(Body::FreeEnd { begin_seq, result }, 0);
        }
    }

    pub fn end_all(&mut self) {
        while !self.begun.is_empty() {
            self.end(Op { what: 0, a: 0, b: self.seq as u16 });
        }
    }

    pub fn vmm(&mut self, op: Op) {
        let held: Vec<_> = self.world.backings.iter().filter(|b| b.references > 0).cloned().collect();
        let bound: Vec<_> = self.world.mappings.iter().filter(|m| m.unmapping.is_none()).cloned().collect();
        match op.what {
            19 => {
                // A number whose last release was entered may be reused; that release cannot fail.
                let Some(handle) = (1..9).find(|h| !held.iter().any(|b| b.handle == *h)) else { return };
                for backing in self.world.backings.iter().filter(|b| b.handle == handle) {
                    for begun in self.begun.iter_mut().filter(|begun| backing.releasing.contains(&begun.0)) {
                        begun.1 = false;
                    }
                }
                let memory = MemoryKind::Vmm;
                let seq = self.say(Body::VmmCreate { handle, bytes: MIB, references: 1, memory }, op.b);
                self.born.push((seq, 0, 0));
            }
            20 | 21 => {
                let Some(backing) = pick(&held, op.a) else { return };
                let near = !self.world.mappings.iter().any(|m| m.backing == backing.seq);
                let base = if near { VA } else { FAR };
                let taken = |at: u64| self.world.mappings.iter().any(|m| m.address == at);
                let Some(address) = (0..8).map(|n| base + n * MIB).find(|&at| !taken(at)) else { return };
                self.say(Body::VmmMap { address, bytes: MIB, handle: backing.handle }, 0);
            }
            22 => {
                let Some(mapping) = pick(&bound, op.a) else { return };
                let owner = self.world.backings.iter().find(|b| b.seq == mapping.backing).expect("mapped");
                let others =
                    self.world.backings.iter().any(|b| b.handle == owner.handle && b.seq != owner.seq);
                if op.b.is_multiple_of(3) && !others {
                    let handle = owner.handle;
                    self.say(Body::VmmRetain { handle, address: mapping.address + 7 }, 0);
                    return;
                }
                // One or two adjacent mappings; segments are removed first.
                let two = bound.iter().any(|m| m.address == mapping.address + MIB) && op.b.is_multiple_of(2);
                let (address, bytes) = (mapping.address, if two { 2 * MIB } else { MIB });
                let inside = |at: u64, size: u64| super::overlap(at, size, address, bytes) > 0;
                if self.world.blocks.iter().any(|b| inside(b.address, b.bytes)) {
                    return;
                }
                for pool in [POOL, OPAQUE] {
                    if self.world.segments.iter().any(|s| s.pool == pool && inside(s.address, s.bytes)) {
                        self.say(Body::SegmentRemove { address, bytes, pool }, 0);
                    }
                }
                self.begin(Body::VmmUnmap { address, bytes });
            }
            _ => {
                if let Some(backing) = pick(&held, op.a) {
                    self.begin(Body::VmmRelease { handle: backing.handle });
                }
            }
        }
    }

    pub fn segment(&mut self, op: Op) {
        let pool = [POOL, OPAQUE, NESTED][usize::from(op.b % 3)];
        self.create_pools();
        let segments = &self.world.segments;
        if op.what == 26 {
            // Removed, wholly or in part.
            let whole = self.world.allocs.iter().any(|a| a.seq == segments.first().map_or(0, |s| s.seq));
            let Some(segment) = pick(segments, op.a).filter(|s| !s.by_birth) else { return };
            let (mut address, mut bytes) = (segment.address, segment.bytes);
            if op.b.is_multiple_of(2) && bytes > MIB && !whole {
                (address, bytes) = (address + MIB / 2, MIB / 2);
            }
            let pool = segment.pool;
            let inside =
                |b: &super::Block| b.pool == pool && super::overlap(b.address, b.bytes, address, bytes) > 0;
            if !self.world.blocks.iter().any(inside) {
                self.say(Body::SegmentRemove { address, bytes, pool }, 0);
            }
            return;
        }
        let free = |at: u64, size: u64| {
            let other = |s: &super::Segment| {
                (s.pool == NESTED) == (pool == NESTED) && super::overlap(s.address, s.bytes, at, size) > 0
            };
            !segments.iter().any(other)
        };
        let mut places: Vec<(u64, u64)> = Vec::new();
        if pool == NESTED {
            let outer = self.world.blocks.iter().filter(|b| b.pool == POOL && b.booked);
            places.extend(outer.map(|b| (b.address, b.bytes)));
        } else if op.what == 25 {
            for n in 0..8 {
                let mapped =
                    |at: u64| self.world.mappings.iter().any(|m| m.address == at && m.unmapping.is_none());
                let length = (n..8).take_while(|n| mapped(VA + n * MIB)).count() as u64;
                places.push((VA + n * MIB, length.min(u64::from(op.b / 3 % 3) + 1) * MIB));
            }
        } else {
            let bound = self.world.allocs.iter().filter(|a| a.is_direct() && a.freeing.is_none());
            places.extend(bound.map(|a| (a.address, a.bytes)));
            if op.b % 16 == 1 {
                // Reported before its memory, which comes with the next allocation at a fresh address.
                places = vec![(self.fresh, 2 * MIB)];
            }
        }
        places.retain(|&(at, size)| size > 0 && free(at, size));
        let Some(&(mut address, mut bytes)) = pick(&places, op.a) else { return };
        if bytes >= 2 * MIB && op.b.is_multiple_of(2) && op.what != 25 {
            (address, bytes) = (address + MIB, bytes - MIB); // a part of a large allocation
        }
        self.say(Body::SegmentAdd { address, bytes, pool }, 0);
    }

    pub fn block(&mut self, op: Op) {
        let Some(segment) = pick(&self.world.segments, op.a) else { return };
        let pool = segment.pool;
        let bytes = (u64::from(op.b) * 37 % segment.bytes + 1).min(segment.bytes);
        let address = segment.address + (segment.bytes - bytes) / 64 * 64 * u64::from(op.b % 2);
        let freeing = self.world.allocs.iter().any(|a| a.seq == segment.seq && a.freeing.is_some());
        let taken =
            |b: &super::Block| b.pool == pool && super::overlap(b.address, b.bytes, address, bytes) > 0;
        let created = self.world.pools.iter().any(|known| known.id == pool);
        if freeing || !created || self.world.blocks.iter().any(taken) {
            return;
        }
        let role = [Role::Unknown, Role::Activation][usize::from(op.b / 4 % 2)];
        let use_as = (role, Phase::Unknown);
        let seq = self.say(Body::BlockAlloc { address, bytes, pool, use_as }, op.b);
        self.born.push((seq, address, pool));
    }
}
