//! Data of each thread: its open scopes and driver calls, and whether it is making a record.
//!
//! A thread claims a place in a table (table.rs) when it first calls the agent. A thread-local word points to the place. The word
//! has no destructor, because callbacks also arrive while thread-local storage is destroyed. So the sender finds threads that
//! have ended.

pub(crate) mod per_feature;
pub(crate) mod stack;
pub(crate) mod table;

use crate::base::memfd::anonymous;
use crate::base::own_thread;
use crate::base::row::RowCopy;
use crate::threads::per_feature::{AutogradThread, Callers, ThreadAllocatorState};
use crate::threads::table::{RecordInProgress, SlotTable, TableSlot};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

/// Maximum number of threads at a time. Calls of further threads make no records; the number of these calls is reported.
const MAX_THREADS: usize = 4096;
/// Maximum depth of nested scopes of a thread. Deeper scopes are ignored: their memory gets the name of the scope at this depth.
pub(crate) const DEPTH: usize = 64;
/// Number of owners of scopes: the C API, NVTX's default domain, and 32 named domains of NVTX.
pub(crate) const OWNERS: usize = 34;
/// Maximum number of open driver calls of a thread (begun and not returned): one call, and calls nested in it.
pub(crate) const CALLS: usize = 4;

/// A driver call between its begin (ENTER) and its return (EXIT).
#[derive(Debug, Clone, Copy, Default)]
pub struct Call {
    /// CUPTI's correlation id, the same at begin and return.
    pub(crate) correlation: u32,
    pub(crate) entered_ns: u64,
    /// CUPTI's id of the driver function, for resource callbacks inside of the call.
    pub(crate) id: u32,
    /// Address of the call's parameters, for resource callbacks inside of the call.
    pub(crate) params: usize,
    /// Number of the record made at the begin; 0 for none.
    pub(crate) begin_seq: u64,
    /// The row that was removed at the begin. It is restored if the call fails.
    pub(crate) taken: Option<RowCopy>,
    /// Number of rows removed when the call began, in addition to `taken`; they cannot be restored.
    pub(crate) more_taken: u32,
    /// Whether the call will create a context.
    pub(crate) creating: bool,
    /// Whether a graph node was made inside of the call: its stream is being captured.
    pub(crate) captured: bool,
    /// Address of an allocation that a call nested in this one has recorded; 0 for none.
    pub(crate) reported: u64,
    /// Id of the pool from which the begin of the call removed a segment; 0 for none.
    pub(crate) segment_of: u64,
}

impl Call {
    /// Creates a call that began at this time.
    pub fn new(correlation: u32, entered_ns: u64) -> Self {
        Call { correlation, entered_ns, ..Call::default() }
    }
}

/// Data of a thread that only the thread itself uses.
#[derive(Debug)]
pub(crate) struct OwnerData {
    /// Number of the thread's open scopes; may be larger than `DEPTH`.
    pub depth: usize,
    /// For each of the first `DEPTH` open scopes, the tag of the thread before it was opened.
    pub outer: [u32; DEPTH],
    /// For each open scope, the number of its owner: see [`OWNERS`].
    pub owner: [u8; DEPTH],
    /// For each owner, the number of its open scopes.
    pub open_scopes: [u16; OWNERS],
    /// Driver calls that have not returned, the outermost first. `open` is their number.
    pub calls: [Option<Call>; CALLS],
    pub open: usize,
    /// The pool of the thread's last block in the C API: its row is marked as a pool that reports blocks.
    pub block_pool: u64,
    pub callers: Callers,
}

impl OwnerData {
    /// Removes open calls whose return was not observed, because no callbacks arrived then. `thread` is the owner.
    #[inline(always)]
    pub(crate) fn drop_unobserved_calls(&mut self, thread: &Thread) {
        let outermost = self.calls[0].filter(|_| self.open != 0);
        if outermost.is_some_and(|call| call.entered_ns < CALLBACKS_SINCE_NS.load(Relaxed)) {
            self.open = 0;
            thread.moving_since_ns.store(0, Release);
        }
    }

    #[inline(always)]
    pub(crate) fn entered(&mut self, call: Call) {
        if self.open < CALLS {
            self.calls[self.open] = Some(call);
            self.open += 1;
        }
    }

    #[inline(always)]
    pub(crate) fn innermost(&mut self) -> Option<&mut Call> {
        self.calls.get_mut(self.open.checked_sub(1)?)?.as_mut()
    }

    /// Removes and returns the call that returns now. Removes calls nested in it, too: their return was not observed.
    #[inline(always)]
    pub(crate) fn returned(&mut self, correlation: u32) -> Option<Call> {
        let is_it = |call: &Option<Call>| call.is_some_and(|call| call.correlation == correlation);
        self.open = self.calls[..self.open].iter().rposition(is_it)?;
        self.calls[self.open].take()
    }
}

