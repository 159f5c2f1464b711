//! `gpumemctl explain` knows every heading that gpumemctl prints.

use crate::common::{FakeDaemon, Folder, shipped, stdout};
use crate::{job, live, oom, whatif};
use gpumem_model::run::State;
use gpumem_report::explain::is_known;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// What looks like a heading, and is a tag of the shipped log or the name of the test's job.
const NAMES: [&str; 2] = ["untagged", "job bert"];

/// Returns the headings of a printed text: names of columns, names of rows with amounts, and words before a colon.
fn headings(text: &str) -> Vec<String> {
    let is_amount = |cell: &&str| {
        let digits = cell.trim_start_matches(['~', '+', '-']).trim_end_matches('*');
        cell.trim() == "-"
            || !digits.is_empty() && digits.chars().all(|c| c.is_ascii_digit() || ",.".contains(c))
    };
    let mut found = Vec::new();
    // The last line of `top` names its keys.
    for line in text.lines().filter(|line| !line.starts_with("? keys") && !line.starts_with("Esc")) {
        // A narrow legend has one space before each sign.
        let line = [" █", " ▓", " ."]
            .iter()
            .fold(line.to_owned(), |line, sign| line.replace(sign, &format!(" {sign}")));
        let cells: Vec<&str> = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        if cells.get(1).is_some_and(is_amount) {
            found.push(cells[0].to_owned());
        } else if cells.len() > 2 && cells[cells.len() - 1] == "%" {
            // The first screen of a report, as in `at the peak, line 529`.
            found.extend(cells[0].split(", ").next().map(str::to_owned));
        } else if cells.len() > 2 && !line.contains(|c: char| c.is_ascii_digit()) {
            // A legend has a sign before each word.
            let is_sign = |c: char| !c.is_alphabetic() && c != '(';
            found.extend(cells.iter().map(|cell| cell.trim_start_matches(is_sign).to_owned()));
        }
        let label = line.split_once(": ").map(|(label, _)| label);
        // A row or note may begin with another heading, or continue in brackets.
        let label = label.and_then(|label| label.trim().split("  ").next()?.split(" (").next());
        found.extend(
            label.filter(|label| label.chars().all(|c| c.is_alphabetic() || c == ' ')).map(str::to_owned),
        );
    }
    // Names of a program, times and sentences are not headings.
    found.retain(|name| {
        let first = name.trim_start_matches('(').chars().next();
        !name.contains(['/', '_'])
            && first.is_some_and(char::is_alphabetic)
            && ![" is ", " has ", "line "].iter().any(|part| name.contains(part))
    });
    found
}

/// Returns whether a heading is known, or each of its words if it is several columns with one space between them.
fn is_explained(heading: &str) -> bool {
    let is_known_word = |word: &str| is_known(word.trim_matches(['(', ')']));
    let are_known = |part: &str| is_known(part) || part.split(' ').all(is_known_word);
    is_known(heading) || heading.split(", ").all(are_known)
}

fn goldens() -> Vec<String> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let files = ["reports", "diffs", "top"].into_iter().flat_map(|folder| {
        let files = fs::read_dir(golden.join(folder)).expect("goldens").flatten().map(|file| file.path());
        files.filter(|path| path.extension().is_some_and(|ending| ending == "txt"))
    });
    files.map(|path| fs::read_to_string(path).expect("a text")).collect()
}

#[test]
fn every_printed_heading_is_explained() {
    let folder = Folder::new("headings");
    let daemon = FakeDaemon::at(&folder.path("gpumem/control.sock"));
    daemon.says("GET /v1/ps", 200, live::machine());
    let ranks = [0, 1].map(|rank| job::rank(101 + rank, rank, State::Open));
    daemon.runs("?job=bert", &ranks.each_ref());
    let log = shipped().to_string_lossy().into_owned();
    stdout(&folder.run(&["import", &log]));
    let failed = oom::recording(&folder);
    let snapshot = whatif::Snapshot::new("headings", "", &whatif::TWO_DEVICES);
    let snapshot = snapshot.0.to_string_lossy().into_owned();
    let commands: [&[&str]; 21] = [
        &[],
        &["ps"],
        &["runs"],
        &["job"],
        &["job", "bert"],
        &["report", &log],
        &["report", &log, "--verbose"],
        &["report", &log, "--growth"],
        &["report", &log, "--iterations"],
        &["report", &log, "--iterations", "--columns"],
        &["report", &log, "--steps"],
        &["report", &log, "--counters"],
        &["report", &log, "--at", "300"],
        &["report", &log, "--between", "100,300"],
        &["report", &log, "--between", "100,300", "--verbose"],
        &["report", &failed],
        &["report", &failed, "--verbose"],
        &["oom", &failed],
        &["oom", &failed, "--verbose"],
        &["diff", &log, &failed],
        &["whatif", &snapshot],
    ];
    let mut unknown = BTreeSet::new();
    let printed = commands.map(|command| (format!("{command:?}"), stdout(&folder.run(command))));
    for (source, text) in printed.into_iter().chain(goldens().into_iter().map(|text| ("golden".into(), text)))
    {
        let found = headings(&text);
        assert!(!found.is_empty(), "{source}: no heading in {text}");
        let found = found.into_iter();
        let found = found.filter(|heading| !is_explained(heading) && !NAMES.contains(&heading.as_str()));
        unknown.extend(found.map(|heading| format!("{heading} ({source})")));
    }
    assert!(unknown.is_empty(), "not explained: {unknown:#?}");
}
