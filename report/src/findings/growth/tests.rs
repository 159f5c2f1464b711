//! Tests of growth on amounts and runs that are made here.

use super::*;
use gpumem_model::timeline::Point;

fn judged(amounts: Vec<i64>) -> Option<Growth> {
    let course =
        Course { whole: amounts, ..Course::new((0..60).collect(), (0..60).map(f64::from).collect()) };
    course.judged(1e6, "forward pass", |judgement| Some(judgement.units() as u64))
}

#[test]
fn a_growth_has_the_structures_that_make_up_most_of_it() {
    let parts = |amounts: &[i64]| {
        let names = ["gradients", "parameters", "activations", "inputs"];
        main_parts(names.iter().map(ToString::to_string).zip(amounts.iter().copied()).collect(), 100)
    };
    assert_eq!(parts(&[90, 5, 5, 0]), ["gradients"]);
    assert_eq!(parts(&[27, 53, 15, 5]), ["parameters", "gradients"]);
    assert_eq!(parts(&[-50, 0, 0, 0]), [""; 0]);
}

#[test]
fn activations_of_one_long_forward_pass_are_not_growth() {
    let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
    let role = Role::Activation.name().map(str::to_owned);
    run.cells = vec![Cell { class: Class::Block, role, ..run.cells[0].clone() }];
    let device = &mut run.devices[0];
    let rising = |at: i64| Point {
        time_ns: at as u64 * 1_000_000_000,
        amounts: vec![(0, at << 30)].into(),
        ..Point::default()
    };
    device.details.timeline.points = (1..40).map(rising).collect();
    device.details.growth = Points::default();
    let found = |passes| {
        let oom = Oom { time_ns: u64::MAX, passes_without_backward: passes, ..Oom::default() };
        let report = Report::new(&run, crate::rules::Groupings::default(), None);
        growth(&report, &report.run.devices[0], Some(&oom)).map(|growth| growth.axis)
    };
    assert_eq!([found(Some(1)), found(Some(10)), found(None)], [None, Some("second"), Some("second")]);
}

#[test]
fn memory_that_falls_back_to_an_earlier_level_is_not_growth() {
    // Answers of a generation, each longer than the one before.
    let cache = |at: i64| (at % 5) * (at / 5 + 1) * 1_000_000;
    assert_eq!(judged((0..60).map(cache).collect()), None);
    // A model generates three answers; the cache of each answer is freed at its end.
    let cache = |at: i64| if at < 40 { at % 20 * 1_000_000 } else { (at - 40) * 1_000_000 };
    assert_eq!(judged((0..60).map(cache).collect()), None);
    // From point 30 on, the memory rises above every earlier level.
    let leak = |at: i64| if at < 30 { at % 10 * 1_000_000 } else { (at - 30) * 1_000_000 };
    let found = judged((0..60).map(leak).collect()).expect("it grows");
    assert_eq!(
        found.rate(),
        "+1.0 MiB per forward pass over 29 forward passes".replace("1.0 MiB", "976.6 KiB")
    );
}

#[test]
fn memory_that_has_released_most_of_its_growth_does_not_grow() {
    let ramp = |after: i64| judged((0..60).map(|at| if at < 55 { at } else { after } * 1_000_000).collect());
    assert!(ramp(55).is_some());
    assert_eq!(ramp(20), None);
}

#[test]
fn a_line_outside_of_modules_is_said_to_make_tensors() {
    let growth = judged((0..60).map(|at| at * 1_000_000).collect()).expect("it grows");
    let subject = |structures: &[&str], names: &[&str]| {
        let structures = structures.iter().map(ToString::to_string).collect();
        let names = names.iter().map(|name| ((*name).to_owned(), 1)).collect();
        Growth { structures, names, ..growth.clone() }.subject()
    };
    let line = "train.py:31 main";
    assert_eq!(subject(&[line], &[line]), format!("tensors made at {line}, outside of every module"));
    let both = subject(&[line], &[line, "train.py:32 main"]);
    assert_eq!(both, format!("tensors made at {line}, train.py:32 main, outside of every module"));
    assert_eq!(subject(&["activations"], &[line]), format!("activations of {line}"));
    assert_eq!(subject(&["activations"], &["Net/a", "Net/b"]), "activations of Net/a, Net/b");
    assert_eq!(subject(&["Others"], &[]), "memory");
    let outside = format!("{line} (outside torch)");
    assert_eq!(subject(&[&outside], &[line]), outside, "no tensors");
}

/// A program that leaks in 40 steps, catches the failure, and makes 60 more steps without growth.
#[test]
fn growth_until_a_failure_does_not_depend_on_later_steps() {
    let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
    run.cells = vec![Cell { class: Class::Block, tag: Some("history".into()), ..Cell::default() }];
    let bytes = |step: u64| step.min(40) as i64 * 64_000_000;
    let details = &mut run.devices[0].details;
    details.timeline.points.clear();
    details.growth = Points {
        axis: Axis::Step,
        stride: 1,
        points: (0..100).map(|step| (step, step * 10_000_000)).collect(),
        latest: (100, 1_000_000_000),
        named: (0..100).map(bytes).collect(),
        cells: vec![(0, (0..100).map(bytes).collect())],
        slack: (0..100).map(bytes).collect(),
        ..Points::default()
    };
    let report = Report::new(&run, crate::rules::Groupings::default(), None);
    let oom = Oom { time_ns: 400_000_000, ..Oom::default() };
    let found = growth(&report, &run.devices[0], Some(&oom)).expect("it grows");
    assert_eq!((found.axis, found.names[0].0.as_str()), ("step", "history"));
    let whole_bytes = found.whole(&run.devices[0], i64::MAX).whole_bytes;
    assert_eq!(whole_bytes, 41 * 64_000_000, "of the steps until the failure");
    let whole_bytes = found.whole(&run.devices[0], 0).whole_bytes;
    assert_eq!(whole_bytes, 41 * 64_000_000, "all that was added, if other tags have a part of it");
    let unused = |oom| idle(&report, &run.devices[0], oom).map(|growth| growth.over);
    assert_eq!(unused(Some(&oom)), Some(found.over), "unused memory, too");
}

/// A forward pass that takes ten seconds and does not fit, after steps that did not grow.
#[test]
fn activations_of_one_long_step_are_not_growth() {
    let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
    let judged = |role: Option<Role>| {
        let role = role.and_then(|role| role.name().map(str::to_owned));
        run.cells = vec![Cell { class: Class::Block, role, tag: Some("Teacher".into()), ..Cell::default() }];
        let at = |number: u64| number * 250_000_000;
        let details = &mut run.devices[0].details;
        details.growth = Points {
            axis: Axis::Step,
            stride: 1,
            points: (0..10).map(|step| (step, at(step))).collect(),
            latest: (10, at(10)),
            named: vec![0; 10],
            ..Points::default()
        };
        let grown = |number: u64| vec![(0, number.saturating_sub(10) as i64 * 100_000_000)].into();
        let point = |number| Point { time_ns: at(number), amounts: grown(number), ..Point::default() };
        details.timeline.points = (0..50).map(point).collect();
        let report = Report::new(&run, crate::rules::Groupings::default(), None);
        growth(&report, &run.devices[0], None).map(|growth| growth.axis)
    };
    let mut judged = judged;
    assert_eq!(judged(Some(Role::Activation)), None);
    assert_eq!(judged(None), Some("second"));
}
