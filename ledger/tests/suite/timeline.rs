//! Timelines: compares each point with a naive model that remembers every moment.
use crate::common::*;
use gpumem_ledger::{CellView, MAX_POINT_CELLS, MAX_POINTS};
use gpumem_model::cell::SUM;
use gpumem_model::timeline::{Point, Timeline};
use gpumem_wire::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const MS: u64 = 1_000_000;

fn timeline(s: &Script) -> Timeline {
    s.ledger.timeline(KEY, 0)
}

fn tracked(point: &Point) -> i64 {
    point.amounts.iter().map(|(_, bytes)| bytes).sum::<i64>() + point.rest_bytes
}

fn name(cell: &CellView) -> String {
    let library = cell.library.as_deref().unwrap_or("");
    format!("{:?}{library} {} {:?}", cell.class, cell.tag.as_deref().unwrap_or("-"), cell.role)
}

/// Times in milliseconds, and tracked bytes.
fn told(s: &Script) -> Vec<(u64, i64)> {
    timeline(s).points.iter().map(|point| (point.time_ns / MS, tracked(point))).collect()
}

#[test]
fn the_fullest_moment_of_each_slot_and_what_a_silence_held() {
    let mut s = Script::new();
    s.at(MS).alloc(0x1000, 100);
    s.alloc(0x2000, 50);
    s.free(0x1000);
    assert_eq!(told(&s), [(1, 150), (1, 50)], "the open slot, and now");
    s.at(12 * MS).alloc(0x3000, 7);
    assert_eq!(told(&s), [(1, 150), (1, 50), (12, 57)], "nothing happened for longer than a slot");
    s.at(21 * MS).free(0x3000);
    assert_eq!(told(&s), [(1, 150), (1, 50), (12, 57), (21, 57), (21, 50)]);
    s.at(29 * MS).alloc(0x3000, 1);
    s.at(31 * MS).alloc(0x4000, 1);
    assert_eq!(told(&s)[3..], [(21, 57), (31, 52)], "activity that continues has no other points");
}

#[test]
fn of_equally_full_moments_the_one_with_least_idle_stays() {
    let mut s = Script::new();
    s.pool(3, 0, true, PoolOwner::Framework);
    s.at(MS).alloc(0x1000, 4096);
    s.segment(0x1000, 4096, 3);
    s.tag("a").block(0x1000, 1000, 3);
    s.tag("b").block(0x1400, 1000, 3);
    s.unblock(0x1000, 3);
    let view = timeline(&s);
    let cells = s.process().cells;
    let idle = |point: &Point| {
        let find =
            |&(id, bytes): &(u32, i64)| name(&cells[id as usize]).starts_with("PoolIdle").then_some(bytes);
        point.amounts.iter().find_map(find)
    };
    assert_eq!(view.points.iter().map(idle).collect::<Vec<_>>(), [Some(2096), Some(3096)]);
}

#[test]
fn a_segment_that_is_said_after_its_memory_is_no_fuller_moment() {
    let mut s = Script::new();
    s.pool(3, 0, true, PoolOwner::Framework);
    s.at(MS).alloc(0x1000, 4096);
    s.segment(0x1000, 4096, 3);
    let view = timeline(&s);
    let class = |point: &Point| s.process().cells[point.amounts[0].0 as usize].class;
    assert!(view.points.iter().all(|point| class(point) == gpumem_ledger::Class::PoolIdle), "{view:?}");
}

#[test]
fn the_points_of_a_long_life_are_few_and_hold_the_peak() {
    let mut s = Script::new();
    let day = 86_400_000 * MS;
    for step in 0..3000_u64 {
        s.at(step * (20 * day / 3000)).alloc(0x1000, 10 + step % 7);
        if step == 1234 {
            s.alloc(0x9000, 1 << 30);
            s.free(0x9000);
        }
        s.free(0x1000);
    }
    let view = timeline(&s);
    assert!((MAX_POINTS / 4..=MAX_POINTS).contains(&view.points.len()), "{}", view.points.len());
    assert!(view.points.iter().any(|point| tracked(point) >= 1 << 30));
    assert!(view.points.is_sorted_by_key(|point| point.time_ns));
}

