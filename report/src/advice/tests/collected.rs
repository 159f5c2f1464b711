//! Tests of the change for results that a program collects over many passes.

use super::free::{first, fitting, made_in};
use super::*;

/// Returns a run that ended well, whose modules have 4 GiB of parameters, and at the peak these GiB of outputs that no backward pass
/// has freed. Before, the outputs have had these parts of them, in sixteenths.
fn collecting(outputs: &[(&str, i64)], levels: &[i64], passes: u64) -> Run {
    let outputs = outputs.iter().map(|(tag, gib)| (Role::Unknown, *tag, *gib));
    let held: Vec<_> = [(Role::Parameter, "Net/a", 4)].into_iter().chain(outputs).collect();
    let mut run = fitting(&held);
    made_in(&mut run, 1, Phase::Forward);
    let device = &mut run.devices[0];
    let point = |level: &i64| {
        let amounts = device.peak.amounts.iter().map(|(cell, bytes)| match cell {
            0 => (*cell, *bytes),
            _ => (*cell, bytes / 16 * level),
        });
        Point { time_ns: 104, amounts: Amounts::from(amounts.collect::<Vec<_>>()), rest_bytes: 0 }
    };
    device.details.timeline.points = levels.iter().map(point).collect();
    device.details.iterations.rows[10].passes_at_once = passes;
    run
}

const RISES: [i64; 11] = [0, 0, 1, 3, 5, 7, 9, 10, 12, 14, 15];

#[test]
fn outputs_of_an_evaluation_are_collected_on_the_host() {
    let advised = |levels: &[i64], passes: u64| first(&collecting(&[("Net/out", 16)], levels, passes));
    assert_eq!(advised(&RISES, 16), Some((Kind::RetainedTensors, [14, 16])), "two passes need theirs");
    assert_eq!(advised(&RISES, 1), None, "one pass, in which memory rises, too");
    assert_eq!(advised(&[0, 0, 8, 8, 8, 8, 8, 8, 8, 8, 8], 16), None, "few tensors");
    assert_eq!(advised(&[0, 2, 4, 6, 8, 10, 4, 6, 8, 10, 12, 14], 16), None, "some are dropped");
    assert_eq!(advised(&[9, 10, 11, 11, 12, 12, 13, 13, 14, 15], 16), None, "it was there before");
    let run = collecting(&[("Net/layers.3", 16)], &RISES, 16);
    assert_eq!(items(&run)[0].untrusted_names, ["Net/layers.3"], "one of several modules");
}

#[test]
fn graphs_that_a_sum_keeps_are_not_made() {
    let graph = [("Net/a", 6), ("Net/b", 5), ("Net/c", 5)];
    let item = items(&collecting(&graph, &RISES, 16)).remove(0);
    assert_eq!(item.kind, Kind::EvaluationGradients);
    assert!(item.untrusted_names.is_empty(), "{item:?}");
}

#[test]
fn keys_and_values_of_all_layers_are_needed() {
    let layers = [("Net/h.0/kv", 6), ("Net/h.1/kv", 6), ("Net/h.2/kv", 6)];
    assert_eq!(first(&collecting(&layers, &RISES, 16)), None);
}
