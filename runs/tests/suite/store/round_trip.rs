//! A loaded run equals the stored one.

use super::support::{TempDir, run_at};
use gpumem_model::growth::{Axis, Growth};
use gpumem_model::keeper::Keeper;
use gpumem_model::run::*;
use gpumem_model::series::{Bucket, Extremes, Series};
use gpumem_model::timeline::Point;
use gpumem_runs::store::{RunId, Store, StoreError};
use proptest::collection::{btree_map, btree_set, vec};
use proptest::option::of;
use proptest::prelude::*;

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        Just(String::new()),
        Just("a\0b'\";--\u{202e}\u{fffd}\n\t\u{1f980}".to_owned()),
        "[a-z/._]{0,40}",
    ]
}

fn facts() -> impl Strategy<Value = std::collections::BTreeMap<String, String>> {
    btree_map(prop_oneof![Just("command".to_owned()), Just("comm".to_owned()), text()], text(), 0..4)
}

fn state() -> impl Strategy<Value = State> {
    prop_oneof![
        Just(State::Open),
        any::<(u64, Option<u64>)>().prop_map(|(time_ns, status)| State::Closed { time_ns, status }),
        Just(State::Interrupted),
        any::<u64>().prop_map(|time_ns| State::Rolled { time_ns }),
    ]
}

fn coverage() -> impl Strategy<Value = Coverage> {
    let blind = (any::<(u64, Option<u64>)>(), text());
    let blind =
        blind.prop_map(|((from_ns, to_ns), why)| gpumem_model::run::BlindWindow { from_ns, to_ns, why });
    let blocked = (of(text()), any::<Option<u16>>(), prop::collection::vec(blind, 0..3));
    let layer = (text(), text(), text());
    let layer = layer.prop_map(|(layer, state, reason)| LayerReport { layer, state, reason });
    let rest = (any::<[u64; 14]>(), vec(layer, 0..3));
    (any::<[bool; 5]>(), blocked, rest).prop_map(|(flags, blocked, (counts, layers))| Coverage {
        covered: flags[0],
        late: flags[1],
        blocked_by: blocked.0,
        blocked_code: blocked.1,
        blind: blocked.2,
        blind_count: counts[11],
        blind_ns: counts[12],
        blind_doubt: flags[4],
        partial_state: flags[2],
        partial_history: flags[3],
        events: counts[0],
        allocations: counts[8],
        allocated_bytes: counts[9],
        rejected: counts[10],
        lost: counts[1],
        withheld: counts[6],
        complete: flags[3],
        odd: counts[2],
        samples: counts[3],
        torn_samples: counts[4],
        stale_samples: counts[5],
        failed_allocations: counts[6],
        steps: counts[7],
        layers,
        ooms_dropped: counts[13],
        marks: Vec::new(),
        marks_dropped: counts[9],
        programs: vec![Program { instance: counts[4] as u16, heard: counts[5] }; usize::from(flags[1])],
        part: flags[0].then_some(Part { number: 3, began_ns: counts[2], events_before: counts[0] }),
    })
}

fn parameters() -> impl Strategy<Value = Parameters> {
    let column = (text(), of(text())).prop_map(|(role, tag)| gpumem_model::parameters::Column { role, tag });
    let change = (any::<u64>(), vec(any::<(u32, i64)>(), 0..4));
    (vec(column, 0..4), any::<bool>(), vec(change, 0..3)).prop_map(|(columns, is_cut, changes)| Parameters {
        columns,
        is_cut,
        changes,
    })
}

