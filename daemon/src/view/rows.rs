//! What holds the devices now, as the rows that `ps` and the page show.

use super::health::Health;
use super::visibility::Viewer;
use crate::aggregator::Published;
use crate::config::Tenants;
use gpumem_ledger::{AccountView, DeviceView, ProcessView};
use gpumem_model::control::{ClaimRow, DeviceRow, ProcessRow};
use gpumem_model::run::absence_name;
use gpumem_model::who::Who;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Rows with what they are made of.
pub(super) struct Rows<'a> {
    /// In NVML's order.
    pub devices: Vec<(DeviceRow, &'a DeviceView)>,
    /// By device, the largest first.
    pub processes: Vec<(ProcessRow, &'a ProcessView, &'a AccountView)>,
    /// What processes say to hold on devices that this machine does not have, one for each process.
    pub claims: Vec<ClaimRow>,
}

pub(super) fn rows<'a>(
    published: &'a Published,
    health: &Health,
    viewer: Viewer,
    tenants: Tenants,
) -> Rows<'a> {
    let snapshot = &published.snapshot;
    // In NVML's order; devices that only agents have named come last.
    let place = |device: &DeviceView| health.nvml.devices.iter().position(|of| of.name == device.name);
    // What is only said to be there is shown while somebody says to hold something on it: a liar names devices without end.
    let living = || snapshot.processes.iter().filter(|process| process.ended.is_none());
    let held = living().flat_map(|process| &process.accounts).filter(|account| holds(account));
    let held: BTreeSet<usize> = held.filter_map(|account| account.device).collect();
    let may_be = |at: &usize| health.nvml.may_have(snapshot.devices[*at].name);
    let is_there = |at: &usize| place(&snapshot.devices[*at]).is_some() || held.contains(at) && may_be(at);
    let mut order: Vec<usize> = (0..snapshot.devices.len()).filter(is_there).collect();
    order.sort_by_key(|&at| (place(&snapshot.devices[at]).unwrap_or(usize::MAX), at));
    let devices = order.iter().map(|&at| &snapshot.devices[at]);
    let devices = devices.map(|of| (device(published, health, of), of)).collect();
    let mut processes = Vec::new();
    let mut claims = Vec::new();
    for process in living() {
        claims.extend(claim(published, process, &may_be, viewer, tenants));
        for account in &process.accounts {
            let row = account.device.and_then(|device| order.iter().position(|&at| at == device));
            if let Some(row) = row {
                let row = self::process(published, process, account, row, viewer, tenants);
                processes.extend(row.map(|row| (row, process, account)));
            }
        }
    }
    let size =
        |row: &ProcessRow| row.used_bytes.or(row.tracked_bytes.and_then(|bytes| bytes.try_into().ok()));
    processes.sort_by_key(|(row, ..)| (row.device, Reverse(size(row)), row.pid));
    claims.sort_by_key(|claim| claim.pid);
    Rows { devices, processes, claims }
}

/// What a process says to hold on devices that this machine does not have; `None` if it says nothing of the kind.
fn claim(
    published: &Published,
    process: &ProcessView,
    may_be: &dyn Fn(&usize) -> bool,
    viewer: Viewer,
    tenants: Tenants,
) -> Option<ClaimRow> {
    let is_claimed = |account: &&AccountView| {
        let device = account.device.filter(|device| *device < published.snapshot.devices.len());
        holds(account) && device.is_some_and(|device| !may_be(&device))
    };
    let claimed: Vec<&AccountView> = process.accounts.iter().filter(is_claimed).collect();
    let first = *claimed.first()?;
    let of = self::process(published, process, first, 0, viewer, tenants)?;
    let tracked = claimed.iter().fold(0_i64, |sum, account| sum.saturating_add(account.tracked_bytes));
    Some(ClaimRow {
        pid: of.pid,
        uid: of.uid,
        user: of.user,
        devices: claimed.len(),
        tracked_bytes: of.tracked_bytes.map(|_| tracked),
        command: of.command,
    })
}

fn holds(account: &AccountView) -> bool {
    account.tracked_bytes != 0 || account.peak.tracked_bytes != 0
}

