//! Tests of the causes of a failed request, on runs that are made here.

use super::*;
use crate::rules::Groupings;
use gpumem_model::growth::{Axis, Growth};
use gpumem_model::run::{Amounts, Class, OomDevice, Run};

const GIB: i64 = 1 << 30;

fn cell(class: Class, tag: &str) -> Cell {
    Cell { class, tag: Some(tag.into()), ..Cell::default() }
}

/// Returns a run in which a request of `asked` GiB failed while the cells had these GiB, with 5 GiB free.
fn failed(cells: Vec<Cell>, held: &[i64], asked: i64) -> Run {
    let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
    let idle = cells.iter().zip(held).filter(|(cell, _)| cell.class == Class::PoolIdle);
    let idle = sum(idle.map(|(_, gib)| gib * GIB)) as u64;
    run.cells = cells;
    let device = &mut run.devices[0];
    device.total_bytes = Some(16 << 30);
    device.details.growth = Growth::default();
    device.details.timeline.points.clear();
    device.details.iterations.rows.clear();
    device.details.ooms = vec![Oom {
        kind: OomKind::Device,
        fate: Fate::Fatal { after_ns: 0, status: Some(256) },
        time_ns: 1_000_000_000,
        asked_bytes: (asked * GIB) as u64,
        tracked_bytes: sum(held.iter().map(|gib| gib * GIB)),
        amounts: Amounts::from((0..).zip(held.iter().map(|gib| gib * GIB)).collect::<Vec<_>>()),
        idle_bytes: Some(idle),
        largest_idle_bytes: Some(idle / 4),
        device: Some(OomDevice { total_bytes: 16 << 30, free_bytes: 5 * GIB, ..OomDevice::default() }),
        ..Oom::default()
    }];
    run
}

fn causes_of(run: &Run) -> Vec<Finding> {
    let report = Report::new(run, Groupings::preset(Some("torch")).clone(), None);
    of_request(&report, &run.devices[0], &run.devices[0].details.ooms[0])
}

/// Sessions have grown to `grown` GiB; `held` of them, and `idle` GiB of unused memory, exist when a request of 8 GiB fails.
fn sessions(grown: i64, held: i64, idle: i64) -> Vec<(Kind, i64)> {
    let cells = vec![cell(Class::Block, "Net.2"), cell(Class::PoolIdle, "")];
    let mut run = failed(cells, &[held, idle], 8);
    let amounts: Vec<i64> = (0..60).map(|at| at * grown * GIB / 59).collect();
    let growth = &mut run.devices[0].details.growth;
    (growth.axis, growth.stride) = (Axis::ForwardPass, 1);
    growth.points = (0..60).map(|at| (at, at)).collect();
    growth.named.clone_from(&amounts);
    growth.cells = vec![(0, amounts)];
    causes_of(&run).into_iter().map(|finding| (finding.kind, finding.bytes / GIB)).collect()
}

#[test]
fn memory_that_was_released_before_the_request_did_not_grow() {
    assert_eq!(sessions(8, 3, 3), [(Kind::Fragmentation, 3)]);
    assert_eq!(sessions(8, 8, 3), [(Kind::Growth, 7), (Kind::Fragmentation, 3)]);
    let causes = sessions(10, 8, 3);
    assert!(causes.iter().all(|(_, gib)| *gib <= 8), "more than is held: {causes:?}");
}

#[test]
fn unused_memory_comes_before_growth_that_is_not_much_larger() {
    assert_eq!(sessions(5, 5, 3), [(Kind::Fragmentation, 3), (Kind::Growth, 4)]);
}

/// A tensor that is made anew in each step has grown to `held` GiB, when a request of 8 GiB fails beside 7 GiB of unused memory.
#[test]
fn growth_of_the_tensor_that_is_requested_comes_first() {
    let kinds = |held: i64| sessions(held, held, 12).into_iter().map(|(kind, _)| kind).collect::<Vec<_>>();
    assert_eq!(kinds(8), [Kind::Growth, Kind::Fragmentation]);
    assert_eq!(kinds(5), [Kind::Fragmentation, Kind::Growth], "another size");
}

