//! Converts the ledger's own types to those of `gpumem-model`.

use crate as ledger;
use gpumem_model::coverage::BlindWindow;
use gpumem_model::coverage::Mark;
use gpumem_model::device::Pool;
use gpumem_model::gap::Step;
use gpumem_model::growth::{Axis, Growth};
use gpumem_model::iterations::{Iteration, Iterations};
use gpumem_model::layers::LayerSaid;
use gpumem_model::names::Named;
use gpumem_model::oom::{Fate, Holder, Oom, OomDevice};
use gpumem_model::parameters::{Column, Parameters};
use gpumem_model::run::{Cell, Class, Clock, OPEN_FATE_NS};
use gpumem_wire::{ClockKind, OomOutcome, PoolOwner, Role};
use std::collections::{BTreeMap, HashMap};

impl From<&ledger::Step> for Step {
    fn from(step: &ledger::Step) -> Self {
        let file_name = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
        Step {
            from_ns: step.from_ns,
            time_ns: step.time_ns,
            bytes: step.bytes(),
            parts: step.parts,
            cause: step.cause.name().to_owned(),
            also: step
                .causes()
                .filter(|cause| *cause != step.cause)
                .map(|cause| cause.name().to_owned())
                .collect(),
            events: step.events,
            kind: match step.kind {
                ledger::BookedAs::Measured => "measured",
                ledger::BookedAs::Model => "model",
                ledger::BookedAs::UpperBound => "upper_bound",
                ledger::BookedAs::Unexplained => "none",
            }
            .to_owned(),
            tag: step.tag.as_deref().map(str::to_owned),
            library: step.library.as_deref().map(file_name),
            expected_bytes: step.expected_bytes,
            note: note_of(step),
        }
    }
}

fn note_of(step: &ledger::Step) -> Option<String> {
    use ledger::Cause;
    let text = match step.cause {
        Cause::BetweenEvents if step.unseen_module_bytes > 0 => format!(
            "modules with {} bytes not yet seen are loaded: may be lazy loading",
            step.unseen_module_bytes
        ),
        Cause::StackLimit
            if step.expected_bytes.is_some_and(|model| model > step.parts.local_memory_bytes) =>
        {
            "the driver may take the rest when a kernel needs it".to_owned()
        }
        Cause::Blind => "the agent saw nothing for a part of the time".to_owned(),
        Cause::HistoryLost => "records were lost, or the process became another program".to_owned(),
        Cause::EventsLost => "more events happened than are kept".to_owned(),
        Cause::Smaller => "the smallest steps, as one".to_owned(),
        _ => return None,
    };
    Some(text)
}

impl From<&ledger::BlindWindow> for BlindWindow {
    fn from(window: &ledger::BlindWindow) -> Self {
        let by = window.by.as_str();
        let why = match (window.cause, by) {
            (ledger::BlindCause::Held, "") => "another CUPTI client held CUPTI".to_owned(),
            (ledger::BlindCause::Held, by) => format!("{by} held CUPTI"),
            (ledger::BlindCause::Paused, "") => "paused by the program".to_owned(),
            (ledger::BlindCause::Refused | ledger::BlindCause::Disarmed, "") => "not known why".to_owned(),
            (_, why) => why.to_owned(),
        };
        BlindWindow { from_ns: window.from_ns, to_ns: window.to_ns, why }
    }
}

impl From<&ledger::MarkView> for Mark {
    fn from(mark: &ledger::MarkView) -> Self {
        let by = if mark.from_outside { "gpumemctl" } else { "program" };
        Mark { time_ns: mark.time_ns, name: mark.name.as_deref().map(str::to_owned), by: by.to_owned() }
    }
}

impl From<&ledger::Iteration> for Iteration {
    fn from(row: &ledger::Iteration) -> Self {
        let of = |role: Role| row.roles[usize::from(role.to_code())];
        Iteration {
            epoch: row.epoch,
            first: row.first,
            last: row.last,
            count: row.count,
            start_ns: row.start_ns,
            end_ns: row.end_ns,
            partial: row.partial,
            tracked: row.tracked,
            pool_reserved: row.pool_reserved,
            parameters: of(Role::Parameter),
            gradients: of(Role::Gradient),
            optimizer_state: of(Role::OptimizerState),
            activations: of(Role::Activation),
            intermediate_gradients: row.intermediate,
            temporaries: row.temporaries,
            inputs: of(Role::Input),
            workspace: of(Role::Workspace),
            buffers: of(Role::Buffer),
            kv_caches: of(Role::KvCache),
            parameter_copies: of(Role::ParameterCopy),
        }
    }
}

impl From<&ledger::IterationsView> for Iterations {
    fn from(view: &ledger::IterationsView) -> Self {
        let open = view.open.as_ref().map(Iteration::from);
        Iterations { rows: view.rows.iter().map(Iteration::from).collect(), open }
    }
}

