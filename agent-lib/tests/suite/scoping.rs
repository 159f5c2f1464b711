//! Threads start and end with open scopes: their places are claimed, swept and reused while others work and the table is read.

use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, agent, patience};
use gpumem::threads;
use gpumem_test_support::alone;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Number of families; each runs one thread after the other.
const FAMILIES: u64 = 4;
const EACH: u64 = 300;
const BASE: u64 = 0x5000_0000;
const BYTES: u64 = 512;
/// Places in use at which a family waits for the sender to sweep.
const MANY: usize = 400;

fn places_taken() -> usize {
    threads::all().iter().filter(|place| place.id.load(Relaxed) != 0).count()
}

/// Runs a thread with that number; returns the name of the memory that stays.
fn live(number: u64) -> Option<String> {
    let address = BASE + number * BYTES;
    let [outer, inner] = [format!("outer {}", number % 3), format!("inner {}", number % 5)];
    let [a, b, moved] = [outer.as_str(), &inner, "moved"].map(|name| CString::new(name).expect("no 0"));
    // SAFETY: C strings.
    unsafe { gpumem::gpumem_push(a.as_ptr()) };
    // SAFETY: as above.
    unsafe { gpumem::gpumem_push(b.as_ptr()) };
    alloc(address, BYTES);
    let is_moved = number % 4 == 1;
    if is_moved {
        // SAFETY: as above.
        unsafe { gpumem::gpumem_retag(0, address, moved.as_ptr(), -1, -1) };
    }
    if number % 7 != 3 {
        // SAFETY: takes no arguments.
        unsafe { gpumem::gpumem_pop() };
        // SAFETY: as above.
        unsafe { gpumem::gpumem_pop() };
    }
    let stays = number % 2 == 1;
    if !stays {
        free(address);
    }
    stays.then(|| if is_moved { "moved".to_owned() } else { format!("{outer}/{inner}") })
}

#[test]
fn a_place_that_is_taken_again_has_no_scope_of_the_last_thread() {
    alone(|| {
        let folder = Folder::new("scoping");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        agent(&socket, |_| {});
        context(CONTEXT, 0);
        let (done, deadline) = (AtomicBool::new(false), Instant::now() + patience());
        let family = |family: u64| {
            let mut kept = BTreeMap::new();
            for number in family * EACH..(family + 1) * EACH {
                while places_taken() > MANY {
                    assert!(Instant::now() < deadline, "nobody sweeps");
                    std::thread::sleep(Duration::from_millis(5));
                }
                if let Some(name) = std::thread::spawn(move || live(number)).join().expect("no panic") {
                    *kept.entry(name).or_insert(0) += BYTES as i64;
                }
            }
            kept
        };
        let (mut peer, wanted) = std::thread::scope(|scope| {
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
            let families: Vec<_> = (0..FAMILIES)
                .map(|number| {
                    scope.spawn({
                        let family = &family;
                        move || family(number)
                    })
                })
                .collect();
            let mut wanted = BTreeMap::new();
            for kept in families.into_iter().map(|family| family.join().expect("no panic")) {
                kept.into_iter().for_each(|(name, bytes)| *wanted.entry(name).or_insert(0) += bytes);
            }
            done.store(true, Relaxed);
            (reader.join().expect("no panic"), wanted)
        });
        peer.catch_up();
        assert_eq!(peer.tags(), wanted);
        assert_eq!(peer.view().odd, Default::default());
        assert_eq!(peer.view().coverage.lost, 0);
        let (used, threads) = (threads::all().len(), (FAMILIES * EACH) as usize);
        assert!(used < threads / 2, "{used} places for {threads} threads: hardly one was taken again");
        assert_eq!(threads::refused(), 0);
    });
}

#[test]
fn the_record_before_a_module_moves_gets_the_new_path_and_later_records_keep_theirs() {
    alone(|| {
        let folder = Folder::new("moved");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        agent(&socket, |_| {});
        let mut peer = daemon.accept();
        peer.resync(1);
        context(CONTEXT, 0);
        let path = c"net/a";
        let made = |address| {
            // SAFETY: a C string.
            unsafe { gpumem::gpumem_push(path.as_ptr()) };
            alloc(address, BYTES);
            // SAFETY: takes no arguments.
            unsafe { gpumem::gpumem_pop() };
        };
        made(BASE);
        // SAFETY: no bytes.
        let until = unsafe { gpumem::gpumem_rename(c"".as_ptr(), 0) };
        // Another module takes the old path.
        made(BASE + BYTES);
        let lines = format!("net/a\0net/b\0{}\0{until}\0", 0);
        // SAFETY: the bytes of `lines`.
        unsafe { gpumem::gpumem_rename(lines.as_ptr().cast(), lines.len() as u64) };
        peer.catch_up();
        let wanted = ["net/a", "net/b"].map(|name| (name.to_owned(), BYTES as i64));
        assert_eq!(peer.tags(), BTreeMap::from(wanted));
    });
}
