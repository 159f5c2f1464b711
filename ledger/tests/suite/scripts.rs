//! Each row of the table of booking rules (ledger/README.md), as short scripts: allocations, contexts, devices, losses and
//! invalid sizes. VMM is in vmm.rs, pools in pools.rs, peaks and retags in peaks.rs, resyncs in resync.rs, samples in samples.rs.
use crate::common::*;
use gpumem_ledger::Class;
use gpumem_wire::*;

#[test]
fn allocation_is_posted_to_its_tag() {
    check(
        |s| {
            s.tag("a/b").alloc(0x1000, 100);
            s.tag("a/b").alloc(0x2000, 50);
            s.alloc(0x3000, 7);
        },
        &["tracked 157 = direct:- 7 + direct:a/b 150", "peak 157 = direct:- 7 + direct:a/b 150"],
    );
}

/// A thread without a tag inherits the process's.
fn inherits(script: &mut Script) {
    script.stamp.flags = Flags::INHERITED;
}

fn has_its_own(script: &mut Script) {
    script.stamp.flags = Flags(0);
}

#[test]
fn an_inherited_tag_is_told_from_one_that_a_thread_gave() {
    check(
        |s| {
            s.tag("job").alloc(0x1000, 100);
            inherits(s);
            s.tag("job").alloc(0x2000, 20);
            s.alloc(0x3000, 3); // a process without a tag has none to inherit
            has_its_own(s);
            s.free(0x1000);
        },
        &[
            "tracked 23 = direct:- 3 + direct:job^ 20",
            "peak 123 = direct:- 3 + direct:job 100 + direct:job^ 20",
        ],
    );
}

#[test]
fn who_tags_it_later_means_it() {
    check(
        |s| {
            inherits(s);
            let [first, second, third] = [0x1000, 0x2000, 0x3000].map(|at| s.tag("job").alloc(at, 10));
            has_its_own(s);
            s.tag("cache").retag(0x1000, 0, first, Role::Unknown);
            s.tag("job").retag(0x2000, 0, second, Role::Unknown);
            s.retag(0x3000, 0, third, Role::Workspace); // does not change names
        },
        &["tracked 30 = direct:cache<job 10 + direct:job 10 + direct:job@Workspace^ 10"],
    );
}

#[test]
fn a_resync_brings_back_who_inherited() {
    check(
        |s| {
            s.tag("job").say(Body::Marker {});
            let flags = Flags::INHERITED.with(Flags::RESTATED);
            s.control(Body::ResyncBegin { epoch: 1, after_seq: s.seq + 2 });
            for (seq, address) in [(s.seq + 1, 0x1000), (s.seq + 2, 0x2000)] {
                let body = Body::AllocEnd { address, bytes: 10, pool: 0, took_us: 0, memory: DEV };
                s.push(Stamp { seq, tag: 1, flags, ..s.stamp }, body);
            }
            let retag = Body::Retag { address: 0x2000, block_seq: s.seq + 2, pool: 0, use_as: NOTHING };
            let cache = Stamp { tag: 2, ..Stamp::default() };
            s.push(cache, Body::Tag { path: "cache" });
            s.push(Stamp { seq: s.seq + 2, tag: 2, stack: 1, flags: Flags::RESTATED, ..s.stamp }, retag);
            s.seq += 2;
            s.control(Body::ResyncEnd { epoch: 1, head_seq: s.seq, rows: 3 });
            s.watermark(0);
        },
        &["tracked 20 = direct:cache<job 10 + direct:job^ 10", "flags was_partial"],
    );
}

#[test]
fn free_takes_what_was_posted() {
    check(
        |s| {
            s.tag("a").alloc(0x1000, 100);
            s.alloc(0x2000, 1);
            s.free(0x1000);
        },
        &["tracked 1 = direct:- 1", "peak 101 = direct:- 1 + direct:a 100"],
    );
}

#[test]
fn free_that_has_only_begun_keeps_the_bytes() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            s.begin(0x1000);
        },
        &["tracked 100 = direct:- 100"],
    );
}

#[test]
fn address_is_used_again_between_begin_and_end_of_a_free() {
    check(
        |s| {
            s.tag("old").alloc(0x1000, 100);
            let begin = s.begin(0x1000);
            s.tag("new").alloc(0x1000, 30);
            s.end(begin, 0);
        },
        &["tracked 30 = direct:new 30", "peak 130 = direct:new 30 + direct:old 100"],
    );
}

