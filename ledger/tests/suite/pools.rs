//! Booking rules of framework pools as short scripts: segments, blocks, nesting, opacity.
use crate::common::*;
use gpumem_wire::*;

const FRAMEWORK: PoolOwner = PoolOwner::Framework;

/// An allocation of 4096 bytes at 0x1000 that is a segment of pool 3.
fn with_segment(s: &mut Script) {
    s.pool(3, 0, true, FRAMEWORK);
    s.tag("a").alloc(0x1000, 4096);
    s.segment(0x1000, 4096, 3);
}

#[test]
fn segment_and_block_shift_without_posting() {
    check(
        |s| {
            with_segment(s);
            expect(s, &["tracked 4096 = idle 4096"]);
            s.tag("w").block(0x1000, 1000, 3);
        },
        &["tracked 4096 = block:w 1000 + idle 3096", "peak 4096 = block:w 1000 + idle 3096"],
    );
}

#[test]
fn block_freed_goes_back_to_idle() {
    check(
        |s| {
            with_segment(s);
            s.tag("w").block(0x1000, 1000, 3);
            s.unblock(0x1000, 3);
        },
        &["tracked 4096 = idle 4096", "peak 4096 = block:w 1000 + idle 3096"],
    );
}

#[test]
fn pending_block_is_told_apart_until_it_is_done() {
    check(
        |s| {
            with_segment(s);
            s.tag("w").block(0x1000, 1000, 3);
            s.say(Body::BlockFree { address: 0x1000, pool: 3, state: FreeState::Pending });
            s.say(Body::BlockFree { address: 0x1000, pool: 3, state: FreeState::Pending });
            expect(s, &["tracked 4096 = block:w 1000 + idle 3096", "beside pending 1000"]);
            s.unblock(0x1000, 3);
        },
        &["tracked 4096 = idle 4096"],
    );
}

#[test]
fn segment_reported_before_its_allocation() {
    check(
        |s| {
            s.pool(3, 0, true, FRAMEWORK);
            s.segment(0x1000, 4096, 3);
            s.tag("a").alloc(0x1000, 4096);
            s.tag("w").block(0x1000, 96, 3);
        },
        &["tracked 4096 = block:w 96 + idle 4000"],
    );
}

#[test]
fn block_reported_before_the_memory_of_its_segment_is_booked_with_it() {
    check(
        |s| {
            s.pool(3, 0, true, FRAMEWORK);
            s.segment(0x1000, 4096, 3);
            s.tag("w").block(0x1000, 96, 3);
            s.block(0x9000, 5, 3);
            expect(s, &["tracked 0 = 0", "beside unbooked 101"]);
            s.tag("a").alloc(0x1000, 4096);
            expect(s, &["tracked 4096 = block:w 96 + idle 4000", "beside unbooked 5"]);
            s.unblock(0x1000, 3);
            s.unblock(0x9000, 3);
        },
        &["tracked 4096 = idle 4096"],
    );
}

#[test]
fn late_agent_meets_blocks_in_segments_that_it_never_saw() {
    check(
        |s| {
            s.control(Body::Agent { result: 0, state: AgentState::Late, detail: "" });
            with_segment(s);
            s.tag("w").block(0x1000, 96, 3);
            s.tag("old").block(0x9000, 5, 3);
            expect(s, &["tracked 4096 = block:w 96 + idle 4000", "beside unbooked 5", "flags late"]);
            s.unblock(0x9000, 3);
        },
        &["tracked 4096 = block:w 96 + idle 4000", "flags late"],
    );
}

#[test]
fn segment_of_a_part_of_a_large_allocation() {
    check(
        |s| {
            s.pool(3, 0, true, FRAMEWORK);
            s.tag("a").alloc(16 * MIB, 4 * MIB);
            s.segment(17 * MIB, MIB, 3);
            s.segment(18 * MIB, MIB, 3);
            s.tag("w").block(17 * MIB, 1, 3);
        },
        &["tracked 4194304 = direct:a 2097152 + block:w 1 + idle 2097151"],
    );
}

