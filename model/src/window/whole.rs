//! Parts of a life as one run again, for a window that may lie in several of them.

use crate::run::{BlindWindow, Cell, Coverage, Device, Moment, Run};
use std::collections::HashMap;

/// One run of these parts of a life, which are in the order of time; the last one says how it is. `None` of none.
pub fn whole(parts: Vec<Run>) -> Option<Run> {
    let mut parts = parts.into_iter();
    let mut whole = parts.next()?;
    for part in parts {
        join(&mut whole, part);
    }
    Some(whole)
}

fn join(whole: &mut Run, mut part: Run) {
    let mut known: HashMap<Cell, u32> =
        whole.cells.iter().enumerate().map(|(index, cell)| (cell.clone(), index as u32)).collect();
    let places: Vec<u32> = part
        .cells
        .drain(..)
        .map(|cell| match known.get(&cell) {
            Some(place) => *place,
            None => {
                let place = whole.cells.len() as u32;
                whole.cells.push(cell.clone());
                known.insert(cell, place);
                place
            }
        })
        .collect();
    let mut own = std::mem::take(&mut whole.own);
    own.go_on(std::mem::take(&mut part.own));
    whole.own = own;
    for device in &mut part.devices {
        renumber(device, &places);
    }
    for device in part.devices {
        match whole.devices.iter_mut().find(|other| other.name == device.name) {
            Some(other) => follow(other, device),
            None => whole.devices.push(device),
        }
    }
    let before = std::mem::replace(&mut whole.coverage, part.coverage);
    go_on(&mut whole.coverage, before);
    // That a part has parts before it is true of the first of these alone; the driver's accounting is of the whole life.
    part.caveats.retain(|caveat| caveat.code != "part");
    let mut earlier = std::mem::replace(&mut whole.caveats, part.caveats);
    earlier.retain(|caveat| {
        caveat.code != "accounting_disagrees" && whole.caveats.iter().all(|other| other.code != caveat.code)
    });
    whole.caveats.splice(0..0, earlier);
    (whole.state, whole.process, whole.clock) = (part.state, part.process, part.clock);
}

/// Makes the coverage of a part that of the whole, of which `before` tells the parts before: how it is now, and all that was lost at any
/// time, because the peak may be of any part.
fn go_on(coverage: &mut Coverage, before: Coverage) {
    coverage.add_counts(&before);
    coverage.covered |= before.covered;
    coverage.late |= before.late;
    coverage.blind_doubt |= before.blind_doubt;
    coverage.partial_history |= before.partial_history || before.partial_state;
    // One that lasted when a part ended is in the next part, too.
    let is_new = |window: &BlindWindow| coverage.blind.iter().all(|other| other.from_ns != window.from_ns);
    let mut blind: Vec<BlindWindow> = before.blind.into_iter().filter(is_new).collect();
    blind.append(&mut coverage.blind);
    coverage.blind = blind;
    coverage.marks.splice(0..0, before.marks);
    coverage.marks_dropped = coverage.marks_dropped.saturating_add(before.marks_dropped);
    let mut programs = before.programs;
    programs.retain(|program| coverage.programs.iter().all(|other| other.instance != program.instance));
    programs.append(&mut coverage.programs);
    coverage.programs = programs;
    coverage.part = before.part;
}

/// Amounts of the part's cells are of the whole's.
fn renumber(device: &mut Device, places: &[u32]) {
    let moment = |moment: &mut Moment| each(&mut moment.amounts, places);
    moment(&mut device.last);
    moment(&mut device.peak);
    device.details.timeline.points.iter_mut().for_each(|point| each(&mut point.amounts, places));
    device.details.ooms.iter_mut().for_each(|oom| each(&mut oom.amounts, places));
    device.details.growth.cells.iter_mut().for_each(|(cell, _)| *cell = place(places, *cell));
}

fn each(amounts: &mut [(u32, i64)], places: &[u32]) {
    amounts.iter_mut().for_each(|(cell, _)| *cell = place(places, *cell));
    amounts.sort_unstable_by_key(|(cell, _)| *cell);
}

fn place(places: &[u32], cell: u32) -> u32 {
    places.get(cell as usize).copied().unwrap_or(u32::MAX)
}

/// What is told of a device goes on.
fn follow(whole: &mut Device, part: Device) {
    let mut part = part;
    let is_higher =
        |a: &Moment, b: &Moment| a.tracked_bytes.or(a.used_bytes()) > b.tracked_bytes.or(b.used_bytes());
    if is_higher(&whole.peak, &part.peak) {
        part.peak = whole.peak.clone();
    }
    part.peak_used = whole.peak_used.max(part.peak_used);
    let mut series = whole.series.clone();
    series.absorb(&part.series);
    part.series = series;
    let (before, after) = (&mut whole.details, &mut part.details);
    let timeline = &mut after.timeline;
    timeline.width_ns = timeline.width_ns.max(before.timeline.width_ns);
    timeline.points.splice(0..0, before.timeline.points.drain(..));
    after.iterations.rows.splice(0..0, before.iterations.rows.drain(..));
    let mut parameters = std::mem::take(&mut before.parameters);
    parameters.go_on(std::mem::take(&mut after.parameters));
    after.parameters = parameters;
    after.ooms.splice(0..0, before.ooms.drain(..));
    // The gap's steps and the points of growth are those of the whole life.
    *whole = part;
}