fn own() -> impl Strategy<Value = ProgramData> {
    let counter =
        (of(text()), any::<[i64; 3]>(), any::<i128>(), any::<[u64; 3]>(), vec(any::<(u64, i64)>(), 0..3));
    let counter =
        counter.prop_map(|(name, [value, min, max], area, [changes, since_ns, until_ns], points)| {
            gpumem_model::program_data::Counter {
                name,
                value,
                changes,
                min,
                max,
                area,
                since_ns,
                until_ns,
                points,
            }
        });
    let range = (of(text()), any::<bool>(), any::<[u64; 5]>());
    let range = range.prop_map(|(name, is_step, [count, total_ns, min_ns, max_ns, open])| {
        gpumem_model::program_data::Range { name, is_step, count, total_ns, min_ns, max_ns, open }
    });
    let span = any::<(u32, u32, u64, u64)>();
    let span = span.prop_map(|(range, thread, from_ns, to_ns)| {
        gpumem_model::program_data::Span(range, thread, from_ns, to_ns)
    });
    let lists = (vec(counter, 0..3), vec(range, 0..20), vec(span, 0..300));
    (lists, any::<[u64; 4]>()).prop_map(|((counters, ranges, spans), dropped)| ProgramData {
        counters,
        counters_dropped: dropped[0],
        ranges,
        ranges_dropped: dropped[1],
        ranges_broken: dropped[2],
        spans,
        spans_dropped: dropped[3],
        snapshot: (dropped[0] % 2 == 0).then_some(gpumem_model::program_data::SnapshotFigures {
            reserved_bytes: dropped[1],
            peak_requested_bytes: dropped[2],
            ..Default::default()
        }),
    })
}

fn cell() -> impl Strategy<Value = Cell> {
    let class = prop::sample::select(vec![Class::Direct, Class::Block, Class::PoolIdle, Class::Opaque]);
    let words = (of(text()), of(text()), of(text()), of(text()), of(text()), of(text()));
    (class, words, any::<[bool; 2]>()).prop_map(|(class, words, [pending, inherited])| {
        let (tag, origin, role, phase, library, pool) = words;
        Cell { class, tag, origin, role, phase, library, pool, pending, inherited }
    })
}

fn moment(cells: usize) -> impl Strategy<Value = Moment> {
    let amounts = btree_map(0..cells.max(1) as u32, any::<i64>(), 0..=cells);
    let numbers = any::<(u64, Option<i64>, Option<i64>, Option<i64>, Option<u64>, i64)>();
    (amounts, numbers, any::<(Option<(i64, i64)>, bool, bool)>(), (of(text()), of(parts()))).prop_map(
        move |(amounts, numbers, (torn, stale, partial), (used_absence, parts))| {
            let (time_ns, tracked_bytes, predates_bytes, untrackable_bytes, uncovered_used_bytes, distance) =
                numbers;
            Moment {
                time_ns,
                tracked_bytes,
                amounts: amounts.into_iter().filter(|&(cell, _)| (cell as usize) < cells).collect(),
                predates_bytes,
                untrackable_bytes,
                parts,
                used_absence,
                uncovered_used_bytes,
                gap_distance_ns: distance,
                torn,
                stale,
                partial,
            }
        },
    )
}

fn parts() -> impl Strategy<Value = UntrackableParts> {
    any::<[i64; 6]>().prop_map(|[context, modules, local_memory, heaps, rounding, unexplained]| {
        UntrackableParts {
            context_bytes: context,
            modules_bytes: modules,
            local_memory_bytes: local_memory,
            heaps_bytes: heaps,
            rounding_bytes: rounding,
            unexplained_bytes: unexplained,
        }
    })
}

fn step() -> impl Strategy<Value = UntrackableChange> {
    let numbers = (any::<(u64, u64, u64, i64, Option<i64>)>(), parts());
    let words = (text(), vec(text(), 0..3), text(), of(text()), of(text()), of(text()));
    (numbers, words).prop_map(|((numbers, parts), (cause, also, kind, tag, library, note))| {
        let (from_ns, time_ns, events, bytes, expected_bytes) = numbers;
        UntrackableChange {
            from_ns,
            time_ns,
            bytes,
            parts,
            cause,
            also,
            events,
            kind,
            tag,
            library,
            expected_bytes,
            note,
        }
    })
}

fn extremes() -> impl Strategy<Value = Option<Extremes>> {
    of(any::<[i64; 3]>().prop_map(|[min, max, last]| Extremes { min, max, last }))
}

