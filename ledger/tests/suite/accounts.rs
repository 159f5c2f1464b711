//! Accounts of a process: devices without a name or beyond the maximum, windows of `tracked`, waiting samples.

use crate::common::{DEV, KEY, MIB, Script, device, verify};
use gpumem_ledger::{AccountRef, WINDOW_NS, Window};
use gpumem_wire::*;

fn windows(s: &mut Script) -> Vec<(AccountRef, Window)> {
    let taken = s.ledger.take_windows();
    taken
        .map(|(key, place, window)| (key == KEY, place, window))
        .map(|(_, place, window)| (place, window))
        .collect()
}

fn slot(s: &mut Script, slot: u8) {
    s.stamp.device = slot;
}

#[test]
fn windows_have_the_time_of_their_own_records() {
    let mut s = Script::new();
    s.alloc(0x1000, 100);
    s.alloc(0x2000, 50);
    s.free(0x1000);
    assert_eq!(windows(&mut s), [], "the first one is still open");
    s.ledger.end_windows();
    let first = Window { start_ns: 0, min: 0, max: 150, last: 50 };
    assert_eq!(windows(&mut s), [(AccountRef::Device(0), first)]);
    s.alloc(0x3000, 1);
    s.at(7 * WINDOW_NS).alloc(0x4000, 900);
    let rest = Window { start_ns: 0, min: 50, max: 51, last: 51 };
    assert_eq!(
        windows(&mut s),
        [(AccountRef::Device(0), rest)],
        "the rest of it ends where the next one begins"
    );
    s.ledger.end_windows();
    let next = Window { start_ns: 7 * WINDOW_NS, min: 51, max: 951, last: 951 };
    assert_eq!(windows(&mut s), [(AccountRef::Device(0), next)]);
    s.ledger.end_windows();
    assert_eq!(windows(&mut s), [], "nothing happened");
}

#[test]
fn a_slot_without_a_name_has_windows_until_it_gets_one() {
    let mut s = Script::new();
    slot(&mut s, 3);
    s.alloc(0x1000, 100);
    s.ledger.end_windows();
    let window = Window { start_ns: 0, min: 0, max: 100, last: 100 };
    assert_eq!(windows(&mut s), [(AccountRef::Unnamed(1), window)]);
    s.control(device(8));
    s.alloc(0x2000, 100);
    s.ledger.end_windows();
    assert_eq!(windows(&mut s)[0].0, AccountRef::Device(1));
}

#[test]
fn devices_beyond_those_a_process_may_have_are_one_account_of_their_own() {
    let mut s = Script::new();
    for number in 0..100_u8 {
        slot(&mut s, number);
        s.control(device(1000 + u64::from(number)));
        s.alloc((u64::from(number) + 1) << 30, MIB);
        s.host(Body::SampleBegin { number: 1 });
    }
    // The first slot got a second device when it was named again, so 62 more have an account.
    let process = s.process();
    verify(&process);
    assert_eq!((process.accounts.len(), process.odd.devices_beyond), (64, 38));
    let (beyond, own) = process.accounts.split_last().expect("64");
    assert!(beyond.is_beyond && beyond.device.is_none());
    assert_eq!(beyond.tracked_bytes, 38 * MIB as i64);
    assert!(own.iter().all(|account| !account.is_beyond && account.device.is_some()));
    assert_eq!(own.iter().map(|account| account.tracked_bytes).max(), Some(MIB as i64));
    // NVML's reading of one device beyond the limit is not joined with the account that sums these devices.
    let stamp = Stamp { device: 99, ..Stamp::default() };
    let host = |s: &mut Script, body| s.ledger.observe(gpumem_ledger::Origin::Host, &Record { stamp, body });
    host(&mut s, device(1099));
    s.watermark(0);
    host(&mut s, Body::SampleBegin { number: 7 });
    let stamp = Stamp { thread: KEY.pid, ..stamp };
    let used_bytes = Reading::of(5);
    let body = Body::ProcessSample { start_ticks: 7, used_bytes, absence: Absence::Unknown, lists: 1 };
    s.ledger.observe(gpumem_ledger::Origin::Host, &Record { stamp, body });
    host(&mut s, Body::SampleEnd { number: 7, result: 0 });
    assert!(s.process().accounts.iter().all(|account| account.latest.is_none()));
}

#[test]
fn an_address_in_a_slot_beyond_is_freed_where_it_was_booked() {
    let mut s = Script::new();
    for number in 0..80_u8 {
        slot(&mut s, number);
        s.alloc_as((u64::from(number) + 1) << 30, MIB, DEV, 0);
    }
    for number in 0..80_u64 {
        s.free((number + 1) << 30);
    }
    assert!(s.process().accounts.iter().all(|account| account.tracked_bytes == 0));
}

#[test]
fn readings_that_wait_are_bounded_and_the_oldest_is_closed_stale() {
    let mut s = Script::new();
    s.alloc(0x1000, 100);
    for number in 0..200 {
        // The clock hardly moves, so no deadline passes, and the agent sends nothing.
        s.sample(1_000_000 + number, 1_000_000 + number, 150);
    }
    let closed = s.closed();
    assert_eq!(closed.len(), 200 - 64);
    assert!(closed.iter().all(|sample| sample.stale && sample.tracked_bytes == Some(100)));
    s.at(2_000_000).watermark(0);
    assert_eq!(s.closed().iter().filter(|sample| !sample.stale).count(), 64);
}

#[test]
fn the_last_complete_sample_survives_those_without_a_value() {
    let mut s = Script::new();
    s.alloc(0x1000, 100);
    s.at(990).watermark(0);
    s.sample(1000, 1010, 150);
    s.at(1900).alloc(0x2000, 30);
    s.sample_begin(2000);
    s.listed(KEY.pid, None);
    s.sample_end(2000, 2010);
    s.at(3000).watermark(0);
    let account = s.account();
    let (complete, latest) = (account.complete.expect("one"), account.latest.expect("two"));
    assert_eq!((complete.t0_ns, complete.used_bytes, complete.tracked_bytes), (1000, Ok(150), Some(100)));
    assert_eq!((latest.t0_ns, latest.used_bytes), (2000, Err(Absence::NoPermission)));
    assert_eq!((complete.amounts.iter().sum::<i64>(), latest.amounts.iter().sum::<i64>()), (100, 130));
}

#[test]
fn a_clock_alone_makes_no_process() {
    let mut ledger = gpumem_ledger::Ledger::new();
    let body = Body::ClockAnchor { realtime_ns: 5, boottime_ns: 0, clock: ClockKind::Monotonic };
    ledger.observe(gpumem_ledger::Origin::Process(KEY), &Record { stamp: Stamp::default(), body });
    let snapshot = ledger.snapshot();
    assert_eq!((snapshot.processes.len(), snapshot.wall_offset_ns), (0, Some(5)));
}
