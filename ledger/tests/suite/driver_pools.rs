//! Booking rules of driver pools as short scripts.
use crate::common::*;
use gpumem_wire::*;

const STREAM: MemoryKind = MemoryKind::StreamOrdered;

#[test]
fn stream_ordered_memory_posts_the_highest_live() {
    check(
        |s| {
            s.tag("s").alloc_as(0x1000, 100, STREAM, 5);
            s.tag("s").alloc_as(0x2000, 50, STREAM, 5);
            s.free(0x1000);
        },
        &["tracked 150 = block:s 50 + idle 100", "peak 150 = block:s 150"],
    );
}

#[test]
fn polled_reservation_above_live_is_idle() {
    check(
        |s| {
            s.tag("s").alloc_as(0x1000, 100, STREAM, 5);
            s.state(5, 1000);
        },
        &["tracked 1000 = block:s 100 + idle 900"],
    );
}

#[test]
fn polled_reservation_below_live_is_not_believed() {
    check(
        |s| {
            s.tag("s").alloc_as(0x1000, 100, STREAM, 5);
            s.state(5, 30);
            expect(s, &["tracked 100 = block:s 100"]);
            s.free(0x1000);
            s.state(5, 30);
        },
        &["tracked 30 = idle 30"],
    );
}

#[test]
fn destroyed_driver_pool_lives_until_its_last_allocation() {
    check(
        |s| {
            s.pool(5, 0, false, PoolOwner::Driver);
            s.tag("s").alloc_as(0x1000, 100, STREAM, 5);
            s.state(5, 1000);
            s.say(Body::PoolDestroy { pool: 5 });
            expect(s, &["tracked 1000 = block:s 100 + idle 900"]); // and keeps all of its reserved bytes
            assert_eq!(s.account().pools.len(), 1, "it has an allocation still");
            s.free(0x1000);
            assert_eq!(s.account().pools.len(), 0);
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn driver_pool_number_is_used_again_while_old_allocations_live() {
    check(
        |s| {
            s.pool(5, 0, false, PoolOwner::Driver);
            s.tag("old").alloc_as(0x1000, 100, STREAM, 5);
            s.say(Body::PoolDestroy { pool: 5 });
            s.pool(5, 0, false, PoolOwner::Driver);
            s.tag("new").alloc_as(0x2000, 30, STREAM, 5);
            s.state(5, 40);
            expect(s, &["tracked 140 = block:new 30 + block:old 100 + idle 10"]);
            s.free(0x1000);
        },
        &["tracked 40 = block:new 30 + idle 10"],
    );
}

#[test]
fn unknown_pool_end_is_counted() {
    check(
        |s| {
            s.alloc(0x1000, 1);
            s.say(Body::PoolDestroy { pool: 77 });
            s.unblock(0x1000, 77);
        },
        &["tracked 1 = direct:- 1", "odd unknown_frees 1 unknown_handles 1"],
    );
}

#[test]
fn what_graphs_use_has_no_name_and_is_not_idle() {
    check(
        |s| {
            let graphs = |reserved_bytes, used_bytes| Body::PoolState {
                pool: 7,
                reserved_bytes,
                used_bytes,
                took_us: 0,
            };
            s.pool(7, 0, false, PoolOwner::Graph);
            s.say(graphs(1000, 300));
            expect(s, &["tracked 1000 = idle 700 + opaque 300"]);
            s.say(graphs(1000, 0));
            expect(s, &["tracked 1000 = idle 1000"]);
            s.say(graphs(500, 200));
            s.say(Body::ContextDestroy { scope: DestroyScope::Device });
        },
        &["tracked 0 = 0", "peak 1000 = idle 700 + opaque 300"],
    );
}
