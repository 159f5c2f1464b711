//! Tests of changes for memory of an earlier pass that is still held when a request fails.

use super::*;

fn first(run: &Run) -> Option<(Kind, Option<[i64; 2]>)> {
    let item = items(run).into_iter().next()?;
    Some((item.kind, item.saves_bytes.map(|bytes| bytes.map(|bytes| bytes / GIB))))
}

#[test]
fn previous_result_is_deleted_if_the_next_one_fits_then() {
    let advised = |kept: i64, asked: u64, tag: &str, phase: Phase, passes: u64| {
        let mut run = holding(&[(Role::Unknown, "Net/head", 7), (Role::Unknown, "Net/body", 3)]);
        let details = &mut run.devices[0].details;
        let kept_activations = Level { peak_bytes: kept * GIB, last_bytes: kept * GIB };
        details.iterations.open = Some(Iteration { kept_activations, ..Iteration::default() });
        let oom = &mut details.ooms[0];
        (oom.asked_bytes, oom.driver_asked_bytes) = (asked << 30, Some(asked << 30));
        (oom.tag, oom.passes_without_backward) = (Some(tag.into()), Some(passes));
        oom.phase = phase.name().map(Into::into);
        let item = of_kind(&run, Kind::PreviousResult)?;
        assert!(item.change.starts_with("If nothing reads the previous result"), "{}", item.change);
        item.saves_bytes.map(|bytes| bytes.map(|bytes| bytes / GIB))
    };
    let evaluation = Phase::Evaluation;
    assert_eq!(advised(7, 7, "Net/head", evaluation, 2), Some([0, 7]), "the next pass may read it");
    assert_eq!(advised(7, 3, "Net/head", evaluation, 3), None, "the program keeps several results");
    assert_eq!(advised(0, 7, "Net/head", evaluation, 2), None, "the output is of this pass");
    assert_eq!(advised(7, 9, "Net/head", evaluation, 2), None, "the next one would not fit");
    assert_eq!(advised(7, 7, "Net/body", evaluation, 2), None, "another module");
    assert_eq!(advised(7, 7, "Net/head", Phase::Forward, 2), None, "a backward pass may need it");
    assert_eq!(advised(7, 7, "Net/head", evaluation, 1), None, "the first pass");
}

/// Returns a run that failed twice in a step: with `then` GiB in two modules at a request in `tag`, and with `now` GiB.
fn failed_twice(then: [i64; 2], now: [i64; 2], tag: &str) -> Run {
    let mut run = holding(&[(Role::Activation, "Net/a", now[0]), (Role::Activation, "Net/b", now[1])]);
    let ooms = &mut run.devices[0].details.ooms;
    (ooms[0].time_ns, ooms[0].step, ooms[0].asked_bytes) = (9, Some(4), 512 << 20);
    let amounts = Amounts::from(vec![(0, then[0] * GIB), (1, then[1] * GIB)]);
    let asked_bytes = 1 << 30;
    let (fate, tag) = (Fate::Survived, Some(tag.into()));
    ooms.insert(0, Oom { time_ns: 5, asked_bytes, amounts, fate, tag, ..ooms[0].clone() });
    run
}

#[test]
fn a_retry_waits_for_the_end_of_the_exception() {
    let advised = |then: [i64; 2], asked_mib: u64, fate: Fate, step: u64| {
        let mut run = failed_twice(then, [8, 6], "Net/b");
        let before = &mut run.devices[0].details.ooms[0];
        (before.asked_bytes, before.fate, before.step) = (asked_mib << 20, fate, Some(step));
        first(&run).is_some_and(|(kind, bytes)| kind == Kind::FailedAttempt && bytes.is_none())
    };
    assert!(advised([7, 6], 1024, Fate::Survived, 4));
    assert!(!advised([12, 2], 1024, Fate::Survived, 4), "the first attempt is gone: less in a module");
    assert!(!advised([7, 6], 512, Fate::Survived, 4), "an attempt of the same size");
    assert!(!advised([7, 6], 1024, Fate::Open, 4), "the error is not known to be caught");
    assert!(!advised([7, 6], 1024, Fate::Survived, 3), "another step");
}

#[test]
fn a_batch_of_nearly_the_same_size_is_no_retry_beside_the_first_one() {
    let advised = |then: [i64; 2], now: [i64; 2], tag: &str| {
        let run = failed_twice(then, now, tag);
        let item = of_kind(&run, Kind::FailedAttempt).expect("a condition");
        let is_first = first(&run).is_some_and(|(kind, _)| kind == Kind::FailedAttempt);
        assert_eq!(item.change.starts_with("If the program retries"), !is_first, "{}", item.change);
        is_first
    };
    assert!(advised([9, 4], [10, 4], "Net/b"), "more in a module that the first attempt had passed");
    assert!(!advised([9, 4], [9, 4], "Net/b"), "the bytes of one attempt");
    assert!(!advised([9, 4], [9, 5], "Net/b"), "one attempt that came further");
}
