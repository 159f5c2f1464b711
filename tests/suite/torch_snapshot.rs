//! Memory snapshots of PyTorch: a real third-party one, checked to the byte, and snapshots that the wheels write on the
//! simulated machine, compared with torch's own figures of that moment.
use gpumem_import::read_file;
use gpumem_model::run::{Class, OomKind, Run};
use gpumem_model::units::thousands;
use gpumem_report::rules::Groupings;
use gpumem_report::{GroupBy, Report};
use gpumem_tests::live::torch as wheels;
use gpumem_tests::live::{Job, Machine};
use gpumem_tests::samples::sample;
use std::path::Path;

const FORWARD: &str = "pytorch-snapshot/memory_ctx128_forward_.pickle";
fn one_run(path: &Path) -> Run {
    let mut runs = read_file(path, None).expect("a snapshot");
    assert_eq!((runs.len(), runs[0].source.kind.as_str()), (1, "torch-snapshot"));
    runs.remove(0)
}

fn caveat<'r>(run: &'r Run, code: &str) -> Option<&'r str> {
    run.caveats.iter().find(|caveat| caveat.code == code).map(|caveat| caveat.text.as_str())
}

/// Checks invariants of every run from a snapshot, and all its sums.
fn is_whole(run: &Run) {
    for code in ["contradictions", "rejected_rows", "unknown_actions", "unknown_states", "trailing_bytes"] {
        assert_eq!(caveat(run, code), None);
    }
    assert_eq!((run.coverage.rejected, run.coverage.odd, run.coverage.lost), (0, 0, 0));
    for device in &run.devices {
        for by in [GroupBy::Layer, GroupBy::Structure, GroupBy::Tag] {
            let report = Report::new(run, Groupings::of_run(run), Some(by));
            assert!(report.statement(device, 8, 0).adds_up(), "{by:?}");
            for moment in [&device.last, &device.peak] {
                let total = report.composition(moment, by).total();
                assert_eq!(moment.tracked_bytes.unwrap_or(0), total, "{by:?}");
            }
        }
        let pool = &device.details.pools[0];
        assert_eq!(pool.disagreement(), None, "its own total of live blocks is ours");
        assert_eq!(device.beside.unbooked_block_bytes, 0);
        assert_eq!(device.last.used_bytes(), None, "NVML is not in the file");
    }
}

/// The figures of a snapshot: segments, blocks in use and idle, bytes reserved, allocated and requested, entries, most requested.
fn figures(run: &Run, figures: &[u64; 8]) {
    let [segments, blocks, idle, reserved, allocated, requested, entries, most] = figures.map(thousands);
    let reported = caveat(run, "snapshot_figures").expect("said");
    let expected = format!(
        "reserved {reserved} bytes in {segments} segments; allocated {allocated} in {blocks} blocks; requested {requested}; \
         {idle} blocks idle; history of {entries} entries, with at most {most} bytes requested"
    );
    assert!(reported.starts_with(&expected), "{reported}\n{expected}");
}

#[test]
fn published_snapshot_has_its_known_figures() {
    let Some(path) = sample(FORWARD) else { return };
    let run = one_run(&path);
    is_whole(&run);
    let known = [516, 1227, 49, 19_667_091_456, 19_498_420_224, 19_352_504_320, 4657, 19_352_504_320];
    figures(&run, &known);
    let device = &run.devices[0];
    assert_eq!(device.last.tracked_bytes, Some(19_667_091_456));
    assert_eq!(device.peak.tracked_bytes, Some(19_667_091_456));
    let pool = &device.details.pools[0];
    assert_eq!((pool.segment_bytes, pool.block_bytes), (19_667_091_456, 19_498_420_224));
    // Its weights were there before stacks were recorded; everything later has a name.
    let unnamed: i64 = amounts(&run, |cell| cell.class == Class::Block && cell.tag.is_none());
    assert_eq!(unnamed, 13_763_491_840);
    let attention = amounts(&run, |cell| {
        cell.tag.as_deref().is_some_and(|tag| tag.ends_with("transformer.py:78(forward)"))
    });
    assert_eq!(attention, 1_342_177_280);
    let series = &device.series.buckets;
    assert!(series.len() > 1, "a history is more than its end");
    let report = Report::new(&run, Groupings::of_run(&run), None);
    let text = gpumem_report::text::text(&report, gpumem_report::text::Layout::default());
    assert!(text.contains("memory_allocated 18,595 + idle 161 = memory_reserved 18,756"), "{text}");
}

/// Returns the final bytes of the selected cells.
fn amounts(run: &Run, is_meant: impl Fn(&gpumem_model::run::Cell) -> bool) -> i64 {
    let amounts = run.devices.iter().flat_map(|device| &device.last.amounts);
    amounts.filter(|(cell, _)| is_meant(&run.cells[*cell as usize])).map(|(_, bytes)| bytes).sum()
}

