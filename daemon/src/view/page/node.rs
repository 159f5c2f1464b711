//! Makes the JSON of devices and processes at one time. It has the rows of `gpumemctl ps`, and the field names of the report's
//! JSON.

use super::response_cache::{Text, make_in_thread};
use crate::aggregator::Published;
use crate::clock;
use crate::config::{Page, Tenants};
use crate::run_writer::{EndedRuns, LiveFindings};
use crate::view::Health;
use crate::view::rows::{ConsistentSample, RowMaker, Rows};
use crate::view::text::clean;
use crate::view::{Refused, ViewContext, ViewSettings, Viewer};
use gpumem_ledger::{AccountView, Class, DeviceView, ProcessView, Snapshot};
use gpumem_model::control::{DeviceRow, ProcessRow};
use gpumem_report::category::{OTHERS, Rules};
use gpumem_report::names;
use gpumem_report::plot::palette::preferred;
use gpumem_report::rules::Groupings;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of processes of a device that have a row. The others, which use less memory, are added up.
const MAX_ROWS: usize = 256;
/// Maximum number of categories of a process. The others, which have fewer bytes, are added up.
const MAX_CATEGORIES: usize = 24;
const SMALLER: &str = "(smaller ones)";
/// Maximum number of snapshots that are read to find one in which a device's process list and memory reading belong together.
/// Both arrive as separate records.
const ATTEMPTS: usize = 3;
const RETRY: Duration = Duration::from_millis(80);

/// Returns all devices as JSON, optionally with their processes.
pub(super) async fn answer(
    context: &Arc<ViewContext>,
    shown: ViewSettings,
    with_processes: bool,
) -> Result<Text, Refused> {
    let health = context.sources.health();
    let mut published = context.reader.read();
    for _ in 1..ATTEMPTS {
        let rows = rows(&published, &health, &shown);
        if (0..rows.devices.len()).all(|at| adds_up(&rows, at) != Some(false)) {
            break;
        }
        tokio::time::sleep(RETRY).await;
        published = context.reader.read();
    }
    let run_writer = context.run_writer.clone();
    let node = move || {
        let mut node = node(&published, &health, &shown, run_writer.findings(), with_processes);
        if with_processes {
            // The processes that ended last, with their stored runs.
            node["ended"] = ended(run_writer.ended(), &shown);
        }
        node.to_string()
    };
    make_in_thread(node).await
}

/// Returns the rows that any client may see, because clients of the page are not identified.
fn rows<'a>(published: &'a Published, health: &'a Health, shown: &ViewSettings) -> Rows<'a> {
    let all = shown.tenants == Tenants::Named;
    let viewer = Viewer { uid: u32::MAX, all };
    RowMaker { published, health, viewer, tenants: shown.tenants }.rows()
}

fn ended(ended: &EndedRuns, shown: &ViewSettings) -> Value {
    let rows = ended.rows(|_| shown.tenants == Tenants::Named).into_iter().map(|row| {
        json!({
            "pid": row.pid, "start_ticks": row.start_ticks, "uid": row.uid, "run": row.run, "age_ms": row.age_ms,
            "outcome": row.outcome,
            "who": row.who.iter().map(|(name, value)| (name, clean(value))).collect::<BTreeMap<_, _>>(),
        })
    });
    rows.collect()
}

/// Returns whether a device's processes and unaccounted bytes add up to its used bytes; `None` if unknown.
fn adds_up(rows: &Rows<'_>, device: usize) -> Option<bool> {
    let agreed = rows.devices.get(device)?.1.agreed?;
    let mut sum = i128::from(agreed.unaccounted_bytes);
    for (row, ..) in rows.processes.iter().filter(|(row, ..)| row.device == device) {
        sum += i128::from(row.used_bytes?);
    }
    Some(sum == i128::from(agreed.reading.used_bytes))
}

