//! Booking rules of virtual memory management as short scripts.
use crate::common::*;
use gpumem_wire::*;

#[test]
fn vmm_released_before_unmapped_lives_until_the_unmap() {
    check(
        |s| {
            s.tag("v").create(1, 100);
            s.map(0x10_0000, 100, 1);
            s.release(1);
            expect(s, &["tracked 100 = direct:v 100"]);
            s.unmap(0x10_0000, 100);
        },
        &["tracked 0 = 0", "peak 100 = direct:v 100"],
    );
}

#[test]
fn vmm_unmapped_before_released_lives_until_the_release() {
    check(
        |s| {
            s.tag("v").create(1, 100);
            s.map(0x10_0000, 100, 1);
            s.unmap(0x10_0000, 100);
            expect(s, &["tracked 100 = direct:v 100"]);
            s.release(1);
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn vmm_retained_handle_needs_two_releases() {
    check(
        |s| {
            s.create(1, 100);
            s.map(0x10_0000, 100, 1);
            s.say(Body::VmmRetain { handle: 1, address: 0x10_0010 });
            s.unmap(0x10_0000, 100);
            s.release(1);
            expect(s, &["tracked 100 = direct:- 100"]);
            s.release(1);
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn vmm_retain_binds_a_released_handle_again() {
    check(
        |s| {
            s.create(1, 100);
            s.map(0x10_0000, 100, 1);
            s.release(1);
            s.say(Body::VmmRetain { handle: 8, address: 0x10_0000 });
            s.unmap(0x10_0000, 100);
            expect(s, &["tracked 100 = direct:- 100"]);
            s.release(8);
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn vmm_one_unmap_takes_two_neighbours() {
    check(
        |s| {
            s.create(1, 100);
            s.create(2, 200);
            s.map(0x10_0000, 0x1000, 1);
            s.map(0x10_1000, 0x1000, 2);
            s.release(1);
            s.release(2);
            s.unmap(0x10_0000, 0x2000);
        },
        &["tracked 0 = 0", "peak 300 = direct:- 300"],
    );
}

#[test]
fn vmm_failed_release_and_unmap_change_nothing() {
    check(
        |s| {
            s.create(1, 100);
            s.map(0x10_0000, 100, 1);
            let unmap = s.say(Body::VmmUnmap { address: 0x10_0000, bytes: 100 });
            s.end(unmap, 1);
            let release = s.say(Body::VmmRelease { handle: 1 });
            s.end(release, 1);
            s.release(1);
            expect(s, &["tracked 100 = direct:- 100"]);
            s.unmap(0x10_0000, 100);
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn vmm_handle_number_is_used_again_while_its_release_runs() {
    check(
        |s| {
            s.tag("old").create(1, 100);
            let release = s.say(Body::VmmRelease { handle: 1 });
            s.tag("new").create(1, 30);
            s.end(release, 0);
            expect(s, &["tracked 30 = direct:new 30"]);
            s.release(1);
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn vmm_mapped_twice_counts_once() {
    check(
        |s| {
            s.create(1, 100);
            s.map(0x10_0000, 100, 1);
            s.map(0x20_0000, 100, 1);
            s.release(1);
            s.unmap(0x10_0000, 100);
            expect(s, &["tracked 100 = direct:- 100"]);
            s.unmap(0x20_0000, 100);
        },
        &["tracked 0 = 0"],
    );
}

#[test]
fn vmm_unknown_handles_are_counted() {
    check(
        |s| {
            s.map(0x10_0000, 100, 99);
            s.say(Body::VmmRetain { handle: 98, address: 0x77 });
            let release = s.say(Body::VmmRelease { handle: 97 });
            s.end(release, 0);
            s.alloc(0x1000, 1);
        },
        &["tracked 1 = direct:- 1", "odd unknown_frees 1 unknown_handles 2"],
    );
}
