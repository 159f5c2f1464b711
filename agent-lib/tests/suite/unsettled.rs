//! The agent's report of its state while handles change during a resync.

use crate::common;
use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, agent};
use gpumem_test_support::alone;
use gpumem_wire::Body;
use std::sync::atomic::Ordering::SeqCst;

#[test]
fn a_state_in_which_references_changed_is_not_ended_and_said_again() {
    alone(|| {
        let folder = Folder::new("unsettled");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        let core = agent(&socket, |_| {});
        let mut peer = daemon.accept();
        context(CONTEXT, 0);
        alloc(0x1000_0000, 4096);
        let begun =
            |peer: &common::daemon::Peer| peer.seen.iter().filter(|kind| *kind == "ResyncBegin").count();
        // As if a handle were retained or released all the time.
        core.references_changed.store(u64::MAX, SeqCst);
        peer.send(Body::Welcome { epoch: 1, versions: 1 << 16, capabilities: 0 });
        peer.send(Body::ResyncRequest { epoch: 1 });
        peer.until("state that is said again", |peer| begun(peer) > 3);
        assert_eq!(peer.resyncs, 0, "none of them is ended");
        core.references_changed.store(0, SeqCst);
        peer.until("state that is ended", |peer| peer.resyncs == 1);
        peer.catch_up();
        let count = begun(&peer);
        assert_eq!(peer.account().tracked_bytes, 4096);
        alloc(0x2000_0000, 512);
        peer.catch_up();
        assert_eq!(
            (begun(&peer), peer.resyncs, peer.account().tracked_bytes),
            (count, 1, 4608),
            "and then no more"
        );
    });
}