/// A place of the table, with the data of its thread. The fields used for each block of PyTorch come first: one cache line and
/// the beginning of the next.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Thread {
    /// Kernel id of the thread; 0 while this entry of the table is free.
    pub id: AtomicU32,
    /// Not 0 while the thread is inside of the agent: calls of the agent from there are ignored.
    pub(crate) busy: AtomicU32,
    pub(crate) making: RecordInProgress,
    /// Tag of the innermost open scope; 0 for none. Only the thread itself writes it: in `push` and `pop`, and in Python code.
    /// Python has the address (`gpumem_scope_word`), and restores the value that was there before.
    pub(crate) scope: AtomicU32,
    pub(crate) autograd: AutogradThread,
    pub(crate) torch: ThreadAllocatorState,
    /// Time at which the outermost open call that allocates device memory, or that trims a pool, began (ns); 0 for none.
    pub(crate) moving_since_ns: AtomicU64,
    /// Cache: the context whose device was last determined << 8 | the slot of that device.
    context: AtomicU64,
    own: UnsafeCell<OwnerData>,
}

// SAFETY: only the thread that has the place uses `own` (see `Thread::own`); the rest is atomic.
unsafe impl Sync for Thread {}

static PLACES: SlotTable<Thread, MAX_THREADS> = SlotTable {
    table: AtomicPtr::new(std::ptr::null_mut()),
    used: AtomicUsize::new(0),
    next: AtomicUsize::new(0),
    refused: AtomicU64::new(0),
};

impl TableSlot for Thread {
    fn id(&self) -> &AtomicU32 {
        &self.id
    }

    fn making(&self) -> &RecordInProgress {
        &self.making
    }

    fn begin(&self) {
        self.clear_calls();
        self.scope.store(0, Relaxed);
        self.autograd.reset();
        // SAFETY: this thread has claimed the place, and no other thread uses `own`.
        unsafe {
            (*self.own.get()) = OwnerData {
                depth: 0,
                outer: [0; DEPTH],
                owner: [0; DEPTH],
                open_scopes: [0; OWNERS],
                calls: [None; CALLS],
                open: 0,
                block_pool: 0,
                callers: Callers::default(),
            };
        }
    }

    fn end(&self) {
        // The kernel makes all stores of the ended thread visible. Race detectors do not know that and need this load.
        let _ = self.busy.load(Acquire);
        self.moving_since_ns.store(0, Release);
    }
}

/// The thread-local word that points to the calling thread's place.
///
/// Not `thread_local!`: in a library that is loaded late, its first use on a thread allocates, and the host's allocator may call
/// the driver. A word in static TLS never allocates; it uses 8 bytes of the loader's reserve.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod word {
    use super::Thread;
    use std::arch::{asm, global_asm};

    global_asm!(
        ".section .tbss.gpumem_thread,\"awT\",@nobits",
        ".balign 8",
        ".globl gpumem_thread",
        ".hidden gpumem_thread",
        ".type gpumem_thread, %object",
        ".size gpumem_thread, 8",
        "gpumem_thread:",
        ".zero 8",
        ".previous",
    );

    #[inline(always)]
    pub(crate) fn get() -> *const Thread {
        let place: *const Thread;
        // SAFETY: reads the calling thread's copy of the word above.
        unsafe {
            asm!(
                "mov {place}, qword ptr [rip + gpumem_thread@GOTTPOFF]",
                "mov {place}, qword ptr fs:[{place}]",
                place = out(reg) place,
                options(nostack, readonly, preserves_flags),
            );
        }
        place
    }

    pub(crate) fn set(place: *const Thread) {
        // SAFETY: writes the calling thread's copy of the word above.
        unsafe {
            asm!(
                "mov {offset}, qword ptr [rip + gpumem_thread@GOTTPOFF]",
                "mov qword ptr fs:[{offset}], {place}",
                offset = out(reg) _,
                place = in(reg) place,
                options(nostack, preserves_flags),
            );
        }
    }
}
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod word {
    use super::Thread;
    use std::cell::Cell;

    thread_local! {
        static PLACE: Cell<*const Thread> = const { Cell::new(std::ptr::null()) };
    }

    pub(crate) fn get() -> *const Thread {
        PLACE.get()
    }

    pub(crate) fn set(place: *const Thread) {
        PLACE.set(place);
    }
}

/// Allocates the table, if there is none; returns false if there is no memory for it.
pub(crate) fn prepare() -> bool {
    if !PLACES.table.load(Acquire).is_null() {
        return true;
    }
    let Some(table) = anonymous::<Thread>(MAX_THREADS) else { return false };
    PLACES.table.store(table.as_ptr().cast_mut(), Release);
    true
}