#[test]
fn segment_over_two_allocations_takes_what_lies_under_it() {
    check(
        |s| {
            s.tag("a").alloc(16 * MIB, 2 * MIB);
            s.tag("b").alloc(18 * MIB, 2 * MIB);
            s.pool(3, 0, true, FRAMEWORK);
            s.segment(17 * MIB, 2 * MIB, 3);
        },
        &["tracked 4194304 = direct:a 1048576 + direct:b 1048576 + idle 2097152"],
    );
}

#[test]
fn segment_over_vmm_mappings_takes_the_handles() {
    check(
        |s| {
            s.pool(3, 0, true, FRAMEWORK);
            s.tag("v").create(1, 0x1000);
            s.tag("v").create(2, 0x1000);
            s.map(0x10_0000, 0x1000, 1);
            s.segment(0x10_0000, 0x2000, 3);
            expect(s, &["tracked 8192 = direct:v 4096 + idle 4096"]);
            s.map(0x10_1000, 0x1000, 2);
            s.tag("w").block(0x10_0000, 0x2000, 3);
            expect(s, &["tracked 8192 = block:w 8192"]);
            s.unblock(0x10_0000, 3);
            s.unmap(0x10_1000, 0x1000);
            expect(s, &["tracked 8192 = direct:v 4096 + idle 4096"]);
            s.release(2);
        },
        &["tracked 4096 = idle 4096"],
    );
}

#[test]
fn pool_that_sleeps_keeps_its_blocks_and_names_them_again() {
    check(
        |s| {
            s.pool(3, 0, true, FRAMEWORK);
            for (handle, address) in [(1, 0x10_0000), (2, 0x20_0000)] {
                s.tag("v").create(handle, 0x1000);
                s.map(address, 0x1000, handle);
                s.segment(address, 0x1000, 3);
            }
            s.tag("w").block(0x10_0000, 0x1000, 3);
            s.tag("kv").block(0x20_0000, 0x800, 3);
            expect(s, &["tracked 8192 = block:kv 2048 + block:w 4096 + idle 2048"]);
            s.unmap(0x10_0000, 0x1000);
            let asleep = "tracked 8192 = direct:v 4096 + block:kv 2048 + idle 2048";
            expect(s, &[asleep, "beside unbooked 4096"]);
            s.release(1);
            expect(s, &["tracked 4096 = block:kv 2048 + idle 2048", "beside unbooked 4096"]);
            // Blocks freed while it sleeps leave the count; new blocks there wait for memory.
            s.unmap(0x20_0000, 0x1000);
            s.release(2);
            s.unblock(0x20_0000, 3);
            s.tag("x").block(0x20_0800, 0x100, 3);
            expect(s, &["tracked 0 = 0", "beside unbooked 4352"]);
            // It wakes up: other handles at the same addresses.
            s.tag("v").create(3, 0x1000);
            s.map(0x10_0000, 0x1000, 3);
            expect(s, &["tracked 4096 = block:w 4096", "beside unbooked 256"]);
            s.tag("v").create(4, 0x1000);
            s.map(0x20_0000, 0x1000, 4);
        },
        &["tracked 8192 = block:w 4096 + block:x 256 + idle 3840"],
    );
}

#[test]
fn segment_that_waits_for_more_takes_the_same_bytes_once() {
    check(
        |s| {
            s.pool(3, 0, true, FRAMEWORK);
            s.tag("a").alloc(16 * MIB, 2 * MIB);
            s.segment(17 * MIB, 3 * MIB, 3);
            s.tag("b").alloc(18 * MIB, MIB);
            s.tag("c").alloc(19 * MIB, MIB);
        },
        &["tracked 4194304 = direct:a 1048576 + idle 3145728"],
    );
}