/// Tags and bytes of the last point.
fn last_named(s: &Script) -> BTreeMap<String, i64> {
    let cells = s.process().cells;
    let point = timeline(s).points.pop().expect("a point");
    assert!(point.amounts.len() <= MAX_POINT_CELLS && point.rest_bytes == 0, "{point:?}");
    let tag = |id: u32| cells[id as usize].tag.as_deref().unwrap_or("-").to_owned();
    point.amounts.iter().map(|&(id, bytes)| (tag(id), bytes)).collect()
}

#[test]
fn what_repeats_is_summed_under_its_pattern_and_the_rest_as_near_as_its_size_earns() {
    let mut s = Script::new();
    let mut at = 0;
    let mut hold = |tag: String, bytes: u64| {
        at += 1 << 30;
        s.tag(&tag).alloc(at, bytes);
    };
    for layer in 0..96 {
        hold(format!("gpt/layers.{layer}/attn/qkv"), 3 << 20);
        hold(format!("gpt/layers.{layer}/mlp/up"), 4 << 20);
        hold(format!("gpt/layers.{layer}/norm"), 1 << 10);
        hold(format!("gpt/layers.{layer}/rope"), 1 << 9);
    }
    hold("gpt/embed".into(), 900 << 20);
    for letter in 'a'..='z' {
        hold(format!("gpt/head/{letter}"), 1 << 20);
        hold(format!("gpt/odds/{letter}"), 1);
    }
    hold("loose".into(), 5);
    let named = last_named(&s);
    let expected = [
        ("gpt/layers.*/attn/qkv (smaller ones)", 96 * (3 << 20)),
        ("gpt/embed", 900 << 20),
        ("gpt/head/(smaller ones)", 26 << 20),
        ("gpt/layers.*/norm (smaller ones)", 96 << 10),
        ("gpt/layers.*/rope (smaller ones)", 96 << 9),
        ("gpt/odds/(smaller ones)", 26),
        ("(smaller ones)", 5),
    ];
    // Some layers keep their own names; the other layers are summed.
    let up = named
        .iter()
        .filter(|(tag, _)| tag.ends_with("/mlp/up") || *tag == "gpt/layers.*/mlp/up (smaller ones)");
    assert_eq!(up.map(|(_, bytes)| bytes).sum::<i64>(), 96 * (4 << 20), "{named:#?}");
    for (tag, bytes) in expected {
        assert_eq!(named.get(tag), Some(&bytes), "{tag} in {named:#?}");
    }
}

#[test]
fn hostile_names_have_few_sums() {
    let mut s = Script::new();
    for at in 0..1000_u64 {
        let tag: String =
            (0..60).map(|part| format!("{}/", (b'a' + ((at >> (part % 12)) % 26) as u8) as char)).collect();
        s.tag(&format!("{tag}{}", ["\u{663}", "*", "", "//"][at as usize % 4]))
            .alloc((at + 1) << 30, 1 + at % 7);
    }
    let held: i64 = (0..1000).map(|at| 1 + at % 7).sum();
    assert_eq!(last_named(&s).values().sum::<i64>(), held);
    assert!(s.process().cells.len() < 1000 + 4200, "{}", s.process().cells.len());
}

#[test]
fn a_new_part_begins_with_what_is_held() {
    let mut s = Script::new();
    s.at(MS).alloc(0x1000, 100);
    s.alloc(0x2000, 50);
    s.free(0x1000);
    s.ledger.begin_part(KEY, 100 * MS);
    assert_eq!(told(&s), [(100, 50)]);
    s.at(101 * MS).alloc(0x3000, 7);
    s.free(0x3000);
    s.at(500 * MS).free(0x2000);
    assert_eq!(told(&s), [(101, 57), (101, 50), (500, 50), (500, 0)]);
    assert_eq!(s.account().peak.tracked_bytes, 57);
}

