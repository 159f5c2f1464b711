//! Tests of changes that cost nothing, on programs that fit.

use super::*;

fn saving_line(report: &Report<'_>) -> Option<String> {
    super::saving_line(report, &Findings::of(report), &own_advice(report))
}

/// Returns a run that ended well. At the peak, after ten of twelve steps of 10 ns, it held these GiB by role and tag, on a device
/// of 40 GiB.
pub(super) fn fitting(held: &[(Role, &str, i64)]) -> Run {
    let mut run = holding(held);
    let device = &mut run.devices[0];
    let oom = device.details.ooms.remove(0);
    (device.total_bytes, device.reading) = (Some(40 << 30), None);
    let tracked = held.iter().map(|(.., gib)| gib * GIB).sum();
    let peak =
        Moment { tracked_bytes: Some(tracked), time_ns: 105, amounts: oom.amounts, ..Moment::default() };
    (device.last, device.peak) = (peak.clone(), peak);
    let row = |step: u64| Iteration {
        start_ns: step * 10,
        end_ns: step * 10 + 10,
        count: 1,
        ..Iteration::default()
    };
    device.details.iterations.rows = (0..12).map(row).collect();
    device.details.iterations.open = None;
    run
}

/// Returns the step of the peak.
fn step(run: &mut Run) -> &mut Iteration {
    &mut run.devices[0].details.iterations.rows[10]
}

fn level(gib: i64) -> Level {
    Level { peak_bytes: gib * GIB, last_bytes: 0 }
}

pub(super) fn first(run: &Run) -> Option<(Kind, [i64; 2])> {
    let item = items(run).into_iter().next()?;
    Some((item.kind, item.saves_bytes.unwrap_or_default().map(|bytes| bytes / GIB)))
}

/// Sets the phase of a run's cells from index `from` on.
pub(super) fn made_in(run: &mut Run, from: usize, phase: Phase) {
    run.cells[from..].iter_mut().for_each(|cell| cell.phase = phase.name().map(Into::into));
}

#[test]
fn elements_with_too_many_bits_are_named_if_they_are_most_of_the_memory() {
    let advised = |kind: &str, trained: bool, activations: i64| {
        let held = [(Role::Parameter, "Net/a/weight", 4), (Role::Activation, "Net/a", activations)];
        let mut run = fitting(&held);
        run.process.claims.insert("models".into(), format!("Net\t{kind}\t4\t4\t0"));
        if trained {
            made_in(&mut run, 1, Phase::Backward);
        }
        first(&run)
    };
    assert_eq!(
        advised("float64", true, 12),
        Some((Kind::ParameterPrecision, [5, 8])),
        "and all that follows"
    );
    assert_eq!(advised("float32", false, 1), Some((Kind::ParameterPrecision, [2; 2])));
    assert_eq!(advised("float32", false, 12), None, "parameters are a part");
    assert_eq!(advised("float32", true, 1), None, "training may need the bits");
    assert_eq!(advised("bfloat16", false, 1), None);
}

#[test]
fn inference_that_drops_its_graphs_needs_none() {
    let tags = ["Net/a", "Net/b", "Net/c", "Net/d", "Net/e"];
    let mut run = fitting(&tags.map(|tag| (Role::Unknown, tag, 2)));
    let iterations = &mut run.devices[0].details.iterations;
    let open = |passes_at_once, kept| Iteration {
        passes_at_once,
        kept_activations: level(kept),
        ..Iteration::default()
    };
    iterations.rows.clear();
    let mut advised = |passes, kept| {
        run.devices[0].details.iterations.open = Some(open(passes, kept));
        first(&run)
    };
    assert_eq!(advised(9, 0), Some((Kind::EvaluationGradients, [6, 10])));
    assert_eq!(
        advised(9, 5),
        Some((Kind::EvaluationGradients, [6, 10])),
        "the last output is kept for one pass"
    );
    assert_eq!(advised(2, 0), None, "a backward pass may follow");
    assert_eq!(advised(9, 9), Some((Kind::GraphsAtOnce, [9; 2])), "a backward pass may follow");
}

