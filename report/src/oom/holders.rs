//! Who had the device: holders, what nobody owns, the driver's share and what is free are its size, as printed.

use super::own::Own;
use super::signed;
use crate::text::{clean, free_name, rest_name};
use gpumem_model::run::{Holder, Oom, OomDevice};
use gpumem_model::time::Times;
use gpumem_model::units::{Unit, thousands};

/// Holders that have a line each.
const MOST_HOLDERS: usize = 6;

pub(super) fn holders(
    oom: &Oom,
    device: &OomDevice,
    own: Option<&Own>,
    unit: Unit,
    times: Times,
    lines: &mut Vec<String>,
) {
    let total = unit.round(signed(device.total_bytes));
    let (mut named, mut folded) = (device.holders.clone(), device.others);
    for holder in named.split_off(named.len().min(MOST_HOLDERS)) {
        folded = (folded.0.saturating_add(1), folded.1.saturating_add(holder.used_bytes));
    }
    // The driver's own word of what was free is newer than the reading: others have moved since.
    let free = oom.device_free_bytes.map_or(device.free_bytes, signed);
    let moved = device.free_bytes.saturating_sub(free);
    let mut parts: Vec<i64> = named.iter().map(|holder| holder.used_bytes).collect();
    parts.extend([folded.1, moved, device.unaccounted_bytes, signed(device.system_bytes.unwrap_or(0)), free]);
    let mut steps = unit.apportion(total, &parts);
    // The process itself reads as it is told below.
    if let (Some(own), [first, .., last]) = (own.filter(|own| !own.is_tracked_only), steps.as_mut_slice()) {
        let told = unit.round(own.total);
        if parts.first() == Some(&own.total) {
            *last += *first - told;
            *first = told;
        }
    }
    let names: Vec<String> = named.iter().map(name).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let column = steps.iter().map(|steps| unit.print(*steps).len()).max().unwrap_or(0);
    for (index, ((holder, name), steps)) in named.iter().zip(&names).zip(&steps).enumerate() {
        let head = if index == 0 { "holders" } else { "" };
        let growth = growth(holder, unit).map_or(String::new(), |growth| format!("  ({growth})"));
        lines.push(format!("{head:<8} {name:<width$}  {:>column$}{growth}", unit.print(*steps)));
    }
    let beside = [
        (format!("{} other processes", thousands(folded.0)), folded.1, false),
        ("allocated since".to_owned(), moved, false),
        (rest_name(device.unified).to_owned(), device.unaccounted_bytes, false),
        ("system".to_owned(), signed(device.system_bytes.unwrap_or(0)), false),
        (free_name(device.unified).to_owned(), free, true),
    ];
    let beside = beside.into_iter().zip(steps.into_iter().skip(named.len()));
    let beside = beside.filter(|((_, bytes, always), steps)| *always || *bytes != 0 || *steps != 0);
    let beside: Vec<String> =
        beside.map(|((name, ..), steps)| format!("{name} {}", unit.print(steps))).collect();
    let age = oom.time_ns.saturating_sub(device.read_ns);
    let read = if age > 2_000_000_000 {
        format!(" (read at {})", times.time(device.read_ns))
    } else {
        String::new()
    };
    lines.push(format!("         {} = {} with above{read}", beside.join(" + "), unit.print(total)));
}

pub(super) fn growth(holder: &Holder, unit: Unit) -> Option<String> {
    let (bytes, in_ns) = holder.growth_bytes.zip(holder.growth_ns)?;
    let plus = if bytes >= 0 { "+" } else { "" };
    Some(format!("{plus}{} in {} s", unit.amount(bytes), in_ns.div_ceil(1_000_000_000)))
}

/// `alice 41873`; where others are not shown, `another process`.
pub(super) fn name(holder: &Holder) -> String {
    let user = holder.user.as_deref().map(clean);
    match (user, holder.pid) {
        (Some(user), 0) => user,
        (Some(user), pid) => format!("{user} {pid}"),
        (None, 0) => "another process".to_owned(),
        (None, pid) => format!("- {pid}"),
    }
}
