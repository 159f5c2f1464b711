//! Writes facts about a device below its table: when untrackable memory was measured, what `Others` contains, which other
//! processes have memory on the device.

use crate::amounts::{apportioned, largest_first, sum, sum_of, sums};
use crate::labels::{free_name, rest_name};
use crate::lines::{Lines, clean_name, listed};
use crate::rules::NO_TAG;
use crate::steps::largest_unexplained;
use crate::{GroupBy, Report, gap_distance, growth};
use gpumem_model::run::{Clock, Device, OomDevice};
use gpumem_model::time::Times;
use gpumem_model::units::{Unit, signed, thousands};
use gpumem_model::window::WindowKind;

/// Maximum number of names in a list.
const NAMED: usize = 3;

pub(super) fn facts(report: &Report<'_>, device: &Device, times: Times, out: &mut Lines) {
    if let (Some(absence), Some(_)) = (&device.last.used_absence, device.last.used_bytes()) {
        let time = times.time(device.last.time_ns);
        out.prose(&format!(
            "NVML's newest reading has no number for this process ({absence}); the last one is of {time}"
        ));
    }
    if device.peak.gap_distance_ns != 0 {
        let moment = match report.window.map(|window| window.part) {
            None => "the peak",
            Some(WindowKind::At) => "that time",
            Some(_) => "the highest moment",
        };
        out.prose(&if report.window.is_some_and(|window| !window.exact) {
            let distances = [&device.last, &device.peak].map(|moment| moment.gap_distance_ns.unsigned_abs());
            let most = report.run.clock.distance(distances[0].max(distances[1]));
            format!("~ Untrackable is from the nearest stored sample, less than {most} away")
        } else {
            format!("~ Untrackable was measured {} {moment}", gap_distance(report.run, &device.peak))
        });
    }
    // A log has no driver events, so it gives no causes of changes (steps) of untrackable memory.
    if report.run.clock != Clock::Lines {
        largest_unexplained(device, times).iter().for_each(|line| out.prose(line));
    }
    if let Some((low, high)) = device.last.torn {
        let unit = Unit::for_largest(high);
        let range = match low == high {
            true => format!("at least {}, a call was in progress", unit.amount(low)),
            false => format!("between {} and {}", unit.amount(low), unit.amount(high)),
        };
        out.prose(&format!("memory changed while NVML was read ({}): tracked was {range}", unit.name));
    }
    let others = report.others(&device.last, report.by);
    if report.by != GroupBy::Tag && !others.is_empty() {
        let unit = Unit::for_largest(sum_of(&others));
        let name = |tag: &str| if tag.is_empty() { NO_TAG.to_owned() } else { clean_name(tag) };
        let named = others.iter().map(|(tag, bytes)| (name(tag), *bytes));
        out.prose(&list("in Others", unit, named, NAMED));
    }
    inherited(report, device, out);
    // The memory of other processes at a past time is not recorded.
    if report.window.is_none_or(|window| window.part != WindowKind::Between) {
        out.prose(&device_line(device, times));
    }
    if let Some(accounting) = device.accounting() {
        let unit = Unit::for_largest(signed(accounting.driver_bytes));
        let amount = |bytes: u64| unit.amount_with_name(signed(bytes));
        let ours = accounting.our_bytes.map_or("not known".to_owned(), amount);
        out.prose(&format!("driver accounting: peak {}, ours {ours}", amount(accounting.driver_bytes)));
    }
    beside(device, out);
    if let Some(growth) = growth::line(report, device) {
        out.prose(&growth);
    }
}

/// Adds the amounts that have only the tag of the whole process, the largest first.
fn inherited(report: &Report<'_>, device: &Device, out: &mut Lines) {
    let named = device.last.amounts.iter().filter_map(|(index, bytes)| {
        let cell = report.cell(*index).filter(|cell| cell.inherited)?;
        Some((cell.tag.as_deref()?, *bytes))
    });
    let named = largest_first(sums(named).into_iter().filter(|(_, bytes)| *bytes > 0));
    if named.is_empty() {
        return;
    }
    let unit = Unit::for_largest(sum(named.iter().map(|(_, bytes)| *bytes)));
    let named = named.into_iter().map(|(tag, bytes)| (clean_name(tag), bytes));
    out.prose(&list("inherited from the process, by threads without a tag", unit, named, NAMED));
}

/// Returns a line such as `TITLE (MiB): NAME 3, NAME 2, 4 more`, with the first `limit` of the named amounts.
fn list(title: &str, unit: Unit, named: impl IntoIterator<Item = (String, i64)>, limit: usize) -> String {
    let named = named.into_iter().map(|(name, bytes)| format!("{name} {}", unit.amount(bytes)));
    format!("{title} ({}): {}", unit.name, listed(named, limit))
}

/// Returns the line on the memory of the whole device.
pub(super) fn device_line(device: &Device, times: Times) -> String {
    let Some(reading) = device.reading else { return "device: device memory was not read".into() };
    let total = device.total_bytes.unwrap_or(reading.used_bytes.saturating_add(reading.free_bytes));
    let unit = Unit::for_largest(signed(total));
    let Some(parts) = device_parts(device) else {
        let free = (free_name(reading.unified).to_owned(), signed(reading.free_bytes));
        return format!(
            "device ({}): {}, read at {}, not when the process was read: unaccounted is unknown",
            unit.name,
            equation(unit, &[("used".to_owned(), signed(reading.used_bytes)), free]),
            times.time(reading.time_ns)
        );
    };
    let unified = if reading.unified { "; unified: the host's memory" } else { "" };
    format!("device ({}): {}{unified}", unit.name, equation(unit, &parts))
}