fn device(published: &Published, health: &Health, device: &DeviceView) -> DeviceRow {
    let known = health.nvml.device(device.name);
    let reading = device.latest;
    let why = known.and_then(|known| known.problem.clone());
    DeviceRow {
        index: known.map_or(device.ordinal, |known| known.index).into(),
        uuid: device.name.to_string(),
        model: device.model.clone(),
        total_bytes: device.total_bytes,
        unified: reading.is_some_and(|reading| reading.unified),
        used_bytes: reading.map(|reading| reading.used_bytes),
        free_bytes: reading.map(|reading| reading.free_bytes),
        system_bytes: reading.and_then(|reading| reading.system_reserved_bytes),
        unaccounted_bytes: device.agreed.map(|agreed| agreed.unaccounted_bytes),
        age_ms: reading.map(|reading| published.now_ns().saturating_sub(reading.time_ns) / 1_000_000),
        why: why.or_else(|| health.nvml.problem().map(str::to_owned)),
    }
}

/// None for a process that holds nothing there any more.
fn process(
    published: &Published,
    process: &ProcessView,
    account: &AccountView,
    device: usize,
    viewer: Viewer,
    tenants: Tenants,
) -> Option<ProcessRow> {
    let facts = &process.facts;
    let coverage = &process.coverage;
    let own = viewer.sees(facts.uid);
    let named = own || tenants == Tenants::Named;
    let newest = account.latest.as_ref();
    let absence = newest.and_then(|sample| Some(absence_name(sample.used_bytes.err()?, sample.list_failed)));
    let held = coverage.covered && holds(account);
    if !held && newest.is_some_and(|sample| sample.used_bytes == Err(gpumem_wire::Absence::NotListed)) {
        return None;
    }
    let sample = account.complete.as_ref().filter(|_| absence.is_none());
    let idle = |amounts: &[i64]| {
        let cells = process.cells.iter().zip(amounts);
        cells.filter(|(cell, _)| cell.is_idle()).map(|(_, bytes)| *bytes).fold(0, i64::wrapping_add)
    };
    // The numbers of one row belong to one instant where that can be.
    let at_sample = sample.and_then(|sample| Some((sample.tracked_bytes?, &*sample.amounts)));
    let tracked = coverage.covered.then(|| at_sample.unwrap_or((account.tracked_bytes, &account.amounts)));
    let tracked = tracked.filter(|_| own);
    let mut who = Who::of(&facts.seen, &facts.claims, facts.uid).map();
    who.retain(|name, _| own || (named && name == "user"));
    let rank = who.get("rank").map(|rank| format!(" rank {rank}")).unwrap_or_default();
    let command = facts.seen.get("command").or(facts.seen.get("comm"));
    Some(ProcessRow {
        pid: if named { process.key.pid } else { 0 },
        device,
        uid: facts.uid.filter(|_| named),
        user: facts.seen.get("user").filter(|_| named).cloned(),
        flags: flags(process, account).into_iter().map(str::to_owned).collect(),
        used_bytes: sample.and_then(|sample| sample.used_bytes.ok()),
        protected_bytes: account
            .protected_bytes
            .filter(|_| sample.is_some_and(|sample| sample.used_bytes.is_ok())),
        tracked_bytes: tracked.map(|(tracked, _)| tracked),
        idle_bytes: tracked.map(|(_, amounts)| idle(amounts)),
        untrackable_bytes: sample.filter(|_| own).and_then(|sample| sample.untrackable_bytes()),
        age_ms: sample.map(|sample| published.now_ns().saturating_sub(sample.t1_ns) / 1_000_000),
        why: absence.or(newest.is_none().then_some("never sampled")).map(str::to_owned),
        command: command.filter(|_| own).map(|command| format!("{command}{rank}")),
        who,
    })
}

/// Returns the caveats on the numbers of a process.
pub(super) fn flags(process: &ProcessView, account: &AccountView) -> Vec<&'static str> {
    let coverage = &process.coverage;
    let mut flags = vec![if coverage.covered { "covered" } else { "uncovered" }];
    let stale = account.latest.as_ref().is_some_and(|sample| sample.stale);
    for (holds, flag) in [
        (coverage.late, "late"),
        (coverage.blocked.is_some(), "blocked"),
        (coverage.paused, "paused"),
        (coverage.is_partial(), "partial"),
        (coverage.earlier.is_some(), "restarted"),
        (stale, "stale"),
    ] {
        if holds {
            flags.push(flag);
        }
    }
    flags
}
