//! Memory outside of PyTorch's allocator: of libraries, of modules, and of child processes that hold a CUDA context and no memory
//! of their own, such as workers of a DataLoader.

use super::item::{Item, Kind, Memory, is_material, mib};
use crate::findings::is_eager;
use crate::names::library;
use crate::oom::holder_name;
use crate::{Report, held, most_used};
use gpumem_model::names::Named;
use gpumem_model::run::{Cell, Class, Device, Holder, Run};
use gpumem_model::units::signed;
use gpumem_wire::Role;

/// Minimum share of the libraries' memory in the process's memory, for advice on it.
const LIBRARY_SHARE: f64 = 0.1;
/// Minimum growth of another process, in bytes, that is stated.
const LEAST_GROWTH: i64 = 1 << 20;
/// Divisor: a process is idle if its tracked bytes never exceeded its used bytes divided by this.
const IDLE_SHARE: i64 = 20;

/// Returns the changes for the memory of libraries. With `is_short`, also those that cost speed.
pub(super) fn libraries(report: &Report<'_>, device: &Device, is_short: bool) -> Vec<Item> {
    let run = report.run;
    let used = most_used(device).unwrap_or(0);
    let bytes = |fits: &dyn Fn(&Cell) -> bool| held(run, &device.peak.amounts, fits);
    let is_set = |claim: &str| run.process.claims.contains_key(claim);
    let is_much = |bytes: i64| is_material(bytes, used) && bytes as f64 >= used as f64 * LIBRARY_SHARE;
    let mut items = Vec::new();
    let workspace = bytes(&|cell| cell.role.as_deref() == Role::Workspace.name());
    if is_short && is_much(workspace) && !is_set("cublas_workspace") {
        let item = Item::new(Kind::Workspace, Memory::Libraries, device, "Set CUBLAS_WORKSPACE_CONFIG=:16:8");
        let formula = format!("{} of workspaces, less 128 KiB for each stream", mib(workspace));
        items.push(item.estimated([workspace / 2, workspace], formula));
    }
    let is_nccl = |cell: &Cell| {
        cell.class == Class::Direct && cell.library.as_deref().is_some_and(|path| library(path) == "libnccl")
    };
    let nccl = bytes(&is_nccl);
    if is_short && is_much(nccl) && !is_set("nccl_buffsize") {
        let change = "Set NCCL_BUFFSIZE=1048576, which may slow communication";
        let item = Item::new(Kind::Communication, Memory::Libraries, device, change);
        let formula = format!(
            "up to 3/4 x {} of NCCL's memory: buffers of 1 MiB instead of the default 4 MiB",
            mib(nccl)
        );
        items.push(item.estimated([0, nccl / 4 * 3], formula));
    }
    let modules = device.last.gap_parts().map_or(0, |parts| parts.modules_bytes);
    if is_eager(run) && is_material(modules, used) {
        let change = "Remove CUDA_MODULE_LOADING=EAGER, so that kernels are loaded at first use";
        let item = Item::new(Kind::EagerModules, Memory::Untrackable, device, change);
        items.push(item.estimated([0, modules], "at most the bytes of the loaded modules"));
    }
    items
}

/// Returns whether a process is one that the program has started.
pub(super) fn is_child(pid: u32, children: &[Run]) -> bool {
    children.iter().any(|child| child.process.pid == pid)
}

/// Returns whether a process has started that of the run, directly or not. Process 1 has started all, so that says nothing.
pub(super) fn is_ancestor(pid: u32, run: &Run) -> bool {
    let ancestors = run.process.facts.get("ancestors").map_or("", String::as_str);
    pid != 1 && ancestors.split(',').any(|ancestor| ancestor.parse() == Ok(pid))
}