/// Returns the line on the memory of the whole device when a request failed. `None` if the record does not have it, and on a device
/// that shares the host's memory.
pub(super) fn device_line_at(device: &OomDevice) -> Option<String> {
    let (own, others) = device.holders.split_first().filter(|_| !device.unified)?;
    let mut parts = vec![("this process".to_owned(), own.used_bytes)];
    let (more, more_bytes) = device.others;
    let used = sum(others.iter().map(|holder| holder.used_bytes).chain([more_bytes]));
    match (others, more) {
        ([], 0) => {}
        ([one], 0) if one.pid != 0 => parts.push((format!("pid {}", one.pid), used)),
        _ => {
            let count = (others.len() as u64).saturating_add(u64::from(more));
            parts.push((format!("other processes ({})", thousands(count)), used));
        }
    }
    parts.push((rest_name(false).to_owned(), device.unaccounted_bytes));
    parts.extend(device.system_bytes.map(|bytes| ("system".to_owned(), signed(bytes))));
    parts.push((free_name(false).to_owned(), device.free_bytes));
    let unit = Unit::for_largest(signed(device.total_bytes));
    Some(format!("device ({}): {}", unit.name, equation(unit, &parts)))
}

/// Returns the device's memory by holder: this process, other processes, and memory of no process. `None` if these amounts were
/// not read at the same time.
pub(crate) fn device_parts(device: &Device) -> Option<Vec<(String, i64)>> {
    let reading = device.reading?;
    let (unaccounted, used) = (device.unaccounted_bytes?, device.last.used_bytes()?);
    let mut parts = vec![("this process".to_owned(), used)];
    match device.tenants.as_slice() {
        [] => {}
        // A process that the reader may not see has pid 0.
        [(pid, used)] => {
            let who = if *pid == 0 { "another process".to_owned() } else { format!("pid {pid}") };
            parts.push((who, used.map_or(0, signed)));
        }
        many => {
            let (more, more_bytes) = device.other_tenants;
            let named = many.iter().filter_map(|(_, used)| used.map(signed));
            let used = sum(named.chain([signed(more_bytes)]));
            let count = many.len() as u64 + u64::from(more);
            parts.push((format!("other processes ({})", thousands(count)), used));
        }
    }
    parts.push((rest_name(reading.unified).to_owned(), unaccounted));
    if let Some(system) = reading.system_reserved_bytes {
        parts.push(("system".to_owned(), signed(system)));
    }
    parts.push((free_name(reading.unified).to_owned(), signed(reading.free_bytes)));
    // On a device that shares the host's memory, the numbers do not include the kernel's own memory.
    if let Some(total) = device.total_bytes.filter(|_| !reading.unified) {
        let missing = signed(total).saturating_sub(sum_of(&parts));
        if missing != 0 {
            parts.push(("not in NVML's numbers".to_owned(), missing));
        }
    }
    Some(parts)
}

/// Returns an equation such as `1 this process + 2 free = 3`, which adds up as printed.
fn equation(unit: Unit, parts: &[(String, i64)]) -> String {
    let total = unit.round(sum_of(parts));
    let shown = apportioned(unit, total, parts);
    let mut text = String::new();
    for (name, amount) in shown {
        let (sign, amount) =
            amount.strip_prefix('-').map_or((" + ", amount.as_str()), |amount| (" - ", amount));
        text +=
            &format!("{}{amount} {name}", if text.is_empty() { sign.trim_matches([' ', '+']) } else { sign });
    }
    format!("{text} = {}", unit.print(total))
}

/// Adds the line on memory that is not part of `tracked`.
fn beside(device: &Device, out: &mut Lines) {
    let beside = &device.beside;
    let kinds = [
        ("managed", beside.managed_bytes),
        ("pinned host", beside.pinned_bytes),
        ("registered host", beside.registered_bytes),
        ("imported", beside.imported_bytes),
        ("host VMM", beside.host_vmm_bytes),
        ("blocks in unrecorded allocations", beside.unbooked_block_bytes),
    ];
    let Some(largest) = kinds.iter().map(|(_, bytes)| bytes.saturating_abs()).max().filter(|most| *most > 0)
    else {
        return;
    };
    let named = kinds.into_iter().filter(|(_, bytes)| *bytes != 0);
    let named = named.map(|(name, bytes)| (name.to_owned(), bytes));
    out.prose(&list("beside the sum", Unit::for_largest(largest), named, usize::MAX));
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_model::run::Holder;

    #[test]
    fn device_at_a_failure_adds_up_with_other_processes() {
        const MIB: i64 = 1 << 20;
        let holder = |pid: u32, mib: i64| Holder { pid, used_bytes: mib * MIB, ..Holder::default() };
        let mut device = OomDevice {
            total_bytes: 1000 << 20,
            free_bytes: 50 * MIB,
            system_bytes: Some(100 << 20),
            holders: vec![holder(5, 600), holder(7, 250)],
            ..OomDevice::default()
        };
        let line = |device: &OomDevice| device_line_at(device).unwrap_or_default();
        assert_eq!(
            line(&device),
            "device (MiB): 600.0 this process + 250.0 pid 7 + 0.0 unaccounted + 100.0 system + 50.0 free = 1,000.0"
        );
        device.others = (2, 30 * MIB);
        assert!(line(&device).contains(" + 280.0 other processes (3) + "), "{}", line(&device));
        device.unified = true;
        assert_eq!(device_line_at(&device), None);
        assert_eq!(device_line_at(&OomDevice::default()), None, "an older record");
    }
}