#[test]
fn segment_removed_gives_the_bytes_back_to_the_allocation() {
    check(
        |s| {
            with_segment(s);
            s.unsegment(0x1000, 4096, 3);
        },
        &["tracked 4096 = direct:a 4096"],
    );
}

#[test]
fn segment_removed_with_a_live_block_shows_as_negative_idle() {
    check(
        |s| {
            with_segment(s);
            s.tag("w").block(0x1000, 96, 3);
            s.unsegment(0x1000, 4096, 3);
            expect(s, &["tracked 4096 = direct:a 4096 + block:w 96 + idle -96"]);
            s.unblock(0x1000, 3);
        },
        &["tracked 4096 = direct:a 4096"],
    );
}

#[test]
fn what_is_left_of_two_that_overlapped_is_one() {
    check(
        |s| {
            s.pool(3, 0, true, FRAMEWORK);
            s.tag("a").alloc(16 * MIB, 4 * MIB);
            s.segment(16 * MIB, 3 * MIB, 3);
            s.segment(17 * MIB, 3 * MIB, 3);
            s.unsegment(17 * MIB, MIB, 3); // both continue from 18 MiB
            expect(s, &["tracked 4194304 = direct:a 1048576 + idle 3145728"]);
            s.tag("b").alloc(16 * MIB, 4 * MIB); // its free was lost
        },
        &["tracked 4194304 = direct:b 1048576 + idle 3145728", "odd replaced 1"],
    );
}

#[test]
fn part_of_a_segment_removed_leaves_the_rest() {
    check(
        |s| {
            s.pool(3, 0, true, FRAMEWORK);
            s.tag("a").alloc(16 * MIB, 4 * MIB);
            s.segment(16 * MIB, 4 * MIB, 3);
            s.unsegment(17 * MIB, MIB, 3);
            expect(s, &["tracked 4194304 = direct:a 1048576 + idle 3145728"]);
            s.tag("w").block(18 * MIB, 2 * MIB, 3);
            expect(s, &["tracked 4194304 = direct:a 1048576 + block:w 2097152 + idle 1048576"]);
            s.unsegment(16 * MIB, MIB, 3);
        },
        &["tracked 4194304 = direct:a 2097152 + block:w 2097152"],
    );
}

#[test]
fn one_removal_takes_several_segments() {
    check(
        |s| {
            s.pool(3, 0, true, FRAMEWORK);
            s.tag("v").create(1, MIB);
            s.tag("v").create(2, MIB);
            s.map(16 * MIB, MIB, 1);
            s.segment(16 * MIB, MIB, 3);
            s.map(17 * MIB, MIB, 2);
            s.segment(17 * MIB, MIB, 3);
            s.unsegment(16 * MIB, 2 * MIB, 3);
        },
        &["tracked 2097152 = direct:v 2097152"],
    );
}

#[test]
fn removal_where_no_segment_is_counts_as_odd() {
    check(
        |s| {
            with_segment(s);
            s.unsegment(0x9000, 4096, 3);
        },
        &["tracked 4096 = idle 4096", "odd unknown_handles 1"],
    );
}

#[test]
fn driver_free_under_a_live_segment_takes_the_bytes() {
    check(
        |s| {
            with_segment(s);
            s.tag("w").block(0x1000, 96, 3);
            s.free(0x1000);
            expect(s, &["tracked 0 = block:w 96 + idle -96"]);
            s.unblock(0x1000, 3);
            s.tag("b").alloc(0x1000, 4096);
            s.tag("w").block(0x1000, 96, 3);
        },
        &["tracked 4096 = block:w 96 + idle 4000"],
    );
}

#[test]
fn address_used_again_while_the_segment_is_removed_late() {
    check(
        |s| {
            with_segment(s);
            let begin = s.begin(0x1000);
            s.tag("b").alloc(0x1000, 4096);
            s.unsegment(0x1000, 4096, 3);
            expect(s, &["tracked 8192 = direct:a 4096 + direct:b 4096"]);
            s.end(begin, 0);
        },
        &["tracked 4096 = direct:b 4096"],
    );
}

