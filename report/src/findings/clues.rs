//! Clues to the cause of a finding that the amounts give: how large a growth is beside the parameters, and whether graphs are kept.

use super::finding::{Finding, KeptBy, mib};
use crate::amounts::sum;
use crate::{Report, held};
use gpumem_model::escape::escape;
use gpumem_model::growth::Axis;
use gpumem_model::keeper::Keeper;
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Class, Device, Oom};
use gpumem_model::units::signed;
use gpumem_wire::{Phase, Role};
use std::collections::BTreeMap;

/// Two numbers of bytes are about the same if they differ by at most this share.
const SAME_SHARE: f64 = 0.05;
/// Minimum bytes of gradients or optimizer state, as a factor of the parameters', from which more exist than one model has.
const TOO_MANY: f64 = 2.5;
/// Minimum bytes of a keeper's tensors, as a share of the growth, from which it explains the growth.
const KEEPER_SHARE: f64 = 0.5;
/// Minimum number of a keeper's tensors with graphs from which the graphs may explain growth: a step has several outputs.
const LEAST_GRAPHS: u64 = 16;
/// Clue to memory of many modules that grows in few steps: a step that fails keeps the memory of its frames.
const EXCEPTIONS: &str = "outputs of many of its modules in the minority of the steps, as when exceptions of failed steps are kept";

/// Minimum growth of a forward pass, as a share of the activations at one moment, from which it keeps its whole graph. These
/// activations may be those of three passes, the latest ones.
const GRAPH_SHARE: f64 = 0.25;
/// Minimum share of each graph that stays after its backward pass, and number of forward passes after the first one, for graphs to be
/// retained.
const GRAPH_KEPT_SHARE: f64 = 0.75;
const LEAST_OTHERS: f64 = 4.0;
/// Minimum share of bytes that two divisions among modules have in common for both to be of graphs of the same model.
const SAME_MODULES_SHARE: f64 = 0.75;

/// Returns a finding on growth with the clues to its cause appended to its sentence. `amounts` are those of the process when the
/// request failed, or at the peak.
pub(super) fn with_clues(
    report: &Report<'_>,
    (oom, amounts): (Option<&Oom>, &Amounts),
    finding: Finding,
) -> Finding {
    let graphs = graphs(report, (oom, amounts), &finding);
    let structure = finding.structures.first().map(String::as_str);
    let is_of_graphs = matches!(structure, Some("activations" | "retained forward outputs"));
    let keeper = oom.and_then(|oom| keeper(oom, finding.bytes, is_of_graphs)).cloned();
    let finding = Finding { keeper, kept_by: graphs.or(finding.kept_by.clone()), ..finding };
    let clue = finding
        .keeper
        .as_ref()
        .map(text_of)
        .or_else(|| finding.kept_by.as_ref().and_then(of_kept_by))
        .or_else(|| of_structure(report, (oom, amounts), &finding));
    let what = [Some(finding.what.clone()), clue].into_iter().flatten().collect::<Vec<_>>().join("; ");
    Finding { what, ..finding }
}

/// Returns the name in the program that keeps `bytes`: tensors with at least half of them, or tensors with graphs. The tensors that a
/// graph keeps are not counted.
pub(super) fn keeper(oom: &Oom, bytes: i64, is_of_graphs: bool) -> Option<&Keeper> {
    let has_much = |keeper: &&Keeper| keeper.bytes as f64 >= bytes as f64 * KEEPER_SHARE;
    let with_graphs = oom.keepers.iter().filter(|keeper| is_of_graphs && keeper.with_graph >= LEAST_GRAPHS);
    oom.keepers.iter().find(has_much).or_else(|| with_graphs.max_by_key(|keeper| keeper.with_graph))
}

