//! A late agent takes over what PyTorch has already: its allocator lists its segments and blocks for whoever asks
//! (torch.cuda.memory_snapshot), and our Python asks.
//!
//! The list is right as of when the allocator wrote it. So it counts only if nothing has happened from before it was asked for until all of
//! it is booked: no record of anybody's, no report of PyTorch's. Else all is taken back, and the list is asked for again. That leaves one
//! race, of some hundred ns: another thread frees a block that is about to be booked, and gets it again.

use super::patch;
use super::state::Device;
use crate::core::{At, Core, nothing};
use crate::live::{Beside, Key};
use crate::threads::Thread;
use gpumem_wire::{Body, Flags, FreeState, MemoryKind, Phase, Role};
use std::sync::atomic::{AtomicU64, Ordering::*};

/// What it is called, until somebody says what it is.
const NAME: &[u8] = b"before the agent";

/// Records and reports when the list was asked for.
static BEFORE: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Of the list: the program's number of the device, whether it is a block (or a segment), address, and bytes.
pub type Part = [u64; 4];

/// What was booked so far.
struct Booked<'a> {
    core: &'a Core,
    thread: &'a Thread,
    /// Rows, and the records that made them.
    rows: Vec<(Key, u64)>,
    /// Records.
    count: u64,
}

impl Core {
    fn counts(&self) -> [u64; 2] {
        [self.ring.head(), self.torch.devices.iter().map(|device| device.reports.load(Relaxed)).sum()]
    }

    /// The list is about to be asked for. False if there is nothing that was missed.
    pub fn adoption_begins(&self) -> bool {
        if !self.torch.is_late.load(Relaxed) || !patch::is_patched(patch::REPORT) {
            return false;
        }
        for (place, count) in BEFORE.iter().zip(self.counts()) {
            place.store(count, Relaxed);
        }
        true
    }

    /// Takes over what is in the list. False if something else has happened meanwhile: then nothing is.
    pub fn adopt(&self, thread: &Thread, parts: &[Part]) -> bool {
        let [records, reports] = BEFORE.each_ref().map(|place| place.load(Relaxed));
        let mut booked = Booked { core: self, thread, rows: Vec::new(), count: 0 };
        for (ordinal, device) in self.torch.devices.iter().enumerate() {
            let of_kind =
                |kind: u64| parts.iter().filter(move |part| part[0] == ordinal as u64 && part[1] == kind);
            if self.counts() == [records + booked.count, reports] && of_kind(0).next().is_some() {
                booked.take_over(device, ordinal as u8, of_kind(0), of_kind(1));
            }
        }
        let is_right = self.counts() == [records + booked.count, reports];
        if !is_right {
            booked.take_back();
        }
        for (ordinal, device) in self.torch.devices.iter().enumerate() {
            if device.pool.load(Acquire) != 0 {
                let unseen = device.reserved.load(Relaxed).wrapping_sub(device.segments.load(Relaxed));
                device.unseen.store(unseen as i64, Relaxed);
                self.tell_unseen(thread, device, At { device: ordinal as u8, ..At::NOWHERE });
            }
        }
        is_right
    }
}

impl Booked<'_> {
    fn take_over<'p>(
        &mut self,
        device: &Device,
        slot: u8,
        segments: impl Iterator<Item = &'p Part> + Clone,
        blocks: impl Iterator<Item = &'p Part> + Clone,
    ) {
        let (core, thread) = (self.core, self.thread);
        let tag = core.names.intern(0, NAME);
        let at = At { tag, device: slot, flags: Flags::OLDER, ..At::NOWHERE };
        let bytes_of = |parts: &mut dyn Iterator<Item = &'p Part>| parts.map(|part| part[3]).sum::<u64>();
        if device.pool.load(Acquire) == 0 {
            device.reserved.store(bytes_of(&mut segments.clone()), Relaxed);
            self.count += 1;
        }
        let pool = core.make_pool(thread, device, slot, bytes_of(&mut blocks.clone()));
        for &[_, _, address, bytes] in segments {
            if core.live.get(Key::Segment(pool, address)).is_some() {
                continue;
            }
            let body = Body::AllocEnd { address, bytes, pool: 0, took_us: 0, memory: MemoryKind::Device };
            self.book(at, Key::Allocation(address), body);
            self.book(at, Key::Segment(pool, address), Body::SegmentAdd { address, bytes, pool });
            device.segments.fetch_add(bytes, Relaxed);
        }
        for &[_, _, address, bytes] in blocks {
            let use_as = (Role::Unknown, Phase::Unknown);
            if self.book(at, Key::Block(pool, address), Body::BlockAlloc { address, bytes, pool, use_as }) {
                device.forget_older(bytes);
            }
        }
    }

    /// Whether it was new.
    fn book(&mut self, at: At, key: Key, body: Body<'_>) -> bool {
        if self.core.live.get(key).is_some() {
            return false;
        }
        let seq = self.core.record(self.thread, at, body, |core, row| {
            core.live.insert(key, row, Beside::default());
        });
        self.count += 1;
        self.rows.push((key, seq));
        true
    }

    /// What is still as it was booked.
    fn take_back(self) {
        let (core, thread) = (self.core, self.thread);
        for (key, seq) in self.rows.into_iter().rev() {
            let Some(row) = core.live.get(key).filter(|taken| taken.seq() == seq).map(|taken| taken.row)
            else {
                continue;
            };
            let (slot, bytes) = (crate::book::device_of(&row), row[3]);
            let device = &core.torch.devices[usize::from(slot)];
            let at = At { device: slot, flags: Flags::OLDER, ..At::NOWHERE };
            let body = match key {
                Key::Block(pool, address) => {
                    device.older.fetch_add(bytes, Relaxed);
                    Body::BlockFree { address, pool, state: FreeState::Done }
                }
                Key::Segment(pool, address) => {
                    device.segments.fetch_sub(bytes, Relaxed);
                    Body::SegmentRemove { address, bytes, pool }
                }
                _ => Body::FreeBegin { address: row[2] },
            };
            let begin_seq = core.record(thread, at, body, |core, _| core.live.discard(key));
            if matches!(body, Body::FreeBegin { .. }) {
                core.record(thread, at, Body::FreeEnd { begin_seq, result: 0 }, nothing);
            }
        }
    }
}
