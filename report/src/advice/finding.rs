//! The changes that a finding asks for.

use super::composition::{self, library};
use super::item::{Item, Kind, Memory, mib, place_of};
use super::{outside, settings};
use crate::findings::{self, Finding, KeptBy};
use crate::held;
use crate::names::OUTSIDE_TORCH;
use crate::oom::{holder_name, holders_of};
use gpumem_model::growth::Axis;
use gpumem_model::keeper::Keeper;
use gpumem_model::names::Named;
use gpumem_model::run::{Cell, Device, Oom, Run};
use gpumem_model::units::signed;
use gpumem_wire::{Phase, Role};

/// Category of NCCL's buffers.
const NCCL: &str = "libnccl (outside torch)";
/// Category of the workspaces of cuBLAS.
const WORKSPACE: &str = "workspace (cuBLAS etc.)";
/// Maximum bytes of a tensor with one value.
const SCALAR_BYTES: u64 = 8;
/// The change for graphs that stay after their backward passes.
const DETACH: &str =
    "Detach the state that one pass gives to the next, and call backward() without retain_graph=True";

/// Returns the changes for a finding. `oom` is the failed request that ended the process, if it is of this device. After a
/// replay, its settings replace those that are estimated.
pub(super) fn items(
    report: &crate::Report<'_>,
    device: &Device,
    oom: Option<&Oom>,
    finding: &Finding,
    (is_replayed, children): (bool, &[Run]),
) -> Vec<Item> {
    let run = report.run;
    match (finding.kind, oom) {
        (findings::Kind::Growth, _) => vec![growth(run, device, oom, finding)],
        (findings::Kind::NoBackward, Some(oom)) => vec![no_backward(run, device, oom, finding)],
        (findings::Kind::OtherProcesses, Some(oom)) => {
            vec![other_process(report, device, (oom, finding), children)]
        }
        (findings::Kind::Fragmentation | findings::Kind::UnusedPool, _)
            if !is_replayed && !library::is_kept(oom) =>
        {
            pool(run, device, oom, finding)
        }
        (findings::Kind::TooLarge, Some(oom)) if oom.is_suspected() => {
            let change =
                "Start the program with gpumemctl run -- COMMAND: without the agent, its parts are unknown";
            vec![Item::new(Kind::Coverage, Memory::Untrackable, device, change)]
        }
        (findings::Kind::TooLarge, _) => {
            let kept = finding.keeper.as_ref().map(|keeper| {
                let formula = format!("it keeps {}", keeper.count());
                of_keeper(device, keeper).named(keeper.title()).estimated([0, signed(keeper.bytes)], formula)
            });
            let graphs = oom.filter(|_| finding.kept_by.is_some());
            let graphs = graphs.and_then(|oom| retained_graphs(report, device, oom));
            kept.into_iter().chain(graphs).chain(composition::parts(report, device, oom)).collect()
        }
        (findings::Kind::LargeRequest, Some(oom)) => {
            let change = "Make this tensor in pieces{0}: it is larger than the device";
            let formula = format!("the request has {}", mib(signed(oom.asked_bytes)));
            let item =
                Item::new(Kind::LargeRequest, Memory::Activations, device, change).named(place_of(oom));
            vec![Item { formula, ..item }]
        }
        (findings::Kind::PoolLimit, Some(oom)) => {
            let change = format!("Raise or remove {}", findings::pool_limit_setting(run));
            let free = signed(oom.device_free_bytes.unwrap_or(0)).max(oom.free_bytes().unwrap_or(0));
            let spare = finding
                .spare_bytes
                .map(|bytes| format!("without it, the request fits with {} to spare: ", mib(bytes)));
            let formula = format!(
                "{}a limit of the program refused the request while {} of the device were free",
                spare.unwrap_or_default(),
                mib(free)
            );
            vec![Item { formula, ..Item::new(Kind::PoolLimit, Memory::Cached, device, change) }]
        }
        _ => Vec::new(),
    }
}

