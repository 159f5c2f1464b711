//! Tests of advice on what certain modules hold.

use super::*;

#[test]
fn module_without_parameters_that_holds_many_times_its_input_is_a_formula() {
    let tags = ["a.0/up", "a.0/act", "a.1/up", "a.1/act", "a.2/up", "a.2/act"].map(|tag| format!("Net/{tag}"));
    let weights = [0, 2, 4].map(|at| format!("{}/weight", tags[at]));
    let advised = |up: i64, act: i64| {
        let sizes = [up, act].into_iter().cycle();
        let held = tags.iter().zip(sizes).map(|(tag, gib)| (Role::Activation, tag.as_str(), gib));
        let weights = weights.iter().map(|tag| (Role::Parameter, tag.as_str(), 1));
        items(&holding(&held.chain(weights).collect::<Vec<_>>())).remove(0)
    };
    let first = advised(1, 3);
    assert_eq!((first.kind, first.saves_bytes), (Kind::FusedOperation, Some([3 * GIB, 9 * GIB])));
    assert!(first.sentence().starts_with("If Net/a.*/act computes"), "{}", first.sentence());
    assert_eq!(advised(2, 3).kind, Kind::Checkpointing, "an input and an output");
    let loss = |gib: i64, parameter: &str| {
        let held = [
            (Role::Activation, "Loss", gib),
            (Role::Activation, "Net/head", 2),
            (Role::Parameter, parameter, 1),
        ];
        of_kind(&holding(&held), Kind::FusedOperation).map(|item| item.sentence())
    };
    assert!(loss(8, "Net/head/weight").is_some_and(|sentence| sentence.starts_with("If Loss computes")));
    assert_eq!(loss(5, "Net/head/weight"), None);
    assert_eq!(loss(8, "Loss/margin"), None, "it has parameters");
    assert_eq!(loss(8, "Other/a/weight"), None, "the input is unknown");
}
