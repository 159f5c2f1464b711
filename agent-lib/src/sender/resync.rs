//! Resync: sends the state again while the program continues.
//!
//! Every record up to `after_seq` was sent before and is in the table, because a record enters the table before the ring. Rows
//! that are added later follow in the ring. Rows that are removed later may be missing, and the ring contains their removal.
//! Only reference counts are not covered that way. So they are read again until none changed meanwhile. If one did, or if the
//! row of a failed free was restored, the state is sent without an end, and the next one replaces it.

use super::Sender;
use super::drain::PATIENCE;
use crate::base::fault_injection;
use crate::base::ring::Row;
use crate::base::row::{RowCopy, kind, kind_of, pool_owner};
use crate::threads;
use gpumem_wire::{Body, Flags, FreeState, PoolOwner, Record, Stamp};
use std::collections::HashMap;
use std::sync::atomic::Ordering::{Acquire, Release};

/// Times that handles are read again in one round. After that they are sent as they are, and everything again a round later.
const TRIES: usize = 16;

/// Rows that must be sent in a certain order.
#[derive(Default)]
struct Ordered {
    pools: Vec<RowCopy>,
    handles: Vec<RowCopy>,
    /// By the seq of their handle.
    mappings: HashMap<u64, Vec<RowCopy>>,
    /// Last record that the rows include.
    after_seq: u64,
    /// No count changed while the rows were read.
    are_settled: bool,
}

impl Sender {
    pub(super) fn say_state_again(&mut self, epoch: u64) {
        self.progress.resync = None;
        fault_injection::at("resync");
        let restored = self.core.restored.load(Acquire);
        let Some(ordered) = self.read_settled() else {
            self.progress.resync = self.link.is_up().then_some(epoch); // a thread is in the middle of a record: retried in the next round
            return;
        };
        let Ordered { after_seq, are_settled, .. } = ordered;
        self.progress.losses = false;
        self.say_skipped();
        self.progress.names_sent = 0;
        if !self.send_names(Flags::RESTATED) {
            return;
        }
        self.say(Body::ResyncBegin { epoch, after_seq });
        let mut rows = 0;
        for pool in outer_first(ordered.pools) {
            rows += self.say_pool(&pool);
        }
        for handle in &ordered.handles {
            rows += self.say_handle(handle);
            for mapping in ordered.mappings.get(&handle.seq()).map_or(&[][..], |mappings| mappings) {
                let mut row = mapping.row;
                row[4] = handle.row[2];
                rows += self.restate(row);
            }
        }
        for taken in self.core.recorder.live.scan() {
            if taken.seq() <= after_seq && !has_order(&taken) {
                rows += self.say_row(&taken);
            }
            if !self.link.is_up() {
                return;
            }
        }
        self.say_state(0);
        // A row may have been restored at a place that was scanned already.
        if are_settled && self.core.restored.load(Acquire) == restored {
            let head_seq = self.core.recorder.ring.head();
            self.say(Body::ResyncEnd { epoch, head_seq, rows });
        } else {
            self.progress.resync = Some(epoch);
        }
        self.flush();
    }

    /// Reads pools, handles and mappings as of one moment, up to which everything has been sent; `None` if that fails.
    fn read_settled(&mut self) -> Option<Ordered> {
        let mut ordered = Ordered::default();
        for _ in 0..TRIES {
            // The daemon may be slow, so most data is sent before the time in which counts must not change.
            if !self.send_names(Flags(0)) || !self.send_records(self.core.recorder.ring.head()) {
                return None;
            }
            let after_seq = self.core.recorder.ring.head();
            if !threads::quiesce(after_seq, PATIENCE) {
                return None;
            }
            self.core.said_after.store(after_seq, Release);
            ordered = self.read_ordered(after_seq);
            ordered.are_settled = self.core.references_changed.load(Acquire) <= after_seq;
            if ordered.are_settled {
                break;
            }
        }
        (self.send_names(Flags(0)) && self.send_records(ordered.after_seq)).then_some(ordered)
    }

