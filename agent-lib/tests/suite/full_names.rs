//! A program that keeps making names: the daemon is informed that the table is full.

use crate::common::daemon::{Daemon, Folder, agent};
use gpumem_test_support::alone;

#[test]
fn the_daemon_hears_that_names_are_left_out() {
    alone(|| {
        let folder = Folder::new("full-names");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        let core = agent(&socket, |settings| settings.name_bytes = 4096);
        let mut peer = daemon.accept();
        peer.resync(1);
        for number in 0..1000 {
            core.recorder.names.intern(0, format!("step {number}").as_bytes());
        }
        let is_said = |state: Option<&str>| state.is_some_and(|detail| detail.contains("names is full"));
        peer.until("word of it", |peer| is_said(peer.state.as_ref().map(|(_, detail)| detail.as_str())));
    });
}
