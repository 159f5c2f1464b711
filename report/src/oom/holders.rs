//! Holders of the device's memory when memory ran out. Holders, memory of no process, the driver's share and free memory add up
//! to the device's size as printed. Also divides the process's own memory by name.

use crate::Report;
use crate::amounts::{apportioned, folded_parts, sum_of};
use crate::labels::{free_name, rest_name};
use crate::table::{Align, Table, pad, width};
use gpumem_model::escape::escape;
use gpumem_model::run::{Holder, Moment, Oom, OomDevice};
use gpumem_model::time::Times;
use gpumem_model::units::{Unit, signed, thousands};

/// Maximum number of holders with their own row.
const MOST_HOLDERS: usize = 6;
/// Maximum number of tags (names of memory) listed for the failed process.
const NAMED: usize = 8;

/// Returns the processes that held memory of the device at an out-of-memory event, the failed process first.
pub(crate) fn holders_of(oom: &Oom) -> &[Holder] {
    oom.device.as_ref().map(|device| device.holders.as_slice()).unwrap_or_default()
}

/// Adds the rows of the device's memory by holder, and the line on memory that no listed process holds.
pub(super) fn holders(
    oom: &Oom,
    device: &OomDevice,
    own: Option<&ProcessMemory>,
    unit: Unit,
    times: Times,
    lines: &mut Vec<String>,
) {
    let total = unit.round(signed(device.total_bytes));
    let (mut named, mut folded) = (device.holders.clone(), device.others);
    for holder in named.split_off(named.len().min(MOST_HOLDERS)) {
        folded = (folded.0.saturating_add(1), folded.1.saturating_add(holder.used_bytes));
    }
    let beside = beside_holders(oom, device, folded);
    let held = named.iter().map(|holder| holder.used_bytes);
    let parts: Vec<i64> = held.chain(beside.iter().map(|(_, bytes)| *bytes)).collect();
    let mut steps = unit.apportion(total, &parts);
    // The first holder is the process itself. Its row shows the same rounded total as the line `you` below the table.
    if let (Some(own), [first, .., last]) = (own.filter(|own| !own.is_tracked_only), steps.as_mut_slice()) {
        let rounded = unit.round(own.total);
        if parts.first() == Some(&own.total) {
            *last += *first - rounded;
            *first = rounded;
        }
    }
    // The column of amounts is also as wide as the amounts in the line below the table.
    let column = steps.iter().map(|steps| width(&unit.print(*steps))).max().unwrap_or(0);
    let mut table = Table::of_numbers(1, 2);
    for (holder, steps) in named.iter().zip(&steps) {
        let growth = growth(holder, unit).map_or(String::new(), |growth| format!("({growth})"));
        table.row_with_note([name(holder), pad(&unit.print(*steps), column, Align::Right)], &growth);
    }
    for (index, line) in table.lines().iter().enumerate() {
        let head = if index == 0 { "holders" } else { "" };
        lines.push(format!("{head:<8} {line}"));
    }
    // Free memory, the last amount, is always shown; each other amount only if it is not zero.
    let is_shown = |at: usize, bytes: i64, steps: i64| at == 4 || bytes != 0 || steps != 0;
    let beside = beside.iter().zip(steps.into_iter().skip(named.len())).enumerate();
    let beside = beside.filter(|(at, ((_, bytes), steps))| is_shown(*at, *bytes, *steps));
    let beside: Vec<String> =
        beside.map(|(_, ((name, _), steps))| format!("{name} {}", unit.print(steps))).collect();
    let age = oom.time_ns.saturating_sub(device.read_ns);
    let read = match age {
        0..=2_000_000_000 => String::new(),
        _ => format!(" (read at {})", times.time(device.read_ns)),
    };
    lines.push(format!("         {} = {} with above{read}", beside.join(" + "), unit.print(total)));
}

/// Returns the memory of a device that no listed process has: other processes, changes since the processes were read, memory of
/// no process, the driver's share, and free memory.
pub(crate) fn beside_holders(oom: &Oom, device: &OomDevice, others: (u32, i64)) -> [(String, i64); 5] {
    // The driver's value for free memory is newer than the holders' readings: other processes have allocated or freed since.
    let free = oom.device_free_bytes.map_or(device.free_bytes, signed);
    [
        (format!("{} other processes", thousands(others.0)), others.1),
        ("allocated since".to_owned(), device.free_bytes.saturating_sub(free)),
        (rest_name(device.unified).to_owned(), device.unaccounted_bytes),
        ("system".to_owned(), device.system_bytes.map_or(0, signed)),
        (free_name(device.unified).to_owned(), free),
    ]
}

pub(super) fn growth(holder: &Holder, unit: Unit) -> Option<String> {
    let (bytes, in_ns) = holder.growth_bytes.zip(holder.growth_ns)?;
    let plus = if bytes >= 0 { "+" } else { "" };
    Some(format!("{plus}{} in {} s", unit.amount(bytes), in_ns.div_ceil(1_000_000_000)))
}

/// Returns the holder's user and pid, `alice 41873`, or `another process` if the reader may not see other users' processes.
pub(crate) fn name(holder: &Holder) -> String {
    let user = holder.user.as_deref().map(escape);
    match (user, holder.pid) {
        (Some(user), 0) => user,
        (Some(user), pid) => format!("{user} {pid}"),
        (None, 0) => "another process".to_owned(),
        (None, pid) => format!("- {pid}"),
    }
}

/// Memory of the process itself at an out-of-memory event, by name.
pub(super) struct ProcessMemory {
    pub parts: Vec<(String, i64)>,
    pub total: i64,
    /// Whether `total` covers only tracked memory, because another part of `used` is unknown.
    pub is_tracked_only: bool,
}

impl ProcessMemory {
    /// Returns the parts and their total as an equation that adds up as printed.
    pub fn sum(&self, unit: Unit) -> String {
        let total = unit.round(self.total);
        // Omits parts that round to zero.
        let shown =
            apportioned(unit, total, &self.parts).into_iter().filter(|(_, amount)| *amount != unit.print(0));
        let mut shown: Vec<String> = shown.map(|(name, amount)| format!("{name} {amount}")).collect();
        if shown.is_empty() {
            shown.push("nothing".to_owned());
        }
        let what = if self.is_tracked_only { " tracked" } else { "" };
        format!("{} = {}{what}", shown.join(" + "), unit.print(total))
    }
}

pub(super) fn composition(report: &Report<'_>, oom: &Oom) -> ProcessMemory {
    let moment = Moment { amounts: oom.amounts.clone(), ..Moment::default() };
    let composition = report.composition(&moment, report.by);
    let beside = [
        (report.by.name_of_rest(), composition.others),
        ("opaque pools", composition.opaque),
        ("idle", composition.pool_idle),
        ("predates the agent", oom.predates_bytes.unwrap_or(0)),
        ("Untrackable", oom.untrackable_bytes.unwrap_or(0)),
    ];
    let mut parts = folded_parts(composition.ranked(), NAMED, |number| format!("({number} smaller)"));
    let beside = beside.into_iter().filter(|(_, bytes)| *bytes != 0);
    parts.extend(beside.map(|(name, bytes)| (name.to_owned(), bytes)));
    let is_tracked_only = oom.untrackable_bytes.is_none() || oom.predates_bytes.is_none();
    ProcessMemory { total: sum_of(&parts), parts, is_tracked_only }
}
