//! Tests of advice on what certain modules hold.

use super::*;

#[test]
fn module_without_parameters_that_holds_many_times_its_input_is_a_formula() {
    let tags =
        ["a.0/up", "a.0/act", "a.1/up", "a.1/act", "a.2/up", "a.2/act"].map(|tag| format!("Net/{tag}"));
    let weights = [0, 2, 4].map(|at| format!("{}/weight", tags[at]));
    let advised = |up: i64, act: i64| {
        let sizes = [up, act].into_iter().cycle();
        let held = tags.iter().zip(sizes).map(|(tag, gib)| (Role::Activation, tag.as_str(), gib));
        let weights = weights.iter().map(|tag| (Role::Parameter, tag.as_str(), 1));
        items(&holding(&held.chain(weights).collect::<Vec<_>>())).remove(0)
    };
    let first = advised(1, 3);
    assert_eq!((first.kind, first.saves_bytes), (Kind::FusedOperation, Some([0, 9 * GIB])));
    assert!(first.sentence().starts_with("If Net/a.*/act computes"), "{}", first.sentence());
    assert_eq!(advised(2, 3).kind, Kind::Checkpointing, "an input and an output");
    let upsampled = [
        (Role::Activation, "Net/upsample", 6),
        (Role::Activation, "Net/layers", 2),
        (Role::Activation, "Net/conv", 2),
        (Role::Parameter, "Net/conv/weight", 1),
    ];
    let found = items(&holding(&upsampled));
    assert_ne!(found[0].kind, Kind::FusedOperation, "an output that may be needed");
    let loss = |gib: i64, parameter: &str| {
        let held = [
            (Role::Activation, "Loss", gib),
            (Role::Activation, "Net/head", 2),
            (Role::Parameter, parameter, 1),
        ];
        of_kind(&holding(&held), Kind::FusedOperation).map(|item| item.sentence())
    };
    let sentence = loss(8, "Net/head/weight").expect("advice");
    assert!(sentence.starts_with("If Loss computes") && !sentence.contains("checkpoint"), "{sentence}");
    assert_eq!(loss(5, "Net/head/weight"), None);
    assert_eq!(loss(8, "Loss/margin"), None, "it has parameters");
    assert_eq!(loss(8, "Other/a/weight"), None, "the input is unknown");
}

#[test]
fn checkpoint_keeps_the_input_of_each_module() {
    let advised = |parts: &[&str]| {
        let tags: Vec<String> = (0..9).map(|number| format!("Net/features.{number}")).collect();
        let tags = tags.iter().flat_map(|tag| parts.iter().map(move |part| format!("{tag}{part}")));
        let tags: Vec<String> = tags.collect();
        let weights = tags.iter().map(|tag| format!("{tag}/weight")).collect::<Vec<_>>();
        let held = tags.iter().map(|tag| (Role::Activation, tag.as_str(), 4 / parts.len() as i64));
        let held = held.chain(weights.iter().map(|tag| (Role::Parameter, tag.as_str(), 1)));
        of_kind(&holding(&held.collect::<Vec<_>>()), Kind::Checkpointing).expect("advice")
    };
    let leaf = advised(&[""]);
    assert_eq!(leaf.saves_bytes, Some([0, 12 * GIB]), "each input is the output of the module before");
    assert!(leaf.change.contains("in groups of several"), "{}", leaf.change);
    let [pair, blocks] = [advised(&["/a", "/b"]), advised(&["/a", "/b", "/c", "/d"])];
    assert_eq!((pair.saves_bytes, blocks.saves_bytes), (Some([14 * GIB, 15 * GIB]), Some([15 * GIB; 2])));
    assert!(blocks.change.starts_with("Checkpoint each module {0}"), "{}", blocks.change);
}