#[test]
fn marks_are_kept_and_the_oldest_go_first() {
    let mut s = Script::new();
    s.at(MS).tag("program").say(Body::Marker {});
    for number in 0..200 {
        let name = format!("mark {number}");
        s.host_as(KEY.pid, Body::ProcessMark { start_ticks: KEY.start_ticks, name: &name });
    }
    let process = s.process();
    let names: Vec<&str> = process.coverage.marks.iter().filter_map(|mark| mark.name.as_deref()).collect();
    assert_eq!(
        (names.len(), names[0], names[1], process.coverage.marks_dropped),
        (129, "program", "mark 72", 72)
    );
    assert!(process.coverage.marks[0].by == "program" && process.coverage.marks[1].by == "gpumemctl");
}

#[test]
fn lines_of_a_log_have_points_too() {
    let mut s = Script::new();
    s.host(Body::ClockAnchor { realtime_ns: 0, clock: ClockKind::Ordinal, boottime_ns: 0 });
    let mut s = Script { seq: 0, ..s };
    let key = gpumem_ledger::ProcessKey { pid: 77, start_ticks: 1 };
    for line in 1..=1000_u64 {
        let stamp = Stamp { seq: line, time_ns: line, ..s.stamp };
        let memory = DEV;
        let body = Body::AllocEnd { address: line << 20, bytes: 1, pool: 0, took_us: 0, memory };
        s.ledger.observe(gpumem_ledger::Origin::Process(key), &Record { stamp, body });
    }
    let view = s.ledger.timeline(key, 0);
    assert!((100..=MAX_POINTS).contains(&view.points.len()), "{}", view.points.len());
    assert!(view.points.iter().all(|point| tracked(point) == point.time_ns as i64));
    assert_eq!(view.width_ns, 4);
}

/// One moment of the model: cells by name.
type Moment = BTreeMap<String, i64>;

struct Row {
    address: u64,
    bytes: i64,
    seq: u64,
    /// Index in the history of the first moment with it.
    since: usize,
    /// Class and library, tag, role.
    name: String,
    tag: String,
    class: String,
    in_pool: bool,
}

struct Model {
    script: Script,
    rows: Vec<Row>,
    /// Times of changes, and the amounts held from then on.
    history: Vec<(u64, Moment)>,
    /// Times of records that may have touched the book without a change: a free that begins, a name that stays.
    begins: Vec<(u64, Moment)>,
    next: u64,
}

const POOL_BYTES: i64 = 1 << 30;

impl Model {
    fn new() -> Self {
        let mut script = Script::new();
        for module in 1..5 {
            let path = &format!("@{module}");
            script.push(Stamp { module, ..Stamp::default() }, Body::Module { base: 0, bytes: 0, path });
        }
        script.pool(3, 0, true, PoolOwner::Framework);
        script.alloc(1 << 40, POOL_BYTES as u64);
        script.segment(1 << 40, POOL_BYTES as u64, 3);
        let mut model = Model { script, rows: Vec::new(), history: Vec::new(), begins: Vec::new(), next: 0 };
        // The memory belonged to its pool from the beginning.
        let idle = Moment::from([("PoolIdle - Unknown".to_owned(), POOL_BYTES)]);
        model.history.push((model.script.time_ns - 10, idle.clone()));
        model.history.push((model.script.time_ns, idle));
        model
    }

    fn now(&self) -> Moment {
        self.history.last().map(|(_, moment)| moment.clone()).unwrap_or_default()
    }

    fn book(&mut self, from: Option<&str>, to: Option<&str>, bytes: i64) {
        let mut moment = self.now();
        shift(&mut moment, from, to, bytes);
        self.history.push((self.script.time_ns, moment));
    }

