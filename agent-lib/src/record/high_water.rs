//! The peak of live bytes in a range of time and its composition, for programs that request it (`gpumem_peak`).
//!
//! While no range is open each row costs one load and a branch. In a range, each row that is added or removed changes the sums
//! of its device and tag. A tag saves its bytes at the peak when it changes for the first time afterwards.
//!
//! There are two families: driver allocations (for a driver pool, the memory that it handed out), and blocks of pools without a
//! parent. The figures are exact, except that allocations while a range is opened may count twice or not at all.

use crate::base::hot::HOT_WORDS;
use crate::base::locks::ForkMutex;
use crate::base::memfd::LazyTable;
use crate::base::ring::Row;
use crate::base::row::{device_of, kind, kind_of, memory_of};
use gpumem_wire::MemoryKind;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering::*};

/// Devices whose peaks are kept.
pub(crate) const DEVICES: usize = 16;
/// Tags have numbers up to 2^17; 0 is not a tag.
const TAGS: usize = (1 << 17) + 1;

/// Rows that are summed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Allocations,
    Blocks,
}

/// Bytes of a tag on a device in a family.
#[derive(Debug)]
struct TagHighWater {
    live: AtomicI64,
    /// Bytes at the peak, if `turn` is the peak's.
    then: AtomicI64,
    turn: AtomicU32,
}

#[derive(Debug)]
struct HighWater {
    live: AtomicI64,
    high: AtomicI64,
    /// Number of the current peak; increases with each new one.
    turn: AtomicU32,
}

const OPEN: &AtomicBool = &HOT_WORDS.peaks_open;
static SUMS: [[HighWater; 2]; DEVICES] = [const {
    [const { HighWater { live: AtomicI64::new(0), high: AtomicI64::new(0), turn: AtomicU32::new(0) } }; 2]
}; DEVICES];
/// Made when the first range is opened.
static SHARES: LazyTable<TagHighWater, SHARE_COUNT> = LazyTable::new();
const SHARE_COUNT: usize = DEVICES * 2 * TAGS;
/// Lock held while bytes are added to a tag and to its sum, so that a peak's composition equals its sum.
static MOVING: AtomicBool = AtomicBool::new(false);
/// Attempts to take `MOVING` while a range is open. A thread that holds it for longer has lost its core. Other threads then
/// continue without it, and the peak may be wrong by the bytes of that thread.
const LOOKS: u32 = 2000;
/// One thread at a time opens and closes.
static CHANGING: ForkMutex<()> = ForkMutex::new(|| ());

/// Releases the lock in a forked child that starts its own agent.
pub(crate) fn reset_after_fork() {
    MOVING.store(false, Release);
}

#[inline(always)]
pub(crate) fn open() -> bool {
    OPEN.load(Relaxed)
}

fn share(device: usize, family: Family, tag: u32) -> Option<&'static TagHighWater> {
    SHARES.get().get((device * 2 + family as usize) * TAGS + (tag as usize).min(TAGS - 1))
}

/// Returns the family of a row. `parent` is the parent of a block's pool; 0 for none.
fn family(row: &Row, parent: u64) -> Option<Family> {
    match kind_of(row) {
        kind::BLOCK_ALLOC => (parent == 0).then_some(Family::Blocks),
        kind::ALLOC_END | kind::VMM_CREATE => {
            let device = [
                MemoryKind::Device,
                MemoryKind::Pitched,
                MemoryKind::Array,
                MemoryKind::StreamOrdered,
                MemoryKind::Vmm,
            ];
            device.contains(&memory_of(row)).then_some(Family::Allocations)
        }
        _ => None,
    }
}

fn alone(work: impl FnOnce()) {
    let is_mine = (0..LOOKS).any(|look| {
        if look > 0 {
            std::hint::spin_loop();
        }
        !MOVING.swap(true, Acquire)
    });
    work();
    if is_mine {
        MOVING.store(false, Release);
    }
}

#[cold]
fn add(row: &Row, parent: u64, tag: u32, bytes: i64) {
    let device = usize::from(device_of(row));
    let Some(family) = family(row, parent).filter(|_| device < DEVICES) else { return };
    alone(|| move_bytes(&SUMS[device][family as usize], share(device, family, tag), bytes));
}

