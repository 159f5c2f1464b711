//! Rules of the allocator, each in a few requests, and amounts that must agree after any events.

use gpumem_replay::{
    Device, Event, EventReturn, Figures, Options, PoolKind, Release, Replay, SegmentAddresses, Settings,
};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn options(text: &str, minor: u16) -> Options {
    let release = Release::new(minor);
    Options {
        release,
        settings: Settings::parse(text, release).expect("a valid text"),
        fraction: None,
        device: Device { total_bytes: 1024 * MIB, other_bytes: 0 },
        addresses: SegmentAddresses::LowestFree,
        returns: EventReturn::AsRecorded,
    }
}

fn request(id: u64, bytes: u64) -> Event {
    Event::Request { id, bytes, stream: 0, pool: 0, has_failed: false }
}

fn free(id: u64) -> Event {
    Event::Free { id, is_pending: false }
}

fn run(options: Options, events: &[Event]) -> Figures {
    let mut replay = Replay::new(options);
    events.iter().for_each(|event| replay.apply(event).expect("a valid event"));
    replay.figures().clone()
}

#[test]
fn segments_have_the_sizes_of_their_pools() {
    let reserved = |bytes| run(options("", 15), &[request(1, bytes)]).reserved.now;
    assert_eq!([reserved(1), reserved(MIB), reserved(MIB + 1)], [2 * MIB, 2 * MIB, 20 * MIB]);
    assert_eq!(
        [reserved(10 * MIB - 1), reserved(10 * MIB), reserved(11 * MIB)],
        [10 * MIB, 10 * MIB, 12 * MIB]
    );
    let reserved = |bytes| run(options("large_segment_size_mb:64", 15), &[request(1, bytes)]).reserved.now;
    assert_eq!([reserved(MIB + 1), reserved(11 * MIB)], [64 * MIB, 12 * MIB]);
}

#[test]
fn rest_of_exactly_one_mebibyte_is_not_split() {
    let allocated =
        |bytes| run(options("", 15), &[request(1, 30 * MIB), free(1), request(2, bytes)]).allocated.now;
    assert_eq!(allocated(29 * MIB), 30 * MIB);
    assert_eq!(allocated(29 * MIB - 512), 29 * MIB - 512);
}

#[test]
fn expandable_segments_map_what_is_missing() {
    let events = [request(1, 30 * MIB), free(1), request(2, 50 * MIB)];
    let figures = run(options("expandable_segments:True", 15), &events);
    assert_eq!((figures.reserved.now, figures.device_allocs), (60 * MIB, 2));
    assert_eq!(run(options("", 15), &events).reserved.now, 80 * MIB);
    let emptied = [&events[..], &[Event::EmptyCache { pool: None }]].concat();
    let figures = run(options("expandable_segments:True", 15), &emptied);
    assert_eq!(
        (figures.reserved.now, figures.device_frees),
        (60 * MIB, 0),
        "a page that is used in part stays"
    );
}

#[test]
fn request_beyond_a_range_leaves_unused_ranges_up_to_2_14() {
    let beyond = Event::Request { id: 9, bytes: 2048 * MIB, stream: 0, pool: 0, has_failed: true };
    let empty = Event::EmptyCache { pool: None };
    // The first range ends. Up to 2.14, the second failure leaves a range at its place, below the range of request 2, so the pages of
    // the requests 2 and 3 are apart.
    let first = [request(1, 20 * MIB), beyond.clone(), free(1), empty];
    let rest = [request(2, 20 * MIB), beyond, request(3, 20 * MIB), free(2), free(3), request(4, 40 * MIB)];
    let events = [&first[..], &rest].concat();
    let mappings = |minor| run(options("expandable_segments:True", minor), &events).device_allocs;
    assert_eq!((mappings(15), mappings(14)), (3, 4));
}

#[test]
fn fraction_of_the_program_does_not_change_what_is_rejected() {
    let text = "per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True";
    let events = [request(1, 400 * MIB), free(1), request(2, 500 * MIB)];
    let figures = run(Options { fraction: Some(0.9), ..options(text, 15) }, &events);
    assert_eq!((figures.ooms, figures.retries), (1, 0), "rejected above the fraction of the text");
    let figures = run(options(text, 15), &events);
    assert_eq!((figures.ooms, figures.retries), (0, 1), "released first");
}