/// Returns the words on a keeper, with the number and size of its tensors.
pub(super) fn text_of(keeper: &Keeper) -> String {
    let traceback = if keeper.in_traceback { "the tracebacks of exceptions in " } else { "" };
    let bytes = signed(keeper.bytes);
    let size = if bytes >= 1 << 20 { format!(", {} MiB", mib(bytes)) } else { String::new() };
    // A graph that lives keeps tensors, too, and no release shows that to Python.
    let but = if keeper.with_graph > 0 { ", but for those of a living graph" } else { "" };
    match keeper.is_cycle() {
        true => format!("kept by {}: {}{size}; gc.collect() frees them{but}", keeper.title(), keeper.count()),
        false => format!("kept by {traceback}the {}: {}{size}", keeper.title(), keeper.count()),
    }
}

/// Returns the words on what keeps the memory.
pub(super) fn of_kept_by(kept_by: &KeptBy) -> Option<String> {
    match kept_by {
        KeptBy::Frames(function) => Some(format!(
            "tensors of several lines of {} grow together: an object keeps them, or an exception, whose traceback keeps the local variables",
            escape(function)
        )),
        KeptBy::CacheOfSizes => Some(
            "only the first of several like modules makes it, in changing sizes, as a cache with an entry for each size".to_owned(),
        ),
        KeptBy::RetainedGraphs => Some(
            "each pass has its backward pass, and yet its activations stay, as with retain_graph=True and a state that is not detached".to_owned(),
        ),
        KeptBy::GradientGraphs => None,
    }
}

/// Returns whether growing gradients or activations are kept by graphs: of gradients that are many times the parameters, or of
/// forward passes that each have their backward pass.
fn graphs(
    report: &Report<'_>,
    (oom, amounts): (Option<&Oom>, &Amounts),
    finding: &Finding,
) -> Option<KeptBy> {
    let bytes = |role: Role| held(report.run, amounts, |cell| cell.role.as_deref() == role.name());
    let rate = finding.rate.as_ref()?;
    match finding.structures.first().map(String::as_str)? {
        _ if finding.is_of_whole_models() => None,
        "gradients" => {
            let parameters = bytes(Role::Parameter);
            let is_too_many = parameters > 0 && bytes(Role::Gradient) as f64 >= parameters as f64 * TOO_MANY;
            is_too_many.then_some(KeptBy::GradientGraphs)
        }
        "activations" | "retained forward outputs" => {
            let passes = oom?.passes_without_backward?;
            let device = report.run.devices.iter().find(|device| Some(device.ordinal) == finding.device)?;
            let is_by_pass = device.details.growth.axis == Axis::ForwardPass && !rate.is_over_time;
            let of_passes = bytes(Role::Activation);
            let is_part = rate.bytes_per_unit as f64 >= of_passes as f64 * GRAPH_SHARE;
            // In the backward pass, the whole graph of its own pass is alive. If that is no more than what each pass has added, all of
            // each graph stays, and not its results only.
            let is_in_backward = oom?.phase.as_deref() == Phase::Backward.name();
            let of_last = of_passes.saturating_sub(rate.whole_bytes);
            let is_whole = is_part || is_in_backward && of_last <= rate.bytes_per_unit.saturating_mul(2);
            let is_trained = bytes(Role::Gradient) > 0;
            (is_by_pass && passes <= 1 && is_trained && of_passes > 0 && is_whole)
                .then_some(KeptBy::RetainedGraphs)
        }
        _ => None,
    }
}

