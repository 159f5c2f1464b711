//! Makes records: takes a number and a time, updates the live table, and puts the record into the ring.

use crate::base::clock::Clock;
use crate::base::fault_injection;
use crate::base::ring::{Ring, Row};
use crate::base::row::{Key, RowExtra};
use crate::record::live::Live;
use crate::record::names::Names;
use crate::threads::Thread;
use gpumem_wire::{Body, Flags, NONE_DEVICE, Record, Stamp};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// Makes records of events. The fields used most come first, so that they share few cache lines.
#[derive(Debug)]
#[repr(C)]
pub struct Recorder {
    pub ring: Ring,
    pub live: Live,
    pub clock: Clock,
    pub names: Names,
}

/// The fields of a record's stamp that the caller sets. The recorder sets the others: number, time and thread.
#[derive(Debug, Clone, Copy)]
pub struct RecordContext {
    pub tag: u32,
    pub flags: Flags,
    pub stack: u32,
    pub context: u32,
    pub module: u16,
    pub device: u8,
}

impl RecordContext {
    /// A record context in which no field is set: no tag, stack, library or device.
    pub const NOWHERE: RecordContext =
        RecordContext { tag: 0, flags: Flags(0), stack: 0, context: 0, module: 0, device: NONE_DEVICE };

    pub(crate) const fn on(device: u8) -> Self {
        RecordContext { device, ..Self::NOWHERE }
    }

    pub(crate) const fn tagged(tag: u32) -> Self {
        RecordContext { tag, ..Self::NOWHERE }
    }
}

impl Recorder {
    /// Returns the stamp for a record without a number, with the current time.
    pub(crate) fn stamp(&self) -> Stamp {
        Stamp { time_ns: self.clock.now(), ..Stamp::default() }
    }

    /// Makes a numbered record and returns its number. `keep` updates the live table after the number is taken and before the
    /// record enters the ring. So the table contains the effect of each record that was sent.
    #[inline(always)]
    pub(crate) fn record(
        &self,
        thread: &Thread,
        at: RecordContext,
        body: Body<'_>,
        keep: impl FnOnce(&Recorder, &Row),
    ) -> u64 {
        self.record_timed(thread, at, |_, _| body, keep)
    }

    #[inline(always)]
    pub(crate) fn note(&self, thread: &Thread, at: RecordContext, body: Body<'_>) -> u64 {
        self.record(thread, at, body, no_row)
    }

    /// Makes a record and adds it to the live table under `key`.
    #[inline(always)]
    pub(crate) fn insert(
        &self,
        thread: &Thread,
        at: RecordContext,
        body: Body<'_>,
        key: Key,
        beside: RowExtra,
    ) -> u64 {
        self.record(thread, at, body, |recorder, row| {
            recorder.live.insert(key, row, beside);
        })
    }

    #[inline(always)]
    pub(crate) fn remove(&self, thread: &Thread, at: RecordContext, body: Body<'_>, key: Key) -> u64 {
        self.record(thread, at, body, |recorder, _| {
            recorder.live.remove(key);
        })
    }

    /// Like `record`, for a record with a duration: `body` gets the record's time.
    #[inline(always)]
    pub(crate) fn record_timed<'a>(
        &self,
        thread: &Thread,
        mut at: RecordContext,
        body: impl FnOnce(u64, &mut RecordContext) -> Body<'a>,
        keep: impl FnOnce(&Recorder, &Row),
    ) -> u64 {
        let seq = thread.making.begin(&self.ring);
        let time_ns = self.clock.now();
        let body = body(time_ns, &mut at);
        let stamp = Stamp {
            seq,
            time_ns,
            tag: at.tag,
            stack: at.stack,
            thread: thread.id.load(Relaxed),
            context: at.context,
            module: at.module,
            device: at.device,
            flags: at.flags,
        };
        let row = Record { stamp, body }.words().0;
        fault_injection::at("record"); // the number is taken, but there is no record
        keep(self, &row);
        fault_injection::at("kept"); // the row is in the table, but the record is not in the ring
        self.ring.put(&row);
        thread.making.end();
        self.ring.expect(seq + AHEAD);
        seq
    }
}

/// Distance, in slots, between the slot just written and the slot that is prefetched.
const AHEAD: u64 = 2;

#[inline(always)]
pub(crate) fn no_row(_: &Recorder, _: &Row) {}

/// Bit in `CLASSES` of the records of steps, phases, marks and counters.
pub(crate) const MARKS: u8 = 1;
/// Bit of the class with the records of begins and ends of scopes.
pub(crate) const RANGES: u8 = 2;
/// Bit of the class with the records of driver events outside of allocations: contexts, modules, limits, peer access, graphs.
pub(crate) const API: u8 = 4;

/// Bits of the classes (`MARKS`, `RANGES`, `API`) whose records are made.
static CLASSES: AtomicU8 = AtomicU8::new(MARKS | API);

#[inline(always)]
pub(crate) fn records(class: u8) -> bool {
    CLASSES.load(Relaxed) & class != 0
}

pub(crate) fn set_recorded(class: u8, is_on: bool) {
    match is_on {
        true => CLASSES.fetch_or(class, Relaxed),
        false => CLASSES.fetch_and(!class, Relaxed),
    };
}
