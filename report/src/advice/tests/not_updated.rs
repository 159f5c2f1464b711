//! Tests of changes for modules that no optimizer updates.

use super::free::{first, fitting, trained_with};
use super::*;

/// Returns a program that has completed twelve steps with these GiB by role and tag.
fn training(held: &[(Role, &str, i64)], models: &str) -> Run {
    let mut run = fitting(held);
    run.process.claims.insert("models".into(), models.into());
    let all: Vec<(u32, i64)> = (0..).zip(held.iter().map(|(.., gib)| *gib)).collect();
    trained_with(&mut run, &all);
    run
}

/// A model of which an optimizer updates the head only.
const HELD: [(Role, &str, i64); 13] = [
    (Role::Unknown, "Net/backbone/a", 0),
    (Role::Unknown, "Net/head", 0),
    (Role::Activation, "Net/backbone/a", 3),
    (Role::Activation, "Net/backbone/b", 3),
    (Role::Activation, "Net/backbone/c", 3),
    (Role::Activation, "Net/backbone/d", 3),
    (Role::Parameter, "Net/backbone/a/weight", 1),
    (Role::Parameter, "Net/backbone/c/weight", 1),
    (Role::Parameter, "Net/head/weight", 1),
    (Role::Gradient, "Net/backbone/a/weight", 1),
    (Role::Gradient, "Net/backbone/c/weight", 1),
    (Role::Gradient, "Net/head/weight", 1),
    (Role::OptimizerState, "Net/head/weight", 1),
];

/// Returns the description of a model with 3 GiB of parameters, of which an optimizer updates as many.
fn models(updated_gib: i64) -> String {
    format!("Net\tfloat32\t{0}\t{0}\t{1}", 3 * GIB, updated_gib * GIB)
}

#[test]
fn part_that_no_optimizer_updates_needs_no_gradients() {
    let run = training(&HELD, &models(1));
    assert_eq!(first(&run), Some((Kind::EvaluationGradients, [7, 14])));
    let mut optimizing = training(&HELD, &models(1));
    // Without the backbone's memory, this moment has 12 GiB.
    let amounts = Amounts::from(vec![(6, GIB), (7, GIB), (8, GIB), (12, 9 * GIB)]);
    optimizing.devices[0].details.timeline.points[5].amounts = amounts;
    assert_eq!(first(&optimizing), Some((Kind::EvaluationGradients, [6, 14])), "19 GiB less 12 and copies");
    let mut half = training(&HELD, &models(1).replace("float32", "bfloat16"));
    assert_eq!(first(&half), Some((Kind::EvaluationGradients, [8, 14])), "autocast copies no weights");
    half.cells.swap(0, 1);
    assert_eq!(first(&half), Some((Kind::EvaluationGradients, [2, 14])), "gradients pass through it");
    let first_item = items(&run).remove(0);
    assert!(first_item.formula.contains("saves 1,024 MiB less under autocast"), "{}", first_item.formula);
    let sentence = first_item.sentence();
    assert!(sentence.starts_with("No optimizer updates Net/backbone: "), "{sentence}");
    let gradients = |held: &[(Role, &str, i64)], models: &str| {
        let items = items(&training(held, models)).into_iter();
        items.filter(|item| item.kind == Kind::EvaluationGradients).count()
    };
    assert_eq!(gradients(&HELD, &models(3)), 0, "an optimizer without state updates it");
    assert_eq!(gradients(&HELD, ""), 0, "the models are unknown");
    let mut frozen = HELD;
    (frozen[9], frozen[10]) = (frozen[11], frozen[12]);
    assert_eq!(gradients(&frozen, &models(1)), 0, "it has no gradients");
    let mut early = training(&HELD, &models(1));
    early.devices[0].details.timeline.points.drain(..10);
    assert!(
        first(&early).is_none_or(|(kind, _)| kind != Kind::EvaluationGradients),
        "a later step may update it"
    );
}

#[test]
fn no_gradient_passes_through_a_module_that_runs_before_all_trained_ones() {
    let least = |tags: [&str; 2], phase: Phase| {
        let mut held = HELD;
        (held[0].1, held[1].1) = (tags[0], tags[1]);
        let mut run = training(&held, &models(1));
        run.cells[..2].iter_mut().for_each(|cell| cell.phase = phase.name().map(Into::into));
        first(&run).map(|(_, [least, _])| least)
    };
    let (backbone, head) = ("Net/backbone/a", "Net/head");
    assert_eq!(
        least([backbone, head], Phase::Forward),
        Some(7),
        "12 GiB less two tensors and copies, and gradients"
    );
    assert_eq!(least([head, backbone], Phase::Forward), Some(2), "the head's output may be its input");
    assert_eq!(least([backbone, "Net"], Phase::Forward), Some(2), "the head is never called");
    assert_eq!(least([backbone, head], Phase::Evaluation), Some(2), "no pass of training is known");
}

#[test]
fn a_second_call_of_a_module_may_have_the_output_of_a_trained_one() {
    // A run has cells in the order in which they were first used.
    let least = |activations: &[(Role, &'static str, i64)]| {
        let made = [(Role::Unknown, "Vgg/a", 0), (Role::Unknown, "Net", 0)];
        let others = [
            (Role::Parameter, "Vgg/a/weight", 1),
            (Role::Parameter, "Net/weight", 1),
            (Role::Gradient, "Vgg/a/weight", 1),
            (Role::OptimizerState, "Net/weight", 1),
            (Role::Temporary, "Vgg/a", 0),
            (Role::Activation, "Vgg/e", 0),
        ];
        let models = format!("Vgg\tfloat32\t{GIB}\t{GIB}\t0\nNet\tfloat32\t{GIB}\t{GIB}\t{GIB}");
        let mut run = training(&[&made, activations, &others].concat(), &models);
        let backward = run.cells.len() - 2;
        run.cells[backward].phase = Phase::Backward.name().map(Into::into);
        first(&run).map(|(_, [least, _])| least)
    };
    let vgg = ["Vgg/a", "Vgg/b", "Vgg/c", "Vgg/d"].map(|tag| (Role::Activation, tag, 4));
    let net = [(Role::Activation, "Net", 1)];
    assert_eq!(
        least(&[&vgg[..], &net].concat()),
        Some(8),
        "16 GiB less two tensors and copies, and gradients"
    );
    let target = [(Role::Activation, "Vgg/d", 1)];
    assert_eq!(least(&[&target, &net[..], &vgg].concat()), Some(1), "after a call under torch.no_grad()");
}

#[test]
fn layers_of_a_sequential_are_one_model() {
    let held = [
        (Role::Activation, "Sequential.0", 6),
        (Role::Activation, "Sequential.1", 6),
        (Role::Activation, "Net/a", 4),
        (Role::Gradient, "Sequential.1/weight", 3),
        (Role::OptimizerState, "Net/a/weight", 1),
    ];
    let models = "Sequential\tfloat32\t9\t9\t0\nNet\tfloat32\t9\t9\t9";
    assert_eq!(first(&training(&held, models)), Some((Kind::EvaluationGradients, [3, 15])));
    let sentence = items(&training(&held, models)).remove(0).sentence();
    assert!(sentence.starts_with("No optimizer updates Sequential: "), "{sentence}");
}