#[test]
fn graphs_of_several_passes_may_be_needed_at_once() {
    let mut run = fitting(&[(Role::Parameter, "Net/a", 2), (Role::Activation, "Net/a", 16)]);
    let mut advised = |passes, kept| {
        let step = step(&mut run);
        (step.passes_at_once, step.kept_activations, step.activations) = (passes, level(kept), level(16));
        first(&run)
    };
    let graphs = Some((Kind::GraphsAtOnce, [0, 14]));
    assert_eq!(advised(8, 14), graphs, "or the state of one pass is needed for the next");
    assert_eq!(advised(40, 16), None, "steps of a sequence");
    assert_eq!(advised(1, 0), None, "a backward pass follows each pass");
    assert_eq!(advised(8, 2), None, "most graphs are dropped");
    assert_eq!(advised(3, 11), None, "the loss of a triplet needs all graphs");
    let rows = &mut run.devices[0].details.iterations.rows;
    let unknown = Iteration { passes_at_once: 8, kept_activations: level(14), ..rows[10] };
    (rows[9], rows[10]) = (Iteration { activations: level(16), ..unknown }, unknown);
    rows[10].activations = level(0);
    assert_eq!(first(&run), graphs, "a backward pass followed those of an earlier step");
}

#[test]
fn float64_that_fits_may_be_needed() {
    let mut run = fitting(&[(Role::Parameter, "Net/a", 2), (Role::Activation, "Net/a", 16)]);
    run.process.claims.insert("models".into(), "Net\tfloat64\t2\t2\t2".into());
    let step = step(&mut run);
    (step.passes_at_once, step.kept_activations, step.activations) = (8, level(14), level(16));
    let kinds = |run: &Run| items(run).into_iter().map(|item| item.kind).collect::<Vec<_>>();
    assert_eq!(kinds(&run), [Kind::GraphsAtOnce, Kind::ParameterPrecision]);
    let change = items(&run).remove(1).change;
    assert!(change.starts_with("If float32 is precise enough, "), "{change}");
    run.devices[0].total_bytes = Some(18 << 30);
    assert_eq!(kinds(&run)[0], Kind::ParameterPrecision, "memory is short");
}

#[test]
fn gradients_are_cleared_before_a_forward_pass_that_fits() {
    let held = |gradients| {
        [(Role::Parameter, "Net/a", 4), (Role::Gradient, "Net/a", gradients), (Role::Activation, "Net/a", 12)]
    };
    let advised = |gradients: i64, temporaries: i64, total_gib: u64| {
        let mut run = fitting(&held(gradients));
        run.devices[0].total_bytes = Some(total_gib << 30);
        let step = step(&mut run);
        (step.kept_gradients, step.intermediate_gradients) = (level(gradients), level(temporaries));
        first(&run)
    };
    assert_eq!(advised(4, 1, 40), Some((Kind::KeptGradients, [3, 4])));
    assert_eq!(advised(1, 0, 40), None, "less than a tenth of the memory");
    assert_eq!(advised(4, 1, 100), None, "less than a twentieth of the device");
    assert_eq!(advised(4, 5, 40), None, "the backward pass needs as much");
}

#[test]
fn only_gradients_made_outside_of_backward_are_buckets() {
    let held = [
        (Role::Activation, "Net/a", 6),
        (Role::Parameter, "Net/a", 5),
        (Role::Gradient, "Net/a", 5),
        (Role::Gradient, "Net", 5),
    ];
    let mut run = fitting(&held);
    assert_eq!(first(&run), Some((Kind::GradientBuckets, [5; 2])));
    made_in(&mut run, 2, Phase::Backward);
    assert_eq!(first(&run), None, "gradients that the program keeps");
    let views =
        fitting(&[(Role::Parameter, "Net/a", 5), (Role::Gradient, "Net", 5), (Role::Gradient, "Net/b", 5)]);
    assert_eq!(first(&views), None, "new buckets beside the old ones, and no gradients of their own");
}

