//! Joins a run that an earlier daemon stored with this daemon's run of the same process.
//!
//! This daemon's ledger starts from the agent's present state, so it counts all earlier records as lost. Records that the earlier
//! daemon received are not lost.

use gpumem_ledger::MAX_MARKS;
use gpumem_model::fields::Field;
use gpumem_model::iterations::MAX_ROWS;
use gpumem_model::run::{BlindWindow, Coverage, Device, Part, Run, State};

/// Maximum number of out-of-memory events that a joined run keeps: the first one and the latest ones.
const MAX_OOMS: usize = 32;

/// Returns the stored run joined with this daemon's run `now`. If the stored run is a complete part (rolled), returns `now` as the
/// next part.
pub(super) fn join_runs(before: &Run, now: &Run) -> Run {
    match before.state {
        State::Rolled { time_ns } => next_part(before, time_ns, now),
        _ => same_part(before, now),
    }
}

/// Returns the number of records received in a run and its earlier parts.
pub(super) fn received_records(run: &Run) -> u64 {
    seen(run).saturating_sub(run.coverage.lost)
}

/// Returns how many records that this daemon missed at its start were received by the earlier daemon, from the same program.
fn received_before(before: &Run, now: &Run) -> u64 {
    match (before.coverage.programs.last(), now.coverage.programs.first()) {
        (Some(then), Some(now)) if then.instance != now.instance => 0,
        (Some(then), _) => then.heard,
        (None, _) => seen(before),
    }
}

/// Returns the number of records, received or lost, of a run and its earlier parts.
fn seen(run: &Run) -> u64 {
    let coverage = &run.coverage;
    let before = coverage.part.map_or(0, |part| part.events_before);
    before.saturating_add(coverage.events).saturating_add(coverage.lost)
}

/// Returns `now` as the next part. Used if the daemon ended after the part `before` was complete and before `now` was stored.
fn next_part(before: &Run, rolled_ns: u64, now: &Run) -> Run {
    let mut run = now.clone();
    let (coverage, events_before) = (&mut run.coverage, seen(before));
    coverage.lost = coverage.lost.saturating_sub(received_before(before, now));
    coverage.partial_history = coverage.partial_state || coverage.lost > 0;
    let number = before.coverage.part.map_or(1, |part| part.number).saturating_add(1);
    coverage.part = Some(Part { number, began_ns: rolled_ns, events_before });
    run
}

fn same_part(before: &Run, now: &Run) -> Run {
    let (mut then, mut run) = (before.clone(), now.clone());
    let cells = run.merge_cells(&before.cells);
    then.remap(&|cell| cells.get(cell as usize).copied());
    let mut dropped = 0_u64;
    for old in then.devices {
        match run.devices.iter_mut().find(|device| device.name == old.name) {
            Some(device) => dropped = dropped.saturating_add(join_device(old, device)),
            None => run.devices.push(old),
        }
    }
    run.coverage = joined_coverage(then.coverage, run.coverage, received_before(before, now));
    run.coverage.ooms_dropped = run.coverage.ooms_dropped.saturating_add(dropped);
    then.own.append(run.own);
    run.own = then.own;
    then.caveats.retain(|caveat| !run.caveats.contains(caveat));
    run.caveats.splice(0..0, then.caveats);
    for (key, value) in then.process.facts {
        run.process.facts.entry(key).or_insert(value);
    }
    run
}

/// Joins the coverage of both runs. `known`: number of records that this daemon missed and the earlier one received.
fn joined_coverage(mut then: Coverage, mut now: Coverage, known: u64) -> Coverage {
    now.lost = now.lost.saturating_sub(known);
    now.partial_history = now.partial_state || now.lost > 0;
    // A period without records that has not ended is reported to each daemon, so both runs may have it.
    let is_in_both = |window: &&BlindWindow| now.blind.iter().any(|other| other.from_ns == window.from_ns);
    let again = then.blind.iter().filter(is_in_both).count() as u64;
    let programs = now.programs.clone();
    then.join(now);
    then.blind_count = then.blind_count.saturating_sub(again);
    then.programs = programs;
    let beyond = then.marks.len().saturating_sub(2 * MAX_MARKS);
    then.marks.drain(..beyond);
    then.marks_dropped = then.marks_dropped.saturating_add(beyond as u64);
    then
}

