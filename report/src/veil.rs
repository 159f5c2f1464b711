//! A run without what its process calls things, for those who may know how much and what for, but not more: a page on a port that
//! everybody on the machine can open.
//!
//! What stays is amounts, times, names of the rules' categories, roles, phases, and what labels of metrics tell too. Everything
//! is taken over field by field: one that is added to a run does not compile here before somebody has decided.

use super::text::HELD;
use super::{By, Report, names};
use crate::rules::Groupings;
use gpumem_ledger::SUM;
use gpumem_model::growth::Growth;
use gpumem_model::run::{
    BlindWindow, Caveat, Cell, Coverage, Details, Device, LayerSaid, Moment, Oom, Own, Parameters, Pool,
    Process, Run, Step, phase_name, phase_of_name, role_name, role_of_name,
};
use gpumem_model::timeline::{Point, Timeline};
use gpumem_model::who;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Stands where there is a tag.
pub const VEILED: &str = "(not shown)";
/// What names come from that are told, see [`who`].
const TOLD_TOO: [&str; 3] = [who::MAPPED_JOB, "slurm_job_id", "slurm_step_id"];
/// Caveats that the daemon words itself, with numbers.
const CAVEATS: [&str; 4] = ["part", "unnamed_device", "devices_beyond", "accounting_disagrees"];

/// Leaves of a process what its labels in the metrics tell: no command line, no directory.
pub fn unnamed(process: &mut Process) {
    let is_told = |name: &String| who::NAMES.contains(&name.as_str()) || TOLD_TOO.contains(&name.as_str());
    process.facts.retain(|name, _| is_told(name));
    process.claims.retain(|name, _| is_told(name));
}

/// A run with categories and without tags.
#[derive(Debug)]
pub struct Veiled {
    run: Run,
    groupings: Groupings,
    categories: [Vec<Option<String>>; 3],
}

/// Cells that are alike without their names.
struct Merged {
    /// Of each cell of the run, its place in `cells`.
    places: Vec<u32>,
    cells: Vec<Cell>,
    categories: [Vec<Option<String>>; 3],
}

impl Veiled {
    /// A run under these rules, as it may be told.
    pub fn of(run: &Run, groupings: Groupings) -> Self {
        let report = Report::new(run, groupings, None);
        let merged = Merged::of(&report);
        let groupings = report.groupings;
        let mut process = run.process.clone();
        unnamed(&mut process);
        let veiled = Run {
            source: run.source.clone(),
            clock: run.clock,
            process,
            state: run.state,
            coverage: coverage(&run.coverage),
            caveats: run
                .caveats
                .iter()
                .filter(|of| CAVEATS.contains(&of.code.as_str()))
                .cloned()
                .collect::<Vec<Caveat>>(),
            devices: run.devices.iter().map(|device| merged.device(device)).collect(),
            cells: merged.cells,
            own: Own::default(), // all of it has names
        };
        Veiled { run: veiled, groupings, categories: merged.categories }
    }

    /// Its report.
    pub fn report(&self) -> Report<'_> {
        let names = |by: &By| self.categories[*by as usize].iter().any(Option::is_some);
        let by = [By::Layer, By::Structure].into_iter().find(names).unwrap_or(By::Structure);
        let report = Report::with(&self.run, self.groupings.clone(), by, Vec::new(), self.categories.clone());
        Report { veiled: true, ..report }
    }
}

impl Merged {
    fn of(report: &Report<'_>) -> Self {
        let of_rules = [&report.groupings.layer, &report.groupings.structure]
            .map(|rules| rules.rules.iter().map(|rule| rule.name.as_str()).collect::<BTreeSet<_>>());
        // Libraries have names of their own, too; this one alone is the same wherever there is one.
        let is_told = |by: By, name: &str| {
            name.starts_with("libnccl ")
                || of_rules.get(by as usize).is_some_and(|names| names.contains(name))
        };
        let category = |index: u32, by: By| {
            report.category(index, by).filter(|name| is_told(by, name)).map(str::to_owned)
        };
        let mut known: HashMap<(Cell, Option<String>, Option<String>), u32> = HashMap::new();
        let mut merged = Merged { places: Vec::new(), cells: Vec::new(), categories: Default::default() };
        for (index, cell) in (0_u32..).zip(&report.run.cells) {
            let told = |tag: &String| if tag == SUM { SUM } else { VEILED }.to_owned();
            let cell = Cell {
                class: cell.class,
                tag: cell.tag.as_ref().map(told),
                origin: None,
                role: cell.role.as_deref().and_then(role_of_name).and_then(role_name).map(str::to_owned),
                phase: cell.phase.as_deref().and_then(phase_of_name).and_then(phase_name).map(str::to_owned),
                library: None,
                pool: cell.pool.clone().filter(|pool| pool == names::TORCH),
                pending: cell.pending,
                inherited: cell.inherited,
            };
            let key = (cell, category(index, By::Layer), category(index, By::Structure));
            let next = merged.cells.len() as u32;
            let place = *known.entry(key).or_insert_with_key(|(cell, layer, structure)| {
                merged.cells.push(cell.clone());
                let categories = [layer.clone(), structure.clone(), None];
                merged.categories.iter_mut().zip(categories).for_each(|(all, one)| all.push(one));
                next
            });
            merged.places.push(place);
        }
        merged
    }