impl From<&ledger::LayerView> for LayerSaid {
    fn from(view: &ledger::LayerView) -> Self {
        LayerSaid {
            layer: view.layer.name_or_unknown().into(),
            state: view.state.name_or_unknown().into(),
            reason: view.reason.clone(),
        }
    }
}

impl From<&ledger::PoolView> for Pool {
    fn from(pool: &ledger::PoolView) -> Self {
        let owner = match pool.owner {
            PoolOwner::Driver => Some("driver"),
            PoolOwner::Graph => Some("graph"),
            PoolOwner::Framework => Some("framework"),
            PoolOwner::Unknown => None,
        };
        Pool {
            id: pool.id,
            name: pool.name.as_deref().map(str::to_owned),
            owner: owner.map(str::to_owned),
            parent: pool.parent,
            opaque: pool.opaque,
            segment_bytes: pool.reserved_bytes,
            booked_bytes: pool.booked_bytes,
            block_bytes: pool.used_bytes,
            pending_bytes: pool.pending_bytes,
            own: pool.own,
            check: pool.check,
        }
    }
}

impl From<&ledger::OomDevice> for OomDevice {
    fn from(device: &ledger::OomDevice) -> Self {
        let holder = |holder: &ledger::Holder| Holder {
            pid: holder.key.pid,
            user: holder.user.clone(),
            used_bytes: holder.used_bytes,
            growth_bytes: holder.growth.map(|(bytes, _)| bytes),
            growth_ns: holder.growth.map(|(_, in_ns)| in_ns),
        };
        OomDevice {
            read_ns: device.read_ns,
            total_bytes: device.total_bytes,
            free_bytes: device.free_bytes,
            system_bytes: device.system_bytes,
            unaccounted_bytes: device.unaccounted_bytes,
            unified: device.unified,
            holders: device.holders.iter().map(holder).collect(),
            others: device.others,
        }
    }
}

impl From<&ledger::Snapshot> for Clock {
    fn from(snapshot: &ledger::Snapshot) -> Self {
        match snapshot.clock {
            ClockKind::Ordinal => Clock::Lines,
            _ => Clock::Monotonic {
                wall_offset_ns: snapshot.wall_offset_ns.and_then(|offset| i64::try_from(offset).ok()),
            },
        }
    }
}

impl From<&ledger::CellView> for Cell {
    fn from(cell: &ledger::CellView) -> Self {
        Cell {
            class: if cell.pending { Class::PoolIdle } else { cell.class },
            tag: cell.tag.as_deref().map(str::to_owned),
            origin: cell.origin.as_deref().map(str::to_owned),
            role: cell.role.name().map(str::to_owned),
            phase: cell.phase.name().map(str::to_owned),
            library: cell.library.as_deref().map(str::to_owned),
            pool: cell.pool.as_deref().map(str::to_owned),
            pending: cell.pending,
            inherited: cell.inherited,
        }
    }
}

impl ledger::OomView {
    /// Converts an OOM entry. `ended`: time of the process's end and its status, if known; `now_ns`: the latest known time.
    pub fn to_model(&self, ended: Option<(u64, Option<u64>)>, now_ns: u64) -> Oom {
        let oom = self;
        let after = |time_ns: u64| time_ns.saturating_sub(oom.last_ns);
        let fate = match ended {
            _ if oom.went_on => Fate::Survived,
            Some((_, Some(0))) => Fate::Survived,
            Some((time_ns, status)) if after(time_ns) <= OPEN_FATE_NS => {
                Fate::Fatal { after_ns: after(time_ns), status }
            }
            Some(_) => Fate::Survived,
            None if after(now_ns) > OPEN_FATE_NS => Fate::Survived,
            None => Fate::Open,
        };
        let text = |text: &Option<std::sync::Arc<str>>| text.as_deref().map(str::to_owned);
        Oom {
            kind: oom.kind,
            fate,
            time_ns: oom.time_ns,
            last_ns: oom.last_ns,
            count: oom.count,
            refusals: oom.refusals,
            asked_bytes: oom.asked_bytes,
            driver_asked_bytes: oom.driver_asked_bytes,
            device_free_bytes: oom.device_free_bytes,
            pool_used_bytes: oom.pool_used_bytes,
            pool_reserved_bytes: oom.pool_reserved_bytes,
            said: match oom.outcome {
                OomOutcome::Fatal => Some("fatal".into()),
                OomOutcome::Survived => Some("survived".into()),
                OomOutcome::Unknown => None,
            },
            result: oom.result,
            tag: text(&oom.tag),
            library: text(&oom.library),
            stack: text(&oom.stack),
            phase: oom.phase.name().map(str::to_owned),
            step: oom.step,
            tracked_bytes: oom.tracked_bytes,
            amounts: sparse(&oom.amounts).into(),
            predates_bytes: oom.predates_bytes,
            untrackable_bytes: oom.untrackable_bytes,
            idle_bytes: oom.idle.map(|idle| idle.bytes),
            idle_pieces: oom.idle.map(|idle| idle.pieces),
            largest_idle_bytes: oom.idle.map(|idle| idle.largest_bytes),
            is_expandable: oom.idle.is_some_and(|idle| idle.is_expandable),
            device: oom.device.as_ref().map(OomDevice::from),
            is_unheard: oom.is_unheard,
        }
    }
}

