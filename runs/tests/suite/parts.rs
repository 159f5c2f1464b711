//! The parts of a life together contain what the whole contains, and each part has its own peak.
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::fields::Field;
use gpumem_model::run::{BlindWindow, Caveat, Cell, Class, Oom, Run, Source, State};
use gpumem_model::window::join_parts;
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_wire::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const KEY: ProcessKey = ProcessKey { pid: 41, start_ticks: 1 };

struct Life {
    builder: RunBuilder,
    parts: Vec<Run>,
    seq: u64,
    time_ns: u64,
}

impl Life {
    fn new() -> Self {
        let source = Source { kind: "daemon".into(), origin: "test".into(), preset: None };
        let mut life = Life { builder: RunBuilder::new(source), parts: Vec::new(), seq: 0, time_ns: 0 };
        let device = Body::Device {
            uuid_high: 7,
            uuid_low: 1,
            total_bytes: Reading::of(80 << 30),
            ordinal: 0,
            id: DeviceIdKind::Gpu,
            name: "H100",
        };
        life.say(Origin::Host, 0, device);
        life.say(Origin::Process(KEY), 0, device);
        for (tag, path) in [(1, "one"), (2, "two"), (3, "three"), (4, "four")] {
            life.say(Origin::Process(KEY), tag, Body::Tag { path });
        }
        life
    }

    fn say(&mut self, origin: Origin, tag: u32, body: Body<'_>) {
        let ordered = matches!(body, Body::AllocEnd { .. } | Body::FreeEnd { .. } | Body::FreeBegin { .. });
        self.seq += u64::from(ordered);
        self.time_ns += 7_000_000;
        let seq = if ordered { self.seq } else { 0 };
        let stamp = Stamp { time_ns: self.time_ns, seq, tag, device: 0, ..Stamp::default() };
        self.builder.observe(origin, &Record { stamp, body });
    }

    fn alloc(&mut self, address: u64, bytes: u64, tag: u32) {
        let body = Body::AllocEnd { address, bytes, pool: 0, took_us: 0, memory: MemoryKind::Device };
        self.say(Origin::Process(KEY), tag, body);
    }

    fn roll(&mut self) {
        self.time_ns += 1;
        let parts = self.builder.roll(&[KEY], self.time_ns);
        self.parts.extend(parts.into_iter().map(|(_, run)| run));
    }

    fn run(&mut self) -> Run {
        self.builder.runs(true).remove(0)
    }

    /// Returns all parts, the open one last.
    fn all(mut self) -> Vec<Run> {
        let last = self.run();
        self.parts.push(last);
        self.parts
    }
}

fn sum(amounts: &[(u32, i64)]) -> i64 {
    amounts.iter().map(|(_, bytes)| bytes).sum()
}

#[test]
fn a_part_begins_with_what_is_held_and_has_its_own_peak() {
    let mut life = Life::new();
    life.alloc(1 << 40, 100, 1);
    life.alloc(2 << 40, 900, 2);
    life.free(2 << 40);
    life.roll();
    let rolled = life.time_ns;
    let now = life.run();
    assert_eq!(now.devices[0].peak.tracked_bytes, Some(100));
    assert_eq!(now.devices[0].peak.time_ns, rolled);
    assert_eq!(now.devices[0].series.buckets.len(), 1, "what is held, though nothing happens");
    assert_eq!(now.devices[0].series.buckets[0].tracked.map(|tracked| tracked.max), Some(100));
    let points = &now.devices[0].details.timeline.points;
    assert_eq!(
        points.iter().map(|point| (point.time_ns, point.tracked_bytes())).collect::<Vec<_>>(),
        [(rolled, 100)]
    );
    assert_eq!((now.coverage.events, now.coverage.allocations), (0, 0));
    let part = now.coverage.part.expect("it is a part");
    assert_eq!((part.number, part.began_ns, part.events_before), (2, rolled, 4));
    assert_eq!(now.caveats[0].code, "part");
    life.alloc(3 << 40, 50, 3);
    let parts = life.all();
    assert_eq!(parts[0].state, State::Rolled { time_ns: rolled });
    assert_eq!(parts[0].devices[0].peak.tracked_bytes, Some(1000));
    assert_eq!(parts[0].coverage.part, None);
    assert_eq!(parts[1].state, State::Open);
    assert_eq!(parts[1].devices[0].peak.tracked_bytes, Some(150));
}

impl Life {
    fn free(&mut self, address: u64) {
        self.say(Origin::Process(KEY), 0, Body::FreeBegin { address });
        self.say(Origin::Process(KEY), 0, Body::FreeEnd { begin_seq: self.seq, result: 0 });
    }
}