    fn read_ordered(&self, after_seq: u64) -> Ordered {
        let mut ordered = Ordered { after_seq, ..Ordered::default() };
        for taken in
            self.core.recorder.live.scan().filter(|taken| taken.seq() <= after_seq && has_order(taken))
        {
            match kind_of(&taken.row) {
                kind::POOL_CREATE => ordered.pools.push(taken),
                kind::VMM_MAP => ordered.mappings.entry(taken.beside.backing).or_default().push(taken),
                _ => ordered.handles.push(taken),
            }
        }
        ordered
    }

    /// Sends one entry; returns the number of entries.
    fn restate(&mut self, mut row: Row) -> u64 {
        row[7] |= u64::from(Flags::RESTATED.0) << 48;
        self.link.slot(&row);
        1
    }

    fn say_pool(&mut self, pool: &RowCopy) -> u64 {
        let mut rows = self.restate(pool.row);
        let owner = pool_owner(&pool.row);
        if owner != PoolOwner::Framework
            && let Some((reserved_bytes, used_bytes)) = self.core.driver_pools.state(pool.row[2])
        {
            let stamp = stamp_of(&pool.row);
            let body = Body::PoolState { pool: pool.row[2], reserved_bytes, used_bytes, took_us: 0 };
            self.link.frame(&Record { stamp, body });
            rows += 1;
        }
        rows
    }

    fn say_handle(&mut self, handle: &RowCopy) -> u64 {
        let mut row = handle.row;
        if kind_of(&row) == kind::VMM_CREATE {
            let references = u64::from(u16::try_from(handle.beside.references).unwrap_or(u16::MAX));
            row[7] = row[7] & !0xffff_0000 | references << 16;
        }
        self.restate(row)
    }

    /// Sends an allocation, segment or block with its current name and state.
    fn say_row(&mut self, taken: &RowCopy) -> u64 {
        let mut row = taken.row;
        let latest = row[5] as u32;
        if taken.is_retagged() {
            row[5] = row[5] & !0xffff_ffff | u64::from(taken.beside.first_tag);
        }
        let mut rows = self.restate(row);
        if taken.is_retagged() {
            let replaced = latest != taken.beside.first_tag;
            let stack = if replaced { taken.beside.first_tag } else { 0 };
            let stamp = Stamp { tag: latest, stack, ..stamp_of(&row) };
            self.link.frame(&Record { stamp, body: taken.retag(taken.later_use()) });
            rows += 1;
        }
        if taken.is_pending() {
            let body = Body::BlockFree { address: row[2], pool: row[4], state: FreeState::Pending };
            self.link.frame(&Record { stamp: stamp_of(&row), body });
            rows += 1;
        }
        rows
    }
}

/// Returns the stamp of a row, marked as restated.
fn stamp_of(row: &Row) -> Stamp {
    match Record::decode(&crate::base::row::slot_of(row), &[]) {
        Ok(record) => Stamp { flags: record.stamp.flags.with(Flags::RESTATED), ..record.stamp },
        Err(_) => Stamp { seq: row[0], flags: Flags::RESTATED, ..Stamp::default() },
    }
}

/// Whether the row is a pool, handle or mapping. Handles include allocations and imports that follow the rules of handles.
fn has_order(taken: &RowCopy) -> bool {
    use crate::base::row::Key::{Backing, Handle, Mapping, Pool};
    matches!(crate::base::row::key_of(taken), Some(Pool(_) | Handle(_) | Backing(_) | Mapping(_)))
}

/// Sorts pools so that each follows its parent.
fn outer_first(mut pools: Vec<RowCopy>) -> Vec<RowCopy> {
    let mut said: Vec<RowCopy> = Vec::with_capacity(pools.len());
    while !pools.is_empty() {
        let left = pools.len();
        let waits =
            |pool: &RowCopy, others: &[RowCopy]| others.iter().any(|other| other.row[2] == pool.row[4]);
        let (later, now): (Vec<_>, Vec<_>) = pools.iter().partition(|pool| waits(pool, &pools));
        said.extend(now);
        pools = later;
        if pools.len() == left {
            said.append(&mut pools); // parents form a cycle, as reported by the program
        }
    }
    said
}
