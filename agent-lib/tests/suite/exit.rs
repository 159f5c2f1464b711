//! Remaining records are sent at exit; a child forked before does not keep the connection open.

use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, agent};
use gpumem_test_support::alone;
use std::time::{Duration, Instant};

/// A child that is killed at any end of the test, because it holds the test's output open.
struct Child(libc::pid_t);

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: the test's own child, which nothing else waits for.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

#[test]
fn the_last_records_arrive_and_the_end_is_seen() {
    alone(|| {
        let folder = Folder::new("exit");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        agent(&socket, |_| {});
        let mut peer = daemon.accept();
        peer.resync(1);
        // SAFETY: the child only sleeps.
        let child = unsafe {
            match libc::fork() {
                0 => {
                    libc::sleep(600);
                    libc::_exit(0)
                }
                child => Child(child),
            }
        };
        context(CONTEXT, 0);
        for n in 0..5_000 {
            alloc(0x1000 + n * 512, 512);
        }
        let mut left = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                peer.until("good-bye", |peer| peer.bye);
                while peer.take(Duration::from_secs(5)) {}
                peer
            });
            gpumem::sender::finish();
            reader.join().expect("no panic")
        });
        assert_eq!(left.account().tracked_bytes, 5_000 * 512);
        assert_eq!(left.view().coverage.lost, 0);
        left.take(Duration::from_secs(5));
        let ended = left.ended;
        drop(child);
        assert!(ended, "the connection is still open");
    });
}

/// Waits until the sender has unsent records and has sent none for a while.
fn until_waiting_for_room(core: &gpumem::driver::core::Core) {
    let ring = &core.recorder.ring;
    let start = Instant::now();
    let mut last = (ring.sent(), start);
    while ring.sent() == ring.head() || last.1.elapsed() < Duration::from_millis(300) {
        assert!(start.elapsed() < gpumem_test_support::DEADLINE, "the sender does not wait");
        std::thread::sleep(Duration::from_millis(5));
        if ring.sent() != last.0 {
            last = (ring.sent(), Instant::now());
        }
    }
}

#[test]
fn an_agent_whose_last_packet_found_no_room_does_not_connect_again() {
    alone(|| {
        let folder = Folder::new("given-up");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        let core = agent(&socket, |settings| settings.exit_wait_ms = 250);
        let mut peer = daemon.accept();
        peer.resync(1);
        context(CONTEXT, 0);
        // Far more than a socket's buffer holds, and nothing is read.
        for _ in 0..10_000 {
            allocate_and_free(0x1000, 512);
        }
        until_waiting_for_room(core);
        gpumem::sender::finish();
        assert!(!daemon.is_called(Duration::from_millis(500)), "the agent has connected again");
        while peer.take(Duration::from_secs(5)) {}
        assert!(peer.ended && !peer.bye, "{:?}", peer.seen.last());
    });
}
