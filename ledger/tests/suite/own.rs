//! Data that a program reports apart from memory: counters, ranges and steps.

use crate::common::{KEY, Script};
use gpumem_ledger::{MAX_COUNTERS, MAX_SPANS_OF_FILE};
use gpumem_model::program_data::{ProgramData, Span};
use gpumem_wire::{Body, Edge, Stamp};

fn own(script: &Script) -> ProgramData {
    script.ledger.own(KEY)
}

#[test]
fn counters_have_names_and_are_weighted_by_time() {
    let mut script = Script::new();
    script.tag("batch").say(Body::Counter { value: 16 }); // at 10
    script.say(Body::Step { number: 1 });
    script.tag("scale").say(Body::Counter { value: -3 }); // at 30
    script.tag("batch").say(Body::Counter { value: 64 }); // at 40
    script.say(Body::Step { number: 2 }); // at 50
    let own = own(&script);
    let told = |at: usize| {
        let counter = &own.counters[at];
        let lasted = i128::from(counter.until_ns - counter.since_ns);
        let numbers = [counter.value, counter.changes as i64, counter.min, counter.max];
        (counter.name.as_deref(), numbers, counter.area, lasted)
    };
    assert_eq!(told(0), (Some("batch"), [64, 2, 16, 64], 16 * 30 + 64 * 10, 40));
    assert_eq!(told(1), (Some("scale"), [-3, 1, -3, -3], -3 * 20, 20));
    assert_eq!(own.counters[0].points, [(10, 16), (40, 64)]);
    let [steps] = own.ranges.as_slice() else { panic!("{:?}", own.ranges) };
    assert_eq!((steps.is_step, steps.count, steps.total_ns, steps.open), (true, 1, 30, 1));
}

#[test]
fn scopes_have_times_and_memory_is_not_moved_by_them() {
    let mut script = Script::new();
    script.tag("a").say(Body::Scope { edge: Edge::Begin }); // at 10
    script.alloc(1, 100);
    script.tag("a/b").say(Body::Scope { edge: Edge::Begin }); // at 30
    script.tag("a/b").say(Body::Scope { edge: Edge::End });
    script.tag("a").say(Body::Scope { edge: Edge::End }); // at 50
    let own = own(&script);
    let rows: Vec<_> = own.ranges.iter().map(|range| (range.name.as_deref(), range.total_ns)).collect();
    assert_eq!(rows, [(Some("a/b"), 10), (Some("a"), 40)]);
    let spans: Vec<_> =
        own.spans.iter().map(|&Span(range, _, from_ns, to_ns)| (range, from_ns, to_ns)).collect();
    assert_eq!(spans, [(0, 30, 40), (1, 10, 50)]);
    assert_eq!(script.process().accounts[0].tracked_bytes, 100);
}

#[test]
fn a_loss_breaks_what_is_open_and_a_new_part_begins_with_what_goes_on() {
    let mut script = Script::new();
    script.tag("a").say(Body::Scope { edge: Edge::Begin });
    script.tag("n").say(Body::Counter { value: 7 });
    script.seq += 1; // lost: the end, or anything else
    script.tag("a").say(Body::Scope { edge: Edge::End });
    script.tag("b").say(Body::Scope { edge: Edge::Begin });
    let before = own(&script);
    assert_eq!((before.ranges_broken, before.spans.len(), before.ranges[0].open), (2, 0, 1));
    script.ledger.begin_part(KEY, script.time_ns);
    script.tag("b").say(Body::Scope { edge: Edge::End });
    let after = own(&script);
    assert_eq!((after.ranges_broken, after.ranges[0].count, after.spans.len()), (0, 1, 1));
    assert_eq!((after.counters[0].value, after.counters[0].changes), (7, 0));
}

#[test]
fn an_exec_ends_what_was_open() {
    let hello = |instance| Body::Hello { start_ticks: 7, versions: 0, capabilities: 0, instance, claims: "" };
    let mut script = Script::new();
    script.control(hello(1));
    script.tag("a").say(Body::Scope { edge: Edge::Begin });
    script.control(hello(2));
    script.seq = 0;
    script.push(Stamp { tag: 1, ..Stamp::default() }, Body::Tag { path: "of the next program" });
    script.push(Stamp { tag: 1, seq: 1, time_ns: 500, ..Stamp::default() }, Body::Scope { edge: Edge::End });
    let own = own(&script);
    assert_eq!((own.ranges_broken, own.ranges.len()), (2, 0));
}

#[test]
fn what_finds_no_room_is_counted() {
    let mut script = Script::new();
    for number in 0..MAX_COUNTERS + 3 {
        script.tag(&format!("counter {number}")).say(Body::Counter { value: 1 });
    }
    for _ in 0..MAX_SPANS_OF_FILE + 5 {
        script.tag("again").say(Body::Scope { edge: Edge::Begin });
        script.tag("again").say(Body::Scope { edge: Edge::End });
    }
    let own = own(&script);
    assert_eq!((own.counters.len(), own.counters_dropped), (MAX_COUNTERS, 3));
    assert_eq!((own.spans.len(), own.spans_dropped), (MAX_SPANS_OF_FILE, 5));
    assert_eq!(own.ranges[0].count, MAX_SPANS_OF_FILE as u64 + 5);
}