#[test]
fn free_that_failed_binds_the_address_again() {
    check(
        |s| {
            s.tag("a").alloc(0x1000, 100);
            let begin = s.begin(0x1000);
            s.end(begin, 1);
            s.tag("b").alloc(0x2000, 5);
            s.free(0x1000);
        },
        &["tracked 5 = direct:b 5"],
    );
}

#[test]
fn free_after_the_driver_is_gone_gives_the_bytes_back() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            let begin = s.begin(0x1000);
            s.end(begin, 4);
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn free_of_null_does_nothing() {
    check(
        |s| {
            let begin = s.begin(0);
            s.end(begin, 0);
            s.alloc(0x1000, 1);
        },
        &["tracked 1 = direct:- 1"],
    );
}

#[test]
fn unknown_frees_and_ends_are_counted() {
    check(
        |s| {
            s.alloc(0x1000, 1);
            let begin = s.begin(0x2000);
            s.end(begin, 0);
            s.end(77, 0);
        },
        &["tracked 1 = direct:- 1", "odd unknown_frees 1 unknown_ends 1"],
    );
}

#[test]
fn allocation_at_a_live_address_replaces_it() {
    check(
        |s| {
            s.tag("a").alloc(0x1000, 100);
            s.tag("b").alloc(0x1000, 30);
        },
        &["tracked 30 = direct:b 30", "odd replaced 1"],
    );
}

#[test]
fn host_memory_stands_beside() {
    check(
        |s| {
            s.alloc_as(0x1000, 1, MemoryKind::Managed, 0);
            s.alloc_as(0x2000, 2, MemoryKind::Pinned, 0);
            s.alloc_as(0x3000, 3, MemoryKind::Registered, 0);
            s.say(Body::Import { address: 0x4000, bytes: 4, source: ImportSource::Ipc });
            s.say(Body::VmmCreate { handle: 1, bytes: 5, references: 1, memory: MemoryKind::HostVmm });
            s.say(Body::Import { address: 2, bytes: 6, source: ImportSource::ShareableHandle });
        },
        &["tracked 0 = 0", "beside managed 1 pinned 2 registered 3 imported 10 host_vmm 5"],
    );
    check(
        |s| {
            s.alloc_as(0x1000, 1, MemoryKind::Managed, 0);
            s.free(0x1000);
            s.say(Body::Import { address: 0x4000, bytes: 4, source: ImportSource::Ipc });
            s.free(0x4000);
            s.say(Body::Import { address: 2, bytes: 6, source: ImportSource::ShareableHandle });
            s.map(0x10_0000, 6, 2);
            s.release(2);
            s.unmap(0x10_0000, 6);
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn captured_allocation_is_booked_nowhere() {
    check(
        |s| {
            s.stamp.flags = Flags::CAPTURED;
            s.alloc(0x1000, 100);
            s.alloc_as(0x2000, 100, MemoryKind::StreamOrdered, 5);
            s.stamp.flags = Flags(0);
            s.alloc(0x3000, 1);
            s.free(0x1000);
            s.free(0x2000);
        },
        &["tracked 1 = direct:- 1"],
    );
}

#[test]
fn failed_allocation_books_nothing() {
    check(
        |s| {
            s.alloc(0x1000, 1);
            let device_free_bytes = Reading::ABSENT;
            let memory = MemoryKind::Device;
            s.say(Body::AllocFailed { bytes: 1 << 40, pool: 0, device_free_bytes, result: 2, memory });
            assert_eq!(s.process().coverage.failed_allocations, 1);
        },
        &["tracked 1 = direct:- 1"],
    );
}

#[test]
fn context_end_takes_its_own_allocations() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            s.stamp.context = 2;
            s.tag("two").alloc(0x2000, 30);
            s.stamp.context = 1;
            s.say(Body::ContextDestroy { scope: DestroyScope::Context });
        },
        &["tracked 30 = direct:two 30", "peak 130 = direct:- 100 + direct:two 30"],
    );
}