/// Returns the least and most bytes of graphs that stayed after their backward passes when `oom` failed, if these were too few for a
/// judgement of growth. All passes must have had their backward passes, and the memory that lost the role of activations must be
/// divided among the modules as the activations are. Outputs that the program keeps are of few modules, or a small part of a graph.
pub(crate) fn retained_graphs(report: &Report<'_>, device: &Device, oom: &Oom) -> Option<[i64; 2]> {
    let is_role = |cell: &Cell, role: Role| cell.role.as_deref() == role.name();
    let is_of_pass = |cell: &Cell| {
        let is_of_forward = cell.phase.as_deref() == Phase::Forward.name();
        cell.class == Class::Block
            && is_of_forward
            && (cell.role.is_none() || is_role(cell, Role::Activation))
    };
    let iterations = &device.details.iterations;
    let mut steps = iterations.rows.iter().chain(&iterations.open);
    let has_backward = oom.passes_without_backward? <= 1 && steps.all(|step| step.passes_at_once <= 1);
    let gradients = held(report.run, &oom.amounts, |cell| is_role(cell, Role::Gradient));
    let by_tag = |is_activation: bool| {
        let is_part = |cell: &Cell| is_of_pass(cell) && is_role(cell, Role::Activation) == is_activation;
        report.by_tag(&oom.amounts, is_part)
    };
    let (activations, earlier) = (by_tag(true), by_tag(false));
    let bytes = |tags: &BTreeMap<&str, i64>| sum(tags.values().copied());
    let latest = bytes(&activations);
    let all = latest.saturating_add(bytes(&earlier));
    // With a graph of 1, of which each pass keeps f, the activations of the latest three passes are 1 + 2 f, and all are 1 + n f, with n
    // passes after the first one.
    let others = oom.passes_after_first? as f64;
    let ratio = all as f64 / latest.max(1) as f64;
    let kept = (ratio - 1.0) / (others - 2.0 * ratio);
    let is_whole = (GRAPH_KEPT_SHARE..=1.0 / GRAPH_KEPT_SHARE).contains(&kept);
    let is_retained = has_backward && gradients > 0 && others >= LEAST_OTHERS && is_whole;
    // The last graph is needed.
    let of_one = [1.0, GRAPH_KEPT_SHARE].map(|kept| (latest as f64 / (1.0 + 2.0 * kept)) as i64);
    (is_retained && is_divided_alike(&activations, &earlier))
        .then(|| [all.saturating_sub(of_one[1]), all.saturating_sub(of_one[0])])
}

/// Returns whether two amounts are divided among tags in about the same way.
pub(crate) fn is_divided_alike(one: &BTreeMap<&str, i64>, other: &BTreeMap<&str, i64>) -> bool {
    let share = |tags: &BTreeMap<&str, i64>, tag: &str| {
        tags.get(tag).copied().unwrap_or(0) as f64 / sum(tags.values().copied()).max(1) as f64
    };
    let same: f64 = one.keys().map(|tag| share(one, tag).min(share(other, tag))).sum();
    same >= SAME_MODULES_SHARE
}

fn of_structure(
    report: &Report<'_>,
    (oom, amounts): (Option<&Oom>, &Amounts),
    finding: &Finding,
) -> Option<String> {
    let bytes = |role: Role| held(report.run, amounts, |cell| cell.role.as_deref() == role.name());
    let parameters = bytes(Role::Parameter);
    let factor = |bytes: i64| bytes as f64 / parameters.max(1) as f64;
    let is_too_many = |bytes: i64| parameters > 0 && factor(bytes) >= TOO_MANY;
    match finding.structures.first().map(String::as_str)? {
        _ if finding.is_of_whole_models() => {
            Some(match finding.structures.iter().any(|name| name == "optimizer state") {
                true => "whole models are kept, with their optimizers' state".to_owned(),
                false => "whole models are kept".to_owned(),
            })
        }
        "optimizer state" if is_too_many(bytes(Role::OptimizerState)) => Some(format!(
            "it is {:.0} times the parameters (Adam has 2 times): old optimizers are kept, or one has a long history",
            factor(bytes(Role::OptimizerState))
        )),
        "gradients" if is_too_many(bytes(Role::Gradient)) => Some(format!(
            "all gradients are {:.0} times the parameters: gradients of outputs, or old ones, are kept, as with create_graph=True",
            factor(bytes(Role::Gradient))
        )),
        "activations" | "retained forward outputs" => {
            let is_evaluation = oom.is_some_and(|oom| oom.phase.as_deref() == Phase::Evaluation.name());
            let is_in_few_steps = finding.is_in_few_steps && finding.is_in_many;
            let clue = if is_in_few_steps { EXCEPTIONS } else { outputs(finding.is_in_many, is_evaluation) };
            Some(clue.to_owned())
        }
        _ => copies(finding, parameters),
    }
}

