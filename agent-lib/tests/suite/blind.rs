//! Times without callbacks: each daemon gets one report for each, and calls open at the begin are dropped.

use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, Peer, agent};
use gpumem::threads::{CALLBACKS_SINCE_NS, moving_since_ns};
use gpumem_test_support::alone;
use gpumem_wire::AgentState;
use std::sync::atomic::Ordering::Relaxed;

fn windows(peer: &Peer) -> Vec<(bool, String)> {
    let windows = &peer.view().coverage.blind;
    windows.iter().map(|window| (window.to_ns.is_some(), window.why.clone())).collect()
}

#[test]
fn states_are_said_once_and_to_everybody() {
    alone(|| {
        let folder = Folder::new("blind");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        let core = agent(&socket, |_| {});
        let mut first = daemon.accept();
        first.resync(1);
        context(CONTEXT, 0);
        alloc(0x7000_0000, 100);
        first.catch_up();

        // A call that is entered, and returns while no callbacks arrive.
        let under_way = Call::new(ALLOC, CONTEXT, &[0, 8]).enter();
        assert_ne!(moving_since_ns(), 0);
        CALLBACKS_SINCE_NS.store(u64::MAX, Relaxed);
        assert_eq!(moving_since_ns(), 0, "its return will not be seen: it would be in flight for ever");
        // Both between two rounds of the sender.
        gpumem::driver::core::report_status(AgentState::Paused, 0, "paused by the program");
        gpumem::driver::core::report_status(AgentState::Blocked, 39, "nsys");
        CALLBACKS_SINCE_NS.store(core.recorder.clock.now(), Relaxed);
        gpumem::driver::core::report_status(AgentState::Late, 0, "");
        drop(under_way);
        // The next call is the outermost one.
        let next = Call::new(ALLOC, CONTEXT, &[(&raw const *Box::leak(Box::new(0_u64))) as u64, 8]).enter();
        assert!(moving_since_ns() >= CALLBACKS_SINCE_NS.load(Relaxed));
        next.exit(2);
        assert_eq!(moving_since_ns(), 0);

        let told = vec![(true, "paused by the program".to_owned()), (true, "nsys held CUPTI".to_owned())];
        first.until("the windows", |peer| windows(peer).len() == 2);
        assert_eq!(windows(&first), told);
        let (count, ended_ns) = (first.view().coverage.blind_count, first.view().coverage.blind_ns);
        first.resync(2);
        assert_eq!(windows(&first), told);

        // A daemon that connects later gets the same reports, with the same times.
        drop(first);
        let mut second = daemon.accept();
        second.resync(3);
        assert_eq!(windows(&second), told);
        let coverage = second.view().coverage;
        assert_eq!((coverage.blind_count, coverage.blind_ns), (count, ended_ns));

        // Of very many reports the first and the latest are kept.
        for _ in 0..100 {
            gpumem::driver::core::report_status(AgentState::Paused, 0, "");
            gpumem::driver::core::report_status(AgentState::Late, 0, "");
        }
        let said = gpumem::record::status::reports_after(0, 0);
        assert!(said.len() <= 65 && said[0].state == AgentState::Covered, "{}", said.len());
        assert!(said.is_sorted_by_key(|said| (said.number, said.time_ns)));
        assert_eq!(said.last().map(|said| (said.number, said.state)), Some((204, AgentState::Late)));
    });
}
