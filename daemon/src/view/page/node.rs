//! Makes the JSON of devices and processes at one time. It has the rows of `gpumemctl ps`, and the field names of the report's
//! JSON.

use super::response_cache::{Text, make_in_thread};
use crate::aggregator::Published;
use crate::clock;
use crate::config::{Page, Tenants};
use crate::view::Health;
use crate::view::rows::{ConsistentSample, RowMaker, Rows};
use crate::view::text::clean;
use crate::view::visibility::Viewer;
use crate::view::{Refused, ViewContext, ViewSettings};
use gpumem_ledger::{AccountView, Class, DeviceView, ProcessView};
use gpumem_model::control::{DeviceRow, ProcessRow};
use gpumem_model::run::{Clock, DeviceReading};
use gpumem_report::category::{OTHERS, Rules};
use gpumem_report::names;
use gpumem_report::rules::Groupings;
use serde::Serialize;
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

#[derive(Serialize)]
pub(super) struct Node<'a> {
    schema: &'static str,
    version: u32,
    program: &'static str,
    host: String,
    clock: Clock,
    now_ns: u64,
    at_ns: u64,
    shows: &'static str,
    nvml: Nvml<'a>,
    devices: Vec<DeviceJson>,
    claims: Claims,
    #[serde(skip_serializing_if = "Option::is_none")]
    processes: Option<Vec<ProcessJson>>,
}

#[derive(Serialize)]
struct Nvml<'a> {
    up: bool,
    reason: &'a str,
}

#[derive(Serialize)]
struct DeviceJson {
    name: String,
    ordinal: u32,
    model: String,
    total_bytes: Option<u64>,
    reading: Option<DeviceReading>,
    /// The reading that belongs to the process list: its used bytes are those of the processes plus `unaccounted_bytes`.
    listed: Option<DeviceReading>,
    unaccounted_bytes: Option<i64>,
    other_processes: Others,
    why: Option<String>,
}

/// Devices that processes report although NVML, which works, does not have them.
#[derive(Default, Serialize)]
struct Claims {
    /// Number of processes that report such devices.
    processes: usize,
    /// Number of such devices, summed over these processes.
    devices: usize,
}

/// Processes of a device that have no row.
#[derive(Default, Serialize)]
struct Others {
    count: u32,
    used_bytes: u64,
}

#[derive(Serialize)]
struct ProcessJson {
    /// Pid; 0 if the viewer may not see it.
    pid: u32,
    start_ticks: u64,
    uid: Option<u64>,
    who: BTreeMap<String, String>,
    /// Index of the process's device in `devices`.
    device: usize,
    flags: Vec<String>,
    time_ns: Option<u64>,
    used_bytes: Option<u64>,
    used_absence: Option<String>,
    predates_bytes: Option<i64>,
    tracked_bytes: Option<i64>,
    pool_idle_bytes: Option<i64>,
    opaque_bytes: Option<i64>,
    untrackable_bytes: Option<i64>,
    /// Bytes by category. Together with idle and opaque bytes they add up to `tracked_bytes`.
    structures: Vec<Category>,
}

#[derive(Serialize)]
struct Category {
    name: String,
    bytes: i64,
}

/// Returns all devices as JSON, optionally with their processes.
pub(super) async fn json(
    context: &Arc<ViewContext>,
    shown: ViewSettings,
    with_processes: bool,
) -> Result<Text, Refused> {
    let health = context.sources.health();
    let mut published = context.board.read();
    for _ in 1..ATTEMPTS {
        let rows = rows(&published, &health, &shown);
        if (0..rows.devices.len()).all(|at| adds_up(&rows, at) != Some(false)) {
            break;
        }
        tokio::time::sleep(RETRY).await;
        published = context.board.read();
    }
    make_in_thread(move || {
        let node = node(&published, &health, &shown, with_processes);
        // Keys are strings and numbers are finite, so serialization cannot fail.
        serde_json::to_string(&node).unwrap_or_default()
    })
    .await
}