#[test]
fn request_is_retried_after_everything_free_is_released() {
    let events = [request(1, 600 * MIB), free(1), request(2, 700 * MIB)];
    let figures = run(options("", 15), &events);
    assert_eq!((figures.reserved.now, figures.retries, figures.ooms), (700 * MIB, 1, 0));
    let kept = [request(0, 400 * MIB), request(1, 600 * MIB), free(1), request(2, 700 * MIB), request(3, 1)];
    let figures = run(options("", 15), &kept);
    let failure = figures.failure.expect("a failure");
    assert_eq!((failure.event, failure.rounded_bytes, failure.reserved_bytes), (3, 700 * MIB, 400 * MIB));
    assert_eq!(
        (figures.retries, figures.ooms, figures.allocated.now),
        (1, 1, 400 * MIB),
        "nothing after it counts"
    );
}

#[test]
fn memory_that_another_stream_uses_is_free_when_it_returns() {
    let pending = Event::Free { id: 1, is_pending: true };
    let events = [
        request(1, 100 * MIB),
        pending,
        request(2, 100 * MIB),
        Event::Return { id: 1 },
        request(3, 100 * MIB),
    ];
    let with = |returns| {
        let figures = run(Options { returns, ..options("", 15) }, &events);
        (figures.reserved.now / MIB, figures.active.now / MIB)
    };
    assert_eq!(with(EventReturn::AsRecorded), (200, 200));
    assert_eq!(with(EventReturn::AtOnce), (200, 200));
    assert_eq!(with(EventReturn::AtSynchronisation), (300, 300));
}

#[test]
fn private_pools_keep_their_segments_until_they_end() {
    let of_pool = |id| Event::Request { id, bytes: 30 * MIB, stream: 0, pool: 7, has_failed: false };
    let begin = Event::PoolBegins { pool: 7, kind: PoolKind::Graph };
    let events = [begin, of_pool(1), free(1), Event::EmptyCache { pool: None }, request(2, 30 * MIB)];
    assert_eq!(run(options("", 15), &events).reserved.now, 60 * MIB);
    let ended = [&events[..], &[Event::PoolEnds { pool: 7 }, Event::EmptyCache { pool: None }]].concat();
    assert_eq!(run(options("", 15), &ended).reserved.now, 30 * MIB);
}

/// The same program ran on the wheels of 2.12.1 and 2.15.0.
#[test]
fn empty_cache_within_a_pool_keeps_the_default_pool_up_to_2_12() {
    let kind = PoolKind::User { has_own_allocator: false, no_split: false, use_on_oom: false };
    let pool = 7;
    let empty = || Event::EmptyCache { pool: None };
    let events = [
        Event::PoolBegins { pool, kind },
        request(1, 30 * MIB),
        free(1),
        Event::ScopeBegins { pool },
        empty(),
        Event::ScopeEnds { pool },
    ];
    assert_eq!([12, 13].map(|minor| run(options("", minor), &events).device_frees), [0, 1]);
    assert_eq!(run(options("", 12), &[&events[..], &[empty()]].concat()).device_frees, 1);
}

/// The same program ran on the wheels of 2.9.1, 2.10.0, 2.12.1 and 2.15.0.
#[test]
fn pools_for_shortage_serve_the_default_pool_as_the_release_does() {
    let of = |pool, id, bytes| Event::Request { id, bytes, stream: 0, pool, has_failed: false };
    let pool = |pool, use_on_oom| {
        let kind = PoolKind::User { has_own_allocator: false, no_split: false, use_on_oom };
        Event::PoolBegins { pool, kind }
    };
    let cached =
        [pool(1, true), pool(2, false), of(1, 1, 600 * MIB), free(1), request(2, 300 * MIB), free(2)];
    let with = |minor, text, last: &[Event]| {
        let figures = run(options(text, minor), &[&cached[..], last].concat());
        (figures.retries, figures.ooms, figures.reserved.now / MIB)
    };
    let large = [request(3, 200 * MIB), request(4, 500 * MIB)];
    assert_eq!([10, 11].map(|minor| with(minor, "", &large)), [(1, 0, 900), (0, 0, 900)]);
    assert_eq!([9, 10].map(|minor| with(minor, "expandable_segments:True", &large).1), [0, 1]);
    assert_eq!(with(15, "", &[of(2, 3, 500 * MIB)]).1, 1, "another pool's request");
}

