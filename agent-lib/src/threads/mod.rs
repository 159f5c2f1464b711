//! Data of each thread: its tag stack, its open driver calls, and whether it is making a record.
//!
//! Threads claim a place in a table (table.rs) on first use. A thread-local word points to it, without a destructor: callbacks
//! arrive while thread-local storage is destroyed. The sender asks the kernel which threads have ended.

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

/// Threads at a time; records of further threads are lost, and their number is reported.
const MOST: usize = 4096;
/// Scopes that a thread can nest; deeper ones count for the innermost that fits.
pub(crate) const DEPTH: usize = 64;
/// Owners of scopes: the C API, NVTX's default domain, and 32 named domains.
pub(crate) const OWNERS: usize = 34;
/// Driver calls that can be open on a thread at a time: one, and nested calls.
pub(crate) const CALLS: usize = 4;

/// A driver call between ENTER and EXIT.
#[derive(Debug, Clone, Copy, Default)]
pub struct Call {
    /// CUPTI's correlation id, the same at ENTER and EXIT.
    pub(crate) correlation: u32,
    pub(crate) entered_ns: u64,
    /// Id of the call, for nested resource callbacks.
    pub(crate) id: u32,
    /// Address of its parameters, for nested resource callbacks.
    pub(crate) params: usize,
    /// Number of the record made at ENTER; 0 for none.
    pub(crate) begin_seq: u64,
    /// The row that ENTER removed, to be restored if the call fails.
    pub(crate) taken: Option<RowCopy>,
    /// Number of further rows that ENTER removed.
    pub(crate) more_taken: u32,
    pub(crate) creating: bool,
    /// A graph node was made inside: the stream is being captured.
    pub(crate) captured: bool,
    /// Address of an allocation that a nested call has recorded already.
    pub(crate) reported: u64,
    /// The pool whose segment that row was; 0 for none.
    pub(crate) segment_of: u64,
}

impl Call {
    /// Creates a call that was entered at this time.
    pub fn new(correlation: u32, entered_ns: u64) -> Self {
        Call { correlation, entered_ns, ..Call::default() }
    }
}

/// Data that only the thread itself uses.
#[derive(Debug)]
pub(crate) struct OwnerData {
    /// Number of open scopes; may be more than `DEPTH`.
    pub depth: usize,
    /// For each open scope, the tag in force when it was opened.
    pub outer: [u32; DEPTH],
    /// For each open scope, its owner: see [`OWNERS`].
    pub owner: [u8; DEPTH],
    /// For each owner, the number of its open scopes.
    pub open_scopes: [u16; OWNERS],
    pub calls: [Option<Call>; CALLS],
    pub open: usize,
    /// A pool whose first block was noted.
    pub block_pool: u64,
    pub callers: Callers,
}

impl OwnerData {
    /// Removes open calls whose return was missed because callbacks were interrupted. `thread` is the owner.
    #[inline(always)]
    pub(crate) fn forget_unheard(&mut self, thread: &Thread) {
        let outermost = self.calls[0].filter(|_| self.open != 0);
        if outermost.is_some_and(|call| call.entered_ns < HEARING_SINCE_NS.load(Relaxed)) {
            self.open = 0;
            thread.moving_since_ns.store(0, Release);
        }
    }

    /// Adds a call as the innermost open one.
    #[inline(always)]
    pub(crate) fn entered(&mut self, call: Call) {
        if self.open < CALLS {
            self.calls[self.open] = Some(call);
            self.open += 1;
        }
    }

    /// Returns the innermost open call.
    #[inline(always)]
    pub(crate) fn innermost(&mut self) -> Option<&mut Call> {
        self.calls.get_mut(self.open.checked_sub(1)?)?.as_mut()
    }

    /// Removes and returns the call that returns now. Nested calls that never returned are removed, too.
    #[inline(always)]
    pub(crate) fn returned(&mut self, correlation: u32) -> Option<Call> {
        let is_it = |call: &Option<Call>| call.is_some_and(|call| call.correlation == correlation);
        let place = self.calls[..self.open].iter().rposition(is_it)?;
        self.open = place;
        self.calls[place].take()
    }
}

/// A thread's place. What a report of PyTorch's allocator reads comes first: one cache line and the beginning of the next.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Thread {
    /// Its kernel id, 0 while the place is free.
    pub id: AtomicU32,
    /// Not 0 while the thread is inside of the library: the guard against re-entry.
    pub(crate) busy: AtomicU32,
    pub(crate) making: RecordInProgress,
    /// Tag of the innermost open scope, 0 for none. Only its thread writes it: `push` and `pop`, and Python. Python keeps the
    /// address (`gpumem_scope_word`) and restores the value that it found there.
    pub(crate) scope: AtomicU32,
    pub(crate) autograd: AutogradThread,
    pub(crate) torch: ThreadAllocatorState,
    /// ENTER time of the outermost open call that allocates or trims a pool; 0 for none.
    pub(crate) moving_since_ns: AtomicU64,
    /// The context whose device was looked up last << 8 | that device's slot.
    context: AtomicU64,
    own: UnsafeCell<OwnerData>,
}

// SAFETY: only the thread that has the place uses `own` (see `Thread::own`); the rest is atomic.
unsafe impl Sync for Thread {}

