//! The hot path makes no system call: a thread that must not make any runs it.

use crate::common::cupti::{CONTEXT, allocate_and_free, context};
use crate::common::daemon::{Folder, agent};
use gpumem_test_support::alone;
use std::hint::black_box;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

static CALLS: AtomicU32 = AtomicU32::new(0);
static LAST: AtomicU64 = AtomicU64::new(u64::MAX);
/// 0 running, 1 done, 2 the filter is not allowed here.
static STATE: AtomicU32 = AtomicU32::new(0);
static COUNTED: AtomicU32 = AtomicU32::new(0);

extern "C" fn trapped(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    CALLS.fetch_add(1, SeqCst);
    // SAFETY: SIGSYS has the number of the call at this offset: after three words of which the second is an address.
    LAST.store(unsafe { info.cast::<u32>().add(6).read().into() }, SeqCst);
}

/// From here on each system call of this thread is counted and not made. Exceptions are the clock (where the kernel has no
/// faster way), the return from the handler, and waiting for the end.
fn no_more_system_calls() -> bool {
    let free = [libc::SYS_clock_gettime, libc::SYS_rt_sigreturn, libc::SYS_ppoll, libc::SYS_exit_group];
    let statement =
        |code: u32, jump: u8, value: u32| libc::sock_filter { code: code as u16, jt: jump, jf: 0, k: value };
    let mut program = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (index, call) in free.iter().enumerate() {
        let to_end = (free.len() - index) as u8;
        program.push(statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, to_end, *call as u32));
    }
    program.push(statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_TRAP));
    program.push(statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let ok = |result: i32| result == 0;
    // SAFETY: a handler that is signal-safe, and a program of that length. The vector is never dropped, as that could make a
    // call.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = trapped as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        let ready = ok(libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()))
            && ok(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
            && ok(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter));
        std::mem::forget(program);
        ready
    }
}

/// Frames at many addresses: callers that are not cached are searched again.
#[inline(never)]
fn deeper(times: u64) {
    let room = black_box([times; 37]);
    allocate_and_free(0x7000_0000 + times * 512, 512);
    if times > 0 {
        deeper(times - 1);
    }
    black_box(&room);
}

fn work() {
    // The first calls of a thread find its stack.
    for turn in 0..2 {
        if turn == 1 && !no_more_system_calls() {
            return STATE.store(2, SeqCst);
        }
        for name in [c"layer.0", c"layer.1"] {
            // SAFETY: C strings.
            unsafe { gpumem::gpumem_push(name.as_ptr()) };
            deeper(200);
            for n in 0..100_u64 {
                let address = ((1 << 44) + n * 512) as *mut std::ffi::c_void;
                // SAFETY: PyTorch's arguments; the slots have no original functions.
                unsafe {
                    gpumem::sources::torch::report::reported(address, 512, 512, 1 << 31, 1);
                    gpumem::sources::torch::report::reported(address, -512, 0, 1 << 31, 1);
                }
            }
            // SAFETY: takes no arguments.
            unsafe { gpumem::gpumem_pop() };
        }
    }
    COUNTED.store(CALLS.load(SeqCst), SeqCst);
    // SAFETY: takes no arguments.
    unsafe { libc::syscall(libc::SYS_getppid) };
    STATE.store(1, SeqCst);
    loop {
        // SAFETY: waits forever: the end of a thread makes system calls.
        unsafe { libc::syscall(libc::SYS_ppoll, 0, 0, 0, 0, 0) };
    }
}

#[test]
fn callbacks_make_no_system_call() {
    alone(|| {
        let folder = Folder::new("no-system-call");
        let core = agent(&folder.0.join("nobody.sock"), |settings| settings.ring_slots = 1 << 14);
        context(CONTEXT, 0);
        let before = core.recorder.ring.head();
        std::thread::spawn(work);
        let deadline = Instant::now() + Duration::from_secs(20);
        while STATE.load(SeqCst) == 0 {
            assert!(Instant::now() < deadline, "still at it");
            std::thread::sleep(Duration::from_millis(5));
        }
        if STATE.load(SeqCst) == 2 {
            gpumem_test_support::skip("no filter of system calls is allowed here", "");
            return;
        }
        assert_eq!(COUNTED.load(SeqCst), 0, "the last one was number {}", LAST.load(SeqCst));
        assert_eq!(
            (CALLS.load(SeqCst), LAST.load(SeqCst)),
            (1, libc::SYS_getppid as u64),
            "the counter counts"
        );
        assert!(core.recorder.ring.head() - before >= 2 * 2 * 201 * 3, "they were recorded");
    });
}