impl ledger::ParametersView {
    /// Converts the view and merges cells with the same name into one column.
    pub fn to_model(&self, cells: &[ledger::CellView]) -> Parameters {
        let view = self;
        let mut places: HashMap<Column, u32> = HashMap::new();
        let mut columns: Vec<Column> = Vec::new();
        let mut column_of = |cell: &u32| {
            let cell = cells.get(*cell as usize);
            let role = cell.and_then(|cell| cell.role.name()).unwrap_or_default().to_owned();
            let tag = cell.and_then(|cell| cell.tag.as_deref()).map(str::to_owned);
            let column = Column { role, tag };
            *places.entry(column).or_insert_with_key(|column| {
                columns.push(column.clone());
                columns.len() as u32 - 1
            })
        };
        let place: Vec<u32> = view.columns.iter().map(&mut column_of).collect();
        let mut held = vec![0_i64; view.columns.len()];
        let mut sums = vec![0_i64; columns.len()];
        let mut changes = Vec::new();
        for (time_ns, differs) in &view.changes {
            let mut touched: BTreeMap<u32, i64> = BTreeMap::new();
            for &(cell, bytes) in differs {
                let (Some(was), Some(&column)) = (held.get_mut(cell as usize), place.get(cell as usize))
                else {
                    continue;
                };
                let Some(sum) = sums.get_mut(column as usize) else { continue };
                touched.entry(column).or_insert(*sum);
                *sum = sum.wrapping_add(bytes).wrapping_sub(*was);
                *was = bytes;
            }
            let differs = touched.into_iter().filter_map(|(column, was)| {
                let now = *sums.get(column as usize)?;
                (now != was).then_some((column, now))
            });
            changes.push((*time_ns, differs.collect()));
        }
        // Drops iterations in which bytes only moved between cells of the same name. The first one stays, because it marks the
        // time from which amounts are known.
        let mut first = true;
        changes.retain(|(_, differs): &(u64, Vec<_>)| std::mem::take(&mut first) || !differs.is_empty());
        Parameters { columns, is_cut: view.is_cut, changes }
    }
}

/// Maximum number of cells whose points a run keeps; all others share one sum.
const GROWTH_CELLS: usize = 64;
/// Minimum number of steps from which a program is judged by its steps: two of them are warm-up.
const LEAST_STEPS: usize = gpumem_model::growth::LEAST_POINTS + 2;

impl From<ledger::TrendView> for Growth {
    fn from(trend: ledger::TrendView) -> Self {
        let enough = |track: &ledger::TrackView| track.points.len() >= LEAST_STEPS;
        let periods = trend.periods.filter(|(_, track)| enough(track));
        let (axis, period_ns, track) = match periods {
            _ if enough(&trend.steps) => (Axis::Step, None, trend.steps),
            Some((length_ns, track)) => (Axis::Period, Some(length_ns), track),
            None => (Axis::Minute, None, trend.times),
        };
        let ledger::TrackView { stride, points, latest, named, slack, mut cells, mut rest } = track;
        cells.sort_by_key(|(cell, points)| (std::cmp::Reverse(ledger::rise(points)), *cell));
        for (_, points) in cells.drain(GROWTH_CELLS.min(cells.len())..) {
            let first = points.first().copied().unwrap_or(0);
            for (sum, bytes) in rest.iter_mut().zip(points) {
                *sum = sum.wrapping_add(bytes.wrapping_sub(first));
            }
        }
        cells.sort_by_key(|(cell, _)| *cell);
        let (gap, used) = if trend.gap_is_used { (Vec::new(), trend.gap) } else { (trend.gap, Vec::new()) };
        Growth {
            axis,
            period_ns,
            stride,
            points: points.iter().map(|point| (point.index, point.time_ns)).collect(),
            latest: (latest.index, latest.time_ns),
            named,
            slack,
            cells,
            rest,
            gap,
            used,
        }
    }
}

/// Returns amounts by index, without zeros.
pub fn sparse(amounts: &[i64]) -> Vec<(u32, i64)> {
    let indexed = amounts.iter().enumerate().map(|(index, &bytes)| (index as u32, bytes));
    indexed.filter(|&(_, bytes)| bytes != 0).collect()
}