#[test]
fn context_end_takes_segments_and_blocks_in_its_memory() {
    check(
        |s| {
            s.pool(4, 3, true, FRAMEWORK);
            with_segment(s);
            s.tag("w").block(0x1000, 1024, 3);
            s.segment(0x1000, 1024, 4);
            s.tag("inner").block(0x1000, 100, 4);
            s.stamp.context = 2;
            s.tag("b").alloc(0x8000, 4096);
            s.segment(0x8000, 4096, 3);
            s.tag("w").block(0x8000, 7, 3);
            s.stamp.context = 1;
            s.say(Body::ContextDestroy { scope: DestroyScope::Context });
        },
        &["tracked 4096 = block:w 7 + idle 4089"],
    );
}

#[test]
fn allocation_for_a_pool_is_its_segment_until_it_is_freed() {
    check(
        |s| {
            s.tag("a").alloc_as(0x1000, 4096, DEV, 3);
            expect(s, &["tracked 4096 = opaque 4096"]);
            s.tag("w").block(0x1000, 96, 3);
            expect(s, &["tracked 4096 = block:w 96 + idle 4000"]);
            s.unblock(0x1000, 3);
            s.free(0x1000);
            assert_eq!(s.account().pools[0].segment_bytes, 0, "the segment went with it");
            s.alloc_as(0x1000, 4096, DEV, 3);
        },
        &["tracked 4096 = idle 4096"],
    );
}

#[test]
fn allocation_for_a_pool_whose_free_failed_is_its_segment_still() {
    check(
        |s| {
            s.pool(3, 0, true, FRAMEWORK);
            s.alloc_as(0x1000, 4096, DEV, 3);
            let begin = s.begin(0x1000);
            s.end(begin, 1);
        },
        &["tracked 4096 = idle 4096"],
    );
}

#[test]
fn blocks_in_managed_segments_stand_beside() {
    check(
        |s| {
            s.alloc_as(0x1000, 4096, DEV, 3);
            s.alloc_as(0x8000, 4096, MemoryKind::Managed, 3);
            s.tag("w").block(0x8000, 96, 3);
        },
        &["tracked 4096 = idle 4096", "beside managed 4096 unbooked 96"],
    );
}

#[test]
fn nested_pool_takes_from_the_outer_block() {
    check(
        |s| {
            with_segment(s);
            s.pool(4, 3, true, FRAMEWORK);
            s.tag("outer").block(0x1000, 1024, 3);
            s.segment(0x1000, 1024, 4);
            expect(s, &["tracked 4096 = idle 4096"]);
            s.tag("inner").block(0x1100, 100, 4);
            expect(s, &["tracked 4096 = block:inner 100 + idle 3996"]);
            s.unblock(0x1100, 4);
            s.unsegment(0x1000, 1024, 4);
        },
        &["tracked 4096 = block:outer 1024 + idle 3072"],
    );
}

#[test]
fn nested_segment_before_its_outer_block() {
    check(
        |s| {
            with_segment(s);
            s.pool(4, 3, true, FRAMEWORK);
            s.segment(0x1000, 1024, 4);
            s.tag("outer").block(0x1000, 1024, 3);
            s.tag("inner").block(0x1100, 100, 4);
        },
        &["tracked 4096 = block:inner 100 + idle 3996"],
    );
}

#[test]
fn id_of_a_destroyed_pool_names_another_pool() {
    check(
        |s| {
            with_segment(s);
            s.tag("w").block(0x1000, 96, 3);
            s.say(Body::PoolDestroy { pool: 3 });
            s.segment(0x1000, 4096, 3);
            s.tag("x").block(0x1000, 64, 3);
            assert_eq!(s.account().pools.len(), 1);
        },
        &["tracked 4096 = block:x 64 + idle 4032"],
    );
}

