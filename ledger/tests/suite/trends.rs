//! Memory that remains from step to step and over time, as the ledger records it.

use crate::common::{KEY, MIB, Script};
use gpumem_ledger::{Class, TrendView};
use gpumem_wire::*;

const SECOND: u64 = 1_000_000_000;

fn trend(s: &Script) -> TrendView {
    s.ledger.trend(KEY, 0)
}

/// Cells with points, by tag.
fn by_tag(s: &Script, cells: &[(u32, Vec<i64>)]) -> Vec<(String, Vec<i64>)> {
    let names = s.process().cells;
    let name = |cell: u32| names[cell as usize].tag.as_deref().unwrap_or("-").to_owned();
    cells.iter().map(|(cell, points)| (name(*cell), points.clone())).collect()
}

#[test]
fn a_step_holds_what_it_did_not_give_back() {
    let mut s = Script::new();
    s.tag("weights").alloc(1, 1000);
    for step in 0..5_u64 {
        s.say(Body::Step { number: 100 + step });
        s.tag("activation").alloc(2, 777);
        s.tag("cache").alloc(10 + step, 10);
        s.free(2);
    }
    s.say(Body::Step { number: 105 });
    let steps = trend(&s).steps;
    assert_eq!(steps.points.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(steps.named, [1000, 1010, 1020, 1030, 1040, 1050]);
    assert_eq!(steps.slack, [0; 6]);
    assert_eq!(by_tag(&s, &steps.cells), [("cache".to_owned(), vec![0, 10, 20, 30, 40, 50])]);
}

#[test]
fn what_pools_keep_in_reserve_is_told_apart() {
    let mut s = Script::new();
    s.pool(7, 0, true, PoolOwner::Framework);
    for step in 0..3_u64 {
        let address = (step + 1) << 30;
        s.alloc(address, 100);
        s.segment(address, 100, 7);
        s.tag("leak").block(address, 10, 7);
        s.say(Body::Step { number: step });
    }
    let steps = trend(&s).steps;
    assert_eq!((steps.named, steps.slack), (vec![10, 20, 30], vec![90, 180, 270]));
}

#[test]
fn without_steps_points_come_as_time_passes() {
    let mut s = Script::new();
    for second in 0..100 {
        s.at(second * SECOND).tag("cache").alloc(100 + second, 1);
        s.at(second * SECOND + SECOND / 2).tag("request").alloc(1, 50);
        s.free(1);
    }
    let times = trend(&s).times;
    assert_eq!((times.stride, times.points.len()), (2, 50));
    let cache = by_tag(&s, &times.cells).into_iter().find(|(tag, _)| tag == "cache").expect("it changes").1;
    assert!(cache.windows(2).all(|pair| pair[1] - pair[0] == 2), "{cache:?}");
    assert!(trend(&s).steps.points.is_empty());
    // No more records: samples provide the book.
    for second in 100..128 {
        s.sample(second * SECOND, second * SECOND + 100, 5000);
        s.watermark(0);
    }
    assert_eq!(trend(&s).times.latest.0, 127);
}

#[test]
fn who_asks_in_between_changes_nothing() {
    let told = |asks: bool| {
        let mut s = Script::new();
        for number in 0..2000_u64 {
            let taken = 1 + number % 40;
            s.at(number * SECOND / 97).tag("request").alloc(1, taken * MIB);
            s.at(number * SECOND / 97 + SECOND / 200).free(1);
            s.tag("cache").alloc(100 + number, 1);
            if asks && number % 7 == 3 {
                s.ledger.end_windows();
            }
        }
        trend(&s)
    };
    let alone = told(false);
    assert!(alone.times.points.len() > 10);
    assert_eq!(told(true), alone, "a replay is not asked when a daemon was");
}

#[test]
fn the_gap_is_looked_at_where_it_is_beyond_doubt() {
    let mut s = Script::new();
    s.tag("a").alloc(1, MIB);
    for second in 1..6 {
        s.sample(second * SECOND, second * SECOND + 100, MIB + 100 * second);
        s.at(second * SECOND + 200).watermark(0);
    }
    // Memory changes while NVML is read.
    s.sample_begin(6 * SECOND);
    s.listed(KEY.pid, Some(9 * MIB));
    s.at(6 * SECOND + 10).tag("a").alloc(2, MIB);
    s.sample_end(6 * SECOND, 6 * SECOND + 100);
    s.at(6 * SECOND + 200).watermark(0);
    let found = trend(&s);
    let expected: Vec<(u64, i64)> = (1..6).map(|second| (second * SECOND, 100 * second as i64)).collect();
    assert_eq!((found.gap, found.used), (expected, Vec::new()));
}

#[test]
fn without_an_agent_used_is_all_there_is() {
    let mut s = Script::new();
    for second in 1..4 {
        s.sample_begin(second * SECOND);
        s.host_as(
            9,
            Body::ProcessSample {
                start_ticks: 7,
                used_bytes: Reading::of(second * MIB),
                absence: Absence::Unknown,
                lists: 1,
            },
        );
        s.sample_end(second * SECOND, second * SECOND + 100);
    }
    let key = gpumem_ledger::ProcessKey { pid: 9, start_ticks: 7 };
    let found = s.ledger.trend(key, 0);
    assert_eq!(found.used.last(), Some(&(3 * SECOND, 3 * MIB as i64)));
    assert!(found.gap.is_empty() && found.times.points.is_empty());
}

#[test]
fn nothing_is_looked_at_while_the_state_is_not_known() {
    let mut s = Script::new();
    s.tag("a").alloc(1, 10);
    for number in 0..3 {
        s.say(Body::Step { number });
    }
    s.seq += 5; // records are lost, two steps among them
    s.say(Body::Step { number: 5 });
    s.say(Body::Step { number: 6 });
    assert_eq!(trend(&s).steps.points.len(), 3);
    s.resync(1, |s| {
        s.tag("a").restate(
            1,
            Body::AllocEnd { address: 1, bytes: 10, pool: 0, took_us: 0, memory: MemoryKind::Device },
        );
    });
    s.say(Body::Step { number: 7 });
    let steps = trend(&s).steps;
    assert_eq!(steps.points.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 1, 2, 7]);
    assert_eq!(steps.named, [10; 4]);
}

