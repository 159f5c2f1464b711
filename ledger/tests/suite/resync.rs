//! Resyncs as short scripts: the sums are marked during a resync and exact after it.
use crate::common::*;
use gpumem_wire::*;

fn alloc_body(address: u64, bytes: u64, pool: u64) -> Body<'static> {
    Body::AllocEnd { address, bytes, pool, took_us: 0, memory: DEV }
}

#[test]
fn resync_sweeps_what_is_gone_and_adds_what_was_missed() {
    check(
        |s| {
            s.tag("a").alloc(0x1000, 100);
            let kept = s.tag("b").alloc(0x2000, 50);
            s.seq += 3; // lost: a is freed and c is allocated
            let missed = s.seq;
            s.alloc(0x4000, 1);
            let last = s.seq;
            expect(s, &["tracked 151 = direct:- 1 + direct:a 100 + direct:b 50", "flags partial"]);
            s.resync(3, |s| {
                s.tag("c").restate(missed, alloc_body(0x3000, 7, 0));
                s.tag("b").restate(kept, alloc_body(0x2000, 50, 0));
                s.restate(last, alloc_body(0x4000, 1, 0));
            });
        },
        &["tracked 58 = direct:- 1 + direct:b 50 + direct:c 7", "flags was_partial"],
    );
}

#[test]
fn a_peak_before_the_head_of_a_resync_that_confirms_is_seen() {
    // A connection begins with a resync. The agent was slow: the program's meanwhile changes follow after it.
    check(
        |s| {
            let kept = s.tag("a").alloc(0x1000, 100);
            s.watermark(0);
            s.control(Body::ResyncBegin { epoch: 1, after_seq: kept });
            s.tag("a").restate(kept, alloc_body(0x1000, 100, 0));
            s.control(Body::ResyncEnd { epoch: 1, head_seq: kept + 6, rows: 1 });
            s.tag("b").alloc(0x2000, 60);
            s.free(0x2000);
            s.tag("c").alloc(0x3000, 5);
        },
        &["tracked 105 = direct:a 100 + direct:c 5", "peak 160 = direct:a 100 + direct:b 60"],
    );
}

#[test]
fn resync_takes_no_peak_from_its_middle() {
    // The row that is gone and the row that replaced it both exist until the resync ends.
    check(
        |s| {
            s.tag("a").alloc(0x1000, 100);
            s.seq += 3;
            let missed = s.seq;
            s.watermark(0);
            s.resync(1, |s| {
                s.tag("b").restate(missed, alloc_body(0x3000, 100, 0));
            });
        },
        &["tracked 100 = direct:b 100", "flags was_partial", "peak 100 = direct:a 100"],
    );
}

#[test]
fn resync_takes_no_peak_before_the_ring_reached_its_head() {
    // While the table is read, a is freed and b allocated: both are restated, and a's free comes later.
    check(
        |s| {
            let a = s.tag("a").alloc(0x1000, 100);
            s.control(Body::ResyncBegin { epoch: 1, after_seq: 1 });
            s.tag("a").restate(a, alloc_body(0x1000, 100, 0));
            s.tag("b").restate(4, alloc_body(0x2000, 100, 0));
            s.control(Body::ResyncEnd { epoch: 1, head_seq: 4, rows: 2 });
            s.free(0x1000);
            s.tag("b").alloc(0x2000, 100);
        },
        &["tracked 100 = direct:b 100", "peak 100 = direct:a 100"],
    );
}

#[test]
fn state_is_not_known_before_the_ring_reached_the_head_of_the_resync() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            s.seq += 1;
            s.watermark(0);
            s.control(Body::ResyncBegin { epoch: 1, after_seq: 2 });
            s.control(Body::ResyncEnd { epoch: 1, head_seq: 3, rows: 0 });
            expect(s, &["tracked 100 = direct:- 100", "flags partial"]); // its free may still come
            s.alloc(0x2000, 1);
        },
        &["tracked 1 = direct:- 1", "flags was_partial"],
    );
}

