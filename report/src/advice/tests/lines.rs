//! Tests of changes for the memory of one line, and for formulas, in programs that fit.

use super::free::{first, fitting, made_in};
use super::*;

const LINE: &str = "train.py:8 make";

/// Sets the points of the timeline, one for each step of 10 ns: the last of the cells of the run has these bytes, and the others those of
/// the peak.
fn course(run: &mut Run, levels: &[i64]) {
    let peak = run.devices[0].peak.amounts.clone();
    let last = peak.len() - 1;
    let point = |(step, level): (usize, &i64)| {
        let mut amounts: Vec<(u32, i64)> = peak.iter().copied().collect();
        amounts[last].1 = *level;
        Point { time_ns: step as u64 * 10 + 5, amounts: Amounts::from(amounts), rest_bytes: 0 }
    };
    run.devices[0].details.timeline.points = levels.iter().enumerate().map(point).collect();
}

#[test]
fn copies_of_the_model_and_its_state_belong_on_the_host() {
    let advised = |gib: i64, optimizer: i64, levels: &[i64]| {
        let held = [
            (Role::Parameter, "Net/a", 2),
            (Role::OptimizerState, "Net/a", optimizer),
            (Role::Activation, "Net/b", 6),
            (Role::Unknown, LINE, gib),
        ];
        let mut run = fitting(&held);
        made_in(&mut run, 3, Phase::Unknown);
        run.cells[3].phase = None;
        course(&mut run, &levels.iter().map(|gib| gib * GIB).collect::<Vec<_>>());
        first(&run).filter(|(kind, _)| *kind == Kind::StateCopy)
    };
    let later = [0, 0, 6, 6, 6, 6, 6, 12, 6, 6, 12, 6];
    // At other moments one copy is held.
    assert_eq!(advised(12, 4, &later), Some((Kind::StateCopy, [12, 12])));
    assert_eq!(
        advised(6, 4, &[6; 12]),
        None,
        "such as an average of the weights, made before the first step"
    );
    assert_eq!(advised(8, 4, &later), None, "not the size of the state");
    assert_eq!(
        advised(8, 2, &[0, 0, 4, 4, 4, 4, 4, 8, 4, 4, 8, 4]),
        None,
        "the size of weights and momentum, such as those and penalties of an earlier task"
    );
    assert_eq!(
        advised(2, 0, &[0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]),
        None,
        "a copy of the weights alone may be used"
    );
    assert_eq!(
        advised(12, 4, &[0, 0, 12, 0, 0, 0, 12, 0, 0, 0, 12, 0]),
        None,
        "it is made to be written to disk"
    );
}

#[test]
fn a_queue_rises_and_falls_by_a_tensor_at_a_time() {
    let tensor = GIB / 4;
    let advised = |level: &dyn Fn(i64) -> i64| {
        let mut run = fitting(&[(Role::Activation, "Net/b", 6), (Role::Unknown, LINE, 8)]);
        run.cells[1].phase = None;
        let levels: Vec<i64> = (0..60).map(level).collect();
        course(&mut run, &levels);
        first(&run).filter(|(kind, _)| *kind == Kind::Queue)
    };
    let full = 8 * GIB;
    assert_eq!(advised(&|at| full - at % 3 * tensor), Some((Kind::Queue, [4, 7])));
    assert_eq!(advised(&|_| full), None, "a buffer that stays");
    assert_eq!(advised(&|at| full - at % 2 * full), None, "a batch that is made anew");
    assert_eq!(advised(&|at| full - at * 37 % 50 * (full / 500)), None, "a batch of changing sizes");
    assert_eq!(advised(&|at| full / 60 * (at + 1)), None, "it grows");
    let drained = |at: i64| (full - (at - 12).max(0) * tensor).max(0);
    assert_eq!(advised(&drained), Some((Kind::Queue, [4, 7])), "filled before it is used");
    assert_eq!(advised(&|at| if at < 12 { full } else { 0 }), None, "freed at once");
    assert_eq!(advised(&|at| drained(at) + i64::from(at == 40) * 6 * tensor), None, "filled again");
}

