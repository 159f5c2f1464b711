//! Windows of a run: compares every sum with a naive model that remembers every moment, from points and by rereading the file.
use gpumem_import::read_file;
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::run::{Moment, Run, Source};
use gpumem_model::window::{self, Window, WindowKind, join_parts};
use gpumem_report::rules::Groupings;
use gpumem_report::text::{Layout, text};
use gpumem_report::{GroupBy, Report};
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_runs::recording::Writer;
use gpumem_wire::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const KEY: ProcessKey = ProcessKey { pid: 7, start_ticks: 3 };
const MS: u64 = 1_000_000;
const MIB: u64 = 1 << 20;

type Said = (Origin, Stamp, Body<'static>);

/// Actions of a process, and the bytes that it held after each record that changed them.
struct Life {
    said: Vec<Said>,
    history: Vec<(u64, BTreeMap<String, i64>)>,
    time_ns: u64,
}

const NAMES: [&str; 5] = ["a", "b", "c/d", "e", "f"];

fn life(ops: &[(u8, u16, u64)]) -> Life {
    let mut life = Life { said: Vec::new(), history: Vec::new(), time_ns: 5 * MS };
    let agent = Origin::Process(KEY);
    let device = || Body::Device {
        uuid_high: 1,
        uuid_low: 2,
        total_bytes: Reading::of(1 << 40),
        ordinal: 0,
        id: DeviceIdKind::Gpu,
        name: "test",
    };
    let anchor = Body::ClockAnchor {
        realtime_ns: 1_795_170_600_000_000_000,
        clock: ClockKind::Monotonic,
        boottime_ns: 0,
    };
    life.said.push((Origin::Host, Stamp::default(), anchor));
    life.said.push((Origin::Host, Stamp::default(), device()));
    let hello = Body::Hello { start_ticks: 3, versions: 1 << 16, capabilities: 0, instance: 1, claims: "" };
    life.said.push((agent, Stamp { thread: 7, ..Stamp::default() }, hello));
    life.said.push((agent, Stamp { thread: 7, ..Stamp::default() }, device()));
    for (index, path) in NAMES.iter().enumerate() {
        life.said.push((agent, Stamp { tag: index as u32 + 1, ..Stamp::default() }, Body::Tag { path }));
    }
    let mut held: BTreeMap<String, i64> = BTreeMap::new();
    let mut rows: Vec<(u64, usize, i64)> = Vec::new();
    let (mut seq, mut number) = (0, 0);
    for &(what, a, wait) in ops {
        life.time_ns += 1 + wait % (if what % 8 == 7 { 3_000 * MS } else { 4 * MS });
        seq += 1;
        let stamp = Stamp { seq, time_ns: life.time_ns, context: 1, ..Stamp::default() };
        match what / 32 {
            0..=3 => {
                let (tag, bytes) = (usize::from(a) % NAMES.len(), 1 + i64::from(a));
                let address = seq << 20;
                let body = Body::AllocEnd {
                    address,
                    bytes: bytes as u64,
                    pool: 0,
                    took_us: 0,
                    memory: MemoryKind::Device,
                };
                life.said.push((agent, Stamp { tag: tag as u32 + 1, ..stamp }, body));
                rows.push((address, tag, bytes));
                *held.entry(NAMES[tag].into()).or_default() += bytes;
            }
            4..=5 if !rows.is_empty() => {
                let (address, tag, bytes) = rows.swap_remove(usize::from(a) % rows.len());
                life.said.push((agent, stamp, Body::FreeBegin { address }));
                let begin_seq = seq;
                seq += 1;
                life.said.push((agent, Stamp { seq, ..stamp }, Body::FreeEnd { begin_seq, result: 0 }));
                let amount = held.entry(NAMES[tag].into()).or_default();
                *amount -= bytes;
                held.retain(|_, bytes| *bytes != 0);
            }
            _ => {
                // An NVML reading; its charge beyond tracked is 3 MiB plus the number of the reading.
                life.said.push((agent, stamp, Body::Marker {}));
                number += 1;
                let host = |time_ns| Stamp { time_ns, thread: 7, ..Stamp::default() };
                let used = held.values().sum::<i64>() as u64 + 3 * MIB + number;
                let at = life.time_ns;
                let sample = Body::ProcessSample {
                    start_ticks: 3,
                    used_bytes: Reading::of(used),
                    absence: Absence::Unknown,
                    lists: 1,
                };
                life.said.push((Origin::Host, host(at), Body::SampleBegin { number }));
                life.said.push((Origin::Host, host(at), sample));
                life.said.push((Origin::Host, host(at), Body::SampleEnd { number, result: 0 }));
                let all = Body::Watermark { last_seq: seq, in_flight_since_ns: 0 };
                life.said.push((agent, Stamp { time_ns: at, ..Stamp::default() }, all));
            }
        }
        life.history.push((life.time_ns, held.clone()));
    }
    life
}

fn source() -> Source {
    Source { kind: "recording".into(), origin: "x".into(), preset: None }
}

fn run_of(life: &Life) -> Run {
    let mut builder = RunBuilder::new(source());
    life.said
        .iter()
        .for_each(|(origin, stamp, body)| builder.observe(*origin, &Record { stamp: *stamp, body: *body }));
    builder.runs(false).remove(0)
}

fn named(run: &Run, moment: &Moment) -> BTreeMap<String, i64> {
    let name = |cell: u32| run.cells[cell as usize].tag.clone().unwrap_or_default();
    moment.amounts.iter().map(|&(cell, bytes)| (name(cell), bytes)).collect()
}

/// Checks the invariants of every window.
fn verify(run: &Run, window: Window) {
    for device in &run.devices {
        for moment in [&device.last, &device.peak] {
            let sum: i64 = moment.amounts.iter().map(|(_, bytes)| bytes).sum();
            assert!(moment.tracked_bytes.is_none_or(|tracked| tracked == sum), "{window:?} {moment:?}");
            assert!(moment.amounts.iter().all(|(cell, _)| (*cell as usize) < run.cells.len()));
        }
        for by in [GroupBy::Tag, GroupBy::Structure] {
            let report = Report::new(run, Groupings::of_run(run), Some(by));
            assert!(report.statement(device, 3, 0).adds_up(), "{window:?}");
        }
    }
    let mut report = Report::new(run, Groupings::of_run(run), None);
    report.window = Some(window);
    let told = text(&report, Layout { width: Some(100), ..Layout::default() });
    assert!(told.lines().count() <= 35, "{told}");
}

/// Windows of a life, at its own times and between them.
fn windows(life: &Life, picks: [u64; 2]) -> Vec<Window> {
    let (first, last) = (life.history[0].0, life.history.last().expect("one").0);
    let pick = |of: u64| first + of % (last - first + 1);
    let (a, b) = (pick(picks[0]).min(pick(picks[1])), pick(picks[0]).max(pick(picks[1])));
    let window = |part, from_ns, to_ns| Window { part, from_ns, to_ns, exact: false };
    vec![
        window(WindowKind::At, a, a),
        window(WindowKind::Since, a, last),
        window(WindowKind::Between, a, b),
        window(WindowKind::At, last, last),
    ]
}

/// Returns the bytes held at a time, according to the model.
fn at(life: &Life, time_ns: u64) -> BTreeMap<String, i64> {
    let before = life.history.iter().rev().find(|(time, _)| *time <= time_ns);
    before.map(|(_, held)| held.clone()).unwrap_or_default()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn moments_of_a_window_are_moments_of_the_model(
        ops in proptest::collection::vec(any::<(u8, u16, u64)>(), 2..400), picks in any::<[u64; 2]>()
    ) {
        let life = life(&ops);
        let run = run_of(&life);
        prop_assume!(!run.devices.is_empty());
        for asked in windows(&life, picks) {
            let told = window::of(&run, &asked);
            verify(&told, asked);
            let device = &told.devices[0];
            let moment = if asked.part == WindowKind::Between { &device.last } else { &device.peak };
            if asked.part != WindowKind::Since && !moment.amounts.is_empty() {
                let held = at(&life, moment.time_ns);
                let during = life.history.iter().filter(|(time, _)| *time == moment.time_ns);
                let is_of = |held: &BTreeMap<String, i64>| named(&told, moment) == *held;
                // A moment also ends at the time of the record that changed it.
                let until = at(&life, moment.time_ns - 1);
                let mut all = during.map(|(_, held)| held).chain([&held, &until]);
                prop_assert!(all.any(is_of), "{asked:?} {moment:?}");
            }
            if asked.part != WindowKind::At {
                let highest = life.history.iter().filter(|(time, _)| (asked.from_ns..=asked.to_ns).contains(time));
                let highest = highest.map(|(_, held)| held.values().sum::<i64>()).max();
                let tracked = device.peak.tracked_bytes.unwrap_or(0);
                let is_told = told.caveats.iter().any(|caveat| caveat.code == "window");
                let begins = [0, 1].map(|before| at(&life, asked.from_ns - before).values().sum::<i64>());
                let most = begins.map(|begins| highest.unwrap_or(begins).max(begins));
                prop_assert!(most.contains(&tracked) || is_told, "{asked:?}: {tracked}, not {most:?}");
            }
        }
    }

    #[test]
    fn a_file_that_is_read_again_tells_exactly(
        ops in proptest::collection::vec(any::<(u8, u16, u64)>(), 2..300), picks in any::<[u64; 2]>()
    ) {
        let life = life(&ops);
        let path = std::env::temp_dir().join(format!("gpumem-window-{}-{:?}.gpumem", std::process::id(), std::thread::current().id()));
        let mut writer = Writer::new(std::fs::File::create(&path).expect("a file")).expect("a header");
        for (origin, stamp, body) in &life.said {
            writer.write(*origin, &Record { stamp: *stamp, body: *body }).expect("a record");
        }
        writer.flush().expect("a file");
        let run = read_file(&path, None).expect("a run").remove(0);
        for asked in windows(&life, picks).into_iter().take(3) {
            let told = gpumem_import::reread(&path, None, &run, &asked, true).expect("the same file").expect("the same process");
            verify(&told, Window { exact: true, ..asked });
            let device = &told.devices[0];
            let moment = if asked.part == WindowKind::Between { &device.last } else { &device.peak };
            if asked.part != WindowKind::Since {
                prop_assert_eq!(named(&told, moment), at(&life, asked.to_ns), "{:?}", asked);
            }
            if asked.part != WindowKind::At {
                let inside = life.history.iter().filter(|(time, _)| (asked.from_ns..=asked.to_ns).contains(time));
                let inside = inside.map(|(_, held)| held.values().sum::<i64>()).max().unwrap_or(0);
                let begins = [0, 1].map(|before| at(&life, asked.from_ns - before).values().sum::<i64>());
                let highest = begins.map(|begins| Some(begins.max(inside)));
                prop_assert!(highest.contains(&device.peak.tracked_bytes), "{:?} {:?}", asked, highest);
            }
        }
        std::fs::remove_file(&path).expect("our own file");
    }
}

/// Two parts of a life are joined again.
#[test]
fn parts_join_to_the_life_that_they_are_of() {
    let ops: Vec<(u8, u16, u64)> =
        (0..400_u64).map(|n| ((n * 37 % 256) as u8, (n * 7919 % 65_536) as u16, n * n * 104_729)).collect();
    let life = life(&ops);
    let middle = life.history[200].0;
    let mut builder = RunBuilder::new(source());
    let mut first = None;
    for (origin, stamp, body) in &life.said {
        if first.is_none() && stamp.time_ns > middle {
            first = Some(builder.roll(&[KEY], middle).remove(0).1);
        }
        builder.observe(*origin, &Record { stamp: *stamp, body: *body });
    }
    let second = builder.runs(false).remove(0);
    let (alone, joined) =
        (run_of(&life), join_parts(vec![first.expect("it rolled"), second]).expect("two parts"));
    let of = |run: &Run| (run.devices[0].peak.tracked_bytes, run.devices[0].peak.time_ns, window::span(run));
    assert_eq!(of(&joined), of(&alone));
    assert_eq!(named(&joined, &joined.devices[0].peak), named(&alone, &alone.devices[0].peak));
    for asked in windows(&life, [middle - life.history[0].0 - 1, u64::MAX / 3]) {
        verify(&window::of(&joined, &asked), asked);
    }
}

/// The gap of a past moment comes from the nearest reading, with an upper bound of the distance.
#[test]
fn the_gap_of_a_past_moment_is_marked() {
    let mut ops = vec![(0, 100, MS); 3];
    ops.push((255, 0, 2_000 * MS));
    ops.extend([(0, 1000, 2_999 * MS), (0, 1000, 2_999 * MS)]);
    let life = life(&ops);
    let run = run_of(&life);
    let window =
        Window { part: WindowKind::At, from_ns: life.history[4].0, to_ns: life.history[4].0, exact: false };
    let told = window::of(&run, &window);
    let moment = &told.devices[0].peak;
    assert_eq!(moment.untrackable_bytes, Some(3 * MIB as i64 + 1));
    assert_eq!(moment.used_bytes(), Some(moment.tracked_bytes.unwrap_or(0) + 3 * MIB as i64 + 1));
    assert!(moment.gap_distance_ns != 0, "{moment:?}");
    let mut report = Report::new(&told, Groupings::of_run(&told), None);
    report.window = Some(window);
    let text = text(&report, Layout::default());
    assert!(
        text.contains("then\n")
            && text.contains(" ~3,07")
            && text.contains("\n~ Untrackable is from the nearest stored sample"),
        "{text}"
    );
}
