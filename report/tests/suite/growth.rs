//! Growth of runs made from observations: verdicts, time units and sentences.
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::growth::Axis;
use gpumem_model::run::{Run, Source};
use gpumem_report::growth::{GrowthReport, growth_report, line, table};
use gpumem_report::json::json;
use gpumem_report::judge::trend_test::Verdict;
use gpumem_report::rules::Groupings;
use gpumem_report::{GroupBy, Report};
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_wire::*;

const KEY: ProcessKey = ProcessKey { pid: 41, start_ticks: 1 };
const MIB: u64 = 1 << 20;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;
const TAGS: [&str; 4] = ["model/weights", "model/cache", "model/activation", "loader"];

/// A process on a device, controlled by the test.
struct Said {
    builder: RunBuilder,
    seq: u64,
    now_ns: u64,
    gap: u64,
    tracked: u64,
    address: u64,
}

impl Said {
    fn new() -> Self {
        let source = Source { kind: "recording".into(), origin: "test".into(), preset: None };
        let mut said = Said {
            builder: RunBuilder::new(source),
            seq: 0,
            now_ns: 0,
            gap: 300 * MIB,
            tracked: 0,
            address: 0,
        };
        let device = Body::Device {
            uuid_high: 7,
            uuid_low: 1,
            total_bytes: Reading::of(80 << 30),
            ordinal: 0,
            id: DeviceIdKind::Gpu,
            name: "H100",
        };
        said.observe(Origin::Host, Stamp::default(), device);
        said.observe(Origin::Process(KEY), Stamp::default(), device);
        for (at, path) in TAGS.iter().enumerate() {
            let stamp = Stamp { tag: at as u32 + 1, ..Stamp::default() };
            said.observe(Origin::Process(KEY), stamp, Body::Tag { path });
        }
        said
    }

    fn observe(&mut self, origin: Origin, stamp: Stamp, body: Body<'_>) {
        self.builder.observe(origin, &Record { stamp: Stamp { time_ns: self.now_ns, ..stamp }, body });
    }

    fn say(&mut self, tag: &str, body: Body<'_>) -> u64 {
        self.seq += 1;
        let tag = TAGS.iter().position(|other| *other == tag).map_or(0, |at| at as u32 + 1);
        self.observe(Origin::Process(KEY), Stamp { seq: self.seq, tag, ..Stamp::default() }, body);
        self.seq
    }

    fn take(&mut self, tag: &str, bytes: u64) -> (u64, u64) {
        self.address += 1 << 36;
        let address = self.address;
        self.tracked += bytes;
        self.say(tag, Body::AllocEnd { address, bytes, pool: 0, took_us: 0, memory: MemoryKind::Device });
        (address, bytes)
    }

    fn give(&mut self, (address, bytes): (u64, u64)) {
        self.tracked -= bytes;
        let begin_seq = self.say("", Body::FreeBegin { address });
        self.say("", Body::FreeEnd { begin_seq, result: 0 });
    }

    fn pass(&mut self, ns: u64) {
        self.now_ns += ns;
    }

    fn sample(&mut self) {
        let number = self.now_ns;
        let used = self.tracked + self.gap;
        self.listed(number, KEY.pid, used);
        self.pass(MS);
        let last_seq = self.seq;
        self.observe(
            Origin::Process(KEY),
            Stamp::default(),
            Body::Watermark { last_seq, in_flight_since_ns: 0 },
        );
    }

    fn listed(&mut self, number: u64, pid: u32, used: u64) {
        let host = |thread| Stamp { thread, ..Stamp::default() };
        self.observe(Origin::Host, host(0), Body::SampleBegin { number });
        let used_bytes = Reading::of(used);
        let absence = Absence::Unknown;
        self.observe(
            Origin::Host,
            host(pid),
            Body::ProcessSample { start_ticks: 1, used_bytes, absence, lists: 1 },
        );
        self.observe(Origin::Host, host(0), Body::SampleEnd { number, result: 0 });
    }

    fn run(&mut self) -> Run {
        self.builder.runs(true).remove(0)
    }
}

fn report(run: &Run) -> Report<'_> {
    Report::new(run, Groupings::preset(None).clone(), None)
}

fn all(run: &Run) -> GrowthReport {
    growth_report(&report(run), &run.devices[0]).expect("something to judge")
}

fn sentence(run: &Run) -> String {
    line(&report(run), &run.devices[0]).expect("something to say")
}

/// Runs steps of 300 ms: activations are allocated and freed, and the cache keeps `leak` bytes for each step.
fn train(said: &mut Said, steps: u64, leak: u64) {
    for step in 0..steps {
        said.say("", Body::Step { number: step });
        let activations: Vec<_> =
            (0..4).map(|_| said.take("model/activation", (100 + step % 7) * MIB)).collect();
        said.pass(150 * MS);
        said.sample();
        activations.into_iter().for_each(|taken| said.give(taken));
        if leak > 0 {
            said.take("model/cache", leak);
        }
        said.pass(150 * MS);
        said.sample();
    }
}

