//! Peaks, their composition, and retags that correct it, as short scripts.
use crate::common::*;
use gpumem_wire::*;

const STREAM: MemoryKind = MemoryKind::StreamOrdered;

/// An allocation of 4096 bytes at 0x1000 that is a segment of pool 3.
fn with_segment(s: &mut Script) {
    s.pool(3, 0, true, PoolOwner::Framework);
    s.tag("a").alloc(0x1000, 4096);
    s.segment(0x1000, 4096, 3);
}

#[test]
fn retag_keeps_the_first_tag_as_origin() {
    check(
        |s| {
            let seq = s.tag("first").alloc(0x1000, 100);
            s.tag("second").retag(0x1000, 0, seq, Role::Parameter);
            s.tag("third").retag(0x1000, 0, seq, Role::Unknown);
        },
        &["tracked 100 = direct:third<first@Parameter 100", "peak 100 = direct:third<first@Parameter 100"],
    );
}

#[test]
fn retag_of_a_freed_row_corrects_the_peak_only() {
    check(
        |s| {
            let seq = s.tag("a").alloc(0x1000, 100);
            s.free(0x1000);
            s.tag("a").alloc(0x1000, 10);
            s.retag(0x1000, 0, seq, Role::Gradient);
        },
        &["tracked 10 = direct:a 10", "peak 100 = direct:a@Gradient 100"],
    );
}

#[test]
fn retag_of_a_row_that_the_peak_does_not_hold_leaves_the_peak() {
    check(
        |s| {
            s.tag("a").alloc(0x1000, 100);
            s.free(0x1000);
            let seq = s.tag("b").alloc(0x1000, 10);
            s.retag(0x1000, 0, seq, Role::Gradient);
            s.free(0x1000);
            s.retag(0x1000, 0, seq, Role::Parameter);
            s.alloc(0x1000, 1);
        },
        &["tracked 1 = direct:- 1", "peak 100 = direct:a 100"],
    );
}

#[test]
fn retag_of_a_vmm_handle_by_its_seq() {
    check(
        |s| {
            let seq = s.tag("v").create(1, 100);
            s.retag(0, 0, seq, Role::Workspace);
        },
        &["tracked 100 = direct:v@Workspace 100", "peak 100 = direct:v@Workspace 100"],
    );
}

#[test]
fn peak_holds_the_composition_of_its_own_moment() {
    check(
        |s| {
            s.tag("a").alloc(0x1000, 100);
            s.tag("b").alloc(0x2000, 50);
            s.free(0x1000);
            s.tag("c").alloc(0x3000, 20);
            s.free(0x2000);
        },
        &["tracked 20 = direct:c 20", "peak 150 = direct:a 100 + direct:b 50"],
    );
}

#[test]
fn retag_of_a_block_moves_now_and_peak() {
    check(
        |s| {
            with_segment(s);
            let seq = s.tag("w").block(0x1000, 96, 3);
            s.tag("x").retag(0x1000, 3, seq, Role::Parameter);
        },
        &[
            "tracked 4096 = block:x<w@Parameter 96 + idle 4000",
            "peak 4096 = block:x<w@Parameter 96 + idle 4000",
        ],
    );
}

#[test]
fn retag_of_a_freed_block_does_not_touch_the_new_block_at_its_address() {
    check(
        |s| {
            with_segment(s);
            let seq = s.tag("w").block(0x1000, 96, 3);
            s.unblock(0x1000, 3);
            s.tag("new").block(0x1000, 50, 3);
            s.retag(0x1000, 3, seq, Role::Gradient);
        },
        &["tracked 4096 = block:new 50 + idle 4046", "peak 4096 = block:w@Gradient 96 + idle 4000"],
    );
}

#[test]
fn retag_of_a_stream_ordered_allocation() {
    check(
        |s| {
            let seq = s.tag("w").alloc_as(0x1000, 96, STREAM, 5);
            s.retag(0x1000, 5, seq, Role::Workspace);
        },
        &["tracked 96 = block:w@Workspace 96"],
    );
}

#[test]
fn retag_of_an_allocation_under_a_segment_names_what_the_segment_left() {
    check(
        |s| {
            s.pool(3, 0, true, PoolOwner::Framework);
            let seq = s.tag("a").alloc(16 * MIB, 2 * MIB);
            s.segment(16 * MIB, MIB, 3);
            s.retag(16 * MIB, 0, seq, Role::Workspace);
        },
        &[
            "tracked 2097152 = direct:a@Workspace 1048576 + idle 1048576",
            "peak 2097152 = direct:a@Workspace 1048576 + idle 1048576",
        ],
    );
}

#[test]
fn peak_prefers_the_moment_with_least_idle_among_equals() {
    check(
        |s| {
            with_segment(s);
            s.tag("w").block(0x1000, 1000, 3);
            s.tag("w").block(0x1800, 500, 3);
            s.unblock(0x1000, 3);
            s.tag("x").block(0x1000, 1000, 3); // equally full but later: the first moment stays
        },
        &["tracked 4096 = block:w 500 + block:x 1000 + idle 2596", "peak 4096 = block:w 1500 + idle 2596"],
    );
}

#[test]
fn who_takes_leave_of_a_segment_fills_nothing_by_that() {
    check(
        |s| {
            with_segment(s);
            s.tag("w").block(0x1000, 1000, 3);
            s.unblock(0x1000, 3);
            s.unsegment(0x1000, 4096, 3);
        },
        &["tracked 4096 = direct:a 4096", "peak 4096 = block:w 1000 + idle 3096"],
    );
    // Freed memory no longer counts as given up by its segments.
    check(
        |s| {
            with_segment(s);
            s.unsegment(0x1000, 4096, 3);
            s.free(0x1000);
            s.tag("b").alloc(0x8000, 4096);
        },
        &["tracked 4096 = direct:b 4096", "peak 4096 = direct:b 4096"],
    );
}

#[test]
fn segment_added_twice_is_renamed_at_the_peak_once() {
    check(
        |s| {
            with_segment(s);
            s.tag("b").alloc(0x8000, 10);
            s.free(0x8000);
            s.unsegment(0x1000, 4096, 3);
            s.segment(0x1000, 4096, 3);
        },
        &["tracked 4096 = idle 4096", "peak 4106 = direct:b 10 + idle 4096"],
    );
}

#[test]
fn retag_after_the_segment_is_gone_leaves_what_was_idle_at_the_peak() {
    check(
        |s| {
            s.pool(3, 0, true, PoolOwner::Framework);
            let seq = s.tag("a").alloc(0x1000, 4096);
            s.segment(0x1000, 4096, 3);
            s.tag("b").alloc(0x8000, 10);
            s.free(0x8000);
            s.unsegment(0x1000, 4096, 3);
            s.retag(0x1000, 0, seq, Role::Buffer);
        },
        &["tracked 4096 = direct:a@Buffer 4096", "peak 4106 = direct:b 10 + idle 4096"],
    );
}
