//! Parts of a life as one run again, for a window that may lie in several of them.

use crate::fields::Field;
use crate::run::Run;

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
    let cells = std::mem::take(&mut part.cells);
    let places = whole.merge_cells(&cells);
    part.remap(&|cell| Some(places.get(cell as usize).copied().unwrap_or(u32::MAX)));
    for device in part.devices {
        match whole.devices.iter_mut().find(|other| other.name == device.name) {
            Some(other) => other.join(device),
            None => whole.devices.push(device),
        }
    }
    whole.own.append(part.own);
    // The peak may be of any part: what was lost in one of them makes it a lower bound.
    whole.coverage.partial_history |= whole.coverage.partial_state;
    whole.coverage.join(part.coverage);
    // That a part has parts before it is true of the first of these alone; the driver's accounting is of the whole life.
    part.caveats.retain(|caveat| caveat.code != "part");
    let mut earlier = std::mem::replace(&mut whole.caveats, part.caveats);
    earlier.retain(|caveat| {
        caveat.code != "accounting_disagrees" && whole.caveats.iter().all(|other| other.code != caveat.code)
    });
    whole.caveats.splice(0..0, earlier);
    (whole.state, whole.process, whole.clock) = (part.state, part.process, part.clock);
}