#[test]
fn a_leak_is_told_per_step_with_its_name_and_nothing_else() {
    let mut said = Said::new();
    said.take("model/weights", 4096 * MIB);
    train(&mut said, 400, 3 * MIB);
    let run = said.run();
    let told = all(&run);
    assert_eq!(told.per, Axis::Step);
    let rate = told.tracked.and_then(|tracked| tracked.bytes_per_unit).expect("a rate");
    assert!((rate / (3 * MIB) as f64 - 1.0).abs() < 0.01, "{rate}");
    assert_eq!(told.tags.len(), 1, "what stands still is not judged: {:?}", told.tags);
    assert_eq!(
        sentence(&run),
        "growth: tracked +3.0 MiB per step over 360 steps (99.9 % sure): model/cache +3.0; Untrackable flat"
    );
    assert_eq!(told.gap.map(|gap| gap.verdict), Some(Verdict::Flat));
    let text = table(&report(&run), false);
    assert!(text.contains("\n  model/cache "), "{text}");
    assert!(text.contains("\nflat: pool slack, Untrackable (--all lists them)\n"), "{text}");
    assert!(table(&report(&run), true).contains("\nUntrackable "), "{text}");
    assert!(text.lines().all(|line| line.chars().count() < 100), "{text}");
}

#[test]
fn a_flat_sawtooth_is_flat_and_a_gap_that_drifts_is_not() {
    let mut said = Said::new();
    said.take("model/weights", 4096 * MIB);
    train(&mut said, 100, 0);
    assert_eq!(sentence(&said.run()), "growth: tracked flat over 90 steps; Untrackable flat");
    for _ in 0..100 {
        said.gap += 2 * MIB;
        train(&mut said, 1, 0);
    }
    let run = said.run();
    let gap = all(&run).gap.expect("samples");
    assert_eq!(gap.verdict, Verdict::Growing, "{gap:?}");
    let rate = gap.bytes_per_unit.expect("a rate") / (2 * MIB) as f64;
    assert!((0.95..1.05).contains(&rate), "{gap:?}");
    assert!(sentence(&run).starts_with("growth: tracked flat over "), "{}", sentence(&run));
    assert!(sentence(&run).contains("; Untrackable +2.0 MiB per step (99.9 % sure)"), "{}", sentence(&run));
}

#[test]
fn categories_grow_by_the_sum_of_their_cells() {
    let mut said = Said::new();
    for step in 0..60 {
        said.say("", Body::Step { number: step });
        said.take("model/weights", 2 * MIB);
        said.take("loader", MIB);
        said.pass(100 * MS);
    }
    let run = said.run();
    let by_tag = all(&run).tags;
    let rates: f64 = by_tag.iter().filter_map(|tag| tag.judgement.bytes_per_unit).sum();
    assert_eq!(rates, (3 * MIB) as f64);
    for by in [GroupBy::Layer, GroupBy::Structure] {
        let told = all(&run);
        let names = if by == GroupBy::Layer { told.layers } else { told.structures };
        let rates: f64 = names.iter().filter_map(|name| name.judgement.bytes_per_unit).sum();
        assert_eq!(rates, (3 * MIB) as f64, "{by:?} {names:?}");
    }
    let document = json(&report(&run));
    let document: serde_json::Value = serde_json::from_str(&document).expect("JSON");
    assert_eq!(document["devices"][0]["growth"]["tags"][0]["verdict"], "growing");
    assert_eq!(document["devices"][0]["growth"]["tags"][0]["bytes_per_unit"], (2 * MIB) as f64);
}

/// Runs a server with requests of random sizes at random times; `leak` bytes remain each second.
fn serve(said: &mut Said, seconds: u64, leak: u64) {
    let mut random = 88_172_645_463_325_252_u64;
    for _ in 0..seconds {
        for _ in 0..4 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let request = said.take("model/activation", (1 + random % 500) * MIB);
            said.pass(random % 200 * MS);
            said.give(request);
            said.pass((250 - random % 200) * MS);
        }
        if leak > 0 {
            said.take("model/cache", leak);
        }
        said.sample();
    }
}

#[test]
fn a_server_without_steps_is_judged_by_the_minute() {
    let mut said = Said::new();
    said.take("model/weights", 4096 * MIB);
    serve(&mut said, 9 * 60, MIB / 4);
    let run = said.run();
    assert_eq!(all(&run).tracked.map(|tracked| tracked.verdict), Some(Verdict::NotEnoughData));
    assert_eq!(line(&report(&run), &run.devices[0]), None, "it is still starting");
    serve(&mut said, 30 * 60, MIB / 4);
    let run = said.run();
    let told = all(&run);
    assert_eq!(told.per, Axis::Minute);
    let cache = told.tags.iter().find(|tag| tag.name == "model/cache").expect("it grows").judgement;
    assert_eq!(cache.verdict, Verdict::Growing, "{cache:?}");
    let rate = cache.bytes_per_unit.expect("a rate") / (15 * MIB) as f64;
    assert!((0.95..1.05).contains(&rate), "{cache:?}");
    let said_so = sentence(&run);
    assert!(said_so.contains("MiB per minute over 3") && said_so.contains("model/cache +1"), "{said_so}");
    assert!(!said_so.contains("model/activation"), "{said_so}");
}