#[test]
fn checkpoint_stays_if_it_is_as_large_as_the_model() {
    const LINE: &str = "train.py:8 load";
    let advised = |gib: i64, phase: Phase, points: u64| {
        let held =
            [(Role::Parameter, "Net/a", 5), (Role::Activation, "Net/a", 6), (Role::Unknown, LINE, gib)];
        let mut run = fitting(&held);
        made_in(&mut run, 2, phase);
        let point = |at: u64| Point {
            time_ns: 120 - at * 10,
            amounts: run.devices[0].peak.amounts.clone(),
            rest_bytes: 0,
        };
        run.devices[0].details.timeline.points = (0..points).rev().map(point).collect();
        first(&run)
    };
    assert_eq!(advised(5, Phase::Setup, 9), Some((Kind::LoadedCheckpoint, [5; 2])));
    assert_eq!(advised(5, Phase::Unknown, 9), None, "torch.load did not make it");
    assert_eq!(advised(8, Phase::Setup, 9), None, "not the size of the model");
    assert_eq!(advised(5, Phase::Setup, 2), None, "it may go soon");
}

#[test]
fn checkpoint_that_is_kept_when_memory_runs_out_is_not_needed() {
    let advised = |gib: i64, steps: usize| {
        let line = "train.py:8 load";
        let held =
            [(Role::Parameter, "Net/a", 5), (Role::Activation, "Net/a", 6), (Role::Unknown, line, gib)];
        let mut run = holding(&held);
        made_in(&mut run, 2, Phase::Setup);
        let device = &mut run.devices[0];
        let row = |step: u64| Iteration {
            start_ns: step * 10,
            end_ns: step * 10 + 10,
            count: 1,
            ..Iteration::default()
        };
        device.details.iterations.rows = (0..steps as u64).map(row).collect();
        let amounts = device.details.ooms[0].amounts.clone();
        let point = |at: u64| Point { time_ns: at * 10, amounts: amounts.clone(), rest_bytes: 0 };
        device.details.timeline.points = (0..=steps as u64).map(point).collect();
        device.details.ooms[0].time_ns = steps as u64 * 10 + 5;
        first(&run).filter(|(kind, _)| *kind == Kind::LoadedCheckpoint)
    };
    assert_eq!(advised(5, 1), Some((Kind::LoadedCheckpoint, [5; 2])), "it fails in the second step");
    assert_eq!(advised(8, 1), None, "not the size of the model");
    assert_eq!(advised(5, 0), None, "no step is over");
}

#[test]
fn model_without_a_backward_pass_needs_no_gradients() {
    let held = [
        (Role::OptimizerState, "Student/a", 2),
        (Role::Activation, "Teacher/a", 4),
        (Role::Activation, "Teacher/b", 4),
        (Role::Activation, "Teacher/c", 4),
        (Role::Temporary, "Student/a", 1),
    ];
    let mut run = fitting(&held);
    made_in(&mut run, 4, Phase::Backward);
    assert_eq!(first(&run), None, "its first backward pass may come");
    let amounts = run.devices[0].peak.amounts.clone();
    let point = |step: u64| Point { time_ns: step * 10, amounts: amounts.clone(), rest_bytes: 0 };
    run.devices[0].details.timeline.points = (0..10).map(point).collect();
    assert_eq!(first(&run), Some((Kind::EvaluationGradients, [4, 12])));
    run.cells[4].tag = Some("Teacher/a".into());
    assert_eq!(first(&run), None, "gradients may pass through it");
}

#[test]
fn report_points_to_a_saving_that_costs_nothing() {
    let held = [(Role::Parameter, "Net/a", 4), (Role::Gradient, "Net/a", 4), (Role::Activation, "Net/a", 12)];
    let mut run = fitting(&held);
    let step = step(&mut run);
    (step.kept_gradients, step.intermediate_gradients) = (level(4), level(1));
    let line = |run: &Run| saving_line(&Report::new(run, Groupings::default(), None));
    let free = line(&run).expect("a line");
    assert!(free.starts_with("free to save: ") && free.contains("-3,072 to -4,096 MiB"), "{free}");
    run.devices[0].total_bytes = Some(400 << 30);
    assert_eq!(line(&run), None, "little of the device");
}