#[test]
fn the_largest_part_that_stays_is_named_without_steps_too() {
    let advised = |gib: i64, levels: &[i64]| {
        let mut run = fitting(&[
            (Role::Parameter, "Net/a", 5),
            (Role::Unknown, "Net/b", 1),
            (Role::Unknown, LINE, gib),
        ]);
        run.cells[2].phase = None;
        run.devices[0].details.iterations.rows.clear();
        course(&mut run, &levels.iter().map(|level| level * GIB).collect::<Vec<_>>());
        let items = advice(&run, &Evidence::default()).0.items;
        items.into_iter().next().filter(|item| item.change.contains("than is in use at one time"))
    };
    assert_eq!(advised(9, &[9; 12]).map(|item| item.saves_bytes), Some(Some([0, 9 * GIB])));
    assert_eq!(advised(4, &[4; 12]), None, "the parameters are larger");
    assert_eq!(advised(9, &[0, 0, 0, 0, 0, 0, 0, 0, 9, 9, 0, 0]), None, "it does not stay");
    assert_eq!(advised(9, &[9; 4]), None, "too few moments");
}

#[test]
fn formulas_of_pairs_and_own_operations_of_modules_are_named() {
    // A line keeps `kept` GiB, of which the backward pass makes `made` GiB outside of modules.
    let pairs = |kept: i64, made: i64| {
        let mut run = fitting(&[
            (Role::Activation, "Net/a", 6),
            (Role::Activation, LINE, kept),
            (Role::Temporary, "", made),
        ]);
        (run.cells[1].phase, run.cells[2].tag) = (None, None);
        run.cells[2].phase = Phase::Backward.name().map(Into::into);
        first(&run)
    };
    assert_eq!(pairs(2, 6), Some((Kind::FusedOperation, [0, 8])));
    assert_eq!(pairs(4, 6), None, "other tensors");
    assert_eq!(pairs(3, 3), None, "the gradient of a loss");
    assert_eq!(pairs(2, 4), None, "the gradients of F.cross_entropy and of its log_softmax()");
    // Two layers whose own operations keep `own` GiB, and those inside of them 1 GiB; the parameter `name` beside theirs.
    let masks = |own: i64, name: &str| {
        let parameters = ["Net/h.0/attn/qkv/weight", "Net/h.1/attn/qkv/weight", name];
        let parameters = parameters.map(|name| (Role::Parameter, name, 1));
        let activations = [
            (Role::Activation, "Net/h.0/attn", own),
            (Role::Activation, "Net/h.1/attn", own),
            (Role::Activation, "Net/h.0/attn/qkv", 1),
            (Role::Activation, "Net/h.1/attn/qkv", 1),
        ];
        let gradients = [(Role::Gradient, "Net/head/weight", 1)];
        let held = [parameters.as_slice(), activations.as_slice(), gradients.as_slice()].concat();
        let mut run = fitting(&held);
        made_in(&mut run, held.len() - 1, Phase::Backward);
        first(&run)
    };
    assert_eq!(masks(6, "Net/head/weight"), Some((Kind::FusedOperation, [0, 12])));
    assert_eq!(masks(3, "Net/head/weight"), None, "inputs and outputs");
    assert_eq!(masks(6, "Net/h.0/attn/weight"), None, "a parameter of its own, as of nn.LSTM");
    // Layers whose own operations keep 6 GiB, with a dropout of `dropped` GiB inside, as large as these, and 1 GiB of a linear layer.
    let scores = |own: i64, dropped: i64| {
        let held = [
            (Role::Parameter, "Net/h.0/attn/q/weight", 1),
            (Role::Parameter, "Net/h.1/attn/q/weight", 1),
            (Role::Activation, "Net/h.0/attn", own),
            (Role::Activation, "Net/h.1/attn", own),
            (Role::Activation, "Net/h.0/attn/dropout", dropped),
            (Role::Activation, "Net/h.1/attn/dropout", dropped),
            (Role::Activation, "Net/h.1/attn/q", 1),
            (Role::Gradient, "Net/h.1/attn/q/weight", 1),
        ];
        let mut run = fitting(&held);
        made_in(&mut run, held.len() - 1, Phase::Backward);
        run.devices[0].total_bytes = Some(100 << 30);
        first(&run)
    };
    assert_eq!(scores(6, 7), Some((Kind::FusedOperation, [0, 26])), "the dropout works on the scores");
    assert_eq!(scores(1, 5), None, "such as layers of an MLP with an activation function each");
    let held = [
        (Role::Parameter, "Net/h.0/q/weight", 1),
        (Role::Parameter, "Net/h.1/q/weight", 1),
        (Role::Activation, "Net/h.0", 6),
        (Role::Activation, "Net/h.1", 6),
        (Role::Activation, "Net/h.1/q", 1),
        (Role::Gradient, "Net/h.1/q/weight", 1),
    ];
    let mut run = fitting(&held);
    made_in(&mut run, held.len() - 1, Phase::Backward);
    assert_eq!(
        first(&run),
        Some((Kind::FusedOperation, [0, 12])),
        "modules beside that are alike do not count"
    );
}

