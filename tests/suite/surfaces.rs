//! Every view of a process shows the same list of findings: of a live leak, and of a program that has run out of memory.

use gpumem_tests::live::prometheus::{free_address, get};
use gpumem_tests::live::{Daemon, Job, Machine, until};
use serde_json::Value;
use std::net::SocketAddr;

/// Kind, severity and bytes of a finding.
type Row = (String, String, i64);

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn printed(daemon: &Daemon, machine: &Machine, arguments: &[&str]) -> String {
    let output = daemon.ctl(machine, arguments).output().expect("gpumemctl runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.stdout.is_empty(), "{arguments:?}: {error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn json(daemon: &Daemon, machine: &Machine, arguments: &[&str]) -> Value {
    serde_json::from_str(&printed(daemon, machine, arguments)).expect("JSON")
}

fn rows(findings: &Value) -> Vec<Row> {
    let text = |value: &Value| value.as_str().expect("a name").to_owned();
    let row = |finding: &Value| {
        (text(&finding["kind"]), text(&finding["severity"]), finding["bytes"].as_i64().expect("bytes"))
    };
    findings.as_array().expect("findings").iter().map(row).collect()
}

/// Returns the rows of the metrics of a process, the one with the most bytes first.
fn rows_of_metrics(http: SocketAddr, pid: &str) -> Vec<Row> {
    let metrics = get(http, "/metrics").expect("a scrape");
    let of_process = format!("pid=\"{pid}\"");
    let series = metrics.lines().filter(|line| line.starts_with("gpumem_process_finding{"));
    let row = |line: &str| {
        let label =
            |name: &str| line.split(&format!("{name}=\"")).nth(1)?.split('"').next().map(str::to_owned);
        Some((label("kind")?, label("severity")?, line.rsplit(' ').next()?.parse::<f64>().ok()? as i64))
    };
    series.filter(|line| line.contains(&of_process)).map(|line| row(line).expect(line)).collect()
}

/// Returns the sentence of a finding in JSON as text prints it.
fn sentence(finding: &Value) -> String {
    let advice = finding["advice"].as_str().map(|advice| format!(" ({advice})")).unwrap_or_default();
    words(finding["what"].as_str().expect("a sentence")) + &words(&advice)
}

/// Returns the sentences of a report's findings, which must be complete and in order of their severity and bytes.
fn checked(report: &Value) -> Vec<String> {
    let findings = report["findings"].as_array().expect("findings");
    assert!(!findings.is_empty(), "{report}");
    let rank = |finding: &Value| {
        let severity = ["critical", "warning", "note"].iter().position(|name| finding["severity"] == *name);
        (severity.expect("a severity"), -finding["bytes"].as_i64().expect("bytes"))
    };
    assert!(findings.is_sorted_by_key(rank), "{findings:?}");
    for finding in &findings[1..] {
        assert!(finding["share"].as_f64().expect("a share") >= 0.02, "{finding}");
    }
    for finding in findings {
        let has = |field: &str| finding.get(field).is_some();
        assert!(has("confidence") && has("names") && has("device") && has("advice"), "{finding}");
    }
    findings.iter().map(sentence).collect()
}

#[test]
fn live_leak_is_the_same_everywhere_until_its_process_ends() {
    let load = ["gpu0.utilization=87", "gpu0.power=412"];
    let machine =
        Machine::new(&[&["devices=1", "gpu0.memory=16G", "cuda.module_bytes=4M"][..], &load].concat());
    let http = free_address();
    let config = format!(
        "[runs]\ncheckpoint_every_s = 0.5\n[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n[metrics]\nlisten = \"{http}\"\n"
    );
    let mut daemon = Daemon::start(&machine, "daemon", &config);
    let arguments = ["--steps", "100000", "--step-ms", "20", "--no-cache", "--quiet", "--leak", "1"];
    let mut trainer = Job::start(&mut machine.trainer(&daemon.runtime, &arguments));
    let pid = trainer.pid().to_string();
    let of_ps = || daemon.asked("/v1/ps").map(|ps| ps["findings"].clone());
    until(60, "a certain leak", || of_ps()?[0]["full_in_s"].as_u64());

    // The lists are compared while nothing changes. The daemon limits the time that findings take, so those of the last moments
    // may be missing in its own views.
    trainer.signal("STOP");
    let kinds = |rows: &[Row]| -> Vec<(String, String)> {
        rows.iter().map(|(kind, severity, _)| (kind.clone(), severity.clone())).collect()
    };
    let (report, live) = until(60, "one list in JSON, in metrics, of ps and of the page", || {
        let report = json(&daemon, &machine, &["report", &pid, "--json"]);
        let (live, metrics) = (of_ps()?, rows_of_metrics(http, &pid));
        let page: Value = serde_json::from_str(&get(http, "/api/processes")?).ok()?;
        let is_same = [rows(&live), rows(&page["findings"])].iter().all(|rows| *rows == metrics)
            && kinds(&rows(&report["findings"])) == kinds(&metrics);
        is_same.then_some((report, live))
    });
    let sentences = checked(&report);
    let leak = "history: +";
    assert!(sentences[0].starts_with("the GPU is full in ") && sentences[0].contains(leak), "{sentences:?}");
    let page = daemon.ctl(&machine, &["report", &pid, "--html"]).output().expect("gpumemctl runs");
    let page = String::from_utf8_lossy(&page.stdout).into_owned();
    for (number, sentence) in (1..).zip(&sentences) {
        let numbered = format!("{number}. {sentence}");
        assert!(words(&printed(&daemon, &machine, &["report", &pid])).contains(&numbered), "{numbered}");
        assert!(words(&page).contains(&numbered), "{numbered}");
    }
    for finding in live.as_array().expect("findings") {
        let (sentence, shown) =
            (finding["text"].as_str().expect("a sentence"), printed(&daemon, &machine, &[]));
        assert!(words(&shown).contains(&words(sentence)), "{sentence}: {shown}");
    }
    let top = printed(&daemon, &machine, &["top", "--once"]);
    assert!(words(&top).contains(leak) && words(&top).contains("the GPU is full in"), "{top}");
    let overview = printed(&daemon, &machine, &[]);
    for shown in [&overview, &top] {
        assert!(words(shown).contains(" 87 % 412 W "), "{shown}");
    }
    assert!(overview.contains(&format!("next: gpumemctl report {pid} ")), "{overview}");
    let page = get(http, "/api/processes").expect("the page's data");
    let page: Value = serde_json::from_str(&page).expect("JSON");
    let anonymous = page["findings"][0]["text"].as_str().expect("a sentence");
    assert!(anonymous.starts_with("growth: ") && !anonymous.contains("history"), "{anonymous}");

    trainer.signal("KILL");
    trainer.signal("CONT");
    trainer.end();
    daemon.wait_for_the_end_of(&machine, &[&trainer]);
    assert_eq!(of_ps().expect("a reply"), serde_json::json!([]));
    assert!(!get(http, "/metrics").expect("a scrape").contains("gpumem_process_finding{"));
    daemon.stop();
}

#[test]
fn causes_of_an_error_are_the_same_in_every_form_of_the_report() {
    let machine = Machine::new(&["devices=1", "gpu0.memory=4G", "cuda.module_bytes=4M"]);
    let mut daemon = Daemon::start(&machine, "daemon", "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n");
    let trainer = machine.bare_trainer(&[]);
    let trainer = trainer.get_program().to_str().expect("a path");
    let mut command = vec!["run", "--", trainer];
    let arguments = "--steps 400 --step-ms 15 --no-cache --quiet --leak 25 --oom-fatal";
    command.extend(arguments.split(' '));
    let ran = daemon.ctl(&machine, &command).output().expect("gpumemctl runs");
    assert!(!ran.status.success());
    let last_lines = words(&String::from_utf8_lossy(&ran.stderr));
    let report = json(&daemon, &machine, &["report", "r1", "--json"]);
    assert_eq!(report["outcome"], "out_of_memory", "{}", report["findings"]);
    let sentences = checked(&report);
    println!("{sentences:#?}");
    let page = daemon.ctl(&machine, &["report", "r1", "--html"]).output().expect("gpumemctl runs");
    let page = words(&String::from_utf8_lossy(&page.stdout));
    let text = words(&printed(&daemon, &machine, &["report", "r1"]));
    let verbose = words(&printed(&daemon, &machine, &["report", "r1", "--verbose"]));
    let oom = words(&printed(&daemon, &machine, &["oom", "r1"]));
    for (number, sentence) in (1..).zip(&sentences) {
        let numbered = format!("{number}. {sentence}");
        for (form, shown) in [
            ("run", &last_lines),
            ("report", &text),
            ("--verbose", &verbose),
            ("--html", &page),
            ("oom", &oom),
        ] {
            assert!(shown.contains(&numbered), "{form} lacks `{numbered}`: {shown}");
        }
    }
    assert!(printed(&daemon, &machine, &["ps"]).contains("out of memory"));
    daemon.stop();
}