#[test]
fn pool_destroyed_with_live_blocks_leaves_direct_memory() {
    check(
        |s| {
            with_segment(s);
            s.tag("w").block(0x1000, 96, 3);
            s.say(Body::PoolDestroy { pool: 3 });
            assert_eq!(s.account().pools.len(), 0);
        },
        &["tracked 4096 = direct:a 4096"],
    );
}

#[test]
fn opaque_pool_is_neither_idle_nor_named() {
    check(
        |s| {
            s.pool(3, 0, false, FRAMEWORK);
            s.tag("a").alloc(0x1000, 4096);
            s.segment(0x1000, 4096, 3);
            s.alloc(0x8000, 4);
        },
        &["tracked 4100 = direct:- 4 + opaque 4096"],
    );
}

#[test]
fn opaque_pool_opens_with_its_first_block() {
    check(
        |s| {
            s.pool(3, 0, false, FRAMEWORK);
            s.alloc(0x1000, 4096);
            s.segment(0x1000, 4096, 3);
            s.tag("w").block(0x1000, 96, 3);
            s.unblock(0x1000, 3);
        },
        &["tracked 4096 = idle 4096", "peak 4096 = block:w 96 + idle 4000"],
    );
}

#[test]
fn pool_created_after_its_segment_opens_when_it_says_so() {
    check(
        |s| {
            s.alloc(0x1000, 4096);
            s.segment(0x1000, 4096, 3);
            expect(s, &["tracked 4096 = opaque 4096"]);
            s.pool(3, 0, true, FRAMEWORK);
        },
        &["tracked 4096 = idle 4096"],
    );
}