#[test]
fn context_end_leaves_stream_ordered_memory_and_handles() {
    check(
        |s| {
            s.tag("s").alloc_as(0x1000, 100, MemoryKind::StreamOrdered, 5);
            s.tag("v").create(1, 30);
            s.say(Body::ContextDestroy { scope: DestroyScope::Context });
        },
        &["tracked 130 = direct:v 30 + block:s 100"],
    );
}

#[test]
fn device_reset_takes_everything_on_it() {
    check(
        |s| {
            s.alloc(0x1000, 4096);
            s.segment(0x1000, 4096, 3);
            s.block(0x1000, 64, 3);
            s.alloc_as(0x8000, 100, MemoryKind::StreamOrdered, 5);
            s.state(5, 1000);
            s.create(1, 30);
            s.map(0x10_0000, 30, 1);
            s.alloc_as(0x9000, 5, MemoryKind::Pinned, 0);
            s.say(Body::ContextDestroy { scope: DestroyScope::Device });
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn device_reset_takes_frees_in_flight_for_good() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            let begin = s.begin(0x1000);
            s.say(Body::ContextDestroy { scope: DestroyScope::Device });
            expect(s, &["tracked 0 = 0"]);
            s.end(begin, 709);
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn devices_have_books_of_their_own() {
    let mut s = Script::new();
    s.stamp.device = 1;
    s.control(device(10));
    s.alloc(0x1000, 100);
    s.stamp.device = 0;
    s.alloc(0x2000, 30);
    let accounts = s.process().accounts;
    assert_eq!(accounts.iter().map(|account| account.tracked_bytes).collect::<Vec<_>>(), [30, 100]);
    assert_eq!(accounts.iter().map(|account| account.device).collect::<Vec<_>>(), [Some(0), Some(1)]);
}

#[test]
fn two_slots_with_one_uuid_are_one_device() {
    let mut s = Script::new();
    s.stamp.device = 1;
    s.control(device(9));
    s.alloc(0x1000, 100);
    s.stamp.device = 0;
    s.alloc(0x2000, 30);
    assert_eq!(s.process().accounts.len(), 1);
    assert_eq!(s.account().tracked_bytes, 130);
}

#[test]
fn slot_named_after_its_first_use_joins_the_account_that_samples_made() {
    let mut s = Script::new();
    s.stamp.device = 3;
    s.host(device(10)); // the host's slot 0 is another device now
    s.sample(100, 110, 500);
    s.at(200).alloc(0x1000, 100);
    s.control(device(10));
    s.sample(300, 310, 600);
    s.at(400).watermark(0);
    let process = s.process();
    let of_device: Vec<_> = process.accounts.iter().filter(|account| account.device == Some(1)).collect();
    assert_eq!(of_device.len(), 1, "{:?}", process.accounts);
    assert_eq!(of_device[0].tracked_bytes, 100);
    assert_eq!(of_device[0].latest.as_ref().and_then(|sample| sample.gap_bytes()), Some(500));
}

#[test]
fn what_the_host_says_of_a_device_stands() {
    let mut s = Script::new();
    let told = |total, name| {
        let (total_bytes, id) = (Reading::of(total), DeviceIdKind::Gpu);
        Body::Device { uuid_high: 5, uuid_low: 6, total_bytes, ordinal: 2, id, name }
    };
    let known = |s: &Script| {
        let device = s.ledger.snapshot().devices.pop().expect("a device");
        (device.total_bytes, device.model)
    };
    s.control(told(900, "by the agent"));
    assert_eq!(known(&s), (Some(900), "by the agent".into()), "better than nothing");
    s.host(told(1000, "by NVML"));
    assert_eq!(known(&s), (Some(1000), "by NVML".into()));
    s.control(told(900, "by the agent"));
    assert_eq!(known(&s), (Some(1000), "by NVML".into()));
}

#[test]
fn slot_that_gets_another_device_leaves_old_bytes_where_they_are() {
    let mut s = Script::new();
    s.alloc(0x1000, 100);
    s.control(device(10));
    s.alloc(0x2000, 30);
    let found: Vec<_> =
        s.process().accounts.iter().map(|account| (account.device, account.tracked_bytes)).collect();
    assert_eq!(found, [(Some(0), 100), (Some(1), 30)]);
}

#[test]
fn sizes_and_addresses_that_no_machine_has_are_refused() {
    check(
        |s| {
            s.alloc(u64::MAX - 1, 1);
            s.alloc(u64::MAX, 1);
            s.block(u64::MAX, 1, 6);
            s.alloc(0x1000, u64::MAX);
            s.create(1, u64::MAX);
            s.state(5, u64::MAX);
            s.segment(u64::MAX - 1, 100, 6);
            s.segment(0x1000, u64::MAX, 6);
            s.block(u64::MAX, u64::MAX, 6);
            s.map(u64::MAX, u64::MAX, 1);
            s.unmap(u64::MAX, u64::MAX);
            s.unmap(0, u64::MAX);
            s.unsegment(0, u64::MAX, 6);
        },
        &["tracked 1 = direct:- 1", "odd unknown_frees 2 unknown_handles 1 impossible 7"],
    );
}

#[test]
fn more_believable_rows_than_i64_can_sum_do_not_panic() {
    let mut ledger = gpumem_ledger::Ledger::new();
    for memory in [DEV, MemoryKind::Pinned, MemoryKind::StreamOrdered] {
        for seq in 1..=70_000 {
            let stamp = Stamp { seq: seq + memory as u64 * 100_000, device: 0, ..Stamp::default() };
            let body = Body::AllocEnd { address: stamp.seq, bytes: 1 << 48, pool: 9, took_us: 0, memory };
            ledger.observe(gpumem_ledger::Origin::Process(KEY), &Record { stamp, body });
        }
    }
    verify(&ledger.snapshot().processes[0]);
}

#[test]
fn losses_beyond_all_counting_do_not_panic() {
    let mut s = Script::new();
    for _ in 0..3 {
        s.control(Body::ResyncBegin { epoch: 1, after_seq: 0 });
        s.control(Body::ResyncEnd { epoch: 1, head_seq: 0, rows: u64::MAX });
    }
    s.control(Body::Lost { count: u64::MAX, first_seq: u64::MAX });
    s.control(Body::Watermark { last_seq: u64::MAX, in_flight_since_ns: u64::MAX });
    assert_eq!(s.process().coverage.lost, 1 << 46, "more than that nobody can have lost");
}

#[test]
fn cells_beyond_the_table_keep_their_bytes() {
    let mut s = Script::new();
    s.say(Body::Step { number: 1 });
    for tag in 1..=70_000 {
        let (seq, address) = (s.seq + u64::from(tag), 0x1000 * u64::from(tag));
        let stamp = Stamp { seq, tag, device: 0, ..Stamp::default() };
        let body = Body::AllocEnd { address, bytes: 1, pool: 0, took_us: 0, memory: DEV };
        s.ledger.observe(gpumem_ledger::Origin::Process(KEY), &Record { stamp, body });
    }
    let process = s.process();
    verify(&process);
    assert_eq!(process.accounts[0].tracked_bytes, 70_000);
    assert!(process.odd.overflowed > 0);
    assert!(process.cells.iter().any(|cell| cell.class == Class::Direct
        && cell.tag.as_deref().is_some_and(|tag| tag.contains("more names"))));
}

#[test]
fn gap_in_seq_makes_the_sums_partial() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            s.seq += 3;
            s.alloc(0x2000, 1);
            assert_eq!(s.process().coverage.lost, 3);
            assert_eq!(s.process().coverage.events, 2);
        },
        &["tracked 101 = direct:- 101", "flags partial"],
    );
}

#[test]
fn lost_record_makes_the_sums_partial_once() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            s.control(Body::Lost { count: 2, first_seq: 2 });
            s.control(Body::Lost { count: 2, first_seq: 2 });
            s.seq += 2;
            s.alloc(0x2000, 1);
            assert_eq!(s.process().coverage.lost, 2);
        },
        &["tracked 101 = direct:- 101", "flags partial"],
    );
}

#[test]
fn watermark_beyond_the_last_record_makes_the_sums_partial() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            s.seq += 1;
            s.watermark(0);
            s.alloc(0x2000, 1);
            assert_eq!(s.process().coverage.lost, 1);
        },
        &["tracked 101 = direct:- 101", "flags partial"],
    );
}

#[test]
fn record_that_comes_twice_counts_once() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            s.seq -= 1;
            s.alloc(0x2000, 100);
        },
        &["tracked 100 = direct:- 100", "odd duplicates 1"],
    );
}
