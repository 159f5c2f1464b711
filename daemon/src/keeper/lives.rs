//! A run that an earlier life of the daemon began: what that life saw is kept, what this one sees goes on from it.
//!
//! This life's ledger starts from a resync, so it counts everything before as lost; what the earlier life had
//! booked of that was not.

use gpumem_runs::run::{Cell, Device, Moment, Run};

/// The whole run: what was stored, and what has been seen since.
pub(super) fn joined(before: &Run, now: &Run) -> Run {
    let mut run = now.clone();
    let places = places(&before.cells, &mut run.cells);
    for old in &before.devices {
        match run.devices.iter_mut().find(|device| device.name == old.name) {
            Some(device) => {
                device.series.absorb(&old.series);
                if old.peak.tracked_bytes > device.peak.tracked_bytes {
                    device.peak = moved(&old.peak, &places);
                }
                device.peak_used = device.peak_used.max(old.peak_used);
            }
            None => run.devices.push(Device {
                last: moved(&old.last, &places),
                peak: moved(&old.peak, &places),
                ..old.clone()
            }),
        }
    }
    let (then, coverage) = (&before.coverage, &mut run.coverage);
    let known = then.events + then.lost;
    coverage.lost = then.lost + coverage.lost.saturating_sub(known);
    coverage.partial_history = then.partial_history || coverage.partial_state || coverage.lost > then.lost;
    coverage.covered |= then.covered;
    coverage.late |= then.late;
    coverage.events += then.events;
    coverage.allocations += then.allocations;
    coverage.allocated_bytes = coverage.allocated_bytes.saturating_add(then.allocated_bytes);
    coverage.odd += then.odd;
    coverage.samples += then.samples;
    coverage.torn_samples += then.torn_samples;
    coverage.stale_samples += then.stale_samples;
    coverage.failed_allocations += then.failed_allocations;
    coverage.steps += then.steps;
    for caveat in &before.caveats {
        if !run.caveats.contains(caveat) {
            run.caveats.push(caveat.clone());
        }
    }
    for (key, value) in &before.process.facts {
        run.process.facts.entry(key.clone()).or_insert_with(|| value.clone());
    }
    run
}

/// Where each old cell is among the new ones; those that are new there are added.
fn places(old: &[Cell], new: &mut Vec<Cell>) -> Vec<u32> {
    let place = |cell: &Cell| {
        let at = new.iter().position(|known| known == cell).unwrap_or_else(|| {
            new.push(cell.clone());
            new.len() - 1
        });
        at as u32
    };
    old.iter().map(place).collect()
}

fn moved(moment: &Moment, places: &[u32]) -> Moment {
    let place = |&(cell, bytes): &(u32, i64)| Some((*places.get(cell as usize)?, bytes));
    let mut amounts: Vec<_> = moment.amounts.iter().filter_map(place).collect();
    amounts.sort_unstable();
    Moment { amounts, ..moment.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_runs::run::{Beside, Class, Clock, Coverage, Process, Source, State};
    use gpumem_runs::series::Series;

    fn cell(tag: &str) -> Cell {
        Cell { class: Class::Direct, tag: Some(tag.into()), ..Cell::default() }
    }

    fn run(tags: &[&str], peak: &[(u32, i64)], coverage: Coverage) -> Run {
        let moment = Moment {
            tracked_bytes: Some(peak.iter().map(|(_, bytes)| bytes).sum()),
            amounts: peak.to_vec(),
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
            beside: Beside::default(),
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
        }
    }

    #[test]
    fn a_higher_peak_of_the_earlier_life_stays_with_its_names() {
        let before =
            run(&["a", "b", "c"], &[(0, 10), (2, 30)], Coverage { events: 100, ..Coverage::default() });
        let lost = Coverage { events: 7, lost: 100, partial_history: true, ..Coverage::default() };
        let now = run(&["c", "d"], &[(0, 1), (1, 2)], lost);
        let whole = joined(&before, &now);
        assert_eq!(whole.cells, [cell("c"), cell("d"), cell("a"), cell("b")]);
        assert_eq!(whole.devices[0].peak.amounts, [(0, 30), (2, 10)]);
        assert_eq!(whole.devices[0].last, now.devices[0].last);
        assert_eq!((whole.coverage.events, whole.coverage.lost), (107, 0));
        assert!(!whole.coverage.partial_history, "the earlier life had booked what this one never saw");
    }

    #[test]
    fn what_neither_life_saw_is_lost() {
        let before = run(&["a"], &[(0, 1)], Coverage { events: 90, lost: 5, ..Coverage::default() });
        let now = run(&["a"], &[(0, 2)], Coverage { lost: 100, ..Coverage::default() });
        let whole = joined(&before, &now);
        assert_eq!(whole.coverage.lost, 10);
        assert!(whole.coverage.partial_history);
        assert_eq!(whole.devices[0].peak, now.devices[0].peak);
    }

    #[test]
    fn a_device_that_only_the_earlier_life_saw_stays() {
        let before = run(&["a"], &[(0, 1)], Coverage::default());
        let mut now = run(&["b"], &[(0, 2)], Coverage::default());
        now.devices[0].name = "GPU-2".into();
        let whole = joined(&before, &now);
        assert_eq!(whole.devices.len(), 2);
        assert_eq!(whole.devices[1].last.amounts, [(1, 1)]);
    }
}