#[test]
fn window_over_several_parts_keeps_names_and_losses_of_each() {
    let mut life = Life::new();
    life.alloc(1 << 40, 900, 1);
    life.free(1 << 40);
    life.alloc(2 << 40, 50, 1);
    life.roll();
    life.free(2 << 40);
    life.alloc(3 << 40, 70, 2);
    let mut parts = life.all();
    let cell = |tag: &str| Cell { class: Class::Direct, tag: Some(tag.into()), ..Cell::default() };
    // As after a restart of the daemon: each part numbers its own cells.
    (parts[0].cells, parts[1].cells) = (vec![cell("early")], vec![cell("late"), cell("early")]);
    for (part, (time_ns, bytes)) in parts.iter_mut().zip([(1, 900), (2, 70)]) {
        let device = &mut part.devices[0];
        device.details.ooms =
            vec![Oom { time_ns, count: 1, amounts: vec![(0, bytes)].into(), ..Oom::default() }];
        (device.last.amounts, device.peak.amounts) = (vec![(0, bytes)].into(), vec![(0, bytes)].into());
        device.details.growth = Default::default();
        device.details.timeline = Default::default();
    }
    let window = |from_ns, to_ns| BlindWindow { from_ns, to_ns, why: "paused".into() };
    let counts = |run: &mut Run, lost: u64, blind: Vec<BlindWindow>| {
        let of = &mut run.coverage;
        (of.lost, of.partial_history, of.ooms_dropped) = (lost, lost > 0, 2);
        (of.blind, of.blind_count, of.blind_ns, of.torn_samples) = (blind, 1, 10, 3);
    };
    counts(&mut parts[0], 5, vec![window(1, Some(3)), window(7, None)]);
    counts(&mut parts[1], 0, vec![window(7, Some(20))]);
    parts[0].caveats.push(Caveat { code: "lost".into(), text: "records were lost".into() });
    let events: Vec<u64> = parts.iter().map(|part| part.coverage.events).collect();
    let whole = join_parts(parts).expect("a run");
    let named = |amounts: &[(u32, i64)]| -> Vec<(String, i64)> {
        let tag = |cell: u32| whole.cells[cell as usize].tag.clone().expect("a tag");
        amounts.iter().map(|(cell, bytes)| (tag(*cell), *bytes)).collect()
    };
    let device = &whole.devices[0];
    assert_eq!(named(&device.last.amounts), [("late".to_owned(), 70)]);
    assert_eq!(named(&device.peak.amounts), [("early".to_owned(), 900)]);
    let ooms: Vec<_> = device.details.ooms.iter().map(|oom| named(&oom.amounts)).collect();
    assert_eq!(ooms, [[("early".to_owned(), 900)], [("late".to_owned(), 70)]]);
    // The peak lies in the part that lost records.
    let of = &whole.coverage;
    assert_eq!((of.partial_history, of.lost, of.ooms_dropped), (true, 5, 4));
    assert_eq!((of.events, of.torn_samples), (events.iter().sum(), 6));
    assert_eq!((of.blind_count, of.blind_ns), (2, 20));
    assert_eq!(of.blind, [window(1, Some(3)), window(7, Some(20))]);
    assert_eq!(of.part, None, "it is told from the beginning on");
    let codes: Vec<&str> = whole.caveats.iter().map(|caveat| caveat.code.as_str()).collect();
    assert_eq!(codes, ["lost"], "no part before is left out");
}

impl Life {
    fn fail(&mut self, bytes: u64, tag: u32) {
        let (pool_used_bytes, pool_reserved_bytes) = (Reading::of(0), Reading::of(0));
        let outcome = OomOutcome::Survived;
        let body = Body::Oom { bytes, pool_used_bytes, pool_reserved_bytes, outcome, result: 2 };
        self.say(Origin::Process(KEY), tag, body);
    }

    fn lose(&mut self, count: u64) {
        let first_seq = self.seq + 1;
        self.seq += count;
        self.say(Origin::Process(KEY), 0, Body::Lost { count, first_seq });
    }
}

/// Returns the time of each OOM, with the memory held by name, in order of time.
fn held_at_ooms(run: &Run) -> Vec<(u64, Vec<(String, i64)>)> {
    let name = |cell: u32| run.cells[cell as usize].tag.clone().unwrap_or_default();
    let ooms = run.devices.iter().flat_map(|device| &device.details.ooms);
    ooms.map(|oom| {
        let mut held: Vec<_> = oom.amounts.iter().map(|(cell, bytes)| (name(*cell), *bytes)).collect();
        held.sort();
        (oom.time_ns, held)
    })
    .collect()
}

