//! A program that opens scopes, forks, and initialises CUDA in its children: each child has its own agent, with the scopes that
//! were open.

use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder};
use gpumem_test_support::alone;

#[test]
fn children_that_initialise_cuda_themselves_are_agents_with_their_parents_scopes() {
    alone(|| {
        let folder = Folder::new("fork-first");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        let settings = || gpumem::base::env::Settings {
            sockets: vec![socket.clone()],
            ring_slots: 1 << 10,
            live_rows: 1 << 10,
            name_bytes: 1 << 16,
            ..Default::default()
        };
        // The parent's memory is made by its first scope; nothing is sent.
        // SAFETY: C strings; the child calls what a driver's start calls, and runs until it is killed.
        let child = unsafe {
            std::env::set_var("GPUMEM_SOCKET", &socket);
            gpumem::gpumem_push(c"outer".as_ptr());
            assert_eq!(gpumem::gpumem_available(), 1);
            match libc::fork() {
                0 => {
                    let silent = gpumem::gpumem_available() == 0;
                    gpumem::entry::attach::start_with(settings());
                    if !silent || gpumem::gpumem_available() == 0 {
                        libc::_exit(1);
                    }
                    context(CONTEXT, 0);
                    gpumem::gpumem_push(c"inner".as_ptr());
                    alloc(0x1000, 1000);
                    gpumem::gpumem_pop();
                    alloc(0x2000, 24);
                    libc::sleep(600);
                    libc::_exit(0)
                }
                child => child,
            }
        };
        let mut peer = daemon.accept_from(child as u32);
        peer.resync_from(1);
        peer.until("both allocations", |peer| {
            peer.ledger.snapshot().processes[0]
                .accounts
                .first()
                .is_some_and(|account| account.tracked_bytes == 1024)
        });
        let tags: Vec<_> = peer.tags().into_iter().collect();
        assert_eq!(tags, [("outer".to_owned(), 24), ("outer/inner".to_owned(), 1000)]);
        // SAFETY: the test's own child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        // Records that were not sent to the daemon are in the memory that it got.
        let header = peer.header();
        assert_eq!((header.pid, header.lost), (child as u32, 0));
        assert_eq!(header.head_seq, 5, "three of the context, two allocations");
    });
}