static PLACES: SlotTable<Thread, MOST> = SlotTable {
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
        // SAFETY: the place belongs to this thread since its `id` was set; no other thread uses `own`.
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
        // Everything that the thread has done is visible: the kernel orders it. Race detectors need this load.
        let _ = self.busy.load(Acquire);
        self.moving_since_ns.store(0, Release);
    }
}

/// The thread-local word that points to a thread's place.
///
/// Not `thread_local!`: in a library that is loaded late, its first use on a thread allocates, and the host's allocator may
/// call the driver. A word in static TLS (8 bytes of the loader's reserve) needs neither.
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

/// Allocates the table, once; returns false without memory.
pub(crate) fn prepare() -> bool {
    if !PLACES.table.load(Acquire).is_null() {
        return true;
    }
    let Some(table) = anonymous::<Thread>(MOST) else { return false };
    PLACES.table.store(table.as_ptr().cast_mut(), Release);
    true
}

/// Returns all places that were ever used.
pub fn all() -> &'static [Thread] {
    PLACES.all()
}

/// Returns the number of threads that found no place.
pub fn refused() -> u64 {
    PLACES.refused.load(Relaxed)
}

/// Returns the calling thread's place; `None` before `prepare`, and for the 4097th thread.
#[inline(always)]
pub fn current() -> Option<&'static Thread> {
    let place = word::get();
    if place.is_null() {
        return claim();
    }
    // SAFETY: it points into the table, which is never unmapped.
    Some(unsafe { &*place })
}

#[cold]
#[inline(never)]
fn claim() -> Option<&'static Thread> {
    let place = PLACES.claim(own_thread::kernel_id())?;
    word::set(place);
    Some(place)
}

/// Frees the places of all threads but the calling one, in a forked child that starts its own agent. The calling thread has a
/// new id there.
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

/// Turns of [`wait_a_turn`] in which the thread only lets others run.
const AWAKE: u32 = 64;

/// Waits for a task of the sender of some microseconds: first lets others run, then sleeps for 100 us each time.
pub(crate) fn wait_a_turn(turn: u32) {
    const NAP: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 100_000 };
    // SAFETY: nothing is written.
    unsafe { if turn < AWAKE { libc::sched_yield() } else { libc::nanosleep(&NAP, std::ptr::null_mut()) } };
}

impl Thread {
    fn clear_calls(&self) {
        self.busy.store(0, Relaxed);
        self.moving_since_ns.store(0, Relaxed);
        self.context.store(0, Relaxed);
        self.torch.reset();
    }

    /// Returns the device slot of `context`, if it was this thread's last one.
    #[inline(always)]
    pub(crate) fn device_of(&self, context: usize) -> Option<u8> {
        let cached = self.context.load(Relaxed);
        (cached >> 8 == context as u64 && context != 0).then_some(cached as u8)
    }

    pub(crate) fn remember_context(&self, context: usize, device: u8) {
        self.context.store((context as u64) << 8 | u64::from(device), Relaxed);
    }

    /// Runs `work`, in which callbacks of the agent's own driver calls are ignored.
    pub(crate) fn inside<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = self.busy.swap(1, Relaxed);
        let done = work();
        self.busy.store(before, Relaxed);
        done
    }

    /// Forgets a context that ends: its address may be reused for another device.
    pub(crate) fn forget_context(&self, context: usize) {
        let cached = self.context.load(Relaxed);
        if cached >> 8 == context as u64 {
            let _ = self.context.compare_exchange(cached, 0, Relaxed, Relaxed);
        }
    }

    /// Returns the data of the calling thread.
    ///
    /// # Safety
    /// `self` must be `current()`, and no other reference from here may be in use.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn own(&self) -> &mut OwnerData {
        // SAFETY: the thread's own place, used by one caller at a time.
        unsafe { &mut *self.own.get() }
    }
}

/// Waits until every record up to `seq` is made or was dropped; false if that takes longer than `patience`.
pub(crate) fn quiesce(seq: u64, patience: std::time::Duration) -> bool {
    let start = std::time::Instant::now();
    PLACES.quiesce(seq, |turns| {
        if turns < 64 {
            std::hint::spin_loop();
        } else if start.elapsed() > patience {
            return false;
        } else {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
        true
    })
}

/// Callbacks arrive since this time; `u64::MAX` while none arrive. The return of a call entered before it may have been missed.
pub static HEARING_SINCE_NS: AtomicU64 = AtomicU64::new(0);

/// Returns the ENTER time of the oldest open call that allocates or trims a pool; 0 for none.
pub fn moving_since_ns() -> u64 {
    let hearing_since_ns = HEARING_SINCE_NS.load(Acquire);
    let entered = all().iter().map(|thread| thread.moving_since_ns.load(Acquire));
    entered.filter(|&ns| ns != 0 && ns >= hearing_since_ns).min().unwrap_or(0)
}

/// Frees places of threads that have ended. Only worthwhile when many were used.
pub(crate) fn sweep(pid: u32) {
    if PLACES.used.load(Relaxed) < 64 {
        return;
    }
    // SAFETY: signal 0 is never delivered; the call checks whether the thread exists.
    PLACES.sweep(|id| unsafe { libc::syscall(libc::SYS_tgkill, pid, id, 0) } != 0);
}