/// Few widths, and times that are often shared, so that the second checkpoint keeps part of the first.
fn series() -> impl Strategy<Value = Series> {
    let buckets = btree_set(prop_oneof![0..8u64, any::<u64>()], 0..12).prop_flat_map(|times| {
        let bucket = (extremes(), extremes(), extremes(), any::<u32>(), 0..2u32);
        vec(bucket, times.len()).prop_map(move |buckets| {
            let timed = times.iter().zip(buckets);
            let bucket = |(&time_ns, (used, tracked, untrackable, samples, doubtful))| Bucket {
                time_ns,
                used,
                tracked,
                untrackable,
                samples,
                doubtful,
            };
            timed.map(bucket).collect()
        })
    });
    (prop_oneof![1..3u64, any::<u64>()], buckets).prop_map(|(width_ns, buckets)| Series { width_ns, buckets })
}

fn growth(cells: usize) -> impl Strategy<Value = Growth> {
    let points = || vec(any::<i64>(), 0..4);
    let timed = || vec(any::<(u64, i64)>(), 0..4);
    let of_cells = vec((0..cells.max(1) as u32, points()), 0..3);
    let at = (any::<bool>(), any::<u64>(), vec(any::<(u64, u64)>(), 0..4), any::<(u64, u64)>());
    (at, (points(), points()), points(), of_cells, points(), timed(), timed()).prop_map(
        |((by_step, stride, points, latest), (named, pinned), slack, cells, rest, gap, used)| Growth {
            axis: if by_step { Axis::Step } else { Axis::Period },
            period_ns: (!by_step).then_some(stride),
            stride,
            points,
            latest,
            named,
            slack,
            pinned_cells: gap.iter().map(|(time_ns, bytes)| (*time_ns as u32, *bytes)).collect(),
            early_pinned_cells: used.iter().map(|(time_ns, bytes)| (*time_ns as u32, *bytes)).collect(),
            pinned,
            cells,
            rest,
            gap,
            used,
        },
    )
}

fn iteration() -> impl Strategy<Value = Iteration> {
    let level = prop_oneof![Just((0, 0)), any::<(i64, i64)>()].prop_map(Level::from);
    (any::<[u64; 7]>(), any::<bool>(), vec(level, 15)).prop_map(|(numbers, partial, levels)| Iteration {
        epoch: numbers[5],
        first: numbers[0],
        last: numbers[1],
        count: numbers[2],
        start_ns: numbers[3],
        end_ns: numbers[4],
        partial,
        tracked: levels[0],
        pool_reserved: levels[1],
        parameters: levels[2],
        gradients: levels[3],
        optimizer_state: levels[4],
        activations: levels[5],
        intermediate_gradients: levels[6],
        temporaries: levels[7],
        inputs: levels[8],
        workspace: levels[9],
        buffers: levels[10],
        kv_caches: levels[11],
        parameter_copies: levels[12],
        kept_gradients: levels[13],
        kept_activations: levels[14],
        passes_at_once: numbers[6],
    })
}

fn timeline(cells: usize) -> impl Strategy<Value = Timeline> {
    let amounts = btree_map(0..cells.max(1) as u32, any::<i64>(), 0..4);
    let point = (any::<u64>(), amounts, any::<i64>()).prop_map(move |(time_ns, amounts, rest_bytes)| Point {
        time_ns,
        amounts: amounts.into_iter().filter(|&(cell, _)| (cell as usize) < cells).collect(),
        rest_bytes,
    });
    let points = prop_oneof![4 => vec(point.clone(), 0..3), 1 => vec(point, 15..40)];
    (any::<u64>(), points).prop_map(|(width_ns, points)| Timeline { width_ns, points })
}

fn iterations() -> impl Strategy<Value = Iterations> {
    (vec(iteration(), 0..3), of(iteration())).prop_map(|(rows, open)| Iterations { rows, open })
}