#[test]
fn blocks_of_segments_that_nothing_booked_stand_beside() {
    check(
        |s| {
            s.segment(0x1000, 4096, 3);
            s.tag("w").block(0x1000, 96, 3);
            expect(s, &["tracked 0 = 0", "beside unbooked 96"]);
            s.unblock(0x1000, 3);
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn pool_check_keeps_both_totals() {
    let mut s = Script::new();
    with_segment(&mut s);
    s.block(0x1000, 96, 3);
    s.say(Body::PoolCheck { pool: 3, total_bytes: 100 });
    let pools = s.account().pools;
    assert_eq!((pools[0].check, pools[0].segment_bytes, pools[0].block_bytes), (Some((100, 96)), 4096, 96));
}

#[test]
fn pool_has_the_number_of_streams_and_private_pools_of_its_requests() {
    let counts = |requests: &[(u32, u32)]| {
        let mut s = Script::new();
        with_segment(&mut s);
        for (number, (stream, private_pool)) in (0..).zip(requests) {
            (s.stamp.flags, s.stamp.context) = (Flags::REQUEST, stream | private_pool << 16);
            s.block(0x1000 + number * 32, 32, 3);
            (s.stamp.flags, s.stamp.context) = (Flags::default(), 0);
        }
        let pool = s.account().pools.remove(0);
        (pool.streams, pool.private_pools)
    };
    assert_eq!(counts(&[]), (None, None));
    assert_eq!(counts(&[(0, 0)]), (Some(1), Some(0)));
    assert_eq!(counts(&[(0, 0), (1, 1), (1, 2), (1, 2)]), (Some(2), Some(2)));
    assert_eq!(counts(&[(1, 1)]), (Some(1), Some(1)), "nothing of the default pool");
}

#[test]
fn pool_tells_what_waits_for_a_stream_and_what_its_owner_says() {
    let mut s = Script::new();
    with_segment(&mut s);
    s.block(0x1000, 96, 3);
    s.block(0x1100, 32, 3);
    s.say(Body::BlockFree { address: 0x1000, pool: 3, state: FreeState::Pending });
    s.say(Body::PoolState { pool: 3, reserved_bytes: 8192, used_bytes: 32, took_us: 0 });
    s.say(Body::PoolCheck { pool: 3, total_bytes: 32 });
    let pool = s.account().pools.remove(0);
    assert_eq!((pool.block_bytes, pool.pending_bytes), (128, 96));
    assert_eq!(pool.own, Some((8192, 32)));
    assert_eq!(pool.check, Some((32, 32)), "what its owner let go is not in the owner's total");
    s.unblock(0x1000, 3);
    let pool = s.account().pools.remove(0);
    assert_eq!((pool.block_bytes, pool.pending_bytes), (32, 0));
}

#[test]
fn many_mappings_under_one_segment_stay_cheap() {
    // 20,000 handles, mapped one by one under a segment that waits for them: quadratic work would take
    // minutes in a debug build.
    let mut s = Script::new();
    s.pool(3, 0, true, FRAMEWORK);
    s.segment(1 << 40, 20_000 * MIB, 3);
    let quiet = |s: &mut Script, body: Body<'_>| {
        s.seq += 1;
        let stamp = Stamp { seq: s.seq, ..s.stamp };
        s.ledger.observe(gpumem_ledger::Origin::Process(KEY), &Record { stamp, body });
    };
    for n in 0..20_000 {
        let memory = MemoryKind::Vmm;
        quiet(&mut s, Body::VmmCreate { handle: n + 1, bytes: MIB, references: 1, memory });
        quiet(&mut s, Body::VmmMap { address: (1 << 40) + n * MIB, bytes: MIB, handle: n + 1 });
    }
    expect(&s, &["tracked 20971520000 = idle 20971520000"]);
}

/// Bytes of a pool by its name, now and at the peak: reports sum these at any moment.
#[test]
fn cells_know_the_pool_of_their_bytes_and_what_waits_in_it() {
    let mut s = Script::new();
    for (pool, name, base) in [(7, "torch", 0x1000_0000), (8, "rmm", 0x9000_0000)] {
        s.tag(name);
        s.say(Body::PoolCreate { pool, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework });
        s.alloc_as(base, 100, DEV, pool);
        s.tag("w").say(Body::BlockAlloc { address: base, bytes: 60, pool, use_as: NOTHING });
        s.tag("w").say(Body::BlockAlloc { address: base + 60, bytes: 10, pool, use_as: NOTHING });
    }
    s.say(Body::BlockFree { address: 0x1000_0000 + 60, pool: 7, state: FreeState::Pending });
    let of =
        |amounts: &[i64], process: &gpumem_ledger::ProcessView, pool: &str, wanted: (bool, bool)| -> i64 {
            let cells = process.cells.iter().zip(amounts);
            let is_wanted = |cell: &gpumem_ledger::CellView| {
                cell.pool.as_deref() == Some(pool) && (cell.is_idle(), cell.pending) == wanted
            };
            cells.filter(|(cell, _)| is_wanted(cell)).map(|(_, bytes)| bytes).sum()
        };
    let process = s.process();
    let account = &process.accounts[0];
    for (pool, live, idle, pending) in [("torch", 60, 30, 10), ("rmm", 70, 30, 0)] {
        let now = |wanted| of(&account.amounts, &process, pool, wanted);
        assert_eq!(
            (now((false, false)), now((true, false)), now((true, true))),
            (live, idle, pending),
            "{pool}"
        );
        let at_peak = |wanted| of(&account.peak.amounts, &process, pool, wanted);
        assert_eq!((at_peak((false, false)), at_peak((true, true))), (70, 0), "{pool}: nothing waited then");
    }
    // A role that is reported later also applies to the peak.
    let seq = 4;
    s.say(Body::Retag {
        address: 0x1000_0000 + 60,
        block_seq: seq,
        pool: 7,
        use_as: (Role::Gradient, Phase::Unknown),
    });
    let process = s.process();
    let gradients = |amounts: &[i64]| -> i64 {
        let cells = process.cells.iter().zip(amounts);
        cells.filter(|(cell, _)| cell.role == Role::Gradient).map(|(_, bytes)| bytes).sum()
    };
    assert_eq!(gradients(&process.accounts[0].peak.amounts), 10);
}