#[test]
fn a_server_that_does_not_leak_is_flat() {
    let mut said = Said::new();
    said.take("model/weights", 4096 * MIB);
    serve(&mut said, 40 * 60, 0);
    let run = said.run();
    assert_eq!(
        all(&run).tracked.map(|tracked| tracked.verdict),
        Some(Verdict::Flat),
        "{}",
        table(&report(&run), true)
    );
    assert!(sentence(&run).starts_with("growth: tracked flat over 3"), "{}", sentence(&run));
}

#[test]
fn noise_that_could_hide_a_leak_is_stated() {
    let mut said = Said::new();
    let mut random = 88_172_645_463_325_252_u64;
    for step in 0..64 {
        let held = said.take("model/weights", (1000 + random % 500) * MIB);
        said.say("", Body::Step { number: step });
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        said.give(held);
    }
    let said_so = sentence(&said.run());
    assert!(said_so.starts_with("growth: tracked flat over 57 steps (within "), "{said_so}");
    assert!(said_so.ends_with(" MiB per step)"), "{said_so}");
}

#[test]
fn a_stable_rise_and_fall_is_as_good_as_steps() {
    let mut said = Said::new();
    said.take("model/weights", 4096 * MIB);
    for _ in 0..120 {
        let taken: Vec<_> = (0..10)
            .map(|_| {
                said.pass(20 * MS);
                said.take("model/activation", 90 * MIB)
            })
            .collect();
        for taken in taken.into_iter().rev() {
            said.pass(20 * MS);
            said.give(taken);
        }
        said.take("model/cache", 3 * MIB);
        said.sample();
    }
    let run = said.run();
    let told = all(&run);
    assert_eq!(told.per, Axis::Period);
    let cache = told.tags.iter().find(|tag| tag.name == "model/cache").expect("it grows").judgement;
    assert_eq!(cache.verdict, Verdict::Growing, "{cache:?}");
    let rate = cache.bytes_per_unit.expect("a rate") / (3 * MIB) as f64;
    assert!((0.95..1.05).contains(&rate), "{cache:?}");
    let said_so = sentence(&run);
    assert!(
        said_so.starts_with("growth: tracked +3.0 MiB per period over ")
            && said_so.ends_with(" (a period is 0.40 s)"),
        "{said_so}"
    );
}

#[test]
fn a_process_without_an_agent_is_judged_by_what_it_uses() {
    let mut said = Said::new();
    for second in 0..30 * 60 {
        said.listed(second, 77, 1024 * MIB + second * MIB / 20);
        said.pass(SECOND);
    }
    let runs = said.builder.runs(true);
    let run = runs.iter().find(|run| run.process.pid == 77).expect("its run");
    assert_eq!(sentence(run), "growth: used +3.0 MiB per minute over 26 minutes (99.9 % sure)");
    let told = all(run);
    assert!(told.tracked.is_none() && told.gap.is_none() && told.tags.is_empty());
}

#[test]
fn what_has_hardly_begun_says_nothing() {
    let mut said = Said::new();
    assert!(
        growth_report(
            &report(&said.run()),
            &said.run().devices.first().cloned().unwrap_or_else(|| {
                said.take("loader", MIB);
                said.run().devices.remove(0)
            })
        )
        .is_none()
    );
    train(&mut said, 5, MIB);
    let run = said.run();
    assert_eq!(line(&report(&run), &run.devices[0]), None);
    let few = table(&report(&run), false);
    assert!(
        few.contains("\ntoo few points to judge: 2 tags (--all lists them)\n")
            && !few.contains("model/cache"),
        "{few}"
    );
    let all = table(&report(&run), true);
    assert!(all.contains("not enough data") && all.contains("model/cache"), "{all}");
}

#[test]
fn names_from_strangers_are_printed_harmless() {
    let mut said = Said::new();
    said.observe(
        Origin::Process(KEY),
        Stamp { tag: 1, ..Stamp::default() },
        Body::Tag { path: "a\u{1b}[2Jb" },
    );
    for step in 0..60 {
        said.say("", Body::Step { number: step });
        said.take("model/weights", 2 * MIB);
        said.pass(100 * MS);
    }
    let run = said.run();
    let texts = sentence(&run) + &table(&report(&run), true);
    assert!(texts.contains("a\\u{1b}[2Jb") && !texts.contains('\u{1b}'), "{texts}");
}