/// Returns what keeps outputs of modules. References are not recorded.
fn outputs(is_in_many: bool, is_evaluation: bool) -> &'static str {
    match (is_in_many, is_evaluation) {
        (true, false) => "outputs of many of its modules, as when a loss or output is kept with its graph",
        (true, true) => "outputs of many of its modules; a list, dict or hook may keep them",
        // A graph keeps outputs of other modules, too.
        (false, _) => "a list, dict or hook may keep them",
    }
}

/// Returns that memory grows by as much as the parameters have each time, if so.
fn copies(finding: &Finding, parameters: i64) -> Option<String> {
    let rate = finding.rate.as_ref()?;
    let added = rate.bytes_per_unit;
    let is_copy = !rate.is_over_time && parameters > 0 && is_same(added as f64, parameters as f64);
    is_copy.then(|| "as much as all parameters each time: copies of them, or of their gradients".to_owned())
}

fn is_same(one: f64, other: f64) -> bool {
    (one - other).abs() <= other.abs() * SAME_SHARE
}

/// Returns which pieces of a pool a request cannot use: those of CUDA graphs, of other streams, or of other size classes.
pub(super) fn pieces_apart(device: &Device, has_graphs: bool) -> String {
    match (has_graphs, streams(device)) {
        (true, Some(count)) => {
            format!(
                "in pools of CUDA graphs or in pieces of other streams ({count} streams requested memory)"
            )
        }
        (true, None) => "in the private pools of CUDA graphs or in pieces of other size classes".to_owned(),
        (false, Some(count)) => {
            format!("in pieces of other streams ({count} streams requested memory) or of CUDA graphs")
        }
        (false, None) => "in pieces of other size classes".to_owned(),
    }
}

/// Returns the number of streams that requested memory of a pool, if these were several.
pub(super) fn streams(device: &Device) -> Option<u64> {
    let pools = device.details.pools.iter();
    pools.filter_map(|pool| pool.streams).map(u64::from).max().filter(|count| *count > 1)
}

/// Returns the most bytes of activations that a completed step kept; `None` before the first one.
pub(super) fn activations_of_earlier_steps(device: &Device) -> Option<i64> {
    let rows = device.details.iterations.rows.iter();
    rows.map(|row| row.activations.peak_bytes).max().filter(|bytes| *bytes > 0)
}