#[test]
fn loss_during_a_resync_needs_another_one() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            s.control(Body::ResyncBegin { epoch: 1, after_seq: 1 });
            s.restate(1, alloc_body(0x1000, 100, 0));
            s.seq += 2;
            s.alloc(0x2000, 1);
            s.control(Body::ResyncEnd { epoch: 1, head_seq: 4, rows: 1 });
            expect(s, &["tracked 101 = direct:- 101", "flags partial"]);
            s.resync(2, |s| {
                s.restate(1, alloc_body(0x1000, 100, 0));
                s.restate(4, alloc_body(0x2000, 1, 0));
            });
        },
        &["tracked 101 = direct:- 101", "flags was_partial"],
    );
}

#[test]
fn resync_with_another_number_of_rows_sweeps_nothing() {
    check(
        |s| {
            let seq = s.alloc(0x1000, 100);
            s.alloc(0x2000, 1);
            s.resync(2, |s| s.restate(seq, alloc_body(0x1000, 100, 0)));
        },
        &["tracked 101 = direct:- 101", "flags partial"],
    );
}

#[test]
fn names_said_again_are_no_rows() {
    check(
        |s| {
            let seq = s.alloc(0x1000, 100);
            s.resync(1, |s| {
                let stamp = Stamp { tag: 9, flags: Flags::RESTATED, ..Stamp::default() };
                s.push(stamp, Body::Tag { path: "late name" });
                s.push(stamp, device(9));
                s.restate(seq, alloc_body(0x1000, 100, 0));
            });
        },
        &["tracked 100 = direct:- 100"],
    );
}

#[test]
fn new_ledger_takes_the_whole_state_from_a_resync() {
    check(
        |s| {
            s.seq = 1000;
            s.resync(9, |s| {
                // Pools first; then rows in the table's order, which is arbitrary.
                let framework = PoolOwner::Framework;
                s.restate(1, Body::PoolCreate { pool: 3, parent: 0, reports_blocks: 1, owner: framework });
                let block = |address| Body::BlockAlloc { address, bytes: 96, pool: 3, use_as: NOTHING };
                s.tag("w").restate(5, block(0x1000));
                s.restate(4, Body::SegmentAdd { address: 0x1000, bytes: 4096, pool: 3 });
                s.tag("w").restate(6, block(0x2000));
                s.tag("w").restate(7, block(16 * MIB));
                s.restate(2, alloc_body(0x1000, 4096, 0));
                let memory = MemoryKind::Vmm;
                s.restate(8, Body::VmmCreate { handle: 1, bytes: MIB, references: 0, memory });
                s.restate(9, Body::VmmMap { address: 16 * MIB, bytes: MIB, handle: 1 });
                s.restate(10, Body::SegmentAdd { address: 16 * MIB, bytes: MIB, pool: 3 });
            });
            // 0x2000 lies in no segment.
            expect(
                s,
                &[
                    "tracked 1052672 = block:w 192 + idle 1052480",
                    "beside unbooked 96",
                    "flags was_partial",
                    "peak 1052672 = block:w 192 + idle 1052480",
                ],
            );
            s.unblock(16 * MIB, 3);
            s.unmap(16 * MIB, MIB);
        },
        &["tracked 4096 = block:w 96 + idle 4000", "beside unbooked 96", "flags was_partial"],
    );
}

#[test]
fn handle_number_that_belonged_to_two_backings() {
    // The first was released but is mapped; the second has its number now.
    check(
        |s| {
            s.seq = 100;
            let memory = MemoryKind::Vmm;
            s.resync(4, |s| {
                s.tag("old").restate(1, Body::VmmCreate { handle: 1, bytes: MIB, references: 0, memory });
                s.restate(2, Body::VmmMap { address: 16 * MIB, bytes: MIB, handle: 1 });
                s.tag("new").restate(5, Body::VmmCreate { handle: 1, bytes: 3 * MIB, references: 1, memory });
                s.restate(6, Body::VmmMap { address: 32 * MIB, bytes: 3 * MIB, handle: 1 });
            });
            s.unmap(16 * MIB, MIB);
            expect(s, &["tracked 3145728 = direct:new 3145728", "flags was_partial"]);
            s.release(1);
            s.unmap(32 * MIB, 3 * MIB);
        },
        &["tracked 0 = 0", "flags was_partial"],
    );
}

