//! What a run takes: for who keeps many, and for who shares room out among users.

use crate::run::{Cell, Details, Device, Moment, Run};
use std::mem::size_of;

/// Texts in a line of a list that has few: a step of the gap, a pool, a caveat.
const WORDS: usize = 128;

fn list<T>(list: &[T]) -> usize {
    size_of_val(list)
}

fn cell(cell: &Cell) -> usize {
    let Cell { tag, origin, role, phase, library, pool, .. } = cell;
    let texts = [tag, origin, role, phase, library, pool].into_iter();
    size_of::<Cell>() + texts.flatten().map(String::len).sum::<usize>()
}

fn moment(moment: &Moment) -> usize {
    list(&moment.amounts)
}

fn details(details: &Details) -> usize {
    let points = &details.timeline.points;
    let growth = &details.growth;
    let lists = [
        list(points),
        points.iter().map(|point| list(&point.amounts)).sum(),
        list(&details.iterations.rows),
        details.parameters.weight(),
        list(&details.steps) + WORDS * details.steps.len(),
        list(&details.pools) + WORDS * details.pools.len(),
        list(&details.ooms),
        details.ooms.iter().map(|oom| list(&oom.amounts) + WORDS).sum(),
        list(&growth.points) + list(&growth.named) + list(&growth.slack) + list(&growth.rest),
        list(&growth.gap) + list(&growth.used),
        growth.cells.iter().map(|(_, values)| list(values) + size_of::<usize>()).sum(),
    ];
    lists.into_iter().sum()
}

fn device(device: &Device) -> usize {
    let lists = list(&device.series.buckets) + list(&device.tenants);
    size_of::<Device>() + lists + moment(&device.last) + moment(&device.peak) + details(&device.details)
}

impl Run {
    /// Bytes that it takes in memory, about; in a store it takes less, by no more than users differ in.
    pub fn weight(&self) -> usize {
        let facts = self.process.facts.iter().chain(&self.process.claims);
        let texts = facts.map(|(key, value)| 2 * size_of::<String>() + key.len() + value.len());
        let lines = self.caveats.len() + self.coverage.marks.len() + self.coverage.blind.len();
        let cells = self.cells.iter().map(cell).sum::<usize>();
        let devices = self.devices.iter().map(device).sum::<usize>();
        size_of::<Run>() + texts.sum::<usize>() + lines * 2 * WORDS + cells + devices + self.own.weight()
    }
}

#[cfg(test)]
mod tests {
    use crate::run::{Cell, Clock, Coverage, Own, Process, Run, Source, State};

    #[test]
    fn texts_and_lists_weigh() {
        let mut run = Run {
            source: Source { kind: "daemon".into(), origin: "host".into(), preset: None },
            clock: Clock::Lines,
            process: Process::default(),
            state: State::Open,
            coverage: Coverage::default(),
            caveats: Vec::new(),
            cells: Vec::new(),
            devices: Vec::new(),
            own: Own::default(),
        };
        let empty = run.weight();
        assert!(empty < 2000, "{empty}");
        run.cells = vec![Cell { tag: Some("x".repeat(1000)), ..Cell::default() }; 100];
        let cells = run.weight() - empty;
        assert!((100_000..130_000).contains(&cells), "{cells}");
        run.process.facts.insert("command".into(), "y".repeat(5000));
        assert!(run.weight() - empty - cells >= 5000);
    }
}