/// Returns the change for activations of passes without a backward pass. Without them, the training steps set the peak.
fn no_backward(run: &Run, device: &Device, oom: &Oom, finding: &Finding) -> Item {
    let (of_steps, beyond) = findings::beyond_steps(run, device, oom);
    let saved = finding.bytes.min(beyond);
    let change = "Run the passes that are not for training{0} under torch.no_grad()";
    let formula = format!(
        "{} of activations of forward passes without a backward pass, at most down to the {} in use in training steps",
        mib(finding.bytes),
        mib(of_steps)
    );
    let item = Item::new(Kind::EvaluationGradients, Memory::Activations, device, change);
    item.named(place_of(oom)).estimated([saved; 2], formula)
}

/// Returns the change for memory that a name in the program keeps.
fn of_keeper(device: &Device, keeper: &Keeper) -> Item {
    let change = match keeper.kind.as_str() {
        _ if keeper.is_cycle() => {
            "Break the {0}: drop one of the references, or make it weak (weakref); or call gc.collect() before memory runs out"
        }
        _ if keeper.in_traceback => {
            "Keep only the text of the exceptions in the {0}: a traceback keeps all local variables of its functions"
        }
        _ if keeper.is_sum => "Add .item() of each tensor to the {0}, or call backward() for each",
        _ if keeper.with_graph > 0 && keeper.bytes / keeper.tensors.max(1) <= SCALAR_BYTES => {
            "Keep no tensors with graphs in the {0}: keep .item() of them"
        }
        _ if keeper.with_graph > 0 => {
            "Keep no tensors with graphs in the {0}: keep .detach().cpu() of them, or drop old ones"
        }
        "cache" => "Bound the {0}, or keep .cpu() of its tensors",
        _ => "Drop old tensors of the {0}, or keep .cpu() of them",
    };
    Item::new(Kind::RetainedTensors, Memory::Activations, device, change)
}

/// Returns the change for graphs that stayed after the backward passes of a few forward passes.
fn retained_graphs(report: &crate::Report<'_>, device: &Device, oom: &Oom) -> Option<Item> {
    let [least, most] = findings::retained_graphs(report, device, oom)?;
    // A backward pass through all graphs has temporaries that one through the last graph may not have.
    let is_temporary = |cell: &Cell| cell.role.as_deref() == Role::Temporary.name();
    let temporaries = held(report.run, &oom.amounts, is_temporary);
    let formula = format!(
        "the bytes of all graphs that were held when the request failed, less those of one, and up to {} of temporaries",
        mib(temporaries)
    );
    let item = Item::new(Kind::RetainedTensors, Memory::Activations, device, DETACH);
    Some(item.estimated([least, most.saturating_add(temporaries)], formula))
}

/// Returns the change for memory that grows.
fn growth(run: &Run, device: &Device, oom: Option<&Oom>, finding: &Finding) -> Item {
    let of_library = finding.names.iter().find_map(|(name, _)| library::keeper_of(name));
    let kept_by = (finding.keeper.as_ref(), finding.kept_by.as_ref());
    let (item, name) = match (of_library, kept_by) {
        (Some(frame), _) => {
            let change = format!("{}{{0}}", frame.change);
            (Item::new(frame.kind, Memory::Activations, device, change), None)
        }
        (None, (Some(keeper), _)) => (of_keeper(device, keeper), Some(keeper.title())),
        (None, (None, None)) if finding.is_of_whole_models() && library::has_accelerator(run) => {
            let change = "Drop the old models{0}; if each was given to prepare() of an Accelerator, which keeps it and its optimizer, call free_memory() of the Accelerator";
            (Item::new(Kind::RetainedTensors, Memory::Parameters, device, change), None)
        }
        (None, (None, Some(KeptBy::Frames(function)))) => {
            let change = "Drop these tensors of {0} when they are not needed, or keep .detach().cpu() of them. If an exception keeps them (a traceback keeps all local tensors), keep its text only";
            (Item::new(Kind::RetainedTensors, Memory::Activations, device, change), Some(function.clone()))
        }
        (None, (None, Some(KeptBy::CacheOfSizes))) => {
            let change = "If a cache such as lru_cache has an entry for each size{0}, bound it, or compute the entry of the largest size once and slice it. Else drop old outputs";
            (Item::new(Kind::RetainedTensors, Memory::Activations, device, change), None)
        }
        (None, (None, Some(KeptBy::RetainedGraphs))) => {
            let change = format!("{DETACH}{{0}}");
            (Item::new(Kind::RetainedTensors, Memory::Activations, device, change), None)
        }
        (None, (None, Some(KeptBy::GradientGraphs))) => {
            let change = "Drop old gradients{0}; of results of create_graph=True, which have graphs, keep .item() or .detach() only";
            (Item::new(Kind::RetainedTensors, Memory::Gradients, device, change), None)
        }
        (None, (None, None)) => (of_structure(device, oom, finding), None),
    };
    let names = finding.names.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
    let place = if names.is_empty() { String::new() } else { format!(" ({names})") };
    let item = item.named(name.unwrap_or(place));
    let Some(rate) = &finding.rate else { return item };
    item.estimated([finding.bytes, rate.whole_bytes.max(finding.bytes)], rate.text.clone())
}