#[test]
fn report_with_a_finding_has_the_first_change() {
    let run = fragmented(&[]);
    let line = saving_line(&Report::new(&run, Groupings::default(), None)).expect("a line");
    assert!(line.starts_with("first change: Set PYTORCH_CUDA_ALLOC_CONF="), "{line}");
}

#[test]
fn report_of_a_device_that_is_nearly_full_has_the_number_of_suggestions() {
    let held = [
        (Role::Parameter, "Net/a", 4),
        (Role::OptimizerState, "Net/a", 30),
        (Role::Activation, "Net/a", 20),
        (Role::Activation, "Net/b", 20),
    ];
    let mut run = fitting(&held);
    run.devices[0].total_bytes = Some(80 << 30);
    let items = advice(&run, &Evidence::default()).0.items;
    assert!(items.len() > 1, "{items:?}");
    let report = Report::new(&run, Groupings::default(), None);
    let line = saving_line(&report).expect("a line");
    let count = format!("; gpumemctl why: {} suggestions)", items.len());
    assert!(line.starts_with("memory is short: ") && line.ends_with(&count), "{line}");
    assert!(line.contains(&items[0].sentence()), "{line}");
    let text = crate::text::text(&report, crate::text::Layout::default());
    let next = format!("why: {} suggestions (gpumemctl why)", items.len());
    assert!(text.contains(&next), "{text}");
}

#[test]
fn line_without_a_problem_names_the_place_of_what_passes_made() {
    let first_line = |held: &[(Role, &str, i64)]| {
        let mut run = fitting(held);
        run.state = gpumem_model::run::State::Closed { time_ns: 200, status: Some(0) };
        run.source.kind = "recording".into();
        run.coverage.covered = true;
        let groupings = Groupings::preset(Some(crate::names::TORCH)).clone();
        let report = Report::new(&run, groupings, Some(crate::GroupBy::Structure));
        let layout = crate::text::Layout { is_short: true, ..crate::text::Layout::default() };
        let text = crate::text::text(&report, layout);
        let note = "  10,240 of a.py:16 step";
        let row = text.lines().find(|line| line.starts_with("temporaries ") && line.ends_with(note));
        assert_eq!(row.is_some(), text.contains("a.py:16"), "{text}");
        crate::findings::text::lines(&report).remove(0)
    };
    let lines = first_line(&[(Role::Temporary, "a.py:16 step", 10), (Role::Temporary, "Net/a", 2)]);
    assert!(lines.contains(" temporaries 12,288 MiB (10,240 of a.py:16 step), "), "{lines}");
    let lines = first_line(&[(Role::Parameter, "Net/a", 10), (Role::Temporary, "Net/a", 2)]);
    assert!(lines.contains(" parameters 10,240 MiB, "), "{lines}");
}