#[test]
fn copy_of_an_output_in_float32_has_twice_its_bytes() {
    let advised = |kind: &str, gib: i64| {
        let mut run = fitting(&[
            (Role::Parameter, "Net/a", 4),
            (Role::Activation, "Net/head", 4),
            (Role::Activation, LINE, gib),
        ]);
        run.cells[2].phase = None;
        run.process.claims.insert("models".into(), format!("Net\t{kind}\t9\t9\t9"));
        first(&run)
    };
    assert_eq!(advised("bfloat16", 8), Some((Kind::OutputCopy, [8; 2])));
    assert_eq!(advised("bfloat16", 6), None, "not twice as much");
    assert_eq!(advised("float32", 8), None, "autocast makes copies itself");
    let mut rearranged = fitting(&[
        (Role::Parameter, "Net/a", 4),
        (Role::Activation, "Net/head", 4),
        (Role::Activation, LINE, 4),
        (Role::Temporary, LINE, 4),
    ]);
    rearranged.process.claims.insert("models".into(), "Net\tbfloat16\t9\t9\t9".into());
    assert_eq!(
        first(&rearranged),
        None,
        "two tensors with the bytes of the output, as of reshape() and log_softmax()"
    );
}

#[test]
fn equal_models_in_a_program_that_trains_nothing_may_be_shared() {
    let here = ["Net/a", "Net#2/a", "Net#3/a"];
    let advised_on = |here: &[&str], models: &[&str], updated: i64, phase: Phase| {
        let parameters = here.iter().map(|tag| (Role::Parameter, *tag, 18 / here.len() as i64));
        let held: Vec<_> = parameters.chain([(Role::Unknown, "Net/b", 1)]).collect();
        let mut run = fitting(&held);
        made_in(&mut run, here.len(), phase);
        let sizes = models.iter().map(|name| format!("{name}\tbfloat16\t{}\t9\t{updated}\n", 6 * GIB));
        run.process.claims.insert("models".into(), sizes.collect());
        first(&run)
    };
    let advised = |models: &[&str], updated: i64, phase: Phase| advised_on(&here, models, updated, phase);
    let three = ["Net", "Net#2", "Net#3"];
    assert_eq!(advised(&three, 0, Phase::Forward), Some((Kind::EqualModels, [0, 12])));
    assert_eq!(advised(&three[..2], 0, Phase::Forward), None, "such as a model and its average");
    assert_eq!(advised(&["Net", "Other", "Third"], 0, Phase::Forward), None, "of three classes");
    assert_eq!(advised(&three, 9, Phase::Forward), None, "an optimizer updates them");
    assert_eq!(advised(&three, 0, Phase::Backward), None, "the program trains");
    assert_eq!(advised_on(&here[..1], &three, 0, Phase::Forward), None, "two of them are on other devices");
}