#[test]
fn another_program_in_the_process_begins_anew() {
    let mut s = Script::new();
    let hello = |instance| Body::Hello { start_ticks: 7, versions: 0, capabilities: 0, instance, claims: "" };
    s.control(hello(1));
    s.tag("a").alloc(1, 10);
    s.say(Body::Step { number: 0 });
    s.control(hello(2));
    assert!(trend(&s).steps.points.is_empty());
    s.seq = 0;
    s.say(Body::Step { number: 0 });
    assert_eq!(trend(&s).steps.named, [0]);
    assert!(s.process().cells.iter().any(|cell| cell.class == Class::Direct));
}

/// A request on the host's side, pinned memory that stays, and a module that is called with each request.
#[test]
fn forward_passes_are_counted_and_pinned_memory_has_points() {
    let mut s = Script::new();
    s.pool(7, 0, true, PoolOwner::Framework);
    s.alloc(1 << 40, 1 << 30);
    s.segment(1 << 40, 1 << 30, 7);
    s.stamp.thread = 1;
    s.say(Body::PhaseBegin { phase: Phase::Setup });
    s.say(Body::PhaseBegin { phase: Phase::Forward });
    let place = |number: u64| (1 << 40) + number * MIB;
    let born = |s: &mut Script, number: u64, bytes: u64, phase: Phase| {
        s.say(Body::BlockAlloc { address: place(number), bytes, pool: 7, use_as: (Role::Unknown, phase) });
    };
    for pass in 0..4_u64 {
        let (memory, took_us) = (MemoryKind::Pinned, 0);
        s.say(Body::AllocEnd { address: (1 << 50) + (pass << 20), bytes: 1000, pool: 0, took_us, memory });
        born(&mut s, 0, 10, Phase::Between);
        born(&mut s, 1, 5, Phase::Evaluation);
        born(&mut s, 2 + pass, 100, Phase::Evaluation);
        s.unblock(place(1), 7);
        s.unblock(place(0), 7);
    }
    let passes = trend(&s).passes;
    assert_eq!(passes.points.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(passes.named, [15, 115, 215, 315]);
    assert_eq!(passes.pinned, [1000, 2000, 3000, 4000]);
    let cells = trend(&s).growth().pinned_cells;
    assert_eq!(cells, [], "the points by time are too few");
    assert!(matches!(trend(&s).pinned_cells[..], [(_, 4000)]));
    assert!(matches!(passes.early_pinned_cells[..], [(_, 2000)]), "{:?}", passes.early_pinned_cells);
}

#[test]
fn cells_with_pinned_memory_add_up_to_it_at_each_record() {
    let mut s = Script::new();
    let add_up = |s: &Script, cells: &[(&str, i64)]| {
        let names = s.process().cells;
        let name = |cell: u32| names[cell as usize].tag.as_deref().unwrap_or("-");
        let found = trend(s).pinned_cells;
        assert_eq!(found.iter().map(|(cell, bytes)| (name(*cell), *bytes)).collect::<Vec<_>>(), cells);
        let sum: i64 = cells.iter().map(|(_, bytes)| bytes).sum();
        assert_eq!(s.account().beside.pinned_bytes, sum);
    };
    let pin = |s: &mut Script, address, bytes| s.alloc_as(address, bytes, MemoryKind::Pinned, 0);
    let loader = pin(s.tag("loader"), 1, 1000);
    pin(s.tag("cache"), 2, 300);
    s.tag("weights").alloc(3, 5000);
    add_up(&s, &[("loader", 1000), ("cache", 300)]);
    // A retag moves the bytes to another cell.
    let use_as = (Role::Unknown, Phase::Unknown);
    s.tag("cache").say(Body::Retag { address: 1, block_seq: loader, pool: 0, use_as });
    add_up(&s, &[("cache", 1000), ("cache", 300)]);
    // Memory is pinned until its free has ended.
    let free = s.begin(1);
    add_up(&s, &[("cache", 1000), ("cache", 300)]);
    s.end(free, 0);
    add_up(&s, &[("cache", 300)]);
    s.free(2);
    add_up(&s, &[]);
}
