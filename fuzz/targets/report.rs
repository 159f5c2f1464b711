//! Every view of a run read from a recording or an exported run: sums are consistent, the output is well-formed, and its
//! text has no control characters.
#![no_main]

use gpumem_fuzz::{harmless, import};
use gpumem_report::rules::Groupings;
use gpumem_report::text::{Layout, text};
use gpumem_report::{GroupBy, Report, csv, html, json, trace, tree};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((&how, bytes)) = bytes.split_first() else { return };
    let by = [None, Some(GroupBy::Layer), Some(GroupBy::Structure), Some(GroupBy::Tag)][usize::from(how & 3)];
    for run in import(bytes, None, 1 << 20, 2000).iter().take(4) {
        let rules = Groupings::preset((how & 4 != 0).then_some("torch")).clone();
        let report = Report::new(run, rules, by);
        for device in &run.devices {
            assert!(report.statement(device, usize::from(how >> 4), 0).adds_up());
        }
        let width = (how & 8 != 0).then_some(60);
        text(&report, Layout { width, unicode: how & 64 != 0, ..Layout::default() })
            .lines()
            .for_each(harmless);
        let told = json::json(&report);
        let read: serde_json::Value = serde_json::from_str(&told).expect("JSON");
        assert!(read.is_object());
        match how >> 4 & 3 {
            0 => drop(
                serde_json::from_str::<serde_json::Value>(&trace::json(&report)).expect("a trace is JSON"),
            ),
            1 => drop(
                serde_json::from_str::<serde_json::Value>(&tree::treemap(&report))
                    .expect("a treemap is JSON"),
            ),
            2 => table(&csv::csv(&report)),
            _ => page(&html::html(&report)),
        }
        for line in tree::collapsed(&report).lines() {
            harmless(line);
            assert!(line.rsplit_once(' ').is_some_and(|(_, bytes)| bytes.parse::<i64>().is_ok()), "{line}");
        }
    }
});

/// Asserts that each row has as many fields as the first.
fn table(text: &str) {
    let fields = |line: &str| {
        let mut quoted = false;
        line.bytes()
            .filter(|byte| {
                quoted ^= *byte == b'"';
                *byte == b',' && !quoted
            })
            .count()
    };
    let mut lines = text.lines();
    let first = lines.next().map(fields);
    assert!(lines.all(|line| Some(fields(line)) == first), "{text}");
}

/// Asserts that script tags are balanced, and that the page has no control characters.
fn page(text: &str) {
    let count = |what: &str| text.matches(what).count();
    assert_eq!(count("<script"), count("</script>"));
    assert!(
        !text.chars().any(|one| one.is_control() && !matches!(one, '\n' | '\t' | '\r')),
        "control characters"
    );
}