/// Joins both runs' data of a device, within the limits of a run. Returns the number of OOM reports that were dropped for lack of
/// room.
fn join_device(mut old: Device, device: &mut Device) -> u64 {
    let accounted_peaks = [old.details.accounted_peak_bytes, device.details.accounted_peak_bytes];
    old.join(std::mem::take(device));
    *device = old;
    let details = &mut device.details;
    details.accounted_peak_bytes = accounted_peaks.into_iter().max().flatten();
    details.timeline.thin();
    let rows = &mut details.iterations.rows;
    rows.drain(..rows.len().saturating_sub(MAX_ROWS));
    let mut dropped = 0_u64;
    while details.ooms.len() > MAX_OOMS {
        dropped = dropped.saturating_add(details.ooms.remove(MAX_OOMS / 2).count.max(1));
    }
    dropped
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_model::run::{
        Cell, Class, Clock, Iteration, Moment, Oom, Process, ProgramData, SideMemory, Source,
    };
    use gpumem_model::series::{Bucket, Series};
    use gpumem_model::timeline::{Point, Timeline};

    fn cell(tag: &str) -> Cell {
        Cell { class: Class::Direct, tag: Some(tag.into()), ..Cell::default() }
    }

    fn run(tags: &[&str], peak: &[(u32, i64)], coverage: Coverage) -> Run {
        let moment = Moment {
            tracked_bytes: Some(peak.iter().map(|(_, bytes)| bytes).sum()),
            amounts: peak.to_vec().into(),
            ..Moment::default()
        };
        let device = Device {
            name: "GPU-1".into(),
            ordinal: 0,
            model: String::new(),
            total_bytes: None,
            last: moment.clone(),
            peak: moment,
            peak_used: Some((5, 5)),
            beside: SideMemory::default(),
            reading: None,
            unaccounted_bytes: None,
            tenants: Vec::new(),
            other_tenants: (0, 0),
            series: Series::new(1),
            details: Default::default(),
        };
        Run {
            source: Source { kind: "daemon".into(), origin: "host".into(), preset: None },
            clock: Clock::Monotonic { wall_offset_ns: None },
            process: Process::default(),
            state: State::Open,
            coverage,
            caveats: Vec::new(),
            cells: tags.iter().map(|tag| cell(tag)).collect(),
            devices: vec![device],
            own: ProgramData::default(),
        }
    }

    #[test]
    fn a_higher_peak_of_the_earlier_life_stays_with_its_names() {
        let before =
            run(&["a", "b", "c"], &[(0, 10), (2, 30)], Coverage { events: 100, ..Coverage::default() });
        let lost = Coverage { events: 7, lost: 100, partial_history: true, ..Coverage::default() };
        let now = run(&["c", "d"], &[(0, 1), (1, 2)], lost);
        let whole = join_runs(&before, &now);
        assert_eq!(whole.cells, [cell("c"), cell("d"), cell("a"), cell("b")]);
        assert_eq!(whole.devices[0].peak.amounts, [(0, 30), (2, 10)]);
        assert_eq!(whole.devices[0].last, now.devices[0].last);
        assert_eq!((whole.coverage.events, whole.coverage.lost), (107, 0));
        assert!(!whole.coverage.partial_history, "the earlier life had booked what this one never saw");
    }

    #[test]
    fn what_happened_in_both_lives_is_told_with_the_right_names() {
        let mut before = run(&["a", "b"], &[(1, 30)], Coverage::default());
        let point =
            |time_ns, cell, bytes| Point { time_ns, amounts: vec![(cell, bytes)].into(), rest_bytes: 1 };
        let oom = |time_ns, cell| Oom { time_ns, amounts: vec![(cell, 5)].into(), ..Oom::default() };
        let row = |first| Iteration { first, ..Iteration::default() };
        let details = &mut before.devices[0].details;
        details.timeline =
            Timeline { width_ns: 4, points: (0..200).map(|at| point(4 * at, 1, 30)).collect() };
        details.ooms = vec![oom(7, 1)];
        details.iterations.rows = vec![row(0)];
        let mut now = run(&["b", "c"], &[(0, 10)], Coverage::default());
        let details = &mut now.devices[0].details;
        details.timeline =
            Timeline { width_ns: 2, points: (150..400).map(|at| point(4 * at, 0, 9)).collect() };
        details.ooms = vec![oom(300, 1)];
        details.iterations.rows = vec![row(1)];
        let whole = join_runs(&before, &now);
        assert_eq!(whole.cells, [cell("b"), cell("c"), cell("a")]);
        let details = &whole.devices[0].details;
        assert_eq!(details.ooms, [oom(7, 0), oom(300, 1)]);
        assert_eq!(details.iterations.rows, [row(0), row(1)]);
        assert_eq!((details.timeline.width_ns, details.timeline.points.len()), (8, 201));
        assert!(details.timeline.points.is_sorted_by(|a, b| a.time_ns < b.time_ns));
        assert_eq!(details.timeline.points[0].amounts, [(0, 30)]);
        assert_eq!(details.timeline.points[200].amounts, [(0, 9)]);
    }

    #[test]
    fn a_part_after_one_that_rolled_begins_anew() {
        let part = Part { number: 2, began_ns: 5, events_before: 50 };
        let mut before = run(
            &["a"],
            &[(0, 30)],
            Coverage { events: 40, lost: 1, part: Some(part), ..Coverage::default() },
        );
        before.state = State::Rolled { time_ns: 9 };
        let lost = Coverage { events: 3, lost: 93, partial_history: true, ..Coverage::default() };
        let next = join_runs(&before, &run(&["b"], &[(0, 7)], lost));
        assert_eq!(next.coverage.part, Some(Part { number: 3, began_ns: 9, events_before: 91 }));
        assert_eq!((next.coverage.events, next.coverage.lost), (3, 2));
        assert_eq!(
            (next.cells.len(), next.devices[0].peak.tracked_bytes),
            (1, Some(7)),
            "nothing of the part before"
        );
    }

    #[test]
    fn damaged_counts_are_added_without_overflow() {
        let most = u64::MAX;
        let part = Some(Part { number: u32::MAX, began_ns: most, events_before: most });
        let window = BlindWindow { from_ns: 1, to_ns: None, why: "paused".into() };
        let worst = || Coverage {
            covered: true,
            blind: vec![window.clone()],
            blind_count: most,
            blind_ns: most,
            events: most,
            allocations: most,
            allocated_bytes: most,
            rejected: most,
            lost: most,
            odd: most,
            samples: most,
            torn_samples: most,
            stale_samples: most,
            failed_allocations: most,
            steps: most,
            ooms_dropped: most,
            marks_dropped: most,
            part,
            ..Coverage::default()
        };
        let damaged = || {
            let mut run = run(&["a"], &[(0, i64::MAX)], worst());
            let device = &mut run.devices[0];
            let bucket = Bucket { samples: u32::MAX, doubtful: u32::MAX, ..Bucket::default() };
            device.series = Series { width_ns: 0, buckets: vec![bucket] };
            let point = Point { time_ns: 1, amounts: vec![(0, i64::MAX)].into(), rest_bytes: i64::MAX };
            device.details.timeline = Timeline { width_ns: 0, points: vec![point; 300] };
            device.details.ooms = vec![Oom { count: most, ..Oom::default() }; MAX_OOMS];
            run
        };
        let whole = join_runs(&damaged(), &damaged());
        let coverage = &whole.coverage;
        assert_eq!((coverage.events, coverage.samples, coverage.ooms_dropped), (most, most, most));
        assert_eq!(whole.devices[0].series.buckets[0].samples, u32::MAX);
        // The next part of a damaged run.
        let mut rolled = damaged();
        rolled.state = State::Rolled { time_ns: most };
        let next = join_runs(&rolled, &damaged());
        assert_eq!(next.coverage.part, Some(Part { number: u32::MAX, began_ns: most, events_before: most }));
    }

    #[test]
    fn times_in_which_nothing_was_seen_are_those_of_both_lives() {
        let window = |from_ns, to_ns| BlindWindow { from_ns, to_ns, why: "paused".into() };
        let blind = |blind: Vec<BlindWindow>, blind_ns| Coverage {
            covered: true,
            blind_count: blind.len() as u64,
            blind,
            blind_ns,
            ..Coverage::default()
        };
        let then = blind(vec![window(1, Some(3)), window(7, None)], 2);
        let now = blind(vec![window(7, Some(9)), window(20, None)], 2);
        let whole = join_runs(&run(&["a"], &[(0, 1)], then), &run(&["a"], &[(0, 1)], now)).coverage;
        assert_eq!(whole.blind, [window(1, Some(3)), window(7, Some(9)), window(20, None)]);
        assert_eq!((whole.blind_count, whole.blind_ns), (3, 4));
    }

    #[test]
    fn what_neither_life_saw_is_lost() {
        let before = run(&["a"], &[(0, 1)], Coverage { events: 90, lost: 5, ..Coverage::default() });
        let now = run(&["a"], &[(0, 2)], Coverage { lost: 100, ..Coverage::default() });
        let whole = join_runs(&before, &now);
        assert_eq!(whole.coverage.lost, 10);
        assert!(whole.coverage.partial_history);
        assert_eq!(whole.devices[0].peak, now.devices[0].peak);
    }

    #[test]
    fn a_device_that_only_the_earlier_life_saw_stays() {
        let before = run(&["a"], &[(0, 1)], Coverage::default());
        let mut now = run(&["b"], &[(0, 2)], Coverage::default());
        now.devices[0].name = "GPU-2".into();
        let whole = join_runs(&before, &now);
        assert_eq!(whole.devices.len(), 2);
        assert_eq!(whole.devices[1].last.amounts, [(1, 1)]);
    }
}