/// Returns the bytes of state that an optimizer keeps for its parameters, if its name is known: the tag of a request in its step.
pub(super) fn state_of_optimizer(oom: &Oom, parameters: i64) -> Option<(String, i64)> {
    let name = oom.tag.as_deref()?.strip_suffix(".step")?;
    let is_adam = matches!(name, "Adam" | "AdamW" | "NAdam" | "RAdam" | "Adamax");
    (is_adam && parameters > 0).then(|| (name.to_owned(), parameters.saturating_mul(2)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::finding::{Kind, Rate, Severity};
    use crate::rules::Groupings;
    use gpumem_model::run::{Iteration, Pool};

    #[test]
    fn keepers_have_their_tensors_and_what_frees_those_of_cycles() {
        let text = |line: &str| Keeper::parse(line).iter().map(text_of).collect::<String>();
        let cycles = text("cycle\tJob\t\t\t\t52\t1073741824\t0\t");
        assert_eq!(cycles, "kept by reference cycles of Job: 52 tensors, 1,024 MiB; gc.collect() frees them");
        let list = text("local\terrors\tmain\ta.py:7\tlist\t9\t4\t9\ttraceback");
        let expected =
            "kept by the tracebacks of exceptions in the list errors of main (a.py:7): 9 tensors with graphs";
        assert_eq!(list, expected);
    }

    #[test]
    fn growth_is_compared_with_the_parameters() {
        const MIB: i64 = 1 << 20;
        let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
        let of = |role: Role| Cell { role: role.name().map(str::to_owned), ..run.cells[0].clone() };
        run.cells = vec![of(Role::Parameter), of(Role::OptimizerState), of(Role::Gradient)];
        let clue = |structures: &[&str], is_in_many: bool, added: i64, states: [i64; 2]| {
            let report = Report::new(&run, Groupings::default(), None);
            let amounts = Amounts::from(vec![(0, 100 * MIB), (1, states[0] * MIB), (2, states[1] * MIB)]);
            let rate = Rate { bytes_per_unit: added * MIB, ..Rate::default() };
            let finding = Finding::new(Kind::Growth, Severity::Warning, None, (MIB, MIB), "grows".into());
            let structures = structures.iter().map(ToString::to_string).collect();
            let finding = Finding { structures, is_in_many, rate: Some(rate), ..finding };
            with_clues(&report, (None, &amounts), finding).what
        };
        let optimizers = clue(&["optimizer state"], false, 40, [1200, 100]);
        assert!(optimizers.starts_with("grows; it is 12 times the parameters"), "{optimizers}");
        assert_eq!(clue(&["optimizer state"], false, 40, [200, 100]), "grows", "one Adam");
        assert!(clue(&["gradients"], false, 40, [0, 900]).contains("9 times the parameters"));
        assert_eq!(clue(&["gradients"], false, 40, [0, 100]), "grows");
        assert!(clue(&["gradients", "parameters"], true, 40, [0, 900]).contains("whole models"));
        assert!(clue(&["Others"], false, 101, [0, 0]).contains("as much as all parameters each time"));
        assert_eq!(clue(&["Others"], false, 50, [0, 0]), "grows");
        let outputs = |is_in_many| clue(&["retained forward outputs"], is_in_many, 50, [0, 0]);
        assert!(outputs(true).contains("with its graph"), "{}", outputs(true));
        assert_eq!(outputs(false), "grows; a list, dict or hook may keep them");
    }

    /// Forward passes that keep 800 MiB each, in a run whose latest three still have the role of activations.
    #[test]
    fn graphs_that_stay_after_their_backward_pass_are_retained() {
        const MIB: i64 = 1 << 20;
        let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
        let of = |role: Role| Cell { role: role.name().map(str::to_owned), ..run.cells[0].clone() };
        run.cells = vec![of(Role::Parameter), of(Role::Gradient), of(Role::Activation)];
        run.devices[0].details.growth.axis = Axis::ForwardPass;
        let kept_in = |phase: Phase, (passes, whole): (u64, i64), structure: &str, held: [i64; 3]| {
            let report = Report::new(&run, Groupings::default(), None);
            let amounts = (0..).zip(held.map(|bytes| bytes * MIB)).collect::<Vec<_>>();
            let phase = phase.name().map(str::to_owned);
            let oom = Oom { passes_without_backward: Some(passes), phase, ..Oom::default() };
            let rate = Rate { bytes_per_unit: 800 * MIB, whole_bytes: whole * MIB, ..Rate::default() };
            let device = Some(&run.devices[0]);
            let finding = Finding::new(Kind::Growth, Severity::Warning, device, (MIB, MIB), "grows".into());
            let finding = Finding { structures: vec![structure.into()], rate: Some(rate), ..finding };
            let found = with_clues(&report, (Some(&oom), &Amounts::from(amounts)), finding);
            (found.kept_by, found.what.contains("retain_graph=True"))
        };
        let kept_by = |passes, structure, held| kept_in(Phase::Forward, (passes, 0), structure, held);
        let outputs = "retained forward outputs";
        let of_backward = |whole: i64, phase| kept_in(phase, (1, whole), "activations", [100, 100, 9600]).0;
        assert_eq!(of_backward(8800, Phase::Backward), Some(KeptBy::RetainedGraphs));
        assert_eq!(
            of_backward(7200, Phase::Backward),
            None,
            "results are kept, and the graph of the last pass"
        );
        assert_eq!(of_backward(8800, Phase::Forward), None, "the graph of the last pass is not complete");
        assert_eq!(kept_by(0, outputs, [100, 100, 2400]), (Some(KeptBy::RetainedGraphs), true));
        assert_eq!(kept_by(9, outputs, [100, 100, 2400]).0, None, "no backward pass");
        assert_eq!(kept_by(0, outputs, [100, 0, 2400]).0, None, "no gradients");
        assert_eq!(kept_by(0, outputs, [100, 100, 9600]).0, None, "a small part of the activations");
        assert_eq!(kept_by(0, "gradients", [100, 900, 0]).0, Some(KeptBy::GradientGraphs));
        assert_eq!(kept_by(0, "gradients", [100, 200, 0]).0, None, "with buckets");
    }

    /// A program that runs out of memory in its fifth forward pass with these MiB of gradients, of the latest activations by module, and
    /// of earlier forward passes by module.
    #[test]
    fn graphs_of_few_passes_are_retained_if_all_of_each_graph_stays() {
        const MIB: i64 = 1 << 20;
        let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
        let of = |role: Role, tag: &str| {
            let phase = Phase::Forward.name().map(str::to_owned);
            let (role, tag) = (role.name().map(str::to_owned), Some(tag.to_owned()));
            Cell { class: Class::Block, role, phase, tag, ..Cell::default() }
        };
        let (is_active, is_earlier) = (Role::Activation, Role::Unknown);
        run.cells = vec![of(Role::Gradient, "Net"), of(is_active, "Net/a"), of(is_active, "Net/b")];
        run.cells.extend([of(is_earlier, "Net/a"), of(is_earlier, "Net/b")]);
        let amounts = |mib: [i64; 5]| Amounts::from((0..).zip(mib.map(|mib| mib * MIB)).collect::<Vec<_>>());
        let mut retained = |passes: u64, at_once: u64, mib: [i64; 5]| {
            let details = &mut run.devices[0].details;
            details.iterations.rows.clear();
            details.iterations.open = Some(Iteration { passes_at_once: at_once, ..Iteration::default() });
            let oom = Oom {
                passes_without_backward: Some(passes),
                passes_after_first: Some(4),
                amounts: amounts(mib),
                ..Oom::default()
            };
            let report = Report::new(&run, Groupings::default(), None);
            let found = retained_graphs(&report, &report.run.devices[0], &oom);
            found.map(|saved| saved.map(|bytes| bytes / MIB))
        };
        let of_all = [9, 600, 300, 400, 200];
        assert_eq!(retained(1, 1, of_all), Some([1140, 1200]), "five graphs, of which one is needed");
        assert_eq!(retained(3, 1, of_all), None, "passes without a backward pass");
        assert_eq!(retained(1, 3, of_all), None, "several passes before each backward pass");
        assert_eq!(retained(1, 1, [0, 600, 300, 400, 200]), None, "no gradients");
        assert_eq!(retained(1, 1, [9, 600, 300, 0, 600]), None, "outputs of one module");
        assert_eq!(retained(1, 1, [9, 400, 200, 100, 50]), None, "half of each graph");
        assert_eq!(retained(1, 1, [9, 600, 300, 4000, 2000]), None, "more than these passes can have");
    }

    #[test]
    fn pieces_belong_to_graphs_or_streams_or_sizes() {
        let mut device = Device::default();
        assert!(pieces_apart(&device, false).contains("size classes"));
        device.details.pools = vec![Pool { streams: Some(1), ..Pool::default() }];
        assert!(pieces_apart(&device, false).contains("size classes"));
        device.details.pools[0].streams = Some(4);
        assert!(pieces_apart(&device, false).contains("(4 streams requested memory)"));
        assert!(pieces_apart(&device, true).contains("CUDA graphs or in pieces of other streams"));
    }

    #[test]
    fn only_optimizers_of_the_adam_family_have_two_states() {
        let needed = |tag: &str| state_of_optimizer(&Oom { tag: Some(tag.into()), ..Oom::default() }, 50);
        assert_eq!(needed("AdamW.step"), Some(("AdamW".to_owned(), 100)));
        assert_eq!([needed("SGD.step"), needed("Adam"), needed("Net/head")], [None, None, None]);
    }
}