pub(super) fn node(
    published: &Published,
    health: &Health,
    shown: &ViewSettings,
    live: &LiveFindings,
    with_processes: bool,
) -> Value {
    let rows = rows(published, health, shown);
    let mut processes = Vec::new();
    // For each device: the number of its processes, and the used bytes of those that have no row.
    let mut counts = vec![(0, 0_u64); rows.devices.len()];
    for (row, process, account) in &rows.processes {
        let Some((count, used_bytes)) = counts.get_mut(row.device) else { continue };
        *count += 1;
        if *count > MAX_ROWS {
            *used_bytes = used_bytes.saturating_add(row.used_bytes.unwrap_or(0));
        } else if with_processes {
            processes.push(self::process(row, process, account, (&published.snapshot, shown)));
        }
    }
    let device = |(at, (row, view)): (usize, &(DeviceRow, &DeviceView))| {
        let (count, used_bytes) = counts[at];
        let listed = view.agreed.filter(|_| adds_up(&rows, at) == Some(true));
        json!({
            "name": row.uuid,
            "ordinal": row.index,
            "model": clean(&row.model),
            "total_bytes": row.total_bytes,
            "reading": view.latest,
            // Device reading that fits the process list: its used bytes are those of all processes plus `unaccounted_bytes`.
            "listed": listed.map(|agreed| agreed.reading),
            "unaccounted_bytes": row.unaccounted_bytes,
            // Processes without a row.
            "other_processes": { "count": count.saturating_sub(MAX_ROWS), "used_bytes": used_bytes },
            "why": row.why.as_deref().map(clean),
        })
    };
    let mut node = json!({
        "schema": if with_processes { "gpumem.processes" } else { "gpumem.devices" },
        "version": 1,
        "program": env!("CARGO_PKG_VERSION"),
        "host": clean(&rustix::system::uname().nodename().to_string_lossy()),
        "clock": published.snapshot.run_clock(),
        "now_ns": clock::now_ns(),
        "at_ns": published.at_ns,
        "shows": if shown.page == Page::Tags { "tags" } else { "categories" },
        "nvml": {
            "up": health.nvml.problem().is_none(),
            "reason": health.nvml.problem().unwrap_or(health.nvml.reason()),
        },
        "devices": rows.devices.iter().enumerate().map(device).collect::<Vec<_>>(),
        // Devices that processes report although NVML, which works, does not have them.
        "claims": {
            "processes": rows.claims.len(),
            "devices": rows.claims.iter().map(|claim| claim.devices).sum::<usize>(),
        },
    });
    if with_processes {
        node["processes"] = processes.into();
        // Conclusions about the memory of these processes, the most important first.
        let names = shown.page == Page::Tags;
        node["findings"] = json!(rows.findings(live, names));
    }
    node
}

fn process(
    row: &ProcessRow,
    process: &ProcessView,
    account: &AccountView,
    (snapshot, shown): (&Snapshot, &ViewSettings),
) -> Value {
    let ConsistentSample { sample, tracked: (_, amounts), .. } = ConsistentSample::of(account);
    let sample = sample.filter(|_| row.used_bytes.is_some());
    let predates = sample.filter(|_| row.untrackable_bytes.is_some()).map(|sample| sample.predates_bytes);
    let sums = row.tracked_bytes.map(|_| Sums::of(process, amounts, rules(process, shown)));
    json!({
        // If the pid is hidden, pid and start are 0.
        "pid": row.pid,
        "start_ticks": if row.pid != 0 { process.key.start_ticks } else { 0 },
        "uid": row.uid,
        "who": row.who.iter().map(|(name, value)| (name, clean(value))).collect::<BTreeMap<_, _>>(),
        "device": row.device,
        "flags": row.flags,
        "time_ns": sample.map(|sample| snapshot.read_ns(process, account, sample)),
        "used_bytes": row.used_bytes,
        "used_absence": row.why,
        "predates_bytes": predates,
        "tracked_bytes": row.tracked_bytes,
        "pool_idle_bytes": row.idle_bytes,
        "opaque_bytes": sums.as_ref().map(|sums| sums.opaque),
        "untrackable_bytes": row.untrackable_bytes,
        // Bytes by category. Idle bytes of pools and bytes of pools that report no blocks (opaque) complete the tracked bytes.
        "structures": sums.map(Sums::categories).unwrap_or_default(),
    })
}

/// Returns the rules for a process: the configured ones, or instead of `default` those that fit the process.
fn rules<'a>(process: &ProcessView, shown: &'a ViewSettings) -> &'a Rules {
    let is_torch = || process.cells.iter().any(|cell| cell.pool.as_deref() == Some(names::TORCH));
    match shown.rules.name == "default" && is_torch() {
        true => &Groupings::preset(Some(names::TORCH)).structure,
        false => &shown.rules.structure,
    }
}

#[derive(Default)]
struct Sums {
    named: BTreeMap<String, i64>,
    others: i64,
    opaque: i64,
}

impl Sums {
    fn of(process: &ProcessView, amounts: &[i64], rules: &Rules) -> Self {
        let mut sums = Sums::default();
        for (cell, &bytes) in process.cells.iter().zip(amounts).filter(|(_, bytes)| **bytes != 0) {
            let sum = match cell.class {
                _ if cell.is_idle() => continue,
                Class::Opaque => &mut sums.opaque,
                _ => match rules.category(cell) {
                    Some(name) => match sums.named.get_mut(name) {
                        Some(sum) => sum,
                        None => sums.named.entry(name.to_owned()).or_default(),
                    },
                    None => &mut sums.others,
                },
            };
            *sum = sum.wrapping_add(bytes);
        }
        sums
    }

    /// Returns the categories with the numbers of their colours, largest first; then the sum of small ones, and `Others`.
    fn categories(self) -> Vec<Value> {
        let mut list: Vec<(String, i64)> = self.named.into_iter().collect();
        list.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let smaller = list.split_off(list.len().min(MAX_CATEGORIES));
        let smaller = smaller.iter().fold(0_i64, |sum, (_, bytes)| sum.wrapping_add(*bytes));
        let others = [(SMALLER.to_owned(), smaller), (OTHERS.to_owned(), self.others)];
        list.extend(others.into_iter().filter(|(_, bytes)| *bytes != 0));
        list.into_iter()
            .map(|(name, bytes)| json!({ "name": name, "bytes": bytes, "color": preferred(&name).0 }))
            .collect()
    }
}
