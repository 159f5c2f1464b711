//! A daemon that does not read: history is lost and counted, the program does not wait, and the state is complete again after
//! the agent's own resync.

use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, agent, patience};
use gpumem_test_support::alone;
use std::time::{Duration, Instant};

const RING: u64 = 256;
/// More than a socket's buffer and the ring hold together.
const CALLS: u64 = 50_000;

/// Returns how often this thread gave up its processor voluntarily; on a busy machine, elapsed time is not meaningful.
fn waits() -> i64 {
    // SAFETY: all zeros are a valid value, and `usage` has room for the answer.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &mut usage), 0);
        usage.ru_nvcsw
    }
}

#[test]
fn a_full_ring_loses_history_and_never_state() {
    alone(|| {
        let folder = Folder::new("full-ring");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        let core = agent(&socket, |settings| settings.ring_slots = RING);
        let mut peer = daemon.accept();
        peer.resync(1);
        context(CONTEXT, 0);
        let waits = waits();
        for call in 0..CALLS {
            alloc(0x1000_0000 + call * 512, 512);
            if call % 2 == 1 {
                free(0x1000_0000 + call * 512);
            }
        }
        assert!(
            self::waits() - waits < 100,
            "the program waited {} times in {CALLS} calls",
            self::waits() - waits
        );
        assert!(
            core.recorder.ring.lost() > 0,
            "nothing was lost: {} of {}",
            core.recorder.ring.sent(),
            core.recorder.ring.head()
        );
        // Live rows beyond the table are refused and reported; these all fit or are counted.
        let refused = core.recorder.live.refused.load(std::sync::atomic::Ordering::Relaxed);
        let before = peer.resyncs;
        peer.until("a resync of its own", |peer| peer.resyncs > before);
        let deadline = Instant::now() + patience();
        loop {
            peer.catch_up();
            let view = peer.view();
            let state = view.coverage.partial_state;
            if !state && view.accounts[0].tracked_bytes == ((CALLS / 2 - refused) * 512) as i64 {
                break;
            }
            peer.take(Duration::from_millis(50));
            assert!(Instant::now() < deadline, "{:?} {}", view.coverage, view.accounts[0].tracked_bytes);
        }
        assert!(peer.view().coverage.lost > 0 && peer.view().coverage.partial_history, "the loss is told");
        if refused > 0 {
            peer.until("a word about the table", |peer| {
                peer.state.as_ref().is_some_and(|(_, detail)| detail.contains("not whole"))
            });
        }
    });
}