/// Returns all places that were ever used.
pub fn all() -> &'static [Thread] {
    PLACES.all()
}

/// Returns the number of calls by threads that got no place because the table was full.
pub fn refused() -> u64 {
    PLACES.refused.load(Relaxed)
}

/// Returns the calling thread's place, if it has claimed one.
#[inline(always)]
pub(crate) fn known() -> Option<&'static Thread> {
    // SAFETY: null, or the word points into the table, which is never unmapped.
    unsafe { word::get().as_ref() }
}

/// Returns the calling thread's place; `None` before `prepare`, and for a thread that has found no free place.
#[inline(always)]
pub fn current() -> Option<&'static Thread> {
    known().or_else(claim)
}

#[cold]
#[inline(never)]
fn claim() -> Option<&'static Thread> {
    let place = PLACES.claim(own_thread::kernel_id())?;
    word::set(place);
    Some(place)
}

/// Frees the places of all threads but the calling one, in a forked child that starts its own agent. There the calling thread has
/// another kernel id.
pub(crate) fn reset_after_fork() {
    let mine = word::get();
    let id = own_thread::kernel_id();
    for thread in all() {
        let is_mine = std::ptr::eq(thread, mine);
        thread.id.store(if is_mine { id } else { 0 }, Relaxed);
        thread.making.reset();
        thread.clear_calls();
        if !is_mine {
            thread.autograd.reset();
        }
    }
}

/// Waits a moment for the sender. `turn` is the iteration of the caller's loop: the first 64 yield, later ones sleep 100 us.
pub(crate) fn wait_a_turn(turn: u32) {
    const NAP: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 100_000 };
    // SAFETY: nothing is written.
    unsafe { if turn < 64 { libc::sched_yield() } else { libc::nanosleep(&NAP, std::ptr::null_mut()) } };
}

impl Thread {
    fn clear_calls(&self) {
        self.busy.store(0, Relaxed);
        self.moving_since_ns.store(0, Relaxed);
        self.context.store(0, Relaxed);
        self.torch.reset();
    }

    #[inline(always)]
    pub(crate) fn device_of(&self, context: usize) -> Option<u8> {
        let cached = self.context.load(Relaxed);
        (cached >> 8 == context as u64 && context != 0).then_some(cached as u8)
    }

    pub(crate) fn remember_context(&self, context: usize, device: u8) {
        self.context.store((context as u64) << 8 | u64::from(device), Relaxed);
    }

    /// Runs `work`. Callbacks of driver calls that it makes are ignored.
    pub(crate) fn inside<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = self.busy.swap(1, Relaxed);
        let done = work();
        self.busy.store(before, Relaxed);
        done
    }

    /// Removes an ending context from the thread's cache (`context`): its address may be reused for a context of another device.
    pub(crate) fn forget_context(&self, context: usize) {
        let cached = self.context.load(Relaxed);
        if cached >> 8 == context as u64 {
            let _ = self.context.compare_exchange(cached, 0, Relaxed, Relaxed);
        }
    }

    /// Returns the data of the calling thread.
    ///
    /// # Safety
    /// `self` must be `current()`, and no other reference that this function returned may be in use.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn own(&self) -> &mut OwnerData {
        // SAFETY: the thread's own place, used by one caller at a time.
        unsafe { &mut *self.own.get() }
    }
}

/// Waits until every record up to `seq` is made or lost; returns false after the timeout.
pub(crate) fn quiesce(seq: u64, timeout: std::time::Duration) -> bool {
    let start = std::time::Instant::now();
    PLACES.quiesce(seq, |turns| {
        if turns < 64 {
            std::hint::spin_loop();
        } else if start.elapsed() > timeout {
            return false;
        } else {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
        true
    })
}

/// Time since which callbacks arrive (ns); `u64::MAX` while none arrive. The return of a call that began before it may not have
/// been observed.
pub static CALLBACKS_SINCE_NS: AtomicU64 = AtomicU64::new(0);

/// Returns the time at which the oldest open call that allocates device memory, or that trims a pool, began (ns); 0 for none.
pub fn moving_since_ns() -> u64 {
    let hearing_since_ns = CALLBACKS_SINCE_NS.load(Acquire);
    let entered = all().iter().map(|thread| thread.moving_since_ns.load(Acquire));
    entered.filter(|&ns| ns != 0 && ns >= hearing_since_ns).min().unwrap_or(0)
}

/// Frees the entries of threads that have ended, if at least 64 entries were ever used.
pub(crate) fn sweep(pid: u32) {
    if PLACES.used.load(Relaxed) < 64 {
        return;
    }
    // SAFETY: signal 0 is never delivered; the call checks whether the thread exists.
    PLACES.sweep(|id| unsafe { libc::syscall(libc::SYS_tgkill, pid, id, 0) } != 0);
}