fn pool() -> impl Strategy<Value = Pool> {
    let told = any::<(Option<u64>, Option<(u64, u64)>, Option<(u64, u64)>)>();
    (any::<[u64; 5]>(), of(text()), of(text()), told, any::<bool>()).prop_map(
        |(numbers, name, owner, (parent, own, check), opaque)| Pool {
            id: numbers[0],
            name,
            owner,
            parent,
            opaque,
            segment_bytes: numbers[1],
            booked_bytes: numbers[2],
            block_bytes: numbers[3],
            pending_bytes: numbers[4],
            streams: parent.map(|parent| parent as u32),
            private_pools: own.map(|(reserved, _)| reserved as u32),
            own,
            check,
        },
    )
}

fn oom(cells: usize) -> impl Strategy<Value = Oom> {
    let fate = prop_oneof![
        Just(Fate::Open),
        Just(Fate::Survived),
        any::<(u64, Option<u64>)>().prop_map(|(after_ns, status)| Fate::Fatal { after_ns, status }),
    ];
    let kind =
        prop::sample::select(vec![OomKind::Pressure, OomKind::Pool, OomKind::Device, OomKind::Suspected]);
    let holder = (any::<u32>(), of(text()), any::<i64>(), any::<Option<i64>>(), any::<Option<u64>>())
        .prop_map(|(pid, user, used_bytes, growth_bytes, growth_ns)| Holder {
            pid,
            user,
            used_bytes,
            growth_bytes,
            growth_ns,
            since_ns: growth_ns,
        });
    let numbers = any::<(u64, u64, i64, Option<u64>, i64, (u32, i64), bool)>();
    let device = (numbers, vec(holder, 0..3)).prop_map(|(numbers, holders)| OomDevice {
        read_ns: numbers.0,
        total_bytes: numbers.1,
        free_bytes: numbers.2,
        system_bytes: numbers.3,
        unaccounted_bytes: numbers.4,
        holders,
        others: numbers.5,
        unified: numbers.6,
    });
    let words = (of(text()), of(text()), of(text()), of(text()), of(text()));
    let amounts = btree_map(0..cells.max(1) as u32, any::<i64>(), 0..=cells);
    let held = (any::<(i64, Option<i64>, Option<i64>)>(), amounts);
    (kind, fate, any::<[u64; 5]>(), any::<[Option<u64>; 7]>(), words, held, of(device), any::<(u16, bool)>())
        .prop_map(|(kind, fate, counts, maybe, words, held, device, (result, is_unheard))| {
            let (said, tag, library, stack, phase) = words;
            let tag_of_keeper = tag.clone().unwrap_or_default();
            let ((tracked_bytes, predates_bytes, untrackable_bytes), amounts) = held;
            Oom {
                kind,
                fate,
                time_ns: counts[0],
                last_ns: counts[1],
                count: counts[2],
                refusals: counts[3],
                asked_bytes: counts[4],
                driver_asked_bytes: maybe[0],
                device_free_bytes: maybe[1],
                pool_used_bytes: maybe[2],
                pool_reserved_bytes: maybe[3],
                said,
                result,
                tag,
                library,
                stack,
                phase,
                step: maybe[4],
                passes_without_backward: maybe[3],
                passes_after_first: maybe[3],
                tracked_bytes,
                amounts: amounts.into_iter().collect(),
                predates_bytes,
                untrackable_bytes,
                idle_bytes: maybe[5],
                idle_pieces: maybe[4],
                largest_idle_bytes: maybe[6],
                is_expandable: is_unheard,
                is_partial: !is_unheard,
                keepers: keepers(is_unheard, counts, tag_of_keeper),
                device,
                is_unheard,
                is_stalled: false,
            }
        })
}

fn keepers(is_known: bool, counts: [u64; 5], name: String) -> Vec<Keeper> {
    let [tensors, bytes, with_graph, ..] = counts;
    let keeper =
        Keeper { kind: "local".into(), name, tensors, bytes, with_graph, is_sum: true, ..Keeper::default() };
    if is_known { vec![keeper] } else { Vec::new() }
}