#[test]
fn a_pass_more_than_in_all_steps_is_of_an_evaluation() {
    let kind_of = |gib: i64, steps: u64, passes: u64, failures: u64| {
        let activation =
            Cell { role: Role::Activation.name().map(Into::into), ..cell(Class::Block, "Net/a") };
        let mut run = failed(vec![activation], &[gib], 6);
        let device = &mut run.devices[0];
        let row = |step: u64| Iteration {
            start_ns: step * 10,
            end_ns: step * 10 + 10,
            count: 1,
            passes_at_once: 1,
            activations: gpumem_model::run::Level { peak_bytes: 2 * GIB, last_bytes: 0 },
            ..Iteration::default()
        };
        device.details.iterations.rows = (0..steps).map(row).collect();
        device.details.ooms[0].passes_without_backward = Some(passes);
        device.details.ooms[0].count = failures;
        causes_of(&run).remove(0).kind
    };
    let kind = |gib, steps, passes| kind_of(gib, steps, passes, 1);
    assert_eq!(kind(8, 8, 2), Kind::NoBackward);
    assert_eq!(kind(8, 8, 1), Kind::TooLarge, "a larger batch");
    assert_eq!(kind(4, 8, 2), Kind::TooLarge, "the activations of two passes");
    assert_eq!(kind(8, 4, 2), Kind::TooLarge, "few steps");
    assert_eq!(kind_of(8, 8, 2, 2), Kind::TooLarge, "the same batch again");
}

#[test]
fn memory_that_does_not_fit_has_the_place_of_its_largest_output() {
    let of = |role: Role, tag: &str| Cell { role: role.name().map(str::to_owned), ..cell(Class::Block, tag) };
    let output = || of(Role::Activation, "train.py:14 main");
    let cells = || vec![output(), of(Role::Activation, "Net/a"), of(Role::Activation, "Net/b")];
    let what = |held: &[i64], asked| causes_of(&failed(cells(), held, asked)).remove(0).what;
    let large = what(&[6, 2, 2], 6);
    assert!(large.contains("activations 10,240 (6,144 of train.py:14 main) MiB"), "{large}");
    assert!(large.contains("requested, as much as the outputs of train.py:14 main have"), "{large}");
    assert!(!what(&[6, 2, 2], 7).contains("the size of"));
    assert!(!what(&[3, 3, 3], 7).contains("train.py"), "no output is much larger");
}

#[test]
fn a_limit_is_named_by_what_sets_it() {
    let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
    assert_eq!(pool_limit_setting(&run), "torch.cuda.set_per_process_memory_fraction()");
    run.process.claims.insert("alloc_conf".into(), "per_process_memory_fraction:0.4".into());
    assert_eq!(pool_limit_setting(&run), "per_process_memory_fraction in the allocator's settings");
}

/// The report and the advice recommend the same change.
#[test]
fn graphs_with_pools_of_their_own_share_one() {
    let advised = |graphs: u64, pools: u32| {
        let idle = Cell { pool: Some(names::TORCH.into()), ..cell(Class::PoolIdle, "") };
        let mut run = failed(vec![cell(Class::Block, "Net"), idle], &[1, 9], 8);
        let details = &mut run.devices[0].details;
        details.graphs = graphs;
        details.pools = vec![gpumem_model::run::Pool { private_pools: Some(pools), ..Default::default() }];
        causes_of(&run).into_iter().find(|finding| finding.kind == Kind::Fragmentation)?.advice
    };
    assert!(advised(5, 5).is_some_and(|text| text.contains("into one pool")));
    assert!(advised(5, 1).is_some_and(|text| text.contains("expandable_segments")), "they share one");
    assert!(advised(0, 0).is_some_and(|text| text.contains("expandable_segments")));
}

/// A module with half of the activations is named with its own bytes, and not with all of them.
#[test]
fn all_activations_are_of_a_module_only_if_it_has_most_of_them() {
    let activation =
        |tag: &str| Cell { role: Role::Activation.name().map(Into::into), ..cell(Class::Block, tag) };
    let named = |others: usize| {
        let mut cells = vec![activation("train.py:16 loss")];
        cells.extend((0..others).map(|at| activation(&format!("Net{at}/layer"))));
        let held = [vec![20], vec![1; others]].concat();
        causes_of(&failed(cells, &held, 8)).remove(0).what
    };
    assert!(named(2).contains(": activations of train.py:16 loss 22,528"), "{}", named(2));
    assert!(named(18).contains(": activations 38,912 (20,480 of train.py:16 loss)"), "{}", named(18));
}