#[test]
fn graphs_that_stay_through_steps_need_no_gradients() {
    let held = [
        (Role::Unknown, "Net/a", 4),
        (Role::Unknown, "Net/b", 4),
        (Role::Unknown, "Net/c", 2),
        (Role::Activation, "Net/a", 2),
        (Role::Activation, "Net/b", 2),
        (Role::Activation, "Net/c", 1),
        (Role::Temporary, "Net/a", 1),
    ];
    // In each of 12 steps `kept` holds a share of the first three, and passes kept `gib` GiB in the first step.
    let staying = |held: &[(Role, &str, i64)], kept: &dyn Fn(i64) -> i64, passes, gib| {
        let mut run = fitting(held);
        made_in(&mut run, 6, Phase::Backward);
        let details = &mut run.devices[0].details;
        let points = |(cell, (.., gib)): (u32, &(Role, &str, i64))| {
            (cell, (0..12).map(|step| gib * GIB / 100 * kept(step as i64)).collect())
        };
        details.growth.cells = (0..).zip(&held[..3]).map(points).collect();
        details.growth.axis = Axis::Step;
        details.growth.points = (0..12).map(|step| (step, step * 10)).collect();
        let row = &mut details.iterations.rows[0];
        (row.passes_at_once, row.kept_activations) = (passes, level(gib));
        run
    };
    let advised =
        |held: &[_], kept: &dyn Fn(i64) -> i64, passes, gib| first(&staying(held, kept, passes, gib));
    let always = |_| 100;
    assert_eq!(advised(&held, &always, 8, 10), Some((Kind::EvaluationGradients, [5, 9])));
    let mostly = |step| if step % 4 == 0 { 0 } else { 100 };
    assert_eq!(advised(&held, &mostly, 8, 10), Some((Kind::EvaluationGradients, [5, 9])));
    let rarely = |step| if step % 4 == 0 { 100 } else { 0 };
    assert_eq!(advised(&held, &rarely, 8, 10), None, "most steps end without them");
    assert_eq!(advised(&held, &|step| step * 9, 8, 10), None, "growth has advice of its own");
    assert_eq!(advised(&held, &always, 1, 0), None, "buffers of a captured CUDA graph");
    let mut outputs = held;
    (outputs[0].2, outputs[1].2, outputs[2].2) = (0, 0, 10);
    assert_eq!(advised(&outputs, &always, 8, 10), None, "outputs of one module have no graph");
    (outputs[0].2, outputs[1].2, outputs[2].2) = (0, 4, 6);
    assert_eq!(advised(&outputs, &always, 8, 10), None, "outputs of other modules than the activations");
    // The rest of these steps' activations after their optimizer's step.
    let outliving = |rest: [i64; 2]| {
        let mut run = staying(&outputs, &always, 8, 10);
        for (row, gib) in run.devices[0].details.iterations.rows.iter_mut().zip(rest) {
            row.activations = Level { peak_bytes: 10 * GIB, last_bytes: gib * GIB };
        }
        first(&run)
    };
    assert_eq!(outliving([10, 10]), Some((Kind::EvaluationGradients, [3, 9])), "no backward pass frees them");
    assert_eq!(outliving([10, 0]), None, "that of a second optimizer does");
    assert_eq!(outliving([1, 1]), None, "a backward pass does");
}

#[test]
fn copy_of_a_base_is_not_needed_beside_its_adapter() {
    let held = [(Role::Parameter, "Peft/a/weight", 4), (Role::Parameter, "Llama/a/weight", 4)];
    let mut run = fitting(&held);
    assert_eq!(first(&run), None, "nothing is known of the models");
    let bytes = 4 * GIB;
    let models =
        format!("Peft\tbfloat16\t{bytes}\t0\t0\nPeft\tfloat32\t9\t9\t9\nLlama\tbfloat16\t{bytes}\t0\t0");
    run.process.claims.insert("models".into(), models);
    assert_eq!(first(&run), Some((Kind::ModelCopy, [4; 2])));
    let sentence = items(&run).remove(0).sentence();
    assert!(sentence.starts_with("If Llama is a copy of the frozen base of Peft, "), "{sentence}");
    run.cells[1].tag = Some("Other/a/weight".into());
    assert_eq!(first(&run), None, "the copy is not on this device");
}

