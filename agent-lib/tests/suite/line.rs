//! Many clients keep the daemon's queue full: the agent waits in the queue, too.

use crate::common::daemon::{Daemon, Folder, agent};
use gpumem_test_support::alone;
use std::time::Duration;

#[test]
fn an_agent_is_let_in_though_others_keep_the_queue_full() {
    alone(|| {
        let folder = Folder::new("line");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        // They wait before the agent comes, and again as soon as they have been accepted.
        daemon.crowd(&socket, 4);
        agent(&socket, |_| {});
        // A client that leaves comes back, and may be faster than the one that was woken: being first takes a few rounds. A
        // client that only polls would find the queue full each time.
        let turns = (1..=500).find(|_| {
            std::thread::sleep(Duration::from_millis(2));
            daemon.let_one_in()
        });
        println!("in after {turns:?} others");
        assert!(turns.is_some(), "500 others were accepted, and no agent");
    });
}
