//! Resync: sends the whole state (names and rows of the live table) again while the program continues.
//!
//! Every record up to `after_seq` was sent before, and its effect is in the table: a record changes the table before it enters
//! the ring. The records of later changes follow. This does not work for reference counts, so they are read again, at most
//! `TRIES` times, until none has changed meanwhile. If one has changed each time, or if the row of a failed free was restored,
//! the state is sent without `ResyncEnd`, and the next resync replaces it.

use super::Sender;
use super::drain::QUIESCE_TIMEOUT;
use crate::base::fault_injection;
use crate::base::ring::Row;
use crate::base::row::{RowCopy, kind, kind_of, pool_owner};
use crate::threads;
use gpumem_wire::{Body, Flags, FreeState, PoolOwner, Record, Stamp};
use std::collections::HashMap;
use std::sync::atomic::Ordering::{Acquire, Release};

/// Maximum number of times that handles are read in a round. If reference counts still change, a later round sends all again.
const TRIES: usize = 16;

/// Rows that must be sent in a certain order: pools, and handles each with its mappings.
#[derive(Default)]
struct Ordered {
    pools: Vec<RowCopy>,
    handles: Vec<RowCopy>,
    /// Mappings by the number of the record that made their handle.
    mappings: HashMap<u64, Vec<RowCopy>>,
    /// Number of the last record whose effect is included in the sent rows.
    after_seq: u64,
    /// Whether no reference count changed while the rows were read.
    are_settled: bool,
}

impl Sender {
    /// Sends the state in reply to the request `epoch`. If it is inconsistent, another resync is due in the next round.
    pub(super) fn send_state(&mut self, epoch: u64) {
        self.progress.resync = None;
        fault_injection::at("resync");
        let restored = self.core.restored.load(Acquire);
        let Some(ordered) = self.read_settled() else {
            // A thread has not finished its record, or the link has ended.
            self.progress.resync = self.link.is_up().then_some(epoch);
            return;
        };
        let Ordered { after_seq, are_settled, .. } = ordered;
        self.progress.has_losses = false;
        self.send_withheld_count();
        self.progress.names_sent = 0;
        if !self.send_names(Flags::RESTATED) {
            return;
        }
        self.send(Body::ResyncBegin { epoch, after_seq });
        let mut rows = 0;
        for pool in outer_first(ordered.pools) {
            rows += self.send_pool(&pool);
        }
        for handle in &ordered.handles {
            rows += self.send_handle(handle);
            for mapping in ordered.mappings.get(&handle.seq()).map_or(&[][..], |mappings| mappings) {
                let mut row = mapping.row;
                row[4] = handle.row[2];
                rows += self.send_again(row);
            }
        }
        for taken in self.core.recorder.live.scan() {
            if taken.seq() <= after_seq && !is_ordered(&taken) {
                rows += self.send_row(&taken);
            }
            if !self.link.is_up() {
                return;
            }
        }
        self.send_reports(0);
        // A row restored during the scan may be at a place that was scanned before.
        if are_settled && self.core.restored.load(Acquire) == restored {
            let head_seq = self.core.recorder.ring.head();
            self.send(Body::ResyncEnd { epoch, head_seq, rows });
        } else {
            self.progress.resync = Some(epoch);
        }
        self.flush();
    }

    /// Reads pools, handles and mappings when all records up to `after_seq` are made or lost, and then sends these records. Reads
    /// again while reference counts change meanwhile, at most `TRIES` times. `None` if a thread did not finish its record or the
    /// link has ended.
    fn read_settled(&mut self) -> Option<Ordered> {
        let mut ordered = Ordered::default();
        for _ in 0..TRIES {
            // The daemon may be slow, so most records are sent before the time in which counts must not change.
            if !self.send_names(Flags(0)) || !self.send_records(self.core.recorder.ring.head()) {
                return None;
            }
            let after_seq = self.core.recorder.ring.head();
            if !threads::quiesce(after_seq, QUIESCE_TIMEOUT) {
                return None;
            }
            self.core.resync_after_seq.store(after_seq, Release);
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
            self.core.recorder.live.scan().filter(|taken| taken.seq() <= after_seq && is_ordered(taken))
        {
            match kind_of(&taken.row) {
                kind::POOL_CREATE => ordered.pools.push(taken),
                kind::VMM_MAP => ordered.mappings.entry(taken.beside.backing).or_default().push(taken),
                _ => ordered.handles.push(taken),
            }
        }
        ordered
    }

    /// Sends the record of a row again; returns 1, the number of records sent.
    fn send_again(&mut self, mut row: Row) -> u64 {
        row[7] |= u64::from(Flags::RESTATED.0) << 48;
        self.link.slot(&row);
        1
    }

    fn send_pool(&mut self, pool: &RowCopy) -> u64 {
        let mut rows = self.send_again(pool.row);
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

    fn send_handle(&mut self, handle: &RowCopy) -> u64 {
        let mut row = handle.row;
        if kind_of(&row) == kind::VMM_CREATE {
            let references = u64::from(u16::try_from(handle.beside.references).unwrap_or(u16::MAX));
            row[7] = row[7] & !0xffff_0000 | references << 16;
        }
        self.send_again(row)
    }

    /// Sends an allocation, segment or block with its current name and state; returns the number of records.
    fn send_row(&mut self, taken: &RowCopy) -> u64 {
        let mut row = taken.row;
        let latest = row[5] as u32;
        if taken.is_retagged() {
            row[5] = row[5] & !0xffff_ffff | u64::from(taken.beside.first_tag);
        }
        let mut rows = self.send_again(row);
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

/// Returns the stamp of a row's record, marked as sent again.
fn stamp_of(row: &Row) -> Stamp {
    match Record::decode(&crate::base::row::slot_of(row), &[]) {
        Ok(record) => Stamp { flags: record.stamp.flags.with(Flags::RESTATED), ..record.stamp },
        Err(_) => Stamp { seq: row[0], flags: Flags::RESTATED, ..Stamp::default() },
    }
}

/// Whether the row is a pool, handle or mapping. Imports by shareable handle are handles, too.
fn is_ordered(taken: &RowCopy) -> bool {
    use crate::base::row::Key::{Backing, Handle, Mapping, Pool};
    matches!(crate::base::row::key_of(taken), Some(Pool(_) | Handle(_) | Backing(_) | Mapping(_)))
}

/// Sorts pools so that each follows its parent.
fn outer_first(mut pools: Vec<RowCopy>) -> Vec<RowCopy> {
    let mut sorted: Vec<RowCopy> = Vec::with_capacity(pools.len());
    while !pools.is_empty() {
        let left = pools.len();
        let waits = |pool: &RowCopy| pools.iter().any(|other| other.row[2] == pool.row[4]);
        let (later, now): (Vec<RowCopy>, Vec<RowCopy>) = pools.iter().partition(|pool| waits(pool));
        sorted.extend(now);
        pools = later;
        if pools.len() == left {
            sorted.append(&mut pools); // the program has reported parents that form a cycle
        }
    }
    sorted
}