#[test]
fn handle_number_said_last_of_a_released_backing_stays_with_the_held_one() {
    check(
        |s| {
            s.seq = 100;
            let memory = MemoryKind::Vmm;
            s.resync(3, |s| {
                s.tag("new").restate(5, Body::VmmCreate { handle: 1, bytes: 3 * MIB, references: 1, memory });
                s.tag("old").restate(1, Body::VmmCreate { handle: 1, bytes: MIB, references: 0, memory });
                s.restate(2, Body::VmmMap { address: 16 * MIB, bytes: MIB, handle: 1 });
            });
            s.release(1);
        },
        &["tracked 1048576 = direct:old 1048576", "flags was_partial"],
    );
}

#[test]
fn segment_by_birth_survives_a_failed_free_whose_end_was_lost() {
    check(
        |s| {
            s.pool(3, 0, true, PoolOwner::Framework);
            let seq = s.alloc_as(0x1000, 4096, DEV, 3);
            s.begin(0x1000);
            s.seq += 1; // lost: the free failed
            s.watermark(0);
            s.resync(1, |s| s.restate(seq, alloc_body(0x1000, 4096, 3)));
        },
        &["tracked 4096 = idle 4096", "flags was_partial", "peak 4096 = idle 4096"],
    );
}

#[test]
fn failed_unmap_whose_end_was_lost_keeps_its_segment() {
    check(
        |s| {
            s.pool(3, 0, true, PoolOwner::Framework);
            let create = s.create(1, MIB);
            let map = s.map(16 * MIB, MIB, 1);
            let segment = s.segment(16 * MIB, MIB, 3);
            s.say(Body::VmmUnmap { address: 16 * MIB, bytes: MIB });
            s.seq += 1; // lost: the free failed
            s.watermark(0);
            s.resync(3, |s| {
                let memory = MemoryKind::Vmm;
                s.restate(create, Body::VmmCreate { handle: 1, bytes: MIB, references: 1, memory });
                s.restate(map, Body::VmmMap { address: 16 * MIB, bytes: MIB, handle: 1 });
                s.restate(segment, Body::SegmentAdd { address: 16 * MIB, bytes: MIB, pool: 3 });
            });
        },
        &["tracked 1048576 = idle 1048576", "flags was_partial"],
    );
}

#[test]
fn mapping_made_again_where_the_end_of_an_unmap_was_lost() {
    check(
        |s| {
            let create = s.create(1, MIB);
            s.map(16 * MIB, MIB, 1);
            s.say(Body::VmmUnmap { address: 16 * MIB, bytes: MIB });
            s.seq += 1; // lost: the free succeeded
            let map = s.map(16 * MIB, MIB, 1);
            s.resync(2, |s| {
                let memory = MemoryKind::Vmm;
                s.restate(create, Body::VmmCreate { handle: 1, bytes: MIB, references: 1, memory });
                s.restate(map, Body::VmmMap { address: 16 * MIB, bytes: MIB, handle: 1 });
            });
            s.release(1);
            expect(s, &["tracked 1048576 = direct:- 1048576", "flags was_partial"]);
            s.unmap(16 * MIB, MIB);
        },
        &["tracked 0 = 0", "flags was_partial"],
    );
}

