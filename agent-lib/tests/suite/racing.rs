//! Threads pass addresses to each other as fast as a driver can: another thread has the address between the begin and the
//! return of the free.

use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, agent};
use gpumem_test_support::alone;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const THREADS: u64 = 4;
const LOOPS: u64 = 20_000;
const BASE: u64 = 0x4000_0000;

/// A driver with few addresses: the last one freed is the next one allocated.
struct Driver(Mutex<Vec<u64>>);

impl Driver {
    fn take(&self) -> Option<u64> {
        self.0.lock().expect("a lock").pop()
    }
    fn give(&self, address: u64) {
        self.0.lock().expect("a lock").push(address);
    }
}

#[test]
fn addresses_that_change_hands_are_never_mixed_up() {
    alone(|| {
        let folder = Folder::new("racing");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        let core = agent(&socket, |settings| settings.ring_slots = 1 << 21);
        context(CONTEXT, 0);
        let driver = Driver(Mutex::new((0..THREADS + 2).map(|n| BASE + n * 4096).collect()));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut peer = daemon.accept();
                let mut epoch = 1;
                peer.resync(epoch);
                while !done.load(Relaxed) {
                    epoch += 1;
                    peer.resync(epoch); // the table is read all the time
                }
                peer
            });
            let workers: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let driver = &driver;
                    scope.spawn(move || {
                        for turn in 0..LOOPS {
                            let bytes = 1 + thread + turn % 7;
                            let mut out = Box::new(0_u64);
                            let call = Call::new(ALLOC, CONTEXT, &[(&raw mut *out) as u64, bytes]).enter();
                            let Some(address) = driver.take() else {
                                call.exit(2);
                                continue;
                            };
                            *out = address;
                            call.exit(0);
                            let call = Call::new(FREE, CONTEXT, &[address]).enter();
                            if turn % 5 == 0 {
                                call.exit(1); // it fails: the address stays allocated
                                taking_with(driver, address);
                            } else {
                                driver.give(address);
                                call.exit(0);
                            }
                        }
                    })
                })
                .collect();
            workers.into_iter().for_each(|worker| worker.join().expect("no panic"));
            done.store(true, Relaxed);
            let mut peer = reader.join().expect("no panic");
            peer.catch_up();
            peer.resync(1_000_000);
            assert_eq!(peer.account().tracked_bytes, 0);
            assert_eq!(peer.view().odd, Default::default());
            assert_eq!(peer.view().coverage.lost, 0);
            alloc(BASE, 77);
            peer.catch_up();
            assert_eq!(peer.account().tracked_bytes, 77);
        });
        assert_eq!(core.recorder.live.scan().count(), 1);
        assert_eq!(core.recorder.ring.lost(), 0);
    });
}

/// Frees the address.
fn taking_with(driver: &Driver, address: u64) {
    let call = Call::new(FREE, CONTEXT, &[address]).enter();
    driver.give(address);
    call.exit(0);
}