/// Returns the change for another process that held more of the device than this one at the last reading. A child of the process, or
/// one that has started it, is not another tenant.
pub(super) fn tenant(report: &Report<'_>, device: &Device, children: &[Run]) -> Option<Item> {
    let run = report.run;
    let is_own = |pid: u32| is_child(pid, children) || is_ancestor(pid, run);
    let tenants = device.tenants.iter().filter(|(pid, _)| !is_own(*pid));
    let (pid, used) = tenants.filter_map(|(pid, used)| Some((*pid, signed((*used)?)))).next()?;
    (used > most_used(device).unwrap_or(0)).then(|| {
        // Runs of earlier versions, and processes that are not the largest, have no times.
        let known = device.details.largest_tenant.as_ref().filter(|holder| holder.pid == pid);
        let unknown = Holder { pid, used_bytes: used, ..Holder::default() };
        let holder = known.unwrap_or(&unknown);
        let name = match (&holder.user, pid) {
            (Some(_), _) => holder_name(holder),
            (None, 0) => "hidden".to_owned(),
            (None, _) => format!("pid {pid}"),
        };
        let change = "End or move the process of another tenant ({0})";
        let item = Item::new(Kind::OtherProcess, Memory::Others, device, change).named(name);
        item.estimated([used; 2], format!("it holds {}", since(report, holder)))
    })
}

/// Returns the bytes of a process, since when it has been on the device, and its growth in the last minute.
pub(super) fn since(report: &Report<'_>, holder: &Holder) -> String {
    let seen = holder.since_ns.map(|ns| format!(" and was first seen at {}", report.times().time(ns)));
    let own = mib(holder.used_bytes) + &seen.unwrap_or_default();
    let time = holder.growth_ns.map(|ns| ns.div_ceil(1_000_000_000));
    match (holder.growth_bytes, time) {
        (Some(bytes), Some(seconds)) if bytes >= LEAST_GROWTH => {
            format!("{own}; {} came in the last {seconds} s", mib(bytes))
        }
        (Some(bytes), Some(seconds)) if bytes <= -LEAST_GROWTH => {
            format!("{own}; it freed {} in the last {seconds} s", mib(bytes.saturating_neg()))
        }
        (_, Some(seconds)) => format!("{own}; unchanged in the last {seconds} s"),
        _ => own,
    }
}

/// Returns one item for the idle contexts on each device.
pub(super) fn idle(children: &[Run]) -> Vec<Item> {
    let all = || children.iter().flat_map(|run| run.devices.iter().map(move |device| (run, device)));
    let mut ordinals: Vec<u16> = all().map(|(_, device)| device.ordinal).collect();
    ordinals.sort_unstable();
    ordinals.dedup();
    let of_device = |ordinal: u16| {
        let on_it = all().filter(|(_, device)| device.ordinal == ordinal);
        let idle: Vec<(&Run, &Device, i64)> =
            on_it.filter_map(|(run, device)| Some((run, device, idle_bytes(run, device)?))).collect();
        let (first, device, _) = idle.first()?;
        let bytes = crate::amounts::sum(idle.iter().map(|(.., bytes)| *bytes));
        let pids = idle.iter().map(|(run, ..)| run.process.pid.to_string()).collect::<Vec<_>>().join(", ");
        let name = first.process.facts.get("comm").cloned().unwrap_or_default();
        let change = "Keep CUDA out of the child processes ({0}): move tensors to the GPU in the parent only";
        let formula = format!("contexts of pid {pids}, which have no tensors");
        Some(
            Item::new(Kind::IdleContext, Memory::Others, device, change)
                .named(name)
                .estimated([bytes; 2], formula),
        )
    };
    ordinals.into_iter().filter_map(of_device).collect()
}

/// Returns the used bytes of a process whose memory is nearly all Untrackable; `None` for others.
fn idle_bytes(run: &Run, device: &Device) -> Option<i64> {
    let used = most_used(device).filter(|used| *used > 0)?;
    let tracked = device.peak.tracked_bytes?.max(device.last.tracked_bytes?);
    (run.coverage.covered && tracked <= used / IDLE_SHARE).then_some(used)
}
