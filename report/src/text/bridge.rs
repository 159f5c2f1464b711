//! Explains in two lines why nvidia-smi shows more memory than PyTorch. The lines add up as printed, and their numbers are those
//! of the table above them.

use super::table::Shown;
use crate::amounts::sum;
use crate::bridge::{Bridge, Source, disagreement, reported_totals};
use crate::diff::sum_of_moments;
use crate::lines::Lines;
use crate::{Part, Report};
use gpumem_model::run::Device;
use gpumem_model::units::{Unit, signed, thousands};

/// The parts of a bridge (PyTorch's memory and the memory outside it), in multiples of the unit's last printed digit.
struct Printed {
    allocated: i64,
    idle: i64,
    outside: i64,
    /// Memory older than the agent; `None` if unknown or zero.
    predates: Option<i64>,
    /// Untrackable memory; `None` if unknown.
    untrackable: Option<i64>,
}

/// Adds the lines of the bridge (from PyTorch's memory to nvidia-smi's) below the table of a device.
pub(super) fn bridge(report: &Report<'_>, device: &Device, shown: &Shown, out: &mut Lines) {
    let Some(bridge) = Bridge::of(report.run, &device.last) else { return };
    let printed = printed(report, device, shown, &bridge);
    sums(&bridge, shown.unit, printed, out);
    let amount = |bytes: u64| shown.unit.amount(signed(bytes));
    if let Some((own, ours)) = disagreement(device) {
        out.inset(&format!(
            "torch's own memory_allocated was {} when it last compared, ours {}: {} bytes apart",
            amount(own),
            amount(ours),
            thousands(i128::from(own) - i128::from(ours))
        ));
    }
    if let (true, Some((reserved, allocated))) = (report.run.coverage.late, reported_totals(device)) {
        out.inset(&format!(
            "torch's own numbers: memory_allocated {}, memory_reserved {}; memory older than the agent is in `predates`",
            amount(allocated),
            amount(reserved)
        ));
    }
}

/// Adds the lines of the bridge (from PyTorch's memory to nvidia-smi's) for all devices together.
pub(super) fn of_all(report: &Report<'_>, out: &mut Lines) {
    let moments = report.run.devices.iter().map(|device| &device.last);
    let moments = moments.filter(|moment| moment.tracked_bytes.is_some()).cloned();
    let Some(sum) = moments.reduce(sum_of_moments).and_then(|sum| Bridge::of(report.run, &sum)) else {
        return;
    };
    let tracked = sum.memory_reserved_bytes.saturating_add(sum.outside_bytes);
    let largest = sum.used_bytes.unwrap_or(0).max(tracked);
    let unit = Unit::for_largest(largest);
    let (tracked_steps, predates, untrackable) =
        match (sum.used_bytes, sum.predates_bytes, sum.untrackable_bytes) {
            (Some(used), Some(predates), Some(gap)) => {
                let parts = unit.apportion(unit.round(used), &[tracked, predates, gap]);
                (parts[0], Some(parts[1]).filter(|_| predates != 0), Some(parts[2]))
            }
            _ => (unit.round(tracked), None, None),
        };
    let parts =
        unit.apportion(tracked_steps, &[sum.memory_allocated_bytes, sum.idle_bytes, sum.outside_bytes]);
    let printed = Printed { allocated: parts[0], idle: parts[1], outside: parts[2], predates, untrackable };
    sums(&sum, unit, printed, out);
}

/// Adds the two lines with the sums.
fn sums(bridge: &Bridge, unit: Unit, printed: Printed, out: &mut Lines) {
    let print = |steps: i64| unit.print(steps);
    let pending = match unit.round(bridge.pending_bytes) {
        0 if bridge.pending_bytes == 0 => String::new(),
        pending => format!(" (of it {} waiting for a stream)", print(pending)),
    };
    let reserved = print(printed.allocated + printed.idle);
    out.line(&format!("why nvidia-smi shows more than torch ({}):", unit.name));
    match bridge.source {
        Source::Pool => out.inset(&format!(
            "memory_allocated {} + idle {}{pending} = memory_reserved {reserved}",
            print(printed.allocated),
            print(printed.idle)
        )),
        Source::Driver => {
            let sum = match bridge.idle_bytes {
                0 => print(printed.allocated),
                _ => format!(
                    "{} + idle in the driver's pools {} (read at most 1 s before) = {reserved}",
                    print(printed.allocated),
                    print(printed.idle)
                ),
            };
            out.inset(&format!(
                "torch has no pool of its own: allocated from the driver by its library {sum}"
            ));
        }
    }
    let tracked = printed.allocated + printed.idle + printed.outside;
    let mut words = format!("+ outside torch {}", print(printed.outside));
    if let Some(predates) = printed.predates {
        words += &format!(" + predates the agent {}", print(predates));
    }
    words += &match printed.untrackable {
        Some(gap) => {
            let used = tracked + gap + printed.predates.unwrap_or(0);
            format!(" + Untrackable {} = {}", print(gap), print(used))
        }
        None => format!(" = tracked {}; nvidia-smi's figure is unknown", print(tracked)),
    };
    out.inset(&words);
}

/// Computes the rounded parts from those of the table's rows. Each row is divided into idle memory, memory outside PyTorch and
/// other memory, so that the lines and the table add up to the same numbers.
fn printed(report: &Report<'_>, device: &Device, shown: &Shown, bridge: &Bridge) -> Printed {
    let moment = &device.last;
    let outside = report.composition(&Bridge::outside(report.run, moment, bridge.source), report.by);
    let rows = &shown.statement.rows;
    let at = |part: Part| rows.iter().position(|row| row.part == part);
    let of = |row: Option<usize>| row.and_then(|row| shown.steps[row][0]);
    let tracked = at(Part::Tracked);
    let (mut idle_steps, mut outside_steps) = (0_i64, 0_i64);
    let others = report.by.name_of_rest();
    let named: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
    let folded = outside.categories.iter().filter(|(name, _)| !named.contains(&name.as_str()));
    let folded = sum(folded.map(|(_, bytes)| *bytes));
    for (index, row) in rows.iter().enumerate().filter(|(_, row)| row.parent == tracked && tracked.is_some())
    {
        let (Some(bytes), Some(steps)) = (row.bytes[0], shown.steps[index][0]) else { continue };
        let foreign = match row.part {
            Part::PoolIdle => outside.pool_idle,
            Part::Opaque => outside.opaque,
            Part::Others if row.name == others => outside.others,
            _ => match outside.categories.get(&row.name) {
                Some(bytes) => *bytes,
                None if row.name.starts_with('(') && row.name.ends_with(" smaller)") => folded,
                None => 0,
            },
        };
        let split = shown.unit.apportion(steps, &[foreign, bytes.saturating_sub(foreign)]);
        outside_steps += split[0];
        if row.part == Part::PoolIdle {
            idle_steps += split[1];
        }
    }
    let tracked_steps = of(tracked).unwrap_or_else(|| {
        shown.unit.round(bridge.memory_reserved_bytes.saturating_add(bridge.outside_bytes))
    });
    Printed {
        allocated: tracked_steps - idle_steps - outside_steps,
        idle: idle_steps,
        outside: outside_steps,
        predates: of(at(Part::Predates)).filter(|_| bridge.predates_bytes != Some(0)),
        untrackable: of(at(Part::Untrackable)),
    }
}