    fn run(&mut self, (what, a, b): (u8, u16, u64)) {
        let wait = match what % 16 {
            15 => b % (3_600_000 * MS),
            13 | 14 => b % (200 * MS),
            _ => b % (3 * MS),
        };
        self.script.time_ns += wait;
        let tag = match a % 150 {
            of @ 0..30 => format!("t{of}"),
            of @ 30..60 => format!("model/op{}_{}", of % 7, ["mul", "add", "sum"][usize::from(of % 3)]),
            of => format!(
                "model/layers.{}/{}",
                of % 13,
                ["up", "down", "attn/q", "attn/k"][usize::from(of % 4)]
            ),
        };
        // Libraries create more uses than a point has sums.
        let module = a / 150 % 5;
        let class = |in_pool: bool| match (in_pool, module) {
            (false, 0) => "Direct".to_owned(),
            (false, module) => format!("Direct@{module}"),
            (true, 0) => "Block".to_owned(),
            (true, module) => format!("Block@{module}"),
        };
        self.script.stamp.module = if what / 16 < 8 { module } else { 0 };
        match what / 16 {
            0..=3 => {
                self.next += 1;
                let bytes = 1 + i64::from(a);
                let (address, in_pool) = (self.next << 20, false);
                let seq = self.script.tag(&tag).alloc(address, bytes as u64);
                let class = class(in_pool);
                let name = format!("{class} {tag} Unknown");
                self.book(None, Some(&name), bytes);
                let since = self.history.len() - 1;
                self.rows.push(Row { address, bytes, seq, since, name, tag, class, in_pool });
            }
            4..=7 => {
                self.next += 1;
                let bytes = 1 + i64::from(a);
                let (address, in_pool) = ((1 << 40) + (self.next << 17), true);
                let seq = self.script.tag(&tag).block(address, bytes as u64, 3);
                let class = class(in_pool);
                let name = format!("{class} {tag} Unknown");
                self.book(Some("PoolIdle - Unknown"), Some(&name), bytes);
                let since = self.history.len() - 1;
                self.rows.push(Row { address, bytes, seq, since, name, tag, class, in_pool });
            }
            8..=12 if !self.rows.is_empty() => {
                let row = self.rows.swap_remove(usize::from(a) % self.rows.len());
                if !row.in_pool {
                    self.begins.push((self.script.time_ns + 10, self.now()));
                }
                if row.in_pool {
                    self.script.unblock(row.address, 3);
                    self.book(Some(&row.name), Some("PoolIdle - Unknown"), row.bytes);
                } else {
                    self.script.free(row.address);
                    self.book(Some(&row.name), None, row.bytes);
                }
            }
            13..=15 if !self.rows.is_empty() => {
                let at = usize::from(a) % self.rows.len();
                let row = &mut self.rows[at];
                let role = [Role::Parameter, Role::Gradient, Role::Activation][usize::from(a) % 3];
                self.script.retag(row.address, if row.in_pool { 3 } else { 0 }, row.seq, role);
                let name = format!("{} {} {role:?}", row.class, row.tag);
                let (old, since, bytes) =
                    (std::mem::replace(&mut row.name, name.clone()), row.since, row.bytes);
                let since_ns = self.history[since].0;
                let begins = self.begins.iter_mut().filter(|(time_ns, _)| *time_ns > since_ns);
                for (_, moment) in self.history[since..].iter_mut().chain(begins) {
                    shift(moment, Some(&old), Some(&name), bytes);
                }
                let now = self.now();
                let touched = if old == name { &mut self.begins } else { &mut self.history };
                touched.push((self.script.time_ns, now));
            }
            _ => {}
        }
    }

    /// Compares a point with a moment: named cells exactly; each sum must contain exactly the bytes without a more specific sum
    /// or name.
    fn is_of(&self, cells: &[CellView], point: &Point, moment: &Moment) -> bool {
        let amounts = point.amounts.iter().map(|&(id, bytes)| (name(&cells[id as usize]), bytes));
        let (said, mut left): (Moment, i64) = (amounts.collect(), 0);
        let mut expected = Moment::new();
        for (name, bytes) in moment {
            let (class, rest) = name.split_once(' ').expect("a class");
            let (tag, role) = rest.rsplit_once(' ').expect("a role");
            let sums = sums_of(tag).into_iter().map(|sum| format!("{class} {sum} {role}"));
            match [name.clone()].into_iter().chain(sums).find(|name| said.contains_key(name)) {
                Some(holder) => *expected.entry(holder).or_default() += bytes,
                None => left += bytes,
            }
        }
        expected == said && left == point.rest_bytes
    }