/// Moves the cells of a run by some places, as a daemon that was started anew may number them.
fn with_other_cells(mut run: Run, places: u32) -> Run {
    let count = run.cells.len() as u32;
    if count > 0 {
        run.remap(&|cell| Some((cell + places) % count));
        run.cells.rotate_right((places % count) as usize);
    }
    run
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]
    #[test]
    fn parts_are_the_whole(ops in prop::collection::vec((0..14_u64, 1..1000_u64, 1..5_u32), 1..120)) {
        let (mut whole, mut rolled) = (Life::new(), Life::new());
        let mut live = [0_u64; 10];
        // Expected peak of a part: the highest sum since it began, including the sum at its begin.
        let (mut peaks, mut most) = (Vec::new(), 0);
        let (mut failed, mut lost) = (0, 0);
        for (slot, bytes, tag) in ops {
            match live.get_mut(slot as usize) {
                None if slot == 10 => {
                    whole.fail(bytes, tag);
                    rolled.fail(bytes, tag);
                    failed += 1;
                }
                None if slot == 11 => {
                    whole.lose(bytes);
                    rolled.lose(bytes);
                    lost += bytes;
                }
                None => {
                    rolled.roll();
                    peaks.push(std::mem::replace(&mut most, live.iter().sum()));
                }
                Some(held) if *held == 0 => {
                    whole.alloc((slot + 1) << 40, bytes, tag);
                    rolled.alloc((slot + 1) << 40, bytes, tag);
                    *held = bytes;
                }
                Some(held) => {
                    whole.free((slot + 1) << 40);
                    rolled.free((slot + 1) << 40);
                    *held = 0;
                }
            }
            most = most.max(live.iter().sum());
        }
        peaks.push(most);
        let whole = whole.all().remove(0);
        let parts = rolled.all();
        for (part, peak) in parts.iter().zip(&peaks) {
            let Some(device) = part.devices.first() else { continue };
            prop_assert_eq!(device.peak.tracked_bytes.unwrap_or(0), *peak as i64);
            prop_assert_eq!(sum(&device.peak.amounts), *peak as i64);
            let highest = device.series.buckets.iter().filter_map(|bucket| Some(bucket.tracked?.max)).max();
            prop_assert_eq!(highest.unwrap_or(0), *peak as i64);
            let points = &device.details.timeline.points;
            let fullest = points.iter().map(|point| point.tracked_bytes()).max();
            prop_assert_eq!(fullest.unwrap_or(0), *peak as i64);
            let began_ns = part.coverage.part.map_or(0, |part| part.began_ns);
            prop_assert!(points.iter().all(|point| point.time_ns >= began_ns), "{points:?}");
        }
        let counts = |of: fn(&Run) -> u64| parts.iter().map(of).sum::<u64>();
        prop_assert_eq!(counts(|run| run.coverage.events), whole.coverage.events);
        prop_assert_eq!(counts(|run| run.coverage.allocations), whole.coverage.allocations);
        prop_assert_eq!(counts(|run| run.coverage.allocated_bytes), whole.coverage.allocated_bytes);
        let joined = gpumem_model::window::join_parts(parts.clone()).expect("a run");
        prop_assert_eq!(joined.coverage.events, whole.coverage.events);
        prop_assert_eq!(joined.coverage.allocated_bytes, whole.coverage.allocated_bytes);
        prop_assert_eq!(joined.coverage.partial_history, whole.coverage.partial_history);
        prop_assert_eq!((joined.coverage.lost, whole.coverage.lost), (lost, lost));
        prop_assert_eq!(joined.coverage.partial_history, lost > 0);
        // One that was undecided when a part ended is in two parts, and in the whole once.
        for run in [&joined, &whole] {
            let ooms = run.devices.iter().flat_map(|device| &device.details.ooms);
            let count: u64 = ooms.map(|oom| oom.count).sum();
            prop_assert_eq!(count + run.coverage.ooms_dropped, failed);
        }
        // The names do not depend on the numbers that each part gives to its cells.
        let expected: BTreeMap<_, _> = parts.iter().flat_map(held_at_ooms).collect();
        let renumbered = parts.iter().cloned().enumerate().map(|(part, run)| with_other_cells(run, part as u32));
        let joined = gpumem_model::window::join_parts(renumbered.collect()).expect("a run");
        prop_assert_eq!(held_at_ooms(&joined), expected.into_iter().collect::<Vec<_>>());
        let last = parts.last().expect("a part");
        prop_assert_eq!(&last.cells, &whole.cells);
        if let (Some(last), Some(whole)) = (last.devices.first(), whole.devices.first()) {
            prop_assert_eq!(&last.last.amounts, &whole.last.amounts);
        }
    }
}
