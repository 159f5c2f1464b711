//! Savings that a part of the run proves, and pools of CUDA graphs.

use super::*;

#[test]
fn graphs_with_one_pool_need_no_other() {
    let mut run = fragmented(&[]);
    let graphs = |run: &Run| of_kind(run, Kind::GraphPools).is_some();
    run.devices[0].details.pools = vec![Pool { private_pools: Some(11), ..Pool::default() }];
    assert!(!graphs(&run), "pools of torch.cuda.MemPool");
    run.devices[0].details.graphs = 11;
    assert!(graphs(&run));
    run.devices[0].details.pools[0].private_pools = Some(1);
    assert!(!graphs(&run), "the change is in force");
    run.devices[0].details.pools[0].private_pools = None;
    assert!(graphs(&run), "unknown");
}

#[test]
fn foreach_makes_the_temporaries_of_all_parameters() {
    let saves = |frame: &str| {
        let held = ["Net/a", "Net/b", "Net/c", "Net/d"].map(|name| (Role::Parameter, name, 1));
        let mut run = holding(&[&held[..], &[(Role::OptimizerState, "Adam.step", 9)]].concat());
        run.devices[0].details.iterations.rows.clear();
        let oom = &mut run.devices[0].details.ooms[0];
        oom.phase = Phase::Optimizer.name().map(Into::into);
        oom.stack = Some(format!("{frame}\t/v/torch/optim/adam.py\t7\n"));
        of_kind(&run, Kind::OptimizerTemporaries).and_then(|item| item.saves_bytes)
    };
    assert_eq!(saves("_multi_tensor_adam"), Some([2 * GIB, 4 * GIB]), "less two of one parameter");
    assert_eq!(saves("_single_tensor_adam"), Some([GIB, 4 * GIB]));
}

#[test]
fn small_state_of_a_first_step_may_save_temporaries() {
    let held = [(Role::Parameter, "Net/a", 4), (Role::OptimizerState, "Adam.step", 6)];
    let mut run = holding(&held);
    run.devices[0].details.ooms[0].phase = Phase::Optimizer.name().map(Into::into);
    run.devices[0].details.iterations.rows.clear();
    let saves = |run: &Run| of_kind(run, Kind::OptimizerState).and_then(|item| item.saves_bytes);
    let [least, most] = saves(&run).expect("an estimate");
    assert_eq!((least, most), (8 * GIB / 10 * 7, 8 * GIB / 4 * 3 + 4 * GIB));
    run.devices[0].details.ooms[0].phase = Phase::Forward.name().map(Into::into);
    assert_eq!(saves(&run).map(|[_, most]| most), Some(6 * GIB / 4 * 3), "the state exists");
}

#[test]
fn training_steps_bound_the_saving_of_an_evaluation_without_gradients() {
    let saves = |of_steps: i64| {
        let mut run = holding(&[(Role::Activation, "Net/a", 12), (Role::Parameter, "Net/a", 3)]);
        let details = &mut run.devices[0].details;
        let activations = gpumem_model::run::Level { peak_bytes: GIB, last_bytes: 0 };
        details.iterations.rows =
            vec![Iteration { start_ns: 0, end_ns: 10, count: 9, activations, ..Iteration::default() }];
        let amounts = Amounts::from(vec![(0, GIB), (1, (of_steps - 1) * GIB)]);
        details.timeline.points = vec![Point { time_ns: 5, amounts, rest_bytes: 0 }];
        (details.ooms[0].time_ns, details.ooms[0].passes_without_backward) = (100, Some(50));
        of_kind(&run, Kind::EvaluationGradients).and_then(|item| item.saves_bytes)
    };
    assert_eq!(saves(2), Some([12 * GIB; 2]), "all activations");
    assert_eq!(saves(5), Some([10 * GIB; 2]), "the training steps need more than the parameters");
}
