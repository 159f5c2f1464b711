//! Changes of memory outside of allocations are reported at once, also by an idle sender. A reading is most useful then.

use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, Peer, agent};
use gpumem_test_support::alone;
use std::time::{Duration, Instant};

/// An idle sender checks every 100 ms: without a wake-up, half of the events would be later than this.
const SOON: Duration = Duration::from_millis(25);
const EVENTS: usize = 9;

fn events(peer: &Peer) -> usize {
    peer.seen.iter().filter(|kind| *kind == "DriverEvent" || *kind == "AllocFailed").count()
}

/// Returns the time until the event that `make` causes arrives.
fn told_after(peer: &mut Peer, make: impl FnOnce()) -> Duration {
    // Idle: nothing but heartbeats for a while.
    let rest = Instant::now() + Duration::from_millis(280);
    while Instant::now() < rest {
        peer.take(Duration::from_millis(20));
    }
    let before = events(peer);
    let start = Instant::now();
    make();
    peer.until("event", |peer| events(peer) > before);
    start.elapsed()
}

#[test]
fn an_idle_sender_is_woken() {
    alone(|| {
        let folder = Folder::new("waking");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        agent(&socket, |_| {});
        let mut peer = daemon.accept();
        peer.resync(1);
        context(CONTEXT, 0);
        // A loaded machine may be slow for a while, but not always.
        let mut medians = Vec::new();
        for _ in 0..4 {
            let mut times: Vec<Duration> = (0..EVENTS)
                .map(|event| {
                    told_after(&mut peer, || match event % 3 {
                        0 => taking(136, 0, &[0, 4096]),      // cuCtxSetLimit
                        1 => giving(ALLOC, 0, 2, &[1 << 40]), // a failed allocation
                        _ => drop(Call::new(CTX_CREATE_V2, CONTEXT, &[0, halves(0, 0)]).enter()),
                    })
                })
                .collect();
            times.sort_unstable();
            medians.push(times[EVENTS / 2]);
            if times[EVENTS / 2] < SOON {
                return;
            }
        }
        panic!("medians of {EVENTS} events: {medians:?}");
    });
}