#[test]
fn copies_of_weights_under_autocast_need_a_smaller_model() {
    let tags = ["Net/a", "Net/b", "Net/c", "Net/d", "Net/e"];
    let weights = tags.map(|tag| format!("{tag}/weight"));
    let run = |models: &str| {
        let parameters = weights.iter().map(|tag| (Role::Parameter, tag.as_str(), 2));
        let held: Vec<_> = tags.map(|tag| (Role::Unknown, tag, 1)).into_iter().chain(parameters).collect();
        let mut run = holding(&held);
        run.process.claims.insert("models".into(), models.into());
        run
    };
    let float32 = run("Net\tfloat32\t9\t9\t0");
    let first = items(&float32).remove(0);
    assert_eq!((first.kind, first.saves_bytes), (Kind::WeightCopies, Some([5 * GIB, 10 * GIB])));
    assert_eq!(of_kind(&float32, Kind::ParameterPrecision), None, "the same change");
    assert_eq!(of_kind(&run("Net\tbfloat16\t9\t9\t0"), Kind::WeightCopies), None);
    let mut trained = float32;
    trained.cells[0].phase = Phase::Backward.name().map(Into::into);
    assert_eq!(of_kind(&trained, Kind::WeightCopies), None, "training needs float32 weights");
}

#[test]
fn smaller_parameters_have_smaller_gradients_and_state() {
    let held =
        [(Role::Parameter, "Net/a", 4), (Role::Gradient, "Net/a", 4), (Role::OptimizerState, "Net/a", 8)];
    let saved = |state: &str| {
        let mut run = holding(&held);
        run.devices[0].details.iterations.rows.clear();
        run.process.claims.insert("models".into(), format!("Net\tfloat32\t4\t4\t4\n\t{state}\t8\t0\t0"));
        let found = items(&run);
        let is_first = found[0].kind == Kind::ParameterPrecision;
        assert!(!is_first || state == "uint8", "it costs accuracy: {found:?}");
        found.iter().find(|item| item.kind == Kind::ParameterPrecision).map(|item| item.most() / GIB)
    };
    assert_eq!(saved("float32"), Some(8));
    assert_eq!(saved("uint8"), Some(4));
}

#[test]
fn half_the_batch_leaves_copies_of_weights() {
    let tags = ["Net/a", "Net/b", "Net/c"];
    let weights = tags.map(|tag| format!("{tag}/weight"));
    let saved = |kind: &str, copy: i64| {
        let parameters = weights.iter().map(|tag| (Role::Parameter, tag.as_str(), 2));
        let copies = tags.map(|tag| (Role::Activation, tag, copy)).into_iter();
        let held: Vec<_> = copies.chain([(Role::Activation, "Loss", 6)]).chain(parameters).collect();
        let mut run = holding(&held);
        run.process.claims.insert("models".into(), format!("Net\t{kind}\t9\t9\t9"));
        let item = of_kind(&run, Kind::BatchSize);
        item.and_then(|item| item.saves_bytes).map(|bytes| bytes.map(|bytes| bytes / GIB))
    };
    assert_eq!(saved("float32", 1), Some([2, 3]), "known copies");
    assert_eq!(saved("float32", 2), Some([3, 6]), "3 GiB may be copies");
    assert_eq!(saved("bfloat16", 2), Some([4, 6]), "a batch of 3 becomes one of 2");
}

#[test]
fn parameters_with_few_bits_do_not_become_smaller() {
    let held = [(Role::Parameter, "Net/a", 9), (Role::OptimizerState, "Net/a", 2)];
    let mut run = holding(&held);
    run.devices[0].details.iterations.rows.clear();
    let models =
        [("float32", 5), ("uint8", 4)].map(|(kind, gib)| format!("Net\t{kind}\t{}\t0\t0", gib * GIB));
    run.process.claims.insert("models".into(), models.join("\n"));
    let saved = of_kind(&run, Kind::ParameterPrecision).and_then(|item| item.saves_bytes);
    assert_eq!(saved, Some([7 * GIB / 2; 2]), "of a quantized model");
    let state = [("float32", 1), ("uint8", 1)].map(|(kind, gib)| format!("\t{kind}\t{}\t0\t0", gib * GIB));
    run.process.claims.insert("models".into(), [models, state].concat().join("\n"));
    let saved = of_kind(&run, Kind::ParameterPrecision).and_then(|item| item.saves_bytes);
    assert_eq!(saved, Some([3 * GIB; 2]), "half of the state has 8 bits");
}

