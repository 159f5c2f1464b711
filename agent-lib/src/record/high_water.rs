//! The peak of live bytes in a range of time and the bytes of each tag at the peak, for programs that call `gpumem_peak`.
//!
//! While no range is open, each change of the live table costs one load and a branch. In a range, each row that is added or
//! removed changes the sums of its device and tag. The first change of a tag after a peak stores the tag's bytes at that peak.
//!
//! There are two families of rows: driver allocations (including those from driver pools), and blocks of pools without a parent.
//! The figures are exact, except that allocations made while a range is opened may count twice or not at all.

use crate::base::hot::HOT_WORDS;
use crate::base::locks::ForkMutex;
use crate::base::memfd::LazyTable;
use crate::base::ring::Row;
use crate::base::row::{device_of, kind, kind_of, memory_of};
use gpumem_wire::MemoryKind;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering::*};

pub(crate) const DEVICES: usize = 16;
/// Number of tags: 1 to 2^17, and 0 for rows without a tag.
const TAGS: usize = (1 << 17) + 1;

/// Kinds of live rows that are summed separately, so that no byte counts twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Allocations,
    Blocks,
}

/// Bytes with one tag on one device, for one [`Family`] of rows: now and at the measured peak.
#[derive(Debug)]
struct TagHighWater {
    live: AtomicI64,
    /// Bytes at the peak with number `peak`. If the device has a newer peak, `live` has not changed since that peak, and is the
    /// value at it.
    at_peak: AtomicI64,
    peak: AtomicU32,
}

#[derive(Debug)]
struct HighWater {
    live: AtomicI64,
    high: AtomicI64,
    /// Number of peaks so far, which identifies the current peak.
    peak: AtomicU32,
}

const OPEN: &AtomicBool = &HOT_WORDS.peaks_open;
static SUMS: [[HighWater; 2]; DEVICES] = [const {
    [const { HighWater { live: AtomicI64::new(0), high: AtomicI64::new(0), peak: AtomicU32::new(0) } }; 2]
}; DEVICES];
/// Bytes for each device, [`Family`] and tag. Allocated when `gpumem_peak` first begins a range.
static SHARES: LazyTable<TagHighWater, SHARE_COUNT> = LazyTable::new();
const SHARE_COUNT: usize = DEVICES * 2 * TAGS;
/// Spin lock held while bytes of tags, or of a tag and its device, are changed, so that the tags always add up to the device.
static MOVING: AtomicBool = AtomicBool::new(false);
/// Maximum number of attempts to take `MOVING`. A thread that holds it for longer has lost its processor core. Other threads then
/// continue without the lock, and the peak may be wrong by the bytes of that thread.
const ATTEMPTS: u32 = 2000;
/// Lock for opening a range of time whose peak is recorded.
static CHANGING: ForkMutex<()> = ForkMutex::new(|| ());

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

/// Returns device and family of a row; `None` for a row that is not counted. `parent`: parent of a block's pool; 0 for none.
fn place_of(row: &Row, parent: u64) -> Option<(usize, Family)> {
    use MemoryKind::{Array, Device, Pitched, StreamOrdered, Vmm};
    let family = match kind_of(row) {
        kind::BLOCK_ALLOC if parent == 0 => Family::Blocks,
        kind::ALLOC_END | kind::VMM_CREATE
            if matches!(memory_of(row), Device | Pitched | Array | StreamOrdered | Vmm) =>
        {
            Family::Allocations
        }
        _ => return None,
    };
    Some((device_of(row).into(), family)).filter(|(device, _)| *device < DEVICES)
}

fn locked(work: impl FnOnce()) {
    let is_mine = (0..ATTEMPTS).any(|attempt| {
        if attempt > 0 {
            std::hint::spin_loop();
        }
        !MOVING.swap(true, Acquire)
    });
    work();
    if is_mine {
        MOVING.store(false, Release);
    }
}