/// Returns the run of a wheel's snapshot, and the program's own figures.
fn written(version: &str, words: &[&str], settings: &str) -> Option<(Run, Vec<serde_json::Value>)> {
    let wheel = wheels::wheel(version)?;
    let machine: Machine = wheels::machine(&[]);
    let path = machine.dir.join("snapshot.pickle");
    let arguments = [&[path.to_str().expect("UTF-8")], words].concat();
    let mut command = wheel.bare(&machine, "snapshot.py", &arguments);
    if !settings.is_empty() {
        command.env("PYTORCH_CUDA_ALLOC_CONF", settings).env("PYTORCH_ALLOC_CONF", settings);
    }
    let printed = wheels::finished(&mut Job::start(&mut command));
    let devices = printed.iter().find_map(|line| line["devices"].as_array()).expect("its own word");
    Some((one_run(&path), devices.clone()))
}

/// Checks a run with complete history.
fn names_are_right(version: &str, run: &Run) {
    let by_role = |role: &str| amounts(run, |cell| cell.role.as_deref() == Some(role));
    let blocks = amounts(run, |cell| cell.class == Class::Block);
    let unnamed = amounts(run, |cell| cell.class == Class::Block && cell.tag.is_none());
    assert_eq!(unnamed, 0, "torch {version}: of {blocks}");
    // The optimizer keeps two numbers for each parameter, and its steps.
    let (parameters, gradients, state) =
        (by_role("parameter"), by_role("gradient"), by_role("optimizer state"));
    println!("torch {version}: parameters {parameters}, gradients {gradients}, optimizer state {state}");
    assert!(parameters > 1 << 20, "{parameters}");
    assert!((gradients - parameters).abs() * 5 < parameters, "{gradients} beside {parameters}");
    assert!((state - 2 * parameters).abs() * 5 < 2 * parameters, "{state} beside {parameters}");
    let tags: Vec<&str> = run.cells.iter().filter_map(|cell| cell.tag.as_deref()).collect();
    for part in ["models.py:", "(forward)", "snapshot.py:", "(train)", "(gpt)"] {
        assert!(tags.iter().any(|tag| tag.contains(part)), "{part}: {tags:?}");
    }
}

/// Lane `torch`.
mod torch {
    use super::*;

    #[test]
    fn snapshots_match_the_wheels_figures() {
        let programs: [(&[&str], &str); 5] = [
            (&["devices", "pinned", "oom"], ""),
            (&["oom"], "expandable_segments:True"),
            (&["python", "short", "streams"], ""),
            (&["python", "mid"], "roundup_power2_divisions:4"),
            (&["none"], ""),
        ];
        for (nth, version) in wheels::versions().iter().enumerate() {
            // Each takes torch some seconds, mostly for names of C++ frames.
            let count = if nth == 0 { 2 } else { programs.len() };
            for (words, settings) in programs.into_iter().take(count) {
                let Some((run, printed)) = written(version, words, settings) else { return };
                println!("torch {version} {words:?} {settings}");
                is_whole(&run);
                for device in &run.devices {
                    let printed = &printed[usize::from(device.ordinal)];
                    let own = |name: &str| printed[name].as_i64().expect("a number");
                    let pool = &device.details.pools[0];
                    assert_eq!(device.last.tracked_bytes, Some(own("reserved")));
                    assert_eq!(pool.segment_bytes as i64, own("reserved"), "memory_reserved");
                    assert_eq!(pool.allocated_bytes() as i64, own("allocated"), "memory_allocated");
                    assert_eq!(pool.block_bytes as i64, own("active"));
                    // Of a history that has all of the run.
                    if words.iter().all(|word| ["devices", "pinned", "oom"].contains(word)) {
                        assert_eq!(device.peak.tracked_bytes, Some(own("peak")), "max_memory_reserved");
                    }
                }
                let reported = caveat(&run, "snapshot_figures").expect("said");
                let requested: i64 = printed.iter().filter_map(|device| device["requested"].as_i64()).sum();
                assert!(
                    reported.contains(&format!("requested {};", thousands(requested as u64))),
                    "{reported}"
                );
                if words == ["oom"] {
                    let most = printed[0]["allocated_peak"].as_u64().expect("a number");
                    assert!(
                        reported.ends_with(&format!("and {} allocated", thousands(most))),
                        "max_memory_allocated: {reported}"
                    );
                }
                if words.contains(&"oom") {
                    let oom = &run.devices[0].details.ooms[0];
                    assert_eq!((oom.kind, oom.asked_bytes, oom.count), (OomKind::Device, 64 << 30, 1));
                    assert!(
                        oom.stack.as_deref().is_some_and(|stack| stack.starts_with("give_up\t")),
                        "{oom:?}"
                    );
                    names_are_right(version, &run);
                }
            }
        }
    }
}