/// Returns the change for growing memory by its structure.
fn of_structure(device: &Device, oom: Option<&Oom>, finding: &Finding) -> Item {
    // Whether gradients were enabled is recorded for failed requests only.
    let is_without_gradients = oom.is_some_and(|oom| oom.phase.as_deref() == Phase::Evaluation.name());
    let is_graph = finding.is_in_many && !is_without_gradients;
    let structure = finding.structures.first().map(String::as_str).unwrap_or_default();
    let (kind, memory, change) = match structure {
        _ if finding.is_of_whole_models() => {
            let change = "Drop the old models and their gradients{0}: a list or backward(create_graph=True) keeps them";
            (Kind::RetainedTensors, Memory::Parameters, change)
        }
        NCCL => {
            let change = "Reuse process groups, and destroy those that are not used again{0}: each keeps its communicators";
            (Kind::Communication, Memory::Libraries, change)
        }
        outside if outside.ends_with(OUTSIDE_TORCH) => {
            let change = "Free what is allocated outside of PyTorch in each step{0}";
            (Kind::RetainedTensors, Memory::Libraries, change)
        }
        WORKSPACE => {
            let change = "Multiply matrices on fewer threads and streams{0}: cuBLAS keeps a workspace for each pair of them";
            (Kind::Workspace, Memory::Libraries, change)
        }
        findings::PINNED => {
            let change = "Reuse a fixed set of pinned buffers{0}: new ones are kept in each step";
            (Kind::PinnedMemory, Memory::Host, change)
        }
        "optimizer state" => {
            let change =
                "Drop the old optimizers before a new one is made; lists and schedulers keep them{0}";
            (Kind::RetainedTensors, Memory::OptimizerState, change)
        }
        "activations" | "retained forward outputs"
            if is_graph && device.details.growth.axis == Axis::ForwardPass =>
        {
            let change = "Keep no graphs{0}: call backward() in each pass of training, and run the others under torch.no_grad(); if they are, keep fewer outputs";
            (Kind::RetainedTensors, Memory::Activations, change)
        }
        // Outputs of many modules are kept together by a graph.
        structure
            if (structure == "activations" || structure == "retained forward outputs" && is_graph)
                && !is_without_gradients =>
        {
            let change = "Stop keeping tensors with their graphs in each step{0}: keep .item() or .detach().cpu() of them";
            (Kind::RetainedTensors, Memory::Activations, change)
        }
        "activations" | "retained forward outputs" => {
            let change = "Stop keeping the outputs on the GPU in each step{0}: keep .detach().cpu() of them, or drop old ones";
            (Kind::RetainedTensors, Memory::Activations, change)
        }
        "parameter copies" => {
            let change = "Drop old copies of the model{0}, or keep them on the host with .cpu(): a list or dict keeps all";
            (Kind::RetainedTensors, Memory::Parameters, change)
        }
        "kv cache" => {
            let change = "Limit the cached keys and values{0}: drop those of ended sessions";
            (Kind::RetainedTensors, Memory::Activations, change)
        }
        _ => {
            let change = "Drop old tensors of the list, dict or cache that keeps them{0}, or keep .detach().cpu() of them";
            (Kind::RetainedTensors, Memory::Activations, change)
        }
    };
    let is_of_pass = matches!(structure, "activations" | "retained forward outputs");
    let change = match finding.is_in_few_steps && is_of_pass {
        true => format!(
            "{change}. It grows in few passes: if these raise an exception that is kept, keep its text only"
        ),
        false => change.to_owned(),
    };
    Item::new(kind, memory, device, change)
}