#[test]
fn copies_that_autocast_keeps_are_no_graph() {
    let tags = ["Net/a", "Net/b", "Net/c", "Net/d", "Net/e"];
    let weights = tags.map(|tag| format!("{tag}/weight"));
    let advised = |kind: &str, gib: i64| {
        let parameters = weights.iter().map(|tag| (Role::Parameter, tag.as_str(), gib));
        let held: Vec<_> = tags.map(|tag| (Role::Unknown, tag, 2)).into_iter().chain(parameters).collect();
        let mut run = fitting(&held);
        run.process.claims.insert("models".into(), format!("Net\t{kind}\t9\t9\t0"));
        let groupings = Groupings::preset(Some(crate::names::TORCH)).clone();
        let report = Report::new(&run, groupings, Some(crate::GroupBy::Structure));
        let categories = report.composition(&run.devices[0].peak, report.by).categories;
        let advised = first(&run);
        let is_copied = advised.is_some_and(|(kind, _)| kind == Kind::WeightCopies);
        let name = if is_copied { "parameter copies" } else { "retained forward outputs" };
        assert_eq!(categories.get(name), Some(&(10 * GIB)), "as in the advice: {categories:?}");
        advised
    };
    assert_eq!(advised("float32", 4), Some((Kind::WeightCopies, [10, 20])));
    assert_eq!(advised("bfloat16", 4), Some((Kind::EvaluationGradients, [6, 10])));
    assert_eq!(advised("float32", 3), Some((Kind::EvaluationGradients, [6, 10])), "another size");
}

#[test]
fn graph_holds_bytes_of_all_layers() {
    let weights: Vec<String> = (0..8).map(|layer| format!("Net/layers.{layer}/a/weight")).collect();
    let advised = |layers: [usize; 5]| {
        let tags = layers.map(|layer| format!("Net/layers.{layer}/a"));
        let parameters = weights.iter().map(|tag| (Role::Parameter, tag.as_str(), 1));
        let held = tags.iter().map(|tag| (Role::Unknown, tag.as_str(), 2));
        first(&fitting(&held.chain(parameters).collect::<Vec<_>>()))
    };
    assert_eq!(advised([0, 2, 3, 5, 7]), Some((Kind::EvaluationGradients, [6, 10])));
    let inside = ["Net/layers.1/a", "Net/layers.1/b", "Net/layers.1/c", "Net/layers.1/d", "Net/layers.0"];
    let held = inside.map(|tag| (Role::Unknown, tag, 2)).into_iter();
    let held = held.chain(weights.iter().map(|tag| (Role::Parameter, tag.as_str(), 1)));
    assert_eq!(first(&fitting(&held.collect::<Vec<_>>())), None, "temporaries of one layer");
}

/// Adds moments of training steps to the timeline, with these GiB by cell.
pub(super) fn trained_with(run: &mut Run, amounts: &[(u32, i64)]) {
    let amounts = Amounts::from(amounts.iter().map(|(cell, gib)| (*cell, gib * GIB)).collect::<Vec<_>>());
    let point = |at: u64| Point { time_ns: at * 10 + 5, amounts: amounts.clone(), rest_bytes: 0 };
    run.devices[0].details.timeline.points = (0..12).map(point).collect();
}

#[test]
fn evaluation_that_needs_more_than_training_sets_the_peak() {
    // In the step of the peak `passes` began without a backward pass, and one in each other step, with these temporaries.
    let of_steps = |activations: i64, phase: Phase, passes, temporaries, is_one_module| {
        let held = [
            (Role::Parameter, "Net/a", 2),
            (Role::Temporary, "Net/head", 4),
            (Role::Temporary, "train.py:7 evaluate", 6),
            (Role::Activation, "Net/a", 0),
        ];
        let mut run = fitting(&held);
        made_in(&mut run, 1, phase);
        let rows = &mut run.devices[0].details.iterations.rows;
        rows.iter_mut().for_each(|row| (row.activations, row.passes_at_once) = (level(activations), 1));
        rows[10].passes_at_once = passes;
        rows[3].temporaries = level(temporaries);
        trained_with(&mut run, &[(0, 2), (3, activations)]);
        if is_one_module {
            run.cells[2].tag = run.cells[1].tag.clone();
        }
        first(&run)
    };
    let advised = |activations: i64, phase: Phase| of_steps(activations, phase, 3, 0, false);
    assert_eq!(advised(4, Phase::Forward), Some((Kind::EvaluationBatch, [6; 2])));
    assert_eq!(advised(4, Phase::Unknown), Some((Kind::EvaluationBatch, [6; 2])), "a line after the passes");
    assert_eq!(advised(9, Phase::Forward), None, "a training step needs nearly as much");
    assert_eq!(advised(4, Phase::Setup), None, "no forward pass");
    assert_eq!(advised(4, Phase::Optimizer), None, "an optimizer needs its temporaries");
    assert_eq!(advised(0, Phase::Forward), None, "no training");
    assert_eq!(of_steps(4, Phase::Forward, 1, 0, false), None, "the first layer of a training step");
    assert_eq!(of_steps(4, Phase::Forward, 3, 10, false), None, "each training step has these temporaries");
    assert_eq!(of_steps(4, Phase::Forward, 3, 0, true), None, "trials of a convolution");
    let named = of_steps(4, Phase::Evaluation, 1, 0, false);
    assert_eq!(named, Some((Kind::EvaluationBatch, [6; 2])), "the program names the phase");
}