/// References that change while the table is read are counted in the row and by their record. The agent does not complete such a
/// resync but restates its rows again.
#[test]
fn state_without_an_end_is_replaced_by_the_next_one() {
    let create = |references| Body::VmmCreate { handle: 1, bytes: MIB, references, memory: MemoryKind::Vmm };
    let mut s = Script::new();
    let made = s.create(1, MIB);
    s.seq += 1; // lost
    s.watermark(0);
    s.control(Body::ResyncBegin { epoch: 1, after_seq: s.seq });
    s.restate(made, create(2));
    let map = s.map(16 * MIB, MIB, 1);
    s.say(Body::VmmRetain { handle: 1, address: 16 * MIB });
    expect(&s, &["tracked 1048576 = direct:- 1048576", "flags partial"]);
    s.resync(2, |s| {
        s.restate(made, create(2));
        s.restate(map, Body::VmmMap { address: 16 * MIB, bytes: MIB, handle: 1 });
    });
    expect(&s, &["tracked 1048576 = direct:- 1048576", "flags was_partial"]);
    s.release(1);
    s.unmap(16 * MIB, MIB);
    expect(&s, &["tracked 1048576 = direct:- 1048576", "flags was_partial"]);
    s.release(1);
    expect(&s, &["tracked 0 = 0", "flags was_partial"]);
}

#[test]
fn known_state_is_only_confirmed_however_often_it_is_begun() {
    check(
        |s| {
            let kept = s.tag("a").alloc(0x1000, 100);
            s.watermark(0);
            s.control(Body::ResyncBegin { epoch: 1, after_seq: kept });
            s.tag("a").restate(kept, alloc_body(0x1000, 100, 0));
            s.tag("b").alloc(0x2000, 60);
            s.free(0x2000);
            s.resync(1, |s| s.tag("a").restate(kept, alloc_body(0x1000, 100, 0)));
            s.tag("c").alloc(0x3000, 5);
        },
        &["tracked 105 = direct:a 100 + direct:c 5", "peak 160 = direct:a 100 + direct:b 60"],
    );
}

#[test]
fn rows_born_while_the_table_was_read_come_with_the_ring() {
    check(
        |s| {
            s.pool(3, 0, true, PoolOwner::Framework);
            s.control(Body::ResyncBegin { epoch: 1, after_seq: 1 });
            s.restate(
                1,
                Body::PoolCreate { pool: 3, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework },
            );
            // The block was read, but its segment was not.
            let block = Body::BlockAlloc { address: 0x1000, bytes: 96, pool: 3, use_as: NOTHING };
            s.tag("w").restate(3, block);
            s.control(Body::ResyncEnd { epoch: 1, head_seq: 3, rows: 2 });
            s.alloc_as(0x1000, 4096, DEV, 3);
            s.tag("w").block(0x1000, 96, 3);
        },
        &["tracked 4096 = block:w 96 + idle 4000"],
    );
}

#[test]
fn segment_of_an_allocation_for_a_pool_survives_a_resync() {
    check(
        |s| {
            s.pool(3, 0, true, PoolOwner::Framework);
            let seq = s.alloc_as(0x1000, 4096, DEV, 3);
            let block = s.tag("w").block(0x1000, 96, 3);
            s.resync(2, |s| {
                s.restate(seq, alloc_body(0x1000, 4096, 3));
                s.tag("w").restate(
                    block,
                    Body::BlockAlloc { address: 0x1000, bytes: 96, pool: 3, use_as: NOTHING },
                );
            });
        },
        &["tracked 4096 = block:w 96 + idle 4000"],
    );
}

#[test]
fn segment_said_again_with_less_is_what_is_left_of_it() {
    check(
        |s| {
            s.pool(3, 0, true, PoolOwner::Framework);
            let seq = s.tag("a").alloc(16 * MIB, 2 * MIB);
            let segment = s.segment(16 * MIB, 2 * MIB, 3);
            s.seq += 1; // lost: a part is removed
            s.watermark(0);
            s.resync(2, |s| {
                s.tag("a").restate(seq, alloc_body(16 * MIB, 2 * MIB, 0));
                s.restate(segment, Body::SegmentAdd { address: 16 * MIB, bytes: MIB, pool: 3 });
            });
        },
        &["tracked 2097152 = direct:a 1048576 + idle 1048576", "flags was_partial"],
    );
}