/// Returns the change for memory of other processes, with the largest one's name, the time since which it is there, and its last
/// growth.
fn other_process(
    report: &crate::Report<'_>,
    device: &Device,
    (oom, finding): (&Oom, &Finding),
    children: &[Run],
) -> Item {
    let largest = holders_of(oom).iter().skip(1).max_by_key(|holder| holder.used_bytes);
    let since = largest.map(|holder| outside::since(report, holder));
    let change = match largest.map_or(0, |holder| holder.pid) {
        pid if outside::is_child(pid, children) => {
            "End the program's own child process ({0}) before memory is needed, or let it free its tensors and call torch.cuda.empty_cache()"
        }
        pid if outside::is_ancestor(pid, report.run) => {
            "Keep CUDA out of the program's own process ({0}) that has started this one, or let it free its tensors and call torch.cuda.empty_cache() first"
        }
        _ => "End or move the process of another tenant ({0})",
    };
    let name = largest.map(holder_name).unwrap_or_default();
    let item = Item::new(Kind::OtherProcess, Memory::Others, device, change).named(name);
    item.estimated([finding.bytes; 2], format!("it holds {}", since.unwrap_or_default()))
}

/// Returns the changes for memory that the allocator caches: a setting, graphs or streams.
fn pool(run: &Run, device: &Device, oom: Option<&Oom>, finding: &Finding) -> Vec<Item> {
    // A process that needs more at another moment still needs it with a perfect allocator.
    let possible = match oom {
        Some(_) => finding.bytes,
        None => {
            let in_use = findings::most_in_use(run, device).0;
            device.peak.tracked_bytes.unwrap_or(0).saturating_sub(in_use)
        }
    };
    if possible <= 0 {
        return Vec::new();
    }
    let most = [0, finding.bytes.min(possible)];
    let is_apart = oom
        .and_then(|oom| oom.largest_idle_bytes.map(|largest| largest >= oom.asked_bytes))
        .unwrap_or_default();
    let graphs = findings::has_pools_of_graphs(device).then(|| {
        let item = Item::new(Kind::GraphPools, Memory::Cached, device, settings::ONE_POOL);
        item.estimated(most, "at most the unused bytes; each private pool keeps its own")
    });
    let is_expandable = oom.is_some_and(|oom| oom.is_expandable);
    let setting = settings::with_setting(run, "expandable_segments:True").filter(|_| !is_expandable);
    let setting = setting.map(|line| {
        let item = Item::new(Kind::AllocatorSetting, Memory::Cached, device, format!("Set {line}"));
        item.estimated(most, "at most the bytes that the allocator cached and did not use")
    });
    let count = device.details.pools.iter().filter_map(|pool| pool.streams).max();
    // Each stream has its own segments, expandable or not. They may help within one stream if memory ran out.
    let setting = setting.filter(|_| oom.is_some() || count.is_none_or(|count| count <= 1));
    let streams = (count.is_none_or(|count| count > 1) && (oom.is_none() || is_apart)).then(|| {
        let change = "Reuse CUDA streams, and capture graphs into one pool: what one caches serves no other";
        let formula = match count {
            Some(count) => format!("at most the unused bytes; {count} streams requested memory"),
            None => "at most the unused bytes, if several streams are in use".to_owned(),
        };
        Item::new(Kind::Streams, Memory::Cached, device, change).estimated(most, formula)
    });
    graphs.into_iter().chain(streams).chain(setting).collect()
}
