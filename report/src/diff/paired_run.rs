//! Combines several runs into one.
//!
//! For a comparison, B's cells are appended to A's, and each device has A's moment as its last and B's as its peak. So one report
//! applies the same rules to both sides and shortens tag paths to the same depth. For a job, the runs of its ranks are summed.

use super::{At, Pairing};
use crate::amounts::sums;
use crate::labels::{PROCESS, RANK, rank};
use gpumem_model::fields::Field;
use gpumem_model::run::{
    Caveat, Clock, Coverage, Details, Device, Moment, Process, ProgramData, Run, Source, State,
    UntrackableParts,
};

pub(super) struct PairedRun {
    pub(super) run: Run,
    /// Number of cells of A; the cells of B follow them.
    pub(super) cells_of_a: usize,
    /// For each device of the combined run: its indices in the device lists of A and B, and how the two were matched.
    pub(super) paired: Vec<([Option<usize>; 2], Pairing)>,
}

impl PairedRun {
    pub(super) fn of(runs: [&Run; 2], at: At) -> Self {
        let [a, b] = runs;
        let cells_of_a = a.cells.len();
        let paired = pairs(&a.devices, &b.devices);
        let moment = |side: usize, device: Option<usize>| {
            let run = runs[side];
            let offset = if side == 0 { 0 } else { cells_of_a as u32 };
            match device.and_then(|device| run.devices.get(device)) {
                Some(device) => shifted(compared(device, at), offset),
                None => zero_moment(run),
            }
        };
        let device = |(devices, _): &([Option<usize>; 2], Pairing)| {
            let [of_a, of_b] = *devices;
            let named = of_a.and_then(|device| a.devices.get(device));
            let named = named.or(of_b.and_then(|device| b.devices.get(device)));
            Device {
                name: named.map(|device| device.name.clone()).unwrap_or_default(),
                ordinal: named.map_or(0, |device| device.ordinal),
                last: moment(0, of_a),
                peak: moment(1, of_b),
                ..Device::default()
            }
        };
        let source = Source { kind: a.source.kind.clone(), origin: String::new(), preset: None };
        let run = Run {
            coverage: Coverage { covered: a.coverage.covered || b.coverage.covered, ..Coverage::default() },
            cells: a.cells.iter().chain(&b.cells).cloned().collect(),
            devices: paired.iter().map(device).collect(),
            ..empty_run(source, a.clock)
        };
        PairedRun { run, cells_of_a, paired }
    }

    pub(super) fn total(&self) -> Device {
        let sum = |of: fn(&Device) -> &Moment| {
            self.run.devices.iter().map(of).cloned().reduce(sum_of_moments).unwrap_or_default()
        };
        Device { last: sum(|device| &device.last), peak: sum(|device| &device.peak), ..Device::default() }
    }
}

/// Returns a run that has no process, cells or devices.
fn empty_run(source: Source, clock: Clock) -> Run {
    Run {
        source,
        clock,
        process: Process::default(),
        state: State::Interrupted,
        coverage: Coverage::default(),
        caveats: Vec::new(),
        cells: Vec::new(),
        devices: Vec::new(),
        own: ProgramData::default(),
    }
}

/// Returns the moment of a device (its peak or its last) that the comparison uses.
pub(super) fn compared(device: &Device, at: At) -> &Moment {
    match at {
        At::Peak => &device.peak,
        At::Now => &device.last,
    }
}

fn shifted(moment: &Moment, offset: u32) -> Moment {
    let mut shifted = moment.clone();
    shifted.remap(&|cell| Some(cell.saturating_add(offset)));
    shifted
}

/// Returns a moment with zero bytes, for a device that the run does not use.
fn zero_moment(run: &Run) -> Moment {
    if !run.coverage.covered {
        return Moment { uncovered_used_bytes: Some(0), ..Moment::default() };
    }
    Moment {
        tracked_bytes: Some(0),
        predates_bytes: Some(0),
        untrackable_bytes: Some(0),
        parts: Some(UntrackableParts::default()),
        ..Moment::default()
    }
}

/// Returns the sum of two moments. A value that is unknown in either moment is unknown in the sum.
pub(crate) fn sum_of_moments(a: Moment, b: Moment) -> Moment {
    let sum = |a: Option<i64>, b: Option<i64>| Some(a?.saturating_add(b?));
    let uncovered = a.uncovered_used_bytes.zip(b.uncovered_used_bytes);
    Moment {
        time_ns: 0,
        tracked_bytes: sum(a.tracked_bytes, b.tracked_bytes),
        amounts: sums(a.amounts.iter().chain(&b.amounts).copied()).into_iter().collect(),
        predates_bytes: sum(a.predates_bytes, b.predates_bytes),
        untrackable_bytes: sum(a.untrackable_bytes, b.untrackable_bytes),
        parts: a.gap_parts().zip(b.gap_parts()).map(|(a, b)| a.plus(b)),
        used_absence: a.used_absence.or(b.used_absence),
        uncovered_used_bytes: uncovered.map(|(a, b)| a.saturating_add(b)),
        gap_distance_ns: a.gap_distance_ns.saturating_abs().max(b.gap_distance_ns.saturating_abs()),
        torn: None,
        stale: a.stale || b.stale,
        partial: a.partial || b.partial,
    }
}