#[test]
fn data_set_that_is_most_of_the_memory_is_named() {
    let line = "data.py:15 Images.__init__";
    let holding = |gib: i64, early: i64| {
        let held =
            [(Role::Unknown, line, gib), (Role::Parameter, "Net/a", 2), (Role::Activation, "Net/a", 4)];
        let mut run = fitting(&held);
        made_in(&mut run, 0, Phase::Setup);
        made_in(&mut run, 2, Phase::Forward);
        trained_with(&mut run, &[(0, gib), (1, 2)]);
        run.devices[0].details.timeline.points[6].amounts = Amounts::from(vec![(0, early * GIB)]);
        run
    };
    let advised = |gib, early| first(&holding(gib, early));
    let run = holding(20, 20);
    let named = saving_line(&Report::new(&run, Groupings::default(), None)).expect("a line");
    assert!(
        named.starts_with("could save: If data.py:15 ") && named.contains("up to -20,480 MiB"),
        "{named}"
    );
    assert_eq!(advised(20, 20), Some((Kind::RetainedTensors, [0, 20])), "a step may use all of it");
    assert_eq!(advised(20, 10), None, "memory that changes");
    assert_eq!(advised(3, 3), None, "less than 2/5 of the memory");
    assert_eq!(advised(4, 4), None, "no more than the activations");
}

#[test]
fn history_that_rose_in_many_passes_is_shortened() {
    let line = "solve.py:16 LBFGS.step";
    let risen = |levels: &[i64], phase: Phase, role| {
        let mut run = fitting(&[(role, line, 16), (Role::Unknown, "Net/a", 4)]);
        run.cells[0].phase = None;
        made_in(&mut run, 1, phase);
        let point = |(at, gib): (u64, &i64)| Point {
            time_ns: at * 10,
            amounts: Amounts::from(vec![(0, gib * GIB), (1, GIB)]),
            rest_bytes: 0,
        };
        run.devices[0].details.timeline.points = (0..).zip(levels).map(point).collect();
        run
    };
    let advised = |levels: &[i64], phase: Phase| first(&risen(levels, phase, Role::Temporary));
    let rises = [0, 2, 4, 6, 8, 10, 12, 14, 16, 16, 16, 0];
    assert_eq!(advised(&rises, Phase::Backward), Some((Kind::History, [12, 16])), "or a data set");
    let mut full = risen(&rises, Phase::Backward, Role::Unknown);
    full.devices[0].total_bytes = Some(20 << 30);
    let of_line = items(&full).into_iter().filter(|item| item.untrusted_names == [line]);
    assert_eq!(of_line.map(|item| item.kind).collect::<Vec<_>>(), [Kind::History], "one change for the line");
    assert_eq!(advised(&rises, Phase::Setup), None, "data are loaded before the first pass");
    assert_eq!(advised(&[0, 16, 16, 16, 16], Phase::Backward), None, "made at once");
    assert_eq!(advised(&[0, 2, 4, 6, 8, 10, 12, 14, 16, 2, 16], Phase::Backward), None, "dropped");
}
