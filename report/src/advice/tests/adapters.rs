//! Tests of changes for models with adapters.

use super::free::{first, fitting};
use super::*;

const BASE: &str = "Peft/layers.0/q_proj/base_layer/weight";

#[test]
fn base_of_a_model_with_adapters_is_frozen() {
    let held = [
        (Role::Parameter, BASE, 4),
        (Role::Parameter, "Peft/layers.0/q_proj/lora_A.default/weight", 1),
        (Role::Parameter, "Peft/embed/weight", 4),
        (Role::Gradient, "Peft/layers.0/q_proj/lora_A.default/weight", 1),
        (Role::Gradient, "Peft/embed/weight", 4),
        (Role::Gradient, BASE, 4),
        (Role::OptimizerState, BASE, 8),
        (Role::OptimizerState, "AdamW.step", 1),
        (Role::OptimizerState, "Peft/layers.0/q_proj/lora_A.default/weight", 2),
    ];
    assert_eq!(first(&fitting(&held)), Some((Kind::UnfrozenBase, [16, 17])));
    let mut run = holding(&held);
    run.devices[0].details.ooms[0].phase = Phase::Optimizer.name().map(Into::into);
    assert_eq!(first(&run).map(|(kind, _)| kind), Some(Kind::UnfrozenBase), "before cheaper optimizers");
    let mut between = held;
    between[5].0 = Role::Unknown;
    let state = first(&fitting(&between));
    assert_eq!(state, Some((Kind::UnfrozenBase, [12, 13])), "a pass between two steps");
    let frozen = &held[..5];
    assert_eq!(first(&fitting(frozen)), None, "an embedding that is trained by intention");
    let mut plain = held;
    (plain[1].1, plain[3].1, plain[8].1) = ("Peft/a", "Peft/a", "Peft/a");
    assert_eq!(first(&fitting(&plain)), None, "no adapters");
}

#[test]
fn without_gradients_of_the_base_the_forward_pass_may_need_the_most() {
    let held = [
        (Role::Parameter, BASE, 10),
        (Role::Parameter, "Peft/layers.0/q_proj/lora_A.default/weight", 0),
        (Role::Gradient, BASE, 10),
        (Role::OptimizerState, BASE, 20),
    ];
    let advised = |activations: i64| {
        let mut run = fitting(&held);
        let row = &mut run.devices[0].details.iterations.rows[3];
        row.activations = Level { peak_bytes: activations * GIB, last_bytes: 0 };
        first(&run)
    };
    assert_eq!(advised(0), Some((Kind::UnfrozenBase, [30, 30])));
    assert_eq!(advised(9), Some((Kind::UnfrozenBase, [21, 30])), "40 GiB, and then 19");
    assert_eq!(advised(12), Some((Kind::UnfrozenBase, [20, 30])), "the state is not needed at all");
}
