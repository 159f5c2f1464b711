//! Restates the state: to a ledger that lost records, to a new one, or while the process continues.

use super::drive::{Drive, Op};
use super::{Name, Said, World};
use crate::common::verify;
use gpumem_ledger::{Class, Ledger};
use gpumem_wire::*;

impl Drive {
    /// Restates the state to this ledger or to a new one; `racing`: while the process continues.
    pub fn resync(&mut self, op: Op) {
        let doomed = |pool: &super::DriverPool| {
            pool.gone
                && self.world.allocs.iter().any(|a| a.pool == pool.id && a.kind == MemoryKind::StreamOrdered)
        };
        if self.world.driver_pools.iter().any(doomed) {
            return; // see PoolDestroy
        }
        let restart = self.losses && op.a.is_multiple_of(4);
        let racing = op.a.is_multiple_of(3);
        if !self.exact || self.drop > 0 || restart || racing {
            self.end_all();
        }
        self.drop = 0;
        if restart {
            self.ledger = Ledger::new();
            self.ledger.keep_blocks();
            self.in_blocks.clear();
            self.first_watermark = None;
            self.sample = None;
            self.introduce();
        }
        let after_seq = self.seq;
        self.control(Body::ResyncBegin { epoch: 1, after_seq });
        let mut rows = 0;
        let early = self.world.clone();
        rows += self.restate_pools(&early);
        rows += self.restate_rows(&early, |seq| !racing || seq % 2 == 0);
        if racing {
            self.queue = Some(Vec::new());
            for n in 0..op.b % 16 {
                let (a, b) = (op.b.wrapping_mul(n + 7), op.a.wrapping_mul(31 * n + 5));
                self.run(Op { what: ((a ^ b >> 3) % 35) as u8, a, b });
            }
            self.end_all();
            let late = self.world.clone();
            rows += self.restate_rows(&late, |seq| seq % 2 == 1);
        }
        self.control(Body::ResyncEnd { epoch: 1, head_seq: self.seq, rows });
        let queue = self.queue.take().unwrap_or_default();
        for said in &queue {
            self.tell(said.stamp, said.body);
        }
        if restart || racing || !self.exact {
            // The composition of the peak is unknown now.
            let view = self.view();
            let peak = &view.accounts[0].peak;
            let of = |class| {
                let cells = view.cells.iter().zip(&peak.amounts);
                cells.filter(|(cell, _)| cell.class == class).map(|(_, bytes)| bytes).sum::<i64>()
            };
            self.world.as_full.clear();
            self.world.peak = super::Peak {
                bytes: peak.tracked_bytes,
                rows: Vec::new(),
                idle: of(Class::PoolIdle),
                opaque: of(Class::Opaque),
                let_go: 0,
                known: false,
            };
            assert!(peak.tracked_bytes >= view.accounts[0].tracked_bytes);
            if !self.exact || restart {
                self.odd = view.odd;
            }
            self.clean_since = self.time;
        }
        self.exact = true;
        self.world.unsure = true;
        self.compare();
    }

    pub fn restate(&mut self, said: &Said) -> u64 {
        self.tell(Stamp { flags: said.stamp.flags.with(Flags::RESTATED), ..said.stamp }, said.body);
        verify(&self.view());
        1
    }

    /// Restates the present names of a row.
    fn restate_name(&mut self, said: &Said, name: Name) -> u64 {
        let (address, pool) = match said.body {
            Body::BlockAlloc { address, pool, .. } => (address, pool),
            Body::AllocEnd { address, .. } => (address, 0),
            Body::VmmCreate { handle, .. } => (handle, 0),
            _ => return 0,
        };
        let use_as = (name.role, Phase::Unknown);
        let body = Body::Retag { address, block_seq: said.stamp.seq, pool, use_as };
        self.restate(&Said { stamp: Stamp { tag: name.tag, stack: name.origin, ..said.stamp }, body })
    }

    pub fn restate_pools(&mut self, world: &World) -> u64 {
        let mut rows = 0;
        let stamp = Stamp { seq: 1, device: 0, ..Stamp::default() };
        for pool in &world.pools {
            let (reports_blocks, owner) = (u16::from(!pool.opaque), PoolOwner::Framework);
            let body = Body::PoolCreate { pool: pool.id, parent: pool.parent, reports_blocks, owner };
            rows += self.restate(&Said { stamp, body });
        }
        for pool in world.driver_pools.iter().filter(|pool| !pool.gone) {
            let body =
                Body::PoolState { pool: pool.id, reserved_bytes: pool.reserved, used_bytes: 0, took_us: 0 };
            rows += self.restate(&Said { stamp, body });
        }
        for backing in &world.backings {
            let Body::VmmCreate { handle, bytes, memory, .. } = backing.said.body else { continue };
            let references = backing.references;
            let body = Body::VmmCreate { handle, bytes, references, memory };
            rows += self.restate(&Said { body, ..backing.said });
            rows += self.restate_name(&backing.said, backing.name);
            for mapping in world.mappings.iter().filter(|m| m.unmapping.is_none() && m.backing == backing.seq)
            {
                rows += self.restate(&mapping.said);
            }
        }
        rows
    }

    /// Returns allocations, segments and blocks, sorted by a hash of their number.
    pub fn restate_rows(&mut self, world: &World, now: impl Fn(u64) -> bool) -> u64 {
        let allocs = world.allocs.iter().filter(|a| a.freeing.is_none()).map(|a| (a.seq, a.said));
        let segments = world.segments.iter().filter(|s| !s.by_birth).map(|s| (s.seq, s.said));
        let mut said: Vec<(u64, Said)> = allocs.chain(segments).collect();
        said.extend(world.blocks.iter().map(|b| (b.seq, b.said)));
        said.sort_by_key(|(seq, _)| seq.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 7);
        let mut rows = 0;
        for (seq, said) in said.iter().filter(|(seq, _)| now(*seq)) {
            rows += self.restate(said);
            let alloc = world.allocs.iter().find(|a| a.seq == *seq).map(|a| a.name);
            let block = world.blocks.iter().find(|b| b.seq == *seq).map(|b| b.name);
            if let Some(name) = alloc.or(block) {
                rows += self.restate_name(said, name);
            }
            if let Some(block) = world.blocks.iter().find(|b| b.seq == *seq && b.pending) {
                let (address, pool, state) = (block.address, block.pool, FreeState::Pending);
                rows += self.restate(&Said { body: Body::BlockFree { address, pool, state }, ..*said });
            }
        }
        rows
    }
}