#[test]
fn segment_said_again_takes_nothing_of_rows_that_may_be_gone() {
    // Old memory of another device overlaps, in the books, a new segment. The ring then destroys that device's context.
    check(
        |s| {
            s.stamp.context = 2;
            s.stamp.device = 1;
            s.control(device(8));
            s.alloc(0x10_0000, 3 * MIB);
            (s.stamp.context, s.stamp.device) = (1, 0);
            s.seq += 5; // lost: it is freed, and a segment with a block is made
            let (row, segment, block) = (s.seq - 2, s.seq - 1, s.seq);
            s.watermark(0);
            s.control(Body::ResyncBegin { epoch: 1, after_seq: s.seq });
            s.tag("a").restate(row, alloc_body(0x20_0000, 4 * MIB, 0));
            s.tag("a").restate(segment, Body::SegmentAdd { address: 0x20_0000, bytes: 4 * MIB, pool: 7 });
            let body = Body::BlockAlloc { address: 0x20_0000, bytes: MIB, pool: 7, use_as: NOTHING };
            s.tag("b").restate(block, body);
            s.control(Body::ResyncEnd { epoch: 1, head_seq: s.seq + 1, rows: 3 });
            (s.stamp.context, s.stamp.device) = (2, 1);
            s.say(Body::ContextDestroy { scope: DestroyScope::Context });
        },
        &["tracked 4194304 = block:b 1048576 + idle 3145728", "flags was_partial"],
    );
}

#[test]
fn driver_pool_reserves_what_it_says_in_the_resync() {
    check(
        |s| {
            s.alloc_as(0x1000, 100, MemoryKind::StreamOrdered, 5);
            s.seq += 2; // lost: it is freed, and the pool is trimmed
            s.watermark(0);
            s.resync(1, |s| {
                s.restate(1, Body::PoolState { pool: 5, reserved_bytes: 20, used_bytes: 0, took_us: 0 });
            });
        },
        &["tracked 20 = idle 20", "flags was_partial"],
    );
}

#[test]
fn pools_that_are_not_said_again_are_gone() {
    let mut s = Script::new();
    s.pool(3, 0, true, PoolOwner::Framework);
    s.pool(4, 0, true, PoolOwner::Framework);
    s.alloc_as(0x1000, 100, MemoryKind::StreamOrdered, 5);
    s.seq += 5;
    s.watermark(0);
    s.resync(1, |s| {
        let owner = PoolOwner::Framework;
        s.restate(2, Body::PoolCreate { pool: 4, parent: 0, reports_blocks: 1, owner });
    });
    expect(&s, &["tracked 0 = 0", "flags was_partial"]);
    assert_eq!(s.account().pools.iter().map(|pool| pool.id).collect::<Vec<_>>(), [4]);
}

#[test]
fn free_whose_end_was_lost_is_over_after_a_resync() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            s.alloc(0x2000, 1);
            s.begin(0x1000);
            s.seq += 1;
            s.watermark(0);
            expect(s, &["tracked 101 = direct:- 101", "flags partial"]);
            s.resync(1, |s| s.restate(2, alloc_body(0x2000, 1, 0)));
        },
        &["tracked 1 = direct:- 1", "flags was_partial"],
    );
}

#[test]
fn failed_free_whose_end_was_lost_is_live_after_a_resync() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            s.begin(0x1000);
            s.seq += 1;
            s.watermark(0);
            s.resync(1, |s| s.restate(1, alloc_body(0x1000, 100, 0)));
            s.free(0x1000);
        },
        &["tracked 0 = 0", "flags was_partial", "peak 100 = direct:- 100"],
    );
}

