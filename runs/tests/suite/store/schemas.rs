//! Stores written by earlier versions, created with their SQL.

use super::support::{TempDir, refused};
use gpumem_model::growth::Growth;
use gpumem_model::program_data::{Counter, Range, Span};
use gpumem_model::run::*;
use gpumem_model::series::{Bucket, Extremes, Series};
use gpumem_runs::store::{RunId, Store, StoreError, VERSION};

const TEXTS: [&str; 7] = [
    include_str!("schemas/1.sql"),
    include_str!("schemas/2.sql"),
    include_str!("schemas/3.sql"),
    include_str!("schemas/4.sql"),
    include_str!("schemas/5.sql"),
    include_str!("schemas/6.sql"),
    include_str!("schemas/7.sql"),
];

fn said() -> ProgramData {
    let counter = Counter {
        name: Some("batch".into()),
        value: 32,
        changes: 2,
        min: 16,
        max: 32,
        area: i128::MAX,
        since_ns: 1,
        until_ns: 9,
        points: vec![(1, 16), (5, 32)],
    };
    let (name, of) = (Some("load".to_owned()), Range::default());
    ProgramData {
        counters: vec![counter],
        counters_dropped: 7,
        ranges: vec![Range { name, count: 1, total_ns: 3, min_ns: 3, max_ns: 3, ..of }],
        spans: vec![Span(0, 41, 2, 5)],
        ..ProgramData::default()
    }
}

/// The run in the form that schema `version` could store.
fn run_of(version: usize) -> Run {
    let mut cells = vec![
        Cell { class: Class::PoolIdle, ..Cell::default() },
        Cell {
            class: Class::Block,
            tag: Some("model/a".into()),
            origin: Some("load".into()),
            role: Some("parameter".into()),
            phase: Some("setup".into()),
            library: Some("libtorch".into()),
            ..Cell::default()
        },
    ];
    let at = |min, max, last| Some(Extremes { min, max, last });
    let mut last = Moment {
        time_ns: 800,
        tracked_bytes: Some(30),
        amounts: vec![(0, 10), (1, 20)].into(),
        predates_bytes: Some(0),
        untrackable_bytes: Some(12),
        ..Moment::default()
    };
    let mut details = Details::default();
    if version >= 2 {
        last.parts =
            Some(UntrackableParts { context_bytes: 10, unexplained_bytes: 2, ..UntrackableParts::default() });
        details.accounted_peak_bytes = Some(77);
        details.growth =
            Growth { stride: 4, points: vec![(1, 2)], cells: vec![(1, vec![5, 6])], ..Growth::default() };
        details.steps = vec![UntrackableChange {
            from_ns: 1,
            time_ns: 2,
            bytes: 3,
            parts: UntrackableParts::default(),
            cause: "context created".into(),
            also: Vec::new(),
            events: 1,
            kind: "measured".into(),
            tag: None,
            library: None,
            expected_bytes: None,
            note: None,
        }];
    }
    if version >= 3 {
        (cells[0].pool, cells[0].pending) = (Some("torch".into()), true);
        let row =
            Iteration { count: 1, start_ns: 1, end_ns: 2, tracked: (9, 8).into(), ..Iteration::default() };
        details.iterations = Iterations { rows: vec![row], open: None };
        details.pools = vec![Pool { id: 3, name: Some("torch".into()), ..Pool::default() }];
    }
    let buckets = vec![
        Bucket {
            time_ns: 100,
            used: at(40, 70, 60),
            tracked: at(20, 60, 30),
            untrackable: at(10, 12, 12),
            samples: 4,
            doubtful: 1,
        },
        Bucket { time_ns: 110, tracked: at(30, 30, 30), ..Bucket::default() },
    ];
    let device = Device {
        name: "GPU-1".into(),
        ordinal: 1,
        model: "H100".into(),
        total_bytes: Some(80 << 30),
        last: last.clone(),
        peak: Moment {
            time_ns: 300,
            tracked_bytes: Some(60),
            amounts: vec![(1, 60)].into(),
            gap_distance_ns: -4,
            partial: true,
            parts: None,
            ..last
        },
        peak_used: Some((70, 300)),
        beside: SideMemory { pinned_bytes: 5, ..SideMemory::default() },
        reading: Some(DeviceReading {
            time_ns: 300,
            used_bytes: 99,
            free_bytes: 1,
            system_reserved_bytes: None,
            unified: false,
        }),
        unaccounted_bytes: Some(-1),
        tenants: vec![(43, Some(6))],
        other_tenants: (0, 0),
        series: Series { width_ns: 10, buckets },
        details,
    };
    Run {
        source: Source { kind: "daemon".into(), origin: "node1".into(), preset: None },
        clock: Clock::Monotonic { wall_offset_ns: Some(1000) },
        process: Process {
            pid: 42,
            start_ticks: 7,
            uid: Some(1000),
            facts: [("command".to_owned(), "python train.py".to_owned())].into(),
            claims: [("rank".to_owned(), "3".to_owned())].into(),
        },
        state: State::Closed { time_ns: 900, status: Some(9) },
        coverage: Coverage { covered: true, events: 12, lost: 1, ..Coverage::default() },
        caveats: vec![Caveat { code: "late".into(), text: "The agent came late.".into() }],
        cells,
        devices: vec![device],
        own: if version >= 6 { said() } else { ProgramData::default() },
    }
}

#[test]
fn every_earlier_schema_is_brought_up_to_date_by_a_writer_only() {
    assert_eq!(TEXTS.len() as i64 + 1, VERSION, "a schema that was released has a text here");
    for version in 1..=TEXTS.len() {
        let dir = TempDir::new();
        let db = rusqlite::Connection::open(dir.store()).unwrap();
        TEXTS.iter().take(version).for_each(|text| db.execute_batch(text).unwrap());
        drop(db);
        let before = std::fs::read(dir.store()).unwrap();
        let StoreError::OlderVersion { found, supported, .. } = refused(Store::open_read_only(dir.store()))
        else {
            panic!("read without what it needs")
        };
        assert_eq!((found, supported), (version as i64, VERSION));
        assert_eq!(std::fs::read(dir.store()).unwrap(), before, "a reader changes nothing");

        let mut store = Store::open(dir.store()).unwrap();
        assert_eq!(store.load(RunId(5)).unwrap(), run_of(version));
        let line = store.list().unwrap().remove(0);
        assert_eq!(
            (line.uid.as_str(), line.stored_s, line.part, line.continues),
            ("boot:42:7", 1_700_000_000, 1, None)
        );
        assert_eq!(line.peak_tracked_bytes, Some(60));
        let over = store.deletable_runs().unwrap()[0];
        assert_eq!(over.written_s, 1_700_000_000, "its age is that of the file's own word");
        assert_eq!((over.uid, over.bytes), (Some(1000), None), "unknown is not zero");
        // It can also be written like any other store.
        let newer = Run { coverage: Coverage { events: 13, ..Coverage::default() }, ..run_of(3) };
        store.checkpoint(RunId(5), &newer).unwrap();
        drop(store);
        assert_eq!(Store::open_read_only(dir.store()).unwrap().load(RunId(5)).unwrap().coverage.events, 13);
    }
}
