//! `/metrics`: what is there, what is not, and what a scraper says to it.
#![allow(missing_docs)]

mod common;

use common::node::{MIB, Node, batch, key};
use common::{Scratch, http, metric, start, wait_for};
use gpumem_ledger::Origin;
use gpumem_wire::{Absence, Body, Reading, Stamp};
use gpumemd::view::prometheus::scrape;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const T: u64 = 500_000_000;

/// One GPU with a covered process, an uncovered one, one whose bytes NVML does not tell, and an idle GPU.
fn node(scratch: &Scratch, max_series: usize) -> Node {
    let mut node = Node::new(scratch.join("runs.sqlite"), 2, max_series);
    node.covered(0, 0, 3);
    let uncovered = key(0, 1);
    let facts = "comm=b\"a\\d\nuser=bo\u{202e}b";
    let facts = Body::ProcessFacts { start_ticks: 7, uid: Reading::of(1001), parent_pid: 1, facts };
    let stamp = Stamp { thread: uncovered.pid, time_ns: 3, ..Stamp::default() };
    node.core.take(batch(Origin::Host, &[(stamp, facts)]));
    let listed =
        [(key(0, 0), Ok(500 * MIB)), (uncovered, Ok(300 * MIB)), (key(0, 2), Err(Absence::NotAvailable))];
    node.sample(0, T, &listed);
    node.sample(1, T, &[]);
    node.core.publish(T + 2_001_000_000);
    node
}

/// The families about GPUs; those about the daemon itself change with each run.
fn facts(text: &str) -> String {
    let own = ["gpumemd_", "process_"];
    let is_own = |line: &str| {
        let name = line.strip_prefix("# HELP ").or(line.strip_prefix("# TYPE ")).unwrap_or(line);
        own.iter().any(|own| name.starts_with(own))
    };
    text.lines().filter(|line| !is_own(line)).map(|line| format!("{line}\n")).collect()
}

#[test]
fn the_whole_text() {
    let scratch = Scratch::new();
    let node = node(&scratch, 10_000);
    let text = facts(&scrape(&node.sight));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/metrics/node.prom");
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(&path, &text).expect("written");
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, golden, "UPDATE_GOLDEN=1 writes it anew, if that is meant");
}

#[test]
fn nothing_unknown_is_zero() {
    let scratch = Scratch::new();
    let node = node(&scratch, 10_000);
    let text = scrape(&node.sight);
    let of =
        |pid: u32| text.lines().filter(|line| line.contains(&format!("pid=\"{pid}\""))).collect::<Vec<_>>();
    let unknown = of(key(0, 2).pid);
    assert!(
        unknown
            .iter()
            .any(|line| line.contains("used_unavailable") && line.contains("reason=\"not available\""))
    );
    assert!(!unknown.iter().any(|line| line.starts_with("gpumem_process_used_bytes")), "{unknown:?}");
    let uncovered = of(key(0, 1).pid);
    for absent in ["tracked", "untrackable", "category", "events"] {
        assert!(!uncovered.iter().any(|line| line.contains(absent)), "{absent}: {uncovered:?}");
    }
    assert!(!text.lines().any(|line| line.starts_with("gpumem_") && line.ends_with(" NaN")));
}

#[test]
fn the_identity_adds_up() {
    let scratch = Scratch::new();
    let node = node(&scratch, 10_000);
    let text = scrape(&node.sight);
    let pid = format!("pid=\"{}\"", key(0, 0).pid);
    let sum = |name: &str| -> i64 {
        let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(&pid));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<i64>().unwrap()).sum()
    };
    let used = sum("gpumem_process_used_bytes{");
    let tracked = sum("gpumem_process_tracked_bytes{");
    assert_eq!(used, 500 << 20);
    assert_eq!(
        used,
        sum("gpumem_process_predates_bytes{") + tracked + sum("gpumem_process_untrackable_bytes{")
    );
    assert_eq!(tracked, sum("gpumem_process_category_bytes{"));
}

#[test]
fn series_beyond_the_most_are_counted() {
    let scratch = Scratch::new();
    let node = node(&scratch, 20);
    let text = facts(&scrape(&node.sight));
    assert_eq!(text.lines().filter(|line| !line.starts_with('#')).count(), 20);
    let folded = metric(&scrape(&node.sight), "gpumemd_series_folded_total").expect("a count");
    assert!(folded > 20.0, "{folded}");
}

#[test]
fn series_vanish_with_their_process() {
    let scratch = Scratch::new();
    let mut node = node(&scratch, 10_000);
    let gone = key(0, 0);
    let stamp = Stamp { thread: gone.pid, time_ns: T + 3_000_000_000, ..Stamp::default() };
    let body = Body::ProcessGone { start_ticks: 7, status: Reading::ABSENT };
    node.core.take(batch(Origin::Host, &[(stamp, body)]));
    // No agent spoke for it: a hello that is still on its way is waited for.
    node.core.tick(T + 3_300_000_000);
    node.core.publish(T + 3_300_000_000);
    let pid = format!("pid=\"{}\"", gone.pid);
    assert!(!scrape(&node.sight).contains(&pid));
}

#[test]
fn promtool_has_nothing_to_say() {
    let found = std::env::var_os("PROMTOOL").unwrap_or_else(|| "promtool".into());
    let check =
        Command::new(found).args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let Ok(mut check) = check else {
        eprintln!("skipped: there is no promtool (set PROMTOOL to one)");
        return;
    };
    let scratch = Scratch::new();
    let text = scrape(&node(&scratch, 10_000).sight);
    check.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("written");
    let output = check.wait_with_output().expect("an end");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
}

#[test]
fn only_get_is_answered() {
    let daemon = start("");
    let ask = |method, path| http(TcpStream::connect(daemon.metrics).expect("a daemon"), method, path);
    assert_eq!(ask("GET", "/healthz"), (200, "ok\n".into()));
    assert_eq!(ask("GET", "/nothing").0, 404);
    for method in ["POST", "PUT", "DELETE", "BREW"] {
        assert_eq!(ask(method, "/metrics").0, 405);
    }
}

#[test]
fn clients_that_do_nothing_do_not_stop_a_scrape() {
    let daemon = start("[metrics]\nconnections = 8\n");
    // Half a head each, on every place and beyond.
    let mut slow: Vec<_> = (0..24).filter_map(|_| TcpStream::connect(daemon.metrics).ok()).collect();
    for stream in &mut slow {
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHos");
    }
    let started = Instant::now();
    let answered = wait_for("an answer", || {
        let mut stream = TcpStream::connect(daemon.metrics).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        text.starts_with("HTTP/1.1 200").then(|| started.elapsed())
    });
    assert!(answered < Duration::from_secs(3), "{answered:?}");
    drop(slow);
}