/// Returns the rows that a viewer without an identity may see.
fn rows<'a>(published: &'a Published, health: &'a Health, shown: &ViewSettings) -> Rows<'a> {
    let all = shown.tenants == Tenants::Named;
    let viewer = Viewer { uid: u32::MAX, all };
    RowMaker { published, health, viewer, tenants: shown.tenants }.rows()
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

pub(super) fn node<'a>(
    published: &Published,
    health: &'a Health,
    shown: &ViewSettings,
    with_processes: bool,
) -> Node<'a> {
    let rows = rows(published, health, shown);
    let mut devices: Vec<DeviceJson> = (0..rows.devices.len())
        .zip(&rows.devices)
        .map(|(at, (row, device))| self::device(row, device, adds_up(&rows, at) == Some(true)))
        .collect();
    let claims =
        Claims { processes: rows.claims.len(), devices: rows.claims.iter().map(|claim| claim.devices).sum() };
    let mut processes = Vec::new();
    let mut counts = vec![0; devices.len()];
    for (row, process, account) in &rows.processes {
        let (Some(count), Some(device)) = (counts.get_mut(row.device), devices.get_mut(row.device)) else {
            continue;
        };
        *count += 1;
        if *count <= MAX_ROWS {
            processes.extend(with_processes.then(|| self::process(row, process, account, shown)));
        } else {
            device.other_processes.count += 1;
            let used = row.used_bytes.unwrap_or(0);
            device.other_processes.used_bytes = device.other_processes.used_bytes.saturating_add(used);
        }
    }
    Node {
        schema: if with_processes { "gpumem.processes" } else { "gpumem.devices" },
        version: 1,
        program: env!("CARGO_PKG_VERSION"),
        host: clean(&rustix::system::uname().nodename().to_string_lossy()).into_owned(),
        clock: published.snapshot.run_clock(),
        now_ns: clock::now_ns(),
        at_ns: published.at_ns,
        shows: match shown.page {
            Page::Tags => "tags",
            Page::Categories | Page::Off => "categories",
        },
        nvml: Nvml {
            up: health.nvml.problem().is_none(),
            reason: health.nvml.problem().unwrap_or(health.nvml.reason()),
        },
        devices,
        claims,
        processes: with_processes.then_some(processes),
    }
}

fn device(row: &DeviceRow, device: &DeviceView, adds_up: bool) -> DeviceJson {
    DeviceJson {
        name: row.uuid.clone(),
        ordinal: row.index,
        model: clean(&row.model).into_owned(),
        total_bytes: row.total_bytes,
        reading: device.latest,
        listed: device.agreed.filter(|_| adds_up).map(|agreed| agreed.reading),
        unaccounted_bytes: row.unaccounted_bytes,
        other_processes: Others::default(),
        why: row.why.as_deref().map(|why| clean(why).into_owned()),
    }
}

fn process(
    row: &ProcessRow,
    process: &ProcessView,
    account: &AccountView,
    shown: &ViewSettings,
) -> ProcessJson {
    // If the pid is hidden, only the bytes of the process are shown.
    let is_named = row.pid != 0;
    let who = row.who.iter().map(|(name, value)| (name.clone(), clean(value).into_owned()));
    let ConsistentSample { sample, tracked: (_, amounts), .. } = ConsistentSample::of(account);
    let sample = sample.filter(|_| row.used_bytes.is_some());
    let amounts = row.tracked_bytes.map(|_| amounts);
    let sums = amounts.map(|amounts| Sums::of(process, amounts, rules(process, shown)));
    ProcessJson {
        pid: row.pid,
        start_ticks: if is_named { process.key.start_ticks } else { 0 },
        uid: row.uid,
        who: who.collect(),
        device: row.device,
        flags: row.flags.clone(),
        time_ns: sample.map(|sample| sample.t1_ns),
        used_bytes: row.used_bytes,
        used_absence: row.why.clone(),
        predates_bytes: sample
            .filter(|_| row.untrackable_bytes.is_some())
            .map(|sample| sample.predates_bytes),
        tracked_bytes: row.tracked_bytes,
        pool_idle_bytes: row.idle_bytes,
        opaque_bytes: sums.as_ref().map(|sums| sums.opaque),
        untrackable_bytes: row.untrackable_bytes,
        structures: sums.map(Sums::categories).unwrap_or_default(),
    }
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

    /// Returns the categories, largest first; then the sum of small ones, and `Others`.
    fn categories(self) -> Vec<Category> {
        let mut list: Vec<Category> =
            self.named.into_iter().map(|(name, bytes)| Category { name, bytes }).collect();
        list.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
        let rest = list.split_off(list.len().min(MAX_CATEGORIES));
        let rest = rest.iter().fold(0_i64, |sum, category| sum.wrapping_add(category.bytes));
        let others = [(SMALLER, rest), (OTHERS, self.others)].into_iter().filter(|(_, bytes)| *bytes != 0);
        list.extend(others.map(|(name, bytes)| Category { name: name.to_owned(), bytes }));
        list
    }
}
