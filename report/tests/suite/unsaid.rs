//! Files of other tools are incomplete: missing values must be reported as unknown, not as zero.
use gpumem_import::read_file;
use gpumem_model::run::Clock;
use gpumem_report::rules::Groupings;
use gpumem_report::{Report, growth, iterations, oom, steps, text};
use std::path::Path;

#[test]
fn what_a_file_does_not_say_is_not_none() {
    let run = |kind: &str| {
        let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = read_file(&log, None).expect("a log").remove(0);
        run.process.pid = 0;
        run.source.kind = kind.into();
        run.coverage.covered = true;
        run.clock = Clock::Monotonic { wall_offset_ns: None };
        run
    };
    let (file, own) = (run("mxnet1-trace"), run("recording"));
    for (run, says) in [(&file, false), (&own, true)] {
        let report = Report::new(run, Groupings::of_run(run), None);
        let text = text::text(&report, text::Layout::default());
        assert_eq!(text.contains("oom: none"), says, "{text}");
        let form = oom::OomOptions::default();
        let told = oom::text(&report, form);
        assert_eq!(told.contains("has not run out"), says, "{told}");
        let texts = [
            told,
            growth::table(&report, false),
            iterations::text(&report, Default::default()),
            steps::text(&report),
        ];
        assert!(texts.iter().all(|text| !text.contains("pid 0")), "{texts:?}");
    }
}