#[test]
fn free_in_flight_goes_on_through_a_resync_without_loss() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            let begin = s.begin(0x1000);
            s.resync(0, |_| ());
            expect(s, &["tracked 100 = direct:- 100"]);
            s.end(begin, 0);
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn frees_that_ran_while_the_table_was_read_are_no_oddity() {
    check(
        |s| {
            s.alloc(0x1000, 100);
            s.control(Body::ResyncBegin { epoch: 1, after_seq: 1 });
            s.control(Body::ResyncEnd { epoch: 1, head_seq: 3, rows: 0 });
            s.free(0x1000); // records 2 and 3: the table was read after them
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn free_that_was_entered_while_the_table_was_read_keeps_its_bytes_until_it_returns() {
    check(
        |s| {
            let seq = s.alloc(0x1000, 100);
            s.alloc(0x2000, 30);
            s.control(Body::ResyncBegin { epoch: 1, after_seq: 2 });
            s.control(Body::ResyncEnd { epoch: 1, head_seq: 4, rows: 0 });
            let (first, second) = (s.begin(0x1000), s.begin(0x2000));
            assert_eq!((seq, first, second), (1, 3, 4));
            expect(s, &["tracked 130 = direct:- 130"]);
            s.end(first, 1); // the free failed
            s.end(second, 0);
        },
        &["tracked 100 = direct:- 100"],
    );
}

#[test]
fn free_that_began_before_the_daemon_came_ends_without_oddity() {
    check(
        |s| {
            s.seq = 10; // record 10 began the free
            s.resync(0, |_| ());
            s.end(10, 0);
        },
        &["tracked 0 = 0", "flags was_partial"],
    );
}

#[test]
fn mapping_that_was_lost_with_its_handle_is_swept() {
    check(
        |s| {
            s.create(1, MIB);
            s.map(16 * MIB, MIB, 1);
            s.seq += 4;
            s.watermark(0);
            s.resync(0, |_| ());
            s.create(1, 5);
            s.release(1);
        },
        &["tracked 0 = 0", "flags was_partial"],
    );
}

#[test]
fn rows_stay_the_same_rows_through_many_resyncs() {
    check(
        |s| {
            let seq = s.tag("a").alloc(0x1000, 100);
            for _ in 0..600 {
                s.seq += 1; // a record was lost each time
                s.resync(1, |s| s.tag("a").restate(seq, alloc_body(0x1000, 100, 0)));
            }
            s.seq += 1;
            s.resync(0, |_| ());
        },
        &["tracked 0 = 0", "flags was_partial", "peak 100 = direct:a 100"],
    );
}

#[test]
fn another_program_in_the_same_process_begins_with_nothing() {
    let hello = |instance| Body::Hello { start_ticks: 7, versions: 0, capabilities: 0, instance, claims: "" };
    let mut s = Script::new();
    s.control(hello(4));
    s.tag("old").alloc(0x1000, 100);
    s.create(0xabc, 50);
    s.pool(9, 0, true, PoolOwner::Framework);
    s.alloc_as(0x9000, 1000, DEV, 9);
    s.tag("old/block").block(0x9000, 600, 9);
    s.begin(0x1000); // exec() before the call returned
    s.control(hello(4)); // a new connection of the same program has no effect
    assert_eq!(s.process().accounts[0].tracked_bytes, 1150);
    s.control(hello(5));
    assert_eq!(s.process().accounts[0].tracked_bytes, 0);
    // The new program's ids restart and have other meanings.
    s.seq = 0;
    s.tags.clear();
    s.tag("new").alloc(0x1000, 7);
    let view = s.process();
    let account = &view.accounts[0];
    let named = |amounts: &[i64]| {
        let cells = view.cells.iter().zip(amounts).filter(|(_, bytes)| **bytes != 0);
        cells.map(|(cell, bytes)| (cell.tag.as_deref().unwrap_or("-").to_owned(), *bytes)).collect::<Vec<_>>()
    };
    assert_eq!(sum(&account.peak.amounts), 1150);
    assert!(named(&account.peak.amounts).contains(&("old/block".into(), 600)));
    assert_eq!(view.odd, Default::default());
    assert!(!view.coverage.partial_history);
    let all: Vec<_> = view.accounts.iter().flat_map(|account| named(&account.amounts)).collect();
    assert_eq!(all, [("new".to_owned(), 7)]);
}

#[test]
fn process_with_more_rows_than_it_may_have_is_partial_and_the_rest_is_right() {
    let mut s = Script::new();
    s.ledger = gpumem_ledger::Ledger::new();
    s.ledger.set_limits(gpumem_ledger::Limits { rows_per_process: 1000, ..gpumem_ledger::Limits::NONE });
    for n in 1..=5000 {
        s.alloc(n << 20, 10);
    }
    let view = s.process();
    let (events, lost) = (view.coverage.events, view.coverage.lost);
    let kept = events - lost;
    assert!(events == 5000 && (1000..2048).contains(&kept), "counted now and then: {kept}");
    assert_eq!(view.accounts[0].tracked_bytes, kept as i64 * 10);
    assert!(view.coverage.partial_state);
    (1..=kept).for_each(|n| s.free(n << 20));
    assert_eq!(s.process().accounts[0].tracked_bytes, 0);
    s.alloc(1 << 20, 10);
    assert_eq!(s.process().accounts[0].tracked_bytes, 10, "there is room again");
}

/// A process may have thousands of frees in flight, and one unmap may hold all mappings. A hostile process has both and restates
/// its rows repeatedly. A linear search took minutes, during which no other process was served.
#[test]
fn what_is_said_again_costs_the_same_whatever_is_under_way() {
    const MAPPINGS: u64 = 100_000;
    const FREES: u64 = 4_000;
    let mut s = Script::new();
    let quiet = |s: &mut Script, body: Body<'_>| {
        s.seq += 1;
        let stamp = Stamp { seq: s.seq, ..s.stamp };
        s.ledger.observe(gpumem_ledger::Origin::Process(KEY), &Record { stamp, body });
    };
    let again = |s: &mut Script, seq: u64, body: Body<'_>| {
        let stamp = Stamp { seq, flags: Flags::RESTATED, ..s.stamp };
        s.ledger.observe(gpumem_ledger::Origin::Process(KEY), &Record { stamp, body });
    };
    let mapping = |n: u64| Body::VmmMap { address: (n + 1) * MIB, bytes: MIB, handle: 1 };
    let memory = MemoryKind::Vmm;
    let create = Body::VmmCreate { handle: 1, bytes: MIB, references: 1, memory };
    quiet(&mut s, create);
    s.seq += 1; // lost, so that restated rows are booked instead of only confirmed
    let first = s.seq + 1;
    (0..MAPPINGS).for_each(|n| quiet(&mut s, mapping(n)));
    quiet(&mut s, Body::VmmUnmap { address: 0, bytes: 1 << 47 });
    let base = 1 << 48;
    (0..FREES).for_each(|n| quiet(&mut s, alloc_body(base + n * 512, 512, 0)));
    (0..FREES).for_each(|n| quiet(&mut s, Body::FreeBegin { address: base + n * 512 }));

    let start = std::time::Instant::now();
    s.control(Body::ResyncBegin { epoch: 1, after_seq: s.seq });
    again(&mut s, first - 2, create);
    for n in 0..MAPPINGS {
        again(&mut s, first + n, mapping(n));
        again(&mut s, first + MAPPINGS + 1 + n % FREES, alloc_body(base + n % FREES * 512, 512, 0));
    }
    s.control(Body::ResyncEnd { epoch: 1, head_seq: s.seq, rows: 2 * MAPPINGS + 1 });
    let took = start.elapsed();
    gpumem_test_support::bar("the resync", took, std::time::Duration::from_secs(20));
    // All calls are still in flight, and no row was bound again: only its handle holds the memory.
    expect(&s, &["tracked 3096576 = direct:- 3096576", "flags was_partial"]);
    s.end(first + MAPPINGS, 0);
    s.release(1);
    expect(&s, &["tracked 2048000 = direct:- 2048000", "flags was_partial"]);
}