/// Adds the bytes of a row `times` times: 1 for a row that was added to the live table, -1 for one that was removed.
#[cold]
pub(crate) fn count(row: &Row, parent: u64, times: i64) {
    let Some((device, family)) = place_of(row, parent) else { return };
    let bytes = times * row[3].cast_signed();
    locked(|| {
        let sum = &SUMS[device][family as usize];
        if let Some(share) = share(device, family, row[5] as u32) {
            let peak = sum.peak.load(Acquire);
            if share.peak.swap(peak, AcqRel) != peak {
                share.at_peak.store(share.live.load(Relaxed), Release);
            }
            share.live.fetch_add(bytes, AcqRel);
        }
        let now = sum.live.fetch_add(bytes, AcqRel) + bytes;
        if now > sum.high.load(Acquire) {
            sum.high.fetch_max(now, AcqRel);
            sum.peak.fetch_add(1, AcqRel);
        }
    });
}

/// Moves the bytes of a row to another tag, in the live bytes and in those at the peak. The device's sum does not change.
pub(crate) fn row_retagged(row: &Row, parent: u64, tag: u32) {
    let Some((device, family)) = place_of(row, parent).filter(|_| row[5] as u32 != tag) else { return };
    locked(|| {
        let peak = SUMS[device][family as usize].peak.load(Acquire);
        for (tag, bytes) in [(row[5] as u32, -row[3].cast_signed()), (tag, row[3].cast_signed())] {
            if let Some(share) = share(device, family, tag) {
                share.live.fetch_add(bytes, AcqRel);
                if share.peak.load(Acquire) == peak {
                    share.at_peak.fetch_add(bytes, AcqRel);
                }
            }
        }
    });
}

/// Opens a range, unless one is open. `live` returns the live rows, each with the parent of its block's pool. Returns false
/// without memory. Must not be called in a callback: it locks and allocates.
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
            // SAFETY: the agent's own private mapping. Afterwards its pages contain zeros, which are a valid TagHighWater.
            unsafe { libc::madvise(start, size_of_val(shares), libc::MADV_DONTNEED) };
        }
    }
    MOVING.store(false, Relaxed); // a forked child inherits the parent's value
    for sum in SUMS.iter().flatten() {
        sum.live.store(0, Relaxed);
        sum.high.store(0, Relaxed);
        sum.peak.store(1, Relaxed);
    }
    // Rows of other threads that change until OPEN is set may count twice or not at all.
    let live = live();
    OPEN.store(true, SeqCst);
    for (row, parent) in &live {
        count(row, *parent, 1);
    }
    reset();
    true
}

/// Restarts the range: sets the peak to the current live bytes.
pub(crate) fn reset() {
    for sum in SUMS.iter().flatten() {
        sum.peak.fetch_add(1, AcqRel);
        sum.high.store(sum.live.load(Acquire), Release);
    }
}

pub(crate) fn end() {
    OPEN.store(false, SeqCst);
}

pub(crate) fn high(device: usize, family: Family) -> u64 {
    let high = SUMS.get(device).map_or(0, |sums| sums[family as usize].high.load(Acquire));
    u64::try_from(high).unwrap_or(0)
}

/// Returns, for a family on a device, the bytes at the peak, the bytes live now, and the bytes of each tag at the peak.
pub(crate) fn read(device: usize, family: Family) -> (u64, u64, Vec<(u32, u64)>) {
    let sum = &SUMS[device][family as usize];
    let bytes = |value: i64| u64::try_from(value).unwrap_or(0);
    let peak = sum.peak.load(Acquire);
    let live = sum.live.load(Acquire);
    let first = (device * 2 + family as usize) * TAGS;
    let all = SHARES.get().get(first..first + TAGS).unwrap_or_default();
    let at_high = all.iter().enumerate().filter_map(|(tag, share)| {
        let at_peak = if share.peak.load(Acquire) == peak { &share.at_peak } else { &share.live };
        Some((tag as u32, bytes(at_peak.load(Acquire)))).filter(|(_, bytes)| *bytes > 0)
    });
    (high(device, family), bytes(live), at_high.collect())
}