#[test]
fn a_step_with_many_times_the_activations_is_bounded_first() {
    let advised_above = |in_steps: i64, earlier: i64, steps: u64, passes: u64| {
        let mut run = holding(&[
            (Role::Parameter, "Net/h.0/a", 1),
            (Role::Activation, "Net/h.0", 6),
            (Role::Activation, "Net/h.1", 6),
        ]);
        let row = |step: u64| Iteration {
            start_ns: step * 10,
            end_ns: step * 10 + 10,
            count: 1,
            passes_at_once: 1,
            activations: Level { peak_bytes: earlier * GIB, last_bytes: 0 },
            ..Iteration::default()
        };
        let device = &mut run.devices[0];
        device.details.iterations.rows = (0..steps).map(row).collect();
        let amounts = Amounts::from(vec![(0, in_steps * GIB)]);
        device.details.timeline.points = vec![Point { time_ns: 15, amounts, rest_bytes: 0 }];
        device.details.ooms[0].tracked_bytes = 13 * GIB;
        let oom = &mut device.details.ooms[0];
        (oom.step, oom.phase) = (Some(27), Phase::Forward.name().map(Into::into));
        (oom.passes_without_backward, oom.time_ns) = (Some(passes), steps * 10 + 5);
        let item = advice(&run, &Evidence::default()).0.items.remove(0);
        (item.kind == Kind::OutlierBatch).then(|| (item.sentence(), item.saves_bytes))
    };
    let advised = |earlier, steps, passes| advised_above(1, earlier, steps, passes);
    let (sentence, saved) = advised(3, 20, 1).expect("advice");
    assert!(
        sentence.ends_with("the activations of step 27 are 4 times the most of an earlier step"),
        "{sentence}"
    );
    assert_eq!(saved, Some([9 * GIB; 2]));
    let (_, saved) = advised_above(6, 3, 20, 1).expect("advice");
    assert_eq!(saved, Some([7 * GIB, 9 * GIB]), "earlier steps had 6 GiB in the optimizer");
    assert_eq!(advised(6, 20, 1), None, "batches of changing sizes");
    assert!(advised(3, 8, 1).is_some(), "the first epoch has such a batch");
    assert_eq!(advised(3, 7, 1), None, "few steps");
    assert_eq!(advised(3, 20, 4), None, "more passes before the backward pass");
}

#[test]
fn data_of_a_line_can_stay_on_the_host() {
    let held = [(Role::Unknown, "train.py:8 load", 11), (Role::Activation, "Net/a", 4)];
    let data = |phase: Phase| {
        let mut run = holding(&held);
        run.cells[0].phase = phase.name().map(Into::into);
        let items = advice(&run, &Evidence::default()).0.items;
        items.into_iter().find(|item| item.memory == Memory::Data)
    };
    let item = data(Phase::Setup).expect("advice");
    assert_eq!(
        (item.kind, &item.untrusted_names[..]),
        (Kind::RetainedTensors, &["train.py:8 load".into()][..])
    );
    assert!(item.change.starts_with("If {0} makes a data set or a buffer "), "{}", item.change);
    assert!(data(Phase::Unknown).is_some());
    let mut collected = holding(&held);
    collected.cells[0].phase = Phase::Setup.name().map(Into::into);
    collected.devices[0].details.ooms[0].tag = Some("train.py:8 load".into());
    let item = items(&collected).into_iter().find(|item| item.memory == Memory::Data).expect("advice");
    assert!(item.change.starts_with("Move the results that {0} collects"), "{}", item.change);
    for phase in [Phase::Forward, Phase::Backward, Phase::Optimizer, Phase::Evaluation] {
        assert_eq!(data(phase), None, "{phase:?}");
    }
}
