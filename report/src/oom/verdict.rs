//! States in one line why memory ran out, or which other cause ended the process.

use super::holders::{growth, holders_of, name};
use crate::Report;
use crate::amounts::sum;
use crate::findings::{self, Finding};
use gpumem_model::ending::{Cause, Ending};
use gpumem_model::escape::escape;
use gpumem_model::run::{Device, Holder, Oom};
use gpumem_model::units::{Unit, plural, signed, thousands};

/// Returns a text on idle memory, its fragmentation, and how its largest block compares with the request. `None` if no pool
/// reports its blocks.
pub(super) fn idle(oom: &Oom, unit: Unit) -> Option<String> {
    let (idle, largest) = oom.idle_bytes.zip(oom.largest_idle_bytes)?;
    let relation = if largest < oom.asked_bytes { "<" } else { ">=" };
    let [idle, largest, asked] = [idle, largest, oom.asked_bytes].map(|bytes| unit.amount(signed(bytes)));
    Some(format!("{idle}{}, largest block {largest} {relation} {asked}", pieces(oom)))
}

fn pieces(oom: &Oom) -> String {
    oom.idle_pieces.map_or(String::new(), |pieces| format!(" in {}", plural(pieces, "piece")))
}

/// Returns the causes of a failed request as one text.
pub(super) fn verdict(
    report: &Report<'_>,
    (device, oom): (&Device, &Oom),
    ending: Option<&Ending>,
    unit: Unit,
) -> String {
    if oom.is_suspected() {
        return suspicion(oom, ending, unit);
    }
    let asked = signed(oom.asked_bytes);
    let need = oom.driver_asked_bytes.map_or(asked, signed);
    let Some(free) = oom.free_bytes() else {
        return "unknown: free memory was not reported".to_owned();
    };
    // The process continued after a refusal without an error, so nothing explains it but the missing bytes.
    let causes = if oom.is_out_of_memory() { findings::of_request(report, device, oom) } else { Vec::new() };
    if !causes.is_empty() {
        return causes.iter().map(Finding::sentence).collect::<Vec<_>>().join("; ");
    }
    if free >= need {
        return "the driver refused although enough was free".to_owned();
    }
    let short = unit.print(unit.round(need) - unit.round(free));
    match &oom.device {
        Some(device) => {
            let named = holders_of(oom).iter().skip(1).map(|holder| holder.used_bytes);
            let held = sum(named.chain([device.others.1]));
            format!("{short} short; others hold {}", unit.amount(held))
        }
        None => format!("{short} short; the other holders are unknown: NVML was not read"),
    }
}

fn suspicion(oom: &Oom, ending: Option<&Ending>, unit: Unit) -> String {
    if let Some(ending) = ending {
        return format!("not an OOM: {}", sentence(ending));
    }
    let free = oom.free_bytes().map_or("not known".to_owned(), |free| unit.amount(free));
    let mut words = vec![format!("suspected: it ended while {free} of the device was free")];
    let holders = holders_of(oom);
    let grown = most_grown(holders).filter(|(_, bytes)| *bytes > 0);
    if let Some((holder, growth)) = grown.and_then(|(holder, _)| Some((holder, growth(holder, unit)?))) {
        let is_own = holders.first().is_some_and(|own| std::ptr::eq(own, holder));
        let who = if is_own { "itself".to_owned() } else { holder_label(holder, holders.first()) };
        words.push(format!("most grown: {who} ({growth})"));
    }
    words.join("; ")
}

fn most_grown(holders: &[Holder]) -> Option<(&Holder, i64)> {
    let grown = holders.iter().filter_map(|holder| Some((holder, holder.growth_bytes?)));
    grown.max_by_key(|(_, bytes)| *bytes)
}

/// Returns the holder's user if it differs from the process's own user, else user and pid.
fn holder_label(holder: &Holder, own: Option<&Holder>) -> String {
    match &holder.user {
        Some(user) if own.is_none_or(|own| own.user.as_ref() != Some(user)) => escape(user),
        _ => name(holder),
    }
}

/// Returns a sentence on what ended a process, if that was not GPU memory.
pub fn sentence(ending: &Ending) -> String {
    let host = "killed by the kernel for HOST memory, not GPU memory";
    match (&ending.cause, ending.is_named) {
        (Cause::HostMemory, _) => format!("{host}: the machine had none left"),
        (Cause::CgroupMemory { cgroup, owner, limit_bytes }, is_named) => {
            let limit = limit_bytes.map_or(String::new(), |bytes| format!(" of {}", limit(bytes)));
            let whose = match (owner, cgroup) {
                (Some(owner), _) => owner.clone(),
                (None, Some(cgroup)) => format!("control group {cgroup}"),
                (None, None) => "its control group".to_owned(),
            };
            match is_named {
                true => format!("{host}: the limit{limit} of {whose} was reached"),
                false => format!(
                    "probably {host}: the limit{limit} of {whose} was reached, and one of its processes was killed, \
                         during this run"
                ),
            }
        }
        (Cause::Xid { xid, words }, is_named) => {
            let words = words.map(|words| format!(" ({words})")).unwrap_or_default();
            let whose = if is_named { "" } else { " on its GPU; the driver does not name the process" };
            format!("Xid {}{words}{whose}: a fault, not an OOM", thousands(*xid))
        }
    }
}

/// Formats a memory limit in GiB or MiB, the units in which people set limits.
fn limit(bytes: u64) -> String {
    match bytes {
        0x4000_0000.. => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
        _ => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
    }
}