#[test]
fn failed_request_of_the_recording_may_be_served() {
    let failed = Event::Request { id: 9, bytes: 100 * MIB, stream: 0, pool: 0, has_failed: true };
    let mut replay = Replay::new(options("", 15));
    replay.apply(&failed).expect("valid");
    assert!(replay.serves_recorded_failure() && replay.has_ended());
    let mut replay =
        Replay::new(Options { device: Device { total_bytes: 64 * MIB, other_bytes: 0 }, ..options("", 15) });
    replay.apply(&failed).expect("valid");
    replay.apply(&request(1, MIB)).expect("valid");
    assert_eq!((replay.has_ended(), replay.figures().ooms, replay.figures().allocated.now), (false, 1, MIB));
}

#[test]
fn driver_pool_has_at_least_the_live_requests() {
    let device = Device { total_bytes: 1024 * MIB, other_bytes: 200 * MIB };
    let graph = Event::Request { id: 7, bytes: 500 * MIB, stream: 0, pool: 1, has_failed: false };
    let pending = Event::Free { id: 1, is_pending: true };
    let events = [request(1, 300 * MIB + 1), graph, pending, request(2, 400 * MIB), request(3, 100 * MIB)];
    let with = |text| run(Options { device, ..options(text, 15) }, &events);
    let figures = with("backend:cudaMallocAsync");
    assert_eq!((figures.reserved.peak, figures.allocated.now, figures.ooms), (500 * MIB, 500 * MIB, 0));
    // PyTorch compares all requests with the process's share, those of graphs included.
    let figures = with("backend:cudaMallocAsync,per_process_memory_fraction:0.9");
    assert_eq!(figures.failure.map(|failure| (failure.event, failure.rounded_bytes)), Some((4, 100 * MIB)));
    let more = [&events[..], &[request(4, 400 * MIB), request(5, 1)]].concat();
    let figures = run(Options { device, ..options("backend:cudaMallocAsync", 15) }, &more);
    assert_eq!((figures.ooms, figures.reserved.now), (1, 500 * MIB), "more than the rest of the device");
}

fn settings() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(vec![
        "",
        "expandable_segments:True",
        "max_split_size_mb:32",
        "roundup_power2_divisions:4",
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.3",
        "expandable_segments:True,per_process_memory_fraction:0.2,max_split_size_mb:24",
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// After any events: live blocks are what is allocated, and everything is given back at the end.
    #[test]
    fn amounts_agree_after_any_events(
        text in settings(),
        actions in proptest::collection::vec((0_u8..10, 0_u64..40, 1_u64..(1 << 25), 0_u32..3, 0_u32..3), 1..400),
    ) {
        let mut replay = Replay::new(options(text, 15));
        let mut live = std::collections::BTreeMap::new();
        let mut pending = Vec::new();
        for (action, id, bytes, stream, pool) in actions {
            let event = match action {
                0..=4 if !live.contains_key(&id) && !pending.contains(&id) => {
                    live.insert(id, bytes);
                    Event::Request { id, bytes, stream, pool, has_failed: false }
                }
                5..=7 if live.remove(&id).is_some() => {
                    let is_pending = action == 7;
                    pending.extend(is_pending.then_some(id));
                    Event::Free { id, is_pending }
                }
                8 if !pending.is_empty() => Event::Return { id: pending.remove(0) },
                9 if id == 0 => Event::EmptyCache { pool: None },
                _ => continue,
            };
            replay.apply(&event).expect("valid");
            let figures = replay.figures();
            prop_assert!(figures.allocated.now <= figures.active.now && figures.active.now <= figures.reserved.now);
            prop_assert!(figures.requested.now <= figures.active.now);
            prop_assert!(figures.reserved.now <= 1024 * MIB);
            if replay.has_ended() {
                return Ok(());
            }
            prop_assert!(live.values().sum::<u64>() <= figures.allocated.now);
        }
        for (id, _) in live {
            replay.apply(&free(id)).expect("valid");
        }
        for pool in 1..3 {
            replay.apply(&Event::PoolEnds { pool }).expect("valid");
        }
        replay.apply(&Event::EmptyCache { pool: None }).expect("valid");
        let figures = replay.figures();
        prop_assert_eq!([figures.reserved.now, figures.allocated.now, figures.active.now, figures.segments.now], [0; 4]);
        prop_assert_eq!(figures.device_frees > 0, figures.device_allocs > 0);
    }
}