#[test]
fn large_tables_of_which_a_batch_uses_few_rows_need_sparse_gradients() {
    let found_in = |phase: Phase, tables: &str, rows: i64| {
        let held = [
            (Role::Parameter, "Net/table/weight", 5),
            (Role::Gradient, "Net/table/weight", 5),
            (Role::OptimizerState, "Net/table/weight", 10),
            (Role::Activation, "Net/table", rows),
        ];
        let mut run = holding(&held);
        run.devices[0].details.iterations.rows.clear();
        run.devices[0].details.ooms[0].phase = phase.name().map(Into::into);
        let bytes = 5 * GIB;
        let tables = tables.replace("ALL", &bytes.to_string());
        let models = format!("Net\tfloat32\t{bytes}\t{bytes}\t{bytes}{tables}\n\tfloat32\t9\t0\t0");
        run.process.claims.insert("models".into(), models);
        let (advice, ..) = advice(&run, &Evidence::default());
        let chosen: Vec<Kind> = advice
            .together
            .iter()
            .flat_map(|(numbers, _)| numbers.iter().map(|at| advice.items[at - 1].kind))
            .collect();
        let is_both = chosen.contains(&Kind::SparseGradients) && chosen.contains(&Kind::OptimizerState);
        assert!(!is_both, "SparseAdam has no 8-bit state");
        let kinds = [Kind::SparseGradients, Kind::OptimizerState];
        let sparse = of_kind(&run, Kind::SparseGradients).and_then(|item| item.saves_bytes);
        let saved = [5 - 2 * rows, 10].map(|gib| gib * GIB);
        assert!(sparse.is_none_or(|bytes| bytes == saved), "a sparse gradient is held twice: {sparse:?}");
        (items(&run)[0].kind, kinds.map(|kind| of_kind(&run, kind).is_some()))
    };
    let found = |tables: &str, rows: i64| found_in(Phase::Forward, tables, rows);
    assert_eq!(found("\tALL\t0", 1), (Kind::SparseGradients, [true, true]));
    let in_first_step = found_in(Phase::Optimizer, "\tALL\t0", 1);
    assert_eq!(in_first_step, (Kind::SparseGradients, [true, true]), "8-bit state has no temporaries either");
    assert_eq!(found("\tALL\t0", 3).1, [false, true], "most rows");
    assert_eq!(found("\t0\tALL", 1).1, [false, false], "sparse gradients, which 8-bit state does not take");
    assert_eq!(found("", 1).1, [false, true], "an older agent");
}

#[test]
fn float64_is_the_first_advice_and_small_types_get_none() {
    let held = [
        (Role::Parameter, "Net/a", 2),
        (Role::Gradient, "Net/a", 2),
        (Role::OptimizerState, "Net/a", 4),
        (Role::Activation, "Net/a", 6),
    ];
    let first = first_with_models(&held, "Net\tfloat64\t2\t2\t2\n\tfloat64\t4\t0\t0");
    assert_eq!((first.kind, first.saves_bytes), (Kind::ParameterPrecision, Some([11 * GIB / 2, 7 * GIB])));
    let kinds = |models: &str| {
        let mut run = holding(&held);
        run.devices[0].details.iterations.rows.clear();
        run.process.claims.insert("models".into(), models.into());
        let kinds = [Kind::ParameterPrecision, Kind::OptimizerState, Kind::GradientBuckets];
        kinds.map(|kind| of_kind(&run, kind).map(|item| item.formula))
    };
    assert_eq!(kinds("Net\tbfloat16\t2\t2\t2\n\tuint8\t4\t0\t0"), [const { None }; 3]);
    let [.., state, buckets] = kinds("Net\tbfloat16\t2\t2\t2\n\tbfloat16\t4\t0\t0");
    assert!(state.is_some_and(|formula| formula.starts_with("1/2 x 4,096 MiB of bfloat16 state")));
    assert_eq!(buckets, None);
}