/// Pairs devices of A with those of B by UUID, rank or number. Pairs the remaining devices in their order.
fn pairs(a: &[Device], b: &[Device]) -> Vec<([Option<usize>; 2], Pairing)> {
    let mut unpaired: Vec<usize> = (0..b.len()).collect();
    let mut same_name = |device: &Device| {
        let is_same = |index: &usize| b.get(*index).is_some_and(|other| other.name == device.name);
        let index = unpaired.remove(unpaired.iter().position(is_same)?);
        let begins = |with: &str| device.name.starts_with(with);
        let paired = match begins("GPU-") || begins("MIG-") {
            true => Pairing::Uuid,
            false if begins(RANK) => Pairing::Rank,
            false if begins(PROCESS) => Pairing::Order,
            false => Pairing::Number,
        };
        Some((index, paired))
    };
    let mut of_b: Vec<Option<(usize, Pairing)>> = a.iter().map(&mut same_name).collect();
    unpaired.sort_by_key(|&index| b.get(index).map(|device| device.ordinal));
    let mut order: Vec<usize> = (0..a.len()).collect();
    order.sort_by_key(|&index| a.get(index).map(|device| device.ordinal));
    let mut unpaired = unpaired.into_iter();
    for index in order {
        if let Some(slot @ None) = of_b.get_mut(index) {
            *slot = unpaired.next().map(|index| (index, Pairing::Order));
        }
    }
    let of_a = of_b.iter().enumerate().map(|(index, of_b)| match of_b {
        Some((other, paired)) => ([Some(index), Some(*other)], *paired),
        None => ([Some(index), None], Pairing::Alone),
    });
    of_a.chain(unpaired.map(|index| ([None, Some(index)], Pairing::Alone))).collect()
}

/// Combines several processes into one run: the ranks of a job, or the processes of a launcher. Each device of a process becomes a
/// device of the combined run, named after the process's rank, so that ranks can be compared and summed. Processes without a rank
/// are numbered in the order in which they started. `title` describes the processes, such as `8 processes of job bert`. Each
/// process is counted at its own time (its peak or its last moment).
pub fn sum_of_ranks(title: &str, mut runs: Vec<Run>) -> Run {
    runs.sort_by_key(|run| (rank(run).is_none(), rank(run), run.process.start_ticks, run.process.pid));
    let command = runs.iter().find_map(|run| run.process.facts.get("command").cloned());
    let count = runs.len();
    let first = runs.first();
    let none = Source { kind: String::new(), origin: String::new(), preset: None };
    let source = first.map_or(none, |run| run.source.clone());
    let mut sum = empty_run(source, first.map_or(Clock::Lines, |run| run.clock));
    sum.process.facts.extend(command.map(|command| ("command".into(), command)));
    if runs.iter().any(|run| run.state == State::Open) {
        sum.state = State::Open;
    }
    let mut without_rank = 0;
    for (place, mut run) in runs.into_iter().enumerate() {
        let name = match rank(&run) {
            Some(rank) => format!("{RANK}{rank}"),
            None => {
                without_rank += 1;
                format!("{PROCESS}{without_rank}")
            }
        };
        sum.coverage.add(&run.coverage);
        let offset = sum.cells.len() as u32;
        run.remap(&|cell| Some(cell.saturating_add(offset)));
        sum.cells.extend(run.cells);
        let several = run.devices.len() > 1;
        for device in run.devices {
            let mut name = if several { format!("{name}, GPU {}", device.ordinal) } else { name.clone() };
            if sum.devices.iter().any(|known| known.name == name) {
                name = format!("{name} ({place})"); // two processes claim the same rank
            }
            let ordinal = u16::try_from(sum.devices.len()).unwrap_or(u16::MAX);
            let details = Details { ooms: device.details.ooms, ..Details::default() };
            sum.devices.push(Device { name, ordinal, details, ..device });
        }
    }
    let text = if count == 1 { title.to_owned() } else { format!("{title}, each run at its own time") };
    sum.caveats.push(Caveat { code: "job".into(), text });
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, ordinal: u16) -> Device {
        Device { name: name.into(), ordinal, ..Device::default() }
    }

    #[test]
    fn devices_are_paired_by_uuid_then_in_order() {
        let x = || device("GPU-x", 3);
        let y = || device("GPU-y", 1);
        let z = || device("GPU-z", 0);
        let pair = |a, b| [Some(a), Some(b)];
        assert_eq!(
            pairs(&[x(), y()], &[y(), x()]),
            [(pair(0, 1), Pairing::Uuid), (pair(1, 0), Pairing::Uuid)]
        );
        // Devices of different machines are compared by order: the first with the first.
        assert_eq!(
            pairs(&[x(), y()], &[z()]),
            [([Some(0), None], Pairing::Alone), (pair(1, 0), Pairing::Order)]
        );
        assert_eq!(
            pairs(&[x()], &[x(), z()]),
            [(pair(0, 0), Pairing::Uuid), ([None, Some(1)], Pairing::Alone)]
        );
        assert_eq!(
            pairs(&[device("ordinal-0", 0)], &[device("ordinal-0", 0)]),
            [(pair(0, 0), Pairing::Number)]
        );
        assert_eq!(pairs(&[], &[]), []);
    }
}