fn device(cells: usize) -> impl Strategy<Value = Device> {
    let identity = (text(), any::<u16>(), text(), of(any::<u64>()));
    let reading = any::<([u64; 3], Option<u64>, bool)>().prop_map(
        |([time_ns, used_bytes, free_bytes], reserved, unified)| DeviceReading {
            time_ns,
            used_bytes,
            free_bytes,
            system_reserved_bytes: reserved,
            unified,
        },
    );
    let beside = any::<[i64; 7]>().prop_map(|bytes| SideMemory {
        managed_bytes: bytes[0],
        pinned_bytes: bytes[1],
        registered_bytes: bytes[2],
        imported_bytes: bytes[3],
        host_vmm_bytes: bytes[4],
        unbooked_block_bytes: bytes[5],
        pending_block_bytes: bytes[6],
    });
    let tenants = (vec(any::<(u32, Option<u64>)>(), 0..3), any::<(u32, u64)>());
    let rest = (any::<Option<(u64, u64)>>(), beside, of(reading), any::<Option<i64>>(), tenants, series());
    let tables = ((iterations(), parameters()), vec(pool(), 0..3), vec(oom(cells), 0..3), timeline(cells));
    let rest = (rest, (of(any::<u64>()), vec(step(), 0..4), growth(cells), tables));
    (identity, moment(cells), moment(cells), rest).prop_map(|(identity, last, peak, rest)| {
        let (name, ordinal, model, total_bytes) = identity;
        let (rest, (accounted_peak_bytes, steps, growth, ((iterations, parameters), pools, ooms, timeline))) =
            rest;
        let (peak_used, beside, reading, unaccounted_bytes, (tenants, other_tenants), series) = rest;
        Device {
            name,
            ordinal,
            model,
            total_bytes,
            last,
            peak,
            peak_used,
            beside,
            reading,
            unaccounted_bytes,
            tenants,
            other_tenants,
            series,
            details: Details {
                blocks: Default::default(), // not stored
                accounted_peak_bytes,
                steps,
                graphs: accounted_peak_bytes.unwrap_or(0),
                largest_tenant: accounted_peak_bytes.map(|used| Holder {
                    pid: 7,
                    used_bytes: (used / 2) as i64,
                    since_ns: Some(used),
                    ..Holder::default()
                }),
                growth,
                timeline,
                iterations,
                parameters,
                pools,
                ooms,
                faults: peak_used.into_iter().collect(),
            },
        }
    })
}

fn run() -> impl Strategy<Value = Run> {
    let source = (text(), text(), of(text()));
    let clock = prop_oneof![
        Just(Clock::Lines),
        any::<Option<i64>>().prop_map(|wall_offset_ns| Clock::Monotonic { wall_offset_ns })
    ];
    let process = (any::<(u32, u64, Option<u64>)>(), facts(), facts());
    let caveats = vec((text(), text()).prop_map(|(code, text)| Caveat { code, text }), 0..3);
    let cells = vec(cell(), 0..8);
    let said = (coverage(), own());
    (source, clock, process, state(), said, caveats, cells).prop_flat_map(|parts| {
        let devices = vec(device(parts.6.len()), 0..3);
        (Just(parts), devices).prop_map(
            |((source, clock, process, state, (coverage, own), caveats, cells), devices)| {
                let (kind, origin, preset) = source;
                let ((pid, start_ticks, uid), facts, claims) = process;
                Run {
                    source: Source { kind, origin, preset },
                    clock,
                    process: Process { pid, start_ticks, uid, facts, claims },
                    state,
                    coverage,
                    caveats,
                    cells,
                    devices,
                    own,
                }
            },
        )
    })
}