    fn place(&self, cell: u32) -> u32 {
        self.places.get(cell as usize).copied().unwrap_or(u32::MAX)
    }

    fn amounts(&self, amounts: &[(u32, i64)]) -> Vec<(u32, i64)> {
        let mut sums: BTreeMap<u32, i64> = BTreeMap::new();
        for &(cell, bytes) in amounts {
            let sum = sums.entry(self.place(cell)).or_default();
            *sum = sum.wrapping_add(bytes);
        }
        sums.into_iter().filter(|(_, bytes)| *bytes != 0).collect()
    }

    fn moment(&self, moment: &Moment) -> Moment {
        Moment { amounts: self.amounts(&moment.amounts), ..moment.clone() }
    }

    fn device(&self, device: &Device) -> Device {
        Device {
            name: device.name.clone(),
            ordinal: device.ordinal,
            model: device.model.clone(),
            total_bytes: device.total_bytes,
            last: self.moment(&device.last),
            peak: self.moment(&device.peak),
            peak_used: device.peak_used,
            beside: device.beside,
            reading: device.reading,
            unaccounted_bytes: device.unaccounted_bytes,
            tenants: device.tenants.clone(),
            other_tenants: device.other_tenants,
            series: device.series.clone(),
            details: self.details(&device.details),
        }
    }

    fn details(&self, details: &Details) -> Details {
        let point = |point: &Point| Point {
            time_ns: point.time_ns,
            amounts: self.amounts(&point.amounts),
            rest_bytes: point.rest_bytes,
        };
        Details {
            accounted_peak_bytes: details.accounted_peak_bytes,
            steps: details.steps.iter().map(step).collect(),
            growth: self.growth(&details.growth),
            timeline: Timeline {
                width_ns: details.timeline.width_ns,
                points: details.timeline.points.iter().map(point).collect(),
            },
            iterations: details.iterations.clone(),
            parameters: Parameters::default(), // names, and what has each
            pools: details.pools.iter().map(pool).collect(),
            ooms: details.ooms.iter().map(|oom| self.oom(oom)).collect(),
            faults: details.faults.clone(),
        }
    }

    fn growth(&self, growth: &Growth) -> Growth {
        let mut cells: BTreeMap<u32, Vec<i64>> = BTreeMap::new();
        for (cell, points) in &growth.cells {
            let sums = cells.entry(self.place(*cell)).or_insert_with(|| vec![0; points.len()]);
            sums.iter_mut().zip(points).for_each(|(sum, bytes)| *sum = sum.wrapping_add(*bytes));
        }
        Growth { cells: cells.into_iter().collect(), ..growth.clone() }
    }

    fn oom(&self, oom: &Oom) -> Oom {
        Oom {
            kind: oom.kind,
            fate: oom.fate,
            time_ns: oom.time_ns,
            last_ns: oom.last_ns,
            count: oom.count,
            refusals: oom.refusals,
            asked_bytes: oom.asked_bytes,
            driver_asked_bytes: oom.driver_asked_bytes,
            device_free_bytes: oom.device_free_bytes,
            pool_used_bytes: oom.pool_used_bytes,
            pool_reserved_bytes: oom.pool_reserved_bytes,
            said: oom.said.clone().filter(|said| said == "fatal" || said == "survived"),
            result: oom.result,
            tag: None,
            library: None,
            stack: None,
            phase: oom.phase.as_deref().and_then(phase_of_name).and_then(phase_name).map(str::to_owned),
            step: oom.step,
            tracked_bytes: oom.tracked_bytes,
            amounts: self.amounts(&oom.amounts),
            predates_bytes: oom.predates_bytes,
            untrackable_bytes: oom.untrackable_bytes,
            idle_bytes: oom.idle_bytes,
            idle_pieces: oom.idle_pieces,
            largest_idle_bytes: oom.largest_idle_bytes,
            is_expandable: oom.is_expandable,
            device: oom.device.clone(),
            is_unheard: oom.is_unheard,
        }
    }
}

fn step(step: &Step) -> Step {
    Step {
        from_ns: step.from_ns,
        time_ns: step.time_ns,
        bytes: step.bytes,
        parts: step.parts,
        cause: step.cause.clone(),
        also: step.also.clone(),
        events: step.events,
        kind: step.kind.clone(),
        tag: None,
        library: None,
        expected_bytes: step.expected_bytes,
        note: step.note.clone(),
    }
}

fn pool(pool: &Pool) -> Pool {
    Pool { name: pool.name.clone().filter(|name| name == names::TORCH), ..pool.clone() }
}

fn coverage(coverage: &Coverage) -> Coverage {
    let blocked = |_| match coverage.blocked_code {
        None | Some(HELD) => String::new(),
        Some(_) => "gpumemctl doctor says why".to_owned(),
    };
    let blind =
        |window: &BlindWindow| BlindWindow { why: "the agent saw nothing".to_owned(), ..window.clone() };
    let layer = |said: &LayerSaid| LayerSaid { reason: String::new(), ..said.clone() };
    Coverage {
        blocked_by: coverage.blocked_by.as_ref().map(blocked),
        blind: coverage.blind.iter().map(blind).collect(),
        layers: coverage.layers.iter().map(layer).collect(),
        marks: Vec::new(),
        marks_dropped: 0,
        ..coverage.clone()
    }
}