    fn check(&self) {
        let view = timeline(&self.script);
        let cells = self.script.process().cells;
        assert!(view.points.len() <= MAX_POINTS);
        assert!(view.points.is_sorted_by_key(|point| point.time_ns));
        for point in &view.points {
            assert!(
                point.amounts.len() <= MAX_POINT_CELLS && point.amounts.iter().all(|(_, bytes)| *bytes != 0)
            );
            let mut at_time =
                self.history.iter().chain(&self.begins).filter(|(time_ns, _)| *time_ns == point.time_ns);
            assert!(at_time.any(|(_, moment)| self.is_of(&cells, point, moment)), "{point:?}");
        }
        // The highest moment of each slot is included.
        let mut highest: BTreeMap<u64, i64> = BTreeMap::new();
        for (time_ns, moment) in &self.history {
            let slot = highest.entry(time_ns / view.width_ns).or_insert(i64::MIN);
            *slot = (*slot).max(moment.values().sum());
        }
        for (slot, bytes) in highest {
            let mut points = view.points.iter().filter(|point| point.time_ns / view.width_ns == slot);
            assert!(points.any(|point| tracked(point) >= bytes), "slot {slot}: {bytes} in {view:?}");
        }
        // During a silence, the last point shows the amounts held.
        for pair in self.history.windows(2) {
            let ((since_ns, moment), (until_ns, _)) = (&pair[0], &pair[1]);
            if until_ns - since_ns < view.width_ns + 20 {
                continue; // (a free is two records)
            }
            // A retag that changes nothing also ends the silence.
            if self.begins.iter().any(|(time_ns, _)| (since_ns + 1..until_ns - 20).contains(time_ns)) {
                continue;
            }
            let before = view.points.iter().rev().find(|point| point.time_ns < *until_ns - 20);
            assert!(before.is_some_and(|point| self.is_of(&cells, point, moment)), "silence of {since_ns}");
        }
        let last = self.history.last().map(|(_, moment)| moment.clone()).unwrap_or_default();
        let present = view.points.last().expect("there is one");
        assert!(
            self.is_of(&cells, present, &last)
                || present.time_ns / view.width_ns == self.script.time_ns / view.width_ns
        );
    }
}

/// Returns the sums that may contain a tag, the most specific first.
fn sums_of(tag: &str) -> Vec<String> {
    let mut starred = tag.replace(|letter: char| letter.is_ascii_digit(), "*");
    while starred.contains("**") {
        starred = starred.replace("**", "*");
    }
    let mut sums = Vec::new();
    if starred != tag {
        sums.push(format!("{starred} {SUM}"));
    }
    let (above, last) = starred.rsplit_once('/').map_or(("", &*starred), |(above, last)| (above, last));
    if let Some((begin, _)) = last.split_once('*').filter(|(_, end)| !end.is_empty()) {
        sums.push(format!("{above}{}{begin}* {SUM}", if above.is_empty() { "" } else { "/" }));
    }
    while let Some((above, _)) = starred.rsplit_once('/') {
        sums.push(format!("{above}/{SUM}"));
        starred = above.to_owned();
    }
    sums.push(SUM.to_owned());
    sums
}

fn shift(moment: &mut Moment, from: Option<&str>, to: Option<&str>, bytes: i64) {
    for (name, delta) in [(from, -bytes), (to, bytes)] {
        let Some(name) = name else { continue };
        let amount = moment.entry(name.to_owned()).or_default();
        *amount += delta;
        if *amount == 0 {
            moment.remove(name);
        }
    }
}

fn config() -> ProptestConfig {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 40;
    }
    config
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn points_are_moments_of_the_model(ops in proptest::collection::vec(any::<(u8, u16, u64)>(), 1..900)) {
        let mut model = Model::new();
        for op in ops {
            model.run(op);
        }
        model.check();
    }
}