fn move_bytes(sum: &HighWater, share: Option<&TagHighWater>, bytes: i64) {
    if let Some(share) = share {
        let turn = sum.turn.load(Acquire);
        if share.turn.swap(turn, AcqRel) != turn {
            share.then.store(share.live.load(Relaxed), Release);
        }
        share.live.fetch_add(bytes, AcqRel);
    }
    let now = sum.live.fetch_add(bytes, AcqRel) + bytes;
    if now > sum.high.load(Acquire) {
        sum.high.fetch_max(now, AcqRel);
        sum.turn.fetch_add(1, AcqRel);
    }
}

/// Counts a row that was added to the table.
pub(crate) fn born(row: &Row, parent: u64) {
    add(row, parent, row[5] as u32, row[3].cast_signed());
}

/// Counts a row that was removed from the table.
pub(crate) fn gone(row: &Row, parent: u64) {
    add(row, parent, row[5] as u32, -row[3].cast_signed());
}

/// Moves a row to another tag. No sum changes, so the peak's composition gets the later name.
pub(crate) fn renamed(row: &Row, parent: u64, tag: u32) {
    let device = usize::from(device_of(row));
    let Some(family) = family(row, parent).filter(|_| device < DEVICES && row[5] as u32 != tag) else {
        return;
    };
    alone(|| {
        let turn = SUMS[device][family as usize].turn.load(Acquire);
        for (tag, bytes) in [(row[5] as u32, -row[3].cast_signed()), (tag, row[3].cast_signed())] {
            if let Some(share) = share(device, family, tag) {
                share.live.fetch_add(bytes, AcqRel);
                if share.turn.load(Acquire) == turn {
                    share.then.fetch_add(bytes, AcqRel);
                }
            }
        }
    });
}

/// Begins to count. `live` returns the live rows with the parents of blocks' pools. Not in a hook. False without memory.
pub(crate) fn begin(live: impl FnOnce() -> Vec<(Row, u64)>) -> bool {
    let Ok(_changing) = CHANGING.lock() else { return false };
    if open() {
        return true;
    }
    match SHARES.get() {
        [] if !SHARES.make() => return false,
        [] => {}
        shares => {
            let start = shares.as_ptr().cast_mut().cast();
            // SAFETY: the agent's own private mapping. Its pages read as zeros afterwards, which is a valid TagHighWater.
            unsafe { libc::madvise(start, size_of_val(shares), libc::MADV_DONTNEED) };
        }
    }
    MOVING.store(false, Relaxed); // in a forked child
    for sum in SUMS.iter().flatten() {
        sum.live.store(0, Relaxed);
        sum.high.store(0, Relaxed);
        sum.turn.store(1, Relaxed);
    }
    // Between these two lines, other threads' rows may count twice or not at all: see the module's docs.
    let live = live();
    OPEN.store(true, SeqCst);
    for (row, parent) in &live {
        born(row, *parent);
    }
    reset();
    true
}

/// Sets the peak to the bytes that are live now.
pub(crate) fn reset() {
    for sum in SUMS.iter().flatten() {
        sum.turn.fetch_add(1, AcqRel);
        sum.high.store(sum.live.load(Acquire), Release);
    }
}

pub(crate) fn end() {
    OPEN.store(false, SeqCst);
}

pub(crate) fn high(device: usize, which: Family) -> u64 {
    let high = SUMS.get(device).map_or(0, |sums| sums[which as usize].high.load(Acquire));
    u64::try_from(high).unwrap_or(0)
}

/// Returns, for a family on a device, the bytes at the peak, the bytes live now, and the bytes of each tag at the peak.
pub(crate) fn read(device: usize, which: Family) -> (u64, u64, Vec<(u32, u64)>) {
    let sum = &SUMS[device][which as usize];
    let bytes = |value: i64| u64::try_from(value).unwrap_or(0);
    let turn = sum.turn.load(Acquire);
    let (high, live) = (sum.high.load(Acquire), sum.live.load(Acquire));
    let first = (device * 2 + which as usize) * TAGS;
    let all = SHARES.get().get(first..first + TAGS).unwrap_or_default();
    let at_high = all.iter().enumerate().filter_map(|(tag, share)| {
        let then = if share.turn.load(Acquire) == turn { &share.then } else { &share.live };
        let then = then.load(Acquire);
        (then > 0).then(|| (tag as u32, bytes(then)))
    });
    (bytes(high), bytes(live), at_high.collect())
}