/// The run as it is loaded once it has no writer.
fn abandoned(mut run: Run) -> Run {
    if run.state == State::Open {
        run.state = State::Interrupted;
    }
    run
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    /// Three unrelated runs checkpointed over one another: nothing is left of the earlier ones.
    #[test]
    fn whatever_was_stored_last_is_loaded(first in run(), second in run(), third in run(), uid in text()) {
        let dir = TempDir::new();
        let mut store = Store::open(dir.store()).unwrap();
        let id = store.begin(&first, &uid).unwrap();
        prop_assert_eq!(&store.load(id).unwrap(), &first);
        store.checkpoint(id, &second).unwrap();
        prop_assert_eq!(&store.load(id).unwrap(), &second);
        let (other, new) = store.insert(&first, &(uid.clone() + "'")).unwrap();
        prop_assert!(new);
        store.close(id, &third).unwrap();
        drop(store);

        let store = Store::open_read_only(dir.store()).unwrap();
        prop_assert_eq!(store.load(id).unwrap(), abandoned(third.clone()));
        prop_assert_eq!(store.load(other).unwrap(), abandoned(first.clone()));
        let list = store.list().unwrap();
        prop_assert_eq!(list.iter().map(|line| line.id).collect::<Vec<_>>(), [other, id]);
        prop_assert_eq!(store.newest_runs(1).unwrap(), &list[..1]);
        prop_assert_eq!(store.newest_runs(0).unwrap(), []);
        for (line, run) in list.iter().zip([&first, &third]) {
            let peaks = run.devices.iter().filter_map(|device| device.peak.tracked_bytes);
            prop_assert_eq!(line.peak_tracked_bytes, peaks.max());
            prop_assert_eq!(line.events, run.coverage.events);
            prop_assert_eq!(line.state, abandoned(run.clone()).state);
            prop_assert_eq!(line.clock, run.clock);
        }
    }

    /// Runs of one process, of which only the first is written to the database: deltas add up to what a whole write would store.
    #[test]
    fn deltas_add_up_to_the_last_run(runs in vec(run(), 2..6), uid in text()) {
        let dir = TempDir::new();
        let mut store = Store::open(dir.store()).unwrap();
        let first = &runs[0];
        let devices = runs.iter().map(|run| run.devices.len()).min().unwrap();
        let of_one_process = |run: &Run| {
            let mut run = run.clone();
            (run.source, run.clock, run.state) = (first.source.clone(), first.clock, first.state);
            run.process = first.process.clone();
            run.devices.truncate(devices);
            for (device, of_first) in run.devices.iter_mut().zip(&first.devices) {
                (device.name, device.ordinal) = (of_first.name.clone(), of_first.ordinal);
                device.details.ooms.clear();
            }
            run
        };
        let id = store.begin(&of_one_process(first), &uid).unwrap();
        let before = std::fs::read(dir.path().join("runs.db-wal")).unwrap();
        for run in &runs {
            store.checkpoint(id, &of_one_process(run)).unwrap();
            prop_assert_eq!(store.load(id).unwrap(), of_one_process(run));
            prop_assert_eq!(store.list().unwrap()[0].events, run.coverage.events);
        }
        prop_assert!(std::fs::read(dir.path().join("runs.db-wal")).unwrap() == before, "the database was written");
        let last = of_one_process(runs.last().unwrap());
        store.close(id, &last).unwrap();
        drop(store);
        prop_assert_eq!(Store::open_read_only(dir.store()).unwrap().load(id).unwrap(), abandoned(last));
    }

    /// Realistic growth of a series: amounts change, buckets are added, the last one grows, all widen.
    #[test]
    fn a_run_that_grows(steps in vec(0..400u64, 1..12)) {
        let dir = TempDir::new();
        let mut store = Store::open(dir.store()).unwrap();
        let id = store.begin(&run_at(0), "grows").unwrap();
        let mut n = 0;
        for step in steps {
            n += step;
            store.checkpoint(id, &run_at(n)).unwrap();
            prop_assert_eq!(store.load(id).unwrap(), run_at(n));
        }
    }
}

