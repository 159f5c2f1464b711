//! The agent does not disturb its host: a forked child is silent and does not hold the connection, a panic ends the agent and
//! not the program, and remaining records are sent at exit.

use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, agent};
use gpumem_test_support::alone;
use gpumem_wire::AgentState;
use std::time::{Duration, Instant};

fn available() -> i32 {
    // SAFETY: takes no arguments.
    unsafe { gpumem::gpumem_available() }
}

/// Runs `work` in a forked child; returns its exit status.
fn forked(work: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls only the tested functions and _exit.
    unsafe {
        match libc::fork() {
            0 => libc::_exit(work()),
            child => {
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &mut status, 0), child);
                assert!(libc::WIFEXITED(status), "the child was killed: {status}");
                libc::WEXITSTATUS(status)
            }
        }
    }
}

#[test]
fn children_panics_and_the_end() {
    alone(|| {
        let folder = Folder::new("host-safety");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        let core = agent(&socket, |_| {});
        let mut peer = daemon.accept();
        peer.resync(1);
        context(CONTEXT, 0);
        alloc(0x1000, 100);
        peer.catch_up();

        // A child: nothing that it does is recorded, and its exit does not affect the parent.
        let head = core.recorder.ring.head();
        let status = forked(|| {
            if available() != 0 {
                return 1;
            }
            alloc(0x2000, 100);
            free(0x1000);
            // SAFETY: a C string; no arguments.
            unsafe {
                gpumem::gpumem_push(c"child".as_ptr());
                gpumem::gpumem_pop();
            }
            i32::from(gpumem::driver::core::Core::get().is_none_or(|core| core.recorder.ring.head() != head))
        });
        assert_eq!((status, core.recorder.ring.head()), (0, head));
        assert_eq!(available(), 1);
        alloc(0x3000, 11);
        peer.catch_up();
        assert_eq!(peer.account().tracked_bytes, 111);

        // A driver call made inside of the library is ignored.
        let head = core.recorder.ring.head();
        gpumem::driver::guard::guard((), |_, _| alloc(0x4000, 1));
        assert_eq!(core.recorder.ring.head(), head);

        // A panic is reported, and then nothing more is recorded.
        let quiet = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        assert_eq!(gpumem::driver::guard::guard(7, |_, _| if head > 0 { panic!("inside") } else { 8 }), 7);
        std::panic::set_hook(quiet);
        assert_eq!(available(), 0);
        alloc(0x5000, 1);
        assert_eq!(core.recorder.ring.head(), head);
        peer.until("good-bye", |peer| peer.bye);
        assert_eq!(peer.state.as_ref().map(|(state, _)| *state), Some(AgentState::Disarmed));

        // The exit does not wait.
        let start = Instant::now();
        gpumem::sender::finish();
        gpumem_test_support::bar("an exit", start.elapsed(), Duration::from_millis(500));
    });
}
