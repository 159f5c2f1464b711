//! Redaction: amounts by category stay, names go, and cells that become equal are one.
use gpumem_import::read_file;
use gpumem_model::cell::SUM;
use gpumem_model::run::Run;
use gpumem_report::redacted::RedactedRun;
use gpumem_report::rules::Groupings;
use gpumem_report::{GroupBy, Report};
use std::collections::HashSet;
use std::path::Path;

#[test]
fn categories_keep_their_bytes_and_equal_cells_are_merged() {
    let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    let run = read_file(&log, None).expect("a log").remove(0);
    let open = Report::new(&run, Groupings::of_run(&run), None);
    let redacted = RedactedRun::of(&run, Groupings::of_run(&run));
    let report = redacted.report();
    // The tag of a group of small cells is not a name.
    let tags = |run: &Run| -> HashSet<String> {
        run.cells.iter().filter_map(|cell| cell.tag.clone()).filter(|tag| tag != SUM).collect()
    };
    assert!(tags(&run).is_disjoint(&tags(report.run)));
    assert!(report.run.cells.len() < run.cells.len());
    let names = |index: u32| [GroupBy::Layer, GroupBy::Structure].map(|by| report.category(index, by));
    let cells: HashSet<_> =
        (0_u32..).zip(&report.run.cells).map(|(index, cell)| (cell, names(index))).collect();
    assert_eq!(cells.len(), report.run.cells.len(), "equal cells are one");
    let ruled: HashSet<&str> = open.groupings.structure.rules.iter().map(|rule| rule.name.as_str()).collect();
    for (device, shown) in run.devices.iter().zip(&report.run.devices) {
        let (before, after) = (
            open.composition(&device.peak, GroupBy::Structure),
            report.composition(&shown.peak, GroupBy::Structure),
        );
        assert_eq!(before.total(), after.total());
        let expected = before.categories.into_iter().filter(|(name, _)| ruled.contains(name.as_str()));
        assert_eq!(after.categories, expected.collect());
    }
}