#[test]
fn inserting_twice_changes_nothing() {
    let dir = TempDir::new();
    let mut store = Store::open(dir.store()).unwrap();
    let closed = Run { state: State::Closed { time_ns: 5, status: Some(9) }, ..run_at(3) };
    let (id, new) = store.insert(&closed, "import:1").unwrap();
    assert!(new);
    assert_eq!(store.insert(&run_at(4), "import:1").unwrap(), (id, false));
    assert_eq!(store.load(id).unwrap(), closed);

    let error = store.begin(&run_at(4), "import:1").unwrap_err();
    assert!(matches!(error, StoreError::KnownUid { id: known, .. } if known == id), "{error}");
    assert_eq!(store.list().unwrap().len(), 1);
}

#[test]
fn list_says_what_people_look_for() {
    let dir = TempDir::new();
    let mut store = Store::open(dir.store()).unwrap();
    assert_eq!(store.latest().unwrap(), None);
    assert_eq!(store.list().unwrap(), []);
    let mut import = Run { state: State::Interrupted, clock: Clock::Lines, ..run_at(2) };
    import.process.facts.clear();
    import.source = Source { kind: "tbd-log".into(), origin: "old.log".into(), preset: None };
    store.insert(&import, "a").unwrap();
    let id = store.begin(&run_at(9), "b").unwrap();
    assert_eq!(store.latest().unwrap(), Some(id));

    let list = store.list().unwrap();
    assert_eq!((list[0].id, &*list[0].uid, &*list[0].label), (id, "b", "python train.py"));
    assert_eq!((list[0].pid, &*list[0].source_kind, list[0].state), (4242, "daemon", State::Open));
    assert_eq!((list[0].started_ns, list[0].last_ns), (Some(0), Some(80)));
    assert_eq!(list[0].peak_tracked_bytes, run_at(9).devices[0].peak.tracked_bytes);
    assert!(list[0].stored_s > 1_600_000_000);
    assert_eq!(
        (&*list[1].label, list[1].state, list[1].clock),
        ("old.log", State::Interrupted, Clock::Lines)
    );
}

#[test]
fn a_closed_run_that_did_not_end_is_interrupted() {
    let dir = TempDir::new();
    let mut store = Store::open(dir.store()).unwrap();
    let id = store.begin(&run_at(1), "a").unwrap();
    assert_eq!(store.load(id).unwrap().state, State::Open);
    store.close(id, &run_at(2)).unwrap();
    assert_eq!(store.load(id).unwrap(), abandoned(run_at(2)));
}

#[test]
fn what_the_tables_cannot_hold_is_refused_whole() {
    let dir = TempDir::new();
    let mut store = Store::open(dir.store()).unwrap();
    let id = store.begin(&run_at(4), "a").unwrap();
    for amounts in [vec![(1, 1), (1, 1)], vec![(2, 1), (1, 1)], vec![(u32::MAX, 1)]] {
        let mut run = run_at(5);
        run.devices[0].peak.amounts = amounts.into();
        let error = store.checkpoint(id, &run).unwrap_err();
        assert!(matches!(error, StoreError::InvalidRun { .. }), "{error}");
        assert!(error.to_string().contains("peak amounts of device \"GPU-0\""), "{error}");
    }
    assert_eq!(store.load(id).unwrap(), run_at(4));
}

#[test]
fn unknown_runs() {
    let dir = TempDir::new();
    let mut store = Store::open(dir.store()).unwrap();
    let id: RunId = "r7".parse().unwrap();
    for error in [store.load(id).unwrap_err(), store.checkpoint(id, &run_at(1)).unwrap_err()] {
        assert!(matches!(error, StoreError::UnknownRun { .. }), "{error}");
        assert!(error.to_string().contains("there is no run r7: "), "{error}");
    }
    assert_eq!(store.list().unwrap(), []);
}

#[test]
fn names_of_runs() {
    assert_eq!("r7".parse(), Ok(RunId(7)));
    assert_eq!(RunId(7).to_string(), "r7");
    for wrong in ["", "7", "r", "r0", "r-1", "r+1", "R7", "r7 ", "r99999999999999999999"] {
        let error = wrong.parse::<RunId>().unwrap_err().to_string();
        assert_eq!(
            error,
            format!("{wrong:?} is not a run: runs are named r1, r2, ...; gpumemctl runs lists them")
        );
    }
}
